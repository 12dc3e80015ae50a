// What happens to a tile of scores between the products: which pairs take part, and what the score_mod makes of them.
//
// The host generates a Config (cuda/attention/plan/kernel_spec.cpp), which says what a kernel is compiled for:
//   Element                    BFloat16, Float16 or float
//   kHead, kValue              D and E, rounded up to 16
//   kRows, kCols               queries and keys of a tile
//   kWarps                     warps of a CTA
//   ScoreMod, MaskMod          rendered structs (csrc/score_mod/render_cuda.h)
//   kKeySplits                 whether several CTAs share each row of tiles, and another kernel merges their results
//   kBlocks, kMixed            whether there is a block mask, and whether tiles may lie in several of its blocks
//   kSplit                     float: products of split operands
//   kDropout                   see dropout.cuh
#pragma once

#include "cuda/attention/device/dropout.cuh"
#include "cuda/attention/mask/tile_entry.cuh"
#include "cuda/device/mma.cuh"

namespace fusegrad::device {

using score_mod::LineBy;

constexpr float kLog2E = 1.4426950408889634f;

/// A derivative's view of what its score_mod captured.
template <class Mod, class Captured>
__device__ __forceinline__ const typename Mod::Captured& captured_of(const Captured& captured) {
  static_assert(sizeof(Captured) == sizeof(typename Mod::Captured));
  return reinterpret_cast<const typename Mod::Captured&>(captured);
}

/// Whether the call has the mod: one that it lacks is rendered too, and changes nothing.
template <class Mod>
constexpr bool kHas = Mod::kGiven;

/// Prefetches into the L1 cache what a score_mod reads by keys or diagonals for kQueries queries from q on and kKeys
/// keys from kv on. Called by kThreads threads, this one number `thread`; nothing waits here. Read where it is needed,
/// a few pairs at a time, each cache line would be waited for. Reads by keys alone are all covered where there are at
/// least as many keys as queries.
template <class Mod, int kQueries, int kKeys, int kThreads>
__device__ __forceinline__ void touch_tile(const typename Mod::Captured& captured, int b, int h, int q, int kv,
                                           int thread, unsigned nowhere) {
  if constexpr (Mod::kTouchesKeys) {
    // The diagonals of the first and the last one of the shorter side are all of them.
    constexpr bool kAlongKeys = kQueries <= kKeys;
    constexpr int kLong = kAlongKeys ? kKeys : kQueries, kShort = kAlongKeys ? kQueries : kKeys;
    constexpr int kPlaces = kLong * (Mod::kTouchesDiagonals ? 2 : 1);
#pragma unroll
    for (int i = 0; i < kPlaces; i += kThreads) {
      const int at = i + thread;
      if (kPlaces % kThreads != 0 && at >= kPlaces) break;
      const int along = at % kLong, across = at / kLong * (kShort - 1);
      Mod::touch(captured, b, h, q + (kAlongKeys ? across : along), kv + (kAlongKeys ? along : across), true, nowhere);
    }
  }
}
/// Lines in shared memory of what mods read for kQueries queries and kKeys keys: one for each read of a score_mod by
/// keys or diagonals whose index no other read gives, and of a mask_mod by queries too (csrc/score_mod/render_cuda.h).
/// An element of a line takes one instruction, a read of the tensor eight to ten. kTellsMasks: a word for
/// each 32 keys follows the lines, and is not 0 where all masks by keys are true.
template <class Mod, int kQueries, int kKeys, int kThreads, bool kTellsMasks = false>
class TileLines {
  using Captured = typename Mod::Captured;
  static __device__ constexpr int places(int k) {
    const LineBy of = Mod::kLine[k].by;
    return of == LineBy::kDiagonal ? kQueries + kKeys : of == LineBy::kKey ? kKeys : kQueries;
  }
  /// The element of line k.
  template <int k>
  using Element = decltype(Mod::template line<k>(*static_cast<const Captured*>(nullptr), 0, 0, 0, 0, true));
  /// Words before line k, an even number.
  template <int k, int kBefore = 0>
  static __device__ constexpr int offset(int sum = 0) {
    if constexpr (kBefore < k) {
      return offset<k, kBefore + 1>(sum + places(kBefore) * Mod::kLine[kBefore].words);
    } else {
      return sum;
    }
  }
  static constexpr int kEach = (kQueries + kKeys + kThreads - 1) / kThreads;
  template <int k>
  static constexpr bool kIsMask = kSame<Element<k>, bool>;
  /// Whether there are masks, and all of them are by keys.
  template <int k = 0>
  static __device__ constexpr bool has_masks(bool any = false) {
    if constexpr (k < Mod::kLineCount) {
      return kIsMask<k> && Mod::kLine[k].by != LineBy::kKey ? false : has_masks<k + 1>(any || kIsMask<k>);
    } else {
      return any;
    }
  }
  static constexpr int kLineWords = offset<Mod::kLineCount>(), kWarps = kThreads / kLanes, kGroups = kKeys / kLanes;

 public:
  /// Whether are_true() may be asked.
  static constexpr bool kMasks = kTellsMasks && has_masks();
  static_assert(!kMasks || kKeys % kLanes == 0);
  static constexpr int kWords = kLineWords + (kMasks ? (kGroups + 1) / 2 * 2 : 0);
  /// For a score_mod: whether there are lines for all reads by keys or diagonals.
  static __device__ constexpr bool all() { return Mod::kLineCount > 0 && !Mod::kTouchesBesides; }

  /// Called by kThreads threads: loads the thread's part of the lines from (q, kv) on.
  __device__ __forceinline__ void load(const typename Mod::Captured& captured, int b, int h, int q, int kv,
                                       int thread) {
    for_each_line([&](auto line, int i, int) {
      constexpr int k = decltype(line)::value;
      const int at = i * kThreads + thread;
      constexpr LineBy kOf = Mod::kLine[k].by;
      const auto element = Mod::template line<k>(captured, b, h, kOf == LineBy::kKey ? q : q + at,
                                                 kOf == LineBy::kKey        ? kv + at
                                                 : kOf == LineBy::kDiagonal ? kv + kKeys - 1
                                                                            : kv,
                                                 true);
      if constexpr (kSame<Element<k>, float>) {
        ahead_[k][i] = __float_as_int(element);
      } else {
        ahead_[k][i] = static_cast<long long>(element);
      }
    });
  }
  __device__ __forceinline__ void store(unsigned lines, int thread) const {
    bool all_true[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) all_true[i] = true;
    for_each_line([&](auto line, int i, int places) {
      constexpr int k = decltype(line)::value;
      const int at = i * kThreads + thread;
      if (places % kThreads != 0 && at >= places) return;
      if constexpr (kMasks && kIsMask<k>) all_true[i] = all_true[i] && ahead_[k][i] != 0;
      if constexpr (Mod::kLine[k].words == 2) {
        asm volatile("st.shared.b64 [%0], %1;" ::"r"(lines + offset<k>() * 4 + at * 8), "l"(ahead_[k][i]) : "memory");
      } else {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(lines + (offset<k>() + at) * 4),
                     "r"(static_cast<int>(ahead_[k][i]))
                     : "memory");
      }
    });
    if constexpr (kMasks) {
#pragma unroll
      for (int i = 0; i * kWarps < kGroups; ++i) {
        const int group = i * kWarps + thread / kLanes;
        const bool all = __all_sync(~0u, all_true[i]);
        if (thread % kLanes == 0 && group < kGroups) {
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(lines + (kLineWords + group) * 4), "r"(static_cast<int>(all))
                       : "memory");
        }
      }
    }
  }
  /// Whether masks are true for so many keys from kFirst on.
  template <int kFirst = 0, int kCount = kKeys>
  static __device__ __forceinline__ bool are_true(unsigned lines) {
    static_assert(kFirst % kLanes == 0 && kCount % kLanes == 0);
    bool all = true;
#pragma unroll
    for (int group = kFirst / kLanes; group < (kFirst + kCount) / kLanes; ++group)
      all = all && load_word(lines + (kLineWords + group) * 4) != 0;
    return all;
  }

  /// The reads of a pair so many queries and keys from the first ones. kTrue: masks are true, and constants.
  template <bool kTrue>
  struct ReadsOf {
    unsigned lines, of_query, of_key, of_diagonal;
    __device__ __forceinline__ ReadsOf(unsigned lines, int q, int kv)
        : lines(lines), of_query(lines + q * 4), of_key(lines + kv * 4), of_diagonal(lines + (q - kv + kKeys - 1) * 4) {
      // Else they would be computed anew for each pair.
      asm volatile("" : "+r"(of_key), "+r"(of_diagonal));
    }
    /// Those of the pair so many queries and keys on.
    __device__ __forceinline__ ReadsOf at(int q, int kv) const {
      ReadsOf result = *this;
      result.of_query += q * 4;
      result.of_key += kv * 4;
      result.of_diagonal += (q - kv) * 4;
      return result;
    }
    template <int k, class T>
    __device__ __forceinline__ Element<k> read(const T*, bool) const {
      if constexpr (kTrue && kIsMask<k>) return true;
      const unsigned from = Mod::kLine[k].by == LineBy::kDiagonal ? of_diagonal
                            : Mod::kLine[k].by == LineBy::kKey    ? of_key
                                                                  : of_query;
      if constexpr (Mod::kLine[k].words == 2) {
        return *static_cast<const long long*>(__cvta_shared_to_generic(2 * from - lines + offset<k>() * 4));
      } else if constexpr (kSame<Element<k>, float>) {
        return static_cast<const float*>(__cvta_shared_to_generic(from))[offset<k>()];
      } else {
        return static_cast<Element<k>>(static_cast<const int*>(__cvta_shared_to_generic(from))[offset<k>()]);
      }
    }
    template <int, class T>
    __device__ __forceinline__ auto pair(const T* p, bool there) const {
      return score_mod::read_if<Mod::kUnread>(p, there);
    }
  };
  using Reads = ReadsOf<false>;

 private:
  template <int kValue>
  struct Number {
    static constexpr int value = kValue;
  };
  template <int k = 0, class F>
  static __device__ __forceinline__ void for_each_line(const F& f) {
    if constexpr (k < Mod::kLineCount) {
#pragma unroll
      for (int i = 0; i < (places(k) + kThreads - 1) / kThreads; ++i) f(Number<k>(), i, places(k));
      for_each_line<k + 1>(f);
    }
  }
  long long ahead_[Mod::kLineCount + 1][kEach];
};

/// Prefetches what a score_mod reads for each pair by itself as touch_tile does, assuming that 32 bytes of neighbouring
/// keys lie side by side.
template <class Mod, int kQueries, int kKeys, int kThreads>
__device__ __forceinline__ void touch_pairs(const typename Mod::Captured& captured, int b, int h, int q, int kv,
                                            int thread, unsigned nowhere) {
  if constexpr (Mod::kPairBytes > 0) {
    constexpr int kTogether = 32 / Mod::kPairBytes, kAcross = kKeys / kTogether;
    static_assert(kQueries * kAcross % kThreads == 0);
#pragma unroll
    for (int i = thread; i < kQueries * kAcross; i += kThreads)
      Mod::touch_pair(captured, b, h, q + i / kAcross, kv + i % kAcross * kTogether, true, nowhere);
  }
}
/// Waits for prefetches: the CTA's shared memory must live until they are written.
__device__ __forceinline__ void wait_touches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Whether a kernel instantiates a score_mod's pairs twice, with and without a mask, though that compiles twice as
/// long.
template <class Config>
constexpr bool kUnmaskedToo = [] {
  if constexpr (!kHas<typename Config::ScoreMod>) return true;
  if (Config::kHead != 64 || Config::Derivative::kContributions != 1 || Config::Derivative::kVectors) return false;
  return Config::kFixedPoint || (Config::kPartialSums && sums_over_queries(Config::Schemes::kScheme[0]));
}();

/// Keeps ptxas from moving instructions across: it would compute many pairs side by side, whose numbers are more than
/// there are registers. An event that only profilers count; neither __syncwarp nor volatile code holds ptxas back.
__device__ __forceinline__ void hold_order() { asm volatile("pmevent 0;" ::: "memory"); }
/// Words that are computed before what comes behind it.
template <int kWords>
__device__ __forceinline__ void pin_words(unsigned (&word)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) asm volatile("" : "+r"(word[w]));
  hold_order();
}

/// Whether pairs that take no part read captured tensors too, where their indices are inside: reads then have no
/// condition of their own, and a thread's equal ones are one. A branch around a mask_mod would wait for each of them.
template <class Config>
constexpr bool kAllRead = Config::ScoreMod::kUnread != score_mod::Unread::kBranch;

/// An integer with a bit for each of so many pairs. There is none for more than 64.
struct TooManyPairs;
template <int kCount>
struct BitsFor {
  using Type = TooManyPairs;
};
template <int kCount>
  requires(kCount > 32 && kCount <= 64)
struct BitsFor<kCount> {
  using Type = unsigned long long;
};
template <int kCount>
  requires(kCount <= 32)
struct BitsFor<kCount> {
  using Type = unsigned;
};
template <int kCount>
using Bits = typename BitsFor<kCount>::Type;
/// Bits that are tested by one instruction each. Compilers turn a constant mask into a shift, and need three, or four
/// for 64 bits.
template <class Bits>
class Tested {
 public:
  __device__ __forceinline__ explicit Tested(Bits bits) {
    if constexpr (sizeof(Bits) == 4) {
      word_[0] = bits;
    } else {
      asm("mov.b64 {%0, %1}, %2;" : "=r"(word_[0]), "=r"(word_[1]) : "l"(bits));
    }
  }
  __device__ __forceinline__ bool operator[](int i) const {
    int set;
    asm("{\n.reg .pred set;\n.reg .b32 masked;\nand.b32 masked, %1, %2;\nsetp.ne.b32 set, masked, 0;\n"
        "selp.b32 %0, 1, 0, set;\n}"
        : "=r"(set)
        : "r"(word_[i / 32]), "r"(1u << i % 32));
    return set != 0;
  }

 private:
  unsigned word_[sizeof(Bits) / 4];
};

/// The tiles of one row of tiles, in order.
class TileWalk {
 public:
  template <class Config>
  __device__ __forceinline__ TileWalk(const FlexTiles& tiles, int b, int h, int row, int all, const Config*) {
    if constexpr (Config::kBlocks) {
      const long long head =
          static_cast<long long>(tiles.batches == 1 ? 0 : b) * tiles.heads + (tiles.heads == 1 ? 0 : h);
      count_ = tiles.count[head * tiles.rows + row];
      list_ = tiles.list + (head * tiles.rows + row) * tiles.cols;
    } else {
      count_ = all;
    }
  }
  __device__ __forceinline__ int count() const { return count_; }
  /// Leaves the tiles of one of several splits of the keys, which differ by one at most.
  __device__ __forceinline__ void keep(int split, int splits) {
    if (count_ < 0) return;
    const int some = count_ / splits, more = count_ - some * splits;
    first_ = split * some + min(split, more);
    count_ = some + (split < more ? 1 : 0);
    if (list_ != nullptr) list_ += first_;
  }
  /// The word of a TileEntry; without a block mask, whose tiles have no parts, a full tile.
  __device__ __forceinline__ int operator[](int i) const {
    return list_ == nullptr ? (first_ + i) * (1 << TileEntry<>::kKindBits) : list_[i];
  }

 private:
  int count_, first_ = 0;
  const int* list_ = nullptr;
};

/// Whether a pair of a tile that is not full takes part.
template <class Config, class Reads = score_mod::ReadThere<Config::MaskMod::kUnread>>
__device__ __forceinline__ bool takes_part(const FlexTiles& tiles, const typename Config::MaskMod::Captured& mask,
                                           int kind, int b, int h, int q, int kv, bool inside,
                                           const Reads& reads = Reads()) {
  if constexpr (!Config::kBlocks) {
    return inside;
  } else {
    bool full = kind == kTileFull;
    if (Config::kMixed && kind == kTileMixed && inside) {
      const long long head =
          static_cast<long long>(tiles.batches == 1 ? 0 : b) * tiles.heads + (tiles.heads == 1 ? 0 : h);
      const unsigned char state =
          tiles
              .blocks[(head * tiles.block_rows + q / tiles.block_size_q) * tiles.block_cols + kv / tiles.block_size_kv];
      inside = state != kBlockNone;
      full = state == kBlockFull;
    }
    if constexpr (kHas<typename Config::MaskMod> && kAllRead<Config>) {
      return inside & (full | Config::MaskMod::apply(mask, b, h, q, kv, true, reads));
    } else if constexpr (kHas<typename Config::MaskMod>) {
      if (!full) return inside && Config::MaskMod::apply(mask, b, h, q, kv, inside);
    }
    return inside;
  }
}

/// A thread's pairs whose block is listed, and those whose block is full, as bits that masked_pairs explains.
template <class Pairs>
struct BlockBits {
  Pairs listed, full;
};
/// They are found in tiles that may lie in several blocks. A block is looked up where a column enters it; rows and
/// columns are the accumulators'.
template <int kBlocks, bool kKeyRows, class Arguments>
__device__ __forceinline__ BlockBits<Bits<kBlocks * 4>> block_bits(const Arguments& a, int kind, int b, int h, int q,
                                                                   int kv) {
  using Pairs = Bits<kBlocks * 4>;
  const FlexTiles& t = a.tiles;
  const int row = kKeyRows ? kv : q, rows = kKeyRows ? a.keys : a.queries;
  const int col = kKeyRows ? q : kv, cols = kKeyRows ? a.queries : a.keys;
  const int row_size = kKeyRows ? t.block_size_kv : t.block_size_q;
  const int col_size = kKeyRows ? t.block_size_q : t.block_size_kv;
  const int row_stride = kKeyRows ? 1 : t.block_cols, col_stride = kKeyRows ? t.block_cols : 1;
  const int head = (t.batches == 1 ? 0 : b) * t.heads + (t.heads == 1 ? 0 : h);
  const unsigned char* states[2];
  FlexBlock state[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const long long line = static_cast<long long>(min(row + 8 * r, rows - 1) / row_size) * row_stride;
    states[r] = t.blocks + static_cast<long long>(head) * t.block_rows * t.block_cols + line;
    state[r] = row + 8 * r >= rows ? kBlockNone : kind == kTileFull ? kBlockFull : kBlockPartial;
  }
  unsigned next = kind == kTileMixed ? 0 : ~0u;  // the column where the next block begins that is to be looked up
  BlockBits<Pairs> made = {0, 0};
#pragma unroll 1
  for (int n = 0; n < kBlocks; ++n) {
    unsigned listed = 0, full = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = col + n * 8 + e;
      if (at >= cols) continue;
      if (static_cast<unsigned>(at) >= next) {
        const int block = at / col_size;
        next = (block + 1u) * col_size;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (row + 8 * r < rows)
            state[r] = static_cast<FlexBlock>(states[r][static_cast<long long>(block) * col_stride]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        listed |= static_cast<unsigned>(state[r] != kBlockNone) << (2 * r + e);
        full |= static_cast<unsigned>(state[r] == kBlockFull) << (2 * r + e);
      }
    }
    made.listed |= Pairs(listed) << (n * 4);
    made.full |= Pairs(full) << (n * 4);
  }
  return made;
}

struct PairIndex {
  int q, kv;
};
/// The pair of bit i of masked_pairs; (q, kv) is the first one.
template <bool kKeyRows>
__device__ __forceinline__ PairIndex pair_at(int i, int q, int kv) {
  const int row = (kKeyRows ? kv : q) + i / 2 % 2 * 8, col = (kKeyRows ? q : kv) + i / 4 * 8 + i % 2;
  return kKeyRows ? PairIndex{col, row} : PairIndex{row, col};
}

/// masked_pairs() of tiles that may lie in several blocks. The mask_mod is called where a block is partial.
template <class Config, int kBlocks, bool kKeyRows, int kTogether, class Arguments>
__device__ __forceinline__ Bits<kBlocks * 4> masked_pairs_of_blocks(const Arguments& a,
                                                                    const typename Config::MaskMod::Captured& mask,
                                                                    int kind, int b, int h, int q, int kv) {
  using Result = Bits<kBlocks * 4>;
  const auto blocks = block_bits<kBlocks, kKeyRows>(a, kind, b, h, q, kv);
  Result alive = blocks.listed;
  if constexpr (kHas<typename Config::MaskMod>) {
    const Result partial = blocks.listed & ~blocks.full;
#pragma unroll 1
    for (int i = 0; i < kBlocks * 4; i += kTogether) {
      const unsigned asked = static_cast<unsigned>(partial >> i) & ((1u << kTogether) - 1);
      if (asked == 0) continue;
      unsigned some = 0;
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        const auto [at_q, at_kv] = pair_at<kKeyRows>(i + e, q, kv);
        if (kAllRead<Config> || (asked >> e & 1) != 0)
          some |= static_cast<unsigned>(Config::MaskMod::apply(mask, b, h, at_q, at_kv, true)) << e;
      }
      alive &= ~(Result(asked & ~some) << i);
    }
  }
  return alive;
}

/// The pairs of masked_pairs() whose row and column are there; (row, col) is the first one.
template <int kBlocks>
__device__ __forceinline__ Bits<kBlocks * 4> pairs_inside(int row, int rows, int col, int cols) {
  using Result = Bits<kBlocks * 4>;
  constexpr Result kAll = ~Result(0), kEvenColumns = kAll / 3, kFirstRows = kAll / 5;
  const auto blocks = [](int count) { return count < kBlocks ? (Result(1) << (4 * count)) - 1 : kAll; };
  const int left = max(cols - col, 0);
  const Result columns = (blocks((left + 7) / 8) & kEvenColumns) | (blocks((left + 6) / 8) & ~kEvenColumns);
  return columns & ((row < rows ? kFirstRows : 0) | (row + 8 < rows ? ~kFirstRows : 0));
}

/// Which of a thread's pairs take part: bit 4 * n + e for element e of accumulator n. (q, kv) is the first pair.
/// kKeyRows: keys are the accumulators' rows, and queries their columns. As bits and before the score_mod, a mask_mod
/// is instantiated only kTogether times, and a score_mod once an element, whether pairs are masked or not.
template <class Config, int kBlocks, bool kKeyRows, int kTogether, class Arguments>
__device__ __forceinline__ Bits<kBlocks * 4> masked_pairs(const Arguments& a,
                                                          const typename Config::MaskMod::Captured& mask, int kind,
                                                          int b, int h, int q, int kv) {
  using Result = Bits<kBlocks * 4>;
  static_assert(kTogether % 2 == 0 && kBlocks * 4 % kTogether == 0);
  if constexpr (Config::kMixed) {
    return masked_pairs_of_blocks<Config, kBlocks, kKeyRows, kTogether>(a, mask, kind, b, h, q, kv);
  } else if constexpr (!Config::kBlocks) {
    return kKeyRows ? pairs_inside<kBlocks>(kv, a.keys, q, a.queries) : pairs_inside<kBlocks>(q, a.queries, kv, a.keys);
  } else {
    Result alive = 0;
#pragma unroll 1
    for (int i = 0; i < kBlocks * 4; i += kTogether) {
      unsigned some = 0;
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        const auto [at_q, at_kv] = pair_at<kKeyRows>(i + e, q, kv);
        const bool inside = at_kv < a.keys && at_q < a.queries;
        some |= static_cast<unsigned>(takes_part<Config>(a.tiles, mask, kind, b, h, at_q, at_kv, inside)) << e;
      }
      alive |= Result(some) << i;
    }
    return alive;
  }
}
/// The same, and all pairs where not `masked`.
template <class Config, int kBlocks, bool kKeyRows, class Arguments>
__device__ __forceinline__ Bits<kBlocks * 4> pairs_that_take_part(const Arguments& a,
                                                                  const typename Config::MaskMod::Captured& mask,
                                                                  int kind, bool masked, int b, int h, int q, int kv) {
  if (!masked) return ~Bits<kBlocks * 4>(0);
  return masked_pairs<Config, kBlocks, kKeyRows, 2>(a, mask, kind, b, h, q, kv);
}

/// The tile scheduler of CTAs with one tile each: which tile of which head a CTA has. The same tile of a few heads
/// comes before their next one, so that tiles of like work end together; few heads, so that what they read stays in the
/// L2 cache.
struct HeadTile {
  int head, tile;
  __device__ __forceinline__ HeadTile(int heads, int tiles, int id = static_cast<int>(blockIdx.x)) {
    constexpr int kTogether = 8;
    const int first = id / (kTogether * tiles) * kTogether;
    const int together = min(kTogether, heads - first), rest = id - first * tiles;
    head = first + rest % together;
    tile = rest / together;
  }
};

/// Loads a tile of a head's rows from `row` on, by all threads of the CTA; zeros beyond `rows` and `cols`.
template <class Into, int kThreads>
__device__ __forceinline__ void load_tile(unsigned to, const FlexTensor& from, int b, int h, int row, int rows,
                                          int cols) {
  using T = typename Into::Element;
  constexpr int kVector = 16 / sizeof(T);
  const T* p = static_cast<const T*>(from.data) + b * from.batch_stride + h * from.head_stride + row * from.row_stride;
  Into::template load<kThreads>(to, reinterpret_cast<const char*>(p),
                                from.row_stride * static_cast<long long>(sizeof(T)), rows - row,
                                (cols + kVector - 1) / kVector, static_cast<int>(threadIdx.x));
}

/// Stores kRows rows of a tile, which a warp or a CTA of kThreads threads has in shared memory, to a head's rows from
/// `row` on of a tensor of any strides with `rows` rows and `cols` columns; kTogether stores of a thread at a time.
template <class From, int kRows, int kThreads, int kTogether = 1>
__device__ __forceinline__ void store_tile(const FlexTensor& to, int b, int h, int row, int rows, int cols,
                                           unsigned from) {
  using T = typename From::Element;
  constexpr int kVector = 16 / sizeof(T);
  T* out = static_cast<T*>(to.data) + b * to.batch_stride + h * to.head_stride + row * to.row_stride;
  const bool vectors = to.col_stride == 1 && cols % kVector == 0 && to.row_stride % kVector == 0 &&
                       reinterpret_cast<unsigned long long>(out) % 16 == 0;
  constexpr int kCount = kRows * From::kVectors;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) % kThreads; first < kCount; first += kTogether * kThreads) {
    uint4 words[kTogether];
    const auto at = [&](int i) {
      const int r = i / From::kVectors;
      return from + r * From::kStride + (i - r * From::kVectors) * 16;
    };
    if (vectors) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (kTogether == 1 || first + j * kThreads < kCount) words[j] = load_shared<uint4>(at(first + j * kThreads));
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = first + j * kThreads, r = i / From::kVectors, col = i % From::kVectors * kVector;
      if ((kTogether > 1 && i >= kCount) || row + r >= rows || col >= cols) continue;
      T* there = out + r * to.row_stride + col * to.col_stride;
      if (vectors) {
        *reinterpret_cast<uint4*>(there) = words[j];
      } else {
#pragma unroll 1
        for (int e = 0; e < kVector && col + e < cols; ++e)
          there[e * to.col_stride] = load_shared<T>(at(i) + e * static_cast<int>(sizeof(T)));
      }
    }
  }
}

}  // namespace fusegrad::device
