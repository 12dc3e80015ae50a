// cross_entropy_shard_gradient(_) on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"

namespace fusegrad {
namespace {

using at::Tensor;

void write_gradient(const CrossEntropyShardGradient& call, const Tensor& logits, const Tensor& grad) {
  if (logits.numel() == 0) return;
  const c10::OptionalDeviceGuard guard(at::device_of(logits));
  const auto device = row_device(logits.device());
  RowGradient p;
  p.rows = logits.size(0);
  p.cols = logits.size(1);
  p.vocab = call.vocab;
  p.col_offset = call.vocab_start;
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.grad = grad.data_ptr();
  p.grad_stride = grad.stride(0);
  auto& t = p.targets;
  if (call.target.is_floating_point()) {
    t.probability = call.target.const_data_ptr();
    t.probability_is_acc = call.target.scalar_type() == call.lse.scalar_type();
    t.probability_stride = call.target.stride(0);
  } else {
    t.index = call.target.const_data_ptr();
    t.index_is_int32 = call.target.scalar_type() == at::kInt;
  }
  t.class_weight = pointer_at(call.weight, 0);
  t.token_weight = pointer_at(call.token_weight, 0);
  t.ignore_index = call.options.ignore_index;
  t.smoothing = call.options.label_smoothing;
  t.dense = dense_target(call.target, call.weight.has_value(), call.options.label_smoothing);
  TORCH_INTERNAL_ASSERT(!t.dense || call.mass.has_value());
  p.transform.cap = call.options.softcap;
  p.z_loss = call.options.z_loss;
  p.scales = call.scales.const_data_ptr();
  p.lse = call.lse.const_data_ptr();
  p.lse_low = call.lse_low.const_data_ptr();
  p.mass = pointer_at(call.mass, 0);
  put_upstream(call.grad_loss.value_or(Tensor()), p.grad_loss, p.grad_loss_stride);
  put_upstream(call.grad_lse.value_or(Tensor()), p.grad_lse, p.grad_lse_stride);
  p.grad_log_prob = pointer_at(call.grad_log_prob, 0);
  p.grad_entropy = pointer_at(call.grad_entropy, 0);
  p.entropy = pointer_at(call.entropy, 0);
  p.entropy_low = pointer_at(call.entropy_low, 0);
  device.kernels->gradient(p, to_dtype(logits.scalar_type()), device.stream);
}

Tensor cross_entropy_shard_gradient(const CrossEntropyShardGradient& call) {
  const auto grad = empty_result(call.logits.sizes(), call.logits.options());
  write_gradient(call, dense_rows(call.logits), grad);
  return grad;
}

void cross_entropy_shard_gradient_(const CrossEntropyShardGradient& call) {
  begin_overwriting("the logits");
  write_gradient(call, call.logits, call.logits);
}

void implement_cross_entropy_shard(torch::Library& m) {
  m.impl("cross_entropy_shard_gradient", named_kernel<"cross_entropy", unpacked<cross_entropy_shard_gradient>()>());
  m.impl("cross_entropy_shard_gradient_", named_kernel<"cross_entropy", unpacked<cross_entropy_shard_gradient_>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_cross_entropy_shard(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_cross_entropy_shard(m); }
#endif

}  // namespace fusegrad
