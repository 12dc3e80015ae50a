#include "pytorch/rows/job.h"

#include <limits>

#include "common/memory.h"
#include "fusegrad/options.h"
#include "pytorch/host.h"
#include "pytorch/rows/collectives.h"

#ifdef FUSEGRAD_WITH_CUDA
#include "pytorch/gpu.h"
#endif

namespace fusegrad {

using at::Tensor;

Tensor readable_target(const Tensor& target, at::ScalarType logits_dtype) {
  const auto dtype = target.scalar_type();
  return !target.is_floating_point() || dtype == logits_dtype ? target : target.to(acc_type(logits_dtype));
}

RowDevice row_device(const at::Device& device) {
  if (device.is_cpu()) return {&kCpuRowKernels, const_cast<cpu::Host*>(&torch_host())};
#ifdef FUSEGRAD_WITH_CUDA
  return {&kCudaRowKernels, gpu::current_stream(device.index())};
#else
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
#endif
}

void* pointer_at(const Tensor& tensor, int64_t index) {
  if (!tensor.defined() || tensor.numel() == 0) return nullptr;
  return static_cast<char*>(tensor.data_ptr()) + index * tensor.stride(0) * tensor.element_size();
}

const void* pointer_at(const std::optional<Tensor>& tensor, int64_t index) {
  return tensor.has_value() ? pointer_at(*tensor, index) : nullptr;
}

void* pointer_at(const Tensor& matrix, int64_t i, int64_t j) {
  if (!matrix.defined() || matrix.numel() == 0) return nullptr;
  return static_cast<char*>(matrix.data_ptr()) + (i * matrix.stride(0) + j * matrix.stride(1)) * matrix.element_size();
}

void put_upstream(const Tensor& gradient, const void*& pointer, int64_t& stride, int64_t first) {
  if (!gradient.defined()) return;
  stride = gradient.dim() == 0 ? 0 : gradient.stride(0);
  pointer = static_cast<const char*>(gradient.const_data_ptr()) + first * stride * gradient.element_size();
}

Tensor dense_rows(const Tensor& matrix) {
  return matrix.size(1) <= 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  auto result = at::empty(sizes, options);
  if (result.is_cpu() && result.nbytes() >= 4 * kHugePage)
    ask_for_huge_pages(result.mutable_data_ptr(), result.nbytes());
  return result;
}

DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernels for ", dtype);
  }
}

RowJob::RowJob(const Tensor& target, const std::optional<Tensor>& weight, const std::optional<Tensor>& token_weight,
               const RowOptions& options, double logit_scale, int64_t rows, int64_t vocab, at::ScalarType logits_dtype)
    : target_(readable_target(target, logits_dtype)),
      weight_(weight),
      token_weight_(token_weight),
      options_(options),
      logit_scale_(logit_scale),
      rows_(rows),
      vocab_(vocab),
      dtype_(logits_dtype),
      acc_(target.options().dtype(acc_type(logits_dtype)).requires_grad(false)),
      device_(row_device(target.device())),
      dense_(dense_target(target, weight.has_value(), options.label_smoothing)),
      stat_rows_(dense_, options.aux) {}

void* RowJob::stat(int64_t row, int64_t first) const { return row < 0 ? nullptr : pointer_at(out_.stats, row, first); }

RowTargets RowJob::targets(int64_t first_row, int64_t first_column) const {
  RowTargets t;
  if (target_.is_floating_point()) {
    t.probability_is_acc = target_.scalar_type() == acc_.dtype();
    t.probability_stride = target_.stride(0);
    if (target_.numel() != 0) {
      t.probability = static_cast<const char*>(target_.const_data_ptr()) +
                      (first_row * target_.stride(0) + first_column) * target_.element_size();
    }
  } else {
    t.index_is_int32 = target_.scalar_type() == at::kInt;
    t.index = pointer_at(target_, first_row);
  }
  t.class_weight = pointer_at(weight_, 0);
  t.token_weight = pointer_at(token_weight_, first_row);
  t.ignore_index = options_.ignore_index;
  t.smoothing = options_.label_smoothing;
  t.dense = dense_;
  return t;
}

void RowJob::begin_forward(const std::optional<Tensor>& normalizer, Gradients gradients) {
  row_loss_ = at::empty({rows_}, acc_);
  // Here too what comes last: an op in place should not fail after its first write.
  if (options_.reduction != at::Reduction::None) out_.loss = at::empty({}, acc_);
  out_.lse = at::empty({rows_}, acc_);
  out_.stats = at::empty({stat_rows_.count, rows_}, acc_);
  const bool predict = (options_.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0;
  out_.predicted_tokens = at::empty({predict ? rows_ : 0}, acc_.dtype(at::kLong));
  const bool mean = options_.reduction == at::Reduction::Mean;
  out_.scales = at::empty({mean ? 4 : 0}, acc_);
  normalizer_ = normalizer;
  deferred_ = mean && gradients == Gradients::kDeferred;
  // Without a gradient, and without a z-loss that is divided by something else, only the sum of the losses needs them.
  scales_come_last_ = mean && gradients == Gradients::kNone && options_.z_loss == 0.0 && vocab_ != 0;
  if (mean && !scales_come_last_) compute_scales();
}

void RowJob::compute_scales() {
  RowScales p;
  p.rows = rows_;
  p.cols = vocab_;
  p.targets = targets(0, 0);
  p.normalizer = normalizer_.has_value() ? normalizer_->const_data_ptr() : nullptr;
  p.defer = deferred_;
  p.out = out_.scales.data_ptr();
  if (scales_come_last_) {
    p.loss = pointer_at(row_loss_, 0);
    p.mean_loss = out_.loss.data_ptr();
  }
  device_.kernels->scales(p, to_dtype(dtype_), device_.stream);
}

void RowJob::forward(const Tensor& logits, int64_t first, bool gradient_over_logits) {
  if (nodes_ || shards_) {
    if (vocab_ == 0) return;
    nodes_ ? forward_by_segments(logits, first) : combine(gather_parts(part_statistics(logits, first), shards_), first);
    if (gradient_over_logits) gradient({.loss = unit_gradient()}, logits, 0, logits, first);
    return;
  }
  if (logits.numel() == 0) return;
  RowForward p;
  describe(p, logits, first);
  if (gradient_over_logits) {
    p.grad = logits.data_ptr();
    p.grad_stride = logits.stride(0);
  }
  device_.kernels->forward(p, to_dtype(dtype_), device_.stream);
}

// What a forward reads of rows from `first` on, and all that it writes of them but their gradient.
void RowJob::describe(RowForward& p, const Tensor& logits, int64_t first) const {
  p.rows = logits.size(0);
  p.cols = logits.size(1);
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.targets = targets(first, 0);
  p.transform = {logit_scale_, options_.softcap};
  p.row_scale = pointer_at(row_scale_, first);
  p.z_loss = options_.z_loss;
  p.scales = scales_come_last_ ? nullptr : pointer_at(out_.scales, 0);
  p.alone = (options_.aux & kBatchInvariant) != 0;
  p.lse_of_ignored = (options_.aux & kAuxLse) != 0;
  p.loss = pointer_at(row_loss_, first);
  p.lse = pointer_at(out_.lse, first);
  p.lse_low = stat(stat_rows_.lse_low, first);
  p.mass = stat(stat_rows_.mass, first);
  p.z_loss_term = stat(stat_rows_.z_loss, first);
  p.predicted = pointer_at(out_.predicted_tokens, first);
  p.token_log_prob = stat(stat_rows_.token_log_prob, first);
  p.entropy = stat(stat_rows_.entropy, first);
  p.entropy_low = stat(stat_rows_.entropy_low, first);
  p.mean = stat(stat_rows_.mean, first);
  p.variance = stat(stat_rows_.variance, first);
  p.slope = stat(stat_rows_.slope, first);
}

RowOutputs RowJob::finish_forward() {
  if (vocab_ == 0) {
    // No kernel ran. A row that counts has no class to choose from.
    row_loss_.zero_();
    if (!target_.is_floating_point()) {
      row_loss_.masked_fill_(target_.ne(options_.ignore_index), std::numeric_limits<double>::quiet_NaN());
    }
    out_.lse.fill_(-std::numeric_limits<double>::infinity());
    out_.predicted_tokens.fill_(-1);
    out_.stats.zero_();
  }
  if (options_.reduction == at::Reduction::None) {
    out_.loss = row_loss_;
    return out_;
  }
  if (scales_come_last_) {
    compute_scales();
    return out_;
  }
  RowSum p;
  p.rows = rows_;
  p.loss = pointer_at(row_loss_, 0);
  p.factor = deferred_ ? pointer_at(out_.scales, 2) : nullptr;
  p.nan_if_zero = pointer_at(out_.scales, 3);
  p.out = out_.loss.data_ptr();
  device_.kernels->sum(p, to_dtype(dtype_), device_.stream);
  return out_;
}

void RowJob::resume(const Tensor& lse, const Tensor& stats, const Tensor& scales) {
  out_.lse = lse;
  out_.stats = stats;
  out_.scales = scales;
}

Tensor RowJob::unit_gradient() const { return at::ones({}, acc_); }

void RowJob::gradient(const Upstream& upstream, const Tensor& logits, int64_t column, const Tensor& grad,
                      int64_t first) {
  if (logits.numel() == 0) return;
  RowGradient p;
  p.rows = logits.size(0);
  p.cols = logits.size(1);
  p.vocab = vocab_;
  p.col_offset = column + (shards_ ? shards_.start() : 0);
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  p.grad = grad.data_ptr();
  p.grad_stride = grad.stride(0);
  p.targets = targets(first, column);
  p.transform = {logit_scale_, options_.softcap};
  p.row_scale = pointer_at(row_scale_, first);
  p.z_loss = options_.z_loss;
  p.scales = pointer_at(out_.scales, 0);
  p.lse = pointer_at(out_.lse, first);
  p.lse_low = stat(stat_rows_.lse_low, first);
  p.mass = stat(stat_rows_.mass, first);
  put_upstream(upstream.loss, p.grad_loss, p.grad_loss_stride, first);
  put_upstream(upstream.lse, p.grad_lse, p.grad_lse_stride, first);
  if (upstream.stats.defined()) {
    const auto gradient_of = [&](int64_t row) { return row < 0 ? nullptr : pointer_at(upstream.stats, row, first); };
    p.grad_log_prob = gradient_of(stat_rows_.token_log_prob);
    p.grad_entropy = gradient_of(stat_rows_.entropy);
    p.entropy = stat(stat_rows_.entropy, first);
    p.entropy_low = stat(stat_rows_.entropy_low, first);
  }
  device_.kernels->gradient(p, to_dtype(dtype_), device_.stream);
}

}  // namespace fusegrad
