// Classes E and G, and contributions that are stored: each pair by itself, to memory.
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

template <class Of, int k, Scheme kScheme>
  requires(kScheme == Scheme::kInjective || kScheme == Scheme::kGeneral || kScheme == Scheme::kStored)
class SchemeSums<Of, k, kScheme> : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;
  using typename Base::Derivative;

 public:
  using Base::Base;

  template <class Reads>
  __device__ __forceinline__ void add(float v, int, int, int e, float score, int b, int h, int q, int kv,
                                      bool takes_part, const Reads& of_pair) {
    value_[e] = v;
    const bool reads = kAllRead<typename Of::Config> || takes_part;
    const long long at =
        Derivative::template offset<k>(captured_of<Derivative>(Base::captured_), score, b, h, q, kv, reads, of_pair);
    // Pairs that take no part have 0 too. What is stored has no zeros below.
    at_[e] = kScheme != Scheme::kStored && v == 0.0f ? -1 : at;
  }
  // Added only now, so that reads of indices before are shared with the score_mod's.
  __device__ __forceinline__ void end_block(int, int, int, int) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool there = at_[e] >= 0;
      if constexpr (kScheme == Scheme::kStored) {
        if (there) device::store(static_cast<ElementOf<Derivative, k>*>(Base::to_.data) + at_[e], value_[e]);
      } else {
        Base::put_if(there, at_[e], value_[e]);
      }
    }
  }

 private:
  float value_[4];
  long long at_[4];
};

}  // namespace fusegrad::device
