// Sums over the batches of a CTA that stays with a head (kKeeps), of contributions that every batch makes to the same
// places: each thread adds up its pairs' in shared memory, and adds them to theirs behind the last batch.
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

template <class Of, int k>
class SchemeSums<Of, k, Scheme::kOverBatches> : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;
  static_assert(Of::Config::kKeeps && !Of::Config::kFixedPoint && !Of::Config::kPartialSums);

 public:
  using Base::Base;

  template <class Reads>
  __device__ __forceinline__ void add(float v, int, int, int e, float, int, int, int, int, bool, const Reads&) {
    value_[e] = v;
  }
  __device__ __forceinline__ void end_block(int m, int n, int, int) {
    float4& sum = of_block(m, n);
    float4 x = sum;
    x.x += value_[0];
    x.y += value_[1];
    x.z += value_[2];
    x.w += value_[3];
    sum = x;
  }
  __device__ __forceinline__ void end_batches(int h, int q, int kv) const {
#pragma unroll 1
    for (int i = 0; i < Of::kBlocksM * Of::kBlocksN; ++i) {
      const int m = i / Of::kBlocksN, n = i % Of::kBlocksN;
      const float4 x = of_block(m, n);
      const float sums[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at_q = q + n * 8 + e % 2, at_kv = kv + m * 16 + e / 2 * 8;
        if (at_q < Base::a_.queries && at_kv < Base::a_.keys) Base::put_at(0, h, at_q, at_kv, sums[e]);
      }
    }
  }

 private:
  __device__ __forceinline__ float4& of_block(int m, int n) const {
    return reinterpret_cast<float4*>(
        Base::shared_)[(m * Of::kBlocksN + n) * Of::kThreads + static_cast<int>(threadIdx.x)];
  }
  float value_[4];
};

}  // namespace fusegrad::device
