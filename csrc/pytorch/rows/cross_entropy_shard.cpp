// cross_entropy_shard_gradient(_) on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void write_gradient(const Tensor& logits, const Tensor& grad, const OptionalTensor& grad_loss,
                    const OptionalTensor& grad_lse, const Tensor& target, const OptionalTensor& weight,
                    const Tensor& lse, const Tensor& lse_low, const OptionalTensor& mass, const Tensor& scales,
                    const OptionalTensor& token_weight, int64_t ignore_index, double label_smoothing, double z_loss,
                    double softcap, int64_t vocab_start, int64_t vocab) {
  if (logits.numel() == 0) return;
  const c10::OptionalDeviceGuard guard(at::device_of(logits));
  const auto device = row_device(logits.device());
  RowGradient p;
  p.rows = logits.size(0);
  p.cols = logits.size(1);
  p.vocab = vocab;
  p.col_offset = vocab_start;
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.grad = grad.data_ptr();
  p.grad_stride = grad.stride(0);
  auto& t = p.targets;
  if (target.is_floating_point()) {
    t.probability = target.const_data_ptr();
    t.probability_is_acc = target.scalar_type() == lse.scalar_type();
    t.probability_stride = target.stride(0);
  } else {
    t.index = target.const_data_ptr();
    t.index_is_int32 = target.scalar_type() == at::kInt;
  }
  t.class_weight = pointer_at(weight, 0);
  t.token_weight = pointer_at(token_weight, 0);
  t.ignore_index = ignore_index;
  t.smoothing = label_smoothing;
  t.dense = dense_target(target, weight.has_value(), label_smoothing);
  TORCH_INTERNAL_ASSERT(!t.dense || mass.has_value());
  p.transform.cap = softcap;
  p.z_loss = z_loss;
  p.scales = scales.const_data_ptr();
  p.lse = lse.const_data_ptr();
  p.lse_low = lse_low.const_data_ptr();
  p.mass = pointer_at(mass, 0);
  put_upstream(grad_loss.value_or(Tensor()), p.grad_loss, p.grad_loss_stride);
  put_upstream(grad_lse.value_or(Tensor()), p.grad_lse, p.grad_lse_stride);
  device.kernels->gradient(p, to_dtype(logits.scalar_type()), device.stream);
}

Tensor cross_entropy_shard_gradient(const Tensor& logits, const OptionalTensor& grad_loss,
                                    const OptionalTensor& grad_lse, const Tensor& target, const OptionalTensor& weight,
                                    const Tensor& lse, const Tensor& lse_low, const OptionalTensor& mass,
                                    const Tensor& scales, const OptionalTensor& token_weight, int64_t ignore_index,
                                    double label_smoothing, double z_loss, double softcap, int64_t vocab_start,
                                    int64_t vocab) {
  const auto grad = empty_result(logits.sizes(), logits.options());
  write_gradient(dense_rows(logits), grad, grad_loss, grad_lse, target, weight, lse, lse_low, mass, scales,
                 token_weight, ignore_index, label_smoothing, z_loss, softcap, vocab_start, vocab);
  return grad;
}

void cross_entropy_shard_gradient_(const Tensor& logits, const OptionalTensor& grad_loss,
                                   const OptionalTensor& grad_lse, const Tensor& target, const OptionalTensor& weight,
                                   const Tensor& lse, const Tensor& lse_low, const OptionalTensor& mass,
                                   const Tensor& scales, const OptionalTensor& token_weight, int64_t ignore_index,
                                   double label_smoothing, double z_loss, double softcap, int64_t vocab_start,
                                   int64_t vocab) {
  begin_overwriting("the logits");
  write_gradient(logits, logits, grad_loss, grad_lse, target, weight, lse, lse_low, mass, scales, token_weight,
                 ignore_index, label_smoothing, z_loss, softcap, vocab_start, vocab);
}

void implement(torch::Library& m) {
  m.impl("cross_entropy_shard_gradient", named_kernel<"cross_entropy", cross_entropy_shard_gradient>());
  m.impl("cross_entropy_shard_gradient_", named_kernel<"cross_entropy", cross_entropy_shard_gradient_>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement(m); }
#endif

}  // namespace fusegrad
