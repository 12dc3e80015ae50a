// The divergences of 16-bit log-probabilities in long rows by persistent clusters. There are no normalizers, so one
// pass makes sums and gradients from the same exponentials, and nothing waits for the one merge over the cluster.
#pragma once

#include <cstdint>

#include "cuda/losses/device/jsd_rows.cuh"

namespace fusegrad::device {

constexpr int kJsdMaxSlots = 4;

/// How the warps of a cluster share a row.
struct JsdSlots {
  int span;   // vectors of each input a warp has, a multiple of 8
  int slots;  // rows in shared memory at a time
};

/// See JsdWarpRows.
template <class T, JsdKind kKind>
class LogProbJsdWarp : public JsdWarpRows<T, kKind> {
  using Base = JsdWarpRows<T, kKind>;
  using Base::begin_, Base::end_, Base::lane_, Base::p_, Base::constants_, Base::halves_;
  using Base::kWidth, Base::kMixed, Base::kForward, Base::kReverse;
  using typename Base::P;

 public:
  using Base::kLn2;

  __device__ LogProbJsdWarp(const RowJsd& p, const JsdConstants& constants, const JsdSlots& split, int group, int lane)
      : Base(p, constants, group * split.span, (group + 1) * split.span, lane), split_(split) {}

  __device__ void load(int row, P* slot, Arrival& arrival, bool wanted) const {
#if __CUDA_ARCH__ >= 900
    fence_before_copy();
    __syncwarp();
    if (wanted) {
      this->copy(row, begin_, end_, 0, slot, kJsdWarps * split_.span, arrival);
    } else if (lane_ == 0) {
      arrival.expect(0);
    }
#endif
  }

  /// Computes the divergences' parts of a row whose vectors lie in `slot`, and its gradient.
  __device__ JsdHalf run(int row, const P* slot, float upstream) {
    const auto v = this->vectors(row);
    // Takes the lane's vectors begin_ + lane_ + 32 j with first <= 32 j < last.
    const int first = max(v.lead / kWidth - begin_, 0) - lane_, last = min(end_, v.count) - begin_ - lane_;
    const bool is_cut = begin_ < v.whole_begin || end_ > v.whole_end;  // the warp may have a vector that is
    const int column = v.column(begin_ + lane_);
    const float factor = this->gradient_factor(upstream, kMixed ? kLn2 : 1.f);
    float student = 0.f, teacher = 0.f;
#pragma unroll
    for (int j = 0; j < kJsdVectors; ++j) {
      if (32 * j < first || 32 * j >= last) continue;
      float xq[kWidth], xp[kWidth], of_q = 0.f, of_p = 0.f;
      unpack(slot[lane_ + 32 * j], xq);
      unpack(slot[kJsdWarps * split_.span + lane_ + 32 * j], xp);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float d = fmaxf((xp[i] - xq[i]) * (kReverse ? -kLog2E : kLog2E), kLowestD);
        if constexpr (kMixed) {
          const float near = fminf(d, kLargestD),
                      ratio = -log2_fast(fmaf(constants_.beta, exp2_fast(near), constants_.student_share));
          const float by = exp2_fast(xq[i] * kLog2E) * ratio;
          of_q += by;
          of_p = fmaf(exp2_fast(xp[i] * kLog2E), near + ratio, of_p);
          xq[i] = by * factor;
        } else {
          // p over q, or the reverse.
          const float weight = exp2_fast((kForward ? xp[i] : xq[i]) * kLog2E);
          const float other = kForward ? xq[i] : xp[i];  // fmaxf drops its NaN, as that of -inf in both
          (kForward ? of_p : of_q) = fmaf(weight, isnan(other) ? other : d, kForward ? of_p : of_q);
          xq[i] = weight * (kForward ? -factor : fmaf(fminf(d, 1e30f), kLn2, 1.f) * factor);
        }
      }
      student += of_q;
      teacher += of_p;
      if (p_.grad_student == nullptr) continue;
      const auto pack = packed<T, kWidth>(xq);
      if (is_cut) {
        this->vectors(row).store(this->gradient(row), begin_ + lane_ + 32 * j, pack);
      } else {
        pack.store(this->gradient(row) + column + 32 * kWidth * j);
      }
    }
    return {{0.f, halves_.sum(student, teacher)}, 0.f, 0.f};
  }

 private:
  const JsdSlots& split_;
};

template <class T, JsdKind kKind>
__global__ void __launch_bounds__(32 * kJsdWarps, kJsdCtas)
    log_prob_jsd_by_cluster(const __grid_constant__ RowJsd p, const __grid_constant__ JsdConstants constants,
                            const __grid_constant__ JsdSlots split) {
#if __CUDA_ARCH__ >= 900
  using P = Pack<T, 8>;
  using Warp = LogProbJsdWarp<T, kKind>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ ClusterMerge<kJsdWarps, kMaxCluster> merges;
  __shared__ Arrival arrivals[kJsdMaxSlots][kJsdWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = cluster_rank(), size = cluster_size();
  const int clusters = static_cast<int>(gridDim.x) / size, rows = static_cast<int>(p.rows);
  merges.init();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kJsdMaxSlots * kJsdWarps; ++i) arrivals[i / kJsdWarps][i % kJsdWarps].init();
    Arrival::fence_init();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  Warp part(p, constants, split, rank * kJsdWarps + warp, lane);
  const bool writes = rank == 0 && warp == 0 && lane == 0;
  const auto slot_at = [&](int slot) {
    return reinterpret_cast<P*>(shared_bytes) + (2 * slot * kJsdWarps + warp) * split.span;
  };
  uint32_t needed = 0;  // a bit for each row that has been asked for, the current one's first
  int row = static_cast<int>(blockIdx.x) / size;
  for (int i = 0; i < split.slots; ++i) {
    const bool is_needed = needs_row(p, row + i * clusters);
    needed |= static_cast<uint32_t>(is_needed) << i;
    part.load(row + i * clusters, slot_at(i), arrivals[i][warp], is_needed);
  }
  int slot = 0, turn = 0;
  uint32_t parity = 0;
  for (; row < rows; row += clusters) {
    const int next = row + split.slots * clusters;
    const bool next_needed = needs_row(p, next);  // long before it is used
    arrivals[slot][warp].wait_own(parity);
    __syncwarp();
    const JsdRow info(p, row);
    if (needed & 1) {
      JsdHalf x = part.run(row, slot_at(slot), info.upstream(p, row));
      merges.send(x, turn, warp, lane);
      x = merges.receive(MergeSums{}, turn++, lane);
      const float student = part.student_divergence(x), teacher = part.teacher_divergence(x);
      if (writes) {
        const float soft = (constants.student_share * student + constants.teacher_share * teacher) * Warp::kLn2;
        write_losses(p, constants, info, row, soft, 0.f);
      }
    } else {
      if (writes) write_losses(p, constants, info, row, 0.f, 0.f);
      if (p.grad_student != nullptr) part.fill(row, static_cast<T>(info.in_range ? 0.f : not_a_number()));
    }
    part.load(next, slot_at(slot), arrivals[slot][warp], next_needed);
    needed = needed >> 1 | static_cast<uint32_t>(next_needed) << (split.slots - 1);
    if (++slot == split.slots) slot = 0, parity ^= 1;
  }
#endif
}

}  // namespace fusegrad::device
