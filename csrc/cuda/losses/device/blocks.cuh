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
  bool whole = false;  // all of them

  __device__ Batch() = default;
  __device__ Batch(const RowVectors<T, kWidth>& vectors, const T* row, int first, int distance)
      : whole(first >= vectors.whole_begin && first + (kBlockVectors - 1) * distance < vectors.whole_end) {
    if (whole) {
      const T* from = row + vectors.column(first);
#pragma unroll
      for (int j = 0; j < kBlockVectors; ++j) packs[j] = P::load(from + j * distance * kWidth);
    } else {
#pragma unroll
      for (int j = 0; j < kBlockVectors; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) packs[j] = vectors.load(row, v, static_cast<T>(0.f));
      }
    }
  }
  __device__ void store(const RowVectors<T, kWidth>& vectors, T* row, int first, int distance) const {
    if (whole) {
      T* to = row + vectors.column(first);
#pragma unroll
      for (int j = 0; j < kBlockVectors; ++j) packs[j].store(to + j * distance * kWidth);
    } else {
#pragma unroll 1
      for (int j = 0; j < kBlockVectors; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) vectors.store(row, v, chosen(packs, j));
      }
    }
  }
};

}  // namespace fusegrad::device
