// The arguments of each op, listed once. The schemas, the calls, the kernels, the Meta kernels and what a
// backward gets follow from the lists; pytorch/ops/fields.h says how.
//
// Three layers, as in pytorch/library.cpp: what front ends give (`...Call`), the forward on rows, its backward.
// Letters: N rows (tokens), V vocabulary, H hidden size; B batch, heads, M queries, K keys. `acc` is float64 for
// float64 and float32 otherwise.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <vector>

#include "fusegrad/cross_entropy.h"
#include "fusegrad/jsd.h"
#include "fusegrad/linear_cross_entropy.h"
#include "fusegrad/linear_jsd.h"
#include "pytorch/ops/fields.h"

namespace fusegrad {

using OptionalTensor = std::optional<at::Tensor>;

// --- losses over class targets -------------------------------------------------------------------------------

/// Options that every loss over class targets has, in the order of the schemas. They are not keyword-only, though they
/// are in the front ends: the dispatcher takes half a microsecond for each argument that comes by its name. `aux` is a
/// set of bits, see fusegrad/options.h.
template <class Call, class O>
constexpr auto loss_options() {
  constexpr auto o = &Call::options;
  return list(option(o, "token_weight", &O::token_weight), option(o, "normalizer", &O::normalizer),
              option<Kind::kNoneIsDefault>(o, "ignore_index", &O::ignore_index), option(o, "reduction", &O::reduction),
              option(o, "label_smoothing", &O::label_smoothing, &kUnit), option(o, "z_loss", &O::z_loss, &kNotNegative),
              option(o, "softcap", &O::softcap, &kPositive), option("aux", &Call::aux));
}

/// A bit of RowOptions::aux beside AuxBit's: the forward keeps what the gradient of row_scale needs.
constexpr int64_t kScaleGradient = 64;
/// Another: a row's results depend on that row alone, see batch_invariant of LinearCrossEntropyOptions.
constexpr int64_t kBatchInvariant = 128;

/// The same as kernels take them, checked.
struct RowOptions {
  int64_t ignore_index = -100;
  int64_t reduction = at::Reduction::Mean;  ///< of at::Reduction
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  double softcap = 0.0;  ///< 0: none
  int64_t aux = 0;

  static constexpr auto fields() {
    using A = RowOptions;
    return list(required("ignore_index", &A::ignore_index), forward_only("reduction", &A::reduction),
                required("label_smoothing", &A::label_smoothing), required("z_loss", &A::z_loss),
                required("softcap", &A::softcap), forward_only("aux", &A::aux));
  }
};

struct CrossEntropyCall {
  at::Tensor input, target;
  CrossEntropyOptions options;
  int64_t aux = 0;

  static constexpr auto fields() {
    using A = CrossEntropyCall;
    return list(overwritten("input", &A::input), required("target", &A::target),
                option(&A::options, "weight", &CrossEntropyOptions::weight), loss_options<A, CrossEntropyOptions>(),
                option(&A::options, "support", &CrossEntropyOptions::support));
  }
};

struct CrossEntropyForward {
  at::Tensor logits;  ///< [N, V]
  at::Tensor target;  ///< [N] int32 or int64, or [N, V] probabilities in acc or the logits' dtype
  OptionalTensor weight, token_weight, normalizer;  ///< [V], [N] and 0-d, acc
  RowOptions options;

  static constexpr auto fields() {
    using A = CrossEntropyForward;
    return list(overwritten("logits", &A::logits), required("target", &A::target), required("weight", &A::weight),
                required("token_weight", &A::token_weight), required("normalizer", &A::normalizer),
                all_of(&A::options));
  }
};

struct CrossEntropyBackward {
  OptionalTensor grad_loss, grad_lse;
  at::Tensor logits, target;
  OptionalTensor weight;
  at::Tensor lse, stats, scales;  ///< what the forward returned
  OptionalTensor token_weight;
  RowOptions options;
  OptionalTensor grad_stats;  ///< of stats' shape; its rows of entropy and token_log_prob count

  static constexpr auto fields() {
    using A = CrossEntropyBackward;
    return list(required("grad_loss", &A::grad_loss), required("grad_lse", &A::grad_lse),
                required("logits", &A::logits), required("target", &A::target), required("weight", &A::weight),
                required("lse", &A::lse), required("stats", &A::stats), required("scales", &A::scales),
                required("token_weight", &A::token_weight), all_of<true>(&A::options),
                option("grad_stats", &A::grad_stats), option(&A::options, "aux", &RowOptions::aux));
  }
};

/// What shapes the values of rows that are differentiated, beside the logits. A weight and a target are constants.
struct RowSettings {
  at::Tensor target;      ///< as CrossEntropyForward's
  OptionalTensor weight;  ///< [V] acc
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  double softcap = 0.0;
  int64_t aux = 0;  ///< bits of AuxBit: kAuxLse, of ignored rows too; kAuxEntropy; kAuxTokenLogProb

  static constexpr auto fields() {
    using A = RowSettings;
    return list(required("target", &A::target), required("weight", &A::weight),
                required("ignore_index", &A::ignore_index), required("label_smoothing", &A::label_smoothing),
                required("softcap", &A::softcap), required("aux", &A::aux));
  }
};

/// Cross entropy's rows without weights of tokens, z-loss and reduction, as functions that PyTorch can differentiate
/// again: values [4, N] acc are each row's cross entropy, lse, entropy and the target's log-probability; those that
/// `aux` does not ask for are 0. stats [5, N] acc are constants: lse, what rounding took from it, the sum of the
/// coefficients (dense targets), the entropy and what rounding took from that. Of ignored rows there is lse alone.
struct CrossEntropyRows {
  at::Tensor logits;  ///< [N, V]
  RowSettings settings;

  static constexpr auto fields() {
    using A = CrossEntropyRows;
    return list(required("logits", &A::logits), all_of(&A::settings));
  }
};

/// The gradient of the logits for one of the values, [4, N] acc.
struct CrossEntropyRowsGradient {
  at::Tensor logits, upstream, stats;
  RowSettings settings;

  static constexpr auto fields() {
    using A = CrossEntropyRowsGradient;
    return list(required("logits", &A::logits), required("upstream", &A::upstream), required("stats", &A::stats),
                all_of(&A::settings));
  }
};

/// The tangents of the values, [4, N] acc, for one of the logits, of their dtype.
struct CrossEntropyRowsTangent {
  at::Tensor logits, tangent, stats;
  RowSettings settings;

  static constexpr auto fields() {
    using A = CrossEntropyRowsTangent;
    return list(required("logits", &A::logits), required("tangent", &A::tangent), required("stats", &A::stats),
                all_of(&A::settings));
  }
};

/// The tangent of that gradient, for tangents of the logits and, where there is one, of the upstream gradient.
struct CrossEntropyRowsSecond {
  at::Tensor logits, upstream, tangent;
  OptionalTensor upstream_tangent;
  at::Tensor stats;
  RowSettings settings;

  static constexpr auto fields() {
    using A = CrossEntropyRowsSecond;
    return list(required("logits", &A::logits), required("upstream", &A::upstream), required("tangent", &A::tangent),
                required("upstream_tangent", &A::upstream_tangent), required("stats", &A::stats), all_of(&A::settings));
  }
};

/// The gradient of a shard's logits [N, V / processes], columns [vocab_start, vocab_start + size) of `vocab` of them;
/// the in-place twin writes it over them. Indices and the class weights count in the whole vocabulary, a probability
/// target's columns are the shard's. `lse`, `lse_low` and (dense targets) `mass` are of whole rows, see RowGradient;
/// `scales` holds the first two of RowScales. The last four are of whole rows too, [N] acc; those that are absent are
/// 0.
struct CrossEntropyShardGradient {
  at::Tensor logits;
  OptionalTensor grad_loss, grad_lse;
  at::Tensor target;
  OptionalTensor weight;
  at::Tensor lse, lse_low;
  OptionalTensor mass;
  at::Tensor scales;
  OptionalTensor token_weight;
  RowOptions options;
  int64_t vocab_start = 0, vocab = 0;
  OptionalTensor grad_log_prob, grad_entropy, entropy, entropy_low;

  static constexpr auto fields() {
    using A = CrossEntropyShardGradient;
    return list(overwritten("logits", &A::logits), required("grad_loss", &A::grad_loss),
                required("grad_lse", &A::grad_lse), required("target", &A::target), required("weight", &A::weight),
                required("lse", &A::lse), required("lse_low", &A::lse_low), required("mass", &A::mass),
                required("scales", &A::scales), required("token_weight", &A::token_weight), all_of<true>(&A::options),
                required("vocab_start", &A::vocab_start), required("vocab", &A::vocab),
                option("grad_log_prob", &A::grad_log_prob), option("grad_entropy", &A::grad_entropy),
                option("entropy", &A::entropy), option("entropy_low", &A::entropy_low));
  }
};

// --- linear cross entropy ------------------------------------------------------------------------------------

struct LinearCrossEntropyCall {
  at::Tensor input, linear_weight, target;
  LinearCrossEntropyOptions options;
  int64_t aux = 0;

  static constexpr auto fields() {
    using A = LinearCrossEntropyCall;
    using O = LinearCrossEntropyOptions;
    constexpr auto o = &A::options;
    return list(overwritten("input", &A::input), required("linear_weight", &A::linear_weight),
                required("target", &A::target), option(o, "linear_bias", &O::linear_bias),
                option(o, "weight", &O::weight), loss_options<A, O>(),
                option(o, "logit_scale", &O::logit_scale, &kFinite),
                option(o, "accumulate_dtype", &O::accumulate_dtype), option(o, "workspace_mib", &O::workspace_mib),
                option(o, "row_scale", &O::row_scale), option(o, "support", &O::support),
                option(o, "grad_weight_into", &O::grad_weight_into), option(o, "batch_invariant", &O::batch_invariant));
  }
};

/// linear_cross_entropy's own options.
struct LinearOptions {
  double logit_scale = 1.0;
  std::optional<at::ScalarType> accumulate_dtype;
  std::optional<int64_t> workspace_mib;

  static constexpr auto fields() {
    using A = LinearOptions;
    return list(required("logit_scale", &A::logit_scale), forward_only("accumulate_dtype", &A::accumulate_dtype),
                required("workspace_mib", &A::workspace_mib));
  }
};

/// Gradients for an upstream gradient of 1, computed where `needs_grad` (input, weight, bias) says so and empty
/// otherwise; the in-place twin writes the input's over the input and returns it empty. With `keep_logits`, and no
/// gradients, the logits [N, V] come back, in rows of logits_row_elements(V) elements.
struct LinearCrossEntropyForward {
  at::Tensor input, linear_weight, target;
  OptionalTensor linear_bias, weight, token_weight, normalizer;
  RowOptions options;
  LinearOptions linear;
  std::array<bool, 3> needs_grad{};
  bool keep_logits = false;
  OptionalTensor row_scale;  ///< [N] acc

  static constexpr auto fields() {
    using A = LinearCrossEntropyForward;
    return list(overwritten("input", &A::input), required("linear_weight", &A::linear_weight),
                required("target", &A::target), required("linear_bias", &A::linear_bias),
                required("weight", &A::weight), required("token_weight", &A::token_weight),
                required("normalizer", &A::normalizer), all_of(&A::options), all_of(&A::linear),
                required("needs_grad", &A::needs_grad), option("keep_logits", &A::keep_logits),
                option("row_scale", &A::row_scale));
  }
};

/// `logits` are those that the forward kept; without them they are computed again. The in-place twin writes over them.
struct LinearCrossEntropyBackward {
  OptionalTensor grad_loss, grad_lse;
  at::Tensor input, linear_weight, target;
  OptionalTensor linear_bias, weight;
  at::Tensor lse, stats, scales;
  OptionalTensor token_weight;
  RowOptions options;
  LinearOptions linear;
  std::array<bool, 3> needs_grad{};
  OptionalTensor logits, grad_stats, row_scale;

  static constexpr auto fields() {
    using A = LinearCrossEntropyBackward;
    return list(required("grad_loss", &A::grad_loss), required("grad_lse", &A::grad_lse), required("input", &A::input),
                required("linear_weight", &A::linear_weight), required("target", &A::target),
                required("linear_bias", &A::linear_bias), required("weight", &A::weight), required("lse", &A::lse),
                required("stats", &A::stats), required("scales", &A::scales),
                required("token_weight", &A::token_weight), all_of<true>(&A::options), all_of<true>(&A::linear),
                required("needs_grad", &A::needs_grad), overwritten("logits", &A::logits),
                option("grad_stats", &A::grad_stats), option(&A::options, "aux", &RowOptions::aux),
                option("row_scale", &A::row_scale));
  }
};

/// The weight's gradient is added to `grad_weight_into` [V, H] acc, and comes back empty.
struct LinearCrossEntropyBackwardInto {
  at::Tensor grad_weight_into;
  LinearCrossEntropyBackward backward;

  static constexpr auto fields() {
    using A = LinearCrossEntropyBackwardInto;
    return list(added_to("grad_weight_into", &A::grad_weight_into), all_of(&A::backward));
  }
};

/// What a second derivative of linear_cross_entropy's rows is made of. Of `upstream`, [4, N] acc as CrossEntropyRows'
/// values, and `upstream_of_square`, [N] acc of lse^2: the tangents of the gradients of input, weight and bias, where
/// `needs_grad` says so, for tangents of input, weight and bias; and those of the values, with lse itself behind them.
struct LinearCrossEntropySecond {
  at::Tensor input, linear_weight;
  OptionalTensor linear_bias, input_tangent, weight_tangent, bias_tangent;
  at::Tensor upstream;
  OptionalTensor upstream_of_square;
  RowSettings settings;
  LinearOptions linear;  ///< without a logit_scale
  std::array<bool, 3> needs_grad{};

  static constexpr auto fields() {
    using A = LinearCrossEntropySecond;
    return list(required("input", &A::input), required("linear_weight", &A::linear_weight),
                required("linear_bias", &A::linear_bias), required("input_tangent", &A::input_tangent),
                required("weight_tangent", &A::weight_tangent), required("bias_tangent", &A::bias_tangent),
                required("upstream", &A::upstream), required("upstream_of_square", &A::upstream_of_square),
                all_of(&A::settings), all_of<true>(&A::linear), required("needs_grad", &A::needs_grad));
  }
};

// --- a softmax over a few columns of each row ----------------------------------------------------------------

/// The logits input @ linear_weight.T + linear_bias at columns `index` [N, K] int64, as [N, K] acc; an index outside
/// [0, V) gives any number.
struct SupportLogits {
  at::Tensor input, linear_weight;
  OptionalTensor linear_bias;
  at::Tensor index;
  std::optional<int64_t> workspace_mib;
  int64_t aux = 0;  ///< kBatchInvariant or 0

  static constexpr auto fields() {
    using A = SupportLogits;
    return list(required("input", &A::input), required("linear_weight", &A::linear_weight),
                required("linear_bias", &A::linear_bias), required("index", &A::index),
                required("workspace_mib", &A::workspace_mib), option("aux", &A::aux));
  }
};

/// A column may come once in a row. What is given to an index outside [0, V) is lost.
struct SupportLogitsBackward {
  at::Tensor grad, input, linear_weight;
  OptionalTensor linear_bias;
  at::Tensor index;
  std::optional<at::ScalarType> accumulate_dtype;
  std::optional<int64_t> workspace_mib;
  std::array<bool, 3> needs_grad{};
  int64_t aux = 0;

  static constexpr auto fields() {
    using A = SupportLogitsBackward;
    return list(required("grad", &A::grad), required("input", &A::input), required("linear_weight", &A::linear_weight),
                required("linear_bias", &A::linear_bias), required("index", &A::index),
                required("accumulate_dtype", &A::accumulate_dtype), required("workspace_mib", &A::workspace_mib),
                required("needs_grad", &A::needs_grad), option("aux", &A::aux));
  }
};

struct SupportLogitsBackwardInto {
  at::Tensor grad_weight_into;  ///< as above
  SupportLogitsBackward backward;

  static constexpr auto fields() {
    using A = SupportLogitsBackwardInto;
    return list(added_to("grad_weight_into", &A::grad_weight_into), all_of(&A::backward));
  }
};

/// Where each row's target stands in its support [N, K] int64, -1 pads: [N] int64, -100 for `ignore_index` and K where
/// it is not there or the support is wrong. On the CPU both are errors.
struct SupportPositions {
  at::Tensor target, support;
  int64_t vocab = 0, ignore_index = -100;

  static constexpr auto fields() {
    using A = SupportPositions;
    return list(required("target", &A::target), required("support", &A::support), required("vocab", &A::vocab),
                required("ignore_index", &A::ignore_index));
  }
};

// --- divergences -----------------------------------------------------------------------------------------------

/// Options that jsd and linear_jsd share. `aux` is a set of bits, see fusegrad/jsd.h.
template <class Call, class O>
constexpr auto divergence_options() {
  constexpr auto o = &Call::options;
  return list(option(o, "labels", &O::labels), option(o, "token_weight", &O::token_weight),
              option(o, "normalizer", &O::normalizer), option(o, "beta", &O::beta, &kUnit),
              option(o, "temperature", &O::temperature, &kPositive),
              option<Kind::kNoneIsDefault>(o, "ignore_index", &O::ignore_index), option(o, "reduction", &O::reduction),
              option(o, "tail", &O::tail), option(o, "soft_weight", &O::soft_weight, &kNotNegative),
              option(o, "hard_weight", &O::hard_weight, &kNotNegative), option("aux", &Call::aux));
}

/// Beside those of at::Reduction: the sum over the number of kept rows. 'mean' divides by the columns too.
constexpr int64_t kBatchMean = at::Reduction::END;

/// The same as kernels take them, checked, and those of the heads. Those of the teacher's logits are not used for a
/// top-k teacher; a softcap of 0 means none.
struct JsdSettings {
  double beta = 0.5;
  double student_temperature = 1.0;
  double teacher_temperature = 1.0;
  double student_softcap = 0.0;
  double teacher_softcap = 0.0;
  double student_logit_scale = 1.0;
  double teacher_logit_scale = 1.0;
  double soft_weight = 1.0;
  double hard_weight = 0.0;
  double roundoff = 0.0;  ///< of the dtype in which log-probabilities came: half the spacing of numbers at 1
  bool log_probs = false;
  bool renormalize = false;
  int64_t ignore_index = -100;
  int64_t reduction = kBatchMean;
  int64_t aux = 0;  ///< bits of JSDAuxBit

  static constexpr auto fields() {
    using A = JsdSettings;
    return list(required("beta", &A::beta), required("student_temperature", &A::student_temperature),
                required("teacher_temperature", &A::teacher_temperature),
                required("student_softcap", &A::student_softcap), required("teacher_softcap", &A::teacher_softcap),
                required("student_logit_scale", &A::student_logit_scale),
                required("teacher_logit_scale", &A::teacher_logit_scale), required("soft_weight", &A::soft_weight),
                required("hard_weight", &A::hard_weight), required("roundoff", &A::roundoff),
                forward_only("log_probs", &A::log_probs), required("renormalize", &A::renormalize),
                required("ignore_index", &A::ignore_index), forward_only("reduction", &A::reduction),
                forward_only("aux", &A::aux));
  }

  bool hard_wanted() const { return hard_weight != 0.0 || (aux & kJSDAuxHardLoss) != 0; }
  bool averaged() const { return reduction == at::Reduction::Mean || reduction == kBatchMean; }
};

/// Tensors flattened to rows, in the dtypes that the kernels read.
struct JsdRows {
  OptionalTensor teacher_index;  ///< [N, K] int64, contiguous, -1 pads; none for a dense teacher
  OptionalTensor tail_log_prob;  ///< [N] acc: log of what a top-k teacher has beside the K
  OptionalTensor labels;         ///< [N] int64 or int32, contiguous
  OptionalTensor token_weight;   ///< [N] acc
  OptionalTensor normalizer;     ///< 0-d acc

  static constexpr auto fields() {
    using A = JsdRows;
    return list(required("teacher_index", &A::teacher_index), required("tail_log_prob", &A::tail_log_prob),
                required("labels", &A::labels), required("token_weight", &A::token_weight),
                forward_only("normalizer", &A::normalizer));
  }
};

struct JsdCall {
  at::Tensor student, teacher;
  OptionalTensor teacher_indices;
  JSDOptions options;
  int64_t aux = 0;
  OptionalTensor tail_log_prob;

  static constexpr auto fields() {
    using A = JsdCall;
    return list(overwritten("student", &A::student), required("teacher", &A::teacher),
                option("teacher_indices", &A::teacher_indices), divergence_options<A, JSDOptions>(),
                option(&A::options, "log_probs", &JSDOptions::log_probs), option("tail_log_prob", &A::tail_log_prob));
  }
};

/// Gradients for an upstream gradient of 1, where `needs_grad` (student, teacher) says so and empty otherwise; the
/// in-place twin writes the student's over the student and returns it empty.
struct JsdForward {
  at::Tensor student;  ///< [N, V]
  at::Tensor teacher;  ///< [N, V], or a top-k teacher's [N, K] acc
  JsdRows rows;
  JsdSettings settings;
  std::array<bool, 2> needs_grad{};
  bool partial = false;  ///< log-probabilities are parts of longer rows: they do not sum to 1, the sum may be negative

  static constexpr auto fields() {
    using A = JsdForward;
    return list(overwritten("student", &A::student), required("teacher", &A::teacher), all_of(&A::rows),
                all_of(&A::settings), required("needs_grad", &A::needs_grad), option("partial", &A::partial));
  }
};

/// What a graph of jsd's gradients is made of. No op has these arguments: the forward makes the gradients.
struct JsdBackward {
  at::Tensor grad_loss, student, teacher;
  JsdRows rows;
  at::Tensor scales;
  JsdSettings settings;

  static constexpr auto fields() {
    using A = JsdBackward;
    return list(required("grad_loss", &A::grad_loss), required("student", &A::student),
                required("teacher", &A::teacher), all_of<true>(&A::rows), required("scales", &A::scales),
                all_of<true>(&A::settings), option(&A::settings, "log_probs", &JsdSettings::log_probs));
  }
};

/// What shapes the soft part of a divergence of rows, beside both sides' logits, as JsdSettings and JsdRows have it.
struct JsdSoftSettings {
  OptionalTensor labels;
  int64_t ignore_index = -100;
  double beta = 0.5;
  double student_temperature = 1.0;
  double teacher_temperature = 1.0;
  double student_softcap = 0.0;
  double teacher_softcap = 0.0;
  double student_logit_scale = 1.0;
  double teacher_logit_scale = 1.0;
  bool log_probs = false;

  static constexpr auto fields() {
    using A = JsdSoftSettings;
    return list(required("labels", &A::labels), required("ignore_index", &A::ignore_index), required("beta", &A::beta),
                required("student_temperature", &A::student_temperature),
                required("teacher_temperature", &A::teacher_temperature),
                required("student_softcap", &A::student_softcap), required("teacher_softcap", &A::teacher_softcap),
                required("student_logit_scale", &A::student_logit_scale),
                required("teacher_logit_scale", &A::teacher_logit_scale), required("log_probs", &A::log_probs));
  }
};

/// The soft part of each row, [N] acc, without weights of tokens and reduction, of a dense teacher, as a function that
/// PyTorch can differentiate again. Ignored rows are 0.
struct JsdSoft {
  at::Tensor student, teacher;  ///< [N, V] of one dtype
  JsdSoftSettings settings;

  static constexpr auto fields() {
    using A = JsdSoft;
    return list(required("student", &A::student), required("teacher", &A::teacher), all_of(&A::settings));
  }
};

/// The gradients of student and teacher, where `needs_grad` says so, for one of the soft parts, [N] acc.
struct JsdSoftGradient {
  at::Tensor student, teacher, upstream;
  std::array<bool, 2> needs_grad{};
  JsdSoftSettings settings;

  static constexpr auto fields() {
    using A = JsdSoftGradient;
    return list(required("student", &A::student), required("teacher", &A::teacher), required("upstream", &A::upstream),
                required("needs_grad", &A::needs_grad), all_of(&A::settings));
  }
};

/// The tangent of the soft parts, [N] acc, for tangents of student and teacher, of their dtype.
struct JsdSoftTangent {
  at::Tensor student, teacher;
  OptionalTensor student_tangent, teacher_tangent;
  JsdSoftSettings settings;

  static constexpr auto fields() {
    using A = JsdSoftTangent;
    return list(required("student", &A::student), required("teacher", &A::teacher),
                required("student_tangent", &A::student_tangent), required("teacher_tangent", &A::teacher_tangent),
                all_of(&A::settings));
  }
};

/// The tangents of those gradients, for tangents of student, teacher and upstream gradient.
struct JsdSoftSecond {
  at::Tensor student, teacher, upstream;
  OptionalTensor student_tangent, teacher_tangent, upstream_tangent;
  std::array<bool, 2> needs_grad{};
  JsdSoftSettings settings;

  static constexpr auto fields() {
    using A = JsdSoftSecond;
    return list(required("student", &A::student), required("teacher", &A::teacher), required("upstream", &A::upstream),
                required("student_tangent", &A::student_tangent), required("teacher_tangent", &A::teacher_tangent),
                required("upstream_tangent", &A::upstream_tangent), required("needs_grad", &A::needs_grad),
                all_of(&A::settings));
  }
};

// --- linear Jensen-Shannon divergence ----------------------------------------------------------------------------

/// A top-k teacher has no weight: its log-probabilities stand in for hidden states.
struct LinearJsdCall {
  at::Tensor student_input, student_weight, teacher_input;
  OptionalTensor teacher_weight, teacher_indices;
  LinearJSDOptions options;
  int64_t aux = 0;
  OptionalTensor tail_log_prob;

  static constexpr auto fields() {
    using A = LinearJsdCall;
    using O = LinearJSDOptions;
    constexpr auto o = &A::options;
    return list(overwritten("student_input", &A::student_input), required("student_weight", &A::student_weight),
                required("teacher_input", &A::teacher_input), option("teacher_weight", &A::teacher_weight),
                option("teacher_indices", &A::teacher_indices), option(o, "student_bias", &O::student_bias),
                option(o, "teacher_bias", &O::teacher_bias), divergence_options<A, O>(),
                option(o, "teacher_temperature", &O::teacher_temperature, &kPositive),
                option(o, "student_softcap", &O::student_softcap, &kPositive),
                option(o, "teacher_softcap", &O::teacher_softcap, &kPositive),
                option(o, "student_logit_scale", &O::student_logit_scale, &kFinite),
                option(o, "teacher_logit_scale", &O::teacher_logit_scale, &kFinite),
                option(o, "vocab_size", &O::vocab_size), option(o, "accumulate_dtype", &O::accumulate_dtype),
                option(o, "workspace_mib", &O::workspace_mib), option("tail_log_prob", &A::tail_log_prob));
  }
};

/// The student's head, and the teacher: hidden states [N, H] and their head, or a top-k teacher's log-probabilities
/// [N, K] acc.
struct JsdHeads {
  at::Tensor student_weight;
  OptionalTensor student_bias;
  at::Tensor teacher;
  OptionalTensor teacher_weight, teacher_bias;

  static constexpr auto fields() {
    using A = JsdHeads;
    return list(required("student_weight", &A::student_weight), required("student_bias", &A::student_bias),
                required("teacher", &A::teacher), required("teacher_weight", &A::teacher_weight),
                required("teacher_bias", &A::teacher_bias));
  }
};

struct LinearJsdOptions {
  std::optional<int64_t> vocab_size;  ///< only the first so many rows of the weights count; none: all
  std::optional<at::ScalarType> accumulate_dtype;
  std::optional<int64_t> workspace_mib;

  static constexpr auto fields() {
    using A = LinearJsdOptions;
    return list(required("vocab_size", &A::vocab_size), required("accumulate_dtype", &A::accumulate_dtype),
                required("workspace_mib", &A::workspace_mib));
  }
};

/// Gradients as LinearCrossEntropyForward's.
struct LinearJsdForward {
  at::Tensor student_input;
  JsdHeads heads;
  JsdRows rows;
  JsdSettings settings;
  LinearJsdOptions linear;
  std::array<bool, 3> needs_grad{};

  static constexpr auto fields() {
    using A = LinearJsdForward;
    return list(overwritten("student_input", &A::student_input), all_of(&A::heads), all_of(&A::rows),
                all_of(&A::settings), all_of(&A::linear), required("needs_grad", &A::needs_grad));
  }
};

struct LinearJsdBackward {
  at::Tensor grad_loss, student_input;
  JsdHeads heads;
  JsdRows rows;
  at::Tensor scales;
  JsdSettings settings;
  LinearJsdOptions linear;
  std::array<bool, 3> needs_grad{};

  static constexpr auto fields() {
    using A = LinearJsdBackward;
    return list(required("grad_loss", &A::grad_loss), required("student_input", &A::student_input), all_of(&A::heads),
                all_of<true>(&A::rows), required("scales", &A::scales), all_of<true>(&A::settings), all_of(&A::linear),
                required("needs_grad", &A::needs_grad));
  }
};

/// As LinearCrossEntropySecond, of rows of a dense teacher: `upstream` is [2, N] acc, of the soft and the hard parts,
/// and so are the values' tangents. A hard part is there where `hard` says so, for a student_logit_scale of 1.
struct LinearJsdSecond {
  at::Tensor student_input;
  JsdHeads heads;
  OptionalTensor input_tangent, weight_tangent, bias_tangent;
  at::Tensor upstream;
  JsdSoftSettings settings;
  bool hard = false;
  LinearJsdOptions linear;
  std::array<bool, 3> needs_grad{};

  static constexpr auto fields() {
    using A = LinearJsdSecond;
    return list(required("student_input", &A::student_input), all_of(&A::heads),
                required("input_tangent", &A::input_tangent), required("weight_tangent", &A::weight_tangent),
                required("bias_tangent", &A::bias_tangent), required("upstream", &A::upstream), all_of(&A::settings),
                required("hard", &A::hard), all_of(&A::linear), required("needs_grad", &A::needs_grad));
  }
};

// --- flex attention ------------------------------------------------------------------------------------------------

/// A mod is a text of the score_mod language, empty for none, with the tensors and numbers that it declares: its
/// floats, and its integers and bools (0 or 1), each in the text's order. `kv_blocks` are a BlockMask's lists: none;
/// num_blocks and indices of the partial blocks; or these and the full blocks' as well. Views of what the caller has.
struct FlexMods {
  std::string_view score_mod;
  at::TensorList score_mod_buffers;
  at::ArrayRef<double> score_mod_floats;
  at::IntArrayRef score_mod_ints;
  std::string_view mask_mod;
  at::TensorList mask_mod_buffers;
  at::ArrayRef<double> mask_mod_floats;
  at::IntArrayRef mask_mod_ints;
  at::TensorList kv_blocks;
  at::IntArrayRef block_size;

  static constexpr auto fields() {
    using A = FlexMods;
    return list(required("score_mod", &A::score_mod), required("score_mod_buffers", &A::score_mod_buffers),
                required("score_mod_floats", &A::score_mod_floats), required("score_mod_ints", &A::score_mod_ints),
                required("mask_mod", &A::mask_mod), required("mask_mod_buffers", &A::mask_mod_buffers),
                required("mask_mod_floats", &A::mask_mod_floats), required("mask_mod_ints", &A::mask_mod_ints),
                required("kv_blocks", &A::kv_blocks), required("block_size", &A::block_size));
  }
};

/// `inplace` lets the backward write over query, key and value.
struct FlexAttentionCall {
  at::Tensor query, key, value;
  FlexMods mods;
  std::optional<double> scale;
  bool enable_gqa = false;
  bool inplace = false;
  std::optional<bool> deterministic;
  int64_t aux = 0;
  double dropout_p = 0.0;

  static constexpr auto fields() {
    using A = FlexAttentionCall;
    return list(required("query", &A::query), required("key", &A::key), required("value", &A::value), all_of(&A::mods),
                option("scale", &A::scale), option("enable_gqa", &A::enable_gqa), option("inplace", &A::inplace),
                option("deterministic", &A::deterministic), option("aux", &A::aux), option("dropout_p", &A::dropout_p));
  }
};

/// What shapes the scores. `dropout_seed` is one int64 on the query's device, absent without dropout: from it and a
/// pair's place both directions know whether the pair is dropped.
struct FlexScoring {
  FlexMods mods;
  double scale = 1.0;
  double dropout_p = 0.0;
  OptionalTensor dropout_seed;

  static constexpr auto fields() {
    using A = FlexScoring;
    return list(all_of(&A::mods), required("scale", &A::scale), required("dropout_p", &A::dropout_p),
                required("dropout_seed", &A::dropout_seed));
  }
};

struct FlexForward {
  at::Tensor query, key, value;
  FlexScoring scoring;
  int64_t aux = 0;

  static constexpr auto fields() {
    using A = FlexForward;
    return list(required("query", &A::query), required("key", &A::key), required("value", &A::value),
                all_of(&A::scoring), required("aux", &A::aux));
  }
};

/// `needs_grad`: of query, key, value, then of each of the score_mod's buffers; what is not wanted is empty.
struct FlexBackward {
  at::Tensor query, key, value;
  OptionalTensor grad_out, grad_lse, grad_max_scores;
  at::Tensor out, lse, max_scores, max_ties, out_low, lse_low;  ///< what the forward returned
  FlexScoring scoring;
  bool deterministic = false;
  c10::List<bool> needs_grad;

  static constexpr auto fields() {
    using A = FlexBackward;
    return list(overwritten("query", &A::query), overwritten("key", &A::key), overwritten("value", &A::value),
                required("grad_out", &A::grad_out), required("grad_lse", &A::grad_lse),
                required("grad_max_scores", &A::grad_max_scores), required("out", &A::out), required("lse", &A::lse),
                required("max_scores", &A::max_scores), required("max_ties", &A::max_ties),
                required("out_low", &A::out_low), required("lse_low", &A::lse_low), all_of(&A::scoring),
                required("deterministic", &A::deterministic), required("needs_grad", &A::needs_grad));
  }
};

/// Forward mode: the forward's inputs with their tangents, none of which is zero. `with_tangent`: the indices of the
/// score_mod's buffers that have one, ascending; `buffer_tangents`: these. `aux`: kFlexLow or 0.
struct FlexTangents {
  at::Tensor query, key, value;
  OptionalTensor query_tangent, key_tangent, value_tangent;
  at::IntArrayRef with_tangent;
  at::TensorList buffer_tangents;
  FlexScoring scoring;
  int64_t aux = 0;

  static constexpr auto fields() {
    using A = FlexTangents;
    return list(required("query", &A::query), required("key", &A::key), required("value", &A::value),
                required("query_tangent", &A::query_tangent), required("key_tangent", &A::key_tangent),
                required("value_tangent", &A::value_tangent), required("with_tangent", &A::with_tangent),
                required("buffer_tangents", &A::buffer_tangents), all_of(&A::scoring), required("aux", &A::aux));
  }
};

/// Second derivatives on CUDA: what each pair gives to the tangents of the gradients of query, key and value, of
/// `head_count` heads of queries from `first_head` on, counted over all batches, whole groups of them, and `row_count`
/// queries from `first_row` on, a multiple of 128. `rows`: [B, H, M, 5] float32, of each row lse, what rounding
/// took from it, the sum of grad_out * out less grad_lse, and the tangents of lse and of that sum. `score_tangent`:
/// [head_count, row_count, columns] float32, what else the tangents of the scores have, of captured tensors. There is
/// no dropout.
struct FlexPairTangents {
  at::Tensor query, key, value, grad_out, query_tangent, key_tangent, value_tangent;
  OptionalTensor grad_out_tangent;
  at::Tensor rows;
  FlexScoring scoring;
  int64_t first_head = 0, head_count = 0, first_row = 0, row_count = 0;
  OptionalTensor score_tangent;

  static constexpr auto fields() {
    using A = FlexPairTangents;
    return list(required("query", &A::query), required("key", &A::key), required("value", &A::value),
                required("grad_out", &A::grad_out), required("query_tangent", &A::query_tangent),
                required("key_tangent", &A::key_tangent), required("value_tangent", &A::value_tangent),
                required("grad_out_tangent", &A::grad_out_tangent), required("rows", &A::rows), all_of(&A::scoring),
                required("first_head", &A::first_head), required("head_count", &A::head_count),
                required("first_row", &A::first_row), required("row_count", &A::row_count),
                option("score_tangent", &A::score_tangent));
  }
};

/// The in-place twin, which writes the first three over the inputs, and the others into `grad_buffers`.
struct FlexBackwardInto {
  FlexBackward backward;
  at::TensorList grad_buffers;

  static constexpr auto fields() {
    using A = FlexBackwardInto;
    return list(all_of(&A::backward), overwritten("grad_buffers", &A::grad_buffers));
  }
};

}  // namespace fusegrad
