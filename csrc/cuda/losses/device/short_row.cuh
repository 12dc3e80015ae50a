// The row skeleton for rows that fit a CTA's registers; row.cuh has the one for longer rows.
#pragma once

#include <cstdint>

#include "cuda/device/reduce.cuh"
#include "cuda/device/vector.cuh"

namespace fusegrad::device {

constexpr int kShortRowThreads = 256;
constexpr int kShortRowVectors = 4;  // a thread holds
/// CTAs of a multiprocessor, as registers allow.
template <class Loss>
constexpr int kShortRowCtas = Loss::kUnroll >= 4 && Loss::kInputs == 1 ? 4 : 2;
template <class Loss>
  requires requires { Loss::kTopK; }
constexpr int kShortRowCtas<Loss> = 3;

/// A group of `group` threads (a power of 2, at most kShortRowThreads) computes a row and holds its vectors in
/// registers between the phases. The gradient may overwrite the logits: each thread has read its own vectors before it
/// writes them, and the target's logit comes with the merged sums.
template <class Loss, class T, int kWidth>
__global__ void __launch_bounds__(kShortRowThreads, Loss::kUnroll >= 4 && Loss::kInputs == 1 ? 4 : 2)
    row_by_group(const __grid_constant__ typename Loss::Params p,
                 const __grid_constant__ typename Loss::Constants constants, int group) {
  using P = Pack<T, kWidth>;
  using Sums = typename Loss::Sums;
  using Parts = typename Loss::Parts;
  constexpr int kInputs = Loss::kInputs, kHeld = kShortRowVectors;
  __shared__ SharedSlots<Sums, kShortRowThreads / 32> warp_sums;
  __shared__ SharedSlots<Parts, kShortRowThreads / 32> warp_parts;
  const int thread = static_cast<int>(threadIdx.x) & (group - 1);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kShortRowThreads / group) + threadIdx.x / group;
  // Groups beyond the last row repeat it and write nothing: all threads must take part in the merge.
  const bool exists = index < p.rows;
  Loss loss(p, constants, exists ? index : p.rows - 1);
  const RowVectors<T, kWidth> vectors(loss.input(0), p.cols, kUnitBytes);
  constexpr bool kTopK = requires { Loss::kTopK; };
  if constexpr (kTopK) {
    constexpr int kMarks = kShortRowThreads * kHeld / 4;  // a byte for each vector
    __shared__ uint32_t marks[kMarks];
    for (int i = threadIdx.x; i < kMarks; i += kShortRowThreads) marks[i] = 0;
    __syncthreads();
    loss.mark(marks + threadIdx.x / group * (group * kHeld / 4), vectors.column(0), vectors.cols, thread, group);
    __syncthreads();
  }

  // Phase 1
  P packs[kInputs][kHeld];
  Sums sums;
  if (loss.needs_row()) {
    typename Loss::Early early{};
    if (thread == 0) early = loss.read_early(0, vectors.cols);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) packs[k][j] = vectors.load(loss.input(k), thread + j * group, lowest_pad<T>());
    }
    if (Loss::kUnroll >= kHeld && vectors.whole(thread) && vectors.whole(thread + (kHeld - 1) * group)) {
      loss.template add<true>(sums, packs, [&](int j) { return vectors.column(thread + j * group); });
    } else {
#pragma unroll 1
      for (int j = 0; j < kHeld; ++j) {
        if (thread + j * group >= vectors.count) break;
        P one[kInputs][1];
        for (int k = 0; k < kInputs; ++k) one[k][0] = chosen(packs[k], j);
        loss.template add<false>(sums, one, [&](int) { return vectors.column(thread + j * group); });
      }
    }
    if (thread == 0) loss.add_early(sums, early);
  }

  // Phase 2
  merge_threads(sums, warp_sums.get(), group);
  Parts parts;
  if constexpr (Loss::kSecondPass) {
    if (loss.needs_row()) {
      const auto normal = loss.normal(sums);
#pragma unroll 1
      for (int j = 0; j < kHeld; ++j) {
        if (thread + j * group >= vectors.count) break;
        P one[kInputs];
        for (int k = 0; k < kInputs; ++k) one[k] = chosen(packs[k], j);
        loss.template add_parts<false, false>(normal, parts, one, vectors.column(thread + j * group));
      }
    }
    merge_threads(parts, warp_parts.get(), group);
  }
  if constexpr (kTopK) {
    const int lanes = min(group, 32), lane = thread & (lanes - 1);
    parts = loss.top_parts(sums, loss.read_top(lane, lanes), lane, lanes);
  }
  if (exists && thread == 0) loss.write(sums, parts);

  // Phase 3
  if (!loss.has_output() || (!kTopK && !exists)) return;  // a top-k teacher's loss has a barrier below
  const auto g = loss.finish(sums, parts);
#pragma unroll 1
  for (int j = 0; j < kHeld; ++j) {
    const int v = thread + j * group;
    if ((kTopK && !exists) || v >= vectors.count) break;
    P one[kInputs];
    for (int k = 0; k < kInputs; ++k) {
      one[k] = loss.constant_gradient() ? filled<T, kWidth>(static_cast<T>(loss.constant())) : chosen(packs[k], j);
    }
    if (!loss.constant_gradient()) loss.template gradient<false>(g, one, vectors.column(v));
    for (int k = 0; k < kInputs; ++k) {
      if (loss.output(k) != nullptr) vectors.store(loss.output(k), v, one[k]);
    }
    // Stored by the thread that wrote the target's vector.
    if (loss.constant_gradient()) continue;
    loss.write_target(g, sums, vectors.column(v), vectors.column(v + 1));
  }
  if constexpr (kTopK) {
    __syncthreads();  // the K columns' vectors have been written
    if (exists && !loss.constant_gradient()) loss.write_top(g, 0, vectors.cols, thread, group);
  }
}

}  // namespace fusegrad::device
