#include "cuda/attention/backward/prepare.h"

#include <type_traits>

#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/rows.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/dtype.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// The rows of a CTA, kThreads / kLanes of one head: a division per thread would cost as much as the rows.
template <int kLanes>
struct RowPlace {
  int first, h, b;  // `first`: its first row
  int64_t head;     // b * heads + h
  static constexpr int kRows = kThreads / kLanes;
  __device__ RowPlace(int heads, int queries) {
    const unsigned tiles = static_cast<unsigned>((queries + kRows - 1) / kRows);
    head = blockIdx.x / tiles;
    first = static_cast<int>(blockIdx.x % tiles) * kRows;
    b = static_cast<int>(head) / heads;
    h = static_cast<int>(head) % heads;
  }
};

// kLanes lanes a row. kWidth: values that a lane reads at once, from rows whose values lie side by side, or 1.
template <class T, int kWidth, int kLanes>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ FlexRows p, device::FlexRow* out) {
  using Values = device::Pack<T, kWidth>;
  using Low = LowOf<T>;
  const RowPlace<kLanes> place(p.heads, p.queries);
  const auto [first, h, b, head] = place;
  const int q = first + static_cast<int>(threadIdx.x) / kLanes;
  const bool there = q < p.queries;
  const int64_t row = head * p.queries + q;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  // Read with the rows, not when their sums are there: the kernel waits for memory, little else.
  const bool writes = there && lane == 0;
  const float lse = writes ? p.lse[row] : 0.0f;
  const float grad_lse = writes && p.grad_lse != nullptr ? p.grad_lse[row] : 0.0f;
  if (p.query_sum != nullptr) {
    // Zeros the CTA's rows; the last CTA of a head also the rows beyond.
    const int end = first + place.kRows < p.queries ? first + place.kRows : p.sum_rows;
    float4* sums = reinterpret_cast<float4*>(p.query_sum + (head * p.sum_rows + first) * p.sum_cols);
    for (int i = static_cast<int>(threadIdx.x); i < (end - first) * p.sum_cols / 4; i += kThreads)
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (p.sum_states != nullptr) {
    const int chunks = sum_chunks(p.sum_cols);
    const int end = (first + place.kRows < p.queries ? first + place.kRows : p.sum_rows) / 8 * chunks;
    int* states = p.sum_states + head * (p.sum_rows / 8) * chunks;
    for (int i = first / 8 * chunks + static_cast<int>(threadIdx.x); i < end; i += kThreads)
      states[i] = device::kSumMissing;
  }
  float sum = 0.0f;
  if (there && p.grad_out.data != nullptr) {
    const auto values = [&](const device::FlexTensor& t, int col) {
      return Values::load(row_of<T>(t, b, h, q) + (kWidth == 1 ? col * t.col_stride : col));
    };
    // The low part is summed by itself: added to out in float32 it would not be lost, but its product is more accurate.
    float low = 0.0f;
    for (int col = lane * kWidth; col < p.value_size; col += kLanes * kWidth) {
      const Values g = values(p.grad_out, col), o = values(p.out, col);
      LowParts<kWidth> l{};
      if (p.out_low.data != nullptr) {
        l = *reinterpret_cast<const LowParts<kWidth>*>(row_of<signed char>(p.out_low, b, h, q) +
                                                       (kWidth == 1 ? col * p.out_low.col_stride : col));
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float up = static_cast<float>(g.get(i)), at = static_cast<float>(o.get(i));
        sum = fmaf(up, at, sum);
        low = fmaf(up, static_cast<float>(l.counts[i]) * __uint_as_float(Low::power(at)), low);
      }
    }
    sum = fmaf(low, 1.0f / Low::kUnits, sum);
  }
  for (int bit = kLanes / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  const bool far = writes && fabsf(lse) > device::kFarLse<T> && !isinf(lse);
  bool none = lse == -__int_as_float(0x7f800000);
  // A far row without an upstream gradient gives nothing, as one without keys: padding makes heads of such rows.
  if (__any_sync(~0u, far)) {
    bool given = grad_lse != 0.0f;
    if (there && p.grad_out.data != nullptr) {
      const T* from = row_of<T>(p.grad_out, b, h, q);
      for (int col = lane; col < p.value_size; col += kLanes)
        given = given || static_cast<float>(from[col * p.grad_out.col_stride]) != 0.0f;
    }
    for (int bit = kLanes / 2; bit > 0; bit /= 2) given |= __shfl_xor_sync(~0u, static_cast<int>(given), bit) != 0;
    none = none || (far && !given);
  }
  if (!writes) return;
  constexpr float kUnit = std::is_same_v<T, float> ? 1.0f : 1.4426950408889634f;
  sum -= grad_lse;
  if (far && !none) p.far[0] = p.far[1 + head] = p.call;
  // Other rows have no -0.
  const float of_row = far ? -0.0f : (lse - logf(p.dropout_scale)) * kUnit + 0.0f;
  out[head * p.row_stride + q] = {none ? __int_as_float(0x7f800000) : of_row, none ? 0.0f : sum / p.dropout_scale};
}

// Four lanes a row: a warp has four blocks of 8 rows and 8 columns at a time, a lane one row of one of them.
constexpr int kSumLanes = 4;
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) query_sum_kernel(const __grid_constant__ FlexQuerySum p) {
  const RowPlace<kSumLanes> place(p.heads, p.queries);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane % 8;
  const int eight = place.first + static_cast<int>(threadIdx.x) / kWarp * 8;
  if (eight + row >= p.queries) return;
  const float* from = p.sum + (place.head * p.sum_rows + eight) * p.sum_cols;
  const int* states = p.sum_states;
  if (states != nullptr) {
    const int state_row = p.transposed ? eight : eight / 64 * 64;
    states += (place.head * p.sum_rows + state_row) / 8 * sum_chunks(p.sum_cols);
  }
  T* to = static_cast<T*>(p.grad_query.data) + place.b * p.grad_query.batch_stride +
          place.h * p.grad_query.head_stride + (eight + row) * p.grad_query.row_stride;
  for (int col = lane / 8 * 8; col < p.head_size; col += kWarp) {
    float x[8];
    const bool missing = states != nullptr && states[col / 64] != device::kSumStored;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float* at = from + col * 8;
      float4 four;
      if (p.transposed) {
        at += i * 8 + row;
        four = make_float4(at[0], at[8], at[16], at[24]);
      } else {
        four = *reinterpret_cast<const float4*>(at + row * 8 + i);
      }
      if (missing) four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      x[i] = four.x * p.scale;
      x[i + 1] = four.y * p.scale;
      x[i + 2] = four.z * p.scale;
      x[i + 3] = four.w * p.scale;
    }
#pragma unroll
    for (int i = 0; i < 8; i += kWidth) {
      if (col + i >= p.head_size) break;
      float part[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) part[k] = x[i + k];
      device::packed<T>(part).store(to + (kWidth == 1 ? (col + i) * p.grad_query.col_stride : col + i));
    }
  }
}

// The CTAs of RowPlace.
template <class Rows>
int64_t row_ctas(const Rows& p, int lanes) {
  const int64_t each = kThreads / lanes;
  return int64_t{p.batches} * p.heads * ((p.queries + each - 1) / each);
}

}  // namespace

void flex_rows(const FlexRows& rows, device::FlexRow* out, DType dtype, void* stream) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel, int lanes) {
      launch("flex_rows", kernel, {row_ctas(rows, lanes), kThreads}, stream, rows, out);
    };
    constexpr int kWidth = 16 / sizeof(T);
    const bool vectors = has_vector_rows(rows.grad_out, rows.value_size, sizeof(T)) &&
                         has_vector_rows(rows.out, rows.value_size, sizeof(T)) &&
                         has_vector_rows(rows.out_low, rows.value_size, 1, kWidth);
    // A lane of few reads has too little to do for its beginning, unless it writes zeros for dQ.
    const int reads = rows.value_size / kWidth;
    if (!vectors) {
      run(rows_kernel<T, 1, kWarp>, kWarp);
    } else if (reads <= (rows.query_sum != nullptr ? 4 : 15)) {
      run(rows_kernel<T, kWidth, 4>, 4);
    } else {
      run(rows_kernel<T, kWidth, 8>, 8);
    }
  });
}

void flex_scale_query_sum(const FlexQuerySum& p, DType dtype, void* stream) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel) {
      launch("flex_scale_query_sum", kernel, {row_ctas(p, kSumLanes), kThreads}, stream, p);
    };
    has_vector_rows(p.grad_query, p.head_size, sizeof(T)) ? run(query_sum_kernel<T, 16 / sizeof(T)>)
                                                          : run(query_sum_kernel<T, 1>);
  });
}

}  // namespace fusegrad::cuda
