// The forward over whole rows: which kernel, and how many CTAs hold a row.
#include <algorithm>

#include "cuda/device/cross_entropy.cuh"
#include "cuda/device/row.cuh"
#include "cuda/device/short_row.cuh"
#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using device::Constants;
using device::CrossEntropy;
using device::kRowThreads;
using device::Mode;
using device::RowSplit;

constexpr int64_t kSliceBytes = 72 << 10;  // three CTAs with such slices fit a multiprocessor of 228 KiB
constexpr int64_t kStaticShared = 2048;    // at most, of the kernels themselves

struct RowShape {
  int cluster = 1;
  bool bulk = false;
  RowSplit split{};
  int shared_bytes = 0;
};

/// How many CTAs share a row of `vectors` vectors, and whether they keep it in shared memory.
RowShape choose_shape(const Device& device, int64_t rows, int64_t vectors, int64_t vector_bytes, bool gradient) {
  RowShape shape;
  const auto slice = [&] { return (vectors + 8 * shape.cluster - 1) / (8 * shape.cluster) * 8; };
  const auto slice_bytes = [&] { return slice() * vector_bytes; };
  while (gradient && shape.cluster < device.cluster && slice_bytes() > kSliceBytes) shape.cluster *= 2;
  // Few rows: spread each over the multiprocessors that would idle, while a CTA has at least 8 KiB of it.
  while (shape.cluster < std::min(device.cluster, kPortableCluster) &&
         rows * shape.cluster * 2 <= device.multiprocessors && slice_bytes() > 8192) {
    shape.cluster *= 2;
  }
  shape.split.slice = static_cast<int>(slice());
  // Chunks of whole steps of a warp.
  shape.split.chunk = ((shape.split.slice + device::kMaxChunks - 1) / device::kMaxChunks + 31) / 32 * 32;
  shape.split.stash = gradient && slice_bytes() + kStaticShared <= device.shared_bytes;
  shape.bulk = shape.split.stash && device.cluster > 1 && vector_bytes == 16;
  shape.shared_bytes = shape.split.stash ? static_cast<int>(slice_bytes()) : 0;
  return shape;
}

template <class T, Mode kMode, int kWidth>
void launch_rows(const RowForward& p, void* stream) {
  using Loss = CrossEntropy<T, kMode>;
  const Constants constants(p.targets, p.transform, p.z_loss, p.cols);
  // A row that does not start at a multiple of `align` bytes has so many vectors more.
  const auto count = [&](int align) { return (p.cols + kWidth - 1) / kWidth + (kWidth > 1 ? align / 16 : 0); };
  const bool units = is_aligned(p.logits, p.logits_stride, sizeof(T), device::kUnitBytes);
  if (const auto vectors = count(units ? 0 : device::kUnitBytes);
      vectors <= device::kShortRowThreads * device::kShortRowVectors) {
    // A vector a thread in short rows: more threads share what is the same for every row.
    int group = 2;
    while (group < device::kShortRowThreads && group * (group < 32 ? 1 : device::kShortRowVectors) < vectors)
      group *= 2;
    const int64_t groups = device::kShortRowThreads / group;
    launch("row_by_group", device::row_by_group<Loss, T, kWidth>,
           {(p.rows + groups - 1) / groups, device::kShortRowThreads}, stream, p, constants, group);
    return;
  }
  const bool lines = is_aligned(p.logits, p.logits_stride, sizeof(T), device::kLineBytes);
  const auto vectors = lines ? count(0) : count(device::kLineBytes);
  const auto shape = choose_shape(current_device(), p.rows, vectors, kWidth * sizeof(T), p.grad != nullptr);
  const auto grid = [&] { return Grid{p.rows * shape.cluster, kRowThreads, shape.cluster, shape.shared_bytes}; };
  if constexpr (kWidth > 1) {
    const auto kernel = device::row_by_cluster<Loss, T, kWidth, true>;
    if (shape.bulk) return launch("row_by_cluster", kernel, grid(), stream, p, constants, shape.split);
  }
  launch("row_by_cluster", device::row_by_cluster<Loss, T, kWidth, false>, grid(), stream, p, constants, shape.split);
}

template <class T, Mode kMode>
void launch_aligned(const RowForward& p, void* stream) {
  constexpr int kWidth = 16 / sizeof(T);
  if (p.grad == nullptr || same_alignment(p.logits, p.logits_stride, p.grad, p.grad_stride, sizeof(T))) {
    launch_rows<T, kMode, kWidth>(p, stream);
  } else {
    launch_rows<T, kMode, 1>(p, stream);
  }
}

}  // namespace

void row_forward(const RowForward& p, DType dtype, void* stream) {
  if (p.rows == 0) return;
  check_columns("cross entropy", p.cols);
  const bool plain = p.targets.smoothing == 0.0 && p.transform.cap == 0.0 && p.transform.scale > 0.0 &&
                     p.entropy == nullptr && p.predicted == nullptr;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.targets.dense) {
      launch_aligned<T, Mode::kDense>(p, stream);
    } else if (plain) {
      launch_aligned<T, Mode::kPlain>(p, stream);
    } else {
      launch_aligned<T, Mode::kSparse>(p, stream);
    }
  });
}

}  // namespace fusegrad::cuda
