// What the producer of a backward knows of a head whose keys the CTA has all (kWhole): for each tile of queries and
// keys, whether it is the first and the last one that adds to dQ of these queries. The first one stores its part as
// sums, and the last one adds the sums to its own and rounds.
#pragma once

#include "cuda/attention/backward/place.cuh"

namespace fusegrad::device {

template <class Config>
class WholeHead {
  using Entry = TileEntry<Config::kParts>;

 public:
  /// With a block mask: counts of how many tiles of keys each of `row_tiles` tiles of queries has some. walk_of(col):
  /// the tiles of queries of a tile of keys (TileWalk). `same`: every head has the same lists, which are read once
  /// then.
  template <class WalkOf>
  __device__ __forceinline__ void begin(int row_tiles, int col_tiles, bool same, const WalkOf& walk_of) {
    if constexpr (Config::kBlocks) {
      if (all_ == 0 || !same) {
        all_ = 0;
        for (int col = 0; col < col_tiles; ++col) {
          const auto walk = walk_of(col);
          for (int tile = 0; tile < walk.count(); ++tile) all_ += 1ull << kBits * Entry::column(walk[tile]);
        }
      }
      left_ = all_;
      lacking_ = 0;
      find_lacking(row_tiles);
    }
  }
  /// Whether there are queries left that the lists give no keys. Their dQ is zero: a tile beyond the queries stands for
  /// each tile of them, beside the head's first keys.
  __device__ __forceinline__ bool lacks_keys(int row_tiles) const {
    return Config::kWhole && Config::kBlocks && lacking_ < row_tiles;
  }
  /// The word of a TileEntry of a tile beyond the queries, the next one of those.
  __device__ __forceinline__ int tile_beyond(int row_tiles) {
    int column = row_tiles;
    if (lacks_keys(row_tiles)) {
      column += 1 + lacking_++;
      find_lacking(row_tiles);
    }
    return column * Config::kParts << Entry::kKindBits;
  }
  /// The first of the queries that a tile from `row` on stands for, or less than 0.
  static __device__ __forceinline__ int lacking_row(int row, int queries) {
    return row - ((queries + Config::kRows - 1) / Config::kRows + 1) * Config::kRows;
  }
  /// The bits of the next tile's Place, and counts it. `word`: of its TileEntry, or less than 0 where there is no tile;
  /// `row`: its first query.
  __device__ __forceinline__ int next(int word, int row, int queries, bool first_keys, bool last_keys) {
    const int bits = before_;
    bool begins = Config::kBlocks && word >= 0 && lacking_row(row, queries) >= 0, rounds = begins;
    if (word >= 0 && row < queries) {
      if constexpr (Config::kBlocks) {
        const int shift = kBits * Entry::column(word);
        begins = ((all_ ^ left_) >> shift & kMost) == 0;
        left_ -= 1ull << shift;
        rounds = (left_ >> shift & kMost) == 0;
      } else {
        begins = first_keys;
        rounds = last_keys;
      }
    }
    before_ = rounds ? kAfterRounds | (begins ? 0 : kAfterSums) : 0;
    return bits | begins * kBeginsSums | rounds * kRounds;
  }

 private:
  static constexpr int kBits = kWholeHeadBits, kMost = (1 << kBits) - 1;  // of a count
  // From tile `lacking_` on the first that has no keys.
  __device__ __forceinline__ void find_lacking(int row_tiles) {
    while (lacking_ < row_tiles && (all_ >> kBits * lacking_ & kMost) != 0) ++lacking_;
  }

  int before_ = 0;                         // the bits that the last tile gives the next one
  unsigned long long all_ = 0, left_ = 0;  // of each tile of queries, the tiles of keys in all and those left
  int lacking_ = 0;                        // the next tile of queries that has none
};

}  // namespace fusegrad::device
