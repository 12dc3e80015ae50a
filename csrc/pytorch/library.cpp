// READ FIRST: every schema of the library, each backward under its forward.
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

namespace {

void define(torch::Library& m, const std::string& schema) {
  m.def(schema.c_str(), {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
}

// One text for an op and its in-place twin, so that they cannot differ.
void define_pair(torch::Library& m, const std::string& name, const std::string& overwritten,
                 const std::string& arguments, const std::string& returns) {
  define(m, name + "(Tensor " + overwritten + ", " + arguments + ") -> " + returns);
  define(m, name + "_(Tensor(a!) " + overwritten + ", " + arguments + ") -> " + returns);
}

}  // namespace

TORCH_LIBRARY(fusegrad, m) {
  // Options that every loss over class targets has. Not keyword-only, though they are in the front ends: the
  // dispatcher takes half a microsecond for each argument that comes by its name. `aux` is a set of bits, see
  // include/fusegrad/options.h.
  const std::string loss_options =
      "Tensor? token_weight=None, Tensor? normalizer=None, int? ignore_index=None, str reduction='mean', "
      "float label_smoothing=0.0, float z_loss=0.0, float? softcap=None, int aux=0";
  // `aux` holds what was asked for, in the order of the bits.
  const std::string loss_returns = "(Tensor loss, Tensor[] aux)";

  // The same after the checks: weights are acc, `reduction` is at::Reduction, a softcap of 0 means none.
  const std::string row_options =
      "Tensor? token_weight, Tensor? normalizer, int ignore_index, int reduction, float label_smoothing, "
      "float z_loss, float softcap, int aux";
  // `stats` is [k, N] acc, see StatRows in pytorch/ops/dispatch.h; `scales` what reduction 'mean' divides by.
  const std::string row_returns = "Tensor loss, Tensor lse, Tensor stats, Tensor predicted_tokens, Tensor scales";
  const std::string saved = "Tensor lse, Tensor stats, Tensor scales";

  // --- cross entropy ---------------------------------------------------------------------------------------
  define_pair(m, "cross_entropy", "input", "Tensor target, Tensor? weight=None, " + loss_options, loss_returns);
  define_pair(m, "cross_entropy_forward", "logits", "Tensor target, Tensor? weight, " + row_options,
              "(" + row_returns + ")");
  define(m,
         "cross_entropy_backward(Tensor? grad_loss, Tensor? grad_lse, Tensor logits, Tensor target, Tensor? weight, " +
             saved +
             ", Tensor? token_weight, int ignore_index, float label_smoothing, float z_loss, float softcap) "
             "-> Tensor grad_logits");

  // --- linear cross entropy --------------------------------------------------------------------------------
  define_pair(m, "linear_cross_entropy", "input",
              "Tensor linear_weight, Tensor target, Tensor? linear_bias=None, Tensor? weight=None, " + loss_options +
                  ", float logit_scale=1.0, ScalarType? accumulate_dtype=None, int? workspace_mib=None",
              loss_returns);
  const std::string linear_options =
      row_options + ", float logit_scale, ScalarType? accumulate_dtype, int? workspace_mib";
  // Gradients for an upstream gradient of 1, computed where `needs_grad` (input, weight, bias) says so and empty
  // otherwise; the in-place twin writes the input's over the input and returns it empty.
  define_pair(m, "linear_cross_entropy_forward", "input",
              "Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, " + linear_options +
                  ", bool[3] needs_grad",
              "(" + row_returns + ", Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  define(m,
         "linear_cross_entropy_backward(Tensor? grad_loss, Tensor? grad_lse, Tensor input, Tensor linear_weight, "
         "Tensor target, Tensor? linear_bias, Tensor? weight, " +
             saved +
             ", Tensor? token_weight, int ignore_index, float label_smoothing, float z_loss, float softcap, "
             "float logit_scale, int? workspace_mib, bool[3] needs_grad) "
             "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // --- Jensen-Shannon divergence ---------------------------------------------------------------------------
  const std::string divergence_options =
      "Tensor? labels=None, Tensor? token_weight=None, Tensor? normalizer=None, float beta=0.5, float temperature=1.0, "
      "int? ignore_index=None, str reduction='batchmean', str tail='bucket', float soft_weight=1.0, "
      "float hard_weight=0.0, int aux=0";
  // The same after the checks, see JsdSettings and JsdRows in pytorch/ops/jsd_settings.h. A top-k teacher is [N, K]
  // acc.
  const std::string divergence_rows =
      "Tensor? teacher_index, Tensor? tail_log_prob, Tensor? labels, Tensor? token_weight, Tensor? normalizer, "
      "float[] numbers, "
      "bool log_probs, bool renormalize, int ignore_index, int reduction, int aux";
  // `stats` is [k, N] acc: the soft and the hard loss, as `aux` asks for them.
  const std::string divergence_returns = "Tensor loss, Tensor stats, Tensor scales";
  define_pair(m, "jsd", "student",
              "Tensor teacher, Tensor? teacher_indices=None, " + divergence_options +
                  ", bool log_probs=False, Tensor? tail_log_prob=None",
              loss_returns);
  // Gradients for an upstream gradient of 1, where `needs_grad` (student, teacher) says so and empty otherwise; the
  // in-place twin writes the student's over the student and returns it empty. `partial`: log-probabilities are parts of
  // longer rows, so they do not sum to 1 and the divergence may be negative.
  define_pair(m, "jsd_forward", "student",
              "Tensor teacher, " + divergence_rows + ", bool[2] needs_grad, bool partial=False",
              "(" + divergence_returns + ", Tensor grad_student, Tensor grad_teacher)");

  // --- linear Jensen-Shannon divergence --------------------------------------------------------------------
  // A top-k teacher has no weight: its log-probabilities stand in for hidden states.
  define_pair(m, "linear_jsd", "student_input",
              "Tensor student_weight, Tensor teacher_input, Tensor? teacher_weight=None, "
              "Tensor? teacher_indices=None, Tensor? student_bias=None, Tensor? teacher_bias=None, " +
                  divergence_options +
                  ", float? teacher_temperature=None, float? student_softcap=None, float? teacher_softcap=None, "
                  "float student_logit_scale=1.0, float teacher_logit_scale=1.0, int? vocab_size=None, "
                  "ScalarType? accumulate_dtype=None, int? workspace_mib=None, Tensor? tail_log_prob=None",
              loss_returns);
  // Only the first `vocab_size` rows of the weights count; None: all.
  const std::string heads =
      "Tensor student_weight, Tensor? student_bias, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, ";
  const std::string head_options = ", int? vocab_size, ScalarType? accumulate_dtype, int? workspace_mib";
  // Gradients as linear_cross_entropy_forward's.
  define_pair(m, "linear_jsd_forward", "student_input", heads + divergence_rows + head_options + ", bool[3] needs_grad",
              "(" + divergence_returns + ", Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  define(m, "linear_jsd_backward(Tensor grad_loss, Tensor student_input, " + heads +
                "Tensor? teacher_index, Tensor? tail_log_prob, Tensor? labels, Tensor? token_weight, Tensor scales, "
                "float[] numbers, "
                "bool renormalize, int ignore_index" +
                head_options + ", bool[3] needs_grad) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // --- flex attention --------------------------------------------------------------------------------------
  // B batch, H query heads, M queries, N keys. A mod is a text of the score_mod language, empty for none, with the
  // tensors and numbers that it declares: its floats, and its integers and bools (0 or 1), each in the
  // text's order. `kv_blocks` are a BlockMask's lists: none; num_blocks and indices of the
  // partial blocks; or these and the full blocks' as well. `q_blocks` are the same by key block, for backwards that
  // want them. lse and max_scores are [B, H, M] acc and differentiable; max_scores is empty unless `aux` asks for it,
  // see FlexAuxBit. `inplace` lets the backward write over query, key and value.
  const std::string mods =
      "str score_mod, Tensor[] score_mod_buffers, float[] score_mod_floats, int[] score_mod_ints, "
      "str mask_mod, Tensor[] mask_mod_buffers, float[] mask_mod_floats, int[] mask_mod_ints, "
      "Tensor[] kv_blocks, Tensor[] q_blocks, int[] block_size, ";
  define(m, "flex_attention(Tensor query, Tensor key, Tensor value, " + mods +
                "float? scale=None, bool enable_gqa=False, bool inplace=False, bool? deterministic=None, int aux=0, "
                "float dropout_p=0.0) -> (Tensor out, Tensor lse, Tensor max_scores)");
  // `max_ties` [B, H, M]: how many scores of a row equal the largest. `out_low`: what rounding took from out, in out's
  // dtype; empty unless `aux` asks for it. `dropout_seed` is one int64 on the query's device, absent without dropout:
  // from it and a pair's place both directions know whether the pair is dropped.
  define(m, "flex_attention_forward(Tensor query, Tensor key, Tensor value, " + mods +
                "float scale, float dropout_p, Tensor? dropout_seed, int aux) "
                "-> (Tensor out, Tensor lse, Tensor max_scores, Tensor max_ties, Tensor out_low)");
  // `needs_grad`: of query, key, value, then of each of the score_mod's buffers; what is not wanted is empty. The
  // in-place twin writes the first three over the inputs, and the others into `grad_buffers`.
  const std::string flex_saved =
      "Tensor? grad_out, Tensor? grad_lse, Tensor? grad_max_scores, Tensor out, Tensor lse, Tensor max_scores, "
      "Tensor max_ties, Tensor out_low, " +
      mods + "float scale, float dropout_p, Tensor? dropout_seed, bool deterministic, bool[] needs_grad";
  define(m, "flex_attention_backward(Tensor query, Tensor key, Tensor value, " + flex_saved +
                ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor[] grad_buffers)");
  define(m, "flex_attention_backward_(Tensor(a!) query, Tensor(b!) key, Tensor(c!) value, " + flex_saved +
                ", Tensor(d!)[] grad_buffers) -> ()");
  // Which pairs dropout keeps, bool [B, H, M, N]: for tests, and for looking at them.
  define(m, "flex_attention_dropout_mask(Tensor dropout_seed, float dropout_p, SymInt[] sizes) -> Tensor");

  // --- a vocabulary sharded over processes -----------------------------------------------------------------
  // The gradient of a shard's logits [N, V / processes], columns [vocab_start, vocab_start + size) of `vocab` of them;
  // the in-place twin writes it over them. Indices and the class weights count in the whole vocabulary, a probability
  // target's columns are the shard's. `lse`, `lse_low` and (dense targets) `mass` are of whole rows, see RowGradient;
  // `scales` holds the first two of RowScales.
  const std::string shard =
      ", Tensor? grad_loss, Tensor? grad_lse, Tensor target, Tensor? weight, Tensor lse, Tensor lse_low, Tensor? mass, "
      "Tensor scales, Tensor? token_weight, int ignore_index, float label_smoothing, float z_loss, float softcap, "
      "int vocab_start, int vocab) -> ";
  define(m, "cross_entropy_shard_gradient(Tensor logits" + shard + "Tensor grad_logits");
  define(m, "cross_entropy_shard_gradient_(Tensor(a!) logits" + shard + "()");
  // What autograd Functions in Python ask and do: pytorch/autograd/inplace.h, losses/linear_plan.h.
  define(m, "may_overwrite(Tensor tensor, Tensor[] others) -> bool");
  define(m, "may_reuse_saved(Tensor saved, bool hooks_were_active) -> bool");
  define(m, "saved_tensor_hooks_active() -> bool");
  define(m, "refuse_double_backward(str op, Tensor gradient, Tensor[] inputs) -> Tensor");
  define(m,
         "plan_linear(int rows, int hidden, int vocab, int element_size, bool cpu, bool weight_grad, "
         "bool low_precision_result, int logits_per_row, int? workspace_mib) -> (int rows, bool accumulator)");

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
  // A graph's canonical text (docs/score_mod.md) evaluated over all scores [B, H, M, N], on the CPU: for tests and for
  // looking at masks and biases. `buffers`, `floats` and `ints` are what the text declares, as above. Where the bool
  // `mask` is false the score is -inf and nothing contributes; the backward gives a gradient for every floating-point
  // buffer. Masks are computed in float64.
  define(m,
         "evaluate_score_mod(str graph, Tensor score, Tensor[] buffers, float[] floats, int[] ints, Tensor? mask=None) "
         "-> Tensor");
  define(
      m,
      "evaluate_score_mod_backward(Tensor grad, str graph, Tensor score, Tensor[] buffers, float[] floats, int[] ints, "
      "Tensor? mask=None) -> (Tensor grad_score, Tensor[] grad_buffers)");
  define(m, "evaluate_mask_mod(str graph, int[] sizes, Tensor[] buffers, float[] floats, int[] ints) -> Tensor");
}
