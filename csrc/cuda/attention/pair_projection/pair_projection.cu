#include "cuda/attention/pair_projection/pair_projection.h"

#include <algorithm>
#include <type_traits>

#include "cuda/attention/pair_projection/backward.cuh"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using namespace device::pair_projection;
using device::Mma;
using device::pack;

constexpr int kForwardCtas = 4, kBackwardCtas = 3;      // of a multiprocessor
constexpr int kForwardStages = 2, kBackwardStages = 3;  // of a warp's reads

template <class T, bool kCentered, int kVectors>
__global__ void __launch_bounds__(kThreads, kForwardCtas)
    project_kernel(const __grid_constant__ PairProjectionCall p, T* out) {
  constexpr int kAll = kVectors * kChannels;
  __shared__ float2 norm[kAll];  // weight and bias
  for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
    norm[i] = {parameter<T>(p.norm_weight, i, 1.0f), parameter<T>(p.norm_bias, i, 0.0f)};
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % device::kLanes, t = lane % 4;
  uint4 weight[2][kVectors];  // of heads g and g + 8, as operand B
  float bias[2][2];           // of heads 2t and 2t + 1, and eight more
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = 8 * j + lane / 4;
    const auto* from = static_cast<const uint4*>(p.weight) + head * (kVectors * 4) + t;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) weight[j][v] = head < p.heads ? from[v * 4] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * j + 2 * t + i;
      bias[j][i] = column < p.heads ? parameter<T>(p.bias, column, 0.0f) : 0.0f;
    }
  }
  extern __shared__ uint4 stages[];
  const Reads<kVectors, kForwardStages> reads(p, stages);
  reads.for_each_tile([&](const Walk& at, int stage) {
    const Norm first = norm_of<T, kCentered>(reads, 0, stage);
    const Norm second = norm_of<T, kCentered>(reads, 1, stage);
    float c[2][4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 row[2] = {reads.take(0, v, stage), reads.take(1, v, stage)};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        unsigned a[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float4 n = *reinterpret_cast<const float4*>(norm + v * kChannels + 8 * t + 2 * (w + k));
          const unsigned one = word_of(row[0], w + k), other = word_of(row[1], w + k);
          a[2 * k] = pack(T{}, first.first<T>(one) * n.x + n.y, first.second<T>(one) * n.z + n.w);
          a[2 * k + 1] = pack(T{}, second.first<T>(other) * n.x + n.y, second.second<T>(other) * n.z + n.w);
        }
        const unsigned b[4] = {word_of(weight[0][v], w), word_of(weight[0][v], w + 1), word_of(weight[1][v], w),
                               word_of(weight[1][v], w + 1)};
        const auto rows = Mma<T>::factor(a), heads = Mma<T>::factor(b);
        Mma<T>::template step<0>(c[0], rows, heads);
        Mma<T>::template step<1>(c[1], rows, heads);
      }
    }
    T* to = out + at.batch * p.heads * p.pairs + at.pair();
    const int rows_there = at.rows(p.pairs);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = 8 * j + 2 * t + i % 2, row = lane / 4 + i / 2 * 8;
        if (head < p.heads && row < rows_there) device::store(to + head * p.pairs + row, c[j][i] + bias[j][i % 2]);
      }
    }
  });
}

template <class T, bool kCentered, int kVectors>
__global__ void __launch_bounds__(kThreads, kBackwardCtas)
    backward_kernel(const __grid_constant__ PairProjectionCall p, const T* grad, T* grad_pair, float* parts) {
  using Kernel = Backward<T, kCentered, kVectors, kBackwardStages>;
  __shared__ typename Kernel::Shared shared;
  extern __shared__ uint4 stages[];
  Kernel(p, shared, stages).run(grad, grad_pair, parts);
}

constexpr int kSlices = 8;  // of the parts, whose sums are added up in their order

// A CTA for each head.
template <class T>
__global__ void __launch_bounds__(kSlices* kMostChannels)
    weight_kernel(const __grid_constant__ PairProjectionCall p, const __grid_constant__ PairProjectionGradients to,
                  int64_t count, float* totals) {
  __shared__ float slices[kSlices][kMostChannels + 1];
  const int all = p.channels + 1, h = static_cast<int>(blockIdx.x);
  const float* from = to.parts + h * all;
  for (int i = static_cast<int>(threadIdx.x); i < kSlices * all; i += static_cast<int>(blockDim.x)) {
    const int slice = i / all, c = i % all;
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t part = slice; part < count; part += kSlices) sum += from[part * p.heads * all + c];
    slices[slice][c] = sum;
  }
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= all) return;
  const auto total = [&](int channel) {
    float sum = 0.0f;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) sum += slices[slice][channel];
    return sum;
  };
  const float sum = total(c), of_grad = total(p.channels);
  totals[h * all + c] = sum;
  if (c == p.channels) {
    if (to.bias != nullptr) device::store(static_cast<T*>(to.bias) + h, of_grad);
  } else if (to.weight != nullptr) {
    device::store(static_cast<T*>(to.weight) + h * p.channels + c,
                  sum * parameter<T>(p.norm_weight, c, 1.0f) + of_grad * parameter<T>(p.norm_bias, c, 0.0f));
  }
}

template <class T>
__global__ void __launch_bounds__(kMostChannels)
    norm_kernel(const __grid_constant__ PairProjectionCall p, const __grid_constant__ PairProjectionGradients to,
                const float* totals) {
  const int all = p.channels + 1, c = static_cast<int>(threadIdx.x);
  if (c >= p.channels) return;
  float of_weight = 0.0f, of_bias = 0.0f;
  for (int h = 0; h < p.heads; ++h) {
    const float w = from_bits(static_cast<const T*>(p.weight)[h * p.channels + c]);
    of_weight += w * totals[h * all + c];
    of_bias += w * totals[h * all + p.channels];
  }
  if (to.norm_weight != nullptr) device::store(static_cast<T*>(to.norm_weight) + c, of_weight);
  if (to.norm_bias != nullptr) device::store(static_cast<T*>(to.norm_bias) + c, of_bias);
}

// CTAs that are on the GPU at once, each of which takes tile after tile.
template <int kCtas, int kStages>
Grid grid_of(const PairProjectionCall& p) {
  const int64_t wanted = (p.batches * tiles_of(p.pairs) + kWarps - 1) / kWarps;
  return {.blocks = std::min(wanted, int64_t{current_device().multiprocessors} * kCtas),
          .threads = kThreads,
          .shared_bytes = p.channels == 64 ? Reads<2, kStages>::kBytes : Reads<4, kStages>::kBytes};
}
Grid forward_grid(const PairProjectionCall& p) { return grid_of<kForwardCtas, kForwardStages>(p); }
Grid backward_grid(const PairProjectionCall& p) { return grid_of<kBackwardCtas, kBackwardStages>(p); }

// run(element, centered, vectors), each as a type.
template <class Run>
void with_kernel(const PairProjectionCall& p, const Run& run) {
  const auto with_vectors = [&](auto element, auto centered) {
    if (p.channels == 64) return run(element, centered, std::integral_constant<int, 2>());
    return run(element, centered, std::integral_constant<int, 4>());
  };
  const auto with_norm = [&](auto element) {
    return p.centered ? with_vectors(element, std::true_type()) : with_vectors(element, std::false_type());
  };
  return p.dtype == DType::kBFloat16 ? with_norm(device::BFloat16()) : with_norm(device::Float16());
}

}  // namespace

bool pair_projection_takes(DType dtype, int64_t channels, int64_t heads) {
  return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) && (channels == 64 || channels == 128) && heads > 0 &&
         heads <= kHeads;
}

void pair_projection(const PairProjectionCall& p, void* out, void* stream) {
  if (p.batches * p.pairs == 0) return;
  with_kernel(p, [&](auto element, auto centered, auto vectors) {
    using T = decltype(element);
    launch("pair_projection", project_kernel<T, centered.value, vectors.value>, forward_grid(p), stream, p,
           static_cast<T*>(out));
  });
}

int64_t pair_projection_parts(const PairProjectionCall& p) { return backward_grid(p).blocks + 1; }

void pair_projection_backward(const PairProjectionCall& p, const PairProjectionGradients& to, void* stream) {
  const Grid grid = backward_grid(p);
  with_kernel(p, [&](auto element, auto centered, auto vectors) {
    using T = decltype(element);
    if (grid.blocks > 0) {
      launch("pair_projection_backward", backward_kernel<T, centered.value, vectors.value>, grid, stream, p,
             static_cast<const T*>(to.grad), static_cast<T*>(to.pair), to.parts);
    }
    if (to.parts == nullptr) return;
    float* totals = to.parts + grid.blocks * p.heads * (p.channels + 1);
    launch("pair_projection_weight", weight_kernel<T>, Grid{p.heads, kSlices * kMostChannels}, stream, p, to,
           grid.blocks, totals);
    if (to.norm_weight == nullptr && to.norm_bias == nullptr) return;
    launch("pair_projection_norm", norm_kernel<T>, Grid{1, kMostChannels}, stream, p, to, totals);
  });
}

}  // namespace fusegrad::cuda
