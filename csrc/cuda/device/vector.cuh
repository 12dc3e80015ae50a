// 16-byte vectors of logits, and rows as vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusegrad::device {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }

/// kWidth values of T: 16 bytes, or one value where rows do not share their alignment.
template <class T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T value[kWidth];
};

/// A row of `cols` values as vectors that are aligned in memory: vector v holds columns [v * kWidth - lead, ...), and
/// only the first and the last may be cut.
template <class T, int kWidth>
struct RowVectors {
  int64_t cols;
  int lead;

  __device__ RowVectors(const T* row, int64_t cols)
      : cols(cols), lead(static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth)) {}

  __device__ int count() const { return static_cast<int>((cols + lead + kWidth - 1) / kWidth); }
  __device__ int64_t column(int v) const { return static_cast<int64_t>(v) * kWidth - lead; }
  __device__ bool whole(int v) const { return column(v) >= 0 && column(v) + kWidth <= cols; }
  __device__ bool has(int64_t c) const { return c >= 0 && c < cols; }

  /// Columns outside the row are `pad`.
  __device__ Pack<T, kWidth> load(const T* row, int v, float pad) const {
    using P = Pack<T, kWidth>;
    const int64_t c = column(v);
    if (whole(v)) return *reinterpret_cast<const P*>(row + c);
    P pack;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.value[i] = has(c + i) ? row[c + i] : from_float<T>(pad);
    return pack;
  }
  __device__ void store(T* row, int v, const Pack<T, kWidth>& pack) const {
    const int64_t c = column(v);
    if (whole(v)) {
      *reinterpret_cast<Pack<T, kWidth>*>(row + c) = pack;
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (has(c + i)) row[c + i] = pack.value[i];
    }
  }
};

}  // namespace fusegrad::device
