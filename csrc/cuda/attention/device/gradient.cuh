// The gradient of a pair's score, for all kernels of the backward, and contributions by vectors of captured buffers.
#pragma once

#include "cuda/attention/device/far_rows.cuh"

namespace fusegrad::device {

/// What the backward knows of a query.
struct FlexQuery {
  FlexRow row;
  float max, grad_max;  // where there is a gradient of max_scores
  float origin;         // in tiles with a far row (take_origin)
};

template <class Config>
struct FlexPairGradient {
  using ScoreMod = typename Config::ScoreMod;
  using Derivative = typename Config::Derivative;

  /// The probability of a pair, 0 where it does not take part (kRaw: anything); `changed` is the score that the
  /// score_mod makes of it. kFar: there may be far rows.
  template <bool kRaw = false, bool kFar = false, class Reads = score_mod::ReadThere<ScoreMod::kUnread>>
  static __device__ __forceinline__ float probability(const typename ScoreMod::Captured& captured, float scale,
                                                      float score, const FlexQuery& row, int b, int h, int q, int kv,
                                                      bool takes_part, float& changed, const Reads& reads = Reads()) {
    const float lse = row.row.lse;
    changed = score * scale;
    if constexpr (kHas<ScoreMod>)
      changed = ScoreMod::apply(captured, changed, b, h, q, kv, kAllRead<Config> || takes_part, reads);
    float p;
    if constexpr (kFar) {
      const float above = kHas<ScoreMod> ? changed - row.origin : fmaf(score, scale, -row.origin);
      if constexpr (kSame<typename Config::Element, float>) {
        p = expf(above - lse);
      } else {
        const bool near = !kHas<ScoreMod> && row.origin == 0.0f;
        p = power_of_two(near ? score * (scale * kLog2E) - lse : above * kLog2E - lse);
      }
    } else if constexpr (kSame<typename Config::Element, float>) {
      p = expf(changed - lse);
    } else if constexpr (kHas<ScoreMod>) {
      // Compilers would move a product by itself into the operands of a mask's select, where it is not fused.
      p = power_of_two(fmaf(changed, kLog2E, -lse));
    } else {
      p = power_of_two(score * (scale * kLog2E) - lse);
    }
    return kRaw || takes_part ? p : 0.0f;
  }

  /// From query * key and grad_out * value of a pair: `p` its probability, `value` its contributions, and where there
  /// are vectors, behind them the gradient by what the score_mod gives; returns the gradient by scale * query * key.
  /// All of them are 0 where the pair does not take part.
  template <bool kFar = false, class Reads = score_mod::ReadThere<ScoreMod::kUnread>>
  static __device__ __forceinline__ float apply(const typename ScoreMod::Captured& captured, float scale, float score,
                                                float grad, const FlexQuery& row, int b, int h, int q, int kv,
                                                bool takes_part, float& p, float* value, const Reads& reads = Reads()) {
    float changed;
    // p of pairs that take no part reaches nothing, as their gradients are replaced too; but the portable kernels spill
    // more where it is replaced last.
    p = probability<kAllRead<Config>, kFar>(captured, scale, score, row, b, h, q, kv, takes_part, changed, reads);
    float d = p * (grad - row.row.delta);
    if constexpr (kAllRead<Config>) p = takes_part ? p : 0.0f;
    if constexpr (Config::kMaxGradient) d += changed == row.max ? row.grad_max : 0.0f;
    if constexpr (kHas<ScoreMod>) {
      // A score that the score_mod made -inf counts as masked, whatever the derivative is there. Without one the
      // gradient is 0 already, as the probability is; but the portable kernels are slower without the test.
      constexpr bool kZeroAlready = kAllRead<Config> && Derivative::kPasses && !Config::kMaxGradient;
      const bool counts = takes_part && (kZeroAlready || changed != -FUSEGRAD_INFINITY);
      if constexpr (Derivative::kVectors) value[Derivative::kContributions] = counts ? d : 0.0f;
      d = Derivative::apply(captured_of<Derivative>(captured), score * scale, d, b, h, q, kv,
                            kAllRead<Config> || counts, value, reads);
      if constexpr (kAllRead<Config>) {
        d = counts ? d : 0.0f;
#pragma unroll
        for (int k = 0; k < Derivative::kContributions; ++k) value[k] = counts ? value[k] : 0.0f;
      }
      return d;
    } else {
      return takes_part ? d : 0.0f;
    }
  }
};

/// Pairs whose contributions with axes are computed together, as a reader of Derivative::scatter: all of an
/// accumulator's four. A pair whose gradient is 0 contributes nothing.
template <class Config>
struct FlexVectorPairs {
  using Derivative = typename Config::Derivative;
  static constexpr int kPairs = 4;
  float score[kPairs], grad[kPairs];
  int q[kPairs], kv[kPairs];

  /// Pair i, with what FlexPairGradient::apply left in `value`.
  __device__ __forceinline__ void set(int i, const float* value, float score_of, int at_q, int at_kv) {
    if constexpr (Derivative::kVectors) {
      score[i] = score_of;
      grad[i] = value[Derivative::kContributions];
      q[i] = at_q;
      kv[i] = at_kv;
    }
  }
  /// Called by all lanes of a warp.
  template <class Captured, class Put>
  __device__ __forceinline__ void scatter(const Captured& captured, int b, int h, const Put& put) const {
    if constexpr (Derivative::kVectors) {
      bool valid[kPairs], some = false;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        valid[i] = grad[i] != 0.0f;
        some |= valid[i];
      }
      if (!__any_sync(~0u, some)) return;
      Derivative::template scatter<kPairs>(captured_of<Derivative>(captured), score, grad, b, h, q, kv, valid, put);
    }
  }
};

/// The largest magnitude of each contribution, from which fixed point takes its unit.
template <class Config>
class FlexLargest {
  using Derivative = typename Config::Derivative;

 public:
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int k = 0; k < Derivative::kContributions; ++k) largest_[k] = 0.0f;
  }
  /// Adds pair i of four, as FlexVectorPairs::set.
  __device__ __forceinline__ void add(int i, const float* value, float score, int q, int kv) {
#pragma unroll
    for (int k = 0; k < Derivative::kContributions; ++k) largest_[k] = score_mod::maximum(largest_[k], fabsf(value[k]));
    pairs_.set(i, value, score, q, kv);
  }
  /// Called after four pairs.
  template <class Captured>
  __device__ __forceinline__ void end_pairs(const Captured& captured, int b, int h) {
    pairs_.scatter(captured, b, h, Put{largest_});
  }
  /// Magnitudes are ordered as their bits are, NaN above all.
  __device__ __forceinline__ void finish(float* to) const {
#pragma unroll
    for (int k = 0; k < Derivative::kContributions; ++k) {
      const unsigned most = __reduce_max_sync(~0u, __float_as_uint(fabsf(largest_[k])));
      if (static_cast<int>(threadIdx.x) % kLanes == 0 && most != 0)
        atomicMax(reinterpret_cast<unsigned*>(to + Derivative::kContribution[k].buffer), most);
    }
  }

 private:
  struct Put {
    float* largest;
    template <int k, int kPairs>
    __device__ __forceinline__ void put(const float (&value)[kPairs], const long long (&)[kPairs]) const {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) largest[k] = score_mod::maximum(largest[k], fabsf(value[i]));
    }
  };
  float largest_[Derivative::kContributions + 1];
  FlexVectorPairs<Config> pairs_;
};

}  // namespace fusegrad::device
