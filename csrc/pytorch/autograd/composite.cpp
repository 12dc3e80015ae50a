#include "pytorch/autograd/composite.h"

#include <torch/library.h>

#include "pytorch/autograd/composite_parts.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/ops/faults.h"

namespace fusegrad::composite {
namespace {

using at::Tensor;

struct Targets {
  const Tensor& target;
  const OptionalTensor &weight, &token_weight;
  const RowOptions& options;
  const Shards& shards;
  const OptionalTensor& different;
};

// Per-row values, [N] acc each: `loss` and `z_loss` make up the loss, both times the token weight. `z_term` is without.
struct Rows {
  Tensor loss, z_loss, z_term;
  Tensor divisor, kept;                      // what a row adds to those of the two where the reduction is 'mean'
  Tensor valid;                              // of class indices: whether the row is kept
  Tensor lse, entropy, log_prob, predicted;  // aux values, where asked for
};

// sum_c weight[c] * (lse - z[c]) / V
Tensor smoothing_of(const Tensor& z, const Tensor& lse, const OptionalTensor& weight) {
  return weight ? ((lse.unsqueeze(1) - z) * *weight).mean(1) : lse - z.mean(1);
}

// Whether the row kernels have the derivatives: by the logits alone.
bool kernels_have(const Tensor& logits, const Targets& t) {
  const auto is_constant = [](const Tensor& x) {
    return !is_transformed({&x}) && !(at::GradMode::is_enabled() && x.requires_grad());
  };
  if (t.weight && !is_constant(*t.weight)) return false;
  if (t.target.is_floating_point() && !is_constant(t.target)) return false;
  return has_row_kernels(logits);
}

Rows rows_by_kernels(const Tensor& logits, const Targets& t) {
  const auto& o = t.options;
  const auto acc = acc_type(logits.scalar_type());
  RowSettings settings{.target = t.target,
                       .weight = t.weight,
                       .ignore_index = o.ignore_index,
                       .label_smoothing = o.label_smoothing,
                       .softcap = o.softcap,
                       .aux = o.aux & (kAuxLse | kAuxEntropy | kAuxTokenLogProb)};
  Rows rows;
  std::optional<Labels> labels;
  if (t.target.is_floating_point()) {
    if (t.target.scalar_type() != logits.scalar_type()) settings.target = t.target.to(acc);
  } else {
    labels.emplace(t.target, o.ignore_index, logits.sym_size(1).guard_int(__FILE__, __LINE__));
    rows.valid = labels->valid;
  }
  const auto by = LabelsOfKernels(logits, labels ? OptionalTensor(t.target) : std::nullopt, labels, o.ignore_index);
  if (by.labels) settings.target = *by.labels;
  const auto values = by.checked(std::get<0>(dispatch::cross_entropy_rows({logits, settings})));
  rows.loss = values.select(0, kRowCrossEntropy);
  if ((o.aux & kAuxLse) != 0) rows.lse = values.select(0, kRowLse);
  if ((o.aux & kAuxEntropy) != 0) rows.entropy = values.select(0, kRowEntropy);
  if ((o.aux & kAuxTokenLogProb) != 0) rows.log_prob = values.select(0, kRowLogProb);
  if (o.z_loss != 0.0 || (o.aux & kAuxZLoss) != 0) {
    const auto lse = values.select(0, kRowLse);
    rows.z_term = lse * lse * o.z_loss;
    if (labels) rows.z_term = rows.z_term.masked_fill(rows.valid.logical_not(), 0);
  }
  if (labels) {
    rows.kept = rows.divisor = rows.valid.to(acc);
    if (t.weight) rows.divisor = t.weight->gather(0, labels->index).masked_fill(rows.valid.logical_not(), 0);
  } else {
    rows.kept = rows.divisor = at::ones_like(rows.loss.detach());
  }
  if ((o.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0) {
    rows.predicted = logits.detach().argmax(1);
    if (labels) rows.predicted = rows.predicted.masked_fill(rows.valid.logical_not(), -1);
  }
  return rows;
}

// For this process's part of the columns: sums over them are summed up over the processes. Each is one of distances
// from the row's largest value, which is exact for large offsets.
Rows rows_of_part(const Tensor& logits, const Targets& t) {
  const auto& o = t.options;
  const auto& shards = t.shards;
  const auto acc = acc_type(logits.scalar_type());
  const auto vocab = static_cast<double>(shards.vocab());
  Rows rows;
  auto x = logits.to(acc);
  std::optional<Labels> labels;
  if (!t.target.is_floating_point()) {
    labels.emplace(t.target, o.ignore_index, shards.vocab());
    rows.valid = labels->valid;
    if ((o.aux & kAuxLse) == 0) x = labels->without_ignored(x);
  }
  const auto z = with_softcap(x, o.softcap), largest = largest_of_rows(z, shards), away = z - largest;
  const auto finite = away.masked_fill(away.eq(-kInfinity), 0), e = away.exp();
  const OptionalTensor weight =
      t.weight ? OptionalTensor(t.weight->narrow(0, shards.start(), shards.size())) : std::nullopt;
  // [size] or [N, size]: what each column's cost is times, but for the target's.
  Tensor coefficients;
  if (!labels) coefficients = t.target.to(acc) * (1 - o.label_smoothing) + o.label_smoothing / vocab;
  if (labels && o.label_smoothing > 0) coefficients = at::full_like(away.detach(), o.label_smoothing / vocab);
  if (coefficients.defined() && weight) coefficients = coefficients * *weight;
  std::vector<Tensor> own{e.sum(1), (e * finite).sum(1)};
  if (labels) own.push_back(own_column(away, labels->index, shards));
  if (coefficients.defined()) {
    own.push_back(coefficients.sum(1));
    own.push_back((coefficients * away.masked_fill(coefficients.detach().eq(0), 0)).sum(1));
  }
  const auto sums = sum_of_parts(at::stack(own), shards).unbind(0);
  const auto log_sum = sums[0].log();
  rows.lse = largest.squeeze(1) + log_sum;
  rows.loss = at::zeros_like(log_sum.detach());
  auto count = at::ones_like(rows.loss);
  if (labels) {
    rows.log_prob = labels->of_rows(sums[2] - log_sum);
    if (t.weight) count = t.weight->gather(0, labels->index);
    rows.loss = rows.log_prob * (o.label_smoothing - 1) * count;
  }
  if (coefficients.defined()) rows.loss = rows.loss + sums[sums.size() - 2] * log_sum - sums.back();
  const auto where_kept = [&](const Tensor& value) {
    return labels ? value.masked_fill(rows.valid.logical_not(), 0) : value;
  };
  rows.loss = where_kept(unless_different(rows.loss, t.different));
  rows.divisor = where_kept(count);
  rows.kept = labels ? rows.valid.to(acc) : count;
  rows.z_term = where_kept(rows.lse * rows.lse * o.z_loss);
  rows.entropy = where_kept(log_sum - sums[1] / sums[0]);
  if ((o.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0) {
    const auto values = z._fw_primal(/*level=*/0).detach();
    auto best = at::full_like(rows.loss, -kInfinity), column = at::zeros_like(rows.loss);
    if (shards.size() != 0) std::tie(best, column) = values.max(1);
    const auto all = gather_parts(at::stack({best.to(at::kDouble), column.to(at::kDouble)}), shards);
    rows.predicted = first_largest(all.select(1, 0), all.select(1, 1), shards);
    if (labels) rows.predicted = rows.predicted.masked_fill(rows.valid.logical_not(), -1);
  }
  return rows;
}

Rows rows_of(const Tensor& logits, const Targets& t) {
  const auto& o = t.options;
  const auto weighted = [&](Rows rows) {
    if (o.z_loss != 0.0) rows.z_loss = rows.z_term;
    if (t.token_weight) {
      rows.loss = rows.loss * *t.token_weight;
      if (rows.z_loss.defined()) rows.z_loss = rows.z_loss * *t.token_weight;
    }
    return rows;
  };
  if (t.shards) return weighted(rows_of_part(logits, t));
  if (kernels_have(logits, t)) return weighted(rows_by_kernels(logits, t));
  const auto acc = acc_type(logits.scalar_type());
  Rows rows;
  const auto widened = [&](const Tensor& x) { return with_softcap(x.to(acc), o.softcap); };
  if ((o.aux & kAuxLse) != 0) rows.lse = logsumexp(widened(logits));
  const double smoothing = o.label_smoothing;
  Tensor z, lse;
  if (t.target.is_floating_point()) {
    z = widened(logits);
    lse = logsumexp(z);
    const auto target = t.target.to(acc);
    auto each = lse.unsqueeze(1) - z;
    // A class that has no probability costs nothing, whatever its logit.
    each = each.masked_fill(z.eq(-kInfinity).logical_and(target.eq(0)), 0);
    each = target * each;
    if (t.weight) each = each * *t.weight;
    rows.loss = each.sum(1) * (1 - smoothing);
    if (smoothing > 0) rows.loss = rows.loss + smoothing * smoothing_of(z, lse, t.weight);
    rows.kept = rows.divisor = at::ones_like(lse.detach());
  } else {
    const Labels labels(t.target, o.ignore_index, logits.sym_size(1).guard_int(__FILE__, __LINE__));
    rows.valid = labels.valid;
    z = widened(labels.without_ignored(logits));  // a softcap leaves 0 as it is
    // Where nothing else asks for lse, in the pass that has a kernel of its own.
    const bool alone = smoothing == 0 && o.z_loss == 0.0 && (o.aux & (kAuxZLoss | kAuxEntropy)) == 0;
    if (!alone) lse = logsumexp(z);
    const auto log_prob = alone ? labels.column(log_softmax(z)) : labels.column(z) - lse;
    rows.loss = log_prob * (smoothing - 1);
    auto count = at::ones_like(log_prob.detach());
    if (t.weight) {
      count = t.weight->gather(0, labels.index);
      rows.loss = rows.loss * count;
    }
    if (smoothing > 0) rows.loss = rows.loss + smoothing * smoothing_of(z, lse, t.weight);
    rows.loss = labels.of_rows(rows.loss);
    rows.divisor = count.masked_fill(labels.valid.logical_not(), 0);
    rows.kept = labels.valid.to(acc);
    if ((o.aux & kAuxTokenLogProb) != 0) rows.log_prob = labels.of_rows(log_prob);
  }
  const auto where_kept = [&](const Tensor& x) {
    return rows.valid.defined() ? x.masked_fill(rows.valid.logical_not(), 0) : x;
  };
  if (o.z_loss != 0.0 || (o.aux & kAuxZLoss) != 0) rows.z_term = where_kept(lse * lse * o.z_loss);
  if ((o.aux & kAuxEntropy) != 0) {
    const auto log_p = (z - lse.unsqueeze(1)).masked_fill(z.eq(-kInfinity), 0);
    rows.entropy = where_kept(-((z - lse.unsqueeze(1)).exp() * log_p).sum(1));
  }
  if ((o.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0) {
    rows.predicted = z.detach().argmax(1);
    if (rows.valid.defined()) rows.predicted = rows.predicted.masked_fill(rows.valid.logical_not(), -1);
  }
  return weighted(rows);
}

// Of StatRows' order; what is only a kernel's is 0.
Tensor stats_of(const Rows& rows, const Targets& t) {
  const StatRows place(dense_target(t.target, t.weight.has_value(), t.options.label_smoothing), t.options.aux);
  std::vector<Tensor> stats(static_cast<size_t>(place.count), at::zeros_like(rows.loss.detach()));
  const auto put = [&](int64_t at, const Tensor& value) {
    if (at >= 0 && value.defined()) stats[static_cast<size_t>(at)] = value;
  };
  put(place.z_loss, rows.z_term);
  put(place.entropy, rows.entropy);
  put(place.token_log_prob, rows.log_prob);
  return at::stack(stats);
}

RowOutputs outputs_of(const Rows& rows, const Targets& t, const Tensor& loss) {
  // Where it was not asked for nobody reads lse.
  return {.loss = loss,
          .lse = rows.lse.defined() ? rows.lse : rows.loss,
          .stats = stats_of(rows, t),
          .predicted_tokens = rows.predicted,
          .scales = {}};
}

// What a backward got gradients of: lse is an output, asked for or not.
template <class Backward>
RowOptions options_of(const Backward& call) {
  auto options = call.options;
  if (call.grad_lse) options.aux |= kAuxLse;
  return options;
}

// Gradients of `inputs` from those of the rows' values that a backward got and that are defined.
template <class Backward>
std::vector<Tensor> gradients_of(const Rows& rows, const Targets& t, const Backward& call,
                                 const std::vector<Tensor>& inputs) {
  std::vector<Tensor> outputs, upstream;
  if (call.grad_loss) {
    const auto scaled = [&](const Tensor& x, int64_t i) {
      return call.scales.numel() == 0 ? x : x * scale_of(call.scales, i);
    };
    auto loss = scaled(rows.loss, 0);
    if (rows.z_loss.defined()) loss = loss + scaled(rows.z_loss, 1);
    outputs.push_back(call.grad_loss->dim() == 0 ? loss.sum() : loss);
    upstream.push_back(*call.grad_loss);
  }
  if (call.grad_lse) {
    outputs.push_back(rows.lse);
    upstream.push_back(*call.grad_lse);
  }
  if (call.grad_stats) {
    outputs.push_back(stats_of(rows, t));
    upstream.push_back(*call.grad_stats);
  }
  return differentiate(outputs, upstream, inputs);
}

template <class Call>
Tensor logits_of(const Call& call) {
  const auto input = call.shards ? for_own_part(call.input, call.shards) : call.input;
  auto logits = linear_logits(input, call.linear_weight, call.linear_bias);
  if (call.linear.logit_scale != 1.0 || call.row_scale)
    logits = logits.to(acc_type(logits.scalar_type())) * call.linear.logit_scale;
  if (!call.row_scale) return logits;
  const auto scale = call.shards ? for_own_part(*call.row_scale, call.shards) : *call.row_scale;
  return logits * scale.unsqueeze(1);
}

// The rows' values that these options make, in the order of the op's.
template <class Visit>
void each_value(Rows& rows, const Targets& t, Visit&& visit) {
  const auto& o = t.options;
  const auto asked = [&](int64_t bit) { return (o.aux & bit) != 0; };
  visit(rows.loss);
  visit(rows.divisor);
  visit(rows.kept);
  if (o.z_loss != 0.0) visit(rows.z_loss);
  if (o.z_loss != 0.0 || asked(kAuxZLoss)) visit(rows.z_term);
  if (asked(kAuxLse)) visit(rows.lse);
  if (asked(kAuxEntropy)) visit(rows.entropy);
  if (asked(kAuxTokenLogProb) && !t.target.is_floating_point()) visit(rows.log_prob);
}

using LinearRows = std::tuple<Tensor, Tensor>;

LinearRows linear_cross_entropy_rows(const LinearCrossEntropyForward& call) {
  const Targets t{call.target, call.weight, call.token_weight, call.options, call.shards, call.different};
  auto rows = rows_of(logits_of(call), t);
  std::vector<Tensor> values;
  each_value(rows, t, [&](const Tensor& value) { values.push_back(value); });
  // float64 holds them all, and takes part in a transform as the values do.
  const auto predicted =
      rows.predicted.defined() ? rows.predicted.to(at::kDouble) : at::zeros_like(rows.loss.detach()).to(at::kDouble);
  return {at::stack(values), predicted};
}

Rows linear_rows(const LinearCrossEntropyForward& call) {
  static const Op<LinearCrossEntropyForward, LinearRows> chunks("fusegrad::linear_cross_entropy_row_chunks");
  // Chunks of a part would have collectives of their own.
  const auto [values, predicted] = call.shards ? linear_cross_entropy_rows(call)
                                               : in_chunks(chunks, &linear_cross_entropy_rows, call,
                                                           {&call.input, &call.linear_weight, &call.target});
  const auto each = values.unbind(0);
  Rows rows;
  auto next = each.begin();
  each_value(rows, {call.target, call.weight, call.token_weight, call.options, call.shards, call.different},
             [&](Tensor& value) { value = *next++; });
  if ((call.options.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0) rows.predicted = predicted.to(at::kLong);
  return rows;
}

RowOutputs reduced(const Rows& rows, const Targets& t, const OptionalTensor& normalizer) {
  const auto& o = t.options;
  if (o.reduction == at::Reduction::None)
    return outputs_of(rows, t, rows.z_loss.defined() ? rows.loss + rows.z_loss : rows.loss);
  auto loss = rows.loss.sum();
  const bool mean = o.reduction == at::Reduction::Mean;
  if (mean) loss = loss / (normalizer ? *normalizer : rows.divisor.sum());
  if (rows.z_loss.defined()) {
    const auto z_loss = rows.z_loss.sum();
    loss = loss + (mean ? z_loss / (normalizer ? *normalizer : rows.kept.sum()) : z_loss);
  }
  return outputs_of(rows, t, loss);
}

void check_targets(const char* op, const Tensor& target, const c10::SymInt& vocab, int64_t ignore_index) {
  if (is_readable(target)) check_target_range(op, target, vocab.guard_int(__FILE__, __LINE__), ignore_index);
}

}  // namespace

RowOutputs cross_entropy(const char* op, const CrossEntropyForward& call) {
  const auto vocab = call.shards ? c10::SymInt(call.shards.vocab()) : call.logits.sym_size(1);
  check_targets(op, call.target, vocab, call.options.ignore_index);
  const Targets t{call.target, call.weight, call.token_weight, call.options, call.shards, call.different};
  return reduced(rows_of(call.logits, t), t, call.normalizer);
}

RowOutputs linear_cross_entropy(const char* op, const LinearCrossEntropyForward& call) {
  const auto vocab = call.shards ? c10::SymInt(call.shards.vocab()) : call.linear_weight.sym_size(0);
  check_targets(op, call.target, vocab, call.options.ignore_index);
  return reduced(linear_rows(call),
                 {call.target, call.weight, call.token_weight, call.options, call.shards, call.different},
                 call.normalizer);
}

std::array<Tensor, 2> cross_entropy_gradients(CrossEntropyBackward call, std::array<bool, 2> wanted) {
  const at::AutoGradMode enabled(true);
  const auto inputs = aliases({{&call.logits, wanted[0]}, {&call.target, wanted[1]}});
  const auto options = options_of(call);
  const Targets t{call.target, call.weight, call.token_weight, options, call.shards, call.different};
  const auto found = gradients_of(rows_of(call.logits, t), t, call, inputs);
  return {found[0], found[1]};
}

std::array<Tensor, 4> linear_cross_entropy_gradients(LinearCrossEntropyBackward call, std::array<bool, 4> wanted) {
  const at::AutoGradMode enabled(true);
  const auto inputs = aliases({{&call.input, wanted[0]},
                               {&call.linear_weight, wanted[1]},
                               input_of(call.linear_bias, wanted[2]),
                               input_of(call.row_scale, wanted[3])});
  const auto options = options_of(call);
  const Targets t{call.target, call.weight, call.token_weight, options, call.shards, call.different};
  const auto rows = linear_rows({.input = call.input,
                                 .linear_weight = call.linear_weight,
                                 .target = call.target,
                                 .linear_bias = call.linear_bias,
                                 .weight = call.weight,
                                 .token_weight = call.token_weight,
                                 .normalizer = {},
                                 .options = options,
                                 .linear = call.linear,
                                 .row_scale = call.row_scale,
                                 .shards = call.shards,
                                 .different = call.different});
  const auto found = gradients_of(rows, t, call, inputs);
  return {found[0], found[1], found[2], found[3]};
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy_rows", named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_rows>()>());
}
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  m.impl("linear_cross_entropy_rows", named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_rows>()>());
}

}  // namespace fusegrad::composite
