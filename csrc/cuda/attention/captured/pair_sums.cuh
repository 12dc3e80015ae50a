// What the kernels that sum over batches (grad_buffers/) share: which batches a
// CTA walks, and how the sums of its pairs reach a captured buffer's gradient.
#pragma once

#include "cuda/attention/captured/buffers.cuh"

namespace fusegrad::device {

/// The work of a CTA that sums over batches: the tile at `place` among the `tiles` of all heads, and every step-th
/// batch from `first` on, below `end`; with kGrouped they belong to one group. The CTAs of a tile are neighbours, and
/// among them those of a group.
template <bool kGrouped>
struct BatchWalk {
  int place, first, end, step;

  __device__ __forceinline__ BatchWalk(const FlexBackwardArguments& a, int tiles) {
    const int ctas = static_cast<int>(gridDim.x) / tiles, of_tile = static_cast<int>(blockIdx.x) % ctas;
    place = static_cast<int>(blockIdx.x) / ctas;
    if constexpr (kGrouped) {
      const auto [groups, group_stride, batch_stride] = a.batch_groups;
      const int parts = ctas / groups, group = of_tile / parts;
      first = group * group_stride + of_tile % parts * batch_stride;
      end = batch_stride == 1 ? min(a.batches, (group + 1) * group_stride) : a.batches;
      step = parts * batch_stride;
    } else {
      first = of_tile;
      end = a.batches;
      step = ctas;
    }
  }
};

/// Whether two places, negative for none, are neighbours that one instruction may write.
template <class Element>
__device__ __forceinline__ bool are_vector(const Element* to, const long long (&at)[2]) {
  return at[0] >= 0 && at[1] == at[0] + 1 &&
         reinterpret_cast<unsigned long long>(to + at[0]) % (2 * sizeof(Element)) == 0;
}
template <class Element>
__device__ __forceinline__ void store_two(Element* to, const long long (&at)[2], const float (&x)[2]) {
  if (are_vector(to, at)) {
    if constexpr (sizeof(Element) == 4) {
      *reinterpret_cast<float2*>(to + at[0]) = {x[0], x[1]};
    } else {
      *reinterpret_cast<unsigned*>(to + at[0]) = pack(Element{}, x[0], x[1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at[i] >= 0) store(to + at[i], x[i]);
    }
  }
}
__device__ __forceinline__ void add_two(float* to, const long long (&at)[2], const float (&x)[2]) {
  if (are_vector(to, at)) {
    add_pair(to + at[0], x[0], x[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at[i] >= 0) atomicAdd(to + at[i], x[i]);
    }
  }
}

/// What a thread added up of the pairs of a CTA's kRows queries by kCols keys, of contribution k: stored for a later
/// kernel (kPartialSums), stored as the gradient (kStored: no other CTA has a sum for its elements), or added to
/// memory. query(e), key(n, e) and inside(n, e): a pair's place, and whether it is one. b: any batch with these places.
template <class Config, int k, int kThreads, int kBlocksN, class Captured, class Query, class Key, class Inside>
__device__ __forceinline__ void put_pair_sums(const FlexSums& to, const float (&sums)[kBlocksN][4],
                                              const Captured& captured, int b, int h, const Query& query,
                                              const Key& key, const Inside& inside) {
  using Derivative = typename Config::Derivative;
  constexpr bool kStored = Config::Schemes::kScheme[k] == Scheme::kStored;
  static_assert(!(kStored && Config::kPartialSums));
  const long long first =
      static_cast<long long>(blockIdx.x) * Config::kRows * Config::kCols + static_cast<int>(threadIdx.x);
  // A copy, which no addition to memory may change: what depends on b and h alone is computed once.
  const typename Derivative::Captured own = captured_of<Derivative>(captured);
#pragma unroll
  for (int i = 0; i < kBlocksN * 4; i += 2) {
    const int n = i / 4;
    float sum[2];
    long long at[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = i % 4 + j;
      sum[j] = sums[n][e];
      at[j] = Derivative::template offset<k>(own, 0.0f, b, h, query(e), key(n, e),
                                             inside(n, e) && (kStored || sum[j] != 0.0f));
      if constexpr (Config::kPartialSums) {
        static_cast<float*>(to.data)[first + (i + j) * kThreads] = at[j] < 0 ? 0.0f : sum[j];
        if (at[j] >= 0) to.elements[first + (i + j) * kThreads] = at[j];
      }
    }
    if constexpr (kStored) {
      store_two(static_cast<ElementOf<Derivative, k>*>(to.data), at, sum);
    } else if constexpr (!Config::kPartialSums) {
      add_two(static_cast<float*>(to.data), at, sum);
    }
  }
}

}  // namespace fusegrad::device
