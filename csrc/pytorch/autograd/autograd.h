// The autograd Functions' front doors: differentiable forwards on rows.
#pragma once

#include "pytorch/attention/flex_attention.h"
#include "pytorch/ops/dispatch.h"

namespace fusegrad::autograd {

/// `inplace` writes the gradient into the logits (may_overwrite has been asked).
RowOutputs cross_entropy(const CrossEntropyForward& call, bool inplace);

/// `deferred`: the gradients are computed in the backward, from logits that are kept where the call says so and
/// something needs a gradient, or are computed again. Otherwise they are computed in the forward, into the input where
/// `inplace`. Which gradients are wanted is found out here. A deferred backward adds the weight's gradient to
/// `grad_weight_into` where there is one, and returns none.
RowOutputs linear_cross_entropy(LinearCrossEntropyForward call, bool deferred, bool inplace,
                                const OptionalTensor& grad_weight_into);

/// For create_graph=True, where kernels_have_second: the gradients `made` of what the call has upstream gradients of
/// (undefined where not wanted) in the graph, with a backward by kernels.
LinearGradients linear_cross_entropy_graph(LinearCrossEntropyBackward call, const LinearGradients& made);
bool kernels_have_second(const LinearCrossEntropyBackward& call);

LinearGradients linear_jsd_graph(const LinearJsdBackward& call, LinearGradients made);
bool kernels_have_second(const LinearJsdBackward& call);

/// The logits at `index`, [N, K] acc; the dtype is that in which the weight's gradient adds up.
at::Tensor support_logits(const SupportLogits& call, std::optional<at::ScalarType> accumulate_dtype,
                          const OptionalTensor& grad_weight_into);

/// `inplace` writes the student's gradient into the student.
JsdOutputs jsd(JsdForward call, bool inplace);

/// `recompute`: as `deferred` above, from logits that are computed again.
JsdOutputs linear_jsd(LinearJsdForward call, bool recompute, bool inplace);

/// query [B, H, M, D], key and value [B or 1, H / group, N, D or E]. `inplace` lets the backward write over the three.
/// max_scores is defined where `aux` asks for it.
FlexOutputs flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const FlexScores& scores, int64_t aux, bool deterministic, bool inplace);

}  // namespace fusegrad::autograd
