// The gradient by the scores, which the kernels of the backward share, and where a thread's pairs lie.
#pragma once

#include "cuda/device/flex_scores.cuh"

namespace fusegrad::device {

/// In place of a derivative.
struct NoDerivative {
  struct Captured {
    long long nothing;
  };
  static constexpr int kContributions = 0;
  static constexpr int kBuffer[] = {-1};
  template <int>
  static __device__ long long offset(const Captured&, float, int, int, int, int, bool) {
    return -1;
  }
};

/// What is known of a query in the backward.
struct FlexQuery {
  FlexRow row;
  float max, grad_max;  // where there is a gradient of max_scores
};

template <class Config>
struct FlexPairGradient {
  using ScoreMod = typename Config::ScoreMod;

  /// The probability of a pair, 0 where it does not take part (kRaw: anything); `changed` is the score that the
  /// score_mod makes of it.
  template <bool kRaw = false, class Reads = score_mod::ReadThere>
  static __device__ __forceinline__ float probability(const typename ScoreMod::Captured& captured, float scale,
                                                      float score, float lse, int b, int h, int q, int kv,
                                                      bool takes_part, float& changed, const Reads& reads = Reads()) {
    changed = score * scale;
    if constexpr (kHas<ScoreMod>)
      changed = ScoreMod::apply(captured, changed, b, h, q, kv, kAllRead || takes_part, reads);
    float p;
    if constexpr (kSame<typename Config::Element, float>) {
      p = expf(changed - lse);
    } else if constexpr (kHas<ScoreMod>) {
      p = power_of_two(changed * kLog2E - lse);
    } else {
      p = power_of_two(score * (scale * kLog2E) - lse);
    }
    return kRaw || takes_part ? p : 0.0f;
  }

  /// From query * key and grad_out * value of a pair: `p` its probability, `value` its contributions; returns the
  /// gradient by scale * query * key. All of them are 0 where the pair does not take part.
  template <class Reads = score_mod::ReadThere>
  static __device__ __forceinline__ float apply(const typename ScoreMod::Captured& captured, float scale, float score,
                                                float grad, const FlexQuery& row, int b, int h, int q, int kv,
                                                bool takes_part, float& p, float* value, const Reads& reads = Reads()) {
    float changed;
    // What p is of pairs that take no part reaches nothing, as their gradients are replaced too; but the portable
    // kernels spill more where it is replaced last.
    p = probability<kAllRead>(captured, scale, score, row.row.lse, b, h, q, kv, takes_part, changed, reads);
    float d = p * (grad - row.row.delta);
    if constexpr (kAllRead) p = takes_part ? p : 0.0f;
    if constexpr (Config::kMaxGradient) d += changed == row.max ? row.grad_max : 0.0f;
    if constexpr (kHas<ScoreMod>) {
      // A score that the score_mod made -inf is as one that is masked.
      using Derivative = typename Config::Derivative;
      const bool counts = takes_part && changed != -FUSEGRAD_INFINITY;
      d = Derivative::apply(captured_of<Derivative>(captured), score * scale, d, b, h, q, kv, kAllRead || counts, value,
                            reads);
      if constexpr (kAllRead) {
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

}  // namespace fusegrad::device
