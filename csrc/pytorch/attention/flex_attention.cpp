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
                    .scoring = scoring.view,
                    .deterministic = deterministic,
                    .needs_grad = c10::List<bool>()};
  for (const bool wanted : needs_grad) call.needs_grad.push_back(wanted);
  if (inplace) {
    auto gradients = empty_flex_gradients(query, key, value, scores.score_mod.buffers, needs_grad, inplace);
    mutating({call, gradients.buffers});
    return gradients;
  }
  return std::make_from_tuple<FlexGradients>(functional(call));
}

}  // namespace fusegrad::dispatch
