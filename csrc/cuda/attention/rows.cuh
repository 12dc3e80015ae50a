// Rows of [B, H, M, E] tensors and their low parts (device/low_part.cuh), for kernels compiled ahead of time.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/low_part.cuh"

namespace fusegrad::cuda {

/// Low parts side by side, read at once.
template <int kWidth>
struct alignas(kWidth) LowParts {
  signed char counts[kWidth];
};

template <class T>
using LowOf = device::LowPart<std::conditional_t<std::is_same_v<T, __half>, device::Float16, device::BFloat16>>;

template <class T>
__device__ T* row_of(const device::FlexTensor& t, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(t.data) + b * t.batch_stride + h * t.head_stride + row * t.row_stride;
}

/// Whether every row begins at a multiple of `vector` bytes and is `size` values side by side that fill whole vectors.
inline bool has_vector_rows(const device::FlexTensor& t, int64_t size, int64_t element, int64_t vector = 16) {
  const auto whole = [&](int64_t values) { return values * element % vector == 0; };
  return t.data == nullptr || (t.col_stride == 1 && whole(size) && whole(t.row_stride) && whole(t.head_stride) &&
                               whole(t.batch_stride) && reinterpret_cast<uintptr_t>(t.data) % vector == 0);
}

}  // namespace fusegrad::cuda
