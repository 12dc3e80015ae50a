// What a call asks of one of its kernels, as a value.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "score_mod/captured.h"

namespace fusegrad::cuda {

/// kGradBuffers: the gradients of captured buffers alone, of which every batch has the same part. kTangents: forward
/// mode, the results and their tangents. kPairTangents: second derivatives, what pairs give to the tangents of the
/// gradients of query, key and value. kSegments, kMergeSegments: the forward with batch_invariant, and what adds up
/// segments of keys where each is a CTA's (forward/segments.h).
enum class FlexKernel : uint8_t {
  kForward,
  kBackward,
  kGradQuery,
  kGradBuffers,
  kTangents,
  kPairTangents,
  kSegments,
  kMergeSegments
};

/// A score_mod or mask_mod; without a text there is none.
struct FlexMod {
  std::string text;
  std::vector<score_mod::DType> dtypes;  ///< of its buffers
  bool small_buffers = true;             ///< every offset into a buffer is below 2^31 elements
  bool small_scalars = true;             ///< every integer scalar is between -2^30 and 2^30

  bool operator==(const FlexMod&) const = default;
};

/// What has a tangent in forward mode.
struct FlexTangentsOf {
  bool query = false, key = false, value = false;
  std::vector<bool> buffers;  ///< of the score_mod
  bool small_buffers = true;  ///< FlexMod::small_buffers of the buffers and of their tangents

  bool operator==(const FlexTangentsOf&) const = default;
};

/// Heads with more columns are wide: the portable kernels alone have them, and values come in parts (column_parts).
inline constexpr int kMostCols = 256;

/// Lengths up to here are small: a rendered mod computes indices in 32 bits.
inline constexpr int64_t kSmallLength = int64_t{1} << 21;

/// What a call asks of one of its kernels: all that decides which kernel it is. Built once and then constant: whoever
/// needs another makes a copy.
struct FlexCase {
  FlexKernel kernel = FlexKernel::kForward;
  DType dtype = DType::kBFloat16;
  int head_size = 0, value_size = 0;
  bool wide = false;  ///< the call's D or E is above kMostCols; a kernel's value_size may be a part of E. Backward: or
                      ///< one_warp_alone_fits
  FlexMod score_mod, mask_mod;
  bool blocks = false;                      ///< there is a block mask
  std::array<int64_t, 2> block_size{};      ///< its blocks: tiles may lie in several of them
  bool small_lengths = true;                ///< B, H, M and N are at most 2^21
  std::vector<std::vector<int64_t>> sizes;  ///< of each buffer of the score_mod, where known
  bool split = true;                        ///< float32: full accuracy, by six products in TF32
  bool unscaled = false;                    ///< forward: the scale is positive, and there is no score_mod
  bool aligned_boxes = true;                ///< rows of what boxes hold lie together, at multiples of 16 bytes
  std::vector<int> place_bytes;  ///< of each buffer of the score_mod the bytes of an integer in the order of threads
                                 ///< (place_order.cuh), or 0
  bool many_batches = false;     ///< so many that a CTA of the portable kernels may stay with a head for some
  int most_queries = 0, most_keys = 0;  ///< the lengths are at most so many, where that decides a tile: 64, 128; 0: any
  bool dropout = false;                 ///< there is dropout; its numbers are arguments
  bool key_splits = false;              ///< forward and dQ by itself: rows of tiles are split over several CTAs
  // forward
  bool max_scores = false, out_low = false;
  int few_rows = 0;  ///< rows of a tile whose rows are queries of several heads (few_queries.h); 0: the usual tile.
                     ///< kSegments too
  int64_t segment_keys = 0;       ///< kSegments: keys of a segment
  bool many_segments = false;     ///< kSegments: a CTA may have several
  FlexTangentsOf tangents_of;     ///< tangents
  bool grad_out_tangent = false;  ///< pair_tangents
  // backward
  std::vector<bool> wants_grad;   ///< of each buffer of the score_mod
  std::vector<int64_t> elements;  ///< of each of them
  /// Whether each of them has an element for each of the call's pairs, and no other; kGradBuffers: for each pair of a
  /// group of batches, or of all, which one CTA has.
  std::vector<bool> covered;
  bool grad_query = false, grad_key = false, grad_value = false, max_gradient = false;
  bool fixed_point = false;   ///< the buffers' gradients are summed in 64-bit fixed point
  bool ordered = false;       ///< Hopper: dQ is summed in one order
  bool whole = false;         ///< Hopper: a CTA may take all keys of a head
  bool partial_sums = false;  ///< A and B are stored head by head, F of CTAs that stay CTA by CTA
  bool sums_batches = false;  ///< CTAs that stay with a head sum up what all batches give to the same places
  bool grouped = false;       ///< kGradBuffers: a CTA's batches are of one group (score_mod::batch_groups)
  bool tall = true;           ///< Hopper backward: tall tiles take less time than others
  bool sums_wide = true;      ///< Hopper backward: with tall tiles dQ of heads above 128 is summed up, too
  bool stores_first = true;   ///< Hopper backward: the first CTA may store dQ; else all add to zeros
  int forward_rows = 256;     ///< Hopper forward: queries of the tallest tile that pays: 128, 192 or 256

  bool operator==(const FlexCase&) const = default;
  bool wants_buffers() const { return std::find(wants_grad.begin(), wants_grad.end(), true) != wants_grad.end(); }
};

int element_bytes(DType dtype);

/// FlexCase::most_queries or most_keys of a length.
int most_of(int64_t length);

}  // namespace fusegrad::cuda
