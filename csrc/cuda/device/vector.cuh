// Rows of logits as 16-byte vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusegrad::device {

/// kWidth values of T: 16 bytes, or a single value where two rows do not share their alignment.
template <class T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T value[kWidth];
};

/// Whole vectors are converted two values at a time: one value at a time costs the instructions that a kernel at the
/// speed of memory does not have.
template <int kWidth>
__device__ inline void unpack(const Pack<float, kWidth>& pack, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = pack.value[i];
}
template <int kWidth>
__device__ inline void unpack(const Pack<__nv_bfloat16, kWidth>& pack, float (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    x[0] = __bfloat162float(pack.value[0]);
  } else {
    const auto* words = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}
template <int kWidth>
__device__ inline void unpack(const Pack<__half, kWidth>& pack, float (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    x[0] = __half2float(pack.value[0]);
  } else {
    const auto* pairs = reinterpret_cast<const __half2*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const float2 both = __half22float2(pairs[i]);
      x[2 * i] = both.x;
      x[2 * i + 1] = both.y;
    }
  }
}

template <int kWidth>
__device__ inline void pack_into(Pack<float, kWidth>& pack, const float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.value[i] = x[i];
}
template <int kWidth>
__device__ inline void pack_into(Pack<__nv_bfloat16, kWidth>& pack, const float (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    pack.value[0] = __float2bfloat16_rn(x[0]);
  } else {
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
  }
}
template <int kWidth>
__device__ inline void pack_into(Pack<__half, kWidth>& pack, const float (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    pack.value[0] = __float2half_rn(x[0]);
  } else {
    auto* pairs = reinterpret_cast<__half2*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) pairs[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
  }
}

template <class T>
__device__ float to_float(T x) {
  float y[1];
  unpack<1>(Pack<T, 1>{{x}}, y);
  return y[0];
}

/// A row as vectors that are aligned in memory: vector v holds columns [v * kWidth - lead, ...). Only the first and the
/// last may be cut.
template <class T, int kWidth>
struct RowVectors {
  int cols, lead, count;
  int whole_begin, whole_end;  // vectors without a cut

  __device__ RowVectors(const T* row, int64_t columns)
      : cols(static_cast<int>(columns)),
        lead(static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth)),
        count((cols + lead + kWidth - 1) / kWidth),
        whole_begin(lead > 0 ? 1 : 0),
        whole_end((cols + lead) / kWidth) {}

  __device__ int column(int v) const { return v * kWidth - lead; }
  __device__ bool whole(int v) const { return v >= whole_begin && v < whole_end; }
  __device__ bool has(int c) const { return c >= 0 && c < cols; }

  /// Columns outside the row are `pad`.
  __device__ Pack<T, kWidth> load(const T* row, int v, T pad) const {
    const int c = column(v);
    if (whole(v)) return *reinterpret_cast<const Pack<T, kWidth>*>(row + c);
    Pack<T, kWidth> pack;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.value[i] = has(c + i) ? row[c + i] : pad;
    return pack;
  }
  __device__ void store(T* row, int v, const Pack<T, kWidth>& pack) const {
    const int c = column(v);
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
