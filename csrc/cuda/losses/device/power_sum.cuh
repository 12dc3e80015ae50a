// An online sum of a row's exponentials, relative to the largest exponent so far.
#pragma once

#include "cuda/losses/device/target.cuh"

namespace fusegrad::device {

/// Over part of a row, relative to the part's own largest exponent m2. -inf is a valid reference while nothing finite
/// has come: then every 2^y is 0.
struct PowerSum {
  float m2 = minus_infinity();
  float sum = 0.f;  // 2^y, y = x k - m2

  __device__ float reference() const { return m2 == minus_infinity() ? 0.f : m2; }
  __device__ void rebase(float larger) {
    if (m2 != larger) sum *= exp2_fast(m2 - larger);
    m2 = larger;
  }
  template <class Over>
  __device__ void merge(const Over& over) {
    rebase(over.max(m2));
    sum = over.sum(sum);
  }
  /// Adds the values of vectors for a positive k.
  template <class T, int kWidth, int kCount>
  __device__ void add(const Pack<T, kWidth> (&packs)[kCount], float k) {
    rebase(fmaxf(m2, largest_of(packs) * k));
    const float from = reference();
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float x[kWidth], part = 0.f;
      unpack(packs[j], x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) part += exp2_fast(fmaf(x[i], k, -from));
      sum += part;
    }
  }
};

}  // namespace fusegrad::device
