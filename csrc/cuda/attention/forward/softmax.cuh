// The online softmax of the Hopper forward (hopper.cuh): for a thread's two rows their maxima, their sums, and the
// factor that rescales what was summed before.
#pragma once

#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/device/scores.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

/// kSlack: exponentials follow a score that is larger by 2^kSlack.
template <class Config, class Arguments = FlexForwardArguments, int kSlack = Config::kMaxScores ? 0 : 8>
class FlexHopperSoftmax {
  using T = typename Config::Element;
  static constexpr int kBlocksN = Config::kCols / 8, kBlocksE = Config::kValue / 8;
  // The largest sum of a tile's exponentials relative to a row's first maximum: float32 and BFloat16 are far from
  // overflow.
  static constexpr float kMostSum = 0x1p64f;
  // Whether maxima of far rows are subtracted. Without a score_mod exponents overflow only where scores are beyond
  // 2^30, and what rounding of the exponent does to all of a row cancels but in lse.
  static constexpr bool kFarScores = kHas<typename Config::ScoreMod> || Config::kKeySplits;

 public:
  __device__ __forceinline__ explicit FlexHopperSoftmax(const Arguments& a) : a_(a) {}

  /// What scores are still to be multiplied by.
  __device__ __forceinline__ float unit() const { return Config::kUnscaled ? a_.scale : 1.0f; }

  /// Called before a row's first tile.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max_[r] = -FUSEGRAD_INFINITY;
      sum_[r] = ties_[r] = 0.0f;
    }
    far_ = false;
  }
  /// Row r's maximum in units of the scores here; its sum and ties over the thread's pairs alone.
  __device__ __forceinline__ float max(int r) const { return max_[r]; }
  __device__ __forceinline__ float sum(int r) const { return sum_[r]; }
  __device__ __forceinline__ float ties(int r) const { return ties_[r]; }

  /// A tile: in place of scores their exponentials; by `rescale` the output of earlier tiles is to be multiplied. As
  /// FlexForward::softmax. `wait`: for the product in flight, once there are maxima. By then it is done, or nearly so,
  /// and operands of the next one are packed while exponentials are computed, which take eight cycles each.
  template <class Wait>
  __device__ __forceinline__ void add(float (&s)[kBlocksN][4], float (&rescale)[2], const Wait& wait) {
    const float factor = unit() * kLog2E;
    float max[2] = {max_[0], max_[1]}, sum[2] = {}, origin[2];
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) max[r] = score_mod::maximum(max[r], larger(s[n], r));
    }
    // Negated, so that NaN and a row that had no score yet follow too. The maximum of far rows is subtracted there.
    bool follows = kFarScores && far_;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      origin[r] = max_[r] * factor;
      rescale[r] = 1.0f;
      follows = follows || !((max[r] - max_[r]) * factor <= kSlack);
    }
    // Lanes exchange their row's maximum only if a score of the warp exceeds it by so much.
    if (Config::kMaxScores || __any_sync(~0u, follows)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) origin[r] = follow(s, max[r], r, factor, rescale);
      if constexpr (kFarScores) far_ = subtract_far(s, max_, origin);
    }
    wait();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[n][e] = power_of_two(s[n][e] * factor - origin[r]);
          sum[r] += s[n][e];
        }
      }
      sum_[r] = sum_[r] * rescale[r] + sum[r];
    }
  }
  /// Whether add_by_first cannot take one of the thread's rows: it has no score yet, or is far from 0.
  __device__ __forceinline__ bool without_maximum() const {
    return max_[0] == -FUSEGRAD_INFINITY || max_[1] == -FUSEGRAD_INFINITY || (kFarScores && far_);
  }
  /// lse of the thread's rows in two numbers, where the warp has a far row. `sum`: of whole rows.
  __device__ __forceinline__ void correct_far(const float (&sum)[2], float (&lse)[2], float (&low)[2]) const {
    const float factor = unit() * kLog2E;
    const auto far = [&](int r) { return fabsf(max_[r] * factor) > kFarExponent; };
    if (!__any_sync(~0u, far(0) || far(1))) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // What rounding of the exponent did to the row's sum.
      const float rest = kFarScores ? 0.0f : fmaf(max_[r], factor, -__fmul_rn(max_[r], factor)) / kLog2E;
      const FlexLse exact = lse_of(max_[r], unit(), logf(sum[r]) - rest);
      lse[r] = far(r) ? exact.lse : lse[r];
      low[r] = far(r) ? exact.low : 0.0f;
    }
  }
  /// As add, relative to the maxima that there are; also as an operand. Whether exponentials are not too large, else
  /// their sums are not added. drop(n): takes from block n of the operand what dropout drops. counts(r): whether row r
  /// is one: what boxes have beyond the queries may be anything.
  template <class Drop, class Counts>
  __device__ __forceinline__ bool add_by_first(float (&s)[kBlocksN][4], unsigned (&p)[kBlocksN * 2], const Drop& drop,
                                               const Counts& counts) {
    const float factor = unit() * kLog2E, origin[2] = {max_[0] * factor, max_[1] * factor};
    const auto scale = [&](int n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = s[n][e] * factor - origin[e / 2];
    };
    float sum[2] = {};
    scale(0);
    // This order keeps ptxas from putting what waits for an exponential right behind it.
#pragma unroll
    for (int n = 0; n <= kBlocksN; ++n) {
      if (n < kBlocksN) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = power_of_two(s[n][e]);
      }
      if (n + 1 < kBlocksN) scale(n + 1);
      if (n > 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e / 2] += s[n - 1][e];
        put_operand<T>(p + 2 * (n - 1), s[n - 1]);
        drop(n - 1);
      }
      if (n < kBlocksN) hold_order();
    }
    if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kMostSum)) {
      if (__any_sync(~0u, (sum[0] > kMostSum && counts(0)) || (sum[1] > kMostSum && counts(1)))) return false;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += sum[r];
    return true;
  }
  static __device__ __forceinline__ void multiply(float (&out)[kBlocksE][4], const float (&rescale)[2]) {
    if (!__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= rescale[e / 2];
    }
  }
  /// Exponentials as an operand, once the product in flight no longer reads p: computed before, ptxas would put it into
  /// the same registers.
  static __device__ __forceinline__ void pack(unsigned (&p)[kBlocksN * 2], const float (&s)[kBlocksN][4]) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) put_operand<T>(p + 2 * n, s[n]);
  }

 private:
  __device__ __forceinline__ static float larger(const float (&x)[4], int r) {
    return score_mod::maximum(x[2 * r], x[2 * r + 1]);
  }
  // Returns what a row's exponentials are relative to, given a lane's maximum.
  __device__ __forceinline__ float follow(const float (&s)[kBlocksN][4], float max, int r, float factor,
                                          float (&rescale)[2]) {
    max = row_max(max);
    if constexpr (Config::kMaxScores) {
      ties_[r] = max != max_[r] ? 0.0f : ties_[r];
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) ties_[r] += (s[n][2 * r] == max) + (s[n][2 * r + 1] == max);
    }
    // NaN and the first score (infinity) do not compare as less, and are followed.
    max = (max - max_[r]) * factor <= kSlack ? max_[r] : max;
    // Without a score yet all exponentials are 0 (-inf less -inf would be NaN).
    const float from = max == -FUSEGRAD_INFINITY ? 0.0f : max;
    rescale[r] = power_of_two((max_[r] - from) * factor);
    max_[r] = max;
    return from * factor;
  }

  const Arguments& a_;
  float max_[2], sum_[2], ties_[2];
  bool far_;
};

}  // namespace fusegrad::device
