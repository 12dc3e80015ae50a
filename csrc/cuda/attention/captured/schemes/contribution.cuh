// What the schemes of contributions have in common: the warps' parts of a tile, and how numbers are added to the
// elements of a captured buffer's gradient.
#pragma once

#include "cuda/attention/captured/scheme.cuh"
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
using ElementOf =
    decltype(element_of<Derivative::kContribution[k].element_bytes, Derivative::kContribution[k].bfloat16>());

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

/// What all contributions of a kernel have in common. kTeams, kLines: FlexBufferSums.
template <class TheConfig, int kTheTeams, int kTheLines>
struct Contributions {
  using Config = TheConfig;
  using Derivative = typename Config::Derivative;
  using Captured = typename Config::ScoreMod::Captured;
  static constexpr int kCount = Derivative::kContributions, kTeams = kTheTeams, kLines = kTheLines;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kCols = Config::kRows / Config::kShare;  // queries of a warp's part
  static constexpr int kBlocksM = Config::kCols * Config::kShare / Config::kWarps / 16, kKeys = 16 * kBlocksM;
  static constexpr int kBlocksN = kCols / 8;
  static constexpr int kTeamWarps = Config::kWarps / kTeams, kTeamThreads = kLanes * kTeamWarps;
  static constexpr int kTeamKeys = Config::kCols / kTeams;
  static constexpr CapturedMemory kMemory{
      .warps = Config::kWarps, .teams = kTeams, .sets = kLines, .queries = kCols, .keys = kKeys};
  static_assert(kLines == 1 || kBlocksM == 1);
  static_assert(kCount == 0 || Config::kRows * Config::kCols <= 1 << 14);

  static __device__ constexpr Scheme scheme(int k) { return Config::Schemes::kScheme[k]; }
  static __device__ constexpr int bytes(int k) { return kMemory.bytes(scheme(k), Config::Schemes::kTable[k]); }
  static __device__ constexpr int offset(int k) {
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += bytes(i);
    return sum;
  }
  static __device__ constexpr bool all_are(Scheme one) {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) != one) return false;
    }
    return true;
  }
  static __device__ constexpr bool some_is(Scheme one) {
    for (int k = 0; k < kCount; ++k) {
      if (scheme(k) == one) return true;
    }
    return false;
  }
  /// FlexBufferSums::kRepeats.
  static constexpr bool kRepeats = Config::kKeeps && !Config::kFixedPoint && kCount > 0 && all_are(Scheme::kSmallTable);

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kLanes; }
  static __device__ __forceinline__ int team() { return kTeams == 1 ? 0 : warp() / kTeamWarps; }
};

/// The sums of contribution k: what a scheme does at each of these moments, by default nothing. FlexBufferSums says
/// when they are.
///
/// Contributions as integers (kFixedPoint, kSmallTable): in units of which the limit is 2^kFixedBits, and in fractions
/// of a unit for the rest. In fixed point the unit follows from the largest contribution of all.
template <class Of, int k>
class Contribution {
 protected:
  using Config = typename Of::Config;
  using Derivative = typename Of::Derivative;
  using Captured = typename Of::Captured;

 public:
  static constexpr int kIndex = k;

  __device__ __forceinline__ Contribution(const FlexBackwardArguments& a, const FlexSums* sums,
                                          const Captured& captured, char* shared)
      : a_(a), to_(sums[k]), captured_(captured), shared_(shared + Of::offset(k)) {}

  __device__ __forceinline__ void begin() {
    if (Config::kFixedPoint && keeps_limit()) limit_ = limit_above(__float_as_int(*to_.largest));
  }
  __device__ __forceinline__ void begin_head() {}
  __device__ __forceinline__ void begin_tile() {}
  template <class Reads>
  __device__ __forceinline__ void add(float, int, int, int, float, int, int, int, int, bool, const Reads&) {}
  __device__ __forceinline__ void end_block(int, int, int, int) {}
  __device__ __forceinline__ void end_tile(int) {}
  __device__ __forceinline__ void flush(int, int, int, int, int, bool) {}
  __device__ __forceinline__ void end_head(int, int, int) {}
  __device__ __forceinline__ void end_batches(int, int, int) const {}

 protected:
  static constexpr int kFixedBits = kFlexFixedBits / 2;  // 2^14 pairs of a tile times 2^17 fit
  static constexpr int kInfinite = 255 << 23, kMostLimit = 254 << 23;
  static __device__ __forceinline__ int lane() { return Of::lane(); }

  // A power of two above a contribution, unless that is infinite. Its unit and the unit's reciprocal are finite.
  static __device__ __forceinline__ int limit_above(int bits) {
    constexpr int kLeast = 27 << 23;
    return min(max((bits & kInfinite) + (1 << 23), kLeast), kMostLimit);
  }
  // The portable kernels have no register for what is needed once a tile, nor have those with several contributions.
  static __device__ constexpr bool keeps_limit() {
    return !(sums_in_registers(Of::scheme(k)) || Of::scheme(k) == Scheme::kDiagonal) ||
           (Of::kLines == 2 && Of::kCount == 1);
  }
  __device__ __forceinline__ int limit() const {
    return keeps_limit() ? limit_ : limit_above(__float_as_int(*to_.largest));
  }
  // The limit is 2^kFixedBits units, both powers of two; units in a contribution of 1.
  __device__ __forceinline__ float unit() const { return __int_as_float(limit()) * (1.0f / (1 << kFixedBits)); }
  __device__ __forceinline__ float scale() const {
    constexpr unsigned kScale = (254u + kFixedBits) << 23;  // bits of scale * limit, but for the bias of an exponent
    return __uint_as_float(kScale - static_cast<unsigned>(limit()));
  }
  // The rest counts in 2^-rest_bits() of a unit.
  __device__ __forceinline__ int rest_bits() const {
    return Config::kFixedPoint ? a_.fixed_bits - kFixedBits : kFixedBits - 1;
  }
  __device__ __forceinline__ float rest_scale() const { return __int_as_float((127 + rest_bits()) << 23); }
  // Rounds by adding 1.5 * 2^23, where a float's unit is 1, since conversions are slow.
  __device__ __forceinline__ void split(float v, int& units, int& rest) const {
    constexpr float kRound = 12582912.0f;
    constexpr int kBits = 0x4b400000;
    const float high = fmaf(v, scale(), kRound), left = fmaf(v, scale(), kRound - high);
    units = __float_as_int(high) - kBits;
    rest = __float_as_int(fmaf(left, rest_scale(), kRound)) - kBits;
  }
  __device__ __forceinline__ long long joined(int units, int rest) const {
    return static_cast<long long>(units) * (1 << rest_bits()) + rest;
  }

  /// The place of a pair's contribution; less than 0: nowhere.
  __device__ __forceinline__ long long place_of(int b, int h, int q, int kv) const {
    return Derivative::template offset<k>(captured_of<Derivative>(captured_), 0.0f, b, h, q, kv, true);
  }
  // Adds a contribution.
  __device__ __forceinline__ void put_if(bool there, long long at, float v) const {
    if constexpr (Config::kFixedPoint) {
      int units, rest;
      split(v, units, rest);
      add_global_if(there, static_cast<unsigned long long*>(to_.data) + at,
                    static_cast<unsigned long long>(joined(units, rest)));
    } else {
      add_global_if(there, static_cast<float*>(to_.data) + at, v);
    }
  }
  // Adds a sum of contributions, which may be beyond the limit.
  __device__ __forceinline__ void put(long long at, float v) const {
    if constexpr (Config::kFixedPoint) {
      // Two products, as that of the scales may overflow a float.
      put_fixed(at, __float2ll_rn(v * scale() * rest_scale()));
    } else {
      atomicAdd(static_cast<float*>(to_.data) + at, v);
    }
  }
  __device__ __forceinline__ void put_fixed(long long at, long long x) const {
    atomicAdd(static_cast<unsigned long long*>(to_.data) + at, static_cast<unsigned long long>(x));
  }
  __device__ __forceinline__ void put_at(int b, int h, int q, int kv, float sum) const {
    if (sum == 0.0f) return;
    const long long at = place_of(b, h, q, kv);
    if (at >= 0) put(at, sum);
  }

  const FlexBackwardArguments& a_;
  const FlexSums& to_;
  const Captured& captured_;
  char* const shared_;  // the scheme's own part
  int limit_;           // bits of a float
};

/// The class of a scheme; in this file that of kStoredTiles, whose contributions the kernel stores itself.
template <class Of, int k, Scheme kScheme = Of::scheme(k)>
class SchemeSums : public Contribution<Of, k> {
  static_assert(kScheme == Scheme::kStoredTiles);

 public:
  using Contribution<Of, k>::Contribution;
};

}  // namespace fusegrad::device
