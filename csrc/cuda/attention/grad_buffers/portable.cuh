// The gradients of captured buffers by themselves, for every GPU from sm_80 on, where all batches, or all of a group,
// reach the same places: a CTA has kRows queries by kCols keys of one query head and walks batches, whose contributions
// it adds up in registers. So a place gets one sum of a CTA, where the backward by keys would add once a batch; and
// what the score_mod reads of a pair it reads once. It computes scores and their gradients again, two products of the
// backward's five.
//
// Each of the n CTAs of a head's tile has every n-th batch. With kGrouped batches lie in groups, each of which has CTAs
// of its own for a tile (BatchWalk).
// backward.cuh describes Config; there is no block mask and no dropout, and every contribution's index is known before
// any score.
//   kPartialSums               sums are stored, and summed by a later kernel; else they are added to memory
#pragma once

#include "cuda/attention/captured/pair_boxes.cuh"
#include "cuda/attention/captured/pair_sums.cuh"
#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"

namespace fusegrad::device {

template <class Config>
class FlexGradBuffers {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Derivative = typename Config::Derivative;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using GradOutTile = Tile<T, Config::kRows, Config::kValue>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksN = Config::kCols / 8;
  static constexpr int kCount = Derivative::kContributions;
  static_assert(Config::kRows == 16 * Config::kWarps && kCount > 0 && !Config::kBlocks && !Config::kDropout);
  using Kept = KeptReads<ScoreMod, kBlocksN, kThreads, true, Config::kGrouped>;
  using Batches = BatchWalk<Config::kGrouped>;
  static constexpr GradBuffersMemory kMemory{{.rows = Config::kRows,
                                              .cols = Config::kCols,
                                              .head = Config::kHead,
                                              .value = Config::kValue,
                                              .element_bytes = static_cast<int>(sizeof(T)),
                                              .kept = Kept::kCount}};
  static_assert(Kept::kBytes == kMemory.kept.bytes());

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexGradBuffers(const FlexBackwardArguments& a, const FlexSums* sums,
                                             const typename ScoreMod::Captured& score,
                                             const typename MaskMod::Captured&, unsigned shared)
      : a_(a), sums_(sums), score_(score), stage_(shared), kept_(shared + kMemory.kept.offset) {}

  __device__ __forceinline__ void run() {
    const AnyFar far(a_);
    const int col_tiles = (a_.keys + Config::kCols - 1) / Config::kCols;
    const int tiles = (a_.queries + Config::kRows - 1) / Config::kRows * col_tiles;
    const Batches batches(a_, a_.heads * tiles);
    const int place = batches.place;
    h_ = place / tiles;
    row_ = place % tiles / col_tiles * Config::kRows;
    col_ = place % tiles % col_tiles * Config::kCols;
    const bool masked = row_ + Config::kRows > a_.queries || col_ + Config::kCols > a_.keys;
    unsigned alive = ~0u;
    if (masked) alive = pairs_inside();
    Kept::load(
        kept_, score_, batches.first, h_, [&](int n, int e) { return PairPlace{query(e), key(n, e)}; },
        [&](int n, int e) { return (alive >> (n * 4 + e) & 1) != 0; });
#pragma unroll
    for (int k = 0; k < kCount; ++k) zero(sum_[k]);
    if (far) {
      walk<true, true>(batches, alive);
    } else if (masked) {
      walk<true, false>(batches, alive);
    } else {
      walk<false, false>(batches, alive);
    }
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      put_pair_sums<Config, k, kThreads>(
          sums_[k], sum_[k], score_, batches.first, h_, [&](int e) { return query(e); },
          [&](int n, int e) { return key(n, e); }, [&](int n, int e) { return (alive >> (n * 4 + e) & 1) != 0; });
    });
  }

 private:
  template <bool kMasked, bool kFar>
  __device__ __forceinline__ void walk(const Batches& batches, unsigned alive) {
    if (batches.first >= batches.end) return;  // of a group with few batches
    int stage = 0;
    FlexQuery rows[2], next_rows[2] = {};
    load<kFar>(batches.first, 0, next_rows);
    for (int b = batches.first; b < batches.end; b += batches.step) {
      rows[0] = next_rows[0];
      rows[1] = next_rows[1];
      wait_copies<0>();
      __syncthreads();
      if (b + batches.step < batches.end) load<kFar>(b + batches.step, 1 - stage, next_rows);
      step<kMasked, kFar>(b, stage, rows, alive);
      stage = 1 - stage;
    }
  }

  static_assert(kBlocksN * 4 <= 32);
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * 16; }
  __device__ __forceinline__ int query(int e) const { return row_ + first_row() + lane() / 4 + e / 2 * 8; }
  __device__ __forceinline__ int key(int n, int e) const { return col_ + n * 8 + lane() % 4 * 2 + e % 2; }
  static __device__ __forceinline__ void zero(float (&x)[kBlocksN][4]) {
#pragma unroll
    for (int i = 0; i < kBlocksN * 4; ++i) x[i / 4][i % 4] = 0.0f;
  }

  __device__ __forceinline__ unsigned pairs_inside() const {
    unsigned alive = 0;
#pragma unroll
    for (int i = 0; i < kBlocksN * 4; ++i)
      alive |= static_cast<unsigned>(query(i % 4) < a_.queries && key(i / 4, i % 4) < a_.keys) << i;
    return alive;
  }

  template <bool kFar>
  __device__ __forceinline__ void load(int b, int stage, FlexQuery (&rows)[2]) const {
    unsigned to = stage_ + stage * kMemory.stages.piece;
    const int key_batch = a_.key_batches == 1 ? 0 : b, key_head = h_ / a_.group;
    load_tile<QueryTile, kThreads>(to, a_.query, b, h_, row_, a_.queries, a_.head_size);
    load_tile<GradOutTile, kThreads>(to += QueryTile::kBytes, a_.grad_out, b, h_, row_, a_.queries, a_.value_size);
    load_tile<KeyTile, kThreads>(to += GradOutTile::kBytes, a_.key, key_batch, key_head, col_, a_.keys, a_.head_size);
    load_tile<ValueTile, kThreads>(to += KeyTile::kBytes, a_.value, key_batch, key_head, col_, a_.keys, a_.value_size);
    commit_copies();
    const FlexRow* from = a_.rows + static_cast<long long>(b * a_.heads + h_) * a_.row_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = query(2 * r);
      rows[r] = {q < a_.queries ? from[q] : FlexRow{0.0f, 0.0f}, 0.0f, 0.0f, 0.0f};
      if constexpr (kFar) rows[r].origin = take_origin<Config>(a_, rows[r].row, b, h_, q);
    }
  }

  template <bool kMasked, bool kFar>
  __device__ __forceinline__ void step(int b, int stage, const FlexQuery (&rows)[2], unsigned alive) {
    const unsigned query = stage_ + stage * kMemory.stages.piece, grad_out = query + QueryTile::kBytes;
    const unsigned keys = grad_out + GradOutTile::kBytes, values = keys + KeyTile::kBytes;
    float s[1][kBlocksN][4] = {}, d[1][kBlocksN][4] = {};
    multiply_rows<T, Config::kSplit, Config::kHead>(s, query, QueryTile::kStride, first_row(), keys, KeyTile::kStride,
                                                    0, lane());
    multiply_rows<T, Config::kSplit, Config::kValue>(d, grad_out, GradOutTile::kStride, first_row(), values,
                                                     ValueTile::kStride, 0, lane());
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      auto reads = Kept::reads(kept_, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float value[kCount + 1], p;
        reads.e = e;
        FlexPairGradient<Config>::template apply<kFar>(score_, a_.scale, s[0][n][e], d[0][n][e], rows[e / 2], b, h_,
                                                       this->query(e), key(n, e),
                                                       !kMasked || (alive >> (n * 4 + e) & 1) != 0, p, value, reads);
#pragma unroll
        for (int k = 0; k < kCount; ++k) sum_[k][n][e] += value[k];
      }
    }
  }

  const FlexBackwardArguments& a_;
  const FlexSums* sums_;
  const typename ScoreMod::Captured& score_;
  const unsigned stage_, kept_;
  int h_, row_, col_;
  float sum_[kCount][kBlocksN][4];
};

}  // namespace fusegrad::device
