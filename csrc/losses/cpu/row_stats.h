// A row of logits as the CPU's kernels read it: its target, its sums, and the outputs that are made of them. Only for
// files that are compiled once per instruction set, see common/lanes.h.
#pragma once

#include <cmath>
#include <limits>

#include "common/lanes.h"
#include "losses/cpu/transform.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {

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
  Acc max = 0, sum = 0;  // m, sum exp(z - m)
  Acc shifted = 0;       // sum of (z - m), for smoothing of sparse targets
  Acc target_dot = 0;    // dense: sum a[c] * (z - m), mass: sum a[c], both without at_index
  Acc mass = 0;
  Acc entropy_dot = 0;  // sum exp(z - m) * (z - m)
  Acc square_dot = 0;   // sum exp(z - m) * (z - m)^2
};

// What row_stats() adds up beside the exponentials.
enum class Moments { kNone, kFirst, kSecond };

// Of `cols` columns from `row` on, column `column` of those that the class weights count. `exps`, unless null, gets
// exp(z - m), padded to whole lanes.
template <class T>
RowStats<AccOf<T>> row_stats(const T* row, int64_t column, int64_t cols, const Transform<AccOf<T>>& transform,
                             const Target<T>& target, Moments moments, AccOf<T>* exps = nullptr) {
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
          const auto a = target.coefficients(c, count, column);
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

// The outputs of an ignored row: all zero, and without a prediction, but what is wanted of its logits where they were
// `read`.
template <class Acc>
void put_ignored(const RowForward& p, int64_t n, const RowStats<Acc>& stats, bool read) {
  for (void* out : {p.loss, p.mass, p.z_loss_term, p.token_log_prob, p.entropy, p.entropy_low, p.variance, p.slope}) {
    put(out, n, Acc(0));
  }
  put(p.predicted, n, int64_t{-1});
  const Acc log_sum = read ? std::log(stats.sum) : Acc(0);
  put(p.lse, n, read ? stats.max + log_sum : Acc(0));
  put(p.lse_low, n, read ? lost_in_difference(stats.max, -log_sum) : Acc(0));
  put(p.mean, n, read ? stats.max + stats.entropy_dot / stats.sum : Acc(0));
}

// What a row's gradient takes from its outputs.
template <class Acc>
struct RowCosts {
  Acc lse, mass;
};

// The outputs of a row that counts, but for its prediction. `at_index` is the target's logit, `vocab` how many columns
// a whole row has.
template <class T>
RowCosts<AccOf<T>> put_kept(const RowForward& p, int64_t n, const RowStats<AccOf<T>>& stats, const Target<T>& target,
                            AccOf<T> at_index, int64_t vocab) {
  using Acc = AccOf<T>;
  const auto* scales = static_cast<const Acc*>(p.scales);
  const Acc log_sum = std::log(stats.sum), lse = stats.max + log_sum;
  const Acc mass = target.dense ? stats.mass + target.at_index : target.at_index + target.uniform * Acc(vocab);
  Acc ce = mass * log_sum - (target.dense ? stats.target_dot : Acc(0));
  if (!target.dense && target.uniform != Acc(0)) ce -= target.uniform * stats.shifted;
  if (target.index >= 0 && target.at_index != Acc(0)) ce -= target.at_index * (at_index - stats.max);
  const Acc z_term = p.z_loss != 0 ? static_cast<Acc>(p.z_loss) * lse * lse : Acc(0);
  const Acc ce_scale = scales != nullptr ? scales[0] : Acc(1), z_scale = scales != nullptr ? scales[1] : Acc(1);
  put(p.loss, n, target.token_weight * (ce_scale * ce + (p.z_loss != 0 ? z_scale * z_term : Acc(0))));
  put(p.lse, n, lse);
  put(p.lse_low, n, lost_in_difference(stats.max, -log_sum));
  put(p.mass, n, mass);
  put(p.z_loss_term, n, z_term);
  put(p.token_log_prob, n, (at_index - stats.max) - log_sum);
  const Acc mean = stats.entropy_dot / stats.sum;
  put(p.entropy, n, log_sum - mean);
  put(p.entropy_low, n, lost_in_difference(log_sum, mean));
  put(p.mean, n, stats.max + mean);
  put(p.variance, n, stats.square_dot / stats.sum - mean * mean);
  put(p.slope, n, ce - mass * (log_sum - mean));
  return {lse, mass};
}

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
