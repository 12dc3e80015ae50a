#include "fusegrad/jsd.h"

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

constexpr const char* kOp = "jsd";

// A call, checked.
struct CheckedJsdCall {
  JsdForward forward;
  std::vector<c10::SymInt> row_shape;
  bool overwrite = false;
};

CheckedJsdCall prepare(const JsdCall& call, const Shards& shards, bool inplace) {
  const auto tensors = tensors_of(call);
  const auto &student = call.student, &teacher = call.teacher;
  check_floating(kOp, "student", student);
  FUSEGRAD_CHECK_VALUE(student.dim() >= 1, kOp, "student must have shape [..., V], but got a 0-d tensor");
  auto settings = make_settings(kOp, call);

  std::vector<c10::SymInt> row_shape(student.sym_sizes().begin(), student.sym_sizes().end() - 1);
  auto dtype = student.scalar_type();
  Tensor teacher_rows;
  if (call.teacher_indices.has_value()) {
    teacher_rows = make_top_k(kOp, "teacher", teacher, *call.teacher_indices, student, row_shape, acc_type(dtype));
    settings.roundoff = roundoff_of_top_k(teacher, call.tail_log_prob, acc_type(dtype));
  } else {
    check_floating(kOp, "teacher", teacher);
    check_same_device(kOp, "teacher", teacher, student);
    FUSEGRAD_CHECK_VALUE(teacher.sym_sizes() == student.sym_sizes(), kOp, "teacher must have the student's shape ",
                         student.sym_sizes(), ", but got ", teacher.sym_sizes());
    // For two dtypes, the narrowest that loses nothing of either: autograd casts the gradients back.
    if (settings.log_probs) settings.roundoff = std::max(roundoff_of(dtype), roundoff_of(teacher.scalar_type()));
    dtype = c10::promoteTypes(dtype, teacher.scalar_type());
    teacher_rows = as_rows(teacher.to(dtype));
  }
  const auto cast = student.to(dtype);
  JsdForward forward{.student = as_rows(cast),
                     .teacher = teacher_rows,
                     .rows = make_jsd_rows(kOp, student, call, row_shape, acc_type(dtype)),
                     .settings = settings,
                     .shards = shards};
  const bool overwrite =
      inplace && !is_transformed(tensors) && cast.is_same(student) && may_overwrite(student, tensors);
  return {std::move(forward), std::move(row_shape), overwrite};
}

LossTuple run(const JsdCall& call, const Shards& shards, bool inplace) {
  const int64_t last = call.student.dim() - 1;
  const Parts parts{{"student", last}, {call.teacher_indices ? "" : "teacher", last}};
  auto [made, different] = prepared_by_all(kOp, call, shards, parts, [&] { return prepare(call, shards, inplace); });
  auto& [forward, row_shape, overwrite] = made;
  forward.different = different;
  if (is_transformed(tensors_of(call)))
    return to_front(kOp, composite::jsd(kOp, forward), row_shape, forward.settings, /*constants=*/false);
  return to_front(kOp, autograd::jsd(forward, overwrite), row_shape, forward.settings);
}

}  // namespace

JSDOutput jsd_with_aux(const Tensor& student, const Tensor& teacher, const JSDOptions& options, const JSDAux& aux) {
  return call_loss<"jsd">(JsdCall{student, teacher, {}, options, 0, {}}, student, aux);
}

JSDOutput jsd_with_aux(const Tensor& student, const TopK& teacher, const JSDOptions& options, const JSDAux& aux) {
  return call_loss<"jsd">(JsdCall{student, teacher.log_probs, teacher.indices, options, 0, teacher.tail_log_prob},
                          student, aux);
}

Tensor jsd(const Tensor& student, const Tensor& teacher, const JSDOptions& options) {
  return jsd_with_aux(student, teacher, options, JSDAux()).loss;
}

Tensor jsd(const Tensor& student, const TopK& teacher, const JSDOptions& options) {
  return jsd_with_aux(student, teacher, options, JSDAux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) { LossOps<"jsd", JsdCall, run>::implement(m); }
// Under torch.vmap too they are compositions of other ops.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) { LossOps<"jsd", JsdCall, run>::implement(m); }

}  // namespace fusegrad
