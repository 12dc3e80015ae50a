// Tiles of 16 pairs a warp: where lanes have them, how they come from memory, and their norm.
#pragma once

#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/pair_projection/pair_projection.h"
#include "cuda/device/mma.cuh"

namespace fusegrad::device::pair_projection {

using cuda::PairProjectionCall;
using score_mod::from_bits;

constexpr int kWarps = 4, kThreads = kWarps * kLanes;
constexpr int kRows = 16;      // pairs of a warp's tile
constexpr int kHeads = 16;     // those beyond the call's are zeros
constexpr int kChannels = 32;  // that a vector of 16 bytes a lane holds of a row
constexpr int kMostChannels = 128;

// Lane g = lane / 4 has rows g and g + 8 of a tile. In vector v the lane t = lane % 4 has channels 32v + 8t to 32v + 8t
// + 7, so that memory is read and written 64 bytes a row at a time. Products do not mind in which order they add
// channels up: word w of a vector holds what a fragment's columns 2t and 2t + 1 are, of its own block of eight channels
// (v, w), and column n of that block is channel 32v + n / 2 * 8 + 2w + n % 2.
__device__ __forceinline__ unsigned word_of(const uint4& vector, int w) {
  return w == 0 ? vector.x : w == 1 ? vector.y : w == 2 ? vector.z : vector.w;
}

template <class T>
__device__ __forceinline__ float first_of(unsigned word) {
  return from_bits(T{static_cast<unsigned short>(word)});
}
template <class T>
__device__ __forceinline__ float second_of(unsigned word) {
  return from_bits(T{static_cast<unsigned short>(word >> 16)});
}

// Tiles of 16 pairs of a batch, a warp each. They are fewer than 2^31: a tile has 2 KiB and more.
__host__ __device__ constexpr int64_t tiles_of(int64_t pairs) { return (pairs + kRows - 1) / kRows; }

// Goes from tile to tile of a warp, which are `step` apart, without a division for each.
struct Walk {
  int batch, tile;  // of the batch
  int tiles, step_batches, step_tiles;

  __device__ __forceinline__ explicit Walk(int64_t pairs) : tiles(static_cast<int>(tiles_of(pairs))) {
    const int first = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kLanes);
    const int step = static_cast<int>(gridDim.x) * kWarps;
    batch = first / tiles;
    tile = first % tiles;
    step_batches = step / tiles;
    step_tiles = step % tiles;
  }
  __device__ __forceinline__ Walk next() const {
    Walk result = *this;
    result.batch += step_batches;
    result.tile += step_tiles;
    if (result.tile >= tiles) {
      result.tile -= tiles;
      ++result.batch;
    }
    return result;
  }
  __device__ __forceinline__ int64_t pair() const { return int64_t{tile} * kRows; }  // the first one, in the batch
  __device__ __forceinline__ int rows(int64_t pairs) const {                         // that there are
    const int64_t left = pairs - pair();
    return left < kRows ? static_cast<int>(left) : kRows;
  }
};

// Tiles of pairs on their way to the lanes, through shared memory: each lane reads what it has copied itself, so that
// warps wait for nobody.
template <int kVectors, int kStages>
struct Reads {
  static constexpr int kVector = kLanes * 16, kStage = 2 * kVectors * kVector;  // bytes of a warp
  static constexpr int kBytes = kWarps * kStages * kStage;
  const PairProjectionCall& p;
  unsigned place;  // the lane's in its warp's first stage

  __device__ __forceinline__ Reads(const PairProjectionCall& p, const void* shared) : p(p) {
    const unsigned thread = threadIdx.x;
    place = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + thread / kLanes * (kStages * kStage) +
            thread % kLanes * 16;
  }
  __device__ __forceinline__ void begin(const Walk& at, int stage) const {
    if (at.batch < p.batches) {
      const int lane = static_cast<int>(threadIdx.x) % kLanes, rows = at.rows(p.pairs);
      const auto* from =
          static_cast<const uint4*>(p.pair) + (at.batch * p.pairs + at.pair()) * (kVectors * 4) + lane % 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4 + 8 * i;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          copy_async(place + stage * kStage + (i * kVectors + v) * kVector, from + row * (kVectors * 4) + v * 4,
                     row < rows);
        }
      }
    }
    commit_copies();
  }
  /// run(walk, stage) for each of the warp's tiles, when it is there and the next ones are on their way.
  template <class Run>
  __device__ __forceinline__ void for_each_tile(const Run& run) const {
    Walk at(p.pairs), ahead = at;
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i, ahead = ahead.next()) begin(ahead, i);
    for (int stage = 0; at.batch < p.batches; at = at.next(), ahead = ahead.next(), stage = (stage + 1) % kStages) {
      begin(ahead, (stage + kStages - 1) % kStages);
      wait_copies<kStages - 1>();
      run(at, stage);
    }
  }
  /// Vector v of row g + 8 * i. Volatile, or the compiler would keep a tile in registers, and spill.
  __device__ __forceinline__ uint4 take(int i, int v, int stage) const {
    uint4 x;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(place + stage * kStage + (i * kVectors + v) * kVector)
                 : "memory");
    return x;
  }
};

// A row's norm without its parameters: x is value * rate + shift.
struct Norm {
  float rate, shift;
  template <class T>
  __device__ __forceinline__ float first(unsigned word) const {
    return first_of<T>(word) * rate + shift;
  }
  template <class T>
  __device__ __forceinline__ float second(unsigned word) const {
    return second_of<T>(word) * rate + shift;
  }
};

template <class T, bool kCentered, int kVectors, int kStages>
__device__ __forceinline__ Norm norm_of(const Reads<kVectors, kStages>& reads, int i, int stage) {
  constexpr float kShare = 1.0f / (kVectors * kChannels);
  unsigned word[kVectors * 4];
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint4 vector = reads.take(i, v, stage);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      word[v * 4 + w] = word_of(vector, w);
      sum += first_of<T>(word[v * 4 + w]) + second_of<T>(word[v * 4 + w]);
    }
  }
  const float mean = kCentered ? row_sum(sum) * kShare : 0.0f;
#pragma unroll
  for (int w = 0; w < kVectors * 4; ++w) {
    const float first = first_of<T>(word[w]) - mean, second = second_of<T>(word[w]) - mean;
    squares += first * first + second * second;
  }
  const float rate = rsqrtf(row_sum(squares) * kShare + reads.p.eps);
  return {rate, -mean * rate};
}

template <class T>
__device__ __forceinline__ float parameter(const void* values, int i, float otherwise) {
  return values == nullptr ? otherwise : from_bits(static_cast<const T*>(values)[i]);
}

}  // namespace fusegrad::device::pair_projection
