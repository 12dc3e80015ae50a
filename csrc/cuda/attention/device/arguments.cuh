// The launch arguments of flex attention's kernels; the host includes this too. attention/flex_attention.h
// explains the letters. Strides are in elements. Kernels read query, key, value and grad_out 16 bytes at a time: their
// innermost stride is 1 and their rows begin at multiples of 16 bytes.
#pragma once

#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/device/tensor.cuh"

namespace fusegrad::device {

/// The tiles of scores that take part: for each row of tiles (query tiles in the forward, key tiles in the backward)
/// how many there are, and the words of their TileEntry, ascending. Without a block mask `count` is null: all tiles
/// take part fully. A negative count says that the block mask lists a block that does not exist: the result is NaN.
struct FlexTiles {
  const int* count;  // [batches, heads, rows]
  const int* list;   // [batches, heads, rows, cols]
  int batches, heads, rows, cols;
  // Where tiles lie in several blocks, the state of each block (FlexBlock): [batches, heads, block_rows, block_cols].
  const unsigned char* blocks;
  int block_rows, block_cols, block_size_q, block_size_kv;
};
enum FlexTileKind : int {
  kTileFull,     // every pair takes part
  kTilePartial,  // those that the mask_mod allows
  kTileMixed,    // as the block of the pair says
  kTileNone,     // no pair, in a part of a tile
};
enum FlexBlock : unsigned char { kBlockNone, kBlockPartial, kBlockFull, kBlockBad };

/// Attention dropout (dropout.cuh).
struct FlexDropout {
  const long long* seed;
  unsigned above[8];  // of the threshold's digits, the highest one first: all bits where it is 0, else none
  unsigned rest;      // the threshold's lower 32 digits
  float scale;        // kept weights are multiplied by it
};

/// What some of a row's keys give besides an output that is not divided by the sum yet. Scores are in units of
/// FlexRowResults::unit.
struct alignas(16) FlexPartialRow {
  float max;   // the score that exponentials are relative to; -inf where no key takes part
  float sum;   // of exponentials
  float ties;  // how many scores equal `max`, where that is wanted
  float nothing;
};
/// What a row's results are made of and where they go. All but lse may be null, and out_low's data.
struct FlexRowResults {
  FlexTensor out, out_low;
  float *lse, *max_scores, *max_ties, *lse_low;  // [B, H, M]
  int value_size;
  float unit;           // what scores are multiplied by
  float dropout_scale;  // 1 without dropout
};
/// Outputs of parts of the keys, [rows, splits, cols], and what belongs to them, [rows, splits]. Row: (b * H + h) * M +
/// q. Without splits, 1, CTAs write the results themselves.
struct FlexPartials {
  float* out;
  FlexPartialRow* rows;
  int splits;
  int cols;  // E rounded up to a multiple of 4
};
struct FlexForwardArguments {
  FlexTensor query, key, value, out, out_low;
  float *lse, *max_scores, *max_ties, *lse_low;  // [B, H, M]; all but lse may be null
  FlexTiles tiles;
  int batches, key_batches, heads, group, queries, keys, head_size, value_size;
  float scale;
  FlexDropout dropout;
  FlexPartials partials;  // where keys are split over CTAs
  int together;           // few queries: heads of a group whose queries are the rows of one tile
};

/// What the forward of few queries takes besides where keys and values come by TMA.
struct FlexForwardFewArguments {
  TensorMap key, value;  // [batch, head, row, column]; boxes of 64 columns of a warp's keys, swizzled
};

/// What the Hopper forward takes besides.
struct FlexForwardHopperArguments {
  TensorMap query, key, value;  // [batch, head, row, column]; boxes of 64 columns of a tile's rows, swizzled
  int* next;                    // with a block mask, 0 before: how many tiles of queries CTAs began beyond their first
  int section;  // heads whose tiles of queries begin together, by their place in the head, the last ones first
  TensorMap boxes[kMostBoxMaps];  // of what a score_mod reads for each pair by itself (kMaps), boxes of 64 keys
};

/// What the backward needs of a row of scores.
struct FlexRow {
  // With dropout probabilities come out times its scale: lse is less the scale's logarithm, delta divided by the scale.
  // For 16-bit elements it is times log2(e). It is infinite where no key takes part, so that probabilities are 0; -0
  // where all scores are far from 0 (far_rows.cuh).
  float lse;
  float delta;  // sum of grad_out * out, less grad_lse
};

/// Fixed point has at most so many bits below the power of two above the largest contribution.
constexpr int kFlexFixedBits = 34;

/// The sums of a contribution to a captured buffer's gradient.
struct FlexSums {
  void* data;            // of the buffer's elements: float, or long long where they are fixed point
  const float* largest;  // fixed point: the largest magnitude of a contribution
  // Partial sums: `data` has floats, zeros before. Classes A and B have one for each head of queries, part of the
  // queries (kShare) and key, keys rounded up to whole tiles; class F has one for each CTA and element of its table.
  // Here is the element of each that is not 0.
  long long* elements;
};

/// Groups of batches. Group g has every batch_stride-th batch from g * group_stride on; if that is every batch, the
/// next group begins where it ends.
struct FlexBatchGroups {
  int groups, group_stride, batch_stride;
};

struct FlexBackwardArguments {
  FlexTensor query, key, value, grad_out, grad_query, grad_key, grad_value;
  const FlexRow* rows;         // [B, H, row_stride]
  const float *lse, *lse_low;  // [B, H, M]; read of far rows alone
  const unsigned* far;         // [1 + B * H] equal `call` where a row is far, of all and of a head: none is cleared
  unsigned call;
  const float *max_scores, *grad_max;  // [B, H, M]; null without a gradient of max_scores
  // The sum of which dQ is made where CTAs add it up, less the scale; zeros before, unless the first CTA stores it. It
  // lies in blocks of 8 queries and 8 columns, [B, H, sum_rows / 8, sum_cols / 8, 8, 8]; in the Hopper kernels' blocks
  // columns come before queries, unless dQ is upright. Where a CTA has all keys of a head (kWhole), of each CTA those
  // of the heads that share the keys.
  float* query_sum;
  int sum_rows, sum_cols;  // M rounded up to whole tiles, D to a multiple of 16
  float* largest;          // [captured buffers], zeros before: the largest magnitudes, where they are wanted
  FlexTiles tiles;
  int batches, key_batches, heads, group, queries, keys, head_size, value_size;
  int row_stride;  // queries, rounded up to an even number: TMA begins at multiples of 16 bytes
  float scale;
  int fixed_bits;  // fixed point: a unit is 2^-fixed_bits of the power of two above the largest contribution
  FlexDropout dropout;
  int splits;                    // dQ by itself: where keys are split, grad_query is float [splits * B, H, M, D]
  FlexBatchGroups batch_groups;  // of the kernel for the gradients of buffers by themselves
};

/// Whether there is a sum of dQ for some queries, where the first CTA stores its part and the others add theirs
/// (kStoresFirst).
enum FlexSumState : int { kSumMissing, kSumBeingStored, kSumStored };

/// Where a CTA has all keys of a head and there is a block mask, 64 bits have of each tile of queries how many tiles of
/// keys it has, so many bits each (whole_head.cuh): what bounds the lengths.
constexpr int kWholeHeadBits = 4;

/// What the Hopper backward takes besides.
struct FlexBackwardHopperArguments {
  TensorMap query, key, value, grad_out;  // [batch, head, row, column]; boxes of 64 columns of a tile's rows, swizzled,
                                          // or of 32 (kNarrow)
  TensorMap grad_query;                   // boxes of the queries whose dQ a warpgroup sums up, where a CTA has all keys
  TensorMap grad_key, grad_value;         // boxes of 64 keys, where CTAs store them so
  TensorMap grad_scores;                  // dS of each pair, boxes of 64 keys, where CTAs store it (kStoredTiles)
  TensorMap rows;                         // FlexRow as numbers of 8 bytes: [B * H * row_stride]; boxes of a tile's rows
  int* next;                              // as FlexForwardHopperArguments has it; where dQ is summed in one order: two
                                          // numbers, 0 before, of which CTAs take tiles of keys (next_id)
  int section;                            // heads of keys whose tiles are begun in the order of their place in the head
  int first_head, heads;                  // heads of keys of the launch
  TensorMap boxes[kMostBoxMaps];          // as FlexForwardHopperArguments has them
  // Where dQ is summed in one order: of each tile of queries and part of it that a warpgroup adds, how many tiles of
  // keys have been added, zeros before: [B, H, tiles of queries, 2].
  int* added;
  // Where the first CTA stores dQ's sum: a FlexSumState for each 8 queries and 64 columns, zeros before:
  // [B, H, sum_rows / 8, (D + 63) / 64]. Where dQ is upright, the first of eight states is that of 64 queries.
  int* sum_states;
};

}  // namespace fusegrad::device
