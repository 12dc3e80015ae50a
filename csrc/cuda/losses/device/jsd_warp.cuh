// A warp's part of the divergences of rows of logits (jsd_cluster.cuh).
//
// Special functions bound the kernel (16 a clock and multiprocessor). A pair of logits takes two for the sums: the
// student's power q and 2^d, with d the difference of the exponents; the teacher's power is q 2^d. No later step needs
// an exponential: 2^d stays in shared memory in place of the two logits, and a factor of the row turns it into p / q.
// log2(m / q), a third special function where 0 < b < 1, then takes its place for the epilogue. At b = 0 and 1 the
// divergence is a sum over the row that needs no normalizer, so one merge is enough.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/losses/device/jsd_rows.cuh"

namespace fusegrad::device {

// Shared memory has room for a row and the front of the next, so many of a lane's vectors. The back of the next row is
// copied while the front's gradient is written.
constexpr int kJsdFront = 5, kJsdBack = kJsdVectors - kJsdFront;
constexpr int kJsdSharedBytes = kJsdWarps * (2 * kJsdFront + kJsdBack) * 2 * 32 * 16;

/// How the warps of a cluster share a row.
struct JsdSplit {
  int span;    // vectors of each input a warp has, a multiple of 32
  bool lines;  // all rows start at multiples of kLineBytes
};
struct JsdArrivals {
  Arrival front[2], back;
};

/// See JsdWarpRows. Transforms are plain (see Jsd).
template <class T, JsdKind kKind>
class JsdWarp : public JsdWarpRows<T, kKind> {
  using Base = JsdWarpRows<T, kKind>;
  using Base::begin_, Base::end_, Base::lane_, Base::p_, Base::constants_, Base::halves_;
  using Base::kWidth, Base::kMixed, Base::kForward, Base::kReverse;
  using typename Base::P;
  /// Powers go up to 2^40: where a student's is 0, no finite 2^d makes a teacher's that counts.
  static constexpr float kHeadroom = kReverse ? 0.f : 40.f;
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static constexpr float kFarthest = 1e25f;  // d that may meet a factor of a gradient

 public:
  using Base::kLn2;

  __device__ JsdWarp(const RowJsd& p, const JsdConstants& constants, const JsdSplit& split, int group, int lane,
                     unsigned char* shared, JsdArrivals& arrivals)
      : Base(p, constants, group * split.span, (group + 1) * split.span, lane),
        split_(split),
        arrivals_(arrivals),
        shared_(reinterpret_cast<P*>(shared)) {}

  /// Starts the copies of a row's front, the `turn`-th row's of the warp, or of its back.
  __device__ void load_front(int row, int turn, bool wanted) const {
    load(row, 0, kJsdFront, front(turn & 1), arrivals_.front[turn & 1], wanted);
  }
  __device__ void load_back(int row, bool wanted) const {
    load(row, kJsdFront, kJsdBack, back(), arrivals_.back, wanted);
  }

  /// Looks for the largest logits in the front of the warp's `turn`-th row, while the warp waits for others.
  __device__ void look_ahead(int row, int turn) {
    const P* slot = front(turn & 1) + lane_;
    const int units = units_of(this->vectors(row));
    arrivals_.front[turn & 1].wait_own(turn >> 1 & 1);
    __syncwarp();
    P most[2] = {filled<T, kWidth>(lowest_pad<T>()), filled<T, kWidth>(lowest_pad<T>())};
#pragma unroll
    for (int j = 0; j < kJsdFront; ++j) {
      if (j >= units) break;
      keep_largest(most[0], slot[32 * j]);
      keep_largest(most[1], slot[32 * (kJsdFront + j)]);
    }
    ahead_[0] = largest_pair(most[0]);
    ahead_[1] = largest_pair(most[1]);
  }
  /// Passes over the warp's `turn`-th row, of which nothing has been loaded.
  __device__ void skip(int turn) const {
    arrivals_.front[turn & 1].wait_own(turn >> 1 & 1);
    arrivals_.back.wait_own(turn & 1);
  }
  /// Begins the warp's `turn`-th row.
  __device__ void begin(int row, int turn) {
    const auto v = this->vectors(row);
    half_ = turn & 1;
    front_ = front(half_) + lane_;
    back_ = back() + lane_;
    const int end = min(end_, v.count);
    // Takes the lane's vectors begin_ + lane_ + 32 j with first_ <= 32 j < last_.
    first_ = max(v.lead / kWidth - begin_, 0) - lane_;
    last_ = end - begin_ - lane_;
    units_ = units_of(v);
    full_ = split_.lines && end_ <= v.whole_end;
    column_ = v.column(begin_ + lane_);
  }

  /// The student's powers and their sums over the warp, the teacher's from them: p = q 2^d. For the passes that follow
  /// 2^d, at b = 1 d, take the place of the logits.
  __device__ JsdHalf levels(int row, uint32_t turn) {
    P most[2] = {filled<T, kWidth>(lowest_pad<T>()), filled<T, kWidth>(lowest_pad<T>())};
    arrivals_.back.wait_own(turn & 1);
    __syncwarp();
    for_back([&](auto from, auto count) {
#pragma unroll
      for (int j = from; j < from + count; ++j) {
        keep_largest(most[0], kept(j, 0));
        keep_largest(most[1], kept(j, 1));
      }
    });
    own_ = {warp_max(largest_of(__hmax2_nan(largest_pair(most[0]), ahead_[0]))),
            warp_max(largest_of(__hmax2_nan(largest_pair(most[1]), ahead_[1])))};
    const float kq = constants_.student.k, kp = constants_.teacher.k, relative = constants_.relative;
    const float mq = Level::reference(own_.student, kq), mp = Level::reference(own_.teacher, kp);
    const float from = __fsub_rn(mq, kHeadroom);
    const float scaled = __fmul_rn(Level::finite(own_.teacher), relative), largest = Level::finite(own_.student);
    const float shift = __fsub_rn(scaled, largest),
                left = fmaf(Level::finite(own_.teacher), relative, -scaled) + lost(scaled, -largest, shift);
    shift_ = __fmul_rn(shift, kq);
    float all_q = 0.f, all_p = 0.f, dot = 0.f;
    far_vectors_ = 0;
    for_all([&](auto from_vector, auto count) {
      constexpr int j = decltype(from_vector)::value, kGroup = decltype(count)::value;
      P packs[kGroup][2];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) packs[i][0] = kept(j + i, 0), packs[i][1] = kept(j + i, 1);
#pragma unroll
      for (int v = 0; v < kGroup; ++v) {
        float xq[kWidth], xp[kWidth], sum_q = 0.f, sum_p = 0.f, part = 0.f;
        unpack(packs[v][0], xq);
        unpack(packs[v][1], xp);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float q = exp2_fast(fmaf(xq[i], kq, -from)), difference = this->difference(xq[i], xp[i]);
          power_[j + v][i] = q;
          sum_q += q;
          if constexpr (kReverse) {
            sum_p += exp2_fast(fmaf(xp[i], kp, -mp));
            // A NaN of two infinities meets a power of 0.
            const float d = fmaxf(fmaf(difference, -kq, shift_), -kFarthest);
            part = fmaf(q, d, part);
            xp[i] = fminf(d, kFarthest);
          } else {
            const float d = fmaxf(fmaf(difference, kq, -shift_), -kFarthest);
            xp[i] = exp2_fast(d);
            const float p = q * xp[i];
            sum_p += p;
            part = fmaf(p, d, part);
          }
        }
        all_q += sum_q;
        if (kReverse || fabsf(sum_p + part) <= 3e38f) {
          all_p += sum_p;
          dot += part;
        } else if (has(j + v)) {
          far_vectors_ |= 1u << (j + v);
        }
        keep(j + v, xp);
      }
    });
    // What rounding left out of the references.
    const float of_shift = fmaf(shift, kq, -shift_), of_student = lost(mq, -kHeadroom, from);
    const float of_teacher =
        (residual(own_.teacher, kp) - residual(own_.student, kq)) - fmaf(left, kq, of_shift) - of_student;
    to_level_ = {fmaf(-of_student, kLn2, 1.f), kReverse ? 1.f : fmaf(of_teacher, kLn2, 1.f)};
    if constexpr (kMixed) {
      near_teacher_ = all_p;
      near_dot_ = dot;
    } else {
      // In units of the student's logits, relative to the difference of the largest ones.
      dot = fmaf(kForward ? -of_shift : of_shift, kForward ? all_p : all_q, dot) / kq;
    }
    all_q *= to_level_.student;
    all_p *= to_level_.teacher;
    dot *= kForward ? to_level_.teacher : to_level_.student;
#pragma unroll 1
    for (uint32_t j = far_vectors_; j != 0; j &= j - 1) add_far_level(row, __ffs(j) - 1, shift, all_p, dot);
    const float sum = halves_.sum(all_q, all_p) * exp2f(-kHeadroom);
    JsdHalf x{{halves_.teacher ? own_.teacher : own_.student, sum}, 0.f, shift};
    if (!kMixed) x.dot = forward(OverLanes{32}.sum(dot)) * exp2f(-kHeadroom);
    return x;
  }

  /// Called after the merge of the levels.
  __device__ void normalize(const JsdHalf& x) {
    const Level other{Halves::other(x.level.largest), Halves::other(x.level.sum)};
    const Level q = halves_.teacher ? other : x.level, p = halves_.teacher ? x.level : other;
    const float kq = constants_.student.k, kp = constants_.teacher.k, relative = constants_.relative;
    const float mq = Level::reference(q.largest, kq), mp = Level::reference(p.largest, kp);
    of_power_ = __fdividef(Level::factor(own_.student, q.largest, kq), q.sum) * exp2f(-kHeadroom) * to_level_.student;
    of_teacher_ = __fdividef(Level::factor(own_.teacher, p.largest, kp), p.sum) * exp2f(-kHeadroom) * to_level_.teacher;
    // What rounding left out of mq, mp and the difference of the largest logits goes into the offset.
    const float scaled = __fmul_rn(p.largest, relative), shift = halves_.difference(x.level.largest);
    const float left = fmaf(p.largest, relative, -scaled) + lost(scaled, -q.largest, shift);
    const float own = fmaf(-left, kq, fmaf(p.largest, kp, -mp) - fmaf(q.largest, kq, -mq)) - log2f(p.sum / q.sum);
    const float product = __fmul_rn(-shift, kq);
    dot_offset_ = own;
    offset_ = (shift_ + product) + (own + fmaf(-shift, kq, -product));
    student_ = q;
  }

  /// Sums the divergences' parts over the warp. log2(m / q) stays in shared memory for the gradient.
  __device__ JsdHalf divergences(int row) {
    float student = 0.f, teacher = 0.f;
    uint32_t far_vectors = 0;
    const float beta = constants_.beta * exp2f(offset_), rest = constants_.student_share;
    for_all([&](auto from, auto count) {
      constexpr int j = decltype(from)::value, kGroup = decltype(count)::value;
      float x[kGroup][kWidth];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) kept_floats(j + i, x[i]);
#pragma unroll
      for (int v = 0; v < kGroup; ++v) {
        float of_q = 0.f, of_p = 0.f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float m_over_q = log2_fast(fmaf(beta, x[v][i], rest)), t = power_[j + v][i] * m_over_q;
          of_q += t;
          of_p = fmaf(t, x[v][i], of_p);
          x[v][i] = m_over_q;
        }
        keep(j + v, x[v]);
        if (fabsf(of_q + of_p) <= 3e38f) {
          student -= of_q;
          teacher -= of_p;
        } else if (has(j + v)) {
          far_vectors |= 1u << (j + v);
        }
      }
    });
    teacher = fmaf(offset_, near_teacher_, near_dot_) + teacher;
    student *= of_power_;
    teacher *= of_teacher_;
#pragma unroll 1
    for (; far_vectors != 0; far_vectors &= far_vectors - 1) {
      const int j = __ffs(far_vectors) - 1;
      add_far(row, j, (far_vectors_ >> j & 1) == 0, student, teacher);
    }
    // Comparisons drop a NaN that only one of the rows has.
    return {{0.f, halves_.sum(student + (offset_ - offset_), teacher)}, 0.f, 0.f};
  }
  /// b = 0: the teacher's, b = 1: the student's.
  __device__ float divergence(const JsdHalf& x) const {
    const float ratio = x.dot / x.level.sum;
    return forward(fmaf(__shfl_sync(~0u, ratio, kForward ? 16 : 0), constants_.student.k, dot_offset_));
  }
  __device__ float label_loss(float logit) const {
    const float k = constants_.label.k;
    return (log2f(student_.sum) - fmaf(logit, k, -Level::reference(student_.largest, k))) * kLn2;
  }

  /// From powers and what is kept for them to the gradient: 0 < b < 1: q (log2(m / q) a + b); b = 1: q (-d a + b);
  /// b = 0: q (-2^d a + b), or q b - p a where p itself is kept.
  struct Gradient {
    float a, b;
    T* out;             // of the lane's vector 0
    int label;          // the label's column if the lane has it, or negative
    float label_value;  // the gradient there
  };
  /// Called after the last merge, with the student's divergence where 0 < b.
  __device__ Gradient gradient_of(int row, float upstream, float divergence, int label) const {
    const float at_label = label >= 0 ? upstream * constants_.hard * constants_.label.scale : 0.f;
    const float soft = this->gradient_factor(upstream, constants_.student.scale * (kForward ? 1.f : kLn2));
    // An infinite divergence must not be multiplied by a factor of 0.
    const float ratio = soft * of_power_, of_q = (soft != 0.f ? -soft * divergence : 0.f) + at_label;
    Gradient g;
    g.a = kMixed ? -ratio : kForward ? soft * of_teacher_ : ratio;
    g.b = kForward ? fmaf(at_label, of_power_, ratio) : fmaf(of_q, of_power_, kReverse ? -ratio * offset_ : 0.f);
    g.out = this->gradient(row) + column_;
    g.label = -1;
    if (label >= 0) {
      const int at = label - column_, j = at / (32 * kWidth);
      if (at >= 0 && at % (32 * kWidth) < kWidth && j < kJsdVectors && has(j)) {
        float q = 0.f;
#pragma unroll
        for (int i = 0; i < kJsdVectors * kWidth; ++i) {
          if (i == j * kWidth + at % kWidth) q = power_[i / kWidth][i % kWidth];
        }
        const float x = reinterpret_cast<const float*>(&kept(j, at % kWidth / 4))[at % 4];
        g.label_value = value(g, q, x, is_far(j)) - at_label;
        g.label = label;
      }
    }
    return g;
  }
  __device__ void write_front(const Gradient& g, int row) const {
    for_front([&](auto from, auto count) { write<decltype(from)::value, decltype(count)::value>(g, row); });
  }
  __device__ void write_back(const Gradient& g, int row) const {
    for_back([&](auto from, auto count) { write<decltype(from)::value, decltype(count)::value>(g, row); });
  }
  __device__ void write_label(const Gradient& g, int row) const {
    if (g.label >= 0) this->gradient(row)[g.label] = static_cast<T>(g.label_value);
  }

 private:
  /// Steps of 32 vectors that the warp has, the last perhaps not for all lanes.
  __device__ int units_of(const RowVectors<T, kWidth>& v) const { return (min(end_, v.count) - begin_ + 31) / 32; }
  __device__ bool has(int j) const { return 32 * j >= first_ && 32 * j < last_; }
  // body(j, n), both known to the compiler, for vectors j ... j + n - 1 that are worked on at a time. A warp may have
  // fewer of them: the others are -inf.
  template <int kFrom, int kCount, class Body>
  __device__ void for_group(const Body& body) const {
    if (kFrom < units_) body(std::integral_constant<int, kFrom>{}, std::integral_constant<int, kCount>{});
  }
  template <class Body>
  __device__ void for_front(const Body& body) const {
    for_group<0, 2>(body);
    for_group<2, 2>(body);
    for_group<4, 1>(body);
  }
  template <class Body>
  __device__ void for_back(const Body& body) const {
    for_group<5, 1>(body);
    for_group<6, 2>(body);
  }
  template <class Body>
  __device__ void for_all(const Body& body) const {
    for_group<0, 2>(body);
    for_group<2, 2>(body);
    if (units_ > 5) {
      for_group<4, 2>(body);
    } else {
      for_group<4, 1>(body);
    }
    for_group<6, 2>(body);
  }
  /// Vector j of input i; later eight floats in place of both.
  __device__ P& kept(int j, int i) const {
    return j < kJsdFront ? front_[32 * (i * kJsdFront + j)] : back_[32 * (i * kJsdBack + j - kJsdFront)];
  }
  __device__ void keep(int j, const float (&x)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      kept(j, i).words = {__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), __float_as_uint(x[4 * i + 2]),
                          __float_as_uint(x[4 * i + 3])};
    }
  }
  __device__ void kept_floats(int j, float (&x)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 words = kept(j, i).words;
      x[4 * i] = __uint_as_float(words.x), x[4 * i + 1] = __uint_as_float(words.y);
      x[4 * i + 2] = __uint_as_float(words.z), x[4 * i + 3] = __uint_as_float(words.w);
    }
  }
  __device__ bool is_far(int j) const { return kForward && (far_vectors_ >> j & 1) != 0; }
  __device__ static float value(const Gradient& g, float q, float x, bool far) {
    return far ? fmaf(q, g.b, -x * g.a) : q * fmaf(x, kForward ? -g.a : g.a, g.b);
  }
  template <int kFrom, int kCount>
  __device__ void write(const Gradient& g, int row) const {
    float x[kCount][kWidth];
#pragma unroll
    for (int v = 0; v < kCount; ++v) kept_floats(kFrom + v, x[v]);
    if (full_ && (!kForward || far_vectors_ == 0)) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[v][i] = value(g, power_[kFrom + v][i], x[v][i], false);
        if (v == 0 || kFrom + v < units_) packed<T, kWidth>(x[v]).store(g.out + 32 * kWidth * (kFrom + v));
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[v][i] = value(g, power_[kFrom + v][i], x[v][i], is_far(kFrom + v));
      if (!has(kFrom + v)) continue;
      this->vectors(row).store(this->gradient(row), begin_ + lane_ + 32 * (kFrom + v), packed<T, kWidth>(x[v]));
    }
  }
  __device__ static Pair pair(const P& x, int i) {
    const uint32_t word = x.word(i);
    return *reinterpret_cast<const Pair*>(&word);
  }
  // A NaN stays: nothing else would carry a teacher's.
  __device__ static void keep_largest(P& most, const P& x) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const Pair larger = __hmax2_nan(pair(most, i), pair(x, i));
      most.word(i) = *reinterpret_cast<const uint32_t*>(&larger);
    }
  }
  __device__ static Pair largest_pair(const P& x) {
    return __hmax2_nan(__hmax2_nan(pair(x, 0), pair(x, 1)), __hmax2_nan(pair(x, 2), pair(x, 3)));
  }
  __device__ static float largest_of(Pair x) { return widen(__hmax_nan(x.x, x.y)); }
  /// The teacher's logit less the student's, in units of the student's.
  __device__ float difference(float xq, float xp) const { return fmaf(xp, constants_.relative, -xq); }
  /// From p over q to q over p where b = 1.
  __device__ static float forward(float x) { return kReverse ? -x : x; }
  /// What a + b = sum has lost.
  __device__ static float lost(float a, float b, float sum) {
    const float of_b = __fsub_rn(sum, a), of_a = __fsub_rn(sum, of_b);
    return __fadd_rn(__fsub_rn(a, of_a), __fsub_rn(b, of_b));
  }
  /// What rounding left out of Level::reference(x, k).
  __device__ static float residual(float x, float k) { return fmaf(Level::finite(x), k, -Level::reference(x, k)); }
  __device__ void load_again(int row, int j, float (&xq)[kWidth], float (&xp)[kWidth]) const {
    const auto all = this->vectors(row);
    unpack(all.load(this->student(row), begin_ + lane_ + 32 * j, lowest_pad<T>()), xq);
    unpack(all.load(this->teacher(row), begin_ + lane_ + 32 * j, lowest_pad<T>()), xp);
  }
  /// A vector with infinite 2^d: the student's powers may be 0 where the teacher's are not. The logits are read again:
  /// nothing is written before the last merge.
  __device__ void add_far_level(int row, int j, float shift, float& all_p, float& dot) const {
    float xq[kWidth], xp[kWidth];
    load_again(row, j, xq, xp);
    const float k = constants_.teacher.k, m = Level::reference(own_.teacher, k);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float p = exp2_fast(fmaf(xp[i], k, kHeadroom - m));
      all_p += p;
      if (p != 0.f) dot = fmaf(p, difference(xq[i], xp[i]) - shift, dot);
      xp[i] = p;
    }
    if (kForward) keep(j, xp);
  }
  /// The same after the merge, or a vector whose ratios overflow; `is_near`: the teacher's part without the ratios has
  /// been counted.
  __device__ void add_far(int row, int j, bool is_near, float& of_q, float& of_p) const {
    float xq[kWidth], xp[kWidth], student = 0.f, teacher = 0.f;
    load_again(row, j, xq, xp);
    const float kq = constants_.student.k, kp = constants_.teacher.k, mp = Level::reference(own_.teacher, kp);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float near_d = fmaxf(fmaf(difference(xq[i], xp[i]), kq, -shift_), -kFarthest);
      const float d = fminf(fmaxf(near_d + offset_, kLowestD), kLargestD);
      const float m_over_q = log2_fast(fmaf(constants_.beta, exp2_fast(d), constants_.student_share));
      const float p = exp2_fast(fmaf(xp[i], kp, kHeadroom - mp));
      student = fmaf(power(xq[i]), m_over_q, student);
      teacher = fmaf(p, d - m_over_q, teacher);
      if (is_near) teacher -= exp2_fast(near_d) * power(xq[i]) * (near_d + offset_);
      xp[i] = m_over_q;
    }
    of_q = fmaf(-of_power_, student, of_q);
    of_p = fmaf(of_teacher_, teacher, of_p);
    keep(j, xp);
  }
  __device__ float power(float x) const {
    const float k = constants_.student.k;
    return exp2_fast(fmaf(x, k, kHeadroom - Level::reference(own_.student, k)));
  }

  __device__ P* front(int half) const { return shared_ + half * 2 * 32 * kJsdFront; }
  __device__ P* back() const { return shared_ + 2 * 2 * 32 * kJsdFront; }
  __device__ void load(int row, int from, int count, P* slot, Arrival& arrival, bool wanted) const {
#if __CUDA_ARCH__ >= 900
    fence_before_copy();
    __syncwarp();
    const int begin = begin_ + 32 * from, end = min(begin + 32 * count, end_);
    if (!wanted) {
      if (lane_ == 0) arrival.expect(0);
    } else if (split_.lines && end * kWidth <= p_.cols && begin + 32 * count == end) {
      if (lane_ == 0) {
        const uint32_t bytes = (end - begin) * sizeof(P);
        arrival.expect(2 * bytes);
        arrival.copy(slot, this->student(row) + begin * kWidth, bytes);
        arrival.copy(slot + 32 * count, this->teacher(row) + begin * kWidth, bytes);
      }
    } else {
      this->copy(row, begin, end, 32 * count, slot, 32 * count, arrival);
    }
#endif
  }

  const JsdSplit& split_;
  JsdArrivals& arrivals_;
  P* const shared_;                       // the warp's
  P *front_ = nullptr, *back_ = nullptr;  // the lane's of the row
  Pair ahead_[2];                         // the lane's largest logits in the front
  int half_ = 0, units_ = 0, first_ = 0, last_ = 0;
  bool full_ = false;  // the warp has all lanes' vectors, or none, and no cut ones
  int column_ = 0;     // of the lane's vector 0
  float power_[kJsdVectors][kWidth];
  struct Both {
    float student, teacher;
  } own_{}, to_level_{};                       // the warp's largest logits; from its powers to those relative to them
  Level student_{};                            // of the row
  float of_power_ = 0.f, of_teacher_ = 0.f;    // from powers to probabilities
  uint32_t far_vectors_ = 0;                   // of the lane, with infinite 2^d
  float near_teacher_ = 0.f, near_dot_ = 0.f;  // sums of p and p d over the others
  // d is the difference * k - shift_ until the normalizers are known, then offset_ more; dot_offset_ is for differences
  // relative to that of the largest logits.
  float shift_ = 0.f, offset_ = 0.f, dot_offset_ = 0.f;
};

}  // namespace fusegrad::device
