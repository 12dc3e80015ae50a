// READ FIRST: every op of the library, each backward under its forward; pytorch/ops/arguments.h lists their arguments.
//
// Three layers, top down:
//   <op>, <op>_                  what front ends call. Composite: checks, views, the choice of the path
//                                (ops/<op>.cpp), then the autograd Function (autograd/<op>.cpp).
//   <op>_forward, <op>_forward_  the work on [N, V] or [N, H], by device; no autograd of its own.
//   <op>_backward                the gradient from what the forward saved; cannot be differentiated.
// A trailing underscore marks the op that may write a gradient into its (a!) argument; it returns fresh tensors
// only, and raises the argument's version counter.
//
// Letters: N rows (tokens), V vocabulary, H hidden size. `acc` is float64 for float64 and float32 otherwise.
#include <torch/library.h>

#include <string>

#include "pytorch/ops/arguments.h"

namespace fusegrad {
namespace {

void define(torch::Library& m, const std::string& schema) {
  m.def(schema.c_str(), {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
}

template <class Arguments>
void define(torch::Library& m, const std::string& name, const std::string& returns) {
  define(m, schema_of<Arguments>(name, returns));
}

// One list for an op and its in-place twin, so that they cannot differ.
template <class Arguments>
void define_pair(torch::Library& m, const std::string& name, const std::string& returns) {
  define<Arguments>(m, name, returns);
  define(m, schema_of<Arguments>(name + "_", returns, /*mutating=*/true));
}

}  // namespace

TORCH_LIBRARY(fusegrad, m) {
  // `aux` holds what was asked for, in the order of the bits.
  const std::string loss_returns = "(Tensor loss, Tensor[] aux)";
  // `stats` is [k, N] acc, see StatRows in pytorch/ops/dispatch.h; `scales` what reduction 'mean' divides by.
  const std::string row_returns = "Tensor loss, Tensor lse, Tensor stats, Tensor predicted_tokens, Tensor scales";
  const std::string gradients = "Tensor grad_input, Tensor grad_weight, Tensor grad_bias)";

  // --- cross entropy ---------------------------------------------------------------------------------------
  define_pair<CrossEntropyCall>(m, "cross_entropy", loss_returns);
  define_pair<CrossEntropyForward>(m, "cross_entropy_forward", "(" + row_returns + ")");
  define<CrossEntropyBackward>(m, "cross_entropy_backward", "Tensor grad_logits");
  // The values of its rows, with derivatives of every order and batching rules: what function transforms, forward mode
  // and a backward that is itself differentiated are made of (pytorch/autograd/row_values.cpp).
  define<CrossEntropyRows>(m, "cross_entropy_rows", "(Tensor values, Tensor stats)");
  define<CrossEntropyRowsGradient>(m, "cross_entropy_rows_gradient", "Tensor grad_logits");
  define<CrossEntropyRowsTangent>(m, "cross_entropy_rows_tangent", "Tensor values_tangent");
  define<CrossEntropyRowsSecond>(m, "cross_entropy_rows_second", "Tensor grad_logits_tangent");

  // --- linear cross entropy --------------------------------------------------------------------------------
  define_pair<LinearCrossEntropyCall>(m, "linear_cross_entropy", loss_returns);
  define_pair<LinearCrossEntropyForward>(m, "linear_cross_entropy_forward",
                                         "(" + row_returns + ", Tensor logits, " + gradients);
  define_pair<LinearCrossEntropyBackward>(m, "linear_cross_entropy_backward", "(" + gradients);
  define_pair<LinearCrossEntropyBackwardInto>(m, "linear_cross_entropy_backward_into", "(" + gradients);

  define<LinearLogProbForward>(m, "linear_log_prob_forward", "(Tensor log_prob, Tensor entropy, Tensor lse)");

  define<LinearCrossEntropySecond>(m, "linear_cross_entropy_second", "(Tensor values, " + gradients);
  // The rows under transforms and for second derivatives, before a reduction: [k, N] acc, and [N] float64 predictions;
  // whole, and in chunks of rows (the Python package implements that).
  const std::string rows_returns = "(Tensor values, Tensor predicted)";
  define<LinearCrossEntropyForward>(m, "linear_cross_entropy_rows", rows_returns);
  define<LinearCrossEntropyForward>(m, "linear_cross_entropy_row_chunks", rows_returns);

  // --- a softmax over a few columns of each row ------------------------------------------------------------
  define<SupportLogits>(m, "support_logits", "Tensor logits");
  define<SupportLogitsBackward>(m, "support_logits_backward", "(" + gradients);
  define<SupportLogitsBackwardInto>(m, "support_logits_backward_into", "(" + gradients);
  define<SupportPositions>(m, "support_positions", "Tensor");

  // --- Jensen-Shannon divergence ---------------------------------------------------------------------------
  // `stats` is [k, N] acc: the soft and the hard loss, as `aux` asks for them.
  const std::string divergence_returns = "(Tensor loss, Tensor stats, Tensor scales, ";
  define_pair<JsdCall>(m, "jsd", loss_returns);
  define_pair<JsdForward>(m, "jsd_forward", divergence_returns + "Tensor grad_student, Tensor grad_teacher)");

  // The soft part of its rows, as cross_entropy_rows (pytorch/autograd/jsd_soft.cpp). Gradients are those that are
  // wanted, in their order.
  define<JsdSoft>(m, "jsd_soft", "Tensor soft");
  define<JsdSoftGradient>(m, "jsd_soft_gradient", "Tensor[] gradients");
  define<JsdSoftTangent>(m, "jsd_soft_tangent", "Tensor soft_tangent");
  define<JsdSoftSecond>(m, "jsd_soft_second", "Tensor[] gradient_tangents");

  // --- linear Jensen-Shannon divergence --------------------------------------------------------------------
  define_pair<LinearJsdCall>(m, "linear_jsd", loss_returns);
  define_pair<LinearJsdForward>(m, "linear_jsd_forward", divergence_returns + gradients);
  define<LinearJsdBackward>(m, "linear_jsd_backward", "(" + gradients);
  define<LinearJsdSecond>(m, "linear_jsd_second", "(Tensor values, " + gradients);
  // As linear_cross_entropy_rows, without predictions.
  define<LinearJsdForward>(m, "linear_jsd_rows", "Tensor values");
  define<LinearJsdForward>(m, "linear_jsd_row_chunks", "Tensor values");

  // --- flex attention --------------------------------------------------------------------------------------
  // lse and max_scores are [B, H, M] acc and differentiable; max_scores is empty unless `aux` asks for it, see
  // FlexAuxBit.
  define<FlexAttentionCall>(m, "flex_attention", "(Tensor out, Tensor lse, Tensor max_scores)");
  // `max_ties` [B, H, M]: how many scores of a row equal the largest. `out_low`: what rounding took from out of 16
  // bits, int8 (attention/low_part.h). `lse_low` [B, H, M] acc: what it took from lse. Both are empty unless `aux` asks
  // for them.
  define<FlexForward>(m, "flex_attention_forward",
                      "(Tensor out, Tensor lse, Tensor max_scores, Tensor max_ties, Tensor out_low, Tensor lse_low)");
  define<FlexBackward>(m, "flex_attention_backward",
                       "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_buffers)");
  define(m, schema_of<FlexBackwardInto>("flex_attention_backward_", "()", /*mutating=*/true));
  // flex_attention_backward where its results are differentiated again, and for several upstream gradients at once,
  // the first dimension of theirs and of its results. The Python package implements both.
  define<FlexBackward>(m, "flex_attention_backward_graph",
                       "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_buffers)");
  define<FlexBackward>(m, "flex_attention_backward_of_each",
                       "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_buffers)");
  // Forward mode of flex_attention_forward: its results, and the tangents of out and lse.
  define<FlexTangents>(
      m, "flex_attention_jvp",
      "(Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent, Tensor out_low, Tensor lse_low)");
  // For several tangents at once, their first dimension and the results'. The Python package implements it.
  define<FlexTangents>(
      m, "flex_attention_jvp_of_each",
      "(Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent, Tensor out_low, Tensor lse_low)");
  // What pairs give to second derivatives, of the query's dtype: the tangents of the weights, [head_count, row_count, 1
  // or 2, columns], and where grad_out has a tangent, behind them the weights; the tangents of the gradients by query *
  // key, [head_count, row_count, 2, columns], and behind them these. With a block mask, which keys take part, uint8
  // [head_count / group, columns], without one of no columns. columns: N rounded up to a multiple of 8. On CUDA alone.
  define<FlexPairTangents>(m, "flex_attention_pair_tangents", "(Tensor weights, Tensor gradients, Tensor seen)");
  // What autograd Functions in Python ask: checks a call's arguments; the lists as flex_attention_forward takes them.
  define<FlexAttentionCall>(m, "flex_attention_checked", "(Tensor[] kv_blocks, float scale)");
  // out * weight + more * more_weight, the outputs of flex_attention_forward over two sets of keys with their low
  // parts, which are empty but for 16 bits. Weights are [B, H, M] acc.
  define(
      m,
      "flex_attention_merge_(Tensor(a!) out, Tensor(b!) out_low, Tensor weight, Tensor more, Tensor more_low, Tensor "
      "more_weight) -> ()");
  // Which pairs dropout keeps, bool [B, H, M, N], of the M queries from first_query on, a multiple of 16.
  define(m,
         "flex_attention_dropout_mask(Tensor dropout_seed, float dropout_p, SymInt[] sizes, SymInt first_query=0) -> "
         "Tensor");

  // The lists of PyTorch's BlockMask, int32, for `sizes` B, H, M and N, on the device of `like`: [B, H, rows of blocks]
  // and [B, H, rows of blocks, columns of blocks], by keys the other way about.
  define(m,
         "create_block_mask(Tensor like, str mask_mod, Tensor[] buffers, float[] floats, int[] ints, SymInt[] sizes, "
         "int[] block_size) -> (Tensor kv_num_blocks, Tensor kv_indices, Tensor full_kv_num_blocks, Tensor "
         "full_kv_indices, Tensor q_num_blocks, Tensor q_indices, Tensor full_q_num_blocks, Tensor full_q_indices)");

  // The bias that attention_pair_bias reads, of 16 bits or any other floats.
  define<PairProjection>(m, "pair_projection", "Tensor");
  define<PairProjection>(m, "pair_projection_forward", "Tensor");
  define<PairProjectionBackward>(m, "pair_projection_backward",
                                 "(Tensor grad_pair, Tensor grad_norm_weight, Tensor grad_norm_bias, Tensor "
                                 "grad_projection_weight, Tensor grad_projection_bias)");

  // What varlen_mask's mask_mod captures: of each query of packed sequences the first and the last key that it sees.
  define(m,
         "varlen_keys(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt queries, bool causal, int left, int right) -> "
         "(Tensor first, Tensor last)");

  // --- a vocabulary sharded over processes -----------------------------------------------------------------
  define_pair<Sharded<CrossEntropyCall>>(m, "cross_entropy_sharded", loss_returns);
  define_pair<Sharded<LinearCrossEntropyCall>>(m, "linear_cross_entropy_sharded", loss_returns);
  define_pair<Sharded<JsdCall>>(m, "jsd_sharded", loss_returns);
  define_pair<Sharded<LinearJsdCall>>(m, "linear_jsd_sharded", loss_returns);
  define<ShardsAgree>(m, "shards_agree", "Tensor different");
  define<ShardsSum>(m, "shards_sum", "Tensor");
  define<ShardsUse>(m, "shards_use", "Tensor");
  // For autograd Functions in Python: pytorch/autograd/inplace.h.
  define(m, "refuse_double_backward(str op, Tensor gradient, Tensor[] inputs) -> Tensor");

  // --- values beside a loss that are constants -------------------------------------------------------------
  // `value` as it is; where `loss` requires grad so does it, and a backward that reaches it raises an error that names
  // both. pytorch/autograd/constant.h says how.
  define(m, "constant_beside(Tensor value, Tensor loss, str op, str name) -> Tensor");
  // What such a backward is in a compiler's graph, which runs it with zeros where nothing reached it: one value, 0;
  // where the gradient is not zero an error on the CPU and NaN on the GPU.
  define(m, "refuse_gradient(Tensor gradient, str op, str name) -> Tensor");

  // --- shared ----------------------------------------------------------------------------------------------
  // gradient * scale * factor: scale is one value or one a row of a [N, ...] gradient, both acc and on its device.
  // In place, rows whose factor is 1 are not touched.
  define(m, "scale_gradient(Tensor gradient, Tensor scale, Tensor? factor=None) -> Tensor");
  define(m, "scale_gradient_(Tensor(a!) gradient, Tensor scale, Tensor? factor=None) -> ()");

  // --- the score_mod language ------------------------------------------------------------------------------
  // A graph's canonical text (docs/design/score_mod.md) evaluated over all scores [B, H, M, N], on the CPU: for tests
  // and for looking at masks and biases. `buffers`, `floats` and `ints` are what the text declares, as above. Where the
  // bool `mask` is false the score is -inf and nothing contributes; the backward gives a gradient for every
  // floating-point buffer. Masks are computed as flex_attention computes them.
  define(m,
         "evaluate_score_mod(str graph, Tensor score, Tensor[] buffers, float[] floats, int[] ints, Tensor? mask=None) "
         "-> Tensor");
  define(
      m,
      "evaluate_score_mod_backward(Tensor grad, str graph, Tensor score, Tensor[] buffers, float[] floats, int[] ints, "
      "Tensor? mask=None) -> (Tensor grad_score, Tensor[] grad_buffers)");
  define(m, "evaluate_mask_mod(str graph, int[] sizes, Tensor[] buffers, float[] floats, int[] ints) -> Tensor");
}

}  // namespace fusegrad
