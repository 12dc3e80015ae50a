// Reductions over [N] values: the divisors of reduction 'mean', and the sum of the rows' losses. One cluster of CTAs,
// in a fixed order of summation.
#include <algorithm>

#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/losses/host/row_kernels.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 1024;

/// Added in double: 53 bits hold every count and keep float32 weights exact enough.
struct Totals {
  double loss = 0.0;
  double kept = 0.0;
  double weight = 0.0;
  template <class Over>
  __device__ void merge(const Over& over) {
    loss = over.sum(loss);
    kept = over.sum(kept);
    weight = over.sum(weight);
  }
};

__device__ float narrow_or_nan(double value, bool nan) {
  return nan ? __int_as_float(0x7fffffff) : static_cast<float>(value);
}

template <class Value>
__device__ Totals total_rows(int64_t rows, const Value& value) {
  __shared__ device::RowMerge<Totals, kThreads / 32> merge;
#if __CUDA_ARCH__ >= 900
  if (device::cluster_size() > 1) {
    if (threadIdx.x == 0) {
      merge.init();
      device::Arrival::fence_init();
    }
    device::cluster_arrive();
  }
#endif
  Totals totals;
  const int64_t threads = static_cast<int64_t>(kThreads) * device::cluster_size();
#pragma unroll 4
  for (int64_t n = device::cluster_rank() * kThreads + threadIdx.x; n < rows; n += threads) value(n, totals);
#if __CUDA_ARCH__ >= 900
  if (device::cluster_size() > 1) device::cluster_wait();
#endif
  merge.merge(totals, [](Totals&) {});
  return totals;
}

__global__ void __launch_bounds__(kThreads) scales_kernel(const __grid_constant__ RowScales p) {
  const auto& t = p.targets;
  const auto* class_weight = static_cast<const float*>(t.class_weight);
  const auto* loss = static_cast<const float*>(p.loss);
  const bool count = t.index != nullptr && p.normalizer == nullptr;
  const auto totals = total_rows(count || loss != nullptr ? p.rows : 0, [&](int64_t n, Totals& totals) {
    if (loss != nullptr) totals.loss += static_cast<double>(loss[n]);
    if (!count) return;
    const int64_t y =
        t.index_is_int32 ? static_cast<const int32_t*>(t.index)[n] : static_cast<const int64_t*>(t.index)[n];
    if (y == t.ignore_index) return;
    const bool known = class_weight != nullptr && y >= 0 && y < p.cols;
    totals.kept += 1.0;
    totals.weight += known ? static_cast<double>(class_weight[y]) : 1.0;
  });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  double kept = totals.kept, weight = totals.weight;
  if (t.index == nullptr) kept = weight = static_cast<double>(p.rows);
  if (p.normalizer != nullptr) kept = weight = static_cast<double>(*static_cast<const float*>(p.normalizer));
  kept *= p.values_per_row;
  weight *= p.values_per_row;
  auto* out = static_cast<float*>(p.out);
  out[0] = p.defer ? 1.f : static_cast<float>(1.0 / weight);
  out[1] = static_cast<float>(p.defer ? weight / kept : 1.0 / kept);
  out[2] = !p.defer ? 1.f : weight == 0.0 ? 0.f : static_cast<float>(1.0 / weight);
  out[3] = static_cast<float>(weight);
  if (p.mean_loss != nullptr) *static_cast<float*>(p.mean_loss) = narrow_or_nan(totals.loss / weight, weight == 0.0);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ RowSum p) {
  const auto* loss = static_cast<const float*>(p.loss);
  const auto totals =
      total_rows(p.rows, [&](int64_t n, Totals& totals) { totals.loss += static_cast<double>(loss[n]); });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  double total = totals.loss;
  if (p.factor != nullptr) total *= static_cast<double>(*static_cast<const float*>(p.factor));
  const bool none = p.nan_if_zero != nullptr && *static_cast<const float*>(p.nan_if_zero) == 0.f;
  *static_cast<float*>(p.out) = narrow_or_nan(total, none);
}

Grid one_cluster(int64_t rows) {
  const int ctas = rows > 16 * kThreads ? std::min(current_device().cluster, kPortableCluster) : 1;
  return {ctas, kThreads, ctas};
}

}  // namespace

void row_scales(const RowScales& p, DType, void* stream) {
  launch("scales_kernel", scales_kernel, one_cluster(p.rows), stream, p);
}

void row_sum(const RowSum& p, DType, void* stream) { launch("sum_kernel", sum_kernel, one_cluster(p.rows), stream, p); }

}  // namespace fusegrad::cuda

namespace fusegrad {

const RowKernels kCudaRowKernels = {.forward = cuda::row_forward,
                                    .gradient = cuda::row_gradient,
                                    .scales = cuda::row_scales,
                                    .sum = cuda::row_sum,
                                    .scaling = cuda::row_scaling,
                                    .jsd = cuda::row_jsd,
                                    .tangents = cuda::row_tangents,
                                    .jsd_tangents = cuda::row_jsd_tangents,
                                    .part = cuda::row_part,
                                    .whole = cuda::row_whole,
                                    .row_states = cuda::kRowStates,
                                    .product = cuda::product,
                                    .product_takes = cuda::product_takes,
                                    .product_workspace = cuda::product_workspace};

}  // namespace fusegrad
