#include <torch/library.h>

#include <algorithm>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/batches.h"
#include "pytorch/autograd/saved.h"
#include "pytorch/ops/arguments.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "flex_attention";

// What a backward reads: tensors one after the other, and all else in one list, since each entry of saved_data takes a
// tenth of a microsecond.
struct Saved {
  variable_list tensors;
  c10::List<c10::IValue> values{c10::AnyType::get()};

  void put(const std::vector<Tensor>& list) {
    values.push_back(static_cast<int64_t>(list.size()));
    tensors.insert(tensors.end(), list.begin(), list.end());
  }
  void put(const ScoreMod& mod) {
    values.push_back(mod.text);
    put(mod.buffers);
    values.push_back(static_cast<int64_t>(mod.scalars.size()));
    for (const auto& scalar : mod.scalars) values.push_back(c10::IValue(scalar));
  }
  void put(const FlexScores& scores) {
    put(scores.score_mod);
    put(scores.mask_mod);
    put(scores.kv_blocks);
    for (const int64_t size : scores.block_size) values.push_back(size);
    values.push_back(scores.scale);
    values.push_back(scores.dropout_p);
  }
};

// The same back, in the same order.
class Reader {
 public:
  Reader(variable_list::const_iterator tensor, c10::ArrayRef<c10::IValue> values)
      : tensor_(tensor), value_(values.begin()) {}

  bool flag() { return (value_++)->toBool(); }
  FlexScores scores() {
    FlexScores scores;
    scores.score_mod = mod();
    scores.mask_mod = mod();
    scores.kv_blocks = list();
    for (auto& size : scores.block_size) size = (value_++)->toInt();
    scores.scale = (value_++)->toDouble();
    scores.dropout_p = (value_++)->toDouble();
    return scores;
  }

 private:
  std::vector<Tensor> list() {
    const auto begin = tensor_;
    tensor_ += (value_++)->toInt();
    return {begin, tensor_};
  }
  ScoreMod mod() {
    ScoreMod mod{(value_++)->toStringRef(), list(), {}};
    mod.scalars.resize(static_cast<size_t>((value_++)->toInt()));
    for (auto& scalar : mod.scalars) scalar = (value_++)->toScalar();
    return mod;
  }

  variable_list::const_iterator tensor_;
  const c10::IValue* value_;
};

// Saves the inputs, the output and a few numbers a row; the scores are computed again in the backward.
struct FlexAttention : NamedFunction<FlexAttention, "flex_attention"> {
  // For what is saved, these come first.
  enum { kQuery, kKey, kValue, kOut, kLse, kMaxScores, kMaxTies, kOutLow, kLseLow, kDropoutSeed, kLists };

  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               at::TensorList /*score_mod buffers: edges*/, const FlexScores& scores, int64_t aux,
                               bool deterministic, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::flex_attention_forward(query, key, value, scores, aux);
    ctx->set_materialize_grads(false);
    Saved saved;
    saved.tensors = {query,          key,          value,       out.out,     out.lse,
                     out.max_scores, out.max_ties, out.out_low, out.lse_low, scores.dropout_seed};
    saved.put(scores);
    for (const bool flag : {deterministic, inplace, saved_tensor_hooks_active()}) saved.values.push_back(flag);
    ctx->saved_data["arguments"] = std::move(saved.values);
    ctx->save_for_backward(std::move(saved.tensors));
    if ((aux & kFlexMaxScores) == 0) return {out.out, out.lse};
    return {out.out, out.lse, out.max_scores};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    Reader reader(saved.begin() + kLists, ctx->saved_data["arguments"].toListRef());
    auto scores = reader.scores();
    scores.dropout_seed = saved[kDropoutSeed];
    const bool deterministic = reader.flag();
    bool inplace = reader.flag();
    const bool hooks = reader.flag();

    const auto& buffers = scores.score_mod.buffers;
    std::vector<bool> needs_grad;
    for (size_t i = 0; i < 3 + buffers.size(); ++i) needs_grad.push_back(ctx->needs_input_grad(i));
    const FlexUpstream upstream{grads[0], grads[1], grads.size() > 2 ? grads[2] : Tensor()};
    variable_list result(3 + buffers.size() + 4);
    if (!upstream.out.defined() && !upstream.lse.defined() && !upstream.max_scores.defined()) return result;

    const bool graph = at::GradMode::is_enabled();  // create_graph=True
    for (size_t i = 0; i < 3; ++i) inplace = inplace && !graph && needs_grad[i] && may_reuse_saved(saved[i], hooks);
    const FlexOutputs outputs{saved[kOut],     saved[kLse],    saved[kMaxScores],
                              saved[kMaxTies], saved[kOutLow], saved[kLseLow]};
    FlexGradients gradients;
    if (graph) {
      gradients = dispatch::flex_attention_backward_graph(upstream, saved[kQuery], saved[kKey], saved[kValue], outputs,
                                                          scores, deterministic, needs_grad);
    } else {
      const BelowAutogradUnlessRecording below;
      gradients = dispatch::flex_attention_backward(upstream, saved[kQuery], saved[kKey], saved[kValue], outputs,
                                                    scores, deterministic, needs_grad, inplace);
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

// What torch.autograd's vectorized functions (is_grads_batched=True, jacobian(vectorize=True)) make of tensors: batches
// of torch's older vmap. Unwraps them, the batch first, those that have none with one element for all.
class Unbatched {
 public:
  explicit Unbatched(std::vector<Tensor*> tensors) {
    for (const auto* t : tensors) {
      const auto* batched = at::maybeGetBatchedImpl(*t);
      if (batched == nullptr) continue;
      const auto dims = batched->bdims();
      TORCH_CHECK_NOT_IMPLEMENTED(dims.size() == 1 && (size_ < 0 || level_ == dims[0].level()), kOp,
                                  ": vectorized derivatives must be batched once, but got a batch of batches; use "
                                  "torch.func");
      level_ = dims[0].level();
      size_ = batched->value().size(dims[0].dim());
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        size_ >= 0, kOp,
        ": upstream gradients and tangents alone must be batched in torch.autograd's vectorized "
        "functions, but got another batched tensor; use torch.func");
    for (auto* t : tensors) {
      if (const auto* batched = at::maybeGetBatchedImpl(*t)) {
        *t = batched->value().movedim(batched->bdims()[0].dim(), 0);
      } else {
        c10::SymDimVector sizes{size_};
        for (const auto& n : t->sym_sizes()) sizes.push_back(n);
        *t = t->unsqueeze(0).expand_symint(sizes);
      }
    }
  }
  Tensor again(const Tensor& result) const { return at::makeBatched(result, {at::BatchDim(level_, 0)}); }

 private:
  int64_t level_ = 0, size_ = -1;
};

FlexGradientTuple backward_of_each(const FlexBackward& call) {
  static const Op<FlexBackward, FlexGradientTuple> op("fusegrad::flex_attention_backward_of_each");
  FlexBackward whole = call;
  std::vector<Tensor*> upstream;
  for (auto* t : {&whole.grad_out, &whole.grad_lse, &whole.grad_max_scores}) {
    if (t->has_value()) upstream.push_back(&**t);
  }
  const Unbatched batch(upstream);
  auto [query, key, value, buffers] = op(whole);
  const auto& wanted = call.needs_grad;
  const auto again = [&](const Tensor& t, bool is) { return is ? batch.again(t) : t; };
  for (size_t i = 0; i < buffers.size(); ++i) buffers[i] = again(buffers[i], wanted[3 + i]);
  return {again(query, wanted[0]), again(key, wanted[1]), again(value, wanted[2]), std::move(buffers)};
}

FlexTangentTuple tangents_of_each(const FlexTangents& call) {
  static const Op<FlexTangents, FlexTangentTuple> op("fusegrad::flex_attention_jvp_of_each");
  FlexTangents whole = call;
  auto buffers = call.buffer_tangents.vec();
  std::vector<Tensor*> tangents;
  for (auto* t : {&whole.query_tangent, &whole.key_tangent, &whole.value_tangent}) {
    if (t->has_value()) tangents.push_back(&**t);
  }
  for (auto& t : buffers) tangents.push_back(&t);
  const Unbatched batch(tangents);
  whole.buffer_tangents = buffers;
  const auto [out, lse, of_out, of_lse, out_low, lse_low] = op(whole);
  return {batch.again(out),    batch.again(lse),     batch.again(of_out),
          batch.again(of_lse), batch.again(out_low), batch.again(lse_low)};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, Batched, m) {
  m.impl("flex_attention_backward", named_kernel<"flex_attention", unpacked<backward_of_each>()>());
  m.impl("flex_attention_backward_graph", named_kernel<"flex_attention", unpacked<backward_of_each>()>());
  m.impl("flex_attention_jvp", named_kernel<"flex_attention", unpacked<tangents_of_each>()>());
}

FlexOutputs flex_attention(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores,
                           int64_t aux, bool deterministic, bool inplace) {
  // Inside Function::forward nothing requires grad any more.
  if (!is_recorded(query, key, value, at::TensorList(scores.score_mod.buffers))) {
    return unrecorded([&] { return dispatch::flex_attention_forward(query, key, value, scores, aux); });
  }
  aux |= kFlexLow | kFlexBackward;
  if (deterministic) aux |= kFlexOrdered;
  const auto out = FlexAttention::apply(query, key, value, at::TensorList(scores.score_mod.buffers), scores, aux,
                                        deterministic, inplace);
  return {out[0], out[1], out.size() > 2 ? out[2] : Tensor(), {}, {}, {}};
}

}  // namespace fusegrad::autograd
