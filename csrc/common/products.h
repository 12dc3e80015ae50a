// Products of small blocks in vectors, for files that are compiled once for each instruction set (common/lanes.h).
//
// An element of a product is a sum over terms in one order, whatever other rows and columns there are: sums of kTerms
// terms, each in a register from 0 on by fused multiply-adds, added up in their order.
#pragma once

#include "common/lanes.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {

/// Columns of b side by side: b is packed as panels, [terms, kPanel] each.
template <class T>
constexpr int64_t kPanel = 2 * at::vec::Vectorized<T>::size();

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// out[c * out_stride + r] = in[r * stride + c] of 8 by 8.
inline void transpose_block(const float* in, int64_t stride, float* out, int64_t out_stride) {
  __m256 row[8], pair[8], four[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) row[r] = _mm256_loadu_ps(in + r * stride);
#pragma GCC unroll 4
  for (int r = 0; r < 8; r += 2) {
    pair[r] = _mm256_unpacklo_ps(row[r], row[r + 1]);
    pair[r + 1] = _mm256_unpackhi_ps(row[r], row[r + 1]);
  }
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
    four[r] = _mm256_shuffle_ps(pair[r], pair[r + 2], 0x44);
    four[r + 1] = _mm256_shuffle_ps(pair[r], pair[r + 2], 0xee);
    four[r + 2] = _mm256_shuffle_ps(pair[r + 1], pair[r + 3], 0x44);
    four[r + 3] = _mm256_shuffle_ps(pair[r + 1], pair[r + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * out_stride, _mm256_permute2f128_ps(four[c], four[c + 4], 0x20));
    _mm256_storeu_ps(out + (c + 4) * out_stride, _mm256_permute2f128_ps(four[c], four[c + 4], 0x31));
  }
}
constexpr bool kTransposesBlocks = true;
#else
inline void transpose_block(const float*, int64_t, float*, int64_t) {}
constexpr bool kTransposesBlocks = false;
#endif

// out[c * kPanel + r] = in[r * stride + c], kPanel rows.
template <class T>
inline void transpose_panel(const T* in, int64_t stride, int64_t cols, T* out) {
  int64_t c = 0;
  if constexpr (kTransposesBlocks && std::is_same_v<T, float>) {
    for (; c + 8 <= cols; c += 8) {
      for (int64_t r = 0; r < kPanel<T>; r += 8) {
        transpose_block(in + r * stride + c, stride, out + c * kPanel<T> + r, kPanel<T>);
      }
    }
  }
  for (; c < cols; ++c) {
    for (int64_t r = 0; r < kPanel<T>; ++r) out[c * kPanel<T> + r] = in[r * stride + c];
  }
}

// As many accumulators as leave registers for a row of b and an element of a.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kMicroRows = 12;
#else
constexpr int kMicroRows = 6;
#endif

template <class T, int kRows>
inline void micro(int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, T* c, int64_t c_stride,
                  bool accumulate) {
  using Vec = at::vec::Vectorized<T>;
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = Vec(0);
  for (int64_t l = 0; l < k; ++l) {
    const Vec b0 = Vec::loadu(b), b1 = Vec::loadu(b + Vec::size());
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec x(a[r * a_row]);
      sum[r][0] = at::vec::fmadd(x, b0, sum[r][0]);
      sum[r][1] = at::vec::fmadd(x, b1, sum[r][1]);
    }
    a += a_col;
    b += 2 * Vec::size();
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    T* o = c + r * c_stride;
    if (accumulate) {
      sum[r][0] = sum[r][0] + Vec::loadu(o);
      sum[r][1] = sum[r][1] + Vec::loadu(o + Vec::size());
    }
    sum[r][0].store(o);
    sum[r][1].store(o + Vec::size());
  }
}

template <class T, int kRows>
void micro_rest(int64_t rows, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, T* c, int64_t c_stride,
                bool accumulate) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return micro<T, kRows>(k, a, a_row, a_col, b, c, c_stride, accumulate);
    micro_rest<T, kRows - 1>(rows, k, a, a_row, a_col, b, c, c_stride, accumulate);
  }
}

// Sums of so many terms are added up: the error of one long sum would grow with its length.
constexpr int64_t kTerms = 64;

// A panel of b stays in the first-level cache while all of a passes.
template <class T>
void multiply(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t b_stride,
              T* c, int64_t c_stride, bool accumulate) {
  for (int64_t j = 0; j < n; j += kPanel<T>, b += b_stride, c += kPanel<T>) {
    // Once at least: a sum of no terms is 0.
    for (int64_t l = 0; l == 0 || l < k; l += kTerms) {
      const int64_t terms = k - l < kTerms ? k - l : kTerms;
      const T* a_part = a + l * a_col;
      const T* b_part = b + l * kPanel<T>;
      const bool add = accumulate || l > 0;
      int64_t i = 0;
      for (; i + kMicroRows <= m; i += kMicroRows) {
        micro<T, kMicroRows>(terms, a_part + i * a_row, a_row, a_col, b_part, c + i * c_stride, c_stride, add);
      }
      micro_rest<T, kMicroRows - 1>(m - i, terms, a_part + i * a_row, a_row, a_col, b_part, c + i * c_stride, c_stride,
                                    add);
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
