// jsd_forward(_) on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "losses/linear_plan.h"
#include "pytorch/ops/faults.h"
#include "pytorch/rows/jsd_job.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

// Rows of a chunk over shards, which hold some ten tensors of a part's logits in acc at a time.
int64_t rows_at_a_time(const Tensor& student, const Shards& shards) {
  const auto size = static_cast<int64_t>(at::elementSize(acc_type(student.scalar_type())));
  const int64_t row_bytes = 10 * std::max<int64_t>(shards.largest(), 1) * size;
  return std::max<int64_t>(1, (student.is_cpu() ? 32 : 512) * kMiB / row_bytes);
}

template <bool inplace>
JsdTuple jsd_forward(const JsdForward& call) {
  BelowAutogradAndAutocast below;
  const auto& [student, teacher, rows, settings, needs_grad, shards, different] = call;
  const c10::OptionalDeviceGuard device(at::device_of(student));
  const auto vocab = shards ? shards.vocab() : student.size(1);
  if (rows.labels.has_value()) check_target_range("jsd", *rows.labels, vocab, settings.ignore_index, "labels");
  if (rows.teacher_index.has_value()) check_top_k("jsd", teacher, rows, settings, vocab);
  if (settings.log_probs && !shards) {
    check_log_probs("jsd", "student", student, rows, settings);
    check_log_probs("jsd", "teacher", teacher, rows, settings);
  }
  const auto gradient = [](bool wanted, const Tensor& like) {
    const auto options = like.options().requires_grad(false);
    return wanted ? empty_result(like.sizes(), options) : at::empty({0}, options);
  };
  const auto grad_student = gradient(needs_grad[0] && !inplace, student);
  const auto grad_teacher = gradient(needs_grad[1], teacher);
  const auto dtype = student.scalar_type();
  JsdJob job(rows, settings, student.size(0), vocab, dtype, student);
  job.set_shards("jsd", shards, different);
  job.begin_forward(/*defer=*/(needs_grad[0] || needs_grad[1]) && dtype == at::kHalf);
  const auto x = inplace ? student : dense_rows(student), y = dense_rows(teacher);
  const int64_t count = x.size(0), most = shards ? rows_at_a_time(x, shards) : std::max<int64_t>(count, 1);
  for (int64_t first = 0; first < count; first += most) {
    const auto of = [&](const Tensor& t) { return part(t, 0, first, std::min(most, count - first)); };
    if (inplace && first == 0) begin_overwriting("the student");
    job.run(of(x), of(y), first,
            !needs_grad[0] ? Tensor()
            : inplace      ? of(student)
                           : of(grad_student),
            needs_grad[1] ? of(grad_teacher) : Tensor());
  }
  const auto out = job.finish_forward();
  return {out.loss, out.stats, out.scales, grad_student, grad_teacher};
}

void implement_jsd(torch::Library& m) {
  m.impl("jsd_forward", named_kernel<"jsd", unpacked<jsd_forward<false>>()>());
  m.impl("jsd_forward_", named_kernel<"jsd", unpacked<jsd_forward<true>>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_jsd(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_jsd(m); }
#endif

}  // namespace fusegrad
