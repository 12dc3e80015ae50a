// The autograd Functions' front doors: differentiable forwards on rows.
#pragma once

#include "pytorch/attention/flex_attention.h"
#include "pytorch/ops/dispatch.h"

namespace fusegrad::autograd {

/// `inplace` writes the gradient into the logits (may_overwrite has been asked).
RowOutputs cross_entropy(const CrossEntropyForward& call, bool inplace);

/// `recompute` keeps no gradients but computes them from the logits again in the backward; otherwise they are computed
/// in the forward, into the input where `inplace`. Which gradients are wanted is found out here.
RowOutputs linear_cross_entropy(LinearCrossEntropyForward call, bool recompute, bool inplace);

/// `inplace` writes the student's gradient into the student.
JsdOutputs jsd(JsdForward call, bool inplace);

/// As linear_cross_entropy and jsd.
JsdOutputs linear_jsd(LinearJsdForward call, bool recompute, bool inplace);

/// query [B, H, M, D], key and value [B or 1, H / group, N, D or E]. `inplace` lets the backward write over the three.
/// max_scores is defined where `aux` asks for it.
FlexOutputs flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const FlexScores& scores, int64_t aux, bool deterministic, bool inplace);

}  // namespace fusegrad::autograd
