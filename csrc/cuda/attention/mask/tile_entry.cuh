// An entry of a list of tiles (FlexTiles::list), for the kernels that write lists and those that walk them.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// The word of an entry. For those who know only at run time how many parts there are.
__device__ __forceinline__ int tile_entry_word(int parts, int column, int kinds) {
  return (column << 2 * parts) + kinds;
}

/// How to read the word of an entry, a tile in the row of tiles that a list is for: its column, and a kind
/// (FlexTileKind) for each of kParts equal parts of its queries. In lists by key whose tiles have parts, a tile begins
/// at any part: the column counts parts. Words stay integers: held in a struct, compilers give kernels other registers.
template <int kParts = 1>
struct TileEntry {
  static constexpr int kKindBits = 2 * kParts;
  static __device__ __forceinline__ int column(int word) { return word >> kKindBits; }
  /// The kinds of all parts, 2 bits each, the first part's lowest. 0: all are kTileFull.
  static __device__ __forceinline__ int kinds(int word) { return word & ((1 << kKindBits) - 1); }
  static __device__ __forceinline__ int kind(int word, int part = 0) {
    return (kParts > 1 ? word >> 2 * part : word) & 3;
  }
};

/// The word of an entry of one part as a producer hands it to its consumers: also whether it is the last of its row.
struct LastTileEntry {
  static constexpr int kLast = 4;
  /// Makes one from the word of a TileEntry; the caller adds kLast for the last one.
  static __device__ __forceinline__ int of(int word) { return word + (word & ~3); }
  static __device__ __forceinline__ int column(int word) { return word >> 3; }
  static __device__ __forceinline__ int kind(int word) { return word & 3; }
};

}  // namespace fusegrad::device
