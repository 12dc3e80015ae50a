// The divergences of long rows of 16-bit logits by persistent clusters: bulk copies prefetch the next row while the
// present one is computed. A warp has the same vectors of every row, copies them for itself and keeps the student's
// exponentials in registers, so a warp waits for others only in the merges over the cluster. losses/row_kernels.h has
// the formulas, jsd.cuh their base-2 form.
#pragma once

#include <cstdint>

#include "cuda/losses/device/jsd_warp.cuh"

namespace fusegrad::device {

template <class T, JsdKind kKind>
__global__ void __launch_bounds__(32 * kJsdWarps, kJsdCtas)
    jsd_by_cluster(const __grid_constant__ RowJsd p, const __grid_constant__ JsdConstants constants,
                   const __grid_constant__ JsdSplit split) {
#if __CUDA_ARCH__ >= 900
  using Warp = JsdWarp<T, kKind>;
  constexpr bool kMixed = kKind == JsdKind::kMixed, kForward = kKind == JsdKind::kForward;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ ClusterMerge<kJsdWarps, kJsdMaxCluster> merges;
  __shared__ JsdArrivals arrivals[kJsdWarps];
  __shared__ volatile float label_logit;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = cluster_rank(), size = cluster_size();
  const int clusters = static_cast<int>(gridDim.x) / size, rows = static_cast<int>(p.rows);
  merges.init();
  if (threadIdx.x == 0) {
    for (auto& of_warp : arrivals) of_warp.front[0].init(), of_warp.front[1].init(), of_warp.back.init();
    Arrival::fence_init();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  Warp part(p, constants, split, rank * kJsdWarps + warp, lane, shared_bytes + warp * (kJsdSharedBytes / kJsdWarps),
            arrivals[warp]);
  const MergeLevels<kKind> merge_levels{part.halves()};
  const bool has_hard = constants.hard != 0.f || p.hard != nullptr, writes = rank == 0 && warp == 0;
  int row = static_cast<int>(blockIdx.x) / size;
  bool needed = needs_row(p, row), next_needed = needs_row(p, row + clusters);
  part.load_front(row, 0, needed);
  part.load_back(row, needed);
  part.load_front(row + clusters, 1, next_needed);
  if (needed) part.look_ahead(row, 0);
  for (int turn = 0, merge = 0; row < rows; row += clusters, ++turn) {
    const int next = row + clusters, last = next + clusters;
    const bool last_needed = needs_row(p, last);  // long before it is used
    if (needed) {
      part.begin(row, turn);
      float student = 0.f, teacher = 0.f;  // the divergences, base 2
      // The gradient may overwrite it once all warps have come to the last merge: until then it must have been read.
      float logit = 0.f;
      if (writes && has_hard) {
        const int label = JsdRow(p, row).index;
        if (label >= 0) logit = widen(part.student(row)[label]);
      }
      JsdHalf x = part.levels(row, turn);
      if constexpr (kMixed) {
        merges.send(x, merge, warp, lane);
        if (next_needed) part.look_ahead(next, turn + 1);
        x = merges.receive(merge_levels, merge++, lane);
        part.normalize(x);
        x = part.divergences(row);
      }
      if (writes && has_hard && lane == 0) label_logit = logit;
      merges.send(x, merge, warp, lane);
      if (!kMixed && next_needed) part.look_ahead(next, turn + 1);
      const JsdRow info(p, row);  // comes during the merge
      const float upstream = info.upstream(p, row);
      if constexpr (kMixed) {
        x = merges.receive(MergeSums{}, merge++, lane);
        student = part.student_divergence(x);
        teacher = part.teacher_divergence(x);
      } else {
        x = merges.receive(merge_levels, merge++, lane);
        part.normalize(x);
        (kForward ? teacher : student) = part.divergence(x);
      }
      if (writes && lane == 0) {
        const float soft = (constants.student_share * student + constants.teacher_share * teacher) * Warp::kLn2;
        const float hard = info.index >= 0 ? part.label_loss(label_logit) : 0.f;
        write_losses(p, constants, info, row, soft, hard);
      }
      if (p.grad_student != nullptr) {
        const auto g = part.gradient_of(row, upstream, student, info.index);
        part.write_back(g, row);
        part.load_back(next, next_needed);
        part.write_front(g, row);
        part.write_label(g, row);
      } else {
        part.load_back(next, next_needed);
      }
    } else {
      part.skip(turn);
      if (next_needed) part.look_ahead(next, turn + 1);
      const JsdRow info(p, row);
      if (writes && lane == 0) write_losses(p, constants, info, row, 0.f, 0.f);
      if (p.grad_student != nullptr) part.fill(row, static_cast<T>(info.in_range ? 0.f : not_a_number()));
      part.load_back(next, next_needed);
    }
    part.load_front(last, turn, last_needed);
    needed = next_needed;
    next_needed = last_needed;
  }
#endif
}

}  // namespace fusegrad::device
