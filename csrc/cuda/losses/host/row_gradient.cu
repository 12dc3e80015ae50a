// Element-wise kernels over rows: the gradient from saved statistics, and scaling by values on the device.
#include <algorithm>

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/losses/device/blocks.cuh"
#include "cuda/losses/device/row_gradient.cuh"
#include "cuda/losses/host/row_kernels.h"

namespace fusegrad::cuda {
namespace {

using device::Batch;
using device::Blocks;
using device::Constants;
using device::RowVectors;

constexpr int kThreads = device::kBlockThreads;
constexpr int kUnroll = device::kBlockVectors;

struct BlockGrid {
  Blocks blocks;
  Grid grid;
};

/// For rows of `cols` values, `width` to a vector, all starting at lines if `aligned`; at most about `most` threads.
BlockGrid make_blocks(int64_t rows, int64_t cols, int width, bool aligned, int64_t most) {
  const int64_t plain = (cols + width - 1) / width;
  const int align = plain > kThreads * kUnroll ? device::kLineBytes : device::kUnitBytes;
  const int64_t vectors = plain + (aligned ? 0 : align / 16);
  BlockGrid result{{2, align}, {}};
  int& threads = result.blocks.threads_per_row;
  while (threads < kThreads && threads * kUnroll < vectors) threads *= 2;
  result.grid.threads = kThreads;
  result.grid.blocks = (vectors + threads * kUnroll - 1) / (threads * kUnroll);
  if (result.grid.blocks > 1) {  // equal blocks, of whole warps
    const int64_t even = (vectors + result.grid.blocks * kUnroll - 1) / (result.grid.blocks * kUnroll);
    threads = result.grid.threads = static_cast<int>((even + 31) / 32 * 32);
  }
  const int64_t rows_per_cta = result.grid.threads / threads;
  const int64_t groups = (rows + rows_per_cta - 1) / rows_per_cta;
  constexpr int64_t kMaxGridY = 65535;
  const int64_t ctas = most / result.grid.threads;
  result.grid.blocks_y = std::min({groups, kMaxGridY, std::max<int64_t>(1, ctas / result.grid.blocks)});
  return result;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) scaling_kernel(const __grid_constant__ RowScaling p, const Blocks blocks) {
  const float factor = p.factor != nullptr ? *static_cast<const float*>(p.factor) : 1.f;
  const auto* scales = static_cast<const float*>(p.scale);
  // One value for all rows, and it is 1: nothing to do, found out by the GPU itself.
  if (p.in == p.out && p.scale_stride == 0 && factor * (scales != nullptr ? *scales : 1.f) == 1.f) return;
  const int first = blocks.vector();
  for (int64_t row = blocks.row(); row < p.rows; row += blocks.row_step()) {
    const T* in = static_cast<const T*>(p.in) + row * p.in_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    const float scale = factor * (scales != nullptr ? scales[row * p.scale_stride] : 1.f);
    if (in == out && scale == 1.f) continue;
    const RowVectors<T, kWidth> vectors(in, p.cols, blocks.align);
    Batch<T, kWidth> batch(vectors, in, first, blocks.threads_per_row);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      float x[kWidth];
      device::unpack(batch.packs[j], x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] *= scale;
      batch.packs[j] = device::packed<T, kWidth>(x);
    }
    batch.store(vectors, out, first, blocks.threads_per_row);
  }
}

template <int kWidth>
bool starts_whole(const void* p, int64_t stride, int64_t size) {
  return kWidth == 1 || is_aligned(p, stride, size, device::kLineBytes);
}

template <class T, device::Part kPart, int kWidth>
void launch_gradient(const RowGradient& p, void* stream) {
  const auto [blocks, grid] =
      make_blocks(p.rows, p.cols, kWidth, starts_whole<kWidth>(p.logits, p.logits_stride, sizeof(T)), INT64_MAX);
  launch("gradient_kernel", device::gradient_kernel<T, kPart, kWidth>, grid, stream, p,
         Constants(p.targets, p.transform, p.z_loss, p.vocab), blocks);
}

template <class T, int kWidth>
void launch_scaling(const RowScaling& p, void* stream) {
  // Not so many CTAs that they take long to find that there is nothing to do.
  const auto [blocks, grid] = make_blocks(p.rows, p.cols, kWidth, starts_whole<kWidth>(p.in, p.in_stride, sizeof(T)),
                                          int64_t{64} * kThreads * current_device().multiprocessors);
  launch("scaling_kernel", scaling_kernel<T, kWidth>, grid, stream, p, blocks);
}

}  // namespace

void row_gradient(const RowGradient& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("cross entropy", p.cols);
  using device::Part;
  const bool simple = p.targets.smoothing == 0.0 && p.transform.cap == 0.0 && !p.targets.dense;
  const bool plain = simple && p.grad_entropy == nullptr && p.row_scale == nullptr;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const bool aligned = same_alignment(p.logits, p.logits_stride, p.grad, p.grad_stride, sizeof(T));
    const auto launch = [&]<Part kPart>() {
      aligned ? launch_gradient<T, kPart, kWidth>(p, stream) : launch_gradient<T, kPart, 1>(p, stream);
    };
    if (plain) return launch.template operator()<Part::kPlain>();
    if constexpr (sizeof(T) == 2) {
      if (simple) return launch.template operator()<Part::kEntropy>();
    }
    launch.template operator()<Part::kAll>();
  });
}

void row_scaling(const RowScaling& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    same_alignment(p.in, p.in_stride, p.out, p.out_stride, sizeof(T))
        ? launch_scaling<T, static_cast<int>(16 / sizeof(T))>(p, stream)
        : launch_scaling<T, 1>(p, stream);
  });
}

}  // namespace fusegrad::cuda
