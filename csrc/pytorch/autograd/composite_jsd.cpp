#include <torch/library.h>

#include <algorithm>

#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/composite_parts.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/jsd_settings.h"

namespace fusegrad::composite {
namespace {

using at::Tensor;

struct Divergence {
  const Tensor &student, &teacher;
  const JsdRows& rows;
  const JsdSettings& settings;
  const Shards& shards;
  const OptionalTensor& different;

  int64_t vocab() const { return shards ? shards.vocab() : student.sym_size(1).guard_int(__FILE__, __LINE__); }
  bool top_k() const { return rows.teacher_index.has_value(); }
};

// Per-row values, [N] acc each. `loss` has the token weight in it; the others are there where they count or are asked
// for.
struct DivergenceRows {
  Tensor loss, soft, hard;
  Tensor kept;  // 1 or 0
};

// sum_c of a row's divergence between exp(log_q) and exp(log_p), [N]. `normalized`: each sums to 1.
//
// All is a function of v = log of the smaller probability over the larger, and the larger: no exponential overflows,
// and no derivative of whatever order has a small probability in a divisor. With e = expm1(v) and b the weight of the
// smaller one in the mixture m, log(m / larger) = log1p(b * e), or that of (1 - b) + b * exp(v) where this is small. A
// KL of normalized rows has the sum of differences of the two added, which is 0: each of its terms is of second order
// in v then, as the mixture's are anyway.
Tensor divergence(const Tensor& log_q, const Tensor& log_p, double beta, bool normalized) {
  const auto up = log_p.gt(log_q), u = log_p - log_q;
  const auto larger = at::where(up, log_p, log_q).exp();
  // Where both are 0 there is nothing, and u is NaN; where one is, v is -inf.
  const auto v = at::where(up, -u, u).masked_fill(larger.eq(0), 0);
  const auto finite = v.masked_fill(v.eq(-kInfinity), 0);
  const auto e = v.expm1();
  if (beta > 0 && beta < 1) {
    // Both from beta itself: near 1 float32 has no digits left for a difference.
    const auto full = [&](double value) { return at::full({}, value, v.options()); };
    const auto b = at::where(up, full(1 - beta), full(beta)), rest = at::where(up, full(beta), full(1 - beta));
    const auto ratio = v.exp(), less = b * e, small = less.lt(-0.5);
    const auto log_m = at::where(small, (rest + b * ratio).masked_fill(small.logical_not(), 1).log(),
                                 less.masked_fill(small, 0).log1p());
    return (larger * (b * ratio * (finite - log_m) - rest * log_m)).sum(1);
  }
  const auto over_larger = beta == 0 ? up : up.logical_not();  // which KL(x | y) takes its average of
  auto each = at::where(over_larger, -v, (e + 1) * finite);
  if (normalized) each = each + at::where(over_larger, e, -e);
  return (larger * each).sum(1);
}

// Less what rounding left of 0; NaN stays.
Tensor not_negative(const Tensor& soft) { return soft - soft.detach().clamp_max(0); }

// [N]: the logsumexp of rows, 0 of those that are ignored, which are not read.
Tensor logsumexp_of(const Tensor& rows, const std::optional<Labels>& labels) {
  if (!has_row_kernels(rows)) return logsumexp(labels ? labels->without_ignored(rows) : rows);
  const auto none = at::zeros({rows.sym_size(0).guard_int(__FILE__, __LINE__)}, rows.options().dtype(at::kLong));
  const RowSettings settings{
      .target = labels ? none.masked_fill(labels->valid.logical_not(), -1) : none, .weight = {}, .ignore_index = -1};
  return std::get<0>(dispatch::cross_entropy_rows(CrossEntropyRows{rows, settings})).select(0, kRowLse);
}

// A top-k teacher's K columns of the student's logits, and the logsumexp of all others.
struct TopKLogits {
  Tensor chosen, tail;  // [N, K] and [N, 1]
};

TopKLogits top_k_logits(const Tensor& z, const Tensor& index, const Tensor& invalid,
                        const std::optional<Labels>& labels) {
  // Those that are no column of their own stand for one of the row's K, or for its first column, if there are none.
  const auto last = index.masked_fill(invalid, -1).amax(1, /*keepdim=*/true);
  const auto columns = at::where(invalid, last.clamp_min(0), index);
  auto chosen = z.gather(1, columns);
  if (labels) chosen = labels->without_ignored(chosen);
  // Where there are no other columns that count their logsumexp has no derivative: it is taken of any.
  const auto counting = [](const Tensor& x) { return x.ne(-kInfinity).sum(1, /*keepdim=*/true); };
  const auto none =
      counting(z.detach()).eq(counting(chosen.detach().masked_fill(invalid, -kInfinity))).logical_and(last.ge(0));
  const auto out = at::where(last.ge(0), -kInfinity, chosen).to(z.scalar_type()).masked_fill(none, 0);
  const auto tail = logsumexp_of(z.scatter(1, columns, out), labels).unsqueeze(1).masked_fill(none, -kInfinity);
  return {chosen.masked_fill(invalid, -kInfinity), tail};
}

// The same of this process's part of the columns: all processes get the K.
TopKLogits top_k_logits_of_part(const Tensor& given, const Tensor& index, const Tensor& invalid,
                                const std::optional<Labels>& labels, const Shards& shards) {
  const auto z = (labels ? labels->without_ignored(given) : given).to(at::kDouble);
  // One more column takes what other processes have.
  const auto size = shards.size();
  const auto column = columns_of(index, shards, size);
  const auto wide = at::cat({z, at::full({z.size(0), 1}, -kInfinity, z.options().requires_grad(false))}, 1);
  const auto mine = wide.gather(1, column).masked_fill(column.eq(size), 0);
  const auto others = wide.scatter(1, column, -kInfinity).narrow(1, 0, size);
  const auto largest = largest_of_rows(others, shards);
  const auto own = at::cat({mine, (others - largest).exp().sum(1, /*keepdim=*/true)}, 1);
  const auto sums = sum_of_parts(own, shards);
  const auto sum = sums.narrow(1, index.size(1), 1), none = sum.detach().eq(0);
  const auto tail = (largest + sum.masked_fill(none, 1).log()).masked_fill(none, -kInfinity);
  return {sums.narrow(1, 0, index.size(1)).masked_fill(invalid, -kInfinity), tail};
}

// Over these columns and one for all others. K is small: in float64, as the kernels have it.
Tensor top_k_divergence(const Tensor& z, const Divergence& call, const std::optional<Labels>& labels) {
  const auto& s = call.settings;
  const auto vocab = call.vocab();
  const auto& index = *call.rows.teacher_index;
  const auto padding = index.eq(-1);
  const auto wrong = index.lt(-1).logical_or(index.ge(vocab));
  const auto invalid = padding.logical_or(wrong);
  const auto [chosen, tail] = call.shards ? top_k_logits_of_part(z, index, invalid, labels, call.shards)
                                          : top_k_logits(z, index, invalid, labels);
  const auto log_q = log_softmax(at::cat({chosen.to(at::kDouble), tail.to(at::kDouble)}, 1));

  auto log_p = call.teacher.to(at::kDouble);
  if (labels) log_p = labels->without_ignored(log_p);
  log_p = log_p.masked_fill(padding, -kInfinity);
  const auto p = log_p.exp(), mass = p.sum(1, /*keepdim=*/true);
  Tensor rest;
  if (s.renormalize) {
    log_p = log_p - mass.log();
    rest = at::full_like(mass, -kInfinity);
  } else if (call.rows.tail_log_prob) {
    rest = call.rows.tail_log_prob->to(at::kDouble).unsqueeze(1);
    if (labels) rest = labels->without_ignored(rest);
  } else {
    const double least = std::min(s.roundoff, roundoff_of(at::kFloat));
    const auto resolution = (p * (least - s.roundoff * log_p.masked_fill(p.eq(0), 0))).sum(1, /*keepdim=*/true);
    rest = at::maximum(1 - mass, resolution).log();
  }
  const auto whole = padding.logical_not().sum(1, /*keepdim=*/true).eq(vocab);  // no other columns
  log_p = at::cat({log_p, rest.masked_fill(whole, -kInfinity)}, 1);
  return divergence(log_q, log_p, s.beta, /*normalized=*/false)
      .masked_fill(wrong.any(1), kNaN)
      .to(acc_type(z.scalar_type()));
}

// The student's logits as a softmax takes them, but for the temperature.
Tensor logits_in_acc(const Tensor& x, double scale, double softcap) {
  auto z = x.to(acc_type(x.scalar_type()));
  if (scale != 1.0) z = z * scale;
  return with_softcap(z, softcap);
}
Tensor by_temperature(const Tensor& z, double temperature) { return temperature == 1.0 ? z : z / temperature; }

// The soft part of a dense teacher, of which this process has a part of the columns.
Tensor soft_of_part(const Divergence& call, const std::optional<Labels>& labels) {
  const auto& s = call.settings;
  const auto& shards = call.shards;
  const auto side = [&](const Tensor& x, double scale, double softcap, double temperature) {
    const auto z = by_temperature(logits_in_acc(x, scale, softcap), temperature);
    return labels ? labels->without_ignored(z) : z;
  };
  auto student = side(call.student, s.student_logit_scale, s.student_softcap, s.student_temperature);
  auto teacher = side(call.teacher, s.teacher_logit_scale, s.teacher_softcap, s.teacher_temperature);
  if (!s.log_probs) {
    student = student - largest_of_rows(student, shards);
    teacher = teacher - largest_of_rows(teacher, shards);
    const auto own = at::stack({student.exp().sum(1), teacher.exp().sum(1)});
    const auto log_sums = for_own_part(sum_of_parts(own, shards).log(), shards);
    student = student - log_sums.select(0, 0).unsqueeze(1);
    teacher = teacher - log_sums.select(0, 1).unsqueeze(1);
  }
  const auto soft = not_negative(sum_of_parts(divergence(student, teacher, s.beta, !s.log_probs), shards));
  return labels ? labels->of_rows(soft) : soft;
}

Tensor soft_of(const Divergence& call, const std::optional<Labels>& labels) {
  const auto& s = call.settings;
  if (!call.top_k()) {
    if (call.shards) return soft_of_part(call, labels);
    const auto by = LabelsOfKernels(call.student, call.rows.labels, labels, s.ignore_index);
    JsdSoft rows{call.student, call.teacher, soft_settings(call.rows, s)};
    rows.settings.labels = by.labels;
    return by.checked(has_row_kernels(call.student) ? dispatch::jsd_soft(rows) : jsd_soft(rows));
  }
  const bool plain = s.student_logit_scale == 1.0 && s.student_softcap == 0.0 && s.student_temperature == 1.0;
  const auto z = plain ? call.student
                       : by_temperature(logits_in_acc(call.student, s.student_logit_scale, s.student_softcap),
                                        s.student_temperature);
  const auto soft = not_negative(top_k_divergence(z, call, labels));
  return labels ? labels->of_rows(soft) : soft;
}

// [N]: the cross entropy at the labels.
Tensor hard_of(const Divergence& call, const std::optional<Labels>& labels) {
  const auto& s = call.settings;
  const auto& x = call.student;
  if (call.shards) {
    const auto z = labels->without_ignored(logits_in_acc(x, s.student_logit_scale, s.student_softcap));
    const auto away = z - largest_of_rows(z, call.shards);
    const auto own = at::stack({away.exp().sum(1), own_column(away, labels->index, call.shards)});
    const auto sums = sum_of_parts(own, call.shards);
    return labels->of_rows(sums.select(0, 0).log() - sums.select(0, 1));
  }
  if (!has_row_kernels(x)) {
    const auto z = labels->without_ignored(logits_in_acc(x, s.student_logit_scale, s.student_softcap));
    return labels->of_rows(logsumexp(z) - labels->column(z));
  }
  const auto by = LabelsOfKernels(x, call.rows.labels, labels, s.ignore_index);
  const auto scaled = s.student_logit_scale == 1.0 ? x : x.to(acc_type(x.scalar_type())) * s.student_logit_scale;
  const CrossEntropyRows rows{
      scaled, {.target = *by.labels, .weight = {}, .ignore_index = s.ignore_index, .softcap = s.student_softcap}};
  return by.checked(std::get<0>(dispatch::cross_entropy_rows(rows)).select(0, kRowCrossEntropy));
}

DivergenceRows rows_of(const Divergence& call) {
  const auto& s = call.settings;
  const auto acc = acc_type(call.student.scalar_type());
  const auto vocab = call.vocab();
  std::optional<Labels> labels;
  if (call.rows.labels) labels.emplace(*call.rows.labels, s.ignore_index, vocab);
  const auto none = at::zeros_like(call.student.detach().slice(1, 0, 1).sum(1), call.student.options().dtype(acc));
  DivergenceRows rows;
  rows.loss = none;
  rows.kept = labels ? labels->valid.to(acc) : at::ones_like(none);
  // A part without weight is left out: infinite it would be NaN.
  if (s.soft_weight != 0.0 || (s.aux & kJSDAuxSoftLoss) != 0) rows.soft = vocab == 0 ? none : soft_of(call, labels);
  if (s.hard_wanted()) rows.hard = vocab == 0 ? none : hard_of(call, labels);
  if (s.soft_weight != 0.0) rows.loss = rows.loss + s.soft_weight * rows.soft;
  if (s.hard_weight != 0.0) rows.loss = rows.loss + s.hard_weight * rows.hard;
  if (call.rows.token_weight) rows.loss = rows.loss * *call.rows.token_weight;
  rows.loss = unless_different(rows.loss, call.different);
  return rows;
}

// What can be read is checked: before the rows, of a linear loss's teacher alone.
void check_values(const char* op, const OptionalTensor& student, const Tensor& teacher, const JsdRows& rows,
                  const JsdSettings& settings, int64_t vocab) {
  const auto readable = [](const OptionalTensor& tensor) { return !tensor || is_readable(*tensor); };
  if (rows.labels && is_readable(*rows.labels))
    check_target_range(op, *rows.labels, vocab, settings.ignore_index, "labels");
  if (rows.teacher_index && is_readable(teacher) && readable(rows.teacher_index) && readable(rows.tail_log_prob) &&
      readable(rows.labels))
    check_top_k(op, teacher, rows, settings, vocab);
  if (settings.log_probs && readable(rows.labels)) {
    if (student && is_readable(*student)) check_log_probs(op, "student", *student, rows, settings);
    if (is_readable(teacher)) check_log_probs(op, "teacher", teacher, rows, settings);
  }
}

JsdOutputs reduced(const DivergenceRows& rows, const JsdSettings& s, int64_t vocab, const OptionalTensor& normalizer) {
  JsdOutputs out;
  out.loss = s.reduction == at::Reduction::None ? rows.loss : rows.loss.sum();
  if (s.averaged()) out.loss = out.loss / (normalizer ? *normalizer : rows.kept.sum().clamp_min(1));
  if (s.reduction == at::Reduction::Mean) out.loss = out.loss / std::max<int64_t>(vocab, 1);
  std::vector<Tensor> stats;
  if ((s.aux & kJSDAuxSoftLoss) != 0) stats.push_back(rows.soft);
  if ((s.aux & kJSDAuxHardLoss) != 0) stats.push_back(rows.hard);
  if (!stats.empty()) out.stats = at::stack(stats);
  return out;
}

std::vector<Tensor> gradients_of(Tensor loss, const Tensor& scales, const Tensor& grad_loss,
                                 const std::vector<Tensor>& inputs) {
  if (scales.numel() != 0) loss = loss * scale_of(scales, 0);
  if (grad_loss.dim() == 0) loss = loss.sum();
  return differentiate({loss}, {grad_loss}, inputs);
}

// The logits of both heads, or a top-k teacher as it is.
std::array<Tensor, 2> logits_of(const LinearJsdForward& call) {
  const auto& heads = call.heads;
  const auto& options = call.linear;
  const auto input = call.shards ? for_own_part(call.student_input, call.shards) : call.student_input;
  const auto used = [&](const Tensor& x) { return options.vocab_size ? x.narrow(0, 0, *options.vocab_size) : x; };
  const auto used_of = [&](const OptionalTensor& x) { return x ? OptionalTensor(used(*x)) : std::nullopt; };
  const auto student = linear_logits(input, used(heads.student_weight), used_of(heads.student_bias));
  if (!heads.teacher_weight) return {student, heads.teacher};
  const auto teacher = linear_logits(heads.teacher, used(*heads.teacher_weight), used_of(heads.teacher_bias));
  return {student, teacher.to(student.scalar_type())};
}

int64_t vocab_of(const LinearJsdForward& call) {
  if (call.shards) return call.shards.vocab();
  return call.linear.vocab_size.value_or(call.heads.student_weight.sym_size(0).guard_int(__FILE__, __LINE__));
}

// The rows' values that these settings make, in the order of the op's.
template <class Visit>
void each_value(DivergenceRows& rows, const JsdSettings& s, Visit&& visit) {
  visit(rows.loss);
  visit(rows.kept);
  if (s.soft_weight != 0.0 || (s.aux & kJSDAuxSoftLoss) != 0) visit(rows.soft);
  if (s.hard_wanted()) visit(rows.hard);
}

Tensor linear_jsd_rows(const LinearJsdForward& call) {
  const auto [student, teacher] = logits_of(call);
  auto rows = rows_of({student, teacher, call.rows, call.settings, call.shards, call.different});
  std::vector<Tensor> values;
  each_value(rows, call.settings, [&](const Tensor& value) { values.push_back(value); });
  return at::stack(values);
}

DivergenceRows linear_rows(const LinearJsdForward& call) {
  static const Op<LinearJsdForward, Tensor> chunks("fusegrad::linear_jsd_row_chunks");
  const auto& heads = call.heads;
  // Chunks of a part would have collectives of their own.
  const auto values = call.shards ? linear_jsd_rows(call)
                                  : in_chunks(chunks, &linear_jsd_rows, call,
                                              {&call.student_input, &heads.student_weight, &heads.teacher});
  const auto each = values.unbind(0);
  DivergenceRows rows;
  auto next = each.begin();
  each_value(rows, call.settings, [&](Tensor& value) { value = *next++; });
  return rows;
}

}  // namespace

Tensor jsd_soft(const JsdSoft& call) {
  const auto& s = call.settings;
  auto student =
      by_temperature(logits_in_acc(call.student, s.student_logit_scale, s.student_softcap), s.student_temperature);
  auto teacher =
      by_temperature(logits_in_acc(call.teacher, s.teacher_logit_scale, s.teacher_softcap), s.teacher_temperature);
  std::optional<Labels> labels;
  if (s.labels) {
    labels.emplace(*s.labels, s.ignore_index, call.student.sym_size(1).guard_int(__FILE__, __LINE__));
    student = labels->without_ignored(student);
    teacher = labels->without_ignored(teacher);
  }
  const auto soft = not_negative(s.log_probs ? divergence(student, teacher, s.beta, /*normalized=*/false)
                                             : divergence(log_softmax(student), log_softmax(teacher), s.beta, true));
  return labels ? labels->of_rows(soft) : soft;
}

JsdOutputs jsd(const char* op, const JsdForward& call) {
  const Divergence divergence{call.student, call.teacher, call.rows, call.settings, call.shards, call.different};
  auto checked = call.settings;
  checked.log_probs = checked.log_probs && !call.shards;  // those of a part do not sum to 1
  check_values(op, call.student, call.teacher, call.rows, checked, divergence.vocab());
  return reduced(rows_of(divergence), call.settings, divergence.vocab(), call.rows.normalizer);
}

JsdOutputs linear_jsd(const char* op, const LinearJsdForward& call) {
  const auto vocab = vocab_of(call);
  check_values(op, std::nullopt, call.heads.teacher, call.rows, call.settings, vocab);
  return reduced(linear_rows(call), call.settings, vocab, call.rows.normalizer);
}

std::array<Tensor, 2> jsd_gradients(JsdBackward call, std::array<bool, 2> wanted) {
  const at::AutoGradMode enabled(true);
  const auto inputs = aliases({{&call.student, wanted[0]}, {&call.teacher, wanted[1]}});
  const auto found =
      gradients_of(rows_of({call.student, call.teacher, call.rows, call.settings, call.shards, call.different}).loss,
                   call.scales, call.grad_loss, inputs);
  return {found[0], found[1]};
}

LinearGradients linear_jsd_gradients(LinearJsdBackward call) {
  const at::AutoGradMode enabled(true);
  const auto inputs = aliases({{&call.student_input, call.needs_grad[0]},
                               {&call.heads.student_weight, call.needs_grad[1]},
                               input_of(call.heads.student_bias, call.needs_grad[2])});
  const auto rows = linear_rows({.student_input = call.student_input,
                                 .heads = call.heads,
                                 .rows = call.rows,
                                 .settings = call.settings,
                                 .linear = call.linear,
                                 .shards = call.shards,
                                 .different = call.different});
  const auto found = gradients_of(rows.loss, call.scales, call.grad_loss, inputs);
  return {found[0], found[1], found[2]};
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("linear_jsd_rows", named_kernel<"linear_jsd", unpacked<linear_jsd_rows>()>());
}
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  m.impl("linear_jsd_rows", named_kernel<"linear_jsd", unpacked<linear_jsd_rows>()>());
}

}  // namespace fusegrad::composite
