// Element-wise kernels over rows: the gradient from saved statistics, and scaling by values on the device.
#include <algorithm>

#include "cuda/device/vector.cuh"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/losses/device/target.cuh"
#include "cuda/losses/host/row_kernels.h"

namespace fusegrad::cuda {
namespace {

using device::Constants;
using device::Pack;
using device::RowVectors;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

/// A grid over blocks of columns (x) and groups of rows (y): a block is what kUnroll vectors a thread cover; short rows
/// share a CTA. A CTA goes on to the row group that is gridDim.y further.
struct Blocks {
  int threads_per_row;  // a power of 2
  int align;            // kLineBytes, or kUnitBytes where rows are short

  __device__ int64_t row() const {
    return static_cast<int64_t>(blockIdx.y) * (blockDim.x / threads_per_row) + threadIdx.x / threads_per_row;
  }
  __device__ int64_t row_step() const { return static_cast<int64_t>(gridDim.y) * (blockDim.x / threads_per_row); }
  /// This thread's first vector of a row; the others follow at distances of threads_per_row.
  __device__ int vector() const {
    return static_cast<int>(blockIdx.x) * threads_per_row * kUnroll +
           (static_cast<int>(threadIdx.x) & (threads_per_row - 1));
  }
};

struct BlockGrid {
  Blocks blocks;
  Grid grid;
};

/// For rows of `cols` values, `width` to a vector, all starting at lines if `aligned`; at most about `most` CTAs.
BlockGrid make_blocks(int64_t rows, int64_t cols, int width, bool aligned, int64_t most) {
  const int64_t plain = (cols + width - 1) / width;
  const int align = plain > kThreads * kUnroll ? device::kLineBytes : device::kUnitBytes;
  const int64_t vectors = plain + (aligned ? 0 : align / 16);
  int threads = 2;
  while (threads < kThreads && threads * kUnroll < vectors) threads *= 2;
  BlockGrid result{{threads, align}, {}};
  result.grid.threads = kThreads;
  result.grid.blocks = (vectors + threads * kUnroll - 1) / (threads * kUnroll);
  const int64_t groups = (rows + kThreads / threads - 1) / (kThreads / threads);
  constexpr int64_t kMaxGridY = 65535;
  result.grid.blocks_y = std::min({groups, kMaxGridY, std::max<int64_t>(1, most / result.grid.blocks)});
  return result;
}

/// kUnroll vectors from `first` on, all loaded before the first use.
template <class T, int kWidth>
struct Batch {
  using P = Pack<T, kWidth>;
  P packs[kUnroll];
  bool whole;  // all of them

  __device__ Batch(const RowVectors<T, kWidth>& vectors, const T* row, int first, int distance)
      : whole(first >= vectors.whole_begin && first + (kUnroll - 1) * distance < vectors.whole_end) {
    if (whole) {
      const T* from = row + vectors.column(first);
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) packs[j] = P::load(from + j * distance * kWidth);
    } else {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) packs[j] = vectors.load(row, v, static_cast<T>(0.f));
      }
    }
  }
  __device__ void store(const RowVectors<T, kWidth>& vectors, T* row, int first, int distance) const {
    if (whole) {
      T* to = row + vectors.column(first);
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) packs[j].store(to + j * distance * kWidth);
    } else {
#pragma unroll 1
      for (int j = 0; j < kUnroll; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) vectors.store(row, v, device::chosen(packs, j));
      }
    }
  }
};

template <class T, bool kPlain, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ RowGradient p, const __grid_constant__ Constants constants,
                    const Blocks blocks) {
  const int column = static_cast<int>(p.col_offset), first = blocks.vector(), distance = blocks.threads_per_row;
  const auto* scales = static_cast<const float*>(p.scales);
  for (int64_t row = blocks.row(); row < p.rows; row += blocks.row_step()) {
    const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
    T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
    const RowVectors<T, kWidth> vectors(logits, p.cols, blocks.align);
    const device::RowTarget<T> target(p.targets, constants, row, p.vocab);
    if (!target.in_range || (!target.kept && p.grad_lse == nullptr)) {
      const auto fill = device::filled<T, kWidth>(static_cast<T>(target.in_range ? 0.f : device::not_a_number()));
      for (int j = 0; j < kUnroll; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) vectors.store(grad, v, fill);
      }
      continue;
    }
    Batch<T, kWidth> batch(vectors, logits, first, distance);

    // grad = (p[c] * (P - E * (z[c] - mean)) - Q * a[c] + L * [c == y]) * dz/dx
    const auto at_row = [row](const void* values) {
      return values != nullptr ? static_cast<const float*>(values)[row] : 0.f;
    };
    auto logits_by = static_cast<const device::LogitConstants&>(constants);
    if (!kPlain && p.row_scale != nullptr) logits_by.scale *= at_row(p.row_scale);
    const float lse = static_cast<const float*>(p.lse)[row], low = at_row(p.lse_low);
    const float L = target.kept ? at_row(p.grad_log_prob) : 0.f, E = target.kept ? at_row(p.grad_entropy) : 0.f;
    float mean = 0.f, mean_low = 0.f;
    if (!kPlain && E != 0.f) {
      const double exact = (static_cast<double>(lse) + static_cast<double>(low)) -
                           (static_cast<double>(at_row(p.entropy)) + static_cast<double>(at_row(p.entropy_low)));
      mean = static_cast<float>(exact);
      mean_low = static_cast<float>(exact - static_cast<double>(mean));
    }
    float P = -L, Q = 0.f;
    if (target.kept && p.grad_loss != nullptr) {
      const float upstream = static_cast<const float*>(p.grad_loss)[row * p.grad_loss_stride] * target.token_weight;
      const float mass =
          p.targets.dense ? static_cast<const float*>(p.mass)[row] : target.sparse_mass(constants, p.vocab);
      Q = scales != nullptr ? upstream * scales[0] : upstream;
      P = fmaf(Q, mass, -L);
      if (constants.z_loss != 0.f) {
        P = fmaf((scales != nullptr ? upstream * scales[1] : upstream) * 2.f * constants.z_loss, lse, P);
      }
    }
    if (p.grad_lse != nullptr) P += static_cast<const float*>(p.grad_lse)[row * p.grad_lse_stride];
    const int index = target.index >= column ? target.index - column : -1;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int c = vectors.column(first + j * distance);
      float x[kWidth], slope[kWidth], a[kWidth];
      device::unpack(batch.packs[j], x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        slope[i] = logits_by.scale;
        a[i] = constants.uniform;
        if (!kPlain && constants.cap != 0.f) {
          const auto z = device::Logit::capped<T>(logits_by, x[i]);
          slope[i] *= z.slope;
          x[i] = z.x;
        } else {
          x[i] *= logits_by.scale;
        }
        const float probability = device::probability<T>(x[i], lse, low);
        if (!kPlain && E != 0.f && probability != 0.f) {  // 0 * inf where the logit is -inf
          x[i] = probability * fmaf(-E, (x[i] - mean) - mean_low, P);
        } else {
          x[i] = P * probability;
        }
      }
      if (!kPlain) {
        if (p.targets.dense) target.coefficients(constants, c, vectors.cols, column, a);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[i] = fmaf(-Q, a[i], x[i]);
      }
      // A branch for the vector, not a comparison for each value: one vector of the row takes it.
      if (const int at = index - c; index >= 0 && at >= 0 && at < kWidth) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (i == at) x[i] = fmaf(-Q, target.at_index, x[i]) + L;
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] *= slope[i];
      batch.packs[j] = device::packed<T, kWidth>(x);
    }
    batch.store(vectors, grad, first, distance);
  }
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

template <class T, bool kPlain, int kWidth>
void launch_gradient(const RowGradient& p, void* stream) {
  const auto [blocks, grid] =
      make_blocks(p.rows, p.cols, kWidth, starts_whole<kWidth>(p.logits, p.logits_stride, sizeof(T)), INT64_MAX);
  launch("gradient_kernel", gradient_kernel<T, kPlain, kWidth>, grid, stream, p,
         Constants(p.targets, p.transform, p.z_loss, p.vocab), blocks);
}

template <class T, int kWidth>
void launch_scaling(const RowScaling& p, void* stream) {
  // Not so many CTAs that they take long to find that there is nothing to do.
  const auto [blocks, grid] = make_blocks(p.rows, p.cols, kWidth, starts_whole<kWidth>(p.in, p.in_stride, sizeof(T)),
                                          64 * current_device().multiprocessors);
  launch("scaling_kernel", scaling_kernel<T, kWidth>, grid, stream, p, blocks);
}

}  // namespace

void row_gradient(const RowGradient& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("cross entropy", p.cols);
  const bool plain = p.targets.smoothing == 0.0 && p.transform.cap == 0.0 && !p.targets.dense &&
                     p.grad_entropy == nullptr && p.row_scale == nullptr;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const bool aligned = same_alignment(p.logits, p.logits_stride, p.grad, p.grad_stride, sizeof(T));
    if (plain) {
      aligned ? launch_gradient<T, true, kWidth>(p, stream) : launch_gradient<T, true, 1>(p, stream);
    } else {
      aligned ? launch_gradient<T, false, kWidth>(p, stream) : launch_gradient<T, false, 1>(p, stream);
    }
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
