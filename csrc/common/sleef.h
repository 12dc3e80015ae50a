// Functions of vectors. ATen's vectors call SLEEF by name. The library defines those names itself (sleef.cpp), as jumps
// through a table: that of libtorch_cpu's own SLEEF in a process with PyTorch's front end, else the standard library's
// functions lane by lane.
#pragma once

/// F(name in SLEEF, instruction set, vector, lane, function of a lane)
#if defined(__x86_64__)
#include <immintrin.h>

#define FUSEGRAD_TARGET(instructions) __attribute__((target(instructions)))
#define FUSEGRAD_SLEEF_OF(F, function, float_accuracy)                   \
  F(function##d4_u10, "avx2", __m256d, double, std::function)            \
  F(function##d8_u10, "avx512f", __m512d, double, std::function)         \
  F(function##f8_##float_accuracy, "avx2", __m256, float, std::function) \
  F(function##f16_##float_accuracy, "avx512f", __m512, float, std::function)
#elif defined(__aarch64__)
#include <arm_neon.h>

#define FUSEGRAD_TARGET(instructions)  // every processor has NEON
#define FUSEGRAD_SLEEF_OF(F, function, float_accuracy)            \
  F(function##d2_u10, "neon", float64x2_t, double, std::function) \
  F(function##f4_##float_accuracy, "neon", float32x4_t, float, std::function)
#else
#error "fusegrad: the processor must be x86-64 or aarch64"
#endif
#define FUSEGRAD_SLEEF(F)          \
  FUSEGRAD_SLEEF_OF(F, exp, u10)   \
  FUSEGRAD_SLEEF_OF(F, exp2, u10)  \
  FUSEGRAD_SLEEF_OF(F, expm1, u10) \
  FUSEGRAD_SLEEF_OF(F, log, u10)   \
  FUSEGRAD_SLEEF_OF(F, log1p, u10) \
  FUSEGRAD_SLEEF_OF(F, log2, u10)  \
  FUSEGRAD_SLEEF_OF(F, sin, u35)   \
  FUSEGRAD_SLEEF_OF(F, cos, u35)   \
  FUSEGRAD_SLEEF_OF(F, tan, u10)   \
  FUSEGRAD_SLEEF_OF(F, tanh, u10)  \
  FUSEGRAD_SLEEF_OF(F, erf, u10)

namespace fusegrad::cpu {

struct VectorMath {
#define FUSEGRAD_MEMBER(name, target, Vector, Lane, function) Vector (*name)(Vector);
  FUSEGRAD_SLEEF(FUSEGRAD_MEMBER)
#undef FUSEGRAD_MEMBER
};

/// The table from now on, for all threads; null: the standard library's. Returns the one before. A front end calls it
/// when its library is loaded, before there are calls: which table it is decides a result's last bits.
const VectorMath* exchange_vector_math(const VectorMath* math);

}  // namespace fusegrad::cpu
