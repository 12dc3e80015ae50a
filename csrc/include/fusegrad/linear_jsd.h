#pragma once

#include "fusegrad/jsd.h"

namespace fusegrad {

/// Options of linear_jsd; those it shares with JSDOptions and LinearCrossEntropyOptions mean the same.
struct LinearJSDOptions {
  /// [V], floating, on the input's device. The teacher's gets no gradient.
  TORCH_ARG(std::optional<at::Tensor>, student_bias);
  TORCH_ARG(std::optional<at::Tensor>, teacher_bias);
  TORCH_ARG(std::optional<at::Tensor>, labels);
  TORCH_ARG(std::optional<at::Tensor>, token_weight);
  TORCH_ARG(Normalizer, normalizer);
  TORCH_ARG(double, beta) = 0.5;
  /// Divides the student's logits, and the teacher's where it has none of its own.
  TORCH_ARG(double, temperature) = 1.0;
  TORCH_ARG(std::optional<double>, teacher_temperature);
  /// z = softcap(logit_scale * (input @ weight.T + bias)), for each side.
  TORCH_ARG(std::optional<double>, student_softcap);
  TORCH_ARG(std::optional<double>, teacher_softcap);
  TORCH_ARG(double, student_logit_scale) = 1.0;
  TORCH_ARG(double, teacher_logit_scale) = 1.0;
  TORCH_ARG(int64_t, ignore_index) = -100;
  TORCH_ARG(std::string, reduction) = "batchmean";
  TORCH_ARG(std::string, tail) = "bucket";
  TORCH_ARG(double, soft_weight) = 1.0;
  TORCH_ARG(double, hard_weight) = 0.0;
  /// Only the first so many rows of the weights and biases count, for vocabularies that are padded differently. The
  /// gradients of the others are zero.
  TORCH_ARG(std::optional<int64_t>, vocab_size);
  /// Permission to overwrite the student's input with its gradient.
  TORCH_ARG(bool, inplace) = false;
  /// The rows of both weights and of the biases are a part of the vocabulary's.
  TORCH_ARG(std::optional<VocabParallel>, vocab_parallel);
  TORCH_ARG(std::optional<at::ScalarType>, accumulate_dtype);
  TORCH_ARG(std::optional<int64_t>, workspace_mib);
};

/// jsd(linear(student_input, student_weight), linear(teacher_input, teacher_weight)) without keeping the logits
/// of either.
///
/// student_input: [..., H]; student_weight: [V, H]; teacher_input: [..., H'], teacher_weight: [V, H'], of any floating
/// dtype: the teacher's logits are computed in its own dtype and rounded to that of the student's. The teacher is a
/// constant: a part of it that requires grad is an error. Errors as in jsd.
at::Tensor linear_jsd(const at::Tensor& student_input, const at::Tensor& student_weight,
                      const at::Tensor& teacher_input, const at::Tensor& teacher_weight,
                      const LinearJSDOptions& options = {});
at::Tensor linear_jsd(const at::Tensor& student_input, const at::Tensor& student_weight, const TopK& teacher,
                      const LinearJSDOptions& options = {});

/// The same, with per-row values beside the loss.
JSDOutput linear_jsd_with_aux(const at::Tensor& student_input, const at::Tensor& student_weight,
                              const at::Tensor& teacher_input, const at::Tensor& teacher_weight,
                              const LinearJSDOptions& options, const JSDAux& aux);
JSDOutput linear_jsd_with_aux(const at::Tensor& student_input, const at::Tensor& student_weight, const TopK& teacher,
                              const LinearJSDOptions& options, const JSDAux& aux);

}  // namespace fusegrad
