// What a score_mod reads for each pair as an index of a table, from a copy in the order of threads (place_order.cuh): a
// thread loads all of a tile at once, and keeps it in registers. Read one by one each would take an address, a sector
// of memory for a few bytes, and a wait.
#pragma once

#include "cuda/attention/captured/place_order.cuh"
#include "cuda/attention/device/scores.cuh"

namespace fusegrad::device {

/// Config::kPlaces has of each of the score_mod's pair_reads the bytes of an element, or 0 where there is no copy.
template <class Config>
constexpr bool kHasPlaces = [] {
  bool some = false;
  for (int k = 0; k < Config::ScoreMod::kPairCount; ++k) some = some || Config::kPlaces[k] > 0;
  return some;
}();

template <class Config, bool kUsed = kHasPlaces<Config>>
class PairPlaces {
  using Mod = typename Config::ScoreMod;
  static constexpr int kEach = kPlaceTile * kPlaceTile / kPlaceThreads;  // pairs of a thread
  static __device__ constexpr int vectors(int k) { return kEach * Config::kPlaces[k] / 16; }
  static __device__ constexpr int before(int k) {
    int count = 0;
    for (int i = 0; i < k; ++i) count += vectors(i);
    return count;
  }
  template <int k = 0>
  __device__ __forceinline__ void load_from(const typename Mod::Captured& captured, int b, int h) {
    if constexpr (k < Mod::kPairCount) {
      if constexpr (there(k)) {
        const char* tile = Mod::template pair_row<k>(captured, b, h, 0, true).data;
#pragma unroll
        for (int i = 0; i < vectors(k); ++i) {
          uint4& vector = vector_[before(k) + i];
          vector = {0, 0, 0, 0};
          if (tile != nullptr)
            vector = __ldg(reinterpret_cast<const uint4*>(tile) + i * kPlaceThreads + static_cast<int>(threadIdx.x));
        }
      }
      load_from<k + 1>(captured, b, h);
    }
  }

 public:
  static __device__ constexpr bool there(int k) { return Config::kPlaces[k] > 0; }

  /// Those of a (b, h); nothing waits here.
  __device__ __forceinline__ void load(const typename Mod::Captured& captured, int b, int h) {
    load_from(captured, b, h);
  }

  /// The indices of a block's four pairs.
  struct Reads {
    const PairPlaces& places;
    int block;
    template <int k>
    __device__ __forceinline__ int read(int e) const {
      constexpr int kBytes = Config::kPlaces[k], kOfWord = 4 / kBytes;
      const int i = block * 4 + e, which = i % (16 / kBytes) / kOfWord;
      const uint4& vector = places.vector_[before(k) + i / (16 / kBytes)];
      const unsigned word = which == 0 ? vector.x : which == 1 ? vector.y : which == 2 ? vector.z : vector.w;
      if constexpr (kBytes == 1) return static_cast<signed char>(word >> i % kOfWord * 8);
      if constexpr (kBytes == 2) return static_cast<short>(word >> i % kOfWord * 16);
      return static_cast<int>(word);
    }
  };
  __device__ __forceinline__ Reads reads(int block) const { return {*this, block}; }

 private:
  uint4 vector_[before(Mod::kPairCount)];
};

template <class Config>
class PairPlaces<Config, false> {
 public:
  static __device__ constexpr bool there(int) { return false; }
  __device__ __forceinline__ void load(const typename Config::ScoreMod::Captured&, int, int) const {}
  struct Reads {};
  __device__ __forceinline__ Reads reads(int) const { return {}; }
};

}  // namespace fusegrad::device
