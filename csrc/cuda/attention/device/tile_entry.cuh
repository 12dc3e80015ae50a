// An entry of a list of tiles (FlexTiles::list), for the kernels that write lists and those that walk them.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// The word of an entry. For those who know only at run time how many parts there are.
__device__ __forceinline__ int tile_entry_word(int parts, int column, int kinds) {
  return (column << 2 * parts) + kinds;
}

/// A tile in the row of tiles that a list is for: its column, and a kind (FlexTileKind) for each of kParts equal parts
/// of its queries. In lists by key whose tiles have parts, a tile begins at any part: the column counts parts.
template <int kParts = 1>
struct TileEntry {
  static constexpr int kKindBits = 2 * kParts;
  int word;

  static __device__ __forceinline__ TileEntry of(int column, int kinds) {
    return {tile_entry_word(kParts, column, kinds)};
  }
  __device__ __forceinline__ int column() const { return word >> kKindBits; }
  /// The kinds of all parts, 2 bits each, the first part's lowest. 0: all are kTileFull.
  __device__ __forceinline__ int kinds() const { return word & ((1 << kKindBits) - 1); }
  __device__ __forceinline__ int kind(int part) const { return (kParts > 1 ? word >> 2 * part : word) & 3; }
};

/// A TileEntry of one part as a producer hands it to its consumers: also whether it is the last of its row.
struct LastTileEntry {
  static constexpr int kLast = 4;
  int word;

  static __device__ __forceinline__ LastTileEntry of(TileEntry<> tile, bool last) {
    return {tile.word + (tile.word & ~3) + (last ? kLast : 0)};
  }
  __device__ __forceinline__ int column() const { return word >> 3; }
  __device__ __forceinline__ int kind() const { return word & 3; }
  __device__ __forceinline__ bool last() const { return (word & kLast) != 0; }
};

}  // namespace fusegrad::device
