// Contributions to several elements along axes, which the derivative gives element by element (Derivative::scatter).
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

template <class Of, int k, Scheme kScheme>
  requires(is_vector(kScheme))
class SchemeSums<Of, k, kScheme> : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;

 public:
  using Base::Base;

  /// An element, of a thread's four pairs (kv, q) = (g + 8 * (e / 2), 2 * t + e % 2).
  __device__ __forceinline__ void put_vector(const float (&value)[4], const long long (&place)[4]) const {
    const int lane = Base::lane();
    if constexpr (kScheme == Scheme::kInvariantVector) {
      float sum = value[0] + value[1] + (value[2] + value[3]);
#pragma unroll
      for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      if (lane == 0) put_there(place[0], sum);
    } else if constexpr (kScheme == Scheme::kKvVector) {
      const float first = row_sum(value[0] + value[1]), second = row_sum(value[2] + value[3]);
      if (lane % 4 == 0) {
        put_there(place[0], first);
        put_there(place[2], second);
      }
    } else if constexpr (kScheme == Scheme::kQVector) {
      float of_query[2] = {value[0] + value[2], value[1] + value[3]};
      fold(of_query, lane);
      if ((lane & 12) == 0) put_there(lane & 16 ? place[1] : place[0], of_query[0]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) Base::put_if(value[e] != 0.0f && place[e] >= 0, place[e], value[e]);
    }
  }

 private:
  __device__ __forceinline__ void put_there(long long at, float sum) const {
    if (sum != 0.0f && at >= 0) Base::put(at, sum);
  }
};

}  // namespace fusegrad::device
