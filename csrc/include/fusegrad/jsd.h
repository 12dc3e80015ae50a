#pragma once

#include "fusegrad/options.h"

namespace fusegrad {

/// Per-row values of the divergences, unweighted, acc, 0 at ignored rows. A backward that reaches one raises.
struct JSDAux {
  TORCH_ARG(bool, soft_loss) = false;  ///< the divergence
  TORCH_ARG(bool, hard_loss) = false;  ///< the labels' cross entropy; needs labels
};

/// What was asked for in JSDAux; the others are undefined tensors.
struct JSDAuxOutput {
  at::Tensor soft_loss;
  at::Tensor hard_loss;
};

struct JSDOutput {
  at::Tensor loss;
  JSDAuxOutput aux;
};

/// The bits of JSDAux in an op's `aux` argument.
enum JSDAuxBit : int64_t {
  kJSDAuxSoftLoss = 1,
  kJSDAuxHardLoss = 2,
};

/// A teacher that is stored as its K largest log-probabilities a row. They are a constant and taken as they are.
struct TopK {
  at::Tensor log_probs;  ///< [..., K], floating, in the dtype in which they were stored
  at::Tensor indices;    ///< [..., K], int64 or int32, in [0, V), distinct in a row; -1 where a row has fewer
  std::optional<at::Tensor> tail_log_prob = std::nullopt;  ///< [...], floating: log of the probability of all others
};

/// Options of jsd.
struct JSDOptions {
  /// [...], int64 or int32: rows with ignore_index count for nothing; the classes of the hard loss.
  TORCH_ARG(std::optional<at::Tensor>, labels);
  /// Scales each row's loss before the reduction: [...], any floating dtype. Gets no gradient.
  TORCH_ARG(std::optional<at::Tensor>, token_weight);
  /// Replaces the number of kept rows in the divisor of "mean" and "batchmean": a number, or a 0-d tensor.
  TORCH_ARG(Normalizer, normalizer);
  /// 0: KL(teacher | student). 1: KL(student | teacher). Between: (1 - beta) KL(student | M) + beta KL(teacher | M)
  /// with the mixture M = (1 - beta) student + beta teacher.
  TORCH_ARG(double, beta) = 0.5;
  /// Divides the logits of both (the student's alone where the teacher is top-k).
  TORCH_ARG(double, temperature) = 1.0;
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "none", "sum", "mean" (over kept rows and columns) or "batchmean" (over kept rows).
  TORCH_ARG(std::string, reduction) = "batchmean";
  /// Student and teacher are log-probabilities, taken as they are.
  TORCH_ARG(bool, log_probs) = false;
  /// What a top-k teacher's other columns are: "bucket", one class with the rest of its mass, or "renormalize", none.
  TORCH_ARG(std::string, tail) = "bucket";
  /// A row's loss is soft_weight * divergence + hard_weight * cross entropy at its label.
  TORCH_ARG(double, soft_weight) = 1.0;
  TORCH_ARG(double, hard_weight) = 0.0;
  /// Permission to overwrite the student with its gradient, under the checks of cross_entropy.
  TORCH_ARG(bool, inplace) = false;
  /// The columns of the student and of a dense teacher are a part of the vocabulary's.
  TORCH_ARG(std::optional<VocabParallel>, vocab_parallel);
};

/// Generalised Jensen-Shannon divergence between rows of a student's and a teacher's logits
/// (docs/design/divergences.md).
///
/// student: [..., V]; float32, bfloat16, float16 (float64 on the CPU). teacher: the same shape; where its dtype
/// differs, both are read in the narrowest dtype that holds either. Gradients go to both, where they require them.
/// Returns the loss, float32 (float64 for float64): 0-d, or [...] for reduction "none". No row kept: 0.
/// Raises as cross_entropy does.
at::Tensor jsd(const at::Tensor& student, const at::Tensor& teacher, const JSDOptions& options = {});
at::Tensor jsd(const at::Tensor& student, const TopK& teacher, const JSDOptions& options = {});

/// The same, with per-row values beside the loss.
JSDOutput jsd_with_aux(const at::Tensor& student, const at::Tensor& teacher, const JSDOptions& options,
                       const JSDAux& aux);
JSDOutput jsd_with_aux(const at::Tensor& student, const TopK& teacher, const JSDOptions& options, const JSDAux& aux);

}  // namespace fusegrad
