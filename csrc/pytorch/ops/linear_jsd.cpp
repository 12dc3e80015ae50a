#include "fusegrad/linear_jsd.h"

#include <torch/library.h>

#include <algorithm>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/jsd_settings.h"
#include "pytorch/ops/loss_front.h"

namespace fusegrad {
namespace {

using at::Tensor;

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

// The heads as the ops below take them, checked.
JsdHeads make_heads(const LinearJsdCall& call, at::ScalarType student_dtype, c10::SymIntArrayRef row_shape) {
  const auto &input = call.teacher_input, &student_input = call.student_input;
  const auto &weight = call.teacher_weight, &bias = call.options.teacher_bias();
  JsdHeads heads;
  heads.student_weight = call.student_weight;
  heads.student_bias = call.options.student_bias();
  if (call.teacher_indices.has_value()) {
    FUSEGRAD_CHECK_VALUE(!weight.has_value() && !bias.has_value(), kOp,
                         "teacher_weight and teacher_bias must be None with a top-k teacher, but got a tensor");
    heads.teacher = make_top_k(kOp, "teacher_input", input, *call.teacher_indices, student_input, row_shape,
                               acc_type(student_dtype));
    return heads;
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
  heads.teacher = as_rows(cast_input(input));
  heads.teacher_weight = weight;
  heads.teacher_bias = bias;
  return heads;
}

JsdSettings make_linear_settings(const LinearJsdCall& call) {
  const auto& o = call.options;
  auto settings = make_settings(kOp, call);
  settings.teacher_temperature = o.teacher_temperature().value_or(o.temperature());
  settings.student_softcap = o.student_softcap().value_or(0.0);
  settings.teacher_softcap = o.teacher_softcap().value_or(0.0);
  settings.student_logit_scale = o.student_logit_scale();
  settings.teacher_logit_scale = o.teacher_logit_scale();
  if (!call.teacher_indices.has_value()) return settings;
  const auto refuse = [](bool given, const char* name) {
    FUSEGRAD_CHECK_VALUE(!given, kOp, name,
                         " must be left out with a top-k teacher, whose log-probabilities are taken "
                         "as they are, but got one");
  };
  refuse(o.teacher_temperature().has_value(), "teacher_temperature");
  refuse(o.teacher_softcap().has_value(), "teacher_softcap");
  refuse(o.teacher_logit_scale() != 1.0, "teacher_logit_scale");
  settings.roundoff =
      roundoff_of_top_k(call.teacher_input, call.tail_log_prob, acc_type(call.student_input.scalar_type()));
  return settings;
}

// A call, checked.
struct CheckedLinearJsdCall {
  LinearJsdForward forward;
  std::vector<c10::SymInt> row_shape;
  bool recompute = false, overwrite = false;
};

CheckedLinearJsdCall prepare(const LinearJsdCall& call, const Shards& shards, bool inplace) {
  const auto tensors = tensors_of(call);
  const auto& student_input = call.student_input;
  const auto& o = call.options;
  FUSEGRAD_CHECK_VALUE(!shards || !o.vocab_size(), kOp,
                       "vocab_size must be None with vocab_parallel, whose parts are the rows that count, but got ",
                       o.vocab_size().value_or(0));
  check_linear(kOp, "student_input", student_input, "student_weight", call.student_weight, "student_bias",
               o.student_bias());
  const auto settings = make_linear_settings(call);
  check_budget(kOp, "student_weight", call.student_weight, o.accumulate_dtype(), o.workspace_mib());

  const auto cast = cast_input(student_input);
  std::vector<c10::SymInt> row_shape(student_input.sym_sizes().begin(), student_input.sym_sizes().end() - 1);
  LinearJsdForward forward{.student_input = as_rows(cast),
                           .heads = make_heads(call, cast.scalar_type(), row_shape),
                           .rows = {},
                           .settings = settings,
                           .linear = {o.vocab_size(), o.accumulate_dtype(), o.workspace_mib()},
                           .shards = shards};
  check_vocabularies(call.student_weight, call.teacher_weight, o.vocab_size());
  forward.rows = make_jsd_rows(kOp, student_input, call, row_shape, acc_type(cast.scalar_type()));

  const bool recompute = settings.reduction == at::Reduction::None || o.workspace_mib() == 0;
  const bool overwrite = inplace && !is_transformed(tensors) && cast.is_same(student_input) && !recompute &&
                         may_overwrite(student_input, tensors);
  return {std::move(forward), std::move(row_shape), recompute, overwrite};
}

LossTuple run(const LinearJsdCall& call, const Shards& shards, bool inplace) {
  const Parts parts{{"student_weight", 0}, {"teacher_weight", 0}, {"student_bias", 0}, {"teacher_bias", 0}};
  auto [made, different] = prepared_by_all(kOp, call, shards, parts, [&] { return prepare(call, shards, inplace); });
  auto& [forward, row_shape, recompute, overwrite] = made;
  forward.different = different;
  if (is_transformed(tensors_of(call)))
    return to_front(kOp, composite::linear_jsd(kOp, forward), row_shape, forward.settings, /*constants=*/false);
  return to_front(kOp, autograd::linear_jsd(forward, recompute, overwrite), row_shape, forward.settings);
}

}  // namespace

JSDOutput linear_jsd_with_aux(const Tensor& student_input, const Tensor& student_weight, const Tensor& teacher_input,
                              const Tensor& teacher_weight, const LinearJSDOptions& options, const JSDAux& aux) {
  return call_loss<"linear_jsd">(
      LinearJsdCall{student_input, student_weight, teacher_input, teacher_weight, {}, options, 0, {}}, student_input,
      aux);
}

JSDOutput linear_jsd_with_aux(const Tensor& student_input, const Tensor& student_weight, const TopK& teacher,
                              const LinearJSDOptions& options, const JSDAux& aux) {
  return call_loss<"linear_jsd">(
      LinearJsdCall{
          student_input, student_weight, teacher.log_probs, {}, teacher.indices, options, 0, teacher.tail_log_prob},
      student_input, aux);
}

Tensor linear_jsd(const Tensor& student_input, const Tensor& student_weight, const Tensor& teacher_input,
                  const Tensor& teacher_weight, const LinearJSDOptions& options) {
  return linear_jsd_with_aux(student_input, student_weight, teacher_input, teacher_weight, options, JSDAux()).loss;
}

Tensor linear_jsd(const Tensor& student_input, const Tensor& student_weight, const TopK& teacher,
                  const LinearJSDOptions& options) {
  return linear_jsd_with_aux(student_input, student_weight, teacher, options, JSDAux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) { LossOps<"linear_jsd", LinearJsdCall, run>::implement(m); }
// Under torch.vmap too they are compositions of other ops.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) { LossOps<"linear_jsd", LinearJsdCall, run>::implement(m); }

}  // namespace fusegrad
