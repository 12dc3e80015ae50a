#include "score_mod/tile_program.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>

#include "score_mod/loops.h"

namespace fusegrad::score_mod {
namespace {

template <class T>
class Compiler {
 public:
  Compiler(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers, std::span<const Value> scalars,
           typename TileProgram<T>::Code& code)
      : graph_(graph), buffers_(buffers), scalars_(scalars), kernels_(tile_kernels()), code_(code), loops_(graph) {
    check_captured(graph, buffers, scalars);
    std::vector<Interval> buffer_intervals, scalar_intervals;
    for (const Buffer& b : buffers) buffer_intervals.push_back(interval_of(b.dtype));
    for (const Value& s : scalars) scalar_intervals.push_back({s.i, s.i});
    wide_ = needs_int64(graph, intervals(graph, lengths, buffer_intervals, scalar_intervals));
    dependence_ = dependences(graph);
    code.kind = graph.kind();
    for (const Buffer& b : buffers) code.sizes.emplace_back(b.sizes.begin(), b.sizes.end());
    std::fill(std::begin(code.input), std::end(code.input), kNoRegister);

    image_.assign(graph.nodes().size(), kNoRegister);
    // What does not depend on an axis first, once, at its own rate.
    std::vector<BlockRoot> roots{{graph.result()}};
    for (const Contribution& c : graph.contributions()) {
      const AxisSet axes = graph.open_axes(c);
      for (const NodeId index : c.indices) roots.push_back({index, axes});
      roots.push_back({c.value, axes});
    }
    for (const NodeId id : reachable(graph)) {
      if (graph[id].operands.empty() && graph[id].op != Op::kAxis) leaf(id);
    }
    Loops::Done done = loops_.nothing();
    block(loops_.block(roots, done), done);
    code.result = image_[graph.result()];
    for (const Contribution& c : graph.contributions()) {
      if (graph.open_axes(c) == 0)
        contribution(c, false);
      else
        contribution_in_loops(c, done);
    }
    find_kept();
    assign_positions();
  }

 private:
  static constexpr Lane kFloatLane = std::is_same_v<T, float> ? Lane::kFloat32 : Lane::kFloat64;

  Register at(RegisterId id) const { return code_.registers[id]; }
  RegisterId new_register(Rate rate, Lane lane) {
    code_.registers.push_back({rate, lane, 0});
    varies_.push_back(false);
    return static_cast<RegisterId>(code_.registers.size()) - 1;
  }
  RegisterId preset(Lane lane, const Value& value) {
    const RegisterId out = new_register(Rate::kOnce, lane);
    code_.presets.push_back({out, value});
    return out;
  }

  Lane lane_of(NodeId id) const {
    if (graph_.type(id) == Type::kFloat) return kFloatLane;
    if (graph_.type(id) == Type::kBool) return Lane::kBool;
    return wide_[id] ? Lane::kInt64 : Lane::kInt32;
  }
  // Integers as wide as the widest operand.
  Lane operand_lane(const Node& node) const {
    Lane lane = Lane::kBool;
    for (size_t i = node.op == Op::kWhere ? 1 : 0; i < node.operands.size(); ++i) {
      lane = std::max(lane, at(image_[node.operands[i]]).lane, wider);
    }
    return lane;
  }
  static bool wider(Lane a, Lane b) {
    const auto order = [](Lane lane) { return lane == Lane::kBool ? 0 : lane == Lane::kInt32 ? 1 : 2; };
    return order(a) < order(b);
  }

  // `varies`: with the axis of a loop, in whose list it then belongs.
  RegisterId emit(Instruction instruction, Rate rate, Lane lane, bool varies) {
    instruction.rate = rate;
    instruction.out = new_register(rate, lane);
    varies_.back() = varies;
    (varies ? loop_list() : code_.instructions[static_cast<int>(rate)]).push_back(instruction);
    return instruction.out;
  }

  // --- loops ---

  std::vector<Instruction>& loop_list() { return code_.instructions[static_cast<int>(*loop_rate_)]; }
  // The rate of what is computed within a loop. In the list of pairs a row is at work: what differs from column to
  // column is computed for a row's columns, anything else as a value of the row.
  Rate in_loop(Rate rate) const {
    if (*loop_rate_ != Rate::kPair) return rate;
    return varies_in_a_row(rate) ? Rate::kPair : Rate::kRow;
  }

  void block(const Block& block, Loops::Done& done) {
    for (const Block::Item& item : block.items) {
      if (item.node >= 0) {
        image_[item.node] = compile(item.node);
        continue;
      }
      if (loop_rate_) {
        loop(item, done);
        continue;
      }
      // Reductions of different rates each in a loop of their own.
      std::map<Rate, std::vector<NodeId>> by_rate;
      for (const NodeId id : item.reductions) by_rate[natural_rate(id)].push_back(id);
      for (const auto& [rate, reductions] : by_rate) {
        Block::Item part{-1, item.axis, reductions, {}};
        std::vector<BlockRoot> values;
        for (const NodeId id : reductions) values.push_back({graph_[id].operands[1]});
        Loops::Done inside = loops_.within(done, item.axis);
        for (const NodeId id : item.reductions) inside[static_cast<size_t>(id)] = false;
        part.body.push_back(loops_.block(values, inside));
        loop_rate_ = rate;
        loop(part, inside);
        loop_rate_.reset();
      }
    }
  }

  // The rate of a value by those of what it is made of that is there.
  Rate natural_rate(NodeId id) const {
    std::vector<NodeId> stack{id};
    std::vector<bool> seen(graph_.nodes().size(), false);
    Rate rate = Rate::kOnce;
    while (!stack.empty()) {
      const NodeId next = stack.back();
      stack.pop_back();
      if (seen[next]) continue;
      seen[next] = true;
      if (image_[next] != kNoRegister && graph_.open_axes(next) == 0) {
        rate = join(rate, at(image_[next]).rate);
        continue;
      }
      for (const NodeId operand : graph_[next].operands) stack.push_back(operand);
    }
    return rate;
  }

  // With what is reduced in it, all in the list of loop_rate_.
  void loop(const Block::Item& item, Loops::Done& done) {
    for (const NodeId id : item.reductions) {
      Instruction fill;
      fill.fills = 1;
      fill.value = identity_of(graph_[id].op, graph_.type(id));
      image_[id] = emit(fill, in_loop(natural_rate(graph_[id].operands[1])), lane_of(id), true);
    }
    begin_loop(item.axis);
    block(item.body.front(), done);
    for (const NodeId id : item.reductions) {
      const RegisterId sum = image_[id];
      const Lane lane = at(sum).lane;
      const RegisterId x[] = {sum, converted(image_[graph_[id].operands[1]], lane)};
      Instruction copy;
      copy.copies = 1;
      copy.x[0] = compute(combining(graph_[id].op), x, lane, lane);
      copy.out = sum;
      copy.rate = at(sum).rate;
      loop_list().push_back(copy);
    }
    end_loop();
    for (const NodeId id : item.reductions) varies_[image_[id]] = graph_.open_axes(id) != 0;
  }

  void begin_loop(int axis) {
    Instruction begin;
    begin.extent = graph_.axes()[static_cast<size_t>(axis)];
    begin.rate = Rate::kOnce;
    begin.out = new_register(Rate::kOnce, Lane::kInt32);
    for (NodeId id = 0; id < static_cast<NodeId>(graph_.nodes().size()); ++id) {
      const Node& node = graph_[id];
      if (node.op == Op::kAxis && node.payload == axis) image_[id] = begin.out;
    }
    varies_.back() = true;
    open_loops_.push_back(loop_list().size());
    loop_list().push_back(begin);
    forget();
  }
  void end_loop() {
    loop_list()[open_loops_.back()].end = loop_list().size();
    open_loops_.pop_back();
    forget();
  }
  // What was computed in one loop is not there in another one.
  void forget() {
    const auto varies = [&](const auto& known) { return known.second == 0 || varies_[known.second - 1]; };
    std::erase_if(conversions_, varies);
    std::erase_if(offsets_, varies);
    std::erase_if(sums_, varies);
  }

  void contribution_in_loops(const Contribution& c, Loops::Done done) {
    loop_rate_ = Rate::kPair;
    std::vector<NodeId> roots = c.indices;
    roots.push_back(c.value);
    AxisSet inner = graph_.open_axes(c);
    const std::vector<int> order = loops_.order(inner, roots);
    for (const int axis : order) {
      inner &= ~set_of_axis(axis);
      begin_loop(axis);
      done = loops_.within(std::move(done), axis);
      std::vector<BlockRoot> needed;
      for (const NodeId root : roots) needed.push_back({root, inner});
      block(loops_.block(needed, done), done);
    }
    contribution(c, true);
    Instruction instruction;
    instruction.contribution = static_cast<int>(code_.contributions.size()) - 1;
    loop_list().push_back(instruction);
    for (size_t i = 0; i < order.size(); ++i) end_loop();
    loop_rate_.reset();
  }

  RegisterId converted(RegisterId x, Lane lane) {
    if (at(x).lane == lane) return x;
    auto& known = conversions_[{x, lane}];
    if (known == 0) {
      Instruction cast;
      cast.compute = kernels_.cast(at(x).lane, lane);
      cast.x[0] = x;
      known = 1 + emit(cast, rate_after(x), lane, varies_[x]);
    }
    return known - 1;
  }

  // An instruction on operands of one lane (but for the condition of a `where`).
  RegisterId compute(Op op, std::span<const RegisterId> x, Lane operands, Lane result) {
    Rate rate = Rate::kOnce;
    bool varies = false;
    for (const RegisterId id : x) {
      rate = join(rate, at(id).rate);
      varies = varies || varies_[id];
    }
    if (varies) rate = in_loop(rate);
    Instruction instruction;
    unsigned broadcast = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      instruction.x[i] = x[i];
      const Rate r = at(x[i]).rate;
      const bool array = r == rate || (rate == Rate::kPair && varies_in_a_row(r));
      if (!array) broadcast |= 1u << i;
    }
    if (broadcast == (1u << x.size()) - 1) broadcast = 0;  // one lane of all
    instruction.within = op == Op::kWithin ? 1 : 0;
    instruction.compute = kernels_.find(op, operands, broadcast);
    if (instruction.compute == nullptr) throw GraphError("no kernel for '" + std::string(primitive(op).name) + "'");
    return emit(instruction, rate, result, varies);
  }

  void leaf(NodeId id) {
    const Node& node = graph_[id];
    if (node.op == Op::kConstant) {
      image_[id] = preset(lane_of(id), graph_.value(id));
    } else if (node.op == Op::kScalar) {
      image_[id] = preset(lane_of(id), scalars_[node.payload]);
    } else if (node.op == Op::kInput) {
      constexpr Rate kRate[kInputCount] = {Rate::kPair, Rate::kOnce,   Rate::kOnce,
                                           Rate::kRow,  Rate::kColumn, Rate::kPair};
      image_[id] = code_.input[node.payload] = new_register(kRate[node.payload], lane_of(id));
    } else {
      image_[id] = load(id);
    }
  }

  RegisterId compile(NodeId id) {
    const Node& node = graph_[id];
    switch (node.op) {
      case Op::kLoad:
        if (node.operands.empty()) return image_[id];
        return load(id);
      case Op::kToFloat:
      case Op::kToInt:
      case Op::kToBool:
        return converted(image_[node.operands[0]], lane_of(id));
      default:
        break;
    }
    if (!loop_rate_) {
      if (const RegisterId diagonal = compile_diagonal(id); diagonal != kNoRegister) return diagonal;
    }
    const Lane result = lane_of(id);
    const Lane operands = result == Lane::kInt64 && node.type == Type::kInt ? Lane::kInt64 : operand_lane(node);
    RegisterId x[kMaxArity];
    for (size_t i = 0; i < node.operands.size(); ++i) {
      const RegisterId operand = image_[node.operands[i]];
      x[i] = node.op == Op::kWhere && i == 0 ? operand : converted(operand, operands);
    }
    return compute(node.op, {x, node.operands.size()}, operands, result);
  }

  // Whether the value is the same along each diagonal as far as its register tells.
  bool is_diagonal(RegisterId id) const { return at(id).rate == Rate::kOnce || at(id).rate == Rate::kDiagonal; }

  // A value that depends on q_idx - kv_idx though its operands do not, such as that difference itself.
  RegisterId compile_diagonal(NodeId id) {
    const Node& node = graph_[id];
    const Dependence& dependence = dependence_[id];
    const bool pair = (dependence.on() & kPairSet) != 0;
    const auto is_diagonal_node = [&](NodeId x) { return is_diagonal(image_[x]); };
    if (!pair || !dependence.diagonal() || std::all_of(node.operands.begin(), node.operands.end(), is_diagonal_node)) {
      return kNoRegister;
    }
    const RegisterId x = on_diagonal(id);
    return x == kNoRegister ? x : converted(x, lane_of(id));
  }

  // A linear function of q_idx and kv_idx, or a comparison of two, with one pair for each difference in their place. In
  // 64 bits: that kv_idx may lie outside of the bounds by which 32 were found to be enough.
  RegisterId on_diagonal(NodeId id) {
    const auto [known, is_new] = diagonal_images_.try_emplace(id, kNoRegister);
    if (is_new) {
      const RegisterId x = new_on_diagonal(id);
      diagonal_images_[id] = x;
      return x;
    }
    return known->second;
  }
  RegisterId new_on_diagonal(NodeId id) {
    const Node& node = graph_[id];
    if (image_[id] != kNoRegister && is_diagonal(image_[id])) return converted(image_[id], Lane::kInt64);
    if (node.op == Op::kInput) {
      const bool query = static_cast<Input>(node.payload) == Input::kQ;
      return (query ? code_.diagonal_q : code_.diagonal_kv) =
                 new_register(query ? Rate::kOnce : Rate::kDiagonal, Lane::kInt64);
    }
    const bool linear = node.op == Op::kAdd || node.op == Op::kSub || node.op == Op::kNeg || node.op == Op::kMul;
    const bool compares = is_primitive(node.op) && primitive(node.op).rule == Rule::kCompare;
    if (!linear && !compares) return kNoRegister;
    RegisterId x[kMaxArity];
    for (size_t i = 0; i < node.operands.size(); ++i) {
      x[i] = on_diagonal(node.operands[i]);
      if (x[i] == kNoRegister) return kNoRegister;
    }
    return compute(node.op, {x, node.operands.size()}, Lane::kInt64, compares ? Lane::kBool : Lane::kInt64);
  }

  // Where a read finds its elements: sets `offset`, or `row` and `column` of an array that is indexed by both.
  void place(Read& read, const std::vector<NodeId>& indices, std::span<const int64_t> sizes,
             std::span<const int64_t> strides) {
    int64_t largest = 0;
    bool small = true;
    for (size_t k = 0; k < sizes.size(); ++k) {
      small = small && sizes[k] <= INT32_MAX && strides[k] < kSmallOffsets;
      if (small) largest += std::max<int64_t>(sizes[k] - 1, 0) * strides[k];
      small = small && largest < kSmallOffsets;
    }
    const Lane lane = small ? Lane::kInt32 : Lane::kInt64;
    // Parts of a lower rate are added up first, and so less often.
    std::vector<RegisterId> parts;
    for (size_t k = 0; k < indices.size(); ++k) {
      const RegisterId index = image_[indices[k]];
      auto& known = offsets_[{index, sizes[k], strides[k], lane}];
      if (known == 0) {
        Instruction instruction;
        instruction.offset = kernels_.offset(at(index).lane, lane);
        instruction.x[0] = index;
        instruction.size = sizes[k];
        instruction.stride = strides[k];
        known = 1 + emit(instruction, rate_after(index), lane, varies_[index]);
      }
      parts.push_back(known - 1);
    }
    if (parts.empty()) {
      read.offset = preset(lane, {Type::kInt, 0, 0});
      return;
    }
    const auto by_rate = [&](RegisterId a, RegisterId b) {
      return std::pair<bool, Rate>(varies_[a], at(a).rate) < std::pair<bool, Rate>(varies_[b], at(b).rate);
    };
    std::stable_sort(parts.begin(), parts.end(), by_rate);
    const auto is_column = [&](RegisterId id) { return at(id).rate == Rate::kColumn; };
    const auto is_of_row = [&](RegisterId id) { return at(id).rate == Rate::kRow || at(id).rate == Rate::kOnce; };
    const auto column = std::stable_partition(parts.begin(), parts.end(), is_of_row);
    const std::span<const RegisterId> of_row{parts.begin(), column}, others{column, parts.end()};
    if (!loop_rate_ && !others.empty() && std::all_of(others.begin(), others.end(), is_column) &&
        std::any_of(of_row.begin(), of_row.end(), [&](RegisterId id) { return at(id).rate == Rate::kRow; })) {
      read.row = sum_of(of_row, lane);
      read.column = sum_of(others, lane);
      read.add = kernels_.find(Op::kAdd, lane, 1u);
      return;
    }
    std::stable_sort(parts.begin(), parts.end(), by_rate);
    read.offset = sum_of(parts, lane);
  }
  RegisterId sum_of(std::span<const RegisterId> parts, Lane lane) {
    RegisterId total = parts[0];
    for (const RegisterId part : parts.subspan(1)) {
      auto& known = sums_[{total, part}];
      if (known == 0) known = 1 + compute(Op::kAdd, std::array{total, part}, lane, lane);
      total = known - 1;
    }
    return total;
  }

  int new_read(int buffer, const void* data, const std::vector<NodeId>& indices, std::span<const int64_t> sizes,
               std::span<const int64_t> strides) {
    Read read{buffer, data, kNoRegister, {}};
    place(read, indices, sizes, strides);
    for (const NodeId index : indices) read.index.push_back(image_[index]);
    code_.reads.push_back(std::move(read));
    return static_cast<int>(code_.reads.size()) - 1;
  }

  RegisterId load(NodeId id) {
    const Node& node = graph_[id];
    const auto buffer = static_cast<int>(node.payload);
    const Buffer& b = buffers_[buffer];
    Instruction instruction;
    instruction.read = new_read(buffer, b.data, node.operands, b.sizes, b.strides);
    const Read& read = code_.reads[instruction.read];
    const RegisterId place = read.by_rows() ? read.row : read.offset;
    instruction.storage = static_cast<Storage>(b.dtype);
    instruction.gather = kernels_.gather(instruction.storage, lane_of(id), at(place).lane);
    if (read.by_rows()) return emit(instruction, Rate::kPair, lane_of(id), false);
    instruction.x[0] = place;
    return emit(instruction, rate_after(place), lane_of(id), varies_[place]);
  }
  // The rate of what is computed from a register alone.
  Rate rate_after(RegisterId x) const { return varies_[x] ? in_loop(at(x).rate) : at(x).rate; }

  void contribution(const Contribution& c, bool in_loops) {
    const auto sizes = buffers_[c.buffer].sizes;
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t k = sizes.size(); k-- > 1;) strides[k - 1] = strides[k] * std::max<int64_t>(sizes[k], 1);
    const int read = new_read(c.buffer, nullptr, c.indices, sizes, strides);
    code_.contributions.push_back({c.buffer, read, image_[c.value], in_loops});
  }

  // Moves the instructions at kPair that give the same for every b to the front.
  void find_kept() {
    std::vector<bool> differs(code_.registers.size(), false);
    for (const Input input : {Input::kB, Input::kScore, Input::kGrad}) {
      const RegisterId id = code_.input[static_cast<int>(input)];
      if (id != kNoRegister) differs[id] = true;
    }
    const auto any = [&](std::span<const RegisterId> ids) {
      return std::any_of(ids.begin(), ids.end(), [&](RegisterId id) { return id != kNoRegister && differs[id]; });
    };
    const auto differing = [&](const Instruction& i) {
      if (any(i.x)) return true;
      if (i.read < 0) return false;
      const Read& read = code_.reads[i.read];
      return any(std::array{read.offset, read.row, read.column}) || any(read.index);
    };
    auto& pair = code_.instructions[static_cast<int>(Rate::kPair)];
    const auto loops = [](const Instruction& i) { return i.extent > 0 || i.fills != 0 || i.contribution >= 0; };
    for (const auto& list : code_.instructions) {
      if (std::any_of(list.begin(), list.end(), loops)) return;
      for (const Instruction& i : list) differs[i.out] = differing(i);
    }
    const auto is_kept = [&](const Instruction& i) { return !differs[i.out]; };
    const auto spares = [&](const Instruction& i) {
      return is_kept(i) && i.gather != nullptr && !code_.reads[i.read].by_rows();
    };
    const auto spares_places = [&](const ProgramContribution& c) {
      const RegisterId place = code_.reads[c.read].offset;
      return place != kNoRegister && at(place).rate == Rate::kPair && !differs[place];
    };
    if (std::none_of(pair.begin(), pair.end(), spares) &&
        std::none_of(code_.contributions.begin(), code_.contributions.end(), spares_places)) {
      return;
    }
    std::stable_partition(pair.begin(), pair.end(), is_kept);
    code_.kept_instructions = static_cast<size_t>(std::count_if(pair.begin(), pair.end(), is_kept));
    std::vector<bool> made(code_.registers.size(), false), read(code_.registers.size(), false);
    const auto reads = [&](RegisterId id) {
      if (id != kNoRegister) read[id] = true;
    };
    const auto reads_place = [&](const Read& place) {
      reads(place.offset);
      for (const RegisterId id : place.index) reads(id);
    };
    for (size_t i = 0; i < pair.size(); ++i) {
      if (i < code_.kept_instructions) {
        made[pair[i].out] = true;
        continue;
      }
      for (const RegisterId id : pair[i].x) reads(id);
      if (pair[i].read >= 0) reads_place(code_.reads[pair[i].read]);
    }
    reads(code_.result);
    for (const ProgramContribution& c : code_.contributions) {
      reads(c.value);
      reads_place(code_.reads[c.read]);
    }
    for (RegisterId id = 0; id < static_cast<RegisterId>(made.size()); ++id) {
      if (made[id] && read[id]) code_.kept.push_back(id);
    }
  }

  // Registers of a row are reused as soon as nothing needs them, so that they stay in the first-level cache.
  void assign_positions() {
    auto& pair = code_.instructions[static_cast<int>(Rate::kPair)];
    std::vector<int64_t> last_use(code_.registers.size(), -1);
    const auto use = [&](RegisterId id, int64_t time) {
      if (id != kNoRegister) last_use[id] = std::max(last_use[id], time);
    };
    for (size_t i = 0; i < pair.size(); ++i) {
      for (const RegisterId id : pair[i].x) use(id, static_cast<int64_t>(i));
      if (pair[i].gather == nullptr) continue;
      for (const RegisterId id : code_.reads[pair[i].read].index) use(id, static_cast<int64_t>(i));
    }
    constexpr int64_t kEnd = INT64_MAX;
    // What is made or used in a loop is there to the end: the next turn may need it.
    for (size_t i = 0; i < pair.size(); ++i) {
      if (pair[i].extent == 0 && pair[i].fills == 0) continue;
      const size_t end = pair[i].extent == 0 ? i + 1 : pair[i].end;
      for (size_t k = i; k < end; ++k) {
        use(pair[k].out, kEnd);
        for (const RegisterId id : pair[k].x) use(id, kEnd);
        if (pair[k].gather == nullptr) continue;
        for (const RegisterId id : code_.reads[pair[k].read].index) use(id, kEnd);
      }
    }
    use(code_.result, kEnd);
    for (const ProgramContribution& c : code_.contributions) {
      use(c.value, kEnd);
      use(code_.reads[c.read].offset, kEnd);
      for (const RegisterId id : code_.reads[c.read].index) use(id, kEnd);
    }

    for (Register& r : code_.registers) {
      if (r.rate != Rate::kPair) r.position = code_.register_count[static_cast<int>(r.rate)]++;
    }
    auto& count = code_.register_count[static_cast<int>(Rate::kPair)];
    std::vector<int64_t> free;
    std::vector<bool> placed(code_.registers.size(), false);
    for (size_t i = 0; i < pair.size(); ++i) {
      const RegisterId id = pair[i].out;
      if (id == kNoRegister || at(id).rate != Rate::kPair || placed[id]) continue;
      placed[id] = true;
      Register& out = code_.registers[id];
      if (free.empty()) free.push_back(count++);
      out.position = free.back();
      free.pop_back();
      // After `out` has its place: no kernel may write over an operand.
      std::vector<RegisterId> operands(std::begin(pair[i].x), std::end(pair[i].x));
      if (pair[i].gather != nullptr) {
        const auto& index = code_.reads[pair[i].read].index;
        operands.insert(operands.end(), index.begin(), index.end());
      }
      operands.push_back(pair[i].out);  // free at once where nothing uses it
      std::sort(operands.begin(), operands.end());
      operands.erase(std::unique(operands.begin(), operands.end()), operands.end());
      for (const RegisterId id : operands) {
        if (id == kNoRegister || at(id).rate != Rate::kPair || is_input(id)) continue;
        if (last_use[id] <= static_cast<int64_t>(i)) {
          // An index may outlive its last instruction as a gather's witness: freed once.
          last_use[id] = kEnd;
          free.push_back(at(id).position);
        }
      }
    }
  }
  bool is_input(RegisterId id) const {
    return std::find(std::begin(code_.input), std::end(code_.input), id) != std::end(code_.input);
  }

  const Graph& graph_;
  std::span<const Buffer> buffers_;
  std::span<const Value> scalars_;
  const TileKernels& kernels_;
  typename TileProgram<T>::Code& code_;
  const Loops loops_;
  std::optional<Rate> loop_rate_;  // within a loop: of its list
  std::vector<bool> varies_;       // of each register: with the axis of a loop
  std::vector<size_t> open_loops_;
  std::vector<bool> wide_;
  std::vector<Dependence> dependence_;
  std::vector<RegisterId> image_;
  // What was emitted for the same; a register's id plus 1.
  std::map<std::pair<RegisterId, Lane>, RegisterId> conversions_;
  std::map<std::tuple<RegisterId, int64_t, int64_t, Lane>, RegisterId> offsets_;
  std::map<std::pair<RegisterId, RegisterId>, RegisterId> sums_;
  std::map<NodeId, RegisterId> diagonal_images_;
};

}  // namespace

template <class T>
TileProgram<T>::TileProgram(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers,
                            std::span<const Value> scalars)
    : code_(std::make_unique<Code>()) {
  if (graph.result() < 0) throw GraphError("there is no result");
  Compiler<T>(graph, lengths, buffers, scalars, *code_);
}
template <class T>
TileProgram<T>::~TileProgram() = default;
template <class T>
TileProgram<T>::TileProgram(TileProgram&&) noexcept = default;

template <class T>
bool TileProgram<T>::keeps() const {
  return code_->kept_instructions > 0;
}

template class TileProgram<float>;
template class TileProgram<double>;

std::string OutOfRange::message() const {
  if (buffer == kValue) {
    return "index " + std::to_string(index) + " is out of range for a dimension of size " + std::to_string(size);
  }
  return "index " + std::to_string(index) + " is out of range for dimension " + std::to_string(dimension) +
         " of captured buffer " + std::to_string(buffer) + ", which has size " + std::to_string(size);
}

}  // namespace fusegrad::score_mod
