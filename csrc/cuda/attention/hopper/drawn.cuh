// Dropout of the Hopper kernels: warps of the producer's warpgroup draw which pairs are kept, and the consumers' warps
// take it from shared memory, a word for each thread's pairs of 64 columns. Drawn by the consumers, it would lie on the
// softmax's critical path.
#pragma once

#include "cuda/attention/device/dropout.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

/// The words of kRings warpgroups, each with 64 rows, a ring of kStages tiles. kKeyRows: as FlexKept. kDrawers warps
/// draw; each takes every kDrawers-th job, which is 32 rows by 64 columns.
template <class Config, bool kKeyRows, int kRings, int kWords, int kStages, int kDrawers>
class FlexDrawn {
  static constexpr int kSetBytes = HopperDrawnMemory::kThreadBytes * kWarpgroup * kWords;
  static constexpr int kJobs = 2 * kWords;

 public:
  using Kept = FlexKept<kKeyRows, kWords>;

  __device__ __forceinline__ explicit FlexDrawn(unsigned shared) : shared_(shared) {}

  /// Called by one thread. `readers`: the warps that take each ring's words.
  __device__ __forceinline__ void init(int readers) const {
    for (int i = 0; i < kRings * kStages; ++i) {
      Barrier::init(full(i), kDrawers);
      Barrier::init(empty(i), readers);
    }
  }
  /// Takes a tile's words. `parity`: of the number of times that the stage was used before.
  __device__ __forceinline__ void take(Kept& kept, int ring, int stage, int parity) const {
    const int thread = thread_anew() % kWarpgroup, set = ring * kStages + stage;
    const unsigned from = shared_ + set * kSetBytes + thread * (4 * kWords);
    Barrier::wait(full(set), parity);
    if constexpr (kWords == 2) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(kept.word[0]), "=r"(kept.word[1]) : "r"(from) : "memory");
    } else {
      static_assert(kWords == 1);
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(kept.word[0]) : "r"(from) : "memory");
    }
    __syncwarp();
    Barrier::arrive_if(thread % kLanes == 0, empty(set));
  }
  /// Draws a drawer's part of a tile of a ring, whose first row and column are given. `next`: how many jobs are before
  /// its next one.
  __device__ __forceinline__ void draw(const FlexDropoutHead<Config>& head, const FlexDropout& dropout, int ring,
                                       int stage, int parity, int row, int col, int& next) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, set = ring * kStages + stage;
    Barrier::wait(empty(set), parity ^ 1);
#ifdef FUSEGRAD_X_NODRAW  // EXPERIMENT
    next += kJobs;
    for (; next < 0;) {
#else
#pragma unroll 1
    for (; next < kJobs; next += kDrawers) {
#endif
      const int part = next / kWords, word = next % kWords;
      const unsigned rows = static_cast<unsigned>(row) / 32 + part, cols = static_cast<unsigned>(col) / 32 + 2 * word;
      unsigned words[2];
      if constexpr (kKeyRows) {
        const unsigned first = head.template block<true>(dropout, cols, rows, lane);
        Kept::combine(first, head.template block<true>(dropout, cols + 1, rows, lane), words);
      } else {
        const unsigned first = head.template block<false>(dropout, rows, cols, lane);
        Kept::combine(first, head.template block<false>(dropout, rows, cols + 1, lane), words);
      }
      const unsigned to = shared_ + set * kSetBytes + ((part * 2 * kLanes + lane) * kWords + word) * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + i * kLanes * kWords * 4), "r"(words[i]) : "memory");
    }
    next -= kJobs;
    __syncwarp();
    Barrier::arrive_if(lane == 0, full(set));
  }

 private:
  __device__ __forceinline__ unsigned full(int set) const {
    return shared_ + kRings * kStages * kSetBytes + set * (2 * kBarrierBytes);
  }
  __device__ __forceinline__ unsigned empty(int set) const { return full(set) + kBarrierBytes; }

  unsigned shared_;
};

/// What a consumer has taken, and where the ring's next words are; empty without dropout.
template <bool kDropout, class Drawn, int kStages>
struct FlexTaken {
  typename Drawn::Kept kept;
  Ring<kStages> stages;
};
template <class Drawn, int kStages>
struct FlexTaken<false, Drawn, kStages> {};

}  // namespace fusegrad::device
