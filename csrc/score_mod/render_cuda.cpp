#include "score_mod/render_cuda.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <iterator>
#include <map>

#include "score_mod/derivative.h"
#include "score_mod/index_analysis.h"
#include "score_mod/loops.h"
#include "score_mod/pair_reads.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::score_mod {
namespace {

std::string storage_name(DType dtype) {
  constexpr std::string_view kNames[] = {"double", "float", "BFloat16",    "Float16",       "long long",
                                         "int",    "short", "signed char", "unsigned char", "Bool"};
  return std::string(kNames[static_cast<int>(dtype)]);
}

std::string number(int64_t i) { return std::to_string(i); }
std::string flag(bool value) { return value ? "true" : "false"; }

std::string unread_name(Unread unread) {
  return unread == Unread::kBranch ? "kBranch" : unread == Unread::kPredicate ? "kPredicate" : "kElsewhere";
}

constexpr int64_t kSmallScalar = int64_t{1} << 30;

// Negative literals stand in parentheses: "-$0" must not become a decrement.
std::string float_literal(double value) {
  if (std::isnan(value)) return "__int_as_float(0x7fffffff)";
  const auto narrow = static_cast<float>(value);
  if (std::isinf(narrow)) return narrow > 0 ? "__int_as_float(0x7f800000)" : "__int_as_float(0xff800000)";
  char digits[40];
  std::string text(digits, std::to_chars(digits, digits + sizeof digits, narrow).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  text += "f";
  return std::signbit(narrow) ? "(" + text + ")" : text;
}
std::string integer_literal(int64_t value, bool wide) {
  const std::string suffix = wide ? "ll" : "";
  // There is no literal of the most negative number.
  if (value == INT64_MIN || (!wide && value == INT32_MIN)) return "(" + number(value + 1) + suffix + " - 1)";
  return value < 0 ? "(" + number(value) + suffix + ")" : number(value) + suffix;
}

class Renderer {
 public:
  Renderer(const Graph& graph, const RenderOptions& options) : graph_(graph), options_(options), loops_(graph) {
    if (options.dtypes.size() != graph.buffers().size()) throw GraphError("expected the dtype of every buffer");
    std::vector<Interval> buffers, scalars;
    for (size_t i = 0; i < options.dtypes.size(); ++i) {
      if (type_of(options.dtypes[i]) != graph.buffers()[i].type) {
        throw GraphError("buffer @" + number(static_cast<int64_t>(i)) + " is not of the declared type");
      }
      buffers.push_back(interval_of(options.dtypes[i]));
    }
    for (size_t i = 0; i < graph.scalars().size(); ++i) {
      scalars.push_back(options.small_scalars ? Interval{-kSmallScalar, kSmallScalar} : Interval{});
    }
    intervals_ = intervals(graph, options.lengths, buffers, scalars);
    wide_ = needs_int64(graph, intervals_);
    for (const NodeId id : reachable(graph)) name(id);
    number_lines();
  }

  std::string render() {
    text_ = "struct " + options_.name + " {\n";
    captured();
    text_ += "  static constexpr bool kGiven = " + flag(options_.given) + ", kFastMath = " + flag(options_.fast_math) +
             ";\n";
    text_ += "  static constexpr auto kUnread = fusegrad::device::score_mod::Unread::" + unread_name(options_.unread) +
             ";\n";
    const std::string indices = "int b, int h, int q_idx, int kv_idx, bool valid";
    if (graph_.kind() == Kind::kScoreMod) {
      begin_apply("float", "float score, " + indices);
      end_with_result({graph_.result()}, "  return " + names_[graph_.result()] + ";\n");
      lines(indices);
      reads_of_pairs(indices);
      batches_of_pairs();
      columns_of_pairs();
      touch();
    } else if (graph_.kind() == Kind::kMaskMod) {
      begin_apply("bool", indices);
      end_with_result({graph_.result()}, "  return " + names_[graph_.result()] + ";\n");
      lines(indices);
    } else if (graph_.kind() == Kind::kTangent) {
      begin_apply("float", "float score, float grad, " + indices);
      end_with_result({graph_.result()}, "  return " + names_[graph_.result()] + ";\n");
      lines(indices);
    } else {
      derivative(indices);
    }
    return text_ + "};\n";
  }

 private:
  std::string type_of_node(NodeId id) const {
    if (graph_.type(id) == Type::kFloat) return "float";
    if (graph_.type(id) == Type::kBool) return "bool";
    return wide_[id] ? "long long" : "int";
  }

  // A leaf's expression, or a generated identifier.
  void name(NodeId id) {
    names_.resize(graph_.nodes().size());
    const Node& node = graph_[id];
    if (node.op == Op::kConstant) {
      const Value value = graph_.value(id);
      names_[id] = value.type == Type::kFloat  ? float_literal(value.f)
                   : value.type == Type::kBool ? (value.i != 0 ? "true" : "false")
                                               : integer_literal(value.i, wide_[id]);
    } else if (node.op == Op::kInput) {
      names_[id] = input_name(static_cast<Input>(node.payload));
    } else if (node.op == Op::kScalar) {
      const std::string scalar = "c.scalar" + number(node.payload);
      names_[id] = node.type == Type::kBool ? "(" + scalar + " != 0)" : type_of_node(id) + "(" + scalar + ")";
      if (node.type == Type::kInt && wide_[id]) names_[id] = scalar;
    } else {
      names_[id] = (node.op == Op::kAxis ? "a" : "v") + number(id);
    }
  }

  void captured() {
    text_ += "  struct Captured {\n";
    for (size_t i = 0; i < graph_.buffers().size(); ++i) {
      const std::string buffer = number(static_cast<int64_t>(i));
      const std::string storage = storage_name(options_.dtypes[i]);
      const bool ours = storage[0] >= 'A' && storage[0] <= 'Z';
      text_ += "    const " + (ours ? "fusegrad::device::score_mod::" + storage : storage) + "* data" + buffer + ";\n";
      for (int k = 0; k < graph_.buffers()[i].rank; ++k) {
        text_ += "    long long size" + buffer + "_" + number(k) + ", stride" + buffer + "_" + number(k) + ";\n";
      }
    }
    for (size_t i = 0; i < graph_.scalars().size(); ++i) {
      text_ += graph_.scalars()[i] == Type::kFloat ? "    double" : "    long long";
      text_ += " scalar" + number(static_cast<int64_t>(i)) + ";\n";
    }
    if (graph_.buffers().empty() && graph_.scalars().empty()) text_ += "    long long nothing;\n";
    text_ += "  };\n";
  }

  void begin(const std::string& name, const std::string& parameters) {
    text_ += "  static __device__ __forceinline__ " + name + "([[maybe_unused]] const Captured& c, " + parameters +
             ") {\n    using namespace fusegrad::device::score_mod;\n";
  }

  void begin_apply(const std::string& type, const std::string& parameters) {
    with_reads("  template <", type + " apply", parameters);
  }
  void with_reads(const std::string& parameters_of_template, const std::string& name, const std::string& parameters) {
    text_ += parameters_of_template + "class Reads = fusegrad::device::score_mod::ReadThere<kUnread>>\n";
    begin(name, parameters + ", [[maybe_unused]] const Reads& reads = Reads()");
  }

  // The statements that `roots` need, and the end of the function.
  void end_with_result(const std::vector<NodeId>& roots, const std::string& last) {
    statements(roots);
    text_ += "  " + last + "  }\n";
  }
  void statements(const std::vector<NodeId>& roots) {
    const std::vector<BlockRoot> needed(roots.begin(), roots.end());
    Loops::Done done = loops_.nothing();
    statements(loops_.block(needed, done));
  }
  void statements(const Block& block) {
    for (const Block::Item& item : block.items) {
      if (item.node >= 0) {
        statement(item.node);
        continue;
      }
      for (const NodeId id : item.reductions) {
        text_ += "    " + type_of_node(id) + " " + names_[id] + " = " + identity(id) + ";\n";
      }
      const Block& body = item.body.front();
      const bool innermost =
          std::all_of(body.items.begin(), body.items.end(), [](const auto& i) { return i.node >= 0; });
      begin_loop(item.axis, innermost ? kUnrolled : 1);
      statements(body);
      for (const NodeId id : item.reductions) {
        const Op op = combining(graph_[id].op);
        text_ += "    " + names_[id] + " = " + expression(op, {id, graph_[id].operands[1]}, wide_[id]) + ";\n";
      }
      text_ += "    }\n";
    }
  }
  // How often a loop's body is unrolled, which the source has once.
  static constexpr int kUnrolled = 2;
  void begin_loop(int axis, int unrolled) {
    const std::string name = names_[axis_node(axis)];
    text_ += "#pragma unroll " + number(unrolled) + "\n    for (int " + name + " = 0; " + name + " < " +
             number(graph_.axes()[static_cast<size_t>(axis)]) + "; ++" + name + ") {\n";
  }
  NodeId axis_node(int axis) const {
    for (NodeId id = 0; id < static_cast<NodeId>(graph_.nodes().size()); ++id) {
      if (graph_[id].op == Op::kAxis && graph_[id].payload == axis) return id;
    }
    throw GraphError("an axis has no node");
  }
  std::string identity(NodeId reduction) const {
    const Value value = identity_of(graph_[reduction].op, graph_.type(reduction));
    if (value.type == Type::kFloat) return float_literal(value.f);
    const int64_t narrow = std::clamp<int64_t>(value.i, INT32_MIN, INT32_MAX);
    return integer_literal(wide_[reduction] ? value.i : narrow, wide_[reduction]);
  }

  void statement(NodeId id) {
    const Node& node = graph_[id];
    if (node.op == Op::kLoad) return load(id);
    if (!is_primitive(node.op)) return;
    // The spelling goes by the operands' type; integers are computed in one width.
    bool wide = node.type == Type::kInt && wide_[id];
    for (const NodeId operand : node.operands) wide = wide || (graph_.type(operand) == Type::kInt && wide_[operand]);
    const NodeId last = node.operands.back();
    if (node.op == Op::kToFloat && graph_.type(last) == Type::kInt && is_small(last)) {
      text_ += "    const float " + names_[id] + " = small_to_float(" + names_[last] + ");\n";
      return;
    }
    text_ +=
        "    const " + type_of_node(id) + " " + names_[id] + " = " + expression(node.op, node.operands, wide) + ";\n";
  }
  std::string expression(Op op, const std::vector<NodeId>& operands, bool wide) const {
    const Primitive& p = primitive(op);
    const std::string_view spelling = graph_.type(operands.back()) == Type::kFloat ? p.cuda_float : p.cuda_integer;
    std::string text;
    for (size_t i = 0; i < spelling.size(); ++i) {
      if (spelling[i] != '$') {
        text += spelling[i];
        continue;
      }
      const NodeId operand = operands[static_cast<size_t>(spelling[++i] - '0')];
      const bool widen = wide && graph_.type(operand) == Type::kInt && !wide_[operand];
      text += widen ? "static_cast<long long>(" + names_[operand] + ")" : names_[operand];
    }
    return text;
  }

  // Whether small_to_float takes it.
  bool is_small(NodeId id) const {
    constexpr int64_t kBound = int64_t{1} << 22;
    return !wide_[id] && intervals_[id].low >= -kBound && intervals_[id].high < kBound;
  }

  // " && inside(...)" for each dimension, with the indices wrapped where they may be negative; for those `without`, a
  // bit each, nothing. `conjunction`: " & " leaves compilers no branch to make.
  std::string checks(int buffer, const std::vector<NodeId>& indices, std::vector<std::string>& wrapped,
                     uint32_t without = 0, std::string_view conjunction = " && ") const {
    std::string text;
    for (size_t k = 0; k < indices.size(); ++k) {
      if (k < 32 && (without >> k & 1) != 0) {
        wrapped.emplace_back();
        continue;
      }
      const bool narrow = options_.small_buffers && !wide_[indices[k]];
      const std::string size =
          (narrow ? "int(c.size" : "(c.size") + number(buffer) + "_" + number(static_cast<int64_t>(k)) + ")";
      const std::string& index = names_[indices[k]];
      const bool nonnegative = intervals_[indices[k]].nonnegative();
      wrapped.push_back(nonnegative ? index : "wrapped(" + index + ", " + size + ")");
      text += std::string(conjunction) + "inside(" + wrapped.back() + ", " + size + ")";
    }
    return text;
  }

  // Where an element is, and whether it is there.
  std::string element(NodeId id) const {
    const Node& node = graph_[id];
    const auto buffer = static_cast<int>(node.payload);
    std::vector<std::string> index;
    const std::string in_range = checks(buffer, node.operands, index);
    std::string offset;
    // Unsigned, since an index that has not passed the check may make it overflow; nothing is read there then.
    const std::string bits = options_.small_buffers ? "unsigned(" : "(unsigned long long)(";
    for (size_t k = 0; k < index.size(); ++k) {
      offset += std::string(k == 0 ? "" : " + ") + bits + index[k] + ") * " + bits + "c.stride" + number(buffer) + "_" +
                number(static_cast<int64_t>(k)) + ")";
    }
    if (!offset.empty()) offset = std::string(" + ") + (options_.small_buffers ? "int(" : "int64(") + offset + ")";
    return "c.data" + number(buffer) + offset + ", valid" + in_range;
  }
  std::string column_size(NodeId id, uint32_t dimensions) const {
    std::string size;
    for (size_t d = 0; d < graph_[id].operands.size(); ++d) {
      if ((dimensions >> d & 1) == 0) continue;
      size += (size.empty() ? "int(c.size" : " * int(c.size") + number(graph_[id].payload) + "_" +
              number(static_cast<int64_t>(d)) + ")";
    }
    return size;
  }
  // An element's place in its column.
  std::string place_in_column(NodeId id, uint32_t dimensions) const {
    const Node& node = graph_[id];
    const auto buffer = static_cast<int>(node.payload);
    if (std::has_single_bit(dimensions))
      return "narrowed(" + names_[node.operands[static_cast<size_t>(std::countr_zero(dimensions))]] + ")";
    std::vector<std::string> index;
    const std::string in_range = checks(buffer, node.operands, index, ~dimensions);
    return "(true" + in_range + " ? " + place_among(buffer, index, dimensions) + " : kNowhere)";
  }
  // The place that indices give among the elements of some of a buffer's dimensions.
  static std::string place_among(int buffer, const std::vector<std::string>& index, uint32_t dimensions) {
    std::string place;
    for (size_t d = 0; d < index.size(); ++d) {
      if ((dimensions >> d & 1) == 0) continue;
      const std::string size = "int(c.size" + number(buffer) + "_" + number(static_cast<int64_t>(d)) + ")";
      place = place.empty() ? "int(" + index[d] + ")" : "(" + place + " * " + size + " + int(" + index[d] + "))";
    }
    return place;
  }
  void load(NodeId id) {
    if (const int k = there_ ? -1 : pair_of_[id]; k >= 0) {
      if (const uint32_t dimensions = column_dimensions(graph_, id, options_.dtypes)) {
        text_ += "    const float " + names_[id] + " = read_column<" + number(k) + ">(reads, " + element(id) + ", " +
                 place_in_column(id, dimensions) + ", " + column_size(id, dimensions) + ");\n";
        return;
      }
    }
    const std::string read = there_              ? "read_if<kUnread>"
                             : line_of_[id] >= 0 ? "reads.template read<" + number(line_of_[id]) + ">"
                             : pair_of_[id] >= 0 ? "reads.template pair<" + number(pair_of_[id]) + ">"
                                                 : "read_if<kUnread>";
    text_ += "    const " + type_of_node(id) + " " + names_[id] + " = " + read + "(" + element(id) + ");\n";
  }

  // The nodes that the result needs where lines have some loads: not what the places of these are computed from.
  template <class IsLine>
  static std::vector<bool> needed_beside(const Graph& graph, const IsLine& is_line) {
    std::vector<bool> needed(graph.nodes().size(), false);
    needed[graph.result()] = true;
    for (NodeId id = graph.result(); id >= 0; --id) {
      if (!needed[id] || is_line(id)) continue;
      for (const NodeId operand : graph[id].operands) needed[operand] = true;
    }
    return needed;
  }
  // The loads that are lines, of a score_mod those of numbers that scores are made of and of masks by key. In a
  // chain such as `t[bucket[k - q], h]` the last read is the line; those before it need none.
  static std::vector<NodeId> line_loads(const Graph& graph) {
    const auto kinds = reads(graph);
    std::vector<bool> axes(graph.nodes().size(), false);
    std::vector<bool> lines(graph.nodes().size(), false);
    for (const NodeId id : reachable(graph)) {
      const Node& node = graph[id];
      axes[id] = node.op == Op::kAxis;
      for (const NodeId operand : node.operands) axes[id] = axes[id] || axes[operand];
      const bool line = kinds[id] == Reads::kKey || kinds[id] == Reads::kDiagonal;
      const bool takes = graph.kind() == Kind::kMaskMod ? line || kinds[id] == Reads::kRow
                         : node.type == Type::kBool     ? kinds[id] == Reads::kKey
                                                        : line && node.type == Type::kFloat;
      lines[id] = node.op == Op::kLoad && takes && !axes[id];
    }
    const std::vector<bool> needed = needed_beside(graph, [&](NodeId id) { return lines[id]; });
    std::vector<NodeId> result;
    for (const NodeId id : reachable(graph)) {
      if (lines[id] && needed[id]) result.push_back(id);
    }
    return result;
  }
  // A derivative's are found in one graph with its score_mod's.
  void number_lines() {
    line_of_.assign(graph_.nodes().size(), -1);
    pair_of_.assign(graph_.nodes().size(), -1);
    if (graph_.kind() != Kind::kDerivative) {
      line_loads_ = line_loads(graph_);
      if (graph_.kind() != Kind::kTangent) pair_loads_ = pair_reads(graph_);
      for (size_t i = 0; i < line_loads_.size(); ++i) line_of_[line_loads_[i]] = static_cast<int>(i);
      for (size_t i = 0; i < pair_loads_.size(); ++i) pair_of_[pair_loads_[i]] = static_cast<int>(i);
    } else if (options_.score_mod != nullptr) {
      const Graph score_mod = canonical(*options_.score_mod);
      Graph both = with_declarations_of(graph_, Kind::kDerivative);
      // Lines have no axes; those of the two graphs are not the same.
      const auto copied = [&](const Graph& from) {
        std::vector<NodeId> ids(from.nodes().size(), -1);
        for (const NodeId id : reachable(from)) {
          std::vector<NodeId> operands;
          bool takes = from[id].op != Op::kAxis;
          for (const NodeId operand : from[id].operands) {
            operands.push_back(ids[operand]);
            takes = takes && ids[operand] >= 0;
          }
          if (takes) ids[id] = both.copy(from, id, std::move(operands));
        }
        return ids;
      };
      const std::vector<NodeId> theirs = copied(score_mod), ours = copied(graph_);
      const auto number = [&](const std::vector<NodeId>& loads, std::vector<int>& numbers) {
        for (const NodeId id : reachable(graph_)) {
          for (size_t i = 0; i < loads.size(); ++i) {
            if (ours[id] >= 0 && ours[id] == theirs[loads[i]]) numbers[id] = static_cast<int>(i);
          }
        }
      };
      number(line_loads(score_mod), line_of_);
      number(pair_reads(score_mod), pair_of_);
    }
  }
  void lines(const std::string& indices) {
    std::vector<std::string> facts;
    const auto all = reads(graph_);
    for (const NodeId id : line_loads_) {
      const char* by = all[id] == Reads::kDiagonal ? "kDiagonal" : all[id] == Reads::kKey ? "kKey" : "kQuery";
      const bool two = options_.dtypes[static_cast<size_t>(graph_[id].payload)] == DType::kInt64;
      facts.push_back(std::string("fusegrad::device::score_mod::LineBy::") + by + (two ? ", 2" : ", 1"));
    }
    list("LineRead", "kLine", "kLineCount", facts);
    elements_of("auto line", line_loads_, indices);
  }
  // An array of structs of the device header, and how many it has.
  void list(const std::string& type, const std::string& name, const std::string& count,
            const std::vector<std::string>& facts) {
    text_ += "  static constexpr int " + count + " = " + number(static_cast<int64_t>(facts.size())) + ";\n";
    text_ += "  static constexpr fusegrad::device::score_mod::" + type + " " + name + "[] = {";
    for (const std::string& each : facts) text_ += "{" + each + "}, ";
    text_ += "{}};\n";  // C++ has no empty arrays
  }
  // One of several loads by itself.
  void elements_of(const std::string& name, const std::vector<NodeId>& loads, const std::string& indices) {
    text_ += "  template <int k>\n";
    begin(name, indices);
    there_ = true;
    for (size_t i = 0; i < loads.size(); ++i) {
      text_ += "    if constexpr (k == " + number(static_cast<int64_t>(i)) + ") {\n";
      statements(graph_[loads[i]].operands);
      text_ += "    return read_if<kUnread>(" + element(loads[i]) + ");\n    }\n";
    }
    there_ = false;
    text_ += "  }\n";
  }
  // PairRead::dimensions.
  int first_dimensions(NodeId id) const {
    const auto found = box_dimensions(graph_, id, options_.dtypes);
    return found ? (found->batch >= 0 ? 1 : 0) + (found->h >= 0 ? 2 : 0) : -1;
  }
  void reads_of_pairs(const std::string& indices) {
    const auto dependence = dependences(graph_);
    std::vector<std::string> facts;
    for (const NodeId id : pair_loads_) {
      const DType dtype = options_.dtypes[static_cast<size_t>(graph_[id].payload)];
      facts.push_back(flag((dependence[id].on() & set_of(kVarB)) != 0) + ", " + flag(reads_by_groups(graph_, id)) +
                      ", " + number(box_bytes(graph_, id, options_.dtypes)) + ", " + number(first_dimensions(id)) +
                      ", " + flag(dtype == DType::kBFloat16) + ", " + flag(graph_[id].type == Type::kInt));
    }
    list("PairRead", "kPair", "kPairCount", facts);
    elements_of("auto pair_read", pair_loads_, indices);
    text_ += "  template <int k>\n";
    begin("auto pair_row", "int b, int h, int q_idx, bool valid");
    there_ = true;
    for (size_t i = 0; i < pair_loads_.size(); ++i) {
      if (box_bytes(graph_, pair_loads_[i], options_.dtypes) == 0 && !reads_places(graph_, pair_loads_[i])) continue;
      text_ += "    if constexpr (k == " + number(static_cast<int64_t>(i)) + ") {\n";
      row_of(pair_loads_[i]);
      text_ += "    }\n";
    }
    there_ = false;
    text_ += "  }\n";
  }
  // The place of a tensor map's boxes in its dimension of batches.
  void batches_of_pairs() {
    text_ += "  template <int k>\n";
    begin("int pair_batch", "[[maybe_unused]] int b");
    there_ = true;
    for (size_t k = 0; k < pair_loads_.size(); ++k) {
      const Node& node = graph_[pair_loads_[k]];
      const auto dimensions = box_dimensions(graph_, pair_loads_[k], options_.dtypes);
      if (!dimensions || dimensions->batch < 0) continue;
      const auto batch = static_cast<size_t>(dimensions->batch);
      text_ += "    if constexpr (k == " + number(static_cast<int64_t>(k)) + ") {\n";
      statements({node.operands[batch]});
      std::vector<std::string> index;
      const std::string in_range =
          checks(static_cast<int>(node.payload), node.operands, index, ~(uint32_t{1} << batch));
      text_ += "    return true" + in_range + " ? static_cast<int>(" + index[batch] + ") : -1;\n    }\n";
    }
    there_ = false;
    text_ += "    return 0;\n  }\n";
  }
  // Takes an index of a place `i` in a column; called for the last dimension first.
  std::string index_of_column(int buffer, size_t d, uint32_t dimensions) {
    if (static_cast<size_t>(std::countr_zero(dimensions)) == d) return "i";
    const std::string at = number(static_cast<int64_t>(d)), size = "int(c.size" + number(buffer) + "_" + at + ")";
    text_ += "    const int i" + at + " = i % " + size + ";\n    i /= " + size + ";\n";
    return "i" + at;
  }
  // An element of the column that a head reaches.
  void columns_of_pairs() {
    text_ += "  template <int k>\n";
    begin("float pair_column", "[[maybe_unused]] int h, [[maybe_unused]] int i");
    there_ = true;
    for (size_t k = 0; k < pair_loads_.size(); ++k) {
      const NodeId id = pair_loads_[k];
      const uint32_t dimensions = column_dimensions(graph_, id, options_.dtypes);
      if (dimensions == 0) continue;
      const Node& node = graph_[id];
      const std::string of = number(node.payload);
      std::vector<NodeId> outer;
      for (size_t d = 0; d < node.operands.size(); ++d) {
        if ((dimensions >> d & 1) == 0) outer.push_back(node.operands[d]);
      }
      text_ += "    if constexpr (k == " + number(static_cast<int64_t>(k)) + ") {\n";
      text_ += "    [[maybe_unused]] constexpr bool valid = true;\n";
      statements(outer);
      std::vector<std::string> index;
      const std::string in_range = checks(static_cast<int>(node.payload), node.operands, index, dimensions);
      text_ += "    const bool is_there = i < " + column_size(id, dimensions) + ";\n";
      std::string offset = "0ll";
      for (size_t d = node.operands.size(); d-- > 0;) {
        if ((dimensions >> d & 1) != 0) index[d] = index_of_column(static_cast<int>(node.payload), d, dimensions);
        offset += " + (long long)(" + index[d] + ") * c.stride" + of + "_" + number(static_cast<int64_t>(d));
      }
      text_ += "    return read_if<kUnread>(c.data" + of + " + (" + offset + "), is_there" + in_range + ");\n    }\n";
    }
    there_ = false;
    text_ += "    return 0.0f;\n  }\n";
    text_ += "  template <int k>\n";
    text_ += "  static __device__ __forceinline__ int pair_column_size([[maybe_unused]] const Captured& c) {\n";
    for (size_t k = 0; k < pair_loads_.size(); ++k) {
      const uint32_t dimensions = column_dimensions(graph_, pair_loads_[k], options_.dtypes);
      if (dimensions == 0) continue;
      text_ += "    if constexpr (k == " + number(static_cast<int64_t>(k)) + ") return " +
               column_size(pair_loads_[k], dimensions) + ";\n";
    }
    text_ += "    return 0;\n  }\n";
  }
  // Where the elements of a box's row begin.
  void row_of(NodeId id) {
    const Node& node = graph_[id];
    const auto buffer = static_cast<int>(node.payload);
    const std::vector<NodeId> before(node.operands.begin(), node.operands.end() - 1);
    statements(before);
    std::vector<std::string> index;
    const std::string in_range = checks(buffer, before, index);
    const std::string of = number(buffer), last = of + "_" + number(static_cast<int64_t>(before.size()));
    std::string offset = "0ll";
    for (size_t k = 0; k < index.size(); ++k) {
      offset += " + (long long)(" + index[k] + ") * c.stride" + of + "_" + number(static_cast<int64_t>(k));
    }
    text_ += "    return PairRow{valid" + in_range + " ? reinterpret_cast<const char*>(c.data" + of + " + (" + offset +
             ")) : nullptr, c.size" + last + ", c.stride" + last + "};\n";
  }

  // Reads at places of keys or diagonals; and of each pair its own.
  void touch() {
    const auto kinds = reads(graph_);
    const std::vector<bool> needed = needed_beside(graph_, [&](NodeId id) { return line_of_[id] >= 0; });
    std::vector<NodeId> roots, pair_roots;
    std::string touches, pair_touches;
    bool diagonals = false, besides = false;
    int pair_bytes = 0;
    for (const NodeId id : reachable(graph_)) {
      if (graph_[id].op != Op::kLoad || kinds[id] < Reads::kKey) continue;
      const bool pair = kinds[id] == Reads::kPair;
      diagonals = diagonals || kinds[id] == Reads::kDiagonal;
      besides = besides || (!pair && needed[id] && line_of_[id] < 0);
      for (const NodeId index : graph_[id].operands) (pair ? pair_roots : roots).push_back(index);
      (pair ? pair_touches : touches) += "  touch_if(" + element(id) + ", nowhere);\n  ";
      if (pair)
        pair_bytes = std::max(pair_bytes, element_bytes(options_.dtypes[static_cast<size_t>(graph_[id].payload)]));
    }
    text_ += "  static constexpr bool kTouchesKeys = " + flag(!touches.empty()) +
             ", kTouchesDiagonals = " + flag(diagonals) + ", kTouchesBesides = " + flag(besides) + ";\n";
    text_ += "  static constexpr int kPairBytes = " + number(pair_bytes) + ";\n";
    const std::string parameters = "int b, int h, int q_idx, int kv_idx, bool valid, [[maybe_unused]] unsigned nowhere";
    there_ = true;  // touches have no lines, though another read may give a place
    begin("void touch", parameters);
    end_with_result(roots, touches);
    begin("void touch_pair", parameters);
    end_with_result(pair_roots, pair_touches);
    there_ = false;
  }

  void derivative(const std::string& indices) {
    const auto& contributions = graph_.contributions();
    const auto plan = plan_scatter(graph_);
    std::vector<NodeId> roots{graph_.result()};
    std::vector<std::string> facts;
    std::string stores;
    for (size_t k = 0; k < contributions.size(); ++k) {
      const DType dtype = options_.dtypes[static_cast<size_t>(contributions[k].buffer)];
      facts.push_back(number(contributions[k].buffer) + ", " + number(element_bytes(dtype)) + ", " +
                      flag(dtype == DType::kBFloat16) + ", " + flag(plan[k].repeats) + ", " + flag(plan[k].has_column));
      if (is_vector(k)) {
        stores += "  value[" + number(static_cast<int64_t>(k)) + "] = 0.0f;\n  ";
        continue;
      }
      roots.push_back(contributions[k].value);
      stores += "  value[" + number(static_cast<int64_t>(k)) + "] = valid ? " + names_[contributions[k].value] +
                " : 0.0f;\n  ";
    }
    list("ContributionFacts", "kContribution", "kContributions", facts);
    std::map<AxisSet, std::vector<size_t>> vectors;  // by their axes
    for (size_t k = 0; k < contributions.size(); ++k) {
      if (is_vector(k)) vectors[graph_.open_axes(contributions[k])].push_back(k);
    }
    text_ += "  static constexpr bool kVectors = " + flag(!vectors.empty()) + ";\n";
    text_ += "  static constexpr bool kPasses = " + flag(passes_gradient(graph_)) + ";\n";
    begin_apply("float", "float score, float grad, " + indices + ", [[maybe_unused]] float* value");
    end_with_result(roots, stores + "  return valid ? " + names_[graph_.result()] + " : 0.0f;\n");
    for (size_t k = 0; k < contributions.size(); ++k) {
      if (!is_vector(k)) place(k, indices);
      if (plan[k].has_column) column(k, plan[k].column, indices);
    }
    with_reads("  template <int k, ", "long long offset", "float score, " + indices);
    for (size_t k = 0; k < contributions.size(); ++k) {
      const std::string index = number(static_cast<int64_t>(k));
      if (is_vector(k)) continue;
      text_ += "    if constexpr (k == " + index + ") return offset_" + index +
               "(c, score, b, h, q_idx, kv_idx, valid, reads);\n";
    }
    text_ += "    return -1;\n  }\n";
    with_reads("  template <int k, ", "int in_column", "float score, " + indices);
    for (size_t k = 0; k < contributions.size(); ++k) {
      if (!plan[k].has_column) continue;
      const std::string index = number(static_cast<int64_t>(k));
      text_ += "    if constexpr (k == " + index + ") return in_column_" + index +
               "(c, score, b, h, q_idx, kv_idx, valid, reads);\n";
    }
    text_ += "    return -1;\n  }\n";
    text_ += "  template <int k>\n";
    begin("long long of_column", "int b, int h, int i");
    for (size_t k = 0; k < contributions.size(); ++k) {
      if (!plan[k].has_column) continue;
      const std::string index = number(static_cast<int64_t>(k));
      text_ += "    if constexpr (k == " + index + ") return of_column_" + index + "(c, b, h, i);\n";
    }
    text_ += "    return i;\n  }\n";
    if (!vectors.empty()) scatter(vectors);
  }

  bool is_vector(size_t k) const { return graph_.open_axes(graph_.contributions()[k]) != 0; }

  // What contributions with axes add, of several pairs at once: what the loops around an element computed, an array of
  // a value for each pair, and in the innermost loop the values and their places.
  void scatter(const std::map<AxisSet, std::vector<size_t>>& vectors) {
    text_ += "  template <int kPairs, class Put>\n";
    begin("void scatter",
          "const float* score_of, const float* grad_of, int b, int h, const int* q_of, const int* kv_of, "
          "const bool* valid_of, const Put& put");
    there_ = true;
    text_ += "    constexpr bool valid = true;\n";
    for (const auto& [axes, members] : vectors) {
      std::vector<NodeId> roots;
      for (const size_t k : members) {
        const Contribution& c = graph_.contributions()[k];
        roots.insert(roots.end(), c.indices.begin(), c.indices.end());
        roots.push_back(c.value);
      }
      const std::vector<int> order = loops_.order(axes, roots);
      Loops::Done done = loops_.nothing();
      std::vector<Block> blocks;
      AxisSet inner = axes;
      for (size_t depth = 0; depth <= order.size(); ++depth) {
        if (depth > 0) {
          done = loops_.within(std::move(done), order[depth - 1]);
          inner &= ~set_of_axis(order[depth - 1]);
        }
        std::vector<BlockRoot> needed;
        for (const NodeId root : roots) needed.push_back({root, inner});
        blocks.push_back(loops_.block(needed, done));
      }
      for (size_t depth = 0; depth < order.size(); ++depth) {
        text_ += "    {\n";
        std::vector<bool> used(graph_.nodes().size(), false);
        for (size_t i = depth + 1; i < blocks.size(); ++i) mark_operands(blocks[i], used);
        for (const NodeId root : roots) used[root] = true;
        std::vector<NodeId> kept;
        for (const Block::Item& item : blocks[depth].items) {
          std::vector<NodeId> made = item.reductions;
          if (item.node >= 0) made = {item.node};
          std::copy_if(made.begin(), made.end(), std::back_inserter(kept), [&](NodeId id) { return used[id]; });
        }
        for (const NodeId id : kept) text_ += "    " + type_of_node(id) + " of_" + names_[id] + "[kPairs];\n";
        begin_pairs();
        take_kept();
        statements(blocks[depth]);
        for (const NodeId id : kept) text_ += "    of_" + names_[id] + "[e] = " + names_[id] + ";\n";
        text_ += "    }\n";
        kept_.push_back(std::move(kept));
        begin_loop(order[depth], 1);
      }
      for (const size_t k : members) {
        const std::string index = number(static_cast<int64_t>(k));
        text_ += "    float value" + index + "[kPairs];\n    long long place" + index + "[kPairs];\n";
      }
      begin_pairs();
      take_kept();
      statements(blocks.back());
      for (const size_t k : members) {
        const Contribution& c = graph_.contributions()[k];
        const std::string index = number(static_cast<int64_t>(k));
        text_ += "    value" + index + "[e] = valid_of[e] ? " + names_[c.value] + " : 0.0f;\n";
        text_ += "    place" + index + "[e] = " + place_of(c) + ";\n";
      }
      text_ += "    }\n";
      for (const size_t k : members) {
        const std::string index = number(static_cast<int64_t>(k));
        text_ += "    put.template put<" + index + ">(value" + index + ", place" + index + ");\n";
      }
      for (size_t depth = 0; depth < order.size(); ++depth) text_ += "    }\n    }\n";
      kept_.clear();
    }
    there_ = false;
    text_ += "  }\n";
  }
  void begin_pairs() {
    text_ += "#pragma unroll\n    for (int e = 0; e < kPairs; ++e) {\n";
    text_ += "    [[maybe_unused]] const float score = score_of[e], grad = grad_of[e];\n";
    text_ += "    [[maybe_unused]] const int q_idx = q_of[e], kv_idx = kv_of[e];\n";
  }
  void take_kept() {
    for (const auto& level : kept_) {
      for (const NodeId id : level) {
        text_ += "    [[maybe_unused]] const " + type_of_node(id) + " " + names_[id] + " = of_" + names_[id] + "[e];\n";
      }
    }
  }
  void mark_operands(const Block& block, std::vector<bool>& used) const {
    for (const Block::Item& item : block.items) {
      if (item.node >= 0) {
        for (const NodeId operand : graph_[item.node].operands) used[operand] = true;
      }
      for (const NodeId id : item.reductions) used[graph_[id].operands[1]] = true;
      for (const Block& body : item.body) mark_operands(body, used);
    }
  }

  // An element's place in a dense gradient, -1 out of range.
  std::string place_of(const Contribution& c) const {
    std::vector<std::string> index;
    const std::string in_range = checks(c.buffer, c.indices, index);
    const bool narrow = options_.small_buffers;
    std::string offset = narrow ? "0" : "0ll";
    for (size_t d = 0; d < index.size(); ++d) {
      offset = "(" + offset + (narrow ? " * int(c.size" : " * (c.size") + number(c.buffer) + "_" +
               number(static_cast<int64_t>(d)) + (narrow ? ") + int(" : ") + (") + index[d] + "))";
    }
    return "valid" + in_range + " ? static_cast<long long>(" + offset + ") : -1ll";
  }

  void place(size_t k, const std::string& parameters) {
    const Contribution& c = graph_.contributions()[k];
    with_reads("  template <", "long long offset_" + number(static_cast<int64_t>(k)), "float score, " + parameters);
    end_with_result(c.indices, "  return " + place_of(c) + ";\n");
  }
  // A contribution's place in the column of its (b, h), of at most kSmallTableElements; and an element's place in the
  // dense gradient.
  void column(size_t k, uint32_t dimensions, const std::string& parameters) {
    const Contribution& c = graph_.contributions()[k];
    const std::string of = number(static_cast<int64_t>(k)), buffer = number(c.buffer);
    std::vector<NodeId> inner, outer;
    for (size_t d = 0; d < c.indices.size(); ++d) ((dimensions >> d & 1) != 0 ? inner : outer).push_back(c.indices[d]);
    with_reads("  template <", "int in_column_" + of, "float score, " + parameters);
    std::vector<std::string> index;
    const std::string in_range = checks(c.buffer, c.indices, index, 0, " & ");
    const std::string local = place_among(c.buffer, index, dimensions);
    end_with_result(c.indices, "  return valid" + in_range + " ? " + local + " : -1;\n");
    begin("long long of_column_" + of, "int b, int h, int i");
    text_ += "    [[maybe_unused]] constexpr bool valid = true;\n";
    there_ = true;
    statements(outer);
    there_ = false;
    std::string offset = "0ll";
    for (size_t d = index.size(); d-- > 0;) {
      if ((dimensions >> d & 1) != 0) index[d] = index_of_column(c.buffer, d, dimensions);
    }
    for (size_t d = 0; d < index.size(); ++d) {
      offset = "(" + offset + " * c.size" + buffer + "_" + number(static_cast<int64_t>(d)) + " + (" + index[d] + "))";
    }
    text_ += "    return " + offset + ";\n  }\n";
  }

  const Graph& graph_;
  const RenderOptions& options_;
  std::vector<Interval> intervals_;
  std::vector<bool> wide_;
  std::vector<std::string> names_;
  std::vector<NodeId> line_loads_;  // of a score_mod or mask_mod
  std::vector<NodeId> pair_loads_;  // of a score_mod
  std::vector<int> line_of_;        // of each node, or -1
  std::vector<int> pair_of_;
  bool there_ = false;  // every load reads its tensor itself
  const Loops loops_;
  std::vector<std::vector<NodeId>> kept_;  // by scatter(), in arrays of a value for each pair
  std::string text_;
};

// The places of contributions are computed without the gradient.
void check_indices(const Graph& graph) {
  std::vector<bool> on_grad(graph.nodes().size(), false);
  for (NodeId id = 0; id < static_cast<NodeId>(on_grad.size()); ++id) {
    const Node& node = graph[id];
    on_grad[id] = node.op == Op::kInput && static_cast<Input>(node.payload) == Input::kGrad;
    for (const NodeId operand : node.operands) on_grad[id] = on_grad[id] || on_grad[operand];
  }
  for (const Contribution& c : graph.contributions()) {
    for (const NodeId index : c.indices) {
      if (on_grad[index]) throw GraphError("the index of a contribution must not depend on grad");
    }
  }
}

}  // namespace

bool small_buffers(std::span<const Buffer> buffers) {
  return std::all_of(buffers.begin(), buffers.end(), [](const Buffer& b) {
    int64_t last = 0, elements = 1;
    for (size_t d = 0; d < b.sizes.size(); ++d) {
      last += (b.sizes[d] - 1) * b.strides[d];
      elements *= b.sizes[d];
    }
    return last <= INT32_MAX && elements <= INT32_MAX;
  });
}

bool small_scalars(std::span<const Value> scalars) {
  return std::all_of(scalars.begin(), scalars.end(), [](const Value& s) {
    return s.type == Type::kFloat || (s.i >= -kSmallScalar && s.i <= kSmallScalar);
  });
}

std::string render_cuda(const Graph& graph, const RenderOptions& options) {
  check_lowered(graph);
  if (graph.result() < 0) throw GraphError("there is no result");
  const Graph ordered = canonical(graph);
  check_indices(ordered);
  return Renderer(ordered, options).render();
}

std::vector<int64_t> pack_captured(const Graph& graph, std::span<const Buffer> buffers,
                                   std::span<const Value> scalars) {
  check_captured(graph, buffers, scalars);
  std::vector<int64_t> words;
  for (const Buffer& b : buffers) {
    words.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.data)));
    for (size_t k = 0; k < b.sizes.size(); ++k) {
      words.push_back(b.sizes[k]);
      words.push_back(b.strides[k]);
    }
  }
  for (const Value& s : scalars) words.push_back(s.type == Type::kFloat ? std::bit_cast<int64_t>(s.f) : s.i);
  if (words.empty()) words.push_back(0);
  return words;
}

}  // namespace fusegrad::score_mod
