// The vectorised row kernels. This file is compiled once per instruction set, with CPU_CAPABILITY set: keep library
// templates and inline functions of other headers out, or the linker may pick a copy with instructions that the
// machine does not have.
#include <cmath>
#include <limits>

#include "common/lanes.h"
#include "losses/cpu/row_range.h"
#include "losses/cpu/transform.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

// A row's target, read once.
template <class T>
struct Target {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;

  int64_t index = -1;  // -1: probabilities
  bool kept = true;
  bool dense;
  Acc token_weight = 1;
  Acc at_index = 0;  // a[index] less its share of smoothing
  Acc uniform;       // smoothing / V
  Acc keep;          // 1 - smoothing
  const Acc* class_weight;
  const T* low = nullptr;
  const Acc* full = nullptr;

  Target(const RowTargets& t, int64_t n, int64_t vocab)
      : dense(t.dense),
        uniform(static_cast<Acc>(t.smoothing / static_cast<double>(vocab))),
        keep(static_cast<Acc>(1 - t.smoothing)),
        class_weight(static_cast<const Acc*>(t.class_weight)) {
    if (t.token_weight != nullptr) token_weight = static_cast<const Acc*>(t.token_weight)[n];
    if (t.index != nullptr) {
      index = t.index_is_int32 ? static_cast<const int32_t*>(t.index)[n] : static_cast<const int64_t*>(t.index)[n];
      kept = index != t.ignore_index;
      if (kept) at_index = keep * (class_weight != nullptr ? class_weight[index] : Acc(1));
    } else if (t.probability_is_acc) {
      full = static_cast<const Acc*>(t.probability) + n * t.probability_stride;
    } else {
      low = static_cast<const T*>(t.probability) + n * t.probability_stride;
    }
  }

  // a[c] of dense targets but for at_index. `column` is where the row pointers start in class_weight.
  Lanes<T> coefficients(int64_t c, int64_t count, int64_t column) const {
    using L = Lanes<T>;
    Lanes<T> a{Vec(uniform), Vec(uniform)};
    if (low != nullptr || full != nullptr) {
      Vec ta, tb;
      if (low != nullptr) {
        const auto t = count == L::kStep ? L::load(low + c) : L::load(low + c, count, 0);
        ta = t.a, tb = t.b;
      } else {
        const auto t = count == L::kStep ? Lanes<Acc>::load(full + c) : Lanes<Acc>::load(full + c, count, 0);
        ta = t.a, tb = t.b;
      }
      a.a = at::vec::fmadd(ta, Vec(keep), a.a);
      a.b = at::vec::fmadd(tb, Vec(keep), a.b);
    }
    if (class_weight != nullptr) {
      const Acc* from = class_weight + column + c;
      const auto w = count == L::kStep ? Lanes<Acc>::load(from) : Lanes<Acc>::load(from, count, 0);
      a.a = a.a * w.a;
      a.b = a.b * w.b;
    } else if (count < L::kStep) {
      // Lanes beyond the row: their coefficient must not count.
      const auto ones = Lanes<Acc>::load(kOnes, count, 0);
      a.a = a.a * ones.a;
      a.b = a.b * ones.b;
    }
    return a;
  }

 private:
  static constexpr Acc kOnes[64] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
};

// Sums over one row with its maximum m known.
template <class Acc>
struct RowStats {
  Acc max, sum = 0;    // m, sum exp(z - m)
  Acc shifted = 0;     // sum of (z - m), for smoothing of sparse targets
  Acc target_dot = 0;  // dense: sum a[c] * (z - m), mass: sum a[c], both without at_index
  Acc mass = 0;
  Acc entropy_dot = 0;  // sum exp(z - m) * (z - m)
  Acc square_dot = 0;   // sum exp(z - m) * (z - m)^2
};

// What row_stats() adds up beside the exponentials.
enum class Moments { kNone, kFirst, kSecond };

// `exps`, unless null, gets exp(z - m), padded to whole lanes.
template <class T>
RowStats<AccOf<T>> row_stats(const T* row, int64_t cols, const Transform<AccOf<T>>& transform, const Target<T>& target,
                             Moments moments, AccOf<T>* exps = nullptr) {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  const bool entropy = moments != Moments::kNone, square = moments == Moments::kSecond;
  const Acc kLow = -std::numeric_limits<Acc>::infinity();
  RowStats<Acc> stats;
  Vec max_a(kLow), max_b(kLow);
  each_lanes(row, cols, kLow, [&](int64_t, int64_t count, const Lanes<T>& x) {
    if (transform.identity()) {
      max_a = at::vec::maximum(max_a, x.a);
      max_b = at::vec::maximum(max_b, x.b);
    } else if (count == Lanes<T>::kStep) {
      max_a = at::vec::maximum(max_a, transform(x.a));
      max_b = at::vec::maximum(max_b, transform(x.b));
    } else {
      // The padding must stay below everything under any transform: repeat a value of the row instead.
      const auto tail = Lanes<T>::load(row + cols - count, count, static_cast<Acc>(row[cols - 1]));
      max_a = at::vec::maximum(max_a, transform(tail.a));
      max_b = at::vec::maximum(max_b, transform(tail.b));
    }
  });
  stats.max = reduce_max(at::vec::maximum(max_a, max_b));

  const Vec m(stats.max);
  const bool smooth = !target.dense && target.uniform != Acc(0);
  const bool extra = target.dense || smooth || entropy;
  Vec sum_a(0), sum_b(0), shifted(0), dot(0), mass(0), entropy_dot(0), square_dot(0);
  // Plain: nothing but the sum of exp(x - m), without a test in the loop.
  const auto add_up = [&](auto plain) {
    each_lanes(row, cols, kLow, [&](int64_t c, int64_t count, const Lanes<T>& x) {
      auto za = x.a - m, zb = x.b - m;
      if constexpr (!plain) za = transform(x.a) - m, zb = transform(x.b) - m;
      auto ea = exp_nonpositive(za), eb = exp_nonpositive(zb);
      if (!plain && count < Lanes<T>::kStep) {
        // exp of the padding is 0 only where the transform leaves -inf as it is.
        ea = Vec::set(Vec(0), ea, std::min<int64_t>(count, Vec::size()));
        eb = Vec::set(Vec(0), eb, std::max<int64_t>(count - Vec::size(), 0));
        za = Vec::set(Vec(0), za, std::min<int64_t>(count, Vec::size()));
        zb = Vec::set(Vec(0), zb, std::max<int64_t>(count - Vec::size(), 0));
      }
      sum_a = sum_a + ea;
      sum_b = sum_b + eb;
      if (exps != nullptr) {
        ea.store(exps + c);
        eb.store(exps + c + Vec::size());
      }
      if constexpr (!plain) {
        if (smooth) shifted = shifted + za + zb;
        if (entropy) entropy_dot = entropy_dot + product_or_zero(ea, za) + product_or_zero(eb, zb);
        if (square) square_dot = square_dot + product_or_zero(ea, za * za) + product_or_zero(eb, zb * zb);
        if (target.dense) {
          const auto a = target.coefficients(c, count, 0);
          dot = dot + product_or_zero(a.a, za) + product_or_zero(a.b, zb);
          mass = mass + a.a + a.b;
        }
      }
    });
  };
  transform.identity() && !extra ? add_up(std::true_type{}) : add_up(std::false_type{});
  stats.sum = reduce_add(sum_a + sum_b);
  if (extra) {
    stats.shifted = reduce_add(shifted);
    stats.target_dot = reduce_add(dot);
    stats.mass = reduce_add(mass);
    stats.entropy_dot = reduce_add(entropy_dot);
    stats.square_dot = reduce_add(square_dot);
  }
  return stats;
}

// What rounding took from a - b.
template <class Acc>
Acc lost_in_difference(Acc a, Acc b) {
  const Acc d = a - b, back = d - a;
  return (a - (d - back)) - (b + back);
}

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
int64_t first_of_largest(const T* row, int64_t cols, double scale) {
  int64_t best = 0;
  for (int64_t c = 1; c < cols; ++c) {
    const auto x = static_cast<AccOf<T>>(row[c]), top = static_cast<AccOf<T>>(row[best]);
    if (scale >= 0 ? x > top : x < top) best = c;
  }
  return best;
}

// The transform of a row.
template <class Acc>
Transform<Acc> of_row(Transform<Acc> transform, const void* row_scale, int64_t n) {
  if (row_scale != nullptr) transform.scale *= static_cast<const Acc*>(row_scale)[n];
  return transform;
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
      put(p.loss, n, Acc(0));
      put(p.lse_low, n, Acc(0));
      put(p.mass, n, Acc(0));
      put(p.z_loss_term, n, Acc(0));
      put(p.predicted, n, int64_t{-1});
      put(p.token_log_prob, n, Acc(0));
      put(p.entropy, n, Acc(0));
      put(p.entropy_low, n, Acc(0));
      put(p.variance, n, Acc(0));
      put(p.slope, n, Acc(0));
      put(p.mean, n, Acc(0));
      Acc lse = 0;
      if (p.lse_of_ignored) {
        const auto stats =
            row_stats(row, p.cols, transform, target, p.mean != nullptr ? Moments::kFirst : Moments::kNone);
        lse = stats.max + std::log(stats.sum);
        put(p.mean, n, stats.max + stats.entropy_dot / stats.sum);
        put(p.lse_low, n, lost_in_difference(stats.max, -std::log(stats.sum)));
      }
      put(p.lse, n, lse);
      if (grad != nullptr) fill_zero(grad, p.cols);
      continue;
    }
    const auto stats = row_stats(row, p.cols, transform, target, moments, exps);
    const Acc log_sum = std::log(stats.sum), lse = stats.max + log_sum;
    const Acc at_index = target.index >= 0 ? transform.one(static_cast<Acc>(row[target.index])) : Acc(0);
    Acc mass = target.dense ? stats.mass + target.at_index : target.at_index + target.uniform * Acc(p.cols);
    Acc ce = mass * log_sum - (target.dense ? stats.target_dot : Acc(0));
    if (!target.dense && target.uniform != Acc(0)) ce -= target.uniform * stats.shifted;
    if (target.index >= 0 && target.at_index != Acc(0)) ce -= target.at_index * (at_index - stats.max);
    const Acc z_term = p.z_loss != 0 ? static_cast<Acc>(p.z_loss) * lse * lse : Acc(0);
    const Acc weight = target.token_weight;
    put(p.loss, n, weight * (ce_scale * ce + (p.z_loss != 0 ? z_scale * z_term : Acc(0))));
    put(p.lse, n, lse);
    put(p.lse_low, n, lost_in_difference(stats.max, -log_sum));
    put(p.mass, n, mass);
    put(p.z_loss_term, n, z_term);
    if (p.predicted != nullptr) put(p.predicted, n, first_of_largest(row, p.cols, transform.scale));
    put(p.token_log_prob, n, (at_index - stats.max) - log_sum);
    const Acc mean = stats.entropy_dot / stats.sum;
    put(p.entropy, n, log_sum - mean);
    put(p.entropy_low, n, lost_in_difference(log_sum, mean));
    put(p.mean, n, stats.max + mean);
    put(p.variance, n, stats.square_dot / stats.sum - mean * mean);
    put(p.slope, n, ce - mass * (log_sum - mean));
    if (grad != nullptr) {
      Factors<Acc> f;
      f.P = weight * ce_scale * mass;
      if (p.z_loss != 0) f.P += weight * z_scale * Acc(2 * p.z_loss) * lse;
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
