// Launches of the tangents of cross entropy's values and of their gradient.
#include "cuda/losses/device/row_tangents.cuh"
#include "cuda/losses/host/row_launch.cuh"

namespace fusegrad::cuda {
namespace {

using device::TangentPart;

template <class T, TangentPart kPart, int kWidth>
void launch_tangents(const RowTangents& p, void* stream) {
  const device::Constants constants(p.targets, {1.0, p.softcap}, /*z_loss=*/0.0, p.cols);
  const Rows rows{p.rows, p.cols, p.logits, p.logits_stride, p.grad_tangent != nullptr};
  launch_rows<device::CrossEntropyTangents<T, kPart>, T, kWidth>(rows, p, constants, stream);
}

}  // namespace

void row_tangents(const RowTangents& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("cross entropy", p.cols);
  const bool plain = p.targets.smoothing == 0.0 && p.softcap == 0.0 && p.entropy == nullptr;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    const auto same = [&](const void* other, int64_t stride) {
      return other == nullptr || same_alignment(p.logits, p.logits_stride, other, stride, sizeof(T));
    };
    const bool aligned = same(p.tangent, p.tangent_stride) && same(p.grad_tangent, p.grad_tangent_stride);
    // Dense targets by single values: by vectors, their kernels would be as large as all the others.
    if (!aligned || p.targets.dense) return launch_tangents<T, TangentPart::kAll, 1>(p, stream);
    plain ? launch_tangents<T, TangentPart::kPlain, kWidth>(p, stream)
          : launch_tangents<T, TangentPart::kSparse, kWidth>(p, stream);
  });
}

}  // namespace fusegrad::cuda
