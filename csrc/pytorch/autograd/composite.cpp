#include "pytorch/autograd/composite.h"

#include "pytorch/autograd/composite_parts.h"

namespace fusegrad::composite {
namespace {

using at::Tensor;

struct Targets {
  const Tensor& target;
  const OptionalTensor &weight, &token_weight;
  const RowOptions& options;
};

// Per-row values, [N] acc each: `loss` and `z_loss` make up the loss, both times the token weight. `z_term` is without.
struct Rows {
  Tensor loss, z_loss, z_term;
  Tensor divisor, kept;                      // 0-d: of the two where the reduction is 'mean'
  Tensor valid;                              // of class indices: whether the row is kept
  Tensor lse, entropy, log_prob, predicted;  // aux values, where asked for
};

// sum_c weight[c] * (lse - z[c]) / V
Tensor smoothing_of(const Tensor& z, const Tensor& lse, const OptionalTensor& weight) {
  return weight ? ((lse.unsqueeze(1) - z) * *weight).mean(1) : lse - z.mean(1);
}

Rows rows_of(const Tensor& logits, const Targets& t) {
  const auto& o = t.options;
  const auto acc = acc_type(logits.scalar_type());
  Rows rows;
  const auto widened = [&](const Tensor& x) { return with_softcap(x.to(acc), o.softcap); };
  if ((o.aux & kAuxLse) != 0) rows.lse = widened(logits).logsumexp(1);
  const double smoothing = o.label_smoothing;
  Tensor z, lse;
  if (t.target.is_floating_point()) {
    z = widened(logits);
    lse = z.logsumexp(1);
    const auto target = t.target.to(acc);
    auto each = lse.unsqueeze(1) - z;
    // A class that has no probability costs nothing, whatever its logit.
    each = each.masked_fill(z.eq(-kInfinity).logical_and(target.eq(0)), 0);
    each = target * each;
    if (t.weight) each = each * *t.weight;
    rows.loss = each.sum(1) * (1 - smoothing);
    if (smoothing > 0) rows.loss = rows.loss + smoothing * smoothing_of(z, lse, t.weight);
    rows.kept = rows.divisor = at::ones_like(lse.detach()).sum();
  } else {
    const Labels labels(t.target, o.ignore_index, logits.sym_size(1).guard_int(__FILE__, __LINE__));
    rows.valid = labels.valid;
    z = widened(labels.without_ignored(logits));  // a softcap leaves 0 as it is
    // Where nothing else asks for lse, in the pass that has a kernel of its own.
    const bool alone = smoothing == 0 && o.z_loss == 0.0 && (o.aux & (kAuxZLoss | kAuxEntropy)) == 0;
    if (!alone) lse = z.logsumexp(1);
    const auto log_prob = alone ? labels.column(z.log_softmax(1)) : labels.column(z) - lse;
    rows.loss = log_prob * (smoothing - 1);
    auto count = at::ones_like(log_prob.detach());
    if (t.weight) {
      count = t.weight->gather(0, labels.index);
      rows.loss = rows.loss * count;
    }
    if (smoothing > 0) rows.loss = rows.loss + smoothing * smoothing_of(z, lse, t.weight);
    rows.loss = labels.of_rows(rows.loss);
    rows.divisor = count.masked_fill(labels.valid.logical_not(), 0).sum();
    rows.kept = labels.valid.to(acc).sum();
    if ((o.aux & kAuxTokenLogProb) != 0) rows.log_prob = labels.of_rows(log_prob);
  }
  const auto where_kept = [&](const Tensor& x) {
    return rows.valid.defined() ? x.masked_fill(rows.valid.logical_not(), 0) : x;
  };
  if (o.z_loss != 0.0 || (o.aux & kAuxZLoss) != 0) rows.z_term = where_kept(lse * lse * o.z_loss);
  if (o.z_loss != 0.0) rows.z_loss = rows.z_term;
  if ((o.aux & kAuxEntropy) != 0) {
    const auto log_p = (z - lse.unsqueeze(1)).masked_fill(z.eq(-kInfinity), 0);
    rows.entropy = where_kept(-((z - lse.unsqueeze(1)).exp() * log_p).sum(1));
  }
  if ((o.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0) {
    rows.predicted = z.detach().argmax(1);
    if (rows.valid.defined()) rows.predicted = rows.predicted.masked_fill(rows.valid.logical_not(), -1);
  }
  if (t.token_weight) {
    rows.loss = rows.loss * *t.token_weight;
    if (rows.z_loss.defined()) rows.z_loss = rows.z_loss * *t.token_weight;
  }
  return rows;
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

// Of what a backward got gradients of, as functions of the logits: the gradients of `inputs`, of those that are
// defined.
template <class Backward>
std::vector<Tensor> gradients_of(const Tensor& logits, const Backward& call, const std::vector<Tensor>& inputs) {
  const Targets t{call.target, call.weight, call.token_weight, call.options};
  const auto rows = rows_of(logits, t);
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
    const auto acc = rows.loss.scalar_type();
    outputs.push_back(rows.lse.defined() ? rows.lse : with_softcap(logits.to(acc), call.options.softcap).logsumexp(1));
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
  auto logits = linear_logits(call.input, call.linear_weight, call.linear_bias);
  if (call.linear.logit_scale != 1.0 || call.row_scale)
    logits = logits.to(acc_type(logits.scalar_type())) * call.linear.logit_scale;
  return call.row_scale ? logits * call.row_scale->unsqueeze(1) : logits;
}

}  // namespace

RowOutputs cross_entropy(const char* op, const CrossEntropyForward& call) {
  const auto& o = call.options;
  if (is_readable(call.target))
    check_target_range(op, call.target, call.logits.sym_size(1).guard_int(__FILE__, __LINE__), o.ignore_index);
  const Targets t{call.target, call.weight, call.token_weight, o};
  const auto rows = rows_of(call.logits, t);
  if (o.reduction == at::Reduction::None)
    return outputs_of(rows, t, rows.z_loss.defined() ? rows.loss + rows.z_loss : rows.loss);
  auto loss = rows.loss.sum();
  const bool mean = o.reduction == at::Reduction::Mean;
  if (mean) loss = loss / (call.normalizer ? *call.normalizer : rows.divisor);
  if (rows.z_loss.defined()) {
    const auto z_loss = rows.z_loss.sum();
    loss = loss + (mean ? z_loss / (call.normalizer ? *call.normalizer : rows.kept) : z_loss);
  }
  return outputs_of(rows, t, loss);
}

RowOutputs linear_cross_entropy(const char* op, const LinearCrossEntropyForward& call) {
  const auto logits = logits_of(call);
  auto options = call.options;
  options.aux &= ~kScaleGradient;
  return cross_entropy(op, {logits, call.target, call.weight, call.token_weight, call.normalizer, options});
}

std::array<Tensor, 2> cross_entropy_gradients(CrossEntropyBackward call, std::array<bool, 2> wanted) {
  const at::AutoGradMode enabled(true);
  const auto inputs = aliases({{&call.logits, wanted[0]}, {&call.target, wanted[1]}});
  const auto found = gradients_of(call.logits, call, inputs);
  return {found[0], found[1]};
}

std::array<Tensor, 4> linear_cross_entropy_gradients(LinearCrossEntropyBackward call, std::array<bool, 4> wanted) {
  const at::AutoGradMode enabled(true);
  const auto inputs = aliases({{&call.input, wanted[0]},
                               {&call.linear_weight, wanted[1]},
                               input_of(call.linear_bias, wanted[2]),
                               input_of(call.row_scale, wanted[3])});
  const auto logits = logits_of(call);
  const auto found = gradients_of(logits, call, inputs);
  return {found[0], found[1], found[2], found[3]};
}

}  // namespace fusegrad::composite
