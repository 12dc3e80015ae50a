// Class C: one sum for the pairs of a query, of each tile: over a warp's keys in registers, then over warps by a line
// of shared memory for each.
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

template <class Of, int k>
class SchemeSums<Of, k, Scheme::kQ> : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;
  using typename Base::Config;
  static constexpr int kSums = Of::kBlocksN * 2;

 public:
  using Base::Base;

  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum_[i] = 0.0f;
  }
  template <class Reads>
  __device__ __forceinline__ void add(float v, int, int n, int e, float, int, int, int, int, bool, const Reads&) {
    sum_[n * 2 + e % 2] += v;
  }
  __device__ __forceinline__ void end_tile(int parity) {
    const int lane = Base::lane();
    fold(sum_, lane);
#pragma unroll
    for (int i = 0; i < (kSums + 7) / 8; ++i) {
      const int j = fold_index<kSums>(i, lane);
      line(Of::warp(), parity)[j / 2 * 8 + lane % 4 * 2 + j % 2] = sum_[i];
    }
  }
  __device__ __forceinline__ void flush(int b, int h, int q, int, int parity, bool) {
    const int thread = static_cast<int>(threadIdx.x) % Of::kTeamThreads, first = Of::team() * Of::kTeamWarps;
    for (int i = thread; i < Config::kRows; i += Of::kTeamThreads) {
      float sum = 0.0f;
      // Each of kShare warps with the same keys has its own part of the queries.
#pragma unroll
      for (int w = 0; w < Of::kTeamWarps / Config::kShare; ++w)
        sum += line(first + w * Config::kShare + i / Of::kCols, parity)[i % Of::kCols];
      Base::put_at(b, h, q + i, 0, sum);
    }
  }

 private:
  __device__ __forceinline__ float* line(int warp, int parity) const {
    return reinterpret_cast<float*>(Base::shared_) + (warp * Of::kLines + (Of::kLines == 1 ? 0 : parity)) * Of::kCols;
  }

  float sum_[kSums];
};

}  // namespace fusegrad::device
