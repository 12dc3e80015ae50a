// The options of the divergences, checked: what jsd and linear_jsd share.
#pragma once

#include <ATen/ATen.h>

#include "pytorch/ops/arguments.h"
#include "pytorch/ops/check.h"

namespace fusegrad {

/// The settings of a call, checked, but for those that only one op has. Call: JsdCall or LinearJsdCall.
template <class Call>
JsdSettings make_settings(const char* op, const Call& call);

/// The option tensors of a call, checked against rows of this shape.
template <class Call>
JsdRows make_jsd_rows(const char* op, const at::Tensor& student, const Call& call, c10::SymIntArrayRef row_shape,
                      at::ScalarType acc);

/// Those of a dense teacher's soft part.
inline JsdSoftSettings soft_settings(const JsdRows& rows, const JsdSettings& s) {
  return {.labels = rows.labels,
          .ignore_index = s.ignore_index,
          .beta = s.beta,
          .student_temperature = s.student_temperature,
          .teacher_temperature = s.teacher_temperature,
          .student_softcap = s.student_softcap,
          .teacher_softcap = s.teacher_softcap,
          .student_logit_scale = s.student_logit_scale,
          .teacher_logit_scale = s.teacher_logit_scale,
          .log_probs = s.log_probs};
}

/// A top-k teacher's log-probabilities [..., K], as [N, K] acc.
at::Tensor make_top_k(const char* op, const char* name, const at::Tensor& log_probs, const at::Tensor& indices,
                      const at::Tensor& student, c10::SymIntArrayRef row_shape, at::ScalarType acc);

/// Half the spacing of a dtype's numbers at 1.
double roundoff_of(at::ScalarType dtype);
/// That of a top-k teacher's log-probabilities and its tail's: of those in which they came, `acc` at the least.
double roundoff_of_top_k(const at::Tensor& log_probs, const std::optional<at::Tensor>& tail, at::ScalarType acc);

/// What the front ends cannot see, on the CPU, and on the GPU where set_check_targets(true) asks for it: a top-k
/// teacher's indices are in [0, V), or -1, and distinct in a row (on the CPU alone); log-probabilities are those of
/// distributions. `teacher` is [N, K] acc.
void check_top_k(const char* op, const at::Tensor& teacher, const JsdRows& rows, const JsdSettings& settings,
                 int64_t vocab);
/// For the sums [n] of whole rows' exponentials, of rows from `first` on.
void check_log_prob_sums(const char* op, const char* name, const at::Tensor& sums, const JsdRows& rows,
                         const JsdSettings& settings, int64_t columns, int64_t first);
/// For dense log-probabilities [N, V].
void check_log_probs(const char* op, const char* name, const at::Tensor& log_probs, const JsdRows& rows,
                     const JsdSettings& settings);

}  // namespace fusegrad
