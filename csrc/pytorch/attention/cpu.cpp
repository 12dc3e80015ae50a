#include "pytorch/attention/cpu.h"

#include "attention/cpu/flex_attention.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/attention/views.h"
#include "pytorch/host.h"

namespace fusegrad::cpu {

using at::Tensor;

FlexOutputTuple flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const FlexScores& scores, int64_t aux) {
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux);
  if (outputs.lse.numel() != 0) {
    const FlexViews views(query, key, value, scores);
    attention_forward(torch_host(), views.call(), results_of(outputs));
  }
  return {outputs.out, outputs.lse, outputs.max_scores, outputs.max_ties, outputs.out_low, outputs.lse_low};
}

void flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key, const Tensor& value,
                             const FlexOutputs& saved, const FlexScores& scores, bool deterministic,
                             const std::vector<bool>& needs_grad, const FlexGradients& grads, bool inplace) {
  const auto begin_writing = inplace ? begin_overwriting_inputs : nullptr;
  if (backward_of_nothing(saved, query, key, value, grads, begin_writing)) return;
  const FlexBackwardViews views(upstream, query, key, value, saved, scores, deterministic, needs_grad, grads,
                                begin_writing);
  attention_backward(torch_host(), views.call());
  views.finish();
}

FlexTangentTuple flex_attention_jvp(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const FlexInputTangents& tangents, const FlexScores& scores, int64_t aux) {
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux), results = empty_flex_outputs(query, value, 0);
  if (outputs.lse.numel() != 0) {
    const FlexTangentViews views(query, key, value, tangents, scores, outputs, results);
    attention_tangents(torch_host(), views.call());
  }
  return {outputs.out, outputs.lse, results.out, results.lse, outputs.out_low, outputs.lse_low};
}

void flex_attention_merge(const FlexMergeCall& call) { attention_merge(torch_host(), call); }

void flex_attention_dropout_mask(const Tensor& seed, double p, int64_t first_query, const Tensor& mask) {
  attention_dropout_mask(torch_host(), static_cast<uint64_t>(seed.item<int64_t>()), p, mask.size(0) * mask.size(1),
                         first_query, mask.size(2), mask.size(3), mask.mutable_data_ptr<bool>());
}

}  // namespace fusegrad::cpu
