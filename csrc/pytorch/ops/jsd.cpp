#include "fusegrad/jsd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/front.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <bool inplace>
LossTuple jsd_op(const Tensor& student, const Tensor& teacher, const OptionalTensor& teacher_indices,
                 const OptionalTensor& labels, const OptionalTensor& token_weight, const OptionalTensor& normalizer,
                 double beta, double temperature, std::optional<int64_t> ignore_index, std::string_view reduction,
                 std::string_view tail, double soft_weight, double hard_weight, int64_t aux, bool log_probs,
                 const OptionalTensor& tail_log_prob) {
  constexpr const char* op = "jsd";
  refuse_transforms(op, {student, teacher, teacher_indices, labels, token_weight, normalizer, tail_log_prob});
  check_floating(op, "student", student);
  FUSEGRAD_CHECK_VALUE(student.dim() >= 1, op, "student must have shape [..., V], but got a 0-d tensor");
  const JsdTensors tensors{teacher_indices, tail_log_prob, labels, token_weight, normalizer};
  JsdSettings settings;
  settings.beta = beta;
  settings.student_temperature = settings.teacher_temperature = temperature;
  settings.soft_weight = soft_weight;
  settings.hard_weight = hard_weight;
  settings.log_probs = log_probs;
  settings.aux = aux;
  complete_settings(op, settings, tensors, ignore_index, reduction, tail);

  std::vector<c10::SymInt> row_shape(student.sym_sizes().begin(), student.sym_sizes().end() - 1);
  auto dtype = student.scalar_type();
  Tensor teacher_rows;
  if (teacher_indices.has_value()) {
    teacher_rows = make_top_k(op, "teacher", teacher, *teacher_indices, student, row_shape, acc_type(dtype));
    settings.roundoff = std::max(roundoff_of(teacher.scalar_type()), roundoff_of(acc_type(dtype)));
  } else {
    check_floating(op, "teacher", teacher);
    check_same_device(op, "teacher", teacher, student);
    FUSEGRAD_CHECK_VALUE(teacher.sym_sizes() == student.sym_sizes(), op, "teacher must have the student's shape ",
                         student.sym_sizes(), ", but got ", teacher.sym_sizes());
    // Of two dtypes, the narrowest that loses nothing of either: autograd casts the gradients back.
    if (log_probs) settings.roundoff = std::max(roundoff_of(dtype), roundoff_of(teacher.scalar_type()));
    dtype = c10::promoteTypes(dtype, teacher.scalar_type());
    teacher_rows = as_rows(teacher.to(dtype));
  }
  const auto rows = make_jsd_rows(op, student, tensors, std::move(row_shape), acc_type(dtype));
  const auto cast = student.to(dtype);
  const bool overwrite =
      inplace && cast.is_same(student) &&
      may_overwrite(student, {teacher, teacher_indices, tail_log_prob, labels, token_weight, normalizer});
  return to_front(op, autograd::jsd(as_rows(cast), teacher_rows, rows, settings, overwrite), rows, settings);
}

JSDOutput call(const Tensor& student, const Tensor& teacher, const OptionalTensor& indices,
               const OptionalTensor& tail_log_prob, const JSDOptions& options, const JSDAux& aux) {
  using Signature = LossTuple(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, double, double, std::optional<int64_t>,
                              std::string_view, std::string_view, double, double, int64_t, bool, const OptionalTensor&);
  static const auto functional = c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::jsd", "").typed<Signature>();
  static const auto mutating = c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::jsd_", "").typed<Signature>();
  return from_front(
      (options.inplace() ? mutating : functional)
          .call(student, teacher, indices, options.labels(), options.token_weight(),
                normalizer_on("jsd", options.normalizer(), student), options.beta(), options.temperature(),
                options.ignore_index(), options.reduction(), options.tail(), options.soft_weight(),
                options.hard_weight(), aux_bits(aux), options.log_probs(), tail_log_prob),
      aux);
}

}  // namespace

JSDOutput jsd_with_aux(const Tensor& student, const Tensor& teacher, const JSDOptions& options, const JSDAux& aux) {
  return call(student, teacher, std::nullopt, std::nullopt, options, aux);
}

JSDOutput jsd_with_aux(const Tensor& student, const TopK& teacher, const JSDOptions& options, const JSDAux& aux) {
  return call(student, teacher.log_probs, teacher.indices, teacher.tail_log_prob, options, aux);
}

Tensor jsd(const Tensor& student, const Tensor& teacher, const JSDOptions& options) {
  return jsd_with_aux(student, teacher, options, JSDAux()).loss;
}

Tensor jsd(const Tensor& student, const TopK& teacher, const JSDOptions& options) {
  return jsd_with_aux(student, teacher, options, JSDAux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("jsd", named_kernel<"jsd", jsd_op<false>>());
  m.impl("jsd_", named_kernel<"jsd", jsd_op<true>>());
}

}  // namespace fusegrad
