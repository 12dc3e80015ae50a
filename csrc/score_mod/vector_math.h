// Functions of a whole array for tile_kernel.cpp: with PyTorch's vectors (Sleef), to 1 unit in the last place; with
// libm where FUSEGRAD_PLAIN_MATH is defined, for programs without PyTorch.
#pragma once

#include <math.h>

#include <cstdint>

#ifndef FUSEGRAD_PLAIN_MATH
#include "common/vec.h"
#endif

namespace fusegrad::score_mod {
namespace {  // NOLINT(google-build-namespaces): compiled for several instruction sets, see functors.h
namespace vector_math {

#ifdef FUSEGRAD_PLAIN_MATH
#define FUSEGRAD_VECTOR_MATH(name)                                               \
  [[maybe_unused]] void name##_of(float* out, const float* x, int64_t lanes) {   \
    for (int64_t i = 0; i < lanes; ++i) out[i] = ::name##f(x[i]);                \
  }                                                                              \
  [[maybe_unused]] void name##_of(double* out, const double* x, int64_t lanes) { \
    for (int64_t i = 0; i < lanes; ++i) out[i] = ::name(x[i]);                   \
  }
#else
template <class T, class Function>
void each_vector(T* out, const T* x, int64_t lanes, Function function) {
  using Vec = at::vec::Vectorized<T>;
  int64_t i = 0;
  for (; i + Vec::size() <= lanes; i += Vec::size()) function(Vec::loadu(x + i)).store(out + i);
  if (i < lanes) function(Vec::loadu(x + i, lanes - i)).store(out + i, static_cast<int>(lanes - i));
}
#define FUSEGRAD_VECTOR_MATH(name)                                      \
  template <class T>                                                    \
  [[maybe_unused]] void name##_of(T* out, const T* x, int64_t lanes) {  \
    each_vector(out, x, lanes, [](const auto& v) { return v.name(); }); \
  }
#endif
FUSEGRAD_VECTOR_MATH(exp)
FUSEGRAD_VECTOR_MATH(exp2)
FUSEGRAD_VECTOR_MATH(expm1)
FUSEGRAD_VECTOR_MATH(log)
FUSEGRAD_VECTOR_MATH(log2)
FUSEGRAD_VECTOR_MATH(log1p)
FUSEGRAD_VECTOR_MATH(erf)
FUSEGRAD_VECTOR_MATH(sin)
FUSEGRAD_VECTOR_MATH(cos)
FUSEGRAD_VECTOR_MATH(tan)
#undef FUSEGRAD_VECTOR_MATH

// exp(x) for -87 <= x <= 0: x = n ln 2 + r with ln 2 in two parts, the Taylor polynomial of degree 6 in r, and n added
// to the exponent. Adding 1.5 * 2^23 rounds to an integer that stands in the low bits.
inline float exp_of_nonpositive(float x) {
  constexpr float kRound = 12582912.f;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.f / 720;
  y = y * r + 1.f / 120;
  y = y * r + 1.f / 24;
  y = y * r + 1.f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.f;
  y = y * r + 1.f;
  const uint32_t exponent = __builtin_bit_cast(uint32_t, shifted) << 23;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, y) + exponent);
}

// Softcaps are common, and Sleef's tanh takes five times as long. Next to 0 an odd polynomial (fitted for the smallest
// relative error, 8e-9), elsewhere (1 - e) / (1 + e) with e = exp(-2 |x|).
inline void tanh_of(float* out, const float* x, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) {
    const float a = ::fabsf(x[i]), z = x[i] * x[i];
    float p = -0.005439439322799444f;
    p = p * z + 0.020397964864969254f;
    p = p * z - 0.053665049374103546f;
    p = p * z + 0.13330543041229248f;
    p = p * z - 0.33333247900009155f;
    const float small = a + a * z * p;
    const float e = exp_of_nonpositive(a < 43.f ? -2 * a : -86.f);
    const float large = (1 - e) / (1 + e);
    const float result = ::copysignf(a < 0.66f ? small : large, x[i]);
    out[i] = x[i] != x[i] ? x[i] : result;
  }
}
#ifdef FUSEGRAD_PLAIN_MATH
inline void tanh_of(double* out, const double* x, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) out[i] = ::tanh(x[i]);
}
#else
inline void tanh_of(double* out, const double* x, int64_t lanes) {
  each_vector(out, x, lanes, [](const auto& v) { return v.tanh(); });
}
#endif

}  // namespace vector_math
}  // namespace
}  // namespace fusegrad::score_mod
