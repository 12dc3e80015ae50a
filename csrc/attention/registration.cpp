// The kernels of flex_attention_forward and its backwards: from the schemas in library.cpp to plain arguments.
#include <torch/library.h>

#include "attention/outputs.h"
#include "cpu/flex_attention.h"
#ifdef FUSEGRAD_WITH_CUDA
#include "cuda/flex_attention.h"
#endif

namespace fusegrad {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using Scalars = at::ArrayRef<at::Scalar>;

// The arguments that both directions have alike, in the order of the schemas.
FlexScores make_scores(std::string_view score_mod, TensorList score_mod_buffers, Scalars score_mod_scalars,
                       std::string_view mask_mod, TensorList mask_mod_buffers, Scalars mask_mod_scalars,
                       TensorList kv_blocks, TensorList q_blocks, at::IntArrayRef block_size, double scale) {
  FlexScores scores;
  scores.score_mod = {std::string(score_mod), score_mod_buffers.vec(), score_mod_scalars.vec()};
  scores.mask_mod = {std::string(mask_mod), mask_mod_buffers.vec(), mask_mod_scalars.vec()};
  scores.kv_blocks = kv_blocks.vec();
  scores.q_blocks = q_blocks.vec();
  std::copy(block_size.begin(), block_size.end(), scores.block_size.begin());
  scores.scale = scale;
  return scores;
}

FlexOutputTuple to_tuple(const FlexOutputs& o) { return {o.out, o.lse, o.max_scores, o.max_ties, o.out_low}; }
FlexGradientTuple to_tuple(const FlexGradients& g) { return {g.query, g.key, g.value, g.buffers}; }

// Forward and Backward: a device's functions of cpu/flex_attention.h or cuda/flex_attention.h.
template <auto Forward>
FlexOutputTuple forward(const Tensor& query, const Tensor& key, const Tensor& value, std::string_view score_mod,
                        TensorList score_mod_buffers, Scalars score_mod_scalars, std::string_view mask_mod,
                        TensorList mask_mod_buffers, Scalars mask_mod_scalars, TensorList kv_blocks,
                        TensorList q_blocks, at::IntArrayRef block_size, double scale, int64_t aux) {
  return Forward(query, key, value,
                 make_scores(score_mod, score_mod_buffers, score_mod_scalars, mask_mod, mask_mod_buffers,
                             mask_mod_scalars, kv_blocks, q_blocks, block_size, scale),
                 aux);
}

FlexOutputTuple forward_meta(const Tensor& query, const Tensor& /*key*/, const Tensor& value,
                             std::string_view /*score_mod*/, TensorList /*score_mod_buffers*/,
                             Scalars /*score_mod_scalars*/, std::string_view /*mask_mod*/,
                             TensorList /*mask_mod_buffers*/, Scalars /*mask_mod_scalars*/, TensorList /*kv_blocks*/,
                             TensorList /*q_blocks*/, at::IntArrayRef /*block_size*/, double /*scale*/, int64_t aux) {
  return to_tuple(empty_flex_outputs(query, value, aux));
}

std::vector<bool> flags_of(const c10::List<bool>& list) { return {list.begin(), list.end()}; }

template <auto Backward>
void backward_into(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& grad_out,
                   const OptionalTensor& grad_lse, const OptionalTensor& grad_max_scores, const Tensor& out,
                   const Tensor& lse, const Tensor& max_scores, const Tensor& max_ties, const Tensor& out_low,
                   std::string_view score_mod, TensorList score_mod_buffers, Scalars score_mod_scalars,
                   std::string_view mask_mod, TensorList mask_mod_buffers, Scalars mask_mod_scalars,
                   TensorList kv_blocks, TensorList q_blocks, at::IntArrayRef block_size, double scale,
                   bool deterministic, const c10::List<bool>& needs_grad, TensorList grad_buffers) {
  const auto needs = flags_of(needs_grad);
  Backward({grad_out.value_or(Tensor()), grad_lse.value_or(Tensor()), grad_max_scores.value_or(Tensor())}, query, key,
           value, {out, lse, max_scores, max_ties, out_low},
           make_scores(score_mod, score_mod_buffers, score_mod_scalars, mask_mod, mask_mod_buffers, mask_mod_scalars,
                       kv_blocks, q_blocks, block_size, scale),
           deterministic, needs, {{}, {}, {}, grad_buffers.vec()}, /*inplace=*/true);
}

template <auto Backward>
FlexGradientTuple backward(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& grad_out,
                           const OptionalTensor& grad_lse, const OptionalTensor& grad_max_scores, const Tensor& out,
                           const Tensor& lse, const Tensor& max_scores, const Tensor& max_ties, const Tensor& out_low,
                           std::string_view score_mod, TensorList score_mod_buffers, Scalars score_mod_scalars,
                           std::string_view mask_mod, TensorList mask_mod_buffers, Scalars mask_mod_scalars,
                           TensorList kv_blocks, TensorList q_blocks, at::IntArrayRef block_size, double scale,
                           bool deterministic, const c10::List<bool>& needs_grad) {
  const auto needs = flags_of(needs_grad);
  const auto grads = empty_flex_gradients(query, key, value, score_mod_buffers, needs, /*inplace=*/false);
  Backward({grad_out.value_or(Tensor()), grad_lse.value_or(Tensor()), grad_max_scores.value_or(Tensor())}, query, key,
           value, {out, lse, max_scores, max_ties, out_low},
           make_scores(score_mod, score_mod_buffers, score_mod_scalars, mask_mod, mask_mod_buffers, mask_mod_scalars,
                       kv_blocks, q_blocks, block_size, scale),
           deterministic, needs, grads, /*inplace=*/false);
  return to_tuple(grads);
}

FlexGradientTuple backward_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                const OptionalTensor& /*grad_out*/, const OptionalTensor& /*grad_lse*/,
                                const OptionalTensor& /*grad_max_scores*/, const Tensor& /*out*/, const Tensor& /*lse*/,
                                const Tensor& /*max_scores*/, const Tensor& /*max_ties*/, const Tensor& /*out_low*/,
                                std::string_view /*score_mod*/, TensorList score_mod_buffers,
                                Scalars /*score_mod_scalars*/, std::string_view /*mask_mod*/,
                                TensorList /*mask_mod_buffers*/, Scalars /*mask_mod_scalars*/, TensorList /*kv_blocks*/,
                                TensorList /*q_blocks*/, at::IntArrayRef /*block_size*/, double /*scale*/,
                                bool /*deterministic*/, const c10::List<bool>& needs_grad) {
  return to_tuple(empty_flex_gradients(query, key, value, score_mod_buffers, flags_of(needs_grad), /*inplace=*/false));
}

void backward_into_meta(const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& /*value*/,
                        const OptionalTensor& /*grad_out*/, const OptionalTensor& /*grad_lse*/,
                        const OptionalTensor& /*grad_max_scores*/, const Tensor& /*out*/, const Tensor& /*lse*/,
                        const Tensor& /*max_scores*/, const Tensor& /*max_ties*/, const Tensor& /*out_low*/,
                        std::string_view /*score_mod*/, TensorList /*score_mod_buffers*/, Scalars /*score_mod_scalars*/,
                        std::string_view /*mask_mod*/, TensorList /*mask_mod_buffers*/, Scalars /*mask_mod_scalars*/,
                        TensorList /*kv_blocks*/, TensorList /*q_blocks*/, at::IntArrayRef /*block_size*/,
                        double /*scale*/, bool /*deterministic*/, const c10::List<bool>& /*needs_grad*/,
                        TensorList /*grad_buffers*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) {
  m.impl("flex_attention_forward", TORCH_FN(forward<cpu::flex_attention_forward>));
  m.impl("flex_attention_backward", TORCH_FN(backward<cpu::flex_attention_backward>));
  m.impl("flex_attention_backward_", TORCH_FN(backward_into<cpu::flex_attention_backward>));
}

#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("flex_attention_forward", TORCH_FN(forward<cuda::flex_attention_forward>));
  m.impl("flex_attention_backward", TORCH_FN(backward<cuda::flex_attention_backward>));
  m.impl("flex_attention_backward_", TORCH_FN(backward_into<cuda::flex_attention_backward>));
}
#endif

TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("flex_attention_forward", TORCH_FN(forward_meta));
  m.impl("flex_attention_backward", TORCH_FN(backward_meta));
  m.impl("flex_attention_backward_", TORCH_FN(backward_into_meta));
}

}  // namespace fusegrad
