// Tangents of the Jensen-Shannon divergence and of its gradients over rows; formulas in losses/row_kernels.h. This file
// is compiled once per instruction set, with CPU_CAPABILITY set: keep library templates and inline functions of other
// headers out, or the linker may pick a copy with instructions that the machine does not have.
#include <cmath>
#include <limits>

#include "losses/cpu/jsd_row.h"
#include "losses/cpu/row_range.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

template <class T>
class JsdTangentRows {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;

  // A side's row in acc, each buffer `padded` values.
  struct Side {
    Transform<Acc> transform;
    Acc temperature;
    Acc* z;            // (z - largest) / T; log-probabilities as they are
    Acc* probability;  // then the tangent of the gradient by z / T
    Acc* moved;        // the tangent of z / T
    Acc* first;        // the gradient by z / T, times the upstream one
    const T* row = nullptr;
    double log_sum = 0;

    Side(const LogitTransform& t, double temperature, Acc* buffers, int64_t padded)
        : transform(t),
          temperature(static_cast<Acc>(temperature)),
          z(buffers),
          probability(buffers + padded),
          moved(buffers + 2 * padded),
          first(buffers + 3 * padded) {}
  };

  // A row's sums, and what its gradients take of them; D for a tangent.
  struct Sums {
    double moved_q, moved_p, A, B, a, b, r, r_moved, ends;
    double AD = 0, BD = 0;
  };

  // A vector of columns.
  struct Columns {
    Vec q, p, h, k, r;
  };

 public:
  JsdTangentRows(const RowJsdTangents& params, void* scratch)
      : p(params),
        padded((params.cols + Lanes<T>::kStep - 1) / Lanes<T>::kStep * Lanes<T>::kStep),
        student(params.student_transform, params.student_temperature, static_cast<Acc*>(scratch), padded),
        teacher(params.teacher_transform, params.teacher_temperature, static_cast<Acc*>(scratch) + 4 * padded, padded),
        mixed(params.beta > 0 && params.beta < 1),
        s(params.beta == 0 ? 1 : 0),
        t(params.beta == 1 ? 1 : 0),
        normalized(params.log_probs ? 0 : 1) {}

  void row(int64_t n) {
    const RowConstants<Acc> constants(p, n);
    const Acc upstream = constants.upstream;
    const Acc moved = p.upstream_tangent != nullptr ? static_cast<const Acc*>(p.upstream_tangent)[n] : Acc(0);
    T* by_student = p.grad_student != nullptr ? static_cast<T*>(p.grad_student) + n * p.grad_student_stride : nullptr;
    T* by_teacher = p.grad_teacher != nullptr ? static_cast<T*>(p.grad_teacher) + n * p.grad_teacher_stride : nullptr;
    // An upstream gradient of 0 must not meet an infinite divergence.
    if (!constants.kept || (p.soft == nullptr && upstream == Acc(0) && moved == Acc(0))) {
      put(p.soft, n, Acc(0));
      if (by_student != nullptr) fill_zero(by_student, p.cols);
      if (by_teacher != nullptr) fill_zero(by_teacher, p.cols);
      return;
    }
    load(student, p.student, p.student_stride, p.student_tangent, p.student_tangent_stride, n);
    load(teacher, p.teacher, p.teacher_stride, p.teacher_tangent, p.teacher_tangent_stride, n);
    const Sums sums = add_up();
    put(p.soft, n, static_cast<Acc>(soft_tangent(sums)));
    if (by_student == nullptr && by_teacher == nullptr) return;
    gradients(sums, upstream, moved, by_student != nullptr, by_teacher != nullptr);
    if (by_student != nullptr) store(student, by_student);
    if (by_teacher != nullptr) store(teacher, by_teacher);
  }

 private:
  void load(Side& side, const void* values, int64_t stride, const void* tangents, int64_t tangent_stride, int64_t n) {
    side.row = static_cast<const T*>(values) + n * stride;
    const Acc largest = load_row(side.row, p.cols, side.transform, side.z);
    const T* tangent = tangents != nullptr ? static_cast<const T*>(tangents) + n * tangent_stride : nullptr;
    const Vec inverse(1 / side.temperature);
    each_lanes(side.row, p.cols, Acc(0), [&](int64_t c, int64_t count, const Lanes<T>& x) {
      Lanes<T> d{Vec(0), Vec(0)};
      if (tangent != nullptr) {
        d = count == Lanes<T>::kStep ? Lanes<T>::load(tangent + c) : Lanes<T>::load(tangent + c, count, 0);
      }
      (d.a * side.transform.slope(side.transform(x.a)) * inverse).store(side.moved + c);
      (d.b * side.transform.slope(side.transform(x.b)) * inverse).store(side.moved + c + Vec::size());
    });
    const Vec shift(normalized != Acc(0) ? largest : Acc(0));
    double sum[1];
    sum_row<1, Acc>(padded, sum, [&](int64_t c, Vec* s) {
      const auto z = (Vec::loadu(side.z + c) - shift) * inverse, e = exp_nonpositive(z);
      z.store(side.z + c);
      e.store(side.probability + c);
      s[0] = s[0] + e;
    });
    if (normalized == Acc(0)) return;
    side.log_sum = std::log(sum[0]);
    const Vec inverse_sum(static_cast<Acc>(1 / sum[0]));
    for (int64_t c = 0; c < padded; c += Vec::size()) {
      (Vec::loadu(side.probability + c) * inverse_sum).store(side.probability + c);
    }
  }

  Columns columns(int64_t c) const {
    const Vec one(1), zero(0);
    const auto q = Vec::loadu(student.probability + c), x = Vec::loadu(teacher.probability + c);
    if (mixed) {
      const Vec beta(static_cast<Acc>(p.beta)), rest(static_cast<Acc>(1 - p.beta));
      const auto d = x - q, below = beta * d, above = rest * d;
      // From the end of beta that it is nearer to, where nothing cancels. Where both are 0 the quotients must not be 0
      // / 0.
      const auto m = p.beta <= 0.5 ? q + below : x - above;
      const auto inverse = one / at::vec::maximum(m, Vec(std::numeric_limits<Acc>::min()));
      return {q, x, rest * log_ratio(q * inverse, below.neg() * inverse),
              beta * log_ratio(x * inverse, above * inverse), rest * beta * q * (x * inverse)};
    }
    const Vec more(1 - normalized), offset(static_cast<Acc>(student.log_sum - teacher.log_sum));
    const auto log = (Vec::loadu(teacher.z + c) - Vec::loadu(student.z + c)) + offset;  // log(p / q)
    if (s != Acc(0)) return {q, x, zero, log + more, x};
    return {q, x, log.neg() + more, zero, q};
  }

  Sums add_up() const {
    const Vec n(normalized), at_s(s), at_t(t);
    double sums[9];
    sum_row<9, Acc>(padded, sums, [&](int64_t c, Vec* to) {
      const auto v = columns(c);
      const auto moved_q = Vec::loadu(student.moved + c), moved_p = Vec::loadu(teacher.moved + c);
      const auto a = product_or_zero(v.q, v.h), b = product_or_zero(v.p, v.k);
      to[0] = to[0] + product_or_zero(v.q, moved_q);
      to[1] = to[1] + product_or_zero(v.p, moved_p);
      to[2] = to[2] + a;
      to[3] = to[3] + b;
      to[4] = to[4] + product_or_zero(a, moved_q);
      to[5] = to[5] + product_or_zero(b, moved_p);
      to[6] = to[6] + v.r;
      to[7] = to[7] + product_or_zero(v.r, moved_q - moved_p);
      if (!mixed) {
        to[8] =
            to[8] + product_or_zero(at_s * (n * v.q - v.p), moved_q) + product_or_zero(at_t * (n * v.p - v.q), moved_p);
      }
    });
    Sums found{sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7], sums[8]};
    if (normalized == Acc(0)) {
      found.moved_q = found.moved_p = found.A = found.B = 0;
      return found;
    }
    const double curved = found.r_moved - found.r * (found.moved_q - found.moved_p);
    found.AD = found.a - found.A * found.moved_q + (s == Acc(0) ? curved : 0);
    found.BD = found.b - found.B * found.moved_p - (t == Acc(0) ? curved : 0);
    return found;
  }

  // A side without a tangent has no part, however infinite its divergence is.
  double soft_tangent(const Sums& f) const {
    double tangent = f.ends;
    if (p.student_tangent != nullptr) tangent += f.a - f.A * f.moved_q;
    if (p.teacher_tangent != nullptr) tangent += f.b - f.B * f.moved_p;
    return tangent;
  }

  void gradients(const Sums& f, Acc upstream, Acc moved, bool by_student, bool by_teacher) {
    const Vec u(upstream), uD(moved), n(normalized);
    const Vec A(static_cast<Acc>(f.A)), B(static_cast<Acc>(f.B)), AD(static_cast<Acc>(f.AD)),
        BD(static_cast<Acc>(f.BD));
    const Vec mean_q(static_cast<Acc>(f.moved_q)), mean_p(static_cast<Acc>(f.moved_p));
    // For the side with the probability x, whose logarithm has the tangent xD, beside y. `end`: all of it is n x - y.
    const auto side = [&](Side& to, bool end, const Vec& x, const Vec& xD, const Vec& y, const Vec& yD,
                          const Vec& ratio, const Vec& mean, const Vec& meanD, const Vec& r, int64_t c) {
      Vec g, gD;
      if (end) {
        g = n * x - y;
        gD = n * product_or_zero(x, xD) - product_or_zero(y, yD);
      } else {
        g = product_or_zero(x, ratio - mean);
        gD = product_or_zero(x, (ratio - mean) * xD - meanD) + product_or_zero(r, xD - yD);
      }
      (u * g).store(to.first + c);
      (uD * g + u * gD).store(to.probability + c);
    };
    for (int64_t c = 0; c < padded; c += Vec::size()) {
      const auto v = columns(c);
      const auto qD = Vec::loadu(student.moved + c) - mean_q, pD = Vec::loadu(teacher.moved + c) - mean_p;
      if (by_student) side(student, s != Acc(0), v.q, qD, v.p, pD, v.h, A, AD, v.r, c);
      if (by_teacher) side(teacher, t != Acc(0), v.p, pD, v.q, qD, v.k, B, BD, v.r, c);
    }
  }

  // By the stored values: (g dz/dx / T). = g. dz/dx / T + g d2z/dx2 / T x., d2z/dx2 = -2 z scale / cap^2 dz/dx.
  void store(const Side& side, T* out) const {
    const auto& transform = side.transform;
    const Vec inverse(1 / side.temperature),
        curve(Acc(-2) * transform.scale * transform.inverse_cap * transform.inverse_cap);
    each_lanes(side.row, p.cols, Acc(0), [&](int64_t c, int64_t count, const Lanes<T>& x) {
      const auto value = [&](const Vec& from, int64_t at) {
        const auto z = transform(from), g = Vec::loadu(side.probability + at) * transform.slope(z) * inverse;
        if (!transform.capped) return g;
        return g + curve * z * Vec::loadu(side.moved + at) * Vec::loadu(side.first + at);
      };
      const Lanes<T> g{value(x.a, c), value(x.b, c + Vec::size())};
      count == Lanes<T>::kStep ? g.store(out + c) : g.store(out + c, count);
    });
  }

  const RowJsdTangents& p;
  const int64_t padded;
  Side student, teacher;
  const bool mixed;
  const Acc s, t, normalized;
};

void jsd_tangents(const RowJsdTangents& p, DType dtype, int64_t begin, int64_t end, void* scratch) {
  with_type(dtype, [&](auto zero) {
    JsdTangentRows<decltype(zero)> rows(p, scratch);
    for (int64_t n = begin; n < end; ++n) rows.row(n);
  });
}

}  // namespace

const JsdTangentsRange kJsdTangentsRange = jsd_tangents;

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
