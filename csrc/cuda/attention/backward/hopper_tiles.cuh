// What both Hopper backwards share: the layout of shared memory, the TMA producer, the products and the pairs of a
// tile. Either each consumer warpgroup owns 64 keys (hopper.cuh), or all have the same 64 (hopper_wide.cuh).
//
// scores.cuh and portable.cuh describe Config; kWarps counts warps with keys of their own. This file adds:
//   kGroups                    consumer warpgroups
//   kQueryStages, kStages      tiles in shared memory: of Q, and of dO and dS
//   kKeyStages                 tiles of keys: with 2, the next keys arrive before the last products of the present ones
//   kBoxes, kReadStages        whether a warp beside the producer brings what a score_mod reads of pairs by itself
//                              (PairBoxes), and tiles of it in shared memory
//   kMaps                      of boxes so many by TMA
//   kNarrow                    tiles of queries, keys and values are narrow ones (device/hopper.cuh)
//   kUpright                   dQ lies in shared memory and in its sums as queries do, else transposed (hopper.cuh)
//   kOwnPlaces                 TMA stores dK and dV from places of their own, else from dQ's
//   kWhole                     a CTA has all keys of a head, one tile after the other, and alone adds to its dQ
//   kParts                     1, or the number of parts of a tile's queries. A tile may begin at any part, and each
//                              part has its own kind
#pragma once

#include "cuda/attention/backward/place.cuh"
#include "cuda/attention/backward/whole_head.cuh"
#include "cuda/attention/captured/buffers.cuh"
#include "cuda/attention/captured/pair_boxes.cuh"
#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

template <class Config>
class FlexBackwardHopperTiles {
 protected:
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using ScoreProduct = Wgmma<T, Config::kRows, false, false>;
  using KeyProduct = Wgmma<T, Config::kHead, true, true>;
  using ValueProduct = Wgmma<T, Config::kValue, true, true>;
  static constexpr bool kOwnKeys = Config::kCols == 64 * Config::kGroups;
  static constexpr bool kSeamless = Config::kKeyStages == 2;
  static constexpr int kThreads = Config::kGroups * kWarpgroup;
  // A CTA that has all keys of a head comes back to its queries and their sums of dQ, which the L2 cache is to hold.
  static constexpr Evict kUsedOnce = Config::kWhole ? Evict::kFirst : Evict::kNormal;
  /// The first of each kind of named barriers; warpgroup g has the g-th of a kind.
  enum NamedBarrier : int {
    kTurn = 1,                              // whose turn it is to issue products
    kAlone = kTurn + Config::kGroups,       // a warpgroup by itself
    kAll = kAlone + Config::kGroups,        // all consumers
    kSumFull = kAll + 1,                    // the warpgroup's dQ is there, for the warp that has it added up
    kSumEmpty = kSumFull + Config::kGroups  // and its place is free again
  };
  // There are two sets of lines: a tile's sums are read until after the next tile's pairs have begun.
  using Sums = FlexBufferSums<Config, kOwnKeys ? Config::kGroups : 1, 2>;
  using Boxes = PairBoxes<ScoreMod, Config::kRows, Config::kCols, KeptReads<ScoreMod, 1, 1, false>, Config::kBoxes,
                          Config::kMaps>;
  static constexpr bool kBoxes = Boxes::kBytes > 0;
  static_assert(kBoxes == (Config::kReadStages > 0) && !(kBoxes && !kOwnKeys));
  // Chunks of columns of dQ, and how many of them the first warpgroup makes.
  static constexpr int kQueryChunks = chunks_of(Config::kHead);
  static constexpr int kFirstChunks = (kQueryChunks + Config::kGroups - 1) / Config::kGroups;
  static constexpr int kBlocksN = Config::kRows / 8, kBlocksD = Config::kHead / 8, kBlocksE = Config::kValue / 8;
  static constexpr int kWords = Config::kDropout ? Config::kRows / 64 : 1;
  static constexpr int kRowBytes = Config::kNarrow ? kNarrowBytes : kChunkBytes;  // of queries, keys and values
  static constexpr int kGroupBytes = 64 * kRowBytes;  // from a warpgroup's keys to the next one's, in a chunk
  static constexpr HopperBackwardMemory kMemory{{.rows = Config::kRows,
                                                 .cols = Config::kCols,
                                                 .head = Config::kHead,
                                                 .value = Config::kValue,
                                                 .stages = Config::kStages,
                                                 .query_stages = Config::kQueryStages,
                                                 .key_stages = Config::kKeyStages,
                                                 .narrow = Config::kNarrow,
                                                 .adds_grad_query = Config::kGradQuery,
                                                 .own_keys = kOwnKeys,
                                                 .own_places = Config::kOwnPlaces,
                                                 .has_score_mod = kHas<ScoreMod>,
                                                 .has_dropout = Config::kDropout,
                                                 .box_bytes = Boxes::kBytes,
                                                 .read_stages = Config::kReadStages,
                                                 .captured_bytes = Sums::kSharedBytes}};
  static constexpr int kConsumerWarps = kThreads / kLanes;
  // What is there once for the keys; an even number.
  static constexpr int kKeyBarriers = 2 * Config::kKeyStages;
  using Place = device::Place<Config>;
  static constexpr int kOtherKeys = Place::kOtherKeys, kNoMore = Place::kNoMore;
  static constexpr unsigned kBoxStages = kBoxes ? Config::kReadStages : 1;
  // Pairs for which a mask_mod is called at a time.
  static constexpr int kTogether = 8;
  // Compute pairs eight queries at a time, against register pressure.
  static constexpr bool kInOrder = kHas<ScoreMod> || Config::kMaxGradient;
  static_assert((kOwnKeys || Config::kCols == 64) && Config::kWarps == Config::kCols / 16 && Config::kShare == 1);
  static_assert(Config::kHead % 16 == 0 && Config::kValue % 16 == 0 && Config::kRows % 16 == 0);
  static_assert(!Config::kNarrow || (Config::kHead <= 96 && Config::kValue <= 96 && kOwnKeys));

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexBackwardHopperTiles(const FlexBackwardArguments& a, const FlexSums* sums,
                                                     const FlexBackwardHopperArguments& more,
                                                     const typename ScoreMod::Captured& score,
                                                     const typename MaskMod::Captured& mask, char* shared)
      : a_(a),
        more_(more),
        score_(score),
        mask_(mask),
        // It is aligned already. Computed, it stays in a register; compilers would rematerialize it from constants.
        shared_((shared_address(shared) + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment),
        sums_(a, sums, score, shared + kMemory.captured.offset),
        far_(a) {}

 protected:
  /// Comes before all else. `releasing`: the warps that release a tile's stages.
  __device__ __forceinline__ void begin(int releasing) {
    if (threadIdx.x == 0) {
      Barrier::init(value_empty(), kConsumerWarps);
      for (int s = 0; s < Config::kKeyStages; ++s) Barrier::init(key_empty(s), kConsumerWarps);
      for (int s = 0; s < Config::kQueryStages; ++s) {
        Barrier::init(query_full(s), 1);
        Barrier::init(query_empty(s), releasing + (kBoxes ? 1 : 0));
      }
      for (int s = 0; s < Config::kStages; ++s) {
        Barrier::init(grad_out_full(s), 1);
        Barrier::init(grad_out_empty(s), releasing);
        Barrier::init(gradient_full(s), kConsumerWarps);
        Barrier::init(gradient_empty(s), kConsumerWarps + (Sums::kStoresTiles ? Config::kGroups : 0));
      }
      for (int s = 0; s < Config::kReadStages; ++s) {
        // The warp, what each lane copies, and what TMA does.
        Barrier::init(boxes_full(s), 1 + (Boxes::kCopies ? kLanes : 0) + (Boxes::kMapped ? 1 : 0));
        Barrier::init(boxes_empty(s), kConsumerWarps);
      }
      if constexpr (Config::kOwnPlaces) {
        for (int g = 0; g < Config::kGroups; ++g) Barrier::init(key_gradients_empty(g), 1);
      }
      if constexpr (Config::kWhole) {
        for (int g = 0; g < Config::kGroups; ++g) Barrier::init(sums_full(g), 1);
      }
      Barrier::fence_inits();
    }
    __syncthreads();
    // The shuffle tells the compiler that it is uniform in a warp.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  }
  __device__ __forceinline__ int col_tiles() const { return (a_.keys + Config::kCols - 1) / Config::kCols; }
  // Goes to the keys of number `id`. A head's first keys come first: under a causal mask they have the most queries,
  // and what begins last should not take long.
  __device__ __forceinline__ void take(int id) {
    const int col_tiles = this->col_tiles(), key_heads = a_.heads / a_.group;
    const int first = id / (more_.section * col_tiles) * more_.section;
    const int heads = min(more_.section, more_.heads - first), place = id - first * col_tiles;
    const int head = more_.first_head + first + place % heads;
    col_tile_ = place / heads;
    key_batch_ = head / key_heads;
    key_head_ = head % key_heads;
  }

  /// In order, before all else: the CTA's first keys. Returns whether there are any.
  __device__ __forceinline__ bool draw_first(bool producer) {
    if (producer) first_id_ = atomicAdd(more_.next, 1);
    return __syncthreads_or(producer && first_id_ < more_.heads * col_tiles()) != 0;
  }

  // The stages of tile i and the parity of their barriers follow from i: one register instead of several.
  static_assert(Config::kStages == 2);
  static __device__ __forceinline__ int stage_of(int i) { return i & 1; }
  static __device__ __forceinline__ int parity_of(int i) { return i >> 1 & 1; }
  static __device__ __forceinline__ int query_stage_of(int i) {
    return static_cast<int>(static_cast<unsigned>(i) % Config::kQueryStages);
  }
  static __device__ __forceinline__ int query_parity_of(int i) {
    return static_cast<int>(static_cast<unsigned>(i) / Config::kQueryStages & 1);
  }
  __device__ __forceinline__ unsigned key(int s) const {
    return shared_ + kMemory.key.offset + (kSeamless ? s : 0) * kMemory.key.piece;
  }
  __device__ __forceinline__ unsigned value() const { return shared_ + kMemory.value.offset; }
  __device__ __forceinline__ unsigned query(int s) const {
    return shared_ + kMemory.query.offset + s * kMemory.query.piece;
  }
  __device__ __forceinline__ unsigned grad_out(int s) const {
    return shared_ + kMemory.grad_out.offset + s * kMemory.grad_out.piece;
  }
  __device__ __forceinline__ unsigned gradient(int s) const {
    return shared_ + kMemory.grad_scores.offset + s * kMemory.grad_scores.piece;
  }
  __device__ __forceinline__ unsigned sum(int group) const {
    constexpr int kBytes = kMemory.grad_query.piece;
    constexpr int kFirst = kQueryChunks == 1 ? kBytes / Config::kGroups : kBytes / kQueryChunks * kFirstChunks;
    return shared_ + kMemory.grad_query.offset + group * kFirst;
  }
  __device__ __forceinline__ unsigned rows(int s) const {
    return shared_ + kMemory.rows.offset + s * kMemory.rows.piece;
  }
  /// The Place of tile i.
  __device__ __forceinline__ unsigned place(int i) const {
    return shared_ + kMemory.places.offset + i % kMemory.places.count * kMemory.places.piece;
  }
  __device__ __forceinline__ unsigned barrier(int i) const {
    return shared_ + kMemory.barriers.offset + i * kMemory.barriers.piece;
  }
  __device__ __forceinline__ unsigned value_empty() const { return barrier(0); }
  __device__ __forceinline__ unsigned key_empty(int s) const { return barrier(1 + (kSeamless ? s : 0)); }
  __device__ __forceinline__ unsigned query_full(int s) const { return barrier(kKeyBarriers + s); }
  __device__ __forceinline__ unsigned query_empty(int s) const { return query_full(Config::kQueryStages + s); }
  __device__ __forceinline__ unsigned grad_out_full(int s) const { return query_empty(Config::kQueryStages + s); }
  __device__ __forceinline__ unsigned grad_out_empty(int s) const { return grad_out_full(Config::kStages + s); }
  __device__ __forceinline__ unsigned gradient_full(int s) const { return grad_out_empty(Config::kStages + s); }
  __device__ __forceinline__ unsigned gradient_empty(int s) const { return gradient_full(Config::kStages + s); }

  __device__ __forceinline__ unsigned boxes_full(int s) const { return gradient_empty(Config::kStages + s); }
  __device__ __forceinline__ unsigned boxes_empty(int s) const { return boxes_full(Config::kReadStages + s); }
  __device__ __forceinline__ unsigned key_gradients_empty(int group) const {
    return boxes_empty(Config::kReadStages + group);
  }
  __device__ __forceinline__ unsigned sums_full(int group) const {
    return key_gradients_empty((Config::kOwnPlaces ? Config::kGroups : 0) + group);
  }
  /// A warpgroup's dV and behind it its dK.
  __device__ __forceinline__ unsigned key_gradients(int group) const {
    return shared_ + kMemory.key_gradients.offset + group * (kMemory.key_gradients.piece / Config::kGroups);
  }
  __device__ __forceinline__ unsigned boxes(int s) const {
    return shared_ + kMemory.boxes.offset + s * kMemory.boxes.piece;
  }
  static __device__ __forceinline__ int box_stage_of(int i) {
    return static_cast<int>(static_cast<unsigned>(i) % kBoxStages);
  }
  static __device__ __forceinline__ int box_parity_of(int i) {
    return static_cast<int>(static_cast<unsigned>(i) / kBoxStages & 1);
  }

  static __device__ __forceinline__ int thread() { return thread_anew(); }
  static __device__ __forceinline__ int lane() { return thread() % kLanes; }
  static __device__ __forceinline__ int warp() { return thread() / kLanes; }
  /// The warpgroup among those with keys of their own; 0 where keys are shared.
  __device__ __forceinline__ int key_group() const { return kOwnKeys ? group_ : 0; }
  __device__ __forceinline__ int first_key() const { return col_ + (kOwnKeys ? warp() : warp() % 4) * 16 + lane() / 4; }

  // --- the producer: one thread, which alone reads lists ---

  /// Loads all tiles of queries for the CTA's keys, then for other keys that no CTA has taken yet.
  __device__ __forceinline__ void produce() {
    const int all = more_.heads * col_tiles(), row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    int id = Config::kOrdered ? first_id_ : static_cast<int>(blockIdx.x) * (Config::kWhole ? col_tiles() : 1), i = 0;
    for (int keys = 0; id < all; ++keys) {
      take(id);
      if constexpr (Config::kWhole) {
        if (col_tile_ == 0) {
          whole_.begin(row_tiles, col_tiles(), a_.tiles.batches == 1 && a_.tiles.heads == 1, [&](int col) {
            return TileWalk(a_.tiles, key_batch_, key_head_ * a_.group, col, row_tiles, (Config*)nullptr);
          });
        }
      }
      // Keys with fewer tiles get tiles beyond the queries: a stage of keys becomes free when the first tile of the
      // next keys is done, and their second tile asks for the keys after them. The last tile belongs to the last head.
      constexpr int kLeast = kSeamless ? 2 : 1;
      int brought = 0, h = key_head_ * a_.group, b = key_batch_;
      // Where the first CTA stores dQ, those of a head begin with different queries, and do not wait for one another.
      int first = 0;
      if constexpr (Config::kStoresFirst && !Config::kBlocks)
        first = static_cast<int>(static_cast<long long>(col_tile_) * row_tiles / col_tiles());
#pragma unroll 1
      for (int left = (a_.key_batches == 1 ? a_.batches : 1) * a_.group; left > 0; --left) {
        const TileWalk walk(a_.tiles, b, h, col_tile_, row_tiles, (Config*)nullptr);
#pragma unroll 1  // or its registers would be more than it has
        for (int tile = 0;
             tile < walk.count() || whole_.lacks_keys(row_tiles) || (left == 1 && (tile == 0 || brought < kLeast));
             ++tile) {
          int at = tile + first;
          if (first > 0 && at >= row_tiles) at -= row_tiles;
          const Place p{b, h, tile < walk.count() ? walk[at] : whole_.tile_beyond(row_tiles), 0};
          const bool last =
              left == 1 && tile + 1 >= walk.count() && !whole_.lacks_keys(row_tiles) && brought + 1 >= kLeast;
          if (last) id = next_id(id, keys == 0);
          load(i++, p, keys, brought++ == 0, last);
        }
        if (++h % a_.group == 0) {
          h -= a_.group;
          ++b;
        }
      }
      const bool more = id < all;
      if (!kSeamless || !more) end(i++, more ? kOtherKeys : kNoMore, keys);
    }
  }
  /// In order a CTA may wait only for keys that a running one has taken, and some CTAs of a launch may not run yet (in
  /// a green context, or beside other kernels). So CTAs take their first keys from a counter (draw_first). The first
  /// that asks for more decides for all: if every CTA has come, each takes every gridDim-th keys, with which it stays
  /// as far behind the CTA before it as it is; else all keys come from the counter (counted_).
  __device__ __forceinline__ int next_id(int id, bool first) {
    const int ctas = static_cast<int>(gridDim.x);
    if constexpr (Config::kWhole) {
      if (col_tile_ + 1 < col_tiles()) return id + 1;
      return Config::kBlocks ? (ctas + atomicAdd(more_.next, 1)) * col_tiles() : id + 1 + (ctas - 1) * col_tiles();
    }
    if constexpr (!Config::kOrdered) return ctas + (Config::kBlocks ? atomicAdd(more_.next, 1) : id);
    if (first) {
      constexpr int kCounted = 1, kEvery = 2;
      const int wanted = atomicAdd(more_.next, 0) == ctas ? kEvery : kCounted;
      const int before = atomicCAS(more_.next + 1, 0, wanted);
      counted_ = (before == 0 ? wanted : before) == kCounted;
    }
    return counted_ ? atomicAdd(more_.next, 1) : id + ctas;
  }
  static __device__ __forceinline__ void store(unsigned to, int x, int y, int z, int w) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
  }
  // Whether the tile's head has far rows. Asked for each tile, as the producer has no register for what it was, and
  // only where a score_mod may have put heads apart by adding -1e9.
  __device__ __forceinline__ bool has_far(const Place& p) const {
    if constexpr (!kHas<ScoreMod>) return static_cast<bool>(far_);
    return far_ && head_has_far(a_, p.b * a_.heads + p.h);
  }
  // Stores what stands in place of a tile behind the last one of the keys.
  __device__ __forceinline__ void end(int i, int kind, int keys) {
    const int s = stage_of(i), query_stage = query_stage_of(i);
    Barrier::wait(query_empty(query_stage), query_parity_of(i) ^ 1);
    store(place(i), key_batch_, key_head_ * a_.group, kind,
          col_tile_ * Config::kCols | (kSeamless ? keys & 1 : 0) * kKeyStage | bits_of(Place{0, 0, kind, 0}));
    Barrier::arrive(query_full(query_stage));
    Barrier::wait(grad_out_empty(s), parity_of(i) ^ 1);
    Barrier::arrive(grad_out_full(s));
  }
  // What a tile's Place says where the CTA has all keys of a head.
  __device__ __forceinline__ int bits_of(const Place& p) {
    if constexpr (!Config::kWhole) return 0;
    return whole_.next(p.tile, p.row(), a_.queries, col_tile_ == 0, col_tile_ + 1 == col_tiles());
  }
  template <int kRows, int kCols, Evict kEvict = Evict::kNormal>
  static __device__ __forceinline__ void copy(unsigned to, const TensorMap& from, unsigned barrier, int row, int head,
                                              int batch) {
    copy_boxes<kRows, kCols, kEvict, kRowBytes>(to, from, barrier, row, head, batch);
  }
  // Loads tile i; with the first tile of the `keys`-th keys also those keys and their values.
  __device__ __forceinline__ void load(int i, const Place& p, int keys, bool first, bool last) {
    const int s = stage_of(i), query_stage = query_stage_of(i), col = col_tile_ * Config::kCols;
    const int key_stage = kSeamless ? keys & 1 : 0;
    store(place(i), p.b, p.h, p.tile,
          col | last * kLastOfKeys | key_stage * kKeyStage | first * kFirstOfKeys | (has_far(p) ? kFarRows : 0) |
              bits_of(p));
    Barrier::wait(query_empty(query_stage), query_parity_of(i) ^ 1);
    Barrier::expect(query_full(query_stage), kMemory.query.piece + (first ? kMemory.key.piece : 0));
    copy<Config::kRows, Config::kHead>(query(query_stage), more_.query, query_full(query_stage), p.row(), p.h, p.b);
    const auto load_keys = [&] {
      Barrier::wait(key_empty(key_stage), (kSeamless ? keys >> 1 : keys) & 1 ^ 1);
      copy<Config::kCols, Config::kHead, kUsedOnce>(key(key_stage), more_.key, query_full(query_stage), col, key_head_,
                                                    key_batch_);
    };
    if (kSeamless && first) load_keys();
    const bool with_values = Config::kGradScores && first;
    Barrier::wait(grad_out_empty(s), parity_of(i) ^ 1);
    Barrier::expect(grad_out_full(s),
                    kMemory.grad_out.piece + kMemory.rows.piece + (with_values ? kMemory.value.piece : 0));
    copy<Config::kRows, Config::kValue>(grad_out(s), more_.grad_out, grad_out_full(s), p.row(), p.h, p.b);
    // Rows beyond the head's last one are the next head's; their pairs take no part.
    copy_line(rows(s), more_.rows, grad_out_full(s), (p.b * a_.heads + p.h) * a_.row_stride + p.row());
    if (with_values) {
      Barrier::wait(value_empty(), keys & 1 ^ 1);
      copy<Config::kCols, Config::kValue, kUsedOnce>(value(), more_.value, grad_out_full(s), col, key_head_,
                                                     key_batch_);
    }
    // Keys come behind the first queries, for which there is room earlier.
    if (!kSeamless && first) load_keys();
  }

  /// Run by one warp: brings the boxes of each tile. It releases queries too, whose Place it reads.
  __device__ __forceinline__ void bring_boxes() const {
    for (int i = 0;; ++i) {
      wait_query(i);
      const Place p = place_of(i);
      release(query_empty(query_stage_of(i)));
      if (p.tile == kNoMore) break;
      const int stage = box_stage_of(i);
      Barrier::wait(boxes_empty(stage), box_parity_of(i) ^ 1);
      // In place of a tile behind the last one nothing is brought, and the stage counts as any.
      if (p.tile >= 0) {
        if constexpr (Boxes::kMapped) {
          if (lane() == 0)
            Boxes::bring_mapped(boxes(stage), boxes_full(stage), more_.boxes, score_, p.b, p.h, p.row(), p.col());
          __syncwarp();
        }
        Boxes::template bring<kLanes>(boxes(stage), boxes_full(stage), score_, p.b, p.h, p.row(), p.col(), a_.queries,
                                      a_.keys, lane());
      } else {
        if constexpr (Boxes::kCopies) arrive_after_copies(boxes_full(stage));
        if constexpr (Boxes::kMapped) release(boxes_full(stage));
      }
      release(boxes_full(stage));
    }
  }
  /// Called by consumers where there is no tile i. They wait too: a phase that nobody waited for would be taken for the
  /// one after it.
  __device__ __forceinline__ void skip_boxes(int i) const {
    if constexpr (kBoxes) {
      Barrier::wait(boxes_full(box_stage_of(i)), box_parity_of(i));
      release(boxes_empty(box_stage_of(i)));
    }
  }

  // --- what consumers wait for ---

  /// Waits for the queries of tile i and its Place.
  __device__ __forceinline__ void wait_query(int i) const {
    Barrier::wait(query_full(query_stage_of(i)), query_parity_of(i));
  }
  /// Waits for dO of tile i, and lse and delta.
  __device__ __forceinline__ void wait_grad_out(int i) const {
    Barrier::wait(grad_out_full(stage_of(i)), parity_of(i));
  }
  /// Uniform in a warp, and known to be. The lane that releases stages reads it.
  __device__ __forceinline__ Place place_of(int i) const {
    Place p;
    load_four_by_first(lane(), place(i), p.b, p.h, p.tile, p.keys);
    return p;
  }
  __device__ __forceinline__ int key_head(const Place& p) const { return p.h / a_.group; }
  __device__ __forceinline__ int key_batch(const Place& p) const { return a_.key_batches == 1 ? 0 : p.b; }
  /// Prefetches what the warpgroup will read of captured tensors for tile i, which is loaded: along diagonals, and for
  /// each pair by itself where that stays in the L1 cache, of which dQ leaves 28 KiB. What it reads by keys it has.
  static constexpr bool kTouchesPairs =
      ScoreMod::kPairBytes > 0 && !kBoxes &&
      (!Config::kGradQuery || Config::kRows * Config::kCols * ScoreMod::kPairBytes <= 1 << 15);
  // By keys alone a thread reads twice a tile. With diagonals all reads come from lines, each warpgroup's its own.
  using Lines = TileLines<ScoreMod, Config::kRows, 64, kWarpgroup>;
  static constexpr bool kLines = ScoreMod::kTouchesDiagonals && !kTouchesPairs && Lines::all() &&
                                 4 * Config::kGroups * Lines::kWords <= kMemory.lines.bytes();
  static constexpr bool kTouches = (ScoreMod::kTouchesDiagonals && !kLines) || kTouchesPairs;
  // Where reads cost little, what a mask adds to each pair is a fifth of its instructions.
  static constexpr bool kUnmasked = kUnmaskedToo<Config> || ((kBoxes || kLines) && !kHas<MaskMod>);
  // Blocks of eight queries that are computed together where registers are left.
  static constexpr int kBlocksHeld = kBoxes && Config::kHead <= 64 ? 4 : kBoxes || kLines ? 2 : 1;
  __device__ __forceinline__ void touch(int i) const {
    if constexpr (!kTouches) return;
    const Place p = place_of(i);
    const int kv = p.col() + key_group() * 64, thread = this->thread() % kWarpgroup;
    const unsigned nowhere = shared_ + kMemory.lines.offset + this->thread() * 4;
    if constexpr (ScoreMod::kTouchesDiagonals && !kLines)
      touch_tile<ScoreMod, Config::kRows, 64, kWarpgroup>(score_, p.b, p.h, p.row(), kv, thread, nowhere);
    if constexpr (kTouchesPairs)
      touch_pairs<ScoreMod, Config::kRows, 64, kWarpgroup>(score_, p.b, p.h, p.row(), kv, thread, nowhere);
  }
  __device__ __forceinline__ unsigned lines() const {
    return shared_ + kMemory.lines.offset + group_ * Lines::kWords * 4;
  }
  __device__ __forceinline__ void load(Lines& lines, int i) const {
    const Place p = place_of(i);
    lines.load(score_, p.b, p.h, p.row(), p.col() + key_group() * 64, thread() % kWarpgroup);
  }
  /// Where the thread's first pair reads.
  __device__ __forceinline__ auto reads() const {
    if constexpr (kLines) {
      return typename Lines::Reads(lines(), lane() % 4 * 2, warp() % 4 * 16 + lane() / 4);
    } else {
      return score_mod::ReadThere<ScoreMod::kUnread>();
    }
  }
  // Called by each warp when all its lanes are done with what the barrier guards.
  __device__ __forceinline__ void release(unsigned barrier) const {
    __syncwarp();
    if (lane() == 0) Barrier::arrive(barrier);
  }

  // --- products ---

  // Scores equal the forward's to the bit: the gradient of max_scores compares them.
  __device__ __forceinline__ void issue_scores(float (&s)[kBlocksN][4], int i, int key_stage) const {
    issue_rows<Config::kHead>(s, key(key_stage), query(query_stage_of(i)));
  }
  __device__ __forceinline__ void issue_grad_probabilities(float (&d)[kBlocksN][4], int i) const {
    if constexpr (Config::kGradScores) issue_rows<Config::kValue>(d, value(), grad_out(stage_of(i)));
  }
  /// The warpgroup's 64 rows of `a` by all rows of `b`.
  template <int kCommon>
  __device__ __forceinline__ void issue_rows(float (&c)[kBlocksN][4], unsigned a, unsigned b) const {
    const auto row = descriptor<kRowBytes>(anew(a + key_group() * kGroupBytes), 16), col = descriptor<kRowBytes>(b, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kCommon / 16; ++k) {
      ScoreProduct::run(c[0], advanced(row, step_bytes<Config::kCols, kRowBytes>(k)),
                        advanced(col, step_bytes<Config::kRows, kRowBytes>(k)), k != 0);
    }
    wgmma_commit();
  }
  // The caller commits these two.
  __device__ __forceinline__ void issue_grad_value(float (&c)[kBlocksE][4], const unsigned (&p)[kBlocksN * 2],
                                                   int i) const {
    if constexpr (Config::kGradValue) issue_operand<ValueProduct>(c[0], p, grad_out(stage_of(i)));
  }
  __device__ __forceinline__ void issue_grad_key(float (&c)[kBlocksD][4], const unsigned (&ds)[kBlocksN * 2],
                                                 int i) const {
    if constexpr (Config::kGradKey) issue_operand<KeyProduct>(c[0], ds, query(query_stage_of(i)));
  }
  template <class Product>
  __device__ __forceinline__ void issue_operand(float* c, const unsigned (&a)[kBlocksN * 2], unsigned b) const {
    const auto from = descriptor<kRowBytes>(b, Config::kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kRows / 16; ++k) Product::run(c, a + 4 * k, advanced(from, k * 16 * kRowBytes), true);
  }
  // --- pairs ---

  /// Whether some pairs of a tile may not take part.
  __device__ __forceinline__ bool masked(const Place& place) const {
    return place.kinds() != kTileFull || at_edge(place);
  }
  /// Whether some pairs are beyond the lengths.
  __device__ __forceinline__ bool at_edge(const Place& place) const {
    return place.row() + Config::kRows > a_.queries || col_ + Config::kCols > a_.keys;
  }
  __device__ __forceinline__ Bits<kBlocksN * 4> alive(const Place& place, bool masked) const {
    static_assert(Config::kParts == 1);
    if (!masked) return ~Bits<kBlocksN * 4>(0);
    return masked_pairs<Config, kBlocksN, true, kTogether>(a_, mask_, place.kinds(), place.b, place.h,
                                                           place.row() + lane() % 4 * 2, first_key());
  }
  /// Draws dropout of tile i, whose place is there. Behind its products, so that both run side by side. A block of
  /// pairs is 16 queries by the warpgroup's 64 keys: its warps draw a block each and share them.
  __device__ __forceinline__ void draw(int i) {
    if constexpr (Config::kDropout) {
      const Place p = place_of(i);
      if (p.tile < 0) return;
      if (const int head = p.b * a_.heads + p.h; head != head_) {
        head_ = head;
        dropout_.begin(a_.dropout, head);
      }
      const int thread = this->thread(), part = thread % kWarpgroup / kLanes;
      const unsigned of_lane = drawn(i) + thread % kLanes * 4;
      hold_order();
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const unsigned word =
            dropout_.block(a_.dropout, p.row() + (4 * w + part) * 16, p.col() + key_group() * 64, thread % kLanes);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(of_lane + (4 * w + part) * (4 * kLanes)), "r"(word) : "memory");
      }
      named_sync(kAlone + group_, kWarpgroup);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        unsigned blocks[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(blocks[k]) : "r"(of_lane + (4 * w + k) * (4 * kLanes)));
        kept_.word[w] = kept_.transposed(blocks, part);
      }
      pin_words(kept_.word);
    }
  }
  /// Where a warpgroup's warps share what they drew for tile i. Where they do not meet for a turn between two tiles,
  /// one may still read a tile's when another one draws the next tile's.
  __device__ __forceinline__ unsigned drawn(int i) const {
    const int set = kOwnKeys ? group_ : group_ * 2 + i % 2;
    return shared_ + kMemory.drawn.offset + set * kMemory.drawn.piece;
  }
  /// Drops probabilities from an operand; signs stay.
  __device__ __forceinline__ void drop_operand(int n, unsigned (&p)[kBlocksN * 2]) const {
    if constexpr (Config::kDropout) {
#pragma unroll
      for (int r = 0; r < 2; ++r) p[2 * n + r] &= kept_.mask(n, r) | 0x80008000;
    }
  }
  // Computes P and dS of the warp's keys, as operands.
  __device__ __forceinline__ void pairs(const Place& place, int i, float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                        unsigned (&p)[kBlocksN * 2], unsigned (&ds)[kBlocksN * 2]) {
    const bool masked = this->masked(place);
    sums_.begin_tile();
    if constexpr (kBoxes) Barrier::wait(boxes_full(box_stage_of(i)), box_parity_of(i));
    if (place.far()) {
      each_pair<true, true>(place, i, alive(place, masked), s, d, p, ds);
    } else if (!kUnmasked || masked) {
      each_pair<true, false>(place, i, alive(place, masked), s, d, p, ds);
    } else {
      each_pair<false, false>(place, i, 0, s, d, p, ds);
    }
    if constexpr (kBoxes) release(boxes_empty(box_stage_of(i)));
    sums_.end_tile(i & 1);
  }
  template <bool kMasked, bool kFar>
  __device__ __forceinline__ void each_pair(const Place& place, int i, Bits<kBlocksN * 4> alive,
                                            float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                            unsigned (&p)[kBlocksN * 2], unsigned (&ds)[kBlocksN * 2]) {
    const int b = place.b, h = place.h, q = place.row() + lane() % 4 * 2, kv = first_key();
    const unsigned rows = this->rows(stage_of(i)) + lane() % 4 * 2 * static_cast<int>(sizeof(FlexRow));
    const Tested<Bits<kBlocksN * 4>> takes_part(alive);
    const auto reads = this->reads();
    const unsigned boxes = kBoxes ? this->boxes(box_stage_of(i)) : 0;
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      if (kFar || (kInOrder && n % kBlocksHeld == 0)) hold_order();
      if constexpr (Config::kDropout) kept_.drop(n, d[n]);
      FlexRow of_row[2];
      load_rows(of_row, rows + n * 8 * static_cast<int>(sizeof(FlexRow)));
      float origin[2] = {};
#pragma unroll
      for (int r = 0; kFar && r < 2; ++r) origin[r] = take_origin<Config>(a_, of_row[r], b, h, q + n * 8 + r);
      const auto of_block = reads_of_boxes<Boxes, true>(boxes, n * 8, (kOwnKeys ? warp() : warp() % 4) * 16, lane());
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
        const float score = s[n][e];
        const float grad = Config::kGradScores ? d[n][e] : 0.0f;
        const bool takes = !kMasked || takes_part[n * 4 + e];
        d[n][e] = FlexPairGradient<Config>::template apply<kFar>(
            score_, a_.scale, score, grad, of, b, h, at_q, at_kv, takes, s[n][e], value,
            reads_of_pair(reads.at(n * 8 + e % 2, e / 2 * 8), of_block, e));
        sums_.add(value, 0, n, e, score * a_.scale, b, h, at_q, at_kv, takes);
      }
      if (kFar || (kInOrder && (n + 1) % kBlocksHeld == 0)) hold_order();
      sums_.end_block(0, n, b, h);
      put_operand<T>(p + 2 * n, s[n]);
      drop_operand(n, p);
      if constexpr (Config::kGradScores) put_operand<T>(ds + 2 * n, d[n]);
    }
  }
  static __device__ __forceinline__ void load_rows(FlexRow (&rows)[2], unsigned address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(rows[0].lse), "=f"(rows[0].delta), "=f"(rows[1].lse), "=f"(rows[1].delta)
                 : "r"(address));
  }

  const FlexBackwardArguments& a_;
  const FlexBackwardHopperArguments& more_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned shared_;
  Sums sums_;
  FlexDropoutHead<Config> dropout_;
  FlexKept<true, kWords> kept_;
  int head_ = -1;  // of dropout_
  int col_tile_, col_, key_batch_, key_head_, group_;
  int first_id_;             // in order: of the CTA's first keys
  bool counted_ = false;     // of the producer, in order: further keys come from the counter
  const AnyFar far_;         // of the producer
  WholeHead<Config> whole_;  // of the producer
};

}  // namespace fusegrad::device
