// The generalised Jensen-Shannon divergence as a functor of the row skeleton (row.cuh). losses/row_kernels.h has the
// formulas.
//
// Logarithms are base 2 until the end. q = 2^lq, and d = log2(p / q) is taken from the difference of the logits, so it
// is exact where they are close. Then
//   p = q 2^d,  log2(q / m) = -log2((1 - b) + b 2^d),  log2(p / m) = d + log2(q / m)
// are consistent with each other, and the rounding of the normalizers does not reach the divergence.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/reduce.cuh"
#include "cuda/losses/device/power_sum.cuh"

namespace fusegrad::device {

/// d is bounded, so that 2^d is finite, and a ratio that is multiplied by a probability of 0 is finite too.
constexpr float kLowestD = -200.f, kLargestD = 100.f;

/// A pair of probabilities q and p in their mixture m.
struct InMixture {
  float student, teacher;  // log2(q / m), log2(p / m)
};
/// Made from a finite d, and log2 of m over the larger of the two. Relative to that neither logarithm is a difference
/// of large ones: where d is 30, float32 has it to 1e-6, and log2(p / m) is about 1.
__device__ inline InMixture in_mixture(float d, float m) { return {-m - fmaxf(d, 0.f), fminf(d, 0.f) - m}; }

/// The options as the kernels use them, computed once on the host. A temperature is a transform, too.
struct JsdConstants {
  LogitConstants student, teacher;
  LogitConstants label;  // the student's logits without the temperature
  float beta;
  // For the divergences in the loss: 1 - b and b, at the ends 1 of the one. A difference 1 - beta in float32 would have
  // no digits left near 1.
  float student_share, teacher_share;
  float soft, hard;
  bool mixed;                  // 0 < b < 1
  bool near_end;               // of that, so near an end that the loss is a small difference of logarithms
  float even;                  // log2(p / q) where both have as much of m
  float relative;              // of the teacher's exponents to the student's: 1 exactly where they are scaled alike
  bool label_apart;            // the hard part needs a normalizer of its own
  float log_error, sum_error;  // top-k: of a stored probability, relative, for each of -log2 p and for 1

  static constexpr double kMostEven = 100.0;  // a power of it is finite

  static LogitTransform tempered(const LogitTransform& t, double temperature) {
    return {t.scale / temperature, t.cap / temperature};
  }
  __host__ __device__ static float exponent(const LogitConstants& t) { return t.cap != 0.f ? kLog2E : t.k; }
  static bool is_near_end(double beta) { return beta > 0.0 && beta < 1.0 && std::min(beta, 1.0 - beta) < 1.0 / 64; }
  explicit JsdConstants(const RowJsd& p)
      : student(tempered(p.student_transform, p.student_temperature)),
        teacher(tempered(p.teacher_transform, p.teacher_temperature)),
        label(p.student_transform),
        beta(static_cast<float>(p.beta)),
        student_share(p.beta == 0.0 ? 0.f : static_cast<float>(1.0 - p.beta)),
        teacher_share(static_cast<float>(p.beta)),
        soft(static_cast<float>(p.soft_weight)),
        hard(static_cast<float>(p.hard_weight)),
        mixed(p.beta > 0.0 && p.beta < 1.0),
        near_end(is_near_end(p.beta)),
        even(mixed ? static_cast<float>(std::clamp(std::log2((1.0 - p.beta) / p.beta), -kMostEven, kMostEven)) : 0.f),
        relative(exponent(teacher) / exponent(student)),
        label_apart((p.hard_weight != 0.0 || p.hard != nullptr) && p.student_temperature != 1.0),
        log_error(static_cast<float>(p.roundoff * kInverseLog2E)),
        sum_error(static_cast<float>(p.acc_roundoff)) {
    if (!mixed) (p.beta == 0.0 ? teacher_share : student_share) = 1.f;
  }
};

/// Sums over part of a row: both normalizers, the one of the hard part, and the logits at the label.
template <bool kPlain>
struct JsdSums {
  PowerSum student, teacher;
  std::conditional_t<kPlain, NoParts, PowerSum> label;
  float student_at = 0.f, teacher_at = 0.f;  // from the one part that has them

  template <class Over>
  __device__ void merge(const Over& over) {
    student.merge(over);
    teacher.merge(over);
    label.merge(over);
    student_at = over.sum(student_at);
    teacher_at = over.sum(teacher_at);
  }
};

/// Sums over part of a row: the divergences from m, base 2, and what rounding left out of them.
struct JsdParts {
  float student = 0.f, teacher = 0.f, rest = 0.f;

  template <class Over>
  __device__ void merge(const Over& over) {
    student = over.sum(student);
    teacher = over.sum(teacher);
    rest = over.sum(rest);
  }
};

/// What a row has beside its logits: whether it is kept, its label, its factor.
struct JsdRow {
  int index = -1;  // the label's column where there is a hard part
  bool kept = true;
  bool in_range = true;
  float factor = 1.f;  // token weight * scales

  __device__ JsdRow(const RowJsd& p, int64_t row) {
    if (p.token_weight != nullptr) factor = static_cast<const float*>(p.token_weight)[row];
    if (p.scales != nullptr) factor *= *static_cast<const float*>(p.scales);
    if (p.label == nullptr) return;
    const int64_t y =
        p.label_is_int32 ? static_cast<const int32_t*>(p.label)[row] : static_cast<const int64_t*>(p.label)[row];
    kept = y != p.ignore_index;
    in_range = !kept || (y >= 0 && y < p.cols);
    if (kept && in_range && (p.hard_weight != 0.0 || p.hard != nullptr)) index = static_cast<int>(y);
  }
  /// The factor of the gradient.
  __device__ float upstream(const RowJsd& p, int64_t row) const {
    return p.upstream == nullptr ? factor : factor * static_cast<const float*>(p.upstream)[row * p.upstream_stride];
  }
};

/// Whether a row's logits count.
__device__ inline bool needs_row(const RowJsd& p, int row) {
  if (row >= static_cast<int>(p.rows) || p.label == nullptr) return row < static_cast<int>(p.rows);
  const JsdRow info(p, row);
  return info.kept && info.in_range;
}

/// Called by one thread: stores a row's outputs.
__device__ inline void write_losses(const RowJsd& p, const JsdConstants& constants, const JsdRow& info, int64_t row,
                                    float soft, float hard) {
  const auto put = [&](void* out, float value) {
    if (out != nullptr) static_cast<float*>(out)[row] = !info.in_range ? not_a_number() : info.kept ? value : 0.f;
  };
  if (soft < 0.f && !p.partial) soft = 0.f;  // what rounding left of 0; NaN stays
  put(p.soft, soft);
  put(p.hard, hard);
  // A weight of 0 must not meet an infinite divergence.
  float loss = constants.soft != 0.f ? constants.soft * soft : 0.f;
  if (constants.hard != 0.f) loss = fmaf(constants.hard, hard, loss);
  put(p.loss, info.factor != 0.f ? info.factor * loss : 0.f);
}

/// The functor. T: dtype of the logits. kPlain: no softcap, positive scales, no gradient to the teacher, and a hard
/// part only at temperature 1.
template <class T, bool kPlain>
struct Jsd {
  using Params = RowJsd;
  using Constants = JsdConstants;
  using Sums = JsdSums<kPlain>;
  using Parts = JsdParts;
  static constexpr int kInputs = 2;
  static constexpr bool kBulk = kPlain;
  static constexpr bool kSecondPass = true;
  /// The student's ratio as a half in place of the teacher's logit: it adds an eighth of a bfloat16's rounding, and
  /// spares the last step a logarithm and an exponential.
  static constexpr bool kCaches = kPlain && std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kUnroll = kPlain ? 4 : 1;

  const Params& p;
  const Constants& constants;
  int64_t row;
  JsdRow info;

  __device__ Jsd(const Params& p, const Constants& constants, int64_t row)
      : p(p), constants(constants), row(row), info(p, row) {}

  __device__ const T* input(int i) const {
    return i == 0 ? static_cast<const T*>(p.student) + row * p.student_stride
                  : static_cast<const T*>(p.teacher) + row * p.teacher_stride;
  }
  __device__ T* output(int i) const {
    if (i == 0)
      return p.grad_student != nullptr ? static_cast<T*>(p.grad_student) + row * p.grad_student_stride : nullptr;
    if (kPlain || p.grad_teacher == nullptr) return nullptr;
    return static_cast<T*>(p.grad_teacher) + row * p.grad_teacher_stride;
  }
  __device__ bool has_output() const { return p.grad_student != nullptr || (!kPlain && p.grad_teacher != nullptr); }
  __device__ bool needs_row() const { return info.kept && info.in_range; }
  __device__ bool constant_gradient() const { return !needs_row(); }
  __device__ float constant() const { return info.in_range ? 0.f : not_a_number(); }

  __device__ static Logit logit(const LogitConstants& constants, float x) {
    if (!kPlain && constants.cap != 0.f) return Logit::capped<T>(constants, x);
    return Logit::plain(constants, x);
  }
  __device__ bool inside(int c) const { return c >= 0 && c < static_cast<int>(p.cols); }

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kInputs][kCount], const Column& column) const {
    if constexpr (kPlain) {
      sums.student.add(packs[0], constants.student.k);
      sums.teacher.add(packs[1], constants.teacher.k);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        add_vector<kWhole>(sums.student, constants.student, packs[0][j], column(j));
        add_vector<kWhole>(sums.teacher, constants.teacher, packs[1][j], column(j));
        if (constants.label_apart) add_vector<kWhole>(sums.label, constants.label, packs[0][j], column(j));
      }
    }
  }
  template <bool kWhole, int kWidth>
  __device__ void add_vector(PowerSum& sum, const LogitConstants& transform, const Pack<T, kWidth>& pack,
                             int first) const {
    float x[kWidth], y[kWidth], largest = minus_infinity(), part = 0.f;
    unpack(pack, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto z = logit(transform, x[i]);
      x[i] = z.x, y[i] = z.k;
      if (kWhole || inside(first + i)) largest = fmaxf(largest, x[i] * y[i]);
    }
    sum.rebase(fmaxf(sum.m2, largest));
    const float from = sum.reference();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (kWhole || inside(first + i)) part += exp2_fast(fmaf(x[i], y[i], -from));
    }
    sum.sum += part;
  }

  struct Early {
    T student, teacher;
  };
  __device__ Early read_early(int begin, int end) const {
    if (info.index < max(begin, 0) || info.index >= end) return {static_cast<T>(0.f), static_cast<T>(0.f)};
    return {input(0)[info.index], input(1)[info.index]};
  }
  __device__ void add_early(Sums& sums, const Early& at) const {
    sums.student_at = widen(at.student);
    sums.teacher_at = widen(at.teacher);
  }

  /// log2 of a probability from a logit: (x - at) * k + low. `at` lies near the row's maximum, so that differences of
  /// logits stay exact for large offsets.
  struct Row {
    float at, low;
  };
  struct Normal {
    Row student, teacher;
    float offset;  // of the teacher's log2 to the student's, from the sums' quotient: exact where they are close
  };
  __device__ Normal normal(const Sums& sums) const {
    const float rest_q = rest_of(constants.student, sums.student), rest_p = rest_of(constants.teacher, sums.teacher);
    return {{at(constants.student, sums.student), rest_q - log2f(sums.student.sum)},
            {at(constants.teacher, sums.teacher), rest_p - log2f(sums.teacher.sum)},
            (rest_p - rest_q) - log2f(sums.teacher.sum / sums.student.sum)};
  }
  __device__ static float at(const LogitConstants& t, const PowerSum& sum) {
    return sum.m2 / JsdConstants::exponent(t);
  }
  /// What rounding left between the two references.
  __device__ static float rest_of(const LogitConstants& t, const PowerSum& sum) {
    return fmaf(at(t, sum), JsdConstants::exponent(t), -sum.m2);
  }
  __device__ static float log2_probability(const Row& row, const Logit& z) { return fmaf(z.x - row.at, z.k, row.low); }
  __device__ static float student_log2(const Normal& n, const Logit& z) { return log2_probability(n.student, z); }
  __device__ static float teacher_log2(const Normal& n, const Logit& z) { return log2_probability(n.teacher, z); }
  /// d = log2(p / q). NaN where both are 0: fmaxf makes that finite.
  __device__ float log2_ratio(const Normal& n, const Logit& student, const Logit& teacher) const {
    const float difference = fmaf(teacher.x - n.teacher.at, constants.relative, -(student.x - n.student.at));
    return fmaxf(fmaf(difference, student.k, n.offset), kLowestD);
  }
  /// 16-bit results show neither how d is rounded nor the difference between logarithms, unless b is near an end.
  static constexpr bool kExact = sizeof(T) == 4;
  __device__ bool exact() const { return kExact || (!kPlain && constants.near_end); }
  /// log2(q / m).
  __device__ float student_ratio(float power_of_d) const {
    const float m_over_q = fmaf(constants.beta, power_of_d, constants.student_share);
    return kExact ? -log2f(m_over_q) : -log2_fast(m_over_q);
  }
  /// log2(m / q) or log2(m / p), whose divisor is the larger one, from the smaller one over it.
  __device__ float mixture_over_larger(float d, float smaller) const {
    const float beta = constants.beta, rest = constants.student_share;
    return log2f(d > 0.f ? fmaf(rest, smaller, beta) : fmaf(beta, smaller, rest));
  }
  /// The teacher's part exists only where it has a gradient.
  __device__ InMixture ratios(float d) const {
    d = fminf(d, kLargestD);
    if (!kPlain && exact()) return in_mixture(d, mixture_over_larger(d, exp2_fast(-fabsf(d))));
    const float student = student_ratio(exp2_fast(d));
    return {student, d + student};
  }

  /// Adds the divergences' parts of one vector. With kCache the student's ratios replace the teacher's logits.
  template <bool kWhole, bool kCache, int kWidth>
  __device__ void add_parts(const Normal& n, Parts& parts, Pack<T, kWidth> (&packs)[kInputs], int first) const {
    float xq[kWidth], xp[kWidth], student = 0.f, teacher = 0.f, rest = 0.f;
    unpack(packs[0], xq);
    unpack(packs[1], xp);
    const auto counts = [&](int i) { return kWhole || inside(first + i); };
    if (exact() && constants.mixed) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto zq = logit(constants.student, xq[i]), zp = logit(constants.teacher, xp[i]);
        const float d = fminf(log2_ratio(n, zq, zp), -kLowestD), power = exp2_fast(-fabsf(d));
        const float larger = exp2_fast(d > 0.f ? teacher_log2(n, zp) : student_log2(n, zq)), smaller = larger * power;
        const InMixture by = in_mixture(d, mixture_over_larger(d, power));
        if (!counts(i)) continue;
        student = fmaf(d > 0.f ? smaller : larger, by.student, student);
        teacher = fmaf(d > 0.f ? larger : smaller, by.teacher, teacher);
      }
    } else if (constants.mixed) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto zq = logit(constants.student, xq[i]), zp = logit(constants.teacher, xp[i]);
        const float d = log2_ratio(n, zq, zp), power = exp2_fast(d), q = exp2_fast(student_log2(n, zq));
        const float ratio = student_ratio(power);
        if (counts(i)) {
          largest = fmaxf(largest, d);
          student = fmaf(q, ratio, student);
          teacher = fmaf(q * power, d + ratio, teacher);
        }
        xp[i] = ratio;
      }
      // Where p is far larger, q may be 0 where p is not: such vectors are rare.
      if (largest > kLargestD) add_far(n, packs, counts, student, teacher, xp);
      if constexpr (kCache && kCaches) packs[1] = cached(xp);
    } else if (constants.beta == 0.f) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto zq = logit(constants.student, xq[i]), zp = logit(constants.teacher, xp[i]);
        const float p = exp2_fast(teacher_log2(n, zp));
        if (!counts(i)) continue;
        teacher = fmaf(p, log2_ratio(n, zq, zp), teacher);
        if (kRest) rest += exp2_fast(student_log2(n, zq)) - p;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto zq = logit(constants.student, xq[i]), zp = logit(constants.teacher, xp[i]);
        const float q = exp2_fast(student_log2(n, zq));
        if (!counts(i)) continue;
        student = fmaf(q, reverse_log2_ratio(n, zq, zp), student);
        if (kRest) rest += exp2_fast(teacher_log2(n, zp)) - q;
      }
    }
    // fmaxf drops a NaN that only one of the rows has.
    parts.student += student + (n.offset - n.offset);
    parts.teacher += teacher + (n.offset - n.offset);
    parts.rest = fmaf(rest, kLog2E, parts.rest);
  }
  /// log2(q / p).
  __device__ float reverse_log2_ratio(const Normal& n, const Logit& student, const Logit& teacher) const {
    const float difference = fmaf(n.teacher.at - teacher.x, constants.relative, student.x - n.student.at);
    return fmaxf(fmaf(difference, student.k, -n.offset), kLowestD);
  }
  /// The sum of y - x is 0, but not that of the rounded ones, which reaches the divergence of x from y. 16-bit results
  /// do not show it.
  static constexpr bool kRest = kExact;
  template <int kWidth, class Counts>
  __device__ void add_far(const Normal& n, const Pack<T, kWidth> (&packs)[kInputs], const Counts& counts,
                          float& student, float& teacher, float (&ratios)[kWidth]) const {
    float xq[kWidth], xp[kWidth];
    unpack(packs[0], xq);
    unpack(packs[1], xp);
    student = teacher = 0.f;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto zq = logit(constants.student, xq[i]), zp = logit(constants.teacher, xp[i]);
      const float d = fminf(log2_ratio(n, zq, zp), kLargestD), ratio = student_ratio(exp2_fast(d));
      if (counts(i)) {
        student = fmaf(exp2_fast(student_log2(n, zq)), ratio, student);
        teacher = fmaf(exp2_fast(teacher_log2(n, zp)), d + ratio, teacher);
      }
      ratios[i] = ratio;
    }
  }
  template <int kWidth>
  __device__ static Pack<T, kWidth> cached(const float (&ratio)[kWidth]) {
    const auto half = packed<__half, kWidth>(ratio);
    return *reinterpret_cast<const Pack<T, kWidth>*>(&half);
  }
  template <int kWidth>
  __device__ static void from_cache(const Pack<T, kWidth>& pack, float (&ratio)[kWidth]) {
    unpack(*reinterpret_cast<const Pack<__half, kWidth>*>(&pack), ratio);
  }

  struct Gradient {
    Normal normal;
    // By the student's logit: q * (ratio * of_ratio + of_q) + (q - p) * of_difference + of_label * (the label's
    // softmax).
    float of_ratio, of_q, of_difference;
    float of_label, label_m2, label_log2;
    // By the teacher's logit: p * (ratio * teacher_ratio + teacher_p) + (p - q) * teacher_difference.
    float teacher_ratio, teacher_p, teacher_difference;
    float at_label;  // what the label's column has less
  };
  __device__ Gradient finish(const Sums& sums, const Parts& parts) const {
    const float upstream = info.upstream(p, row);
    Gradient g{normal(sums)};
    g.at_label = upstream * constants.hard * constants.label.scale;
    add_soft(g, parts, upstream);
    if constexpr (!kPlain) {
      if (constants.label_apart) {
        g.of_label = g.at_label;
        g.label_m2 = sums.label.m2;
        g.label_log2 = log2f(sums.label.sum);
        return g;
      }
    }
    g.of_q += g.at_label;  // the same softmax
    return g;
  }
  __device__ void add_soft(Gradient& g, const Parts& parts, float upstream) const {
    if (upstream * constants.soft == 0.f) return;  // must not meet an infinite divergence
    const float by_student = upstream * constants.soft * constants.student.scale;
    const float by_teacher = upstream * constants.soft * constants.teacher.scale;
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    if (constants.mixed || constants.beta == 1.f) {
      g.of_ratio = by_student * constants.student_share * ln2;
      g.of_q = -g.of_ratio * parts.student;
    } else {
      g.of_difference = by_student;
    }
    if (constants.mixed || constants.beta == 0.f) {
      g.teacher_ratio = by_teacher * constants.teacher_share * ln2;
      g.teacher_p = -g.teacher_ratio * parts.teacher;
    } else {
      g.teacher_difference = by_teacher;
    }
  }

  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[kInputs], int) const {
    float xq[kWidth], xp[kWidth];
    unpack(packs[0], xq);
    if constexpr (kCached && kCaches) {
      if (constants.mixed) {
        from_cache(packs[1], xp);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float q = exp2_fast(student_log2(g.normal, logit(constants.student, xq[i])));
          xq[i] = q * fmaf(xp[i], g.of_ratio, g.of_q);
        }
        packs[0] = packed<T, kWidth>(xq);
        return;
      }
    }
    unpack(packs[1], xp);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto by = gradient_values(g, xq[i], xp[i]);
      xq[i] = by.student;
      xp[i] = by.teacher;
    }
    packs[0] = packed<T, kWidth>(xq);
    if constexpr (!kPlain) packs[1] = packed<T, kWidth>(xp);
  }

  struct ByLogit {
    float student, teacher;
  };
  /// A ratio that may be infinite, where its weight may be 0.
  __device__ static float finite(float ratio) { return fminf(ratio, 1e30f); }
  __device__ ByLogit gradient_values(const Gradient& g, float student, float teacher) const {
    const auto zq = logit(constants.student, student), zp = logit(constants.teacher, teacher);
    const float q = exp2_fast(student_log2(g.normal, zq));
    ByLogit by{q * g.of_q, 0.f};
    if (constants.mixed) {
      const InMixture ratio = ratios(log2_ratio(g.normal, zq, zp));
      by.student = q * fmaf(ratio.student, g.of_ratio, g.of_q);
      if (!kPlain)
        by.teacher = exp2_fast(teacher_log2(g.normal, zp)) * fmaf(ratio.teacher, g.teacher_ratio, g.teacher_p);
    } else if (constants.beta == 0.f) {
      const float p = exp2_fast(teacher_log2(g.normal, zp));
      by.student = fmaf(q - p, g.of_difference, by.student);
      if (!kPlain) by.teacher = p * fmaf(finite(log2_ratio(g.normal, zq, zp)), g.teacher_ratio, g.teacher_p);
    } else {
      by.student = q * fmaf(finite(reverse_log2_ratio(g.normal, zq, zp)), g.of_ratio, g.of_q);
      if (!kPlain) by.teacher = (exp2_fast(teacher_log2(g.normal, zp)) - q) * g.teacher_difference;
    }
    if (!kPlain) {
      if (constants.label_apart) {
        const auto z = logit(constants.label, student);
        by.student = fmaf(g.of_label, exp2_fast(fmaf(z.x, z.k, -g.label_m2) - g.label_log2), by.student);
      }
      by.student *= zq.slope;
      by.teacher *= zp.slope;
    }
    return by;
  }

  /// Stores the gradient of the label's column, if it lies in [begin, end). Its vector must have been written.
  __device__ void write_target(const Gradient& g, const Sums& sums, int begin, int end) const {
    const int c = info.index;
    if (c < max(begin, 0) || c >= end || output(0) == nullptr || g.at_label == 0.f) return;
    const float others = gradient_values(g, sums.student_at, sums.teacher_at).student;
    output(0)[c] = static_cast<T>(fmaf(-g.at_label, logit(constants.label, sums.student_at).slope, others));
  }

  __device__ float label_loss(const PowerSum& sum, const Sums& sums) const {
    const auto z = logit(constants.label, sums.student_at);
    return (log2f(sum.sum) - fmaf(z.x, z.k, -sum.m2)) * static_cast<float>(kInverseLog2E);
  }
  /// Called by one thread: stores the row's outputs.
  __device__ void write(const Sums& sums, const Parts& parts) const {
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    float soft = 0.f, hard = 0.f;
    if (needs_row()) {
      soft = (constants.student_share * parts.student + constants.teacher_share * parts.teacher + parts.rest) * ln2;
      if (info.index >= 0) {
        hard = label_loss(sums.student, sums);
        if constexpr (!kPlain) {
          if (constants.label_apart) hard = label_loss(sums.label, sums);
        }
      }
    }
    write_losses(p, constants, info, row, soft, hard);
  }
};

/// The functor for log-probabilities. Without normalizers the divergences are the sums, and no mean enters the
/// gradient, so a value's gradient comes with its part of the sums, in one pass.
template <class T>
struct JsdOfLogProbs : Jsd<T, false> {
  using Base = Jsd<T, false>;
  using Sums = JsdParts;
  using Parts = NoParts;
  using Early = NoParts;
  using Gradient = typename Base::Gradient;
  static constexpr bool kBulk = false;
  static constexpr bool kSecondPass = false;
  static constexpr bool kOnePass = true;
  static constexpr int kUnroll = 2;
  using Base::Base;

  struct Element {
    float student = 0.f, teacher = 0.f;  // parts of the divergences, base 2
    float by_student, by_teacher;
  };
  /// -inf in both, as padding has, adds nothing.
  __device__ Element element(const Gradient& g, float xq, float xp) const {
    const auto& constants = this->constants;
    const float d = fmaxf((xp - xq) * kLog2E, kLowestD), reverse = fmaxf((xq - xp) * kLog2E, kLowestD);
    const float q = exp2_fast(xq * kLog2E), p = exp2_fast(xp * kLog2E);
    Element e;
    if (constants.mixed) {
      const InMixture ratio = Base::ratios(d);
      e.student = q * ratio.student;
      e.teacher = p * ratio.teacher;
      e.by_student = e.student * g.of_ratio;
      e.by_teacher = e.teacher * g.teacher_ratio;
    } else if (constants.beta == 0.f) {
      e.teacher = isnan(xq) ? xq : p * d;  // fmaxf drops a NaN, as that of -inf in both
      e.by_student = -p * g.of_difference;
      e.by_teacher = p * (Base::finite(d) + kLog2E) * g.teacher_ratio;
    } else {
      e.student = isnan(xp) ? xp : q * reverse;
      e.by_student = q * (Base::finite(reverse) + kLog2E) * g.of_ratio;
      e.by_teacher = -q * g.teacher_difference;
    }
    return e;
  }
  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[2][kCount], const Column&) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float xq[kWidth], xp[kWidth];
      unpack(packs[0][j], xq);
      unpack(packs[1][j], xp);
      JsdParts parts;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Element e = element(Gradient{}, xq[i], xp[i]);
        parts.student += e.student;
        parts.teacher += e.teacher;
      }
      sums.student += parts.student;
      sums.teacher += parts.teacher;
    }
  }
  __device__ Early read_early(int, int) const { return {}; }
  __device__ void add_early(Sums&, Early) const {}
  /// Needs no sums.
  __device__ Gradient finish(const Sums&, NoParts) const {
    Gradient g{};
    Base::add_soft(g, JsdParts{}, this->info.upstream(this->p, this->row));
    return g;
  }
  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[2], int) const {
    float xq[kWidth], xp[kWidth];
    unpack(packs[0], xq);
    unpack(packs[1], xp);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Element e = element(g, xq[i], xp[i]);
      xq[i] = e.by_student;
      xp[i] = e.by_teacher;
    }
    packs[0] = packed<T, kWidth>(xq);
    packs[1] = packed<T, kWidth>(xp);
  }
  __device__ void write(const Sums& sums, NoParts) const { Base::write(JsdSums<false>{}, sums); }
  __device__ void write_target(const Gradient&, const Sums&, int, int) const {}
};

}  // namespace fusegrad::device
