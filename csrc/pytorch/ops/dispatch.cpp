#include "pytorch/ops/dispatch.h"

#include "pytorch/rows/registration.h"

namespace fusegrad::dispatch {
namespace {

using at::Tensor;

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

RowOutputs cross_entropy_forward(const CrossEntropyForward& call, bool inplace) {
  static const Twins<CrossEntropyForward, RowTuple> op("fusegrad::cross_entropy_forward");
  return std::make_from_tuple<RowOutputs>(op(call, inplace));
}

Tensor cross_entropy_backward(const CrossEntropyBackward& call) {
  static const Op<CrossEntropyBackward, Tensor> op("fusegrad::cross_entropy_backward");
  return op(call);
}

std::tuple<Tensor, Tensor> cross_entropy_rows(const CrossEntropyRows& call) {
  static const Op<CrossEntropyRows, RowValuesTuple> op("fusegrad::cross_entropy_rows");
  return op(call);
}
Tensor cross_entropy_rows(const CrossEntropyRowsGradient& call) {
  static const Op<CrossEntropyRowsGradient, Tensor> op("fusegrad::cross_entropy_rows_gradient");
  return op(call);
}
Tensor cross_entropy_rows(const CrossEntropyRowsTangent& call) {
  static const Op<CrossEntropyRowsTangent, Tensor> op("fusegrad::cross_entropy_rows_tangent");
  return op(call);
}
Tensor cross_entropy_rows(const CrossEntropyRowsSecond& call) {
  static const Op<CrossEntropyRowsSecond, Tensor> op("fusegrad::cross_entropy_rows_second");
  return op(call);
}

LinearCrossEntropyOutputs linear_cross_entropy_forward(const LinearCrossEntropyForward& call, bool inplace) {
  static const Twins<LinearCrossEntropyForward, LinearTuple> op("fusegrad::linear_cross_entropy_forward");
  auto [loss, lse, stats, predicted, scales, logits, grad_input, grad_weight, grad_bias] = op(call, inplace);
  return {{loss, lse, stats, predicted, scales}, logits, {grad_input, grad_weight, grad_bias}};
}

LinearGradients linear_cross_entropy_backward(const LinearCrossEntropyBackward& call, bool inplace) {
  static const Twins<LinearCrossEntropyBackward, LinearGradientTuple> op("fusegrad::linear_cross_entropy_backward");
  return std::make_from_tuple<LinearGradients>(op(call, inplace));
}

LinearGradients linear_cross_entropy_backward_into(const LinearCrossEntropyBackwardInto& call, bool inplace) {
  static const Twins<LinearCrossEntropyBackwardInto, LinearGradientTuple> op(
      "fusegrad::linear_cross_entropy_backward_into");
  return std::make_from_tuple<LinearGradients>(op(call, inplace));
}

LinearSecond linear_cross_entropy_second(const LinearCrossEntropySecond& call) {
  static const Op<LinearCrossEntropySecond, LinearSecondTuple> op("fusegrad::linear_cross_entropy_second");
  auto [values, input, weight, bias] = op(call);
  return {values, {input, weight, bias}};
}

std::pair<JsdOutputs, std::array<Tensor, 2>> jsd_forward(const JsdForward& call, bool inplace) {
  static const Twins<JsdForward, JsdTuple> op("fusegrad::jsd_forward");
  auto [loss, stats, scales, grad_student, grad_teacher] = op(call, inplace);
  return {{loss, stats, scales}, {grad_student, grad_teacher}};
}

Tensor jsd_soft(const JsdSoft& call) {
  static const Op<JsdSoft, Tensor> op("fusegrad::jsd_soft");
  return op(call);
}
std::vector<Tensor> jsd_soft(const JsdSoftGradient& call) {
  static const Op<JsdSoftGradient, std::vector<Tensor>> op("fusegrad::jsd_soft_gradient");
  return op(call);
}
Tensor jsd_soft(const JsdSoftTangent& call) {
  static const Op<JsdSoftTangent, Tensor> op("fusegrad::jsd_soft_tangent");
  return op(call);
}
std::vector<Tensor> jsd_soft(const JsdSoftSecond& call) {
  static const Op<JsdSoftSecond, std::vector<Tensor>> op("fusegrad::jsd_soft_second");
  return op(call);
}

std::pair<JsdOutputs, LinearGradients> linear_jsd_forward(const LinearJsdForward& call, bool inplace) {
  static const Twins<LinearJsdForward, LinearJsdTuple> op("fusegrad::linear_jsd_forward");
  auto [loss, stats, scales, grad_input, grad_weight, grad_bias] = op(call, inplace);
  return {{loss, stats, scales}, {grad_input, grad_weight, grad_bias}};
}

LinearGradients linear_jsd_backward(const LinearJsdBackward& call) {
  static const Op<LinearJsdBackward, LinearGradientTuple> op("fusegrad::linear_jsd_backward");
  return std::make_from_tuple<LinearGradients>(op(call));
}

LinearSecond linear_jsd_second(const LinearJsdSecond& call) {
  static const Op<LinearJsdSecond, LinearSecondTuple> op("fusegrad::linear_jsd_second");
  auto [values, input, weight, bias] = op(call);
  return {values, {input, weight, bias}};
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
