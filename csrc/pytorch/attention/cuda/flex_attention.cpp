#include "pytorch/attention/cuda/flex_attention.h"

#include <ATen/DeviceGuard.h>

#include "cuda/attention/flex_attention.h"
#include "cuda/attention/forward/merge.h"
#include "cuda/attention/mask/dropout.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/attention/views.h"
#include "pytorch/gpu.h"

namespace fusegrad::cuda {
namespace {

using at::Tensor;

// PyTorch's memory is used again in the stream's order: the scratch may be let go of once the call is enqueued.
template <class Call>
void run_on_current_stream(const Call& call, const Tensor& like) {
  Tensor scratch;
  const auto allocate = [&](int64_t bytes) {
    scratch = at::empty({bytes}, like.options().dtype(at::kByte).requires_grad(false));
    return scratch.mutable_data_ptr();
  };
  plan_and_run(call, allocate, gpu::current_stream());
}

}  // namespace

FlexOutputTuple flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const FlexScores& scores, int64_t aux) {
  const c10::DeviceGuard guard(query.device());
  const FlexOutputs o = empty_flex_outputs(query, value, aux);
  if (o.lse.numel() != 0 && key.numel() == 0) {
    for (const Tensor& t : {o.out, o.out_low, o.lse_low, o.max_ties}) t.zero_();
    for (const Tensor& t : {o.lse, o.max_scores}) t.fill_(-INFINITY);
  } else if (o.lse.numel() != 0) {
    const FlexViews views(query, key, value, scores);
    FlexForwardCall call{views.call(), results_of(o), {}, (aux & kFlexOrdered) != 0, (aux & kFlexInvariant) != 0};
    if ((aux & kFlexBackward) != 0) {
      for (const Tensor* t : {&query, &key, &value}) call.needs_grad.push_back(t->requires_grad());
      for (const Tensor& t : scores.score_mod.buffers) call.needs_grad.push_back(t.requires_grad());
    }
    run_on_current_stream(call, query);
  }
  return {o.out, o.lse, o.max_scores, o.max_ties, o.out_low, o.lse_low};
}

void flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key, const Tensor& value,
                             const FlexOutputs& saved, const FlexScores& scores, bool deterministic,
                             const std::vector<bool>& needs_grad, const FlexGradients& grads, bool inplace) {
  const c10::DeviceGuard guard(query.device());
  const auto begin_writing = inplace ? begin_overwriting_inputs : nullptr;
  if (backward_of_nothing(saved, query, key, value, grads, begin_writing)) return;
  const FlexBackwardViews views(upstream, query, key, value, saved, scores, deterministic, needs_grad, grads,
                                begin_writing);
  run_on_current_stream(views.call(), query);
  views.finish();
}

FlexTangentTuple flex_attention_jvp(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const FlexInputTangents& tangents, const FlexScores& scores, int64_t aux) {
  const c10::DeviceGuard guard(query.device());
  const FlexOutputs o = empty_flex_outputs(query, value, aux), results = empty_flex_outputs(query, value, 0);
  if (o.lse.numel() != 0 && key.numel() == 0) {
    for (const Tensor& t : {o.out, o.out_low, o.lse_low, results.out, results.lse}) t.zero_();
    o.lse.fill_(-INFINITY);
  } else if (o.lse.numel() != 0) {
    const FlexTangentViews views(query, key, value, tangents, scores, o, results);
    run_on_current_stream(views.call(), query);
  }
  return {o.out, o.lse, results.out, results.lse, o.out_low, o.lse_low};
}

void flex_attention_pair_tangents(const FlexPairTangents& c, const FlexScores& scores,
                                  const FlexPairTangentsResults& results) {
  const c10::DeviceGuard guard(c.query.device());
  const FlexViews views(c.query, c.key, c.value, scores);
  FlexPairTangentsCall call;
  call.of = views.call();
  call.grad_out = view_of(c.grad_out);
  call.query = view_of(c.query_tangent);
  call.key = view_of(c.key_tangent);
  call.value = view_of(c.value_tangent);
  call.grad_out_tangent = view_of(c.grad_out_tangent.value_or(Tensor()));
  call.rows = c.rows.const_data_ptr<float>();
  call.score_tangent = c.score_tangent ? c.score_tangent->const_data_ptr<float>() : nullptr;
  call.weights = data_of(results.weights);
  call.gradients = data_of(results.gradients);
  call.seen = static_cast<uint8_t*>(data_of(results.seen));
  call.first_head = c.first_head;
  call.head_count = c.head_count;
  call.first_row = c.first_row;
  call.row_count = c.row_count;
  call.columns = results.gradients.size(3);
  run_on_current_stream(call, c.query);
}

void flex_attention_merge(const FlexMergeCall& call) { flex_merge(call, gpu::current_stream()); }

void flex_attention_dropout_mask(const Tensor& seed, double p, int64_t first_query, const Tensor& mask) {
  const c10::DeviceGuard guard(seed.device());
  FlexArguments call;
  call.dropout_seed_data = seed.const_data_ptr<int64_t>();
  call.dropout_p = p;
  flex_dropout_mask(dropout_of(call), mask.mutable_data_ptr<bool>(), mask.size(0) * mask.size(1), first_query,
                    mask.size(2), mask.size(3), gpu::current_stream());
}

}  // namespace fusegrad::cuda
