// Captured tensors and numbers as the score_mod language's buffers and scalars.
#pragma once

#include <ATen/ATen.h>

#include <string_view>
#include <vector>

#include "fusegrad/score_mod.h"
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

/// A mod's numbers as schemas hold them: a list of mixed ones cannot be written to a file (torch.export.save). Floats,
/// and integers and bools (0 or 1), each in the order in which the text declares them.
struct Numbers {
  std::vector<double> floats;
  std::vector<int64_t> ints;
};

inline Numbers numbers_of(const ScoreMod& mod) {
  Numbers numbers;
  for (const at::Scalar& s : mod.scalars) {
    const Value value = value_of(s);
    value.type == Type::kFloat ? numbers.floats.push_back(value.f) : numbers.ints.push_back(value.i);
  }
  return numbers;
}

/// The numbers in the order and of the types that the graph declares. GraphError where they are not as many, or a
/// bool is neither 0 nor 1.
std::vector<at::Scalar> scalars_of(const Graph& graph, at::ArrayRef<double> floats, at::IntArrayRef ints);

/// Raises TypeError where a captured float64 tensor would be rounded to float32 and may not be. `in_float64`: whether
/// the mod is computed in float64 where it captures such a tensor.
void check_precision(const char* op, const char* name, const Graph& graph, at::TensorList buffers, bool in_float64);

/// A mod as ops take it; an empty text is none.
ScoreMod mod_of(std::string_view text, at::TensorList buffers, at::ArrayRef<double> floats, at::IntArrayRef ints);

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
