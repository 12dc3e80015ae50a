// What flex attention on CUDA computes before and after its kernels: lists of tiles, a few numbers a row. Compiled
// ahead of time.
#pragma once

#include "cuda/device/flex_arguments.cuh"
#include "rows/row_kernels.h"

namespace fusegrad::cuda {

/// The lists of a block mask as PyTorch has them: [batches, heads, rows] and [batches, heads, rows, cols].
struct FlexBlockList {
  const int *count, *index;
};

/// blocks[batches, heads, rows, cols] (device::FlexBlock), zeros before. A block that is not below `cols` makes its row
/// begin with kBlockBad.
struct FlexBlockMap {
  FlexBlockList partial, full;  // full.count may be null
  int batches, heads, rows, cols;
  int list_cols_partial, list_cols_full;
  bool distinguish;  // false: partial blocks count as full, since there is no mask_mod
};
void flex_block_map(const FlexBlockMap& map, unsigned char* blocks, void* stream);

/// Lists of tiles of `tile_q` queries and `tile_kv` keys; by_key: of each tile of keys its tiles of queries.
struct FlexTileLists {
  int queries, keys, tile_q, tile_kv;
  bool by_key;
  int parts = 1;        // of a tile's queries, each with a kind of its own; not by key
  int* zero = nullptr;  // a number that becomes 0, where a kernel wants one
};
void flex_tile_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, int* count, int* list, void* stream);

/// The same lists without the states of blocks, in one kernel instead of three: where it takes them.
bool takes_direct_lists(const FlexBlockMap& map, const FlexTileLists& lists, int64_t block_size_q,
                        int64_t block_size_kv);
void flex_direct_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, const FlexBlockMap& map, int* count,
                       int* list, void* stream);

/// rows[b, h, m] from grad_out, out and what rounding took from it (data may be null), lse and its gradient (may be
/// null). With `query_sum`, [batches, heads, sum_rows, sum_cols] in any order, that becomes zeros.
struct FlexRows {
  device::FlexTensor grad_out, out, out_low;
  const float *lse, *grad_lse;
  int batches, heads, queries, value_size;
  int row_stride;  // of what is made: [batches, heads, row_stride]
  float* query_sum;
  int sum_rows, sum_cols;  // not below queries; a multiple of 4
};
void flex_rows(const FlexRows& rows, device::FlexRow* out, DType dtype, void* stream);

/// grad_query[b, h, m, d] = sum[b, h, m, d] * scale, rounded once.
struct FlexQuerySum {
  device::FlexTensor grad_query;
  const float* sum;  // in blocks as FlexBackwardArguments::query_sum
  int batches, heads, queries, head_size;
  int sum_rows, sum_cols;
  bool transposed;  // in a block columns come before rows
  float scale;
};
void flex_scale_query_sum(const FlexQuerySum& p, DType dtype, void* stream);

/// Partial sums (device::FlexSums), `count` of them: the largest of the magnitudes and `largest`, NaN above all; and
/// their own sums, added to those of the elements, in fixed point.
void flex_largest(const float* sums, int64_t count, float* largest, void* stream);
void flex_add_partial_sums(const float* sums, const int64_t* elements, int64_t count, const float* largest,
                           int fixed_bits, int64_t* out, void* stream);

/// out[i] = sums[i] as a float: fixed point made for `largest` (device::FlexSums).
void flex_fixed_to_float(const int64_t* sums, const float* largest, int fixed_bits, int64_t elements, float* out,
                         void* stream);

}  // namespace fusegrad::cuda
