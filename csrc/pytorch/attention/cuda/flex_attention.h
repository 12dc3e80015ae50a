// Flex attention on CUDA. cuda/attention/flex_attention.h plans and runs the calls.
#pragma once

#include "pytorch/attention/flex_attention.h"
#include "pytorch/ops/arguments.h"

namespace fusegrad::cuda {

FlexOutputTuple flex_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const FlexScores& scores, int64_t aux);
/// Writes into `grads`, or in place the first three over the inputs.
void flex_attention_backward(const FlexUpstream& upstream, const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                             bool deterministic, const std::vector<bool>& needs_grad, const FlexGradients& grads,
                             bool inplace);
/// As cpu::flex_attention_jvp.
FlexTangentTuple flex_attention_jvp(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const FlexInputTangents& tangents, const FlexScores& scores, int64_t aux);
/// There are pairs, and no dropout.
void flex_attention_pair_tangents(const FlexPairTangents& call, const FlexScores& scores,
                                  const FlexPairTangentsResults& results);
/// On the current device.
void flex_attention_merge(const FlexMergeCall& call);
/// As cpu::flex_attention_dropout_mask.
void flex_attention_dropout_mask(const at::Tensor& seed, double p, int64_t first_query, const at::Tensor& mask);

}  // namespace fusegrad::cuda
