// The states of parts of rows, and a row's outputs from those of its parts. This file is compiled once per instruction
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

// Sums that wait for their pair, as in a binary counter.
template <class Acc>
class Pairs {
 public:
  void add(RowStats<Acc> stats, int64_t cols, int64_t segments) {
    while (count_ > 0 && segments_[count_ - 1] == segments) {
      --count_;
      stats = pair(stats_[count_], cols_[count_], stats, cols);
      cols += cols_[count_];
      segments *= 2;
    }
    stats_[count_] = stats;
    cols_[count_] = cols;
    segments_[count_++] = segments;
  }
  const RowStats<Acc>& sum() const { return stats_[0]; }

 private:
  static constexpr int kMost = 6;
  RowStats<Acc> stats_[kMost];
  int64_t cols_[kMost], segments_[kMost], count_ = 0;
};

// function(place, member of RowStats) for each.
template <class Acc, class Function>
void each_state(Function&& function) {
  using Stats = RowStats<Acc>;
  function(kStateMax, &Stats::max);
  function(kStateSum, &Stats::sum);
  function(kStateShifted, &Stats::shifted);
  function(kStateTargetDot, &Stats::target_dot);
  function(kStateMass, &Stats::mass);
  function(kStateEntropyDot, &Stats::entropy_dot);
  function(kStateSquareDot, &Stats::square_dot);
}

template <class T>
void part_rows(const RowPart& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  const Transform<Acc> common(p.transform);
  const auto wanted = p.variance != nullptr  ? Moments::kSecond
                      : p.entropy != nullptr ? Moments::kFirst
                                             : Moments::kNone;
  for (int64_t n = begin; n < end; ++n) {
    const T* row = static_cast<const T*>(p.logits) + n * p.logits_stride;
    auto* states = static_cast<Acc*>(p.states) + n;
    const Target<T> target(p.targets, n, p.vocab);
    const auto transform = of_row(common, p.row_scale, n);
    RowStats<Acc> stats;
    Acc at_index = 0;
    if (target.kept || p.lse_of_ignored) {
      const auto moments = target.kept ? wanted : p.mean != nullptr ? Moments::kFirst : Moments::kNone;
      Pairs<Acc> pairs;
      for (int64_t s = 0; s < p.segments; ++s) {
        const int64_t first = s * p.segment < p.cols ? s * p.segment : p.cols;
        const int64_t cols = p.segment < p.cols - first ? p.segment : p.cols - first;
        pairs.add(stats_of(row + first, p.col_offset + first, cols, transform, target, moments), cols, 1);
      }
      stats = pairs.sum();
    }
    if (target.kept) {
      const int64_t y = target.index - p.col_offset;
      if (y >= 0 && y < p.cols) at_index = transform.one(static_cast<Acc>(row[y]));
      if (p.predicted != nullptr) put(p.predicted, n, first_of_largest(row, p.cols, transform.scale));
    } else {
      put(p.predicted, n, int64_t{-1});
    }
    each_state<Acc>([&](int64_t place, auto member) { states[place * p.rows] = stats.*member; });
    states[kStateAtIndex * p.rows] = at_index;
  }
}

template <class T>
void whole_rows(const RowWhole& p, int64_t begin, int64_t end) {
  using Acc = AccOf<T>;
  const int64_t segment = (p.vocab + kVocabSegments - 1) / kVocabSegments;
  for (int64_t n = begin; n < end; ++n) {
    const Target<T> target(p.targets, n, p.vocab);
    Pairs<Acc> pairs;
    Acc at_index = 0;
    int64_t first = 0;
    for (int64_t i = 0; i < p.parts; ++i) {
      const auto* states = static_cast<const Acc*>(p.states) + i * kRowStates * p.rows + n;
      RowStats<Acc> stats;
      each_state<Acc>([&](int64_t place, auto member) { stats.*member = states[place * p.rows]; });
      const int64_t start = first * segment < p.vocab ? first * segment : p.vocab;
      first += p.segments[i];
      const int64_t stop = first * segment < p.vocab ? first * segment : p.vocab;
      if (target.index >= start && target.index < stop) at_index = states[kStateAtIndex * p.rows];
      pairs.add(stats, stop - start, p.segments[i]);
    }
    auto stats = pairs.sum();
    // As in a row of one part, where -inf less itself is NaN.
    if (stats.max == kNothing<Acc>) stats.sum = std::numeric_limits<Acc>::quiet_NaN();
    if (target.kept) {
      put_kept(p, n, stats, target, at_index, p.vocab);
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
