// cross_entropy_forward(_), cross_entropy_backward and scale_gradient(_) on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

template <bool inplace>
RowTuple cross_entropy_forward(const CrossEntropyForward& call) {
  BelowAutogradAndAutocast below;
  const auto& logits = call.logits;
  const c10::OptionalDeviceGuard device(at::device_of(logits));
  const auto vocab = call.shards ? call.shards.vocab() : logits.size(1);
  check_target_range("cross_entropy", call.target, vocab, call.options.ignore_index);
  RowJob job(call.target, call.weight, call.token_weight, call.options, /*logit_scale=*/1.0, logits.size(0), vocab,
             logits.scalar_type());
  job.set_shards(call.shards, call.different);
  using Gradients = RowJob::Gradients;
  job.begin_forward(call.normalizer, !inplace                            ? Gradients::kNone
                                     : logits.scalar_type() == at::kHalf ? Gradients::kDeferred
                                                                         : Gradients::kStored);
  if (inplace) begin_overwriting("the logits");
  job.forward(inplace ? logits : dense_rows(logits), 0, /*gradient_over_logits=*/inplace);
  return to_tuple(job.finish_forward());
}

Tensor cross_entropy_backward(const CrossEntropyBackward& call) {
  BelowAutogradAndAutocast below;
  const auto& logits = call.logits;
  const c10::OptionalDeviceGuard device(at::device_of(logits));
  RowJob job(call.target, call.weight, call.token_weight, call.options, /*logit_scale=*/1.0, logits.size(0),
             call.shards ? call.shards.vocab() : logits.size(1), logits.scalar_type());
  job.set_shards(call.shards);
  job.resume(call.lse, call.stats, call.scales);
  const auto rows = dense_rows(logits);
  const auto grad = empty_result(logits.sizes(), logits.options());
  job.gradient(Upstream::of(call), rows, 0, grad);
  return grad;
}

// A gradient of any shape as rows, one for each value of the scale; a single value sees rows of the last dimension.
void scale_rows(const Tensor& in, const Tensor& out, const Tensor& scale, const OptionalTensor& factor) {
  if (in.numel() == 0) return;
  const bool per_row = scale.dim() == 1;
  const bool matrix = in.dim() == 2;
  RowScaling p;
  p.rows = matrix || per_row ? in.size(0) : 1;
  p.cols = in.numel() / p.rows;
  p.in = in.const_data_ptr();
  p.in_stride = matrix ? in.stride(0) : p.cols;
  p.out = out.data_ptr();
  p.out_stride = matrix ? out.stride(0) : p.cols;
  p.scale = scale.const_data_ptr();
  p.scale_stride = per_row ? scale.stride(0) : 0;
  p.factor = factor.has_value() ? factor->const_data_ptr() : nullptr;
  const auto device = row_device(in.device());
  device.kernels->scaling(p, to_dtype(out.scalar_type()), device.stream);
}

Tensor scale_gradient(const Tensor& gradient, const Tensor& scale, const OptionalTensor& factor) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(gradient));
  const auto in = gradient.dim() == 2 ? dense_rows(gradient) : gradient.contiguous();
  const auto out = empty_result(in.sizes(), in.options());
  scale_rows(in, out, scale, factor);
  return out;
}

void scale_gradient_(const Tensor& gradient, const Tensor& scale, const OptionalTensor& factor) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(gradient));
  begin_overwriting("the gradient that the forward saved");
  scale_rows(gradient, gradient, scale, factor);
}

void implement_cross_entropy(torch::Library& m) {
  m.impl("cross_entropy_forward", named_kernel<"cross_entropy", unpacked<cross_entropy_forward<false>>()>());
  m.impl("cross_entropy_forward_", named_kernel<"cross_entropy", unpacked<cross_entropy_forward<true>>()>());
  m.impl("cross_entropy_backward", named_kernel<"cross_entropy", unpacked<cross_entropy_backward>()>());
  m.impl("scale_gradient", named_kernel<"scale_gradient", scale_gradient>());
  m.impl("scale_gradient_", named_kernel<"scale_gradient", scale_gradient_>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_cross_entropy(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_cross_entropy(m); }
#endif

}  // namespace fusegrad
