// Divergences of rows over a vocabulary that processes share; formulas in docs/design/divergences.md. A divergence is
// that of log-probabilities, whose normaliser all processes know after one collective; a second one sums the divergence
// and what the gradients by logits take off. A top-k teacher needs the first one only: its K columns and the tail are
// in every process then.
#include <limits>

#include "pytorch/rows/collectives.h"
#include "pytorch/rows/jsd_job.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr double kLeast = -std::numeric_limits<double>::infinity();

// One number of a row in two, whose sum is exact for large offsets.
struct TwoNumbers {
  Tensor large, rest;
};

// lse of each row.
TwoNumbers log_sum(const Tensor& z) {
  if (z.size(1) == 0) return {at::full({z.size(0)}, kLeast, z.options()), at::zeros({z.size(0)}, z.options())};
  const RowOptions options{.ignore_index = -1, .reduction = at::Reduction::None};
  const auto any_column = at::zeros({z.size(0)}, z.options().dtype(at::kLong));
  const auto out = dispatch::cross_entropy_forward(
      {.logits = z, .target = any_column, .weight = {}, .token_weight = {}, .normalizer = {}, .options = options},
      /*inplace=*/false);
  const auto nothing = dead_rows(z, out.lse);
  return {out.lse.masked_fill(nothing, kLeast), out.stats[0].masked_fill(nothing, 0)};
}

// lse of whole rows from those of all parts, [processes, n] float64: the largest, and what lse is above it.
TwoNumbers combined(const Tensor& large, const Tensor& rest) {
  const auto top = large.amax(0);
  return {top, ((large - top) + rest).exp().sum(0).log()};
}

// s - lse, in two steps: the first is exact where it matters.
Tensor less(const Tensor& s, const TwoNumbers& of) {
  const auto column = [&](const Tensor& t) { return t.to(s.scalar_type()).unsqueeze(1); };
  return (s - column(of.large)).sub_(column(of.rest));
}

void add(std::vector<Tensor>& values, const TwoNumbers& two) {
  values.push_back(two.large);
  values.push_back(two.rest);
}

Tensor transformed(const Tensor& x, double scale, double softcap, at::ScalarType acc) {
  auto y = x.to(acc);
  if (scale != 1) y = y * scale;
  return softcap == 0 ? y : softcap * (y / softcap).tanh();
}

// From the gradient by transformed logits y to that by x.
Tensor by_input(const Tensor& gradient, const Tensor& y, double scale, double softcap) {
  if (softcap != 0) gradient.mul_(1 - (y / softcap).square());
  if (scale != 1) gradient.mul_(scale);
  return gradient;
}

}  // namespace

void JsdJob::set_shards(const char* op, const Shards& shards, const OptionalTensor& different) {
  op_ = op;
  shards_ = shards;
  different_ = different;
  if (!shards) return;
  kept_ = tensors_.labels ? tensors_.labels->ne(settings_.ignore_index) : at::ones({rows_}, acc_.dtype(at::kBool));
}

// Sums over these columns, and the gradients by the log-probabilities.
JsdJob::Soft JsdJob::divergence(const Tensor& log_q, const Tensor& log_p, std::array<bool, 2> wanted) const {
  const JsdSettings settings{.beta = settings_.beta, .log_probs = true, .reduction = at::Reduction::None};
  JsdJob job({}, settings, log_q.size(0), log_q.size(1), log_q.scalar_type(), log_q, /*partial=*/true);
  job.begin_forward(/*defer=*/false);
  Soft made;
  if (wanted[0]) made.by_student = at::empty_like(log_q);
  if (wanted[1]) made.by_teacher = at::empty_like(log_p);
  job.run(log_q, log_p, 0, made.by_student, made.by_teacher);
  made.loss = job.finish_forward().loss;
  return made;
}

JsdJob::Soft JsdJob::dense(const Tensor& s, const Tensor& t, const Tensor& parts, int64_t first,
                           std::array<bool, 2> wanted) const {
  const bool log_probs = settings_.log_probs;
  const auto of = [&](int64_t row) { return parts.select(1, row); };
  const auto log_q = (log_probs ? s : less(s, combined(of(0), of(1)))).contiguous();
  const auto log_p = (log_probs ? t : less(t, combined(of(2), of(3)))).contiguous();
  auto made = divergence(log_q, log_p, wanted);
  std::vector<Tensor> sums{made.loss};
  if (log_probs) {
    sums.push_back(s.exp().sum(1));
    sums.push_back(t.exp().sum(1));
  } else {
    if (wanted[0]) sums.push_back(made.by_student.sum(1));
    if (wanted[1]) sums.push_back(made.by_teacher.sum(1));
  }
  const auto totals = gather_parts(at::stack(sums), shards_).to(at::kDouble).sum(0);
  made.loss = totals[0];
  if (log_probs) {
    check_log_prob_sums(op_, "student", totals[1], tensors_, settings_, vocab_, first);
    check_log_prob_sums(op_, "teacher", totals[2], tensors_, settings_, vocab_, first);
    return made;
  }
  // log_q = z - lse: each gradient by z has the sum of those by log_q taken off, times q.
  int64_t next = 1;
  const auto take_off = [&](const Tensor& gradient, Tensor log_prob) {
    gradient.addcmul_(log_prob.exp_(), totals[next++].to(gradient.scalar_type()).unsqueeze(1), -1);
  };
  if (wanted[0]) take_off(made.by_student, log_q);
  if (wanted[1]) take_off(made.by_teacher, log_p);
  return made;
}

// `others` [n, columns + 1]: s without the columns that the teacher has; `column`: where those stand there, behind the
// last for those of other processes. `teacher`: its log-probabilities [n, K].
JsdJob::Soft JsdJob::over_top_k(const Tensor& others, const Tensor& column, const Tensor& teacher, const Tensor& parts,
                                int64_t first, bool wanted) const {
  const int64_t size = others.size(1) - 1, count = column.size(1);
  const auto acc = c10::typeMetaToScalarType(acc_.dtype());
  const auto index = rows_of(*tensors_.teacher_index, first, others.size(0)), pad = index.eq(-1);
  const auto z =
      parts.narrow(1, 0, count).sum(0).t().masked_fill(pad, kLeast);  // each from the one process that has it
  const auto [top, rest_sum] = combined(parts.select(1, count), parts.select(1, count + 1));
  const auto nothing = top.eq(kLeast);
  const auto tail = (top + rest_sum).masked_fill(nothing, kLeast);
  const auto log_q = at::cat({z, tail.unsqueeze(1)}, 1).log_softmax(1);
  auto log_p = teacher.to(at::kDouble).masked_fill(pad, kLeast);
  Tensor rest;
  if (settings_.renormalize) {
    log_p = log_p - log_p.logsumexp(at::IntArrayRef{1}, /*keepdim=*/true);
    rest = at::full_like(tail, kLeast);
  } else {
    if (tensors_.tail_log_prob) {
      rest = rows_of(*tensors_.tail_log_prob, first, others.size(0)).to(at::kDouble);
    } else {
      const double u = settings_.roundoff;
      const auto p = log_p.exp();
      const auto resolution = p * (-u * log_p + std::min(u, roundoff_of(at::kFloat)));
      rest = at::maximum(1 - p.sum(1), resolution.masked_fill(p.le(0), 0).sum(1)).log();
    }
    rest = rest.masked_fill(pad.logical_not().sum(1).eq(vocab_), kLeast);
  }
  log_p = at::cat({log_p, rest.unsqueeze(1)}, 1);
  auto made = divergence(log_q.to(acc).contiguous(), log_p.to(acc).contiguous(), {wanted, false});
  made.loss = made.loss.to(at::kDouble);
  if (!wanted) return made;
  const auto& by_q = made.by_student;
  const auto by_z = by_q - log_q.to(acc).exp() * by_q.sum(1, /*keepdim=*/true);
  auto gradient = (others - top.masked_fill(nothing, 0).to(acc).unsqueeze(1)).exp_();
  const auto of_tail = by_z.select(1, count) * (-rest_sum).masked_fill(nothing, 0).exp().to(acc);
  gradient.mul_(of_tail.masked_fill(nothing, 0).unsqueeze(1));
  gradient.scatter_add_(1, column, by_z.narrow(1, 0, count).masked_fill(column.eq(size), 0));
  made.by_student = gradient.narrow(1, 0, size);
  return made;
}

void JsdJob::run_part(const Tensor& student, const Tensor& teacher, int64_t first, const Tensor& grad_student,
                      const Tensor& grad_teacher) {
  const auto& s = settings_;
  const auto acc = c10::typeMetaToScalarType(acc_.dtype());
  const int64_t count = student.size(0), size = student.size(1);
  const bool top_k = tensors_.teacher_index.has_value(), hard_wanted = s.hard_wanted();
  const std::array wanted{grad_student.defined(), grad_teacher.defined()};
  const auto kept = rows_of(kept_, first, count);
  const auto over = [](const Tensor& y, double temperature) { return temperature == 1 ? y : y / temperature; };
  const auto y = transformed(student, s.student_logit_scale, s.student_softcap, acc);
  const auto of_student = over(y, s.student_temperature);
  std::vector<Tensor> values;
  Tensor owned, label;
  if (hard_wanted) {
    const auto labels = rows_of(*tensors_.labels, first, count);
    owned = owned_by(labels, shards_).logical_and_(kept);
    label = columns_of(labels, shards_, 0).to(at::kLong);
    const auto lse = log_sum(y);
    const auto at = size == 0 ? at::zeros_like(lse.rest) : y.gather(1, label.unsqueeze(1)).squeeze(1);
    add(values, lse);
    // The difference of this part's lse and the label's logit.
    values.push_back(((lse.large - at) + lse.rest).masked_fill(owned[shards_.rank].logical_not(), 0));
  }
  const auto before = static_cast<int64_t>(values.size());
  Tensor y_teacher, of_teacher, others, column;
  if (top_k) {
    // One more column takes what other processes have.
    others = at::cat({of_student, at::full({count, 1}, kLeast, of_student.options())}, 1);
    column = columns_of(rows_of(*tensors_.teacher_index, first, count), shards_, size);
    const auto found = others.gather(1, column).masked_fill(column.eq(size), 0).t().unbind();
    values.insert(values.end(), found.begin(), found.end());
    others.scatter_(1, column, kLeast);
    add(values, log_sum(others));
  } else {
    y_teacher = transformed(teacher, s.teacher_logit_scale, s.teacher_softcap, acc);
    of_teacher = over(y_teacher, s.teacher_temperature);
    if (!s.log_probs) {  // which are taken as they are: there is nothing to normalise
      add(values, log_sum(of_student));
      add(values, log_sum(of_teacher));
    }
  }
  Tensor gathered;
  if (!values.empty()) gathered = gather_parts(at::stack(values), shards_).to(at::kDouble);
  const auto parts = gathered.defined() ? gathered.slice(1, before) : gathered;
  auto soft = top_k ? over_top_k(others, column, teacher, parts, first, wanted[0])
                    : dense(of_student, of_teacher, parts, first, wanted);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  soft.loss = soft.loss.masked_fill(soft.loss.lt(0), 0);  // what rounding left of 0; NaN stays
  if (different_) soft.loss = soft.loss.masked_fill(*different_, nan);
  soft.loss = soft.loss.masked_fill(kept.logical_not(), 0).to(acc);
  auto loss = s.soft_weight == 0 ? at::zeros_like(soft.loss) : s.soft_weight * soft.loss;
  TwoNumbers lse;
  Tensor hard;
  if (hard_wanted) {
    lse = combined(gathered.select(1, 0), gathered.select(1, 1));
    const auto above = (lse.large - gathered.select(1, 0)) + lse.rest - gathered.select(1, 1);
    const auto cost = (gathered.select(1, 2) + above).masked_fill(owned.logical_not(), 0).sum(0);
    hard = cost.masked_fill(owned.any(0).logical_not(), nan).masked_fill(kept.logical_not(), 0).to(acc);
    if (s.hard_weight != 0) loss = loss + s.hard_weight * hard;
  }

  auto factor = out_.scales.numel() == 0 ? at::ones({}, acc_) : out_.scales[0];
  if (tensors_.token_weight) factor = factor * rows_of(*tensors_.token_weight, first, count);
  if (row_loss_.defined()) {
    rows_of(row_loss_, first, count).copy_((factor * loss).masked_fill(kept.logical_not(), 0));
    const bool soft_out = (s.aux & kJSDAuxSoftLoss) != 0;
    if (soft_out) part(out_.stats[0], 0, first, count).copy_(soft.loss);
    if ((s.aux & kJSDAuxHardLoss) != 0) part(out_.stats[soft_out ? 1 : 0], 0, first, count).copy_(hard);
  }
  if (!wanted[0] && !wanted[1]) return;
  if (upstream_.defined()) factor = factor * (upstream_.dim() == 0 ? upstream_ : rows_of(upstream_, first, count));
  if (different_) factor = factor.masked_fill(*different_, nan);
  factor = factor.expand({count}).masked_fill(kept.logical_not(), 0).unsqueeze(1);
  const auto put = [&](const Tensor& to, Tensor gradient, const Tensor& y, double scale, double softcap) {
    gradient = by_input(gradient, y, scale, softcap);
    // An ignored row may hold what is not finite.
    if (tensors_.labels) gradient.masked_fill_(kept.logical_not().unsqueeze(1), 0);
    to.copy_(gradient);
  };
  if (wanted[0]) {
    Tensor gradient;
    if (s.soft_weight != 0) gradient = soft.by_student.mul_(factor * (s.soft_weight / s.student_temperature));
    if (s.hard_weight != 0) {
      auto by_hard = less(y, lse).exp_();
      if (size != 0) by_hard.scatter_add_(1, label.unsqueeze(1), -owned[shards_.rank].to(acc).unsqueeze(1));
      by_hard.mul_(factor * s.hard_weight);
      gradient = gradient.defined() ? gradient.add_(by_hard) : by_hard;
    }
    if (!gradient.defined()) gradient = at::zeros_like(y);
    put(grad_student, gradient, y, s.student_logit_scale, s.student_softcap);
  }
  if (wanted[1]) {
    put(grad_teacher, soft.by_teacher.mul_(factor * (s.soft_weight / s.teacher_temperature)), y_teacher,
        s.teacher_logit_scale, s.teacher_softcap);
  }
}

}  // namespace fusegrad
