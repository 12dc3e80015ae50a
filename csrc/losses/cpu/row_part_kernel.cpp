// The states of segments of rows, and a row's outputs from those of all. This file is compiled once per instruction
// set, with CPU_CAPABILITY set: keep library templates and inline functions of other headers out.
#include "losses/cpu/row_range.h"
#include "losses/cpu/row_stats.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

template <class Acc>
constexpr Acc kNothing = -std::numeric_limits<Acc>::infinity();

// A sum over columns that are all -inf has no finite m to count from: its exponentials are 0, and what is linear in z
// is -inf where a coefficient is not 0.
template <class T>
RowStats<AccOf<T>> stats_of(const T* row, int64_t column, int64_t cols, const Transform<AccOf<T>>& transform,
                            const Target<T>& target, Moments moments) {
  using Acc = AccOf<T>;
  RowStats<Acc> stats;
  stats.max = kNothing<Acc>;
  if (cols == 0) return stats;
  const auto found = row_stats(row, column, cols, transform, target, moments);
  if (found.max != kNothing<Acc>) return found;
  stats.mass = found.mass;
  stats.target_dot = found.mass != Acc(0) ? kNothing<Acc> : Acc(0);
  stats.shifted = kNothing<Acc>;
  return stats;
}

// The sums of a and then b, and of their columns, `a_cols` and `b_cols`.
template <class Acc>
RowStats<Acc> pair(const RowStats<Acc>& a, int64_t a_cols, const RowStats<Acc>& b, int64_t b_cols) {
  RowStats<Acc> both;
  // NaN stays.
  both.max = a.max >= b.max || a.max != a.max ? a.max : b.max;
  const auto add = [&](const RowStats<Acc>& s, int64_t cols) {
    both.mass += s.mass;
    if (s.max == kNothing<Acc>) {
      both.target_dot += s.target_dot;
      both.shifted += s.shifted;
      return;
    }
    const Acc away = s.max - both.max, factor = std::exp(away);
    both.sum += factor * s.sum;
    both.entropy_dot += factor != Acc(0) ? factor * (s.entropy_dot + away * s.sum) : Acc(0);
    both.square_dot +=
        factor != Acc(0) ? factor * (s.square_dot + away * (Acc(2) * s.entropy_dot + away * s.sum)) : Acc(0);
    both.target_dot += s.mass != Acc(0) ? s.target_dot + away * s.mass : s.target_dot;
    both.shifted += s.shifted + away * static_cast<Acc>(cols);
  };
  add(a, a_cols);
  add(b, b_cols);
  return both;
}

// What a segment of a row leaves behind.
template <class Acc>
struct State {
  RowStats<Acc> stats;
  Acc at_index = 0;  // the target's logit, where it is one of the columns
  Acc best = kNothing<Acc>, best_column = 0;
};
static_assert(sizeof(State<float>) == kRowStates * sizeof(float));
static_assert(sizeof(State<double>) == kRowStates * sizeof(double));

template <class T>
void part_rows(const RowPart& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  const Transform<Acc> common(p.transform);
  const auto wanted = p.variance != nullptr  ? Moments::kSecond
                      : p.entropy != nullptr ? Moments::kFirst
                                             : Moments::kNone;
  for (int64_t n = begin; n < end; ++n) {
    const Target<T> target(p.targets, n, p.vocab);
    const auto transform = of_row(common, p.row_scale, n);
    const auto moments = target.kept ? wanted : p.mean != nullptr ? Moments::kFirst : Moments::kNone;
    for (int64_t s = 0; s < p.segments; ++s) {
      const int64_t first = s * p.segment < p.cols ? s * p.segment : p.cols;
      const int64_t cols = p.segment < p.cols - first ? p.segment : p.cols - first;
      const int64_t column = p.col_offset + first;
      const T* row = static_cast<const T*>(p.logits) + n * p.logits_stride + first;
      State<Acc> state;
      if (target.kept || p.lse_of_ignored) state.stats = stats_of(row, column, cols, transform, target, moments);
      if (target.kept && target.index >= column && target.index < column + cols) {
        state.at_index = transform.one(static_cast<Acc>(row[target.index - column]));
      }
      if (target.kept && p.predicted != nullptr && cols > 0) {
        const int64_t best = first_of_largest(row, cols, transform.scale);
        const auto x = static_cast<Acc>(row[best]);
        state.best = transform.scale >= 0 ? x : -x;
        state.best_column = static_cast<Acc>(column + best);
      }
      static_cast<State<Acc>*>(p.states)[s * p.rows + n] = state;
    }
  }
}

template <class T>
void whole_rows(const RowWhole& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  const int64_t segment = (p.vocab + kVocabSegments - 1) / kVocabSegments;
  for (int64_t n = begin; n < end; ++n) {
    const Target<T> target(p.targets, n, p.vocab);
    RowStats<Acc> sums[kVocabSegments];
    int64_t cols[kVocabSegments];
    Acc at_index = 0, best = kNothing<Acc>, best_column = 0;
    for (int64_t s = 0; s < kVocabSegments; ++s) {
      const auto& state = static_cast<const State<Acc>*>(p.states)[s * p.rows + n];
      const int64_t first = s * segment < p.vocab ? s * segment : p.vocab;
      sums[s] = state.stats;
      cols[s] = segment < p.vocab - first ? segment : p.vocab - first;
      if (target.index >= first && target.index < first + cols[s]) at_index = state.at_index;
      if (state.best > best) best = state.best, best_column = state.best_column;
    }
    for (int64_t far = 1; far < kVocabSegments; far *= 2) {
      for (int64_t s = 0; s < kVocabSegments; s += 2 * far) {
        sums[s] = pair(sums[s], cols[s], sums[s + far], cols[s + far]);
        cols[s] += cols[s + far];
      }
    }
    auto stats = sums[0];
    // As in a row of one part, where -inf less itself is NaN.
    if (stats.max == kNothing<Acc>) stats.sum = std::numeric_limits<Acc>::quiet_NaN();
    if (target.kept) {
      put_kept(p, n, stats, target, at_index, p.vocab);
      put(p.predicted, n, static_cast<int64_t>(best_column));
    } else {
      put_ignored(p, n, stats, p.lse_of_ignored);
    }
  }
}

void part(const RowPart& p, DType dtype, int64_t begin, int64_t end) {
  with_type(dtype, [&](auto zero) { part_rows<decltype(zero)>(p, begin, end); });
}
void whole(const RowWhole& p, DType dtype, int64_t begin, int64_t end) {
  with_type(dtype, [&](auto zero) { whole_rows<decltype(zero)>(p, begin, end); });
}

}  // namespace

const RowPartKernels kRowPartKernels = {part, whole};

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
