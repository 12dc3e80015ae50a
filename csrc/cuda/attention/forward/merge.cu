#include "cuda/attention/forward/merge.h"

#include <type_traits>

#include "cuda/attention/forward/merge.cuh"
#include "cuda/attention/plan/run.h"
#include "cuda/attention/rows.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/dtype.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;

// kLanes threads have four columns each of a row at a time; of many splits, kTurns of such threads take turns at them,
// and then the first ones merge what those have. A CTA has as many rows as it has threads for.
template <class T, int kLanes, int kTurns>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ device::FlexPartials p, const __grid_constant__ device::FlexRowResults to,
                 unsigned rows, unsigned heads, unsigned queries) {
  constexpr int kRows = kThreads / kLanes / kTurns;
  static_assert(kTurns == 1 || kRows == 1);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, turn = static_cast<int>(threadIdx.x) / kLanes % kTurns;
  const unsigned row = blockIdx.x * kRows + threadIdx.x / (kLanes * kTurns), head = row / queries, b = head / heads;
  const int64_t first = static_cast<int64_t>(row) * p.splits;
  const int count = turn < p.splits ? (p.splits - turn + kTurns - 1) / kTurns : 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (row >= rows) return;
  const auto finish = [&](const device::FlexRowMerge& merged, int col) {
    merged.finish<T>(to, static_cast<int>(b), static_cast<int>(head - b * heads),
                     static_cast<int>(row - head * queries), row, col);
  };
  for (int from = 0; from < max(p.cols, 1); from += 4 * kLanes) {
    const int col = from + 4 * lane;
    const bool there = col < p.cols;
    device::FlexRowMerge some;
    some.merge(
        count, to.unit, [&](int i) { return p.rows[first + turn + i * kTurns]; },
        [&](int i) {
          return there ? *reinterpret_cast<const float4*>(p.out + (first + turn + i * kTurns) * p.cols + col)
                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        });
    if constexpr (kTurns == 1) {
      finish(some, col);
    } else {
      __shared__ device::FlexPartialRow parts[kTurns];
      __shared__ float4 outs[kTurns][kLanes];
      __syncthreads();  // those of the columns before have been read
      if (lane == 0) parts[turn] = some.row;
      outs[turn][lane] = make_float4(some.out[0], some.out[1], some.out[2], some.out[3]);
      __syncthreads();
      if (turn != 0) continue;
      device::FlexRowMerge merged;
      merged.merge(kTurns, to.unit, [&](int i) { return parts[i]; }, [&](int i) { return outs[i][lane]; });
      finish(merged, col);
    }
  }
}

struct TwoOutputs {
  device::FlexTensor out, out_low, more, more_low;
  const float *weight, *more_weight;
  unsigned rows, heads, queries;
  int cols;
};
constexpr int kMergeLanes = 8;  // of a row

// kWidth: columns that a lane has at once, side by side in all tensors, or 1.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) merge_two_kernel(const __grid_constant__ TwoOutputs p) {
  using Values = device::Pack<T, kWidth>;
  using Low = LowOf<T>;
  constexpr bool kLow = sizeof(T) == 2;
  const unsigned row = blockIdx.x * (kThreads / kMergeLanes) + threadIdx.x / kMergeLanes, head = row / p.queries;
  if (row >= p.rows) return;
  const unsigned b = head / p.heads, h = head % p.heads, q = row % p.queries;
  const auto at = [&](const device::FlexTensor& t, auto zero, int col) {
    return row_of<decltype(zero)>(t, b, h, q) + (kWidth == 1 ? col * t.col_stride : col);
  };
  const auto read = [&](const device::FlexTensor& t, const device::FlexTensor& low, int col, float (&x)[kWidth]) {
    device::unpack(Values::load(at(t, T{}, col)), x);
    if constexpr (kLow) {
      const auto parts = *reinterpret_cast<const LowParts<kWidth>*>(at(low, static_cast<signed char>(0), col));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float unit = __uint_as_float(Low::power(x[i])) * (1.0f / Low::kUnits);
        if (isfinite(x[i])) x[i] = fmaf(static_cast<float>(parts.counts[i]), unit, x[i]);
      }
    }
  };
  const float weight = p.weight[row], more_weight = p.more_weight[row];
  for (int col = static_cast<int>(threadIdx.x) % kMergeLanes * kWidth; col < p.cols; col += kMergeLanes * kWidth) {
    float x[kWidth], y[kWidth];
    read(p.out, p.out_low, col, x);
    read(p.more, p.more_low, col, y);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = fmaf(x[i], weight, y[i] * more_weight);
    device::packed<T>(x).store(at(p.out, T{}, col));
    if constexpr (kLow) {
      LowParts<kWidth> parts;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) parts.counts[i] = static_cast<signed char>(Low::of(x[i]));
      *reinterpret_cast<LowParts<kWidth>*>(at(p.out_low, static_cast<signed char>(0), col)) = parts;
    }
  }
}

// A thread has four columns of a row.
template <class T>
__global__ void __launch_bounds__(kThreads) add_query_parts_kernel(const __grid_constant__ FlexQueryParts p) {
  const int64_t rows = int64_t{p.batches} * p.heads * p.queries;
  const int64_t id = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = id / (p.cols / 4);
  if (row >= rows) return;
  const int col = static_cast<int>(id % (p.cols / 4)) * 4;
  float sum[4] = {};
#pragma unroll 4
  for (int i = 0; i < p.splits; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(p.parts + (i * rows + row) * p.cols + col);
    sum[0] += x.x;
    sum[1] += x.y;
    sum[2] += x.z;
    sum[3] += x.w;
  }
  const device::FlexTensor& to = p.grad_query;
  const int64_t head = row / p.queries;
  T* out = static_cast<T*>(to.data) + head / p.heads * to.batch_stride + head % p.heads * to.head_stride +
           row % p.queries * to.row_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (col + i < p.head_size) device::store(out + (col + i) * to.col_stride, sum[i]);
  }
}

template <class Run>
void with_element(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat32:
      return run(float{});
    case DType::kBFloat16:
      return run(device::BFloat16{});
    case DType::kFloat16:
      return run(device::Float16{});
    case DType::kFloat64:
    case DType::kInt8:
      break;
  }
  fail<std::invalid_argument>("fusegrad: float64 has no CUDA kernels");
}

}  // namespace

void flex_merge(const device::FlexPartials& partials, const device::FlexRowResults& results, int64_t batches, int heads,
                int queries, DType dtype, void* stream) {
  const int64_t rows = batches * heads * queries;
  if (rows > UINT32_MAX) fail("fusegrad: flex_merge: too many rows for one launch: ", rows);
  const auto run = [&](auto kernel, int rows_of_cta) {
    const Grid grid{(rows + rows_of_cta - 1) / rows_of_cta, kThreads};
    LaunchConfig launch("flex_merge", reinterpret_cast<const void*>(kernel), grid, stream);
    cudaLaunchAttribute ahead = {};
    ahead.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    ahead.val.programmaticStreamSerializationAllowed = 1;
    if (current_device().cluster > 1) {  // GPUs that know clusters know this
      launch.config.attrs = &ahead;
      launch.config.numAttrs = 1;
    }
    check(cudaLaunchKernelEx(&launch.config, kernel, partials, results, static_cast<unsigned>(rows),
                             static_cast<unsigned>(heads), static_cast<unsigned>(queries)),
          "flex_merge");
  };
  // A thread merges a few splits, or more where the rows are many.
  const int one_thread = rows > 256 ? 16 : 8;
  const auto by_lanes = [&]<class T, int kLanes>(T, std::integral_constant<int, kLanes>) {
    constexpr int kTurns = kThreads / kLanes;
    if (partials.splits <= one_thread) {
      run(merge_kernel<T, kLanes, 1>, kTurns);
    } else {
      run(merge_kernel<T, kLanes, kTurns>, 1);
    }
  };
  with_element(dtype, [&]<class T>(T) {
    if (partials.cols > 64) {
      by_lanes(T{}, std::integral_constant<int, 32>{});
    } else {
      by_lanes(T{}, std::integral_constant<int, 16>{});
    }
  });
}

void flex_merge(const FlexMergeCall& c, void* stream) {
  const auto [batches, heads, queries, cols] = c.out.sizes;
  const int64_t rows = batches * heads * queries;
  if (rows > UINT32_MAX) fail("fusegrad: flex_merge: too many rows for one launch: ", rows);
  const TwoOutputs p{tensor_of(c.out),
                     tensor_of(c.out_low),
                     tensor_of(c.more),
                     tensor_of(c.more_low),
                     static_cast<const float*>(c.weight),
                     static_cast<const float*>(c.more_weight),
                     static_cast<unsigned>(rows),
                     static_cast<unsigned>(heads),
                     static_cast<unsigned>(queries),
                     static_cast<int>(cols)};
  constexpr int kRows = kThreads / kMergeLanes;
  const Grid grid{(rows + kRows - 1) / kRows, kThreads};
  with_type(c.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const bool vectors = has_vector_rows(p.out, p.cols, sizeof(T)) && has_vector_rows(p.more, p.cols, sizeof(T)) &&
                         has_vector_rows(p.out_low, p.cols, 1, kWidth) &&
                         has_vector_rows(p.more_low, p.cols, 1, kWidth);
    launch("flex_merge", vectors ? merge_two_kernel<T, kWidth> : merge_two_kernel<T, 1>, grid, stream, p);
  });
}

void flex_add_query_parts(const FlexQueryParts& p, DType dtype, void* stream) {
  const int64_t threads = int64_t{p.batches} * p.heads * p.queries * (p.cols / 4);
  if (threads == 0) return;
  with_element(dtype, [&]<class T>(T) {
    launch("flex_add_query_parts", add_query_parts_kernel<T>, {(threads + kThreads - 1) / kThreads, kThreads}, stream,
           p);
  });
}

}  // namespace fusegrad::cuda
