// A call of flex_attention as front ends hand it to the family. What results are written into is theirs too.
//
// Letters: B batch, H query heads, M queries, N keys, D and E the head sizes of keys and of values. `acc` is float64
// for float64 and float32 otherwise. Keys and values may have fewer heads, and a batch of 1 that stands for every b.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/tensor.h"
#include "score_mod/captured.h"

namespace fusegrad {

/// The bits of an op's `aux`: what is asked for besides the output. lse comes always.
enum FlexAuxBit : int64_t {
  kFlexMaxScores = 1,
  // For the op below the front end:
  kFlexLow = 2,         ///< out_low and lse_low, which a backward wants
  kFlexBackward = 4,    ///< a backward may follow, whose kernels may be compiled beside the forward's
  kFlexOrdered = 8,     ///< its gradients are to be the same bits in every run
  kFlexInvariant = 16,  ///< results of a query have the same bits whatever other queries, heads and batches there are
};

/// The largest D and E for which CUDA has kernels.
inline constexpr int64_t kMostHeadOnCuda = 576, kMostValueOnCuda = 512;

/// A score_mod or mask_mod: its canonical text, and what the text calls @0, @1, … and $0, $1, …
struct CapturedMod {
  std::string_view text;  ///< empty: none
  std::span<const score_mod::Buffer> buffers;
  std::span<const score_mod::Value> scalars;
};

/// Some of the blocks of a block mask: `count` [batches, heads, rows] says how many entries of `index` [batches, heads,
/// rows, columns] list key blocks.
struct BlockListView {
  const int32_t *count = nullptr, *index = nullptr;  ///< null: none
  int64_t columns = 0;
};

/// PyTorch's BlockMask: without a list no pair is masked by it.
struct BlockLists {
  BlockListView partial, full;               ///< where there is no mask_mod, partial blocks count as full
  int64_t batches = 1, heads = 1, rows = 0;  ///< of the lists; 1: for all
  std::array<int64_t, 2> block_size{};       ///< of queries and of keys
  explicit operator bool() const { return partial.count != nullptr; }
};

/// Dropout as kernels have it: of numbers of 40 bits, a pair whose number is below `threshold` is dropped, the weights
/// of the others are multiplied by `scale`. So p is a multiple of 2^-40, for which expectations are exact, and at most
/// 1 - 2^-15, for which Float16 holds probabilities times the scale.
struct FlexDropoutRule {
  static constexpr int64_t kNumbers = int64_t{1} << 40;
  int64_t threshold;
  double scale;
  explicit FlexDropoutRule(double p)
      : threshold(std::min<int64_t>(std::llround(p * kNumbers), kNumbers - (kNumbers >> 15))),
        scale(static_cast<double>(kNumbers) / static_cast<double>(kNumbers - threshold)) {}
};

/// What shapes the scores, and of what they are.
struct FlexArguments {
  TensorView query, key, value;  ///< [B, H, M, D], [B or 1, key heads, N, D], [B or 1, key heads, N, E]
  CapturedMod score_mod, mask_mod;
  BlockLists block_mask;
  double scale = 1.0;
  bool dropout = false;
  double dropout_p = 0.0;
  uint64_t dropout_seed = 0;                   ///< CPU
  const int64_t* dropout_seed_data = nullptr;  ///< CUDA: the seed, on the device
  bool full_float32 = true;                    ///< CUDA: products of float32 have its accuracy, not that of TF32
};

/// out [B, H, M, E]; lse, max_scores and max_ties (how many scores of a row equal the largest) [B, H, M] acc,
/// contiguous. out_low is what rounding took from out of 16 bits, as int8 in the units of attention/low_part.h and with
/// out's strides' order: the backward's sum of grad_out * out is subtracted from numbers that may equal it but for a
/// few places, so that rounding out to 16 bits would be its largest error by far. lse_low [B, H, M] is what rounding
/// took from lse: lse + lse_low is right to rounding of exp(s - lse) for scores of any size.
struct FlexResults {
  TensorView out, out_low;                                                              ///< out_low may be none
  void *lse = nullptr, *max_scores = nullptr, *max_ties = nullptr, *lse_low = nullptr;  ///< all but lse may be null
};

/// Adds up outputs over two sets of keys: out = weight * out + more_weight * more, with their low parts.
struct FlexMergeCall {
  TensorView out, out_low, more, more_low;               ///< [B, H, M, E]; low parts of 16 bits alone
  const void *weight = nullptr, *more_weight = nullptr;  ///< [B, H, M] acc, contiguous
};

/// A forward on CUDA.
struct FlexForwardCall {
  FlexArguments of;
  FlexResults results;
  /// For a backward that may follow: for query, key and value, then for each buffer of the score_mod; empty: none
  /// follows. Its kernels are compiled beside the forward's.
  std::vector<bool> needs_grad;
  bool deterministic = false;    ///< of that backward
  bool batch_invariant = false;  ///< kFlexInvariant
};

/// The gradient of a captured buffer, contiguous.
struct BufferGradient {
  void* data = nullptr;
  score_mod::DType dtype = score_mod::DType::kFloat32;  ///< a floating one
  int64_t count = 0;
};

/// Tangents of the inputs of a forward, none of which may be there, and of its results.
struct FlexTangentCall {
  FlexArguments of;
  TensorView query, key, value;                ///< as the inputs; none: zero
  std::vector<bool> has_tangent;               ///< of each buffer of the score_mod
  std::span<const score_mod::Buffer> buffers;  ///< those of the score_mod, then the tangents of those that have one
  FlexResults results;                         ///< out and lse, and out_low and lse_low where wanted
  TensorView out;                              ///< as results.out
  void* lse = nullptr;                         ///< [B, H, M] acc, contiguous
};

struct FlexBackwardCall {
  FlexArguments of;
  FlexResults saved;
  TensorView grad_out;                                         ///< none: zero
  const void *grad_lse = nullptr, *grad_max_scores = nullptr;  ///< [B, H, M] acc, contiguous; null: zero
  bool needs_query = false, needs_key = false, needs_value = false;
  TensorView query, key, value;     ///< as the inputs, or the inputs themselves; read where needed alone
  std::vector<bool> needs_buffers;  ///< of each buffer of the score_mod
  std::vector<BufferGradient> buffers;
  bool deterministic = false;  ///< CUDA: gradients are the same bits in every run; on the CPU they are always
  /// Called right before the first write, after all that can fail for want of memory; null: nobody wants to know.
  void (*begin_writing)() = nullptr;
};

/// What second derivatives ask of pairs, on CUDA (device::FlexPairTangentsArguments): there are pairs, and no dropout.
/// All operands have tangents, but grad_out's may be none. Letters: `heads` counts heads of queries over all batches.
struct FlexPairTangentsCall {
  FlexArguments of;
  TensorView grad_out, query, key, value, grad_out_tangent;  ///< grad_out itself, then tangents
  const float* rows = nullptr;                               ///< [B, H, M, 5] of device::FlexPairRow
  const float* score_tangent = nullptr;                      ///< [heads, rows, columns]; null: none
  /// In the query's dtype, [heads, rows, 1 or 2, columns] and [heads, rows, 2, columns].
  void *weights = nullptr, *gradients = nullptr;
  uint8_t* seen = nullptr;  ///< [heads / group, columns], written with a block mask only
  int64_t first_head = 0, head_count = 0, first_row = 0, row_count = 0, columns = 0;
};

}  // namespace fusegrad
