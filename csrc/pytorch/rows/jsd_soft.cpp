// jsd_soft and what its derivatives are, on the CPU and on CUDA.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

/// A call's tensors as the kernels read them, and the arguments that all of them have.
struct Job {
  c10::OptionalDeviceGuard guard;
  Tensor student, teacher;
  OptionalTensor labels;
  RowDevice device;
  RowJsdTangents p;

  Job(const Tensor& student_rows, const Tensor& teacher_rows, const JsdSoftSettings& s)
      : guard(at::device_of(student_rows)),
        student(dense_rows(student_rows)),
        teacher(dense_rows(teacher_rows)),
        device(row_device(student_rows.device())) {
    if (s.labels) {
      labels = s.labels->contiguous();
      check_target_range("jsd", *labels, student.size(1), s.ignore_index, "labels");
    }
    p.rows = student.size(0);
    p.cols = student.size(1);
    p.student = student.const_data_ptr();
    p.student_stride = student.stride(0);
    p.teacher = teacher.const_data_ptr();
    p.teacher_stride = teacher.stride(0);
    p.log_probs = s.log_probs;
    p.student_transform = {s.student_logit_scale, s.student_softcap};
    p.teacher_transform = {s.teacher_logit_scale, s.teacher_softcap};
    p.student_temperature = s.student_temperature;
    p.teacher_temperature = s.teacher_temperature;
    p.beta = s.beta;
    p.label = pointer_at(labels, 0);
    p.label_is_int32 = labels && labels->scalar_type() == at::kInt;
    p.ignore_index = s.ignore_index;
  }
  DType dtype() const { return to_dtype(student.scalar_type()); }
  Tensor row_values() {
    const auto values = at::zeros({p.rows}, student.options().dtype(acc_type(student.scalar_type())));
    p.soft = pointer_at(values, 0);
    return values;
  }
  std::vector<Tensor> gradients(const std::array<bool, 2>& wanted) {
    std::vector<Tensor> results;
    if (wanted[0]) {
      const auto& grad = results.emplace_back(empty_result(student.sizes(), student.options()));
      p.grad_student = grad.data_ptr();
      p.grad_student_stride = grad.stride(0);
    }
    if (wanted[1]) {
      const auto& grad = results.emplace_back(empty_result(teacher.sizes(), teacher.options()));
      p.grad_teacher = grad.data_ptr();
      p.grad_teacher_stride = grad.stride(0);
    }
    return results;
  }
};

// Tensors that a kernel reads until it has been launched.
struct Tangents {
  Tensor student, teacher;

  Tangents(Job& job, const OptionalTensor& student_tangent, const OptionalTensor& teacher_tangent) {
    const auto readable = [](const OptionalTensor& t, const Tensor& like) {
      return t ? dense_rows(t->to(like.scalar_type())) : Tensor();
    };
    student = readable(student_tangent, job.student);
    teacher = readable(teacher_tangent, job.teacher);
    if (!student.defined() && job.student.is_cuda()) student = at::zeros_like(job.student);
    if (student.defined()) {
      job.p.student_tangent = student.const_data_ptr();
      job.p.student_tangent_stride = student.stride(0);
    }
    if (teacher.defined()) {
      job.p.teacher_tangent = teacher.const_data_ptr();
      job.p.teacher_tangent_stride = teacher.stride(0);
    }
  }
};

Tensor jsd_soft(const JsdSoft& call) {
  BelowAutogradAndAutocast below;
  Job job(call.student, call.teacher, call.settings);
  const auto values = job.row_values();
  job.device.kernels->jsd(job.p, job.dtype(), job.device.stream);
  return values;
}

std::vector<Tensor> jsd_soft_gradient(const JsdSoftGradient& call) {
  BelowAutogradAndAutocast below;
  Job job(call.student, call.teacher, call.settings);
  const auto upstream = call.upstream.contiguous();
  job.p.upstream = pointer_at(upstream, 0);
  job.p.upstream_stride = 1;
  const auto results = job.gradients(call.needs_grad);
  if (!results.empty()) job.device.kernels->jsd(job.p, job.dtype(), job.device.stream);
  return results;
}

Tensor jsd_soft_tangent(const JsdSoftTangent& call) {
  BelowAutogradAndAutocast below;
  Job job(call.student, call.teacher, call.settings);
  const Tangents tangents(job, call.student_tangent, call.teacher_tangent);
  const auto values = job.row_values();
  job.device.kernels->jsd_tangents(job.p, job.dtype(), job.device.stream);
  return values;
}

std::vector<Tensor> jsd_soft_second(const JsdSoftSecond& call) {
  BelowAutogradAndAutocast below;
  Job job(call.student, call.teacher, call.settings);
  const Tangents tangents(job, call.student_tangent, call.teacher_tangent);
  const auto upstream = call.upstream.contiguous();
  const auto moved = call.upstream_tangent ? call.upstream_tangent->contiguous() : Tensor();
  job.p.upstream = pointer_at(upstream, 0);
  job.p.upstream_stride = 1;
  if (moved.defined()) job.p.upstream_tangent = pointer_at(moved, 0);
  const auto results = job.gradients(call.needs_grad);
  if (!results.empty()) job.device.kernels->jsd_tangents(job.p, job.dtype(), job.device.stream);
  return results;
}

void implement_jsd_soft(torch::Library& m) {
  m.impl("jsd_soft", named_kernel<"jsd", unpacked<jsd_soft>()>());
  m.impl("jsd_soft_gradient", named_kernel<"jsd", unpacked<jsd_soft_gradient>()>());
  m.impl("jsd_soft_tangent", named_kernel<"jsd", unpacked<jsd_soft_tangent>()>());
  m.impl("jsd_soft_second", named_kernel<"jsd", unpacked<jsd_soft_second>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_jsd_soft(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_jsd_soft(m); }
#endif

}  // namespace fusegrad
