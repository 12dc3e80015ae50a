// Flex attention forward with batch_invariant for sm_90a (segments.cuh says what that asks), persistent CTAs whose
// producer warp streams keys and values through a TMA ring to kGroups warpgroups of 64 rows each. Two ways to have
// rows:
//
// - Queries of one head and all their keys, as FlexForwardHopper (hopper.cuh), which this is without what depends on
//   other rows of a warp. At the end of a segment a warpgroup adds its output to that of the segments before, which
//   lies in shared memory, or in global memory of the CTA's own that stays in the L2 cache.
// - kKeySplits, one warpgroup: rows are queries of several heads that share their keys, or of one, and the keys are
//   those of one segment. The warpgroup loads the queries, and its results go to the kernel that merges.
//
// scores.cuh, portable.cuh and hopper.cuh describe Config; this file adds:
//   kSegment                   tiles of a segment
//   kManySegments, kKeptSums   whether a CTA may have several; whether it keeps their sum in shared memory
#pragma once

#include "cuda/attention/forward/hopper_tiles.cuh"
#include "cuda/attention/forward/segments.cuh"

namespace fusegrad::device {

template <class Config>
class FlexSegmentsHopper : FlexForwardHopperTiles<Config> {
  using Tiles = FlexForwardHopperTiles<Config>;
  using Tiles::a_, Tiles::mask_, Tiles::more_, Tiles::score_;
  using Tiles::entry, Tiles::key, Tiles::query, Tiles::value, Tiles::work, Tiles::work_empty, Tiles::work_full;
  using Tiles::key_empty, Tiles::key_full, Tiles::query_empty, Tiles::query_full, Tiles::value_empty, Tiles::value_full;
  using Tiles::lane, Tiles::release, Tiles::tell;
  using typename Tiles::Entry, typename Tiles::MaskMod, typename Tiles::QueryStages, typename Tiles::ScoreMod,
      typename Tiles::Stages;
  using typename Tiles::Reads, typename Tiles::Work, typename Tiles::Works;
  using T = typename Config::Element;
  using ScoreProduct = Wgmma<T, Config::kCols, false, false>;
  using OutProduct = Wgmma<T, Config::kValue, true, true>;
  static constexpr int kBlocksN = Config::kCols / 8, kBlocksE = Config::kValue / 8;
  static constexpr int kScoreProducts = Config::kHead / 16, kOutProducts = Config::kCols / 16;
  using Softmax = FlexSegmentSoftmax<Config, kBlocksN>;
  static constexpr bool kPacked = Config::kKeySplits;
  static constexpr int kTogether = Config::kCols % 32 == 0 && Config::kValue < 256 ? 16 : 8;
  static constexpr int kWords = Config::kDropout ? Config::kCols / 64 : 1;
  static_assert(!Config::kDropout || Config::kCols % 64 == 0);
  static_assert(Config::kParts == 1 && !Config::kMaxScores);
  static_assert(kPacked ? Config::kGroups == 1 && !Reads::kUsed : Config::kGroups > 1);
  // The first scores of the next queries run beside the last output, which is stored meanwhile, and warpgroups issue
  // products by turns, as in FlexForwardHopper.
  static constexpr bool kSeamless = Config::kGroups > 2;
  static constexpr int kTurn = 1;   // the first of the named barriers of whose turn it is
  static constexpr int kAlone = 1;  // the named barrier of the one warpgroup
  // One warpgroup has as many registers as a thread may have.
  static constexpr int kProducerRegisters = Reads::kWarps > 1 ? 56 : Config::kGroups > 2 ? 32 : 40;

  // What the segments before gave lies behind all else.
  static constexpr int kKeptAt = round_up_to(Tiles::kMemory.entries.end(), 16);
  static constexpr int kKeptBytes = Config::kKeptSums ? 16 + 4 * Config::kRows * Config::kValue : 0;
  static_assert(!Config::kKeptSums || Config::kManySegments);

 public:
  static constexpr int kSharedBytes = Tiles::kSharedBytes + kKeptBytes;

  __device__ __forceinline__ FlexSegmentsHopper(const FlexForwardArguments& a, const FlexForwardHopperArguments& more,
                                                const typename ScoreMod::Captured& score,
                                                const typename MaskMod::Captured& mask, unsigned shared)
      : Tiles(a, more, score, mask, shared) {}

  __device__ __forceinline__ void run() {
    Tiles::begin();
    if constexpr (kPacked) {
      // This kernel may have begun before the one before it ended, and so may the one that merges.
      if constexpr (!Config::kBlocks) wait_for_kernel_before();
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    // The shuffle tells the compiler that it is uniform in a warp.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group_ == Config::kGroups) {
      if constexpr (!kPacked) give_registers<kProducerRegisters>();
      const int warp = static_cast<int>(threadIdx.x) / kLanes - Config::kGroups * kWarpgroup / kLanes;
      if constexpr (kPacked) {
        if (warp == 0) produce_segments();
      } else {
        if (threadIdx.x == Config::kGroups * kWarpgroup) Tiles::produce();
        if constexpr (Reads::kUsed) {
          if (warp > 0 && warp <= Reads::kWarps) Tiles::bring_reads({});
        }
      }
    } else {
      if constexpr (!kPacked) take_registers<consumer_registers(Config::kGroups, kProducerRegisters)>();
      consume();
    }
  }

 private:
  // --- works of which each is a segment ---

  // A work's rows: queries of `together` heads from `head` on, one after the other, of which the tile has 64 from `row`
  // on. Several heads have no more.
  __device__ __forceinline__ int rows_of(int head) const {
    return min(a_.together, a_.group - head % a_.group) * a_.queries;
  }
  // Called by one warp.
  __device__ __forceinline__ void produce_segments() const {
    Counted<Config::kStages> tiles;
    Works works;
    const int splits = a_.partials.splits, row_tiles = a_.together > 1 ? 1 : (a_.queries + 63) / 64;
    const int parts = (a_.group + a_.together - 1) / a_.together, key_heads = a_.heads / a_.group;
    const int count = a_.batches * key_heads * parts * row_tiles * splits;
#pragma unroll 1
    for (int id = static_cast<int>(blockIdx.x); id < count; id += static_cast<int>(gridDim.x)) {
      int rest = id / splits;
      const int split = id - rest * splits;
      const int row_tile = rest % row_tiles;
      rest /= row_tiles;
      const int part = rest % parts;
      rest /= parts;
      const int key_head = rest % key_heads, b = rest / key_heads, h = key_head * a_.group + part * a_.together;
      const TileWalk walk(a_.tiles, b, h, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
      const SegmentTiles found(walk, Config::kBlocks, split * Config::kSegment, (split + 1) * Config::kSegment, lane());
      const int some = walk.count() < 0 ? -1 : found.last - found.first;
      if (lane() == 0) tell({b + (split << Work::kSplitShift), h, row_tile * 64, some}, works);
      __syncwarp();
      if (lane() != 0) works.next();
      const int batch = a_.key_batches == 1 ? 0 : b;
#pragma unroll 1
      for (int i = 0; i < some; ++i) {
        const int now = walk[found.first + i], stage = tiles.stage(), col = Entry::column(now) * Config::kCols;
        Barrier::wait(key_empty(stage), tiles.parity() ^ 1);
        if (lane() == 0) {
          asm volatile("st.shared.s32 [%0], %1;" ::"r"(entry(stage)), "r"(now) : "memory");
          copy_tile<Config::kCols, Config::kHead>(key(stage), more_.key, key_full(stage), col, key_head, batch);
        }
        __syncwarp();
        Barrier::wait(value_empty(stage), tiles.parity() ^ 1);
        if (lane() == 0)
          copy_tile<Config::kCols, Config::kValue>(value(stage), more_.value, value_full(stage), col, key_head, batch);
        __syncwarp();
        tiles.next();
      }
    }
    if (lane() == 0) tell({0, 0, Work::kNoMore, 0}, works);
  }

  // --- a consumer warpgroup ---

  __device__ __forceinline__ void consume() {
    Stages keys, values;
    QueryStages queries;
    Works works;
    if constexpr (kSeamless) return seamless(keys, values, queries, works);
    while (true) {
      const int tiles = take(works);
      if (row_ == Work::kNoMore) break;
      compute(tiles, keys, values, queries);
    }
  }
  /// Takes the next work from the producer. Returns how many tiles it has.
  __device__ __forceinline__ int take(Works& works) {
    int tiles;
    Barrier::wait(work_full(works.stage()), works.parity());
    load_four_by_first(lane(), work(works.stage()), b_, h_, row_, tiles);
    if constexpr (kPacked) {
      split_ = Work::split(b_);
      b_ = Work::batch(b_);
      rows_ = row_ == Work::kNoMore ? 0 : rows_of(h_);
    }
    __syncwarp();
    release(work_empty(works.stage()));
    works.next();
    return tiles;
  }

  /// Where the results of a work go.
  struct Place {
    int b, h, row;
  };
  __device__ __forceinline__ void start(float (&out)[kBlocksE][4]) {
    zero(out);
    softmax_.begin();
    segments_ = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) total_[r] = {-FUSEGRAD_INFINITY, 0.0f};
  }
  __device__ __forceinline__ void compute(int tiles, Stages& keys, Stages& values, QueryStages& queries) {
    float out[kBlocksE][4], s[kBlocksN][4];
    start(out);
    place_rows();
    if (tiles > 0) {
      if constexpr (kPacked) {
        load_queries();
      } else {
        dropped_head_.begin(a_.dropout, b_ * a_.heads + h_);
        Barrier::wait(query_full(queries.stage()), queries.parity());
      }
      wait_keys(keys);
      issue_scores(s, queries.stage(), keys.stage);
      const int now = entry_of(keys, 0);
      draw(now);
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      attend(tiles, now, out, s, keys, values, queries);
      wait_output(out, values, true);
    }
    finish(out, tiles < 0, {b_, h_, row_});
  }

  /// Computes all works.
  __device__ __forceinline__ void seamless(Stages& keys, Stages& values, QueryStages& queries, Works& works) {
    float out[kBlocksE][4], s[kBlocksN][4];
    // Warpgroup 0 begins and each hands the turn to the next once its products are queued. Nobody takes the last turn.
    if (group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
    int tiles = begin(s, keys, queries, works);
    while (row_ != Work::kNoMore) {
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      const Place of{b_, h_, row_};
      const bool some = tiles > 0, bad = tiles < 0;
      start(out);
      if (some) attend(tiles, entry_of(keys, 0), out, s, keys, values, queries);
      tiles = begin(s, keys, queries, works);
      wgmma_wait<1>();
      pin<kBlocksE * 4>(out[0]);
      if (some) {
        release(value_empty(values.stage));
        values.next();
      }
      finish(out, bad, of);
    }
    wgmma_wait<0>();
    pin<kBlocksN * 4>(s[0]);
    if (group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
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
    issue_scores(s, queries.stage(), keys.stage);
    if (Config::kDropout && tiles > 0) {
      dropped_head_.begin(a_.dropout, b_ * a_.heads + h_);
      draw(entry_of(keys, 0));
    }
    return tiles;
  }

  /// The thread's first row of the tile, and of the head or heads.
  static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kLanes * 16; }
  __device__ __forceinline__ int row(int r) const { return row_ + first_row() + lane() / 4 + 8 * r; }
  __device__ __forceinline__ bool is_row(int r) const { return row(r) < (kPacked ? rows_ : a_.queries); }
  __device__ __forceinline__ int head_of(int r) const { return kPacked ? head_[r] : h_; }
  __device__ __forceinline__ int query_of(int r) const { return kPacked ? query_[r] : row(r); }
  __device__ __forceinline__ void place_rows() {
    if constexpr (kPacked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = is_row(r) ? row(r) : 0;
        head_[r] = h_ + at / a_.queries;
        query_[r] = at % a_.queries;
        dropped_rows_.begin(a_.dropout, r, b_ * a_.heads + head_[r], query_[r]);
      }
    }
  }
  /// Its place in [B, H, M].
  __device__ __forceinline__ long long at(int r) const {
    return static_cast<long long>(b_ * a_.heads + head_of(r)) * a_.queries + query_of(r);
  }
  // What products read of the work before has been waited for.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kVectors = Config::kHead / 8;
    const T* query = static_cast<const T*>(a_.query.data) + b_ * a_.query.batch_stride;
    const int vectors = (a_.head_size + 7) / 8;
    named_sync(kAlone, kWarpgroup);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < 64 * kVectors; i += kWarpgroup) {
      const int tile_row = i / kVectors, vector = i % kVectors, at = row_ + tile_row;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (at < rows_ && vector < vectors) {
        const int head = at / a_.queries, q = at - head * a_.queries;
        x = *reinterpret_cast<const uint4*>(query + (h_ + head) * a_.query.head_stride + q * a_.query.row_stride +
                                            vector * 8);
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                       this->query(0) + place_in(SwizzledRows<64>{}, tile_row, vector * 16)),
                   "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                   : "memory");
    }
    fence_before_copy();
    named_sync(kAlone, kWarpgroup);
  }

  __device__ __forceinline__ void wait_keys(const Stages& keys) const {
    Barrier::wait(key_full(keys.stage), keys.parity);
  }
  /// The list entry of the stage's keys, tile i. After wait_keys.
  __device__ __forceinline__ int entry_of(const Stages& keys, int i) const {
    return Tiles::kEntries ? load_by_first(lane(), entry(keys.stage)) : i << Entry::kKindBits;
  }
  __device__ __forceinline__ float unit() const { return Config::kUnscaled ? a_.scale : 1.0f; }

  /// Computes all tiles, from `now` on, whose scores are there. At the end the output's last product is in flight.
  __device__ __forceinline__ void attend(int tiles, int now, float (&out)[kBlocksE][4], float (&s)[kBlocksN][4],
                                         Stages& keys, Stages& values, QueryStages& queries) {
    unsigned p[kBlocksN * 2];
    float rescale[2];
    release(key_empty(keys.stage));
    keys.next();
    if (!kPacked && tiles == 1) release(query_empty(queries.stage()));
    segment_ = Entry::column(now) / Config::kSegment;
    bool in_flight = false;
#pragma unroll 1
    for (int i = 1;; ++i) {
      apply_mods(s, now);
      release_reads();
      bool anew = false;
      if constexpr (Config::kManySegments) {
        const int segment = Entry::column(now) / Config::kSegment;
        anew = segment != segment_;
        segment_ = segment;
      }
      FlexSegmentRow before[2];
      if (Config::kManySegments && anew) {
#pragma unroll
        for (int r = 0; r < 2; ++r) before[r] = softmax_.row(r);
        softmax_.begin();
      }
      softmax_.add(s, rescale, unit(), [&] {
        wait_output(out, values, in_flight);
        if constexpr (Config::kManySegments) {
          if (anew) keep_segment(out, before);
        }
      });
      Softmax::multiply(out, rescale);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) put_operand<T>(p + 2 * n, s[n]);
      drop(p);
      if (i >= tiles) break;
      wait_keys(keys);
      if constexpr (kSeamless) named_sync(kTurn + group_, 2 * kWarpgroup);
      issue_scores(s, queries.stage(), keys.stage);
      Barrier::wait(value_full(values.stage), values.parity);
      pin<kBlocksE * 4>(out[0]);
      issue_out(out, p, values.stage);
      if constexpr (kSeamless) named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
      now = entry_of(keys, i);
      draw(now);
      wgmma_wait<1>();
      pin<kBlocksN * 4>(s[0]);
      release(key_empty(keys.stage));
      keys.next();
      if (!kPacked && i + 1 == tiles) release(query_empty(queries.stage()));
      in_flight = true;
    }
    Barrier::wait(value_full(values.stage), values.parity);
    issue_out(out, p, values.stage);
    if constexpr (!kPacked) queries.next();
  }
  // Waits for the output's product where one is in flight.
  __device__ __forceinline__ void wait_output(float (&out)[kBlocksE][4], Stages& values, bool in_flight) const {
    wgmma_wait<0>();
    pin<kBlocksE * 4>(out[0]);
    if (in_flight) {
      release(value_empty(values.stage));
      values.next();
    }
  }
  __device__ __forceinline__ void issue_scores(float (&s)[kBlocksN][4], int query_stage, int stage) const {
    // Uniform in a warp, and known to be: descriptors follow from it.
    query_stage = Config::kQueryStages == 1 ? 0 : __shfl_sync(~0u, query_stage, 0);
    const auto query = descriptor(this->query(query_stage) + group_ * 64 * kChunkBytes, 16);
    const auto key = descriptor(this->key(stage), 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScoreProducts; ++k)
      ScoreProduct::run(s[0], advanced(query, step_bytes<Config::kRows>(k)),
                        advanced(key, step_bytes<Config::kCols>(k)), k != 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_out(float (&out)[kBlocksE][4], const unsigned (&p)[kBlocksN * 2],
                                            int stage) const {
    const auto value = descriptor(this->value(stage), Config::kCols * kChunkBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kOutProducts; ++k)
      OutProduct::run(out[0], p + 4 * k, advanced(value, k * 16 * kChunkBytes), true);
    wgmma_commit();
  }

  // --- mods ---

  __device__ __forceinline__ void apply_mods(float (&s)[kBlocksN][4], int tile) const {
    if constexpr (Reads::kUsed) Barrier::wait(Tiles::reads_full(reads_.stage()), reads_.parity());
    const int kv = Entry::column(tile) * Config::kCols + lane() % 4 * 2;
    if constexpr (!Config::kUnscaled) change(s, kv, Tiles::reads(reads_.stage()));
    if (!Tiles::masked(Entry::kind(tile), Entry::column(tile) * Config::kCols)) return;
    const auto alive = pairs_of(Entry::kind(tile), kv);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = (alive >> (n * 4 + e) & 1) != 0 ? s[n][e] : -FUSEGRAD_INFINITY;
    }
  }
  __device__ __forceinline__ void release_reads() {
    if constexpr (Reads::kUsed) {
      __syncwarp();
      release(Tiles::reads_empty(reads_.stage()));
      reads_.next();
    }
  }
  // All pairs are changed; masked ones too read inside the mod's buffers.
  __device__ __forceinline__ void change(float (&s)[kBlocksN][4], int kv, unsigned reads) const {
    const auto lines = Reads::score_lines(reads, first_row() + lane() / 4, lane() % 4 * 2);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      const auto of_block = Reads::boxes(reads, first_row(), n * 8, lane());
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] *= a_.scale;
        if constexpr (kHas<ScoreMod>) {
          s[n][e] = ScoreMod::apply(score_, s[n][e], b_, head_of(e / 2), query_of(e / 2), kv + n * 8 + e % 2, true,
                                    reads_of_pair(lines.at(e / 2 * 8, n * 8 + e % 2), of_block, e));
        }
      }
    }
  }
  // Bit 4 * n + e of the result: whether element e of accumulator n takes part.
  __device__ __forceinline__ Bits<kBlocksN * 4> pairs_of(int kind, int kv) const {
    if constexpr (!kPacked) {
      return masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, kind, b_, h_, row(0), kv);
    } else {
      using Result = Bits<kBlocksN * 4>;
      Result alive = 0;
#pragma unroll 1
      for (int n = 0; n < kBlocksN; ++n) {
        unsigned some = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = e / 2, at = kv + n * 8 + e % 2;
          const bool inside = is_row(r) && at < a_.keys;
          some |=
              static_cast<unsigned>(takes_part<Config>(a_.tiles, mask_, kind, b_, head_of(r), query_of(r), at, inside))
              << e;
        }
        alive |= static_cast<Result>(some) << 4 * n;
      }
      return alive;
    }
  }

  /// Draws a tile's dropout, behind its products, so that both run side by side.
  __device__ __forceinline__ void draw(int tile) {
    if constexpr (Config::kDropout) {
      const int kv = Entry::column(tile) * Config::kCols;
      hold_order();
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if constexpr (kPacked) {
          drawn_.word[w] = dropped_rows_.to_end(a_.dropout, kv + w * 64, lane()).word[0];
        } else {
          drawn_.word[w] = dropped_head_.block(a_.dropout, row_ + first_row(), kv + w * 64, lane());
        }
      }
      pin_words(drawn_.word);
    }
  }
  /// Drops probabilities from an operand.
  __device__ __forceinline__ void drop(unsigned (&p)[kBlocksN * 2]) const {
    if constexpr (Config::kDropout) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) p[2 * n + r] &= drawn_.mask(n, r);
      }
    }
  }

  // --- segments ---

  /// The thread's own memory, of accumulator n: what the segments before gave.
  __device__ __forceinline__ float4 kept(int n) const {
    if constexpr (Config::kKeptSums) {
      float4 x;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                   : "r"(shared_at(n))
                   : "memory");
      return x;
    } else {
      return *global_at(n);
    }
  }
  __device__ __forceinline__ void keep(int n, const float4& x) const {
    if constexpr (Config::kKeptSums) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_at(n)), "f"(x.x), "f"(x.y), "f"(x.z),
                   "f"(x.w)
                   : "memory");
    } else {
      *global_at(n) = x;
    }
  }
  __device__ __forceinline__ unsigned shared_at(int n) const {
    return Tiles::query_ + kKeptAt + ((group_ * kBlocksE + n) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  __device__ __forceinline__ float4* global_at(int n) const {
    const long long accumulator = (static_cast<long long>(blockIdx.x) * Config::kGroups + group_) * kBlocksE + n;
    return reinterpret_cast<float4*>(a_.partials.out) + accumulator * kWarpgroup + threadIdx.x % kWarpgroup;
  }
  /// Adds a segment to those before: kKeep: the sum is kept, and the output begins anew; else it becomes the output.
  template <bool kKeep>
  __device__ __forceinline__ void add_kept(float (&out)[kBlocksE][4], const FlexSegmentRow (&part)[2]) {
    FlexSegmentWeights w[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) w[r] = add_segment(total_[r], part[r], unit());
    if constexpr (!Config::kManySegments) return;
#pragma unroll
    for (int n = 0; n < kBlocksE; ++n) {
      float4 x = make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
      if (segments_ > 0) {
        const float4 before = kept(n);
        x = make_float4(w[0].add(before.x, x.x), w[0].add(before.y, x.y), w[1].add(before.z, x.z),
                        w[1].add(before.w, x.w));
      }
      if constexpr (kKeep) {
        keep(n, x);
        x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      out[n][0] = x.x;
      out[n][1] = x.y;
      out[n][2] = x.z;
      out[n][3] = x.w;
      if (n % 4 == 3) hold_order();
    }
  }
  __device__ __forceinline__ void keep_segment(float (&out)[kBlocksE][4], const FlexSegmentRow (&part)[2]) {
    add_kept<true>(out, part);
    ++segments_;
  }

  // A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish(float (&out)[kBlocksE][4], bool bad, const Place& of) {
    const float nan = __int_as_float(0x7fffffff);
    const FlexSegmentRow part[2] = {softmax_.row(0), softmax_.row(1)};
    if constexpr (kPacked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store_partial(is_row(r), a_.partials, at(r), split_,
                      {bad ? nan : part[r].max, bad ? nan : part[r].sum, 0.0f, 0.0f}, out, r, lane());
      }
    } else {
      add_kept<false>(out, part);
      float factor[2];
      const int first = of.row + first_row() + lane() / 4;
      const long long place = static_cast<long long>(of.b * a_.heads + of.h) * a_.queries + first;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const FlexSegmentRow row{bad ? nan : total_[r].max, bad ? nan : total_[r].sum};
        const FlexSegmentResult result = segment_result(row, unit(), Config::kDropout ? a_.dropout.scale : 1.0f);
        factor[r] = result.factor;
        if (lane() % 4 == 0 && first + 8 * r < a_.queries) store_segment_lse(a_, place + 8 * r, result);
      }
      store_rows<T>(a_.out, of.b, of.h, first, a_.queries, a_.value_size, out, factor);
      if constexpr (Config::kOutLow)
        store_low_rows<T>(a_.out_low, of.b, of.h, first, a_.queries, a_.value_size, out, factor);
    }
  }

  Softmax softmax_;
  FlexSegmentRow total_[2];
  FlexDropoutHead<Config> dropped_head_;
  FlexDropoutRows<Config> dropped_rows_;
  FlexKept<false, kWords> drawn_;
  typename Tiles::ReadStages reads_;
  int b_, h_, row_, rows_, group_, split_, segment_, segments_;
  int head_[2], query_[2];
};

}  // namespace fusegrad::device
