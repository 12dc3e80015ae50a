// The divergence from a top-k teacher as a functor of the row skeleton: its K columns, and one bucket for all others.
//
// The bucket's probability is summed over its own columns, since 1 less the others' would cancel: the K columns are
// marked, and left out of the sum. Their logits come gathered, since the gradient may overwrite them.
#pragma once

#include "cuda/losses/device/jsd.cuh"

namespace fusegrad::device {

/// The K columns in a part of a row, in shared memory: a byte for each vector of kWidth columns, in it a bit for each.
template <int kWidth>
struct Marks {
  static_assert(kWidth <= 8);
  uint32_t* words = nullptr;
  int first = 0;  // column of the first vector's first bit

  __device__ void set(int c) const {
    const int bit = (c - first) / kWidth * 8 + (c - first) % kWidth;
    atomicOr(&words[bit / 32], 1u << (bit % 32));
  }
  /// The byte of the vector that column c lies in.
  __device__ uint32_t of(int c) const { return reinterpret_cast<const unsigned char*>(words)[(c - first) / kWidth]; }
  __device__ bool get(int c) const { return of(c) >> ((c - first) % kWidth) & 1u; }
};

template <bool kPlain>
struct TopKSums {
  PowerSum rest;                                        // of the bucket's columns
  std::conditional_t<kPlain, NoParts, PowerSum> label;  // of all columns, for the hard part
  float student_at = 0.f;                               // the label's logit, from the one part that has it

  template <class Over>
  __device__ void merge(const Over& over) {
    rest.merge(over);
    label.merge(over);
    student_at = over.sum(student_at);
  }
};

/// What follows from the sums, the same in every thread. Base 2.
struct TopKParts {
  float m2 = 0.f, log2_sum = 0.f;              // of all columns
  float soft = 0.f, mean = 0.f;                // the divergence, and what is taken off the ratios in the gradients
  float log2_mass = 0.f;                       // of the teacher's probabilities, where they are renormalized
  float log2_q_rest = 0.f, log2_p_rest = 0.f;  // of the bucket
  float p_sum = 1.f;

  template <class Over>
  __device__ void merge(const Over&) {}
};

/// kWidth: columns of a vector of the rows. kPlain: see Jsd.
template <class T, int kVector, bool kPlain>
struct JsdTopK {
  using Params = RowJsd;
  using Constants = JsdConstants;
  using Sums = TopKSums<kPlain>;
  using Parts = TopKParts;
  static constexpr int kInputs = 1;
  static constexpr bool kBulk = kPlain;
  static constexpr bool kSecondPass = false;
  static constexpr bool kTopK = true;
  static constexpr int kUnroll = kPlain ? 4 : 1;

  const Params& p;
  const Constants& constants;
  int64_t row;
  JsdRow info;
  Marks<kVector> marks;

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

  /// Called by threads [0, threads): marks the K among columns [begin, end), for which `words` has bytes, zeros before.
  __device__ void mark(uint32_t* words, int begin, int end, int thread, int threads) {
    marks = {words, begin};
    for (int64_t k = thread; k < p.topk; k += threads) {
      const int64_t c = index(k);
      if (c >= max(begin, 0) && c < min(end, static_cast<int>(p.cols))) marks.set(static_cast<int>(c));
    }
  }
  __device__ int64_t index(int64_t k) const { return static_cast<const int64_t*>(p.teacher_index)[row * p.topk + k]; }
  __device__ float top_logit(int64_t k) const { return static_cast<const float*>(p.topk_logits)[row * p.topk + k]; }
  __device__ bool is_padding(int64_t k) const { return index(k) == -1; }
  /// The student's logit with log2(e) over the temperature. Padding's stays -inf, which a softcap bounds.
  __device__ Logit student_logit(int64_t k) const {
    Logit z = logit(constants.student, top_logit(k));
    if (is_padding(k)) z.x = minus_infinity();
    return z;
  }
  __device__ float log2_p(const Parts& parts, int64_t k) const {
    // Both are loaded before the choice, so that the two loads wait together.
    const float stored = static_cast<const float*>(p.teacher)[row * p.teacher_stride + k];
    return is_padding(k) ? minus_infinity() : stored * kLog2E - parts.log2_mass;
  }
  __device__ static Logit logit(const LogitConstants& constants, float x) {
    return !kPlain && constants.cap != 0.f ? Logit::capped<T>(constants, x) : Logit::plain(constants, x);
  }

  template <bool kWhole, int kCount, int kWidth, class Column>
  __device__ void add(Sums& sums, const Pack<T, kWidth> (&packs)[kInputs][kCount], const Column& column) const {
    if constexpr (kPlain) {
      Pack<T, kWidth> rest[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) rest[j] = without_top(packs[0][j], marks.of(column(j)));
      sums.rest.add(rest, constants.student.k);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        add_vector<kWhole>(sums.rest, constants.student, packs[0][j], column(j), [&](int c) { return !marks.get(c); });
        if (constants.hard != 0.f || p.hard != nullptr) {
          add_vector<kWhole>(sums.label, constants.label, packs[0][j], column(j), [](int) { return true; });
        }
      }
    }
  }
  template <int kWidth>
  __device__ static Pack<T, kWidth> without_top(Pack<T, kWidth> pack, uint32_t marked) {
    if (marked != 0) {  // rare
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (marked >> i & 1u) pack.set(i, lowest_pad<T>());
      }
    }
    return pack;
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

  /// Sums over the K: the student's exponentials and the teacher's probabilities.
  struct Top {
    PowerSum student;
    float mass = 0.f;
    float error = 0.f;  // with which the mass is known
    bool all = false;   // the K are all columns
  };
  __device__ bool has_all_columns(int lane, const OverLanes& over, int lanes) const {
    float columns = 0.f;
    for (int64_t k = lane; k < p.topk; k += lanes) columns += is_padding(k) ? 0.f : 1.f;
    return over.sum(columns) == static_cast<float>(p.cols);
  }
  /// Called by `lanes` lanes of a warp for each row; all lanes of the warp must take part.
  __device__ Top read_top(int lane, int lanes) const {
    Top top;
    for (int64_t k = lane; k < p.topk; k += lanes) {
      const auto z = student_logit(k);
      top.student.rebase(fmaxf(top.student.m2, z.x * z.k));
      top.student.sum += exp2f(fmaf(z.x, z.k, -top.student.reference()));
      const float log2 = log2_p(Parts{}, k), probability = exp2f(log2);
      top.mass += probability;
      if (probability > 0.f) top.error += probability * (constants.sum_error - constants.log_error * log2);
    }
    const OverLanes over{lanes};
    top.student.merge(over);
    top.mass = over.sum(top.mass);
    top.error = over.sum(top.error);
    top.all = p.topk >= p.cols && has_all_columns(lane, over, lanes);
    return top;
  }
  /// Called by the same lanes.
  __device__ Parts top_parts(const Sums& sums, const Top& top, int lane, int lanes) const {
    Parts parts;
    const OverLanes over{lanes};
    const float mass = top.mass, larger = fmaxf(top.student.m2, sums.rest.m2);
    PowerSum all = top.student, rest = sums.rest;
    all.rebase(larger);
    rest.rebase(larger);
    parts.m2 = all.reference();
    const float sum = all.sum + rest.sum;
    parts.log2_sum = log2f(sum);
    parts.log2_q_rest = log2_rest(all.sum / sum, (sums.rest.m2 - parts.m2) + log2f(sums.rest.sum) - parts.log2_sum);
    // If the K are all columns, what is missing to 1 belongs to none.
    float p_rest = 0.f;
    parts.log2_p_rest = minus_infinity();
    if (!p.renormalize && !top.all) {
      if (p.tail != nullptr) {
        parts.log2_p_rest = static_cast<const float*>(p.tail)[row] * kLog2E;
        p_rest = exp2f(parts.log2_p_rest);
      } else {
        // The bucket has at least the sum's own error: its columns are not impossible.
        p_rest = 1.f - mass < top.error ? top.error : 1.f - mass;
        parts.log2_p_rest = log2_rest(mass, log2f(p_rest));
      }
    }
    if (p.renormalize) {
      parts.log2_mass = log2f(mass);
    } else {
      parts.p_sum = mass + p_rest;
    }
    const auto add = [&](float log2_q, float log2_p) {
      const auto b = bucket(log2_q, log2_p);
      parts.soft += b.soft;
      parts.mean += b.of_q;
    };
    for (int64_t k = lane; k < p.topk; k += lanes) {
      add(is_padding(k) ? minus_infinity() : log2_q(parts, top_logit(k)), log2_p(parts, k));
    }
    if (lane == 0) add(parts.log2_q_rest, parts.log2_p_rest);
    parts.soft = over.sum(parts.soft);
    parts.mean = over.sum(parts.mean);
    return parts;
  }
  __device__ float log2_q(const Parts& parts, float x) const {
    const auto z = logit(constants.student, x);
    return fmaf(z.x, z.k, -parts.m2) - parts.log2_sum;
  }
  /// log2 of a bucket's probability from that of all others, where these are few: the divergence between teachers and
  /// students of which the bucket has nearly all is a small difference. Else it is `far`.
  __device__ static float log2_rest(float others, float far) { return others < 0.5f ? log1pf(-others) * kLog2E : far; }

  /// One bucket's part of the divergence, and q times its ratio.
  struct Bucket {
    float soft, of_q, q, p;
  };
  __device__ Bucket bucket(float log2_q, float log2_p) const {
    Bucket b{0.f, 0.f, exp2f(log2_q), exp2f(log2_p)};
    if (constants.mixed) {
      const float d = fminf(fmaxf(log2_p - log2_q, kLowestD), -kLowestD);
      // m over the one of q and p that has more of it, so that neither logarithm is a difference of larger ones. Near 1
      // nothing must round, and near 0 it must not come from 1.
      const float rest = constants.student_share, beta = constants.beta;
      const bool by_student = d <= constants.even;
      const float power = by_student ? d : -d, share = by_student ? beta : rest;
      const float more = share * expm1f(power * static_cast<float>(kInverseLog2E));
      const float far = fmaf(share, exp2f(power), by_student ? rest : beta);
      const float ratio = more < -0.5f ? -log2f(far) : -log1pf(more) * kLog2E;
      b.of_q = b.q * (by_student ? ratio : ratio - d);
      b.soft = rest * b.of_q + beta * b.p * (by_student ? d + ratio : ratio);
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
    if (!constants.mixed && constants.beta == 0.f) return b.q * parts.p_sum - b.p;
    return constants.student_share * (b.of_q - b.q * parts.mean) * static_cast<float>(kInverseLog2E);
  }

  struct Gradient {
    Parts parts;
    float rest, rest_m2;  // of a column in the bucket: rest * 2^(y - rest_m2)
    float soft, label;
    float label_m2, label_log2;  // of the hard part's softmax
  };
  __device__ Gradient finish(const Sums& sums, const Parts& parts) const {
    const float upstream = info.upstream(p, row);
    Gradient g{parts};
    g.soft = upstream * constants.soft * constants.student.scale;
    g.label = upstream * constants.hard * constants.label.scale;
    g.rest_m2 = sums.rest.reference();
    if constexpr (kPlain) {
      g.label_m2 = parts.m2;
      g.label_log2 = parts.log2_sum;
    } else {
      g.label_m2 = sums.label.m2;
      g.label_log2 = log2f(sums.label.sum);
    }
    if (sums.rest.sum == 0.f) return g;  // an empty bucket has no columns
    const auto b = bucket(parts.log2_q_rest, parts.log2_p_rest);
    // A weight of 0 must not be multiplied by an infinite divergence.
    if (g.soft != 0.f) g.rest = g.soft * bucket_gradient(parts, b);
    if (kPlain && g.label != 0.f) g.rest = fmaf(g.label, b.q, g.rest);  // the same softmax
    g.rest /= sums.rest.sum;
    return g;
  }
  __device__ float label_part(const Gradient& g, float x) const {
    if (g.label == 0.f) return 0.f;
    const auto z = logit(constants.label, x);
    return g.label * exp2_fast(fmaf(z.x, z.k, -g.label_m2) - g.label_log2) * z.slope;
  }
  __device__ float rest_value(const Gradient& g, float x) const {
    const auto z = logit(constants.student, x);
    const float power = exp2_fast(fmaf(z.x, z.k, -g.rest_m2));
    return kPlain ? g.rest * power : fmaf(g.rest * z.slope, power, label_part(g, x));
  }
  template <bool kCached, int kWidth>
  __device__ void gradient(const Gradient& g, Pack<T, kWidth> (&packs)[kInputs], int) const {
    float x[kWidth];
    unpack(packs[0], x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = rest_value(g, x[i]);
    packs[0] = packed<T, kWidth>(x);
  }
  /// Stores the gradients of the K among columns [begin, end), whose vectors must have been written.
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
      if constexpr (kPlain) {
        hard = (parts.log2_sum - fmaf(z.x, z.k, -parts.m2)) * ln2;
      } else {
        hard = (log2f(sums.label.sum) - fmaf(z.x, z.k, -sums.label.m2)) * ln2;
      }
    }
    write_losses(p, constants, info, row, parts.soft * ln2, hard);
  }
};

}  // namespace fusegrad::device
