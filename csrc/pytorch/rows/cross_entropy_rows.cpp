// cross_entropy_rows and what its derivatives are, on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

RowTargets targets_of(const RowSettings& s, const Tensor& logits) {
  RowTargets t;
  if (s.target.is_floating_point()) {
    t.probability = pointer_at(s.target, 0);
    t.probability_is_acc = s.target.scalar_type() == acc_type(logits.scalar_type());
    t.probability_stride = s.target.stride(0);
  } else {
    t.index = pointer_at(s.target, 0);
    t.index_is_int32 = s.target.scalar_type() == at::kInt;
  }
  t.class_weight = pointer_at(s.weight, 0);
  t.ignore_index = s.ignore_index;
  t.smoothing = s.label_smoothing;
  t.dense = dense_target(s.target, s.weight.has_value(), s.label_smoothing);
  return t;
}

// What a kernel takes of a call, whose tensors may have any strides.
template <class Call>
Call readable(Call call) {
  auto& s = call.settings;
  s.target = readable_target(s.target, call.logits.scalar_type()).contiguous();
  if (s.weight) s.weight = s.weight->contiguous();
  call.logits = dense_rows(call.logits);
  check_target_range("cross_entropy", s.target, call.logits.size(1), s.ignore_index);
  return call;
}

bool asks(const RowSettings& s, int64_t bit) { return (s.aux & bit) != 0; }

Tensor zeros_of_rows(const Tensor& logits, int64_t count) {
  return at::zeros({count, logits.size(0)}, logits.options().dtype(acc_type(logits.scalar_type())));
}

// The values that a call has, of a matrix of them.
template <class Pointer>
RowValues<Pointer> values_in(const Tensor& matrix, const RowSettings& s) {
  const auto row = [&](int64_t i) { return pointer_at(matrix, i); };
  RowValues<Pointer> values{.cross_entropy = row(kRowCrossEntropy), .lse = row(kRowLse)};
  if (asks(s, kAuxEntropy)) values.entropy = row(kRowEntropy);
  if (asks(s, kAuxTokenLogProb)) values.log_prob = row(kRowLogProb);
  return values;
}

RowValuesTuple cross_entropy_rows(const CrossEntropyRows& given) {
  BelowAutogradAndAutocast below;
  const auto call = readable(given);
  const auto& logits = call.logits;
  const c10::OptionalDeviceGuard guard(at::device_of(logits));
  auto values = zeros_of_rows(logits, kRowValues), stats = zeros_of_rows(logits, kRowConstants);
  const auto found = values_in<void*>(values, call.settings);
  const auto device = row_device(logits.device());
  RowForward p;
  p.rows = logits.size(0);
  p.cols = logits.size(1);
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.targets = targets_of(call.settings, logits);
  p.transform = {1.0, call.settings.softcap};
  p.lse_of_ignored = asks(call.settings, kAuxLse);
  p.loss = found.cross_entropy;
  p.lse = found.lse;
  p.lse_low = pointer_at(stats, kStatLseLow);
  if (p.targets.dense) p.mass = pointer_at(stats, kStatMass);
  p.token_log_prob = found.log_prob;
  if (found.entropy != nullptr) {
    p.entropy = found.entropy;
    p.entropy_low = pointer_at(stats, kStatEntropyLow);
  }
  device.kernels->forward(p, to_dtype(logits.scalar_type()), device.stream);
  stats.select(0, kStatLse).copy_(values.select(0, kRowLse));
  if (found.entropy != nullptr) stats.select(0, kStatEntropy).copy_(values.select(0, kRowEntropy));
  return {values, stats};
}

Tensor cross_entropy_rows_gradient(const CrossEntropyRowsGradient& given) {
  BelowAutogradAndAutocast below;
  const auto call = readable(given);
  const auto& logits = call.logits;
  const c10::OptionalDeviceGuard guard(at::device_of(logits));
  const auto upstream = call.upstream.contiguous(), stats = call.stats.contiguous();
  const auto grad = empty_result(logits.sizes(), logits.options());
  const auto from = values_in<const void*>(upstream, call.settings);
  const auto device = row_device(logits.device());
  RowGradient p;
  p.rows = logits.size(0);
  p.cols = p.vocab = logits.size(1);
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.grad = grad.data_ptr();
  p.grad_stride = grad.stride(0);
  p.targets = targets_of(call.settings, logits);
  p.transform = {1.0, call.settings.softcap};
  p.lse = pointer_at(stats, kStatLse);
  p.lse_low = pointer_at(stats, kStatLseLow);
  p.mass = pointer_at(stats, kStatMass);
  p.grad_loss = from.cross_entropy;
  p.grad_loss_stride = 1;
  p.grad_lse = from.lse;
  p.grad_lse_stride = 1;
  p.lse_of_ignored = asks(call.settings, kAuxLse);
  p.grad_log_prob = from.log_prob;
  p.grad_entropy = from.entropy;
  p.entropy = pointer_at(stats, kStatEntropy);
  p.entropy_low = pointer_at(stats, kStatEntropyLow);
  device.kernels->gradient(p, to_dtype(logits.scalar_type()), device.stream);
  return grad;
}

// `values`, or `grad`, gets what is asked for; the other is undefined.
template <class Call>
void compute_tangents(const Call& call, const Tensor& upstream, const Tensor& upstream_tangent, const Tensor& values,
                      const Tensor& grad) {
  const auto& [logits, settings] = std::tie(call.logits, call.settings);
  const c10::OptionalDeviceGuard guard(at::device_of(logits));
  const auto tangent = dense_rows(call.tangent.to(logits.scalar_type())), stats = call.stats.contiguous();
  const auto device = row_device(logits.device());
  RowTangents p;
  p.rows = logits.size(0);
  p.cols = logits.size(1);
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.tangent = tangent.const_data_ptr();
  p.tangent_stride = tangent.stride(0);
  p.targets = targets_of(settings, logits);
  p.softcap = settings.softcap;
  p.lse_of_ignored = asks(settings, kAuxLse);
  p.lse = pointer_at(stats, kStatLse);
  p.lse_low = pointer_at(stats, kStatLseLow);
  p.mass = pointer_at(stats, kStatMass);
  if (asks(settings, kAuxEntropy)) {
    p.entropy = pointer_at(stats, kStatEntropy);
    p.entropy_low = pointer_at(stats, kStatEntropyLow);
  }
  if (upstream.defined()) p.upstream = values_in<const void*>(upstream, settings);
  if (upstream_tangent.defined()) p.upstream_tangent = values_in<const void*>(upstream_tangent, settings);
  if (values.defined()) p.values = values_in<void*>(values, settings);
  if (grad.defined()) {
    p.grad_tangent = grad.data_ptr();
    p.grad_tangent_stride = grad.stride(0);
  }
  device.kernels->tangents(p, to_dtype(logits.scalar_type()), device.stream);
}

Tensor cross_entropy_rows_tangent(const CrossEntropyRowsTangent& given) {
  BelowAutogradAndAutocast below;
  const auto call = readable(given);
  const auto values = zeros_of_rows(call.logits, kRowValues);
  compute_tangents(call, {}, {}, values, {});
  return values;
}

Tensor cross_entropy_rows_second(const CrossEntropyRowsSecond& given) {
  BelowAutogradAndAutocast below;
  const auto call = readable(given);
  const auto grad = empty_result(call.logits.sizes(), call.logits.options());
  compute_tangents(call, call.upstream.contiguous(),
                   call.upstream_tangent ? call.upstream_tangent->contiguous() : Tensor(), {}, grad);
  return grad;
}

void implement_cross_entropy_rows(torch::Library& m) {
  m.impl("cross_entropy_rows", named_kernel<"cross_entropy", unpacked<cross_entropy_rows>()>());
  m.impl("cross_entropy_rows_gradient", named_kernel<"cross_entropy", unpacked<cross_entropy_rows_gradient>()>());
  m.impl("cross_entropy_rows_tangent", named_kernel<"cross_entropy", unpacked<cross_entropy_rows_tangent>()>());
  m.impl("cross_entropy_rows_second", named_kernel<"cross_entropy", unpacked<cross_entropy_rows_second>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_cross_entropy_rows(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_cross_entropy_rows(m); }
#endif

}  // namespace fusegrad
