#include "score_mod/ranges.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace fusegrad::score_mod {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
// Sums of two bounds stay within 64 bits.
constexpr int64_t kLargest = int64_t{1} << 60;
// Floats beyond this are taken as infinite: the bounds of a few operations on others do not overflow.
constexpr double kLargestFloat = 1e30;
// A float32 product contracted with a sum, or the device's quotients and roots.
constexpr double kRounding = 0x1p-20, kSmallest = 1e-35;
// The device's functions, and those of libm or Sleef: neither is monotone to the last place.
constexpr double kFunction = 1e-4, kFunctionZero = 1e-6;

int64_t magnitude(Interval x) { return x.low == kLeast ? kMost : std::max({x.high, -x.low, int64_t{1}}); }

bool increases(Op op) {
  switch (op) {
    case Op::kExp:
    case Op::kExp2:
    case Op::kExpm1:
    case Op::kTanh:
    case Op::kSigmoid:
    case Op::kErf:
    case Op::kAtan:
      return true;
    default:
      return false;
  }
}

}  // namespace

Range Ranges::constant(const Value& value) {
  if (value.type == Type::kFloat && !(std::abs(value.f) <= kLargestFloat)) return {};
  const NodeId node = graph_.constant(value);
  return {node, node, {value.i, value.i}};
}

NodeId Ranges::only(NodeId condition, NodeId x) {
  return graph_.apply(Op::kWhere, {condition, x, graph_.constant(std::numeric_limits<double>::quiet_NaN())});
}

Range Ranges::floats(NodeId low, NodeId high) {
  const NodeId finite = both(graph_.apply(Op::kGe, {low, graph_.constant(-kLargestFloat)}),
                             graph_.apply(Op::kLe, {high, graph_.constant(kLargestFloat)}));
  return {only(finite, low), only(finite, high), {}};
}

Range Ranges::widened(const Range& x, double relative, double absolute) {
  const auto margin = [&](NodeId bound) {
    return graph_.apply(Op::kAdd, {graph_.apply(Op::kMul, {graph_.apply(Op::kAbs, {bound}), graph_.constant(relative)}),
                                   graph_.constant(absolute)});
  };
  return {graph_.apply(Op::kSub, {x.low, margin(x.low)}), graph_.apply(Op::kAdd, {x.high, margin(x.high)}), {}};
}

// Within the limits from here on, or the rectangle is wild.
Range Ranges::tame(const Range& x, int64_t limit) {
  if (x.known.low >= -limit && x.known.high <= limit) return x;
  const NodeId low = integer(-limit), high = integer(limit);
  const auto within = [&](NodeId bound) { return graph_.apply(Op::kClamp, {bound, low, high}); };
  add_wild(graph_.apply(Op::kLt, {x.low, low}));
  add_wild(graph_.apply(Op::kGt, {x.high, high}));
  return {within(x.low), within(x.high), {std::max(x.known.low, -limit), std::min(x.known.high, limit)}};
}

Range Ranges::apply(Op op, Type operand, Type result, Interval value, std::span<const Range> x) {
  if (op == Op::kDetach) return x[0];
  if (operand != Type::kFloat && result != Type::kFloat && std::ranges::all_of(x, &Range::point)) {
    // The value itself, which may wrap.
    std::vector<NodeId> operands;
    for (const Range& r : x) operands.push_back(r.low);
    return {graph_.apply(op, operands), graph_.apply(op, operands), value};
  }
  if (op == Op::kToFloat || op == Op::kToInt || op == Op::kToBool) return cast(op, operand, x[0]);
  if (op == Op::kWhere) return where(result, x);
  if (primitive(op).rule == Rule::kCompare) return comparison(op, x);
  if (result == Type::kBool) return booleans(op, x);
  if (std::ranges::any_of(x, &Range::nothing)) return {};
  return result == Type::kInt ? integers(op, x) : of_floats(op, x);
}

Range Ranges::booleans(Op op, std::span<const Range> x) {
  const auto low = [&](int i) { return x[i].nothing() ? graph_.constant(false) : x[i].low; };
  const auto high = [&](int i) { return x[i].nothing() ? graph_.constant(true) : x[i].high; };
  switch (op) {
    case Op::kAnd:
    case Op::kOr:
      return {graph_.apply(op, {low(0), low(1)}), graph_.apply(op, {high(0), high(1)}), {}};
    case Op::kNot:
      return {negate(high(0)), negate(low(0)), {}};
    case Op::kXor: {
      // Known where both are.
      const NodeId known = both(graph_.apply(Op::kEq, {low(0), high(0)}), graph_.apply(Op::kEq, {low(1), high(1)}));
      const NodeId value = graph_.apply(Op::kXor, {low(0), low(1)});
      return {both(known, value), graph_.apply(Op::kOr, {negate(known), value}), {}};
    }
    default:
      return {};
  }
}

Range Ranges::comparison(Op op, std::span<const Range> x) {
  const Range &a = x[0], &b = x[1];
  if (a.nothing() || b.nothing()) return {};
  const auto compare = [&](Op how, NodeId l, NodeId r) { return graph_.apply(how, {l, r}); };
  // A comparison with NaN is false: `surely` then says no, and so does `never`.
  const auto made = [&](NodeId surely, NodeId never) { return Range{surely, negate(never), {}}; };
  const NodeId apart = graph_.apply(Op::kOr, {compare(Op::kLt, a.high, b.low), compare(Op::kLt, b.high, a.low)});
  const NodeId same = both(compare(Op::kEq, a.low, b.high), compare(Op::kEq, a.high, b.low));
  switch (op) {
    case Op::kLt:
      return made(compare(Op::kLt, a.high, b.low), compare(Op::kGe, a.low, b.high));
    case Op::kLe:
      return made(compare(Op::kLe, a.high, b.low), compare(Op::kGt, a.low, b.high));
    case Op::kGt:
      return made(compare(Op::kGt, a.low, b.high), compare(Op::kLe, a.high, b.low));
    case Op::kGe:
      return made(compare(Op::kGe, a.low, b.high), compare(Op::kLt, a.high, b.low));
    case Op::kEq:
      return made(same, apart);
    default:
      return made(apart, same);
  }
}

Range Ranges::where(Type type, std::span<const Range> x) {
  const Range &c = x[0], &a = x[1], &b = x[2];
  if (type == Type::kBool) {
    // (c and a) or (not c and b)
    const std::array if_true{c, a};
    const std::array negated{c};
    const std::array if_false{booleans(Op::kNot, negated), b};
    const std::array either{booleans(Op::kAnd, if_true), booleans(Op::kAnd, if_false)};
    return booleans(Op::kOr, either);
  }
  if (a.nothing() || b.nothing()) return {};
  Range result{min(a.low, b.low),
               max(a.high, b.high),
               {std::min(a.known.low, b.known.low), std::max(a.known.high, b.known.high)}};
  if (c.nothing()) return result;
  const auto chosen = [&](NodeId if_true, NodeId if_false, NodeId open) {
    return graph_.apply(Op::kWhere, {c.low, if_true, graph_.apply(Op::kWhere, {c.high, open, if_false})});
  };
  result.low = chosen(a.low, b.low, result.low);
  result.high = chosen(a.high, b.high, result.high);
  return result;
}

Range Ranges::cast(Op op, Type operand, const Range& x) {
  if (x.nothing()) return {};
  const auto each = [&](Interval known) { return Range{graph_.apply(op, {x.low}), graph_.apply(op, {x.high}), known}; };
  if (op == Op::kToFloat) return operand == Type::kFloat ? x : each({});
  if (op == Op::kToInt) {
    if (operand != Type::kFloat) return operand == Type::kBool ? each({0, 1}) : x;
    const NodeId known = graph_.apply(Op::kEq, {x.low, x.low});  // not NaN
    return {graph_.apply(Op::kWhere, {known, graph_.apply(op, {x.low}), integer(kLeast)}),
            graph_.apply(Op::kWhere, {known, graph_.apply(op, {x.high}), integer(kMost)}),
            {}};
  }
  if (operand == Type::kBool) return x;
  const NodeId zero = operand == Type::kInt ? integer(0) : graph_.constant(0.0);
  const std::array operands{x, Range{zero, zero, {0, 0}}};
  return comparison(Op::kNe, operands);
}

Range Ranges::reduce(Op op, Type type, const Range& x, int64_t extent) {
  if (x.nothing() || type == Type::kBool) return {};
  if (op == Op::kAmax || op == Op::kAmin) return x;
  if (op != Op::kSum || type != Type::kInt) return {};
  return product(x, constant({Type::kInt, 0, extent}), true);
}

Range Ranges::product(const Range& a, const Range& b, bool integers) {
  Range x = a, y = b;
  Interval known;
  if (integers) {
    // The one that is known the better sets the other's limit.
    if (magnitude(x.known) > magnitude(y.known)) std::swap(x, y);
    x = tame(x, int64_t{1} << 30);
    y = tame(y, kLargest / std::max(magnitude(x.known), int64_t{1} << 20));
    const int64_t corners[] = {x.known.low * y.known.low, x.known.low * y.known.high, x.known.high * y.known.low,
                               x.known.high * y.known.high};
    known = {*std::min_element(corners, corners + 4), *std::max_element(corners, corners + 4)};
    if (x.known.low >= 0 && y.known.low >= 0) {
      return {graph_.apply(Op::kMul, {x.low, y.low}), graph_.apply(Op::kMul, {x.high, y.high}), known};
    }
  }
  NodeId low = -1, high = -1;
  for (const NodeId l : {x.low, x.high}) {
    for (const NodeId r : {y.low, y.high}) {
      const NodeId corner = graph_.apply(Op::kMul, {l, r});
      low = low < 0 ? corner : min(low, corner);
      high = high < 0 ? corner : max(high, corner);
    }
  }
  return {low, high, known};
}

Range Ranges::quotient(Op op, const Range& x, const Range& y) {
  Range a = tame(x, kLargest), b = y;
  if (b.known.low < 1) {
    add_wild(graph_.apply(Op::kLt, {b.low, integer(1)}));
    b.low = max(b.low, integer(1));
    b.high = y.point() ? b.low : max(b.high, integer(1));
    b.known = {1, std::max<int64_t>(b.known.high, 1)};
  }
  const auto divide = [&](NodeId l, NodeId r) { return graph_.apply(Op::kFloorDiv, {l, r}); };
  if (op == Op::kFloorDiv) {
    const Interval known{std::min<int64_t>(a.known.low, 0), std::max<int64_t>(a.known.high, 0)};
    return {min(divide(a.low, b.low), divide(a.low, b.high)), max(divide(a.high, b.low), divide(a.high, b.high)),
            known};
  }
  const Interval known{0, a.known.low >= 0 ? std::min(a.known.high, b.known.high - 1) : b.known.high - 1};
  const NodeId most = graph_.apply(Op::kSub, {b.high, integer(1)});
  Range result{integer(0), a.known.low >= 0 ? min(a.high, most) : most, known};
  if (!b.point()) return result;
  // Within one period the remainder grows with the value.
  const NodeId same = graph_.apply(Op::kEq, {divide(a.low, b.low), divide(a.high, b.low)});
  const auto remainder = [&](NodeId l) { return graph_.apply(Op::kMod, {l, b.low}); };
  result.low = graph_.apply(Op::kWhere, {same, remainder(a.low), result.low});
  result.high = graph_.apply(Op::kWhere, {same, remainder(a.high), result.high});
  return result;
}

// Exact where both operands are one number; else what signs and sizes say.
Range Ranges::bits(Op op, const Range& a, const Range& b) {
  const NodeId known = both(graph_.apply(Op::kEq, {a.low, a.high}), graph_.apply(Op::kEq, {b.low, b.high}));
  const NodeId value = graph_.apply(op, {a.low, b.low});
  Range other{integer(kLeast), integer(kMost), {}};
  const bool natural = a.known.low >= 0 && b.known.low >= 0;
  if (op == Op::kAnd && natural) {
    other = {integer(0), min(a.high, b.high), {0, std::min(a.known.high, b.known.high)}};
  } else if ((op == Op::kOr || op == Op::kXor) && natural && std::max(a.known.high, b.known.high) <= kLargest) {
    other = {op == Op::kOr ? max(a.low, b.low) : integer(0),
             graph_.apply(Op::kAdd, {a.high, b.high}),
             {0, a.known.high + b.known.high}};
  } else if (op == Op::kShr && b.known.low >= 0) {
    const auto shifted = [&](NodeId l, NodeId r) { return graph_.apply(op, {l, r}); };
    return {min(shifted(a.low, b.low), shifted(a.low, b.high)),
            max(shifted(a.high, b.low), shifted(a.high, b.high)),
            {std::min<int64_t>(a.known.low, 0), std::max<int64_t>(a.known.high, 0)}};
  }
  return {graph_.apply(Op::kWhere, {known, value, other.low}), graph_.apply(Op::kWhere, {known, value, other.high}),
          other.known};
}

Range Ranges::integers(Op op, std::span<const Range> x) {
  if (x[0].nothing()) return {};
  const auto each = [&](auto low, auto high, Interval known) { return Range{low, high, known}; };
  const auto node = [&](Op o, std::initializer_list<NodeId> operands) { return graph_.apply(o, operands); };
  const bool sum = op == Op::kAdd || op == Op::kSub || op == Op::kNeg || op == Op::kAbs;
  const Range a = sum ? tame(x[0], kLargest) : x[0];
  const Range b = x.size() < 2 ? Range{} : sum ? tame(x[1], kLargest) : x[1];
  const Interval k = a.known, l = b.known;
  switch (op) {
    case Op::kAdd:
      return each(node(op, {a.low, b.low}), node(op, {a.high, b.high}), {k.low + l.low, k.high + l.high});
    case Op::kSub:
      return each(node(op, {a.low, b.high}), node(op, {a.high, b.low}), {k.low - l.high, k.high - l.low});
    case Op::kNeg:
      return each(node(op, {a.high}), node(op, {a.low}), {-k.high, -k.low});
    case Op::kAbs:
      return each(max(max(a.low, node(Op::kNeg, {a.high})), integer(0)), max(a.high, node(Op::kNeg, {a.low})),
                  {std::max({k.low, -k.high, int64_t{0}}), std::max(k.high, -k.low)});
    case Op::kSquare: {
      const std::array operand{tame(a, int64_t{1} << 30)};
      const Range size = integers(Op::kAbs, operand);
      return each(node(op, {size.low}), node(op, {size.high}),
                  {size.known.low * size.known.low, size.known.high * size.known.high});
    }
    case Op::kMul:
      return product(a, b, true);
    case Op::kFloorDiv:
    case Op::kMod:
      return quotient(op, a, b);
    case Op::kSign:
      return each(node(op, {a.low}), node(op, {a.high}), {-1, 1});
    case Op::kRelu:
      return each(node(op, {a.low}), node(op, {a.high}), {std::max<int64_t>(k.low, 0), std::max<int64_t>(k.high, 0)});
    case Op::kMin:
      return each(min(a.low, b.low), min(a.high, b.high), {std::min(k.low, l.low), std::min(k.high, l.high)});
    case Op::kMax:
      return each(max(a.low, b.low), max(a.high, b.high), {std::max(k.low, l.low), std::max(k.high, l.high)});
    case Op::kClamp: {
      const std::array first{a, b};
      const std::array second{integers(Op::kMax, first), x[2]};
      return integers(Op::kMin, second);
    }
    case Op::kFloor:
    case Op::kCeil:
    case Op::kTrunc:
    case Op::kRound:
      return a;
    case Op::kNot:
      return each(node(op, {a.high}), node(op, {a.low}), {-1 - k.high, -1 - k.low});
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
    case Op::kShl:
    case Op::kShr:
    case Op::kPow:
      return bits(op, a, b);
    default:
      return {};
  }
}

Range Ranges::of_floats(Op op, std::span<const Range> x) {
  const Range &a = x[0], b = x.size() < 2 ? Range{} : x[1];
  const auto node = [&](std::initializer_list<NodeId> operands) { return graph_.apply(op, operands); };
  const auto rounded = [&](const Range& r) {
    const Range wide = widened(r, kRounding, kSmallest);
    return floats(wide.low, wide.high);
  };
  const NodeId zero = graph_.constant(0.0);
  const auto size_of = [&](const Range& r) {
    const auto negative = [&](NodeId bound) { return graph_.apply(Op::kNeg, {bound}); };
    return Range{max(max(r.low, negative(r.high)), zero), max(r.high, negative(r.low)), {}};
  };
  switch (op) {
    case Op::kAdd:
      return floats(node({a.low, b.low}), node({a.high, b.high}));
    case Op::kSub:
      return floats(node({a.low, b.high}), node({a.high, b.low}));
    case Op::kMul:
      return rounded(product(a, b, false));
    case Op::kDiv: {
      const NodeId apart =
          graph_.apply(Op::kOr, {graph_.apply(Op::kGt, {b.low, zero}), graph_.apply(Op::kLt, {b.high, zero})});
      const NodeId corners[] = {node({a.low, b.low}), node({a.low, b.high}), node({a.high, b.low}),
                                node({a.high, b.high})};
      return rounded({only(apart, min(min(corners[0], corners[1]), min(corners[2], corners[3]))),
                      only(apart, max(max(corners[0], corners[1]), max(corners[2], corners[3]))),
                      {}});
    }
    case Op::kNeg:
      return {node({a.high}), node({a.low}), {}};
    case Op::kAbs:
      return size_of(a);
    case Op::kSquare: {
      const Range size = size_of(a);
      return rounded({node({size.low}), node({size.high}), {}});
    }
    case Op::kHypot: {
      const Range s = size_of(a), t = size_of(b);
      return rounded({node({s.low, t.low}), node({s.high, t.high}), {}});
    }
    case Op::kSqrt: {
      const NodeId real = graph_.apply(Op::kGe, {a.low, zero});
      return rounded({only(real, node({a.low})), only(real, node({a.high})), {}});
    }
    case Op::kMin:
    case Op::kMax:
      return {node({a.low, b.low}), node({a.high, b.high}), {}};
    case Op::kClamp:
      return {node({a.low, b.low, x[2].low}), node({a.high, b.high, x[2].high}), {}};
    case Op::kFloor:
    case Op::kCeil:
    case Op::kTrunc:
    case Op::kRound:
    case Op::kRelu:
      return {node({a.low}), node({a.high}), {}};
    default: {
      if (!increases(op)) return {};
      const Range wide = widened({node({a.low}), node({a.high}), {}}, kFunction, kFunctionZero);
      return floats(wide.low, wide.high);
    }
  }
}

}  // namespace fusegrad::score_mod
