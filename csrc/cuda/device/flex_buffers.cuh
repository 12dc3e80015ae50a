// The gradients of captured buffers: how the contributions of a tile's pairs get to their places. One scheme for each
// class of the planner (csrc/score_mod/scatter_plan.h); docs/score_mod.md explains the classes.
//
// Of a warp's part of the tile a thread has the pairs (kv, q) = (16 * m + g + 8 * (e / 2), 8 * n + 2 * t + e % 2) for m
// below kBlocksM, n below kBlocksN and e below 4: keys are rows here. Config (flex_scores.cuh) also says:
//   Derivative                 the rendered derivative
//   Schemes::kScheme[]         the class of each contribution
//   Schemes::kTable[]          the elements of a buffer of class F
//   kFixedPoint                sums are 64-bit integers, the same in every order
#pragma once

#include "cuda/device/flex_scores.cuh"

namespace fusegrad::device {

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

/// The factor of fixed point, a power of two in double since it may be beyond float's range: 2^bits / largest and a
/// little less.
__device__ __forceinline__ double fixed_scale(float largest, int bits) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 255) - 127;
  return __longlong_as_double(static_cast<long long>(1023 + bits - exponent - 1) << 52);
}

/// All threads of the CTA add up.
struct AllThreads {
  static __device__ __forceinline__ void synchronize() { __syncthreads(); }
};

/// Threads: the barrier of those that add up, the first kWarps warps.
template <class Config, class Threads = AllThreads>
class FlexBufferSums {
  using D = typename Config::Derivative;
  using Captured = typename Config::ScoreMod::Captured;
  static constexpr int kCount = D::kContributions;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kCols = Config::kRows / Config::kShare;  // queries of a warp's part
  static constexpr int kBlocksM = Config::kCols * Config::kShare / Config::kWarps / 16, kKeys = 16 * kBlocksM;
  static constexpr int kBlocksN = kCols / 8;
  static constexpr int kPatchCols = kCols < 32 ? kCols : 32;
  static constexpr int kPatchStride = kPatchCols + 8;
  static constexpr int kDiagonals = kCols + kKeys - 1;    // of a warp's part
  static constexpr int kLine = (kDiagonals + 3) / 4 * 4;  // floats
  static __device__ constexpr char scheme(int k) { return Config::Schemes::kScheme[k]; }

  // Of a histogram's element: 64-bit fixed point, or 32 bits and another 32 for what they leave.
  static constexpr int kCountBytes = 8;

  // Bytes of shared memory that a contribution takes.
  static __device__ constexpr int bytes(int k) {
    if (scheme(k) == 'C') return Config::kWarps * kCols * 4;
    if (scheme(k) == 'D') return Config::kWarps * (kLine + 16 * kPatchStride) * 4;
    if (scheme(k) == 'F') return 16 + (Config::Schemes::kTable[k] * kCountBytes + 15) / 16 * 16;
    return 0;
  }
  static __device__ constexpr int offset(int k) {
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += bytes(i);
    return sum;
  }
  static __device__ constexpr bool flushes() {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) == 'C' || scheme(k) == 'D' || (scheme(k) == 'F' && !Config::kFixedPoint)) return true;
    }
    return false;
  }

 public:
  static constexpr int kSharedBytes = offset(kCount);
  /// Whether flush() does anything.
  static constexpr bool kFlushes = flushes();

  __device__ __forceinline__ FlexBufferSums(const FlexBackwardArguments& a, const FlexSums* sums,
                                            const Captured& captured, char* shared)
      : a_(a), sums_(sums), captured_(captured), shared_(shared) {}

  /// Before the first tile, by all threads; a barrier must follow.
  __device__ __forceinline__ void begin() {
    for (int i = static_cast<int>(threadIdx.x); i < kSharedBytes / 4; i += kThreads)
      reinterpret_cast<int*>(shared_)[i] = 0;
    begin_head();
  }
  /// Before the tiles of a query head.
  __device__ __forceinline__ void begin_head() {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      alone_[k] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kBlocksM; ++i) row_[k][i] = 0.0f;
    }
  }
  /// Before a tile. (q, kv): of the thread's first pair.
  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      largest_[k] = 0.0f;
#pragma unroll
      for (int i = 0; i < kBlocksN * 2; ++i) col_[k][i] = 0.0f;
    }
  }

  /// What the pair (m, n, e) contributes, `value` as Derivative::apply leaves it.
  __device__ __forceinline__ void add(const float* value, int m, int n, int e, float score, int b, int h, int q, int kv,
                                      bool takes_part) {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      const float v = value[k];
      if constexpr (scheme(k) == 'A') {
        alone_[k] += v;
      } else if constexpr (scheme(k) == 'B') {
        row_[k][2 * m + e / 2] += v;
      } else if constexpr (scheme(k) == 'C') {
        col_[k][n * 2 + e % 2] += v;
      } else if constexpr (scheme(k) == 'D') {
        patch<k>()[(lane() / 4 + e / 2 * 8) * kPatchStride + (n * 8) % kPatchCols + lane() % 4 * 2 + e % 2] = v;
      } else {
        const long long at = D::template offset<k>(captured_of<D>(captured_), score, b, h, q, kv, takes_part);
        if (at < 0 || v == 0.0f) return;
        if constexpr (scheme(k) == 'F') {
          histogram<k>(static_cast<int>(at), v);
        } else {
          put<k>(at, v);
        }
      }
    });
  }
  /// After the pairs of 16 keys and 8 queries.
  __device__ __forceinline__ void end_block(int m, int n) {
    if ((n + 1) * 8 % kPatchCols != 0) return;
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'D') sum_diagonals<k>((n + 1) * 8 - kPatchCols + (kBlocksM - 1 - m) * 16);
    });
  }
  /// After the pairs of a tile; a barrier must follow before flush.
  __device__ __forceinline__ void end_tile() {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'C') {
        fold(col_[k], lane());
#pragma unroll
        for (int i = 0; i < (kBlocksN * 2 + 7) / 8; ++i) {
          const int j = fold_index<kBlocksN * 2>(i, lane());
          line<k>()[warp() * kCols + j / 2 * 8 + lane() % 4 * 2 + j % 2] = col_[k][i];
        }
      } else if constexpr (scheme(k) == 'F' && !Config::kFixedPoint) {
        const unsigned most = __reduce_max_sync(~0u, __float_as_uint(largest_[k]));
        if (lane() == 0 && most != 0) atomicMax(reinterpret_cast<unsigned*>(shared_ + offset(k)), most);
      }
    });
  }
  /// The tile's sums to their places, by all threads between two barriers. (q, kv): of the tile.
  __device__ __forceinline__ void flush(int b, int h, int q, int kv) {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'C') {
        for (int i = static_cast<int>(threadIdx.x); i < Config::kRows; i += kThreads) {
          float sum = 0.0f;
          // Of kShare warps with the same keys each has its own part of the queries.
#pragma unroll
          for (int w = 0; w < Config::kWarps / Config::kShare; ++w) {
            sum += line<k>()[(w * Config::kShare + i / kCols) * kCols + i % kCols];
          }
          put_at<k>(b, h, q + i, 0, sum);
        }
      } else if constexpr (scheme(k) == 'D') {
        constexpr int kAll = Config::kRows + Config::kCols - 1;
        for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
          const int difference = i - (Config::kCols - 1);  // of q and kv within the tile
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < Config::kWarps; ++w) {
            const int d = difference + w / Config::kShare * kKeys - w % Config::kShare * kCols + kKeys - 1;
            if (d >= 0 && d < kDiagonals) {
              sum += line<k>()[w * kLine + d];
              line<k>()[w * kLine + d] = 0.0f;
            }
          }
          // The diagonal's representative lies in the tile, and so within the lengths if any pair of it does.
          const int down = difference < 0 ? -difference : 0;
          put_at<k>(b, h, q + difference + down, kv + down, sum);
        }
      } else if constexpr (scheme(k) == 'F' && !Config::kFixedPoint) {
        auto* shared = reinterpret_cast<unsigned*>(shared_ + offset(k));
        const float unit = this->unit<k>();
        int* counts = table<k>();
        for (int i = static_cast<int>(threadIdx.x); i < Config::Schemes::kTable[k]; i += kThreads) {
          int &high = counts[i], &low = counts[Config::Schemes::kTable[k] + i];
          const float sum = static_cast<float>(high) + static_cast<float>(low) * (1.0f / (1 << kFixedBits - 1));
          high = low = 0;
          if (sum != 0.0f) put<k>(i, sum * unit);
        }
        // Who has read the limit may not see it change.
        Threads::synchronize();
        if (threadIdx.x == 0) {
          if (shared[0] != 0) shared[1] = __float_as_uint(2.0f * __uint_as_float(shared[0]));
          shared[0] = 0;
        }
      }
    });
  }
  /// After the tiles of a query head. (q, kv): any query of it, and the thread's first key.
  __device__ __forceinline__ void end_head(int b, int h, int kv) {
    for_each_index<kCount>([&](auto index) {
      constexpr int k = decltype(index)::value;
      if constexpr (scheme(k) == 'A') {
        float sum = alone_[k];
#pragma unroll
        for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        if (lane() == 0) put_at<k>(b, h, 0, 0, sum);
      } else if constexpr (scheme(k) == 'B') {
#pragma unroll
        for (int r = 0; r < 2 * kBlocksM; ++r) {
          const float sum = row_sum(row_[k][r]);
          if (lane() % 4 == 0 && kv + 8 * r < a_.keys) put_at<k>(b, h, 0, kv + 8 * r, sum);
        }
      }
    });
  }
  /// After everything; by all threads after a barrier.
  __device__ __forceinline__ void end() {
    if constexpr (Config::kFixedPoint) {
      for_each_index<kCount>([&](auto index) {
        constexpr int k = decltype(index)::value;
        if constexpr (scheme(k) == 'F') {
          const auto* counts = reinterpret_cast<const unsigned long long*>(shared_ + offset(k) + 16);
          for (int i = static_cast<int>(threadIdx.x); i < Config::Schemes::kTable[k]; i += kThreads) {
            if (counts[i] != 0) atomicAdd(static_cast<unsigned long long*>(sums_[k].data) + i, counts[i]);
          }
        }
      });
    }
  }

 private:
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kLanes; }
  template <int k>
  __device__ __forceinline__ float* line() const {
    return reinterpret_cast<float*>(shared_ + offset(k));
  }
  template <int k>
  __device__ __forceinline__ float* patch() const {
    return line<k>() + Config::kWarps * kLine + warp() * 16 * kPatchStride;
  }
  template <int k>
  __device__ __forceinline__ int* table() const {
    return reinterpret_cast<int*>(shared_ + offset(k) + 16);
  }

  // The warp's patch of 16 keys and kPatchCols queries along its diagonals, the first of which is its diagonal `first`.
  template <int k>
  __device__ __forceinline__ void sum_diagonals(int first) {
    __syncwarp();
    const float* p = patch<k>();
#pragma unroll
    for (int i = 0; i < (kPatchCols + 15 + kLanes - 1) / kLanes; ++i) {
      const int d = i * kLanes + lane();
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        const int col = d - 15 + r;
        if (col >= 0 && col < kPatchCols) sum += p[r * kPatchStride + col];
      }
      if (d < kPatchCols + 15) line<k>()[warp() * kLine + first + d] += sum;
    }
    __syncwarp();
  }

  // Class F in float: a histogram in shared memory of 32-bit fixed point, whose unit goes by the largest contribution
  // of the tile before. What lies beyond goes to its place directly: all of the first tile.
  static constexpr int kFixedBits = 17;  // 2^14 pairs of a tile times 2^17 fit
  static_assert(Config::kRows * Config::kCols <= 1 << 14);
  template <int k>
  __device__ __forceinline__ float limit() const {
    return __uint_as_float(reinterpret_cast<const volatile unsigned*>(shared_ + offset(k))[1]);
  }
  template <int k>
  __device__ __forceinline__ float unit() const {
    return limit<k>() * (1.0f / (1 << kFixedBits));
  }
  template <int k>
  __device__ __forceinline__ void histogram(int at, float v) {
    if constexpr (Config::kFixedPoint) {
      auto* counts = reinterpret_cast<unsigned long long*>(shared_ + offset(k) + 16);
      atomicAdd(counts + at, static_cast<unsigned long long>(fixed<k>(v)));
    } else {
      largest_[k] = fmaxf(largest_[k], fabsf(v));
      const float limit = this->limit<k>();
      if (fabsf(v) < limit) {
        const float scaled = v * ((1 << kFixedBits) / limit);
        const int count = __float2int_rn(scaled);
        atomicAdd(table<k>() + at, count);
        const float rest = scaled - static_cast<float>(count);
        atomicAdd(table<k>() + Config::Schemes::kTable[k] + at, __float2int_rn(rest * (1 << kFixedBits - 1)));
      } else {
        put<k>(at, v);
      }
    }
  }

  template <int k>
  __device__ __forceinline__ long long fixed(float v) const {
    return __double2ll_rn(static_cast<double>(v) * fixed_scale(*sums_[k].largest, a_.fixed_bits));
  }
  template <int k>
  __device__ __forceinline__ void put(long long at, float v) {
    if constexpr (Config::kFixedPoint) {
      atomicAdd(static_cast<unsigned long long*>(sums_[k].data) + at, static_cast<unsigned long long>(fixed<k>(v)));
    } else {
      atomicAdd(static_cast<float*>(sums_[k].data) + at, v);
    }
  }
  template <int k>
  __device__ __forceinline__ void put_at(int b, int h, int q, int kv, float sum) {
    if (sum == 0.0f) return;
    const long long at = D::template offset<k>(captured_of<D>(captured_), 0.0f, b, h, q, kv, true);
    if (at >= 0) put<k>(at, sum);
  }

  const FlexBackwardArguments& a_;
  const FlexSums* sums_;
  const Captured& captured_;
  char* shared_;
  float alone_[kCount + 1], row_[kCount + 1][2 * kBlocksM], col_[kCount + 1][kBlocksN * 2], largest_[kCount + 1];
};

}  // namespace fusegrad::device
