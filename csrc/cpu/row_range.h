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

namespace DEFAULT {
extern const RowRangeKernels kRowRangeKernels;
}
namespace AVX2 {
extern const RowRangeKernels kRowRangeKernels;
}
namespace AVX512 {
extern const RowRangeKernels kRowRangeKernels;
}

}  // namespace fusegrad::cpu
