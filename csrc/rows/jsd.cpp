// jsd_forward(_) on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "rows/jsd_job.h"
#include "rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <bool inplace>
JsdTuple jsd_forward(const Tensor& student, const Tensor& teacher, const OptionalTensor& teacher_index,
                     const OptionalTensor& labels, const OptionalTensor& token_weight, const OptionalTensor& normalizer,
                     at::ArrayRef<double> numbers, bool log_probs, bool renormalize, int64_t ignore_index,
                     int64_t reduction, int64_t aux, std::array<bool, 2> needs_grad) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(student));
  const auto vocab = student.size(1);
  if (labels.has_value()) check_target_range("jsd", *labels, vocab, ignore_index, "labels");
  if (teacher_index.has_value()) check_top_k_range("jsd", *teacher_index, vocab);
  const auto settings = JsdSettings::from(numbers, log_probs, renormalize, ignore_index, reduction, aux);
  const auto gradient = [](bool wanted, const Tensor& like) {
    const auto options = like.options().requires_grad(false);
    return wanted ? empty_result(like.sizes(), options) : at::empty({0}, options);
  };
  const auto grad_student = gradient(needs_grad[0] && !inplace, student);
  const auto grad_teacher = gradient(needs_grad[1], teacher);
  const auto dtype = student.scalar_type();
  JsdJob job({teacher_index, labels, token_weight, normalizer, {}}, settings, student.size(0), vocab, dtype, student);
  job.begin_forward(/*defer=*/(needs_grad[0] || needs_grad[1]) && dtype == at::kHalf);
  job.run(inplace ? student : dense_rows(student), dense_rows(teacher), 0,
          !needs_grad[0] ? Tensor()
          : inplace      ? student
                         : grad_student,
          needs_grad[1] ? grad_teacher : Tensor());
  const auto out = job.finish_forward();
  return {out.loss, out.stats, out.scales, grad_student, grad_teacher};
}

void implement(torch::Library& m) {
  m.impl("jsd_forward", TORCH_FN(jsd_forward<false>));
  m.impl("jsd_forward_", TORCH_FN(jsd_forward<true>));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement(m); }
#endif

}  // namespace fusegrad
