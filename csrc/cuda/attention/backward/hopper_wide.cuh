// Flex attention backward for sm_90a with D or E above 128, one CTA per 64 keys.
//
// One gradient of 64 keys fills the registers of a warpgroup, so the two consumer warpgroups share the same 64 keys of
// one KV head:
//   keys      S^T, dP^T and dS; dK += dS Q; the captured buffers' sums
//   values    S^T again, then P; dV += P dO
// The scores are computed twice; in exchange the two warpgroups never wait for each other. dQ has a kernel of its own
// (grad_query/) even where sums may come in any order: reduced from here, it would take as much L2 bandwidth as all
// reads together.
//
// hopper_tiles.cuh describes Config.
#pragma once

#include "cuda/attention/backward/hopper_tiles.cuh"

namespace fusegrad::device {

template <class Config>
class FlexBackwardWideHopper : FlexBackwardHopperTiles<Config> {
  using Tiles = FlexBackwardHopperTiles<Config>;
  using Tiles::a_, Tiles::col_, Tiles::group_, Tiles::key_batch, Tiles::key_head, Tiles::score_, Tiles::sums_;
  using Tiles::alive, Tiles::begin, Tiles::draw, Tiles::drop_operand, Tiles::grad_out_empty, Tiles::query_empty,
      Tiles::first_key, Tiles::lane;
  using Tiles::issue_grad_key, Tiles::issue_grad_probabilities;
  using Tiles::issue_grad_value, Tiles::issue_scores, Tiles::load_rows, Tiles::masked;
  using Tiles::kAlone, Tiles::kBlocksD, Tiles::kBlocksE, Tiles::kBlocksN, Tiles::kInOrder, Tiles::kNoMore;
  using Tiles::kBlocksHeld, Tiles::kLines, Tiles::kThreads, Tiles::lines, Tiles::load, Tiles::reads, Tiles::thread;
  using Tiles::pairs, Tiles::place_of, Tiles::produce, Tiles::release, Tiles::rows;
  using Tiles::stage_of, Tiles::query_stage_of, Tiles::wait_query, Tiles::wait_grad_out;
  using typename Tiles::Lines, typename Tiles::Place, typename Tiles::Sums, typename Tiles::T;
  static constexpr int kKeys = 0, kValues = 1, kProducer = 2;  // values of group_
  // A warpgroup whose gradients nobody wants ends at once; one of them must take the tiles from the producer.
  static constexpr bool kKeysNeeded = Config::kGradScores;
  static constexpr bool kValuesNeeded = Config::kGradValue || !kKeysNeeded;
  static constexpr int kWarps = kWarpgroup / kLanes;
  static_assert(!Tiles::kOwnKeys && Config::kGroups == 2 && Config::kRows == 64 && !Config::kGradQuery);

 public:
  using Tiles::kSharedBytes, Tiles::Tiles;

  __device__ __forceinline__ void run() {
    begin((kKeysNeeded + kValuesNeeded) * kWarps);
    if (group_ == kProducer) {
      give_registers<24>();
      if (threadIdx.x == kThreads) produce();
      return;
    }
    take_registers<240>();
    if (group_ == kKeys) {
      if constexpr (kKeysNeeded) consume_for_keys();
    } else {
      if constexpr (kValuesNeeded) consume_for_values();
    }
  }

 private:
  // No product of these loops is under a condition, which would make the compiler wait for it: behind the last tile
  // they multiply whatever lies in shared memory, and nobody uses them.

  // --- the warpgroup of the keys' gradient ---

  __device__ __forceinline__ void consume_for_keys() {
    float grad[kBlocksD][4], s[kBlocksN][4], d[kBlocksN][4];
    zero(grad);
    sums_.begin();
    meet();
    int i = 0, b = 0, h = -1;
    wait_query(i);
    issue_scores(s, i, 0);
    wait_grad_out(i);
    issue_grad_probabilities(d, i);
    bring_lines(i);
    draw(i);
    Place now = place_of(i);
    col_ = now.col();
    for (; now.tile != kNoMore; now = place_of(++i)) {
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      pin<kBlocksN * 4>(d[0]);
      if (now.b != b || now.h != h) {
        if (h >= 0) sums_.end_head(b, h, first_key());
        sums_.begin_head();
        b = now.b;
        h = now.h;
      }
      unsigned p[kBlocksN * 2], ds[kBlocksN * 2];
      if constexpr (kLines) meet();
      pairs(now, i, s, d, p, ds);
      issue_grad_key(grad, ds, i);
      wgmma_commit();
      wait_query(i + 1);
      issue_scores(s, i + 1, 0);
      wait_grad_out(i + 1);
      issue_grad_probabilities(d, i + 1);
      bring_lines(i + 1);
      draw(i + 1);
      // The tile's sums go out while products run.
      if constexpr (Sums::kFlushes) {
        meet();
        const Place done = place_of(i);
        sums_.flush(done.b, done.h, done.row(), col_, i & 1);
        if constexpr (Sums::kOnce) meet();
      }
      wgmma_wait<2>();
      pin<kBlocksD * 4>(grad[0]);
      release(grad_out_empty(stage_of(i)));
      release(query_empty(query_stage_of(i)));
    }
    wgmma_wait<0>();
    pin<kBlocksN * 4>(s[0]);
    pin<kBlocksN * 4>(d[0]);
    if (h >= 0) sums_.end_head(b, h, first_key());
    if constexpr (Config::kGradKey) {
      store_rows<T>(a_.grad_key, key_batch(now), key_head(now), first_key(), a_.keys, a_.head_size, grad,
                    {a_.scale, a_.scale});
    }
  }

  // --- the warpgroup of the values' gradient ---

  __device__ __forceinline__ void consume_for_values() {
    float grad[kBlocksE][4], s[kBlocksN][4];
    zero(grad);
    int i = 0;
    issue_next_scores(s, i);
    if constexpr (Config::kGradValue) {
      bring_lines(i);
      draw(i);
    }
    Place now = place_of(i);
    col_ = now.col();
    for (; now.tile != kNoMore; now = place_of(++i)) {
      if constexpr (Config::kGradValue) {
        wait_grad_out(i);
        wgmma_wait<0>();
        pin<kBlocksN * 4>(s[0]);
        unsigned p[kBlocksN * 2];
        if constexpr (kLines) meet();
        probabilities(now, i, s, p);
        issue_grad_value(grad, p, i);
        wgmma_commit();
      }
      issue_next_scores(s, i + 1);
      if constexpr (Config::kGradValue) {
        bring_lines(i + 1);
        draw(i + 1);
      }
      wgmma_wait<1>();
      pin<kBlocksE * 4>(grad[0]);
      release(grad_out_empty(stage_of(i)));
      release(query_empty(query_stage_of(i)));
    }
    wgmma_wait<0>();
    if constexpr (Config::kGradValue) {
      pin<kBlocksN * 4>(s[0]);
      store_rows<T>(a_.grad_value, key_batch(now), key_head(now), first_key(), a_.keys, a_.value_size, grad,
                    {1.0f, 1.0f});
    }
  }
  __device__ __forceinline__ void issue_next_scores(float (&s)[kBlocksN][4], int i) const {
    wait_query(i);
    if constexpr (Config::kGradValue) issue_scores(s, i, 0);
  }

  // Computes P of the warp's keys, as an operand.
  __device__ __forceinline__ void probabilities(const Place& place, int i, float (&s)[kBlocksN][4],
                                                unsigned (&p)[kBlocksN * 2]) const {
    const bool masked = this->masked(place);
    if (place.far()) {
      each_probability<true, true>(place, i, alive(place, masked), s, p);
    } else if (kHas<typename Config::ScoreMod> || masked) {
      each_probability<true, false>(place, i, alive(place, masked), s, p);
    } else {
      each_probability<false, false>(place, i, 0, s, p);
    }
  }
  template <bool kMasked, bool kFar>
  __device__ __forceinline__ void each_probability(const Place& place, int i, Bits<kBlocksN * 4> alive,
                                                   float (&s)[kBlocksN][4], unsigned (&p)[kBlocksN * 2]) const {
    const int q = place.row() + lane() % 4 * 2, kv = first_key();
    const unsigned rows = this->rows(stage_of(i)) + lane() % 4 * 2 * static_cast<int>(sizeof(FlexRow));
    const auto reads = this->reads();
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      if (kInOrder && n % kBlocksHeld == 0) hold_order();
      FlexRow of_row[2];
      load_rows(of_row, rows + n * 8 * static_cast<int>(sizeof(FlexRow)));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float changed;
        const bool takes = !kMasked || (alive >> (n * 4 + e) & 1) != 0;
        FlexQuery of{of_row[e % 2], 0.0f, 0.0f, 0.0f};
        if constexpr (kFar) of.origin = take_origin<Config>(a_, of.row, place.b, place.h, q + n * 8 + e % 2);
        s[n][e] = FlexPairGradient<Config>::template probability<false, kFar>(
            score_, a_.scale, s[n][e], of, place.b, place.h, q + n * 8 + e % 2, kv + e / 2 * 8, takes, changed,
            reads.at(n * 8 + e % 2, e / 2 * 8));
      }
      put_operand<T>(p + 2 * n, s[n]);
      drop_operand(n, p);
    }
  }

  // Stores the lines of tile i when all threads are done with the last tile's.
  __device__ __forceinline__ void bring_lines(int i) const {
    if constexpr (kLines) {
      Lines lines;
      load(lines, i);
      meet();
      lines.store(this->lines(), thread() % kWarpgroup);
    }
  }
  __device__ __forceinline__ void meet() const { named_sync(kAlone + group_, kWarpgroup); }
};

}  // namespace fusegrad::device
