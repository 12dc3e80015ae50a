// What the warps of a cluster merge of a row of divergences: levels (the largest logit and the sum of exponentials) of
// both rows, and sums. Half a warp has the student's, the other half the teacher's.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device/jsd.cuh"

namespace fusegrad::device {

enum class JsdKind { kMixed, kForward, kReverse };  // 0 < b < 1, b = 0, b = 1

/// The largest of a warp's values.
__device__ inline float warp_max(float x) {
  // As integers of the same order: one instruction.
  const auto ordered = [](int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

/// Over part of a row: the largest logit and the sum of 2^(x k - largest k).
struct Level {
  float largest, sum;

  /// -inf is no reference; then every power is 0.
  __device__ static float finite(float largest) { return largest == minus_infinity() ? 0.f : largest; }
  __device__ static float reference(float largest, float k) { return __fmul_rn(finite(largest), k); }
  /// What powers of a part are multiplied by to be powers of the whole.
  __device__ static float factor(float part, float whole, float k) {
    return part == minus_infinity() ? 0.f : exp2_fast(reference(part, k) - reference(whole, k));
  }
};

/// What half a warp merges: lanes 0-15 that of the student, 16-31 that of the teacher.
struct alignas(16) JsdHalf {
  Level level;
  float dot;  // b = 0, 1, one half: the sum of its powers times (teacher's logit - student's - their largest ones')
  float unused;
};
struct Halves {
  bool teacher;
  float k, sign;  // of the logits: in exponents, in the difference

  __device__ Halves(const JsdConstants& constants, int lane)
      : teacher(lane >= 16),
        k(teacher ? constants.teacher.k : constants.student.k),
        sign(teacher ? constants.relative : -1.f) {}

  /// The other half's value.
  __device__ static float other(float x) { return __shfl_xor_sync(~0u, x, 16); }
  /// Sums of a over the warp for the lanes of the one half, of b for those of the other.
  __device__ float sum(float a, float b) const { return OverLanes{16}.sum((teacher ? b : a) + other(teacher ? a : b)); }
  /// The teacher's largest logit less the student's, the same bits in both halves.
  __device__ float difference(float largest) const {
    const float mine = __fmul_rn(Level::finite(largest), sign);
    return mine + other(mine);
  }
};

/// The merge of levels over `kLanes` lanes of a half, and of the dot products, if there are.
template <JsdKind kKind>
struct MergeLevels {
  const Halves& halves;

  template <int kLanes>
  __device__ void over_lanes(JsdHalf& x) const {
    const OverLanes over{kLanes};
    const float part = x.level.largest, whole = over.max(part), factor = Level::factor(part, whole, halves.k);
    if constexpr (kKind != JsdKind::kMixed) {
      const float shift = halves.difference(part) - halves.difference(whole);
      x.dot =
          over.sum(factor * (halves.teacher == (kKind == JsdKind::kForward) ? fmaf(shift, x.level.sum, x.dot) : 0.f));
    }
    x.level = {whole, over.sum(factor * x.level.sum)};
  }
};
struct MergeSums {
  template <int kLanes>
  __device__ void over_lanes(JsdHalf& x) const {
    x.level.sum = OverLanes{kLanes}.sum(x.level.sum);
  }
};

/// Shared memory through which the warps of a cluster merge, in turns 0, 1, ... A warp that has got a turn's result may
/// be ahead of others by one turn, so two sets are enough. No CTA is sent anything after the last turn, which it waits
/// for: memory of CTAs that have left is not touched.
template <int kWarps>
class ClusterMerge {
 public:
  /// By all threads; Arrival::fence_init() by thread 0 and a barrier of the cluster must follow.
  __device__ void init() {
    for (int i = threadIdx.x; i < 2 * 2 * kMaxCluster; i += 32 * kWarps) {
      (&ranks_[0][0][0])[i] = {{minus_infinity(), 0.f}, 0.f, 0.f};  // ranks that a smaller cluster does not have
    }
    if (threadIdx.x != 0) return;
    for (int i = 0; i < 2; ++i) {
      warps_arrival_[i].init(2 * kWarps);
      ranks_arrival_[i].init();
    }
  }
  /// Every half warp brings its state, the same in all its lanes, and gets the cluster's.
  template <class Merge>
  __device__ void merge(JsdHalf& x, const Merge& merge, int turn, int warp, int lane) {
#if __CUDA_ARCH__ >= 900
    const int set = turn & 1, half = lane / 16, size = cluster_size(), to = lane % 16;
    const uint32_t parity = turn >> 1 & 1;
    if (to == 0) {
      warps_[set][half][warp] = x;
      warps_arrival_[set].arrive();
    }
    if (warp == 0) {
      warps_arrival_[set].wait_own(parity);
      x = warps_[set][half][lane % kWarps];
      merge.template over_lanes<kWarps>(x);
      if (lane == 0) ranks_arrival_[set].expect(size * 2 * sizeof(JsdHalf));
      if (to < size) {
        uint4 words;
        memcpy(&words, &x, sizeof words);
        store_counted(remote_address(&ranks_[set][half][cluster_rank()], to), words,
                      remote_address(&ranks_arrival_[set], to));
      }
    }
    ranks_arrival_[set].wait(parity);
    x = ranks_[set][half][to];
    merge.template over_lanes<kMaxCluster>(x);
#endif
  }

 private:
  JsdHalf warps_[2][2][kWarps];
  JsdHalf ranks_[2][2][kMaxCluster];
  Arrival warps_arrival_[2], ranks_arrival_[2];
};

}  // namespace fusegrad::device
