// The row skeleton: load once, reduce online, epilogue. A loss is its functor, for example cross_entropy.cuh. The
// functor says how many input rows there are (kInputs, all of one dtype and equally aligned), what is summed over a row
// (Sums), whether a second pass follows and what it needs of the sums (kSecondPass, Parts: divergences need both
// normalizers), and the gradients.
#pragma once

#include <cstdint>

#include "cuda/device/bulk.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/vector.cuh"

namespace fusegrad::device {

constexpr int kRowThreads = 256;
constexpr int kMaxChunks = 4;

/// How the CTAs of a cluster share a row.
struct RowSplit {
  int slice;   // vectors of each input a CTA has, a multiple of 8
  int chunk;   // vectors of a bulk copy, a multiple of 8; at most kMaxChunks of them make a slice
  bool stash;  // the slice is kept in shared memory
};

/// A cluster of CTAs (one, on GPUs without clusters) computes a row, each CTA a slice of the row's vectors.
///
/// Phase 1 reads the slice and adds it up. With kBulk bulk copies bring all of it to shared memory at once; otherwise
/// the threads read it, and store a copy there if it fits. Phase 2 merges the sums over the cluster; then a loss may go
/// over its slice again, and leave in place of its second input what spares it work later. Phase 3, the epilogue,
/// writes the gradient from the copy or from another read.
///
/// A loss whose gradient needs no sums (kOnePass) writes it in phase 1.
///
/// The gradient may overwrite the logits: a CTA touches only its own slice of them, and its barrier in phase 2 lies
/// between all reads of phase 1 and the first write. In a second read a thread reads each vector before it writes it.
template <class Loss, class T, int kWidth, bool kBulk>
__global__ void __launch_bounds__(kRowThreads, !kBulk && Loss::kUnroll >= 4 && Loss::kInputs == 1 ? 4 : 3)
    row_by_cluster(const __grid_constant__ typename Loss::Params p,
                   const __grid_constant__ typename Loss::Constants constants, const RowSplit split) {
  using P = Pack<T, kWidth>;
  using Sums = typename Loss::Sums;
  using Parts = typename Loss::Parts;
  constexpr int kInputs = Loss::kInputs;
  constexpr int kThreads = kRowThreads;
  constexpr int kUnroll = Loss::kUnroll;  // vectors in flight a thread
  constexpr bool kTopK = requires { Loss::kTopK; };
  constexpr bool kOnePass = requires { Loss::kOnePass; };
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ RowMerge<Sums, kThreads / 32> merge_sums;
  __shared__ RowMerge<Parts, kThreads / 32> merge_parts;
  __shared__ Arrival arrivals[kMaxChunks];
  P* copy = reinterpret_cast<P*>(shared_bytes);

  const int thread = static_cast<int>(threadIdx.x), rank = cluster_rank(), size = cluster_size();
  Loss loss(p, constants, blockIdx.x / size);
  const RowVectors<T, kWidth> vectors(loss.input(0), p.cols, kLineBytes);
  const int begin = rank * split.slice, end = min(begin + split.slice, vectors.count);
  const int whole_begin = max(begin, vectors.whole_begin), whole_end = min(end, vectors.whole_end);
  const auto fill = [&](T x) {
#pragma unroll 1
    for (int v = begin + thread; v < end; v += kThreads) {
      for (int k = 0; k < kInputs; ++k) {
        if (loss.output(k) != nullptr) vectors.store(loss.output(k), v, filled<T, kWidth>(x));
      }
    }
  };
  if (!loss.needs_row()) {  // the same for every CTA of the cluster
    if (rank == 0 && thread == 0) loss.write(Sums{}, Parts{});
    fill(static_cast<T>(loss.constant()));
    return;
  }

  if (thread == 0) {
#if __CUDA_ARCH__ >= 900
    merge_sums.init();
    if constexpr (Loss::kSecondPass) merge_parts.init();
    if constexpr (kBulk) {
      for (int i = 0; i < kMaxChunks; ++i) arrivals[i].init();
    }
    Arrival::fence_init();
    if constexpr (kBulk) {
      for (int i = 0, from = begin; from < whole_end; ++i, from += split.chunk) {
        const int first = max(from, whole_begin), last = min(from + split.chunk, whole_end);
        const uint32_t bytes = max(last - first, 0) * sizeof(P);
        arrivals[i].expect(kInputs * bytes);
        for (int k = 0; k < kInputs && bytes > 0; ++k) {
          arrivals[i].copy(copy + k * split.slice + (first - begin), loss.input(k) + vectors.column(first), bytes);
        }
      }
    }
#endif
  }
#if __CUDA_ARCH__ >= 900
  if (size > 1) cluster_arrive();
#endif
  if constexpr (kTopK) {  // while the copies come
    auto* marks = reinterpret_cast<uint32_t*>(shared_bytes + (split.stash ? kInputs * split.slice * sizeof(P) : 0));
    for (int i = thread; i < split.slice / 4; i += kThreads) marks[i] = 0;
    __syncthreads();
    loss.mark(marks, vectors.column(begin), vectors.column(end), thread, kThreads);
  }
  if constexpr (kBulk || kTopK) __syncthreads();

  // Phase 1
  Sums sums;
  // The row's first and last vector, where cut, stay in a register each of a thread of their own.
  int cut = -1;
  if (thread == 0 && vectors.lead % kWidth != 0 && whole_begin > begin && whole_begin <= end) cut = whole_begin - 1;
  if (thread == 32 && whole_end < end) cut = end - 1;
  P cut_packs[kInputs];
  if (cut >= 0) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) cut_packs[k] = vectors.load(loss.input(k), cut, lowest_pad<T>());
  }
  typename Loss::Early early{};
  if (thread < 32) early = loss.read_early(vectors.column(begin), vectors.column(end));
  [[maybe_unused]] const auto top = [&] {
    if constexpr (kTopK) {
      return thread < 32 ? loss.read_top(thread, 32) : typename Loss::Top{};
    } else {
      return NoParts{};
    }
  }();
  using Gradient = typename Loss::Gradient;
  Gradient early_gradient;
  if constexpr (kOnePass) early_gradient = loss.finish(Sums{}, Parts{});
  const auto write_vector = [&](const Gradient& g, int v, P(&packs)[kInputs]) {
    loss.template gradient<kBulk>(g, packs, vectors.column(v));
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (loss.output(k) != nullptr) packs[k].store(loss.output(k) + vectors.column(v));
    }
  };
  int waited = begin;
  for (int v = whole_begin + thread, chunk = 0; v < whole_end; v += kUnroll * kThreads) {
    if constexpr (kBulk) {
      for (; waited < whole_end && waited <= v + (kUnroll - 1) * kThreads; waited += split.chunk)
        arrivals[chunk++].wait();
    }
    if (v + (kUnroll - 1) * kThreads < whole_end) {
      P packs[kInputs][kUnroll];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        const T* from = loss.input(k) + vectors.column(v);
        P* kept = copy + k * split.slice + (v - begin);
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          packs[k][j] = kBulk ? kept[j * kThreads] : P::load(from + j * kThreads * kWidth);
        }
        if (!kBulk && split.stash) {
#pragma unroll
          for (int j = 0; j < kUnroll; ++j) kept[j * kThreads] = packs[k][j];
        }
      }
      loss.template add<true>(sums, packs, [&](int j) { return vectors.column(v + j * kThreads); });
      if constexpr (kOnePass) {
#pragma unroll
        for (int j = 0; j < kUnroll && loss.has_output(); ++j) {
          P both[kInputs];
#pragma unroll
          for (int k = 0; k < kInputs; ++k) both[k] = packs[k][j];
          write_vector(early_gradient, v + j * kThreads, both);
        }
      }
    } else {
#pragma unroll 1
      for (int u = v; u < whole_end; u += kThreads) {
        P packs[kInputs][1];
        for (int k = 0; k < kInputs; ++k) {
          P* kept = copy + k * split.slice + (u - begin);
          packs[k][0] = kBulk ? *kept : P::load(loss.input(k) + vectors.column(u));
          if (!kBulk && split.stash) *kept = packs[k][0];
        }
        loss.template add<true>(sums, packs, [&](int) { return vectors.column(u); });
        if constexpr (kOnePass) {
          P both[kInputs];
          for (int k = 0; k < kInputs; ++k) both[k] = packs[k][0];
          if (loss.has_output()) write_vector(early_gradient, u, both);
        }
      }
    }
  }
  if (cut >= 0) {
    P packs[kInputs][1];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) packs[k][0] = cut_packs[k];
    loss.template add<false>(sums, packs, [&](int) { return vectors.column(cut); });
  }

  // Phase 2
#if __CUDA_ARCH__ >= 900
  if (size > 1) cluster_wait();
#endif
  merge_sums.merge(sums, [&](Sums& merged) { loss.add_early(merged, early); });
  const bool kept = kBulk || split.stash;
  const auto kept_pack = [&](int k, int v) -> P& { return copy[k * split.slice + (v - begin)]; };
  const auto load_inputs = [&](int v, P(&packs)[kInputs]) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      packs[k] = kept ? kept_pack(k, v) : P::load(loss.input(k) + vectors.column(v));
    }
  };
  Parts parts;
  if constexpr (Loss::kSecondPass) {
    const auto normal = loss.normal(sums);
#pragma unroll 2
    for (int v = whole_begin + thread; v < whole_end; v += kThreads) {
      P packs[kInputs];
      load_inputs(v, packs);
      loss.template add_parts<true, kBulk>(normal, parts, packs, vectors.column(v));
      if constexpr (kBulk && Loss::kCaches) kept_pack(1, v) = packs[1];  // read again by the same thread
    }
    if (cut >= 0) {
      P packs[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) packs[k] = cut_packs[k];
      loss.template add_parts<false, false>(normal, parts, packs, vectors.column(cut));
    }
    merge_parts.merge(parts, [](Parts&) {});
  }
  if constexpr (kTopK) {
    __shared__ SharedSlots<Parts, 1> top_parts;
    if (thread < 32) {
      parts = loss.top_parts(sums, top, thread, 32);
      if (thread == 0) *top_parts.get() = parts;
    }
    __syncthreads();
    parts = *top_parts.get();
  }
  if (rank == 0 && thread == kThreads - 1) loss.write(sums, parts);

  // Phase 3
  if (!loss.has_output()) return;
  if (loss.constant_gradient()) {  // an ignored row, read for its lse only
    fill(static_cast<T>(loss.constant()));
    return;
  }
  const auto g = loss.finish(sums, parts);
  int v = kOnePass ? whole_end : whole_begin + thread;
#pragma unroll 1
  for (; v + (kUnroll - 1) * kThreads < whole_end; v += kUnroll * kThreads) {
    P packs[kUnroll][kInputs];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) load_inputs(v + j * kThreads, packs[j]);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) write_vector(g, v + j * kThreads, packs[j]);
  }
#pragma unroll 1
  for (; v < whole_end; v += kThreads) {
    P packs[kInputs];
    load_inputs(v, packs);
    write_vector(g, v, packs);
  }
  if (cut >= 0) {
    loss.template gradient<false>(g, cut_packs, vectors.column(cut));
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (loss.output(k) != nullptr) vectors.store(loss.output(k), cut, cut_packs[k]);
    }
  }
  __syncthreads();  // the target's vector has been written
  if constexpr (kTopK) loss.write_top(g, vectors.column(begin), vectors.column(end), thread, kThreads);
  if (thread == 0) loss.write_target(g, sums, vectors.column(begin), vectors.column(end));
}

}  // namespace fusegrad::device
