// Scores of a tile between the products: which pairs take part, and what the score_mod makes of them.
//
// A Config, which the host generates, says what a kernel is compiled for:
//   Element                    BFloat16, Float16 or float
//   kHead, kValue              the head sizes, rounded up to 16
//   kRows, kCols               queries and keys of a tile
//   kWarps                     of a CTA
//   ScoreMod, MaskMod          rendered structs (csrc/score_mod/render_cuda.h), or NoMod
//   kBlocks, kMixed            whether there is a block mask, and whether tiles may lie in several of its blocks
//   kSplit                     float: products of two parts each
#pragma once

#include "cuda/device/flex_arguments.cuh"
#include "cuda/device/mma.cuh"

namespace fusegrad::device {

constexpr float kLog2E = 1.4426950408889634f;

/// In place of a score_mod or a mask_mod.
struct NoMod {
  struct Captured {
    long long nothing;
  };
};
/// A derivative's view of what its score_mod captured.
template <class Mod, class Captured>
__device__ __forceinline__ const typename Mod::Captured& captured_of(const Captured& captured) {
  static_assert(sizeof(Captured) == sizeof(typename Mod::Captured));
  return reinterpret_cast<const typename Mod::Captured&>(captured);
}

template <class Mod>
constexpr bool kHas = !kSame<Mod, NoMod>;

/// One bit each for so many pairs, at most 64.
template <int kCount>
struct BitsFor {
  static_assert(kCount <= 64);
  using Type = unsigned long long;
};
template <int kCount>
  requires(kCount <= 32)
struct BitsFor<kCount> {
  using Type = unsigned;
};
template <int kCount>
using Bits = typename BitsFor<kCount>::Type;

/// The tiles of one row of tiles, in order.
class TileWalk {
 public:
  template <class Config>
  __device__ __forceinline__ TileWalk(const FlexTiles& tiles, int b, int h, int row, int all, const Config*) {
    if constexpr (Config::kBlocks) {
      const long long head =
          static_cast<long long>(tiles.batches == 1 ? 0 : b) * tiles.heads + (tiles.heads == 1 ? 0 : h);
      count_ = tiles.count[head * tiles.rows + row];
      list_ = tiles.list + (head * tiles.rows + row) * tiles.cols;
    } else {
      count_ = all;
    }
  }
  __device__ __forceinline__ int count() const { return count_; }
  /// 4 * column + kind.
  __device__ __forceinline__ int operator[](int i) const { return list_ == nullptr ? 4 * i : list_[i]; }

 private:
  int count_;
  const int* list_ = nullptr;
};

/// Whether a pair of a tile that is not full takes part.
template <class Config>
__device__ __forceinline__ bool takes_part(const FlexTiles& tiles, const typename Config::MaskMod::Captured& mask,
                                           int kind, int b, int h, int q, int kv, bool inside) {
  if constexpr (!Config::kBlocks) {
    return inside;
  } else {
    bool full = kind == kTileFull;
    if (Config::kMixed && kind == kTileMixed && inside) {
      const long long head =
          static_cast<long long>(tiles.batches == 1 ? 0 : b) * tiles.heads + (tiles.heads == 1 ? 0 : h);
      const unsigned char state =
          tiles
              .blocks[(head * tiles.block_rows + q / tiles.block_size_q) * tiles.block_cols + kv / tiles.block_size_kv];
      inside = state != kBlockNone;
      full = state == kBlockFull;
    }
    if constexpr (kHas<typename Config::MaskMod>) {
      if (!full) return inside && Config::MaskMod::apply(mask, b, h, q, kv, inside);
    }
    return inside;
  }
}

/// The scores of 16 queries of a warp, masked (-inf) and as the score_mod makes them. (q, kv): of the thread's first
/// pair. Masks first, as bits: code of a mask_mod is there once or twice only, that of a score_mod once an element,
/// whether pairs are masked or not.
template <class Config, int kBlocksN, class Arguments>
__device__ __forceinline__ void apply_score_mod(float (&s)[kBlocksN][4], const Arguments& a,
                                                const typename Config::ScoreMod::Captured& score,
                                                const typename Config::MaskMod::Captured& mask, int kind, bool masked,
                                                int b, int h, int q, int kv) {
  constexpr int kPairs = kBlocksN * 4;
  Bits<kPairs> alive = ~Bits<kPairs>(0);
  if (masked) {
    alive = 0;
#pragma unroll 1
    for (int i = 0; i < kPairs; i += 2) {
      const int at_q = q + i / 2 % 2 * 8, at_kv = kv + i / 4 * 8;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool inside = at_kv + e < a.keys && at_q < a.queries;
        const bool takes = takes_part<Config>(a.tiles, mask, kind, b, h, at_q, at_kv + e, inside);
        alive |= Bits<kPairs>(takes) << (i + e);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool takes = (alive >> (n * 4 + e) & 1) != 0;
      float x = s[n][e];
      if constexpr (!Config::kUnscaled) x *= a.scale;
      if constexpr (kHas<typename Config::ScoreMod>) {
        x = Config::ScoreMod::apply(score, x, b, h, q + e / 2 * 8, kv + n * 8 + e % 2, takes);
      }
      s[n][e] = takes ? x : -FUSEGRAD_INFINITY;
    }
  }
}

}  // namespace fusegrad::device
