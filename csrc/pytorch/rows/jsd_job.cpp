#include "pytorch/rows/jsd_job.h"

#include <algorithm>

namespace fusegrad {

using at::Tensor;

JsdJob::JsdJob(const JsdRows& tensors, const JsdSettings& settings, int64_t rows, int64_t vocab, at::ScalarType dtype,
               const Tensor& like, bool partial)
    : tensors_(tensors),
      settings_(settings),
      partial_(partial),
      rows_(rows),
      vocab_(vocab),
      dtype_(to_dtype(dtype)),
      acc_(like.options().dtype(acc_type(dtype)).requires_grad(false)),
      device_(row_device(like.device())) {}

void JsdJob::begin_forward(bool defer) {
  row_loss_ = at::empty({rows_}, acc_);
  // Here too what comes last: an op in place should not fail after its first write.
  if (settings_.reduction != at::Reduction::None) out_.loss = at::empty({}, acc_);
  out_.stats = at::empty({jsd_stat_count(settings_.aux), rows_}, acc_);
  out_.scales = at::empty({settings_.averaged() ? 4 : 0}, acc_);
  if (!settings_.averaged()) return;
  deferred_ = defer;
  RowScales p;
  p.rows = rows_;
  p.cols = vocab_;
  p.targets.index = pointer_at(tensors_.labels, 0);
  p.targets.index_is_int32 = tensors_.labels.has_value() && tensors_.labels->scalar_type() == at::kInt;
  p.targets.ignore_index = settings_.ignore_index;
  p.normalizer = tensors_.normalizer.has_value() ? tensors_.normalizer->const_data_ptr() : nullptr;
  p.values_per_row = settings_.reduction == at::Reduction::Mean ? static_cast<double>(vocab_) : 1.0;
  p.defer = deferred_;
  p.out = out_.scales.data_ptr();
  device_.kernels->scales(p, dtype_, device_.stream);
}

void JsdJob::begin_backward(const Tensor& scales, const Tensor& upstream) {
  out_.scales = scales;
  upstream_ = upstream;
}

void JsdJob::run(const Tensor& student, const Tensor& teacher, int64_t first, const Tensor& grad_student,
                 const Tensor& grad_teacher) {
  if (shards_) return run_part(student, teacher, first, grad_student, grad_teacher);
  if (student.numel() == 0) return;
  const auto& s = settings_;
  RowJsd p;
  p.rows = student.size(0);
  p.cols = vocab_;
  p.student = student.const_data_ptr();
  p.student_stride = student.stride(0);
  p.teacher = teacher.const_data_ptr();
  p.teacher_stride = teacher.stride(0);
  if (tensors_.teacher_index.has_value()) {
    p.teacher_index = pointer_at(tensors_.teacher_index, first);
    p.topk = teacher.size(1);
    p.tail = pointer_at(tensors_.tail_log_prob, first);
    p.roundoff = s.roundoff;
    p.acc_roundoff = std::min(s.roundoff, roundoff_of(at::kFloat));
    if (student.is_cuda()) {
      topk_logits_ = at::empty({p.rows, p.topk}, acc_);
      p.topk_logits = topk_logits_.data_ptr();
    }
  }
  p.renormalize = s.renormalize;
  p.log_probs = s.log_probs;
  p.partial = partial_;
  p.student_transform = {s.student_logit_scale, s.student_softcap};
  p.teacher_transform = {s.teacher_logit_scale, s.teacher_softcap};
  p.student_temperature = s.student_temperature;
  p.teacher_temperature = s.teacher_temperature;
  p.beta = s.beta;
  p.soft_weight = s.soft_weight;
  p.hard_weight = s.hard_weight;
  p.label = pointer_at(tensors_.labels, first);
  p.label_is_int32 = tensors_.labels.has_value() && tensors_.labels->scalar_type() == at::kInt;
  p.ignore_index = s.ignore_index;
  p.token_weight = pointer_at(tensors_.token_weight, first);
  p.scales = pointer_at(out_.scales, 0);
  put_upstream(upstream_, p.upstream, p.upstream_stride);
  if (upstream_.defined()) {
    p.upstream = static_cast<const char*>(p.upstream) +
                 first * p.upstream_stride * static_cast<int64_t>(upstream_.element_size());
  }
  if (grad_student.defined()) {
    p.grad_student = grad_student.data_ptr();
    p.grad_student_stride = grad_student.stride(0);
  }
  if (grad_teacher.defined()) {
    p.grad_teacher = grad_teacher.data_ptr();
    p.grad_teacher_stride = grad_teacher.stride(0);
  }
  p.loss = pointer_at(row_loss_, first);
  const auto stat = [&](int64_t row) { return pointer_at(out_.stats, row, first); };
  const bool soft = (s.aux & kJSDAuxSoftLoss) != 0, hard = (s.aux & kJSDAuxHardLoss) != 0;
  if (out_.stats.defined() && soft) p.soft = stat(0);
  if (out_.stats.defined() && hard) p.hard = stat(soft ? 1 : 0);
  device_.kernels->jsd(p, dtype_, device_.stream);
}

JsdOutputs JsdJob::finish_forward() {
  if (vocab_ == 0) {
    // No kernel ran: sums over nothing.
    row_loss_.zero_();
    out_.stats.zero_();
  }
  if (settings_.reduction == at::Reduction::None) {
    out_.loss = row_loss_;
    return out_;
  }
  RowSum p;
  p.rows = rows_;
  p.loss = pointer_at(row_loss_, 0);
  p.factor = deferred_ ? pointer_at(out_.scales, 2) : nullptr;
  p.out = out_.loss.data_ptr();
  device_.kernels->sum(p, dtype_, device_.stream);
  return out_;
}

}  // namespace fusegrad
