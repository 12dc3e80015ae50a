// Rows of a vocabulary that processes share: each reads its part of the logits, the processes tell each other a few
// numbers a row in one collective, and then each has what a forward over whole rows leaves behind.
#include <limits>

#include "pytorch/rows/collectives.h"
#include "pytorch/rows/job.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Tensor dead_rows(const Tensor& logits, const Tensor& lse) {
  auto dead = lse.eq(-kInfinity);
  if (logits.is_cpu() && lse.isnan().any().item<bool>()) {
    dead = dead.logical_or_(lse.isnan().logical_and_(logits.amax(1).eq(-kInfinity)));
  }
  return dead;
}

void RowJob::set_shards(const Shards& shards, const std::optional<Tensor>& different) {
  shards_ = shards;
  different_ = different;
  if (!shards) return;
  const bool probabilities = target_.is_floating_point();
  soft_ = probabilities || options_.label_smoothing > 0;
  if (probabilities) {
    kept_ = at::ones({rows_}, acc_.dtype(at::kBool));
    owned_ = at::zeros({shards.world(), rows_}, acc_.dtype(at::kBool));
    at_index_ = at::zeros({rows_}, acc_);
    local_ = target_;
  } else {
    kept_ = target_.ne(options_.ignore_index);
    owned_ = owned_by(target_, shards).logical_and_(kept_);
    // -1 stands for ignored rows; those of other parts take any column, whose values are not used.
    local_ = columns_of(target_, shards, 0).masked_fill_(kept_.logical_not(), -1).to(at::kLong);
    at_index_ = at::full({rows_}, 1 - options_.label_smoothing, acc_);
    if (weight_ && vocab_ > 0) {
      at_index_.mul_(weight_->index_select(0, target_.masked_fill(owned_.any(0).logical_not_(), 0)));
    }
  }
  if (soft_ && weight_) part_weight_ = weight_->narrow(0, shards.start(), shards.size());
}

// [k, n] of this part's logits: lse in two numbers; that less the target's logit; with soft targets T = sum a (lse - z)
// and M = sum a; the entropy and the variance of z where they are needed; the largest logit and its column for
// predictions.
Tensor RowJob::part_statistics(const Tensor& logits, int64_t first) const {
  const int64_t count = logits.size(0), size = logits.size(1);
  const bool variance = stat_rows_.variance >= 0, moments = stat_rows_.entropy >= 0;
  const bool predict = out_.predicted_tokens.numel() != 0;
  const int64_t rows = 3 + (soft_ ? 2 : 0) + (moments ? 1 : 0) + (variance ? 1 : 0) + (predict ? 2 : 0);
  const auto values = at::zeros({rows, count}, acc_);
  if (size == 0) {
    values[0].fill_(-kInfinity);
    if (predict) values[rows - 2].fill_(-kInfinity);
    return values;
  }
  const bool probabilities = target_.is_floating_point();
  const double share = options_.label_smoothing * static_cast<double>(size) / static_cast<double>(vocab_);
  const double kept = 1 - options_.label_smoothing + share;
  const auto local = local_.narrow(0, first, count);
  const int64_t next = soft_ ? 5 : 3;
  RowForward p;
  p.rows = count;
  p.cols = size;
  p.logits = logits.const_data_ptr();
  p.logits_stride = logits.stride(0);
  auto& t = p.targets;
  if (probabilities) {
    t.probability = local.const_data_ptr();
    t.probability_is_acc = local.scalar_type() == acc_.dtype();
    t.probability_stride = local.stride(0);
  } else {
    t.index = local.const_data_ptr();
  }
  t.class_weight = pointer_at(part_weight_, 0);
  t.ignore_index = -1;
  // Smoothing alone, for indices: its loss is the mean of w (lse - z), the target's part is token_log_prob.
  t.smoothing = !soft_ ? 0.0 : probabilities ? share / kept : 1.0;
  t.dense = dense_;
  p.transform = {logit_scale_, options_.softcap};
  p.row_scale = pointer_at(row_scale_, first);
  p.lse_of_ignored = (options_.aux & kAuxLse) != 0;
  p.lse = values[0].data_ptr();
  p.lse_low = values[1].data_ptr();
  p.loss = values[soft_ ? 3 : 2].data_ptr();
  if (soft_ && dense_) p.mass = values[4].data_ptr();
  if (soft_ && !probabilities) p.token_log_prob = values[2].data_ptr();
  Tensor unused, predicted;
  if (moments) p.entropy = values[next].data_ptr();
  if (variance) {
    unused = at::empty({2, count}, acc_);
    p.mean = unused[0].data_ptr();
    p.slope = unused[1].data_ptr();
    p.variance = values[next + 1].data_ptr();
  }
  if (predict) {
    predicted = at::empty({count}, acc_.dtype(at::kLong));
    p.predicted = predicted.data_ptr();
  }
  device_.kernels->forward(p, to_dtype(dtype_), device_.stream);

  if (soft_ && probabilities) {
    values.narrow(0, 3, 2).mul_(kept);
  } else if (soft_) {
    values[2].neg_();
    values[3].mul_(share);
    dense_ ? values[4].mul_(share) : values[4].fill_(share);
  }
  // For ignored rows the kernel says an entropy of 0.
  if (variance && !probabilities) {
    values[next].copy_(at::where(local.lt(0), values[0] - unused[0], values[next]));
  }
  if (predict) {
    values[rows - 2].copy_(logits_at(logits, predicted, first));
    values[rows - 1].copy_(predicted);
  }
  // A part whose logits are all -inf gives nothing.
  const auto dead = dead_rows(logits, values[0]);
  values[0].masked_fill_(dead, -kInfinity);
  for (int64_t row = 1; row < next + (moments ? 1 : 0) + (variance ? 1 : 0); ++row) {
    if (!soft_ || row != 4) values[row].masked_fill_(dead, 0);  // T of nothing is 0, M is not
  }
  return values;
}

// Rows' logits at a column, -1 being any, before the softcap.
Tensor RowJob::logits_at(const Tensor& logits, const Tensor& column, int64_t first) const {
  const auto at = logits.gather(1, column.clamp_min(0).unsqueeze(1)).squeeze(1).to(acc_.dtype()) * logit_scale_;
  return row_scale_ ? at * row_scale_->narrow(0, first, column.size(0)) : at;
}

// [processes, k, n] of all parts, into the outputs of rows [first, first + n).
void RowJob::combine(const Tensor& parts, int64_t first) {
  const int64_t count = parts.size(2);
  const auto wide = parts.to(at::kDouble);
  const auto of = [&](int64_t row) { return wide.select(1, row); };
  const auto rows = [&](const Tensor& t) { return t.narrow(t.dim() - 1, first, count); };
  const auto put = [&](int64_t row, const Tensor& value) {
    if (row >= 0) out_.stats.select(0, row).narrow(0, first, count).copy_(value);
  };
  const auto kept = rows(kept_), owned = rows(owned_), at_index = rows(at_index_).to(at::kDouble);
  const auto nothing = at::zeros({}, wide.options());
  const auto times = [&](const Tensor& factor, const Tensor& value) {  // 0 * inf = 0
    return at::where(factor.eq(0), nothing, factor * value);
  };
  const auto lse = of(0), low = of(1), largest = lse.amax(0);
  auto log_sum = ((lse - largest) + low).exp().sum(0).log();
  if (different_) log_sum = log_sum.masked_fill(*different_, std::numeric_limits<double>::quiet_NaN());
  const auto total = (largest + log_sum).to(acc_.dtype());
  rows(out_.lse).copy_(total);
  put(stat_rows_.lse_low, (largest - total.to(at::kDouble)) + log_sum);
  const auto above = (largest - lse) + log_sum - low;  // how far lse of the row is above that of each part
  // lse - z of the target, in the part that has it. An index outside [0, V) is in none.
  const auto missing = at::where(owned, of(2) + above, nothing).sum(0);
  auto cost = times(at_index, missing), mass = at_index;
  if (soft_) {
    cost = cost + (of(3) + times(of(4), above)).sum(0);
    mass = mass + of(4).sum(0);
  }
  if (!target_.is_floating_point()) {
    cost = cost.masked_fill(owned.any(0).logical_not_(), std::numeric_limits<double>::quiet_NaN());
  }
  put(stat_rows_.mass, mass);
  const auto scales = out_.scales.numel() == 0 || scales_come_last_ ? Tensor() : out_.scales.to(at::kDouble);
  auto loss = scales.defined() ? scales[0] * cost : cost;
  if (options_.z_loss != 0) {
    const auto penalty = options_.z_loss * total.to(at::kDouble).square();
    loss = loss + (scales.defined() ? scales[1] * penalty : penalty);
  }
  if (stat_rows_.z_loss >= 0) {
    put(stat_rows_.z_loss, (options_.z_loss * total.square()).masked_fill(kept.logical_not(), 0));
  }
  if (token_weight_) loss = loss * rows(*token_weight_);
  const auto counts = different_ ? kept.logical_or(*different_) : kept;
  rows(row_loss_).copy_(at::where(counts, loss, nothing));
  put(stat_rows_.token_log_prob, at::where(kept, -missing, nothing));
  if (stat_rows_.entropy >= 0) {
    const int64_t at = soft_ ? 5 : 3;
    const auto shares = (-above).exp();
    const auto entropy = times(shares, of(at) + above).sum(0), exact = at::where(kept, entropy, nothing);
    put(stat_rows_.entropy, exact);
    put(stat_rows_.entropy_low, exact - exact.to(acc_.dtype()).to(at::kDouble));
    if (stat_rows_.mean >= 0) {
      // How far the mean of z is in each part from that of the row: lse - H of both.
      const auto away = entropy - of(at) - above;
      const auto spread = times(shares, of(at + 1) + away.square()).sum(0);
      put(stat_rows_.variance, at::where(kept, spread, nothing));
      put(stat_rows_.mean, largest + log_sum - entropy);
      put(stat_rows_.slope, at::where(kept, cost - times(mass, entropy), nothing));
    }
  }
  if (out_.predicted_tokens.numel() != 0) {
    const auto index = first_largest(of(wide.size(1) - 2), of(wide.size(1) - 1), shards_);
    rows(out_.predicted_tokens).copy_(index.masked_fill(kept.logical_not(), -1));
  }
}

// The states of this process's segments of the rows, and the outputs from those of all.
void RowJob::forward_by_segments(const Tensor& logits, int64_t first) {
  const auto& kernels = *device_.kernels;
  const auto states = at::empty({nodes_.most_segments(), logits.size(0), kernels.row_states}, acc_);
  RowPart part;
  describe(part, logits, first);
  part.vocab = vocab_;
  part.col_offset = shards_ ? shards_.start() : 0;
  part.segment = nodes_.segment;
  part.segments = nodes_.mine().segments;
  part.states = states.data_ptr();
  if (part.segments > 0) kernels.part(part, to_dtype(dtype_), device_.stream);
  if (different_) states.masked_fill_(*different_, std::numeric_limits<double>::quiet_NaN());
  const auto all = shards_ ? segments_of_all(gather_parts(states, shards_), nodes_) : states;
  RowWhole whole;
  describe(whole, logits, first);
  whole.vocab = vocab_;
  whole.states = all.const_data_ptr();
  kernels.whole(whole, to_dtype(dtype_), device_.stream);
}

}  // namespace fusegrad
