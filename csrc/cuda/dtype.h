// From the dtype of a call to the type of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/dtype.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {

template <class Function>
void with_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(TypeTag<float>{});
    case DType::kBFloat16:
      return function(TypeTag<__nv_bfloat16>{});
    case DType::kFloat16:
      return function(TypeTag<__half>{});
    case DType::kFloat64:
    case DType::kInt8:
      break;
  }
  fail<std::invalid_argument>("fusegrad: float64 has no CUDA kernels");
}

/// Columns are counted in 32 bits, with room for a vector beyond the last.
inline void check_columns(const char* name, int64_t cols) {
  if (cols >= (int64_t{1} << 31) - 64) {
    fail<std::invalid_argument>(name, ": a row must have fewer than 2^31 - 64 columns, but got ", cols);
  }
}

/// Whether every row of `size`-byte values starts at a multiple of `align` bytes.
inline bool is_aligned(const void* p, int64_t stride, int64_t size, int64_t align) {
  return reinterpret_cast<intptr_t>(p) % align == 0 && stride * size % align == 0;
}

/// Whether two rows of `size`-byte values start at the same place within 16 bytes, for every row: then one split of the
/// row into vectors suits both.
inline bool same_alignment(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t size) {
  const auto distance = reinterpret_cast<intptr_t>(a) - reinterpret_cast<intptr_t>(b);
  return distance % 16 == 0 && (a_stride - b_stride) * size % 16 == 0;
}

}  // namespace fusegrad::cuda
