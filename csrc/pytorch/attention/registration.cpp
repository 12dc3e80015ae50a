// The kernels of flex_attention_forward and its backwards: from the schemas in pytorch/library.cpp to plain arguments.
#include <torch/library.h>

#include "pytorch/attention/cpu.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/faults.h"
#ifdef FUSEGRAD_WITH_CUDA
#include "pytorch/attention/cuda/flex_attention.h"
#endif
#include "pytorch/score_mod/tensors.h"

namespace fusegrad {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using Floats = at::ArrayRef<double>;
using Ints = at::IntArrayRef;

// The arguments that both directions have alike, in the order of the schemas.
FlexScores make_scores(std::string_view score_mod, TensorList score_mod_buffers, Floats score_mod_floats,
                       Ints score_mod_ints, std::string_view mask_mod, TensorList mask_mod_buffers,
                       Floats mask_mod_floats, Ints mask_mod_ints, TensorList kv_blocks, TensorList q_blocks,
                       at::IntArrayRef block_size, double scale, double dropout_p, const OptionalTensor& dropout_seed) {
  FlexScores scores;
  scores.score_mod = score_mod::mod_of(score_mod, score_mod_buffers, score_mod_floats, score_mod_ints);
  scores.mask_mod = score_mod::mod_of(mask_mod, mask_mod_buffers, mask_mod_floats, mask_mod_ints);
  scores.kv_blocks = kv_blocks.vec();
  scores.q_blocks = q_blocks.vec();
  std::copy(block_size.begin(), block_size.end(), scores.block_size.begin());
  scores.scale = scale;
  scores.dropout_p = dropout_p;
  scores.dropout_seed = dropout_seed.value_or(Tensor());
  return scores;
}

FlexOutputTuple to_tuple(const FlexOutputs& o) { return {o.out, o.lse, o.max_scores, o.max_ties, o.out_low}; }
FlexGradientTuple to_tuple(const FlexGradients& g) { return {g.query, g.key, g.value, g.buffers}; }

// Forward and Backward: a device's functions of attention/cpu/flex_attention.h or
// pytorch/attention/cuda/flex_attention.h.
template <auto Forward>
FlexOutputTuple forward(const Tensor& query, const Tensor& key, const Tensor& value, std::string_view score_mod,
                        TensorList score_mod_buffers, Floats score_mod_floats, Ints score_mod_ints,
                        std::string_view mask_mod, TensorList mask_mod_buffers, Floats mask_mod_floats,
                        Ints mask_mod_ints, TensorList kv_blocks, TensorList q_blocks, at::IntArrayRef block_size,
                        double scale, double dropout_p, const OptionalTensor& dropout_seed, int64_t aux) {
  return Forward(
      query, key, value,
      make_scores(score_mod, score_mod_buffers, score_mod_floats, score_mod_ints, mask_mod, mask_mod_buffers,
                  mask_mod_floats, mask_mod_ints, kv_blocks, q_blocks, block_size, scale, dropout_p, dropout_seed),
      aux);
}

FlexOutputTuple forward_meta(const Tensor& query, const Tensor& /*key*/, const Tensor& value,
                             std::string_view /*score_mod*/, TensorList /*score_mod_buffers*/,
                             Floats /*score_mod_floats*/, Ints /*score_mod_ints*/, std::string_view /*mask_mod*/,
                             TensorList /*mask_mod_buffers*/, Floats /*mask_mod_floats*/, Ints /*mask_mod_ints*/,
                             TensorList /*kv_blocks*/, TensorList /*q_blocks*/, at::IntArrayRef /*block_size*/,
                             double /*scale*/, double /*dropout_p*/, const OptionalTensor& /*dropout_seed*/,
                             int64_t aux) {
  return to_tuple(empty_flex_outputs(query, value, aux));
}

std::vector<bool> flags_of(const c10::List<bool>& list) { return {list.begin(), list.end()}; }

template <auto Backward>
void backward_into(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& grad_out,
                   const OptionalTensor& grad_lse, const OptionalTensor& grad_max_scores, const Tensor& out,
                   const Tensor& lse, const Tensor& max_scores, const Tensor& max_ties, const Tensor& out_low,
                   std::string_view score_mod, TensorList score_mod_buffers, Floats score_mod_floats,
                   Ints score_mod_ints, std::string_view mask_mod, TensorList mask_mod_buffers, Floats mask_mod_floats,
                   Ints mask_mod_ints, TensorList kv_blocks, TensorList q_blocks, at::IntArrayRef block_size,
                   double scale, double dropout_p, const OptionalTensor& dropout_seed, bool deterministic,
                   const c10::List<bool>& needs_grad, TensorList grad_buffers) {
  const auto needs = flags_of(needs_grad);
  Backward({grad_out.value_or(Tensor()), grad_lse.value_or(Tensor()), grad_max_scores.value_or(Tensor())}, query, key,
           value, {out, lse, max_scores, max_ties, out_low},
           make_scores(score_mod, score_mod_buffers, score_mod_floats, score_mod_ints, mask_mod, mask_mod_buffers,
                       mask_mod_floats, mask_mod_ints, kv_blocks, q_blocks, block_size, scale, dropout_p, dropout_seed),
           deterministic, needs, {{}, {}, {}, grad_buffers.vec()}, /*inplace=*/true);
}

template <auto Backward>
FlexGradientTuple backward(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& grad_out,
                           const OptionalTensor& grad_lse, const OptionalTensor& grad_max_scores, const Tensor& out,
                           const Tensor& lse, const Tensor& max_scores, const Tensor& max_ties, const Tensor& out_low,
                           std::string_view score_mod, TensorList score_mod_buffers, Floats score_mod_floats,
                           Ints score_mod_ints, std::string_view mask_mod, TensorList mask_mod_buffers,
                           Floats mask_mod_floats, Ints mask_mod_ints, TensorList kv_blocks, TensorList q_blocks,
                           at::IntArrayRef block_size, double scale, double dropout_p,
                           const OptionalTensor& dropout_seed, bool deterministic, const c10::List<bool>& needs_grad) {
  const auto needs = flags_of(needs_grad);
  const auto grads = empty_flex_gradients(query, key, value, score_mod_buffers, needs, /*inplace=*/false);
  Backward({grad_out.value_or(Tensor()), grad_lse.value_or(Tensor()), grad_max_scores.value_or(Tensor())}, query, key,
           value, {out, lse, max_scores, max_ties, out_low},
           make_scores(score_mod, score_mod_buffers, score_mod_floats, score_mod_ints, mask_mod, mask_mod_buffers,
                       mask_mod_floats, mask_mod_ints, kv_blocks, q_blocks, block_size, scale, dropout_p, dropout_seed),
           deterministic, needs, grads, /*inplace=*/false);
  return to_tuple(grads);
}

FlexGradientTuple backward_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                const OptionalTensor& /*grad_out*/, const OptionalTensor& /*grad_lse*/,
                                const OptionalTensor& /*grad_max_scores*/, const Tensor& /*out*/, const Tensor& /*lse*/,
                                const Tensor& /*max_scores*/, const Tensor& /*max_ties*/, const Tensor& /*out_low*/,
                                std::string_view /*score_mod*/, TensorList score_mod_buffers,
                                Floats /*score_mod_floats*/, Ints /*score_mod_ints*/, std::string_view /*mask_mod*/,
                                TensorList /*mask_mod_buffers*/, Floats /*mask_mod_floats*/, Ints /*mask_mod_ints*/,
                                TensorList /*kv_blocks*/, TensorList /*q_blocks*/, at::IntArrayRef /*block_size*/,
                                double /*scale*/, double /*dropout_p*/, const OptionalTensor& /*dropout_seed*/,
                                bool /*deterministic*/, const c10::List<bool>& needs_grad) {
  return to_tuple(empty_flex_gradients(query, key, value, score_mod_buffers, flags_of(needs_grad), /*inplace=*/false));
}

void backward_into_meta(const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& /*value*/,
                        const OptionalTensor& /*grad_out*/, const OptionalTensor& /*grad_lse*/,
                        const OptionalTensor& /*grad_max_scores*/, const Tensor& /*out*/, const Tensor& /*lse*/,
                        const Tensor& /*max_scores*/, const Tensor& /*max_ties*/, const Tensor& /*out_low*/,
                        std::string_view /*score_mod*/, TensorList /*score_mod_buffers*/, Floats /*score_mod_floats*/,
                        Ints /*score_mod_ints*/, std::string_view /*mask_mod*/, TensorList /*mask_mod_buffers*/,
                        Floats /*mask_mod_floats*/, Ints /*mask_mod_ints*/, TensorList /*kv_blocks*/,
                        TensorList /*q_blocks*/, at::IntArrayRef /*block_size*/, double /*scale*/, double /*dropout_p*/,
                        const OptionalTensor& /*dropout_seed*/, bool /*deterministic*/,
                        const c10::List<bool>& /*needs_grad*/, TensorList /*grad_buffers*/) {}

void check_dropout_mask(const Tensor& seed, double p, c10::SymIntArrayRef sizes) {
  constexpr const char* kOp = "flex_attention_dropout_mask";
  FUSEGRAD_CHECK_VALUE(seed.scalar_type() == at::kLong && seed.sym_numel() == 1, kOp,
                       "dropout_seed must be one int64, but got ", seed.scalar_type(), " of shape ", seed.sym_sizes());
  FUSEGRAD_CHECK_VALUE(p >= 0 && p < 1, kOp, "dropout_p must be at least 0 and less than 1, but got ", p);
  FUSEGRAD_CHECK_VALUE(sizes.size() == 4, kOp, "sizes must be [B, H, M, N], but got ", sizes);
}

// Fill: a device's.
template <auto Fill>
Tensor dropout_mask(const Tensor& seed, double p, c10::SymIntArrayRef sizes) {
  check_dropout_mask(seed, p, sizes);
  const Tensor mask = at::empty(C10_AS_INTARRAYREF_SLOW(sizes), seed.options().dtype(at::kBool));
  if (mask.numel() > 0) Fill(seed, p, mask);
  return mask;
}

Tensor dropout_mask_meta(const Tensor& seed, double p, c10::SymIntArrayRef sizes) {
  check_dropout_mask(seed, p, sizes);
  return at::empty_symint(sizes, seed.options().dtype(at::kBool));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) {
  m.impl("flex_attention_forward", named_kernel<"flex_attention", forward<cpu::flex_attention_forward>>());
  m.impl("flex_attention_backward", named_kernel<"flex_attention", backward<cpu::flex_attention_backward>>());
  m.impl("flex_attention_backward_", named_kernel<"flex_attention", backward_into<cpu::flex_attention_backward>>());
  m.impl("flex_attention_dropout_mask", TORCH_FN(dropout_mask<cpu::flex_attention_dropout_mask>));
}

#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("flex_attention_forward", named_kernel<"flex_attention", forward<cuda::flex_attention_forward>>());
  m.impl("flex_attention_backward", named_kernel<"flex_attention", backward<cuda::flex_attention_backward>>());
  m.impl("flex_attention_backward_", named_kernel<"flex_attention", backward_into<cuda::flex_attention_backward>>());
  m.impl("flex_attention_dropout_mask", TORCH_FN(dropout_mask<cuda::flex_attention_dropout_mask>));
}
#endif

TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("flex_attention_forward", TORCH_FN(forward_meta));
  m.impl("flex_attention_backward", TORCH_FN(backward_meta));
  m.impl("flex_attention_backward_", TORCH_FN(backward_into_meta));
  m.impl("flex_attention_dropout_mask", TORCH_FN(dropout_mask_meta));
}

}  // namespace fusegrad
