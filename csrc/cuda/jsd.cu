// The Jensen-Shannon divergences over whole rows.
#include "cuda/device/jsd.cuh"
#include "cuda/device/jsd_topk.cuh"
#include "cuda/row_launch.cuh"

namespace fusegrad::cuda {
namespace {

using device::Jsd;
using device::JsdConstants;
using device::JsdOfLogProbs;

/// Whether one split of a row into vectors suits all rows of the call.
bool same_alignments(const RowJsd& p, int64_t size) {
  const auto same = [&](const void* other, int64_t stride) {
    return other == nullptr || same_alignment(p.student, p.student_stride, other, stride, size);
  };
  return (p.teacher_index != nullptr || same(p.teacher, p.teacher_stride)) &&
         same(p.grad_student, p.grad_student_stride) && same(p.grad_teacher, p.grad_teacher_stride);
}

template <class Loss, class T, int kWidth>
void launch_jsd(const RowJsd& p, void* stream) {
  const Rows rows{p.rows, p.cols, p.student, p.student_stride, p.grad_student != nullptr || p.grad_teacher != nullptr};
  launch_rows<Loss, T, kWidth>(rows, p, JsdConstants(p), stream);
}

/// The K logits of each row. An index out of range gives NaN, which makes the row's loss NaN.
template <class T>
__global__ void gather_kernel(const __grid_constant__ RowJsd p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.rows * p.topk) return;
  const int64_t row = i / p.topk, c = static_cast<const int64_t*>(p.teacher_index)[i];
  const auto* student = static_cast<const T*>(p.student) + row * p.student_stride;
  static_cast<float*>(p.topk_logits)[i] = c >= 0 && c < p.cols ? device::widen(student[c]) : device::not_a_number();
}

template <class T, int kWidth>
void launch_topk(const RowJsd& p, void* stream) {
  constexpr int kThreads = 256;
  launch("gather_kernel", gather_kernel<T>, {(p.rows * p.topk + kThreads - 1) / kThreads, kThreads}, stream, p);
  launch_jsd<device::JsdTopK<T>, T, kWidth>(p, stream);
}

}  // namespace

void row_jsd(const RowJsd& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("jsd", p.cols);
  const auto is_plain = [](const LogitTransform& t) { return t.cap == 0.0 && t.scale > 0.0; };
  const bool plain = is_plain(p.student_transform) && is_plain(p.teacher_transform) && p.grad_teacher == nullptr &&
                     ((p.hard_weight == 0.0 && p.hard == nullptr) || p.student_temperature == 1.0);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const bool aligned = same_alignments(p, sizeof(T));
    if (p.teacher_index != nullptr) {
      aligned ? launch_topk<T, kWidth>(p, stream) : launch_topk<T, 1>(p, stream);
    } else if (p.log_probs) {
      aligned ? launch_jsd<JsdOfLogProbs<T>, T, kWidth>(p, stream) : launch_jsd<JsdOfLogProbs<T>, T, 1>(p, stream);
    } else if (plain && aligned) {
      launch_jsd<Jsd<T, true>, T, kWidth>(p, stream);
    } else {
      aligned ? launch_jsd<Jsd<T, false>, T, kWidth>(p, stream) : launch_jsd<Jsd<T, false>, T, 1>(p, stream);
    }
  });
}

}  // namespace fusegrad::cuda
