#include "pytorch/attention/cpu.h"

#include <algorithm>

#include "attention/cpu/flex_attention.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/host.h"
#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"
#include "pytorch/score_mod/tensors.h"

namespace fusegrad::cpu {
namespace {

using at::Tensor;

TensorView view_of(const Tensor& t) {
  if (!t.defined()) return {};
  TensorView view;
  view.data = t.numel() != 0 ? const_cast<void*>(t.const_data_ptr()) : nullptr;
  view.dtype = to_dtype(t.scalar_type());
  if (t.dim() == 4) {  // an empty one that stands for none has one dimension
    std::copy_n(t.sizes().begin(), 4, view.sizes.begin());
    std::copy_n(t.strides().begin(), 4, view.strides.begin());
  }
  return view;
}

void* data_of(const Tensor& t) { return t.defined() && t.numel() != 0 ? t.mutable_data_ptr() : nullptr; }

// The arguments of both directions, and what keeps their memory.
class Arguments {
 public:
  Arguments(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores)
      : score_mod_(scores.score_mod.buffers, scores.score_mod.scalars),
        mask_mod_(scores.mask_mod.buffers, scores.mask_mod.scalars) {
    call_.query = view_of(query);
    call_.key = view_of(key);
    call_.value = view_of(value);
    call_.score_mod = {scores.score_mod.text, score_mod_.buffers(), score_mod_.scalars()};
    call_.mask_mod = {scores.mask_mod.text, mask_mod_.buffers(), mask_mod_.scalars()};
    call_.scale = scores.scale;
    if (scores.dropout_seed.defined()) {
      call_.dropout = true;
      call_.dropout_p = scores.dropout_p;
      call_.dropout_seed = static_cast<uint64_t>(scores.dropout_seed.item<int64_t>());
    }
    if (scores.kv_blocks.empty()) return;
    for (const Tensor& t : scores.kv_blocks) lists_.push_back(t.to(at::kInt).contiguous());
    const auto list = [&](size_t i) -> BlockListView {
      if (i >= lists_.size()) return {};
      return {lists_[i].const_data_ptr<int32_t>(), lists_[i + 1].const_data_ptr<int32_t>(), lists_[i + 1].size(3)};
    };
    call_.block_mask = {list(0), list(2), lists_[1].size(0), lists_[1].size(1), lists_[1].size(2), scores.block_size};
  }

  const FlexArguments& call() const { return call_; }

 private:
  const score_mod::CapturedTensors score_mod_, mask_mod_;
  std::vector<Tensor> lists_;
  FlexArguments call_;
};

FlexResults results_of(const FlexOutputs& o) {
  return {view_of(o.out),        view_of(o.out_low),  data_of(o.lse),
          data_of(o.max_scores), data_of(o.max_ties), data_of(o.lse_low)};
}

}  // namespace

FlexOutputTuple flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const FlexScores& scores, int64_t aux) {
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux);
  if (outputs.lse.numel() != 0) {
    const Arguments arguments(query, key, value, scores);
    attention_forward(torch_host(), arguments.call(), results_of(outputs));
  }
  return {outputs.out, outputs.lse, outputs.max_scores, outputs.max_ties, outputs.out_low, outputs.lse_low};
}

void flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key, const Tensor& value,
                             const FlexOutputs& saved, const FlexScores& scores, bool /*deterministic*/,
                             const std::vector<bool>& needs_grad, const FlexGradients& grads, bool inplace) {
  const Tensor &grad_query = inplace ? query : grads.query, &grad_key = inplace ? key : grads.key,
               &grad_value = inplace ? value : grads.value;
  if (saved.lse.numel() == 0 || key.numel() == 0) {
    if (inplace) begin_overwriting("query, key and value");
    for (const auto& t : {grad_query, grad_key, grad_value}) t.zero_();
    for (const auto& t : grads.buffers) t.zero_();
    return;
  }
  const Arguments arguments(query, key, value, scores);
  const auto rows = [](const Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const Tensor lse = rows(saved.lse), lse_low = rows(saved.lse_low), max_scores = rows(saved.max_scores),
               max_ties = rows(saved.max_ties);
  const Tensor grad_lse = rows(upstream.lse), grad_max_scores = rows(upstream.max_scores);
  std::vector<Tensor> buffers;
  for (const Tensor& t : grads.buffers) buffers.push_back(t.contiguous());
  FlexBackwardCall call;
  call.of = arguments.call();
  call.saved = {view_of(saved.out),  view_of(saved.out_low), data_of(lse),
                data_of(max_scores), data_of(max_ties),      data_of(lse_low)};
  call.grad_out = view_of(upstream.out);
  call.grad_lse = data_of(grad_lse);
  call.grad_max_scores = data_of(grad_max_scores);
  call.needs_query = needs_grad[0];
  call.needs_key = needs_grad[1];
  call.needs_value = needs_grad[2];
  call.query = view_of(grad_query);
  call.key = view_of(grad_key);
  call.value = view_of(grad_value);
  call.needs_buffers.assign(needs_grad.begin() + 3, needs_grad.end());
  for (const Tensor& t : buffers) call.buffers.push_back({data_of(t), score_mod::dtype_of(t), t.numel()});
  if (inplace) call.begin_writing = [] { begin_overwriting("query, key and value"); };
  attention_backward(torch_host(), call);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!buffers[i].is_same(grads.buffers[i])) grads.buffers[i].copy_(buffers[i]);
  }
}

FlexTangentTuple flex_attention_jvp(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const FlexInputTangents& tangents, const FlexScores& scores, int64_t aux) {
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux), results = empty_flex_outputs(query, value, 0);
  if (outputs.lse.numel() != 0) {
    const Arguments arguments(query, key, value, scores);
    std::vector<Tensor> buffers = scores.score_mod.buffers;
    buffers.insert(buffers.end(), tangents.buffers.begin(), tangents.buffers.end());
    const score_mod::CapturedTensors captured(buffers, {});
    FlexTangentCall call;
    call.of = arguments.call();
    call.query = view_of(tangents.query);
    call.key = view_of(tangents.key);
    call.value = view_of(tangents.value);
    call.has_tangent.assign(scores.score_mod.buffers.size(), false);
    for (const int64_t i : tangents.with_tangent) call.has_tangent[static_cast<size_t>(i)] = true;
    call.buffers = captured.buffers();
    call.results = results_of(outputs);
    call.out = view_of(results.out);
    call.lse = data_of(results.lse);
    attention_tangents(torch_host(), call);
  }
  return {outputs.out, outputs.lse, results.out, results.lse, outputs.out_low, outputs.lse_low};
}

void flex_attention_dropout_mask(const Tensor& seed, double p, int64_t first_query, const Tensor& mask) {
  attention_dropout_mask(torch_host(), static_cast<uint64_t>(seed.item<int64_t>()), p, mask.size(0) * mask.size(1),
                         first_query, mask.size(2), mask.size(3), mask.mutable_data_ptr<bool>());
}

}  // namespace fusegrad::cpu
