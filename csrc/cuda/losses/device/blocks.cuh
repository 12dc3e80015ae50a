// A block of a row's columns in a thread's registers.
#pragma once

#include <cstdint>

#include "cuda/device/vector.cuh"

namespace fusegrad::device {

constexpr int kBlockThreads = 256;  // at most
constexpr int kBlockVectors = 4;    // of a thread

/// A grid over blocks of columns (x) and groups of rows (y): a block is what kBlockVectors vectors a thread cover;
/// short rows share a CTA. A CTA goes on to the row group that is gridDim.y further.
struct Blocks {
  int threads_per_row;  // all of a CTA's, or a power of 2
  int align;            // kLineBytes, or kUnitBytes where rows are short

  __device__ int64_t row() const {
    return static_cast<int64_t>(blockIdx.y) * (blockDim.x / threads_per_row) + threadIdx.x / threads_per_row;
  }
  __device__ int64_t row_step() const { return static_cast<int64_t>(gridDim.y) * (blockDim.x / threads_per_row); }
  /// This thread's first vector of a row; the others follow at distances of threads_per_row.
  __device__ int vector() const {
    return static_cast<int>(blockIdx.x) * threads_per_row * kBlockVectors +
           static_cast<int>(threadIdx.x) % threads_per_row;
  }
};

/// kBlockVectors vectors from `first` on, all loaded before the first use.
template <class T, int kWidth>
struct Batch {
  using P = Pack<T, kWidth>;
  P packs[kBlockVectors];
  bool cut = false;  // the row's first or last vector, which is not whole, is among them

  __device__ Batch(const RowVectors<T, kWidth>& vectors, const T* row, int first, int distance) {
#pragma unroll
    for (int j = 0; j < kBlockVectors; ++j) {
      const int v = first + j * distance;
      if (vectors.whole(v)) {
        packs[j] = P::load(row + vectors.column(v));
      } else {
        packs[j] = P{};
        cut |= v < vectors.count;
      }
    }
    if (!cut) return;
#pragma unroll 1
    for (int j = 0; j < kBlockVectors; ++j) {
      const int v = first + j * distance;
      if (vectors.whole(v) || v >= vectors.count) continue;
      const P pack = vectors.load(row, v, static_cast<T>(0.f));
#pragma unroll
      for (int i = 0; i < kBlockVectors; ++i) {
        if (i == j) packs[i] = pack;
      }
    }
  }
  __device__ void store(const RowVectors<T, kWidth>& vectors, T* row, int first, int distance) const {
#pragma unroll
    for (int j = 0; j < kBlockVectors; ++j) {
      const int v = first + j * distance;
      if (vectors.whole(v)) packs[j].store(row + vectors.column(v));
    }
    if (!cut) return;
#pragma unroll 1
    for (int j = 0; j < kBlockVectors; ++j) {
      const int v = first + j * distance;
      if (!vectors.whole(v) && v < vectors.count) vectors.store(row, v, chosen(packs, j));
    }
  }
};

}  // namespace fusegrad::device
