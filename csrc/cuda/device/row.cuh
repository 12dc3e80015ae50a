// The row skeleton: load once, reduce online, last step. A loss is its functor (device/cross_entropy.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/cross_entropy.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/vector.cuh"

namespace fusegrad::device {

constexpr int kRowThreads = 256;
constexpr int kUnroll = 8;  // vectors in flight a thread

template <class T>
__device__ T lowest_pad() {
  return static_cast<T>(minus_infinity());
}

/// A row by a cluster of CTAs (of one, on GPUs without clusters), each with a slice of the row's vectors.
///
/// Phase 1 reads the slice, keeps a copy in shared memory if `stash`, and adds it up. Phase 2 merges the sums over the
/// cluster. Phase 3 writes the gradient from the copy, or from a second read. A thread reads in phase 3 only what it
/// wrote in phase 1, so the copy needs no barrier; and it may overwrite the logits, because the barriers of phase 2 lie
/// between every read of them in phase 1 and the first write.
template <class Loss, class T, int kWidth>
__global__ void __launch_bounds__(kRowThreads, 3)
    row_by_cluster(const __grid_constant__ typename Loss::Params p, const __grid_constant__ Constants constants,
                   int slice, bool stash) {
  using P = Pack<T, kWidth>;
  using Sums = typename Loss::Sums;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ SharedSlots<Sums, kRowThreads / 32> warp_sums;
  __shared__ SharedSlots<Sums, 1> cluster_slot;
  P* copy = reinterpret_cast<P*>(shared_bytes);

  const int rank = cluster_rank();
  const int64_t row = blockIdx.x / cluster_size();
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = p.grad != nullptr ? static_cast<T*>(p.grad) + row * p.grad_stride : nullptr;
  const Loss loss(p, constants, row);
  const RowVectors<T, kWidth> vectors(logits, p.cols);
  const int begin = rank * slice, end = min(begin + slice, vectors.count);
  const int thread = static_cast<int>(threadIdx.x);
  const bool writes = rank == 0 && thread == 0;

  if (!loss.needs_row()) {  // the same for every CTA of the cluster
    if (writes) loss.finish(Sums{}, true);
    if (grad == nullptr) return;
    const P fill = filled<T, kWidth>(static_cast<T>(loss.constant()));
    for (int v = begin + thread; v < end; v += kRowThreads) vectors.store(grad, v, fill);
    return;
  }

  // Phase 1
  Sums sums;
  for (int v0 = begin + thread; v0 < end; v0 += kUnroll * kRowThreads) {
    P packs[kUnroll];
    if (v0 >= vectors.whole_begin && v0 + (kUnroll - 1) * kRowThreads < min(end, vectors.whole_end)) {
      const T* from = logits + vectors.column(v0);
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) packs[j] = P::load(from + j * kRowThreads * kWidth);
    } else {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int v = v0 + j * kRowThreads;
        packs[j] = v < end ? vectors.load(logits, v, lowest_pad<T>()) : filled<T, kWidth>(lowest_pad<T>());
      }
    }
    if (stash) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int v = v0 + j * kRowThreads;
        if (v < end) copy[v - begin] = packs[j];
      }
    }
    loss.template add<kUnroll, kWidth>(sums, packs, [&](int j) {
      const int v = v0 + j * kRowThreads;
      return v < end ? vectors.column(v) : kNoColumn - kWidth;
    });
  }

  // Phase 2
  merge_block<kRowThreads>(sums, warp_sums.get());
  merge_cluster(sums, cluster_slot.get());

  // Phase 3
  const auto g = loss.finish(sums, writes);
  if (grad != nullptr) {
    for (int v = begin + thread; v < end; v += kRowThreads) {
      P pack = stash ? copy[v - begin] : vectors.load(logits, v, static_cast<T>(0.f));
      loss.template gradient<kWidth>(g, pack, vectors.column(v));
      // A row that is ignored, and was read for its lse only.
      if (loss.constant_gradient()) pack = filled<T, kWidth>(static_cast<T>(0.f));
      vectors.store(grad, v, pack);
    }
  }
  cluster_leave();
}

/// Short rows: one for each group of `lanes` lanes. The second read finds the row in the cache.
template <class Loss, class T, int kWidth>
__global__ void __launch_bounds__(128) row_by_lanes(const __grid_constant__ typename Loss::Params p,
                                                    const __grid_constant__ Constants constants, int lanes) {
  using P = Pack<T, kWidth>;
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  // Groups beyond the last row repeat it and write nothing: all lanes must take part in the merge.
  const bool exists = group < p.rows;
  const int64_t row = exists ? group : p.rows - 1;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const Loss loss(p, constants, row);
  const RowVectors<T, kWidth> vectors(logits, p.cols);
  typename Loss::Sums sums;
  if (loss.needs_row()) {
    for (int v = lane; v < vectors.count; v += lanes) {
      const P packs[1] = {vectors.load(logits, v, lowest_pad<T>())};
      loss.template add<1, kWidth>(sums, packs, [&](int) { return vectors.column(v); });
    }
  }
  merge_lanes(sums, lanes);
  const auto g = loss.finish(sums, exists && lane == 0);
  if (p.grad == nullptr || !exists) return;
  T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
  for (int v = lane; v < vectors.count; v += lanes) {
    P pack = vectors.load(logits, v, static_cast<T>(0.f));
    if (loss.constant_gradient()) {
      pack = filled<T, kWidth>(static_cast<T>(loss.constant()));
    } else {
      loss.template gradient<kWidth>(g, pack, vectors.column(v));
    }
    vectors.store(grad, v, pack);
  }
}

}  // namespace fusegrad::device
