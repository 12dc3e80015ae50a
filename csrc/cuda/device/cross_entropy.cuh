// Cross entropy as a functor of the row skeleton: what is added up over a row, and the last step. The formulas stand
// in rows/row_kernels.h.
//
// Exponentials are base 2. With k = scale * log2(e), (z[c] - m) * log2(e) is x[c] * k - m2: one fused multiply-add
// whose result is exact to float32 whatever the offset of the logits, because m2 is itself a float.
#pragma once

#include <cstdint>

#include "cuda/device/vector.cuh"
#include "rows/row_kernels.h"

namespace fusegrad::device {

constexpr float kLog2E = 1.4426950408889634f;
// The inverse of the float kLog2E, not of log2(e): base-2 and natural values convert back and forth exactly.
constexpr double kInverseLog2E = 1.0 / static_cast<double>(kLog2E);
constexpr int kNoColumn = 0x7fffffff;

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }

/// Which parts of the functor are compiled in.
enum class Mode {
  kPlain,   // class indices, no smoothing, no softcap, a positive scale, no entropy or prediction
  kSparse,  // class indices, everything else
  kDense,   // a coefficient for every column
};

/// The options as the kernels use them, computed once on the host.
struct Constants {
  float uniform;  // smoothing / V
  float keep;     // 1 - smoothing
  float scale, cap, inverse_cap;
  float k;  // scale * log2(e)
  float z_loss;

  Constants(const RowTargets& targets, const LogitTransform& transform, double z_loss, int64_t vocab)
      : uniform(static_cast<float>(targets.smoothing / static_cast<double>(vocab))),
        keep(static_cast<float>(1.0 - targets.smoothing)),
        scale(static_cast<float>(transform.scale)),
        cap(static_cast<float>(transform.cap)),
        inverse_cap(transform.cap == 0.0 ? 0.f : static_cast<float>(1.0 / transform.cap)),
        k(static_cast<float>(transform.scale) * kLog2E),
        z_loss(static_cast<float>(z_loss)) {}
};

/// tanh to the accuracy of the logits' dtype: 1 - 2 / (1 + e^2x) is absolute to 1e-7, which low precision cannot see.
template <class T>
__device__ inline float tanh_for(float x) {
  return 1.f - 2.f * __frcp_rn(1.f + exp2_fast(2.f * kLog2E * x));
}
template <>
__device__ inline float tanh_for<float>(float x) {
  return tanhf(x);
}

/// A row's target.
template <class T>
struct RowTarget {
  int index = -1;        // class index; -1 for probabilities, and where there is none to read at
  bool kept = true;      // not ignored
  bool in_range = true;  // false: the row's loss and gradient are NaN
  float token_weight = 1.f;
  float at_index = 0.f;  // a[index] without its share of smoothing
  const float* class_weight;
  const T* low = nullptr;       // probabilities in the logits' dtype,
  const float* full = nullptr;  // or in float32

  __device__ RowTarget(const RowTargets& t, const Constants& constants, int64_t row, int64_t vocab)
      : class_weight(static_cast<const float*>(t.class_weight)) {
    if (t.token_weight != nullptr) token_weight = static_cast<const float*>(t.token_weight)[row];
    if (t.index != nullptr) {
      const int64_t y =
          t.index_is_int32 ? static_cast<const int32_t*>(t.index)[row] : static_cast<const int64_t*>(t.index)[row];
      kept = y != t.ignore_index;
      in_range = !kept || (y >= 0 && y < vocab);
      if (kept && in_range) {
        index = static_cast<int>(y);
        at_index = constants.keep * (class_weight != nullptr ? class_weight[y] : 1.f);
      }
    } else if (t.probability_is_acc) {
      full = static_cast<const float*>(t.probability) + row * t.probability_stride;
    } else {
      low = static_cast<const T*>(t.probability) + row * t.probability_stride;
    }
  }

  /// a[c] of dense targets, without at_index; `first` is where the row's pointers start in the vocabulary.
  __device__ float coefficient(const Constants& constants, int c, int first) const {
    float a = constants.uniform;
    if (full != nullptr) a = fmaf(full[c], constants.keep, a);
    if (low != nullptr) a = fmaf(widen(low[c]), constants.keep, a);
    return class_weight != nullptr ? a * class_weight[first + c] : a;
  }
  /// A of sparse targets.
  __device__ float sparse_mass(const Constants& constants, int64_t vocab) const {
    return at_index + constants.uniform * static_cast<float>(vocab);
  }
};

/// Sums over part of a row, relative to the part's own largest exponent m2. -inf is a valid reference while nothing
/// finite has come: then every 2^y is 0.
template <Mode kMode>
struct RowSums;

template <>
struct RowSums<Mode::kPlain> {
  float m2 = minus_infinity();
  float sum = 0.f;  // 2^y, y = x k - m2

  __device__ void rebase(float larger) {
    if (m2 != larger) sum *= exp2_fast(m2 - larger);
    m2 = larger;
  }
  __device__ void merge(RowSums other) {
    const float larger = fmaxf(m2, other.m2);
    rebase(larger);
    other.rebase(larger);
    sum += other.sum;
  }
};

template <Mode kMode>
struct RowSums {
  float m2 = minus_infinity();
  float sum = 0.f;
  float count = 0.f;    // columns
  float shifted = 0.f;  // y
  float entropy = 0.f;  // 2^y * y
  float dot = 0.f;      // dense: a * y
  float mass = 0.f;     // dense: a
  float best = minus_infinity();
  int best_column = kNoColumn;

  __device__ void rebase(float larger) {
    if (m2 == larger) return;
    const float shift = m2 - larger;
    if (m2 > minus_infinity()) {
      shifted = fmaf(count, shift, shifted);
      dot = fmaf(mass, shift, dot);
      entropy = fmaf(sum, shift, entropy) * exp2_fast(shift);
    } else {
      // Only -inf so far, or nothing: seen from a finite reference each of them is -inf.
      if (count > 0.f) shifted = minus_infinity();
      if (mass > 0.f) dot = minus_infinity();
    }
    sum *= exp2_fast(shift);
    m2 = larger;
  }
  __device__ void merge(RowSums other) {
    const float larger = fmaxf(m2, other.m2);
    rebase(larger);
    other.rebase(larger);
    sum += other.sum;
    count += other.count;
    shifted += other.shifted;
    entropy += other.entropy;
    dot += other.dot;
    mass += other.mass;
    if (other.best > best || (other.best == best && other.best_column < best_column)) {
      best = other.best;
      best_column = other.best_column;
    }
  }
};

/// The functor. T: dtype of the logits.
template <class T, Mode kMode>
struct CrossEntropy {
  using Params = RowForward;
  using Sums = RowSums<kMode>;

  const Params& p;
  const Constants& constants;
  int64_t row;
  RowTarget<T> target;
  float target_logit = 0.f;

  __device__ CrossEntropy(const Params& p, const Constants& constants, int64_t row)
      : p(p), constants(constants), row(row), target(p.targets, constants, row, p.cols) {
    // Before anything is written over the logits.
    if (target.index >= 0) {
      target_logit = widen((static_cast<const T*>(p.logits) + row * p.logits_stride)[target.index]);
    }
  }

  __device__ bool needs_row() const { return target.in_range && (target.kept || p.lse_of_ignored); }
  /// What the gradient of a row that is not a kept one in range consists of.
  __device__ bool constant_gradient() const { return !target.kept || !target.in_range; }
  __device__ float constant() const { return target.in_range ? 0.f : not_a_number(); }

  // x * k - m2, with the softcap in between.
  __device__ float exponent(float x, float m2) const {
    if (kMode != Mode::kPlain && constants.cap != 0.f) {
      return fmaf(constants.cap * tanh_for<T>(x * constants.scale * constants.inverse_cap), kLog2E, -m2);
    }
    return fmaf(x, constants.k, -m2);
  }

  /// Adds kCount vectors. `column(j)` is the first column of vector j; columns outside [0, V) hold -inf.
  template <int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kCount], const Column& column) const {
    float largest = minus_infinity();
    if constexpr (kMode == Mode::kPlain) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        float x[kWidth];
        unpack(packs[j], x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, x[i]);
      }
      sums.rebase(fmaxf(sums.m2, largest * constants.k));
      const float reference = sums.m2 == minus_infinity() ? 0.f : sums.m2;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        float x[kWidth], part = 0.f;
        unpack(packs[j], x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) part += exp2_fast(exponent(x[i], reference));
        sums.sum += part;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) add_vector<kWidth>(sums, packs[j], column(j));
    }
  }

  template <int kWidth>
  __device__ void add_vector(Sums& sums, const Pack<T, kWidth>& pack, int first) const {
    float e[kWidth], largest = minus_infinity();
    unpack(pack, e);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const bool inside = first + i >= 0 && first + i < p.cols;
      e[i] = inside ? exponent(e[i], 0.f) : minus_infinity();
      largest = fmaxf(largest, e[i]);
      if (p.predicted != nullptr && e[i] > sums.best) {
        sums.best = e[i];
        sums.best_column = first + i;
      }
    }
    sums.rebase(fmaxf(sums.m2, largest));
    const float reference = sums.m2 == minus_infinity() ? 0.f : sums.m2;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float y = e[i] - reference, power = exp2_fast(y);
      sums.sum += power;
      if (p.entropy != nullptr && power > 0.f) sums.entropy = fmaf(power, y, sums.entropy);
      const int c = first + i;
      if (c < 0 || c >= p.cols) continue;
      if constexpr (kMode == Mode::kDense) {
        const float a = target.coefficient(constants, c, 0);
        if (a != 0.f) sums.dot = fmaf(a, y, sums.dot);
        sums.mass += a;
      } else if (constants.uniform != 0.f) {
        sums.shifted += y;
        sums.count += 1.f;
      }
    }
  }

  /// What the gradient of the row is made of: (P * 2^y - Q * a) * dz/dx.
  struct Gradient {
    float m2, P, Q;
  };

  __device__ Gradient finish(const Sums& sums, bool writes) const {
    const float log2_sum = log2f(sums.sum);
    const auto* scales = static_cast<const float*>(p.scales);
    const float ce_scale = scales != nullptr ? scales[0] : 1.f;
    const float z_scale = scales != nullptr ? scales[1] : 1.f;
    float mass = target.sparse_mass(constants, p.cols);
    if constexpr (kMode == Mode::kDense) mass = sums.mass + target.at_index;
    const float lse = (sums.m2 + log2_sum) * static_cast<float>(kInverseLog2E);
    if (writes) write(sums, log2_sum, mass, ce_scale, z_scale);
    float P = target.token_weight * ce_scale * mass;
    if (constants.z_loss != 0.f) {
      P = fmaf(target.token_weight * z_scale * 2.f * constants.z_loss, lse, P);
    }
    return {sums.m2, P / sums.sum, target.token_weight * ce_scale};
  }

  __device__ void write(const Sums& sums, float log2_sum, float mass, float ce_scale, float z_scale) const {
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    const double lse_exact = (static_cast<double>(sums.m2) + static_cast<double>(log2_sum)) * kInverseLog2E;
    const float lse = static_cast<float>(lse_exact);
    const float y_target = exponent(target_logit, sums.m2);
    float dot = 0.f;
    if constexpr (kMode == Mode::kDense) {
      dot = sums.dot;
    } else if constexpr (kMode == Mode::kSparse) {
      if (constants.uniform != 0.f) dot = constants.uniform * sums.shifted;
    }
    if (target.at_index != 0.f) dot = fmaf(target.at_index, y_target, dot);
    const float z_term = constants.z_loss != 0.f ? constants.z_loss * lse * lse : 0.f;
    float loss = ce_scale * (mass * log2_sum - dot) * ln2;
    if (constants.z_loss != 0.f) loss = fmaf(z_scale, z_term, loss);

    const auto put = [&](void* out, float value) {
      if (out != nullptr) static_cast<float*>(out)[row] = value;
    };
    // Of a row that is ignored, and of one whose index is out of range.
    const auto put_kept = [&](void* out, float value) {
      put(out, !target.kept ? 0.f : target.in_range ? value : not_a_number());
    };
    put_kept(p.loss, target.token_weight * loss);
    put_kept(p.mass, mass);
    put_kept(p.z_loss_term, z_term);
    put_kept(p.token_log_prob, (y_target - log2_sum) * ln2);
    put(p.lse, needs_row() ? lse : constant());
    put(p.lse_low, needs_row() ? static_cast<float>(lse_exact - static_cast<double>(lse)) : 0.f);
    if constexpr (kMode != Mode::kPlain) {
      put_kept(p.entropy, (log2_sum - sums.entropy / sums.sum) * ln2);
      if (p.predicted != nullptr) {
        const int best = sums.best_column == kNoColumn ? 0 : sums.best_column;
        static_cast<int64_t*>(p.predicted)[row] = target.kept && target.in_range ? best : -1;
      }
    }
  }

  /// The gradient of one vector, in place.
  template <int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth>& pack, int first) const {
    float x[kWidth];
    unpack(pack, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float slope = constants.scale, y;
      if (kMode != Mode::kPlain && constants.cap != 0.f) {
        const float t = tanh_for<T>(x[i] * constants.scale * constants.inverse_cap);
        slope *= 1.f - t * t;
        y = fmaf(constants.cap * t, kLog2E, -g.m2);
      } else {
        y = fmaf(x[i], constants.k, -g.m2);
      }
      float value = g.P * exp2_fast(y);
      if constexpr (kMode == Mode::kSparse) value = fmaf(-g.Q, constants.uniform, value);
      if constexpr (kMode == Mode::kDense) {
        const int c = first + i;
        if (c >= 0 && c < p.cols) value = fmaf(-g.Q, target.coefficient(constants, c, 0), value);
      }
      if (target.index - first == i) value = fmaf(-g.Q, target.at_index, value);
      x[i] = value * slope;
    }
    pack = packed<T, kWidth>(x);
  }
};

}  // namespace fusegrad::device
