// The autograd Functions' front doors: differentiable forwards on rows.
#pragma once

#include "pytorch/attention/flex_attention.h"
#include "pytorch/ops/dispatch.h"

namespace fusegrad::autograd {

/// logits [N, V]. `inplace` writes the gradient into the logits (may_overwrite has been asked).
RowOutputs cross_entropy(const at::Tensor& logits, const RowArguments& rows, const LossOptions& options, bool inplace);

/// input [N, H], weight [V, H]. `recompute` keeps no gradients but computes them from the logits again in the
/// backward; otherwise they are computed in the forward, into the input where `inplace`.
RowOutputs linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, const RowArguments& rows,
                                const LossOptions& options, const LinearOptions& linear, bool recompute, bool inplace);

/// student [N, V], teacher [N, V] of its dtype, or a top-k teacher's [N, K]. `inplace` writes the student's gradient
/// into the student.
JsdOutputs jsd(const at::Tensor& student, const at::Tensor& teacher, const JsdRows& rows, const JsdSettings& settings,
               bool inplace);

/// input [N, H], weight [V, H]: the student's; otherwise as linear_cross_entropy and jsd.
JsdOutputs linear_jsd(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const JsdTeacher& teacher, const JsdRows& rows, const JsdSettings& settings,
                      const LinearOptions& linear, bool recompute, bool inplace);

/// query [B, H, M, D], key and value [B or 1, H / group, N, D or E]. `inplace` lets the backward write over the three.
/// max_scores is defined where `aux` asks for it.
FlexOutputs flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const FlexScores& scores, int64_t aux, bool deterministic, bool inplace);

}  // namespace fusegrad::autograd
