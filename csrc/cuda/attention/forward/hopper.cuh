// Flex attention forward for sm_90a, persistent CTAs of kRows queries.
//
// One producer warp streams K and V through a TMA ring; kGroups consumer warpgroups have 64 queries each. While one
// warpgroup's WGMMAs run (the scores of a tile and the output of the tile before), the others compute exponentials. The
// producer loads the next queries while the epilogue stores the last output. hopper_reads.cuh has what other warps
// bring for mods.
//
// scores.cuh and portable.cuh describe Config; this file adds:
//   kGroups                    consumer warpgroups, 2 to 4; kRows = 64 * kGroups
//   kStages                    tiles of keys and of values in shared memory
//   kQueryStages               tiles of queries, 1 or 2: with 2, a warpgroup that is ahead stays ahead between queries
//   kParts                     1, or kGroups: each warpgroup's queries have a kind of tile of their own
//   kMaskAlone                 there is no score_mod, and the mask_mod reads no buffer
//   kCornersTell               a partial tile is whole where the mask_mod allows its corners
//   kSeamless                  the first scores of the next queries run beside the last output, which is stored
//                              meanwhile; two or three warpgroups ping-pong by turns
//   kFirstMaximum              exponentials are relative to a row's first maximum, and no other is looked for until a
//                              tile's sums are too large
#pragma once

#include "cuda/attention/forward/hopper_tiles.cuh"
#include "cuda/attention/forward/merge.cuh"
#include "cuda/attention/forward/softmax.cuh"

namespace fusegrad::device {

template <class Config>
class FlexForwardHopper : FlexForwardHopperTiles<Config> {
  using Tiles = FlexForwardHopperTiles<Config>;
  using Tiles::a_, Tiles::mask_, Tiles::query_, Tiles::score_, Tiles::zeros_;
  using Tiles::key, Tiles::kMemory, Tiles::query, Tiles::value;
  using Tiles::key_empty, Tiles::key_full, Tiles::query_empty, Tiles::query_full, Tiles::value_empty, Tiles::value_full;
  using Tiles::lane, Tiles::produce, Tiles::release, Tiles::entry, Tiles::work, Tiles::work_empty, Tiles::work_full;
  using typename Tiles::Entry, typename Tiles::MaskMod, typename Tiles::QueryStages, typename Tiles::ScoreMod,
      typename Tiles::Stages;
  using typename Tiles::Reads, typename Tiles::Work, typename Tiles::Works;
  using T = typename Config::Element;
  using Softmax = FlexHopperSoftmax<Config>;
  using ScoreProduct = Wgmma<T, Config::kCols, false, false>;
  using OutProduct = Wgmma<T, Config::kValue, true, true>;
  static constexpr int kBlocksN = Config::kCols / 8, kBlocksE = Config::kValue / 8;
  static constexpr int kScoreProducts = Config::kHead / 16, kOutProducts = Config::kCols / 16;
  // Mask element by element, or by bits: by bits a tile's mask takes as long as its softmax, but beside a score_mod
  // that reads for each pair it leaves more reads in flight. kTogether is the pairs for which a mask_mod is then called
  // at a time. In a tile of several blocks each pair looks its block up: by element that is unrolled, and compiles for
  // seconds.
  static constexpr bool kByElement = !Config::kMixed && (ScoreMod::kPairBytes == 0 || Reads::kBoxesAlone);
  static constexpr int kTogether = Config::kCols % 32 == 0 && Config::kValue < 256 ? 16 : 8;
  static constexpr bool kSeamless = Config::kSeamless;
  static_assert(!kSeamless || !Config::kKeySplits);
  // Two or three warpgroups issue products by turns: one's run beside the others' exponentials. One of four always
  // computes, and who waits for a turn is late.
  static constexpr bool kTurns = kSeamless && Config::kGroups < 4;
  // Words of dropout of a tile.
  static constexpr int kWords = Config::kDropout ? Config::kCols / 64 : 1;
  static_assert(!Config::kDropout || Config::kCols % 64 == 0);
  // Warpgroup 1 issues the first scores of its queries behind warpgroup 0's, so one's exponentials run beside the
  // other's products from the start. For smaller heads that is slower.
  static constexpr bool kStaggered = Config::kGroups == 2 && (Config::kHead > 128 || Config::kValue > 128);
  // Two barriers alternate: warpgroup 0 may be one work ahead, but not two, as keys have two stages.
  static_assert(!kStaggered || Config::kStages == 2);
  /// The first of each kind of named barriers; warpgroup g has the g-th of a kind.
  enum NamedBarrier : int {
    kTurn = 1,                        // whose turn it is to issue products
    kAlone = kTurn + Config::kGroups  // a warpgroup by itself
  };
  static constexpr bool kCopies = Reads::kWarps > 1 && (Config::kBoxes || Config::kGroups == 2);
  static constexpr int kProducerRegisters = kCopies && Config::kGroups < 4 ? 56 : Config::kGroups >= 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = consumer_registers(Config::kGroups, kProducerRegisters);

 public:
  using Tiles::kSharedBytes;

  __device__ __forceinline__ FlexForwardHopper(const FlexForwardArguments& a, const FlexForwardHopperArguments& more,
                                               const typename ScoreMod::Captured& score,
                                               const typename MaskMod::Captured& mask, unsigned shared)
      : Tiles(a, more, score, mask, shared), softmax_(a) {}

  __device__ __forceinline__ void run() {
    Tiles::begin();
    // The shuffle tells the compiler that it is uniform in a warp.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group_ == Config::kGroups) {
      give_registers<kProducerRegisters>();
      if (threadIdx.x == Config::kGroups * kWarpgroup) produce();
      if constexpr (Reads::kUsed) {
        const int warp = static_cast<int>(threadIdx.x) / kLanes - Config::kGroups * kWarpgroup / kLanes;
        if (warp > 0 && warp <= Reads::kWarps) Tiles::bring_reads();
      }
    } else {
      take_registers<kConsumerRegisters>();
      consume();
    }
  }

 private:
  // --- a consumer warpgroup ---

  __device__ __forceinline__ void consume() {
    Stages keys, values;
    QueryStages queries;
    Works works;
    if constexpr (kSeamless) {
      seamless(keys, values, queries, works);
      return;
    }
    while (true) {
      const int tiles = take(works);
      if (row_ == Work::kNoMore) break;
      compute(tiles, keys, values, queries, works.stage());
    }
  }
  /// Takes the next work from the producer. Returns how many tiles it has.
  __device__ __forceinline__ int take(Works& works) {
    int tiles;
    Barrier::wait(work_full(works.stage()), works.parity());
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b_), "=r"(h_), "=r"(row_), "=r"(tiles)
                 : "r"(work(works.stage()))
                 : "memory");
    // The shuffle tells the compiler that it is uniform in a warp.
    b_ = __shfl_sync(~0u, b_, 0);
    h_ = __shfl_sync(~0u, h_, 0);
    row_ = __shfl_sync(~0u, row_, 0);
    tiles = __shfl_sync(~0u, tiles, 0);
    if constexpr (Config::kKeySplits) {
      split_ = Work::split(b_);
      b_ = Work::batch(b_);
    }
    __syncwarp();
    release(work_empty(works.stage()));
    works.next();
    return tiles;
  }

  /// Computes one work. `parity`: of the number of works before it.
  __device__ __forceinline__ void compute(int tiles, Stages& keys, Stages& values, QueryStages& queries, int parity) {
    float out[kBlocksE][4], s[kBlocksN][4];
    clear(out);
    if (tiles > 0) {
      dropout_.begin(a_.dropout, b_ * a_.heads + h_);
      Barrier::wait(query_full(queries.stage()), queries.parity());
      // Nothing overlaps the first tile's scores.
      wait_keys(keys);
      if (kStaggered && group_ == 1) named_sync(kTurn + parity, 2 * kWarpgroup);
      issue_scores(s, queries.stage(), keys.stage, [](int) {});
      if (kStaggered && group_ == 0) named_arrive(kTurn + parity, 2 * kWarpgroup);
      const int now = entry_of(keys, 0);
      draw(now);
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      attend(tiles, now, out, s, keys, values, queries);
      wait_output(out, values, true);
    }
    finish(out, tiles < 0, b_, h_, first_query());
  }

  /// Computes all works.
  __device__ __forceinline__ void seamless(Stages& keys, Stages& values, QueryStages& queries, Works& works) {
    float out[kBlocksE][4], s[kBlocksN][4];
    // Warpgroup 0 begins and each hands the turn to the next once its products are queued. Nobody takes the last turn.
    if (kTurns && group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
    int tiles = begin(s, keys, queries, works);
    while (row_ != Work::kNoMore) {
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      const int b = b_, h = h_, first = first_query();
      const bool some = tiles > 0, bad = tiles < 0, skips = skips_last();
      clear(out);
      if (tiles > 0) {
        if (skips) --tiles;
        attend(tiles, entry_of(keys, 0), out, s, keys, values, queries);
        if (skips) {
          wait_keys(keys);
          if constexpr (kTurns) {
            begin_turn();
            end_turn();
          }
          release(key_empty(keys.stage));
          keys.next();
        }
      }
      tiles = begin(s, keys, queries, works);
      wgmma_wait<1>();
      pin<kBlocksE * 4>(out[0]);
      if (some) release_values(values);
      if (skips) {
        Barrier::wait(value_full(values.stage), values.parity);
        release_values(values);
      }
      finish(out, bad, b, h, first);
    }
    wgmma_wait<0>();
    pin<kBlocksN * 4>(s[0]);
    if (kTurns && group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
  }
  /// Takes the next work and issues its first scores. They are unconditional, or the compiler would wait for products:
  /// without tiles they multiply whatever lies in shared memory, and nobody uses them.
  __device__ __forceinline__ int begin(float (&s)[kBlocksN][4], const Stages& keys, const QueryStages& queries,
                                       Works& works) {
    const int tiles = take(works);
    if (tiles > 0) {
      Barrier::wait(query_full(queries.stage()), queries.parity());
      wait_keys(keys);
    }
    issue_scores(s, queries.stage(), keys.stage, [](int) {});
    if (Config::kDropout && tiles > 0) {
      dropout_.begin(a_.dropout, b_ * a_.heads + h_);
      draw(entry_of(keys, 0));
    }
    if constexpr (Config::kParts > 1) {
      if (row_ != Work::kNoMore) row_ = (row_ & ~Work::kSkips) | (row_ >> 2 * group_ & 1);
    }
    return tiles;
  }

  /// The thread's first query.
  __device__ __forceinline__ int first_query() const {
    return (row_ & ~Work::kSkips) + static_cast<int>(threadIdx.x) / kLanes * 16 + lane() / 4;
  }

  __device__ __forceinline__ void wait_keys(const Stages& keys) const {
    Barrier::wait(key_full(keys.stage), keys.parity);
  }
  /// The list entry of the stage's keys, tile i. After wait_keys.
  __device__ __forceinline__ int entry_of(const Stages& keys, int i) const {
    return Tiles::kEntries ? load_by_first(lane(), entry(keys.stage)) : i << Entry::kKindBits;
  }
  /// The kind of the warpgroup's part of a tile.
  __device__ __forceinline__ int kind_of(int tile) const { return Entry::kind(tile, group_); }
  /// Whether the last tile has no pair of the warpgroup's, but is not the only one.
  __device__ __forceinline__ bool skips_last() const { return Config::kParts > 1 && (row_ & 1) != 0; }
  __device__ __forceinline__ bool has_none(int tile) const { return Config::kParts > 1 && kind_of(tile) == kTileNone; }

  __device__ __forceinline__ void clear(float (&out)[kBlocksE][4]) {
    zero(out);
    softmax_.begin();
  }
  /// Computes all tiles, from `now` on, whose scores are there. At the end the output's last product is in flight.
  __device__ __forceinline__ void attend(int tiles, int now, float (&out)[kBlocksE][4], float (&s)[kBlocksN][4],
                                         Stages& keys, Stages& values, QueryStages& queries) {
    unsigned p[kBlocksN * 2];
    float rescale[2];
    release(key_empty(keys.stage));
    keys.next();
    if (tiles == 1) release(query_empty(queries.stage()));
    bool in_flight = false, ended = false, again = false;
    for (int i = 1; !ended;) {
      apply_mods(s, now);
      release_reads();
      softmax_.add(s, rescale, [&] {
        if constexpr (!Config::kFirstMaximum) wait_output(out, values, in_flight);
      });
      Softmax::multiply(out, rescale);
      Softmax::pack(p, s);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) drop(p, n);
      // Vote per warpgroup: all its warps must execute the same wgmma.wait. `again`: a warp that computes a tile once
      // more is here by itself.
      bool maxima = again;
      if constexpr (Config::kFirstMaximum) {
        if (!again) maxima = !named_any(kAlone + group_, kWarpgroup, softmax_.without_maximum());
      }
      ended = true;
      while (i < tiles) {
        wait_keys(keys);
        if constexpr (kTurns) begin_turn();
        Draws draws(*this, Config::kDropout ? entry_of(keys, i) : 0);
        issue_scores(s, queries.stage(), keys.stage, [&](int k) { draws.step(k - 1); });
        Barrier::wait(value_full(values.stage), values.parity);
        pin<kBlocksE * 4>(out[0]);
        issue_out(out, p, values.stage, now, [&](int k) { draws.step(kScoreProducts - 1 + k - 1); });
        if constexpr (kTurns) end_turn();
        now = entry_of(keys, i);
        draws.end(kept_);
        wgmma_wait<1>();
        pin<kBlocksN * 4>(s[0]);
        release(key_empty(keys.stage));
        keys.next();
        if (++i == tiles) release(query_empty(queries.stage()));
        in_flight = true;
        ended = maxima;
        again = false;  // set here, so that its register does not live through the loop
        if (!maxima) {
          if constexpr (Config::kFirstMaximum) wait_output(out, values, true);
          break;
        }
        apply_mods(s, now);
        wait_output(out, values, true);
        ended = softmax_.add_by_first(
            s, p,
            [&](int n) {
              (void)now;  // captured: else compilers number the registers of kernels without dropout in another order
              drop(p, n);
            },
            [&](int r) { return !Reads::kUsed || first_query() + 8 * r < a_.queries; });
        if (!ended) {
          scores_again(s, Entry::column(now) * Config::kCols);
          again = true;
          break;
        }
        release_reads();
      }
    }
    Barrier::wait(value_full(values.stage), values.parity);
    issue_out(out, p, values.stage, now, [](int) {});
    queries.next();
  }
  __device__ __forceinline__ void release_values(Stages& values) const {
    release(value_empty(values.stage));
    values.next();
  }
  // Waits for the output's product where one is in flight.
  __device__ __forceinline__ void wait_output(float (&out)[kBlocksE][4], Stages& values, bool in_flight) const {
    wgmma_wait<0>();
    pin<kBlocksE * 4>(out[0]);
    if (in_flight) release_values(values);
  }

  __device__ __forceinline__ void begin_turn() const { named_sync(kTurn + group_, 2 * kWarpgroup); }
  __device__ __forceinline__ void end_turn() const {
    named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
  }
  /// `between(k)` is called before the k-th product but the first.
  template <class Between>
  __device__ __forceinline__ void issue_scores(float (&s)[kBlocksN][4], int query_stage, int stage,
                                               const Between& between) const {
    // Uniform in a warp, and known to be: descriptors follow from it.
    query_stage = Config::kQueryStages == 1 ? 0 : __shfl_sync(~0u, query_stage, 0);
    const auto query = descriptor(this->query(query_stage) + group_ * 64 * kChunkBytes, 16);
    const auto key = descriptor(this->key(stage), 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScoreProducts; ++k) {
      if (k > 0) between(k);
      ScoreProduct::run(s[0], advanced(query, step_bytes<Config::kRows>(k)),
                        advanced(key, step_bytes<Config::kCols>(k)), k != 0);
    }
    wgmma_commit();
  }
  template <class Between>
  __device__ __forceinline__ void issue_out(float (&out)[kBlocksE][4], const unsigned (&p)[kBlocksN * 2], int stage,
                                            int tile, const Between& between) const {
    const unsigned at = has_none(tile) ? zeros_ : this->value(stage);
    const auto value = descriptor(at, Config::kCols * kChunkBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kOutProducts; ++k) {
      if (k > 0) between(k);
      OutProduct::run(out[0], p + 4 * k, advanced(value, k * 16 * kChunkBytes), true);
    }
    wgmma_commit();
  }

  // Rows beyond the queries may get any result, which nobody stores.
  __device__ __forceinline__ bool masked(int tile) const {
    return Tiles::masked(kind_of(tile), Entry::column(tile) * Config::kCols);
  }
  /// Mods are applied again to the reads of a tile that is computed once more: they are released only then.
  __device__ __forceinline__ void apply_mods(float (&s)[kBlocksN][4], int tile) const {
    if constexpr (Reads::kUsed) Barrier::wait(Tiles::reads_full(reads_.stage()), reads_.parity());
    change_and_mask(s, tile, Tiles::reads(reads_.stage()));
  }
  __device__ __forceinline__ void release_reads() {
    if constexpr (Reads::kUsed) {
      __syncwarp();
      release(Tiles::reads_empty(reads_.stage()));
      reads_.next();
    }
  }
  __device__ __forceinline__ void change_and_mask(float (&s)[kBlocksN][4], int tile, unsigned reads) const {
    const int q = first_query(), kv = Entry::column(tile) * Config::kCols + lane() % 4 * 2;
    // All pairs are changed, so that a score_mod is instantiated once; masked pairs too read inside its buffers.
    if constexpr (!Config::kUnscaled) change(s, q, kv, reads);
    if (!masked(tile)) return;
    if constexpr (!kByElement) {
      mask(s, masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, kind_of(tile), b_, h_, q, kv));
      return;
    }
    const auto mask_reads = Reads::mask_lines(reads, first_row() + lane() / 4, lane() % 4 * 2);
    if (!Config::kBlocks) {
      mask(s, tile, kind_of(tile), q, kv, mask_reads);
    } else if (kind_of(tile) == kTileFull) {
      mask(s, tile, kTileFull, q, kv, mask_reads);
    } else {
      mask(s, tile, kTilePartial, q, kv, mask_reads);
    }
  }
  /// The warp's first query of the tile.
  static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kLanes * 16; }
  __device__ __forceinline__ void mask(float (&s)[kBlocksN][4], Bits<kBlocksN * 4> alive) const {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = (alive >> (n * 4 + e) & 1) != 0 ? s[n][e] : -FUSEGRAD_INFINITY;
    }
  }
  template <class Lines>
  __device__ __forceinline__ void mask(float (&s)[kBlocksN][4], int tile, int kind, int q, int kv,
                                       const Lines& reads) const {
    int keys[2];  // a row's pairs may take part below this key
#pragma unroll
    for (int r = 0; r < 2; ++r) keys[r] = has_none(tile) || q + 8 * r >= a_.queries ? 0 : a_.keys;
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at_q = q + e / 2 * 8, at_kv = kv + n * 8 + e % 2;
        const bool takes = takes_part<Config>(a_.tiles, mask_, kind, b_, h_, at_q, at_kv, at_kv < keys[e / 2],
                                              reads.at(e / 2 * 8, n * 8 + e % 2));
        s[n][e] = takes ? s[n][e] : -FUSEGRAD_INFINITY;
      }
      if (n % 2 == 1) hold_order();
    }
  }
  __device__ __forceinline__ void change(float (&s)[kBlocksN][4], int q, int kv, unsigned reads) const {
    if constexpr (Reads::kScoreMasks) {
      if (Reads::are_masks_true(reads)) return change_by<true>(s, q, kv, reads);
    }
    change_by<false>(s, q, kv, reads);
  }
  template <bool kTrue>
  __device__ __forceinline__ void change_by(float (&s)[kBlocksN][4], int q, int kv, unsigned reads) const {
    const auto lines = Reads::template score_lines<kTrue>(reads, first_row() + lane() / 4, lane() % 4 * 2);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      const auto of_block = Reads::boxes(reads, first_row(), n * 8, lane());
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] *= a_.scale;
        if constexpr (kHas<ScoreMod>) {
          s[n][e] = ScoreMod::apply(score_, s[n][e], b_, h_, q + e / 2 * 8, kv + n * 8 + e % 2, true,
                                    reads_of_pair(lines.at(e / 2 * 8, n * 8 + e % 2), of_block, e));
        }
      }
    }
  }

  /// Dropout of a tile, drawn step by step between the products that the warpgroup issues: it waits there anyway.
  class Draws {
   public:
    __device__ __forceinline__ Draws(const FlexForwardHopper& forward, int tile) : dropout_(forward.a_.dropout) {
      if constexpr (Config::kDropout) {
        const int q = forward.first_query() - forward.lane() / 4, kv = Entry::column(tile) * Config::kCols;
#pragma unroll
        for (int w = 0; w < kWords; ++w) of_[w] = forward.dropout_.draw(q, kv + w * 64, forward.lane());
      }
    }
    /// The steps between two products, those behind product i.
    __device__ __forceinline__ void step(int i) {
      if constexpr (Config::kDropout) {
        const int begin = steps_before(i), end = steps_before(i + 1);
#pragma unroll
        for (int k = begin; k < end; ++k) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) of_[w].step(dropout_, k);
#pragma unroll
          for (int w = 0; w < kWords; ++w) of_[w].pin(k);
        }
        if (end > begin) hold_order();
      }
    }
    __device__ __forceinline__ void end(FlexKept<false, kWords>& kept) const {
      if constexpr (Config::kDropout) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) kept.word[w] = of_[w].kept();
      }
    }

   private:
    static constexpr int steps_before(int i) {
      return FlexDropoutDraw::kSteps * i / (kScoreProducts - 1 + kOutProducts - 1);
    }
    const FlexDropout& dropout_;
    FlexDropoutDraw of_[kWords];
  };
  /// Draws a first tile's dropout. Behind its products, so that both run side by side.
  __device__ __forceinline__ void draw(int tile) {
    if constexpr (Config::kDropout) {
      const int q = first_query() - lane() / 4, kv = Entry::column(tile) * Config::kCols;
      hold_order();
#pragma unroll
      for (int w = 0; w < kWords; ++w) kept_.word[w] = dropout_.block(a_.dropout, q, kv + w * 64, lane());
      pin_words(kept_.word);
    }
  }
  /// Drops probabilities of a block of eight keys from an operand.
  __device__ __forceinline__ void drop(unsigned (&p)[kBlocksN * 2], int n) const {
    if constexpr (Config::kDropout) {
#pragma unroll
      for (int r = 0; r < 2; ++r) p[2 * n + r] &= kept_.mask(n, r);
    }
  }

  /// Computes the warp's scores once more, from global memory: operands may be gone from shared memory.
  __device__ __forceinline__ void scores_again(float (&s)[kBlocksN][4], int col) const {
    const int q = first_query();
    const long long key_step = 8 * a_.key.row_stride, query_step = 8 * a_.query.row_stride;
    const T* query = static_cast<const T*>(a_.query.data) + b_ * a_.query.batch_stride + h_ * a_.query.head_stride +
                     q * a_.query.row_stride;
    const T* key = static_cast<const T*>(a_.key.data) + (a_.key_batches == 1 ? 0 : b_) * a_.key.batch_stride +
                   h_ / a_.group * a_.key.head_stride + (col + lane() / 4) * a_.key.row_stride;
    zero(s);
#pragma unroll 1
    for (int step = 0; step < Config::kHead; step += 16) {
      const int k = step + lane() % 4 * 2;
      unsigned word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = pair_if(q + i % 2 * 8 < a_.queries && k + i / 2 * 8 < a_.head_size,
                          query + i % 2 * query_step + k + i / 2 * 8);
      }
      const auto rows = Mma<T>::factor(word);
      const T* at = key + k;
#pragma unroll
      for (int n = 0; n < kBlocksN; n += 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word[i] =
              pair_if(col + lane() / 4 + (n + i / 2) * 8 < a_.keys && k + i % 2 * 8 < a_.head_size, at + i % 2 * 8);
          if (i % 2 == 1) at += key_step;
        }
        const auto cols = Mma<T>::factor(word);
        Mma<T>::template step<0>(s[n], rows, cols);
        Mma<T>::template step<1>(s[n + 1], rows, cols);
        hold_order();
      }
    }
  }
  /// Two elements, or zeros.
  __device__ __forceinline__ static unsigned pair_if(bool there, const T* at) {
    unsigned word = 0;
    asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.b32 %0, [%1];\n}"
                 : "+r"(word)
                 : "l"(at), "r"(static_cast<int>(there))
                 : "memory");
    return word;
  }
  __device__ __forceinline__ void finish(const float (&out)[kBlocksE][4], bool bad, int b, int h, int first) const {
    if constexpr (Config::kKeySplits) {
      finish_split(out, bad, b, h, first);
    } else {
      finish_whole(out, bad, b, h, first);
    }
  }
  // What the split gives. A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish_split(const float (&out)[kBlocksE][4], bool bad, int b, int h,
                                               int first) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first + 8 * r;
      const float sum = row_sum(softmax_.sum(r)), ties = Config::kMaxScores ? row_sum(softmax_.ties(r)) : 0.0f;
      store_partial(q < a_.queries, a_.partials, static_cast<long long>(b * a_.heads + h) * a_.queries + q, split_,
                    {bad ? __int_as_float(0x7fffffff) : softmax_.max(r), sum, ties, 0.0f}, out, r, lane());
    }
  }
  __device__ __forceinline__ void finish_whole(const float (&out)[kBlocksE][4], bool bad, int b, int h,
                                               int first) const {
    const float nan = __int_as_float(0x7fffffff);
    // Without branches, so that both rows go side by side: of short sequences this is a tenth of a warpgroup's time.
    float factor[2], sum[2] = {softmax_.sum(0), softmax_.sum(1)};
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], step);
    }
    float lse[2], low[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) lse[r] = softmax_.max(r) * softmax_.unit() + __logf(sum[r]);
    if constexpr (Config::kOutLow) softmax_.correct_far(sum, lse, low);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first + 8 * r;
      const bool none = softmax_.max(r) == -FUSEGRAD_INFINITY;
      const float ties = Config::kMaxScores ? row_sum(softmax_.ties(r)) : 0.0f;
      const float max = softmax_.max(r) * softmax_.unit();
      factor[r] = bad ? nan : none ? 0.0f : __fdividef(Config::kDropout ? a_.dropout.scale : 1.0f, sum[r]);
      const long long at = static_cast<long long>(b * a_.heads + h) * a_.queries + q;
      if (lane() % 4 == 0 && q < a_.queries) {
        a_.lse[at] = bad ? nan : none ? -FUSEGRAD_INFINITY : lse[r];
        if constexpr (Config::kOutLow) a_.lse_low[at] = none ? 0.0f : low[r];
        if constexpr (Config::kMaxScores) {
          a_.max_scores[at] = none ? -FUSEGRAD_INFINITY : max;
          a_.max_ties[at] = ties;
        }
      }
    }
    store_rows<T>(a_.out, b, h, first, a_.queries, a_.value_size, out, factor);
    if constexpr (Config::kOutLow) store_low_rows<T>(a_.out_low, b, h, first, a_.queries, a_.value_size, out, factor);
  }

  Softmax softmax_;
  FlexDropoutHead<Config> dropout_;
  FlexKept<false, kWords> kept_;
  typename Tiles::ReadStages reads_;
  int b_, h_, row_, group_, split_;
};

}  // namespace fusegrad::device
