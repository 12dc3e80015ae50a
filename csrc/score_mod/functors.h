// The CPU functor of every primitive, by the Id of primitives.def: `Id::apply(operands)` on T = float or double for
// floats, int32_t or int64_t for integers and uint8_t (0 or 1) for bools.
//
// Everything here has internal linkage on purpose: the file is compiled for several instruction sets, and a linker that
// merged the copies might keep one that the machine cannot run. The standard library's own inline functions may be
// used on scalars only, through the C names (::expf), for the same reason.
#pragma once

#include <math.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace fusegrad::score_mod {
namespace {  // NOLINT(google-build-namespaces): see above
namespace functors {

template <class T>
constexpr bool kIsFloat = std::is_floating_point_v<T>;

// Integers wrap: signed overflow would be undefined.
template <class T>
using Unsigned = std::make_unsigned_t<T>;

struct Add {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>)
      return a + b;
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
};
struct Sub {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>)
      return a - b;
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
  }
};
struct Mul {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>)
      return a * b;
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
  }
};
struct Div {
  template <class T>
  static T apply(T a, T b) {
    return a / b;
  }
};
struct Neg {
  template <class T>
  static T apply(T a) {
    if constexpr (kIsFloat<T>)
      return -a;
    else
      return static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(a));
  }
};

inline float fmod_of(float a, float b) { return ::fmodf(a, b); }
inline double fmod_of(double a, double b) { return ::fmod(a, b); }
inline float floor_of(float a) { return ::floorf(a); }
inline double floor_of(double a) { return ::floor(a); }
inline float copysign_of(float a, float b) { return ::copysignf(a, b); }
inline double copysign_of(double a, double b) { return ::copysign(a, b); }

// The remainder has the divisor's sign. By zero: 0 for integers, NaN for floats.
struct Mod {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>) {
      const T m = fmod_of(a, b);
      return m != 0 && (m < 0) != (b < 0) ? m + b : m;
    } else {
      if (b == 0 || b == -1) return 0;  // the most negative number % -1 traps
      const T m = a % b;
      return m != 0 && (m < 0) != (b < 0) ? m + b : m;
    }
  }
};
// By zero: 0 for integers, a / b for floats. floor(a / b) would be off by one where the quotient rounds up to the
// next integer; a - mod is a multiple of b to within rounding.
struct FloorDiv {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>) {
      if (b == 0) return a / b;
      const T m = fmod_of(a, b);
      T q = (a - m) / b;
      if (m != 0 && (m < 0) != (b < 0)) q -= 1;
      if (q == 0) return copysign_of(T(0), a / b);
      const T f = floor_of(q);
      return q - f > T(0.5) ? f + 1 : f;
    } else {
      if (b == 0) return 0;
      if (b == -1) return Neg::apply(a);
      const T q = a / b;
      return a % b != 0 && ((a < 0) != (b < 0)) ? q - 1 : q;
    }
  }
};
// Integers wrap; to a negative power they give what 1 / a^-b truncates to, and 0 for a = 0.
struct Pow {
  static float apply(float a, float b) { return ::powf(a, b); }
  static double apply(double a, double b) { return ::pow(a, b); }
  template <class T>
    requires(!kIsFloat<T>)
  static T apply(T a, T b) {
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 == 0 ? 1 : -1) : 0;
    T result = 1;
    for (; b != 0; b >>= 1) {
      if ((b & 1) != 0) result = Mul::apply(result, a);
      a = Mul::apply(a, a);
    }
    return result;
  }
};
struct Abs {
  template <class T>
  static T apply(T a) {
    if constexpr (kIsFloat<T>)
      return a == 0 ? T(0) : a < 0 ? -a : a;
    else
      return a < 0 ? Neg::apply(a) : a;
  }
};
struct Sign {
  template <class T>
  static T apply(T a) {
    return static_cast<T>((a > 0) - (a < 0));
  }
};
struct Square {
  template <class T>
  static T apply(T a) {
    return Mul::apply(a, a);
  }
};
// NaN where either is NaN.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>) {
      if (a != a) return a;
    }
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (kIsFloat<T>) {
      if (a != a) return a;
    }
    return a > b ? a : b;
  }
};
struct Clamp {
  template <class T>
  static T apply(T a, T low, T high) {
    return Min::apply(Max::apply(a, low), high);
  }
};

// A function of libm for both precisions, the identity for integers.
#define FUSEGRAD_ROUNDING(Id, function)                      \
  struct Id {                                                \
    static float apply(float a) { return ::function##f(a); } \
    static double apply(double a) { return ::function(a); }  \
    template <class T>                                       \
      requires(!kIsFloat<T>)                                 \
    static T apply(T a) {                                    \
      return a;                                              \
    }                                                        \
  };
FUSEGRAD_ROUNDING(Floor, floor)
FUSEGRAD_ROUNDING(Ceil, ceil)
FUSEGRAD_ROUNDING(Trunc, trunc)
FUSEGRAD_ROUNDING(Round, rint)
#undef FUSEGRAD_ROUNDING

#define FUSEGRAD_LIBM(Id, function)                          \
  struct Id {                                                \
    static float apply(float a) { return ::function##f(a); } \
    static double apply(double a) { return ::function(a); }  \
  };
FUSEGRAD_LIBM(Sqrt, sqrt)
FUSEGRAD_LIBM(Exp, exp)
FUSEGRAD_LIBM(Exp2, exp2)
FUSEGRAD_LIBM(Expm1, expm1)
FUSEGRAD_LIBM(Log, log)
FUSEGRAD_LIBM(Log2, log2)
FUSEGRAD_LIBM(Log1p, log1p)
FUSEGRAD_LIBM(Tanh, tanh)
FUSEGRAD_LIBM(Erf, erf)
FUSEGRAD_LIBM(Sin, sin)
FUSEGRAD_LIBM(Cos, cos)
FUSEGRAD_LIBM(Tan, tan)
FUSEGRAD_LIBM(Erfc, erfc)
FUSEGRAD_LIBM(Atan, atan)
FUSEGRAD_LIBM(Asin, asin)
FUSEGRAD_LIBM(Acos, acos)
FUSEGRAD_LIBM(Sinh, sinh)
FUSEGRAD_LIBM(Cosh, cosh)
FUSEGRAD_LIBM(Asinh, asinh)
FUSEGRAD_LIBM(Acosh, acosh)
FUSEGRAD_LIBM(Atanh, atanh)
#undef FUSEGRAD_LIBM

#define FUSEGRAD_LIBM(Id, function)                                      \
  struct Id {                                                            \
    static float apply(float a, float b) { return ::function##f(a, b); } \
    static double apply(double a, double b) { return ::function(a, b); } \
  };
FUSEGRAD_LIBM(Atan2, atan2)
FUSEGRAD_LIBM(Hypot, hypot)
#undef FUSEGRAD_LIBM

struct Rsqrt {
  template <class T>
  static T apply(T a) {
    return 1 / Sqrt::apply(a);
  }
};
struct Sigmoid {
  template <class T>
  static T apply(T a) {
    return 1 / (1 + Exp::apply(-a));
  }
};
struct Silu {
  template <class T>
  static T apply(T a) {
    return a / (1 + Exp::apply(-a));
  }
};
struct Relu {
  template <class T>
  static T apply(T a) {
    return a <= 0 ? T(0) : a;  // NaN stays
  }
};
struct Gelu {
  template <class T>
  static T apply(T a) {
    return T(0.5) * a * (1 + Erf::apply(a * T(0.70710678118654752440)));
  }
};
struct GeluTanh {
  template <class T>
  static T apply(T a) {
    const T inner = T(0.79788456080286535588) * (a + T(0.044715) * a * a * a);
    return T(0.5) * a * (1 + Tanh::apply(inner));
  }
};
struct Detach {
  template <class T>
  static T apply(T a) {
    return a;
  }
};

#define FUSEGRAD_COMPARISON(Id, operation) \
  struct Id {                              \
    template <class T>                     \
    static uint8_t apply(T a, T b) {       \
      return a operation b;                \
    }                                      \
  };
FUSEGRAD_COMPARISON(Eq, ==)
FUSEGRAD_COMPARISON(Ne, !=)
FUSEGRAD_COMPARISON(Lt, <)
FUSEGRAD_COMPARISON(Le, <=)
FUSEGRAD_COMPARISON(Gt, >)
FUSEGRAD_COMPARISON(Ge, >=)
#undef FUSEGRAD_COMPARISON

struct And {
  template <class T>
  static T apply(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  static T apply(T a) {
    if constexpr (std::is_same_v<T, uint8_t>)
      return a ^ 1;
    else
      return ~a;
  }
};
// By a negative number or by the width and more: what shifting one by one without end would leave.
struct Shl {
  template <class T>
  static T apply(T a, T b) {
    const bool out = b < 0 || b >= T(8 * sizeof(T));
    return out ? T(0) : static_cast<T>(static_cast<Unsigned<T>>(a) << b);
  }
};
struct Shr {
  template <class T>
  static T apply(T a, T b) {
    const bool out = b < 0 || b >= T(8 * sizeof(T));
    return a >> (out ? T(8 * sizeof(T) - 1) : b);
  }
};
// What is out of range is the size itself, which the evaluator finds.
struct Within {
  template <class T>
  static T apply(T a, T size) {
    return a >= 0 && a < size ? a : size;
  }
};

struct Where {
  template <class T>
  static T apply(uint8_t condition, T a, T b) {
    return condition != 0 ? a : b;
  }
};
struct ToFloat {
  template <class To, class T>
  static To apply(T a) {
    return static_cast<To>(a);
  }
};
// Towards zero; NaN gives 0, what does not fit the nearest that does.
struct ToInt {
  template <class T>
  static int64_t apply(T a) {
    if constexpr (kIsFloat<T>) {
      if (a != a) return 0;
      if (a >= T(9223372036854775808.0)) return std::numeric_limits<int64_t>::max();
      if (a < T(-9223372036854775808.0)) return std::numeric_limits<int64_t>::min();
    }
    return static_cast<int64_t>(a);
  }
};
struct ToBool {
  template <class T>
  static uint8_t apply(T a) {
    return a != 0;
  }
};

}  // namespace functors
}  // namespace
}  // namespace fusegrad::score_mod
