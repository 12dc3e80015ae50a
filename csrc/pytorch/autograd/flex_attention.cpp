#include <algorithm>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "flex_attention";

// Lists of tensors are saved one after the other: these are their lengths, in order.
std::vector<int64_t> list_sizes(const FlexScores& scores) {
  return {static_cast<int64_t>(scores.score_mod.buffers.size()), static_cast<int64_t>(scores.mask_mod.buffers.size()),
          static_cast<int64_t>(scores.kv_blocks.size()), static_cast<int64_t>(scores.q_blocks.size())};
}

c10::List<c10::IValue> list_of(const std::vector<at::Scalar>& scalars) {
  c10::List<c10::IValue> list(c10::AnyType::get());
  for (const auto& s : scalars) list.push_back(c10::IValue(s));
  return list;
}

std::vector<at::Scalar> scalars_of(const c10::IValue& value) {
  std::vector<at::Scalar> scalars;
  for (const auto& s : value.toListRef()) scalars.push_back(s.toScalar());
  return scalars;
}

// Saves the inputs, the output and a few numbers a row; the scores are computed again in the backward.
struct FlexAttention : NamedFunction<FlexAttention, "flex_attention"> {
  // Of what is saved, these come first.
  enum { kQuery, kKey, kValue, kOut, kLse, kMaxScores, kMaxTies, kOutLow, kDropoutSeed, kLists };

  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               at::TensorList /*score_mod buffers: edges*/, const FlexScores& scores, int64_t aux,
                               bool deterministic, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::flex_attention_forward(query, key, value, scores, aux);
    ctx->set_materialize_grads(false);
    auto& data = ctx->saved_data;
    data["score_mod"] = scores.score_mod.text;
    data["score_mod_scalars"] = list_of(scores.score_mod.scalars);
    data["mask_mod"] = scores.mask_mod.text;
    data["mask_mod_scalars"] = list_of(scores.mask_mod.scalars);
    data["list_sizes"] = list_sizes(scores);
    data["block_size"] = std::vector<int64_t>(scores.block_size.begin(), scores.block_size.end());
    data["scale"] = scores.scale;
    data["dropout_p"] = scores.dropout_p;
    data["deterministic"] = deterministic;
    data["inplace"] = inplace;
    data["hooks"] = saved_tensor_hooks_active();
    variable_list saved{
        query, key, value, out.out, out.lse, out.max_scores, out.max_ties, out.out_low, scores.dropout_seed};
    for (const auto* list :
         {&scores.score_mod.buffers, &scores.mask_mod.buffers, &scores.kv_blocks, &scores.q_blocks}) {
      saved.insert(saved.end(), list->begin(), list->end());
    }
    ctx->save_for_backward(std::move(saved));
    if ((aux & kFlexMaxScores) == 0) return {out.out, out.lse};
    return {out.out, out.lse, out.max_scores};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto sizes = data["list_sizes"].toIntVector();
    auto next = saved.begin() + kLists;
    const auto take = [&](size_t list) {
      const auto begin = next;
      next += sizes[list];
      return std::vector<Tensor>(begin, next);
    };
    FlexScores scores;
    scores.score_mod = {data["score_mod"].toStringRef(), take(0), scalars_of(data["score_mod_scalars"])};
    scores.mask_mod = {data["mask_mod"].toStringRef(), take(1), scalars_of(data["mask_mod_scalars"])};
    scores.kv_blocks = take(2);
    scores.q_blocks = take(3);
    const auto block_size = data["block_size"].toIntVector();
    std::copy(block_size.begin(), block_size.end(), scores.block_size.begin());
    scores.scale = data["scale"].toDouble();
    scores.dropout_p = data["dropout_p"].toDouble();
    scores.dropout_seed = saved[kDropoutSeed];

    const auto& buffers = scores.score_mod.buffers;
    std::vector<bool> needs_grad;
    for (size_t i = 0; i < 3 + buffers.size(); ++i) needs_grad.push_back(ctx->needs_input_grad(i));
    const FlexUpstream upstream{grads[0], grads[1], grads.size() > 2 ? grads[2] : Tensor()};
    variable_list result(3 + buffers.size() + 4);
    if (!upstream.out.defined() && !upstream.lse.defined() && !upstream.max_scores.defined()) return result;

    const bool hooks = data["hooks"].toBool();
    bool inplace = data["inplace"].toBool();
    for (size_t i = 0; i < 3; ++i) inplace = inplace && needs_grad[i] && may_reuse_saved(saved[i], hooks);
    FlexGradients gradients;
    {
      const BelowAutogradUnlessRecording below;
      gradients = dispatch::flex_attention_backward(
          upstream, saved[kQuery], saved[kKey], saved[kValue],
          {saved[kOut], saved[kLse], saved[kMaxScores], saved[kMaxTies], saved[kOutLow]}, scores,
          data["deterministic"].toBool(), needs_grad, inplace);
    }
    if (inplace) {
      gradients.query = saved[kQuery].detach();
      gradients.key = saved[kKey].detach();
      gradients.value = saved[kValue].detach();
    }
    if (needs_grad[0]) result[0] = gradients.query;
    if (needs_grad[1]) result[1] = gradients.key;
    if (needs_grad[2]) result[2] = gradients.value;
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (needs_grad[3 + i]) result[3 + i] = gradients.buffers[i];
    }
    return result;
  }
};

}  // namespace

FlexOutputs flex_attention(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores,
                           int64_t aux, bool deterministic, bool inplace) {
  // Inside Function::forward nothing requires grad any more.
  const auto requires_grad = [](const Tensor& t) { return t.requires_grad(); };
  const auto& buffers = scores.score_mod.buffers;
  const bool recorded =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad() ||
                                     std::any_of(buffers.begin(), buffers.end(), requires_grad));
  const auto dtype = query.scalar_type();
  if (recorded) aux |= deterministic ? kFlexBackward | kFlexOrdered : kFlexBackward;
  if (recorded && (dtype == at::kBFloat16 || dtype == at::kHalf)) aux |= kFlexOutLow;
  const auto out = FlexAttention::apply(query, key, value, at::TensorList(scores.score_mod.buffers), scores, aux,
                                        deterministic, inplace);
  return {out[0], out[1], out.size() > 2 ? out[2] : Tensor(), {}, {}};
}

}  // namespace fusegrad::autograd
