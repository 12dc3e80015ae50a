// One call of a divergence over rows: its tensors, and the device's kernel run on ranges of its rows.
#pragma once

#include "pytorch/ops/jsd_settings.h"
#include "pytorch/rows/job.h"

namespace fusegrad {

class JsdJob {
 public:
  /// `like`: a tensor on the device; `dtype`: that of the logits; `partial`: see JsdForward.
  JsdJob(const JsdRows& tensors, const JsdSettings& settings, int64_t rows, int64_t vocab, at::ScalarType dtype,
         const at::Tensor& like, bool partial = false);

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
};

}  // namespace fusegrad
