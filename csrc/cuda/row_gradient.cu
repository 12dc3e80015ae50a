// Element-wise kernels over rows: the gradient from saved statistics, and scaling by values on the device.
#include <algorithm>

#include "cuda/device/cross_entropy.cuh"
#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using device::from_float;
using device::Mode;
using device::Pack;
using device::RowVectors;
using device::to_float;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

/// A grid over (row, block of columns): a block is what kUnroll vectors a thread cover. Short rows share a CTA.
struct Blocks {
  int64_t rows;
  int threads_per_row;
  int64_t blocks_per_row;

  __host__ __device__ int64_t rows_per_cta() const { return kThreads / threads_per_row; }
  __host__ __device__ int64_t ctas() const { return (rows + rows_per_cta() - 1) / rows_per_cta() * blocks_per_row; }
};

Blocks make_blocks(int64_t rows, int64_t cols, int width) {
  const int64_t vectors = (cols + width - 1) / width + 1;
  int threads = 32;
  while (threads < kThreads && threads * kUnroll < vectors) threads *= 2;
  return {rows, threads, (vectors + threads * kUnroll - 1) / (threads * kUnroll)};
}

/// function(vector) for this thread's vectors of block `block` of its row.
template <class T, int kWidth, class Load, class Use>
__device__ void each_vector(const RowVectors<T, kWidth>& vectors, const Blocks& blocks, int64_t block, Load&& load,
                            Use&& use) {
  const int lane = static_cast<int>(threadIdx.x) % blocks.threads_per_row;
  const int first = static_cast<int>(block) * blocks.threads_per_row * kUnroll + lane;
  Pack<T, kWidth> packs[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int v = first + j * blocks.threads_per_row;
    if (v < vectors.count()) packs[j] = load(v);
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int v = first + j * blocks.threads_per_row;
    if (v < vectors.count()) use(v, packs[j]);
  }
}

template <class T, Mode kMode, int kWidth>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const __grid_constant__ RowGradient p, const Blocks blocks) {
  const int64_t row = blockIdx.x / blocks.blocks_per_row * blocks.rows_per_cta() + threadIdx.x / blocks.threads_per_row;
  if (row >= p.rows) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
  const device::RowTarget<T> target(p.targets, row, p.vocab);
  const device::Exponent<kMode> exponent(p.transform);
  const auto* scales = static_cast<const float*>(p.scales);
  const float lse = static_cast<const float*>(p.lse)[row];
  const float low = p.lse_low != nullptr ? static_cast<const float*>(p.lse_low)[row] : 0.f;
  const float z_loss = static_cast<float>(p.z_loss);

  // grad = (P * p[c] - Q * a[c]) * dz/dx
  float P = 0.f, Q = 0.f;
  if (target.kept && p.grad_loss != nullptr) {
    const float upstream = static_cast<const float*>(p.grad_loss)[row * p.grad_loss_stride] * target.token_weight;
    const float mass = kMode == Mode::kDense ? static_cast<const float*>(p.mass)[row] : target.sparse_mass(p.vocab);
    Q = scales != nullptr ? upstream * scales[0] : upstream;
    P = Q * mass;
    if (z_loss != 0.f) P = fmaf((scales != nullptr ? upstream * scales[1] : upstream) * 2.f * z_loss, lse, P);
  }
  if (p.grad_lse != nullptr) P += static_cast<const float*>(p.grad_lse)[row * p.grad_lse_stride];
  const bool zero = P == 0.f && Q == 0.f && target.in_range;
  if (!target.in_range) P = device::not_a_number();
  const int64_t index = target.index - p.col_offset;
  const float low2 = low * device::kLog2E;

  const RowVectors<T, kWidth> vectors(logits, p.cols);
  each_vector<T, kWidth>(
      vectors, blocks, blockIdx.x % blocks.blocks_per_row,
      [&](int v) { return zero ? Pack<T, kWidth>{} : vectors.load(logits, v, 0.f); },
      [&](int v, Pack<T, kWidth> pack) {
        const int64_t c = vectors.column(v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float x = to_float(pack.value[i]);
          // z - lse first: exact for large offsets, where lse * log2(e) would not be.
          float y;
          if (kMode != Mode::kPlain && exponent.cap != 0.f) {
            y = fmaf(exponent.cap * tanhf(x * exponent.k * exponent.inverse_cap) - lse, device::kLog2E, -low2);
          } else {
            y = fmaf(fmaf(x, exponent.slope_scale, -lse), device::kLog2E, -low2);
          }
          float a = kMode == Mode::kPlain ? 0.f : target.uniform;
          if constexpr (kMode == Mode::kDense) a = vectors.has(c + i) ? target.coefficient(c + i, p.col_offset) : 0.f;
          if (c + i == index) a += target.at_index;
          const float value = fmaf(P, device::exp2_fast(y), -Q * a) * exponent.slope(x);
          pack.value[i] = from_float<T>(zero ? 0.f : value);
        }
        vectors.store(grad, v, pack);
      });
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) scaling_kernel(const __grid_constant__ RowScaling p, const Blocks blocks) {
  const float factor = p.factor != nullptr ? *static_cast<const float*>(p.factor) : 1.f;
  // One value for all rows, and it is 1: nothing to do, found out by the GPU itself.
  if (p.in == p.out && p.scale_stride == 0 && factor * (p.scale != nullptr ? *static_cast<const float*>(p.scale) : 1.f) == 1.f) {
    return;
  }
  for (int64_t cta = blockIdx.x; cta < blocks.ctas(); cta += gridDim.x) {
    const int64_t row = cta / blocks.blocks_per_row * blocks.rows_per_cta() + threadIdx.x / blocks.threads_per_row;
    if (row >= p.rows) continue;
    const T* in = static_cast<const T*>(p.in) + row * p.in_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    const float scale =
        factor * (p.scale != nullptr ? static_cast<const float*>(p.scale)[row * p.scale_stride] : 1.f);
    if (in == out && scale == 1.f) continue;
    const RowVectors<T, kWidth> vectors(in, p.cols);
    each_vector<T, kWidth>(
        vectors, blocks, cta % blocks.blocks_per_row, [&](int v) { return vectors.load(in, v, 0.f); },
        [&](int v, Pack<T, kWidth> pack) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) pack.value[i] = from_float<T>(to_float(pack.value[i]) * scale);
          vectors.store(out, v, pack);
        });
  }
}

template <class T, Mode kMode, int kWidth>
void launch_gradient(const RowGradient& p, void* stream) {
  const auto blocks = make_blocks(p.rows, p.cols, kWidth);
  launch("gradient_kernel", gradient_kernel<T, kMode, kWidth>, {blocks.ctas(), kThreads}, stream, p, blocks);
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
