// The row kernels before and after flex attention's backward: lse and delta of each query, and the rounding of dQ.
// Compiled ahead of time.
#pragma once

#include "common/dtype.h"
#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::cuda {

/// The FlexSumStates of 8 rows of sums.
constexpr int sum_chunks(int sum_cols) { return (sum_cols + 63) / 64; }

/// rows[b, h, m] from grad_out, out and what rounding took from it (data may be null), lse and its gradient (may be
/// null). With dropout rows are such that P comes out times its scale, and its gradient where it is kept without.
/// `query_sum`, [batches, heads, sum_rows, sum_cols] in any order, and `sum_states` (FlexBackwardHopperArguments)
/// become zeros; each may be null.
struct FlexRows {
  device::FlexTensor grad_out, out, out_low;
  const float *lse, *grad_lse;
  float dropout_scale;  // 1 without dropout
  int batches, heads, queries, value_size;
  int row_stride;  // of what is made: [batches, heads, row_stride]
  float* query_sum;
  int sum_rows, sum_cols;  // not below queries; a multiple of 4
  int* sum_states;
  unsigned *far, call;  // far[0] and far[1 + b * heads + h] become `call` where a row's scores are all far from 0
                        // (device/far_rows.cuh)
};
void flex_rows(const FlexRows& rows, device::FlexRow* out, DType dtype, void* stream);

/// grad_query[b, h, m, d] = sum[b, h, m, d] * scale, rounded once.
struct FlexQuerySum {
  device::FlexTensor grad_query;
  const float* sum;  // in blocks as FlexBackwardArguments::query_sum
  int batches, heads, queries, head_size;
  int sum_rows, sum_cols;
  const int* sum_states;  // null: all sums are there; else dQ is 0 where there is none
  bool transposed;        // in a block columns come before rows; else 64 rows have one state
  float scale;
};
void flex_scale_query_sum(const FlexQuerySum& p, DType dtype, void* stream);

}  // namespace fusegrad::cuda
