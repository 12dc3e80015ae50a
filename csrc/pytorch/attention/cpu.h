// Flex attention on the CPU.
#pragma once

#include "pytorch/attention/flex_attention.h"

namespace fusegrad::cpu {

FlexOutputTuple flex_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const FlexScores& scores, int64_t aux);
/// Writes into `grads`, or in place the first three over the inputs. Always deterministic.
void flex_attention_backward(const FlexUpstream& upstream, const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                             bool deterministic, const std::vector<bool>& needs_grad, const FlexGradients& grads,
                             bool inplace);
/// out, lse, their tangents, and out_low and lse_low where `aux` has kFlexLow.
FlexTangentTuple flex_attention_jvp(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const FlexInputTangents& tangents, const FlexScores& scores, int64_t aux);
void flex_attention_merge(const FlexMergeCall& call);
/// Writes which pairs are kept into `mask`, bool [B, H, M, N], contiguous.
void flex_attention_dropout_mask(const at::Tensor& seed, double p, int64_t first_query, const at::Tensor& mask);

}  // namespace fusegrad::cpu
