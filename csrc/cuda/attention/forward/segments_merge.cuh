// Adds up a row's segments where each was a CTA's (segments.cuh). A thread has four columns of a row.
#pragma once

#include "cuda/attention/forward/segments.cuh"

namespace fusegrad::device {

/// Reads of Config: Element, kUnscaled, kOutLow, kDropout, kWarps.
template <class Config>
class FlexMergeSegments {
  using T = typename Config::Element;

 public:
  static constexpr int kSharedBytes = 0;

  template <class Score, class Mask>
  __device__ __forceinline__ FlexMergeSegments(const FlexForwardArguments& a, const Score&, const Mask&, unsigned)
      : a_(a) {}

  __device__ __forceinline__ void run() const {
#if __CUDA_ARCH__ >= 900
    // It may have begun before the kernel before it ended.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    constexpr int kThreads = kLanes * Config::kWarps;
    const FlexPartials& p = a_.partials;
    const int vectors = max(p.cols / 4, 1);
    const long long id = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    const long long row = id / vectors;
    if (row >= static_cast<long long>(a_.batches) * a_.heads * a_.queries) return;
    const int col = static_cast<int>(id - row * vectors) * 4;
    const float unit = Config::kUnscaled ? a_.scale : 1.0f;
    FlexSegmentRow total{-FUSEGRAD_INFINITY, 0.0f};
    float out[4] = {};
    constexpr int kBatch = 4;  // segments whose reads are under way together
    for (int first = 0; first < p.splits; first += kBatch) {
      FlexPartialRow part[kBatch];
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const long long place = row * p.splits + first + i;
        const bool there = first + i < p.splits;
        part[i] = there ? p.rows[place] : FlexPartialRow{-FUSEGRAD_INFINITY, 0.0f, 0.0f, 0.0f};
        x[i] = there && col < p.cols ? *reinterpret_cast<const float4*>(p.out + place * p.cols + col)
                                     : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const FlexSegmentWeights w = add_segment(total, {part[i].max, part[i].sum}, unit);
        out[0] = w.add(out[0], x[i].x);
        out[1] = w.add(out[1], x[i].y);
        out[2] = w.add(out[2], x[i].z);
        out[3] = w.add(out[3], x[i].w);
      }
    }
    const FlexSegmentResult result = segment_result(total, unit, Config::kDropout ? a_.dropout.scale : 1.0f);
    if (col == 0) store_segment_lse(a_, row, result);
    const long long head = row / a_.queries;
    const int q = static_cast<int>(row - head * a_.queries), b = static_cast<int>(head / a_.heads);
    const int h = static_cast<int>(head - static_cast<long long>(b) * a_.heads);
    write_four<T, false>(a_.out, b, h, q, col, a_.value_size, out, result.factor);
    if constexpr (Config::kOutLow) write_four<T, true>(a_.out_low, b, h, q, col, a_.value_size, out, result.factor);
  }

 private:
  const FlexForwardArguments& a_;
};

}  // namespace fusegrad::device
