#include "score_mod/tile_program.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>

namespace fusegrad::score_mod {
namespace {

template <class T>
class Compiler {
 public:
  Compiler(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers, std::span<const Value> scalars,
           typename TileProgram<T>::Code& code)
      : graph_(graph), buffers_(buffers), scalars_(scalars), kernels_(tile_kernels()), code_(code) {
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
    for (const NodeId id : reachable(graph)) image_[id] = compile(id);
    code.result = image_[graph.result()];
    for (const Contribution& c : graph.contributions()) contribution(c);
    assign_positions();
  }

 private:
  static constexpr Lane kFloatLane = std::is_same_v<T, float> ? Lane::kFloat32 : Lane::kFloat64;

  Register at(RegisterId id) const { return code_.registers[id]; }
  RegisterId new_register(Rate rate, Lane lane) {
    code_.registers.push_back({rate, lane, 0});
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

  RegisterId emit(Instruction instruction, Rate rate, Lane lane) {
    instruction.rate = rate;
    instruction.out = new_register(rate, lane);
    code_.instructions[static_cast<int>(rate)].push_back(instruction);
    return instruction.out;
  }

  RegisterId converted(RegisterId x, Lane lane) {
    if (at(x).lane == lane) return x;
    auto& known = conversions_[{x, lane}];
    if (known == 0) {
      Instruction cast;
      cast.compute = kernels_.cast(at(x).lane, lane);
      cast.x[0] = x;
      known = 1 + emit(cast, at(x).rate, lane);
    }
    return known - 1;
  }

  // An instruction on operands of one lane (but for the condition of a `where`).
  RegisterId compute(Op op, std::span<const RegisterId> x, Lane operands, Lane result) {
    Rate rate = Rate::kOnce;
    for (const RegisterId id : x) rate = join(rate, at(id).rate);
    Instruction instruction;
    unsigned broadcast = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      instruction.x[i] = x[i];
      const Rate r = at(x[i]).rate;
      const bool array = r == rate || (rate == Rate::kPair && varies_in_a_row(r));
      if (!array) broadcast |= 1u << i;
    }
    instruction.compute = kernels_.find(op, operands, broadcast);
    if (instruction.compute == nullptr) throw GraphError("no kernel for '" + std::string(primitive(op).name) + "'");
    return emit(instruction, rate, result);
  }

  RegisterId compile(NodeId id) {
    const Node& node = graph_[id];
    switch (node.op) {
      case Op::kConstant:
        return preset(lane_of(id), graph_.value(id));
      case Op::kScalar:
        return preset(lane_of(id), scalars_[node.payload]);
      case Op::kInput: {
        constexpr Rate kRate[kInputCount] = {Rate::kPair, Rate::kOnce,   Rate::kOnce,
                                             Rate::kRow,  Rate::kColumn, Rate::kPair};
        return code_.input[node.payload] = new_register(kRate[node.payload], lane_of(id));
      }
      case Op::kLoad:
        return load(id);
      case Op::kToFloat:
      case Op::kToInt:
      case Op::kToBool:
        return converted(image_[node.operands[0]], lane_of(id));
      default:
        break;
    }
    if (const RegisterId diagonal = compile_diagonal(id); diagonal != kNoRegister) return diagonal;
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
    const bool compares = !is_leaf(node.op) && primitive(node.op).rule == Rule::kCompare;
    if (!linear && !compares) return kNoRegister;
    RegisterId x[kMaxArity];
    for (size_t i = 0; i < node.operands.size(); ++i) {
      x[i] = on_diagonal(node.operands[i]);
      if (x[i] == kNoRegister) return kNoRegister;
    }
    return compute(node.op, {x, node.operands.size()}, Lane::kInt64, compares ? Lane::kBool : Lane::kInt64);
  }

  // The offset of `indices` in an array of these sizes and strides.
  RegisterId offset(const std::vector<NodeId>& indices, std::span<const int64_t> sizes,
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
        known = 1 + emit(instruction, at(index).rate, lane);
      }
      parts.push_back(known - 1);
    }
    if (parts.empty()) return preset(lane, {Type::kInt, 0, 0});
    std::stable_sort(parts.begin(), parts.end(), [&](RegisterId a, RegisterId b) { return at(a).rate < at(b).rate; });
    RegisterId total = parts[0];
    for (size_t k = 1; k < parts.size(); ++k) {
      auto& known = sums_[{total, parts[k]}];
      if (known == 0) known = 1 + compute(Op::kAdd, std::array{total, parts[k]}, lane, lane);
      total = known - 1;
    }
    return total;
  }

  int new_read(int buffer, const void* data, RegisterId offset, const std::vector<NodeId>& indices) {
    Read read{buffer, data, offset, {}};
    for (const NodeId index : indices) read.index.push_back(image_[index]);
    code_.reads.push_back(std::move(read));
    return static_cast<int>(code_.reads.size()) - 1;
  }

  RegisterId load(NodeId id) {
    const Node& node = graph_[id];
    const auto buffer = static_cast<int>(node.payload);
    const Buffer& b = buffers_[buffer];
    const RegisterId place = offset(node.operands, b.sizes, b.strides);
    Instruction instruction;
    instruction.gather = kernels_.gather(static_cast<Storage>(b.dtype), lane_of(id), at(place).lane);
    instruction.x[0] = place;
    instruction.read = new_read(buffer, b.data, place, node.operands);
    return emit(instruction, at(place).rate, lane_of(id));
  }

  void contribution(const Contribution& c) {
    const auto sizes = buffers_[c.buffer].sizes;
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t k = sizes.size(); k-- > 1;) strides[k - 1] = strides[k] * std::max<int64_t>(sizes[k], 1);
    const RegisterId place = offset(c.indices, sizes, strides);
    code_.contributions.push_back({c.buffer, new_read(c.buffer, nullptr, place, c.indices), image_[c.value]});
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
    for (size_t i = 0; i < pair.size(); ++i) {
      Register& out = code_.registers[pair[i].out];
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

template class TileProgram<float>;
template class TileProgram<double>;

std::string OutOfRange::message() const {
  return "index " + std::to_string(index) + " is out of range for dimension " + std::to_string(dimension) +
         " of captured buffer " + std::to_string(buffer) + ", which has size " + std::to_string(size);
}

}  // namespace fusegrad::score_mod
