// Flex attention backward for every GPU from sm_80 on, one CTA per block of keys.
//
// The CTA owns kCols keys of one KV head and walks the query tiles of every query head in the group, with five products
// a tile. Scores and their gradients are kept transposed (keys are rows), so P and dS feed dV and dK straight from
// registers; dS goes through shared memory for dQ, which is added in fp32 in global memory.
//
// scores.cuh and buffers.cuh describe Config; this file adds:
//   kShare                     warps that share keys: 1, 2 or 4. Each has its part of the queries for the scores, and
//                              its part of the head for dK and dV. Sharing halves a warp's accumulators, so it can have
//                              more keys, and its reads of shared memory; in return P goes through shared memory too
//   kStages                    tiles of queries in shared memory
//   kGradientStages            tiles of dS. With 2, dQ is one tile late: half of the warps add it before a tile's
//                              scores and the others after its products, so exponentials of some warps meet products of
//                              others, and a tile takes one CTA barrier
//   kGradQuery, kGradKey, kGradValue   which gradients are wanted
//   kGradScores                whether any gradient but the values' is wanted
//   kMaxGradient               whether max_scores has a gradient
//   kBoxes, kKeeps, kColumns, kPlaces   as the forward has them
//   kStoresQuery               the CTA has all keys, and so all of its queries' gradient, which it stores
#pragma once

#include "cuda/attention/captured/buffers.cuh"
#include "cuda/attention/captured/pair_boxes.cuh"
#include "cuda/attention/captured/pair_columns.cuh"
#include "cuda/attention/captured/pair_places.cuh"
#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"

namespace fusegrad::device {

template <class Config>
class FlexBackward {
  using T = typename Config::Element;
  using Product = Mma<T, Config::kSplit>;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Sums = FlexBufferSums<Config>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using GradOutTile = Tile<T, Config::kRows, Config::kValue>;
  using ScoreTile = Tile<T, Config::kCols, Config::kRows>;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kPart = Config::kRows / Config::kShare;                           // queries of a warp's scores
  static constexpr int kBlocksM = Config::kCols * Config::kShare / Config::kWarps / 16;  // of 16 keys, of a warp
  static constexpr int kBlocksN = kPart / 8;
  using Kept = KeptReads<ScoreMod, kBlocksM * kBlocksN, kThreads, Config::kKeeps>;
  using Boxes = PairBoxes<ScoreMod, Config::kRows, Config::kCols, Kept, Config::kBoxes>;
  using Columns = PairColumns<Config>;
  using Places = PairPlaces<Config>;
  static constexpr int kOperands = kBlocksN * kOperandWords<T>;
  // Blocks of 16 columns of a head, and how many of them a warp has.
  static constexpr int kBlocksD = Config::kHead / 16, kMineD = (kBlocksD + Config::kShare - 1) / Config::kShare;
  static constexpr int kBlocksE = Config::kValue / 16, kMineE = (kBlocksE + Config::kShare - 1) / Config::kShare;
  // For dQ, warps are groups of queries by parts of the head.
  static constexpr int kBlocksQ = Config::kRows % 32 == 0 ? 2 : 1;  // of 16 queries, of a warp
  static constexpr int kGroupsQ = Config::kRows / 16 / kBlocksQ;
  static constexpr int kPartsQ = Config::kWarps / kGroupsQ, kMineQ = (kBlocksD + kPartsQ - 1) / kPartsQ;
  static_assert(Config::kCols == 16 * kBlocksM * Config::kWarps / Config::kShare && kPart % 16 == 0);
  static_assert(Config::kWarps % kGroupsQ == 0);

  static constexpr BackwardMemory kMemory{{.rows = Config::kRows,
                                           .cols = Config::kCols,
                                           .head = Config::kHead,
                                           .value = Config::kValue,
                                           .element_bytes = static_cast<int>(sizeof(T)),
                                           .stages = Config::kStages,
                                           .gradient_stages = Config::kGradientStages,
                                           .shares_keys = Config::kShare > 1,
                                           .box_bytes = Boxes::kBytes,
                                           .kept_bytes = Kept::kBytes,
                                           .column_bytes = Columns::kBytes,
                                           .captured_bytes = Sums::kSharedBytes}};
  static constexpr bool kDelayed = Config::kGradientStages == 2;
  static_assert(!kDelayed || (Config::kStages == 2 && Config::kGradQuery && !Sums::kFlushes));
  static_assert(Config::kRows <= kThreads);
  static_assert(!kHasPlaces<Config> || (Config::kRows == kPlaceTile && Config::kCols == kPlaceTile && kBlocksM == 1 &&
                                        kThreads == kPlaceThreads && Config::kShare == 1 && Config::kStages == 1));
  // Where registers are left, operands are loaded a step ahead, and a warp keeps its own part of P and dS.
  static constexpr bool kAhead = sizeof(T) == 2 && Config::kShare > 1 && Config::Derivative::kContributions == 0;
  // Run tiles of like work together. Reads and sums of captured buffers are better for one head at a time.
  static constexpr bool kLikeTogether = Config::kBlocks && Config::Derivative::kContributions == 0;
  // What is computed again must be stored, not added: dQ.
  static_assert(!Sums::kRepeats || Config::kStoresQuery || !Config::kGradQuery);

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexBackward(const FlexBackwardArguments& a, const FlexSums* sums,
                                          const typename ScoreMod::Captured& score,
                                          const typename MaskMod::Captured& mask, char* shared)
      : a_(a),
        score_(score),
        mask_(mask),
        shared_(shared),
        key_(shared_address(shared)),
        value_(key_ + kMemory.value.offset),
        stage_(key_ + kMemory.stages.offset),
        gradient_(key_ + kMemory.grad_scores.offset),
        probability_(key_ + kMemory.probabilities.offset),
        sums_(a, sums, score, shared + kMemory.captured.offset),
        far_(a) {}

  __device__ __forceinline__ void run() {
    if constexpr (Config::kKeeps) return run_batches();
    const int col_tiles = (a_.keys + Config::kCols - 1) / Config::kCols;
    const int key_heads = a_.heads / a_.group;
    int head = static_cast<int>(blockIdx.x / col_tiles);
    col_tile_ = static_cast<int>(blockIdx.x % col_tiles);
    if constexpr (kLikeTogether) {
      const HeadTile work(a_.key_batches * key_heads, col_tiles);
      head = work.head;
      col_tile_ = work.tile;
    }
    key_batch_ = head / key_heads;
    key_head_ = head % key_heads;
    walk();
    store_gradients();
  }

 private:
  // The CTAs of a head have every n-th batch each, of n; each query head has its own keys.
  __device__ __forceinline__ void run_batches() {
    const int parts = static_cast<int>(gridDim.x) / a_.heads;
    key_head_ = static_cast<int>(blockIdx.x) / parts;
    col_tile_ = col_ = 0;
    const auto place = [&](int block, int e) {
      return PairPlace{part() * kPart + block % kBlocksN * 8 + lane() % 4 * 2 + e % 2,
                       first_key() + block / kBlocksN * 16 + e / 2 * 8};
    };
    Kept::load(kept(), score_, 0, key_head_, place, [&](int block, int e) {
      const PairPlace at = place(block, e);
      return at.q < a_.queries && at.kv < a_.keys;
    });
    sums_.begin();
    load_columns(key_head_);
    key_batch_ = static_cast<int>(blockIdx.x) % parts;
#pragma unroll 1
    while (key_batch_ < a_.batches) {
      walk();
      // Keys and values that are read again must not be overwritten: with inplace=True their gradients take their
      // place.
      const bool again = Sums::kRepeats && sums_.must_repeat();
      if (!again) {
        store_gradients();
        key_batch_ += parts;
      }
      __syncthreads();
      if constexpr (Sums::kRepeats) sums_.next_limits();
    }
    sums_.end_histograms(key_head_);
    sums_.end_batches(key_head_, part() * kPart + lane() % 4 * 2, first_key());
  }
  /// A tile of queries of one of the query heads that share the keys.
  struct ListPlace {
    int b, h, i, tile;  // i: in the head's list; tile: its entry
  };
  // All tiles of queries for the CTA's keys.
  __device__ __forceinline__ void walk() {
    col_ = col_tile_ * Config::kCols;
    row_tiles_ = (a_.queries + Config::kRows - 1) / Config::kRows;
    load_tile<KeyTile, kThreads>(key_, a_.key, key_batch_, key_head_, col_, a_.keys, a_.head_size);
    load_tile<ValueTile, kThreads>(value_, a_.value, key_batch_, key_head_, col_, a_.keys, a_.value_size);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      zero(grad_key_[m]);
      zero(grad_value_[m]);
    }
    // In units that the last batch has shown to be right, class F needs no additions to memory.
    if constexpr (!Config::kKeeps) sums_.begin();

    if constexpr (kDelayed) later_ = __shfl_sync(~0u, static_cast<int>(warp() >= Config::kWarps / 2), 0) != 0;
    const ListPlace place = first();
    if (place.b < last_batch_) load_stage(place, 0);
    commit_copies();
    // A loop for each: both ways in one loop cost the common one up to a fifth. Where the CTA stays for many batches it
    // spills beside another loop.
    if constexpr (Config::kKeeps) {
      walk_tiles<true>(place);
    } else {
      far_ ? walk_tiles<true>(place) : walk_tiles<false>(place);
    }
  }
  template <bool kFar>
  __device__ __forceinline__ void walk_tiles(ListPlace place) {
    int b = -1, h = -1, stage = 0;
    ListPlace last = place;
    while (place.b < last_batch_) {
      const ListPlace next = after(place);
      wait_copies<0>();
      __syncthreads();
      if constexpr (Config::kStages == 2 && !kAhead) load_next(next, 1 - stage);
      const bool first = h < 0;
      if (kDelayed && !first && !later_) finish(last, 1 - stage);
      if (b != place.b || h != place.h) {
        if (!first) sums_.end_head(b, h, first_key());
        sums_.begin_head();
        if constexpr (Columns::kBytes > 0 && !Config::kKeeps) {
          if (h != place.h) {
            load_columns(place.h);
            __syncthreads();
          }
        }
        b = place.b;
        h = place.h;
        dropout_.begin(a_.dropout, b * a_.heads + h);
      }
      step<kFar>(place, next, stage);
      if constexpr (kDelayed) {
        if (!first && later_) finish(last, 1 - stage);
      } else {
        if constexpr (Config::kStages == 1 || Config::kGradQuery || Sums::kFlushes) __syncthreads();
        if constexpr (Config::kStages == 1) load_next(next, 0);
        finish(place, 0);
      }
      last = place;
      place = next;
      if (Config::kStages == 2) stage = 1 - stage;
    }
    wait_copies<0>();
    __syncthreads();
    if (h >= 0) {
      if constexpr (kDelayed) {
        finish(last, 1 - stage);
        __syncthreads();
      }
      sums_.end_head(b, h, first_key());
    }
  }
  // After walk().
  __device__ __forceinline__ void store_gradients() {
    // Nobody reads the tiles of keys and values any more.
    if constexpr (Config::kGradKey) keep_gradient<KeyTile, kMineD, kBlocksD>(grad_key_, key_, a_.scale);
    if constexpr (Config::kGradValue) keep_gradient<ValueTile, kMineE, kBlocksE>(grad_value_, value_, 1.0f);
    __syncthreads();
    if constexpr (Config::kGradKey) store<KeyTile>(a_.grad_key, a_.head_size, key_);
    if constexpr (Config::kGradValue) store<ValueTile>(a_.grad_value, a_.value_size, value_);
  }

  __device__ __forceinline__ ListPlace first() {
    first_head_ = key_head_ * a_.group;
    last_batch_ = a_.key_batches == 1 ? a_.batches : key_batch_ + 1;
    return settle({key_batch_, first_head_, 0, 0});
  }
  __device__ __forceinline__ ListPlace after(const ListPlace& p) const { return settle({p.b, p.h, p.i + 1, 0}); }
  __device__ __forceinline__ ListPlace settle(ListPlace p) const {
    while (p.b < last_batch_) {
      const TileWalk tiles(a_.tiles, p.b, p.h, col_tile_, row_tiles_, (Config*)nullptr);
      if (p.i < tiles.count()) {
        p.tile = tiles[p.i];
        break;
      }
      p.i = 0;
      if (++p.h == first_head_ + a_.group) {
        p.h = first_head_;
        ++p.b;
      }
    }
    return p;
  }

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ int key_group() const {
    return warp() / Config::kShare * 16 * kBlocksM;
  }  // first key of the warp
  __device__ __forceinline__ int part() const { return warp() % Config::kShare; }
  __device__ __forceinline__ int first_key() const { return col_ + key_group() + lane() / 4; }

  __device__ __forceinline__ unsigned kept() const { return key_ + kMemory.kept.offset; }
  __device__ __forceinline__ unsigned columns() const { return key_ + kMemory.columns.offset; }
  __device__ __forceinline__ void load_columns(int h) const {
    Columns::template load<kThreads>(columns(), score_, h, static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ unsigned boxes(int stage) const {
    return key_ + kMemory.boxes.offset + stage * kMemory.boxes.piece;
  }
  __device__ __forceinline__ void load_stage(const ListPlace& p, int stage) {
    const unsigned to = stage_ + stage * kMemory.stages.piece;
    const int b = p.b, h = p.h, row = (p.tile >> TileEntry<>::kKindBits) * Config::kRows;
    load_tile<QueryTile, kThreads>(to, a_.query, b, h, row, a_.queries, a_.head_size);
    load_tile<GradOutTile, kThreads>(to + QueryTile::kBytes, a_.grad_out, b, h, row, a_.queries, a_.value_size);
    Boxes::template load<kThreads>(boxes(stage), score_, b, h, row, col_, a_.queries, a_.keys,
                                   static_cast<int>(threadIdx.x));
    if (const int i = static_cast<int>(threadIdx.x); i < Config::kRows) {
      const FlexRow* rows = a_.rows + static_cast<long long>(b * a_.heads + h) * a_.row_stride + row;
      const bool there = row + i < a_.queries;
      copy_async_pair(to + QueryTile::kBytes + GradOutTile::kBytes + i * sizeof(FlexRow), rows + (there ? i : 0),
                      there);
    }
    places_.load(score_, b, h);
  }
  __device__ __forceinline__ void load_next(const ListPlace& next, int stage) {
    if (next.b < last_batch_) load_stage(next, stage);
    commit_copies();
  }

  template <int kCount>
  static __device__ __forceinline__ void zero(float (&x)[kCount][2][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e / 4][e % 4] = 0.0f;
    }
  }

  template <bool kFar>
  __device__ __forceinline__ void step(const ListPlace& place, const ListPlace& next, int stage) {
    const unsigned query = stage_ + stage * kMemory.stages.piece, grad_out = query + QueryTile::kBytes;
    const unsigned gradient = gradient_ + (kDelayed ? stage : 0) * kMemory.grad_scores.piece;
    unsigned p[kBlocksM][kOperands], ds[kBlocksM][kOperands];
    scores<kFar>(query, grad_out, boxes(stage), place, p, ds);
    // The prefetch is here, not before the scores: other warps compute while these wait.
    if constexpr (Config::kStages == 2 && kAhead) load_next(next, 1 - stage);
    if constexpr (Config::kShare > 1 && Config::kGradValue) keep(probability_, p);
    if constexpr (Config::kGradScores) keep(gradient, ds);
    if constexpr (Config::kShare == 1 || kAhead) {
      if constexpr (Config::kGradValue)
        accumulate_own<kMineE, kBlocksE>(grad_value_, p, grad_out, GradOutTile::kStride);
      if constexpr (Config::kGradKey) accumulate_own<kMineD, kBlocksD>(grad_key_, ds, query, QueryTile::kStride);
    }
    if constexpr (Config::kShare > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + warp() / Config::kShare), "n"(Config::kShare * kLanes) : "memory");
      // The other warps' queries, or all at once.
      constexpr int kQueries = kAhead ? kPart : Config::kRows;
#pragma unroll 1
      for (int i = kAhead ? 1 : 0; i < (kAhead ? Config::kShare : 1); ++i) {
        const int from = kAhead ? (part() + i) % Config::kShare * kPart : 0;
        if constexpr (Config::kGradValue) {
          accumulate_kept<kMineE, kBlocksE, kQueries>(grad_value_, probability_, from, grad_out, GradOutTile::kStride);
        }
        if constexpr (Config::kGradKey) {
          accumulate_kept<kMineD, kBlocksD, kQueries>(grad_key_, gradient, from, query, QueryTile::kStride);
        }
      }
    }
  }
  // Follows all warps' parts of a tile: what they compute together.
  __device__ __forceinline__ void finish(const ListPlace& place, int stage) {
    const int row = (place.tile >> TileEntry<>::kKindBits) * Config::kRows;
    // This order spills less.
    if constexpr (Config::kShare == 1) sums_.flush(place.b, place.h, row, col_);
    if constexpr (Config::kGradQuery) {
      add_grad_query(place.b, place.h, row, gradient_ + (kDelayed ? stage : 0) * kMemory.grad_scores.piece);
    }
    if constexpr (Config::kShare > 1) sums_.flush(place.b, place.h, row, col_);
  }

  // The warp's keys by its part of the queries; two blocks of 8 queries make one of 16.
  using Scores = float[kBlocksM][kBlocksN / 2][2][4];

  template <int kCommon>
  __device__ __forceinline__ void multiply_tiles(Scores& c, unsigned a, int a_stride, unsigned b, int b_stride) const {
    multiply_loaded<T, Config::kSplit, kCommon / Product::kDepth, kUnrolledSteps<T>, true, kAhead>(
        c, [&](auto& words, int k, int m) { load_a(words, a, a_stride, key_group() + m * 16, k, lane()); },
        [&](auto& words, int k, int i) { load_b(words, b, b_stride, part() * kPart + i * 16, k, lane()); },
        [](int) { return true; });
  }

  // Computes P and dS of the warp's keys and its part of the queries, as operands.
  template <bool kFar>
  __device__ __forceinline__ void scores(unsigned query, unsigned grad_out, unsigned boxes, const ListPlace& place,
                                         unsigned (&p)[kBlocksM][kOperands], unsigned (&ds)[kBlocksM][kOperands]) {
    Scores s = {}, d = {};
    // Scores equal the forward's to the bit: the gradient of max_scores compares them.
    multiply_tiles<Config::kHead>(s, key_, KeyTile::kStride, query, QueryTile::kStride);
    if constexpr (Config::kGradScores) {
      multiply_tiles<Config::kValue>(d, value_, ValueTile::kStride, grad_out, GradOutTile::kStride);
    }
    const int row = (place.tile >> TileEntry<>::kKindBits) * Config::kRows;
    const bool masked =
        (place.tile & 3) != kTileFull || row + Config::kRows > a_.queries || col_ + Config::kCols > a_.keys;
    const auto* rows = reinterpret_cast<const FlexRow*>(shared_ + (grad_out + GradOutTile::kBytes - key_) +
                                                        (part() * kPart + lane() % 4 * 2) * sizeof(FlexRow));
    sums_.begin_tile();
    if constexpr (kFar) {
      pairs<true, true>(place, masked, rows, boxes, s, d, p, ds);
    } else if (kHas<ScoreMod> || masked) {
      pairs<true, false>(place, masked, rows, boxes, s, d, p, ds);
    } else {
      pairs<false, false>(place, masked, rows, boxes, s, d, p, ds);
    }
    sums_.end_tile();
  }

  template <bool kMasked, bool kFar>
  __device__ __forceinline__ void pairs(const ListPlace& place, bool masked, const FlexRow* rows, unsigned boxes,
                                        Scores& s, Scores& d, unsigned (&p)[kBlocksM][kOperands],
                                        unsigned (&ds)[kBlocksM][kOperands]) {
    const int b = place.b, h = place.h,
              q = (place.tile >> TileEntry<>::kKindBits) * Config::kRows + part() * kPart + lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const int kv = first_key() + m * 16;
      const auto alive =
          pairs_that_take_part<Config, kBlocksN, true>(a_, mask_, place.tile & 3, kMasked && masked, b, h, q, kv);
      FlexKept<true> kept;
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        if constexpr (Config::kDropout) {
          hold_order();
          if (n % 2 == 0) kept = dropout_.key_rows(a_.dropout, q - lane() % 4 * 2 + n * 8, kv - lane() / 4, lane());
          if constexpr (Config::kGradScores) kept.drop(n % 2, d[m][n / 2][n % 2]);
        }
        auto reads = this->reads(boxes, m, n);
        FlexRow of_row[2] = {rows[n * 8], rows[n * 8 + 1]};
        float origin[2] = {};
        if (kFar && far_) {
#pragma unroll
          for (int r = 0; r < 2; ++r) origin[r] = take_origin<Config>(a_, of_row[r], b, h, q + n * 8 + r);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at_q = q + n * 8 + e % 2, at_kv = kv + e / 2 * 8;
          FlexQuery of{of_row[e % 2], 0.0f, 0.0f, origin[e % 2]};
          if constexpr (Config::kMaxGradient) {
            const bool there = at_q < a_.queries;
            const long long at = static_cast<long long>(b * a_.heads + h) * a_.queries + at_q;
            of.max = there ? a_.max_scores[at] : 0.0f;
            of.grad_max = there ? a_.grad_max[at] : 0.0f;
          }
          float value[Config::Derivative::kContributions + 1];
          float &x = s[m][n / 2][n % 2][e], &dx = d[m][n / 2][n % 2][e];
          const float score = x;
          const bool takes = !kMasked || (alive >> (n * 4 + e) & 1) != 0;
          reads.of(e);
          dx = FlexPairGradient<Config>::template apply<kFar>(score_, a_.scale, score, dx, of, b, h, at_q, at_kv, takes,
                                                              x, value, reads);
          sums_.add(value, m, n, e, score * a_.scale, b, h, at_q, at_kv, takes, reads);
        }
        sums_.end_block(m, n, b, h);
        if constexpr (Config::kDropout && Config::kGradValue) kept.drop(n % 2, s[m][n / 2][n % 2]);
        put_operand<T>(p[m] + n * kOperandWords<T>, s[m][n / 2][n % 2]);
        if constexpr (Config::kGradScores) put_operand<T>(ds[m] + n * kOperandWords<T>, d[m][n / 2][n % 2]);
      }
    }
  }

  // The score_mod's of four pairs.
  __device__ __forceinline__ PairReads<Kept, Boxes, Columns, Places> reads(unsigned boxes, int m, int n) const {
    return {Kept::reads(kept(), m * kBlocksN + n),
            Boxes::template reads<true>(boxes, part() * kPart + n * 8, key_group() + m * 16, lane()), columns(),
            places_.reads(m * kBlocksN + n)};
  }

  __device__ __forceinline__ void keep(unsigned tile, const unsigned (&words)[kBlocksM][kOperands]) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        store_operand<T>(tile, ScoreTile::kStride, key_group() + m * 16, part() * kBlocksN + n,
                         words[m] + n * kOperandWords<T>, lane());
      }
    }
  }

  // c += (P or dS) * (grad_out or query), for the warp's blocks of columns: over its own queries, from registers, or
  // over kQueries of them from shared memory.
  template <int kMine, int kBlocks>
  __device__ __forceinline__ void accumulate_own(float (&c)[kBlocksM][kMine][2][4],
                                                 const unsigned (&words)[kBlocksM][kOperands], unsigned b,
                                                 int b_stride) const {
    accumulate<kMine, kBlocks, kPart>(
        c,
        [&](auto& to, int k, int m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) to[i] = words[m][k * 4 + i];
        },
        b + part() * kPart * b_stride, b_stride);
  }
  template <int kMine, int kBlocks, int kQueries>
  __device__ __forceinline__ void accumulate_kept(float (&c)[kBlocksM][kMine][2][4], unsigned tile, int from,
                                                  unsigned b, int b_stride) const {
    tile += from * static_cast<int>(sizeof(T));
    accumulate<kMine, kBlocks, kQueries>(
        c, [&](auto& to, int k, int m) { load_transposed_order(to, tile, m, k); }, b + from * b_stride, b_stride);
  }
  template <int kMine, int kBlocks, int kQueries, class Row>
  __device__ __forceinline__ void accumulate(float (&c)[kBlocksM][kMine][2][4], const Row& row, unsigned b,
                                             int b_stride) const {
    const auto block = [&](int i) { return i * Config::kShare + part(); };
    multiply_loaded<T, Config::kSplit, kQueries / Product::kDepth, kQueries, false, kAhead>(
        c, row,
        [&](auto& words, int k, int i) {
          Product::load_b_transposed(words, b, b_stride, k * Product::kDepth, block(i) * 16, lane());
        },
        [&](int i) { return kBlocks % Config::kShare == 0 || block(i) < kBlocks; });
  }
  // Loads operand A as it lies, with floats in the order of operands that are read transposed.
  __device__ __forceinline__ void load_transposed_order(unsigned (&a)[4], unsigned tile, int m, int step) const {
    if constexpr (sizeof(T) == 2) {
      load_a(a, tile, ScoreTile::kStride, key_group() + m * 16, step, lane());
    } else {
      const unsigned at = tile + (key_group() + m * 16 + lane() / 4) * ScoreTile::kStride + step * 32 + lane() % 4 * 8;
      a[0] = load_word(at);
      a[1] = load_word(at + 8 * ScoreTile::kStride);
      a[2] = load_word(at + 4);
      a[3] = load_word(at + 8 * ScoreTile::kStride + 4);
    }
  }

  __device__ __forceinline__ void add_grad_query(int b, int h, int row, unsigned gradient) const {
    const int part = warp() / kGroupsQ, group = warp() % kGroupsQ * 16 * kBlocksQ;
    const auto block = [&](int i) { return i * kPartsQ + part; };
    const auto there = [&](int i) { return kBlocksD % kPartsQ == 0 || block(i) < kBlocksD; };
    float c[kBlocksQ][kMineQ][2][4];
#pragma unroll
    for (int j = 0; j < kBlocksQ; ++j) zero(c[j]);
    multiply_loaded<T, Config::kSplit, Config::kCols / Product::kDepth, kUnrolledSteps<T>, false, kAhead>(
        c,
        [&](auto& words, int k, int j) {
          Product::load_a_transposed(words, gradient, ScoreTile::kStride, k * Product::kDepth, group + j * 16, lane());
        },
        [&](auto& words, int k, int i) {
          Product::load_b_transposed(words, key_, KeyTile::kStride, k * Product::kDepth, block(i) * 16, lane());
        },
        there);
    if constexpr (Config::kStoresQuery) {
#pragma unroll
      for (int j = 0; j < kBlocksQ; ++j) {
#pragma unroll
        for (int i = 0; i < kMineQ; ++i) {
          if (there(i)) store_grad_query(b, h, row + group + j * 16, block(i) * 16, c[j][i]);
        }
      }
      return;
    }
    // A warp adds whole cache lines of 128 bytes; rows beyond the queries exist.
    const long long head = static_cast<long long>(b * a_.heads + h) * a_.sum_rows;
    float* to = a_.query_sum + (head + row + group) * Config::kHead + lane() * 2;
#pragma unroll
    for (int j = 0; j < kBlocksQ; ++j) {
#pragma unroll
      for (int i = 0; i < kMineQ; ++i) {
        if (!there(i)) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float* at = to + j * 16 * Config::kHead + (block(i) * 2 + n) * 64;
          add_pair(at, c[j][i][n][0], c[j][i][n][1]);
          add_pair(at + 8 * Config::kHead, c[j][i][n][2], c[j][i][n][3]);
        }
      }
    }
  }

  // 16 queries by 16 columns.
  __device__ __forceinline__ void store_grad_query(int b, int h, int row, int col, const float (&c)[2][4]) const {
    const FlexTensor& to = a_.grad_query;
    const long long stride = to.row_stride;
    T* out = static_cast<T*>(to.data) + b * to.batch_stride + h * to.head_stride;
    const bool pairs = to.col_stride == 1 && stride % 2 == 0 && a_.head_size % 2 == 0 &&
                       reinterpret_cast<unsigned long long>(out) % (2 * sizeof(T)) == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int q = row + lane() / 4 + i % 2 * 8, d = col + i / 2 * 8 + lane() % 4 * 2;
      const float first = c[i / 2][i % 2 * 2] * a_.scale, second = c[i / 2][i % 2 * 2 + 1] * a_.scale;
      if (q >= a_.queries || d >= a_.head_size) continue;
      T* at = out + q * stride + d * to.col_stride;
      if constexpr (sizeof(T) == 2) {
        if (pairs) {
          *reinterpret_cast<unsigned*>(at) = pack(T{}, first, second);
          continue;
        }
      }
      device::store(at, first);
      if (d + 1 < a_.head_size) device::store(at + to.col_stride, second);
    }
  }

  // Stores the warp's part of a gradient to shared memory, laid out as the keys.
  template <class Into, int kMine, int kBlocks>
  __device__ __forceinline__ void keep_gradient(float (&c)[kBlocksM][kMine][2][4], unsigned tile, float factor) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int block = i * Config::kShare + part();
        if (kBlocks % Config::kShare != 0 && block >= kBlocks) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          unsigned words[kOperandWords<T>];
#pragma unroll
          for (int e = 0; e < 4; ++e) c[m][i][n][e] *= factor;
          put_operand<T>(words, c[m][i][n]);
          store_operand<T>(tile, Into::kStride, key_group() + m * 16, block * 2 + n, words, lane());
        }
      }
    }
  }
  template <class From>
  __device__ __forceinline__ void store(const FlexTensor& to, int cols, unsigned from) const {
    store_tile<From, Config::kCols, kThreads>(to, key_batch_, key_head_, col_, a_.keys, cols, from);
  }

  const FlexBackwardArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  char* const shared_;
  const unsigned key_, value_, stage_, gradient_, probability_;
  bool later_ = false;
  FlexDropoutHead<Config> dropout_;
  Places places_;
  Sums sums_;
  const AnyFar far_;
  int col_tile_, row_tiles_, col_, key_batch_, key_head_, first_head_, last_batch_;
  float grad_key_[kBlocksM][kMineD][2][4], grad_value_[kBlocksM][kMineE][2][4];
};

}  // namespace fusegrad::device
