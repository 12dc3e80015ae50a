// The backward of flex attention on sm_90a. A CTA owns kCols keys of a key head, 64 for each warpgroup that computes,
// and goes over the tiles of queries of all query heads that share it; a producer warp brings them by the copy engine.
// As in flex_backward.cuh scores and their gradients are transposed (keys are rows): from registers they are operands
// of the gradients of values and keys. That of the queries has dS of all keys from shared memory, and the copy engine
// adds it up in float32 in memory.
//
// A warpgroup's step, for the tile i of queries; the warpgroups take turns in issuing products, so that one's pairs are
// computed while the other's products run:
//   pairs   waits for the scores and for dP; probabilities P and dS, as operands; dS to shared memory too
//   turn    issues dQ(i - 1) = dS(i - 1) K, dV += P dO, dK += dS Q; the scores and dP of tile i + 1. While they run, dQ
//           goes to the copy engine. It is a step late: dS of the other warpgroup's keys has been there for long
//
// See flex_backward_tiles_hopper.cuh for Config; of dS there are kStages tiles too.
#pragma once

#include "cuda/device/flex_backward_tiles_hopper.cuh"

namespace fusegrad::device {

template <class Config>
class FlexBackwardHopper : FlexBackwardHopperTiles<Config> {
  using Tiles = FlexBackwardHopperTiles<Config>;
  using Tiles::a_, Tiles::col_, Tiles::group_, Tiles::key_batch_, Tiles::key_head_, Tiles::sums_;
  using Tiles::add_grad_query, Tiles::issue_grad_key, Tiles::issue_grad_probabilities, Tiles::issue_grad_query;
  using Tiles::begin, Tiles::empty, Tiles::first_key, Tiles::gradient_empty;
  using Tiles::issue_grad_value, Tiles::issue_scores, Tiles::keep, Tiles::key_full, Tiles::pairs, Tiles::place_of;
  using Tiles::kAll, Tiles::kAlone, Tiles::kBlocksD, Tiles::kBlocksE, Tiles::kBlocksN, Tiles::kConsumerWarps;
  using Tiles::kNoMore, Tiles::kThreads, Tiles::kTurn;
  using Tiles::produce, Tiles::read_place, Tiles::release, Tiles::speaks, Tiles::stage_of, Tiles::wait_gradient;
  using Tiles::touch, Tiles::wait_stage, Tiles::zero;
  using typename Tiles::Place, typename Tiles::Sums, typename Tiles::T;
  // dQ of a warpgroup: half the queries of a tile, or half the columns.
  static constexpr bool kRowsShared = Config::kRows == 64 * Config::kGroups;
  static_assert(Tiles::kOwnKeys && (!Config::kGradQuery || Config::kRows * Config::kHead == Config::kGroups * 64 * 64));

 public:
  using Tiles::kSharedBytes, Tiles::Tiles;

  __device__ __forceinline__ void run() {
    begin(kConsumerWarps, kConsumerWarps, kConsumerWarps);
    if (group_ == Config::kGroups) {
      give_registers<24>();
      if (threadIdx.x == kThreads) produce();
    } else {
      take_registers<240>();
      consume();
    }
  }

 private:
  // --- a consumer warpgroup ---

  __device__ __forceinline__ void consume() {
    float grad_key[kBlocksD][4], grad_value[kBlocksE][4], s[kBlocksN][4], d[kBlocksN][4];
    zero(grad_key);
    zero(grad_value);
    sums_.begin();
    named_sync(kAll, kThreads);
    // Warpgroup 0 begins; each gives the turn to the next. The last turn is nobody's.
    if (group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
    Barrier::wait(key_full(), 0);
    int i = 0, b = 0, h = -1;
    wait_stage(i);
    issue_scores(s, i);
    issue_grad_probabilities(d, i);
    for (Place now = place_of(i); now.tile != kNoMore; now = place_of(++i)) {
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      if constexpr (Config::kGradScores) pin<kBlocksN * 4>(d[0]);
      if (now.b != b || now.h != h) {
        if (h >= 0) sums_.end_head(b, h, first_key());
        sums_.begin_head();
        b = now.b;
        h = now.h;
      }
      unsigned p[kBlocksN * 2], ds[kBlocksN * 2];
      pairs(now, i, s, d, p, ds);
      if constexpr (Config::kGradQuery) keep(ds, i);
      begin_turn();
      turn(i, p, ds, s, d, grad_key, grad_value);
      end_turn();
      touch(i + 1);
      // Its turn was where the warpgroup's threads met; the next tile's products are in flight.
      if constexpr (Sums::kFlushes) {
        const Place done = read_place(i);
        sums_.flush(done.b, done.h, done.row(), col_, i & 1);
        if constexpr (Sums::kTables) named_sync(kAlone + group_, kWarpgroup);
      }
    }
    wgmma_wait<0>();
    pin<kBlocksN * 4>(s[0]);
    if constexpr (Config::kGradScores) pin<kBlocksN * 4>(d[0]);
    if (group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
    if constexpr (Tiles::kTouches) wait_touches();
    if constexpr (Config::kGradQuery) {
      if (i > 0) last_grad_query(i - 1);
    }
    if (h >= 0) sums_.end_head(b, h, first_key());
    if constexpr (Config::kGradKey && Config::kGradValue && kBlocksD == kBlocksE) {
#pragma unroll 1  // the same code for both
      for (int value = 0; value < 2; ++value) {
        const float factor = value != 0 ? 1.0f : a_.scale;
        store_rows<false, T>(value != 0 ? a_.grad_value : a_.grad_key, key_batch_, key_head_, first_key(), a_.keys,
                             value != 0 ? a_.value_size : a_.head_size, grad_key, {factor, factor});
#pragma unroll
        for (int i = 0; i < kBlocksD * 4; ++i) grad_key[i / 4][i % 4] = grad_value[i / 4][i % 4];
      }
    } else {
      if constexpr (Config::kGradKey) {
        store_rows<false, T>(a_.grad_key, key_batch_, key_head_, first_key(), a_.keys, a_.head_size, grad_key,
                             {a_.scale, a_.scale});
      }
      if constexpr (Config::kGradValue) {
        store_rows<false, T>(a_.grad_value, key_batch_, key_head_, first_key(), a_.keys, a_.value_size, grad_value,
                             {1.0f, 1.0f});
      }
    }
    // Shared memory must be there until the copy engine has read it.
    if (Config::kGradQuery && speaks()) wait_sums_added();
  }

  /// The products of tile i, and the first ones of the next tile. None of them is under a condition, which would make
  /// the compiler wait for them: of a tile that there is not they are made of whatever lies in shared memory, and not
  /// used.
  __device__ __forceinline__ void turn(int i, const unsigned (&p)[kBlocksN * 2], const unsigned (&ds)[kBlocksN * 2],
                                       float (&s)[kBlocksN][4], float (&d)[kBlocksN][4], float (&grad_key)[kBlocksD][4],
                                       float (&grad_value)[kBlocksE][4]) const {
    float c[8][4];
    if constexpr (Config::kGradQuery) issue_own_grad_query(c, i - 1);
    issue_grad_value(grad_value, p, i);
    issue_grad_key(grad_key, ds, i);
    wgmma_commit();
    if constexpr (Config::kGradQuery) {
      wgmma_wait<1>();
      pin<8 * 4>(c[0]);
      if (i > 0) add_own_grad_query(c, i - 1);
    }
    wait_stage(i + 1);
    issue_scores(s, i + 1);
    wgmma_wait<1>();
    pin<kBlocksD * 4>(grad_key[0]);
    pin<kBlocksE * 4>(grad_value[0]);
    release(empty(stage_of(i)));
    // The operands' registers are free only now.
    issue_grad_probabilities(d, i + 1);
  }

  __device__ __forceinline__ void last_grad_query(int i) const {
    float c[8][4];
    if (speaks()) wait_sums_read();
    named_sync(kAlone + group_, kWarpgroup);
    issue_own_grad_query(c, i);
    wgmma_wait<0>();
    pin<8 * 4>(c[0]);
    add_own_grad_query(c, i);
  }

  // All threads of the warpgroup come here after `speaks` has: whoever has the turn may write the sums.
  __device__ __forceinline__ void begin_turn() const {
    if (Config::kGradQuery && speaks()) wait_sums_read();
    named_sync(kTurn + group_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() const {
    named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void issue_own_grad_query(float (&c)[8][4], int i) const {
    wait_gradient(i);
    issue_grad_query(c, i, first_row(), first_col());
  }
  __device__ __forceinline__ void add_own_grad_query(const float (&c)[8][4], int i) const {
    release(gradient_empty(stage_of(i)));
    add_grad_query(c, i, first_row(), first_col());
  }
  __device__ __forceinline__ int first_row() const { return kRowsShared ? group_ * 64 : 0; }
  __device__ __forceinline__ int first_col() const { return kRowsShared ? 0 : group_ * 64; }
};

}  // namespace fusegrad::device
