#include "pytorch/attention/views.h"

#include <ATen/Context.h>

#include <algorithm>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"

namespace fusegrad {
namespace {

using at::Tensor;

std::vector<Tensor> joined(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  std::vector<Tensor> all = a;
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

TensorView view_of(const Tensor& t, DType dtype) {
  TensorView view;
  view.data = t.numel() != 0 ? const_cast<void*>(t.const_data_ptr()) : nullptr;
  view.dtype = dtype;
  if (t.dim() == 4) {  // an empty one that stands for none has one dimension
    std::copy_n(t.sizes().begin(), 4, view.sizes.begin());
    std::copy_n(t.strides().begin(), 4, view.strides.begin());
  }
  return view;
}

}  // namespace

TensorView view_of(const Tensor& t) { return t.defined() ? view_of(t, to_dtype(t.scalar_type())) : TensorView{}; }

TensorView low_view_of(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {};
  TORCH_CHECK_TYPE(t.scalar_type() == at::kChar, "flex_attention: out_low must be int8, but got ", t.scalar_type());
  return view_of(t, DType::kInt8);
}

void* data_of(const Tensor& t) { return t.defined() && t.numel() != 0 ? t.mutable_data_ptr() : nullptr; }

FlexResults results_of(const FlexOutputs& o) {
  return {view_of(o.out),        low_view_of(o.out_low), data_of(o.lse),
          data_of(o.max_scores), data_of(o.max_ties),    data_of(o.lse_low)};
}

FlexViews::FlexViews(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores)
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
    if (scores.dropout_seed.is_cuda()) {
      call_.dropout_seed_data = scores.dropout_seed.const_data_ptr<int64_t>();
    } else {
      call_.dropout_seed = static_cast<uint64_t>(scores.dropout_seed.item<int64_t>());
    }
  }
  if (query.is_cuda() && query.scalar_type() == at::kFloat) {
    call_.full_float32 = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) !=
                         at::Float32Precision::TF32;
  }
  if (scores.kv_blocks.empty()) return;
  for (const Tensor& t : scores.kv_blocks) lists_.push_back(t.to(at::kInt).contiguous());
  const auto list = [&](size_t i) -> BlockListView {
    if (i >= lists_.size()) return {};
    return {lists_[i].const_data_ptr<int32_t>(), lists_[i + 1].const_data_ptr<int32_t>(), lists_[i + 1].size(3)};
  };
  call_.block_mask = {list(0), list(2), lists_[1].size(0), lists_[1].size(1), lists_[1].size(2), scores.block_size};
}

FlexBackwardViews::FlexBackwardViews(const FlexUpstream& upstream, const Tensor& query, const Tensor& key,
                                     const Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                                     bool deterministic, const std::vector<bool>& needs_grad,
                                     const FlexGradients& grads, void (*begin_writing)())
    : views_(query, key, value, scores), grads_(grads.buffers) {
  const bool inplace = begin_writing != nullptr;
  call_.of = views_.call();
  call_.saved = {view_of(saved.out),      low_view_of(saved.out_low), dense(saved.lse),
                 dense(saved.max_scores), dense(saved.max_ties),      dense(saved.lse_low)};
  call_.grad_out = view_of(upstream.out);
  call_.grad_lse = dense(upstream.lse);
  call_.grad_max_scores = dense(upstream.max_scores);
  call_.needs_query = needs_grad[0];
  call_.needs_key = needs_grad[1];
  call_.needs_value = needs_grad[2];
  call_.query = view_of(inplace ? query : grads.query);
  call_.key = view_of(inplace ? key : grads.key);
  call_.value = view_of(inplace ? value : grads.value);
  call_.needs_buffers.assign(needs_grad.begin() + 3, needs_grad.end());
  for (const Tensor& t : grads_) buffers_.push_back(t.contiguous());
  for (const Tensor& t : buffers_) call_.buffers.push_back({data_of(t), score_mod::dtype_of(t), t.numel()});
  call_.deterministic = deterministic;
  call_.begin_writing = begin_writing;
}

void* FlexBackwardViews::dense(const Tensor& t) {
  if (!t.defined() || t.is_contiguous()) return data_of(t);
  return data_of(kept_.emplace_back(t.contiguous()));
}

void FlexBackwardViews::finish() const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!buffers_[i].is_same(grads_[i])) grads_[i].copy_(buffers_[i]);
  }
}

FlexTangentViews::FlexTangentViews(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const FlexInputTangents& tangents, const FlexScores& scores,
                                   const FlexOutputs& outputs, const FlexOutputs& tangents_of_outputs)
    : views_(query, key, value, scores), captured_(joined(scores.score_mod.buffers, tangents.buffers), {}) {
  call_.of = views_.call();
  call_.query = view_of(tangents.query);
  call_.key = view_of(tangents.key);
  call_.value = view_of(tangents.value);
  call_.has_tangent.assign(scores.score_mod.buffers.size(), false);
  for (const int64_t i : tangents.with_tangent) call_.has_tangent[static_cast<size_t>(i)] = true;
  call_.buffers = captured_.buffers();
  call_.results = results_of(outputs);
  call_.out = view_of(tangents_of_outputs.out);
  call_.lse = data_of(tangents_of_outputs.lse);
}

void begin_overwriting_inputs() { begin_overwriting("query, key and value"); }

bool backward_of_nothing(const FlexOutputs& saved, const Tensor& query, const Tensor& key, const Tensor& value,
                         const FlexGradients& grads, void (*begin_writing)()) {
  if (saved.lse.numel() != 0 && key.numel() != 0) return false;
  const bool inplace = begin_writing != nullptr;
  if (inplace) begin_writing();
  for (const Tensor* t :
       {inplace ? &query : &grads.query, inplace ? &key : &grads.key, inplace ? &value : &grads.value})
    t->zero_();
  for (const Tensor& t : grads.buffers) t.zero_();
  return true;
}

}  // namespace fusegrad
