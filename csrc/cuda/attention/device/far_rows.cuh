// Rows whose scores are all far from 0: masked by adding -1e9, say.
//
// float32 has 24 bits. Near -1e9 neighbouring numbers are 64 apart, so that an lse in one number says nothing of the sum
// of exponentials, and score * log2(e) - max * log2(e) is off by as much. Such rows subtract first: score - max is exact
// where the exponential is not 0. That is one instruction for each pair more, so kernels do it for these rows alone:
//   forward    a warp sees its rows' maxima, and subtracts them from the scores
//   backward   lse comes in two numbers, what rounding took from it in the second (lse_of). The kernel of row values
//              marks the row by an lse of -0, which no other row has; warps that find one subtract both numbers
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// Rows are far where their maximum times log2(e) exceeds this in the forward of 16-bit elements. It has an error of up
/// to 2^-13 there. float subtracts always.
constexpr float kFarExponent = 2048.0f;

/// Rows are far where the magnitude of lse exceeds this in the backward: its error there is that of rounding
/// probabilities to 16 bits, or a few times that of a float.
template <class T>
constexpr float kFarLse = sizeof(T) == 4 ? 32.0f : 1024.0f;

/// lse in two numbers: the second is what rounding took from the first.
struct FlexLse {
  float lse, low;
};
/// `max`: the largest score, to be multiplied by `unit`; `log_sum`: of exponentials relative to it.
__device__ __forceinline__ FlexLse lse_of(float max, float unit, float log_sum) {
  const float product = __fmul_rn(max, unit), lse = __fadd_rn(product, log_sum);
  return {lse, fmaf(max, unit, -product) + __fadd_rn(log_sum, -__fadd_rn(lse, -product))};
}

/// Called where the exponentials of row r of a warp's scores are to be computed relative to `most`, of which `origin`
/// is the exponent: of a far row the scores are relative to it afterwards.
template <int kBlocks>
__device__ __forceinline__ void subtract_far(float (&s)[kBlocks][4], int r, float most, float& origin) {
  if (fabsf(origin) <= kFarExponent) return;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 2 * r; e < 2 * r + 2; ++e) s[n][e] -= most;
  }
  origin = 0.0f;
}

/// What the scores of a far row are relative to: `high` is subtracted first. 0 of other rows.
struct FlexOrigin {
  float high, low;
};

__device__ __forceinline__ bool is_far(const FlexRow& row) { return __float_as_uint(row.lse) == 0x80000000u; }

template <class Config>
__device__ __forceinline__ FlexOrigin origin_of(const FlexBackwardArguments& a, const FlexRow& row, int b, int h,
                                                int q) {
  if (!is_far(row) || q >= a.queries) return {0.0f, 0.0f};
  const long long at = static_cast<long long>(b * a.heads + h) * a.queries + q;
  // Probabilities come out times dropout's scale, as of other rows.
  return {a.lse[at], a.lse_low[at] - (Config::kDropout ? logf(a.dropout.scale) : 0.0f)};
}

/// Of a far row's scaled score in units of 1 / scale, what is above lse, in the same unit: exp(score * scale) is the
/// probability then. Other rows' scores stay.
__device__ __forceinline__ float above_lse(float score, float scale, const FlexOrigin& origin) {
  return (fmaf(score, scale, -origin.high) - origin.low) / scale;
}

}  // namespace fusegrad::device
