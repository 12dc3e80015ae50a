// The generalised Jensen-Shannon divergence as a functor of the row skeleton (device/row.cuh). The formulas stand in
// rows/row_kernels.h. Here logarithms are base 2 until the end: q = 2^lq, p = 2^lp, and with m = (1 - b) q + b p
//   ratio of the student: lq - log2 m,   of the teacher: lp - log2 m
// whose means under q and p are the two divergences. At the ends m is p (b = 1) or q (b = 0) itself.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/power_sum.cuh"
#include "cuda/device/reduce.cuh"

namespace fusegrad::device {

/// A ratio of a probability that is 0 is multiplied by 0: finite, so that the product is 0, and a half.
constexpr float kLowestRatio = -6e4f;

/// The options as the kernels use them, computed once on the host. A temperature is a transform, too.
struct JsdConstants {
  LogitConstants student, teacher;
  LogitConstants label;  // the student's logits without the temperature
  float beta;
  float student_share, teacher_share;  // of the divergences in the loss: 1 - b and b, at the ends 1 of the one
  float soft, hard;
  bool mixed;        // 0 < b < 1
  bool comparable;   // equal logits are equal distributions
  bool label_apart;  // the hard part needs a normalizer of its own

  static LogitTransform tempered(const LogitTransform& t, double temperature) {
    return {t.scale / temperature, t.cap / temperature};
  }
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
        comparable(student.scale == teacher.scale && student.cap == teacher.cap),
        label_apart(p.hard_weight != 0.0 && p.student_temperature != 1.0) {
    if (!mixed) (p.beta == 0.0 ? teacher_share : student_share) = 1.f;
  }
};

/// Over part of a row: both normalizers, the one of the hard part, and the logits at the label.
template <bool kPlain>
struct JsdSums {
  PowerSum student, teacher;
  std::conditional_t<kPlain, NoParts, PowerSum> label;
  float student_at = 0.f, teacher_at = 0.f;  // from the one part that has them
  int differ = 0;                            // 0: both rows are the same bits

  template <class Over>
  __device__ void merge(const Over& over) {
    student.merge(over);
    teacher.merge(over);
    label.merge(over);
    student_at = over.sum(student_at);
    teacher_at = over.sum(teacher_at);
    differ = over.any(differ);
  }
};

/// Over part of a row: the divergences from m, base 2.
struct JsdParts {
  float student = 0.f, teacher = 0.f;

  template <class Over>
  __device__ void merge(const Over& over) {
    student = over.sum(student);
    teacher = over.sum(teacher);
  }
};

/// What a row has beside its logits: is it kept, its label, its factor.
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
    if (p.hard_weight == 0.0 || !kept) return;
    in_range = y >= 0 && y < p.cols;
    if (in_range) index = static_cast<int>(y);
  }
  /// Of the gradient.
  __device__ float upstream(const RowJsd& p, int64_t row) const {
    return p.upstream == nullptr ? factor : factor * static_cast<const float*>(p.upstream)[row * p.upstream_stride];
  }
};

/// A row's outputs, by one thread.
__device__ inline void write_losses(const RowJsd& p, const JsdConstants& constants, const JsdRow& info, int64_t row,
                                    float soft, float hard) {
  const auto put = [&](void* out, float value) {
    if (out != nullptr) static_cast<float*>(out)[row] = !info.in_range ? not_a_number() : info.kept ? value : 0.f;
  };
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
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums.differ |= difference(packs[0][j], packs[1][j]);
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

  /// From logits to log2 of probabilities. float32: x * k - m2 first, which is exact for large offsets; low precision
  /// cannot see how the offset and the normalizer are rounded together.
  struct Normal {
    float student_m2, student_log2, teacher_m2, teacher_log2;
  };
  __device__ Normal normal(const Sums& sums) const {
    return {sums.student.m2, log2f(sums.student.sum), sums.teacher.m2, log2f(sums.teacher.sum)};
  }
  __device__ static float log2_probability(const Logit& z, float m2, float log2) {
    if constexpr (sizeof(T) == 2) return fmaf(z.x, z.k, -(m2 + log2));
    return fmaf(z.x, z.k, -m2) - log2;
  }
  __device__ float student_log2(const Normal& n, float x) const {
    return log2_probability(logit(constants.student, x), n.student_m2, n.student_log2);
  }
  __device__ float teacher_log2(const Normal& n, float x) const {
    return log2_probability(logit(constants.teacher, x), n.teacher_m2, n.teacher_log2);
  }
  /// log2 of m, for 0 < b < 1. Where both are 0 their ratios to it must stay finite.
  __device__ float log2_of_mixture(float q, float p) const {
    constexpr float tiny = 1e-37f;
    return log2_fast(fmaf(1.f - constants.beta, q, fmaf(constants.beta, p, tiny)));
  }
  __device__ static float ratio(float log2_x, float log2_m) { return fmaxf(log2_x - log2_m, kLowestRatio); }

  /// The divergences' parts of one vector. With kCache the student's ratios replace the teacher's logits.
  template <bool kWhole, bool kCache, int kWidth>
  __device__ void add_parts(const Normal& n, Parts& parts, Pack<T, kWidth> (&packs)[kInputs], int first) const {
    float xq[kWidth], xp[kWidth], student = 0.f, teacher = 0.f;
    unpack(packs[0], xq);
    unpack(packs[1], xp);
    const auto counts = [&](int i) { return kWhole || inside(first + i); };
    if (constants.mixed) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float lq = student_log2(n, xq[i]), lp = teacher_log2(n, xp[i]);
        const float q = exp2_fast(lq), p = exp2_fast(lp), log2_m = log2_of_mixture(q, p);
        xp[i] = ratio(lq, log2_m);
        if (counts(i)) {
          student = fmaf(q, xp[i], student);
          teacher = fmaf(p, ratio(lp, log2_m), teacher);
        }
      }
      if constexpr (kCache && kCaches) packs[1] = cached(xp);
    } else if (constants.beta == 0.f) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float lp = teacher_log2(n, xp[i]);
        if (counts(i)) teacher = fmaf(exp2_fast(lp), ratio(lp, student_log2(n, xq[i])), teacher);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float lq = student_log2(n, xq[i]);
        if (counts(i)) student = fmaf(exp2_fast(lq), ratio(lq, teacher_log2(n, xp[i])), student);
      }
    }
    parts.student += student;
    parts.teacher += teacher;
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

  /// By student logit: q * (ratio * of_ratio + of_q) - p * of_p + of_label * (probability of the label's softmax).
  struct Gradient {
    Normal normal;
    float of_ratio, of_q, of_p;
    float of_label, label_m2, label_log2;
    float teacher_ratio, teacher_p,
        teacher_q;   // by teacher logit: p * (ratio * teacher_ratio + teacher_p) - q * teacher_q
    float at_label;  // what the label's column has less
  };
  __device__ Gradient finish(const Sums& sums, const Parts& parts) const {
    const float upstream = info.upstream(p, row);
    Gradient g{normal(sums)};
    g.at_label = upstream * constants.hard * constants.label.scale;
    // A weight of 0 must not meet an infinite divergence.
    if (!same(sums) && upstream * constants.soft != 0.f) add_soft(g, parts, upstream);
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
  /// Equal distributions have exactly no divergence, however the sums were rounded.
  __device__ bool same(const Sums& sums) const { return constants.comparable && sums.differ == 0; }
  __device__ void add_soft(Gradient& g, const Parts& parts, float upstream) const {
    const float by_student = upstream * constants.soft * constants.student.scale;
    const float by_teacher = upstream * constants.soft * constants.teacher.scale;
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    if (constants.mixed || constants.beta == 1.f) {
      g.of_ratio = by_student * constants.student_share * ln2;
      g.of_q = -g.of_ratio * parts.student;
    } else {
      g.of_q = g.of_p = by_student;
    }
    if (constants.mixed || constants.beta == 0.f) {
      g.teacher_ratio = by_teacher * constants.teacher_share * ln2;
      g.teacher_p = -g.teacher_ratio * parts.teacher;
    } else {
      g.teacher_p = g.teacher_q = by_teacher;
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
          xq[i] = exp2_fast(student_log2(g.normal, xq[i])) * fmaf(xp[i], g.of_ratio, g.of_q);
        }
        packs[0] = packed<T, kWidth>(xq);
        return;
      }
    }
    unpack(packs[1], xp);
    if (kPlain && !constants.mixed) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float lq = student_log2(g.normal, xq[i]), lp = teacher_log2(g.normal, xp[i]);
        if (constants.beta == 0.f) {
          xq[i] = fmaf(exp2_fast(lq), g.of_q, -exp2_fast(lp) * g.of_p);
        } else {
          xq[i] = exp2_fast(lq) * fmaf(ratio(lq, lp), g.of_ratio, g.of_q);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto by = gradient_values(g, xq[i], xp[i]);
        xq[i] = by.student;
        xp[i] = by.teacher;
      }
      if constexpr (!kPlain) packs[1] = packed<T, kWidth>(xp);
    }
    packs[0] = packed<T, kWidth>(xq);
  }

  struct ByLogit {
    float student, teacher;
  };
  __device__ ByLogit gradient_values(const Gradient& g, float student, float teacher) const {
    const float lq = student_log2(g.normal, student), lp = teacher_log2(g.normal, teacher);
    const float q = exp2_fast(lq), p = exp2_fast(lp);
    const float log2_m = constants.mixed ? log2_of_mixture(q, p) : constants.beta == 0.f ? lq : lp;
    float by_student = fmaf(q, fmaf(ratio(lq, log2_m), g.of_ratio, g.of_q), -p * g.of_p);
    if constexpr (kPlain) return {by_student, 0.f};
    if (constants.label_apart) {
      const auto z = logit(constants.label, student);
      by_student = fmaf(g.of_label, exp2_fast(fmaf(z.x, z.k, -g.label_m2) - g.label_log2), by_student);
    }
    const float by_teacher = fmaf(p, fmaf(ratio(lp, log2_m), g.teacher_ratio, g.teacher_p), -q * g.teacher_q);
    return {by_student * logit(constants.student, student).slope, by_teacher * logit(constants.teacher, teacher).slope};
  }

  /// The gradient of the label's column, if it lies in [begin, end). Its vector has been written.
  __device__ void write_target(const Gradient& g, const Sums& sums, int begin, int end) const {
    const int c = info.index;
    if (c < max(begin, 0) || c >= end || output(0) == nullptr) return;
    const float others = gradient_values(g, sums.student_at, sums.teacher_at).student;
    output(0)[c] = static_cast<T>(fmaf(-g.at_label, logit(constants.label, sums.student_at).slope, others));
  }

  __device__ float label_loss(const PowerSum& sum, const Sums& sums) const {
    const auto z = logit(constants.label, sums.student_at);
    return (log2f(sum.sum) - fmaf(z.x, z.k, -sum.m2)) * static_cast<float>(kInverseLog2E);
  }
  /// The row's outputs, by one thread.
  __device__ void write(const Sums& sums, const Parts& parts) const {
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    float soft = 0.f, hard = 0.f;
    if (needs_row()) {
      if (!same(sums)) soft = (constants.student_share * parts.student + constants.teacher_share * parts.teacher) * ln2;
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

/// Log-probabilities are as they are: no normalizers, so the divergences are the sums, and the gradient has no mean in
/// it.
template <class T>
struct JsdOfLogProbs : Jsd<T, false> {
  using Base = Jsd<T, false>;
  using Sums = JsdParts;
  using Parts = NoParts;
  using Early = NoParts;
  using Gradient = typename Base::Gradient;
  using Normal = typename Base::Normal;
  static constexpr bool kBulk = true;
  static constexpr bool kSecondPass = false;
  using Base::Base;

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[2][kCount], const Column& column) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Pack<T, kWidth> both[2] = {packs[0][j], packs[1][j]};
      Base::template add_parts<kWhole, false>(Normal{}, sums, both, column(j));
    }
  }
  __device__ Early read_early(int, int) const { return {}; }
  __device__ void add_early(Sums&, Early) const {}
  __device__ Gradient finish(const Sums&, NoParts) const {
    JsdSums<false> unknown;
    unknown.differ = 1;
    auto g = Base::finish(unknown, JsdParts{});
    g.normal = Normal{};
    if (this->constants.beta == 1.f) g.of_q = g.of_ratio * kLog2E;
    if (this->constants.beta == 0.f) {
      g.of_q = 0.f;
      g.teacher_p = g.teacher_ratio * kLog2E;
    } else if (!this->constants.mixed) {
      g.teacher_p = 0.f;
    }
    return g;
  }
  __device__ void write(const Sums& sums, NoParts) const {
    JsdSums<false> unknown;
    unknown.differ = 1;
    Base::write(unknown, sums);
  }
  __device__ void write_target(const Gradient&, const Sums&, int, int) const {}
};

}  // namespace fusegrad::device
