// The shared memory, the mbarriers, the producer and the tile scheduler of the Hopper forward (hopper.cuh).
#pragma once

#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/hopper_reads.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

/// What is copied: of query, keys and values so many tiles a stage, the second one, behind the first, of tangents.
struct FlexForwardOperands {
  using Arguments = FlexForwardArguments;
  using HopperArguments = FlexForwardHopperArguments;
  using Tangent = NoTangent;
  static constexpr int kQuery = 1, kKey = 1, kValue = 1;
};

template <class Config, class Operands = FlexForwardOperands>
class FlexForwardHopperTiles {
 protected:
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Reads = FlexForwardReads<Config, typename Operands::Tangent>;
  static constexpr HopperForwardMemory kMemory{{.rows = Config::kRows,
                                                .cols = Config::kCols,
                                                .head = Config::kHead,
                                                .value = Config::kValue,
                                                .stages = Config::kStages,
                                                .query_stages = Config::kQueryStages,
                                                .parts = Config::kParts,
                                                .read_bytes = Reads::kStageBytes,
                                                .read_stages = Config::kReadStages,
                                                .query_tiles = Operands::kQuery,
                                                .key_tiles = Operands::kKey,
                                                .value_tiles = Operands::kValue}};
  static constexpr int kConsumerWarps = Config::kGroups * kWarpgroup / kLanes;
  using Entry = TileEntry<Config::kParts>;
  // The producer asks for its next work so many tiles before the end of the present one: late, or the CTA with the
  // longest rows would get the next longest too, and early enough to hide the latency of its reads.
  static constexpr int kAskBefore = 4;
  // Values are loaded so many tiles behind keys. 1 is the order of the products, in which keys do not wait for room for
  // values; it helps where tiles are so large that there is one tile of queries.
  static constexpr int kLag = Config::kQueryStages == 1 && Config::kGroups == 2 ? 1 : 0;
  static_assert(Config::kRows == 64 * Config::kGroups && Config::kHead % 16 == 0 && Config::kValue % 16 == 0);
  static_assert(Config::kCols % 16 == 0);
  static_assert(Config::kParts == 1 || (Config::kParts == Config::kGroups && Config::kBlocks && Config::kMaskAlone));

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexForwardHopperTiles(const typename Operands::Arguments& a,
                                                    const typename Operands::HopperArguments& more,
                                                    const typename ScoreMod::Captured& score,
                                                    const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        more_(more),
        score_(score),
        mask_(mask),
        query_((shared + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment),
        key_(query_ + kMemory.key.offset),
        value_(query_ + kMemory.value.offset),
        zeros_(query_ + kMemory.zeros.offset),
        barriers_(query_ + kMemory.barriers.offset) {}

 protected:
  /// Comes before all else.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < Config::kQueryStages; ++s) {
        Barrier::init(query_full(s), Operands::kQuery);
        Barrier::init(query_empty(s), kConsumerWarps);
      }
      for (int s = 0; s < 2; ++s) {
        Barrier::init(work_full(s), 1);
        Barrier::init(work_empty(s), kConsumerWarps + Reads::kWarps);
      }
      for (int s = 0; s < Config::kStages; ++s) {
        Barrier::init(key_full(s), Operands::kKey);
        Barrier::init(value_full(s), Operands::kValue);
        Barrier::init(key_empty(s), kConsumerWarps);
        Barrier::init(value_empty(s), kConsumerWarps);
      }
      if constexpr (Reads::kUsed) {  // else nobody would arrive, and a barrier of no arrivals is an error
        for (int s = 0; s < Config::kReadStages; ++s) {
          Barrier::init(reads_full(s), Reads::kArrivals);
          Barrier::init(reads_empty(s), kConsumerWarps);
        }
      }
      Barrier::fence_inits();
    }
    if constexpr (Config::kParts > 1) {
      constexpr int kStep = (Config::kGroups + 1) * kWarpgroup * 16;
      static_assert(kMemory.zeros.piece % kStep == 0);
#pragma unroll
      for (int i = 0; i < kMemory.zeros.piece; i += kStep) {
        const int at = i + static_cast<int>(threadIdx.x) * 16;
        asm volatile("st.shared.v4.s32 [%0], {%1, %1, %1, %1};" ::"r"(zeros_ + at), "r"(0) : "memory");
      }
      fence_before_copy();
    }
    __syncthreads();
    if constexpr (Config::kBlocks) wait_for_kernel_before();
  }

  using Stages = Ring<Config::kStages>;
  using QueryStages = Counted<Config::kQueryStages>;
  using Works = Counted<2>;
  using ReadStages = Counted<Reads::kUsed ? Config::kReadStages : 1>;

  __device__ __forceinline__ unsigned query(int s) const { return query_ + s * kMemory.query.piece; }
  __device__ __forceinline__ unsigned key(int s) const { return key_ + s * kMemory.key.piece; }
  __device__ __forceinline__ unsigned value(int s) const { return value_ + s * kMemory.value.piece; }
  __device__ __forceinline__ unsigned barrier(int i) const { return barriers_ + i * kBarrierBytes; }
  __device__ __forceinline__ unsigned work_full(int s) const { return barrier(s); }
  __device__ __forceinline__ unsigned work_empty(int s) const { return barrier(2 + s); }
  __device__ __forceinline__ unsigned query_full(int s) const { return barrier(4 + s); }
  __device__ __forceinline__ unsigned query_empty(int s) const { return query_full(Config::kQueryStages + s); }
  __device__ __forceinline__ unsigned key_full(int s) const { return query_full(2 * Config::kQueryStages + s); }
  __device__ __forceinline__ unsigned key_empty(int s) const { return key_full(Config::kStages + s); }
  __device__ __forceinline__ unsigned value_full(int s) const { return key_full(2 * Config::kStages + s); }
  __device__ __forceinline__ unsigned value_empty(int s) const { return key_full(3 * Config::kStages + s); }
  __device__ __forceinline__ unsigned reads_full(int s) const { return key_full(4 * Config::kStages + s); }
  __device__ __forceinline__ unsigned reads_empty(int s) const { return reads_full(Config::kReadStages + s); }
  __device__ __forceinline__ unsigned reads(int s) const {
    return query_ + kMemory.reads.offset + s * kMemory.reads.piece;
  }
  /// A Work.
  __device__ __forceinline__ unsigned work(int s) const {
    return query_ + kMemory.works.offset + s * kMemory.works.piece;
  }
  /// The list entry of each stage of keys.
  __device__ __forceinline__ unsigned entry(int s) const {
    return query_ + kMemory.entries.offset + s * kMemory.entries.piece;
  }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  // Called by each warp.
  __device__ __forceinline__ void release(unsigned barrier) const { Barrier::arrive_if(lane() == 0, barrier); }

  /// Whether stages of keys have an entry: else their place in the row of tiles says all.
  static constexpr bool kEntries = Config::kBlocks || Config::kKeySplits;
  /// kRows queries of a head from `row` on, and how many tiles of keys they have: negative if the block mask is bad.
  /// Where keys are split, `b` has the split in its upper half.
  struct Work {
    int b, h, row, tiles;
    static constexpr int kSplitShift = 16;
    static __device__ __forceinline__ int batch(int b) { return Config::kKeySplits ? b & ((1 << kSplitShift) - 1) : b; }
    static __device__ __forceinline__ int split(int b) { return b >> kSplitShift; }
    static constexpr int kNoMore = -1;  // as row
    // Beside a row, which is a multiple of 64: bit 2 * i says that the last of several tiles has no pair of part i.
    static constexpr int kSkips = Config::kParts > 1 ? 0x15 : 0;
  };

  // --- the producer: one thread, which alone divides indices and reads lists ---

  __device__ __forceinline__ void produce() const {
    Counted<Config::kStages> tiles;
    QueryStages queries;
    Works works;
    int first = 0, next_first = 0;
    Work next, w = work_at(static_cast<int>(blockIdx.x), first);
    for (int id = static_cast<int>(blockIdx.x); w.row != Work::kNoMore; w = next, first = next_first) {
      tell(w, works);
      if (w.tiles <= 0) {
        id = next_id(id);
        next = work_at(id, next_first);
        continue;
      }
      const int key_head = w.h / a_.group, key_batch = a_.key_batches == 1 ? 0 : Work::batch(w.b);
      const TileWalk walk = walk_of(w);
      const int ask = max(w.tiles - kAskBefore, 0);
      int col = 0;
#pragma unroll 1  // or its code would be a third of the kernel's
      for (int i = 0, now = first; i < w.tiles + kLag; ++i) {
        if (i == ask) id = next_id(id);
        int value_col = col;
        if (i < w.tiles) {
          const int stage = tiles.stage();
          col = Entry::column(now) * Config::kCols;
          const int told = with_whole_parts(now, w);  // while the stage is not yet free
          Barrier::wait(key_empty(stage), tiles.parity() ^ 1);
          if constexpr (kEntries) asm volatile("st.shared.s32 [%0], %1;" ::"r"(entry(stage)), "r"(told) : "memory");
          copy_tile<Config::kCols, Config::kHead>(key(stage), more_.key, key_full(stage), col, key_head, key_batch);
          if constexpr (Operands::kKey > 1) {
            copy_tile<Config::kCols, Config::kHead>(key(stage) + kMemory.key.piece / 2, more_.key_tangent,
                                                    key_full(stage), col, key_head, key_batch);
          }
          now = !Config::kBlocks ? now + (1 << Entry::kKindBits) : i + 1 < w.tiles ? walk[i + 1] : 0;
        }
        if (i == 0) {
          Barrier::wait(query_empty(queries.stage()), queries.parity() ^ 1);
          copy_tile<Config::kRows, Config::kHead>(query(queries.stage()), more_.query, query_full(queries.stage()),
                                                  w.row & ~Work::kSkips, w.h, Work::batch(w.b));
          if constexpr (Operands::kQuery > 1) {
            copy_tile<Config::kRows, Config::kHead>(query(queries.stage()) + kMemory.query.piece / 2,
                                                    more_.query_tangent, query_full(queries.stage()), w.row, w.h,
                                                    Work::batch(w.b));
          }
          queries.next();
        }
        if (kLag == 0) value_col = col;
        if (i >= kLag) {
          const Counted<Config::kStages> brought{tiles.i - kLag};
          const int stage = brought.stage();
          Barrier::wait(value_empty(stage), brought.parity() ^ 1);
          copy_tile<Config::kCols, Config::kValue>(value(stage), more_.value, value_full(stage), value_col, key_head,
                                                   key_batch);
          if constexpr (Operands::kValue > 1) {
            copy_tile<Config::kCols, Config::kValue>(value(stage) + kMemory.value.piece / 2, more_.value_tangent,
                                                     value_full(stage), value_col, key_head, key_batch);
          }
        }
        if (i < w.tiles) tiles.next();
        // What it reads comes while tiles do.
        if (i == ask) next = work_at(id, next_first);
      }
    }
    tell(w, works);
  }
  // --- warps that bring what mods read ---

  /// Whether some pairs of a tile may take no part.
  __device__ __forceinline__ bool masked(int kind, int col) const {
    return kind != kTileFull || col + Config::kCols > a_.keys;
  }
  /// Called by the warps behind the producer's.
  __device__ __forceinline__ void bring_reads(const typename Operands::Tangent::Captured& tangent = {}) const {
    static_assert(!Reads::kUsed || Config::kParts == 1);
    const int thread = static_cast<int>(threadIdx.x) - Config::kGroups * kWarpgroup - kLanes;
    Works works;
    ReadStages stages;
    while (true) {
      Work w;
      Barrier::wait(work_full(works.stage()), works.parity());
      load_four_by_first(lane(), work(works.stage()), w.b, w.h, w.row, w.tiles);
      release(work_empty(works.stage()));
      works.next();
      if (w.row == Work::kNoMore) break;
      if (w.tiles <= 0) continue;
      const TileWalk walk = walk_of(w);
      int next = walk[0];
#pragma unroll 1
      for (int i = 0; i < w.tiles; ++i) {
        const int tile = next, col = Entry::column(tile) * Config::kCols, stage = stages.stage();
        if (i + 1 < w.tiles) next = walk[i + 1];
        Reads::bring(reads(stage), reads_full(stage), a_, more_, score_, mask_, tangent, Work::batch(w.b), w.h, w.row,
                     col, masked(Entry::kind(tile, 0), col), thread,
                     [&] { Barrier::wait(reads_empty(stage), stages.parity() ^ 1); });
        __syncwarp();
        release(reads_full(stage));
        stages.next();
      }
    }
  }
  // The tile scheduler: static without a block mask, where all works take the same time, else dynamic.
  __device__ __forceinline__ int next_id(int id) const {
    return static_cast<int>(gridDim.x) + (Config::kBlocks ? atomicAdd(more_.next, 1) : id);
  }
  __device__ __forceinline__ TileWalk walk_of(const Work& w) const {
    TileWalk walk(a_.tiles, Work::batch(w.b), w.h, w.row / Config::kRows, (a_.keys + Config::kCols - 1) / Config::kCols,
                  (Config*)nullptr);
    if constexpr (Config::kKeySplits) walk.keep(Work::split(w.b), a_.partials.splits);
    return walk;
  }
  // `first` becomes its first tile, where it has one.
  __device__ __forceinline__ Work work_at(int id, int& first) const {
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    int split = 0;
    if constexpr (Config::kKeySplits) {
      split = id % a_.partials.splits;
      id /= a_.partials.splits;
    }
    if (id >= a_.batches * a_.heads * row_tiles) return {0, 0, Work::kNoMore, 0};
    // The last queries come first: under a causal mask they have the most keys, and what begins last should not take
    // long.
    const int section = id / (more_.section * row_tiles) * more_.section, place = id - section * row_tiles;
    const int heads = min(more_.section, a_.batches * a_.heads - section);
    const int head = section + place % heads, b = head / a_.heads;
    Work w{b, head - b * a_.heads, (row_tiles - 1 - place / heads) * Config::kRows, 0};
    if constexpr (Config::kKeySplits) w.b += split << Work::kSplitShift;
    const TileWalk walk = walk_of(w);
    w.tiles = walk.count();
    first = walk[0];
    if constexpr (Config::kParts > 1) {
      static_assert(kTileNone == 3 && Config::kParts <= 3);
      if (w.tiles > 1) {
        const int last = walk[w.tiles - 1];
        w.row |= last & last >> 1 & Work::kSkips;
      }
    }
    return w;
  }
  /// A list's word as consumers get it: partial where the mask_mod leaves pairs out, not because queries end in the
  /// block.
  __device__ __forceinline__ int with_whole_parts(int word, const Work& w) const {
    if constexpr (Config::kCornersTell) {
      constexpr int kPartRows = Config::kRows / Config::kParts;
      static_assert(kTileFull == 0);
      const int col = Entry::column(word) * Config::kCols, last_col = min(col + Config::kCols, a_.keys) - 1;
#pragma unroll 1  // registers
      for (int part = 0; part < Config::kParts; ++part) {
        const int row = (w.row & ~Work::kSkips) + part * kPartRows, last = min(row + kPartRows, a_.queries) - 1;
        const auto takes = [&](int q, int kv) { return MaskMod::apply(mask_, Work::batch(w.b), w.h, q, kv, true); };
        if (Entry::kind(word, part) == kTilePartial && last >= row && takes(row, col) && takes(row, last_col) &&
            takes(last, col) && takes(last, last_col))
          word &= ~(3 << 2 * part);
      }
    }
    return word;
  }
  __device__ __forceinline__ void tell(const Work& w, Works& works) const {
    Barrier::wait(work_empty(works.stage()), works.parity() ^ 1);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(work(works.stage())), "r"(w.b), "r"(w.h), "r"(w.row),
                 "r"(w.tiles)
                 : "memory");
    Barrier::arrive(work_full(works.stage()));
    works.next();
  }

  const typename Operands::Arguments& a_;
  const typename Operands::HopperArguments& more_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, key_, value_, zeros_, barriers_;
};

}  // namespace fusegrad::device
