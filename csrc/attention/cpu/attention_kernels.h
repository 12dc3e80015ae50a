// The vectorised loops of attention on the CPU, compiled once for each instruction set (attention_kernel.cpp): packing,
// a matrix product over packed panels, and what is done to a tile of scores between the products.
//
// Every element of a product is summed over k in order, by itself: its bits depend neither on the size of the tile nor
// on its place in it. The backward relies on that: it computes the forward's scores again.
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "common/dtype.h"

namespace fusegrad::cpu {

/// A matrix as a tensor stores it: dtype and strides in elements. kFloat64 where the loops compute in double, and only
/// there.
struct Matrix {
  void* data;
  DType dtype;
  int64_t row_stride, col_stride;
};

/// A tile of scores and what is known of its rows. For masked pairs (0 in `mask`, if not null) the score is not read.
template <class T>
struct ScoreTile {
  T* score;
  int64_t stride;
  const uint8_t* mask;
  int64_t mask_stride;
  int64_t rows, cols;
};

/// The running softmax of a tile's rows.
template <class T>
struct OnlineSoftmax {
  T* max;   ///< the largest score so far, -inf before the first
  T* sum;   ///< of exp(score - max)
  T* ties;  ///< how many scores equal max; null: not wanted
  T* out;   ///< the weighted sum of values, [rows, out_cols]
  int64_t out_stride, out_cols;
};

/// Dropout of a head: its key (the numbers of all its pairs follow from that and their places), the threshold below
/// which a number drops its pair, its eight highest digits and the rest, and what the weights of the others are
/// multiplied by. See cuda/attention/device/dropout.cuh.
struct HeadDropout {
  uint32_t key[2];
  uint32_t digits, rest;
  double scale;
};

template <class T>
struct AttentionKernels {
  /// Columns of a panel. A matrix of C columns is packed as [ceil(C / panel)][rows][panel], padded with zeros.
  int64_t panel;
  /// Terms that a product sums up at a time, a multiple of `panel`. A product that begins at a multiple of it has the
  /// same sums whether terms of 0 come before or not.
  int64_t terms;
  /// Rows of a micro tile: products are fastest for multiples of it.
  int64_t micro_rows;

  /// out[r, c] = in[r, c] * factor, in memory row by row.
  void (*pack_rows)(T* out, int64_t stride, const Matrix& in, int64_t rows, int64_t cols, T factor);
  /// Panels of in * factor.
  void (*pack_panels)(T* out, const Matrix& in, int64_t rows, int64_t cols, T factor);
  /// Panels of the transpose of in [rows, cols]: [ceil(rows / panel)][cols][panel].
  void (*pack_transposed)(T* out, const Matrix& in, int64_t rows, int64_t cols);
  /// out[r, c] = in[r, c] * factor[r] (null: 1) * scale, rounded to out's dtype.
  void (*unpack)(const Matrix& out, const T* in, int64_t stride, int64_t rows, int64_t cols, const T* factor, T scale);
  /// The low parts (attention/low_part.h) of in[r, c] * factor[r], of which unpack stored `out` in 16 bits.
  void (*unpack_low)(const Matrix& low, const Matrix& out, const T* in, int64_t stride, int64_t rows, int64_t cols,
                     const T* factor);

  /// c [m, n] = a [m, k] times b, or added to it. a's element (i, l) is at a[i * a_row + l * a_col]; b is packed, its
  /// panels `b_stride` apart; c has room for whole panels.
  void (*multiply)(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b,
                   int64_t b_stride, T* c, int64_t c_stride, bool accumulate);

  /// Scores become exp(score - max), 0 where masked; the rows' sums, and what was summed of values before, follow a new
  /// maximum.
  void (*softmax)(const ScoreTile<T>& tile, const OnlineSoftmax<T>& state);
  /// Scores become exp(score - lse - low), exactly 0 where masked or -inf. Returns whether a score that was not masked
  /// was -inf.
  bool (*probabilities)(const ScoreTile<T>& tile, const T* lse, const T* low);
  /// alive[r, c] = p[r, c] != 0
  void (*alive)(uint8_t* alive, int64_t alive_stride, const T* p, int64_t stride, int64_t rows, int64_t cols);
  /// grad = p * (grad - delta[r]), 0 where p is 0. Rows `stride` apart in both.
  void (*score_gradient)(T* grad, const T* p, int64_t stride, int64_t rows, int64_t cols, const T* delta);
  /// grad[r, c] += grad_max[r] where the score of a pair that takes part equals max[r].
  void (*add_max_gradient)(T* grad, const ScoreTile<T>& tile, const T* max, const T* grad_max);
  /// out[r] = sum of a[r, c] * b[r, c]. `low`: the low parts of b, or no data.
  void (*row_dot)(T* out, const Matrix& a, const Matrix& b, const Matrix& low, int64_t rows, int64_t cols);
  /// factor[r, c] = 0 for a dropped pair of query q + r and key kv + c, else the scale. Rows `stride` apart.
  void (*dropout)(T* factor, int64_t stride, const HeadDropout& head, int64_t q, int64_t kv, int64_t rows,
                  int64_t cols);
  /// out = in * factor, 0 where factor is 0. Rows `stride` apart in all of them.
  void (*drop)(T* out, const T* in, const T* factor, int64_t stride, int64_t rows, int64_t cols);
  /// out[r, c] = out[r, c] * weight[r] + more[r, c] * more_weight[r], with the low parts of 16 bits.
  void (*merge)(const Matrix& out, const Matrix& low, const Matrix& more, const Matrix& more_low, const T* weight,
                const T* more_weight, int64_t rows, int64_t cols);
  /// out[i] += in[i]
  void (*add)(T* out, const T* in, int64_t count);
};

/// Those of this machine.
template <class T>
const AttentionKernels<T>& attention_kernels();

FUSEGRAD_EACH_CAPABILITY(extern const AttentionKernels<float> kAttentionFloat;
                         extern const AttentionKernels<double> kAttentionDouble;)

}  // namespace fusegrad::cpu
