// Low parts (device/low_part.cuh) for kernels of rows.
#pragma once

#include <cuda_fp16.h>

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

}  // namespace fusegrad::cuda
