// The row skeleton: load once, reduce online, last step. A loss is its functor (device/cross_entropy.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/reduce.cuh"
#include "cuda/device/vector.cuh"

namespace fusegrad::device {

constexpr int kRowThreads = 256;
constexpr int kUnroll = 4;  // vectors in flight a thread

/// A row by a cluster of CTAs (of one, on GPUs without clusters), each with a slice of the row's vectors.
///
/// Phase 1 reads the slice, keeps a copy in shared memory if `stash`, and adds it up. Phase 2 merges the sums over the
/// cluster. Phase 3 writes the gradient from the copy, or from a second read. A thread reads in phase 3 only what it
/// wrote in phase 1, so the copy needs no barrier; and it may overwrite the logits, because the barriers of phase 2 lie
/// between every read of them in phase 1 and the first write.
template <class Loss, class T, int kWidth>
__global__ void __launch_bounds__(kRowThreads, 3)
    row_by_cluster(const __grid_constant__ typename Loss::Params p, int slice, bool stash) {
  using P = Pack<T, kWidth>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ SharedSlots<typename Loss::Sums, kRowThreads / 32> warp_sums;
  __shared__ SharedSlots<typename Loss::Sums, 1> cluster_slot;
  P* copy = reinterpret_cast<P*>(shared_bytes);

  const int rank = cluster_rank();
  const int64_t row = blockIdx.x / cluster_size();
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = p.grad != nullptr ? static_cast<T*>(p.grad) + row * p.grad_stride : nullptr;
  const Loss loss(p, row);
  const RowVectors<T, kWidth> vectors(logits, p.cols);
  const int begin = rank * slice, end = min(begin + slice, vectors.count());
  const bool writes = rank == 0 && threadIdx.x == 0;

  if (!loss.needs_row()) {  // the same for every CTA of the cluster
    if (writes) loss.finish(typename Loss::Sums{}, true);
    if (grad == nullptr) return;
    P fill;
    for (int i = 0; i < kWidth; ++i) fill.value[i] = from_float<T>(loss.target.in_range ? 0.f : not_a_number());
    for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kRowThreads) vectors.store(grad, v, fill);
    return;
  }

  // Phase 1
  typename Loss::Sums sums;
  for (int v0 = begin + static_cast<int>(threadIdx.x); v0 < end; v0 += kUnroll * kRowThreads) {
    P packs[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int v = v0 + j * kRowThreads;
      if (v < end) {
        packs[j] = vectors.load(logits, v, minus_infinity());
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) packs[j].value[i] = from_float<T>(minus_infinity());
      }
    }
    if (stash) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int v = v0 + j * kRowThreads;
        if (v < end) copy[v - begin] = packs[j];
      }
    }
    loss.template add<kUnroll, kWidth>(sums, packs, [&](int j, int i) -> int64_t {
      const int v = v0 + j * kRowThreads;
      const int64_t c = vectors.column(v) + i;
      return v < end && vectors.has(c) ? c : -1;
    });
  }

  // Phase 2
  merge_block<kRowThreads>(sums, warp_sums.get());
  merge_cluster(sums, cluster_slot.get());

  // Phase 3
  const auto g = loss.finish(sums, writes);
  if (grad != nullptr) {
    const bool zero = !loss.target.kept;
    for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kRowThreads) {
      P pack = stash ? copy[v - begin] : vectors.load(logits, v, 0.f);
      const int64_t c = vectors.column(v);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        // A dense target reads its coefficient at the column: not beyond the row.
        const bool inside = vectors.has(c + i);
        pack.value[i] =
            from_float<T>(zero || !inside ? 0.f : loss.gradient(g, to_float(pack.value[i]), c + i));
      }
      vectors.store(grad, v, pack);
    }
  }
  cluster_leave();
}

/// Short rows: one a warp. The second read finds the row in the cache.
template <class Loss, class T, int kWidth>
__global__ void __launch_bounds__(128) row_by_warp(const __grid_constant__ typename Loss::Params p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = p.grad != nullptr ? static_cast<T*>(p.grad) + row * p.grad_stride : nullptr;
  const Loss loss(p, row);
  const RowVectors<T, kWidth> vectors(logits, p.cols);
  typename Loss::Sums sums;
  if (loss.needs_row()) {
    for (int v = lane; v < vectors.count(); v += 32) {
      Pack<T, kWidth> packs[1] = {vectors.load(logits, v, minus_infinity())};
      loss.template add<1, kWidth>(sums, packs, [&](int, int i) -> int64_t {
        const int64_t c = vectors.column(v) + i;
        return vectors.has(c) ? c : -1;
      });
    }
    merge_warp(sums);
  }
  const auto g = loss.finish(sums, lane == 0);
  if (grad == nullptr) return;
  const bool constant = !loss.target.kept || !loss.target.in_range;
  const float fill = loss.target.in_range ? 0.f : not_a_number();
  for (int v = lane; v < vectors.count(); v += 32) {
    Pack<T, kWidth> pack = vectors.load(logits, v, 0.f);
    const int64_t c = vectors.column(v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value =
          constant || !vectors.has(c + i) ? fill : loss.gradient(g, to_float(pack.value[i]), c + i);
      pack.value[i] = from_float<T>(value);
    }
    vectors.store(grad, v, pack);
  }
}

}  // namespace fusegrad::device
