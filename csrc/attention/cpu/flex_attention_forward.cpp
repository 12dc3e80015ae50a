// The forward of flex_attention: online softmax over tiles of scores.
#include <algorithm>
#include <cmath>

#include "attention/cpu/flex_attention.h"
#include "common/capability.h"

namespace fusegrad::cpu {

template <>
const AttentionKernels<float>& attention_kernels<float>() {
  static const auto& chosen =
      for_this_machine(DEFAULT::kAttentionFloat, AVX2::kAttentionFloat, AVX512::kAttentionFloat);
  return chosen;
}

template <>
const AttentionKernels<double>& attention_kernels<double>() {
  static const auto& chosen =
      for_this_machine(DEFAULT::kAttentionDouble, AVX2::kAttentionDouble, AVX512::kAttentionDouble);
  return chosen;
}

// Philox4x32-10 of the head's number, its key the seed.
HeadDropout head_dropout(const FlexDropoutRule& rule, uint64_t seed, int64_t head) {
  uint32_t word[4] = {static_cast<uint32_t>(head)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * word[0], b = uint64_t{0xCD9E8D57} * word[2];
    word[0] = static_cast<uint32_t>(b >> 32) ^ word[1] ^ key[0];
    word[1] = static_cast<uint32_t>(b);
    word[2] = static_cast<uint32_t>(a >> 32) ^ word[3] ^ key[1];
    word[3] = static_cast<uint32_t>(a);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return {{word[0], word[1]},
          static_cast<uint32_t>(rule.threshold >> 32),
          static_cast<uint32_t>(rule.threshold),
          rule.scale};
}

void attention_dropout_mask(const Host& host, uint64_t seed, double p, int64_t heads, int64_t first, int64_t queries,
                            int64_t keys, bool* mask) {
  const FlexDropoutRule rule(p);
  parallel_for(host, heads, 1, [&](int64_t begin, int64_t end) {
    constexpr int64_t kRows = 16;
    const Scratch<float> factor(kRows * keys);
    for (int64_t head = begin; head < end; ++head) {
      const HeadDropout dropout = head_dropout(rule, seed, head);
      for (int64_t q = 0; q < queries; q += kRows) {
        const int64_t height = std::min(kRows, queries - q);
        attention_kernels<float>().dropout(factor.data(), keys, dropout, first + q, 0, height, keys);
        std::transform(factor.data(), factor.data() + height * keys, mask + (head * queries + q) * keys,
                       [](float f) { return f != 0; });
      }
    }
  });
}

namespace {

// A packed tile of keys serves so many queries, unless there would be too few tasks for the threads.
constexpr int64_t kMostRows = 256;

// Rows of a head that one task computes.
template <class T>
int64_t rows_of_a_task(const FlexProblem<T>& p) {
  int64_t rows = kMostRows;
  const int64_t heads = p.batches * p.heads;
  while (rows > kTileRows && heads * ceil_div(p.queries, rows) < 4 * threads(p.host)) rows /= 2;
  return std::min(rows, round_up(p.queries, kTileRows));
}

// Whether the query heads of a key head are one task: they have few queries, for which packing keys and values would be
// most of the work, and all keys, and there are tasks enough for the threads.
template <class T>
bool takes_groups(const FlexProblem<T>& p) {
  return p.all_pairs && p.group() > 1 && p.group() * p.queries <= kTileRows &&
         p.batches * p.key_heads >= threads(p.host);
}

// One thread's memory and evaluators.
template <class T>
class Worker {
 public:
  Worker(const FlexProblem<T>& problem, const FlexResults& results, int64_t rows)
      : p_(problem),
        out_(results.out),
        lse_(static_cast<T*>(results.lse)),
        max_(static_cast<T*>(results.max_scores)),
        ties_(static_cast<T*>(results.max_ties)),
        lse_low_(static_cast<T*>(results.lse_low)),
        out_low_(results.out_low.data != nullptr ? std::optional<HeadView>(results.out_low) : std::nullopt),
        query_(rows * p_.head_size),
        key_(kTileCols * p_.head_size + p_.kernels.panel * p_.head_size),
        value_(kTileCols * p_.padded_value()),
        score_(kTileRows * kScoreStride),
        sum_of_values_(rows * p_.padded_value()),
        row_max_(rows),
        row_sum_(rows),
        row_ties_(rows),
        masker_(p_.blocks, p_.mask(), kTileRows, kTileCols, p_.kernels.terms) {
    if (p_.score_program) evaluator_.emplace(*p_.score_program, kTileRows, kTileCols);
    if (p_.keeps_pairs(kTileCols) && !takes_groups(p_)) evaluator_->keep();
    if (p_.dropout) dropout_ = Scratch<T>(kTileRows * kScoreStride);
  }

  /// The queries of so many heads of one key head, from h on: of several all queries and keys, in one tile of rows.
  void run(int64_t b, int64_t h, int64_t heads, Range queries) {
    const auto& kernels = p_.kernels;
    const int64_t values = p_.padded_value(), rows = heads * queries.size();
    std::fill_n(sum_of_values_.data(), rows * values, T(0));
    std::fill_n(row_max_.data(), rows, -std::numeric_limits<T>::infinity());
    std::fill_n(row_sum_.data(), rows, T(0));
    std::fill_n(row_ties_.data(), rows, T(0));
    for (int64_t i = 0; i < heads; ++i) {
      kernels.pack_rows(query_.data() + i * queries.size() * p_.head_size, p_.head_size,
                        p_.query.at(b, h + i, queries.begin), queries.size(), p_.head_size, p_.scale);
    }
    const int64_t key_head = h / p_.group();
    for (const Range keys : p_.blocks.keys_of(b, h, queries, kTileCols, p_.kernels.terms)) {
      kernels.pack_transposed(key_.data(), p_.key.at(b, key_head, keys.begin), keys.size(), p_.head_size);
      kernels.pack_panels(value_.data(), p_.value.at(b, key_head, keys.begin), keys.size(), p_.value_size, T(1));
      for (int64_t q = queries.begin; q < queries.end; q += kTileRows) {
        tile(b, h, heads, {q, std::min(q + kTileRows, queries.end)}, q - queries.begin, keys);
      }
    }
    for (int64_t i = 0; i < heads; ++i) finish(b, h + i, i * queries.size(), queries);
  }

 private:
  // Rows of scores do not begin at a multiple of the cache's way size.
  static constexpr int64_t kScoreStride = kTileCols + 16;

  // `row`: of the rows in the task.
  void tile(int64_t b, int64_t h, int64_t heads, Range queries, int64_t row, Range keys) {
    const auto& kernels = p_.kernels;
    const TileMask mask = masker_.mask(b, h, queries, keys);
    if (mask.begin == mask.end) return;
    const int64_t cols = mask.end - mask.begin, rows = heads * queries.size();
    const int64_t values = p_.padded_value();
    kernels.multiply(rows, cols, p_.head_size, query_.data() + row * p_.head_size, p_.head_size, 1,
                     key_.data() + mask.begin * p_.head_size, kernels.panel * p_.head_size, score_.data(), kScoreStride,
                     false);
    for (int64_t i = 0; evaluator_ && i < heads; ++i) {
      T* score = score_.data() + i * queries.size() * kScoreStride;
      const bool in_range =
          evaluator_->score_mod({b, h + i, queries.begin, keys.begin + mask.begin, queries.size(), cols},
                                {score, kScoreStride}, {mask.bytes, mask.stride}, {score, kScoreStride});
      FUSEGRAD_CHECK(IndexError, in_range, "flex_attention: score_mod: ", evaluator_->out_of_range().message());
    }
    T* out = sum_of_values_.data() + row * values;
    kernels.softmax({score_.data(), kScoreStride, mask.bytes, mask.stride, rows, cols},
                    {row_max_.data() + row, row_sum_.data() + row, ties_ != nullptr ? row_ties_.data() + row : nullptr,
                     out, values, p_.value_size});
    for (int64_t i = 0; p_.dropout && i < heads; ++i) {
      T* score = score_.data() + i * queries.size() * kScoreStride;
      kernels.dropout(dropout_.data(), kScoreStride, p_.dropout_of(b, h + i), queries.begin, keys.begin + mask.begin,
                      queries.size(), cols);
      kernels.drop(score, score, dropout_.data(), kScoreStride, queries.size(), cols);
    }
    kernels.multiply(rows, p_.value_size, cols, score_.data(), kScoreStride, 1,
                     value_.data() + mask.begin * kernels.panel, keys.size() * kernels.panel, out, values, true);
  }

  // `row`: the first one of the head in the task.
  void finish(int64_t b, int64_t h, int64_t row, Range queries) {
    const int64_t first = (b * p_.heads + h) * p_.queries + queries.begin;
    for (int64_t r = 0; r < queries.size(); ++r) {
      const T sum = row_sum_.data()[row + r], max = row_max_.data()[row + r];
      const bool none = max == -std::numeric_limits<T>::infinity();
      put_lse(max, sum, lse_ + first + r, lse_low_ != nullptr ? lse_low_ + first + r : nullptr);
      if (max_ != nullptr) {
        max_[first + r] = max;
        ties_[first + r] = row_ties_.data()[row + r];
      }
      row_sum_.data()[row + r] = none ? T(0) : T(1) / sum;
    }
    const T* sums = sum_of_values_.data() + row * p_.padded_value();
    p_.kernels.unpack(out_.at(b, h, queries.begin), sums, p_.padded_value(), queries.size(), p_.value_size,
                      row_sum_.data() + row, T(1));
    if (out_low_) {
      p_.kernels.unpack_low(out_low_->at(b, h, queries.begin), out_.at(b, h, queries.begin), sums, p_.padded_value(),
                            queries.size(), p_.value_size, row_sum_.data() + row);
    }
  }

  const FlexProblem<T>& p_;
  const HeadView out_;
  T *lse_, *max_, *ties_, *lse_low_;
  const std::optional<HeadView> out_low_;
  Scratch<T> query_, key_, value_, score_, sum_of_values_, row_max_, row_sum_, row_ties_, dropout_;
  TileMasker masker_;
  std::optional<score_mod::TileEvaluator<T>> evaluator_;
};

template <class T>
void run(const FlexProblem<T>& problem, const FlexResults& results) {
  if (takes_groups(problem)) {
    const int64_t group = problem.group();
    share_tasks(problem.host, problem.batches * problem.key_heads, [&](const auto& next) {
      Worker<T> worker(problem, results, group * problem.queries);
      while (const auto task = next()) {
        worker.run(*task / problem.key_heads, *task % problem.key_heads * group, group, {0, problem.queries});
      }
    });
    return;
  }
  const int64_t heads = problem.batches * problem.heads, rows = rows_of_a_task(problem);
  const int64_t row_tasks = ceil_div(problem.queries, rows);
  share_tasks(problem.host, heads * row_tasks, [&](const auto& next) {
    Worker<T> worker(problem, results, rows);
    while (const auto task = next()) {
      // The last queries first: under a causal mask they have the most keys.
      const int64_t head = *task % heads, begin = (row_tasks - 1 - *task / heads) * rows;
      const Range queries{begin, std::min(begin + rows, problem.queries)};
      if (problem.keeps_pairs(kTileCols)) {
        worker.run(head % problem.batches, head / problem.batches, 1, queries);
      } else {
        worker.run(head / problem.heads, head % problem.heads, 1, queries);
      }
    }
  });
}

template <class T>
void merge_heads(const Host& host, const FlexMergeCall& c) {
  const auto& kernels = attention_kernels<T>();
  const HeadView out(c.out), low(c.out_low), more(c.more), more_low(c.more_low);
  const int64_t heads = c.out.sizes[1], queries = c.out.sizes[2], tiles = ceil_div(queries, kTileRows);
  parallel_for(host, c.out.sizes[0] * heads * tiles, 1, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      const int64_t head = i / tiles, b = head / heads, h = head % heads, row = i % tiles * kTileRows;
      const int64_t at = head * queries + row;
      kernels.merge(out.at(b, h, row), low.at(b, h, row), more.at(b, h, row), more_low.at(b, h, row),
                    static_cast<const T*>(c.weight) + at, static_cast<const T*>(c.more_weight) + at,
                    std::min(kTileRows, queries - row), c.out.sizes[3]);
    }
  });
}

}  // namespace

void attention_merge(const Host& host, const FlexMergeCall& call) {
  if (call.out.dtype == DType::kFloat64) {
    merge_heads<double>(host, call);
  } else {
    merge_heads<float>(host, call);
  }
}

void attention_forward(const Host& host, const FlexArguments& arguments, const FlexResults& results) {
  if (arguments.query.dtype == DType::kFloat64) {
    run(FlexProblem<double>(host, arguments), results);
  } else {
    run(FlexProblem<float>(host, arguments), results);
  }
}

}  // namespace fusegrad::cpu
