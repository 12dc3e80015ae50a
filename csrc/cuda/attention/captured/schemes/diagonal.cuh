// Class D: one sum for the pairs of a diagonal, of each tile.
//
// For 16 keys m and 8 queries a thread has two sums of two elements each, which fold them to 8 keys by 8 queries: row
// g, columns 2 * t and 2 * t + 1, on diagonals 8 * n + 2 * t - g and the next one. In rows 2 * i and 2 * i + 1 one
// thread's second diagonal is another's first: after a shuffle both rows together have each of their diagonals once, in
// a line. A warp has four lines.
#pragma once

#include "cuda/attention/captured/schemes/contribution.cuh"

namespace fusegrad::device {

template <class Of, int k>
class SchemeSums<Of, k, Scheme::kDiagonal> : public Contribution<Of, k> {
  using Base = Contribution<Of, k>;
  using typename Base::Config;
  static constexpr int kBlocksM = Of::kBlocksM, kBlocksN = Of::kBlocksN;
  static constexpr int kDiagonals = Of::kCols + Of::kKeys - 1;  // of a warp's part
  static constexpr int kLine = Of::kMemory.diagonal_line();     // floats, of two of eight rows of keys
  using Base::lane;

 public:
  using Base::Base;

  __device__ __forceinline__ void begin_head() { sum_[0] = sum_[1] = above_ = 0.0f; }
  template <class Reads>
  __device__ __forceinline__ void add(float v, int, int, int e, float, int, int, int, int, bool, const Reads&) {
    // 8 keys on, 8 queries back is the same diagonal.
    if (e < 2) {
      next_[e] = v;
    } else {
      sum_[e - 2] += v;
    }
  }
  __device__ __forceinline__ void end_block(int m, int n, int, int) {
    keep_diagonals(m, n - 1);
    sum_[0] = next_[0];
    sum_[1] = next_[1];
    if (n + 1 == kBlocksN) {
      keep_diagonals(m, n);
      sum_[0] = sum_[1] = 0.0f;
      keep_diagonals(m, n + 1);
      if (lane() % 8 == 4) keep(m, n + 1);
      above_ = 0.0f;
      if constexpr (kBlocksM > 1) __syncwarp();
    }
  }
  __device__ __forceinline__ void flush(int b, int h, int q, int kv, int, bool) {
    const int thread = static_cast<int>(threadIdx.x) % Of::kTeamThreads, first = Of::team() * Of::kTeamWarps;
    // Beyond the last diagonal sums are 0.
    constexpr bool kMeet = Of::Derivative::kContribution[k].meets;
    constexpr int kAll = Config::kRows + Of::kTeamKeys - 1, kPlaces = kMeet ? round_up_to(kAll, kLanes) : kAll;
    for (int i = thread; i < kPlaces; i += Of::kTeamThreads) {
      const int difference = i - (Of::kTeamKeys - 1);  // of q and kv within the team's part of the tile
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < Of::kTeamWarps; ++w) {
        const int d = difference + w / Config::kShare * Of::kKeys - w % Config::kShare * Of::kCols + Of::kKeys - 1;
        if (d < 0 || d >= kDiagonals) continue;
        float* of_warp = lines(first + w) + d;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          sum += of_warp[g * kLine];
          if constexpr (kBlocksM > 1) of_warp[g * kLine] = 0.0f;
        }
      }
      // The diagonal's representative lies in the tile, and so within the lengths if any pair of it does.
      const int down = difference < 0 ? -difference : 0;
      const int at_q = q + difference + down, at_kv = kv + Of::team() * Of::kTeamKeys + down;
      if constexpr (kMeet) {
        put_run(b, h, at_q, at_kv, sum);
      } else {
        Base::put_at(b, h, at_q, at_kv, sum);
      }
    }
  }

 private:
  __device__ __forceinline__ float* lines(int warp) const {
    return reinterpret_cast<float*>(Base::shared_) + warp * 4 * kLine;
  }
  __device__ __forceinline__ void keep_diagonals(int m, int n) {
    const int t = lane() % 4;
    const bool odd = lane() % 8 >= 4;
    const float sent = !odd && t == 3 ? above_ : sum_[1];
    const float received = __shfl_sync(~0u, sent, odd ? lane() - (t == 0 ? 1 : 5) : lane() + 4);
    // Stored a block later: the shuffle takes a while.
    if (n >= 0) keep(m, n - 1);
    above_ = sum_[1];
    kept_[0] = sum_[0];
    kept_[1] = received;
  }
  __device__ __forceinline__ void keep(int m, int n) {
    const int at = lane() / 8 * kLine + lane() % 4 * 2 - lane() / 4 + 15 + (kBlocksM - 1 - m) * 16 + n * 8;
    float& to = lines(Of::warp())[at];
    to = kBlocksM > 1 ? to + (kept_[0] + kept_[1]) : kept_[0] + kept_[1];
  }
  // put_at, called by whole warps: where lanes side by side have one element, the first of them adds for all. Additions
  // to one place of memory come one after the other.
  __device__ __forceinline__ void put_run(int b, int h, int q, int kv, float sum) const {
    long long at = -1;
    if (sum != 0.0f) at = Base::place_of(b, h, q, kv);
    const long long before = __shfl_up_sync(~0u, at, 1);
    const unsigned firsts = __ballot_sync(~0u, lane() == 0 || before != at);
    // Lanes up to the next first one, or the warp's end.
    const int run = __ffs(static_cast<int>(firsts >> lane() >> 1 | 1u << (kLanes - 1 - lane())));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float further = __shfl_down_sync(~0u, sum, step);
      if (step < run) sum += further;
    }
    if ((firsts >> lane() & 1) != 0 && at >= 0) Base::put(at, sum);
  }

  float sum_[2], next_[2];  // of this block's diagonals, and what its upper keys give the next block's
  float above_, kept_[2];
};

}  // namespace fusegrad::device
