// The vectorised row kernels. This file is compiled once per instruction set, with CPU_CAPABILITY set: keep library
// templates and inline functions of other headers out, or the linker may pick a copy with instructions that the
// machine does not have.
#include <cmath>
#include <limits>

#include "common/lanes.h"
#include "losses/cpu/row_range.h"
#include "losses/cpu/row_stats.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

// The factors of a row's gradient (p * (P - E * (z - mean)) - Q * a + L * [c == y]) * dz/dx, with
// p = exp((z - shift) - low) * inverse_sum.
template <class Acc>
struct Factors {
  Acc P = 0, Q = 0, shift = 0, low = 0, inverse_sum = 1;
  Acc L = 0;                          // log-probability's
  Acc E = 0, mean = 0, mean_low = 0;  // entropy's

  bool nothing() const { return P == Acc(0) && Q == Acc(0) && L == Acc(0) && E == Acc(0); }
};

// kExps: the exponentials are in `exps`, and there is no entropy.
template <bool kExps, class T>
void row_gradient(const T* row, const AccOf<T>* exps, T* grad, int64_t cols, int64_t column,
                  const Transform<AccOf<T>>& transform, const Target<T>& target, const Factors<AccOf<T>>& f) {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  const Vec m(f.shift), l(f.low), scale(f.P * f.inverse_sum), q(f.Q), uniform(f.Q * target.uniform);
  const Vec entropy(f.E), mean(f.mean), mean_low(f.mean_low);
  const bool entropic = !kExps && f.E != Acc(0);
  // The target's own logit, before its place is overwritten.
  const int64_t y = target.kept ? target.index - column : -1;
  const bool has_index = target.index >= 0 && y >= 0 && y < cols;
  const Acc at_index = has_index ? static_cast<Acc>(row[y]) : Acc(0);
  const bool sloped = !transform.identity();
  each_lanes(row, cols, Acc(0), [&](int64_t c, int64_t count, const Lanes<T>& x) {
    Vec za, zb;
    if (!kExps || sloped) za = transform(x.a), zb = transform(x.b);
    Lanes<T> g;
    if constexpr (kExps) {
      const auto e = Lanes<Acc>::load(exps + c);
      g = {e.a * scale, e.b * scale};
    } else if (entropic) {
      const auto pa = exp_nonpositive((za - m) - l), pb = exp_nonpositive((zb - m) - l);
      g = {product_or_zero(pa, scale - entropy * ((za - mean) - mean_low)),
           product_or_zero(pb, scale - entropy * ((zb - mean) - mean_low))};
    } else {
      g = {exp_nonpositive((za - m) - l) * scale, exp_nonpositive((zb - m) - l) * scale};
    }
    if (target.dense) {
      const auto a = target.coefficients(c, count, column);
      g.a = g.a - q * a.a;
      g.b = g.b - q * a.b;
    } else {
      g.a = g.a - uniform;
      g.b = g.b - uniform;
    }
    if (sloped) {
      g.a = g.a * transform.slope(za);
      g.b = g.b * transform.slope(zb);
    }
    if (count == Lanes<T>::kStep) {
      g.store(grad + c);
    } else {
      g.store(grad + c, count);
    }
  });
  if (has_index) {
    const Acc z = transform.one(at_index);
    Acc a = target.uniform + target.at_index;
    if (target.dense) a = target.uniform * target.class_weight[column + y] + target.at_index;
    const Acc p = std::exp((z - f.shift) - f.low) * f.inverse_sum;
    Acc value = f.P * p - f.Q * a + f.L;
    if (entropic && p != Acc(0)) value -= f.E * p * ((z - f.mean) - f.mean_low);
    grad[y] = static_cast<T>(value * transform.one_slope(z));
  }
}

template <class T>
void forward_rows(const RowForward& p, int64_t begin, int64_t end, void* scratch) {
  using Acc = AccOf<T>;
  auto* exps = static_cast<Acc*>(scratch);
  const Transform<Acc> common(p.transform);
  const auto moments = p.variance != nullptr  ? Moments::kSecond
                       : p.entropy != nullptr ? Moments::kFirst
                                              : Moments::kNone;
  const auto* scales = static_cast<const Acc*>(p.scales);
  const Acc ce_scale = scales != nullptr ? scales[0] : Acc(1), z_scale = scales != nullptr ? scales[1] : Acc(1);
  for (int64_t n = begin; n < end; ++n) {
    const T* row = static_cast<const T*>(p.logits) + n * p.logits_stride;
    T* grad = p.grad != nullptr ? static_cast<T*>(p.grad) + n * p.grad_stride : nullptr;
    const Target<T> target(p.targets, n, p.cols);
    const auto transform = of_row(common, p.row_scale, n);
    if (!target.kept) {
      RowStats<Acc> stats;
      if (p.lse_of_ignored) {
        const auto moment = p.mean != nullptr ? Moments::kFirst : Moments::kNone;
        stats = row_stats(row, 0, p.cols, transform, target, moment);
      }
      put_ignored(p, n, stats, p.lse_of_ignored);
      if (grad != nullptr) fill_zero(grad, p.cols);
      continue;
    }
    const auto stats = row_stats(row, 0, p.cols, transform, target, moments, exps);
    const Acc at_index = target.index >= 0 ? transform.one(static_cast<Acc>(row[target.index])) : Acc(0);
    const auto costs = put_kept(p, n, stats, target, at_index, p.cols);
    if (p.predicted != nullptr) put(p.predicted, n, first_of_largest(row, p.cols, transform.scale));
    if (grad != nullptr) {
      Factors<Acc> f;
      const Acc weight = target.token_weight;
      f.P = weight * ce_scale * costs.mass;
      if (p.z_loss != 0) f.P += weight * z_scale * Acc(2 * p.z_loss) * costs.lse;
      f.Q = weight * ce_scale;
      f.shift = stats.max;
      f.inverse_sum = Acc(1) / stats.sum;
      row_gradient<true>(row, exps, grad, p.cols, 0, transform, target, f);
    }
  }
}

// A value of a row; 0 where there is none.
template <class Acc>
Acc at_row(const void* values, int64_t n) {
  return values != nullptr ? static_cast<const Acc*>(values)[n] : Acc(0);
}

template <class T>
void gradient_rows(const RowGradient& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  const Transform<Acc> common(p.transform);
  const auto* scales = static_cast<const Acc*>(p.scales);
  const Acc ce_scale = scales != nullptr ? scales[0] : Acc(1), z_scale = scales != nullptr ? scales[1] : Acc(1);
  for (int64_t n = begin; n < end; ++n) {
    const T* row = static_cast<const T*>(p.logits) + n * p.logits_stride;
    T* grad = static_cast<T*>(p.grad) + n * p.grad_stride;
    const Target<T> target(p.targets, n, p.vocab);
    const auto transform = of_row(common, p.row_scale, n);
    const Acc lse = static_cast<const Acc*>(p.lse)[n];
    Factors<Acc> f;
    f.shift = lse;
    f.low = at_row<Acc>(p.lse_low, n);
    auto &P = f.P, &Q = f.Q;
    if (target.kept) {
      f.L = at_row<Acc>(p.grad_log_prob, n);
      f.E = at_row<Acc>(p.grad_entropy, n);
    }
    if (f.E != Acc(0)) {
      const Acc entropy = at_row<Acc>(p.entropy, n);
      f.mean = lse - entropy;
      f.mean_low = (lost_in_difference(lse, entropy) + f.low) - at_row<Acc>(p.entropy_low, n);
    }
    if (target.kept && p.grad_loss != nullptr) {
      const Acc upstream = static_cast<const Acc*>(p.grad_loss)[n * p.grad_loss_stride] * target.token_weight;
      const Acc mass =
          target.dense ? static_cast<const Acc*>(p.mass)[n] : target.at_index + target.uniform * Acc(p.vocab);
      Q = upstream * ce_scale;
      P = Q * mass;
      if (p.z_loss != 0) P += upstream * z_scale * Acc(2 * p.z_loss) * lse;
    }
    if (p.grad_lse != nullptr && (target.kept || p.lse_of_ignored))
      P += static_cast<const Acc*>(p.grad_lse)[n * p.grad_lse_stride];
    P -= f.L;
    if (f.nothing()) {
      fill_zero(grad, p.cols);
    } else {
      row_gradient<false, T>(row, nullptr, grad, p.cols, p.col_offset, transform, target, f);
    }
  }
}

// The factors of the tangent of a row's gradient, see RowTangents; those with a D behind them are tangents.
template <class Acc>
struct TangentFactors {
  Acc k = 0, kD = 0, B = 0, BD = 0, D = 0, DD = 0, E = 0, ED = 0;
  Acc lseD = 0, meanD = 0;
  Acc shift = 0, low = 0, mean = 0, mean_low = 0;  // p = exp((z - shift) - low)

  bool nothing() const {
    return k == Acc(0) && kD == Acc(0) && B == Acc(0) && BD == Acc(0) && D == Acc(0) && DD == Acc(0) && E == Acc(0) &&
           ED == Acc(0);
  }
};

// A row's logits and their tangents, as vectors of z and of its tangent.
template <class T, class Body>
void each_tangent(const T* row, const T* tangent, int64_t cols, const Transform<AccOf<T>>& transform, Body&& body) {
  using L = Lanes<T>;
  each_lanes(row, cols, AccOf<T>(0), [&](int64_t c, int64_t count, const L& x) {
    auto d = count == L::kStep ? L::load(tangent + c) : L::load(tangent + c, count, 0);
    const L z{transform(x.a), transform(x.b)};
    body(c, count, z, d);
  });
}

// The sums of a row's tangents.
template <class Acc>
struct TangentSums {
  Acc lse = 0, mean = 0, dot = 0;  // sum p * z., sum p * (z - m) * z., and sum a * z. but for at_index
};

template <class T>
TangentSums<AccOf<T>> tangent_sums(const T* row, const T* tangent, int64_t cols, const Transform<AccOf<T>>& transform,
                                   const Target<T>& target, bool entropy, const TangentFactors<AccOf<T>>& f) {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  const Vec m(f.shift), low(f.low), mean(f.mean), mean_low(f.mean_low), uniform(target.uniform);
  Vec lse(0), centered(0), dot(0);
  each_tangent(row, tangent, cols, transform, [&](int64_t c, int64_t count, const Lanes<T>& z, const Lanes<T>& d) {
    const auto coefficients = target.dense ? target.coefficients(c, count, 0) : Lanes<T>{uniform, uniform};
    const auto add = [&](const Vec& z, const Vec& d, const Vec& a) {
      const auto moved = transform.capped ? d * transform.slope(z) : d;
      const auto part = product_or_zero(exp_nonpositive((z - m) - low), moved);
      lse = lse + part;
      if (entropy) centered = centered + product_or_zero(part, (z - mean) - mean_low);
      dot = dot + product_or_zero(a, moved);
    };
    add(z.a, d.a, coefficients.a);
    add(z.b, d.b, coefficients.b);
  });
  return {reduce_add(lse), reduce_add(centered), reduce_add(dot)};
}

// The tangent of a row's gradient.
template <class T>
void write_gradient_tangent(const T* row, const T* tangent, T* out, int64_t cols, const Transform<AccOf<T>>& transform,
                            const Target<T>& target, const TangentFactors<AccOf<T>>& f) {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  const Acc curve = transform.capped ? Acc(-2) * transform.inverse_cap * transform.inverse_cap : Acc(0);
  const auto value = [&](const Vec& z, const Vec& d, const Vec& a, Acc hit) {
    const auto slope = transform.slope(z), moved = d * slope;
    const auto p = exp_nonpositive((z - Vec(f.shift)) - Vec(f.low));
    const auto away = f.D != Acc(0) || f.DD != Acc(0) ? (z - Vec(f.mean)) - Vec(f.mean_low) : Vec(0);
    const auto upstream = Vec(f.k) - Vec(f.D) * away;
    const auto inner =
        (moved - Vec(f.lseD)) * upstream + Vec(f.kD) - Vec(f.D) * (moved - Vec(f.meanD)) - Vec(f.DD) * away;
    auto g = product_or_zero(p, inner) - Vec(f.BD) * a + Vec(f.ED * hit);
    if (!transform.capped) return g;
    // d2z/dx2 = -2 z / cap^2 * dz/dx
    const auto first = product_or_zero(p, upstream) - Vec(f.B) * a + Vec(f.E * hit);
    return slope * (g + Vec(curve) * z * d * first);
  };
  const Vec uniform(target.uniform);
  each_tangent(row, tangent, cols, transform, [&](int64_t c, int64_t count, const Lanes<T>& z, const Lanes<T>& d) {
    const auto a = target.dense ? target.coefficients(c, count, 0) : Lanes<T>{uniform, uniform};
    const Lanes<T> g{value(z.a, d.a, a.a, Acc(0)), value(z.b, d.b, a.b, Acc(0))};
    count == Lanes<T>::kStep ? g.store(out + c) : g.store(out + c, count);
  });
  if (!target.kept || target.index < 0) return;
  const int64_t y = target.index;
  const Acc of_class = target.dense ? target.class_weight[y] : Acc(1);
  Acc lane[Vec::size()];
  value(transform(Vec(static_cast<Acc>(row[y]))), Vec(static_cast<Acc>(tangent[y])),
        Vec(target.uniform * of_class + target.at_index), Acc(1))
      .store(lane);
  out[y] = static_cast<T>(lane[0]);
}

template <class T>
void tangent_rows(const RowTangents& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  const Transform<Acc> transform(LogitTransform{1.0, p.softcap});
  const bool entropy =
      p.values.entropy != nullptr || p.upstream.entropy != nullptr || p.upstream_tangent.entropy != nullptr;
  for (int64_t n = begin; n < end; ++n) {
    const T* row = static_cast<const T*>(p.logits) + n * p.logits_stride;
    const T* tangent = static_cast<const T*>(p.tangent) + n * p.tangent_stride;
    T* grad = p.grad_tangent != nullptr ? static_cast<T*>(p.grad_tangent) + n * p.grad_tangent_stride : nullptr;
    const Target<T> target(p.targets, n, p.cols);
    if (!target.kept && !p.lse_of_ignored) {
      for (void* out : {p.values.cross_entropy, p.values.lse, p.values.entropy, p.values.log_prob}) put(out, n, Acc(0));
      if (grad != nullptr) fill_zero(grad, p.cols);
      continue;
    }
    TangentFactors<Acc> f;
    f.shift = static_cast<const Acc*>(p.lse)[n];
    f.low = at_row<Acc>(p.lse_low, n);
    if (entropy) {
      const Acc value = at_row<Acc>(p.entropy, n);
      f.mean = f.shift - value;
      f.mean_low = (lost_in_difference(f.shift, value) + f.low) - at_row<Acc>(p.entropy_low, n);
    }
    const auto sums = tangent_sums(row, tangent, p.cols, transform, target, entropy && target.kept, f);
    f.lseD = sums.lse;
    f.meanD = sums.mean + sums.lse;
    const Acc mass = target.dense ? at_row<Acc>(p.mass, n) : target.at_index + target.uniform * Acc(p.cols);
    Acc moved = 0;
    if (target.kept && target.index >= 0) {
      moved = static_cast<Acc>(tangent[target.index]);
      if (transform.capped) moved *= transform.one_slope(transform.one(static_cast<Acc>(row[target.index])));
    }
    const Acc dot = target.at_index != Acc(0) ? sums.dot + target.at_index * moved : sums.dot;
    put(p.values.cross_entropy, n, target.kept ? mass * sums.lse - dot : Acc(0));
    put(p.values.lse, n, sums.lse);
    put(p.values.entropy, n, target.kept ? -sums.mean : Acc(0));
    put(p.values.log_prob, n, target.kept ? moved - sums.lse : Acc(0));
    if (grad == nullptr) continue;
    const auto read = [&](const RowValues<const void*>& from, Acc& k, Acc& B, Acc& D, Acc& E) {
      if (target.kept) {
        B = at_row<Acc>(from.cross_entropy, n);
        D = at_row<Acc>(from.entropy, n);
        E = at_row<Acc>(from.log_prob, n);
      }
      k = mass * B + at_row<Acc>(from.lse, n) - E;
    };
    read(p.upstream, f.k, f.B, f.D, f.E);
    read(p.upstream_tangent, f.kD, f.BD, f.DD, f.ED);
    if (f.nothing()) {
      fill_zero(grad, p.cols);
    } else {
      write_gradient_tangent(row, tangent, grad, p.cols, transform, target, f);
    }
  }
}

template <class T>
void scaling_rows(const RowScaling& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  const Acc factor = p.factor != nullptr ? *static_cast<const Acc*>(p.factor) : Acc(1);
  for (int64_t n = begin; n < end; ++n) {
    const T* in = static_cast<const T*>(p.in) + n * p.in_stride;
    T* out = static_cast<T*>(p.out) + n * p.out_stride;
    const Acc scale = factor * (p.scale != nullptr ? static_cast<const Acc*>(p.scale)[n * p.scale_stride] : Acc(1));
    if (in == out && scale == Acc(1)) continue;
    each_lanes(in, p.cols, Acc(0), [&](int64_t c, int64_t count, const Lanes<T>& x) {
      const Lanes<T> y{x.a * Vec(scale), x.b * Vec(scale)};
      count == Lanes<T>::kStep ? y.store(out + c) : y.store(out + c, count);
    });
  }
}

void forward(const RowForward& p, DType dtype, int64_t begin, int64_t end, void* scratch) {
  with_type(dtype, [&](auto zero) { forward_rows<decltype(zero)>(p, begin, end, scratch); });
}
void gradient(const RowGradient& p, DType dtype, int64_t begin, int64_t end) {
  with_type(dtype, [&](auto zero) { gradient_rows<decltype(zero)>(p, begin, end); });
}
void scaling(const RowScaling& p, DType dtype, int64_t begin, int64_t end) {
  with_type(dtype, [&](auto zero) { scaling_rows<decltype(zero)>(p, begin, end); });
}

void tangents(const RowTangents& p, DType dtype, int64_t begin, int64_t end) {
  with_type(dtype, [&](auto zero) { tangent_rows<decltype(zero)>(p, begin, end); });
}

}  // namespace

const RowRangeKernels kRowRangeKernels = {forward, gradient, scaling, tangents};

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
