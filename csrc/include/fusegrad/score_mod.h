// score_mods and mask_mods of flex attention, built in C++:
//
//   auto bias = fusegrad::Captured(bias_tensor), offset = fusegrad::Captured(offset_tensor);
//   auto mod = fusegrad::trace_score_mod([&](auto score, auto b, auto h, auto q_idx, auto kv_idx) {
//     return where(q_idx >= kv_idx, score + bias[offset[kv_idx]], -INFINITY);
//   });
//
// The function runs once; what it computes on its arguments is recorded. docs/design/score_mod.md describes the
// language.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fusegrad/expression.h"

namespace fusegrad {

/// A tensor that a score_mod or mask_mod reads. Gradients of floating-point ones are computed where they require them.
class Captured {
 public:
  explicit Captured(at::Tensor tensor);

  /// The element at an index, of a tensor of one dimension; at several of a tensor of as many. Negative indices count
  /// from the end.
  Expression operator[](const Expression& index) const { return at({index}); }
  template <class... Index>
  Expression operator()(const Index&... index) const {
    return at({Expression(index)...});
  }
  /// The value of a tensor without dimensions.
  operator Expression() const { return at({}); }  // NOLINT(google-explicit-constructor)

  const at::Tensor& tensor() const { return *tensor_; }

 private:
  Expression at(const std::vector<Expression>& indices) const;
  std::shared_ptr<at::Tensor> tensor_;
};

/// A number that may be another at the next call without compiling anew; a plain number is part of the text.
class CapturedNumber {
 public:
  explicit CapturedNumber(at::Scalar value);
  operator Expression() const;  // NOLINT(google-explicit-constructor)

 private:
  std::shared_ptr<at::Scalar> value_;
};

/// A traced function: its canonical text, and the tensors and numbers that the text calls @0, @1, … and $0, $1, …
struct ScoreMod {
  std::string text;
  std::vector<at::Tensor> buffers;
  std::vector<at::Scalar> scalars;
};

using ScoreModFunction =
    std::function<Expression(Expression score, Expression b, Expression h, Expression q_idx, Expression kv_idx)>;
using MaskModFunction = std::function<Expression(Expression b, Expression h, Expression q_idx, Expression kv_idx)>;

/// std::invalid_argument where the function breaks a rule of the language.
ScoreMod trace_score_mod(const ScoreModFunction& function);
ScoreMod trace_mask_mod(const MaskModFunction& function);

}  // namespace fusegrad
