// One call of a divergence over rows: its tensors, and the device's kernel run on ranges of its rows.
#pragma once

#include "pytorch/ops/jsd_settings.h"
#include "pytorch/rows/job.h"

namespace fusegrad {

class JsdJob {
 public:
  /// `like`: a tensor on the device; `dtype`: that of the logits; `partial`: log-probabilities are parts of longer
  /// rows, which do not sum to 1, and the sums may be negative.
  JsdJob(const JsdRows& tensors, const JsdSettings& settings, int64_t rows, int64_t vocab, at::ScalarType dtype,
         const at::Tensor& like, bool partial = false);

  /// The logits of run(), and those of a dense teacher, are this process's part of the columns: it has collectives in
  /// all processes. `different`: see CrossEntropyForward.
  void set_shards(const char* op, const Shards& shards, const OptionalTensor& different);

  /// Allocates the outputs and computes the scales of the means. `defer`: gradients are to be stored in float16 for an
  /// upstream gradient of 1, so they leave a factor for later, see RowScales.
  void begin_forward(bool defer);
  /// The scales of a forward; from now on run() computes gradients alone, times `upstream`: 0-d or [N].
  void begin_backward(const at::Tensor& scales, const at::Tensor& upstream);
  /// Rows [first, first + student.size(0)) of logits, or of a top-k teacher's log-probabilities. The gradients may lie
  /// over the logits; undefined ones are not wanted.
  void run(const at::Tensor& student, const at::Tensor& teacher, int64_t first, const at::Tensor& grad_student,
           const at::Tensor& grad_teacher);
  /// Reduces the loss and hands out the outputs.
  JsdOutputs finish_forward();

 private:
  struct Soft {
    at::Tensor loss, by_student, by_teacher;  ///< [n], and the gradients by logits over the temperature
  };
  void run_part(const at::Tensor& student, const at::Tensor& teacher, int64_t first, const at::Tensor& grad_student,
                const at::Tensor& grad_teacher);
  Soft divergence(const at::Tensor& log_q, const at::Tensor& log_p, std::array<bool, 2> wanted) const;
  Soft dense(const at::Tensor& s, const at::Tensor& t, const at::Tensor& parts, int64_t first,
             std::array<bool, 2> wanted) const;
  Soft over_top_k(const at::Tensor& others, const at::Tensor& column, const at::Tensor& teacher,
                  const at::Tensor& parts, int64_t first, bool wanted) const;
  at::Tensor rows_of(const at::Tensor& t, int64_t first, int64_t count) const { return part(t, 0, first, count); }

  JsdRows tensors_;
  JsdSettings settings_;
  bool partial_;
  int64_t rows_;
  int64_t vocab_;
  DType dtype_;
  at::TensorOptions acc_;
  RowDevice device_;
  bool deferred_ = false;
  at::Tensor upstream_;
  at::Tensor row_loss_;
  at::Tensor topk_logits_;
  JsdOutputs out_;

  // Shards alone have these.
  const char* op_ = nullptr;
  Shards shards_;
  OptionalTensor different_;
  at::Tensor kept_;  // [N] bool
};

}  // namespace fusegrad
