// ATen's vectors call SLEEF for some functions, and libtorch_cpu holds it. These stand in for it where there is no
// torch: lane by lane, for those that the row kernels use. All but tanhf are of float64.
#include <immintrin.h>

#include <cmath>

#define FUSEGRAD_SLEEF(name, target_name, Vector, Scalar, function)       \
  extern "C" __attribute__((target(target_name))) Vector name(Vector x) { \
    Vector result;                                                        \
    alignas(64) Scalar lanes[sizeof(Vector) / sizeof(Scalar)];            \
    __builtin_memcpy(lanes, &x, sizeof(x));                               \
    for (auto& lane : lanes) lane = function(lane);                       \
    __builtin_memcpy(&result, lanes, sizeof(x));                          \
    return result;                                                        \
  }

FUSEGRAD_SLEEF(Sleef_expd4_u10, "avx2", __m256d, double, std::exp)
FUSEGRAD_SLEEF(Sleef_logd4_u10, "avx2", __m256d, double, std::log)
FUSEGRAD_SLEEF(Sleef_log1pd4_u10, "avx2", __m256d, double, std::log1p)
FUSEGRAD_SLEEF(Sleef_tanhd4_u10, "avx2", __m256d, double, std::tanh)
FUSEGRAD_SLEEF(Sleef_tanhf8_u10, "avx2", __m256, float, std::tanh)
FUSEGRAD_SLEEF(Sleef_expd8_u10, "avx512f", __m512d, double, std::exp)
FUSEGRAD_SLEEF(Sleef_logd8_u10, "avx512f", __m512d, double, std::log)
FUSEGRAD_SLEEF(Sleef_log1pd8_u10, "avx512f", __m512d, double, std::log1p)
FUSEGRAD_SLEEF(Sleef_tanhd8_u10, "avx512f", __m512d, double, std::tanh)
FUSEGRAD_SLEEF(Sleef_tanhf16_u10, "avx512f", __m512, float, std::tanh)
