#include "fusegrad/linear_jsd.h"

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

constexpr const char* kOp = "linear_jsd";

// Under autocast only the inputs are cast here: the op itself rounds the weights, so that a float32 weight gets its
// gradient in float32.
Tensor cast_input(const Tensor& input) {
  const auto dtype = autocast_dtype(input).value_or(input.scalar_type());
  return input.scalar_type() == at::kDouble ? input : input.to(dtype);
}

void check_vocabularies(const Tensor& student_weight, const OptionalTensor& teacher_weight,
                        std::optional<int64_t> vocab_size) {
  const auto vocab = student_weight.sym_size(0);
  if (vocab_size.has_value()) {
    const auto check = [&](const char* name, const Tensor& weight) {
      FUSEGRAD_CHECK_VALUE(*vocab_size >= 1 && weight.sym_size(0) >= *vocab_size, kOp, "vocab_size must be in [1, ",
                           weight.sym_size(0), "], the rows of ", name, ", but got ", *vocab_size);
    };
    check("student_weight", student_weight);
    if (teacher_weight.has_value()) check("teacher_weight", *teacher_weight);
  } else if (teacher_weight.has_value()) {
    FUSEGRAD_CHECK_VALUE(teacher_weight->sym_size(0) == vocab, kOp,
                         "teacher_weight must have the student's V = ", vocab,
                         " rows, or vocab_size must be given, but got ", teacher_weight->sym_sizes());
  }
}

// The teacher as the ops below take it, checked.
JsdTeacher make_teacher(const Tensor& student_input, at::ScalarType student_dtype, c10::SymIntArrayRef row_shape,
                        const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& indices) {
  if (indices.has_value()) {
    FUSEGRAD_CHECK_VALUE(!weight.has_value() && !bias.has_value(), kOp,
                         "teacher_weight and teacher_bias must be None with a top-k teacher, but got a tensor");
    return {make_top_k(kOp, "teacher_input", input, *indices, student_input, row_shape, acc_type(student_dtype)),
            std::nullopt, std::nullopt};
  }
  FUSEGRAD_CHECK_TYPE(weight.has_value(), kOp,
                      "teacher_weight must be a tensor, but got None and a teacher that is not top-k");
  check_linear(kOp, "teacher_input", input, "teacher_weight", *weight, "teacher_bias", bias);
  check_same_device(kOp, "teacher_input", input, student_input);
  const auto shape = input.sym_sizes();
  FUSEGRAD_CHECK_VALUE(shape.slice(0, shape.size() - 1) == row_shape, kOp,
                       "teacher_input must have shape [..., H] with rows ", row_shape, ", but got ", shape);
  check_no_grad(kOp, "teacher_input", input);
  check_no_grad(kOp, "teacher_weight", *weight);
  if (bias.has_value()) check_no_grad(kOp, "teacher_bias", *bias);
  return {as_rows(cast_input(input)), weight, bias};
}

template <bool inplace>
LossTuple linear_jsd_op(const Tensor& student_input, const Tensor& student_weight, const Tensor& teacher_input,
                        const OptionalTensor& teacher_weight, const OptionalTensor& teacher_indices,
                        const OptionalTensor& student_bias, const OptionalTensor& teacher_bias,
                        const OptionalTensor& labels, const OptionalTensor& token_weight,
                        const OptionalTensor& normalizer, double beta, double temperature,
                        std::optional<int64_t> ignore_index, std::string_view reduction, std::string_view tail,
                        double soft_weight, double hard_weight, int64_t aux, std::optional<double> teacher_temperature,
                        std::optional<double> student_softcap, std::optional<double> teacher_softcap,
                        double student_logit_scale, double teacher_logit_scale, std::optional<int64_t> vocab_size,
                        std::optional<at::ScalarType> accumulate_dtype, std::optional<int64_t> workspace_mib,
                        const OptionalTensor& tail_log_prob) {
  refuse_transforms(kOp, {student_input, student_weight, teacher_input, teacher_weight, teacher_indices, student_bias,
                          teacher_bias, labels, token_weight, normalizer, tail_log_prob});
  check_linear(kOp, "student_input", student_input, "student_weight", student_weight, "student_bias", student_bias);
  const JsdTensors tensors{teacher_indices, tail_log_prob, labels, token_weight, normalizer};
  JsdSettings settings;
  settings.beta = beta;
  settings.student_temperature = temperature;
  settings.teacher_temperature = teacher_temperature.value_or(temperature);
  settings.student_softcap = checked_softcap(kOp, "student_softcap", student_softcap);
  settings.teacher_softcap = checked_softcap(kOp, "teacher_softcap", teacher_softcap);
  settings.student_logit_scale = student_logit_scale;
  settings.teacher_logit_scale = teacher_logit_scale;
  settings.soft_weight = soft_weight;
  settings.hard_weight = hard_weight;
  settings.aux = aux;
  if (teacher_indices.has_value()) {
    const auto refuse = [](bool given, const char* name) {
      FUSEGRAD_CHECK_VALUE(!given, kOp, name,
                           " must be left out with a top-k teacher, whose log-probabilities are taken "
                           "as they are, but got one");
    };
    refuse(teacher_temperature.has_value(), "teacher_temperature");
    refuse(teacher_softcap.has_value(), "teacher_softcap");
    refuse(teacher_logit_scale != 1.0, "teacher_logit_scale");
    settings.roundoff =
        std::max(roundoff_of(teacher_input.scalar_type()), roundoff_of(acc_type(student_input.scalar_type())));
  }
  complete_settings(kOp, settings, tensors, ignore_index, reduction, tail);
  check_budget(kOp, "student_weight", student_weight, accumulate_dtype, workspace_mib);

  const auto cast = cast_input(student_input);
  std::vector<c10::SymInt> row_shape(student_input.sym_sizes().begin(), student_input.sym_sizes().end() - 1);
  const auto teacher = make_teacher(student_input, cast.scalar_type(), row_shape, teacher_input, teacher_weight,
                                    teacher_bias, teacher_indices);
  check_vocabularies(student_weight, teacher_weight, vocab_size);
  const auto rows = make_jsd_rows(kOp, student_input, tensors, std::move(row_shape), acc_type(cast.scalar_type()));
  LinearOptions linear;
  linear.accumulate_dtype = accumulate_dtype;
  linear.workspace_mib = workspace_mib;
  linear.vocab_size = vocab_size;

  const bool recompute = settings.reduction == at::Reduction::None || workspace_mib == 0;
  const bool overwrite =
      inplace && cast.is_same(student_input) && !recompute &&
      may_overwrite(student_input, {student_weight, student_bias, teacher_input, teacher_weight, teacher_bias,
                                    teacher_indices, tail_log_prob, labels, token_weight, normalizer});
  return to_front(kOp,
                  autograd::linear_jsd(as_rows(cast), student_weight, student_bias, teacher, rows, settings, linear,
                                       recompute, overwrite),
                  rows, settings);
}

JSDOutput call(const Tensor& student_input, const Tensor& student_weight, const Tensor& teacher_input,
               const OptionalTensor& teacher_weight, const OptionalTensor& indices, const OptionalTensor& tail_log_prob,
               const LinearJSDOptions& options, const JSDAux& aux) {
  using Signature = LossTuple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, double, double, std::optional<int64_t>,
                              std::string_view, std::string_view, double, double, int64_t, std::optional<double>,
                              std::optional<double>, std::optional<double>, double, double, std::optional<int64_t>,
                              std::optional<at::ScalarType>, std::optional<int64_t>, const OptionalTensor&);
  static const auto functional =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::linear_jsd", "").typed<Signature>();
  static const auto mutating =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::linear_jsd_", "").typed<Signature>();
  return from_front(
      (options.inplace() ? mutating : functional)
          .call(student_input, student_weight, teacher_input, teacher_weight, indices, options.student_bias(),
                options.teacher_bias(), options.labels(), options.token_weight(),
                normalizer_on("linear_jsd", options.normalizer(), student_input), options.beta(), options.temperature(),
                options.ignore_index(), options.reduction(), options.tail(), options.soft_weight(),
                options.hard_weight(), aux_bits(aux), options.teacher_temperature(), options.student_softcap(),
                options.teacher_softcap(), options.student_logit_scale(), options.teacher_logit_scale(),
                options.vocab_size(), options.accumulate_dtype(), options.workspace_mib(), tail_log_prob),
      aux);
}

}  // namespace

JSDOutput linear_jsd_with_aux(const Tensor& student_input, const Tensor& student_weight, const Tensor& teacher_input,
                              const Tensor& teacher_weight, const LinearJSDOptions& options, const JSDAux& aux) {
  return call(student_input, student_weight, teacher_input, teacher_weight, std::nullopt, std::nullopt, options, aux);
}

JSDOutput linear_jsd_with_aux(const Tensor& student_input, const Tensor& student_weight, const TopK& teacher,
                              const LinearJSDOptions& options, const JSDAux& aux) {
  return call(student_input, student_weight, teacher.log_probs, std::nullopt, teacher.indices, teacher.tail_log_prob,
              options, aux);
}

Tensor linear_jsd(const Tensor& student_input, const Tensor& student_weight, const Tensor& teacher_input,
                  const Tensor& teacher_weight, const LinearJSDOptions& options) {
  return linear_jsd_with_aux(student_input, student_weight, teacher_input, teacher_weight, options, JSDAux()).loss;
}

Tensor linear_jsd(const Tensor& student_input, const Tensor& student_weight, const TopK& teacher,
                  const LinearJSDOptions& options) {
  return linear_jsd_with_aux(student_input, student_weight, teacher, options, JSDAux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("linear_jsd", named_kernel<"linear_jsd", linear_jsd_op<false>>());
  m.impl("linear_jsd_", named_kernel<"linear_jsd", linear_jsd_op<true>>());
}

}  // namespace fusegrad
