// Products of the linear losses whose elements depend on their row and their column alone: the same bits whatever other
// rows are in a call, however they are cut, on however many threads and, for sums over a vocabulary, by however many
// processes (docs/losses.md).
#pragma once

#include <cstdint>

#include "common/division.h"
#include "common/dtype.h"

namespace fusegrad {

/// A vocabulary is sixteen segments of ceil(V / 16) columns, rounded up to whole units; the last ones may have fewer,
/// or none. Every sum over its columns is one over each segment, in one order, and then of these in one order. A
/// product's segments add up by pairs: the sum of 16 is that of the first 8 and that of the last 8, and so on down. A
/// process that has 1, 2, 4, 8 or 16 segments from a multiple of as many on has one of these sums, whatever the others
/// have.
constexpr int64_t kVocabSegments = 16;

/// Columns at whose multiples segments begin on GPUs, which read vectors of 16 bytes and copy boxes from there alone; 1
/// on the CPU.
constexpr int64_t kGpuSegmentUnit = 8;

inline int64_t vocab_segment(int64_t vocab, int64_t unit = 1) {
  return round_up(ceil_div(vocab, kVocabSegments), unit);
}

/// A product of matrices of one dtype, whose rows are dense: float32 or float64 on the CPU, 16 bits on CUDA.
///   segments 0:  out = a @ b^T + bias,   b [cols, terms]
///   else:        out = a @ b,            b [terms, cols], terms in so many segments (a power of two) of `segment`
///   terms
struct Product {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t terms = 0;
  const void* a = nullptr;  // [rows, terms]
  int64_t a_stride = 0;     // elements between rows
  const void* b = nullptr;
  int64_t b_stride = 0;
  const void* bias = nullptr;  // [cols], or null: 0
  void* out = nullptr;         // [rows, cols]
  bool float_out = false;      // segments: out is float32
  int64_t out_stride = 0;
  int64_t segment = 0;
  int64_t segments = 0;
  void* workspace = nullptr;  // as many bytes as RowKernels::product_workspace says; multiples of 16
};

}  // namespace fusegrad
