// The derivative of every primitive: an overload of `derive` for each Id of primitives.def.
//
// A rule gets v, the gradient by the result, and says what each operand receives. `add_where` is for what an operand
// receives under a condition only: the value may then be infinite or NaN where the condition does not hold.
#pragma once

#include "score_mod/term.h"

namespace fusegrad::score_mod {

/// One node's place in the backward walk.
class Pullback {
 public:
  virtual Term x(int i) const = 0;  ///< operand i
  virtual Term y() const = 0;       ///< the result
  virtual Term v() const = 0;       ///< the gradient by the result
  virtual bool wants(int i) const = 0;
  virtual void add(int i, Term value) = 0;
  virtual void add_where(int i, Term condition, Term value) = 0;

 protected:
  ~Pullback() = default;
};

template <Op op>
struct Tag {};

#define FUSEGRAD_DERIVATIVE(Id) inline void derive(Tag<Op::k##Id>, [[maybe_unused]] Pullback& p)
#define FUSEGRAD_NO_DERIVATIVE(Id) \
  FUSEGRAD_DERIVATIVE(Id) {}

FUSEGRAD_DERIVATIVE(Add) {
  p.add(0, p.v());
  p.add(1, p.v());
}
FUSEGRAD_DERIVATIVE(Sub) {
  p.add(0, p.v());
  if (p.wants(1)) p.add(1, -p.v());
}
FUSEGRAD_DERIVATIVE(Mul) {
  if (p.wants(0)) p.add(0, p.v() * p.x(1));
  if (p.wants(1)) p.add(1, p.v() * p.x(0));
}
FUSEGRAD_DERIVATIVE(Div) {
  if (p.wants(0)) p.add(0, p.v() / p.x(1));
  if (p.wants(1)) p.add(1, -(p.v() * (p.y() / p.x(1))));
}
FUSEGRAD_NO_DERIVATIVE(FloorDiv)
FUSEGRAD_DERIVATIVE(Mod) {
  p.add(0, p.v());
  if (p.wants(1)) p.add(1, -(p.v() * apply(Op::kFloorDiv, p.x(0), p.x(1))));
}
FUSEGRAD_DERIVATIVE(Pow) {
  const Term a = p.x(0), b = p.x(1);
  if (p.wants(0)) {
    const Term value = p.v() * (b * apply(Op::kPow, a, b - 1.0));
    // For a constant exponent it is known whether the condition ever holds.
    if (b.graph->is_constant(b.id) && b.graph->value(b.id).f != 0) {
      p.add(0, value);
    } else {
      p.add_where(0, !equal(b, 0.0), value);
    }
  }
  if (p.wants(1)) p.add_where(1, !(equal(a, 0.0) & (b >= 0.0)), p.v() * (p.y() * apply(Op::kLog, a)));
}
FUSEGRAD_DERIVATIVE(Neg) { p.add(0, -p.v()); }
FUSEGRAD_DERIVATIVE(Abs) { p.add(0, p.v() * apply(Op::kSign, p.x(0))); }
FUSEGRAD_NO_DERIVATIVE(Sign)
FUSEGRAD_DERIVATIVE(Square) { p.add(0, p.v() * (2.0 * p.x(0))); }

// Half to each where they are equal. The condition is the negation of the other's victory, so that a NaN passes.
inline void derive_extremum(Pullback& p, Op loses) {
  const Term a = p.x(0), b = p.x(1);
  const Term value = where(equal(a, b), 0.5 * p.v(), p.v());
  if (p.wants(0)) p.add_where(0, !apply(loses, a, b), value);
  if (p.wants(1)) p.add_where(1, !apply(loses, b, a), value);
}
FUSEGRAD_DERIVATIVE(Min) { derive_extremum(p, Op::kGt); }
FUSEGRAD_DERIVATIVE(Max) { derive_extremum(p, Op::kLt); }
FUSEGRAD_DERIVATIVE(Clamp) {
  const Term x = p.x(0), low = p.x(1), high = p.x(2);
  if (p.wants(0)) p.add_where(0, (x >= low) & (x <= high), p.v());
  if (p.wants(1)) p.add_where(1, (x < low) & (low < high), p.v());
  if (p.wants(2)) p.add_where(2, (x > high) | (low > high), p.v());
}
FUSEGRAD_NO_DERIVATIVE(Floor)
FUSEGRAD_NO_DERIVATIVE(Ceil)
FUSEGRAD_NO_DERIVATIVE(Trunc)
FUSEGRAD_NO_DERIVATIVE(Round)

inline constexpr double kLn2 = 0.69314718055994530942;
inline constexpr double kTwoOverSqrtPi = 1.12837916709551257390;
inline constexpr double kSqrtHalf = 0.70710678118654752440;
inline constexpr double kSqrtTwoOverPi = 0.79788456080286535588;

FUSEGRAD_DERIVATIVE(Sqrt) { p.add(0, p.v() / (2.0 * p.y())); }
FUSEGRAD_DERIVATIVE(Rsqrt) { p.add(0, p.v() * (-0.5 * (p.y() * square(p.y())))); }
FUSEGRAD_DERIVATIVE(Exp) { p.add(0, p.v() * p.y()); }
FUSEGRAD_DERIVATIVE(Exp2) { p.add(0, p.v() * (kLn2 * p.y())); }
FUSEGRAD_DERIVATIVE(Expm1) { p.add(0, p.v() * (p.y() + 1.0)); }
FUSEGRAD_DERIVATIVE(Log) { p.add(0, p.v() / p.x(0)); }
FUSEGRAD_DERIVATIVE(Log2) { p.add(0, p.v() / (kLn2 * p.x(0))); }
FUSEGRAD_DERIVATIVE(Log1p) { p.add(0, p.v() / (p.x(0) + 1.0)); }
FUSEGRAD_DERIVATIVE(Tanh) { p.add(0, p.v() * (1.0 - square(p.y()))); }
FUSEGRAD_DERIVATIVE(Sigmoid) { p.add(0, p.v() * (p.y() * (1.0 - p.y()))); }
FUSEGRAD_DERIVATIVE(Silu) {
  const Term s = apply(Op::kSigmoid, p.x(0));
  p.add(0, p.v() * (s * (1.0 + p.x(0) * (1.0 - s))));
}
FUSEGRAD_DERIVATIVE(Relu) { p.add_where(0, !(p.x(0) <= 0.0), p.v()); }
FUSEGRAD_DERIVATIVE(Gelu) {
  const Term x = p.x(0);
  const Term cdf = 0.5 * (1.0 + apply(Op::kErf, kSqrtHalf * x));
  const Term density = (0.5 * kSqrtHalf * kTwoOverSqrtPi) * apply(Op::kExp, -0.5 * square(x));
  p.add(0, p.v() * (cdf + x * density));
}
FUSEGRAD_DERIVATIVE(GeluTanh) {
  const Term x = p.x(0);
  const Term t = apply(Op::kTanh, kSqrtTwoOverPi * (x + 0.044715 * (x * square(x))));
  const Term slope = kSqrtTwoOverPi * (1.0 + (3.0 * 0.044715) * square(x));
  p.add(0, p.v() * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - square(t)) * slope));
}
FUSEGRAD_DERIVATIVE(Erf) { p.add(0, p.v() * (kTwoOverSqrtPi * apply(Op::kExp, -square(p.x(0))))); }
FUSEGRAD_DERIVATIVE(Sin) { p.add(0, p.v() * apply(Op::kCos, p.x(0))); }
FUSEGRAD_DERIVATIVE(Cos) { p.add(0, -(p.v() * apply(Op::kSin, p.x(0)))); }
FUSEGRAD_DERIVATIVE(Tan) { p.add(0, p.v() * (1.0 + square(p.y()))); }
FUSEGRAD_DERIVATIVE(Erfc) { p.add(0, -(p.v() * (kTwoOverSqrtPi * apply(Op::kExp, -square(p.x(0)))))); }
FUSEGRAD_DERIVATIVE(Atan) { p.add(0, p.v() / (square(p.x(0)) + 1.0)); }
FUSEGRAD_DERIVATIVE(Asin) { p.add(0, p.v() * apply(Op::kRsqrt, 1.0 - square(p.x(0)))); }
FUSEGRAD_DERIVATIVE(Acos) { p.add(0, -(p.v() * apply(Op::kRsqrt, 1.0 - square(p.x(0))))); }
FUSEGRAD_DERIVATIVE(Sinh) { p.add(0, p.v() * apply(Op::kCosh, p.x(0))); }
FUSEGRAD_DERIVATIVE(Cosh) { p.add(0, p.v() * apply(Op::kSinh, p.x(0))); }
FUSEGRAD_DERIVATIVE(Asinh) { p.add(0, p.v() * apply(Op::kRsqrt, square(p.x(0)) + 1.0)); }
FUSEGRAD_DERIVATIVE(Acosh) { p.add(0, p.v() * apply(Op::kRsqrt, square(p.x(0)) - 1.0)); }
FUSEGRAD_DERIVATIVE(Atanh) { p.add(0, p.v() / (1.0 - square(p.x(0)))); }
// Divided twice by the distance: its square may overflow where it does not. In the origin it is 0.
FUSEGRAD_DERIVATIVE(Atan2) {
  const Term y = p.x(0), x = p.x(1), r = apply(Op::kHypot, y, x);
  if (p.wants(0)) p.add_where(0, !equal(r, 0.0), p.v() * (x / r / r));
  if (p.wants(1)) p.add_where(1, !equal(r, 0.0), -(p.v() * (y / r / r)));
}
FUSEGRAD_DERIVATIVE(Hypot) {
  if (p.wants(0)) p.add(0, p.v() * (p.x(0) / p.y()));
  if (p.wants(1)) p.add(1, p.v() * (p.x(1) / p.y()));
}
FUSEGRAD_NO_DERIVATIVE(Detach)

FUSEGRAD_NO_DERIVATIVE(Eq)
FUSEGRAD_NO_DERIVATIVE(Ne)
FUSEGRAD_NO_DERIVATIVE(Lt)
FUSEGRAD_NO_DERIVATIVE(Le)
FUSEGRAD_NO_DERIVATIVE(Gt)
FUSEGRAD_NO_DERIVATIVE(Ge)
FUSEGRAD_NO_DERIVATIVE(And)
FUSEGRAD_NO_DERIVATIVE(Or)
FUSEGRAD_NO_DERIVATIVE(Xor)
FUSEGRAD_NO_DERIVATIVE(Not)
FUSEGRAD_NO_DERIVATIVE(Shl)
FUSEGRAD_NO_DERIVATIVE(Shr)
FUSEGRAD_NO_DERIVATIVE(Within)

FUSEGRAD_DERIVATIVE(Where) {
  if (p.wants(1)) p.add_where(1, p.x(0), p.v());
  if (p.wants(2)) p.add_where(2, !p.x(0), p.v());
}
// From an integer or a bool: there is nothing to differentiate by.
FUSEGRAD_NO_DERIVATIVE(ToFloat)
FUSEGRAD_NO_DERIVATIVE(ToInt)
FUSEGRAD_NO_DERIVATIVE(ToBool)

#undef FUSEGRAD_DERIVATIVE
#undef FUSEGRAD_NO_DERIVATIVE

}  // namespace fusegrad::score_mod
