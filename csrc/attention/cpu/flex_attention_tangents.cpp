// Forward mode of flex_attention: the forward's pass over tiles of scores, with the tangents beside the values.
//
// For a row with scores s, weights p = exp(s - lse) and tangents ds of the scores: r = sum p ds, d lse = r,
// d out = sum p (ds v + dv) - r out. So a row has three sums relative to its largest score so far: of p v, of
// p (ds v + dv), and of p ds.
#include <algorithm>
#include <cmath>

#include "attention/cpu/flex_attention.h"

namespace fusegrad::cpu {
namespace {

template <class T>
class Worker {
 public:
  Worker(const FlexProblem<T>& problem, const FlexTangentCall& call, const score_mod::TileProgram<T>* tangent)
      : p_(problem),
        out_(call.results.out),
        out_tangent_(call.out),
        out_low_(call.results.out_low.data != nullptr ? std::optional<HeadView>(call.results.out_low) : std::nullopt),
        lse_(static_cast<T*>(call.results.lse)),
        lse_low_(static_cast<T*>(call.results.lse_low)),
        lse_tangent_(static_cast<T*>(call.lse)),
        query_(kTileRows * p_.head_size),
        key_(packed_keys()),
        value_(kTileCols * p_.padded_value()),
        score_(kTileRows * kScoreStride),
        tangent_(kTileRows * kScoreStride),
        sums_(kTileRows * stride()),
        row_max_(kTileRows),
        row_sum_(kTileRows),
        zeros_(kTileRows),
        masker_(p_.blocks, p_.mask(), kTileRows, kTileCols, p_.kernels.panel) {
    std::fill_n(zeros_.data(), kTileRows, T(0));
    if (call.query.data != nullptr) {
      query_view_.emplace(call.query);
      query_tangent_ = Scratch<T>(kTileRows * p_.head_size);
    }
    if (call.key.data != nullptr) {
      key_view_.emplace(call.key);
      key_tangent_ = Scratch<T>(packed_keys());
    }
    if (call.value.data != nullptr) {
      value_view_.emplace(call.value);
      value_tangent_ = Scratch<T>(kTileCols * p_.padded_value());
    }
    if (p_.score_program) evaluator_.emplace(*p_.score_program, kTileRows, kTileCols);
    if (tangent != nullptr) tangent_evaluator_.emplace(*tangent, kTileRows, kTileCols);
    if (p_.dropout) dropout_ = Scratch<T>(kTileRows * kScoreStride);
  }

  void run(int64_t b, int64_t h, Range queries) {
    const auto& kernels = p_.kernels;
    std::fill_n(sums_.data(), queries.size() * stride(), T(0));
    std::fill_n(row_max_.data(), queries.size(), -std::numeric_limits<T>::infinity());
    std::fill_n(row_sum_.data(), queries.size(), T(0));
    const auto pack_queries = [&](T* to, const HeadView& from) {
      kernels.pack_rows(to, p_.head_size, from.at(b, h, queries.begin), queries.size(), p_.head_size, p_.scale);
    };
    pack_queries(query_.data(), p_.query);
    if (query_view_) pack_queries(query_tangent_.data(), *query_view_);
    const int64_t key_head = h / p_.group();
    for (const Range keys : p_.blocks.keys_of(b, h, queries, kTileCols, p_.kernels.panel)) {
      const TileMask mask = masker_.mask(b, h, queries, keys);
      if (mask.begin == mask.end) continue;
      const auto pack_keys = [&](T* to, const HeadView& from) {
        kernels.pack_transposed(to, from.at(b, key_head, keys.begin), keys.size(), p_.head_size);
      };
      const auto pack_values = [&](T* to, const HeadView& from) {
        kernels.pack_panels(to, from.at(b, key_head, keys.begin), keys.size(), p_.value_size, T(1));
      };
      pack_keys(key_.data(), p_.key);
      pack_values(value_.data(), p_.value);
      if (key_view_) pack_keys(key_tangent_.data(), *key_view_);
      if (value_view_) pack_values(value_tangent_.data(), *value_view_);
      tile(b, h, queries, keys, mask);
    }
    finish(b, h, queries);
  }

 private:
  // Rows of scores do not begin at a multiple of the cache's way size.
  static constexpr int64_t kScoreStride = kTileCols + 16;

  int64_t packed_keys() const { return (kTileCols + p_.kernels.panel) * p_.head_size; }
  // A row of sums: of p v, of p (ds v + dv), and in one more column of p ds.
  int64_t first_tangent() const { return p_.padded_value(); }
  int64_t of_scores() const { return 2 * p_.padded_value(); }
  int64_t stride() const { return of_scores() + p_.kernels.panel; }

  void tile(int64_t b, int64_t h, Range queries, Range keys, const TileMask& mask) {
    const auto& kernels = p_.kernels;
    const int64_t rows = queries.size(), cols = mask.end - mask.begin;
    const auto scores = [&](T* to, const Scratch<T>& query, const Scratch<T>& key, bool accumulate) {
      kernels.multiply(rows, cols, p_.head_size, query.data(), p_.head_size, 1, key.data() + mask.begin * p_.head_size,
                       kernels.panel * p_.head_size, to, kScoreStride, accumulate);
    };
    scores(score_.data(), query_, key_, false);
    if (query_view_) scores(tangent_.data(), query_tangent_, key_, false);
    if (key_view_) scores(tangent_.data(), query_, key_tangent_, query_view_.has_value());
    if (!query_view_ && !key_view_) std::fill_n(tangent_.data(), rows * kScoreStride, T(0));
    const score_mod::Tile at{b, h, queries.begin, keys.begin + mask.begin, rows, cols};
    const score_mod::Rectangle<const uint8_t> takes_part{mask.bytes, mask.stride};
    const auto check = [](bool in_range, const score_mod::TileEvaluator<T>& evaluator) {
      FUSEGRAD_CHECK(IndexError, in_range, "flex_attention: score_mod: ", evaluator.out_of_range().message());
    };
    if (tangent_evaluator_) {
      check(tangent_evaluator_->tangent(at, {score_.data(), kScoreStride}, {tangent_.data(), kScoreStride}, takes_part,
                                        {tangent_.data(), kScoreStride}),
            *tangent_evaluator_);
    }
    if (evaluator_) {
      check(evaluator_->score_mod(at, {score_.data(), kScoreStride}, takes_part, {score_.data(), kScoreStride}),
            *evaluator_);
    }
    kernels.softmax({score_.data(), kScoreStride, mask.bytes, mask.stride, rows, cols},
                    {row_max_.data(), row_sum_.data(), nullptr, sums_.data(), stride(), stride()});
    // 0 where p is, whatever the tangent of a pair that takes no part.
    kernels.score_gradient(tangent_.data(), score_.data(), kScoreStride, rows, cols, zeros_.data());
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = tangent_.data() + r * kScoreStride;
      double sum = 0;
      for (int64_t c = 0; c < cols; ++c) sum += static_cast<double>(x[c]);
      sums_.data()[r * stride() + of_scores()] += static_cast<T>(sum);
    }
    if (p_.dropout) {
      kernels.dropout(dropout_.data(), kScoreStride, p_.dropout_of(b, h), queries.begin, keys.begin + mask.begin, rows,
                      cols);
      for (T* x : {score_.data(), tangent_.data()}) kernels.drop(x, x, dropout_.data(), kScoreStride, rows, cols);
    }
    const auto add = [&](int64_t to, const Scratch<T>& weights, const Scratch<T>& values) {
      kernels.multiply(rows, p_.value_size, cols, weights.data(), kScoreStride, 1,
                       values.data() + mask.begin * kernels.panel, keys.size() * kernels.panel, sums_.data() + to,
                       stride(), true);
    };
    add(0, score_, value_);
    add(first_tangent(), tangent_, value_);
    if (value_view_) add(first_tangent(), score_, value_tangent_);
  }

  void finish(int64_t b, int64_t h, Range queries) {
    const int64_t first = (b * p_.heads + h) * p_.queries + queries.begin;
    for (int64_t r = 0; r < queries.size(); ++r) {
      const T sum = row_sum_.data()[r], max = row_max_.data()[r];
      const bool none = max == -std::numeric_limits<T>::infinity();
      const T factor = none ? T(0) : T(1) / sum;
      T* out = sums_.data() + r * stride();
      T* tangent = out + first_tangent();
      const T of_lse = out[of_scores()] * factor;
      put_lse(max, sum, lse_ + first + r, lse_low_ != nullptr ? lse_low_ + first + r : nullptr);
      lse_tangent_[first + r] = of_lse;
      for (int64_t c = 0; c < p_.value_size; ++c) {
        out[c] *= factor;
        tangent[c] = tangent[c] * factor - of_lse * out[c];
      }
      row_sum_.data()[r] = T(1);  // by which out is divided now
    }
    const auto store = [&](const HeadView& to, int64_t from) {
      p_.kernels.unpack(to.at(b, h, queries.begin), sums_.data() + from, stride(), queries.size(), p_.value_size,
                        nullptr, T(1));
    };
    store(out_, 0);
    store(out_tangent_, first_tangent());
    if (out_low_) {
      p_.kernels.unpack_low(out_low_->at(b, h, queries.begin), out_.at(b, h, queries.begin), sums_.data(), stride(),
                            queries.size(), p_.value_size, row_sum_.data());
    }
  }

  const FlexProblem<T>& p_;
  const HeadView out_, out_tangent_;
  const std::optional<HeadView> out_low_;
  T *lse_, *lse_low_, *lse_tangent_;
  std::optional<HeadView> query_view_, key_view_, value_view_;  // of the tangents
  Scratch<T> query_, key_, value_, query_tangent_, key_tangent_, value_tangent_, score_, tangent_, sums_, row_max_,
      row_sum_, zeros_, dropout_;
  TileMasker masker_;
  std::optional<score_mod::TileEvaluator<T>> evaluator_, tangent_evaluator_;
};

template <class T>
void run(const Host& host, const FlexTangentCall& call) {
  const FlexProblem<T> problem(host, call.of);
  std::optional<score_mod::TileProgram<T>> tangent;
  if (problem.score_program) {
    tangent.emplace(*score_mod::cached_tangent(call.of.score_mod.text, call.has_tangent), problem.lengths(),
                    call.buffers, call.of.score_mod.scalars);
  }
  const int64_t heads = problem.batches * problem.heads, row_tasks = ceil_div(problem.queries, kTileRows);
  share_tasks(host, heads * row_tasks, [&](const auto& next) {
    Worker<T> worker(problem, call, tangent ? &*tangent : nullptr);
    while (const auto task = next()) {
      // The last queries first: under a causal mask they have the most keys.
      const int64_t head = *task % heads, begin = (row_tasks - 1 - *task / heads) * kTileRows;
      worker.run(head / problem.heads, head % problem.heads, {begin, std::min(begin + kTileRows, problem.queries)});
    }
  });
}

}  // namespace

void attention_tangents(const Host& host, const FlexTangentCall& call) {
  if (call.of.query.dtype == DType::kFloat64) {
    run<double>(host, call);
  } else {
    run<float>(host, call);
  }
}

}  // namespace fusegrad::cpu
