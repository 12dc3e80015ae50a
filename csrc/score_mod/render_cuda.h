// CUDA source of a graph and of its derivative. The text is made of the table's spellings and of generated names; of
// the user's text only numbers reach it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "score_mod/captured.h"

namespace fusegrad::score_mod {

/// How a read is left out that is not to be made: score_mod::Unread of csrc/cuda/device/score_mod.cuh.
enum class Unread : uint8_t { kBranch, kPredicate, kElsewhere };

/// The texts of mods that change nothing, which are rendered where a call has none.
inline constexpr std::string_view kNoScoreMod = "score_mod 1\nreturn score\n";
inline constexpr std::string_view kNoMaskMod = "mask_mod 1\nreturn true\n";

/// How the text is specialised.
struct RenderOptions {
  std::string name = "ScoreMod";     ///< of the struct; an identifier that the caller chose, not the user
  std::vector<DType> dtypes;         ///< of each buffer
  Lengths lengths;                   ///< what stays below 2^31 under these is computed in 32 bits
  bool small_scalars = false;        ///< whether all integer scalars are between -2^30 and 2^30
  bool small_buffers = false;        ///< whether all places in buffers are below 2^31 elements: 32 bits are enough
  const Graph* score_mod = nullptr;  ///< of a derivative: whose lines it reads too
  bool given = true;                 ///< else it stands for none (kNoScoreMod, kNoMaskMod)
  bool fast_math = false;            ///< with what is as exact as 16-bit queries and keys
  Unread unread = Unread::kBranch;
};

/// RenderOptions::small_buffers and small_scalars of what a call supplies.
bool small_buffers(std::span<const Buffer> buffers);
bool small_scalars(std::span<const Value> scalars);

/// A struct that needs csrc/cuda/device/score_mod.cuh before it and nothing else, which has the types of its facts:
///
///   struct <name> {
///     struct Captured {...};   // as pack_captured fills it
///     static constexpr bool kGiven, kFastMath;  // RenderOptions
///     static constexpr Unread kUnread;
///     // of a score_mod; where `valid` is false nothing is read and the result is meaningless
///     template <class Reads = ReadThere<kUnread>>
///     static __device__ float apply(const Captured&, float score, int b, int h, int q_idx, int kv_idx, bool valid,
///                                   const Reads& reads = Reads());
///     // its reads whose places depend on the key alone, or on its distance from the query alone (and on b and h), by
///     // other such reads too, and an element of one. Each goes through reads.read<k>(pointer, there), so that it can
///     // be made for all keys or diagonals of a tile before; what is read for its place alone is no other line
///     static constexpr int kLineCount;
///     static constexpr LineRead kLine[];
///     template <int k>
///     static __device__ auto line(const Captured&, int b, int h, int q_idx, int kv_idx, bool valid);
///     // its reads of numbers at places that query and key give, each for itself, and no score, and an element of one.
///     // Each goes through reads.pair<k>(pointer, there)
///     static constexpr int kPairCount;
///     static constexpr PairRead kPair[];
///     template <int k>
///     static __device__ auto pair_read(const Captured&, int b, int h, int q_idx, int kv_idx, bool valid);
///     // with box_bytes, or where it reads_places: a query's row
///     template <int k>
///     static __device__ PairRow pair_row(const Captured&, int b, int h, int q_idx, bool valid);
///     // with a batch among its box_dimensions: its index, -1 out of range
///     template <int k>
///     static __device__ int pair_batch(const Captured&, int b);
///     // those with column_dimensions go through read_column<k>(reads, pointer, there, place in the column, its size);
///     // an element of one, NaN beyond it
///     template <int k>
///     static __device__ float pair_column(const Captured&, int h, int i);
///     template <int k>
///     static __device__ int pair_column_size(const Captured&);
///     // brings to the first-level cache what apply reads at places that depend on the key, or on its distance from
///     // the query: all of a tile are those of its first query, and where there are diagonals of its last one too
///     static constexpr bool kTouchesKeys, kTouchesDiagonals;
///     static constexpr bool kTouchesBesides;  // what are no lines too
///     static __device__ void touch(const Captured&, int b, int h, int q_idx, int kv_idx, bool valid,
///                                  unsigned nowhere);  // 4 bytes of shared memory
///     // the same of what apply reads of each pair by itself; its widest element, 0: nothing
///     static constexpr int kPairBytes;
///     static __device__ void touch_pair(const Captured&, int b, int h, int q_idx, int kv_idx, bool valid,
///                                       unsigned nowhere);
///     // of a mask_mod, whose lines are of any type, those of queries too
///     template <class Reads = ReadThere<kUnread>>
///     static __device__ bool apply(const Captured&, int b, int h, int q_idx, int kv_idx, bool valid,
///                                  const Reads& reads = Reads());
///     ... kLineCount, kLine, line as above
///     // of a tangent: that of the score_mod's result, from that of the score; meaningless where not valid. It has
///     // kLineCount, kLine and line as above
///     template <class Reads = ReadThere<kUnread>>
///     static __device__ float apply(const Captured&, float score, float grad, int b, int h, int q_idx, int kv_idx,
///                                   bool valid, const Reads& reads = Reads());
///     // of a derivative: returns d score, contribution k goes into value[k]; all 0 where not valid
///     template <class Reads = ReadThere<kUnread>>
///     static __device__ float apply(const Captured&, float score, float grad, int b, int h, int q_idx, int kv_idx,
///                                   bool valid, float* value, const Reads& reads = Reads());
///     static constexpr int kContributions;
///     static constexpr ContributionFacts kContribution[];
///     // the place of contribution k in its buffer's dense row-major gradient; -1: nowhere
///     static __device__ long long offset_<k>(const Captured&, float score, int b, int h, int q_idx, int kv_idx,
///                                            bool valid);
///     template <int k> ... offset(...);   // offset_<k>
///     // whether one contributes to several places, by axes. Those have no value and no offset, but scatter() gives
///     // them, of kPairs pairs at once: for every element
///     //   put.template put<k>(const float (&value)[kPairs], const long long (&place)[kPairs])
///     // a value is 0 where the pair is not valid; a place is that of the pair, valid or not
///     static constexpr bool kVectors;
///     template <int kPairs, class Put>
///     static __device__ void scatter(const Captured&, const float* score, const float* grad, int b, int h,
///                                    const int* q_idx, const int* kv_idx, const bool* valid, const Put& put);
///     // passes_gradient (derivative.h)
///     static constexpr bool kPasses;
///   };
///
/// A read out of range gives NaN (0 for integers, false for bools); its contribution goes nowhere.
std::string render_cuda(const Graph& graph, const RenderOptions& options);

/// The words of `Captured`: of each buffer its address, then the size and the stride (in elements) of each dimension;
/// then the scalars, floats as the bits of a double. At least one word.
std::vector<int64_t> pack_captured(const Graph& graph, std::span<const Buffer> buffers, std::span<const Value> scalars);

}  // namespace fusegrad::score_mod
