// The vectorised CPU kernels, compiled once for each instruction set (ATen's CPU_CAPABILITY).
#pragma once

#include "rows/row_kernels.h"

namespace fusegrad::cpu {

/// One instruction set's kernels, each on rows [begin, end).
struct RowRangeKernels {
  void (*forward)(const RowForward&, DType, int64_t begin, int64_t end);
  void (*gradient)(const RowGradient&, DType, int64_t begin, int64_t end);
  void (*scaling)(const RowScaling&, DType, int64_t begin, int64_t end);
};

/// The same for RowJsd, with the caller's scratch: kJsdBuffers rows of `cols` acc values, padded to kJsdPadding of
/// them, then 3 (K + 1) doubles.
using JsdRange = void (*)(const RowJsd&, DType, int64_t begin, int64_t end, void* scratch);
constexpr int64_t kJsdBuffers = 5;
constexpr int64_t kJsdPadding = 64;

namespace DEFAULT {
extern const RowRangeKernels kRowRangeKernels;
extern const JsdRange kJsdRange;
}  // namespace DEFAULT
namespace AVX2 {
extern const RowRangeKernels kRowRangeKernels;
extern const JsdRange kJsdRange;
}  // namespace AVX2
namespace AVX512 {
extern const RowRangeKernels kRowRangeKernels;
extern const JsdRange kJsdRange;
}  // namespace AVX512

}  // namespace fusegrad::cpu
