// Class F: a histogram of a small table, or of the column of one that a head reaches, in shared memory, in 32 bits each
// of units and of the rest (Contribution).
//
// In float the unit follows from the largest contribution of the tile before, and what lies beyond the limit is added
// to memory directly, such as all of the first tile. Where kRepeats, a tile with contributions beyond the limit is
// computed again, so that a CTA's sums come in one order; only what is not finite is added directly.
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

__device__ __forceinline__ void add_shared(unsigned address, int x) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

template <class Of, int k>
class SchemeSums<Of, k, Scheme::kSmallTable> : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;
  using Base::captured_, Base::kFixedBits, Base::kInfinite, Base::kMostLimit, Base::lane, Base::limit_,
      Base::limit_above;
  using typename Base::Config, typename Base::Derivative;
  static constexpr int kElements = Config::Schemes::kTable[k];
  static constexpr bool kRepeats = Of::kRepeats;

 public:
  using Base::Base;

  /// Where kRepeats: whether a tile is to be computed again, because it had contributions beyond the limit.
  __device__ __forceinline__ bool must_repeat() const {
    const int most = table()[0], limit = table()[1];
    return most >= limit && most != 0 && limit < kMostLimit;
  }
  /// Called by one thread: sets the limit of the next tile, at least twice the largest contribution of this tile and
  /// half of its limit.
  __device__ __forceinline__ void next_limit() const {
    constexpr int kTwice = 1 << 23;
    int &most = table()[0], &limit = table()[1];
    limit = max(min(limit_above(most) + kTwice, kMostLimit), limit - kTwice);
    most = 0;
  }
  /// Stores the elements that the CTA's sums belong to.
  __device__ __forceinline__ void store_elements(int h) const {
    for (int i = static_cast<int>(threadIdx.x); i < kElements; i += Of::kThreads)
      Base::to_.elements[of_cta(i)] = of_column(0, h, i);
  }

  __device__ __forceinline__ void begin_tile() {
    largest_ = 0.0f;
    if constexpr (!Config::kFixedPoint) limit_ = table()[1];
  }
  template <class Reads>
  __device__ __forceinline__ void add(float v, int, int, int e, float score, int b, int h, int q, int kv,
                                      bool takes_part, const Reads& of_pair) {
    value_[e] = v;
    const bool reads = kAllRead<typename Of::Config> || takes_part;
    if constexpr (Derivative::kContribution[k].column) {
      at_[e] =
          Derivative::template in_column<k>(captured_of<Derivative>(captured_), score, b, h, q, kv, reads, of_pair);
    } else {
      const long long at =
          Derivative::template offset<k>(captured_of<Derivative>(captured_), score, b, h, q, kv, reads, of_pair);
      // Pairs that take no part have 0 too.
      at_[e] = v == 0.0f ? -1 : at;
    }
  }
  // Added only now, so that reads of indices before are shared with the score_mod's.
  __device__ __forceinline__ void end_block(int, int, int b, int h) {
    bool far = false;
#pragma unroll
    for (int e = 0; e < 4; ++e) far |= count(static_cast<int>(at_[e]), value_[e]);
    if constexpr (!Config::kFixedPoint) {
      // Four pairs share a branch, since few contributions are beyond the limit.
      if (far) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = static_cast<int>(at_[e]);
          if (is_far(at, value_[e])) put_element(b, h, at, value_[e]);
        }
      }
    }
  }
  __device__ __forceinline__ void end_tile(int) {
    if constexpr (!Config::kFixedPoint) {
      const unsigned most = __reduce_max_sync(~0u, __float_as_uint(largest_));
      if (lane() == 0 && most != 0) atomicMax(reinterpret_cast<unsigned*>(table()), most);
    }
  }
  __device__ __forceinline__ void flush(int b, int h, int, int, int, bool again) {
    const int thread = static_cast<int>(threadIdx.x) % Of::kTeamThreads;
    int* counts = table() + 4;
    for (int i = thread; i < kElements; i += Of::kTeamThreads) {
      int &high = counts[i], &low = counts[kElements + i];
      if constexpr (Config::kFixedPoint) {
        if ((high | low) != 0) Base::put_fixed(of_column(b, h, i), Base::joined(high, low));
      } else {
        const float sum = static_cast<float>(high) + static_cast<float>(low) * (1.0f / (1 << kFixedBits - 1));
        if (!again && sum != 0.0f) put_element(b, h, i, sum * Base::unit());
      }
      high = low = 0;
    }
    if (!Config::kFixedPoint && !kRepeats && thread == 0) {
      const int most = table()[0];
      if (most != 0 && most < kInfinite) table()[1] = limit_above(most);
      table()[0] = 0;
    }
  }

 private:
  // The largest contribution of this tile and a limit for the next one, as bits of a float; two unused words; the
  // counts.
  __device__ __forceinline__ int* table() const {
    return reinterpret_cast<int*>(Base::shared_ + Of::team() * CapturedMemory::histogram_bytes(kElements));
  }
  // Where an element is in the buffer.
  __device__ __forceinline__ long long of_column(int b, int h, int i) const {
    if constexpr (Derivative::kContribution[k].column)
      return Derivative::template of_column<k>(captured_of<Derivative>(captured_), b, h, i);
    return i;
  }
  // The place of an element's sum among those that CTAs store.
  __device__ __forceinline__ long long of_cta(int i) const {
    return static_cast<long long>(blockIdx.x) * kElements + i;
  }
  // Adds to an element in memory, or to the CTA's own sum of it. One thread adds to that, and so in one order; others
  // add only what is not finite.
  __device__ __forceinline__ void put_element(int b, int h, int i, float v) const {
    if constexpr (Config::kPartialSums) {
      static_assert(kRepeats);
      Base::put(of_cta(i), v);
    } else {
      Base::put(of_column(b, h, i), v);
    }
  }
  // The magnitude from which on contributions are added directly.
  __device__ __forceinline__ float far_limit() const { return __int_as_float(kRepeats ? kInfinite : limit_); }
  __device__ __forceinline__ bool is_far(int at, float v) const {
    return !(fabsf(v) < far_limit()) & (v != 0.0f) & (at >= 0);
  }
  // Counts a contribution. Returns whether it is beyond the limit, and so is not counted.
  __device__ __forceinline__ bool count(int at, float v) {
    const bool far = !Config::kFixedPoint && is_far(at, v);
    bool near = at >= 0;
    if constexpr (!Config::kFixedPoint) {
      near &= fabsf(v) < far_limit();
      if (!kRepeats || near) largest_ = fmaxf(largest_, fabsf(v));
    }
    // ptxas turns a predicated red.shared into a branch, so a contribution that is not added adds 0; one without a
    // place adds it to an element that differs from lane to lane.
    v = near ? v : 0.0f;
    at = at >= 0 ? at : lane();
    int units, rest;
    Base::split(v, units, rest);
    const unsigned to = shared_address(table() + 4) + static_cast<unsigned>(at) * 4;
    add_shared(to, units);
    add_shared(to + kElements * 4, rest);
    return far;
  }

  float largest_, value_[4];
  long long at_[4];
};

}  // namespace fusegrad::device
