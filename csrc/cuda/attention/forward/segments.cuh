// The forward with batch_invariant: what of a row's results must not depend on the other rows of the call.
//
// - The tile of keys, the products' instructions and their order follow from the dtype, the head sizes and the
//   architecture. Rows of a tile do not meet, so how many there are and which is free.
// - Tiles begin at multiples of their size and come in ascending order. The exponential of a key that takes no part is
//   0: products and sums get +0, maxima stay, and what is rescaled is multiplied by 1. So it makes no difference
//   whether a tile without a key of the row's is computed.
// - A segment, kSegmentKeys keys from a multiple of it on, begins without maximum and sums. Segments are added up in
//   their order by one function, add_segment: by the CTA that has them all, or, where each is a CTA's, by the kernel
//   that merges (segments_merge.cuh).
// - Programs are compiled with --fmad=false: which products and sums become one rounding is what is written here, not
//   what a compiler finds in the one program and not in the other.
#pragma once

#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/forward/merge.cuh"

namespace fusegrad::device {

/// What keys give of a row: the score that exponentials are relative to, -inf without a key, and their sum.
struct FlexSegmentRow {
  float max, sum;
};

/// How what a segment gives is added to what those before gave.
struct FlexSegmentWeights {
  float before, now;
  bool first, none;
  __device__ __forceinline__ float add(float total, float part) const {
    const float sum = fmaf(now, part, __fmul_rn(before, total));
    return none ? total : first ? part : sum;
  }
};
/// Adds a segment to a row. `unit`: what scores are multiplied by.
__device__ __forceinline__ FlexSegmentWeights add_segment(FlexSegmentRow& total, const FlexSegmentRow& part,
                                                          float unit) {
  const float max = score_mod::maximum(total.max, part.max);
  const auto weight = [&](float of) { return expf(__fmul_rn(__fadd_rn(of, -max), unit)); };
  const FlexSegmentWeights w{weight(total.max), weight(part.max), total.max == -FUSEGRAD_INFINITY,
                             part.max == -FUSEGRAD_INFINITY};
  total.sum = w.add(total.sum, part.sum);
  total.max = w.none ? total.max : w.first ? part.max : max;
  return w;
}

/// A whole row: what its output is multiplied by, and lse in two numbers.
struct FlexSegmentResult {
  float factor, lse, low;
};
__device__ __forceinline__ FlexSegmentResult segment_result(const FlexSegmentRow& row, float unit,
                                                            float dropout_scale) {
  const bool none = row.max == -FUSEGRAD_INFINITY;
  const FlexLse lse = lse_of(row.max, unit, logf(row.sum));
  return {none ? 0.0f : __fdiv_rn(dropout_scale, row.sum), none ? -FUSEGRAD_INFINITY : lse.lse, none ? 0.0f : lse.low};
}
/// Called by one thread of a row, whose place in [B, H, M] is `at`.
template <class Arguments>
__device__ __forceinline__ void store_segment_lse(const Arguments& a, long long at, const FlexSegmentResult& result) {
  a.lse[at] = result.lse;
  if (a.lse_low != nullptr) a.lse_low[at] = result.low;
}

/// The online softmax of a thread's two rows in a segment. The score that a row's exponentials are relative to depends
/// on the row's own scores alone: votes only say whether a warp looks.
template <class Config, int kBlocksN>
class FlexSegmentSoftmax {
  static constexpr bool kFloat = kSame<typename Config::Element, float>;
  static constexpr float kSlack = 8.0f;  // exponentials follow a score that is larger by 2^kSlack

 public:
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max_[r] = -FUSEGRAD_INFINITY;
      sum_[r] = 0.0f;
    }
    far_ = false;
  }
  /// Called by whole warps.
  __device__ __forceinline__ FlexSegmentRow row(int r) const { return {max_[r], row_sum(sum_[r])}; }

  /// A tile: in place of scores their exponentials; by `rescale` the output of the segment's earlier tiles is to be
  /// multiplied. `unit`: what scores are still to be multiplied by. `wait`: for the product in flight, once there are
  /// maxima.
  template <class Wait>
  __device__ __forceinline__ void add(float (&s)[kBlocksN][4], float (&rescale)[2], float unit, const Wait& wait) {
    const float factor = unit * kLog2E;
    float max[2] = {max_[0], max_[1]}, most[2], origin[2], sum[2] = {};
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) max[r] = score_mod::maximum(max[r], score_mod::maximum(s[n][2 * r], s[n][2 * r + 1]));
    }
    // Negated, so that NaN and a row that had no score yet follow too. The maximum of far rows is subtracted there.
    bool follows = far_;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = max_[r];
      origin[r] = max_[r] * factor;
      rescale[r] = 1.0f;
      follows = follows || !((max[r] - max_[r]) * factor <= kSlack);
    }
    if (__any_sync(~0u, follows)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float now = row_max(max[r]), next = (now - max_[r]) * factor <= kSlack ? max_[r] : now;
        // Without a score yet all exponentials are 0 (-inf less -inf would be NaN).
        most[r] = next == -FUSEGRAD_INFINITY ? 0.0f : next;
        origin[r] = most[r] * factor;
        rescale[r] = power_of_two((max_[r] - most[r]) * factor);
        max_[r] = next;
      }
      if constexpr (!kFloat) far_ = subtract_far(s, most, origin);
    }
    wait();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          if constexpr (kFloat) {
            s[n][e] = expf((s[n][e] - most[r]) * unit);
          } else {
            s[n][e] = power_of_two(fmaf(s[n][e], factor, -origin[r]));
          }
          sum[r] += s[n][e];
        }
      }
      sum_[r] = fmaf(sum_[r], rescale[r], sum[r]);
    }
  }
  template <int kBlocksE>
  static __device__ __forceinline__ void multiply(float (&out)[kBlocksE][4], const float (&rescale)[2]) {
    if (!__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= rescale[e / 2];
    }
  }

 private:
  float max_[2], sum_[2];
  bool far_;
};

/// Those of a row's tiles, ascending, whose columns are in [begin, end). Called by whole warps.
struct SegmentTiles {
  int first, last;
  __device__ __forceinline__ SegmentTiles(const TileWalk& walk, bool listed, int begin, int end, int lane) {
    const int count = max(walk.count(), 0);
    if (!listed) {
      first = min(begin, count);
      last = min(end, count);
      return;
    }
    int before = 0, through = 0;
    for (int i = lane; i < count; i += kLanes) {
      const int column = TileEntry<>::column(walk[i]);
      before += column < begin ? 1 : 0;
      through += column < end ? 1 : 0;
    }
    first = static_cast<int>(__reduce_add_sync(~0u, before));
    last = static_cast<int>(__reduce_add_sync(~0u, through));
  }
};

}  // namespace fusegrad::device
