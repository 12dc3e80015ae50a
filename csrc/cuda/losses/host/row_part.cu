// Launches of the kernels whose rows have the same bits in every call, and in every process that has some of their
// segments.
#include "cuda/losses/device/row_part.cuh"

#include "common/division.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/losses/host/row_kernels.h"

namespace fusegrad::cuda {
namespace {

using device::Mode;
using device::RowSums;

static_assert(sizeof(RowSums<Mode::kSparse>) == kRowStates * sizeof(float));
static_assert(sizeof(RowSums<Mode::kDense>) == kRowStates * sizeof(float));

}  // namespace

void row_part(const RowPart& p, DType dtype, void* stream) {
  if (p.rows == 0) return;
  check_columns("cross entropy", p.cols);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!is_aligned(p.logits, p.logits_stride, sizeof(T), device::kUnitBytes) || p.segment % kGpuSegmentUnit != 0) {
      fail("fusegrad: row_part_kernel: segments of rows must begin at multiples of 16 bytes");
    }
    const auto kernel =
        p.targets.dense ? device::row_part_kernel<T, Mode::kDense> : device::row_part_kernel<T, Mode::kSparse>;
    launch("row_part_kernel", kernel, {p.rows * p.segments, device::kPartThreads}, stream, p,
           device::Constants(p.targets, p.transform, p.z_loss, p.vocab));
  });
}

void row_whole(const RowWhole& p, DType dtype, void* stream) {
  if (p.rows == 0) return;
  auto whole = p;
  whole.cols = p.vocab;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel =
        p.targets.dense ? device::row_whole_kernel<T, Mode::kDense> : device::row_whole_kernel<T, Mode::kSparse>;
    launch("row_whole_kernel", kernel,
           {ceil_div(p.rows * kVocabSegments, int64_t{device::kPartThreads}), device::kPartThreads}, stream, whole,
           device::Constants(p.targets, p.transform, p.z_loss, p.vocab));
  });
}

}  // namespace fusegrad::cuda
