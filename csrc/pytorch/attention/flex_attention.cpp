#include "pytorch/attention/flex_attention.h"

#include "pytorch/attention/outputs.h"
#include "pytorch/ops/arguments.h"
#include "pytorch/score_mod/tensors.h"

namespace fusegrad::dispatch {
namespace {

using at::Tensor;

OptionalTensor optional_of(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

/// Scores as the ops take them: views of them, and of the mods' numbers by type.
class Scoring {
 public:
  explicit Scoring(const FlexScores& s)
      : score_mod_(score_mod::numbers_of(s.score_mod)), mask_mod_(score_mod::numbers_of(s.mask_mod)) {
    view = {{s.score_mod.text, s.score_mod.buffers, score_mod_.floats, score_mod_.ints, s.mask_mod.text,
             s.mask_mod.buffers, mask_mod_.floats, mask_mod_.ints, s.kv_blocks, s.block_size},
            s.scale,
            s.dropout_p,
            optional_of(s.dropout_seed)};
  }
  FlexScoring view;

 private:
  score_mod::Numbers score_mod_, mask_mod_;
};

/// `run` of a backward's arguments, which are views of what is given here.
template <class Run>
auto with_backward_call(const FlexUpstream& upstream, const Tensor& query, const Tensor& key, const Tensor& value,
                        const FlexOutputs& saved, const FlexScores& scores, bool deterministic,
                        const std::vector<bool>& needs_grad, const Run& run) {
  const Scoring scoring(scores);
  FlexBackward call{.query = query,
                    .key = key,
                    .value = value,
                    .grad_out = optional_of(upstream.out),
                    .grad_lse = optional_of(upstream.lse),
                    .grad_max_scores = optional_of(upstream.max_scores),
                    .out = saved.out,
                    .lse = saved.lse,
                    .max_scores = saved.max_scores,
                    .max_ties = saved.max_ties,
                    .out_low = saved.out_low,
                    .lse_low = saved.lse_low,
                    .scoring = scoring.view,
                    .deterministic = deterministic,
                    .needs_grad = c10::List<bool>()};
  for (const bool wanted : needs_grad) call.needs_grad.push_back(wanted);
  return run(call);
}

}  // namespace

FlexOutputs flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const FlexScores& scores, int64_t aux) {
  static const Op<FlexForward, FlexOutputTuple> op("fusegrad::flex_attention_forward");
  return std::make_from_tuple<FlexOutputs>(op({query, key, value, Scoring(scores).view, aux}));
}

FlexGradients flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key,
                                      const Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                                      bool deterministic, const std::vector<bool>& needs_grad, bool inplace) {
  static const Op<FlexBackward, FlexGradientTuple> functional("fusegrad::flex_attention_backward");
  static const Op<FlexBackwardInto, void> mutating("fusegrad::flex_attention_backward_");
  if (inplace) {
    auto gradients = empty_flex_gradients(query, key, value, scores.score_mod.buffers, needs_grad, inplace);
    with_backward_call(upstream, query, key, value, saved, scores, deterministic, needs_grad,
                       [&](const FlexBackward& call) { mutating({call, gradients.buffers}); });
    return gradients;
  }
  return with_backward_call(
      upstream, query, key, value, saved, scores, deterministic, needs_grad,
      [&](const FlexBackward& call) { return std::make_from_tuple<FlexGradients>(functional(call)); });
}

FlexGradients flex_attention_backward_graph(const FlexUpstream& upstream, const Tensor& query, const Tensor& key,
                                            const Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                                            bool deterministic, const std::vector<bool>& needs_grad) {
  constexpr const char* kName = "fusegrad::flex_attention_backward_graph";
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(kName, "");
  TORCH_CHECK_NOT_IMPLEMENTED(
      handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd),
      "flex_attention: create_graph=True must come with the Python package, which has the second "
      "derivatives, but fusegrad is not imported in this process");
  static const Op<FlexBackward, FlexGradientTuple> op(kName);
  return with_backward_call(upstream, query, key, value, saved, scores, deterministic, needs_grad,
                            [&](const FlexBackward& call) { return std::make_from_tuple<FlexGradients>(op(call)); });
}

}  // namespace fusegrad::dispatch
