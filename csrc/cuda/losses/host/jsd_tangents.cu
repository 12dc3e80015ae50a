// Launches of the tangents of the Jensen-Shannon divergence and of its gradients.
#include "cuda/losses/device/jsd_tangents.cuh"
#include "cuda/losses/host/row_launch.cuh"

namespace fusegrad::cuda {
namespace {

template <class T, bool kBoth, int kWidth>
void launch_tangents(const RowJsdTangents& p, void* stream) {
  const Rows rows{p.rows, p.cols, p.student, p.student_stride, p.grad_student != nullptr || p.grad_teacher != nullptr};
  launch_rows<device::JsdTangents<T, kBoth>, T, kWidth>(rows, p, device::JsdConstants(p), stream);
}

}  // namespace

void row_jsd_tangents(const RowJsdTangents& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("jsd", p.cols);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const auto same = [&](const void* other, int64_t stride) {
      return other == nullptr || same_alignment(p.student, p.student_stride, other, stride, sizeof(T));
    };
    const bool aligned = same(p.teacher, p.teacher_stride) && same(p.student_tangent, p.student_tangent_stride) &&
                         same(p.teacher_tangent, p.teacher_tangent_stride) &&
                         same(p.grad_student, p.grad_student_stride) && same(p.grad_teacher, p.grad_teacher_stride);
    if (p.teacher_tangent != nullptr) {
      aligned ? launch_tangents<T, true, kWidth>(p, stream) : launch_tangents<T, true, 1>(p, stream);
    } else {
      aligned ? launch_tangents<T, false, kWidth>(p, stream) : launch_tangents<T, false, 1>(p, stream);
    }
  });
}

}  // namespace fusegrad::cuda
