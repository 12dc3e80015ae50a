// Element-wise kernels over rows: the gradient from saved statistics, and scaling by values on the device.
#include <algorithm>

#include "cuda/device/cross_entropy.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using device::Constants;
using device::Mode;
using device::Pack;
using device::RowVectors;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

/// A grid over (row, block of columns): a block is what kUnroll vectors a thread cover. Short rows share a CTA.
struct Blocks {
  int64_t rows;
  int threads_per_row;  // a power of 2
  int blocks_per_row;

  __host__ __device__ int rows_per_cta() const { return kThreads / threads_per_row; }
  __host__ __device__ int64_t ctas() const { return (rows + rows_per_cta() - 1) / rows_per_cta() * blocks_per_row; }
  __device__ int64_t row(int64_t cta) const {
    return cta / blocks_per_row * rows_per_cta() + static_cast<int>(threadIdx.x) / threads_per_row;
  }
  /// This thread's first vector of a row; the others follow at distances of threads_per_row.
  __device__ int vector(int64_t cta) const {
    return static_cast<int>(cta % blocks_per_row) * threads_per_row * kUnroll +
           static_cast<int>(threadIdx.x) % threads_per_row;
  }
};

Blocks make_blocks(int64_t rows, int64_t cols, int width) {
  const int64_t vectors = (cols + width - 1) / width + 1;
  int threads = 2;
  while (threads < kThreads && threads * kUnroll < vectors) threads *= 2;
  return {rows, threads, static_cast<int>((vectors + threads * kUnroll - 1) / (threads * kUnroll))};
}

/// use(vector, pack) for the kUnroll vectors from `first` on, all loaded before the first use.
template <class T, int kWidth, class Use>
__device__ void each_vector(const RowVectors<T, kWidth>& vectors, const T* row, int first, int distance, Use&& use) {
  using P = Pack<T, kWidth>;
  P packs[kUnroll];
  if (first >= vectors.whole_begin && first + (kUnroll - 1) * distance < vectors.whole_end) {
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
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int v = first + j * distance;
    if (v < vectors.count) use(v, packs[j]);
  }
}

template <class T, Mode kMode, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ RowGradient p, const __grid_constant__ Constants constants,
                    const Blocks blocks) {
  const int64_t row = blocks.row(blockIdx.x);
  if (row >= p.rows) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
  const device::RowTarget<T> target(p.targets, constants, row, p.vocab);
  const auto* scales = static_cast<const float*>(p.scales);
  const float lse = static_cast<const float*>(p.lse)[row];
  const float low = p.lse_low != nullptr ? static_cast<const float*>(p.lse_low)[row] : 0.f;

  // grad = (P * p[c] - Q * a[c]) * dz/dx
  float P = 0.f, Q = 0.f;
  if (target.kept && p.grad_loss != nullptr) {
    const float upstream = static_cast<const float*>(p.grad_loss)[row * p.grad_loss_stride] * target.token_weight;
    const float mass =
        kMode == Mode::kDense ? static_cast<const float*>(p.mass)[row] : target.sparse_mass(constants, p.vocab);
    Q = scales != nullptr ? upstream * scales[0] : upstream;
    P = Q * mass;
    if (constants.z_loss != 0.f) {
      P = fmaf((scales != nullptr ? upstream * scales[1] : upstream) * 2.f * constants.z_loss, lse, P);
    }
  }
  if (p.grad_lse != nullptr) P += static_cast<const float*>(p.grad_lse)[row * p.grad_lse_stride];
  const RowVectors<T, kWidth> vectors(logits, p.cols);
  const int first = blocks.vector(blockIdx.x);
  if (!target.in_range || (P == 0.f && Q == 0.f)) {
    const auto fill = device::filled<T, kWidth>(static_cast<T>(target.in_range ? 0.f : device::not_a_number()));
    for (int j = 0; j < kUnroll; ++j) {
      const int v = first + j * blocks.threads_per_row;
      if (v < vectors.count) vectors.store(grad, v, fill);
    }
    return;
  }
  // Before the logits of this CTA's block are overwritten; those of no other block matter to it.
  const int column = static_cast<int>(p.col_offset);
  const int64_t index = target.index >= 0 ? target.index - p.col_offset : -1;
  const float low2 = low * device::kLog2E;
  each_vector<T, kWidth>(vectors, logits, first, blocks.threads_per_row, [&](int v, const Pack<T, kWidth>& pack) {
    const int c = vectors.column(v);
    float x[kWidth];
    device::unpack(pack, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float slope = constants.scale, z;
      if (kMode != Mode::kPlain && constants.cap != 0.f) {
        const float t = device::tanh_for<T>(x[i] * constants.scale * constants.inverse_cap);
        slope *= 1.f - t * t;
        z = constants.cap * t - lse;
      } else {
        z = fmaf(x[i], constants.scale, -lse);
      }
      // z - lse first: exact for large offsets, where lse * log2(e) would not be.
      float value = P * device::exp2_fast(fmaf(z, device::kLog2E, -low2));
      if constexpr (kMode == Mode::kSparse) value = fmaf(-Q, constants.uniform, value);
      if constexpr (kMode == Mode::kDense) {
        if (vectors.has(c + i)) value = fmaf(-Q, target.coefficient(constants, c + i, column), value);
      }
      if (index - c == i) value = fmaf(-Q, target.at_index, value);
      x[i] = value * slope;
    }
    vectors.store(grad, v, device::packed<T, kWidth>(x));
  });
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) scaling_kernel(const __grid_constant__ RowScaling p, const Blocks blocks) {
  const float factor = p.factor != nullptr ? *static_cast<const float*>(p.factor) : 1.f;
  const auto* scales = static_cast<const float*>(p.scale);
  // One value for all rows, and it is 1: nothing to do, found out by the GPU itself.
  if (p.in == p.out && p.scale_stride == 0 && factor * (scales != nullptr ? *scales : 1.f) == 1.f) return;
  for (int64_t cta = blockIdx.x; cta < blocks.ctas(); cta += gridDim.x) {
    const int64_t row = blocks.row(cta);
    if (row >= p.rows) continue;
    const T* in = static_cast<const T*>(p.in) + row * p.in_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    const float scale = factor * (scales != nullptr ? scales[row * p.scale_stride] : 1.f);
    if (in == out && scale == 1.f) continue;
    const RowVectors<T, kWidth> vectors(in, p.cols);
    each_vector<T, kWidth>(vectors, in, blocks.vector(cta), blocks.threads_per_row,
                           [&](int v, const Pack<T, kWidth>& pack) {
                             float x[kWidth];
                             device::unpack(pack, x);
#pragma unroll
                             for (int i = 0; i < kWidth; ++i) x[i] *= scale;
                             vectors.store(out, v, device::packed<T, kWidth>(x));
                           });
  }
}

template <class T, Mode kMode, int kWidth>
void launch_gradient(const RowGradient& p, void* stream) {
  const auto blocks = make_blocks(p.rows, p.cols, kWidth);
  launch("gradient_kernel", gradient_kernel<T, kMode, kWidth>, {blocks.ctas(), kThreads}, stream, p,
         Constants(p.targets, p.transform, p.z_loss, p.vocab), blocks);
}

template <class T, int kWidth>
void launch_scaling(const RowScaling& p, void* stream) {
  const auto blocks = make_blocks(p.rows, p.cols, kWidth);
  const int64_t ctas = std::min<int64_t>(blocks.ctas(), 16 * current_device().multiprocessors);
  launch("scaling_kernel", scaling_kernel<T, kWidth>, {ctas, kThreads}, stream, p, blocks);
}

}  // namespace

void row_gradient(const RowGradient& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("cross entropy", p.cols);
  const bool plain = p.targets.smoothing == 0.0 && p.transform.cap == 0.0;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const bool aligned = same_alignment(p.logits, p.logits_stride, p.grad, p.grad_stride, sizeof(T));
    if (p.targets.dense) {
      aligned ? launch_gradient<T, Mode::kDense, kWidth>(p, stream) : launch_gradient<T, Mode::kDense, 1>(p, stream);
    } else if (plain) {
      aligned ? launch_gradient<T, Mode::kPlain, kWidth>(p, stream) : launch_gradient<T, Mode::kPlain, 1>(p, stream);
    } else {
      aligned ? launch_gradient<T, Mode::kSparse, kWidth>(p, stream) : launch_gradient<T, Mode::kSparse, 1>(p, stream);
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
