// Launches of cross entropy's forward over whole rows.
#include "cuda/losses/device/cross_entropy.cuh"
#include "cuda/losses/host/row_launch.cuh"

namespace fusegrad::cuda {
namespace {

using device::CrossEntropy;
using device::Mode;

template <class T, Mode kMode>
void launch_aligned(const RowForward& p, void* stream) {
  constexpr int kWidth = 16 / sizeof(T);
  using Loss = CrossEntropy<T, kMode>;
  const device::Constants constants(p.targets, p.transform, p.z_loss, p.cols);
  const Rows rows{p.rows, p.cols, p.logits, p.logits_stride, p.grad != nullptr, !p.alone};
  if (p.grad == nullptr || same_alignment(p.logits, p.logits_stride, p.grad, p.grad_stride, sizeof(T))) {
    launch_rows<Loss, T, kWidth>(rows, p, constants, stream);
  } else {
    launch_rows<Loss, T, 1>(rows, p, constants, stream);
  }
}

}  // namespace

void row_forward(const RowForward& p, DType dtype, void* stream) {
  if (p.rows == 0) return;
  check_columns("cross entropy", p.cols);
  const bool simple =
      p.targets.smoothing == 0.0 && p.transform.cap == 0.0 && p.predicted == nullptr && !p.targets.dense && !p.alone;
  const bool plain = simple && p.transform.scale > 0.0 && p.row_scale == nullptr && p.entropy == nullptr;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.targets.dense) {
      launch_aligned<T, Mode::kDense>(p, stream);
    } else if (plain) {
      launch_aligned<T, Mode::kPlain>(p, stream);
    } else if (simple && p.entropy != nullptr) {
      launch_aligned<T, Mode::kMoments>(p, stream);
    } else {
      launch_aligned<T, Mode::kSparse>(p, stream);
    }
  });
}

}  // namespace fusegrad::cuda
