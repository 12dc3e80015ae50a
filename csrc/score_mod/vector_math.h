// Functions of a whole array for tile_kernel.cpp: with PyTorch's vectors (Sleef), to 1 unit in the last place; with
// libm where FUSEGRAD_PLAIN_MATH is defined, for programs without PyTorch.
#pragma once

#include <math.h>

#include <cstdint>

#ifndef FUSEGRAD_PLAIN_MATH
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
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
FUSEGRAD_VECTOR_MATH(tanh)
FUSEGRAD_VECTOR_MATH(erf)
FUSEGRAD_VECTOR_MATH(sin)
FUSEGRAD_VECTOR_MATH(cos)
FUSEGRAD_VECTOR_MATH(tan)
#undef FUSEGRAD_VECTOR_MATH

}  // namespace vector_math
}  // namespace
}  // namespace fusegrad::score_mod
