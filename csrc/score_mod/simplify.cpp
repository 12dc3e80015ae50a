#include "score_mod/simplify.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace fusegrad::score_mod {
namespace {

// A power of two whose reciprocal float32 holds exactly: dividing by it and multiplying by the reciprocal round alike.
bool has_exact_reciprocal(double value) {
  int exponent = 0;
  return std::abs(std::frexp(value, &exponent)) == 0.5 && std::abs(exponent) < 120;
}

// The comparison with its operands exchanged.
Op mirrored(Op op) {
  switch (op) {
    case Op::kLt:
      return Op::kGt;
    case Op::kLe:
      return Op::kGe;
    case Op::kGt:
      return Op::kLt;
    case Op::kGe:
      return Op::kLe;
    default:
      return op;
  }
}

// What is true of integers when the comparison is not.
std::optional<Op> negated(Op op) {
  switch (op) {
    case Op::kEq:
      return Op::kNe;
    case Op::kNe:
      return Op::kEq;
    case Op::kLt:
      return Op::kGe;
    case Op::kLe:
      return Op::kGt;
    case Op::kGt:
      return Op::kLe;
    case Op::kGe:
      return Op::kLt;
    default:
      return std::nullopt;
  }
}

// Builds a graph node by node, each in its simplest form.
class Rewriter {
 public:
  explicit Rewriter(Graph& graph) : g_(graph) {}

  // The graph's apply, then the first rule that fits. Rules build smaller nodes or the same ones in a fixed order, so
  // this ends.
  NodeId apply(Op op, std::vector<NodeId> operands) {
    const NodeId id = g_.apply(op, std::move(operands));
    if (!is_primitive(g_[id].op)) return id;
    return simplified(id).value_or(id);
  }

  // The axis of a reduction goes by its extent and by how many reductions lie in one another below it: what is the same
  // but for the names of axes becomes one node.
  NodeId reduce(Op op, NodeId axis, NodeId value) {
    const auto from = static_cast<int>(g_[axis].payload);
    const int64_t extent = g_.axes()[static_cast<size_t>(from)];
    if ((g_.open_axes(value) & set_of_axis(from)) == 0) {
      const NodeId number =
          g_.type(value) == Type::kFloat ? g_.constant(static_cast<double>(extent)) : g_.constant(extent);
      if (op == Op::kSum) return apply(Op::kMul, {value, number});
      if (op == Op::kProd) return apply(Op::kPow, {value, number});
      return g_.type(value) == Type::kBool ? apply(Op::kToInt, {value}) : value;
    }
    const auto place = std::pair(extent, height(value));
    auto found = axes_.find(place);
    if (found == axes_.end() && static_cast<int>(g_.axes().size()) < kMaxAxes) {
      found = axes_.emplace(place, g_.add_axis(extent)).first;
    }
    if (found == axes_.end()) return g_.reduce(op, axis, value);
    const NodeId own = g_.axis(found->second);
    return g_.reduce(op, own, substitute(g_, value, {{axis, own}}));
  }

 private:
  int height(NodeId id) {
    for (auto i = static_cast<NodeId>(height_.size()); i <= id; ++i) {
      int most = 0;
      for (const NodeId operand : g_[i].operands) most = std::max(most, height_[static_cast<size_t>(operand)]);
      height_.push_back(most + (is_reduction(g_[i].op) ? 1 : 0));
    }
    return height_[static_cast<size_t>(id)];
  }

  bool is(NodeId id, Op op) const { return g_[id].op == op; }
  NodeId operand(NodeId id, int i) const { return g_[id].operands[i]; }
  bool is_float(NodeId id) const { return g_.type(id) == Type::kFloat; }
  bool is_bool(NodeId id) const { return g_.type(id) == Type::kBool; }
  bool equals(NodeId id, int64_t value) const { return g_.is_constant(id) && !is_float(id) && g_.value(id).i == value; }
  // Bitwise, so that 0.0 and -0.0 differ.
  bool equals(NodeId id, double value) const {
    if (!g_.is_constant(id) || !is_float(id)) return false;
    const double x = g_.value(id).f;
    return x == value && std::signbit(x) == std::signbit(value);
  }
  bool is_number(NodeId id, int value) const {
    return equals(id, static_cast<int64_t>(value)) || equals(id, static_cast<double>(value));
  }

  std::optional<NodeId> simplified(NodeId id) {
    const Node node = g_[id];  // a copy: rules grow the graph
    const auto& x = node.operands;
    if (std::all_of(x.begin(), x.end(), [&](NodeId i) { return g_.is_constant(i); })) {
      Value values[kMaxArity];
      for (size_t i = 0; i < x.size(); ++i) values[i] = g_.value(x[i]);
      const Value folded = primitive(node.op).fold(values);
      if (node.op == Op::kWithin && folded.i == values[1].i) return std::nullopt;  // an error where it runs
      return g_.constant(folded);
    }
    if (x.size() == 1) return unary(node.op, x[0]);
    if (node.op == Op::kWhere) return where(x[0], x[1], x[2]);
    if (x.size() == 2) return binary(node.op, x[0], x[1]);
    return std::nullopt;
  }

  std::optional<NodeId> unary(Op op, NodeId x) {
    switch (op) {
      case Op::kNeg:
        if (is(x, Op::kNeg)) return operand(x, 0);
        if (is(x, Op::kSub) && !is_float(x)) return apply(Op::kSub, {operand(x, 1), operand(x, 0)});
        break;
      case Op::kNot:
        if (is(x, Op::kNot)) return operand(x, 0);
        if (const auto opposite = negated(g_[x].op); opposite && !is_float(operand(x, 0))) {
          return apply(*opposite, {operand(x, 0), operand(x, 1)});
        }
        break;
      case Op::kAbs:
      case Op::kSquare:
        if (is(x, Op::kNeg) || is(x, Op::kAbs)) return apply(op, {operand(x, 0)});
        break;
      case Op::kRelu:
      case Op::kFloor:
      case Op::kCeil:
      case Op::kTrunc:
      case Op::kRound:
      case Op::kDetach:
        if (op == Op::kDetach && is(x, Op::kCustom)) return apply(op, {operand(x, 0)});
        if (is(x, op) || (!is_float(x) && op != Op::kRelu)) return x;
        break;
      case Op::kToFloat:
        if (is(x, Op::kToInt) && is_bool(operand(x, 0))) return apply(Op::kToFloat, {operand(x, 0)});
        break;
      case Op::kToBool:
        if ((is(x, Op::kToInt) || is(x, Op::kToFloat)) && !is_float(operand(x, 0))) {
          return apply(Op::kToBool, {operand(x, 0)});
        }
        break;
      default:
        break;
    }
    return std::nullopt;
  }

  std::optional<NodeId> binary(Op op, NodeId x, NodeId y) {
    const Rule rule = primitive(op).rule;
    const bool commutes = op == Op::kAdd || op == Op::kMul || rule == Rule::kCompare || rule == Rule::kBitwise;
    if (commutes && g_.is_constant(x)) return apply(mirrored(op), {y, x});
    if (rule == Rule::kCompare) return comparison(op, x, y);
    if (rule == Rule::kBitwise) return bitwise(op, x, y);
    return is_float(x) ? float_arithmetic(op, x, y) : integer_arithmetic(op, x, y);
  }

  std::optional<NodeId> float_arithmetic(Op op, NodeId x, NodeId y) {
    switch (op) {
      case Op::kAdd:
        if (equals(y, -0.0)) return x;
        if (is(y, Op::kNeg)) return apply(Op::kSub, {x, operand(y, 0)});
        if (is(x, Op::kNeg)) return apply(Op::kSub, {y, operand(x, 0)});
        break;
      case Op::kSub:
        if (equals(y, 0.0)) return x;
        if (is(y, Op::kNeg)) return apply(Op::kAdd, {x, operand(y, 0)});
        break;
      case Op::kMul:
        if (is_number(y, 1)) return x;
        if (is_number(y, -1)) return apply(Op::kNeg, {x});
        if (is(x, Op::kNeg) && is(y, Op::kNeg)) return apply(op, {operand(x, 0), operand(y, 0)});
        break;
      case Op::kDiv:
        if (is_number(y, 1)) return x;
        if (is_number(y, -1)) return apply(Op::kNeg, {x});
        if (g_.is_constant(y) && has_exact_reciprocal(g_.value(y).f)) {
          return apply(Op::kMul, {x, g_.constant(1 / g_.value(y).f)});
        }
        break;
      case Op::kPow:
        if (is_number(y, 1)) return x;
        if (is_number(y, 2)) return apply(Op::kSquare, {x});  // as PyTorch computes it
        break;
      case Op::kMin:
      case Op::kMax:
        if (x == y) return x;
        break;
      default:
        break;
    }
    return std::nullopt;
  }

  std::optional<NodeId> integer_arithmetic(Op op, NodeId x, NodeId y) {
    const bool constant = g_.is_constant(y);
    switch (op) {
      case Op::kAdd:
        if (is_number(y, 0)) return x;
        if (constant && is(x, Op::kAdd) && g_.is_constant(operand(x, 1))) {
          return apply(op, {operand(x, 0), apply(op, {operand(x, 1), y})});
        }
        if (is(y, Op::kNeg)) return apply(Op::kSub, {x, operand(y, 0)});
        if (is(x, Op::kNeg)) return apply(Op::kSub, {y, operand(x, 0)});
        break;
      case Op::kSub:
        if (x == y) return g_.constant(int64_t{0});
        if (constant) return apply(Op::kAdd, {x, apply(Op::kNeg, {y})});
        if (is(y, Op::kNeg)) return apply(Op::kAdd, {x, operand(y, 0)});
        break;
      case Op::kMul:
        if (is_number(y, 0)) return y;
        if (is_number(y, 1)) return x;
        if (is_number(y, -1)) return apply(Op::kNeg, {x});
        break;
      case Op::kFloorDiv:
      case Op::kPow:
        if (is_number(y, 1)) return x;
        break;
      case Op::kMod:
        if (is_number(y, 1)) return g_.constant(int64_t{0});
        break;
      case Op::kShl:
      case Op::kShr:
        if (is_number(y, 0)) return x;
        break;
      case Op::kMin:
      case Op::kMax:
        if (x == y) return x;
        break;
      default:
        break;
    }
    return std::nullopt;
  }

  std::optional<NodeId> comparison(Op op, NodeId x, NodeId y) {
    if (x == y && (op == Op::kLt || op == Op::kGt)) return g_.constant(false);
    if (x == y && !is_float(x)) return g_.constant(op != Op::kNe);
    // A bool compared as a number.
    if (is(x, Op::kToInt) && is_bool(operand(x, 0)) && (op == Op::kEq || op == Op::kNe)) {
      if (is_number(y, 0) || is_number(y, 1)) {
        const bool same = (op == Op::kEq) == is_number(y, 1);
        return same ? operand(x, 0) : apply(Op::kNot, {operand(x, 0)});
      }
    }
    return std::nullopt;
  }

  std::optional<NodeId> bitwise(Op op, NodeId x, NodeId y) {
    const bool zero = is_number(y, 0);
    const bool ones = is_bool(x) ? is_number(y, 1) : is_number(y, -1);
    switch (op) {
      case Op::kAnd:
        if (x == y || ones) return x;
        if (zero) return y;
        break;
      case Op::kOr:
        if (x == y || zero) return x;
        if (ones) return y;
        break;
      default:
        if (x == y) return is_bool(x) ? g_.constant(false) : g_.constant(int64_t{0});
        if (zero) return x;
        if (ones) return apply(Op::kNot, {x});
    }
    return std::nullopt;
  }

  std::optional<NodeId> where(NodeId c, NodeId x, NodeId y) {
    if (g_.is_constant(c)) return g_.value(c).i != 0 ? x : y;
    if (x == y) return x;
    if (is(c, Op::kNot)) return apply(Op::kWhere, {operand(c, 0), y, x});
    if (is(x, Op::kWhere) && operand(x, 0) == c) return apply(Op::kWhere, {c, operand(x, 1), y});
    if (is(y, Op::kWhere) && operand(y, 0) == c) return apply(Op::kWhere, {c, x, operand(y, 2)});
    if (is_bool(x)) {
      if (is_number(x, 1)) return apply(Op::kOr, {c, y});
      if (is_number(y, 0)) return apply(Op::kAnd, {c, x});
      if (is_number(x, 0)) return apply(Op::kAnd, {apply(Op::kNot, {c}), y});
      if (is_number(y, 1)) return apply(Op::kOr, {apply(Op::kNot, {c}), x});
    }
    return std::nullopt;
  }

  Graph& g_;
  std::vector<int> height_;  // of each node
  std::map<std::pair<int64_t, int>, int> axes_;
};

// A backward without the pairs that give nothing, or give it to a constant.
NodeId rewritten_backward(Graph& result, const std::vector<NodeId>& pairs) {
  std::vector<NodeId> kept;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    const bool zero = result.is_constant(pairs[i + 1]) && result.value(pairs[i + 1]).f == 0;
    if (!zero && !result.is_constant(pairs[i])) kept.insert(kept.end(), {pairs[i], pairs[i + 1]});
  }
  return result.backward(std::move(kept));
}

Graph rewritten(const Graph& graph) {
  Graph result = with_declarations_of(graph, graph.kind());
  Rewriter rewriter(result);
  std::vector<NodeId> image(graph.nodes().size(), -1);
  const std::vector<NodeId> order = reachable(graph);
  std::set<int64_t> keys;
  for (const NodeId id : order) {
    if (graph[id].op == Op::kCustom) keys.insert(graph[id].payload);
  }
  for (const NodeId id : order) {
    const Node& node = graph[id];
    std::vector<NodeId> operands;
    for (const NodeId operand : node.operands) operands.push_back(image[operand]);
    if (node.op == Op::kUpstream && !keys.contains(node.payload)) {
      image[id] = result.constant(0.0);
    } else if (node.op == Op::kBackward) {
      image[id] = rewritten_backward(result, operands);
    } else if (node.op == Op::kCustom && result[operands[1]].operands.empty()) {
      image[id] = rewriter.apply(Op::kDetach, {operands[0]});
    } else {
      image[id] = is_reduction(node.op)   ? rewriter.reduce(node.op, operands[0], operands[1])
                  : is_primitive(node.op) ? rewriter.apply(node.op, std::move(operands))
                                          : result.copy(graph, id, std::move(operands));
    }
  }
  if (graph.result() >= 0) result.set_result(image[graph.result()]);

  // Contributions to the same place become one, those that are always 0 none.
  std::vector<Contribution> merged;
  for (const Contribution& c : graph.contributions()) {
    Contribution mapped{c.buffer, {}, image[c.value]};
    for (const NodeId index : c.indices) mapped.indices.push_back(image[index]);
    const auto same = std::find_if(merged.begin(), merged.end(), [&](const Contribution& m) {
      return m.buffer == mapped.buffer && m.indices == mapped.indices;
    });
    if (same == merged.end()) {
      merged.push_back(std::move(mapped));
    } else {
      same->value = rewriter.apply(Op::kAdd, {same->value, mapped.value});
    }
  }
  for (Contribution& c : merged) {
    if (!result.is_constant(c.value) || result.value(c.value).f != 0) result.add_contribution(std::move(c));
  }
  return canonical(result);
}

}  // namespace

Graph simplify(const Graph& graph) {
  Graph current = rewritten(graph);
  // Every turn makes the graph smaller or moves it towards a fixed form; the bound is a precaution.
  for (int turn = 0; turn < 64; ++turn) {
    Graph next = rewritten(current);
    if (next == current) break;
    current = std::move(next);
  }
  return current;
}

}  // namespace fusegrad::score_mod
