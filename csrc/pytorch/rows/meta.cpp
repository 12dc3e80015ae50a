// Meta kernels: the shapes and dtypes that the ops of rows/ return.
#include <torch/library.h>

#include "losses/linear_plan.h"
#include "pytorch/rows/registration.h"

namespace fusegrad::meta {
namespace {

using at::Tensor;

RowTuple row_outputs(const c10::SymInt& rows, const Tensor& like, const Tensor& target, const OptionalTensor& weight,
                     const RowOptions& options) {
  const auto acc = like.options().dtype(acc_type(like.scalar_type())).requires_grad(false);
  const StatRows stat_rows(dense_target(target, weight.has_value(), options.label_smoothing), options.aux);
  const bool predict = (options.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0;
  return {options.reduction == at::Reduction::None ? at::empty_symint({rows}, acc) : at::empty({}, acc),
          at::empty_symint({rows}, acc), at::empty_symint({c10::SymInt(stat_rows.count), rows}, acc),
          at::empty_symint({predict ? rows : c10::SymInt(0)}, acc.dtype(at::kLong)),
          at::empty({options.reduction == at::Reduction::Mean ? 4 : 0}, acc)};
}

Tensor gradient_like(bool wanted, const Tensor& tensor) {
  const auto options = tensor.options().requires_grad(false);
  return wanted ? at::empty_symint(tensor.sym_sizes(), options) : at::empty({0}, options);
}

LinearGradientTuple linear_gradients(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                     std::array<bool, 3> needs_grad, bool inplace = false) {
  return {gradient_like(needs_grad[0] && !inplace, input), gradient_like(needs_grad[1], weight),
          gradient_like(needs_grad[2], bias.value_or(input))};
}

RowTuple cross_entropy_forward(const CrossEntropyForward& c) {
  return row_outputs(c.logits.sym_size(0), c.logits, c.target, c.weight, c.options);
}

Tensor cross_entropy_backward(const CrossEntropyBackward& c) { return gradient_like(true, c.logits); }

Tensor row_values(const Tensor& logits, int64_t count) {
  const auto acc = logits.options().dtype(acc_type(logits.scalar_type())).requires_grad(false);
  return at::empty_symint({c10::SymInt(count), logits.sym_size(0)}, acc);
}
RowValuesTuple cross_entropy_rows(const CrossEntropyRows& c) {
  return {row_values(c.logits, kRowValues), row_values(c.logits, kRowConstants)};
}
Tensor cross_entropy_rows_gradient(const CrossEntropyRowsGradient& c) { return gradient_like(true, c.logits); }
Tensor cross_entropy_rows_tangent(const CrossEntropyRowsTangent& c) { return row_values(c.logits, kRowValues); }
Tensor cross_entropy_rows_second(const CrossEntropyRowsSecond& c) { return gradient_like(true, c.logits); }

template <bool inplace>
LinearTuple linear_cross_entropy_forward(const LinearCrossEntropyForward& c) {
  const auto options = c.input.options().requires_grad(false);
  const auto columns = logits_row_elements(c.linear_weight.sym_size(0), static_cast<int64_t>(c.input.element_size()));
  return std::tuple_cat(
      row_outputs(c.input.sym_size(0), c.input, c.target, c.weight, c.options),
      std::tuple(c.keep_logits ? at::empty_symint({c.input.sym_size(0), columns}, options) : at::empty({0}, options)),
      linear_gradients(c.input, c.linear_weight, c.linear_bias, c.needs_grad, inplace));
}

LinearGradientTuple linear_cross_entropy_backward(const LinearCrossEntropyBackward& c) {
  return linear_gradients(c.input, c.linear_weight, c.linear_bias, c.needs_grad);
}

LinearGradientTuple linear_cross_entropy_backward_into(const LinearCrossEntropyBackwardInto& c) {
  auto backward = c.backward;
  backward.needs_grad[1] = false;
  return linear_cross_entropy_backward(backward);
}

LinearSecondTuple linear_cross_entropy_second(const LinearCrossEntropySecond& c) {
  return std::tuple_cat(std::tuple(row_values(c.input, kRowValues + 1)),
                        linear_gradients(c.input, c.linear_weight, c.linear_bias, c.needs_grad));
}

std::tuple<Tensor, Tensor, Tensor> jsd_outputs(const c10::SymInt& rows, const Tensor& like,
                                               const JsdSettings& settings) {
  const auto acc = like.options().dtype(acc_type(like.scalar_type())).requires_grad(false);
  return {settings.reduction == at::Reduction::None ? at::empty_symint({rows}, acc) : at::empty({}, acc),
          at::empty_symint({c10::SymInt(jsd_stat_count(settings.aux)), rows}, acc),
          at::empty({settings.averaged() ? 4 : 0}, acc)};
}

template <bool inplace>
JsdTuple jsd_forward(const JsdForward& c) {
  return std::tuple_cat(jsd_outputs(c.student.sym_size(0), c.student, c.settings),
                        std::make_tuple(gradient_like(c.needs_grad[0] && !inplace, c.student),
                                        gradient_like(c.needs_grad[1], c.teacher)));
}

Tensor soft_like(const Tensor& logits) {
  return at::empty_symint({logits.sym_size(0)},
                          logits.options().dtype(acc_type(logits.scalar_type())).requires_grad(false));
}
Tensor jsd_soft(const JsdSoft& c) { return soft_like(c.student); }
Tensor jsd_soft_tangent(const JsdSoftTangent& c) { return soft_like(c.student); }
template <class Call>
std::vector<Tensor> jsd_soft_gradients(const Call& c) {
  std::vector<Tensor> gradients;
  if (c.needs_grad[0]) gradients.push_back(gradient_like(true, c.student));
  if (c.needs_grad[1]) gradients.push_back(gradient_like(true, c.teacher));
  return gradients;
}

template <bool inplace>
LinearJsdTuple linear_jsd_forward(const LinearJsdForward& c) {
  const auto& input = c.student_input;
  return std::tuple_cat(jsd_outputs(input.sym_size(0), input, c.settings),
                        linear_gradients(input, c.heads.student_weight, c.heads.student_bias, c.needs_grad, inplace));
}

LinearGradientTuple linear_jsd_backward(const LinearJsdBackward& c) {
  return linear_gradients(c.student_input, c.heads.student_weight, c.heads.student_bias, c.needs_grad);
}

LinearSecondTuple linear_jsd_second(const LinearJsdSecond& c) {
  return std::tuple_cat(std::tuple(row_values(c.student_input, 2)),
                        linear_gradients(c.student_input, c.heads.student_weight, c.heads.student_bias, c.needs_grad));
}

Tensor scale_gradient(const Tensor& gradient, const Tensor& /*scale*/, const OptionalTensor& /*factor*/) {
  return gradient_like(true, gradient);
}

void scale_gradient_(const Tensor& /*gradient*/, const Tensor& /*scale*/, const OptionalTensor& /*factor*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("cross_entropy_forward", TORCH_FN(unpacked<cross_entropy_forward>()));
  m.impl("cross_entropy_forward_", TORCH_FN(unpacked<cross_entropy_forward>()));
  m.impl("cross_entropy_backward", TORCH_FN(unpacked<cross_entropy_backward>()));
  m.impl("cross_entropy_rows", TORCH_FN(unpacked<cross_entropy_rows>()));
  m.impl("cross_entropy_rows_gradient", TORCH_FN(unpacked<cross_entropy_rows_gradient>()));
  m.impl("cross_entropy_rows_tangent", TORCH_FN(unpacked<cross_entropy_rows_tangent>()));
  m.impl("cross_entropy_rows_second", TORCH_FN(unpacked<cross_entropy_rows_second>()));
  m.impl("jsd_forward", TORCH_FN(unpacked<jsd_forward<false>>()));
  m.impl("jsd_forward_", TORCH_FN(unpacked<jsd_forward<true>>()));
  m.impl("jsd_soft", TORCH_FN(unpacked<jsd_soft>()));
  m.impl("jsd_soft_gradient", TORCH_FN(unpacked<jsd_soft_gradients<JsdSoftGradient>>()));
  m.impl("jsd_soft_tangent", TORCH_FN(unpacked<jsd_soft_tangent>()));
  m.impl("jsd_soft_second", TORCH_FN(unpacked<jsd_soft_gradients<JsdSoftSecond>>()));
  m.impl("linear_cross_entropy_forward", TORCH_FN(unpacked<linear_cross_entropy_forward<false>>()));
  m.impl("linear_cross_entropy_forward_", TORCH_FN(unpacked<linear_cross_entropy_forward<true>>()));
  m.impl("linear_cross_entropy_backward", TORCH_FN(unpacked<linear_cross_entropy_backward>()));
  m.impl("linear_cross_entropy_backward_", TORCH_FN(unpacked<linear_cross_entropy_backward>()));
  m.impl("linear_cross_entropy_backward_into", TORCH_FN(unpacked<linear_cross_entropy_backward_into>()));
  m.impl("linear_cross_entropy_backward_into_", TORCH_FN(unpacked<linear_cross_entropy_backward_into>()));
  m.impl("linear_cross_entropy_second", TORCH_FN(unpacked<linear_cross_entropy_second>()));
  m.impl("linear_jsd_forward", TORCH_FN(unpacked<linear_jsd_forward<false>>()));
  m.impl("linear_jsd_forward_", TORCH_FN(unpacked<linear_jsd_forward<true>>()));
  m.impl("linear_jsd_second", TORCH_FN(unpacked<linear_jsd_second>()));
  m.impl("linear_jsd_backward", TORCH_FN(unpacked<linear_jsd_backward>()));
  m.impl("scale_gradient", TORCH_FN(scale_gradient));
  m.impl("scale_gradient_", TORCH_FN(scale_gradient_));
}

}  // namespace fusegrad::meta
