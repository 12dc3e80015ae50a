// The vectorised CPU kernels, compiled once for each instruction set (ATen's CPU_CAPABILITY).
#pragma once

#include "common/capability.h"
#include "losses/row_kernels.h"

namespace fusegrad::cpu {

/// Rows of scratch are rounded up to a multiple of this, for whole vectors.
constexpr int64_t kPadding = 64;

/// One instruction set's kernels, each on rows [begin, end). The forward's scratch is a row of acc values, padded to
/// kPadding of them, where there is a gradient to compute, and null otherwise.
struct RowRangeKernels {
  void (*forward)(const RowForward&, DType, int64_t begin, int64_t end, void* scratch);
  void (*gradient)(const RowGradient&, DType, int64_t begin, int64_t end);
  void (*scaling)(const RowScaling&, DType, int64_t begin, int64_t end);
  void (*tangents)(const RowTangents&, DType, int64_t begin, int64_t end);
};

/// The same for the states of segments of a row.
constexpr int64_t kRowStates = 10;  // acc values
struct RowPartKernels {
  void (*part)(const RowPart&, DType, int64_t begin, int64_t end);
  void (*whole)(const RowWhole&, DType, int64_t begin, int64_t end);
};

/// The same for RowJsd; its scratch is kJsdBuffers such rows, then 3 (K + 1) doubles.
using JsdRange = void (*)(const RowJsd&, DType, int64_t begin, int64_t end, void* scratch);
constexpr int64_t kJsdBuffers = 5;

/// And for RowJsdTangents; its scratch is kJsdTangentBuffers such rows.
using JsdTangentsRange = void (*)(const RowJsdTangents&, DType, int64_t begin, int64_t end, void* scratch);
constexpr int64_t kJsdTangentBuffers = 8;

FUSEGRAD_EACH_CAPABILITY(extern const RowRangeKernels kRowRangeKernels; extern const RowPartKernels kRowPartKernels;
                         extern const JsdRange kJsdRange; extern const JsdTangentsRange kJsdTangentsRange;)

}  // namespace fusegrad::cpu
