#include "pytorch/ops/jsd_settings.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "pytorch/ops/row_options.h"

namespace fusegrad {

using at::Tensor;

template <class Call>
JsdSettings make_settings(const char* op, const Call& call) {
  const auto& o = call.options;
  check_numbers(op, call);
  JsdSettings s{.beta = o.beta(),
                .student_temperature = o.temperature(),
                .teacher_temperature = o.temperature(),
                .soft_weight = o.soft_weight(),
                .hard_weight = o.hard_weight(),
                .renormalize = o.tail() == "renormalize",
                .ignore_index = o.ignore_index(),
                .aux = call.aux};
  FUSEGRAD_CHECK_VALUE(s.aux >= 0 && s.aux < 4, op, "aux must be a set of the two JSDAuxBit bits, but got ", s.aux);
  if constexpr (requires { o.log_probs(); }) s.log_probs = o.log_probs();
  if (o.reduction() != "batchmean") {
    FUSEGRAD_CHECK_VALUE(o.reduction() == "none" || o.reduction() == "mean" || o.reduction() == "sum", op,
                         "reduction must be 'none', 'mean', 'sum' or 'batchmean', but got '", o.reduction(), "'");
    s.reduction = parse_reduction(op, o.reduction());
  }
  FUSEGRAD_CHECK_VALUE(s.renormalize || o.tail() == "bucket", op, "tail must be 'bucket' or 'renormalize', but got '",
                       o.tail(), "'");
  FUSEGRAD_CHECK_VALUE(std::holds_alternative<std::monostate>(o.normalizer()) || s.averaged(), op,
                       "a normalizer must come with reduction 'mean' or 'batchmean', whose number of rows it replaces, "
                       "but got reduction '",
                       o.reduction(), "'");
  const bool labels = o.labels().has_value(), top_k = call.teacher_indices.has_value();
  // Before the labels: with log_probs no labels would help.
  FUSEGRAD_CHECK_VALUE(
      !s.log_probs || !s.hard_wanted(), op, "log_probs must come without a hard loss, which is of logits, but got ",
      s.hard_weight != 0.0 ? "hard_weight " + std::to_string(s.hard_weight) : "return_aux with hard_loss");
  FUSEGRAD_CHECK_VALUE(s.ignore_index == -100 || labels, op,
                       "an ignore_index must come with labels, whose rows it leaves out, but got ", s.ignore_index,
                       " without them");
  FUSEGRAD_CHECK_VALUE(!s.hard_wanted() || labels, op,
                       "labels must be given where the hard loss is wanted, but got hard_weight ", s.hard_weight,
                       s.hard_weight != 0.0 ? "" : " and return_aux with hard_loss", " without them");
  if (s.log_probs) {
    FUSEGRAD_CHECK_VALUE(s.student_temperature == 1.0, op,
                         "log_probs must come with temperature 1, since log-probabilities have none, but got ",
                         s.student_temperature);
    FUSEGRAD_CHECK_VALUE(!top_k, op, "log_probs must come with a dense teacher, but got a top-k teacher");
  }
  FUSEGRAD_CHECK_VALUE(top_k || !s.renormalize, op,
                       "tail 'renormalize' must come with a top-k teacher, but got a dense one, which has no tail");
  if (call.tail_log_prob.has_value()) {
    FUSEGRAD_CHECK_VALUE(top_k, op,
                         "tail_log_prob must come with a top-k teacher, but got a dense one, which has no tail");
    FUSEGRAD_CHECK_VALUE(!s.renormalize, op,
                         "tail_log_prob must come with tail 'bucket', whose probability it is, but got 'renormalize'");
  }
  FUSEGRAD_CHECK_VALUE(!top_k || !s.renormalize || s.beta != 1.0, op,
                       "tail 'renormalize' must come with beta < 1, since KL(student | teacher) is infinite where the "
                       "teacher has no tail, but got beta ",
                       s.beta);
  return s;
}

template <class Call>
JsdRows make_jsd_rows(const char* op, const Tensor& student, const Call& call, c10::SymIntArrayRef row_shape,
                      at::ScalarType acc) {
  const auto& o = call.options;
  JsdRows rows;
  if (o.labels().has_value()) {
    const auto& labels = *o.labels();
    check_dense(op, "labels", labels);
    FUSEGRAD_CHECK_TYPE(labels.scalar_type() == at::kLong || labels.scalar_type() == at::kInt, op,
                        "labels must be int64 or int32 class indices, but got ", labels.scalar_type());
    FUSEGRAD_CHECK_VALUE(labels.sym_sizes() == row_shape, op, "labels must have shape ", row_shape, ", but got ",
                         labels.sym_sizes());
    check_same_device(op, "labels", labels, student);
    rows.labels = (labels.dim() == 1 ? labels : labels.reshape({-1})).contiguous();
  }
  rows.token_weight = make_row_value(op, "token_weight", student, o.token_weight(), row_shape, acc);
  rows.normalizer = make_normalizer(op, student, tensor_of(o.normalizer()), acc);
  if (call.teacher_indices.has_value()) {
    rows.teacher_index = as_rows(call.teacher_indices->to(at::kLong)).contiguous();
  }
  rows.tail_log_prob = make_row_value(op, "tail_log_prob", student, call.tail_log_prob, row_shape, acc);
  return rows;
}

template JsdSettings make_settings(const char*, const JsdCall&);
template JsdSettings make_settings(const char*, const LinearJsdCall&);
template JsdRows make_jsd_rows(const char*, const Tensor&, const JsdCall&, c10::SymIntArrayRef, at::ScalarType);
template JsdRows make_jsd_rows(const char*, const Tensor&, const LinearJsdCall&, c10::SymIntArrayRef, at::ScalarType);

Tensor make_top_k(const char* op, const char* name, const Tensor& log_probs, const Tensor& indices,
                  const Tensor& student, c10::SymIntArrayRef row_shape, at::ScalarType acc) {
  check_floating(op, name, log_probs);
  check_dense(op, "the teacher's indices", indices);
  const auto shape = log_probs.sym_sizes();
  FUSEGRAD_CHECK_VALUE(log_probs.dim() >= 1 && shape.slice(0, shape.size() - 1) == row_shape, op, name,
                       " of a top-k teacher must have shape [..., K] with rows ", row_shape, ", but got ", shape);
  FUSEGRAD_CHECK_VALUE(shape.back() >= 1, op, name, " of a top-k teacher must have K >= 1, but got ", shape);
  FUSEGRAD_CHECK_TYPE(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt, op,
                      "the teacher's indices must be int64 or int32, but got ", indices.scalar_type());
  FUSEGRAD_CHECK_VALUE(indices.sym_sizes() == shape, op,
                       "the teacher's indices must have its log-probabilities' shape ", shape, ", but got ",
                       indices.sym_sizes());
  check_same_device(op, name, log_probs, student);
  check_same_device(op, "the teacher's indices", indices, student);
  check_no_grad(op, name, log_probs);
  return as_rows(log_probs.to(acc)).contiguous();
}

double roundoff_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

double roundoff_of_top_k(const Tensor& log_probs, const std::optional<Tensor>& tail, at::ScalarType acc) {
  const double stored = std::max(roundoff_of(log_probs.scalar_type()), roundoff_of(acc));
  return tail ? std::max(stored, roundoff_of(tail->scalar_type())) : stored;
}

namespace {

void check_indices(const char* op, const Tensor& index, int64_t vocab) {
  if (index.numel() == 0) return;
  const auto refuse = [&](int64_t row, int64_t column, int64_t value) {
    TORCH_CHECK_INDEX(false, op, ": the teacher's indices must be in [0, ", vocab, "), or -1 as padding, but got ",
                      value, " at row ", row, ", column ", column);
  };
  const int64_t count = index.size(1);
  if (index.is_cpu()) {
    const int64_t* values = index.const_data_ptr<int64_t>();
    std::vector<int64_t> seen(vocab, -1);  // the last row that had the index
    for (int64_t n = 0; n < index.size(0); ++n) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t value = values[n * count + k];
        if (value == -1) continue;
        if (value < 0 || value >= vocab) refuse(n, k, value);
        FUSEGRAD_CHECK_VALUE(seen[value] != n, op, "the teacher's indices must be distinct in a row, but got ", value,
                             " twice at row ", n);
        seen[value] = n;
      }
    }
  } else if (check_targets_enabled()) {
    const auto positions = index.lt(-1).logical_or(index.ge(vocab)).nonzero();
    if (positions.size(0) == 0) return;
    const auto row = positions[0][0].item<int64_t>(), column = positions[0][1].item<int64_t>();
    refuse(row, column, index[row][column].item<int64_t>());
  }
}

// A user's own normaliser was rounded too, perhaps far from 1: what is meant to be caught is far from 1 as well.
double tolerance_of_sums(const JsdSettings& settings, int64_t columns) {
  return std::max(1e-3, 16 * settings.roundoff * (1 + std::log(static_cast<double>(columns))));
}

// Raises where in a row that counts the exponentials sum to more than 1 + tolerance, or to less than 1 - tolerance
// where the row is whole. NaN passes, and makes the loss NaN.
void check_sums(const char* op, const char* name, const Tensor& log_probs, const JsdRows& rows,
                const JsdSettings& settings, bool whole) {
  const int64_t count = log_probs.size(0), columns = log_probs.size(1);
  if (log_probs.numel() == 0 || !(log_probs.is_cpu() || check_targets_enabled())) return;
  const double tolerance = tolerance_of_sums(settings, columns);
  const int64_t step = std::max<int64_t>(1, (int64_t{1} << 22) / columns);
  for (int64_t first = 0; first < count; first += step) {
    const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, first, std::min(step, count - first)); };
    auto values = part(log_probs);
    if (rows.teacher_index.has_value()) {
      values = values.masked_fill(part(*rows.teacher_index).eq(-1), -std::numeric_limits<double>::infinity());
    }
    auto sum = values.to(acc_type(values.scalar_type())).exp().sum(1);
    if (rows.tail_log_prob.has_value()) sum = sum + part(*rows.tail_log_prob).exp();
    auto wrong = sum.gt(1 + tolerance);
    if (whole) wrong = wrong.logical_or(sum.lt(1 - tolerance));
    // Of K = 1 a probability in place of its logarithm is near enough.
    if (!whole) wrong = wrong.logical_or(values.amax(1).gt(16 * settings.roundoff));
    if (rows.labels.has_value()) wrong = wrong.logical_and(part(*rows.labels).ne(settings.ignore_index));
    const auto positions = wrong.nonzero();
    if (positions.size(0) == 0) continue;
    const auto row = positions[0].item<int64_t>();
    FUSEGRAD_CHECK_VALUE(false, op, name, " must be log-probabilities, none above 0, whose exponentials sum to ",
                         whole ? "1" : "at most 1", " (within ", tolerance, "), but got a sum of ",
                         sum[row].item<double>(), " and a largest of ", values[row].max().item<double>(), " at row ",
                         first + row, ": logits need log_softmax, and probabilities log");
  }
}

}  // namespace

void check_top_k(const char* op, const Tensor& teacher, const JsdRows& rows, const JsdSettings& settings,
                 int64_t vocab) {
  check_indices(op, *rows.teacher_index, vocab);
  check_sums(op, "a top-k teacher", teacher, rows, settings, /*whole=*/false);
}

void check_log_prob_sums(const char* op, const char* name, const Tensor& sums, const JsdRows& rows,
                         const JsdSettings& settings, int64_t columns, int64_t first) {
  if (sums.numel() == 0 || !(sums.is_cpu() || check_targets_enabled())) return;
  const double tolerance = tolerance_of_sums(settings, columns);
  auto wrong = sums.gt(1 + tolerance).logical_or(sums.lt(1 - tolerance));
  if (rows.labels) wrong = wrong.logical_and(rows.labels->narrow(0, first, sums.size(0)).ne(settings.ignore_index));
  const auto positions = wrong.nonzero();
  if (positions.size(0) == 0) return;
  const auto row = positions[0].item<int64_t>();
  FUSEGRAD_CHECK_VALUE(false, op, name,
                       " must be log-probabilities, none above 0, whose exponentials sum to 1 (within ", tolerance,
                       "), but got a sum of ", sums[row].item<double>(), " at row ", first + row,
                       ": logits need log_softmax, and probabilities log");
}

void check_log_probs(const char* op, const char* name, const Tensor& log_probs, const JsdRows& rows,
                     const JsdSettings& settings) {
  check_sums(op, name, log_probs, rows, settings, /*whole=*/true);
}

}  // namespace fusegrad
