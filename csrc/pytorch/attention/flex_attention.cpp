#include "pytorch/attention/flex_attention.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "pytorch/attention/outputs.h"
#include "pytorch/score_mod/tensors.h"

namespace fusegrad::dispatch {
namespace {

using at::Tensor;
using at::TensorList;
using score_mod::numbers_of;
using OptionalTensor = std::optional<Tensor>;
using Floats = at::ArrayRef<double>;
using Ints = at::IntArrayRef;

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OptionalTensor optional_of(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

template <class Result, class... Written>
using BackwardSignature = Result(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                 const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                 const Tensor&, const Tensor&, const Tensor&, std::string_view, TensorList, Floats,
                                 Ints, std::string_view, TensorList, Floats, Ints, TensorList, TensorList,
                                 at::IntArrayRef, double, double, const OptionalTensor&, bool, const c10::List<bool>&,
                                 Written...);

}  // namespace

FlexOutputs flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const FlexScores& scores, int64_t aux) {
  using Signature = FlexOutputTuple(const Tensor&, const Tensor&, const Tensor&, std::string_view, TensorList, Floats,
                                    Ints, std::string_view, TensorList, Floats, Ints, TensorList, TensorList,
                                    at::IntArrayRef, double, double, const OptionalTensor&, int64_t);
  static const auto op = handle<Signature>("fusegrad::flex_attention_forward");
  const auto score_mod = numbers_of(scores.score_mod), mask_mod = numbers_of(scores.mask_mod);
  return std::make_from_tuple<FlexOutputs>(op.call(
      query, key, value, scores.score_mod.text, scores.score_mod.buffers, score_mod.floats, score_mod.ints,
      scores.mask_mod.text, scores.mask_mod.buffers, mask_mod.floats, mask_mod.ints, scores.kv_blocks, scores.q_blocks,
      scores.block_size, scores.scale, scores.dropout_p, optional_of(scores.dropout_seed), aux));
}

FlexGradients flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key,
                                      const Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                                      bool deterministic, const std::vector<bool>& needs_grad, bool inplace) {
  static const auto functional = handle<BackwardSignature<FlexGradientTuple>>("fusegrad::flex_attention_backward");
  static const auto mutating = handle<BackwardSignature<void, TensorList>>("fusegrad::flex_attention_backward_");
  const auto score_mod = numbers_of(scores.score_mod), mask_mod = numbers_of(scores.mask_mod);
  c10::List<bool> needs;
  for (const bool wanted : needs_grad) needs.push_back(wanted);
  const auto call = [&](const auto& op, const auto&... written) {
    return op.call(query, key, value, optional_of(upstream.out), optional_of(upstream.lse),
                   optional_of(upstream.max_scores), saved.out, saved.lse, saved.max_scores, saved.max_ties,
                   saved.out_low, scores.score_mod.text, scores.score_mod.buffers, score_mod.floats, score_mod.ints,
                   scores.mask_mod.text, scores.mask_mod.buffers, mask_mod.floats, mask_mod.ints, scores.kv_blocks,
                   scores.q_blocks, scores.block_size, scores.scale, scores.dropout_p, optional_of(scores.dropout_seed),
                   deterministic, needs, written...);
  };
  if (inplace) {
    auto gradients = empty_flex_gradients(query, key, value, scores.score_mod.buffers, needs_grad, inplace);
    call(mutating, TensorList(gradients.buffers));
    return gradients;
  }
  return std::make_from_tuple<FlexGradients>(call(functional));
}

}  // namespace fusegrad::dispatch
