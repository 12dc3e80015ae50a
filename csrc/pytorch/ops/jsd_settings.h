// The options of the divergences, checked: what jsd and linear_jsd share.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string_view>
#include <vector>

#include "pytorch/ops/check.h"

namespace fusegrad {

/// Beside those of at::Reduction: the sum over the number of kept rows. 'mean' divides by the columns too.
constexpr int64_t kBatchMean = at::Reduction::END;

/// Values. Those of the teacher's logits are not used for a top-k teacher; a softcap of 0 means none.
struct JsdSettings {
  double beta = 0.5;
  double student_temperature = 1.0;
  double teacher_temperature = 1.0;
  double student_softcap = 0.0;
  double teacher_softcap = 0.0;
  double student_logit_scale = 1.0;
  double teacher_logit_scale = 1.0;
  double soft_weight = 1.0;
  double hard_weight = 0.0;
  double roundoff = 0.0;  // of the dtype in which log-probabilities came: half the spacing of numbers at 1
  bool log_probs = false;
  bool renormalize = false;
  int64_t ignore_index = -100;
  int64_t reduction = kBatchMean;
  int64_t aux = 0;  // bits of JSDAuxBit
  bool partial = false;

  /// The numbers in one list, which is how the ops below the front ends take them; and back.
  std::vector<double> numbers() const;
  static JsdSettings from(at::ArrayRef<double> numbers, bool log_probs, bool renormalize, int64_t ignore_index,
                          int64_t reduction, int64_t aux);

  bool hard_wanted() const;
  bool averaged() const { return reduction == at::Reduction::Mean || reduction == kBatchMean; }
};

/// Tensors flattened to rows, in the dtypes that the kernels read.
struct JsdRows {
  std::optional<at::Tensor> teacher_index;  // [N, K] int64, contiguous, -1 pads; none for a dense teacher
  std::optional<at::Tensor> tail_log_prob;  // [N] acc: log of what a top-k teacher has beside the K
  std::optional<at::Tensor> labels;         // [N] int64 or int32, contiguous
  std::optional<at::Tensor> token_weight;   // [N] acc
  std::optional<at::Tensor> normalizer;     // 0-d acc
  std::vector<c10::SymInt> row_shape;       // the shape of one value a row
};

/// The option tensors of a call, as it was given them.
struct JsdTensors {
  std::optional<at::Tensor> teacher_indices;
  std::optional<at::Tensor> tail_log_prob;
  std::optional<at::Tensor> labels;
  std::optional<at::Tensor> token_weight;
  std::optional<at::Tensor> normalizer;
};

/// Checks the values of `settings`, and sets those that came as strings or optionals.
void complete_settings(const char* op, JsdSettings& settings, const JsdTensors& tensors,
                       std::optional<int64_t> ignore_index, std::string_view reduction, std::string_view tail);

/// A softcap as the kernels take it.
double checked_softcap(const char* op, const char* name, std::optional<double> softcap);

JsdRows make_jsd_rows(const char* op, const at::Tensor& student, const JsdTensors& tensors,
                      std::vector<c10::SymInt> row_shape, at::ScalarType acc);

/// A top-k teacher's log-probabilities [..., K], as [N, K] acc.
at::Tensor make_top_k(const char* op, const char* name, const at::Tensor& log_probs, const at::Tensor& indices,
                      const at::Tensor& student, c10::SymIntArrayRef row_shape, at::ScalarType acc);

/// [..., C] as [N, C], also where C is 0.
at::Tensor as_rows(const at::Tensor& tensor);

/// Half the spacing of a dtype's numbers at 1.
double roundoff_of(at::ScalarType dtype);

/// What the front ends cannot see, on the CPU, and on the GPU where set_check_targets(true) asks for it: a top-k
/// teacher's indices are in [0, V), or -1, and distinct in a row (on the CPU alone); log-probabilities are those of
/// distributions. `teacher` is [N, K] acc.
void check_top_k(const char* op, const at::Tensor& teacher, const JsdRows& rows, const JsdSettings& settings,
                 int64_t vocab);
/// Of dense log-probabilities [N, V].
void check_log_probs(const char* op, const char* name, const at::Tensor& log_probs, const JsdRows& rows,
                     const JsdSettings& settings);

}  // namespace fusegrad
