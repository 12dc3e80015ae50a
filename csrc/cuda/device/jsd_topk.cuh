// The divergence from a top-k teacher as a functor of the row skeleton: its K columns, and one bucket for all others.
// The bucket's probability is summed over its own columns, since 1 less the others' would cancel: the K are marked, and
// left out of the sum. Their logits come gathered, since the gradient may overwrite them.
#pragma once

#include "cuda/device/jsd.cuh"

namespace fusegrad::device {

/// A bit for each column of a part of a row, in shared memory.
struct Marks {
  uint32_t* words = nullptr;
  int first = 0;  // the column of bit 0

  __device__ void set(int c) const { atomicOr(&words[(c - first) / 32], 1u << ((c - first) % 32)); }
  __device__ bool get(int c) const { return (words[(c - first) / 32] >> ((c - first) % 32)) & 1u; }
};

struct TopKSums {
  PowerSum rest, label;    // the bucket's columns, and all of the hard part
  float student_at = 0.f;  // the label's logit, from the one part that has it

  template <class Over>
  __device__ void merge(const Over& over) {
    rest.merge(over);
    label.merge(over);
    student_at = over.sum(student_at);
  }
};

/// What follows from the sums, the same in every thread. Base 2.
struct TopKParts {
  float m2 = 0.f, log2_sum = 0.f;  // of all columns
  float soft = 0.f, mean = 0.f;    // the divergence, and what is taken off the ratios in the gradients
  float log2_mass = 0.f;           // of the teacher's probabilities, where they are renormalized
  float p_rest = 0.f, p_sum = 1.f;

  template <class Over>
  __device__ void merge(const Over&) {}
};

template <class T>
struct JsdTopK {
  using Params = RowJsd;
  using Constants = JsdConstants;
  using Sums = TopKSums;
  using Parts = TopKParts;
  static constexpr int kInputs = 1;
  static constexpr bool kBulk = false;
  static constexpr bool kSecondPass = false;
  static constexpr bool kTopK = true;
  static constexpr int kUnroll = 1;

  const Params& p;
  const Constants& constants;
  int64_t row;
  JsdRow info;
  Marks marks;

  __device__ JsdTopK(const Params& p, const Constants& constants, int64_t row)
      : p(p), constants(constants), row(row), info(p, row) {}

  __device__ const T* input(int) const { return static_cast<const T*>(p.student) + row * p.student_stride; }
  __device__ T* output(int) const {
    return p.grad_student != nullptr ? static_cast<T*>(p.grad_student) + row * p.grad_student_stride : nullptr;
  }
  __device__ bool has_output() const { return p.grad_student != nullptr; }
  __device__ bool needs_row() const { return info.kept && info.in_range; }
  __device__ bool constant_gradient() const { return !needs_row(); }
  __device__ float constant() const { return info.in_range ? 0.f : not_a_number(); }
  __device__ bool inside(int c) const { return c >= 0 && c < static_cast<int>(p.cols); }

  /// Marks the K among columns [begin, end), which `words` (zeros) has bits for. By threads [0, threads).
  __device__ void mark(uint32_t* words, int begin, int end, int thread, int threads) {
    marks = {words, begin};
    for (int64_t k = thread; k < p.topk; k += threads) {
      const int64_t c = index(k);
      if (c >= max(begin, 0) && c < min(end, static_cast<int>(p.cols))) marks.set(static_cast<int>(c));
    }
  }
  __device__ int64_t index(int64_t k) const { return static_cast<const int64_t*>(p.teacher_index)[row * p.topk + k]; }
  __device__ float top_logit(int64_t k) const { return static_cast<const float*>(p.topk_logits)[row * p.topk + k]; }
  __device__ float log2_p(const Parts& parts, int64_t k) const {
    return static_cast<const float*>(p.teacher)[row * p.teacher_stride + k] * kLog2E - parts.log2_mass;
  }
  __device__ static Logit logit(const LogitConstants& constants, float x) {
    return constants.cap != 0.f ? Logit::capped<T>(constants, x) : Logit::plain(constants, x);
  }

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kInputs][kCount], const Column& column) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      add_vector<kWhole>(sums.rest, constants.student, packs[0][j], column(j), [&](int c) { return !marks.get(c); });
      if (constants.hard != 0.f || p.hard != nullptr) {
        add_vector<kWhole>(sums.label, constants.label, packs[0][j], column(j), [](int) { return true; });
      }
    }
  }
  template <bool kWhole, int kWidth, class Counts>
  __device__ void add_vector(PowerSum& sum, const LogitConstants& transform, const Pack<T, kWidth>& pack, int first,
                             const Counts& counts) const {
    float y[kWidth], x[kWidth], largest = minus_infinity(), part = 0.f;
    unpack(pack, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto z = logit(transform, x[i]);
      const bool in = (kWhole || inside(first + i)) && counts(first + i);
      x[i] = in ? z.x : minus_infinity();
      y[i] = in ? z.k : 1.f;
      largest = fmaxf(largest, x[i] * y[i]);
    }
    sum.rebase(fmaxf(sum.m2, largest));
    const float from = sum.reference();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) part += exp2_fast(fmaf(x[i], y[i], -from));
    sum.sum += part;
  }

  using Early = T;
  __device__ Early read_early(int begin, int end) const {
    return info.index >= max(begin, 0) && info.index < end ? input(0)[info.index] : static_cast<T>(0.f);
  }
  __device__ void add_early(Sums& sums, Early at) const { sums.student_at = widen(at); }

  /// By `lanes` lanes of a warp for each row; all lanes of the warp must take part.
  __device__ Parts top_parts(const Sums& sums, int lane, int lanes) const {
    Parts parts;
    const OverLanes over{lanes};
    PowerSum all;
    float mass = 0.f;
    for (int64_t k = lane; k < p.topk; k += lanes) {
      const auto z = logit(constants.student, top_logit(k));
      const float y = z.x * z.k;
      all.rebase(fmaxf(all.m2, y));
      all.sum += exp2f(y - all.reference());
      mass += exp2f(log2_p(parts, k));
    }
    all.merge(over);
    mass = over.sum(mass);
    const float larger = fmaxf(all.m2, sums.rest.m2);
    PowerSum rest = sums.rest;
    all.rebase(larger);
    rest.rebase(larger);
    parts.m2 = all.reference();
    parts.log2_sum = log2f(all.sum + rest.sum);
    if (p.renormalize) {
      parts.log2_mass = log2f(mass);
    } else {
      // Where the K are all columns, what is missing to 1 belongs to none.
      parts.p_rest = p.topk == p.cols || mass > 1.f ? 0.f : 1.f - mass;
      parts.p_sum = mass + parts.p_rest;
    }
    const auto add = [&](float log2_q, float log2_p) {
      const auto b = bucket(log2_q, log2_p);
      parts.soft += b.soft;
      parts.mean += b.of_q;
    };
    for (int64_t k = lane; k < p.topk; k += lanes) add(log2_q(parts, top_logit(k)), log2_p(parts, k));
    if (lane == 0) add(rest_log2_q(parts, sums), log2f(parts.p_rest));
    parts.soft = over.sum(parts.soft);
    parts.mean = over.sum(parts.mean);
    return parts;
  }
  __device__ float log2_q(const Parts& parts, float x) const {
    const auto z = logit(constants.student, x);
    return fmaf(z.x, z.k, -parts.m2) - parts.log2_sum;
  }
  __device__ float rest_log2_q(const Parts& parts, const Sums& sums) const {
    return (sums.rest.m2 - parts.m2) + log2f(sums.rest.sum) - parts.log2_sum;
  }

  /// One bucket's part of the divergence, and q times its ratio.
  struct Bucket {
    float soft, of_q, q, p;
  };
  __device__ Bucket bucket(float log2_q, float log2_p) const {
    Bucket b{0.f, 0.f, exp2f(log2_q), exp2f(log2_p)};
    if (constants.mixed) {
      // As in jsd.cuh: ratios from the difference of the logarithms.
      const float d = fminf(fmaxf(log2_p - log2_q, kLowestD), kLargestD);
      const float ratio = -log2f(fmaf(constants.beta, exp2f(d), 1.f - constants.beta));
      b.of_q = b.q * ratio;
      b.soft = (1.f - constants.beta) * b.of_q + constants.beta * b.p * (d + ratio);
    } else if (constants.beta == 0.f) {
      if (b.p > 0.f) b.soft = b.p * (log2_p - log2_q);
    } else {
      if (b.q > 0.f) b.of_q = b.q * (log2_q - log2_p);
      b.soft = b.of_q;
    }
    return b;
  }
  /// The gradient by a bucket's logit.
  __device__ float bucket_gradient(const Parts& parts, const Bucket& b) const {
    if (constants.beta == 0.f) return b.q * parts.p_sum - b.p;
    return constants.student_share * (b.of_q - b.q * parts.mean) * static_cast<float>(kInverseLog2E);
  }

  struct Gradient {
    Parts parts;
    float rest, rest_m2, rest_log2;  // of a column in the bucket: rest * 2^(y - rest_m2 - rest_log2)
    float soft;
    float label, label_m2, label_log2;
  };
  __device__ Gradient finish(const Sums& sums, const Parts& parts) const {
    const float upstream = info.upstream(p, row);
    Gradient g{parts};
    g.soft = upstream * constants.soft * constants.student.scale;
    // A weight of 0 must not meet an infinite divergence; an empty bucket has no columns.
    if (g.soft != 0.f && sums.rest.sum > 0.f) {
      g.rest = g.soft * bucket_gradient(parts, bucket(rest_log2_q(parts, sums), log2f(parts.p_rest)));
      g.rest_m2 = sums.rest.m2;
      g.rest_log2 = log2f(sums.rest.sum);
    }
    g.label = upstream * constants.hard * constants.label.scale;
    g.label_m2 = sums.label.m2;
    g.label_log2 = log2f(sums.label.sum);
    return g;
  }
  __device__ float label_part(const Gradient& g, float x) const {
    if (g.label == 0.f) return 0.f;
    const auto z = logit(constants.label, x);
    return g.label * exp2_fast(fmaf(z.x, z.k, -g.label_m2) - g.label_log2) * z.slope;
  }
  __device__ float rest_value(const Gradient& g, float x) const {
    const auto z = logit(constants.student, x);
    return fmaf(g.rest * z.slope, exp2_fast(fmaf(z.x, z.k, -g.rest_m2) - g.rest_log2), label_part(g, x));
  }
  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[kInputs], int) const {
    float x[kWidth];
    unpack(packs[0], x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = rest_value(g, x[i]);
    packs[0] = packed<T, kWidth>(x);
  }
  /// The gradients of the K among columns [begin, end), whose vectors have been written.
  __device__ void write_top(const Gradient& g, int begin, int end, int thread, int threads) const {
    for (int64_t k = thread; k < p.topk; k += threads) {
      const int64_t c = index(k);
      if (c < max(begin, 0) || c >= min(end, static_cast<int>(p.cols))) continue;
      const float x = top_logit(k);
      const auto b = bucket(log2_q(g.parts, x), log2_p(g.parts, k));
      float value = label_part(g, x);
      if (g.soft != 0.f) value = fmaf(g.soft * logit(constants.student, x).slope, bucket_gradient(g.parts, b), value);
      if (c == info.index) value -= g.label * logit(constants.label, x).slope;
      output(0)[c] = static_cast<T>(value);
    }
  }
  /// The label's column in the bucket.
  __device__ void write_target(const Gradient& g, const Sums& sums, int begin, int end) const {
    const int c = info.index;
    if (c < max(begin, 0) || c >= end || marks.get(c)) return;
    const float x = sums.student_at;
    output(0)[c] = static_cast<T>(rest_value(g, x) - g.label * logit(constants.label, x).slope);
  }
  __device__ void write(const Sums& sums, const Parts& parts) const {
    constexpr float ln2 = static_cast<float>(kInverseLog2E);
    float hard = 0.f;
    if (info.index >= 0) {
      const auto z = logit(constants.label, sums.student_at);
      hard = (log2f(sums.label.sum) - fmaf(z.x, z.k, -sums.label.m2)) * ln2;
    }
    write_losses(p, constants, info, row, parts.soft * ln2, hard);
  }
};

}  // namespace fusegrad::device
