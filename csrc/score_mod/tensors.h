// Captured tensors and numbers as the language's buffers and scalars. The one header of this folder that knows PyTorch.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "score_mod/captured.h"

namespace fusegrad::score_mod {

/// The storage type of a tensor's dtype; anything but the ten of DType raises.
inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kLong:
      return DType::kInt64;
    case at::kInt:
      return DType::kInt32;
    case at::kShort:
      return DType::kInt16;
    case at::kChar:
      return DType::kInt8;
    case at::kByte:
      return DType::kUInt8;
    case at::kBool:
      return DType::kBool;
    default:
      TORCH_CHECK_VALUE(false, "a captured tensor must be floating point, integer or bool, but got ",
                        tensor.scalar_type());
  }
}

inline Value value_of(const at::Scalar& s) {
  if (s.isBoolean()) return {Type::kBool, 0, s.toBool() ? 1 : 0};
  if (s.isIntegral(false)) return {Type::kInt, 0, s.toLong()};
  return {Type::kFloat, s.toDouble(), 0};
}

/// Views of tensors that outlive it.
class CapturedTensors {
 public:
  CapturedTensors(at::TensorList tensors, c10::ArrayRef<at::Scalar> scalars) {
    for (const at::Tensor& t : tensors) {
      buffers_.push_back({t.const_data_ptr(),
                          dtype_of(t),
                          {t.sizes().data(), t.sizes().size()},
                          {t.strides().data(), t.strides().size()}});
    }
    for (const at::Scalar& s : scalars) scalars_.push_back(value_of(s));
  }

  std::span<const Buffer> buffers() const { return buffers_; }
  std::span<const Value> scalars() const { return scalars_; }

 private:
  std::vector<Buffer> buffers_;
  std::vector<Value> scalars_;
};

}  // namespace fusegrad::score_mod
