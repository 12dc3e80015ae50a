// The forward over whole rows: which kernel, and how many CTAs hold a row.
#include <algorithm>

#include "cuda/device/cross_entropy.cuh"
#include "cuda/device/row.cuh"
#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using device::CrossEntropy;
using device::kRowThreads;
using device::Mode;

constexpr int64_t kShortRowBytes = 2048;   // rows up to here are one warp's, or less
constexpr int64_t kSliceBytes = 72 << 10;  // three CTAs with such a slice fit a multiprocessor of 228 KiB
constexpr int kMaxCluster = 8;             // portable

struct RowShape {
  int cluster = 1;
  int slice = 0;  // vectors
  bool stash = false;
};

/// How many CTAs share a row, and whether they keep it in shared memory.
RowShape choose_shape(const Device& device, int64_t rows, int64_t vectors, int64_t vector_bytes, bool gradient) {
  RowShape shape;
  const auto slice_bytes = [&] { return (vectors + shape.cluster - 1) / shape.cluster * vector_bytes; };
  if (device.clusters) {
    if (gradient) {
      while (shape.cluster < kMaxCluster && slice_bytes() > kSliceBytes) shape.cluster *= 2;
    }
    // Few rows: spread each over the multiprocessors that would idle, while a CTA has at least 8 KiB of it.
    while (shape.cluster < kMaxCluster && rows * shape.cluster * 2 <= device.multiprocessors && slice_bytes() > 8192) {
      shape.cluster *= 2;
    }
  }
  shape.slice = static_cast<int>((vectors + shape.cluster - 1) / shape.cluster);
  constexpr int64_t kStaticShared = 2048;
  shape.stash = gradient && slice_bytes() + kStaticShared <= device.shared_bytes;
  return shape;
}

template <class T, Mode kMode, int kWidth>
void launch_rows(const RowForward& p, void* stream) {
  using Loss = CrossEntropy<T, kMode>;
  const device::Constants constants(p.targets, p.transform, p.z_loss, p.cols);
  // A row that starts inside a 16-byte unit touches one vector more.
  const int64_t vectors = (p.cols + kWidth - 1) / kWidth + (kWidth > 1 ? 1 : 0);
  if (p.cols * static_cast<int64_t>(sizeof(T)) <= kShortRowBytes) {
    constexpr int kThreads = 128;
    int lanes = 2;
    while (lanes < 32 && lanes < vectors) lanes *= 2;
    const int64_t groups = kThreads / lanes;
    launch("row_by_lanes", device::row_by_lanes<Loss, T, kWidth>, {(p.rows + groups - 1) / groups, kThreads}, stream, p,
           constants, lanes);
    return;
  }
  const auto shape = choose_shape(current_device(), p.rows, vectors, kWidth * sizeof(T), p.grad != nullptr);
  const int shared = shape.stash ? static_cast<int>(shape.slice * kWidth * sizeof(T)) : 0;
  launch("row_by_cluster", device::row_by_cluster<Loss, T, kWidth>,
         {p.rows * shape.cluster, kRowThreads, shape.cluster, shared}, stream, p, constants, shape.slice, shape.stash);
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
