// The vectorised loops. This file is compiled once per instruction set, with CPU_CAPABILITY set: keep library templates
// and inline functions of other headers out, or the linker may pick a copy with instructions that the machine does not
// have.
#include "score_mod/functors.h"
#include "score_mod/tile_kernels.h"
#include "score_mod/tile_memory.h"
#include "score_mod/vector_math.h"

namespace fusegrad::score_mod {
namespace CPU_CAPABILITY {
namespace {

// --- primitives ---------------------------------------------------------------------------------------------

template <class F, class T>
void unary(void* out, const void* const* x, int64_t lanes) {
  using R = decltype(F::apply(T()));
  auto* __restrict o = static_cast<R*>(out);
  const auto* a = static_cast<const T*>(x[0]);
  for (int64_t i = 0; i < lanes; ++i) o[i] = F::apply(a[i]);
}

template <class F, class T, bool one_a, bool one_b>
void binary(void* out, const void* const* x, int64_t lanes) {
  using R = decltype(F::apply(T(), T()));
  auto* __restrict o = static_cast<R*>(out);
  const auto* a = static_cast<const T*>(x[0]);
  const auto* b = static_cast<const T*>(x[1]);
  for (int64_t i = 0; i < lanes; ++i) o[i] = F::apply(a[one_a ? 0 : i], b[one_b ? 0 : i]);
}

// The first operand is a byte in `where`, and a T like the others in `clamp`.
template <class F, class First, class T, bool one_a, bool one_b, bool one_c>
void ternary(void* out, const void* const* x, int64_t lanes) {
  auto* __restrict o = static_cast<T*>(out);
  const auto* a = static_cast<const First*>(x[0]);
  const auto* b = static_cast<const T*>(x[1]);
  const auto* c = static_cast<const T*>(x[2]);
  for (int64_t i = 0; i < lanes; ++i) o[i] = F::apply(a[one_a ? 0 : i], b[one_b ? 0 : i], c[one_c ? 0 : i]);
}

template <class F, class First, class T>
Kernel ternary_kernel(unsigned broadcast) {
  constexpr Kernel kKernels[] = {ternary<F, First, T, false, false, false>, ternary<F, First, T, true, false, false>,
                                 ternary<F, First, T, false, true, false>,  ternary<F, First, T, true, true, false>,
                                 ternary<F, First, T, false, false, true>,  ternary<F, First, T, true, false, true>,
                                 ternary<F, First, T, false, true, true>,   ternary<F, First, T, true, true, true>};
  return kKernels[broadcast & 7];
}

template <class F, int arity, class T>
Kernel kernel_on(unsigned broadcast) {
  if constexpr (arity == 1) {
    return unary<F, T>;
  } else if constexpr (arity == 2) {
    constexpr Kernel kKernels[] = {binary<F, T, false, false>, binary<F, T, true, false>, binary<F, T, false, true>,
                                   binary<F, T, true, true>};
    return kKernels[broadcast & 3];
  } else {
    return ternary_kernel<F, T, T>(broadcast);
  }
}

// The lanes that the rule lets through.
template <class F, int arity, Rule rule>
Kernel kernel_for(Lane lane, unsigned broadcast) {
  constexpr bool kNumbers = rule == Rule::kNumeric || rule == Rule::kCompare;
  if constexpr (rule == Rule::kFloat || kNumbers) {
    if (lane == Lane::kFloat32) return kernel_on<F, arity, float>(broadcast);
    if (lane == Lane::kFloat64) return kernel_on<F, arity, double>(broadcast);
  }
  if constexpr (rule == Rule::kBitwise || rule == Rule::kInteger || kNumbers) {
    if (lane == Lane::kInt32) return kernel_on<F, arity, int32_t>(broadcast);
    if (lane == Lane::kInt64) return kernel_on<F, arity, int64_t>(broadcast);
  }
  if constexpr (rule == Rule::kBitwise) {
    if (lane == Lane::kBool) return kernel_on<F, arity, uint8_t>(broadcast);
  }
  if constexpr (rule == Rule::kWhere) {
    switch (lane) {
      case Lane::kFloat32:
        return ternary_kernel<F, uint8_t, float>(broadcast);
      case Lane::kFloat64:
        return ternary_kernel<F, uint8_t, double>(broadcast);
      case Lane::kInt32:
        return ternary_kernel<F, uint8_t, int32_t>(broadcast);
      case Lane::kInt64:
        return ternary_kernel<F, uint8_t, int64_t>(broadcast);
      default:
        return ternary_kernel<F, uint8_t, uint8_t>(broadcast);
    }
  }
  return nullptr;
}

// --- functions of a whole array -----------------------------------------------------------------------------

// out = after(function(before(x)), x), with a vector function between two loops that the compiler vectorises.
template <class T, void (*function)(T*, const T*, int64_t), class Before, class After>
void composed(T* out, const T* x, int64_t lanes, Before before, After after) {
  for (int64_t i = 0; i < lanes; ++i) out[i] = before(x[i]);
  function(out, out, lanes);
  for (int64_t i = 0; i < lanes; ++i) out[i] = after(out[i], x[i]);
}

template <class T, void (*function)(T*, const T*, int64_t)>
void whole(void* out, const void* const* x, int64_t lanes) {
  function(static_cast<T*>(out), static_cast<const T*>(x[0]), lanes);
}

template <class T>
void sigmoid_of(T* out, const T* x, int64_t lanes) {
  composed<T, vector_math::exp_of>(out, x, lanes, [](T a) { return -a; }, [](T e, T) { return 1 / (1 + e); });
}
template <class T>
void silu_of(T* out, const T* x, int64_t lanes) {
  composed<T, vector_math::exp_of>(out, x, lanes, [](T a) { return -a; }, [](T e, T a) { return a / (1 + e); });
}
template <class T>
void gelu_of(T* out, const T* x, int64_t lanes) {
  composed<T, vector_math::erf_of>(
      out, x, lanes, [](T a) { return a * T(0.70710678118654752440); }, [](T e, T a) { return T(0.5) * a * (1 + e); });
}
template <class T>
void gelu_tanh_of(T* out, const T* x, int64_t lanes) {
  composed<T, vector_math::tanh_of>(
      out, x, lanes, [](T a) { return T(0.79788456080286535588) * (a + T(0.044715) * a * a * a); },
      [](T t, T a) { return T(0.5) * a * (1 + t); });
}

template <class T>
Kernel whole_kernel(Op op) {
  switch (op) {
    case Op::kExp:
      return whole<T, vector_math::exp_of>;
    case Op::kExp2:
      return whole<T, vector_math::exp2_of>;
    case Op::kExpm1:
      return whole<T, vector_math::expm1_of>;
    case Op::kLog:
      return whole<T, vector_math::log_of>;
    case Op::kLog2:
      return whole<T, vector_math::log2_of>;
    case Op::kLog1p:
      return whole<T, vector_math::log1p_of>;
    case Op::kTanh:
      return whole<T, vector_math::tanh_of>;
    case Op::kErf:
      return whole<T, vector_math::erf_of>;
    case Op::kSin:
      return whole<T, vector_math::sin_of>;
    case Op::kCos:
      return whole<T, vector_math::cos_of>;
    case Op::kTan:
      return whole<T, vector_math::tan_of>;
    case Op::kSigmoid:
      return whole<T, sigmoid_of<T>>;
    case Op::kSilu:
      return whole<T, silu_of<T>>;
    case Op::kGelu:
      return whole<T, gelu_of<T>>;
    case Op::kGeluTanh:
      return whole<T, gelu_tanh_of<T>>;
    default:
      return nullptr;
  }
}

Kernel find(Op op, Lane lane, unsigned broadcast) {
  const Kernel kernel = lane == Lane::kFloat32   ? whole_kernel<float>(op)
                        : lane == Lane::kFloat64 ? whole_kernel<double>(op)
                                                 : nullptr;
  if (kernel != nullptr) return kernel;
  switch (op) {
#define PRIMITIVE(Id, name, arity, rule, cuda_float, cuda_integer) \
  case Op::k##Id:                                                  \
    return kernel_for<functors::Id, arity, Rule::k##rule>(lane, broadcast);
#include "score_mod/primitives.def"
#undef PRIMITIVE
    default:
      return nullptr;
  }
}

// --- casts --------------------------------------------------------------------------------------------------

template <class From, class To>
void convert(void* out, const void* const* x, int64_t lanes) {
  auto* __restrict o = static_cast<To*>(out);
  const auto* a = static_cast<const From*>(x[0]);
  for (int64_t i = 0; i < lanes; ++i) {
    if constexpr (std::is_same_v<To, uint8_t>) {
      o[i] = a[i] != 0;
    } else if constexpr (std::is_floating_point_v<From> && !std::is_floating_point_v<To>) {
      o[i] = static_cast<To>(functors::ToInt::apply(a[i]));
    } else {
      o[i] = static_cast<To>(a[i]);
    }
  }
}

template <class From>
Kernel cast_from(Lane to) {
  switch (to) {
    case Lane::kFloat32:
      return convert<From, float>;
    case Lane::kFloat64:
      return convert<From, double>;
    case Lane::kInt32:
      return convert<From, int32_t>;
    case Lane::kInt64:
      return convert<From, int64_t>;
    default:
      return convert<From, uint8_t>;
  }
}

Kernel cast(Lane from, Lane to) {
  switch (from) {
    case Lane::kFloat32:
      return cast_from<float>(to);
    case Lane::kFloat64:
      return cast_from<double>(to);
    case Lane::kInt32:
      return cast_from<int32_t>(to);
    case Lane::kInt64:
      return cast_from<int64_t>(to);
    default:
      return cast_from<uint8_t>(to);
  }
}

}  // namespace

const TileKernels kTileKernels = {find, cast, offset, gather, iota, kScatterKernels<float>, kScatterKernels<double>};

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::score_mod
