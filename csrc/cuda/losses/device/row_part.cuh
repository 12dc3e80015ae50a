// The states of segments of rows, and a row's outputs from those of all segments (RowPart and RowWhole of
// losses/row_kernels.h). A segment is one CTA's, whatever rows and segments there are: its columns are added up in an
// order that depends on them alone. All processes have all states of a row when they make its outputs.
#pragma once

#include <cstdint>

#include "cuda/losses/device/cross_entropy.cuh"

namespace fusegrad::device {

constexpr int kPartThreads = 128;
constexpr int kPartVectors = 4;  // in flight a thread

template <class T, Mode kMode>
__global__ void __launch_bounds__(kPartThreads, 6)
    row_part_kernel(const __grid_constant__ RowPart p, const __grid_constant__ Constants constants) {
  constexpr int kWidth = 16 / sizeof(T);
  using P = Pack<T, kWidth>;
  using Loss = CrossEntropy<T, kMode>;
  using Sums = typename Loss::Sums;
  __shared__ SharedSlots<Sums, kPartThreads / 32> warp_sums;
  const int thread = static_cast<int>(threadIdx.x), segments = static_cast<int>(p.segments);
  const int segment = static_cast<int>(blockIdx.x) % segments;
  const int64_t row = static_cast<int>(blockIdx.x) / segments;
  const int64_t begin = min(segment * p.segment, p.cols), offset = p.col_offset + begin;
  RowForward part = p;
  part.logits = static_cast<const T*>(p.logits) + begin;
  part.cols = min(p.segment, p.cols - begin);
  const Loss loss(part, constants, row, p.vocab, static_cast<int>(offset));
  const T* logits = loss.input(0);
  const int cols = static_cast<int>(part.cols), whole = cols / kWidth, y = loss.target.index - static_cast<int>(offset);
  Sums sums;
  T at_target = static_cast<T>(0.f);
  if (loss.needs_row()) {
    if (thread == 0 && y >= 0 && y < cols) at_target = logits[y];
    int v = thread;
    for (; v + (kPartVectors - 1) * kPartThreads < whole; v += kPartVectors * kPartThreads) {
      P packs[1][kPartVectors];
#pragma unroll
      for (int j = 0; j < kPartVectors; ++j) packs[0][j] = P::load(logits + (v + j * kPartThreads) * kWidth);
      loss.template add<true>(sums, packs, [&](int j) { return (v + j * kPartThreads) * kWidth; });
    }
#pragma unroll 1
    for (; v < whole; v += kPartThreads) {
      const P packs[1][1] = {{P::load(logits + v * kWidth)}};
      loss.template add<true>(sums, packs, [&](int) { return v * kWidth; });
    }
    if (v == whole && cols % kWidth != 0) {  // one thread
      const RowVectors<T, kWidth> vectors(logits, cols, kUnitBytes);
      const P packs[1][1] = {{vectors.load(logits, whole, lowest_pad<T>())}};
      loss.template add<false>(sums, packs, [&](int) { return whole * kWidth; });
    }
  }
  merge_threads(sums, warp_sums.get(), kPartThreads);
  if (thread != 0) return;
  loss.add_early(sums, at_target);
  if (sums.best_column != kNoColumn) sums.best_column += static_cast<int>(offset);
  static_cast<Sums*>(p.states)[segment * p.rows + row] = sums;
}

constexpr int kSegmentLanes = static_cast<int>(kVocabSegments);

/// A row for sixteen lanes; `p.cols` are all of the vocabulary.
template <class T, Mode kMode>
__global__ void __launch_bounds__(kPartThreads)
    row_whole_kernel(const __grid_constant__ RowWhole p, const __grid_constant__ Constants constants) {
  using Loss = CrossEntropy<T, kMode>;
  const int lane = static_cast<int>(threadIdx.x) % kSegmentLanes;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kPartThreads + threadIdx.x) / kSegmentLanes;
  const int64_t row = min(index, p.rows - 1);  // all lanes of a warp must take part in the merge
  auto sums = static_cast<const typename Loss::Sums*>(p.states)[lane * p.rows + row];
  sums.merge(OverLanes{kSegmentLanes});
  if (lane == 0 && index < p.rows) Loss(p, constants, row, p.vocab).write(sums, {});
}

}  // namespace fusegrad::device
