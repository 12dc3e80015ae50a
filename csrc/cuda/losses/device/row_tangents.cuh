// Tangents of cross entropy's values and of their gradient as a functor of the row skeleton (row.cuh), see RowTangents
// (losses/row_kernels.h). The first pass adds up what the tangents of lse, entropy and cross entropy are made of; the
// normalizer comes from the forward. The epilogue writes the gradient's tangent.
#pragma once

#include <cstdint>

#include "cuda/device/reduce.cuh"
#include "cuda/losses/device/target.cuh"

namespace fusegrad::device {

/// What is compiled in: each more is a larger kernel.
enum class TangentPart {
  kPlain,   // class indices, no smoothing, no softcap, nothing of the entropy
  kSparse,  // class indices; not class weights with smoothing
  kAll,     // a coefficient for every column, too
};

/// Sums over part of a row.
template <bool kPlain>
struct TangentSums {
  float lse = 0.f;   // p * z.
  float mean = 0.f;  // p * (z - m) * z.
  float dot = 0.f;   // a * z., without the index's

  template <class Over>
  __device__ void merge(const Over& over) {
    for (float* x : {&lse, &mean, &dot}) *x = over.sum(*x);
  }
};
template <>
struct TangentSums<true> {
  float lse = 0.f;

  template <class Over>
  __device__ void merge(const Over& over) {
    lse = over.sum(lse);
  }
};

/// The functor. T: dtype of the logits.
template <class T, TangentPart kPart>
struct CrossEntropyTangents {
  static constexpr bool kPlain = kPart == TangentPart::kPlain, kAll = kPart == TangentPart::kAll;
  using Params = RowTangents;
  using Constants = device::Constants;
  using Sums = TangentSums<kPlain>;
  using Parts = NoParts;
  using Early = NoParts;
  static constexpr int kInputs = 2;
  static constexpr bool kBulk = kPlain;
  static constexpr bool kSecondPass = false;
  static constexpr int kUnroll = kPlain ? 2 : 1;

  const Params& p;
  const Constants& constants;
  int64_t row;
  RowTarget<T> target;
  float shift, low;
  float mean = 0.f, mean_low = 0.f;

  __device__ CrossEntropyTangents(const Params& p, const Constants& constants, int64_t row)
      : p(p), constants(constants), row(row), target(p.targets, constants, row, p.cols) {
    shift = static_cast<const float*>(p.lse)[row];
    low = static_cast<const float*>(p.lse_low)[row];
    if (!kPlain && p.entropy != nullptr) {
      const double exact = (static_cast<double>(shift) + static_cast<double>(low)) -
                           (static_cast<double>(at_row(p.entropy)) + static_cast<double>(at_row(p.entropy_low)));
      mean = static_cast<float>(exact);
      mean_low = static_cast<float>(exact - static_cast<double>(mean));
    }
  }

  __device__ float at_row(const void* values) const {
    return values != nullptr ? static_cast<const float*>(values)[row] : 0.f;
  }
  __device__ const T* input(int k) const {
    return k == 0 ? static_cast<const T*>(p.logits) + row * p.logits_stride
                  : static_cast<const T*>(p.tangent) + row * p.tangent_stride;
  }
  __device__ T* output(int k) const {
    return k == 0 && p.grad_tangent != nullptr ? static_cast<T*>(p.grad_tangent) + row * p.grad_tangent_stride
                                               : nullptr;
  }
  __device__ bool has_output() const { return p.grad_tangent != nullptr; }
  __device__ bool needs_row() const { return target.in_range && (target.kept || p.lse_of_ignored); }
  __device__ bool constant_gradient() const { return !needs_row(); }
  __device__ float constant() const { return target.in_range ? 0.f : not_a_number(); }

  __device__ Logit logit(float x) const {
    return !kPlain && constants.cap != 0.f ? Logit::capped<T>(constants, x) : Logit::plain(constants, x);
  }
  __device__ float share(float z) const { return probability<T>(z, shift, low); }
  __device__ float away(float z) const { return (z - mean) - mean_low; }

  /// For columns from `first` on, without the index's.
  template <int kWidth>
  __device__ void coefficients(int first, float (&a)[kWidth]) const {
    if (kAll && p.targets.dense) {
      if constexpr (kAll) target.coefficients(constants, first, static_cast<int>(p.cols), 0, a);
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) a[i] = constants.uniform;
  }

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kInputs][kCount], const Column& column) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float x[kWidth], d[kWidth];
      unpack(packs[0][j], x);
      unpack(packs[1][j], d);
      const int first = kWhole && kPlain ? 0 : column(j);
      const auto inside = [&](int i) { return kWhole || (first + i >= 0 && first + i < static_cast<int>(p.cols)); };
      if constexpr (kPlain) {
        float part = 0.f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float q = share(x[i]);
          if (inside(i) && q != 0.f) part = fmaf(q, d[i], part);
        }
        sums.lse += part;
      } else {
        float a[kWidth];
        coefficients(first, a);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (!inside(i)) continue;
          const auto z = logit(x[i]);
          const float moved = d[i] * z.slope, q = share(z.x);
          if (q != 0.f) {  // 0 * inf; a NaN is in the share
            sums.lse = fmaf(q, moved, sums.lse);
            if (p.entropy != nullptr) sums.mean = fmaf(q * moved, away(z.x), sums.mean);
          }
          if (a[i] != 0.f) sums.dot = fmaf(a[i], moved, sums.dot);
        }
      }
    }
  }

  // Nothing is written over the inputs: the target's values are read where they are needed.
  __device__ Early read_early(int, int) const { return {}; }
  __device__ void add_early(Sums&, Early) const {}

  __device__ float mass() const {
    return kAll && p.targets.dense ? at_row(p.mass) : target.sparse_mass(constants, p.cols);
  }

  /// The factors of the gradient's tangent; those with a D behind them are tangents.
  struct Gradient {
    float k, kD, B, BD, D, DD, E, ED, lseD, meanD;
  };

  __device__ Gradient finish(const Sums& sums, NoParts) const {
    const float mass = this->mass();
    const auto read = [&](const RowValues<const void*>& from, float& k, float& B, float& D, float& E) {
      B = D = E = 0.f;
      if (target.kept) {
        B = at_row(from.cross_entropy);
        E = at_row(from.log_prob);
        if constexpr (!kPlain) D = at_row(from.entropy);
      }
      k = fmaf(mass, B, at_row(from.lse) - E);
    };
    Gradient g{};
    read(p.upstream, g.k, g.B, g.D, g.E);
    read(p.upstream_tangent, g.kD, g.BD, g.DD, g.ED);
    g.lseD = sums.lse;
    if constexpr (!kPlain) g.meanD = sums.mean + sums.lse;
    return g;
  }

  /// Called by one thread: stores the tangents of the row's values.
  __device__ void write(const Sums& sums, NoParts) const {
    const auto put = [&](void* out, float value, bool counts) {
      if (out != nullptr) static_cast<float*>(out)[row] = counts ? value : constant();
    };
    const bool read = needs_row(), counts = read && target.kept;
    put(p.values.lse, sums.lse, read);
    float moved = 0.f, dot = 0.f;
    if (counts && target.index >= 0) {
      moved = widen(input(1)[target.index]);
      if constexpr (!kPlain) moved *= logit(widen(input(0)[target.index])).slope;
      if (target.at_index != 0.f) dot = target.at_index * moved;
    }
    if constexpr (!kPlain) dot += sums.dot;
    put(p.values.cross_entropy, counts ? fmaf(mass(), sums.lse, -dot) : 0.f, counts);
    put(p.values.log_prob, moved - sums.lse, counts);
    if constexpr (!kPlain) put(p.values.entropy, -sums.mean, counts);
  }

  /// Turns one vector into the gradient's tangent, in place of the logits; write_target() corrects the target's column.
  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[kInputs], int first) const {
    float x[kWidth], d[kWidth];
    unpack(packs[0], x);
    unpack(packs[1], d);
    if constexpr (kPlain) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = value(g, x[i], d[i], 0.f, 0.f);
    } else {
      float a[kWidth];
      coefficients(first, a);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = value(g, x[i], d[i], a[i], 0.f);
    }
    packs[0] = packed<T, kWidth>(x);
  }

  /// For a logit x with the tangent d and the coefficient a; `hit`: 1 at the target, else 0.
  __device__ float value(const Gradient& g, float x, float d, float a, float hit) const {
    if constexpr (kPlain) {
      const float q = share(x);
      const float part = q != 0.f ? q * fmaf(d - g.lseD, g.k, g.kD) : 0.f;
      return hit != 0.f ? fmaf(-g.BD, a, part) + g.ED : part;
    } else {
      const auto z = logit(x);
      const float moved = d * z.slope, q = share(z.x);
      float second = 0.f, first = 0.f;
      if (q != 0.f) {
        const float from = g.D != 0.f || g.DD != 0.f ? away(z.x) : 0.f, upstream = fmaf(-g.D, from, g.k);
        second = fmaf(moved - g.lseD, upstream, g.kD) - fmaf(g.D, moved - g.meanD, g.DD * from);
        second *= q;
        first = q * upstream;
      }
      second = fmaf(-g.BD, a, second) + g.ED * hit;
      if (constants.cap == 0.f) return second;
      // d2z/dx2 = -2 z / cap^2 * dz/dx
      first = fmaf(-g.B, a, first) + g.E * hit;
      const float curve = -2.f * constants.inverse_cap * constants.inverse_cap * z.x * d;
      return z.slope * fmaf(curve, first, second);
    }
  }

  /// Stores the target's column, if it lies in [begin, end). Its vector must have been written.
  __device__ void write_target(const Gradient& g, const Sums&, int begin, int end) const {
    const int c = target.index;
    if (c < max(begin, 0) || c >= end) return;
    float a[1];
    coefficients(c, a);
    output(0)[c] = static_cast<T>(value(g, widen(input(0)[c]), widen(input(1)[c]), a[0] + target.at_index, 1.f));
  }
};

}  // namespace fusegrad::device
