// What a score_mod reads of small tables at places that other reads give, such as `t[bucket[b, q, k], h]`: the column
// of the table that a head reaches lies in shared memory. Read from where it is, each pair would take a sector of 32
// bytes of its own.
#pragma once

#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/device/shared_memory.cuh"

namespace fusegrad::device {

/// Config::kColumns has of each of the score_mod's pair_reads the elements that its column may have, or 0. A column
/// lies twice in shared memory, so that places from -size to size - 1 need no test of their sign, with NaN behind for
/// all others.
template <class Config>
class PairColumns {
  using Mod = typename Config::ScoreMod;
  static __device__ constexpr int offset(int k) {
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += column_bytes(Config::kColumns[i]);
    return sum;
  }
  template <int kValue>
  struct Number {
    static constexpr int value = kValue;
  };
  template <int k = 0, class F>
  static __device__ __forceinline__ void for_each_column(const F& f) {
    if constexpr (k < Mod::kPairCount) {
      if constexpr (there(k)) f(Number<k>());
      for_each_column<k + 1>(f);
    }
  }

 public:
  static __device__ constexpr bool there(int k) { return Config::kColumns[k] > 0; }
  static constexpr int kBytes = offset(Mod::kPairCount);

  /// Called by kThreads threads, which meet before any reads: loads the columns of head h.
  template <int kThreads>
  static __device__ __forceinline__ void load(unsigned to, const typename Mod::Captured& captured, int h, int thread) {
    for_each_column([&](auto column) {
      constexpr int k = decltype(column)::value;
      const int size = Mod::template pair_column_size<k>(captured);
      for (int i = thread; i <= 2 * size; i += kThreads) {
        const float x = i < 2 * size ? Mod::template pair_column<k>(captured, h, i < size ? i : i - size)
                                     : __int_as_float(0x7fffffff);
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + offset(k) + 4 * i), "f"(x) : "memory");
      }
    });
  }
  /// The element at a place of column k, of `size` elements.
  template <int k>
  static __device__ __forceinline__ float read(unsigned columns, int at, int size) {
    const unsigned i = min(static_cast<unsigned>(at) + static_cast<unsigned>(size), 2 * static_cast<unsigned>(size));
    return load_shared<float>(columns + offset(k) + 4 * i);
  }
};

}  // namespace fusegrad::device
