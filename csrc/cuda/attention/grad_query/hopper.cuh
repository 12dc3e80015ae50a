// dQ by itself for sm_90a, persistent CTAs of kRows queries. Each CTA adds up in one order, so dQ is the same in every
// run; like portable.cuh, the kernel also finds the largest contribution to each captured buffer.
//
// The CTA has 64 queries per consumer warpgroup and walks their tiles of keys, which a producer warp loads by TMA. The
// warpgroups ping-pong: one computes pairs while the other's WGMMAs run. The first products of the next queries run
// while dQ of the present ones is stored.
//
// scores.cuh and backward.cuh describe Config; this file adds:
//   kStages                    tiles of values in shared memory, at least 1; there is one more of keys, which dQ needs
//                              for longer
//   kQueryStages               tiles of queries and dO
#pragma once

#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/merge.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

template <class Config>
class FlexGradQueryHopper {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Derivative = typename Config::Derivative;
  using ScoreProduct = Wgmma<T, Config::kCols, false, false>;
  using QueryProduct = Wgmma<T, Config::kHead, true, true>;
  static constexpr int kBlocksN = Config::kCols / 8, kBlocksD = Config::kHead / 8;
  static constexpr int kKeyStages = Config::kStages + 1, kValueStages = Config::kStages;
  static constexpr HopperGradQueryMemory kMemory{{.rows = Config::kRows,
                                                  .cols = Config::kCols,
                                                  .head = Config::kHead,
                                                  .value = Config::kValue,
                                                  .stages = Config::kStages,
                                                  .query_stages = Config::kQueryStages}};
  static constexpr int kConsumerWarps = Config::kGroups * kWarpgroup / kLanes;
  static constexpr int kQueryStages = Config::kQueryStages;
  using Entry = LastTileEntry;
  static constexpr int kNoMore = -1;  // in place of an entry's word
  /// The first of each kind of named barriers; warpgroup g has the g-th of a kind.
  enum NamedBarrier : int {
    kTurn = 1,                        // whose turn it is to issue products
    kAlone = kTurn + Config::kGroups  // a warpgroup by itself
  };
  // Pairs for which a mask_mod is called at a time.
  static constexpr int kTogether = 8;
  static constexpr bool kPairs = ScoreMod::kPairBytes > 0 && Config::kHead <= 128;
  // Reads by keys and diagonals come from lines in shared memory, each warpgroup's its own, where the tiles leave room
  // for them; else they are prefetched a tile ahead.
  using Lines = TileLines<ScoreMod, 64, Config::kCols, kWarpgroup>;
  static constexpr bool kSmall = Config::kHead <= 128;
  static constexpr bool kLines =
      !kPairs && Lines::all() && 4 * Config::kGroups * Lines::kWords <= kMemory.lines.bytes();
  static constexpr bool kTouches = kSmall && !kLines && ScoreMod::kTouchesKeys;
  // Compute pairs kBlocksHeld blocks of eight keys at a time, against register pressure; the reads of those blocks are
  // waited for together.
  static constexpr bool kInOrder = kHas<ScoreMod> || Config::kMaxGradient;
  // P is computed while dP is being multiplied.
  static constexpr bool kOverlapped = !kInOrder;
  static constexpr int kWords = Config::kDropout ? Config::kCols / 64 : 1;
  static constexpr int kBlocksHeld = kPairs ? 2 : !kTouches && !kLines ? 1 : Config::kHead <= 64 ? 4 : 2;
  static_assert(Config::kRows == 64 * Config::kGroups && Config::kWarps == kConsumerWarps);
  static_assert(Config::kHead % 16 == 0 && Config::kValue % 16 == 0 && Config::kCols % 16 == 0);

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexGradQueryHopper(const FlexBackwardArguments& a,
                                                 const FlexBackwardHopperArguments& more,
                                                 const typename ScoreMod::Captured& score,
                                                 const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        more_(more),
        score_(score),
        mask_(mask),
        query_((shared + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment),
        key_(query_ + kMemory.key.offset),
        barriers_(query_ + kMemory.barriers.offset) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kQueryStages; ++s) {
        Barrier::init(query_full(s), 1);
        Barrier::init(query_empty(s), kConsumerWarps);
      }
      for (int s = 0; s < kKeyStages; ++s) {
        Barrier::init(key_full(s), 1);
        Barrier::init(key_empty(s), kConsumerWarps);
      }
      for (int s = 0; s < kValueStages; ++s) {
        Barrier::init(value_full(s), 1);
        Barrier::init(value_empty(s), kConsumerWarps);
      }
      Barrier::fence_inits();
    }
    __syncthreads();
    // The shuffle tells the compiler that it is uniform in a warp.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group_ == Config::kGroups) {
      give_registers<24>();
      const int warp = static_cast<int>(threadIdx.x) / kLanes - kConsumerWarps;
      if (warp == 0 && lane() == 0) produce();
      if (Config::kBlocks && Config::kGradQuery && warp == 1) store_empty();
    } else {
      take_registers<240>();
      consume();
    }
  }

 private:
  using Keys = Ring<kKeyStages>;
  using Values = Ring<kValueStages>;

  // The stage of the i-th queries and the parity of its barriers.
  static __device__ __forceinline__ int stage_of(unsigned i) { return static_cast<int>(i % kQueryStages); }
  static __device__ __forceinline__ int parity_of(unsigned i) { return static_cast<int>(i / kQueryStages & 1); }

  __device__ __forceinline__ unsigned query(int s) const { return query_ + s * kMemory.query.piece; }
  __device__ __forceinline__ unsigned grad_out(int s) const {
    return query(s) + swizzled_tile_bytes(Config::kRows, Config::kHead);
  }
  __device__ __forceinline__ unsigned key(int s) const { return key_ + s * kMemory.key.piece; }
  __device__ __forceinline__ unsigned value(int s) const { return key(kKeyStages) + s * kMemory.value.piece; }
  __device__ __forceinline__ unsigned query_full(int s) const { return barriers_ + s * kBarrierBytes; }
  __device__ __forceinline__ unsigned query_empty(int s) const { return query_full(kQueryStages + s); }
  __device__ __forceinline__ unsigned key_full(int s) const { return query_full(2 * kQueryStages + s); }
  __device__ __forceinline__ unsigned key_empty(int s) const { return key_full(kKeyStages + s); }
  __device__ __forceinline__ unsigned value_full(int s) const { return key_full(2 * kKeyStages + s); }
  __device__ __forceinline__ unsigned value_empty(int s) const { return value_full(kValueStages + s); }
  /// Whose queries number i are.
  __device__ __forceinline__ unsigned work(unsigned i) const {
    return barriers_ + (kMemory.works.offset - kMemory.barriers.offset) +
           kMemory.works.piece * (i % kMemory.works.count);
  }
  /// The entry of each stage of keys.
  __device__ __forceinline__ unsigned entry(int s) const {
    return work(0) + (kMemory.entries.offset - kMemory.works.offset) + s * kMemory.entries.piece;
  }

  // Read anew under register pressure.
  static __device__ __forceinline__ int thread() { return kSmall ? static_cast<int>(threadIdx.x) : thread_anew(); }
  static __device__ __forceinline__ int lane() { return thread() % kLanes; }
  /// The thread's first query.
  __device__ __forceinline__ int first_query() const { return first_query(row_); }
  __device__ __forceinline__ int first_query(int row) const { return row + thread() / kLanes * 16 + lane() / 4; }

  // --- the producer: one thread, which alone divides indices and reads lists ---

  __device__ __forceinline__ void produce() {
    Keys keys;
    Values values;
    unsigned queries = 0;
    for (int id = static_cast<int>(blockIdx.x); take(id);) {
      const TileWalk walk = this->walk();
      const int key_head = h_ / a_.group, key_batch = a_.key_batches == 1 ? 0 : b_, tiles = walk.count();
#pragma unroll 1  // or its code would be a quarter of the kernel's
      for (int i = 0; i < tiles; ++i) {
        const int now = walk[i], col = TileEntry<>::column(now) * Config::kCols;
        Barrier::wait(key_empty(keys.stage), keys.parity ^ 1);
        tell(Entry::of(now) + (i + 1 == tiles ? Entry::kLast : 0), keys.stage);
        copy_tile<Config::kCols, Config::kHead>(key(keys.stage), more_.key, key_full(keys.stage), col, key_head,
                                                key_batch);
        keys.next();
        if (i == 0) {
          const int s = stage_of(queries);
          Barrier::wait(query_empty(s), parity_of(queries) ^ 1);
          asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(work(queries)), "r"(b_), "r"(h_), "r"(row_),
                       "r"(Config::kKeySplits ? split_ : row_)
                       : "memory");
          Barrier::expect(query_full(s), kMemory.query.piece);
          copy_boxes<Config::kRows, Config::kHead>(query(s), more_.query, query_full(s), row_, h_, b_);
          copy_boxes<Config::kRows, Config::kValue>(grad_out(s), more_.grad_out, query_full(s), row_, h_, b_);
          ++queries;
        }
        Barrier::wait(value_empty(values.stage), values.parity ^ 1);
        copy_tile<Config::kCols, Config::kValue>(value(values.stage), more_.value, value_full(values.stage), col,
                                                 key_head, key_batch);
        values.next();
      }
      // The tile scheduler: static without a block mask, where all queries take the same time, else dynamic.
      id = static_cast<int>(gridDim.x) + (Config::kBlocks ? atomicAdd(more_.next, 1) : id);
    }
    Barrier::wait(key_empty(keys.stage), keys.parity ^ 1);
    tell(kNoMore, keys.stage);
    Barrier::arrive(key_full(keys.stage));
    Barrier::wait(value_empty(values.stage), values.parity ^ 1);
    Barrier::arrive(value_full(values.stage));
  }
  /// Goes to queries number `id`. Returns whether there are any.
  __device__ __forceinline__ bool take(int id) {
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    if constexpr (Config::kKeySplits) {
      split_ = id % a_.splits;
      id /= a_.splits;
    }
    if (id >= a_.batches * a_.heads * row_tiles) return false;
    const HeadTile work(a_.batches * a_.heads, row_tiles, id);
    // The last queries come first: under a causal mask they have the most keys.
    row_ = (row_tiles - 1 - work.tile) * Config::kRows;
    b_ = work.head / a_.heads;
    h_ = work.head % a_.heads;
    return true;
  }
  __device__ __forceinline__ TileWalk walk() const {
    TileWalk walk(a_.tiles, b_, h_, row_ / Config::kRows, (a_.keys + Config::kCols - 1) / Config::kCols,
                  (Config*)nullptr);
    if constexpr (Config::kKeySplits) walk.keep(split_, a_.splits);
    return walk;
  }
  // Run by another warp: stores dQ of queries that have no tiles.
  __device__ __forceinline__ void store_empty() {
    for (int id = static_cast<int>(blockIdx.x); take(id); id += static_cast<int>(gridDim.x)) {
      const int tiles = walk().count();
      if (tiles > 0) continue;
      const FlexTensor& to = a_.grad_query;
      if constexpr (Config::kKeySplits) {
        const float none = tiles < 0 ? __int_as_float(0x7fffffff) : 0.0f;
        float* p = split_head(b_, h_, split_);
        const int floats = (min(row_ + Config::kRows, a_.queries) - row_) * static_cast<int>(to.row_stride);
#pragma unroll 1
        for (int i = lane(); i < floats; i += kLanes) p[row_ * to.row_stride + i] = none;
      } else {
        T* p = static_cast<T*>(to.data) + b_ * to.batch_stride + h_ * to.head_stride;
        const unsigned short none = tiles < 0 ? 0x7fff : 0;
#pragma unroll 1
        for (int q = row_; q < min(row_ + Config::kRows, a_.queries); ++q) {
#pragma unroll 1
          for (int c = lane(); c < a_.head_size; c += kLanes) p[q * to.row_stride + c * to.col_stride] = T{none};
        }
      }
    }
  }
  __device__ __forceinline__ void tell(int now, int stage) const {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(entry(stage)), "r"(now) : "memory");
  }

  // --- a consumer warpgroup ---

  __device__ __forceinline__ void consume() {
    float sum[kBlocksD][4], s[kBlocksN][4], d[kBlocksN][4];
    largest_.begin();
    Keys keys;
    Values values;
    unsigned queries = 0;
    wait_keys(keys);
    int now = entry_of(keys);
    if (now != kNoMore) {
      // Warpgroup 0 begins and each hands the turn to the next. Nobody takes the last turn.
      if (group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
      take_queries(queries);
      load_rows();
      zero(sum);
      issue_scores(s, 0, keys);
      Barrier::wait(value_full(values.stage), values.parity);
      issue_grad_probabilities(d, 0, values);
      touch(now);
      draw(now);
      if constexpr (kLines) {
        Lines lines;
        load(lines, now);
        lines.store(this->lines(), thread() % kWarpgroup);
      }
      if constexpr (kOverlapped) wait_scores(s);
      while (now != kNoMore) {
        unsigned ds[kBlocksN * 2];
        if constexpr (kOverlapped) {
          overlapped_pairs(now, s, d, ds);
        } else {
          wgmma_wait<0>();
          pin<kBlocksN * 4>(s[0]);
          pin<kBlocksN * 4>(d[0]);
        }
        release(value_empty(values.stage));
        values.next();
        const bool last_tile = (now & Entry::kLast) != 0;
        if (last_tile) {
          release(query_empty(stage_of(queries)));
          ++queries;
        }
        if constexpr (kLines) named_sync(kAlone + group_, kWarpgroup);
        if constexpr (!kOverlapped) pairs(now, s, d, ds);
        const Keys last = keys;
        keys.next();
        begin_turn();
        now = turn(last_tile, last, keys, values, queries, ds, sum, s, d);
        if (last_tile) {
          // Where registers are left, they are loaded while dQ of the last queries is stored.
          if constexpr (kSmall) load_rows();
          store(sum, queries - 1);
          zero(sum);
          if constexpr (!kSmall) load_rows();
        }
        if (now != kNoMore) draw(now);
        // The wait is here: at the loop's head the compiler would wait for each product.
        if constexpr (kOverlapped) wait_scores(s);
      }
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      pin<kBlocksN * 4>(d[0]);
      if (group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
    }
    if constexpr (kTouches || kPairs) wait_touches();
    put_largest();
  }
  /// Waits for the i-th queries and reads whose they are.
  __device__ __forceinline__ void take_queries(unsigned i) {
    Barrier::wait(query_full(stage_of(i)), parity_of(i));
    read_work(i, b_, h_, row_);
    dropout_.begin(a_.dropout, b_ * a_.heads + h_);
  }
  __device__ __forceinline__ void read_work(unsigned i, int& b, int& h, int& row) const {
    int unused;
    read_work(i, b, h, row, unused);
  }
  __device__ __forceinline__ void read_work(unsigned i, int& b, int& h, int& row, int& split) const {
    load_four_by_first(lane(), work(i), b, h, row, split);
  }
  /// Where a split of the keys has dQ of a head.
  __device__ __forceinline__ float* split_head(int b, int h, int split) const {
    const FlexTensor& to = a_.grad_query;
    return static_cast<float*>(to.data) + (split * a_.batches + b) * to.batch_stride + h * to.head_stride;
  }
  __device__ __forceinline__ void load_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first_query() + r * 8;
      const bool there = q < a_.queries;
      const long long head = b_ * a_.heads + h_, at = head * a_.queries + q;
      rows_[r] = {there ? a_.rows[head * a_.row_stride + q] : FlexRow{0.0f, 0.0f}, 0.0f, 0.0f, 0.0f};
      if constexpr (Config::kMaxGradient) {
        rows_[r].max = there ? a_.max_scores[at] : 0.0f;
        rows_[r].grad_max = there ? a_.grad_max[at] : 0.0f;
      }
    }
  }

  /// Issues dQ of a tile and the first products of the next one, which is returned. None is under a condition, which
  /// would make the compiler wait for it: behind the last tile they multiply whatever lies in shared memory, and nobody
  /// uses them.
  __device__ __forceinline__ int turn(bool last_tile, const Keys& last, const Keys& keys, const Values& values,
                                      unsigned queries, const unsigned (&ds)[kBlocksN * 2], float (&sum)[kBlocksD][4],
                                      float (&s)[kBlocksN][4], float (&d)[kBlocksN][4]) {
    if constexpr (Config::kGradQuery) issue_grad_query(sum, ds, last);
    wait_keys(keys);
    if (last_tile && entry_of(keys) != kNoMore) take_queries(queries);
    issue_scores(s, stage_of(queries), keys);
    // Queued products keep the tensor cores busy until the next warpgroup has woken up.
    end_turn();
    const int next = entry_of(keys);
    touch(next);
    Lines lines;
    if constexpr (kLines) load(lines, next);
    wgmma_wait<1>();
    pin<kBlocksD * 4>(sum[0]);
    release(key_empty(last.stage));
    // The operands' registers are free only now.
    Barrier::wait(value_full(values.stage), values.parity);
    issue_grad_probabilities(d, stage_of(queries), values);
    // All threads are done with the last tile's lines, as the turn has begun.
    if constexpr (kLines) lines.store(this->lines(), thread() % kWarpgroup);
    return next;
  }

  static __device__ __forceinline__ void wait_scores(float (&s)[kBlocksN][4]) {
    wgmma_wait<1>();
    pin<kBlocksN * 4>(s[0]);
  }
  __device__ __forceinline__ void wait_keys(const Keys& keys) const {
    Barrier::wait(key_full(keys.stage), keys.parity);
  }
  /// The entry of the stage's keys. After wait_keys.
  __device__ __forceinline__ int entry_of(const Keys& keys) const { return load_by_first(lane(), entry(keys.stage)); }
  /// Prefetches what the warpgroup will read of captured tensors.
  __device__ __forceinline__ void touch(int tile) const {
    const int q = row_ + group_ * 64, kv = col_of(tile), thread = this->thread() % kWarpgroup;
    const unsigned nowhere = entry(kKeyStages) + this->thread() * 4;
    if constexpr (kTouches) touch_tile<ScoreMod, 64, Config::kCols, kWarpgroup>(score_, b_, h_, q, kv, thread, nowhere);
    if constexpr (kPairs) touch_pairs<ScoreMod, 64, Config::kCols, kWarpgroup>(score_, b_, h_, q, kv, thread, nowhere);
  }
  __device__ __forceinline__ unsigned lines() const { return entry(kKeyStages) + group_ * Lines::kWords * 4; }
  __device__ __forceinline__ void load(Lines& lines, int tile) const {
    lines.load(score_, b_, h_, row_ + group_ * 64, col_of(tile), thread() % kWarpgroup);
  }
  // Called by each warp when all its lanes are done with what the barrier guards.
  __device__ __forceinline__ void release(unsigned barrier) const {
    __syncwarp();
    if (lane() == 0) Barrier::arrive(barrier);
  }
  __device__ __forceinline__ void begin_turn() const { named_sync(kTurn + group_, 2 * kWarpgroup); }
  __device__ __forceinline__ void end_turn() const {
    named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
  }

  // Scores equal the forward's to the bit: the gradient of max_scores compares them.
  __device__ __forceinline__ void issue_scores(float (&s)[kBlocksN][4], int query_stage, const Keys& keys) const {
    issue_rows<Config::kHead>(s, query(query_stage), key(keys.stage));
  }
  __device__ __forceinline__ void issue_grad_probabilities(float (&d)[kBlocksN][4], int query_stage,
                                                           const Values& values) const {
    issue_rows<Config::kValue>(d, grad_out(query_stage), value(values.stage));
  }
  /// The warpgroup's 64 rows of `a` by all rows of `b`.
  template <int kCommon>
  __device__ __forceinline__ void issue_rows(float (&c)[kBlocksN][4], unsigned a, unsigned b) const {
    const auto row = descriptor(anew(a + group_ * 64 * kChunkBytes), 16), col = descriptor(anew(b), 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kCommon / 16; ++k) {
      ScoreProduct::run(c[0], advanced(row, step_bytes<Config::kRows>(k)), advanced(col, step_bytes<Config::kCols>(k)),
                        k != 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_grad_query(float (&sum)[kBlocksD][4], const unsigned (&ds)[kBlocksN * 2],
                                                   const Keys& keys) const {
    const auto from = descriptor(key(keys.stage), Config::kCols * kChunkBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kCols / 16; ++k)
      QueryProduct::run(sum[0], ds + 4 * k, advanced(from, k * 16 * kChunkBytes), true);
    wgmma_commit();
  }

  // Computes what pairs() computes, and waits for dP itself. The mask's branch is between the probabilities and that
  // wait, or ptxas would move the wait up.
  __device__ __forceinline__ void overlapped_pairs(int tile, float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                                   unsigned (&ds)[kBlocksN * 2]) const {
    if (has_far()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_far(rows_[r].row)) continue;
        FlexRow row = rows_[r].row;
        const float origin = take_origin<Config>(a_, row, b_, h_, first_query() + r * 8);
#pragma unroll
        for (int k = 0; k < kBlocksN * 2; ++k) {
          subtract_lse(s[k / 2][k % 2 + 2 * r], a_.scale, row, origin);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kBlocksN * 4; ++k) {
      float changed;
      s[k / 4][k % 4] = FlexPairGradient<Config>::template probability<true>(
          score_, a_.scale, s[k / 4][k % 4], rows_[k % 4 / 2], 0, 0, 0, 0, true, changed);
    }
    pin<kBlocksN * 4>(s[0]);
    auto alive = ~Bits<kBlocksN * 4>(0);
    const bool masked = this->masked(tile);
    if (masked) alive = mask_of(tile);
    wgmma_wait<0>();
    pin<kBlocksN * 4>(d[0]);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) drop_gradient(n, d[n]);
#pragma unroll
    for (int k = 0; k < kBlocksN * 4; ++k)
      d[k / 4][k % 4] = s[k / 4][k % 4] * (d[k / 4][k % 4] - rows_[k % 4 / 2].row.delta);
    if (masked) {
      const Tested<Bits<kBlocksN * 4>> takes_part(alive);
#pragma unroll
      for (int k = 0; k < kBlocksN * 4; ++k) d[k / 4][k % 4] = takes_part[k] ? d[k / 4][k % 4] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) put_operand<T>(ds + 2 * n, d[n]);
  }
  /// Whether the warp has a far row.
  __device__ __forceinline__ bool has_far() const {
    return __any_sync(~0u, is_far(rows_[0].row) || is_far(rows_[1].row));
  }
  static __device__ __forceinline__ int col_of(int tile) { return Entry::column(tile) * Config::kCols; }
  __device__ __forceinline__ bool masked(int tile) const {
    return Entry::kind(tile) != kTileFull || col_of(tile) + Config::kCols > a_.keys ||
           row_ + Config::kRows > a_.queries;
  }
  __device__ __forceinline__ Bits<kBlocksN * 4> mask_of(int tile) const {
    return masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, Entry::kind(tile), b_, h_, first_query(),
                                                            col_of(tile) + lane() % 4 * 2);
  }

  /// Draws a tile's dropout. Behind its products, so that both run side by side.
  __device__ __forceinline__ void draw(int tile) {
    if constexpr (Config::kDropout) {
      hold_order();
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        kept_.word[w] = dropout_.block(a_.dropout, first_query() - lane() / 4, col_of(tile) + w * 64, lane());
      pin_words(kept_.word);
    }
  }
  /// Applies dropout to dP of a block of eight keys.
  __device__ __forceinline__ void drop_gradient(int n, float (&d)[4]) const {
    if constexpr (Config::kDropout) kept_.drop(n, d);
  }
  // Computes dS of a tile, as an operand.
  __device__ __forceinline__ void pairs(int tile, float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                        unsigned (&ds)[kBlocksN * 2]) {
    const int q = first_query(), kv = col_of(tile) + lane() % 4 * 2;
    const bool masked = this->masked(tile);
    const bool far = has_far();
    if (far || !kUnmaskedToo<Config> || masked) {
      const auto alive = !masked ? ~Bits<kBlocksN * 4>(0) : mask_of(tile);
      far ? each_pair<true, true>(alive, tile, q, kv, s, d, ds) : each_pair<true, false>(alive, tile, q, kv, s, d, ds);
    } else {
      each_pair<false, false>(0, tile, q, kv, s, d, ds);
    }
  }
  template <bool kMasked, bool kFar>
  __device__ __forceinline__ void each_pair(Bits<kBlocksN * 4> alive, int tile, int q, int kv, float (&s)[kBlocksN][4],
                                            float (&d)[kBlocksN][4], unsigned (&ds)[kBlocksN * 2]) {
    const Tested<Bits<kBlocksN * 4>> takes_part(alive);
    const auto reads = this->reads();
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      if (kInOrder && n % kBlocksHeld == 0) hold_order();
      drop_gradient(n, d[n]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float value[Derivative::kContributions + 1];
        const bool takes = !kMasked || takes_part[n * 4 + e];
        const int at_q = q + e / 2 * 8, at_kv = kv + n * 8 + e % 2;
        const float score = s[n][e] * a_.scale;
        FlexQuery of = rows_[e / 2];
        if constexpr (kFar) of.origin = take_origin<Config>(a_, of.row, b_, h_, at_q);
        d[n][e] =
            FlexPairGradient<Config>::template apply<kFar>(score_, a_.scale, s[n][e], d[n][e], of, b_, h_, at_q, at_kv,
                                                           takes, s[n][e], value, reads.at(e / 2 * 8, n * 8 + e % 2));
        largest_.add(e, value, score, at_q, at_kv);
      }
      largest_.end_pairs(score_, b_, h_);
      if constexpr (Config::kGradQuery) put_operand<T>(ds + 2 * n, d[n]);
    }
  }

  /// Where the thread's first pair reads.
  __device__ __forceinline__ auto reads() const {
    if constexpr (kLines) {
      return typename Lines::Reads(lines(), thread() % kWarpgroup / kLanes * 16 + lane() / 4, lane() % 4 * 2);
    } else {
      return score_mod::ReadThere<ScoreMod::kUnread>();
    }
  }

  __device__ __forceinline__ void store(const float (&sum)[kBlocksD][4], unsigned queries) const {
    if constexpr (Config::kGradQuery) {
      int b, h, row, split;
      read_work(queries, b, h, row, split);
      if constexpr (Config::kKeySplits) {
        const int stride = static_cast<int>(a_.grad_query.row_stride);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int q = first_query(row) + 8 * r;
          store_floats(q < a_.queries, split_head(b, h, split) + static_cast<long long>(q) * stride, stride, sum, r,
                       a_.scale, lane());
        }
      } else {
        store_rows<T>(a_.grad_query, b, h, first_query(row), a_.queries, a_.head_size, sum, {a_.scale, a_.scale});
      }
    }
  }
  __device__ __forceinline__ void put_largest() const { largest_.finish(a_.largest); }

  const FlexBackwardArguments& a_;
  const FlexBackwardHopperArguments& more_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, key_, barriers_;
  int b_, h_, row_, group_, split_;
  FlexDropoutHead<Config> dropout_;
  FlexKept<false, kWords> kept_;
  FlexQuery rows_[2];
  FlexLargest<Config> largest_;
};

}  // namespace fusegrad::device
