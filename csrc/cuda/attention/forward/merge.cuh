// Outputs of parts of a row's keys, and how they become the row's: in the parts' order, so with the same bits each
// time.
#pragma once

#include "cuda/attention/device/arguments.cuh"
#include "cuda/attention/device/far_rows.cuh"
#include "cuda/device/low_part.cuh"
#include "cuda/device/mma.cuh"

namespace fusegrad::device {

/// Stores row r, 0 or 1, of a warp's accumulators times `factor` to `cols` floats, a multiple of 4, where it is
/// `there`. Predicated: behind a branch the compiler would wait for products in flight.
template <int kBlocks>
__device__ __forceinline__ void store_floats(bool there, float* to, int cols, const float (&x)[kBlocks][4], int r,
                                             float factor, int lane) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const int col = n * 8 + lane % 4 * 2;
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n@there st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to + col),
        "f"(x[n][2 * r] * factor), "f"(x[n][2 * r + 1] * factor), "r"(static_cast<int>(there && col < cols))
        : "memory");
  }
}
/// Stores what a split gives of row r of a warp's accumulators, the row at place `at` in [B, H, M].
template <int kBlocks>
__device__ __forceinline__ void store_partial(bool there, const FlexPartials& to, long long at, int split,
                                              const FlexPartialRow& row, const float (&out)[kBlocks][4], int r,
                                              int lane) {
  const long long place = at * to.splits + split;
  if (there && lane % 4 == 0) to.rows[place] = row;
  store_floats(there, to.out + place * to.cols, to.cols, out, r, 1.0f, lane);
}

/// Writes four columns of a row from `col` on, of `cols`, times `factor`, or their low parts.
template <class T, bool kLow>
__device__ __forceinline__ void write_four(const FlexTensor& to, int b, int h, int q, int col, int cols,
                                           const float (&x)[4], float factor) {
  const long long row = b * to.batch_stride + h * to.head_stride + q * to.row_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (col + i >= cols) continue;
    const long long at = row + (col + i) * to.col_stride;
    if constexpr (kLow) {
      store_low<T>(static_cast<signed char*>(to.data) + at, x[i] * factor);
    } else {
      store(static_cast<T*>(to.data) + at, x[i] * factor);
    }
  }
}

/// Four neighbouring columns of a row.
struct FlexRowMerge {
  FlexPartialRow row;
  float out[4];

  __device__ __forceinline__ FlexRowMerge() {
    row = {-FUSEGRAD_INFINITY, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = 0.0f;
  }

  /// Part i is row_at(i) and the four floats that out_at(i) returns. `unit`: what scores are multiplied by.
  template <class RowAt, class OutAt>
  __device__ __forceinline__ void merge(int count, float unit, const RowAt& row_at, const OutAt& out_at) {
    constexpr int kBatch = 8;  // parts whose reads are under way together
    for (int first = 0; first < count; first += kBatch) {
      FlexPartialRow part[kBatch];
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool there = first + i < count;
        part[i] = there ? row_at(first + i) : FlexPartialRow{-FUSEGRAD_INFINITY, 0.0f, 0.0f, 0.0f};
        x[i] = there ? out_at(first + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      float max = row.max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) max = score_mod::maximum(max, part[i].max);
      rescale(max, unit);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = weight_of(part[i].max, unit);
        row.sum += weight * part[i].sum;
        row.ties += part[i].max == row.max ? part[i].ties : 0.0f;
        out[0] += weight * x[i].x;
        out[1] += weight * x[i].y;
        out[2] += weight * x[i].z;
        out[3] += weight * x[i].w;
      }
    }
  }

  /// Writes the results of the row. `at`: its place in [B, H, M]. The thread of column 0 writes what a row has once.
  template <class T>
  __device__ __forceinline__ void finish(const FlexRowResults& to, int b, int h, int q, long long at, int col) const {
    const bool none = row.max == -FUSEGRAD_INFINITY;
    const float factor = none ? 0.0f : to.dropout_scale / row.sum;
    if (col == 0) {
      const float max = row.max * to.unit;
      const FlexLse lse = lse_of(row.max, to.unit, logf(row.sum));
      to.lse[at] = none ? -FUSEGRAD_INFINITY : lse.lse;
      if (to.lse_low != nullptr) to.lse_low[at] = none ? 0.0f : lse.low;
      if (to.max_scores != nullptr) {
        to.max_scores[at] = none ? -FUSEGRAD_INFINITY : max;
        to.max_ties[at] = row.ties;
      }
    }
    write_four<T, false>(to.out, b, h, q, col, to.value_size, out, factor);
    if (to.out_low.data != nullptr) write_four<T, true>(to.out_low, b, h, q, col, to.value_size, out, factor);
  }

 private:
  // Without a score -inf less -inf would be NaN.
  __device__ __forceinline__ float weight_of(float max, float unit) const {
    return max == -FUSEGRAD_INFINITY ? 0.0f : expf((max - row.max) * unit);
  }
  __device__ __forceinline__ void rescale(float max, float unit) {
    const float before = row.max;
    row.max = max;
    if (max == before) return;
    const float weight = weight_of(before, unit);
    row.sum *= weight;
    row.ties = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] *= weight;
  }
};

}  // namespace fusegrad::device
