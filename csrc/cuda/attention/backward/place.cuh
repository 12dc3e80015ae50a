// A tile of queries as the producer of a Hopper backward hands it to the CTA's other warps, in shared memory.
#pragma once

#include "cuda/attention/mask/tile_entry.cuh"

namespace fusegrad::device {

/// What Place::keys says beside the first key, which is a multiple of a tile's keys.
enum PlaceBit : int {
  kLastOfKeys = 1,   // it is the keys' last tile
  kKeyStage = 2,     // the stage that the keys are in
  kFirstOfKeys = 4,  // it is the keys' first tile
  // Where a CTA has all keys of a head (whole_head.cuh): the tile is the first one of its queries, and the last one;
  // the tile before it was the last one of its own, and had sums of others to add.
  kBeginsSums = 8,
  kRounds = 16,
  kAfterRounds = 32,
  kAfterSums = 64,
  kFarRows = 1 << 30,  // the head has far rows
};

/// The tile belongs to one of the query heads that share the keys.
template <class Config>
struct Place {
  int b, h;
  int tile;  // the word of a TileEntry, as FlexTiles lists it, or less than 0: kOtherKeys, kNoMore
  int keys;
  // Stand in place of a tile behind the last one of some keys: tiles of other keys follow, or none.
  static constexpr int kOtherKeys = -2, kNoMore = -1;

  __device__ __forceinline__ int row() const { return Entry::column(tile) * (Config::kRows / Config::kParts); }
  __device__ __forceinline__ int kinds() const { return Entry::kinds(tile); }
  __device__ __forceinline__ int col() const { return keys & (kFarRows - Config::kCols); }
  __device__ __forceinline__ bool has(PlaceBit bit) const { return (keys & bit) != 0; }
  __device__ __forceinline__ bool first() const { return has(kFirstOfKeys); }
  __device__ __forceinline__ bool last() const { return has(kLastOfKeys); }
  __device__ __forceinline__ bool far() const { return has(kFarRows); }
  __device__ __forceinline__ int stage() const { return keys / kKeyStage & 1; }
  __device__ __forceinline__ int stage_before() const { return stage() ^ (keys / kFirstOfKeys & 1); }
  __device__ __forceinline__ int next_stage() const { return stage() ^ (keys & kLastOfKeys); }

 private:
  using Entry = TileEntry<Config::kParts>;
  static_assert(Config::kCols > (Config::kWhole ? kAfterSums : kFirstOfKeys));
};

}  // namespace fusegrad::device
