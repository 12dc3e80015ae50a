// What the warps of a cluster merge for a row of divergences: levels (the largest logit and the sum of exponentials) of
// both rows, and sums. Half of a warp's lanes have the student's, the others the teacher's.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/losses/device/jsd.cuh"

namespace fusegrad::device {

enum class JsdKind { kMixed, kForward, kReverse };  // 0 < b < 1, b = 0, b = 1

/// The largest of a warp's values.
__device__ inline float warp_max(float x) {
  // Compared as integers of the same order, which takes one instruction.
  const auto ordered = [](int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

/// The level of part of a row: the largest logit and the sum of 2^(x k - largest k).
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
  float dot;    // b = 0, 1, one half: the sum of its powers times (teacher's logit - student's - shift)
  float shift;  // the difference of the largest ones
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
  /// Sums over the warp: of a for the lanes of one half, of b for those of the other.
  __device__ float sum(float a, float b) const { return OverLanes{16}.sum((teacher ? b : a) + other(teacher ? a : b)); }
  /// The teacher's largest logit less the student's, the same bits in both halves.
  __device__ float difference(float largest) const {
    const float mine = __fmul_rn(Level::finite(largest), sign);
    return mine + other(mine);
  }
};

/// The merge of what 16 lanes of a half have, several states each: of levels and the dot products, if there are.
template <JsdKind kKind>
struct MergeLevels {
  const Halves& halves;

  template <int kParts>
  __device__ JsdHalf operator()(const JsdHalf (&parts)[kParts]) const {
    const OverLanes over{16};
    float whole = parts[0].level.largest, sum = 0.f, dot = 0.f;
#pragma unroll
    for (int i = 1; i < kParts; ++i) whole = fmaxf(whole, parts[i].level.largest);
    whole = over.max(whole);
    const float shift = kKind == JsdKind::kMixed ? 0.f : halves.difference(whole);
    const bool has_dot = halves.teacher == (kKind == JsdKind::kForward);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float scaled = Level::factor(parts[i].level.largest, whole, halves.k);
      sum = fmaf(scaled, parts[i].level.sum, sum);
      if constexpr (kKind != JsdKind::kMixed) {
        dot += scaled * (has_dot ? fmaf(parts[i].shift - shift, parts[i].level.sum, parts[i].dot) : 0.f);
      }
    }
    if constexpr (kKind != JsdKind::kMixed) dot = over.sum(dot);
    return {{whole, over.sum(sum)}, dot, shift};
  }
};
struct MergeSums {
  template <int kParts>
  __device__ JsdHalf operator()(const JsdHalf (&parts)[kParts]) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum += parts[i].level.sum;
    return {{0.f, OverLanes{16}.sum(sum)}, 0.f, 0.f};
  }
};

/// Shared memory through which the warps of a cluster of at most kCluster CTAs merge, in turns 0, 1, ...: each sends
/// its state to all CTAs. A warp that has got a turn's result may be ahead of others by one turn, so two sets are
/// enough. No CTA is sent anything after the last turn, which it waits for: memory of CTAs that have left is not
/// touched.
template <int kWarps, int kCluster>
class ClusterMerge {
 public:
  /// Called by all threads; Arrival::fence_init() by thread 0 and a barrier of the cluster must follow.
  __device__ void init() {
    for (int i = threadIdx.x; i < 2 * 2 * kCluster * kWarps; i += 32 * kWarps) {
      (&states_[0][0][0])[i] = {{minus_infinity(), 0.f}, 0.f, 0.f};  // of ranks that a smaller cluster does not have
    }
    if (threadIdx.x != 0) return;
    for (auto& arrival : arrivals_) arrival.init();
  }
  /// Every half warp brings its state, the same in all its lanes.
  __device__ void send(const JsdHalf& x, int turn, int warp, int lane) {
#if __CUDA_ARCH__ >= 900
    const int set = turn & 1, half = lane / 16, size = cluster_size(), to = lane % 16;
    if (to < size) {
      uint4 words;
      memcpy(&words, &x, sizeof words);
      store_counted(remote_address(&states_[set][half][cluster_rank() * kWarps + warp], to), words,
                    remote_address(&arrivals_[set], to));
    }
    if (threadIdx.x == 0) arrivals_[set].expect(size * kWarps * 2 * sizeof(JsdHalf));
#endif
  }
  /// Returns the cluster's state to every half warp.
  template <class Merge>
  __device__ JsdHalf receive(const Merge& merge, int turn, int lane) {
    constexpr int kParts = kCluster * kWarps / 16;
    constexpr int kAlways = 4;  // where there may be more, smaller clusters skip them
    const int set = turn & 1, half = lane / 16;
    arrivals_[set].wait(turn >> 1 & 1);
    JsdHalf parts[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i] = {{minus_infinity(), 0.f}, 0.f, 0.f};
      if (i < kAlways || 16 * i < cluster_size() * kWarps) parts[i] = states_[set][half][16 * i + lane % 16];
    }
    return merge(parts);
  }

 private:
  JsdHalf states_[2][2][kCluster * kWarps];
  Arrival arrivals_[2];
};

}  // namespace fusegrad::device
