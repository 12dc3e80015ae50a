#include "score_mod/index_analysis.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace fusegrad::score_mod {
namespace {

constexpr Interval kAnything{};

// Bounds beyond this are given up, so that sums and products of bounds cannot overflow.
constexpr int64_t kLargest = int64_t{1} << 62;

Interval bounded(__int128 low, __int128 high) {
  if (low < -kLargest || high > kLargest) return kAnything;
  return {static_cast<int64_t>(low), static_cast<int64_t>(high)};
}

Interval hull(Interval a, Interval b) { return {std::min(a.low, b.low), std::max(a.high, b.high)}; }

Interval product(Interval a, Interval b) {
  const __int128 corners[] = {static_cast<__int128>(a.low) * b.low, static_cast<__int128>(a.low) * b.high,
                              static_cast<__int128>(a.high) * b.low, static_cast<__int128>(a.high) * b.high};
  return bounded(*std::min_element(corners, corners + 4), *std::max_element(corners, corners + 4));
}

// For a product of 0 to `count` factors.
Interval power_of(Interval x, int64_t count) {
  const int64_t size = std::max<int64_t>({x.high, x.low == std::numeric_limits<int64_t>::min() ? kLargest : -x.low, 1});
  __int128 most = 1;
  for (int64_t i = 0; i < count && size > 1 && most <= kLargest; ++i) most *= size;
  return bounded(x.low >= 0 ? 0 : -most, most);
}

// x is the interval of each operand.
Interval interval_of(Op op, const Interval* x) {
  const auto [a, b] = std::pair(x[0], x[1]);
  switch (op) {
    case Op::kAdd:
      return bounded(static_cast<__int128>(a.low) + b.low, static_cast<__int128>(a.high) + b.high);
    case Op::kSub:
      return bounded(static_cast<__int128>(a.low) - b.high, static_cast<__int128>(a.high) - b.low);
    case Op::kMul:
      return product(a, b);
    case Op::kSquare: {
      const Interval p = product(a, a);
      return p.high == kAnything.high ? kAnything : Interval{0, p.high};
    }
    case Op::kNeg:
      return bounded(-static_cast<__int128>(a.high), -static_cast<__int128>(a.low));
    case Op::kAbs: {
      const Interval n = bounded(-static_cast<__int128>(a.high), -static_cast<__int128>(a.low));
      if (n.high == kAnything.high) return kAnything;
      return {a.low >= 0 ? a.low : std::max<int64_t>(0, n.low), std::max(a.high, n.high)};
    }
    case Op::kSign:
      return {a.low > 0 ? 1 : a.low == 0 ? 0 : -1, a.high < 0 ? -1 : a.high == 0 ? 0 : 1};
    case Op::kRelu:
      return {std::max<int64_t>(a.low, 0), std::max<int64_t>(a.high, 0)};
    case Op::kMin:
      return {std::min(a.low, b.low), std::min(a.high, b.high)};
    case Op::kMax:
      return {std::max(a.low, b.low), std::max(a.high, b.high)};
    case Op::kClamp: {
      const Interval m{std::max(a.low, b.low), std::max(a.high, b.high)};
      return {std::min(m.low, x[2].low), std::min(m.high, x[2].high)};
    }
    case Op::kFloor:
    case Op::kCeil:
    case Op::kTrunc:
    case Op::kRound:
      return a;
    case Op::kMod:
      if (b.low > 0) return {0, a.low >= 0 ? std::min(a.high, b.high - 1) : b.high - 1};
      // The remainder has the divisor's sign and a smaller magnitude; by 0 it is 0.
      return bounded(std::min<__int128>(static_cast<__int128>(b.low) + 1, 0),
                     std::max<__int128>(static_cast<__int128>(b.high) - 1, 0));
    case Op::kFloorDiv:
      // Dividing by at least 1 moves towards 0 or to -1.
      if (b.low > 0) return {std::min<int64_t>(a.low, 0), std::max<int64_t>(a.high, 0)};
      // By a negative divisor the magnitude is no larger either; by 0 the quotient is 0.
      return hull(a, bounded(-static_cast<__int128>(a.high), -static_cast<__int128>(a.low)));
    case Op::kAnd:
      if (a.low >= 0 && b.low >= 0) return {0, std::min(a.high, b.high)};
      if (a.low >= 0) return {0, a.high};
      if (b.low >= 0) return {0, b.high};
      return kAnything;
    case Op::kShr:
      return {std::min<int64_t>(a.low, 0), std::max<int64_t>(a.high, 0)};
    case Op::kShl:
      if (a.low >= 0 && b.low >= 0 && b.high < 62) {
        return bounded(0, static_cast<__int128>(a.high) << b.high);
      }
      return kAnything;
    case Op::kWithin:
      return b.low < 0 ? hull(a, b) : Interval{0, b.high};
    case Op::kWhere:
      return hull(x[1], x[2]);
    default:
      return kAnything;
  }
}

}  // namespace

std::vector<Interval> intervals(const Graph& graph, const Lengths& lengths, std::span<const Interval> buffers,
                                std::span<const Interval> scalars) {
  std::vector<Interval> result(graph.nodes().size());
  for (NodeId id = 0; id < static_cast<NodeId>(result.size()); ++id) {
    const Node& node = graph[id];
    if (node.type == Type::kBool) {
      result[id] = {0, 1};
      continue;
    }
    if (node.type == Type::kFloat) continue;
    switch (node.op) {
      case Op::kConstant:
        result[id] = {node.payload, node.payload};
        break;
      case Op::kInput: {
        const int64_t length =
            std::array{int64_t{1}, lengths.b, lengths.h, lengths.q, lengths.kv, int64_t{1}}[node.payload];
        result[id] = {0, std::max<int64_t>(length - 1, 0)};
        break;
      }
      case Op::kScalar:
        if (!scalars.empty()) result[id] = scalars[node.payload];
        break;
      case Op::kLoad:
        if (!buffers.empty()) result[id] = buffers[node.payload];
        break;
      case Op::kToInt:
        if (graph.type(node.operands[0]) == Type::kBool) result[id] = {0, 1};
        break;
      case Op::kAxis:
        result[id] = {0, graph.axes()[static_cast<size_t>(node.payload)] - 1};
        break;
      case Op::kSum: {
        // For some of the summands too.
        const int64_t extent = graph.values(set_of_axis(graph[node.operands[0]].payload));
        result[id] = hull({0, 0}, product(result[node.operands[1]], {extent, extent}));
        break;
      }
      case Op::kProd:
        result[id] = power_of(result[node.operands[1]], graph.values(set_of_axis(graph[node.operands[0]].payload)));
        break;
      case Op::kAmax:
      case Op::kAmin:
        result[id] = result[node.operands[1]];
        break;
      default: {
        Interval x[kMaxArity];
        for (size_t i = 0; i < node.operands.size(); ++i) x[i] = result[node.operands[i]];
        result[id] = interval_of(node.op, x);
      }
    }
  }
  return result;
}

std::vector<bool> needs_int64(const Graph& graph, std::span<const Interval> intervals) {
  std::vector<bool> result(graph.nodes().size(), false);
  for (NodeId id = 0; id < static_cast<NodeId>(result.size()); ++id) {
    const Node& node = graph[id];
    if (node.type != Type::kInt) continue;
    result[id] = !intervals[id].fits_int32();
    if (node.op == Op::kLoad) continue;
    for (const NodeId operand : node.operands) {
      const Type type = graph.type(operand);
      if (type == Type::kFloat || (type == Type::kInt && result[operand])) result[id] = true;
    }
  }
  return result;
}

VariableSet Dependence::on() const {
  VariableSet set = rest;
  for (int v = 0; v < kVariables; ++v) {
    if (coefficient[v] != 0) set |= set_of(static_cast<Variable>(v));
  }
  return set;
}

bool Dependence::diagonal() const {
  return coefficient[kVarQ] == -coefficient[kVarKv] && ((rest & kPairSet) == 0 || rest_diagonal);
}

namespace {

// Coefficients beyond this are not followed: products of them and of lengths stay within 64 bits.
constexpr int64_t kLargestCoefficient = int64_t{1} << 31;

// Nothing but what the operands depend on.
Dependence opaque(std::span<const Dependence> operands) {
  Dependence result;
  for (const Dependence& d : operands) {
    result.rest |= d.on();
    result.rest_diagonal = result.rest_diagonal && d.diagonal();
  }
  return result;
}

// a + factor * b
std::optional<Dependence> combined(const Dependence& a, const Dependence& b, int64_t factor) {
  Dependence result;
  result.rest = a.rest | (factor == 0 ? 0 : b.rest);
  result.rest_diagonal = a.rest_diagonal && b.rest_diagonal;
  for (int v = 0; v < kVariables; ++v) {
    const __int128 c = static_cast<__int128>(a.coefficient[v]) + static_cast<__int128>(factor) * b.coefficient[v];
    if (c > kLargestCoefficient || c < -kLargestCoefficient) return std::nullopt;
    result.coefficient[v] = static_cast<int64_t>(c);
  }
  return result;
}

Dependence variable(Input input) {
  Dependence result;
  switch (input) {
    case Input::kB:
      result.coefficient[kVarB] = 1;
      break;
    case Input::kH:
      result.coefficient[kVarH] = 1;
      break;
    case Input::kQ:
      result.coefficient[kVarQ] = 1;
      break;
    case Input::kKv:
      result.coefficient[kVarKv] = 1;
      break;
    default:
      result.rest = set_of(kVarLane) | kPairSet;
      result.rest_diagonal = false;
  }
  return result;
}

}  // namespace

std::vector<Dependence> dependences(const Graph& graph) {
  std::vector<Dependence> result(graph.nodes().size());
  for (NodeId id = 0; id < static_cast<NodeId>(result.size()); ++id) {
    const Node& node = graph[id];
    if (node.op == Op::kInput) {
      result[id] = variable(static_cast<Input>(node.payload));
      continue;
    }
    if (node.op == Op::kAxis) {
      result[id].rest = set_of(kVarAxis);
      continue;
    }
    std::vector<Dependence> x;
    for (const NodeId operand : node.operands) x.push_back(result[operand]);
    std::optional<Dependence> linear;
    if (node.type == Type::kInt) {
      if (node.op == Op::kAdd) linear = combined(x[0], x[1], 1);
      if (node.op == Op::kSub) linear = combined(x[0], x[1], -1);
      if (node.op == Op::kNeg) linear = combined({}, x[0], -1);
      if (node.op == Op::kMul && graph.is_constant(node.operands[1])) {
        linear = combined({}, x[0], graph.value(node.operands[1]).i);
      } else if (node.op == Op::kMul && graph.is_constant(node.operands[0])) {
        linear = combined({}, x[1], graph.value(node.operands[0]).i);
      }
    }
    result[id] = linear.value_or(opaque(x));
    if (graph.open_axes(id) == 0) result[id].rest &= static_cast<VariableSet>(~set_of(kVarAxis));
    // Comparing integers is asking for the sign of their difference.
    if (node.type == Type::kBool && x.size() == 2 && graph.type(node.operands[0]) == Type::kInt) {
      const auto difference = combined(x[0], x[1], -1);
      result[id].rest_diagonal = difference && difference->diagonal();
    }
  }
  return result;
}

std::optional<BatchGroups> batch_groups(const Graph& graph, std::span<const NodeId> indices,
                                        std::span<const Dependence> dependences) {
  std::optional<BatchGroups> found;
  for (const NodeId index : indices) {
    if ((dependences[index].on() & set_of(kVarB)) == 0) continue;
    const Node& node = graph[index];
    if (node.op != Op::kFloorDiv && node.op != Op::kMod) return std::nullopt;
    const Node &b = graph[node.operands[0]], &divisor = graph[node.operands[1]];
    if (b.op != Op::kInput || static_cast<Input>(b.payload) != Input::kB) return std::nullopt;
    if (divisor.op != Op::kConstant && divisor.op != Op::kScalar) return std::nullopt;
    const BatchGroups groups{node.op, divisor.op == Op::kScalar, divisor.payload};
    if (found && *found != groups) return std::nullopt;
    found = groups;
  }
  return found;
}

std::vector<Reads> reads(const Graph& graph) {
  const auto dependence = dependences(graph);
  std::vector<Reads> result(graph.nodes().size(), Reads::kRow);
  std::vector<bool> late(graph.nodes().size(), false);
  for (size_t id = 0; id < result.size(); ++id) {
    const Node& node = graph.nodes()[id];
    late[id] = node.op == Op::kAxis;
    for (const NodeId operand : node.operands) late[id] = late[id] || late[operand];
    if (node.op != Op::kLoad) continue;
    VariableSet on = 0;
    bool diagonal = true;
    for (const NodeId index : node.operands) {
      on |= dependence[index].on();
      diagonal = diagonal && dependence[index].diagonal();
    }
    const bool keys = (on & set_of(kVarKv)) != 0, rows = (on & set_of(kVarQ)) != 0;
    result[id] = late[id] || (on & set_of(kVarLane)) != 0 ? Reads::kLater
                 : !keys                                  ? Reads::kRow
                 : !rows                                  ? Reads::kKey
                 : diagonal                               ? Reads::kDiagonal
                                                          : Reads::kPair;
    late[id] = late[id] || result[id] == Reads::kPair;
  }
  return result;
}

std::vector<NodeId> pair_reads(const Graph& graph) {
  std::vector<NodeId> result;
  if (graph.kind() == Kind::kMaskMod) return result;
  const auto kinds = reads(graph);
  const auto dependence = dependences(graph);
  for (const NodeId id : reachable(graph)) {
    if (graph[id].op != Op::kLoad || graph[id].type == Type::kBool) continue;
    if (kinds[id] != Reads::kPair && kinds[id] != Reads::kLater) continue;
    const VariableSet on = dependence[id].on();
    const bool known = (on & (set_of(kVarLane) | set_of(kVarAxis))) == 0;
    if (known && (on & kPairSet) == kPairSet) result.push_back(id);
  }
  return result;
}

std::vector<Dimension> indexed_by(const Graph& graph, int buffer) {
  const auto reads_it = [&](NodeId id) { return graph[id].op == Op::kLoad && graph[id].payload == buffer; };
  std::vector<Dimension> found;
  for (const NodeId id : reachable(graph)) {
    const Node& node = graph[id];
    for (size_t d = 0; d < node.operands.size(); ++d) {
      if (!reads_it(node.operands[d])) continue;
      if (node.op != Op::kLoad || node.payload == buffer) return {};
      found.push_back({static_cast<int>(node.payload), d});
    }
  }
  for (const Contribution& c : graph.contributions()) {
    if (reads_it(c.value)) return {};
    for (size_t d = 0; d < c.indices.size(); ++d) {
      if (reads_it(c.indices[d])) found.push_back({c.buffer, d});
    }
  }
  return found;
}

std::optional<BatchGroups> batch_groups(const Graph& graph) {
  const auto dependence = dependences(graph);
  for (const NodeId id : pair_reads(graph)) {
    if (const auto found = batch_groups(graph, graph[id].operands, dependence)) return found;
  }
  return std::nullopt;
}

bool reads_by_groups(const Graph& graph, NodeId load) {
  const auto groups = batch_groups(graph);
  return groups && batch_groups(graph, graph[load].operands, dependences(graph)) == groups;
}

bool allows_between_corners(const Graph& mask_mod) {
  const auto dependence = dependences(mask_mod);
  constexpr VariableSet kUneven = kPairSet | set_of(kVarLane) | set_of(kVarAxis);
  const auto integer = [&](NodeId id) { return mask_mod[id].type == Type::kInt; };
  const auto even = [&](NodeId id) { return integer(id) && (dependence[id].rest & kUneven) == 0; };
  const auto constant = [&](NodeId id) { return even(id) && (dependence[id].on() & kPairSet) == 0; };
  // |x| below a bound holds between the corners, too.
  const auto below = [&](NodeId low, NodeId high) {
    const Node& node = mask_mod[low];
    return node.op == Op::kAbs && even(node.operands[0]) && constant(high);
  };
  std::vector<NodeId> open{mask_mod.result()};
  while (!open.empty()) {
    const NodeId id = open.back();
    const Node& node = mask_mod[id];
    open.pop_back();
    const auto operand = [&](size_t i) { return node.operands[i]; };
    switch (node.op) {
      case Op::kAnd:
        if (node.type != Type::kBool) return false;
        open.insert(open.end(), node.operands.begin(), node.operands.end());
        continue;
      case Op::kEq:
      case Op::kLt:
      case Op::kLe:
      case Op::kGt:
      case Op::kGe: {
        const bool rising = node.op == Op::kLt || node.op == Op::kLe;
        if (even(operand(0)) && even(operand(1))) continue;
        if (node.op != Op::kEq && (rising ? below(operand(0), operand(1)) : below(operand(1), operand(0)))) continue;
        return false;
      }
      default:
        // The same for all pairs of a head.
        if ((dependence[id].on() & kUneven) != 0) return false;
    }
  }
  return true;
}

VariableSet determined(std::span<const NodeId> indices, std::span<const Dependence> dependences,
                       std::span<const Interval> intervals) {
  VariableSet known = 0;
  for (bool grown = true; grown;) {
    grown = false;
    for (const NodeId index : indices) {
      const Dependence& d = dependences[index];
      // An index that can be negative wraps around to where another one may be.
      if (!intervals[index].nonnegative() || (d.rest & ~known) != 0) continue;
      VariableSet open = 0;
      for (int v = 0; v < kVariables; ++v) {
        if (d.coefficient[v] != 0) open |= set_of(static_cast<Variable>(v)) & ~known;
      }
      if (open != 0 && (open & (open - 1)) == 0) {
        known |= open;
        grown = true;
      }
    }
  }
  return known;
}

}  // namespace fusegrad::score_mod
