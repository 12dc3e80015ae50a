#include "pytorch/ops/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "pytorch/rows/registration.h"

namespace fusegrad::dispatch {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OptionalTensor optional_of(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

}  // namespace

RowOutputs cross_entropy_forward(const Tensor& logits, const RowArguments& rows, const LossOptions& options,
                                 bool inplace) {
  using Signature = RowTuple(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, int64_t, int64_t, double, double, double, int64_t);
  static const auto functional = handle<Signature>("fusegrad::cross_entropy_forward");
  static const auto mutating = handle<Signature>("fusegrad::cross_entropy_forward_");
  return std::make_from_tuple<RowOutputs>(
      (inplace ? mutating : functional)
          .call(logits, rows.target, rows.weight, rows.token_weight, rows.normalizer, options.ignore_index,
                options.reduction, options.label_smoothing, options.z_loss, options.softcap, options.aux));
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& grad_lse, const Tensor& logits,
                              const RowArguments& rows, const LossOptions& options, const RowOutputs& saved) {
  using Signature =
      Tensor(const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&,
             const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, double, double, double);
  static const auto op = handle<Signature>("fusegrad::cross_entropy_backward");
  return op.call(optional_of(grad_loss), optional_of(grad_lse), logits, rows.target, rows.weight, saved.lse,
                 saved.stats, saved.scales, rows.token_weight, options.ignore_index, options.label_smoothing,
                 options.z_loss, options.softcap);
}

std::pair<RowOutputs, LinearGradients> linear_cross_entropy_forward(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const RowArguments& rows,
    const LossOptions& options, const LinearOptions& linear, std::array<bool, 3> needs_grad, bool inplace) {
  using Signature =
      LinearTuple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                  const OptionalTensor&, const OptionalTensor&, int64_t, int64_t, double, double, double, int64_t,
                  double, std::optional<at::ScalarType>, std::optional<int64_t>, std::array<bool, 3>);
  static const auto functional = handle<Signature>("fusegrad::linear_cross_entropy_forward");
  static const auto mutating = handle<Signature>("fusegrad::linear_cross_entropy_forward_");
  auto [loss, lse, stats, predicted, scales, grad_input, grad_weight, grad_bias] =
      (inplace ? mutating : functional)
          .call(input, weight, rows.target, bias, rows.weight, rows.token_weight, rows.normalizer, options.ignore_index,
                options.reduction, options.label_smoothing, options.z_loss, options.softcap, options.aux,
                linear.logit_scale, linear.accumulate_dtype, linear.workspace_mib, needs_grad);
  return {{loss, lse, stats, predicted, scales}, {grad_input, grad_weight, grad_bias}};
}

LinearGradients linear_cross_entropy_backward(const Tensor& grad_loss, const Tensor& grad_lse, const Tensor& input,
                                              const Tensor& weight, const OptionalTensor& bias,
                                              const RowArguments& rows, const LossOptions& options,
                                              const LinearOptions& linear, const RowOutputs& saved,
                                              std::array<bool, 3> needs_grad) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(
      const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
      const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, double,
      double, double, double, std::optional<int64_t>, std::array<bool, 3>);
  static const auto op = handle<Signature>("fusegrad::linear_cross_entropy_backward");
  return std::make_from_tuple<LinearGradients>(
      op.call(optional_of(grad_loss), optional_of(grad_lse), input, weight, rows.target, bias, rows.weight, saved.lse,
              saved.stats, saved.scales, rows.token_weight, options.ignore_index, options.label_smoothing,
              options.z_loss, options.softcap, linear.logit_scale, linear.workspace_mib, needs_grad));
}

std::pair<JsdOutputs, std::array<Tensor, 2>> jsd_forward(const Tensor& student, const Tensor& teacher,
                                                         const JsdRows& rows, const JsdSettings& settings,
                                                         std::array<bool, 2> needs_grad, bool inplace) {
  using Signature = JsdTuple(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, at::ArrayRef<double>,
                             bool, bool, int64_t, int64_t, int64_t, std::array<bool, 2>, bool);
  static const auto functional = handle<Signature>("fusegrad::jsd_forward");
  static const auto mutating = handle<Signature>("fusegrad::jsd_forward_");
  auto [loss, stats, scales, grad_student, grad_teacher] =
      (inplace ? mutating : functional)
          .call(student, teacher, rows.teacher_index, rows.tail_log_prob, rows.labels, rows.token_weight,
                rows.normalizer, settings.numbers(), settings.log_probs, settings.renormalize, settings.ignore_index,
                settings.reduction, settings.aux, needs_grad, settings.partial);
  return {{loss, stats, scales}, {grad_student, grad_teacher}};
}

std::pair<JsdOutputs, LinearGradients> linear_jsd_forward(const Tensor& input, const Tensor& weight,
                                                          const OptionalTensor& bias, const JsdTeacher& teacher,
                                                          const JsdRows& rows, const JsdSettings& settings,
                                                          const LinearOptions& linear, std::array<bool, 3> needs_grad,
                                                          bool inplace) {
  using Signature = LinearJsdTuple(
      const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      at::ArrayRef<double>, bool, bool, int64_t, int64_t, int64_t, std::optional<int64_t>,
      std::optional<at::ScalarType>, std::optional<int64_t>, std::array<bool, 3>);
  static const auto functional = handle<Signature>("fusegrad::linear_jsd_forward");
  static const auto mutating = handle<Signature>("fusegrad::linear_jsd_forward_");
  auto [loss, stats, scales, grad_input, grad_weight, grad_bias] =
      (inplace ? mutating : functional)
          .call(input, weight, bias, teacher.input, teacher.weight, teacher.bias, rows.teacher_index,
                rows.tail_log_prob, rows.labels, rows.token_weight, rows.normalizer, settings.numbers(),
                settings.log_probs, settings.renormalize, settings.ignore_index, settings.reduction, settings.aux,
                linear.vocab_size, linear.accumulate_dtype, linear.workspace_mib, needs_grad);
  return {{loss, stats, scales}, {grad_input, grad_weight, grad_bias}};
}

LinearGradients linear_jsd_backward(const Tensor& grad_loss, const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, const JsdTeacher& teacher, const JsdRows& rows,
                                    const Tensor& scales, const JsdSettings& settings, const LinearOptions& linear,
                                    std::array<bool, 3> needs_grad) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const Tensor&, at::ArrayRef<double>, bool, int64_t, std::optional<int64_t>, std::optional<at::ScalarType>,
      std::optional<int64_t>, std::array<bool, 3>);
  static const auto op = handle<Signature>("fusegrad::linear_jsd_backward");
  return std::make_from_tuple<LinearGradients>(
      op.call(grad_loss, input, weight, bias, teacher.input, teacher.weight, teacher.bias, rows.teacher_index,
              rows.tail_log_prob, rows.labels, rows.token_weight, scales, settings.numbers(), settings.renormalize,
              settings.ignore_index, linear.vocab_size, linear.accumulate_dtype, linear.workspace_mib, needs_grad));
}

Tensor scale_gradient(const Tensor& gradient, const Tensor& scale, const OptionalTensor& factor) {
  static const auto op =
      handle<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("fusegrad::scale_gradient");
  return op.call(gradient, scale, factor);
}

void scale_gradient_(const Tensor& gradient, const Tensor& scale, const OptionalTensor& factor) {
  static const auto op = handle<void(const Tensor&, const Tensor&, const OptionalTensor&)>("fusegrad::scale_gradient_");
  op.call(gradient, scale, factor);
}

}  // namespace fusegrad::dispatch
