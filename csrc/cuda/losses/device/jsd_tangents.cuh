// Tangents of a Jensen-Shannon divergence and of its gradients as a functor of the row skeleton (row.cuh), see
// RowJsdTangents (losses/row_kernels.h), whose letters these are. The first pass has both normalizers, the second all
// sums, which are linear in the tangents; the epilogue writes the tangents of the gradients.
#pragma once

#include <cstdint>

#include "cuda/losses/device/jsd.cuh"

namespace fusegrad::device {

/// Sums over part of a row; a D behind a letter is a tangent.
struct JsdTangentParts {
  float qD = 0.f, pD = 0.f;  // q z., p z.
  float A = 0.f, B = 0.f;    // q h, p k
  float a = 0.f, b = 0.f;    // q h z., p k z.
  float r = 0.f, rD = 0.f;   // r, r times the difference of the tangents
  float ends = 0.f;          // at beta 0 and 1: what that side's gradient is times its tangent

  template <class Over>
  __device__ void merge(const Over& over) {
    for (float* x : {&qD, &pD, &A, &B, &a, &b, &r, &rD, &ends}) *x = over.sum(*x);
  }
};

/// The functor. T: dtype of the logits. kBoth: the teacher's have tangents, too.
template <class T, bool kBoth>
struct JsdTangents : Jsd<T, false> {
  using Base = Jsd<T, false>;
  using typename Base::Normal;
  using Params = RowJsdTangents;
  using Parts = JsdTangentParts;
  static constexpr int kInputs = kBoth ? 4 : 3;
  static constexpr bool kBulk = false;
  static constexpr bool kSecondPass = true;
  static constexpr bool kCaches = false;
  static constexpr int kUnroll = 1;
  using Sums = typename Base::Sums;

  const Params& of;
  bool forward, reverse;  // beta is 0 or 1
  float n;                // 1 of logits, 0 of log-probabilities
  float upstream, upstream_tangent = 0.f;

  __device__ JsdTangents(const Params& p, const JsdConstants& constants, int64_t row)
      : Base(p, constants, row),
        of(p),
        forward(!constants.mixed && constants.beta == 0.f),
        reverse(!constants.mixed && constants.beta == 1.f),
        n(p.log_probs ? 0.f : 1.f),
        upstream(this->info.upstream(p, row)) {
    if (p.upstream_tangent != nullptr) upstream_tangent = static_cast<const float*>(p.upstream_tangent)[row];
  }

  __device__ const T* input(int i) const {
    if (i < 2) return Base::input(i);
    return i == 2 ? static_cast<const T*>(of.student_tangent) + this->row * of.student_tangent_stride
                  : static_cast<const T*>(of.teacher_tangent) + this->row * of.teacher_tangent_stride;
  }
  __device__ T* output(int i) const { return i < 2 ? Base::output(i) : nullptr; }
  /// An upstream gradient of 0 must not meet an infinite divergence.
  __device__ bool constant_gradient() const {
    return !this->needs_row() || (upstream == 0.f && upstream_tangent == 0.f);
  }

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kInputs][kCount], const Column& column) const {
    if (of.log_probs) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Base::template add_vector<kWhole>(sums.student, this->constants.student, packs[0][j], column(j));
      Base::template add_vector<kWhole>(sums.teacher, this->constants.teacher, packs[1][j], column(j));
    }
  }
  __device__ Normal normal(const Sums& sums) const { return of.log_probs ? Normal{} : Base::normal(sums); }

  __device__ static float times(float factor, float x) { return factor != 0.f ? factor * x : 0.f; }  // 0 * inf

  /// A column: its probabilities, h, k and r, and the tangents of its z.
  struct Column {
    float q, p, h, k, r, student, teacher;
    Logit zq, zp;
  };
  __device__ Column at(const Normal& normal, float xq, float xp, float dq, float dp) const {
    const auto& constants = this->constants;
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    Column c{};
    c.zq = Base::logit(constants.student, xq), c.zp = Base::logit(constants.teacher, xp);
    c.q = exp2_fast(Base::student_log2(normal, c.zq));
    c.p = exp2_fast(Base::teacher_log2(normal, c.zp));
    c.student = dq * c.zq.slope * constants.student.scale;
    c.teacher = dp * c.zp.slope * constants.teacher.scale;
    if (constants.mixed) {
      const InMixture ratio = Base::ratios(Base::log2_ratio(normal, c.zq, c.zp));
      c.h = ratio.student * (constants.student_share * ln2);
      c.k = ratio.teacher * (constants.teacher_share * ln2);
      c.r = constants.student_share * constants.teacher_share * c.q * exp2_fast(ratio.teacher);
    } else if (forward) {
      c.k = fmaf(Base::finite(Base::log2_ratio(normal, c.zq, c.zp)), ln2, 1.f - n);
      c.r = c.p;
    } else {
      c.h = fmaf(Base::finite(Base::reverse_log2_ratio(normal, c.zq, c.zp)), ln2, 1.f - n);
      c.r = c.q;
    }
    return c;
  }

  template <int kWidth>
  __device__ static void read(const Pack<T, kWidth> (&packs)[kInputs], float (&x)[4][kWidth]) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) unpack(packs[k], x[k]);
    if constexpr (!kBoth) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[3][i] = 0.f;
    }
  }

  template <bool kWhole, bool kCache, int kWidth>
  __device__ void add_parts(const Normal& normal, Parts& parts, Pack<T, kWidth> (&packs)[kInputs], int first) const {
    float x[4][kWidth];
    read(packs, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!kWhole && !this->inside(first + i)) continue;
      const Column c = at(normal, x[0][i], x[1][i], x[2][i], x[3][i]);
      const float a = times(c.q, c.h), b = times(c.p, c.k);
      parts.qD += times(c.q, c.student);
      parts.A += a;
      parts.a += times(a, c.student);
      parts.B += b;
      parts.r += c.r;
      if constexpr (kBoth) {
        parts.pD += times(c.p, c.teacher);
        parts.b += times(b, c.teacher);
      }
      parts.rD += times(c.r, c.student - c.teacher);
      if (forward) parts.ends += times(fmaf(n, c.q, -c.p), c.student);
      if (reverse) parts.ends += times(fmaf(n, c.p, -c.q), c.teacher);
    }
    // fmaxf drops a NaN that only one of the rows has.
    for (float* sum : {&parts.A, &parts.B, &parts.ends}) *sum += normal.offset - normal.offset;
  }

  struct Gradient {
    Normal normal;
    float A, B, AD, BD, qD, pD;
  };
  __device__ Gradient finish(const Sums& sums, const Parts& s) const {
    Gradient g{normal(sums)};
    if (of.log_probs) return g;
    const float curved = s.rD - s.r * (s.qD - s.pD);
    g.A = s.A, g.B = s.B, g.qD = s.qD, g.pD = s.pD;
    g.AD = s.a - s.A * s.qD + (forward ? 0.f : curved);
    g.BD = s.b - s.B * s.pD - (reverse ? 0.f : curved);
    return g;
  }

  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[kInputs], int) const {
    float x[4][kWidth];
    read(packs, x);
    const bool by_student = output(0) != nullptr, by_teacher = output(1) != nullptr;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Column c = at(g.normal, x[0][i], x[1][i], x[2][i], x[3][i]);
      const float qD = c.student - g.qD, pD = c.teacher - g.pD;
      if (by_student) {
        x[0][i] = by_value(this->constants.student, c.zq, c.student,
                           forward ? of_end(c.q, qD, c.p, pD) : of_ratio(c.q, qD, pD, c.h - g.A, g.AD, c.r));
      }
      if (by_teacher) {
        x[1][i] = by_value(this->constants.teacher, c.zp, c.teacher,
                           reverse ? of_end(c.p, pD, c.q, qD) : of_ratio(c.p, pD, qD, c.k - g.B, g.BD, c.r));
      }
    }
    packs[0] = packed<T, kWidth>(x[0]);
    packs[1] = packed<T, kWidth>(x[1]);
  }
  struct First {
    float value, tangent;  // of a gradient by z
  };
  __device__ First of_end(float x, float xD, float y, float yD) const {
    return {fmaf(n, x, -y), fmaf(n, times(x, xD), -times(y, yD))};
  }
  __device__ static First of_ratio(float x, float xD, float yD, float ratio, float meanD, float r) {
    return {times(x, ratio), times(x, fmaf(ratio, xD, -meanD)) + times(r, xD - yD)};
  }
  /// By the stored value; `moved`: the tangent of z.
  __device__ float by_value(const LogitConstants& t, const Logit& z, float moved, const First& g) const {
    const float tangent = fmaf(upstream_tangent, g.value, upstream * g.tangent) * (z.slope * t.scale);
    if (t.cap == 0.f) return tangent;
    // d2z/dx2 = -2 z scale / cap^2 * dz/dx
    return fmaf(-2.f * t.scale * t.inverse_cap * t.inverse_cap * z.x * moved, upstream * g.value, tangent);
  }

  /// Called by one thread: stores the tangent of the row's divergence.
  __device__ void write(const Sums&, const Parts& s) const {
    if (of.soft == nullptr) return;
    const bool logits = !of.log_probs;
    float tangent = s.ends + s.a - (logits ? s.A * s.qD : 0.f);
    if constexpr (kBoth) tangent += s.b - (logits ? s.B * s.pD : 0.f);
    static_cast<float*>(of.soft)[this->row] = this->needs_row() ? tangent : Base::constant();
  }
  __device__ void write_target(const Gradient&, const Sums&, int, int) const {}
};

}  // namespace fusegrad::device
