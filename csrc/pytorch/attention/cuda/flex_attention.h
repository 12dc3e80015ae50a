// Flex attention on CUDA, as the front end calls it.
//
// Read in this order: flex_attention.cpp (the kernels of a call, and what lies between them), call.h; below
// csrc/cuda/attention: host/plan.h (which family, tile and schemes), kernel_spec.h (what a kernel is compiled for),
// program.h (its source), launch_plan.h (its CTAs, lists and maps), tile_lists.h, prepare.h; buffer_sums.h here. Then
// device/arguments.cuh, shared_memory.cuh and tile_entry.cuh, and a kernel, such as hopper/backward.cuh on
// backward_tiles.cuh, device/gradient.cuh, scores.cuh and buffers.cuh, and cuda/device/hopper.cuh.
#pragma once

#include "pytorch/attention/flex_attention.h"

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
void flex_attention_pair_tangents(const FlexPairTangentsCall& call, const FlexScores& scores,
                                  const FlexPairTangentsResults& results);
/// As cpu::flex_attention_dropout_mask.
void flex_attention_dropout_mask(const at::Tensor& seed, double p, int64_t first_query, const at::Tensor& mask);

}  // namespace fusegrad::cuda
