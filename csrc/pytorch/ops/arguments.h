// The arguments of each op, listed once. The schemas, the calls, the kernels, the Meta kernels and what a
// backward gets follow from the lists; pytorch/ops/fields.h says how.
//
// Three layers, as in pytorch/library.cpp: what front ends give (`...Call`), the forward on rows, its backward.
// Letters: N rows (tokens), V vocabulary, H hidden size; B batch, heads, M queries, K keys. `acc` is float64 for
// float64 and float32 otherwise.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
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
template <size_t count>
using Flags = std::array<bool, count>;

// A field is a line: its kind, type and name, and its initial value behind them. LIST has the fields of a function;
// what a struct has without a kind is no field.
#define FIELDS_OF(Struct)                 \
  using Self = Struct;                    \
  static constexpr int kFirst = __LINE__; \
  template <class S = Self>               \
  static constexpr auto fields() {        \
    return lines_of<S>();                 \
  }
#define LIST(...)                                \
  static_assert(__LINE__ - kFirst < kMostLines); \
  static constexpr auto line(Line<__LINE__ - kFirst> /*place*/) { return __VA_ARGS__; }
#define REQUIRED(Type, name) LIST(required(#name, &Self::name)) Type name
#define OVERWRITTEN(Type, name) LIST(overwritten(#name, &Self::name)) Type name
#define ADDED_TO(Type, name) LIST(added_to(#name, &Self::name)) Type name
#define FORWARD_ONLY(Type, name) LIST(forward_only(#name, &Self::name)) Type name
#define OPTION(Type, name) LIST(option(#name, &Self::name)) Type name
#define ALL_OF(Type, name) LIST(all_of(&Self::name)) Type name
#define ALL_OF_BACKWARD(Type, name) LIST(all_of<true>(&Self::name)) Type name

// --- a vocabulary that processes share ----------------------------------------------------------------------

/// The part of a vocabulary that this process has; the others of the group have the rest. Without bounds the vocabulary
/// is whole.
struct Shards {
  FIELDS_OF(Shards)
  OPTION(std::string, group);  ///< its name in torch.distributed
  OPTION(int64_t, rank) = 0;
  OPTION(std::vector<int64_t>, bounds);  ///< where the part of each rank starts and stops

  explicit operator bool() const { return !bounds.empty(); }
  int64_t world() const { return static_cast<int64_t>(bounds.size() / 2); }
  int64_t start(int64_t of) const { return bounds[static_cast<size_t>(2 * of)]; }
  int64_t stop(int64_t of) const { return bounds[static_cast<size_t>(2 * of + 1)]; }
  int64_t start() const { return start(rank); }
  int64_t size() const { return stop(rank) - start(rank); }
  int64_t vocab() const { return bounds.empty() ? 0 : *std::max_element(bounds.begin(), bounds.end()); }
  /// Columns of the largest part, by which chunks are planned: they must be the same in all processes.
  int64_t largest() const {
    int64_t most = 0;
    for (int64_t r = 0; r < world(); ++r) most = std::max(most, stop(r) - start(r));
    return most;
  }
};

/// Compares what the processes of a group were given. `names` are those of the tensors, with commas between them;
/// `kinds` has a number for each: -1 where it is absent and not among the `given`, else twice one more than the
/// dimension that is this process's part (none: 0), and 1 more where it requires grad. `told` has a line for what else
/// must be the same, `name: value`. `who`: which processes, for messages. `failed`: this process cannot make the call.
/// `again`: others may be given the same. Where none is, tensors must be the same bit by bit, and the host waits.
/// Without names the first of the `given` says the device alone. Returns whether something differs, 0-d bool, where the
/// device alone knows it.
struct ShardsAgree {
  FIELDS_OF(ShardsAgree)
  REQUIRED(std::string, op);
  REQUIRED(std::string, who);
  REQUIRED(at::TensorList, given);
  REQUIRED(std::string, names);
  REQUIRED(std::vector<int64_t>, kinds);
  REQUIRED(std::string, told);
  REQUIRED(bool, failed) = false;
  REQUIRED(bool, again) = true;
  ALL_OF(Shards, shards);
};

/// The sum over the processes of a group, each of which does the same with it; what all processes have alike, each for
/// its own part (a copy). The gradient of one is the other, of the upstream gradient.
struct ShardsSum {
  FIELDS_OF(ShardsSum)
  REQUIRED(at::Tensor, values);
  ALL_OF(Shards, shards);
};
struct ShardsUse {
  FIELDS_OF(ShardsUse)
  REQUIRED(at::Tensor, values);
  ALL_OF(Shards, shards);
};

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
  FIELDS_OF(RowOptions)
  REQUIRED(int64_t, ignore_index) = -100;
  FORWARD_ONLY(int64_t, reduction) = at::Reduction::Mean;  ///< of at::Reduction
  REQUIRED(double, label_smoothing) = 0.0;
  REQUIRED(double, z_loss) = 0.0;
  REQUIRED(double, softcap) = 0.0;  ///< 0: none
  FORWARD_ONLY(int64_t, aux) = 0;
};

struct CrossEntropyCall {
  FIELDS_OF(CrossEntropyCall)
  OVERWRITTEN(at::Tensor, input);
  REQUIRED(at::Tensor, target);
  LIST(option(&Self::options, "weight", &CrossEntropyOptions::weight))
  LIST(loss_options<Self, CrossEntropyOptions>())
  LIST(option(&Self::options, "support", &CrossEntropyOptions::support))
  CrossEntropyOptions options;
  int64_t aux = 0;
};

/// A call over a vocabulary that processes share.
template <class Call>
struct Sharded {
  FIELDS_OF(Sharded)
  ALL_OF(Call, call);
  ALL_OF(Shards, shards);
};

struct CrossEntropyForward {
  FIELDS_OF(CrossEntropyForward)
  OVERWRITTEN(at::Tensor, logits);         ///< [N, V]
  REQUIRED(at::Tensor, target);            ///< [N] int32 or int64, or [N, V] probabilities in acc or the logits' dtype
  REQUIRED(OptionalTensor, weight);        ///< [V] acc
  REQUIRED(OptionalTensor, token_weight);  ///< [N] acc
  REQUIRED(OptionalTensor, normalizer);    ///< 0-d acc
  ALL_OF(RowOptions, options);
  /// The logits' columns are this process's part, and those of a probability target; indices and the class weights
  /// count in the whole vocabulary.
  ALL_OF(Shards, shards) {};
  OPTION(OptionalTensor, different) {};  ///< what ShardsAgree returned: the results are NaN where it is true
};

struct CrossEntropyBackward {
  FIELDS_OF(CrossEntropyBackward)
  REQUIRED(OptionalTensor, grad_loss);
  REQUIRED(OptionalTensor, grad_lse);
  REQUIRED(at::Tensor, logits);
  REQUIRED(at::Tensor, target);
  REQUIRED(OptionalTensor, weight);
  REQUIRED(at::Tensor, lse);
  REQUIRED(at::Tensor, stats);
  REQUIRED(at::Tensor, scales);  ///< what the forward returned
  REQUIRED(OptionalTensor, token_weight);
  ALL_OF_BACKWARD(RowOptions, options);
  OPTION(OptionalTensor, grad_stats);  ///< of stats' shape; its rows of entropy and token_log_prob count
  LIST(option(&Self::options, "aux", &RowOptions::aux))
  ALL_OF(Shards, shards) {};
  OPTION(OptionalTensor, different) {};
};

/// What shapes the values of rows that are differentiated, beside the logits. A weight and a target are constants.
struct RowSettings {
  FIELDS_OF(RowSettings)
  REQUIRED(at::Tensor, target);      ///< as CrossEntropyForward's
  REQUIRED(OptionalTensor, weight);  ///< [V] acc
  REQUIRED(int64_t, ignore_index) = -100;
  REQUIRED(double, label_smoothing) = 0.0;
  REQUIRED(double, softcap) = 0.0;
  REQUIRED(int64_t, aux) = 0;  ///< bits of AuxBit: kAuxLse, of ignored rows too; kAuxEntropy; kAuxTokenLogProb
};

/// Cross entropy's rows without weights of tokens, z-loss and reduction, as functions that PyTorch can differentiate
/// again: values [4, N] acc are each row's cross entropy, lse, entropy and the target's log-probability; those that
/// `aux` does not ask for are 0. stats [5, N] acc are constants: lse, what rounding took from it, the sum of the
/// coefficients (dense targets), the entropy and what rounding took from that. For ignored rows there is lse alone.
struct CrossEntropyRows {
  FIELDS_OF(CrossEntropyRows)
  REQUIRED(at::Tensor, logits);  ///< [N, V]
  ALL_OF(RowSettings, settings);
};

/// The gradient of the logits for one of the values, [4, N] acc.
struct CrossEntropyRowsGradient {
  FIELDS_OF(CrossEntropyRowsGradient)
  REQUIRED(at::Tensor, logits);
  REQUIRED(at::Tensor, upstream);
  REQUIRED(at::Tensor, stats);
  ALL_OF(RowSettings, settings);
};

/// The tangents of the values, [4, N] acc, for one of the logits, of their dtype.
struct CrossEntropyRowsTangent {
  FIELDS_OF(CrossEntropyRowsTangent)
  REQUIRED(at::Tensor, logits);
  REQUIRED(at::Tensor, tangent);
  REQUIRED(at::Tensor, stats);
  ALL_OF(RowSettings, settings);
};

/// The tangent of that gradient, for tangents of the logits and, where there is one, of the upstream gradient.
struct CrossEntropyRowsSecond {
  FIELDS_OF(CrossEntropyRowsSecond)
  REQUIRED(at::Tensor, logits);
  REQUIRED(at::Tensor, upstream);
  REQUIRED(at::Tensor, tangent);
  REQUIRED(OptionalTensor, upstream_tangent);
  REQUIRED(at::Tensor, stats);
  ALL_OF(RowSettings, settings);
};

// --- linear cross entropy ------------------------------------------------------------------------------------

struct LinearCrossEntropyCall {
  FIELDS_OF(LinearCrossEntropyCall)
  OVERWRITTEN(at::Tensor, input);
  REQUIRED(at::Tensor, linear_weight);
  REQUIRED(at::Tensor, target);
  LIST(option(&Self::options, "linear_bias", &LinearCrossEntropyOptions::linear_bias))
  LIST(option(&Self::options, "weight", &LinearCrossEntropyOptions::weight))
  LIST(loss_options<Self, LinearCrossEntropyOptions>())
  LIST(option(&Self::options, "logit_scale", &LinearCrossEntropyOptions::logit_scale, &kFinite))
  LIST(option(&Self::options, "accumulate_dtype", &LinearCrossEntropyOptions::accumulate_dtype))
  LIST(option(&Self::options, "workspace_mib", &LinearCrossEntropyOptions::workspace_mib))
  LIST(option(&Self::options, "row_scale", &LinearCrossEntropyOptions::row_scale))
  LIST(option(&Self::options, "support", &LinearCrossEntropyOptions::support))
  LIST(option(&Self::options, "grad_weight_into", &LinearCrossEntropyOptions::grad_weight_into))
  LIST(option(&Self::options, "batch_invariant", &LinearCrossEntropyOptions::batch_invariant))
  LinearCrossEntropyOptions options;
  int64_t aux = 0;
};

/// linear_log_prob without a graph: log_prob, entropy (empty unless asked for) and lse of each row, acc, of the
/// target's shape. What the arguments mean, and the errors, are linear_cross_entropy's.
struct LinearLogProbForward {
  FIELDS_OF(LinearLogProbForward)
  REQUIRED(at::Tensor, input);          ///< [..., H]
  REQUIRED(at::Tensor, linear_weight);  ///< [V, H]
  REQUIRED(at::Tensor, target);         ///< class indices [...]
  OPTION(OptionalTensor, linear_bias);
  OPTION(int64_t, ignore_index) = -100;
  OPTION(std::optional<double>, softcap);
  OPTION(double, logit_scale) = 1.0;
  OPTION(OptionalTensor, row_scale);
  OPTION(std::optional<int64_t>, workspace_mib);
  OPTION(bool, return_entropy) = true;
  OPTION(bool, batch_invariant) = true;
  ALL_OF(Shards, shards) {};
};

/// linear_cross_entropy's own options.
struct LinearOptions {
  FIELDS_OF(LinearOptions)
  REQUIRED(double, logit_scale) = 1.0;
  FORWARD_ONLY(std::optional<at::ScalarType>, accumulate_dtype);
  REQUIRED(std::optional<int64_t>, workspace_mib);
};

/// Gradients for an upstream gradient of 1, computed where `needs_grad` (input, weight, bias) says so and empty
/// otherwise; the in-place twin writes the input's over the input and returns it empty. With `keep_logits`, and no
/// gradients, the logits [N, V] come back, in rows of logits_row_elements(V) elements.
struct LinearCrossEntropyForward {
  FIELDS_OF(LinearCrossEntropyForward)
  OVERWRITTEN(at::Tensor, input);
  REQUIRED(at::Tensor, linear_weight);
  REQUIRED(at::Tensor, target);
  REQUIRED(OptionalTensor, linear_bias);
  REQUIRED(OptionalTensor, weight);
  REQUIRED(OptionalTensor, token_weight);
  REQUIRED(OptionalTensor, normalizer);
  ALL_OF(RowOptions, options);
  ALL_OF(LinearOptions, linear);
  REQUIRED(Flags<3>, needs_grad) {};
  OPTION(bool, keep_logits) = false;
  OPTION(OptionalTensor, row_scale);  ///< [N] acc
  ALL_OF(Shards, shards) {};          ///< as CrossEntropyForward's, of the weight's rows
  OPTION(OptionalTensor, different) {};
};

/// `logits` are those that the forward kept; without them they are computed again. The in-place twin writes over them.
struct LinearCrossEntropyBackward {
  FIELDS_OF(LinearCrossEntropyBackward)
  REQUIRED(OptionalTensor, grad_loss);
  REQUIRED(OptionalTensor, grad_lse);
  REQUIRED(at::Tensor, input);
  REQUIRED(at::Tensor, linear_weight);
  REQUIRED(at::Tensor, target);
  REQUIRED(OptionalTensor, linear_bias);
  REQUIRED(OptionalTensor, weight);
  REQUIRED(at::Tensor, lse);
  REQUIRED(at::Tensor, stats);
  REQUIRED(at::Tensor, scales);
  REQUIRED(OptionalTensor, token_weight);
  ALL_OF_BACKWARD(RowOptions, options);
  ALL_OF_BACKWARD(LinearOptions, linear);
  REQUIRED(Flags<3>, needs_grad) {};
  OVERWRITTEN(OptionalTensor, logits);
  OPTION(OptionalTensor, grad_stats);
  LIST(option(&Self::options, "aux", &RowOptions::aux))
  OPTION(OptionalTensor, row_scale);
  ALL_OF(Shards, shards) {};
  OPTION(OptionalTensor, different) {};
  LIST(option(&Self::linear, "accumulate_dtype", &LinearOptions::accumulate_dtype))  ///< of shards alone
};

/// The weight's gradient is added to `grad_weight_into` [V, H] acc, and comes back empty.
struct LinearCrossEntropyBackwardInto {
  FIELDS_OF(LinearCrossEntropyBackwardInto)
  ADDED_TO(at::Tensor, grad_weight_into);
  ALL_OF(LinearCrossEntropyBackward, backward);
};

/// What a second derivative of linear_cross_entropy's rows is made of. Of `upstream`, [4, N] acc as CrossEntropyRows'
/// values, and `upstream_of_square`, [N] acc of lse^2: the tangents of the gradients of input, weight and bias, where
/// `needs_grad` says so, for tangents of input, weight and bias; and those of the values, with lse itself behind them.
struct LinearCrossEntropySecond {
  FIELDS_OF(LinearCrossEntropySecond)
  REQUIRED(at::Tensor, input);
  REQUIRED(at::Tensor, linear_weight);
  REQUIRED(OptionalTensor, linear_bias);
  REQUIRED(OptionalTensor, input_tangent);
  REQUIRED(OptionalTensor, weight_tangent);
  REQUIRED(OptionalTensor, bias_tangent);
  REQUIRED(at::Tensor, upstream);
  REQUIRED(OptionalTensor, upstream_of_square);
  ALL_OF(RowSettings, settings);
  ALL_OF_BACKWARD(LinearOptions, linear);  ///< without a logit_scale
  REQUIRED(Flags<3>, needs_grad) {};
};

// --- a softmax over a few columns of each row ----------------------------------------------------------------

/// The logits input @ linear_weight.T + linear_bias at columns `index` [N, K] int64, as [N, K] acc; an index outside
/// [0, V) gives any number.
struct SupportLogits {
  FIELDS_OF(SupportLogits)
  REQUIRED(at::Tensor, input);
  REQUIRED(at::Tensor, linear_weight);
  REQUIRED(OptionalTensor, linear_bias);
  REQUIRED(at::Tensor, index);
  REQUIRED(std::optional<int64_t>, workspace_mib);
  OPTION(int64_t, aux) = 0;   ///< kBatchInvariant or 0
  ALL_OF(Shards, shards) {};  ///< the weight's rows are a part, of whose vocabulary are the columns
};

/// A column may come once in a row. What is given to an index outside [0, V) is lost.
struct SupportLogitsBackward {
  FIELDS_OF(SupportLogitsBackward)
  REQUIRED(at::Tensor, grad);
  REQUIRED(at::Tensor, input);
  REQUIRED(at::Tensor, linear_weight);
  REQUIRED(OptionalTensor, linear_bias);
  REQUIRED(at::Tensor, index);
  REQUIRED(std::optional<at::ScalarType>, accumulate_dtype);
  REQUIRED(std::optional<int64_t>, workspace_mib);
  REQUIRED(Flags<3>, needs_grad) {};
  OPTION(int64_t, aux) = 0;
  ALL_OF(Shards, shards) {};
};

struct SupportLogitsBackwardInto {
  FIELDS_OF(SupportLogitsBackwardInto)
  ADDED_TO(at::Tensor, grad_weight_into);  ///< as above
  ALL_OF(SupportLogitsBackward, backward);
};

/// Where each row's target stands in its support [N, K] int64, -1 pads: [N] int64, -100 for `ignore_index` and K where
/// it is not there or the support is wrong. On the CPU both are errors.
struct SupportPositions {
  FIELDS_OF(SupportPositions)
  REQUIRED(at::Tensor, target);
  REQUIRED(at::Tensor, support);
  REQUIRED(int64_t, vocab) = 0;
  REQUIRED(int64_t, ignore_index) = -100;
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
  FIELDS_OF(JsdSettings)
  REQUIRED(double, beta) = 0.5;
  REQUIRED(double, student_temperature) = 1.0;
  REQUIRED(double, teacher_temperature) = 1.0;
  REQUIRED(double, student_softcap) = 0.0;
  REQUIRED(double, teacher_softcap) = 0.0;
  REQUIRED(double, student_logit_scale) = 1.0;
  REQUIRED(double, teacher_logit_scale) = 1.0;
  REQUIRED(double, soft_weight) = 1.0;
  REQUIRED(double, hard_weight) = 0.0;
  REQUIRED(double, roundoff) = 0.0;  ///< of the dtype in which log-probabilities came: half the spacing of numbers at 1
  FORWARD_ONLY(bool, log_probs) = false;
  REQUIRED(bool, renormalize) = false;
  REQUIRED(int64_t, ignore_index) = -100;
  FORWARD_ONLY(int64_t, reduction) = kBatchMean;
  FORWARD_ONLY(int64_t, aux) = 0;  ///< bits of JSDAuxBit

  bool hard_wanted() const { return hard_weight != 0.0 || (aux & kJSDAuxHardLoss) != 0; }
  bool averaged() const { return reduction == at::Reduction::Mean || reduction == kBatchMean; }
};

/// Tensors flattened to rows, in the dtypes that the kernels read.
struct JsdRows {
  FIELDS_OF(JsdRows)
  REQUIRED(OptionalTensor, teacher_index);   ///< [N, K] int64, contiguous, -1 pads; none for a dense teacher
  REQUIRED(OptionalTensor, tail_log_prob);   ///< [N] acc: log of what a top-k teacher has beside the K
  REQUIRED(OptionalTensor, labels);          ///< [N] int64 or int32, contiguous
  REQUIRED(OptionalTensor, token_weight);    ///< [N] acc
  FORWARD_ONLY(OptionalTensor, normalizer);  ///< 0-d acc
};

struct JsdCall {
  FIELDS_OF(JsdCall)
  OVERWRITTEN(at::Tensor, student);
  REQUIRED(at::Tensor, teacher);
  OPTION(OptionalTensor, teacher_indices);
  LIST(divergence_options<Self, JSDOptions>())
  LIST(option(&Self::options, "log_probs", &JSDOptions::log_probs))
  JSDOptions options;
  int64_t aux = 0;
  OPTION(OptionalTensor, tail_log_prob);
};

/// Gradients for an upstream gradient of 1, where `needs_grad` (student, teacher) says so and empty otherwise; the
/// in-place twin writes the student's over the student and returns it empty.
struct JsdForward {
  FIELDS_OF(JsdForward)
  OVERWRITTEN(at::Tensor, student);  ///< [N, V]
  REQUIRED(at::Tensor, teacher);     ///< [N, V], or a top-k teacher's [N, K] acc
  ALL_OF(JsdRows, rows);
  ALL_OF(JsdSettings, settings);
  REQUIRED(Flags<2>, needs_grad) {};
  ALL_OF(Shards, shards) {};             ///< the columns of the student and of a dense teacher are this process's part
  OPTION(OptionalTensor, different) {};  ///< as CrossEntropyForward's
};

/// What a graph of jsd's gradients is made of. No op has these arguments: the forward makes the gradients.
struct JsdBackward {
  FIELDS_OF(JsdBackward)
  REQUIRED(at::Tensor, grad_loss);
  REQUIRED(at::Tensor, student);
  REQUIRED(at::Tensor, teacher);
  ALL_OF_BACKWARD(JsdRows, rows);
  REQUIRED(at::Tensor, scales);
  ALL_OF_BACKWARD(JsdSettings, settings);
  LIST(option(&Self::settings, "log_probs", &JsdSettings::log_probs))
  ALL_OF(Shards, shards) {};
  OPTION(OptionalTensor, different) {};
};

/// What shapes the soft part of a divergence of rows, beside both sides' logits, as JsdSettings and JsdRows have it.
struct JsdSoftSettings {
  FIELDS_OF(JsdSoftSettings)
  REQUIRED(OptionalTensor, labels);
  REQUIRED(int64_t, ignore_index) = -100;
  REQUIRED(double, beta) = 0.5;
  REQUIRED(double, student_temperature) = 1.0;
  REQUIRED(double, teacher_temperature) = 1.0;
  REQUIRED(double, student_softcap) = 0.0;
  REQUIRED(double, teacher_softcap) = 0.0;
  REQUIRED(double, student_logit_scale) = 1.0;
  REQUIRED(double, teacher_logit_scale) = 1.0;
  REQUIRED(bool, log_probs) = false;
};

/// The soft part of each row, [N] acc, without weights of tokens and reduction, of a dense teacher, as a function that
/// PyTorch can differentiate again. Ignored rows are 0.
struct JsdSoft {
  FIELDS_OF(JsdSoft)
  REQUIRED(at::Tensor, student);
  REQUIRED(at::Tensor, teacher);  ///< [N, V] of one dtype
  ALL_OF(JsdSoftSettings, settings);
};

/// The gradients of student and teacher, where `needs_grad` says so, for one of the soft parts, [N] acc.
struct JsdSoftGradient {
  FIELDS_OF(JsdSoftGradient)
  REQUIRED(at::Tensor, student);
  REQUIRED(at::Tensor, teacher);
  REQUIRED(at::Tensor, upstream);
  REQUIRED(Flags<2>, needs_grad) {};
  ALL_OF(JsdSoftSettings, settings);
};

/// The tangent of the soft parts, [N] acc, for tangents of student and teacher, of their dtype.
struct JsdSoftTangent {
  FIELDS_OF(JsdSoftTangent)
  REQUIRED(at::Tensor, student);
  REQUIRED(at::Tensor, teacher);
  REQUIRED(OptionalTensor, student_tangent);
  REQUIRED(OptionalTensor, teacher_tangent);
  ALL_OF(JsdSoftSettings, settings);
};

/// The tangents of those gradients, for tangents of student, teacher and upstream gradient.
struct JsdSoftSecond {
  FIELDS_OF(JsdSoftSecond)
  REQUIRED(at::Tensor, student);
  REQUIRED(at::Tensor, teacher);
  REQUIRED(at::Tensor, upstream);
  REQUIRED(OptionalTensor, student_tangent);
  REQUIRED(OptionalTensor, teacher_tangent);
  REQUIRED(OptionalTensor, upstream_tangent);
  REQUIRED(Flags<2>, needs_grad) {};
  ALL_OF(JsdSoftSettings, settings);
};

// --- linear Jensen-Shannon divergence ----------------------------------------------------------------------------

/// A top-k teacher has no weight: its log-probabilities stand in for hidden states.
struct LinearJsdCall {
  FIELDS_OF(LinearJsdCall)
  OVERWRITTEN(at::Tensor, student_input);
  REQUIRED(at::Tensor, student_weight);
  REQUIRED(at::Tensor, teacher_input);
  OPTION(OptionalTensor, teacher_weight);
  OPTION(OptionalTensor, teacher_indices);
  LIST(option(&Self::options, "student_bias", &LinearJSDOptions::student_bias))
  LIST(option(&Self::options, "teacher_bias", &LinearJSDOptions::teacher_bias))
  LIST(divergence_options<Self, LinearJSDOptions>())
  LIST(option(&Self::options, "teacher_temperature", &LinearJSDOptions::teacher_temperature, &kPositive))
  LIST(option(&Self::options, "student_softcap", &LinearJSDOptions::student_softcap, &kPositive))
  LIST(option(&Self::options, "teacher_softcap", &LinearJSDOptions::teacher_softcap, &kPositive))
  LIST(option(&Self::options, "student_logit_scale", &LinearJSDOptions::student_logit_scale, &kFinite))
  LIST(option(&Self::options, "teacher_logit_scale", &LinearJSDOptions::teacher_logit_scale, &kFinite))
  LIST(option(&Self::options, "vocab_size", &LinearJSDOptions::vocab_size))
  LIST(option(&Self::options, "accumulate_dtype", &LinearJSDOptions::accumulate_dtype))
  LIST(option(&Self::options, "workspace_mib", &LinearJSDOptions::workspace_mib))
  LinearJSDOptions options;
  int64_t aux = 0;
  OPTION(OptionalTensor, tail_log_prob);
};

/// The student's head, and the teacher: hidden states [N, H] and their head, or a top-k teacher's log-probabilities
/// [N, K] acc.
struct JsdHeads {
  FIELDS_OF(JsdHeads)
  REQUIRED(at::Tensor, student_weight);
  REQUIRED(OptionalTensor, student_bias);
  REQUIRED(at::Tensor, teacher);
  REQUIRED(OptionalTensor, teacher_weight);
  REQUIRED(OptionalTensor, teacher_bias);
};

struct LinearJsdOptions {
  FIELDS_OF(LinearJsdOptions)
  REQUIRED(std::optional<int64_t>, vocab_size);  ///< only the first so many rows of the weights count; none: all
  REQUIRED(std::optional<at::ScalarType>, accumulate_dtype);
  REQUIRED(std::optional<int64_t>, workspace_mib);
};

/// Gradients as LinearCrossEntropyForward's.
struct LinearJsdForward {
  FIELDS_OF(LinearJsdForward)
  OVERWRITTEN(at::Tensor, student_input);
  ALL_OF(JsdHeads, heads);
  ALL_OF(JsdRows, rows);
  ALL_OF(JsdSettings, settings);
  ALL_OF(LinearJsdOptions, linear);
  REQUIRED(Flags<3>, needs_grad) {};
  ALL_OF(Shards, shards) {};
  OPTION(OptionalTensor, different) {};
};

struct LinearJsdBackward {
  FIELDS_OF(LinearJsdBackward)
  REQUIRED(at::Tensor, grad_loss);
  REQUIRED(at::Tensor, student_input);
  ALL_OF(JsdHeads, heads);
  ALL_OF_BACKWARD(JsdRows, rows);
  REQUIRED(at::Tensor, scales);
  ALL_OF_BACKWARD(JsdSettings, settings);
  ALL_OF(LinearJsdOptions, linear);
  REQUIRED(Flags<3>, needs_grad) {};
  ALL_OF(Shards, shards) {};
  OPTION(OptionalTensor, different) {};
};

/// As LinearCrossEntropySecond, of rows of a dense teacher: `upstream` is [2, N] acc, of the soft and the hard parts,
/// and so are the values' tangents. A hard part is there where `hard` says so, for a student_logit_scale of 1.
struct LinearJsdSecond {
  FIELDS_OF(LinearJsdSecond)
  REQUIRED(at::Tensor, student_input);
  ALL_OF(JsdHeads, heads);
  REQUIRED(OptionalTensor, input_tangent);
  REQUIRED(OptionalTensor, weight_tangent);
  REQUIRED(OptionalTensor, bias_tangent);
  REQUIRED(at::Tensor, upstream);
  ALL_OF(JsdSoftSettings, settings);
  REQUIRED(bool, hard) = false;
  ALL_OF(LinearJsdOptions, linear);
  REQUIRED(Flags<3>, needs_grad) {};
};

// --- flex attention ------------------------------------------------------------------------------------------------

/// A mod is a text of the score_mod language, empty for none, with the tensors and numbers that it declares: its
/// floats, and its integers and bools (0 or 1), each in the text's order. `kv_blocks` are a BlockMask's lists: none;
/// num_blocks and indices of the partial blocks; or these and the full blocks' as well. Views of what the caller has.
struct FlexMods {
  FIELDS_OF(FlexMods)
  REQUIRED(std::string_view, score_mod);
  REQUIRED(at::TensorList, score_mod_buffers);
  REQUIRED(at::ArrayRef<double>, score_mod_floats);
  REQUIRED(at::IntArrayRef, score_mod_ints);
  REQUIRED(std::string_view, mask_mod);
  REQUIRED(at::TensorList, mask_mod_buffers);
  REQUIRED(at::ArrayRef<double>, mask_mod_floats);
  REQUIRED(at::IntArrayRef, mask_mod_ints);
  REQUIRED(at::TensorList, kv_blocks);
  REQUIRED(at::IntArrayRef, block_size);
};

/// `inplace` lets the backward write over query, key and value.
struct FlexAttentionCall {
  FIELDS_OF(FlexAttentionCall)
  REQUIRED(at::Tensor, query);
  REQUIRED(at::Tensor, key);
  REQUIRED(at::Tensor, value);
  ALL_OF(FlexMods, mods);
  OPTION(std::optional<double>, scale);
  OPTION(bool, enable_gqa) = false;
  OPTION(bool, inplace) = false;
  OPTION(std::optional<bool>, deterministic);
  OPTION(int64_t, aux) = 0;
  OPTION(double, dropout_p) = 0.0;
  OPTION(bool, batch_invariant) = false;
};

/// What shapes the scores. `dropout_seed` is one int64 on the query's device, absent without dropout: from it and a
/// pair's place both directions know whether the pair is dropped.
struct FlexScoring {
  FIELDS_OF(FlexScoring)
  ALL_OF(FlexMods, mods);
  REQUIRED(double, scale) = 1.0;
  REQUIRED(double, dropout_p) = 0.0;
  REQUIRED(OptionalTensor, dropout_seed);
};

struct FlexForward {
  FIELDS_OF(FlexForward)
  REQUIRED(at::Tensor, query);
  REQUIRED(at::Tensor, key);
  REQUIRED(at::Tensor, value);
  ALL_OF(FlexScoring, scoring);
  REQUIRED(int64_t, aux) = 0;
};

/// `needs_grad`: of query, key, value, then of each of the score_mod's buffers; what is not wanted is empty.
struct FlexBackward {
  FIELDS_OF(FlexBackward)
  OVERWRITTEN(at::Tensor, query);
  OVERWRITTEN(at::Tensor, key);
  OVERWRITTEN(at::Tensor, value);
  REQUIRED(OptionalTensor, grad_out);
  REQUIRED(OptionalTensor, grad_lse);
  REQUIRED(OptionalTensor, grad_max_scores);
  REQUIRED(at::Tensor, out);
  REQUIRED(at::Tensor, lse);
  REQUIRED(at::Tensor, max_scores);
  REQUIRED(at::Tensor, max_ties);
  REQUIRED(at::Tensor, out_low);
  REQUIRED(at::Tensor, lse_low);  ///< what the forward returned
  ALL_OF(FlexScoring, scoring);
  REQUIRED(bool, deterministic) = false;
  REQUIRED(c10::List<bool>, needs_grad);
};

/// Forward mode: the forward's inputs with their tangents, none of which is zero. `with_tangent`: the indices of the
/// score_mod's buffers that have one, ascending; `buffer_tangents`: these. `aux`: kFlexLow or 0.
struct FlexTangents {
  FIELDS_OF(FlexTangents)
  REQUIRED(at::Tensor, query);
  REQUIRED(at::Tensor, key);
  REQUIRED(at::Tensor, value);
  REQUIRED(OptionalTensor, query_tangent);
  REQUIRED(OptionalTensor, key_tangent);
  REQUIRED(OptionalTensor, value_tangent);
  REQUIRED(at::IntArrayRef, with_tangent);
  REQUIRED(at::TensorList, buffer_tangents);
  ALL_OF(FlexScoring, scoring);
  REQUIRED(int64_t, aux) = 0;
};

/// Second derivatives on CUDA: what each pair gives to the tangents of the gradients of query, key and value, of
/// `head_count` heads of queries from `first_head` on, counted over all batches, whole groups of them, and `row_count`
/// queries from `first_row` on, a multiple of 128. `rows`: [B, H, M, 5] float32, of each row lse, what rounding
/// took from it, the sum of grad_out * out less grad_lse, and the tangents of lse and of that sum. `score_tangent`:
/// [head_count, row_count, columns] float32, what else the tangents of the scores have, of captured tensors. There is
/// no dropout.
struct FlexPairTangents {
  FIELDS_OF(FlexPairTangents)
  REQUIRED(at::Tensor, query);
  REQUIRED(at::Tensor, key);
  REQUIRED(at::Tensor, value);
  REQUIRED(at::Tensor, grad_out);
  REQUIRED(at::Tensor, query_tangent);
  REQUIRED(at::Tensor, key_tangent);
  REQUIRED(at::Tensor, value_tangent);
  REQUIRED(OptionalTensor, grad_out_tangent);
  REQUIRED(at::Tensor, rows);
  ALL_OF(FlexScoring, scoring);
  REQUIRED(int64_t, first_head) = 0;
  REQUIRED(int64_t, head_count) = 0;
  REQUIRED(int64_t, first_row) = 0;
  REQUIRED(int64_t, row_count) = 0;
  OPTION(OptionalTensor, score_tangent);
};

/// The in-place twin, which writes the first three over the inputs, and the others into `grad_buffers`.
struct FlexBackwardInto {
  FIELDS_OF(FlexBackwardInto)
  ALL_OF(FlexBackward, backward);
  OVERWRITTEN(at::TensorList, grad_buffers);
};

// --- what attention with a pair bias reads ------------------------------------------------------------------

/// The bias of scores from a pair representation: a norm over its channels, and their projection to heads,
/// [B, H, M, N]. The norm's result is rounded to the dtype.
struct PairProjection {
  FIELDS_OF(PairProjection)
  REQUIRED(at::Tensor, pair);                 ///< [B, M, N, c]
  REQUIRED(OptionalTensor, norm_weight);      ///< [c]
  REQUIRED(OptionalTensor, norm_bias);        ///< [c]
  REQUIRED(at::Tensor, projection_weight);    ///< [H, c]
  REQUIRED(OptionalTensor, projection_bias);  ///< [H]
  REQUIRED(double, eps) = 1e-5;
  REQUIRED(bool, centered) = true;  ///< layer norm; false: by the root mean square alone
};

/// The gradients of the five tensors, empty where not wanted.
struct PairProjectionBackward {
  FIELDS_OF(PairProjectionBackward)
  REQUIRED(at::Tensor, grad);
  ALL_OF(PairProjection, of) {};
  REQUIRED(Flags<5>, needs_grad) {};
};

#undef FIELDS_OF
#undef LIST
#undef REQUIRED
#undef OVERWRITTEN
#undef ADDED_TO
#undef FORWARD_ONLY
#undef OPTION
#undef ALL_OF
#undef ALL_OF_BACKWARD

}  // namespace fusegrad
