// Tensors as front ends hand them to the families: who owns them keeps them until the call's end.
#pragma once

#include <array>
#include <cstdint>

#include "common/dtype.h"

namespace fusegrad {

/// Four dimensions; strides in elements.
struct TensorView {
  void* data = nullptr;  ///< null: there is none, or it has no elements
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> sizes{}, strides{};
};

}  // namespace fusegrad
