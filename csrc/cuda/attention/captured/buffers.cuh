// The gradients of captured buffers: how the contributions of a tile's pairs reach their elements. There is one scheme
// for each class of the planner (csrc/score_mod/scatter_plan.h); docs/score_mod.md explains the classes.
//
// Keys are rows here. In its warp's part of a tile a thread has the pairs (kv, q) = (16 * m + g + 8 * (e / 2), 8 * n +
// 2 * t + e % 2) for m below kBlocksM, n below kBlocksN and e below 4. scores.cuh describes Config; this file adds:
//   Derivative                 the rendered derivative
//   Schemes::kScheme[]         the class of each contribution. Small letters ('a', 'b', 'c', 'g') are contributions to
//                              several elements along axes: a warp sums up an element over its 16 keys by 8 queries as
//                              the class allows, then adds it
//                              'S': class E where every element gets one contribution of one pair, which is stored
//                              'T': the same, where contributions are dS itself, of whose tiles the kernel stores them
//   Schemes::kTable[]          the elements of a buffer of class F
//   kFixedPoint                sums are 64-bit integers, the same in every order
//   kPartialSums               classes A and B are stored head by head, and class F of CTAs that stay (kKeeps) CTA by
//                              CTA; a later kernel sums them up
#pragma once

#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"

namespace fusegrad::device {

template <int kBytes, bool kBFloat16>
__device__ constexpr auto element_of() {
  if constexpr (kBytes == 4) {
    return float{};
  } else if constexpr (kBFloat16) {
    return BFloat16{};
  } else {
    return Float16{};
  }
}
/// The type of the elements of contribution k's buffer, where its contributions are stored.
template <class Derivative, int k>
using ElementOf = decltype(element_of<Derivative::kBytes[k], Derivative::kBFloat16[k]>());

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
/// f(Index<0>()), f(Index<1>()), ...
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void for_each_index(F&& f) {
  if constexpr (kFirst < kCount) {
    f(Index<kFirst>());
    for_each_index<kCount, kFirst + 1>(f);
  }
}

/// Adds up x over the lanes that differ in bits 2 to 4, and shares the sums out among them: x[i] of a lane is then the
/// sum at fold_index(i), for i below kCount / 8, at least 1. A butterfly: 7 shuffles for 8 sums.
template <int kCount>
__device__ __forceinline__ void fold(float (&x)[kCount], int lane) {
  int left = kCount;
#pragma unroll
  for (int bit = 16; bit >= 4; bit /= 2) {
    if (left == 1) {
      x[0] += __shfl_xor_sync(~0u, x[0], bit);
      continue;
    }
    left /= 2;
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= left) break;
      const float sent = upper ? x[i] : x[i + left], kept = upper ? x[i + left] : x[i];
      x[i] = kept + __shfl_xor_sync(~0u, sent, bit);
    }
  }
}
template <int kCount>
__device__ __forceinline__ int fold_index(int i, int lane) {
  return i + (lane & 16 ? kCount / 2 : 0) + (lane & 8 ? kCount / 4 : 0) + (lane & 4 ? kCount / 8 : 0);
}

__device__ __forceinline__ void add_shared(unsigned address, int x) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
/// Adds to device memory where `there`, without a branch.
__device__ __forceinline__ void add_global_if(bool there, float* p, float x) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there red.global.add.f32 [%0], %1;\n}" ::"l"(p),
               "f"(x), "r"(static_cast<int>(there))
               : "memory");
}
__device__ __forceinline__ void add_global_if(bool there, unsigned long long* p, unsigned long long x) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there red.global.add.u64 [%0], %1;\n}" ::"l"(p),
               "l"(x), "r"(static_cast<int>(there))
               : "memory");
}

/// kTeams: the CTA's warps form so many teams, each of which sums up a tile for its own keys. A team's threads must
/// meet between a tile's end_tile and its flush; with one set of lines (kLines = 1), and where kOnce, also after flush.
template <class Config, int kTeams = 1, int kLines = 1>
class FlexBufferSums {
  using D = typename Config::Derivative;
  using Captured = typename Config::ScoreMod::Captured;
  static constexpr int kCount = D::kContributions;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kCols = Config::kRows / Config::kShare;  // queries of a warp's part
  static constexpr int kBlocksM = Config::kCols * Config::kShare / Config::kWarps / 16, kKeys = 16 * kBlocksM;
  static constexpr int kBlocksN = kCols / 8;
  static constexpr int kTeamWarps = Config::kWarps / kTeams, kTeamThreads = kLanes * kTeamWarps;
  static constexpr int kTeamKeys = Config::kCols / kTeams;
  static constexpr int kDiagonals = kCols + kKeys - 1;  // of a warp's part
  static constexpr CapturedMemory kMemory{
      .warps = Config::kWarps, .teams = kTeams, .sets = kLines, .queries = kCols, .keys = kKeys};
  // Of floats, each of two of eight rows of keys.
  static constexpr int kLine = kMemory.diagonal_line();
  static_assert(kLines == 1 || kBlocksM == 1);
  static __device__ constexpr char scheme(int k) { return Config::Schemes::kScheme[k]; }
  static __device__ constexpr bool is_vector(int k) { return scheme(k) >= 'a'; }

  // Whether sums live from pair to pair; for more than eight queries at a time they would spill.
  static __device__ constexpr bool held() {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) >= 'D' && scheme(k) != 'T') return true;
    }
    return false;
  }
  static constexpr bool kHeld = held();

  static __device__ constexpr int bytes(int k) { return kMemory.bytes(scheme(k), Config::Schemes::kTable[k]); }
  static __device__ constexpr int offset(int k) {
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += bytes(i);
    return sum;
  }
  static __device__ constexpr bool flushes() {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) == 'C' || scheme(k) == 'D' || scheme(k) == 'F') return true;
    }
    return false;
  }
  static __device__ constexpr bool once() {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) == 'D' || scheme(k) == 'F') return true;
    }
    return false;
  }

  static __device__ constexpr bool stores_tiles() {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) == 'T') return true;
    }
    return false;
  }

  static __device__ constexpr bool histograms_alone() {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) != 'F') return false;
    }
    return true;
  }

 public:
  static constexpr int kSharedBytes = offset(kCount);
  /// Whether the kernel stores dS, for a contribution that is left out here.
  static constexpr bool kStoresTiles = stores_tiles();
  /// Whether flush() does anything.
  static constexpr bool kFlushes = flushes();
  /// Whether a tile's sums and the next one's lie in one place, as classes D and F do.
  static constexpr bool kOnce = once();
  /// Whether the CTA computes a tile again, with another limit, if it has contributions beyond the limit, instead of
  /// adding these to memory one by one. CTAs that stay with a head do, as they have many tiles, where class F sums up
  /// all contributions in float.
  static constexpr bool kRepeats = Config::kKeeps && !Config::kFixedPoint && kCount > 0 && histograms_alone();

  __device__ __forceinline__ FlexBufferSums(const FlexBackwardArguments& a, const FlexSums* sums,
                                            const Captured& captured, char* shared)
      : a_(a), sums_(sums), captured_(captured), shared_(shared) {}

  /// Called by all threads before the first tile; a barrier must follow.
  __device__ __forceinline__ void begin() {
    for (int i = static_cast<int>(threadIdx.x); i < kSharedBytes / 4; i += kThreads)
      reinterpret_cast<int*>(shared_)[i] = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (Config::kFixedPoint && keeps_limit(k)) limit_[k] = limit_above(__float_as_int(*sums_[k].largest));
    }
    begin_head();
  }
  /// Where kRepeats, after a tile's flush(): whether the tile has to be repeated, since flush() added nothing. A
  /// barrier must lie between this, called by all threads, and next_limits(), and another one before the next tile.
  __device__ __forceinline__ bool must_repeat() const {
    bool some = false;
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      const int most = table<k>()[0], limit = table<k>()[1];
      some |= most >= limit && most != 0 && limit < kMostLimit;
    });
    return some;
  }
  /// Sets the limits of the next tile: each is at least twice the largest contribution of this tile and half of its
  /// limit.
  __device__ __forceinline__ void next_limits() const {
    if (threadIdx.x != 0) return;
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      constexpr int kTwice = 1 << 23;
      int &most = table<k>()[0], &limit = table<k>()[1];
      limit = max(min(limit_above(most) + kTwice, kMostLimit), limit - kTwice);
      most = 0;
    });
  }
  /// Called after the last tile of head h: if the CTA stores its sums, it stores the elements that they belong to.
  __device__ __forceinline__ void end_histograms(int h) const {
    if constexpr (kRepeats && Config::kPartialSums) {
      for_each_index<kCount>([&](auto index) {
        constexpr int k = decltype(index)::value;
        for (int i = static_cast<int>(threadIdx.x); i < Config::Schemes::kTable[k]; i += kThreads)
          sums_[k].elements[of_cta<k>(i)] = of_column<k>(0, h, i);
      });
    }
  }
  /// Called before the tiles of a query head.
  __device__ __forceinline__ void begin_head() {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      alone_[k] = 0.0f;
      diagonal_[k][0] = diagonal_[k][1] = above_[k] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kBlocksM; ++i) row_[k][i] = 0.0f;
    }
  }
  /// Called before a tile.
  __device__ __forceinline__ void begin_tile() {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
#pragma unroll
      for (int i = 0; i < kBlocksN * 2; ++i) col_[k][i] = 0.0f;
      largest_[k] = 0.0f;
      if constexpr (scheme(k) == 'F' && !Config::kFixedPoint) limit_[k] = table<k>()[1];
    });
  }

  /// Adds what the pair (m, n, e) contributes, `value` as Derivative::apply leaves it.
  template <class Reads = score_mod::ReadThere>
  __device__ __forceinline__ void add(const float* value, int m, int n, int e, float score, int b, int h, int q, int kv,
                                      bool takes_part, const Reads& of_pair = Reads()) {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      const float v = value[k];
      if constexpr (is_vector(k) || scheme(k) == 'T') {
        return;
      } else if constexpr (scheme(k) == 'A') {
        alone_[k] += v;
      } else if constexpr (scheme(k) == 'B') {
        row_[k][2 * m + e / 2] += v;
      } else if constexpr (scheme(k) == 'C') {
        col_[k][n * 2 + e % 2] += v;
      } else if constexpr (scheme(k) == 'D') {
        // 8 keys on, 8 queries back is the same diagonal.
        if (e < 2) {
          four_[k][e] = v;
        } else {
          diagonal_[k][e - 2] += v;
        }
      } else {
        four_[k][e] = v;
        const bool reads = kAllRead || takes_part;
        if constexpr (scheme(k) == 'F' && D::kColumn[k]) {
          at_[k][e] = D::template in_column<k>(captured_of<D>(captured_), score, b, h, q, kv, reads, of_pair);
        } else {
          const long long at = D::template offset<k>(captured_of<D>(captured_), score, b, h, q, kv, reads, of_pair);
          // Pairs that take no part have 0 too. What is stored has no zeros below.
          at_[k][e] = scheme(k) != 'S' && v == 0.0f ? -1 : at;
        }
      }
    });
    if constexpr (D::kVectors) {
      vectors_.set(e, value, score, q, kv);
      b_ = b;
      h_ = h;
    }
  }
  /// Called after the pairs of 16 keys and 8 queries.
  __device__ __forceinline__ void end_block(int m, int n, int b, int h) {
    if constexpr (kTeams == 1 && kHeld) hold_order();
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'D') {
        keep_diagonals<k>(m, n - 1);
        diagonal_[k][0] = four_[k][0];
        diagonal_[k][1] = four_[k][1];
        if (n + 1 == kBlocksN) {
          keep_diagonals<k>(m, n);
          diagonal_[k][0] = diagonal_[k][1] = 0.0f;
          keep_diagonals<k>(m, n + 1);
          if (lane() % 8 == 4) keep<k>(m, n + 1);
          above_[k] = 0.0f;
          if constexpr (kBlocksM > 1) __syncwarp();
        }
      } else if constexpr (scheme(k) > 'D' && scheme(k) != 'T' && !is_vector(k)) {
        // Added only now, so that reads of indices before are shared with the score_mod's.
        if constexpr (scheme(k) == 'F') {
          bool far = false;
#pragma unroll
          for (int e = 0; e < 4; ++e) far |= histogram<k>(static_cast<int>(at_[k][e]), four_[k][e]);
          if constexpr (!Config::kFixedPoint) {
            // Four pairs share a branch, since few contributions are beyond the limit.
            if (far) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int at = static_cast<int>(at_[k][e]);
                if (is_far<k>(at, four_[k][e])) put_histogram<k>(b, h, at, four_[k][e]);
              }
            }
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) put_if<k>(at_[k][e] >= 0, at_[k][e], four_[k][e]);
        }
      }
    });
    if constexpr (D::kVectors) vectors_.scatter(captured_, b_, h_, VectorPut{*this});
  }
  /// Called after the pairs of a tile.
  __device__ __forceinline__ void end_tile(int parity = 0) {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'C') {
        fold(col_[k], lane());
#pragma unroll
        for (int i = 0; i < (kBlocksN * 2 + 7) / 8; ++i) {
          const int j = fold_index<kBlocksN * 2>(i, lane());
          line<k>(warp(), parity)[j / 2 * 8 + lane() % 4 * 2 + j % 2] = col_[k][i];
        }
      } else if constexpr (scheme(k) == 'F' && !Config::kFixedPoint) {
        const unsigned most = __reduce_max_sync(~0u, __float_as_uint(largest_[k]));
        if (lane() == 0 && most != 0) atomicMax(reinterpret_cast<unsigned*>(table<k>()), most);
      }
    });
  }
  /// Called by a team's threads: adds the tile's sums to their elements. (q, kv): the tile's first pair.
  __device__ __forceinline__ void flush(int b, int h, int q, int kv, int parity = 0) {
    const int thread = static_cast<int>(threadIdx.x) % kTeamThreads, first = team() * kTeamWarps;
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'C') {
        for (int i = thread; i < Config::kRows; i += kTeamThreads) {
          float sum = 0.0f;
          // Each of kShare warps with the same keys has its own part of the queries.
#pragma unroll
          for (int w = 0; w < kTeamWarps / Config::kShare; ++w)
            sum += line<k>(first + w * Config::kShare + i / kCols, parity)[i % kCols];
          put_at<k>(b, h, q + i, 0, sum);
        }
      } else if constexpr (scheme(k) == 'D') {
        // Beyond the last diagonal sums are 0.
        constexpr bool kRepeats = D::kRepeats[k];
        constexpr int kAll = Config::kRows + kTeamKeys - 1, kPlaces = kRepeats ? round_up_to(kAll, kLanes) : kAll;
        for (int i = thread; i < kPlaces; i += kTeamThreads) {
          const int difference = i - (kTeamKeys - 1);  // of q and kv within the team's part of the tile
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kTeamWarps; ++w) {
            const int d = difference + w / Config::kShare * kKeys - w % Config::kShare * kCols + kKeys - 1;
            if (d < 0 || d >= kDiagonals) continue;
            float* of_warp = lines<k>(first + w) + d;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
              sum += of_warp[g * kLine];
              if constexpr (kBlocksM > 1) of_warp[g * kLine] = 0.0f;
            }
          }
          // The diagonal's representative lies in the tile, and so within the lengths if any pair of it does.
          const int down = difference < 0 ? -difference : 0;
          const int at_q = q + difference + down, at_kv = kv + team() * kTeamKeys + down;
          if constexpr (kRepeats) {
            put_run<k>(b, h, at_q, at_kv, sum);
          } else {
            put_at<k>(b, h, at_q, at_kv, sum);
          }
        }
      } else if constexpr (scheme(k) == 'F') {
        int* counts = table<k>() + 4;
        const bool adds = !kRepeats || !must_repeat();
        for (int i = thread; i < Config::Schemes::kTable[k]; i += kTeamThreads) {
          int &high = counts[i], &low = counts[Config::Schemes::kTable[k] + i];
          if constexpr (Config::kFixedPoint) {
            if ((high | low) != 0) put_fixed<k>(of_column<k>(b, h, i), joined(high, low));
          } else {
            const float sum = static_cast<float>(high) + static_cast<float>(low) * (1.0f / (1 << kFixedBits - 1));
            if (adds && sum != 0.0f) put_histogram<k>(b, h, i, sum * unit<k>());
          }
          high = low = 0;
        }
        if (!Config::kFixedPoint && !kRepeats && thread == 0) {
          const int most = table<k>()[0];
          if (most != 0 && most < kInfinite) table<k>()[1] = limit_above(most);
          table<k>()[0] = 0;
        }
      }
    });
  }
  /// Called after the tiles of a query head. kv: the thread's first key.
  __device__ __forceinline__ void end_head(int b, int h, int kv) {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'A') {
        float sum = alone_[k];
#pragma unroll
        for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        if (lane() == 0) put_of_head<k>(b, h, kv, sum);
      } else if constexpr (scheme(k) == 'B') {
#pragma unroll
        for (int r = 0; r < 2 * kBlocksM; ++r) {
          const float sum = row_sum(row_[k][r]);
          if (lane() % 4 == 0 && kv + 8 * r < a_.keys) put_of_head<k>(b, h, kv + 8 * r, sum);
        }
      }
    });
  }

 private:
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ int team() const { return kTeams == 1 ? 0 : warp() / kTeamWarps; }
  // A warp's line of class C, and its four lines of class D.
  template <int k>
  __device__ __forceinline__ float* line(int warp, int parity) const {
    return reinterpret_cast<float*>(shared_ + offset(k)) + (warp * kLines + (kLines == 1 ? 0 : parity)) * kCols;
  }
  template <int k>
  __device__ __forceinline__ float* lines(int warp) const {
    return reinterpret_cast<float*>(shared_ + offset(k)) + warp * 4 * kLine;
  }

  // A histogram of class F: the largest contribution of this tile and a limit for the next one, as bits of a float; two
  // unused words; the counts.
  template <int k>
  __device__ __forceinline__ int* table() const {
    return reinterpret_cast<int*>(shared_ + offset(k) +
                                  team() * CapturedMemory::histogram_bytes(Config::Schemes::kTable[k]));
  }

  // Class D. For 16 keys m and 8 queries a thread has two sums of two elements each, which fold them to 8 keys by 8
  // queries: row g, columns 2 * t and 2 * t + 1, on diagonals 8 * n + 2 * t - g and the next one. In rows 2 * i and
  // 2 * i + 1 one thread's second diagonal is another's first: after a shuffle both rows together have each of their
  // diagonals once, in a line.
  template <int k>
  __device__ __forceinline__ void keep_diagonals(int m, int n) {
    const int t = lane() % 4;
    const bool odd = lane() % 8 >= 4;
    const float sent = !odd && t == 3 ? above_[k] : diagonal_[k][1];
    const float received = __shfl_sync(~0u, sent, odd ? lane() - (t == 0 ? 1 : 5) : lane() + 4);
    // Stored a block later: the shuffle takes a while.
    if (n >= 0) keep<k>(m, n - 1);
    above_[k] = diagonal_[k][1];
    kept_[k][0] = diagonal_[k][0];
    kept_[k][1] = received;
  }
  template <int k>
  __device__ __forceinline__ void keep(int m, int n) {
    const int at = lane() / 8 * kLine + lane() % 4 * 2 - lane() / 4 + 15 + (kBlocksM - 1 - m) * 16 + n * 8;
    float& to = lines<k>(warp())[at];
    to = kBlocksM > 1 ? to + (kept_[k][0] + kept_[k][1]) : kept_[k][0] + kept_[k][1];
  }

  // Contributions as integers: in units of which the limit is 2^kFixedBits, and in fractions of a unit for the rest.
  // Class F sums both in shared memory, in 32 bits each. In float the unit follows from the largest contribution of the
  // tile before, and what lies beyond the limit is added directly, such as all of the first tile. In fixed point the
  // unit follows from the largest contribution of all. Where kRepeats, a tile with contributions beyond the limit is
  // computed again, so that a CTA's sums come in one order; only what is not finite is added directly.
  static constexpr int kFixedBits = kFlexFixedBits / 2;  // 2^14 pairs of a tile times 2^17 fit
  static_assert(kCount == 0 || Config::kRows * Config::kCols <= 1 << 14);
  static constexpr int kInfinite = 255 << 23, kMostLimit = 254 << 23;
  // A power of two above a contribution, unless that is infinite. Its unit and the unit's reciprocal are finite.
  static __device__ __forceinline__ int limit_above(int bits) {
    constexpr int kLeast = 27 << 23;
    return min(max((bits & kInfinite) + (1 << 23), kLeast), kMostLimit);
  }
  // The portable kernels have no register for what is needed once a tile, nor have those with several contributions.
  static __device__ constexpr bool keeps_limit(int k) { return scheme(k) > 'D' || (kLines == 2 && kCount == 1); }
  template <int k>
  __device__ __forceinline__ int limit() const {
    return keeps_limit(k) ? limit_[k] : limit_above(__float_as_int(*sums_[k].largest));
  }
  // The limit is 2^kFixedBits units, both powers of two; units in a contribution of 1.
  template <int k>
  __device__ __forceinline__ float unit() const {
    return __int_as_float(limit<k>()) * (1.0f / (1 << kFixedBits));
  }
  template <int k>
  __device__ __forceinline__ float scale() const {
    constexpr unsigned kScale = (254u + kFixedBits) << 23;  // bits of scale * limit, but for the bias of an exponent
    return __uint_as_float(kScale - static_cast<unsigned>(limit<k>()));
  }
  // The rest counts in 2^-rest_bits() of a unit.
  __device__ __forceinline__ int rest_bits() const {
    return Config::kFixedPoint ? a_.fixed_bits - kFixedBits : kFixedBits - 1;
  }
  __device__ __forceinline__ float rest_scale() const { return __int_as_float((127 + rest_bits()) << 23); }
  // Rounds by adding 1.5 * 2^23, where a float's unit is 1, since conversions are slow.
  template <int k>
  __device__ __forceinline__ void split(float v, int& units, int& rest) const {
    constexpr float kRound = 12582912.0f;
    constexpr int kBits = 0x4b400000;
    const float high = fmaf(v, scale<k>(), kRound), left = fmaf(v, scale<k>(), kRound - high);
    units = __float_as_int(high) - kBits;
    rest = __float_as_int(fmaf(left, rest_scale(), kRound)) - kBits;
  }
  __device__ __forceinline__ long long joined(int units, int rest) const {
    return static_cast<long long>(units) * (1 << rest_bits()) + rest;
  }
  // Where an element of a histogram is in the buffer.
  template <int k>
  __device__ __forceinline__ long long of_column(int b, int h, int i) const {
    if constexpr (D::kColumn[k]) return D::template of_column<k>(captured_of<D>(captured_), b, h, i);
    return i;
  }
  // The place of an element's sum among those that CTAs store.
  template <int k>
  __device__ __forceinline__ long long of_cta(int i) const {
    return static_cast<long long>(blockIdx.x) * Config::Schemes::kTable[k] + i;
  }
  // Adds to a histogram's element in memory, or to the CTA's own sum of it. One thread adds to that, and so in one
  // order; others add only what is not finite.
  template <int k>
  __device__ __forceinline__ void put_histogram(int b, int h, int i, float v) const {
    if constexpr (Config::kPartialSums) {
      static_assert(kRepeats);
      put<k>(of_cta<k>(i), v);
    } else {
      put<k>(of_column<k>(b, h, i), v);
    }
  }
  // The magnitude from which on contributions are added directly.
  template <int k>
  __device__ __forceinline__ float far_limit() const {
    return __int_as_float(kRepeats ? kInfinite : limit_[k]);
  }
  // Whether a contribution to an element of a histogram is beyond the limit.
  template <int k>
  __device__ __forceinline__ bool is_far(int at, float v) const {
    return !(fabsf(v) < far_limit<k>()) & (v != 0.0f) & (at >= 0);
  }
  // Returns whether it is beyond the limit, and so is not added.
  template <int k>
  __device__ __forceinline__ bool histogram(int at, float v) {
    const bool far = !Config::kFixedPoint && is_far<k>(at, v);
    bool near = at >= 0;
    if constexpr (!Config::kFixedPoint) {
      near &= fabsf(v) < far_limit<k>();
      if (!kRepeats || near) largest_[k] = fmaxf(largest_[k], fabsf(v));
    }
    // ptxas turns a predicated red.shared into a branch, so a contribution that is not added adds 0; one without a
    // place adds it to an element that differs from lane to lane.
    v = near ? v : 0.0f;
    at = at >= 0 ? at : lane();
    int units, rest;
    split<k>(v, units, rest);
    const unsigned to = shared_address(table<k>() + 4) + static_cast<unsigned>(at) * 4;
    add_shared(to, units);
    add_shared(to + Config::Schemes::kTable[k] * 4, rest);
    return far;
  }

  // Puts an element of a contribution by axes, for a thread's four pairs (kv, q) = (g + 8 * (e / 2), 2 * t + e % 2).
  struct VectorPut {
    const FlexBufferSums& sums;
    template <int k>
    __device__ __forceinline__ void put(const float (&value)[4], const long long (&place)[4]) const {
      const int lane = sums.lane();
      if constexpr (scheme(k) == 'a') {
        float sum = value[0] + value[1] + (value[2] + value[3]);
#pragma unroll
        for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        if (lane == 0) sums.template put_there<k>(place[0], sum);
      } else if constexpr (scheme(k) == 'b') {
        const float first = row_sum(value[0] + value[1]), second = row_sum(value[2] + value[3]);
        if (lane % 4 == 0) {
          sums.template put_there<k>(place[0], first);
          sums.template put_there<k>(place[2], second);
        }
      } else if constexpr (scheme(k) == 'c') {
        float of_query[2] = {value[0] + value[2], value[1] + value[3]};
        fold(of_query, lane);
        if ((lane & 12) == 0) sums.template put_there<k>(lane & 16 ? place[1] : place[0], of_query[0]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.template put_if<k>(value[e] != 0.0f && place[e] >= 0, place[e], value[e]);
      }
    }
  };
  template <int k>
  __device__ __forceinline__ void put_there(long long at, float sum) const {
    if (sum != 0.0f && at >= 0) put<k>(at, sum);
  }

  // Adds a contribution.
  template <int k>
  __device__ __forceinline__ void put_if(bool there, long long at, float v) const {
    if constexpr (scheme(k) == 'S') {
      if (there) device::store(static_cast<ElementOf<D, k>*>(sums_[k].data) + at, v);
    } else if constexpr (Config::kFixedPoint) {
      int units, rest;
      split<k>(v, units, rest);
      add_global_if(there, static_cast<unsigned long long*>(sums_[k].data) + at,
                    static_cast<unsigned long long>(joined(units, rest)));
    } else {
      add_global_if(there, static_cast<float*>(sums_[k].data) + at, v);
    }
  }
  // Adds a sum of contributions, which may be beyond the limit.
  template <int k>
  __device__ __forceinline__ void put(long long at, float v) const {
    if constexpr (Config::kFixedPoint) {
      // Two products, as that of the scales may overflow a float.
      put_fixed<k>(at, __float2ll_rn(v * scale<k>() * rest_scale()));
    } else {
      atomicAdd(static_cast<float*>(sums_[k].data) + at, v);
    }
  }
  template <int k>
  __device__ __forceinline__ void put_fixed(long long at, long long x) const {
    atomicAdd(static_cast<unsigned long long*>(sums_[k].data) + at, static_cast<unsigned long long>(x));
  }
  template <int k>
  __device__ __forceinline__ void put_at(int b, int h, int q, int kv, float sum) {
    if (sum == 0.0f) return;
    const long long at = D::template offset<k>(captured_of<D>(captured_), 0.0f, b, h, q, kv, true);
    if (at >= 0) put<k>(at, sum);
  }
  // The same, called by whole warps: where lanes side by side have one element, the first of them adds for all.
  // Additions to one place of memory come one after the other.
  template <int k>
  __device__ __forceinline__ void put_run(int b, int h, int q, int kv, float sum) {
    long long at = -1;
    if (sum != 0.0f) at = D::template offset<k>(captured_of<D>(captured_), 0.0f, b, h, q, kv, true);
    const long long before = __shfl_up_sync(~0u, at, 1);
    const unsigned firsts = __ballot_sync(~0u, lane() == 0 || before != at);
    // Lanes up to the next first one, or the warp's end.
    const int run = __ffs(static_cast<int>(firsts >> lane() >> 1 | 1u << (kLanes - 1 - lane())));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float further = __shfl_down_sync(~0u, sum, step);
      if (step < run) sum += further;
    }
    if ((firsts >> lane() & 1) != 0 && at >= 0) put<k>(at, sum);
  }
  // Adds the sum over a head's queries, which the thread has for this key alone.
  template <int k>
  __device__ __forceinline__ void put_of_head(int b, int h, int kv, float sum) {
    if constexpr (Config::kPartialSums) {
      if (sum == 0.0f) return;
      const long long at = D::template offset<k>(captured_of<D>(captured_), 0.0f, b, h, 0, kv, true);
      if (at < 0) return;
      const int keys = (a_.keys + Config::kCols - 1) / Config::kCols * Config::kCols;
      const long long part = static_cast<long long>(b * a_.heads + h) * Config::kShare + warp() % Config::kShare;
      static_cast<float*>(sums_[k].data)[part * keys + kv] = sum;
      sums_[k].elements[part * keys + kv] = at;
    } else {
      put_at<k>(b, h, 0, kv, sum);
    }
  }

  const FlexBackwardArguments& a_;
  const FlexSums* sums_;
  const Captured& captured_;
  char* shared_;
  float alone_[kCount + 1], row_[kCount + 1][2 * kBlocksM], col_[kCount + 1][kBlocksN * 2], largest_[kCount + 1];
  int limit_[kCount + 1];                                // bits of a float
  float diagonal_[kCount + 1][2], four_[kCount + 1][4];  // for pairs of 16 keys and 8 queries
  float above_[kCount + 1], kept_[kCount + 1][2];
  long long at_[kCount + 1][4];
  FlexVectorPairs<Config> vectors_;
  int b_, h_;
};

}  // namespace fusegrad::device
