// The divergences of long rows in low precision, by clusters that stay: while one row is worked on, the copy engine
// brings the next. A warp has the same vectors of every row, copies them for itself and keeps the student's
// exponentials in registers, so that nothing but the merges over the cluster waits for another warp. The formulas stand
// in rows/row_kernels.h, their base-2 form in device/jsd.cuh.
//
// Special functions bound such a kernel (16 a clock and multiprocessor). A pair of logits takes two for the sums: the
// student's power q and 2^d, d the difference of the exponents, which give the teacher's power q 2^d. What follows needs
// no exponential any more: 2^d stays in shared memory in place of the two logits, a factor of the row makes it p / q, and
// log2(m / q), a third special function where 0 < b < 1, takes its place for the last step. At b = 0 and 1 the divergence
// is a sum over the row that needs no normalizer, so one merge does. Log-probabilities need none before their gradients.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/jsd_merge.cuh"

namespace fusegrad::device {

constexpr int kJsdWarps = 8, kJsdCtas = 2;  // of a CTA, on a multiprocessor
constexpr int kJsdVectors = 8;              // of each input a lane has
constexpr int kJsdMaxSlots = 4;

/// How the warps of a cluster share a row.
struct JsdSplit {
  int span;   // vectors of each input a warp has, a multiple of 8
  int room;   // for them in shared memory, a multiple of 32
  int slots;  // rows in shared memory at a time
};

/// A warp's vectors of one row after another. T has 16 bits; transforms are plain (see Jsd).
template <class T, JsdKind kKind, bool kLogProbs>
class JsdWarp {
  static constexpr int kWidth = 8;
  static constexpr bool kMixed = kKind == JsdKind::kMixed, kForward = kKind == JsdKind::kForward,
                        kReverse = kKind == JsdKind::kReverse;
  /// Powers go up to 2^40: where a student's is 0, no finite 2^d makes a teacher's that counts.
  static constexpr float kHeadroom = kReverse ? 0.f : 40.f;
  static constexpr float kFarthest = 1e25f;  // d that may meet a factor of a gradient
  static constexpr int kGroup = 2;           // vectors that are worked on at a time
  using P = Pack<T, kWidth>;
  using Loss = Jsd<T, true>;

 public:
  static constexpr float kLn2 = static_cast<float>(kInverseLog2E);

  __device__ JsdWarp(const RowJsd& p, const JsdConstants& constants, const JsdSplit& split, int group, int lane)
      : p_(p),
        constants_(constants),
        split_(split),
        halves_(constants, lane),
        lane_(lane),
        begin_(group * split.span),
        end_(begin_ + split.span) {}

  __device__ const T* student(int row) const { return static_cast<const T*>(p_.student) + row * p_.student_stride; }
  __device__ const T* teacher(int row) const { return static_cast<const T*>(p_.teacher) + row * p_.teacher_stride; }
  __device__ T* gradient(int row) const { return static_cast<T*>(p_.grad_student) + row * p_.grad_student_stride; }
  __device__ RowVectors<T, kWidth> vectors(int row) const { return {student(row), p_.cols, kLineBytes}; }
  __device__ const Halves& halves() const { return halves_; }

  /// Starts the copies of a row's vectors into `slot`: the student's, a CTA's vectors further the teacher's. What
  /// is no whole vector is filled up with -inf, to a multiple of 32 vectors.
  __device__ void load(int row, P* slot, Arrival& arrival, bool wanted) const {
#if __CUDA_ARCH__ >= 900
    fence_before_copy();
    __syncwarp();
    if (!wanted) {
      if (lane_ == 0) arrival.expect(0);
      return;
    }
    const auto v = vectors(row);
    const int apart = kJsdWarps * split_.room;
    const int from = max(begin_, v.lead / kWidth), end = min(end_, v.count);
    const int whole_from = max(from, v.whole_begin), whole_end = min(end, v.whole_end);
    if (lane_ == 0) {
      const uint32_t bytes = max(whole_end - whole_from, 0) * sizeof(P);
      arrival.expect(2 * bytes);
      if (bytes > 0) {
        const int c = v.column(whole_from);
        arrival.copy(slot + (whole_from - begin_), student(row) + c, bytes);
        arrival.copy(slot + apart + (whole_from - begin_), teacher(row) + c, bytes);
      }
    }
    const auto pad = [&](int first, int last) {
      for (int i = first + lane_; i < last; i += 32) {
        const auto none = filled<T, kWidth>(lowest_pad<T>());
        slot[i - begin_] = i < end ? v.load(student(row), i, lowest_pad<T>()) : none;
        slot[apart + i - begin_] = i < end ? v.load(teacher(row), i, lowest_pad<T>()) : none;
      }
    };
    pad(begin_, min(whole_from, end));
    pad(max(whole_end, begin_), begin_ + (max(end - begin_, 0) + 32 * kGroup - 1) / (32 * kGroup) * (32 * kGroup));
#endif
  }

  /// Begins a row whose vectors lie in `slot`.
  __device__ void begin(int row, P* slot) {
    const auto v = vectors(row);
    slot_ = slot + lane_;
    // Of the lane's vectors begin_ + lane_ + 32 j those with first_ <= 32 j < last_.
    first_ = max(v.lead / kWidth - begin_, 0) - lane_;
    last_ = min(end_, v.count) - begin_ - lane_;
    cut_ = begin_ < v.whole_begin || end_ > v.whole_end;
    column_ = v.column(begin_ + lane_);
  }

  /// Log-probabilities: the divergences' parts, and the gradient.
  __device__ JsdHalf run(int row, float upstream) {
    const float factor = gradient_factor(upstream);
    float student = 0.f, teacher = 0.f;
    for_vectors([&](int j) {
      float xq[kWidth], xp[kWidth], of_q = 0.f, of_p = 0.f;
      unpack(kept(j, 0), xq);
      unpack(kept(j, 1), xp);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float d = fmaxf((xp[i] - xq[i]) * (kReverse ? -kLog2E : kLog2E), kLowestD);
        if constexpr (kMixed) {
          const float near = fminf(d, kLargestD), ratio = log2_ratio_to_mixture(exp2_fast(near));
          const float by = exp2_fast(xq[i] * kLog2E) * ratio;
          of_q += by;
          of_p = fmaf(exp2_fast(xp[i] * kLog2E), near + ratio, of_p);
          xq[i] = by * factor;
        } else {
          // Of p over q, or the reverse.
          const float weight = exp2_fast((kForward ? xp[i] : xq[i]) * kLog2E);
          (kForward ? of_p : of_q) = fmaf(weight, d, kForward ? of_p : of_q);
          xq[i] = weight * (kForward ? -factor : fmaf(fminf(d, 1e30f), kLn2, 1.f) * factor);
        }
      }
      student += of_q;
      teacher += of_p;
      if (p_.grad_student != nullptr) store(row, j, xq);
    });
    return {{0.f, halves_.sum(student, teacher)}, 0.f, 0.f};
  }

  /// The student's powers and their sums over the warp, the teacher's from them: p = q 2^d. For the passes that follow
  /// 2^d, at b = 1 d, take the place of the logits.
  __device__ JsdHalf levels(int row) {
    P most[2] = {filled<T, kWidth>(lowest_pad<T>()), filled<T, kWidth>(lowest_pad<T>())};
    for_groups([&](int j) {
#pragma unroll
      for (int i = j; i < j + kGroup; ++i) {
        keep_largest(most[0], kept(i, 0));
        keep_largest(most[1], kept(i, 1));
      }
    });
    own_ = {warp_max(largest_of(most[0])), warp_max(largest_of(most[1]))};
    const float kq = constants_.student.k, kp = constants_.teacher.k, relative = constants_.relative;
    const float mq = Level::reference(own_.student, kq), mp = Level::reference(own_.teacher, kp);
    const float from = __fsub_rn(mq, kHeadroom);
    const float scaled = __fmul_rn(Level::finite(own_.teacher), relative), largest = Level::finite(own_.student);
    const float shift = __fsub_rn(scaled, largest),
                left = fmaf(Level::finite(own_.teacher), relative, -scaled) + lost(scaled, -largest, shift);
    shift_ = __fmul_rn(shift, kq);
    float all_q = 0.f, all_p = 0.f, dot = 0.f;
    far_vectors_ = 0;
    for_groups([&](int j) {
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
    JsdHalf x{{halves_.teacher ? own_.teacher : own_.student, sum}, 0.f, 0.f};
    if (!kMixed) x.dot = forward(OverLanes{32}.sum(dot)) * exp2f(-kHeadroom);
    return x;
  }

  /// After the merge of the levels.
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

  /// The divergences' parts over the warp. Where a gradient is wanted, log2(m / q) is kept for it.
  __device__ JsdHalf divergences(int row) {
    float student = 0.f, teacher = 0.f;
    uint32_t far_vectors = 0;
    const bool wanted = p_.grad_student != nullptr;
    const float beta = constants_.beta * exp2f(offset_), rest = 1.f - constants_.beta;
    for_groups([&](int j) {
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
        if (fabsf(of_q + of_p) <= 3e38f) {
          student -= of_q;
          teacher -= of_p;
          if (wanted) keep(j + v, x[v]);
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
  /// The divergences of the row from the merged parts, base 2.
  __device__ float student_divergence(const JsdHalf& x) const { return __shfl_sync(~0u, x.level.sum, 0); }
  __device__ float teacher_divergence(const JsdHalf& x) const {
    const float sum = __shfl_sync(~0u, x.level.sum, 16);
    return sum;
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

  /// Writes a row's gradient, with the student's divergence where 0 < b.
  __device__ void write(float upstream, float divergence, int row, int label) const {
    const float at_label = label >= 0 ? upstream * constants_.hard * constants_.label.scale : 0.f;
    const float soft = gradient_factor(upstream);
    // Student's power times: 0 < b < 1 log2(m / q) * a + b; b = 1: -d * a + b; b = 0: -2^d * a + b. An infinite
    // divergence must not meet a factor 0.
    const float ratio = soft * of_power_, of_q = (soft != 0.f ? -soft * divergence : 0.f) + at_label;
    const float a = kMixed ? -ratio : kForward ? soft * of_teacher_ : ratio;
    const float b =
        kForward ? fmaf(at_label, of_power_, ratio) : fmaf(of_q, of_power_, kReverse ? -ratio * offset_ : 0.f);
    const int label_vector = label >= 0 ? (label + vectors(row).lead) / kWidth - begin_ - lane_ : -1;
    for_groups([&](int j) {
      float x[kGroup][kWidth];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) kept_floats(j + i, x[i]);
#pragma unroll
      for (int v = 0; v < kGroup; ++v) {
        const bool far = kForward && (far_vectors_ >> (j + v) & 1) != 0;  // then p itself is kept
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float q = power_[j + v][i];
          x[v][i] = far ? fmaf(q, b, -x[v][i] * a) : q * fmaf(x[v][i], kForward ? -a : a, b);
        }
        if (label_vector == 32 * (j + v)) {
          const int at = (label + vectors(row).lead) % kWidth;
#pragma unroll
          for (int i = 0; i < kWidth; ++i) x[v][i] -= i == at ? at_label : 0.f;
        }
        if (has(j + v)) store(row, j + v, x[v]);
      }
    });
  }

  /// A row without a gradient of its own.
  __device__ void fill(int row, T x) const {
    const auto all = vectors(row);
    for (int v = max(begin_, all.lead / kWidth) + lane_; v < min(end_, all.count); v += 32) {
      all.store(gradient(row), v, filled<T, kWidth>(x));
    }
  }

 private:
  __device__ bool has(int j) const { return 32 * j >= first_ && 32 * j < last_; }
  /// The same for all lanes: what the others have is -inf.
  __device__ bool any_has(int j) const { return 32 * j < last_ + lane_; }
  /// body(j) for the lane's vectors.
  template <class Body>
  __device__ void for_vectors(const Body& body) const {
#pragma unroll
    for (int j = 0; j < kJsdVectors; ++j) {
      if (has(j)) body(j);
    }
  }
  /// body(j) for each kGroup of the warp's vectors j, j + 1, ... of which it has one.
  template <class Body>
  __device__ void for_groups(const Body& body) const {
#pragma unroll
    for (int j = 0; j < kJsdVectors; j += kGroup) {
      if (any_has(j)) body(j);
    }
  }
  /// Vector j of input i; later eight floats in place of both.
  __device__ P& kept(int j, int i) const { return slot_[i * kJsdWarps * split_.room + 32 * j]; }
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
  __device__ void store(int row, int j, const float (&x)[kWidth]) const {
    const auto pack = packed<T, kWidth>(x);
    if (cut_) {
      vectors(row).store(gradient(row), begin_ + lane_ + 32 * j, pack);
    } else {
      pack.store(gradient(row) + column_ + 32 * kWidth * j);
    }
  }
  /// What a gradient's base-2 ratios, or its probabilities at b = 0, are multiplied with.
  __device__ float gradient_factor(float upstream) const {
    const float soft = upstream * constants_.soft;
    if (soft == 0.f) return 0.f;
    if (kLogProbs) return soft * (kForward ? 1.f : constants_.student_share) * (kMixed ? kLn2 : 1.f);
    return soft * constants_.student.scale * (kForward ? 1.f : constants_.student_share * kLn2);
  }
  /// log2(q / m), from 2^d.
  __device__ float log2_ratio_to_mixture(float power) const {
    return -log2_fast(fmaf(constants_.beta, power, 1.f - constants_.beta));
  }
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
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
  __device__ static float largest_of(const P& x) {
    const Pair most = __hmax2_nan(__hmax2_nan(pair(x, 0), pair(x, 1)), __hmax2_nan(pair(x, 2), pair(x, 3)));
    return widen(__hmax_nan(most.x, most.y));
  }
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
    const auto all = vectors(row);
    unpack(all.load(student(row), begin_ + lane_ + 32 * j, lowest_pad<T>()), xq);
    unpack(all.load(teacher(row), begin_ + lane_ + 32 * j, lowest_pad<T>()), xp);
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
      const float m_over_q = log2_fast(fmaf(constants_.beta, exp2_fast(d), 1.f - constants_.beta));
      const float p = exp2_fast(fmaf(xp[i], kp, kHeadroom - mp));
      student = fmaf(power(xq[i]), m_over_q, student);
      teacher = fmaf(p, d - m_over_q, teacher);
      if (is_near) teacher -= exp2_fast(near_d) * power(xq[i]) * (near_d + offset_);
      xp[i] = m_over_q;
    }
    of_q = fmaf(-of_power_, student, of_q);
    of_p = fmaf(of_teacher_, teacher, of_p);
    if (p_.grad_student != nullptr) keep(j, xp);
  }
  __device__ float power(float x) const {
    const float k = constants_.student.k;
    return exp2_fast(fmaf(x, k, kHeadroom - Level::reference(own_.student, k)));
  }

  const RowJsd& p_;
  const JsdConstants& constants_;
  const JsdSplit& split_;
  const Halves halves_;
  const int lane_, begin_, end_;
  P* slot_ = nullptr;  // the row's
  int first_ = 0, last_ = 0;
  bool cut_ = false;  // the warp may have a vector that is
  int column_ = 0;    // of the lane's vector 0
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

template <class T, JsdKind kKind, bool kLogProbs>
__global__ void __launch_bounds__(32 * kJsdWarps, kJsdCtas)
    jsd_by_cluster(const __grid_constant__ RowJsd p, const __grid_constant__ JsdConstants constants,
                   const __grid_constant__ JsdSplit split) {
#if __CUDA_ARCH__ >= 900
  using P = Pack<T, 8>;
  using Warp = JsdWarp<T, kKind, kLogProbs>;
  constexpr bool kMixed = kKind == JsdKind::kMixed, kForward = kKind == JsdKind::kForward;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ ClusterMerge<kJsdWarps> merges;
  __shared__ Arrival arrivals[kJsdMaxSlots][kJsdWarps];
  __shared__ volatile float label_logit;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = cluster_rank(), size = cluster_size();
  const int clusters = static_cast<int>(gridDim.x) / size, rows = static_cast<int>(p.rows);
  merges.init();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kJsdMaxSlots * kJsdWarps; ++i) arrivals[i / kJsdWarps][i % kJsdWarps].init();
    Arrival::fence_init();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  Warp part(p, constants, split, rank * kJsdWarps + warp, lane);
  const MergeLevels<kKind> merge_levels{part.halves()};
  const bool has_hard = constants.hard != 0.f || p.hard != nullptr, writes = rank == 0 && warp == 0;
  const auto slot_at = [&](int slot) {
    return reinterpret_cast<P*>(shared_bytes) + (2 * slot * kJsdWarps + warp) * split.room;
  };
  const auto counts = [&](int row) {
    if (row >= rows || p.label == nullptr) return row < rows;
    const JsdRow info(p, row);
    return info.kept && info.in_range;
  };
  uint32_t needed = 0;  // a bit for each row that has been asked for, the current one's first
  int row = static_cast<int>(blockIdx.x) / size;
  for (int i = 0; i < split.slots; ++i) {
    const bool is_needed = counts(row + i * clusters);
    needed |= static_cast<uint32_t>(is_needed) << i;
    part.load(row + i * clusters, slot_at(i), arrivals[i][warp], is_needed);
  }
  int slot = 0, turn = 0;
  uint32_t parity = 0;
  for (; row < rows; row += clusters) {
    const int next = row + split.slots * clusters;
    const bool next_needed = counts(next);  // long before it is used
    arrivals[slot][warp].wait_own(parity);
    __syncwarp();
    if (needed & 1) {
      part.begin(row, slot_at(slot));
      float student = 0.f, teacher = 0.f;  // the divergences, base 2
      if constexpr (kLogProbs) {
        const JsdRow info(p, row);
        const float upstream = info.upstream(p, row);
        JsdHalf x = part.run(row, upstream);
        merges.merge(x, MergeSums{}, turn++, warp, lane);
        student = part.student_divergence(x);
        teacher = part.teacher_divergence(x);
        if (writes && lane == 0) {
          const float soft = (constants.student_share * student + constants.teacher_share * teacher) * Warp::kLn2;
          write_losses(p, constants, info, row, soft, 0.f);
        }
      } else {
        // The gradient may overwrite it once all warps have come to the last merge: until then it must have been read.
        float logit = 0.f;
        if (writes && has_hard) {
          const int label = JsdRow(p, row).index;
          if (label >= 0) logit = widen(part.student(row)[label]);
        }
        JsdHalf x = part.levels(row);
        if constexpr (kMixed) {
          merges.merge(x, merge_levels, turn++, warp, lane);
          part.normalize(x);
          x = part.divergences(row);
        }
        if (writes && has_hard && lane == 0) label_logit = logit;
        const JsdRow info(p, row);  // comes during the merge
        const float upstream = info.upstream(p, row);
        if constexpr (kMixed) {
          merges.merge(x, MergeSums{}, turn++, warp, lane);
          student = part.student_divergence(x);
          teacher = part.teacher_divergence(x);
        } else {
          merges.merge(x, merge_levels, turn++, warp, lane);
          part.normalize(x);
          (kForward ? teacher : student) = part.divergence(x);
        }
        if (writes && lane == 0) {
          const float soft = (constants.student_share * student + constants.teacher_share * teacher) * Warp::kLn2;
          const float hard = info.index >= 0 ? part.label_loss(label_logit) : 0.f;
          write_losses(p, constants, info, row, soft, hard);
        }
        if (p.grad_student != nullptr) part.write(upstream, student, row, info.index);
      }
    } else {
      const JsdRow info(p, row);
      if (writes && lane == 0) write_losses(p, constants, info, row, 0.f, 0.f);
      if (p.grad_student != nullptr) part.fill(row, static_cast<T>(info.in_range ? 0.f : not_a_number()));
    }
    part.load(next, slot_at(slot), arrivals[slot][warp], next_needed);
    needed = needed >> 1 | static_cast<uint32_t>(next_needed) << (split.slots - 1);
    if (++slot == split.slots) slot = 0, parity ^= 1;
  }
#endif
}

}  // namespace fusegrad::device
