// From what a call asks of a kernel to the KernelSpec that answers it: family, tile, schemes of the captured buffers'
// gradients. Needs no GPU.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/attention/device/arguments.cuh"
#include "cuda/attention/plan/kernel_spec.h"
#include "score_mod/captured.h"

namespace fusegrad::cuda {

/// What a call asks of one of its kernels: all that decides which kernel it is. Built once and then constant: whoever
/// needs another makes a copy.
struct FlexCase {
  FlexKernel kernel = FlexKernel::kForward;
  DType dtype = DType::kBFloat16;
  int head_size = 0, value_size = 0;
  FlexMod score_mod, mask_mod;
  bool blocks = false;                      ///< there is a block mask
  std::array<int64_t, 2> block_size{};      ///< its blocks: tiles may lie in several of them
  bool small_lengths = true;                ///< B, H, M and N are at most 2^21
  std::vector<std::vector<int64_t>> sizes;  ///< of each buffer of the score_mod, where known
  bool split = true;                        ///< float32: full accuracy, by six products in TF32
  bool unscaled = false;                    ///< forward: the scale is positive, and there is no score_mod
  bool aligned_boxes = true;                ///< rows of what boxes hold lie together, at multiples of 16 bytes
  bool many_batches = false;            ///< so many that a CTA of the portable kernels may stay with a head for some
  int most_queries = 0, most_keys = 0;  ///< the lengths are at most so many, where that decides a tile: 64, 128; 0: any
  bool dropout = false;                 ///< there is dropout; its numbers are arguments
  bool key_splits = false;              ///< forward and dQ by itself: rows of tiles are split over several CTAs
  // forward
  bool max_scores = false, out_low = false;
  int few_rows = 0;  ///< rows of a tile whose rows are queries of several heads (few_queries.h); 0: the usual tile
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
  bool grouped = false;       ///< kGradBuffers: a CTA's batches are of one group (score_mod::batch_groups)
  bool tall = true;           ///< Hopper backward: tall tiles take less time than others
  int forward_rows = 256;     ///< Hopper forward: queries of the tallest tile that pays: 128, 192 or 256

  bool operator==(const FlexCase&) const = default;
  bool wants_buffers() const { return std::find(wants_grad.begin(), wants_grad.end(), true) != wants_grad.end(); }
};

/// FlexCase::most_queries or most_keys of a length.
int most_of(int64_t length);

/// The largest dynamic shared memory of a CTA on GPUs of a capability such as 80 or 90.
int flex_shared_limit(int capability);

/// Whether the Hopper kernels take it, and do not compute too much for head sizes between theirs. `architecture`: as
/// jit::current_architecture has it.
bool takes_hopper(const FlexCase& c, const std::string& architecture);

/// Throws where no tile fits the GPU's shared memory. What was asked last is kept: a plan takes as long as a small
/// kernel.
KernelSpec plan_kernel(const FlexCase& c, const std::string& architecture);

/// What the kernels of a backward are asked, in their order, from what they have in common. `needs_grad`: of query, key
/// and value first. dQ has a kernel of its own (kGradQuery) for D or E above 128 in the Hopper family, where two
/// kernels are faster than one though each computes the scores, and where sums must come in one order: but for where
/// one CTA has all keys, and in the Hopper family beside boxes without a block mask. There tiles of keys wait for one
/// another, which takes longer than a second kernel where scores are cheap, and less where it would read all pairs
/// again.
std::vector<FlexCase> backward_kernels(FlexCase c, const std::vector<bool>& needs_grad, bool deterministic,
                                       const std::string& architecture);

/// The columns of values of each kernel that forward mode runs: it has two outputs in registers, so they are at most
/// 128 of them.
std::vector<int> tangents_parts(int value_size);

/// Tiles of so many that hold n.
constexpr int64_t tiles_in(int64_t n, int64_t size) { return (n + size - 1) / size; }

/// FlexCase::covered for so many b, or groups of them, h, q_idx and kv_idx.
std::vector<bool> covered_buffers(const FlexCase& c, const std::array<int64_t, 4>& lengths);

/// In how many launches, one batch after the other or all at once, the backward's sums of the buffers' gradients come
/// in one order without fixed point: where each place gets one contribution a launch, and a launch fills the GPU's
/// `processors`, or gets partial sums of heads or CTAs; else 0. Of key and value so many `batches`, `heads` and `keys`.
int64_t ordered_launches(const FlexCase& c, int64_t batches, int64_t heads, int64_t keys, int64_t processors,
                         const std::string& architecture);

/// Whether a score_mod has reads of each pair by itself.
bool reads_pairs(const FlexMod& mod);

/// For tests.
void force_flex_family(std::optional<FlexFamily> family);
bool flex_family_is_forced();
/// For tests: the scheme of contributions for which it is right, instead of the planner's; 0: the planner's.
void force_flex_scheme(char scheme);

}  // namespace fusegrad::cuda
