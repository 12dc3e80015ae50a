// The launch arguments of the kernel that second derivatives have (portable.cuh); the host includes this
// too.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// What is known of a row of scores, and its tangents. As FlexRow has delta; lse is in natural units, and in two
/// numbers (far_rows.cuh).
struct FlexPairRow {
  float lse, lse_low, delta, lse_tangent, delta_tangent;
};

/// The kernel takes heads of queries from `first_head` on, counted over all batches, and queries from `first_row` on, a
/// multiple of the tile's. Rows of results have `columns` elements, keys rounded up to a multiple of 8.
struct FlexPairTangentsArguments {
  FlexTensor query, key, value, grad_out, query_tangent, key_tangent, value_tangent, grad_out_tangent;
  const FlexPairRow* rows;  // [B, H, M]
  // [head_count, row_count, columns]: what captured tensors add to the tangents of the scores; null: nothing.
  const float* score_tangent;
  // [head_count, row_count, parts, columns] of the operands' dtype: the tangents of the weights, and where grad_out
  // has a tangent, behind them the weights; the tangents of the gradients by scale * query * key times the scale, and
  // behind them these gradients. Where there is a block mask, zeros before.
  void *weights, *gradients;
  unsigned char* seen;  // [head_count / group, columns], zeros before: with a block mask, which keys take part
  FlexTiles tiles;
  int batches, key_batches, heads, group, queries, keys, head_size, value_size;
  int first_head, head_count, first_row, row_count, columns;
  int splits;  // CTAs that share a tile of queries: each has some of its tiles of keys
  float scale;
};

}  // namespace fusegrad::device
