// Chooses the kernel of the row skeleton for a loss and its rows, and how many CTAs share a row.
#pragma once

#include <algorithm>

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/losses/device/row.cuh"
#include "cuda/losses/device/short_row.cuh"
#include "cuda/losses/host/row_kernels.h"

namespace fusegrad::cuda {

using device::RowSplit;

constexpr int64_t kSliceBytes = 72 << 10;  // three CTAs with such slices fit a multiprocessor of 228 KiB
constexpr int64_t kOtherShared = 8192;     // at most, of the kernels themselves

struct RowShape {
  int cluster = 1;
  bool bulk = false;
  RowSplit split{};
  int shared_bytes = 0;
};

/// How many CTAs share a row of `vectors` vectors (of all inputs, with their marks, `vector_bytes` each), and whether
/// they keep it in shared memory; `again`: the row is needed more than once.
inline RowShape choose_shape(const Device& device, int64_t rows, int64_t vectors, int64_t vector_bytes, bool again,
                             bool bulk) {
  RowShape shape;
  const auto slice = [&] { return (vectors + 8 * shape.cluster - 1) / (8 * shape.cluster) * 8; };
  const auto slice_bytes = [&] { return slice() * vector_bytes; };
  while (again && shape.cluster < device.cluster && slice_bytes() > kSliceBytes) shape.cluster *= 2;
  // Few rows are each spread over multiprocessors that would idle, while a CTA has at least 8 KiB of its row.
  while (shape.cluster < std::min(device.cluster, kPortableCluster) &&
         rows * shape.cluster * 2 <= device.multiprocessors && slice_bytes() > 8192) {
    shape.cluster *= 2;
  }
  shape.split.slice = static_cast<int>(slice());
  // CTAs have whole steps of a warp.
  shape.split.chunk = ((shape.split.slice + device::kMaxChunks - 1) / device::kMaxChunks + 31) / 32 * 32;
  // A CTA alone on a multiprocessor takes longer than a second reading from the L2 cache.
  const int ctas = device.cluster > 1 ? 1 : 2;
  shape.split.stash = again && slice_bytes() + kOtherShared <= device.shared_bytes &&
                      ctas * (slice_bytes() + kOtherShared) <= device.shared_of_multiprocessor;
  shape.bulk = bulk && shape.split.stash && device.cluster > 1;
  shape.shared_bytes = shape.split.stash ? static_cast<int>(slice_bytes()) : 0;
  return shape;
}

/// Rows of `cols` columns whose inputs all start like `input` does within a line.
struct Rows {
  int64_t rows = 0;
  int64_t cols = 0;
  const void* input = nullptr;
  int64_t stride = 0;
  bool gradient = false;
  bool spread = true;  // few rows may be spread over more CTAs, which add up in another order; false: all rows are
};

template <class Loss, class T, int kWidth>
void launch_rows(const Rows& r, const typename Loss::Params& p, const typename Loss::Constants& constants,
                 void* stream) {
  // A row that does not start at a multiple of `align` bytes has so many vectors more.
  const auto count = [&](int align) { return (r.cols + kWidth - 1) / kWidth + (kWidth > 1 ? align / 16 : 0); };
  const bool units = is_aligned(r.input, r.stride, sizeof(T), device::kUnitBytes);
  if (const auto vectors = count(units ? 0 : device::kUnitBytes);
      vectors <= device::kShortRowThreads * device::kShortRowVectors) {
    // A vector a thread in short rows: more threads share what is the same for every row.
    int group = 2;
    while (group < device::kShortRowThreads && group * (group < 32 ? 1 : device::kShortRowVectors) < vectors)
      group *= 2;
    const int64_t groups = device::kShortRowThreads / group;
    launch("row_by_group", device::row_by_group<Loss, T, kWidth>,
           {(r.rows + groups - 1) / groups, device::kShortRowThreads}, stream, p, constants, group);
    return;
  }
  constexpr bool kMayBulk = kWidth > 1 && Loss::kBulk;
  constexpr bool kOnePass = requires { Loss::kOnePass; };
  const bool lines = is_aligned(r.input, r.stride, sizeof(T), device::kLineBytes);
  constexpr bool kTopK = requires { Loss::kTopK; };
  constexpr int kMark = kTopK ? 1 : 0;         // bytes beside each vector
  const int64_t rows = r.spread ? r.rows : 1;  // one alone is spread, and so are all
  const auto shape = choose_shape(current_device(), rows, lines ? count(0) : count(device::kLineBytes),
                                  Loss::kInputs * kWidth * sizeof(T) + kMark,
                                  (r.gradient && !kOnePass) || Loss::kSecondPass, kMayBulk);
  const int shared_bytes = shape.split.stash ? shape.shared_bytes : kMark * shape.split.slice;
  const Grid grid{r.rows * shape.cluster, device::kRowThreads, shape.cluster, shared_bytes};
  if constexpr (kMayBulk) {
    const auto kernel = device::row_by_cluster<Loss, T, kWidth, true>;
    if (shape.bulk) return launch("row_by_cluster", kernel, grid, stream, p, constants, shape.split);
  }
  launch("row_by_cluster", device::row_by_cluster<Loss, T, kWidth, false>, grid, stream, p, constants, shape.split);
}

}  // namespace fusegrad::cuda
