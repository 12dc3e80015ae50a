// The kernels of flex_attention_forward and its backwards: from the ops' arguments to plain ones.
#include <torch/library.h>

#include "pytorch/attention/cpu.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/attention/views.h"
#include "pytorch/ops/arguments.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/faults.h"
#ifdef FUSEGRAD_WITH_CUDA
#include "pytorch/attention/cuda/flex_attention.h"
#endif
#include "pytorch/score_mod/tensors.h"

namespace fusegrad {
namespace {

using at::Tensor;

// What kernels take of the arguments that both directions have alike.
FlexScores make_scores(const FlexScoring& scoring) {
  const auto& mods = scoring.mods;
  FlexScores scores;
  scores.score_mod =
      score_mod::mod_of(mods.score_mod, mods.score_mod_buffers, mods.score_mod_floats, mods.score_mod_ints);
  scores.mask_mod = score_mod::mod_of(mods.mask_mod, mods.mask_mod_buffers, mods.mask_mod_floats, mods.mask_mod_ints);
  scores.kv_blocks = mods.kv_blocks.vec();
  std::copy(mods.block_size.begin(), mods.block_size.end(), scores.block_size.begin());
  scores.scale = scoring.scale;
  scores.dropout_p = scoring.dropout_p;
  scores.dropout_seed = scoring.dropout_seed.value_or(Tensor());
  return scores;
}

FlexOutputTuple to_tuple(const FlexOutputs& o) {
  return {o.out, o.lse, o.max_scores, o.max_ties, o.out_low, o.lse_low};
}
FlexGradientTuple to_tuple(const FlexGradients& g) { return {g.query, g.key, g.value, g.buffers}; }

std::vector<bool> flags_of(const c10::List<bool>& list) { return {list.begin(), list.end()}; }

// Forward and Backward: a device's functions, of pytorch/attention/cpu.h or pytorch/attention/cuda/flex_attention.h.
template <auto Forward>
FlexOutputTuple forward(const FlexForward& call) {
  return Forward(call.query, call.key, call.value, make_scores(call.scoring), call.aux);
}

template <auto Backward>
void run_backward(const FlexBackward& c, const std::vector<bool>& needs_grad, const FlexGradients& gradients,
                  bool inplace) {
  FUSEGRAD_CHECK_VALUE(c.lse_low.sym_numel() == c.lse.sym_numel(), "flex_attention_backward",
                       "lse_low must be as lse, of ", c.lse.sym_sizes(), ", but got ", c.lse_low.sym_sizes(),
                       ": ask the forward for it by aux");
  Backward({c.grad_out.value_or(Tensor()), c.grad_lse.value_or(Tensor()), c.grad_max_scores.value_or(Tensor())},
           c.query, c.key, c.value, {c.out, c.lse, c.max_scores, c.max_ties, c.out_low, c.lse_low},
           make_scores(c.scoring), c.deterministic, needs_grad, gradients, inplace);
}

template <auto Backward>
void backward_into(const FlexBackwardInto& call) {
  run_backward<Backward>(call.backward, flags_of(call.backward.needs_grad), {{}, {}, {}, call.grad_buffers.vec()},
                         /*inplace=*/true);
}

FlexGradients empty_gradients(const FlexBackward& c) {
  return empty_flex_gradients(c.query, c.key, c.value, c.scoring.mods.score_mod_buffers, flags_of(c.needs_grad),
                              /*inplace=*/false);
}

template <auto Backward>
FlexGradientTuple backward(const FlexBackward& call) {
  const auto gradients = empty_gradients(call);
  run_backward<Backward>(call, flags_of(call.needs_grad), gradients, /*inplace=*/false);
  return to_tuple(gradients);
}

FlexOutputTuple forward_meta(const FlexForward& c) { return to_tuple(empty_flex_outputs(c.query, c.value, c.aux)); }
FlexGradientTuple backward_meta(const FlexBackward& call) { return to_tuple(empty_gradients(call)); }
void backward_into_meta(const FlexBackwardInto& /*call*/) {}

FlexInputTangents checked_tangents(const FlexTangents& c) {
  static constexpr const char* kOp = "flex_attention_jvp";
  const auto check = [](const std::string& name, const Tensor& tangent, const Tensor& of) {
    check_dense(kOp, name.c_str(), tangent);
    FUSEGRAD_CHECK_VALUE(tangent.sym_sizes() == of.sym_sizes() && tangent.device() == of.device(), kOp, name,
                         " must be as ", of.sym_sizes(), " on ", of.device(), ", but got ", tangent.sym_sizes(), " on ",
                         tangent.device());
    FUSEGRAD_CHECK_TYPE(tangent.scalar_type() == of.scalar_type(), kOp, name, " must have the dtype ", of.scalar_type(),
                        ", but got ", tangent.scalar_type());
    return tangent;
  };
  const auto optional = [&](const char* name, const OptionalTensor& tangent, const Tensor& of) {
    return tangent.has_value() ? check(name, *tangent, of) : Tensor();
  };
  FlexInputTangents result{optional("query_tangent", c.query_tangent, c.query),
                           optional("key_tangent", c.key_tangent, c.key),
                           optional("value_tangent", c.value_tangent, c.value),
                           {},
                           {}};
  const auto buffers = c.scoring.mods.score_mod_buffers;
  FUSEGRAD_CHECK_VALUE(c.with_tangent.size() == c.buffer_tangents.size(), kOp,
                       "with_tangent must have an index for each of the ", c.buffer_tangents.size(),
                       " buffer_tangents, but got ", c.with_tangent.size());
  for (size_t k = 0; k < c.with_tangent.size(); ++k) {
    const int64_t i = c.with_tangent[k];
    FUSEGRAD_CHECK_VALUE(i >= (k == 0 ? 0 : c.with_tangent[k - 1] + 1) && i < static_cast<int64_t>(buffers.size()), kOp,
                         "with_tangent must be ascending indices of buffers, but got ", c.with_tangent);
    const auto& of = buffers[static_cast<size_t>(i)];
    FUSEGRAD_CHECK_TYPE(of.is_floating_point(), kOp, "a buffer with a tangent must hold floats, but got ",
                        of.scalar_type());
    result.buffers.push_back(check("buffer_tangents", c.buffer_tangents[k], of));
    result.with_tangent.push_back(i);
  }
  return result;
}

// Jvp: a device's function.
template <auto Jvp>
FlexTangentTuple jvp(const FlexTangents& c) {
  return Jvp(c.query, c.key, c.value, checked_tangents(c), make_scores(c.scoring), c.aux & kFlexLow);
}
FlexTangentTuple jvp_meta(const FlexTangents& c) {
  checked_tangents(c);
  const FlexOutputs out = empty_flex_outputs(c.query, c.value, c.aux & kFlexLow),
                    tangents = empty_flex_outputs(c.query, c.value, 0);
  return {out.out, out.lse, tangents.out, tangents.lse, out.out_low, out.lse_low};
}

using FlexPairTangentsTuple = std::tuple<Tensor, Tensor, Tensor>;
FlexPairTangentsResults empty_pair_tangents(const FlexPairTangents& c) {
  static constexpr const char* kOp = "flex_attention_pair_tangents";
  const auto check = [](const char* name, const Tensor& t, const Tensor& of, const c10::SymInt& columns) {
    check_dense(kOp, name, t);
    std::vector<c10::SymInt> sizes = of.sym_sizes().vec();
    sizes.back() = columns;
    FUSEGRAD_CHECK_VALUE(t.sym_sizes() == sizes && t.device() == of.device(), kOp, name, " must be of ", sizes, " on ",
                         of.device(), ", but got ", t.sym_sizes(), " on ", t.device());
    FUSEGRAD_CHECK_TYPE(t.scalar_type() == of.scalar_type(), kOp, name, " must have the dtype ", of.scalar_type(),
                        ", but got ", t.scalar_type());
  };
  check("grad_out", c.grad_out, c.query, c.value.sym_size(3));
  check("query_tangent", c.query_tangent, c.query, c.query.sym_size(3));
  check("key_tangent", c.key_tangent, c.key, c.key.sym_size(3));
  check("value_tangent", c.value_tangent, c.value, c.value.sym_size(3));
  if (c.grad_out_tangent) check("grad_out_tangent", *c.grad_out_tangent, c.query, c.value.sym_size(3));
  const auto heads = c.query.sym_size(0) * c.query.sym_size(1), queries = c.query.sym_size(2);
  const auto group = c.query.sym_size(1) / c.key.sym_size(1), keys = c.key.sym_size(2);
  FUSEGRAD_CHECK_VALUE(c.rows.scalar_type() == at::kFloat && c.rows.is_contiguous() &&
                           c.rows.device() == c.query.device() && c.rows.sym_numel() == heads * queries * 5,
                       kOp, "rows must be contiguous float32 [B, H, M, 5], but got ", c.rows.scalar_type(),
                       " of shape ", c.rows.sym_sizes());
  FUSEGRAD_CHECK_VALUE(c.first_head >= 0 && c.head_count > 0 && c.first_head + c.head_count <= heads &&
                           c.first_head % group == 0 && c.head_count % group == 0,
                       kOp, "first_head and head_count must be of whole groups of ", group, " of ", heads,
                       " heads, but got ", c.first_head, " and ", c.head_count);
  FUSEGRAD_CHECK_VALUE(c.first_row >= 0 && c.first_row % 128 == 0 && c.row_count > 0 &&
                           c.first_row + c.row_count <= queries &&
                           (c.row_count % 128 == 0 || c.first_row + c.row_count == queries),
                       kOp, "first_row and row_count must be of whole tiles of 128 of ", queries, " queries, but got ",
                       c.first_row, " and ", c.row_count);
  FUSEGRAD_CHECK_VALUE(keys > 0 && !c.scoring.dropout_seed.has_value(), kOp,
                       "there must be keys and no dropout, but got ", keys, " keys",
                       c.scoring.dropout_seed.has_value() ? " and a dropout_seed" : "");
  const auto columns = (keys + 7) / 8 * 8;
  if (c.score_tangent) {
    const std::array sizes{c10::SymInt(c.head_count), c10::SymInt(c.row_count), columns};
    FUSEGRAD_CHECK_VALUE(c.score_tangent->scalar_type() == at::kFloat && c.score_tangent->is_contiguous() &&
                             c.score_tangent->device() == c.query.device() &&
                             c.score_tangent->sym_sizes() == c10::SymIntArrayRef(sizes) &&
                             !c.scoring.mods.score_mod.empty(),
                         kOp, "score_tangent must be contiguous float32 of ", c10::SymIntArrayRef(sizes),
                         " and come with a score_mod, but got ", c.score_tangent->scalar_type(), " of shape ",
                         c.score_tangent->sym_sizes());
  }
  const auto made = [&](const c10::SymInt& parts) {
    return at::empty_symint({c.head_count, c.row_count, parts, columns}, c.query.options());
  };
  const c10::SymInt seen_columns = c.scoring.mods.kv_blocks.empty() ? c10::SymInt(0) : columns;
  return {made(c.grad_out_tangent ? 2 : 1), made(2),
          at::empty_symint({c.head_count / group, seen_columns}, c.query.options().dtype(at::kByte))};
}

FlexPairTangentsTuple pair_tangents_meta(const FlexPairTangents& c) {
  const FlexPairTangentsResults made = empty_pair_tangents(c);
  return {made.weights, made.gradients, made.seen};
}

void check_merge(const Tensor& out, const Tensor& low, const Tensor& weight, const Tensor& more, const Tensor& more_low,
                 const Tensor& more_weight) {
  constexpr const char* kOp = "flex_attention_merge_";
  FUSEGRAD_CHECK_VALUE(out.dim() == 4, kOp, "out must be [B, H, M, E], but got ", out.sym_sizes());
  const bool has_low = out.scalar_type() == at::kBFloat16 || out.scalar_type() == at::kHalf;
  const auto check = [&](const char* name, const Tensor& t, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
    FUSEGRAD_CHECK_VALUE(t.sym_sizes() == sizes && t.scalar_type() == dtype && t.device() == out.device(), kOp, name,
                         " must be ", dtype, " of shape ", sizes, " on ", out.device(), ", but got ", t.scalar_type(),
                         " of shape ", t.sym_sizes(), " on ", t.device());
  };
  const auto rows = out.sym_sizes().slice(0, 3);
  const c10::SymInt none(0);
  const auto low_sizes = has_low ? out.sym_sizes() : c10::SymIntArrayRef(none);
  const auto acc = acc_type(out.scalar_type());
  check("out_low", low, low_sizes, has_low ? at::kChar : low.scalar_type());
  check("weight", weight, rows, acc);
  check("more", more, out.sym_sizes(), out.scalar_type());
  check("more_low", more_low, low_sizes, has_low ? at::kChar : more_low.scalar_type());
  check("more_weight", more_weight, rows, acc);
}

// Run: a device's.
template <auto Run>
void merge(const Tensor& out, const Tensor& low, const Tensor& weight, const Tensor& more, const Tensor& more_low,
           const Tensor& more_weight) {
  check_merge(out, low, weight, more, more_low, more_weight);
  if (out.numel() == 0) return;
  const c10::OptionalDeviceGuard device(at::device_of(out));
  const Tensor weights[] = {weight.contiguous(), more_weight.contiguous()};
  Run({view_of(out), low_view_of(low), view_of(more), low_view_of(more_low), weights[0].const_data_ptr(),
       weights[1].const_data_ptr()});
}

void check_dropout_mask(const Tensor& seed, double p, c10::SymIntArrayRef sizes, const c10::SymInt& first) {
  constexpr const char* kOp = "flex_attention_dropout_mask";
  FUSEGRAD_CHECK_VALUE(seed.scalar_type() == at::kLong && seed.sym_numel() == 1, kOp,
                       "dropout_seed must be one int64, but got ", seed.scalar_type(), " of shape ", seed.sym_sizes());
  FUSEGRAD_CHECK_VALUE(p >= 0 && p < 1, kOp, "dropout_p must be at least 0 and less than 1, but got ", p);
  FUSEGRAD_CHECK_VALUE(sizes.size() == 4, kOp, "sizes must be [B, H, M, N], but got ", sizes);
  FUSEGRAD_CHECK_VALUE(first >= 0 && first % 16 == 0, kOp, "first_query must be a multiple of 16, but got ", first);
}

// Fill: a device's.
template <auto Fill>
Tensor dropout_mask(const Tensor& seed, double p, c10::SymIntArrayRef sizes, const c10::SymInt& first) {
  check_dropout_mask(seed, p, sizes, first);
  const Tensor mask = at::empty(C10_AS_INTARRAYREF_SLOW(sizes), seed.options().dtype(at::kBool));
  if (mask.numel() > 0) Fill(seed, p, first.guard_int(__FILE__, __LINE__), mask);
  return mask;
}

Tensor dropout_mask_meta(const Tensor& seed, double p, c10::SymIntArrayRef sizes, const c10::SymInt& first) {
  check_dropout_mask(seed, p, sizes, first);
  return at::empty_symint(sizes, seed.options().dtype(at::kBool));
}

#ifdef FUSEGRAD_WITH_CUDA
FlexPairTangentsTuple pair_tangents(const FlexPairTangents& c) {
  const FlexPairTangentsResults made = empty_pair_tangents(c);
  cuda::flex_attention_pair_tangents(c, make_scores(c.scoring), made);
  return {made.weights, made.gradients, made.seen};
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) {
  m.impl("flex_attention_forward", named_kernel<"flex_attention", unpacked<forward<cpu::flex_attention_forward>>()>());
  m.impl("flex_attention_backward",
         named_kernel<"flex_attention", unpacked<backward<cpu::flex_attention_backward>>()>());
  m.impl("flex_attention_backward_",
         named_kernel<"flex_attention", unpacked<backward_into<cpu::flex_attention_backward>>()>());
  m.impl("flex_attention_merge_", named_kernel<"flex_attention_merge_", merge<cpu::flex_attention_merge>>());
  m.impl("flex_attention_dropout_mask", TORCH_FN(dropout_mask<cpu::flex_attention_dropout_mask>));
  m.impl("flex_attention_jvp", named_kernel<"flex_attention", unpacked<jvp<cpu::flex_attention_jvp>>()>());
}

#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("flex_attention_forward", named_kernel<"flex_attention", unpacked<forward<cuda::flex_attention_forward>>()>());
  m.impl("flex_attention_backward",
         named_kernel<"flex_attention", unpacked<backward<cuda::flex_attention_backward>>()>());
  m.impl("flex_attention_backward_",
         named_kernel<"flex_attention", unpacked<backward_into<cuda::flex_attention_backward>>()>());
  m.impl("flex_attention_merge_", named_kernel<"flex_attention_merge_", merge<cuda::flex_attention_merge>>());
  m.impl("flex_attention_dropout_mask", TORCH_FN(dropout_mask<cuda::flex_attention_dropout_mask>));
  m.impl("flex_attention_jvp", named_kernel<"flex_attention", unpacked<jvp<cuda::flex_attention_jvp>>()>());
  m.impl("flex_attention_pair_tangents", named_kernel<"flex_attention", unpacked<pair_tangents>()>());
}
#endif

TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("flex_attention_forward", TORCH_FN(unpacked<forward_meta>()));
  m.impl("flex_attention_backward", TORCH_FN(unpacked<backward_meta>()));
  m.impl("flex_attention_backward_", TORCH_FN(unpacked<backward_into_meta>()));
  m.impl("flex_attention_merge_", TORCH_FN(check_merge));
  m.impl("flex_attention_dropout_mask", TORCH_FN(dropout_mask_meta));
  m.impl("flex_attention_jvp", TORCH_FN(unpacked<jvp_meta>()));
  m.impl("flex_attention_pair_tangents", TORCH_FN(unpacked<pair_tangents_meta>()));
}

}  // namespace fusegrad
