// The Jensen-Shannon divergence over rows; formulas in losses/row_kernels.h. This file is compiled once per instruction
// set, with CPU_CAPABILITY set: keep library templates and inline functions of other headers out, or the linker may
// pick a copy with instructions that the machine does not have.
#include <cmath>
#include <limits>

#include "losses/cpu/jsd_row.h"
#include "losses/cpu/row_range.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

// log(r) of single values, see log_ratio.
double log_ratio_of(double r, double less_one) {
  return std::fabs(less_one) < 0.5 ? std::log1p(less_one) : std::log(r);
}

// A thread's row buffers in the scratch that it was given, each of `padded` values; then the top-k columns'.
template <class Acc>
struct Buffers {
  Acc* q;            // z of the student, then exp, then q, then the gradient by z
  Acc* p;            // the teacher's
  Acc* log_student;  // log(q / m)
  Acc* log_other;    // log(p / m); at the ends of beta the one logarithm there is
  Acc* hard;         // exp of the student's z without temperature
  double *z, *top_q, *gradient;

  Buffers(void* scratch, int64_t padded, int64_t topk, bool teacher_gradient) {
    auto* next = static_cast<Acc*>(scratch);
    q = next;
    p = next + padded;
    // Where p is not needed after the sums, its buffer takes the logarithms: one less to keep in the caches.
    log_student = teacher_gradient ? next + 2 * padded : p;
    log_other = next + 3 * padded;
    hard = next + 4 * padded;
    z = reinterpret_cast<double*>(next + 5 * padded);
    top_q = z + topk + 1;
    gradient = top_q + topk + 1;
  }
};

// The gradient by z as the one by the stored logits, in their dtype. `row` may be `grad`.
template <class T>
void store_gradient(const AccOf<T>* by_z, const T* row, T* grad, int64_t cols, const Transform<AccOf<T>>& transform) {
  using Vec = at::vec::Vectorized<AccOf<T>>;
  each_lanes(row, cols, AccOf<T>(0), [&](int64_t c, int64_t count, const Lanes<T>& x) {
    Lanes<T> g{Vec::loadu(by_z + c), Vec::loadu(by_z + c + Vec::size())};
    if (transform.capped) {
      g.a = g.a * transform.slope(transform(x.a));
      g.b = g.b * transform.slope(transform(x.b));
    } else {
      g.a = g.a * Vec(transform.scale);
      g.b = g.b * Vec(transform.scale);
    }
    count == Lanes<T>::kStep ? g.store(grad + c) : g.store(grad + c, count);
  });
}

template <class T>
class JsdRows {
 public:
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;

  JsdRows(const RowJsd& params, void* scratch)
      : p(params),
        padded((params.cols + Lanes<T>::kStep - 1) / Lanes<T>::kStep * Lanes<T>::kStep),
        student_transform(params.student_transform),
        teacher_transform(params.teacher_transform),
        buffers(scratch, padded, params.topk, params.grad_teacher != nullptr),
        between(params.beta > 0 && params.beta < 1),
        needs_hard(params.hard != nullptr || params.hard_weight != 0),
        // Without temperature the soft part's exponentials are the hard part's too.
        hard_apart(needs_hard && (params.student_temperature != 1 || params.teacher_index != nullptr)) {}

  void row(int64_t n) {
    const T* student = static_cast<const T*>(p.student) + n * p.student_stride;
    T* grad_student = p.grad_student != nullptr ? static_cast<T*>(p.grad_student) + n * p.grad_student_stride : nullptr;
    T* grad_teacher = p.grad_teacher != nullptr ? static_cast<T*>(p.grad_teacher) + n * p.grad_teacher_stride : nullptr;
    const RowConstants<Acc> constants(p, n);
    const Acc factor = constants.weight * constants.upstream;
    const bool loss_wanted = p.loss != nullptr || p.soft != nullptr || p.hard != nullptr;
    if (!constants.kept || (factor == Acc(0) && !loss_wanted)) {
      put(p.loss, n, Acc(0));
      put(p.soft, n, Acc(0));
      put(p.hard, n, Acc(0));
      if (grad_student != nullptr) fill_zero(grad_student, p.cols);
      if (grad_teacher != nullptr) fill_zero(grad_teacher, p.cols);
      return;
    }
    const Acc max = load_row(student, p.cols, student_transform, buffers.q);
    if (hard_apart) sum_hard(max);
    double soft = 0;
    if (p.teacher_index != nullptr) {
      soft = top_k(n, static_cast<double>(max));
    } else {
      const T* teacher = static_cast<const T*>(p.teacher) + n * p.teacher_stride;
      const Acc teacher_max = load_row(teacher, p.cols, teacher_transform, buffers.p);
      const Shift shift{p.log_probs ? Acc(0) : max, p.log_probs ? Acc(0) : teacher_max,
                        static_cast<Acc>(1 / p.student_temperature), static_cast<Acc>(1 / p.teacher_temperature)};
      soft = !between ? one_sided(shift) : p.beta <= 0.5 ? mixture<true>(shift) : mixture<false>(shift);
    }
    if (soft < 0 && !p.partial) soft = 0;  // what rounding left of 0; NaN stays
    double hard = 0;
    if (needs_hard) {
      const Acc z = student_transform.one(static_cast<Acc>(student[constants.label]));
      hard = std::log(hard_sum) - static_cast<double>(z - max);
    }
    double loss = 0;
    if (p.soft_weight != 0) loss += p.soft_weight * soft;
    if (p.hard_weight != 0) loss += p.hard_weight * hard;
    put(p.loss, n, static_cast<Acc>(static_cast<double>(constants.weight) * loss));
    put(p.soft, n, static_cast<Acc>(soft));
    put(p.hard, n, static_cast<Acc>(hard));
    if (grad_student == nullptr && grad_teacher == nullptr) return;

    const double soft_factor = static_cast<double>(factor) * p.soft_weight;
    const double by_student = soft_factor / p.student_temperature, by_teacher = soft_factor / p.teacher_temperature;
    const double by_hard = static_cast<double>(factor) * p.hard_weight;
    if (p.teacher_index != nullptr) {
      top_k_gradient(index(n), by_student, by_hard);
    } else if (between) {
      gradients<true>(by_student, by_teacher, by_hard);
    } else {
      gradients<false>(by_student, by_teacher, by_hard);
    }
    if (grad_student != nullptr) {
      if (by_hard != 0) buffers.q[constants.label] -= static_cast<Acc>(by_hard);
      store_gradient(buffers.q, student, grad_student, p.cols, student_transform);
    }
    if (grad_teacher != nullptr) {
      const T* teacher = static_cast<const T*>(p.teacher) + n * p.teacher_stride;
      store_gradient(buffers.p, teacher, grad_teacher, p.cols, teacher_transform);
    }
  }

 private:
  // From z to what exp is taken of: (z - max) / T. Nothing for log-probabilities.
  struct Shift {
    Acc student, teacher, student_scale, teacher_scale;
  };

  const int64_t* index(int64_t n) const { return static_cast<const int64_t*>(p.teacher_index) + n * p.topk; }

  void sum_hard(Acc max) {
    double sums[1];
    sum_row<1, Acc>(padded, sums, [&](int64_t c, Vec* s) {
      const auto e = exp_nonpositive(Vec::loadu(buffers.q + c) - Vec(max));
      e.store(buffers.hard + c);
      s[0] = s[0] + e;
    });
    hard_sum = sums[0];
  }

  // 0 < beta < 1. With d = p - q and m = q + beta * d, q / m = 1 - beta * d / m and p / m = 1 + (1 - beta) * d / m: no
  // difference of two logarithms, which would cancel where the distributions are close. m is taken from the end of beta
  // that it is nearer to, where nothing of it cancels: p - (1 - beta) * d of the other. Leaves q, p, log(q / m) and
  // log(p / m) in the buffers.
  template <bool near_student>
  double mixture(const Shift& shift) {
    double sums[2];
    sum_row<2, Acc>(padded, sums, [&](int64_t c, Vec* s) {
      const auto q = exp_nonpositive((Vec::loadu(buffers.q + c) - Vec(shift.student)) * Vec(shift.student_scale));
      const auto t = exp_nonpositive((Vec::loadu(buffers.p + c) - Vec(shift.teacher)) * Vec(shift.teacher_scale));
      q.store(buffers.q + c);
      t.store(buffers.p + c);
      s[0] = s[0] + q;
      s[1] = s[1] + t;
    });
    hard_sum = hard_apart ? hard_sum : sums[0];
    const Vec inverse_q(p.log_probs ? Acc(1) : static_cast<Acc>(1 / sums[0]));
    const Vec inverse_p(p.log_probs ? Acc(1) : static_cast<Acc>(1 / sums[1]));
    const Vec beta(static_cast<Acc>(p.beta)), rest(static_cast<Acc>(1 - p.beta)), one(1);
    const Vec smallest(std::numeric_limits<Acc>::min());
    const bool keep_student = p.grad_student != nullptr, keep_teacher = p.grad_teacher != nullptr;
    double divergence[3];
    sum_row<3, Acc>(padded, divergence, [&](int64_t c, Vec* s) {
      const auto q = Vec::loadu(buffers.q + c) * inverse_q, t = Vec::loadu(buffers.p + c) * inverse_p;
      const auto d = t - q, below = beta * d, above = rest * d;
      // Where both are 0 the quotients must not be 0 / 0.
      const auto inverse = one / at::vec::maximum(near_student ? q + below : t - above, smallest);
      const auto log_q = log_ratio(q * inverse, below.neg() * inverse), log_p = log_ratio(t * inverse, above * inverse);
      const auto of_q = q * log_q, of_p = t * log_p;
      s[0] = s[0] + at::vec::fmadd(rest, of_q, beta * of_p);
      // KL(q | m) and KL(p | m) plus the sums of m - q and m - p, which are 0: each term has one sign then.
      s[1] = s[1] + (of_q + below);
      s[2] = s[2] + (of_p - above);
      if (keep_student) {
        q.store(buffers.q + c);
        log_q.store(buffers.log_student + c);
      }
      if (keep_teacher) {
        t.store(buffers.p + c);
        log_p.store(buffers.log_other + c);
      }
    });
    mean_student = p.log_probs ? 0 : divergence[1];
    mean_teacher = p.log_probs ? 0 : divergence[2];
    return divergence[0];
  }

  // beta 0: KL(p | q), an average over x = p; beta 1: KL(q | p), over x = q; y is the other. The divergence takes log x
  // - log y from the quotient of the probabilities, which is consistent with them to the last place and so cancels
  // least, but where one of them is too small for that. The gradient takes it from the logits, which is more exact
  // column by column, less a constant that its own mean has too. Leaves q, p and the gradient's logarithms.
  double one_sided(const Shift& shift) {
    const bool over_p = p.beta == 0;
    double sums[2];
    sum_row<2, Acc>(padded, sums, [&](int64_t c, Vec* s) {
      const auto z_q = (Vec::loadu(buffers.q + c) - Vec(shift.student)) * Vec(shift.student_scale);
      const auto z_p = (Vec::loadu(buffers.p + c) - Vec(shift.teacher)) * Vec(shift.teacher_scale);
      const auto q = exp_nonpositive(z_q), t = exp_nonpositive(z_p);
      q.store(buffers.q + c);
      t.store(buffers.p + c);
      (over_p ? z_p - z_q : z_q - z_p).store(buffers.log_other + c);
      s[0] = s[0] + q;
      s[1] = s[1] + t;
    });
    hard_sum = hard_apart ? hard_sum : sums[0];
    Acc* const x_buffer = over_p ? buffers.p : buffers.q;
    Acc* const y_buffer = over_p ? buffers.q : buffers.p;
    const double x_sum = sums[over_p ? 1 : 0], y_sum = sums[over_p ? 0 : 1];
    const Vec inverse_x(p.log_probs ? Acc(1) : static_cast<Acc>(1 / x_sum));
    const Vec inverse_y(p.log_probs ? Acc(1) : static_cast<Acc>(1 / y_sum));
    const Vec offset(p.log_probs ? Acc(0) : static_cast<Acc>(std::log(y_sum) - std::log(x_sum)));
    const Vec usable(p.log_probs ? std::numeric_limits<Acc>::infinity() : Acc(1e-18)), low(Acc(1e-30));
    double divergence[3];
    sum_row<3, Acc>(padded, divergence, [&](int64_t c, Vec* s) {
      const auto x = Vec::loadu(x_buffer + c) * inverse_x, y = Vec::loadu(y_buffer + c) * inverse_y;
      const auto inverse = Vec(1) / at::vec::maximum(y, low), difference = Vec::loadu(buffers.log_other + c);
      const auto log =
          Vec::blendv(difference + offset, log_ratio(x * inverse, (x - y) * inverse), at::vec::minimum(x, y) > usable);
      x.store(x_buffer + c);
      y.store(y_buffer + c);
      s[0] = s[0] + product_or_zero(x, log);
      s[1] = s[1] + (y - x);  // the sum is 0, but not that of the rounded ones
      s[2] = s[2] + product_or_zero(x, difference);
    });
    mean_student = mean_teacher = p.log_probs ? -1 : divergence[2];
    return p.log_probs ? divergence[0] : divergence[0] + divergence[1];
  }

  // The gradients by z over q and p, but for what the label alone gets.
  template <bool mixed>
  void gradients(double by_student, double by_teacher, double by_hard) {
    const Vec student(static_cast<Acc>(by_student * (mixed ? 1 - p.beta : 1)));
    const Vec teacher(static_cast<Acc>(by_teacher * (mixed ? p.beta : 1)));
    const Vec hard(static_cast<Acc>(hard_apart ? by_hard / hard_sum : by_hard));
    const Vec mean_q(static_cast<Acc>(mean_student)), mean_p(static_cast<Acc>(mean_teacher));
    const bool over_p = p.beta == 0;
    const bool student_wanted = p.grad_student != nullptr, teacher_wanted = p.grad_teacher != nullptr;
    for (int64_t c = 0; c < padded; c += Vec::size()) {
      const auto q = Vec::loadu(buffers.q + c), t = Vec::loadu(buffers.p + c);
      if (student_wanted) {
        Vec g(0);
        if (by_student == 0) {
          // An infinite divergence must not become 0 * inf.
        } else if (!mixed && over_p) {
          g = student * (p.log_probs ? t.neg() : q - t);
        } else {
          g = student * product_or_zero(q, Vec::loadu((mixed ? buffers.log_student : buffers.log_other) + c) - mean_q);
        }
        if (by_hard != 0) g = at::vec::fmadd(hard, hard_apart ? Vec::loadu(buffers.hard + c) : q, g);
        g.store(buffers.q + c);
      }
      if (teacher_wanted) {
        Vec g(0);
        if (by_teacher == 0) {
        } else if (!mixed && !over_p) {
          g = teacher * (p.log_probs ? q.neg() : t - q);
        } else {
          g = teacher * product_or_zero(t, Vec::loadu(buffers.log_other + c) - mean_p);
        }
        g.store(buffers.p + c);
      }
    }
  }

  // The divergence over a top-k teacher's K columns and one bucket for the others. The bucket's probability is summed
  // over its own columns, from their own maximum: 1 less the others' would cancel, and a small one would underflow.
  // Leaves exp of the bucket's columns in q (0 at the K), and the gradients by the K + 1 logits.
  double top_k(int64_t n, double max) {
    const int64_t count = p.topk;
    const int64_t* columns = index(n);
    const double scale = 1 / p.student_temperature, low = -std::numeric_limits<double>::infinity();
    int64_t columns_left = p.cols;
    for (int64_t k = 0; k < count; ++k) {
      buffers.z[k] = low;
      if (columns[k] < 0) continue;
      --columns_left;
      buffers.z[k] = (static_cast<double>(buffers.q[columns[k]]) - max) * scale;
      buffers.q[columns[k]] = static_cast<Acc>(low);
    }
    Vec largest(static_cast<Acc>(low));
    for (int64_t c = 0; c < padded; c += Vec::size()) {
      largest = at::vec::maximum(largest, Vec::loadu(buffers.q + c));
    }
    const Acc rest_max = reduce_max(largest);
    const Acc shift = rest_max == static_cast<Acc>(low) ? Acc(0) : rest_max;  // nothing there: not inf - inf
    double sums[1];
    sum_row<1, Acc>(padded, sums, [&](int64_t c, Vec* s) {
      const auto e = exp_nonpositive((Vec::loadu(buffers.q + c) - Vec(shift)) * Vec(static_cast<Acc>(scale)));
      e.store(buffers.q + c);
      s[0] = s[0] + e;
    });
    tail_sum = sums[0];
    buffers.z[count] = (static_cast<double>(shift) - max) * scale + std::log(tail_sum);

    const Acc* teacher = static_cast<const Acc*>(p.teacher) + n * p.teacher_stride;
    const auto stored = [&](int64_t k) { return columns[k] < 0 ? low : static_cast<double>(teacher[k]); };
    double total = 0, mass = 0, error = 0;
    for (int64_t k = 0; k <= count; ++k) total += std::exp(buffers.z[k]);
    for (int64_t k = 0; k < count; ++k) {
      const double log = stored(k), probability = std::exp(log);
      mass += probability;
      if (probability > 0) error += probability * (p.acc_roundoff - p.roundoff * log);
    }
    const double log_total = std::log(total), log_mass = p.renormalize ? std::log(mass) : 0;
    // Where the K are all columns, what is missing to 1 belongs to none.
    const bool has_rest = !p.renormalize && columns_left != 0;
    const bool known = has_rest && p.tail != nullptr;
    // Missing to 1 by less than the sum's own error is as much as that: the bucket's columns are not impossible.
    const double missing = 1 - mass < error ? error : 1 - mass;
    const double log_rest = known      ? static_cast<double>(static_cast<const Acc*>(p.tail)[n])
                            : has_rest ? std::log(missing)
                                       : low;
    const double rest = known ? std::exp(log_rest) : has_rest ? missing : 0;
    // The student's gradient holds for any p: log-probabilities that were rounded do not sum to 1.
    const double p_sum = p.renormalize ? 1 : mass + rest;
    const double b = p.beta;
    double soft = 0, mean = 0;
    for (int64_t k = 0; k <= count; ++k) {
      const double log_q = buffers.z[k] - log_total, q = std::exp(log_q);
      const double log_p = k < count ? stored(k) - log_mass : log_rest;
      const double t = k < count ? std::exp(log_p) : rest;
      double of_q = 0;  // q times its logarithm in the gradient
      if (between) {
        const double d = t - q, m = b <= 0.5 ? q + b * d : t - (1 - b) * d;
        of_q = q > 0 ? q * log_ratio_of(q / m, -b * d / m) : 0;
        soft += (1 - b) * of_q + (t > 0 ? b * t * log_ratio_of(t / m, (1 - b) * d / m) : 0);
      } else if (b == 0) {
        soft += t > 0 ? t * (log_p - log_q) : 0;
      } else {
        of_q = q > 0 ? q * (log_q - log_p) : 0;
        soft += of_q;
      }
      mean += of_q;
      buffers.top_q[k] = q;
      buffers.gradient[k] = b == 0 ? q * p_sum - t : of_q;
    }
    if (b != 0) {
      const double scale_of_q = between ? 1 - b : 1;
      for (int64_t k = 0; k <= count; ++k) {
        buffers.gradient[k] = scale_of_q * (buffers.gradient[k] - buffers.top_q[k] * mean);
      }
    }
    return soft;
  }

  void top_k_gradient(const int64_t* columns, double by_student, double by_hard) {
    const int64_t count = p.topk;
    const Vec tail(
        static_cast<Acc>(tail_sum > 0 && by_student != 0 ? by_student * buffers.gradient[count] / tail_sum : 0));
    const Vec hard(static_cast<Acc>(by_hard == 0 ? 0 : by_hard / hard_sum));
    for (int64_t c = 0; c < padded; c += Vec::size()) {
      auto g = tail * Vec::loadu(buffers.q + c);
      if (by_hard != 0) g = at::vec::fmadd(hard, Vec::loadu(buffers.hard + c), g);
      g.store(buffers.q + c);
    }
    for (int64_t k = 0; k < count && by_student != 0; ++k) {
      if (columns[k] >= 0) buffers.q[columns[k]] += static_cast<Acc>(by_student * buffers.gradient[k]);
    }
  }

  const RowJsd& p;
  int64_t padded;
  Transform<Acc> student_transform, teacher_transform;
  Buffers<Acc> buffers;
  bool between, needs_hard, hard_apart;
  // The current row's.
  double hard_sum = 1;                        // of exp(z - max)
  double mean_student = 0, mean_teacher = 0;  // what is taken off the logarithms in the gradients
  double tail_sum = 0;                        // top-k: of what q holds
};

void jsd(const RowJsd& p, DType dtype, int64_t begin, int64_t end, void* scratch) {
  with_type(dtype, [&](auto zero) {
    JsdRows<decltype(zero)> rows(p, scratch);
    for (int64_t n = begin; n < end; ++n) rows.row(n);
  });
}

}  // namespace

const JsdRange kJsdRange = jsd;

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
