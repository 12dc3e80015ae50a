// The divergences of long rows in low precision, by clusters that stay: while one row is worked on, the copy engine
// brings the next. A warp has the same vectors of every row, copies them for itself and keeps the student's
// exponentials in registers, so that nothing but the merges over the cluster waits for another warp. The formulas stand
// in rows/row_kernels.h, their base-2 form in device/jsd.cuh.
//
// Special functions bound such a kernel (16 a clock and multiprocessor). A pair of logits takes two for the sums, and
// two more where 0 < b < 1 (2^d and a logarithm), one more at b = 0; for the last step the student's log ratio replaces
// the teacher's logit in shared memory. At b = 0 and 1 the divergence is a sum over the row that needs no normalizer,
// so one merge does. Log-probabilities need none before their gradients.
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
  /// Powers go up to 2^28: those of a student that are 0 are too small for any finite 2^d to count.
  static constexpr float kHeadroom = kMixed ? 28.f : 0.f;
  // The cached ratio is a half, whose rounding only a bfloat16 hides.
  static_assert(!kMixed || kLogProbs || std::is_same_v<T, __nv_bfloat16>);
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
    pad(max(whole_end, begin_), begin_ + (max(end - begin_, 0) + 31) / 32 * 32);
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

  /// The powers, relative to the warp's largest logit, and their sums over the warp.
  __device__ JsdHalf levels() {
    P most[2][1] = {{filled<T, kWidth>(lowest_pad<T>())}, {filled<T, kWidth>(lowest_pad<T>())}};
#pragma unroll
    for (int j = 0; j < kJsdVectors; ++j) {
      if (!any_has(j)) continue;
      keep_largest(most[0][0], kept(j, 0));
      keep_largest(most[1][0], kept(j, 1));
    }
    own_ = {warp_max(largest_of(most[0])), warp_max(largest_of(most[1]))};
    const float kq = constants_.student.k, kp = constants_.teacher.k;
    const float mq = Level::reference(own_.student, kq) - kHeadroom,
                mp = Level::reference(own_.teacher, kp) - kHeadroom;
    const float shift = kMixed ? 0.f : halves_.difference(halves_.teacher ? own_.teacher : own_.student);
    float all_q = 0.f, all_p = 0.f, dot = 0.f;
#pragma unroll
    for (int j = 0; j < kJsdVectors; ++j) {
      float xq[kWidth], xp[kWidth], sum_q = 0.f, sum_p = 0.f, part = 0.f;
      if (!any_has(j)) continue;
      unpack(kept(j, 0), xq);
      unpack(kept(j, 1), xp);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float q = exp2_fast(fmaf(xq[i], kq, -mq)), p = exp2_fast(fmaf(xp[i], kp, -mp));
        const float difference = this->difference(xq[i], xp[i]);
        power_[j][i] = q;
        sum_q += q;
        sum_p += p;
        // A NaN of two infinities meets a power of 0.
        if (kForward) part = fmaf(p, fmaxf(difference - shift, -1e30f), part);
        if (kReverse) part = fmaf(q, fmaxf(shift - difference, -1e30f), part);
      }
      all_q += sum_q;
      all_p += sum_p;
      dot += part;
    }
    const float sum = halves_.sum(all_q, all_p) * exp2f(-kHeadroom);
    JsdHalf x{{halves_.teacher ? own_.teacher : own_.student, sum}, 0.f, 0.f};
    if (!kMixed) x.dot = forward(OverLanes{32}.sum(dot));
    return x;
  }

  /// After the merge of the levels.
  __device__ void normalize(const JsdHalf& x) {
    const Level other{Halves::other(x.level.largest), Halves::other(x.level.sum)};
    const Level q = halves_.teacher ? other : x.level, p = halves_.teacher ? x.level : other;
    const float kq = constants_.student.k, kp = constants_.teacher.k, relative = constants_.relative;
    const float mq = Level::reference(q.largest, kq), mp = Level::reference(p.largest, kp);
    of_power_ = __fdividef(Level::factor(own_.student, q.largest, kq), q.sum) * exp2f(-kHeadroom);
    // Of a teacher's logit: of 2^(x k - m) of the row, at b = 0 of the warp's powers.
    of_teacher_ = __fdividef(kMixed ? 1.f : Level::factor(own_.teacher, p.largest, kp), p.sum);
    teacher_m2_ = mp;
    // What rounding left out of mq, mp and the difference of the largest logits goes into the offset.
    const float scaled = __fmul_rn(p.largest, relative), shift = halves_.difference(x.level.largest);
    const float left = fmaf(p.largest, relative, -scaled) + lost(scaled, -q.largest, shift);
    const float own = fmaf(-left, kq, fmaf(p.largest, kp, -mp) - fmaf(q.largest, kq, -mq)) - log2f(p.sum / q.sum);
    const float product = __fmul_rn(-shift, kq);
    dot_offset_ = own;
    offset_ = __fadd_rn(product, own);
    left_ = lost(product, own, offset_) + fmaf(-shift, kq, -product);
    student_ = q;
  }

  /// The divergences' parts over the warp. Where a gradient is wanted, the student's ratios are kept for it.
  __device__ JsdHalf divergences(int row) {
    float student = 0.f, teacher = 0.f;
    uint32_t far_vectors = 0;
    const bool keep = p_.grad_student != nullptr;
    const float k = constants_.student.k, beta = fmaf(constants_.beta, left_ * kLn2, constants_.beta);
    const float rest = 1.f - constants_.beta;
    for_vectors([&](int j) {
      float d[kWidth], xq[kWidth], of_q = 0.f, of_p = 0.f;
      unpack(kept(j, 0), xq);
      unpack(kept(j, 1), d);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float q = power_[j][i];
        d[i] = fmaf(difference(xq[i], d[i]), k, offset_);
        const float power = exp2_fast(d[i]), ratio = -log2_fast(fmaf(beta, power, rest));
        of_q = fmaf(q, ratio, of_q);
        of_p = fmaf(q * power, d[i] + ratio, of_p);
        d[i] = ratio;
      }
      if (fabsf(of_q + of_p) <= 3e38f) {
        student += of_q;
        teacher += of_p;
        if (keep) kept(j, 1) = Loss::cached(d);
      } else {
        far_vectors |= 1u << j;
      }
    });
    teacher *= of_power_;
#pragma unroll 1
    for (; far_vectors != 0; far_vectors &= far_vectors - 1) add_far(row, __ffs(far_vectors) - 1, student, teacher);
    // Comparisons drop a NaN that only one of the rows has.
    return {{0.f, halves_.sum(fmaf(of_power_, student, offset_ - offset_), teacher)}, 0.f, 0.f};
  }
  /// The divergences of the row from the merged parts, base 2.
  __device__ float student_divergence(const JsdHalf& x) const { return __shfl_sync(~0u, x.level.sum, 0); }
  __device__ float teacher_divergence(const JsdHalf& x) const {
    const float sum = __shfl_sync(~0u, x.level.sum, 16);
    return kLogProbs ? sum : fmaf(sum, fmaf(left_, kLn2, 1.f), left_);
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
    // Student's power times: 0 < b < 1 ratio * a + b; b = 1 difference * a + ratio_b, which may be infinite or NaN
    // where the power is 0, + b. b = 0: power * ratio - p * a. An infinite divergence must not meet a factor 0.
    const float ratio = soft * of_power_, of_q = (soft != 0.f ? -soft * divergence : 0.f) + at_label;
    const float a = kMixed ? ratio : kForward ? soft * of_teacher_ : -ratio * constants_.student.k;
    const float b = kForward ? 0.f : of_q * of_power_, ratio_b = kReverse ? -ratio * offset_ : 0.f;
    const float own_m2_p = Level::reference(own_.teacher, constants_.teacher.k) - kHeadroom;
    const int label_vector = label >= 0 ? (label + vectors(row).lead) / kWidth - begin_ - lane_ : -1;
    for_vectors([&](int j) {
      float x[kWidth], xq[kWidth];
      if (kReverse) unpack(kept(j, 0), xq);
      if constexpr (kMixed) {
        Loss::from_cache(kept(j, 1), x);
      } else {
        unpack(kept(j, 1), x);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float q = power_[j][i];
        if (kForward) x[i] = exp2_fast(fmaf(x[i], constants_.teacher.k, -own_m2_p));
        if (kReverse) x[i] = difference(xq[i], x[i]);
        if constexpr (kMixed) {
          x[i] = q * fmaf(x[i], a, b);
        } else if constexpr (kForward) {
          // Not fused: equal rows give exactly 0.
          x[i] = fmaf(q, at_label * of_power_, __fmul_rn(q, ratio) - __fmul_rn(x[i], a));
        } else {
          x[i] = q * (fminf(fmaxf(fmaf(x[i], a, ratio_b), -1e30f), 1e30f) + b);
        }
      }
      if (label_vector == 32 * j) {
        const int at = (label + vectors(row).lead) % kWidth;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[i] -= i == at ? at_label : 0.f;
      }
      store(row, j, x);
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
  /// Vector j of input i; later the student's ratios in place of the teacher's.
  __device__ P& kept(int j, int i) const { return slot_[i * kJsdWarps * split_.room + 32 * j]; }
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
  /// Of two values each; NaN counts for nothing.
  __device__ static void keep_largest(P& most, const P& x) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const uint32_t a = most.word(i), b = x.word(i);
      const Pair larger = __hmax2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
      most.word(i) = *reinterpret_cast<const uint32_t*>(&larger);
    }
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
  /// A vector with infinite logits, or with a 2^d that is infinite, perhaps where the student's power is 0. The logits
  /// are read again: nothing is written before the merge that follows.
  __device__ void add_far(int row, int j, float& of_q, float& of_p) const {
    const auto all = vectors(row);
    const int v = begin_ + lane_ + 32 * j;
    const float kq = constants_.student.k, kp = constants_.teacher.k,
                mq = Level::reference(own_.student, kq) - kHeadroom;
    float xq[kWidth], xp[kWidth], far = 0.f;
    unpack(all.load(student(row), v, lowest_pad<T>()), xq);
    unpack(all.load(teacher(row), v, lowest_pad<T>()), xp);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float difference = this->difference(xq[i], xp[i]);
      const float d = fminf(fmaxf(fmaf(difference, kq, offset_), kLowestD), kLargestD);
      const float ratio = log2_ratio_to_mixture(exp2_fast(d));
      of_q = fmaf(exp2_fast(fmaf(xq[i], kq, -mq)), ratio, of_q);
      far = fmaf(exp2_fast(fmaf(xp[i], kp, -teacher_m2_)), d + ratio, far);
      xp[i] = ratio;
    }
    of_p = fmaf(of_teacher_, far, of_p);
    if (p_.grad_student != nullptr) kept(j, 1) = Loss::cached(xp);
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
  struct Largest {
    float student, teacher;
  } own_{};                                  // of the warp
  Level student_{};                          // of the row
  float of_power_ = 0.f, of_teacher_ = 0.f;  // from powers to probabilities
  float teacher_m2_ = 0.f;
  // d is the difference * k + offset_ + left_, which is below a float's sight; dot_offset_ is for differences relative
  // to that of the largest logits.
  float offset_ = 0.f, left_ = 0.f, dot_offset_ = 0.f;
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
        if (writes && has_hard) logit = widen(part.student(row)[JsdRow(p, row).index]);
        JsdHalf x = part.levels();
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
