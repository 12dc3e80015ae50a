// A warp's view of the rows that a persistent cluster computes one after the other: the same vectors of every row,
// which a bulk copy brings for this warp alone.
#pragma once

#include <cstdint>

#include "cuda/losses/device/jsd_merge.cuh"

namespace fusegrad::device {

constexpr int kJsdWarps = 8, kJsdCtas = 2;  // of a CTA, on a multiprocessor
constexpr int kJsdVectors = 8;              // of each input a lane has
constexpr int kJsdMaxCluster = 8;           // of logits

/// A warp's vectors [begin, end) of each row. T has 16 bits.
template <class T, JsdKind kKind>
class JsdWarpRows {
 protected:
  static constexpr int kWidth = 8;
  static constexpr bool kMixed = kKind == JsdKind::kMixed, kForward = kKind == JsdKind::kForward,
                        kReverse = kKind == JsdKind::kReverse;
  using P = Pack<T, kWidth>;

 public:
  static constexpr float kLn2 = static_cast<float>(kInverseLog2E);

  __device__ JsdWarpRows(const RowJsd& p, const JsdConstants& constants, int begin, int end, int lane)
      : p_(p), constants_(constants), halves_(constants, lane), lane_(lane), begin_(begin), end_(end) {}

  __device__ const T* student(int row) const { return static_cast<const T*>(p_.student) + row * p_.student_stride; }
  __device__ const T* teacher(int row) const { return static_cast<const T*>(p_.teacher) + row * p_.teacher_stride; }
  __device__ T* gradient(int row) const { return static_cast<T*>(p_.grad_student) + row * p_.grad_student_stride; }
  __device__ RowVectors<T, kWidth> vectors(int row) const { return {student(row), p_.cols, kLineBytes}; }
  __device__ const Halves& halves() const { return halves_; }

  /// Fills the gradient of a row that has none of its own: x is 0 or NaN.
  __device__ void fill(int row, T x) const {
    const auto all = vectors(row);
    for (int v = max(begin_, all.lead / kWidth) + lane_; v < min(end_, all.count); v += 32) {
      all.store(gradient(row), v, filled<T, kWidth>(x));
    }
  }
  /// The divergences of the row from the merged parts, base 2.
  __device__ static float student_divergence(const JsdHalf& x) { return __shfl_sync(~0u, x.level.sum, 0); }
  __device__ static float teacher_divergence(const JsdHalf& x) { return __shfl_sync(~0u, x.level.sum, 16); }

 protected:
  /// Starts the copies of the vectors [from, to) into `slot`: the student's, `apart` vectors further the teacher's. Cut
  /// vectors are filled up with -inf; if there are any vectors, so are as many as `padded` has more.
  __device__ void copy(int row, int from, int to, int padded, P* slot, int apart, Arrival& arrival) const {
#if __CUDA_ARCH__ >= 900
    const auto v = vectors(row);
    const int first = max(from, v.lead / kWidth), end = min(to, v.count);
    const int whole_first = max(first, v.whole_begin), whole_end = min(end, v.whole_end);
    if (lane_ == 0) {
      const uint32_t bytes = max(whole_end - whole_first, 0) * sizeof(P);
      arrival.expect(2 * bytes);
      if (bytes > 0) {
        const int c = v.column(whole_first);
        arrival.copy(slot + (whole_first - from), student(row) + c, bytes);
        arrival.copy(slot + apart + (whole_first - from), teacher(row) + c, bytes);
      }
    }
    const auto pad = [&](int i, int last) {
      for (i += lane_; i < last; i += 32) {
        slot[i - from] = i < end ? v.load(student(row), i, lowest_pad<T>()) : filled<T, kWidth>(lowest_pad<T>());
        slot[apart + i - from] =
            i < end ? v.load(teacher(row), i, lowest_pad<T>()) : filled<T, kWidth>(lowest_pad<T>());
      }
    };
    if (from < end) {
      pad(from, min(whole_first, end));
      pad(max(whole_end, from), max(end, from + padded));
    }
#endif
  }
  /// The factor of a gradient's base-2 ratios, or of its probabilities at b = 0. `scale`: that of the logits.
  __device__ float gradient_factor(float upstream, float scale) const {
    const float soft = upstream * constants_.soft;
    if (soft == 0.f) return 0.f;
    return soft * scale * (kForward ? 1.f : constants_.student_share);
  }

  const RowJsd& p_;
  const JsdConstants& constants_;
  const Halves halves_;
  const int lane_, begin_, end_;
};

}  // namespace fusegrad::device
