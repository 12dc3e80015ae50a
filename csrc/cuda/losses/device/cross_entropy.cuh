// Cross entropy as a functor of the row skeleton (row.cuh): the sums of a row, and the epilogue that makes loss and
// gradient of them.
#pragma once

#include <cstdint>

#include "cuda/device/reduce.cuh"
#include "cuda/losses/device/power_sum.cuh"
#include "cuda/losses/device/target.cuh"

namespace fusegrad::device {

constexpr int kNoColumn = 0x7fffffff;

/// The parts of the functor that are compiled in.
enum class Mode {
  kPlain,    // class indices, no smoothing, no softcap, a positive scale, no entropy or prediction
  kMoments,  // class indices, no smoothing, no softcap; entropy and variance, no prediction
  kSparse,   // class indices, everything else
  kDense,    // a coefficient for every column
};

/// Sums over part of a row.
template <Mode kMode>
struct RowSums;

template <>
struct RowSums<Mode::kPlain> : PowerSum {
  float target_logit = 0.f;  // from the one part that has it

  template <class Over>
  __device__ void merge(const Over& over) {
    PowerSum::merge(over);
    target_logit = over.sum(target_logit);
  }
};

template <>
struct RowSums<Mode::kMoments> {
  float m2 = minus_infinity();
  float sum = 0.f;
  float target_logit = 0.f;
  float entropy = 0.f;  // 2^y * y
  float square = 0.f;   // 2^y * y^2

  __device__ float reference() const { return m2 == minus_infinity() ? 0.f : m2; }
  __device__ void rebase(float larger) {
    if (m2 == larger) return;
    if (m2 > minus_infinity()) {
      const float shift = m2 - larger, factor = exp2_fast(shift);
      square = fmaf(shift, fmaf(sum, shift, 2.f * entropy), square) * factor;
      entropy = fmaf(sum, shift, entropy) * factor;
      sum *= factor;
    }
    m2 = larger;
  }
  template <class Over>
  __device__ void merge(const Over& over) {
    rebase(over.max(m2));
    for (float* x : {&sum, &target_logit, &entropy, &square}) *x = over.sum(*x);
  }
};

template <Mode kMode>
struct RowSums {
  float m2 = minus_infinity();
  float sum = 0.f;
  float target_logit = 0.f;
  float count = 0.f;    // columns
  float shifted = 0.f;  // y
  float entropy = 0.f;  // 2^y * y
  float square = 0.f;   // 2^y * y^2
  float dot = 0.f;      // dense: a * y
  double mass = 0.0;    // dense: a; it is a factor of the whole gradient, so it should not round more than once
  float best = minus_infinity();
  int best_column = kNoColumn;

  __device__ void rebase(float larger) {
    if (m2 == larger) return;
    const float shift = m2 - larger;
    if (m2 > minus_infinity()) {
      shifted = fmaf(count, shift, shifted);
      dot = fmaf(static_cast<float>(mass), shift, dot);
      square = fmaf(shift, fmaf(sum, shift, 2.f * entropy), square) * exp2_fast(shift);
      entropy = fmaf(sum, shift, entropy) * exp2_fast(shift);
    } else {
      // With only -inf so far, or nothing, each value is -inf from a finite reference.
      if (count > 0.f) shifted = minus_infinity();
      if (mass > 0.0) dot = minus_infinity();
    }
    sum *= exp2_fast(shift);
    m2 = larger;
  }
  template <class Over>
  __device__ void merge(const Over& over) {
    rebase(over.max(m2));
    for (float* x : {&sum, &target_logit, &count, &shifted, &entropy, &square, &dot}) *x = over.sum(*x);
    mass = over.sum(mass);
    const float largest = over.max(best);
    best_column = over.min(best == largest ? best_column : kNoColumn);
    best = largest;
  }
};

/// The functor. T: dtype of the logits.
template <class T, Mode kMode>
struct CrossEntropy {
  using Params = RowForward;
  using Constants = device::Constants;
  using Sums = RowSums<kMode>;
  using Parts = NoParts;
  static constexpr int kInputs = 1;
  static constexpr bool kBulk = true;
  static constexpr bool kSecondPass = false;
  // What registers allow.
  static constexpr int kUnroll = kMode == Mode::kPlain ? 4 : kMode == Mode::kDense ? 1 : 2;

  const Params& p;
  const Constants& constants;
  int64_t row;
  RowTarget<T> target;
  int offset;  // of the first column in the vocabulary
  float row_scale = 1.f;

  __device__ CrossEntropy(const Params& p, const Constants& constants, int64_t row)
      : CrossEntropy(p, constants, row, p.cols) {}
  /// A part of a row, whose sums are added up with those of others.
  __device__ CrossEntropy(const Params& p, const Constants& constants, int64_t row, int64_t vocab, int offset = 0)
      : p(p), constants(constants), row(row), target(p.targets, constants, row, vocab), offset(offset) {
    if (kMode != Mode::kPlain && p.row_scale != nullptr) row_scale = static_cast<const float*>(p.row_scale)[row];
  }

  __device__ const T* input(int) const { return static_cast<const T*>(p.logits) + row * p.logits_stride; }
  /// Where the gradient of that input goes; null where it is not wanted.
  __device__ T* output(int) const {
    return p.grad != nullptr ? static_cast<T*>(p.grad) + row * p.grad_stride : nullptr;
  }
  __device__ bool has_output() const { return p.grad != nullptr; }
  __device__ bool needs_row() const { return target.in_range && (target.kept || p.lse_of_ignored); }
  /// A row that is ignored or out of range has one value as its gradient, constant().
  __device__ bool constant_gradient() const { return !target.kept || !target.in_range; }
  __device__ float constant() const { return target.in_range ? 0.f : not_a_number(); }

  __device__ Logit logit(float x) const {
    if (kMode == Mode::kPlain) return Logit::plain(constants, x);
    if (kMode != Mode::kMoments && constants.cap != 0.f) return Logit::capped<T>(constants, x * row_scale);
    return {x, constants.k * row_scale, 1.f};
  }

  /// Adds kCount vectors. `column(j)` is the first column of vector j; without kWhole it may hold columns outside
  /// [0, V), which are -inf.
  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kInputs][kCount], const Column& column) const {
    if constexpr (kMode == Mode::kPlain) {
      sums.add(packs[0], constants.k);
    } else if constexpr (kMode == Mode::kMoments) {
      add_moments<kWhole>(sums, packs[0], column);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) add_vector<kWhole>(sums, packs[0][j], column(j));
    }
  }

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add_moments(Sums& sums, const Pack<T, kWidth> (&packs)[kCount], const Column& column) const {
    const float k = constants.k * row_scale;  // of either sign
    float largest = minus_infinity();
    float x[kCount][kWidth];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      unpack(packs[j], x[j]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int at = kWhole ? 0 : column(j) + i;
        if (kWhole || (at >= 0 && at < static_cast<int>(p.cols))) largest = fmaxf(largest, x[j][i] * k);
      }
    }
    sums.rebase(fmaxf(sums.m2, largest));
    const float from = sums.reference();
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float part = 0.f, moment = 0.f, square = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int at = kWhole ? 0 : column(j) + i;
        if (!kWhole && (at < 0 || at >= static_cast<int>(p.cols))) continue;
        const float y = fmaf(x[j][i], k, -from), power = exp2_fast(y);
        const float finite = fmaxf(y, kVanishes);  // 0 * -inf; a NaN is in the sum already
        part += power;
        moment = fmaf(power, finite, moment);
        if (p.variance != nullptr) square = fmaf(power * finite, finite, square);
      }
      sums.sum += part;
      sums.entropy += moment;
      sums.square += square;
    }
  }

  template <bool kWhole, int kWidth>
  __device__ void add_vector(Sums& sums, const Pack<T, kWidth>& pack, int first) const {
    const auto inside = [&](int i) { return kWhole || (first + i >= 0 && first + i < static_cast<int>(p.cols)); };
    float stored[kWidth], x[kWidth], y[kWidth], largest = minus_infinity(), k = constants.k;
    unpack(pack, stored);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto z = logit(stored[i]);
      x[i] = z.x;
      k = z.k;
      if (inside(i)) largest = fmaxf(largest, x[i] * k);
    }
    sums.rebase(fmaxf(sums.m2, largest));
    const float reference = sums.m2 == minus_infinity() ? 0.f : sums.m2;
    float part = 0.f;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      y[i] = fmaf(x[i], k, -reference);
      if (inside(i)) part += exp2_fast(y[i]);
    }
    sums.sum += part;
    if (p.entropy != nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float power = exp2_fast(y[i]);
        if (inside(i) && power > 0.f) {
          sums.entropy = fmaf(power, y[i], sums.entropy);
          if (p.variance != nullptr) sums.square = fmaf(power * y[i], y[i], sums.square);
        }
      }
    }
    if (p.predicted != nullptr) {
      const float sign = constants.scale * row_scale < 0.f ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (inside(i) && stored[i] * sign > sums.best) {
          sums.best = stored[i] * sign;
          sums.best_column = first + i;
        }
      }
    }
    if constexpr (kMode == Mode::kDense) {
      float a[kWidth];
      target.coefficients(constants, first, static_cast<int>(p.cols), offset, a);
      float mass = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (a[i] != 0.f) sums.dot = fmaf(a[i], y[i], sums.dot);
        mass += a[i];
      }
      sums.mass += static_cast<double>(mass);
    } else if (constants.uniform != 0.f) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (inside(i)) {
          sums.shifted += y[i];
          sums.count += 1.f;
        }
      }
    }
  }

  /// The target's logit, if it lies in [begin, end). One thread reads it first and adds it to its sums last, so that it
  /// is read before anything overwrites the logits. It is not converted here, which would wait for it.
  using Early = T;
  __device__ Early read_early(int begin, int end) const {
    return target.index >= max(begin, 0) && target.index < end ? input(0)[target.index] : static_cast<T>(0.f);
  }
  __device__ void add_early(Sums& sums, Early logit) const { sums.target_logit = widen(logit); }

  /// The factors of the row's gradient (P * 2^y - Q * a) * dz/dx / scale.
  struct Gradient {
    float m2, P, Q;
  };

  __device__ Gradient finish(const Sums& sums, NoParts) const {
    const auto* scales = static_cast<const float*>(p.scales);
    const float Q = target.token_weight * (scales != nullptr ? scales[0] : 1.f);
    float P = Q * mass(sums);
    if (constants.z_loss != 0.f) {
      const float lse = (sums.m2 + log2f(sums.sum)) * static_cast<float>(kInverseLog2E);
      P = fmaf(target.token_weight * (scales != nullptr ? scales[1] : 1.f) * 2.f * constants.z_loss, lse, P);
    }
    const float scale = kMode == Mode::kPlain ? constants.scale : constants.scale * row_scale;
    return {sums.m2, __fdividef(P, sums.sum) * scale, Q * scale};
  }

  __device__ float mass(const Sums& sums) const {
    if constexpr (kMode == Mode::kDense) return static_cast<float>(sums.mass + static_cast<double>(target.at_index));
    return target.sparse_mass(constants, p.cols);
  }

  /// Called by one thread: stores the row's outputs.
  __device__ void write(const Sums& sums, NoParts) const {
    const auto* scales = static_cast<const float*>(p.scales);
    const float ce_scale = scales != nullptr ? scales[0] : 1.f, z_scale = scales != nullptr ? scales[1] : 1.f;
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    const float mass = this->mass(sums), log2_sum = log2f(sums.sum);
    const double lse_exact = (static_cast<double>(sums.m2) + log2_exact(sums.sum)) * kInverseLog2E;
    const float lse = static_cast<float>(lse_exact);
    const auto z = logit(sums.target_logit);
    const float y_target = fmaf(z.x, z.k, -sums.m2);
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
    // The row is ignored, or its index is out of range.
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
      if (p.entropy != nullptr) write_moments(sums, mass, (mass * log2_sum - dot) * ln2);
    }
    if constexpr (kMode == Mode::kSparse || kMode == Mode::kDense) {
      if (p.predicted != nullptr) {
        const int best = sums.best_column == kNoColumn ? 0 : sums.best_column;
        static_cast<int64_t*>(p.predicted)[row] = target.kept && target.in_range ? best : -1;
      }
    }
  }

  /// Entropy, and what the gradient of a factor of z needs; `cost`: the row's cross entropy.
  __device__ void write_moments(const Sums& sums, float mass, float cost) const {
    const bool counts = target.kept && target.in_range;
    const auto put = [&](void* out, double value, bool wanted) {
      if (out != nullptr) static_cast<float*>(out)[row] = wanted ? static_cast<float>(value) : constant();
    };
    const double sum = sums.sum, mean = static_cast<double>(sums.entropy) / sum;
    const double entropy = (log2_exact(sums.sum) - mean) * kInverseLog2E;
    put(p.entropy, entropy, counts);
    put(p.entropy_low, entropy - static_cast<double>(static_cast<float>(entropy)), counts);
    if (p.variance == nullptr) return;
    put(p.mean, (static_cast<double>(sums.m2) + mean) * kInverseLog2E, needs_row());
    put(p.variance, (static_cast<double>(sums.square) / sum - mean * mean) * kInverseLog2E * kInverseLog2E, counts);
    put(p.slope, static_cast<double>(cost) - static_cast<double>(mass) * entropy, counts);
  }

  /// Turns one vector into its gradient, in place; write_target() corrects the target's column.
  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[kInputs], int first) const {
    float x[kWidth], a[kWidth];
    unpack(packs[0], x);
    if constexpr (kMode == Mode::kDense) target.coefficients(constants, first, static_cast<int>(p.cols), 0, a);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if constexpr (kMode == Mode::kDense) {
        x[i] = gradient_value(g, x[i], a[i]);
      } else {
        x[i] = gradient_value(g, x[i], constants.uniform);
      }
    }
    packs[0] = packed<T, kWidth>(x);
  }
  __device__ float gradient_value(const Gradient& g, float x, float a) const {
    const auto z = logit(x);
    const float value = g.P * exp2_fast(fmaf(z.x, z.k, -g.m2));
    return kMode == Mode::kPlain ? value : fmaf(-g.Q, a, value) * z.slope;
  }

  /// Stores the gradient of the target's column, if it lies in [begin, end). Its vector must have been written.
  __device__ void write_target(const Gradient& g, const Sums& sums, int begin, int end) const {
    const int c = target.index;
    if (c < max(begin, 0) || c >= end) return;
    float a[1] = {constants.uniform};
    if constexpr (kMode == Mode::kDense) target.coefficients(constants, c, static_cast<int>(p.cols), 0, a);
    const float others = gradient_value(g, sums.target_logit, a[0]);
    output(0)[c] = static_cast<T>(fmaf(-g.Q * target.at_index, logit(sums.target_logit).slope, others));
  }
};

}  // namespace fusegrad::device
