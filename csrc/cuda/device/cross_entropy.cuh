// Cross entropy as a functor of the row skeleton: what is added up over a row, and the last step. The formulas stand
// in rows/row_kernels.h.
//
// Exponentials are base 2. With k = scale * log2(e), z[c] - m is (x[c] * k - m2) / log2(e): one fused multiply-add whose
// result is exact to float32 whatever the offset of the logits, because m2 is itself a float.
#pragma once

#include <cstdint>

#include "cuda/device/vector.cuh"
#include "rows/row_kernels.h"

namespace fusegrad::device {

constexpr float kLog2E = 1.4426950408889634f;
// The inverse of the float kLog2E, not of log2(e): base-2 and natural values must convert back and forth exactly.
constexpr double kInverseLog2E = 1.0 / static_cast<double>(kLog2E);

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

/// x as a base-2 exponent, z * log2(e).
template <Mode kMode>
struct Exponent {
  float k, cap, inverse_cap, slope_scale;

  __device__ explicit Exponent(const LogitTransform& t)
      : k(static_cast<float>(t.scale) * kLog2E),
        cap(static_cast<float>(t.cap)),
        inverse_cap(t.cap == 0 ? 0.f : static_cast<float>(1 / t.cap)),
        slope_scale(static_cast<float>(t.scale)) {
    if (cap != 0.f) k = slope_scale;
  }
  // x * k - m2, with the softcap in between.
  __device__ float operator()(float x, float m2) const {
    if (kMode != Mode::kPlain && cap != 0.f) return fmaf(cap * tanhf(x * k * inverse_cap), kLog2E, -m2);
    return fmaf(x, k, -m2);
  }
  // dz/dx
  __device__ float slope(float x) const {
    if (kMode != Mode::kPlain && cap != 0.f) {
      const float t = tanhf(x * k * inverse_cap);
      return (1.f - t * t) * slope_scale;
    }
    return slope_scale;
  }
};

/// A row's target.
template <class T>
struct RowTarget {
  int64_t index = -1;    // class index; -1 for probabilities
  bool kept = true;      // not ignored
  bool in_range = true;  // false: the row's loss and gradient are NaN
  float token_weight = 1.f;
  float at_index = 0.f;  // a[index] without its share of smoothing
  float uniform;         // smoothing / V
  float keep;            // 1 - smoothing
  const float* class_weight;
  const T* low = nullptr;       // probabilities in the logits' dtype,
  const float* full = nullptr;  // or in float32

  __device__ RowTarget(const RowTargets& t, int64_t row, int64_t vocab)
      : uniform(static_cast<float>(t.smoothing / static_cast<double>(vocab))),
        keep(static_cast<float>(1.0 - t.smoothing)),
        class_weight(static_cast<const float*>(t.class_weight)) {
    if (t.token_weight != nullptr) token_weight = static_cast<const float*>(t.token_weight)[row];
    if (t.index != nullptr) {
      index = t.index_is_int32 ? static_cast<const int32_t*>(t.index)[row] : static_cast<const int64_t*>(t.index)[row];
      kept = index != t.ignore_index;
      in_range = !kept || (index >= 0 && index < vocab);
      if (kept && in_range) at_index = keep * (class_weight != nullptr ? class_weight[index] : 1.f);
      if (!kept || !in_range) index = -1;
    } else if (t.probability_is_acc) {
      full = static_cast<const float*>(t.probability) + row * t.probability_stride;
    } else {
      low = static_cast<const T*>(t.probability) + row * t.probability_stride;
    }
  }

  /// a[c] of dense targets, without at_index; `first` is the row pointers' first column in the vocabulary.
  __device__ float coefficient(int64_t c, int64_t first) const {
    float a = uniform;
    if (full != nullptr) a = fmaf(full[c], keep, a);
    if (low != nullptr) a = fmaf(to_float(low[c]), keep, a);
    return class_weight != nullptr ? a * class_weight[first + c] : a;
  }
  /// A of sparse targets.
  __device__ float sparse_mass(int64_t vocab) const { return at_index + uniform * static_cast<float>(vocab); }
};

/// Sums over part of a row, relative to the part's own largest exponent m2.
template <Mode kMode>
struct RowSums;

template <>
struct RowSums<Mode::kPlain> {
  float m2 = minus_infinity();
  float sum = 0.f;  // 2^(x k - m2)

  // Everything so far relative to a larger m2. -inf stays a valid reference as long as nothing finite came.
  __device__ float rebase(float larger) {
    const float shift = m2 == larger ? 0.f : m2 - larger;
    sum *= exp2_fast(shift);
    m2 = larger;
    return shift;
  }
  __device__ void merge(const RowSums& other) {
    RowSums o = other;
    const float larger = fmaxf(m2, o.m2);
    rebase(larger);
    o.rebase(larger);
    sum += o.sum;
  }
};

template <Mode kMode>
struct RowSums {
  float m2 = minus_infinity();
  float sum = 0.f;
  float count = 0.f;    // columns, as a float: exact up to 2^24 a thread and harmless beyond
  float shifted = 0.f;  // sum of x k - m2
  float entropy = 0.f;  // sum of 2^y * y, y = x k - m2
  float dot = 0.f;      // dense: sum of a * y
  float mass = 0.f;     // dense: sum of a
  float best = minus_infinity();
  int32_t best_column = 0x7fffffff;

  __device__ void rebase(float larger) {
    if (m2 == larger) return;
    const float shift = m2 - larger;
    if (m2 > minus_infinity()) {
      shifted = fmaf(count, shift, shifted);
      if (kMode == Mode::kDense) dot = fmaf(mass, shift, dot);
      entropy = fmaf(sum, shift, entropy) * exp2_fast(shift);
    } else {
      // Only -inf so far, or nothing: differences to any finite reference are -inf where there was a column.
      if (count > 0.f) shifted = minus_infinity();
      if (kMode == Mode::kDense && mass > 0.f) dot = minus_infinity();
    }
    sum *= exp2_fast(shift);
    m2 = larger;
  }
  __device__ void merge(const RowSums& other) {
    RowSums o = other;
    const float larger = fmaxf(m2, o.m2);
    rebase(larger);
    o.rebase(larger);
    sum += o.sum;
    count += o.count;
    shifted += o.shifted;
    entropy += o.entropy;
    dot += o.dot;
    mass += o.mass;
    if (o.best > best || (o.best == best && o.best_column < best_column)) {
      best = o.best;
      best_column = o.best_column;
    }
  }
};

/// The functor. T: dtype of the logits.
template <class T, Mode kMode>
struct CrossEntropy {
  using Params = RowForward;
  using Sums = RowSums<kMode>;

  const Params& p;
  int64_t row;
  RowTarget<T> target;
  Exponent<kMode> exponent;
  float target_logit = 0.f;

  __device__ CrossEntropy(const Params& p, int64_t row)
      : p(p), row(row), target(p.targets, row, p.cols), exponent(p.transform) {
    // Before anything is written over the logits.
    if (target.index >= 0) {
      target_logit = to_float((static_cast<const T*>(p.logits) + row * p.logits_stride)[target.index]);
    }
  }

  __device__ bool needs_row() const { return target.in_range && (target.kept || p.lse_of_ignored); }

  /// Adds kCount vectors. `valid(i)` tells columns of the row from padding.
  template <int kCount, int kWidth, class Columns>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kCount], const Columns& columns) const {
    if constexpr (kMode == Mode::kPlain) {
      float largest = minus_infinity();  // of the padding too: it is -inf
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, to_float(packs[j].value[i]));
      }
      const float m2 = fmaxf(sums.m2, largest * exponent.k);
      sums.rebase(m2);
      // With m2 = -inf every x is: 2^(x k - 0) is the 0 that it should be.
      const float reference = m2 == minus_infinity() ? 0.f : m2;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        float part = 0.f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) part += exp2_fast(exponent(to_float(packs[j].value[i]), reference));
        sums.sum += part;
      }
    } else {
      for (int j = 0; j < kCount; ++j) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const int64_t c = columns(j, i);
          if (c < 0) continue;
          add_one(sums, to_float(packs[j].value[i]), c);
        }
      }
    }
  }

  __device__ void add_one(Sums& sums, float x, int64_t c) const {
    const float e = exponent(x, 0.f);
    sums.rebase(fmaxf(sums.m2, e));
    const float y = sums.m2 == minus_infinity() ? e : exponent(x, sums.m2);
    const float weight = exp2_fast(y);
    sums.sum += weight;
    sums.count += 1.f;
    sums.shifted += y;
    if (weight > 0.f) sums.entropy = fmaf(weight, y, sums.entropy);
    if constexpr (kMode == Mode::kDense) {
      const float a = target.coefficient(c, 0);
      if (a != 0.f) sums.dot = fmaf(a, y, sums.dot);
      sums.mass += a;
    }
    if (e > sums.best) {
      sums.best = e;
      sums.best_column = static_cast<int32_t>(c);
    }
  }

  /// What the gradient of the row is made of: (P * 2^y - Q * a) * dz/dx.
  struct Gradient {
    float m2, P, Q;
  };

  __device__ Gradient finish(const Sums& sums, bool writes) const {
    const float ln2 = static_cast<float>(kInverseLog2E);
    const float log2_sum = log2f(sums.sum);
    const double lse_exact = (static_cast<double>(sums.m2) + static_cast<double>(log2_sum)) * kInverseLog2E;
    const float lse = static_cast<float>(lse_exact);
    const auto* scales = static_cast<const float*>(p.scales);
    const float ce_scale = scales != nullptr ? scales[0] : 1.f;
    const float z_scale = scales != nullptr ? scales[1] : 1.f;
    const float y_target = exponent(target_logit, sums.m2);
    float mass = target.sparse_mass(p.cols), dot = 0.f;
    if constexpr (kMode == Mode::kDense) {
      mass = sums.mass + target.at_index;
      dot = sums.dot;
    } else if constexpr (kMode == Mode::kSparse) {
      if (target.uniform != 0.f) dot = target.uniform * sums.shifted;
    }
    if (target.at_index != 0.f) dot = fmaf(target.at_index, y_target, dot);
    const float ce = (mass * log2_sum - dot) * ln2;
    const float z_loss = static_cast<float>(p.z_loss);
    const float z_term = z_loss != 0.f ? z_loss * lse * lse : 0.f;
    if (writes) {
      const bool known = target.in_range;
      float loss = ce_scale * ce;
      if (z_loss != 0.f) loss = fmaf(z_scale, z_term, loss);
      put(p.loss, target.kept ? (known ? target.token_weight * loss : not_a_number()) : 0.f);
      put(p.lse, known && (target.kept || p.lse_of_ignored) ? lse : (known ? 0.f : not_a_number()));
      put(p.lse_low, known && needs_row() ? static_cast<float>(lse_exact - static_cast<double>(lse)) : 0.f);
      const auto kept_value = [&](float value) { return target.kept ? (known ? value : not_a_number()) : 0.f; };
      put(p.mass, kept_value(mass));
      put(p.z_loss_term, kept_value(z_term));
      put(p.token_log_prob, kept_value((y_target - log2_sum) * ln2));
      if constexpr (kMode != Mode::kPlain) {
        put(p.entropy, kept_value((log2_sum - sums.entropy / sums.sum) * ln2));
        if (p.predicted != nullptr) {
          static_cast<int64_t*>(p.predicted)[row] =
              target.kept && known ? (sums.best_column == 0x7fffffff ? 0 : sums.best_column) : -1;
        }
      }
    }
    float P = target.token_weight * ce_scale * mass;
    if (z_loss != 0.f) P = fmaf(target.token_weight * z_scale * 2.f * z_loss, lse, P);
    return {sums.m2, P / sums.sum, target.token_weight * ce_scale};
  }

  __device__ void put(void* out, float value) const {
    if (out != nullptr) static_cast<float*>(out)[row] = value;
  }

  __device__ float gradient(const Gradient& g, float x, int64_t c) const {
    const float p2 = exp2_fast(exponent(x, g.m2));
    float a = target.uniform;
    if constexpr (kMode == Mode::kPlain) a = 0.f;
    if constexpr (kMode == Mode::kDense) a = target.coefficient(c, 0);
    float value = fmaf(g.P, p2, -g.Q * a);
    if (c == target.index) value -= g.Q * target.at_index;
    return value * exponent.slope(x);
  }
};

}  // namespace fusegrad::device
