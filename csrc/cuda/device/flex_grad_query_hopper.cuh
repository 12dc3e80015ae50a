// The gradient of the queries by itself on sm_90a, where it must be the same bits each time; what flex_grad_query.cuh
// says holds here too. A CTA owns kRows queries of a head, 64 for each warpgroup that computes, and goes over the tiles
// of keys in order; a producer warp brings them by the copy engine. The warpgroups take turns in issuing products, so
// that one's pairs are computed while the other's products run. See flex_scores.cuh and flex_backward_hopper.cuh for
// Config; also:
//   kStages                    tiles of values in shared memory, at least 1; of keys there is one more, as they are
//   needed for longer
#pragma once

#include "cuda/device/flex_gradient.cuh"
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
  static constexpr int kQueryBytes = Config::kRows * Config::kHead * 2;
  static constexpr int kGradOutBytes = Config::kRows * Config::kValue * 2;
  static constexpr int kKeyBytes = Config::kCols * Config::kHead * 2;
  static constexpr int kValueBytes = Config::kCols * Config::kValue * 2;
  static constexpr int kAlignment = 1024;
  static constexpr int kConsumerWarps = Config::kGroups * kWarpgroup / kLanes;
  static constexpr int kBarriers = 1 + 2 * (kKeyStages + kValueStages);
  static constexpr int kNoMore = -1;  // in place of a tile
  // Named barriers: each warpgroup's turn to issue products, and each by itself.
  static constexpr int kTurn = 1, kAlone = kTurn + Config::kGroups;
  // Of the pairs that a mask_mod is asked for at once.
  static constexpr int kTogether = 8;
  static constexpr bool kPairs = kPairBytes<ScoreMod> > 0 && Config::kHead <= 128;
  // Whether reads by keys and diagonals are of lines in shared memory, each warpgroup's its own, where the tiles leave
  // room for them; else whether they are asked for a tile ahead.
  using Lines = TileLines<ScoreMod, 64, Config::kCols, kWarpgroup>;
  static constexpr int kWords = 2 * Config::kRows + (Config::kHead == 64 && Config::kValue == 64 ? 1024 : 224);
  static constexpr bool kSmall = Config::kHead <= 128;
  static constexpr bool kLines = kSmall && !kPairs && Lines::all() && Config::kGroups * Lines::kWords <= kWords;
  static constexpr bool kTouches = kSmall && !kLines && kTouchesKeys<ScoreMod>;
  // Whether pairs are computed a few blocks of eight keys after a few, as numbers of many at a time would not fit
  // registers; and how many. What they wait for, they wait for together.
  static constexpr bool kInOrder = kHas<ScoreMod> || Config::kMaxGradient;
  // Whether probabilities are computed while grad_out by values is being multiplied.
  static constexpr bool kApart = !kInOrder;
  static constexpr int kBlocksHeld = kPairs ? 2 : !kTouches && !kLines ? 1 : Config::kHead == 64 ? 4 : 2;
  static_assert(Config::kRows == 64 * Config::kGroups && Config::kWarps == kConsumerWarps);
  static_assert(Config::kHead % kChunk == 0 && Config::kValue % kChunk == 0 && Config::kCols % 16 == 0);

 public:
  static constexpr int kSharedBytes = kAlignment + kQueryBytes + kGradOutBytes + kKeyStages * kKeyBytes +
                                      kValueStages * kValueBytes + 8 * kBarriers + 4 * (kKeyStages + kWords);

  __device__ __forceinline__ FlexGradQueryHopper(const FlexBackwardArguments& a,
                                                 const FlexBackwardHopperArguments& more,
                                                 const typename ScoreMod::Captured& score,
                                                 const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        more_(more),
        score_(score),
        mask_(mask),
        query_((shared + kAlignment - 1) / kAlignment * kAlignment),
        key_(query_ + kQueryBytes + kGradOutBytes),
        barriers_(key_ + kKeyStages * kKeyBytes + kValueStages * kValueBytes) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      Barrier::init(query_full(), 1);
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
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    const Work work(a_.batches * a_.heads, row_tiles);
    // The last queries first: under a causal mask they have the most keys.
    const int row_tile = row_tiles - 1 - work.tile;
    b_ = work.head / a_.heads;
    h_ = work.head % a_.heads;
    row_ = row_tile * Config::kRows;
    const TileWalk walk(a_.tiles, b_, h_, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    // The same in all threads of a warp, and known to be.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group_ == Config::kGroups) {
      give_registers<24>();
      if (threadIdx.x == Config::kGroups * kWarpgroup && walk.count() > 0) produce(walk);
    } else {
      take_registers<240>();
      consume(walk.count());
    }
  }

 private:
  using Keys = Ring<kKeyStages>;
  using Values = Ring<kValueStages>;

  // Where all lies in shared memory, in this order; grad_out after the queries.
  __device__ __forceinline__ unsigned grad_out() const { return query_ + kQueryBytes; }
  __device__ __forceinline__ unsigned key(int s) const { return key_ + s * kKeyBytes; }
  __device__ __forceinline__ unsigned value(int s) const { return key(kKeyStages) + s * kValueBytes; }
  __device__ __forceinline__ unsigned query_full() const { return barriers_; }
  __device__ __forceinline__ unsigned key_full(int s) const { return barriers_ + 8 * (1 + s); }
  __device__ __forceinline__ unsigned key_empty(int s) const { return key_full(kKeyStages + s); }
  __device__ __forceinline__ unsigned value_full(int s) const { return key_full(2 * kKeyStages + s); }
  __device__ __forceinline__ unsigned value_empty(int s) const { return value_full(kValueStages + s); }
  /// A tile's number and kind, of each stage of keys; behind them what touches write, 4 bytes of each thread, or lines.
  __device__ __forceinline__ unsigned tile(int s) const { return barriers_ + 8 * kBarriers + 4 * s; }

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  /// The thread's first query.
  __device__ __forceinline__ int first_query() const {
    return row_ + static_cast<int>(threadIdx.x) / kLanes * 16 + lane() / 4;
  }

  // --- the producer: one thread ---

  __device__ __forceinline__ void produce(const TileWalk& walk) const {
    Keys keys;
    Values values;
    Barrier::expect(query_full(), kQueryBytes + kGradOutBytes);
    copy_boxes<Config::kRows, Config::kHead>(query_, more_.query, query_full(), row_, h_, b_);
    copy_boxes<Config::kRows, Config::kValue>(grad_out(), more_.grad_out, query_full(), row_, h_, b_);
    const int key_head = h_ / a_.group, key_batch = a_.key_batches == 1 ? 0 : b_;
#pragma unroll 1  // or its code would be a quarter of the kernel's
    for (int i = 0; i < walk.count(); ++i) {
      const int now = walk[i], col = (now >> 2) * Config::kCols;
      Barrier::wait(key_empty(keys.stage), keys.parity ^ 1);
      tell(now, keys.stage);
      copy_tile<Config::kCols, Config::kHead>(key(keys.stage), more_.key, key_full(keys.stage), col, key_head,
                                              key_batch);
      keys.next();
      Barrier::wait(value_empty(values.stage), values.parity ^ 1);
      copy_tile<Config::kCols, Config::kValue>(value(values.stage), more_.value, value_full(values.stage), col,
                                               key_head, key_batch);
      values.next();
    }
    Barrier::wait(key_empty(keys.stage), keys.parity ^ 1);
    tell(kNoMore, keys.stage);
    Barrier::arrive(key_full(keys.stage));
    Barrier::wait(value_empty(values.stage), values.parity ^ 1);
    Barrier::arrive(value_full(values.stage));
  }
  __device__ __forceinline__ void tell(int now, int stage) const {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(tile(stage)), "r"(now) : "memory");
  }

  // --- a consumer warpgroup ---

  __device__ __forceinline__ void consume(int tiles) {
    float sum[kBlocksD][4], s[kBlocksN][4], d[kBlocksN][4];
#pragma unroll
    for (int i = 0; i < kBlocksD * 4; ++i) sum[i / 4][i % 4] = 0.0f;
    for (int k = 0; k < Derivative::kContributions; ++k) largest_[k] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) begin(r);
    if (tiles > 0) {
      Keys keys;
      Values values;
      // Warpgroup 0 begins; each gives the turn to the next. The last turn is nobody's.
      if (group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
      Barrier::wait(query_full(), 0);
      int now = wait_keys(keys);
      issue_scores(s, keys);
      Barrier::wait(value_full(values.stage), values.parity);
      issue_grad_probabilities(d, values);
      touch(now);
      if constexpr (kLines) {
        Lines lines;
        load(lines, now);
        lines.store(this->lines(), thread());
      }
      if constexpr (kApart) wait_scores(s);
      while (now != kNoMore) {
        unsigned ds[kBlocksN * 2];
        if constexpr (kApart) {
          pairs_apart(now, s, d, ds);
        } else {
          wgmma_wait<0>();
          pin<kBlocksN * 4>(s[0]);
          pin<kBlocksN * 4>(d[0]);
        }
        release(value_empty(values.stage));
        values.next();
        if constexpr (kLines) named_sync(kAlone + group_, kWarpgroup);
        if constexpr (!kApart) pairs(now, s, d, ds);
        const Keys last = keys;
        keys.next();
        begin_turn();
        now = turn(last, keys, values, ds, sum, s, d);
        // Here, and not where the loop begins, or the compiler would wait for each product.
        if constexpr (kApart) wait_scores(s);
      }
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      pin<kBlocksN * 4>(d[0]);
      if (group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
    }
    if constexpr (kTouches || kPairs) wait_touches();
    finish(sum, tiles < 0);
  }
  __device__ __forceinline__ void begin(int r) {
    const int q = first_query() + r * 8;
    const bool there = q < a_.queries;
    const long long head = b_ * a_.heads + h_, at = head * a_.queries + q;
    rows_[r] = {there ? a_.rows[head * a_.row_stride + q] : FlexRow{0.0f, 0.0f}, 0.0f, 0.0f};
    if constexpr (Config::kMaxGradient) {
      rows_[r].max = there ? a_.max_scores[at] : 0.0f;
      rows_[r].grad_max = there ? a_.grad_max[at] : 0.0f;
    }
  }

  /// Adds up the gradient by a tile, and issues the first products of the next one, which is returned. None of the
  /// products is under a condition, which would make the compiler wait for them: of a tile that there is not they are
  /// made of whatever lies in shared memory, and not used.
  __device__ __forceinline__ int turn(const Keys& last, const Keys& keys, const Values& values,
                                      const unsigned (&ds)[kBlocksN * 2], float (&sum)[kBlocksD][4],
                                      float (&s)[kBlocksN][4], float (&d)[kBlocksN][4]) const {
    if constexpr (Config::kGradQuery) issue_grad_query(sum, ds, last);
    const int next = wait_keys(keys);
    issue_scores(s, keys);
    // Products in the queue keep the tensor cores busy until the next warpgroup has woken up.
    end_turn();
    touch(next);
    Lines lines;
    if constexpr (kLines) load(lines, next);
    wgmma_wait<1>();
    pin<kBlocksD * 4>(sum[0]);
    release(key_empty(last.stage));
    // The operands' registers are free only now.
    Barrier::wait(value_full(values.stage), values.parity);
    issue_grad_probabilities(d, values);
    // All threads are done with the last tile's, as the turn has begun.
    if constexpr (kLines) lines.store(this->lines(), thread());
    return next;
  }

  static __device__ __forceinline__ void wait_scores(float (&s)[kBlocksN][4]) {
    wgmma_wait<1>();
    pin<kBlocksN * 4>(s[0]);
  }
  /// Until the stage's keys are there; which tile they are.
  __device__ __forceinline__ int wait_keys(const Keys& keys) const {
    Barrier::wait(key_full(keys.stage), keys.parity);
    return load_by_first(lane(), tile(keys.stage));
  }
  /// What the warpgroup will read of captured tensors.
  __device__ __forceinline__ void touch(int tile) const {
    const int q = row_ + group_ * 64, kv = (tile >> 2) * Config::kCols;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const unsigned nowhere = this->tile(kKeyStages) + static_cast<int>(threadIdx.x) * 4;
    if constexpr (kTouches) touch_tile<ScoreMod, 64, Config::kCols, kWarpgroup>(score_, b_, h_, q, kv, thread, nowhere);
    if constexpr (kPairs) touch_pairs<ScoreMod, 64, Config::kCols, kWarpgroup>(score_, b_, h_, q, kv, thread, nowhere);
  }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }
  __device__ __forceinline__ unsigned lines() const { return tile(kKeyStages) + group_ * Lines::kWords * 4; }
  __device__ __forceinline__ void load(Lines& lines, int tile) const {
    lines.load(score_, b_, h_, row_ + group_ * 64, (tile >> 2) * Config::kCols, thread());
  }
  // By each warp, when all its lanes are done with what the barrier guards.
  __device__ __forceinline__ void release(unsigned barrier) const {
    __syncwarp();
    if (lane() == 0) Barrier::arrive(barrier);
  }
  __device__ __forceinline__ void begin_turn() const { named_sync(kTurn + group_, 2 * kWarpgroup); }
  __device__ __forceinline__ void end_turn() const {
    named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
  }

  // Scores to the bit what the forward has: the gradient of max_scores asks for equality.
  __device__ __forceinline__ void issue_scores(float (&s)[kBlocksN][4], const Keys& keys) const {
    issue_rows<Config::kHead>(s, query_, key(keys.stage));
  }
  __device__ __forceinline__ void issue_grad_probabilities(float (&d)[kBlocksN][4], const Values& values) const {
    issue_rows<Config::kValue>(d, grad_out(), value(values.stage));
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

  // As pairs(), with its own wait for grad_out by values. The branch of the mask is between the probabilities and that
  // wait, or ptxas would have it come first.
  __device__ __forceinline__ void pairs_apart(int tile, float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                              unsigned (&ds)[kBlocksN * 2]) const {
#pragma unroll
    for (int k = 0; k < kBlocksN * 4; ++k) {
      float changed;
      s[k / 4][k % 4] = FlexPairGradient<Config>::template probability<true>(
          score_, a_.scale, s[k / 4][k % 4], rows_[k % 4 / 2].row.lse, 0, 0, 0, 0, true, changed);
    }
    pin<kBlocksN * 4>(s[0]);
    auto alive = ~Bits<kBlocksN * 4>(0);
    const bool masked = this->masked(tile);
    if (masked) alive = mask_of(tile);
    wgmma_wait<0>();
    pin<kBlocksN * 4>(d[0]);
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
  __device__ __forceinline__ bool masked(int tile) const {
    return (tile & 3) != kTileFull || (tile >> 2) * Config::kCols + Config::kCols > a_.keys ||
           row_ + Config::kRows > a_.queries;
  }
  __device__ __forceinline__ Bits<kBlocksN * 4> mask_of(int tile) const {
    return masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, tile & 3, b_, h_, first_query(),
                                                            (tile >> 2) * Config::kCols + lane() % 4 * 2);
  }

  // The gradient by a tile's scores, as an operand.
  __device__ __forceinline__ void pairs(int tile, float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                        unsigned (&ds)[kBlocksN * 2]) {
    const int q = first_query(), kv = (tile >> 2) * Config::kCols + lane() % 4 * 2;
    const bool masked = this->masked(tile);
    if (!kUnmaskedToo<Config> || masked) {
      const auto alive = !masked ? ~Bits<kBlocksN * 4>(0) : mask_of(tile);
      each_pair<true>(alive, q, kv, s, d, ds);
    } else {
      each_pair<false>(0, q, kv, s, d, ds);
    }
  }
  template <bool kMasked>
  __device__ __forceinline__ void each_pair(Bits<kBlocksN * 4> alive, int q, int kv, float (&s)[kBlocksN][4],
                                            float (&d)[kBlocksN][4], unsigned (&ds)[kBlocksN * 2]) {
    const Tested<Bits<kBlocksN * 4>> takes_part(alive);
    const auto reads = this->reads();
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      if (kInOrder && n % kBlocksHeld == 0) hold_order();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float value[Derivative::kContributions + 1];
        const bool takes = !kMasked || takes_part[n * 4 + e];
        d[n][e] = FlexPairGradient<Config>::apply(score_, a_.scale, s[n][e], d[n][e], rows_[e / 2], b_, h_,
                                                  q + e / 2 * 8, kv + n * 8 + e % 2, takes, s[n][e], value,
                                                  reads.at(e / 2 * 8, n * 8 + e % 2));
#pragma unroll
        for (int k = 0; k < Derivative::kContributions; ++k)
          largest_[k] = score_mod::maximum(largest_[k], fabsf(value[k]));
      }
      if constexpr (Config::kGradQuery) put_operand<T>(ds + 2 * n, d[n]);
    }
  }

  /// Of the thread's first pair.
  __device__ __forceinline__ auto reads() const {
    if constexpr (kLines) {
      return typename Lines::Reads(lines(), thread() / kLanes * 16 + lane() / 4, lane() % 4 * 2);
    } else {
      return score_mod::ReadThere();
    }
  }

  __device__ __forceinline__ void finish(const float (&sum)[kBlocksD][4], bool bad) const {
    if constexpr (Config::kGradQuery) {
      const float factor = bad ? __int_as_float(0x7fffffff) : a_.scale;
      store_rows<false, T>(a_.grad_query, b_, h_, first_query(), a_.queries, a_.head_size, sum, {factor, factor});
    }
    // Magnitudes are ordered as their bits are, NaN above all.
#pragma unroll
    for (int k = 0; k < Derivative::kContributions; ++k) {
      const unsigned most = __reduce_max_sync(~0u, __float_as_uint(fabsf(largest_[k])));
      if (lane() == 0 && most != 0) atomicMax(reinterpret_cast<unsigned*>(a_.largest + Derivative::kBuffer[k]), most);
    }
  }

  const FlexBackwardArguments& a_;
  const FlexBackwardHopperArguments& more_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, key_, barriers_;
  int b_, h_, row_, group_;
  FlexQuery rows_[2];
  float largest_[Derivative::kContributions + 1];
};

}  // namespace fusegrad::device
