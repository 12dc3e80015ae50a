// Classes A and B: one sum for the pairs of a head, or for those of a key, in registers until the head ends.
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

/// What sums over a head's queries have in common.
template <class Of, int k>
class SumsOverQueries : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;
  using typename Base::Config;

 public:
  using Base::Base;

 protected:
  using Base::a_, Base::to_;

  // Adds the sum, which the thread has for this key alone; with kPartialSums stores it, and where it belongs.
  __device__ __forceinline__ void put_of_head(int b, int h, int kv, float sum) const {
    if constexpr (Config::kPartialSums) {
      if (sum == 0.0f) return;
      const long long at = Base::place_of(b, h, 0, kv);
      if (at < 0) return;
      const int keys = (a_.keys + Config::kCols - 1) / Config::kCols * Config::kCols;
      const long long part = static_cast<long long>(b * a_.heads + h) * Config::kShare + Of::warp() % Config::kShare;
      static_cast<float*>(to_.data)[part * keys + kv] = sum;
      to_.elements[part * keys + kv] = at;
    } else {
      Base::put_at(b, h, 0, kv, sum);
    }
  }
};

template <class Of, int k>
class SchemeSums<Of, k, Scheme::kInvariant> : public SumsOverQueries<Of, k> {
  using Base = SumsOverQueries<Of, k>;

 public:
  using Base::Base;

  __device__ __forceinline__ void begin_head() { sum_ = 0.0f; }
  template <class Reads>
  __device__ __forceinline__ void add(float v, int, int, int, float, int, int, int, int, bool, const Reads&) {
    sum_ += v;
  }
  __device__ __forceinline__ void end_head(int b, int h, int kv) const {
    float sum = sum_;
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (Base::lane() == 0) Base::put_of_head(b, h, kv, sum);
  }

 private:
  float sum_;
};

template <class Of, int k>
class SchemeSums<Of, k, Scheme::kKv> : public SumsOverQueries<Of, k> {
  using Base = SumsOverQueries<Of, k>;
  static constexpr int kRows = 2 * Of::kBlocksM;

 public:
  using Base::Base;

  __device__ __forceinline__ void begin_head() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum_[i] = 0.0f;
  }
  template <class Reads>
  __device__ __forceinline__ void add(float v, int m, int, int e, float, int, int, int, int, bool, const Reads&) {
    sum_[2 * m + e / 2] += v;
  }
  __device__ __forceinline__ void end_head(int b, int h, int kv) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = row_sum(sum_[r]);
      if (Base::lane() % 4 == 0 && kv + 8 * r < Base::a_.keys) Base::put_of_head(b, h, kv + 8 * r, sum);
    }
  }

 private:
  float sum_[kRows];  // of the thread's keys
};

}  // namespace fusegrad::device
