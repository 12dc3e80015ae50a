// Properties of the chunk policy of the linear losses, over a grid of sizes and budgets.
#include <gtest/gtest.h>

#include <functional>
#include <ostream>

#include "losses/linear_plan.h"

namespace fusegrad {

void PrintTo(const LinearPlan& plan, std::ostream* out) {
  *out << "{rows " << plan.rows << ", columns " << plan.columns << ", accumulator " << plan.accumulator << "}";
}

namespace {

using Budget = std::optional<int64_t>;

int64_t row_bytes(const LinearSizes& s) {
  return s.logits_per_row * logits_row_elements(s.vocab, s.element_size) * s.element_size;
}

int64_t accumulator_bytes(const LinearSizes& s, bool accumulator) { return accumulator ? 4 * s.vocab * s.hidden : 0; }

/// What the pass over rows holds above the gradients themselves.
int64_t row_pass_bytes(const LinearSizes& s, const LinearPlan& plan) {
  return plan.rows * row_bytes(s) + accumulator_bytes(s, plan.accumulator);
}

/// What the pass over columns holds: logits of all rows, and the input's gradient in float32.
int64_t column_pass_bytes(const LinearSizes& s, int64_t columns) {
  return s.rows * logits_row_elements(std::min(columns, s.vocab), s.element_size) * s.element_size +
         4 * s.rows * s.hidden;
}

int64_t minimum_rows(const LinearSizes& s) { return s.cpu ? 64 : 256; }

void for_each_size(const std::function<void(const LinearSizes&)>& check) {
  for (const int64_t rows : {0, 1, 63, 257, 1000, 4096, 8192, 16384, 100003}) {
    for (const int64_t hidden : {1, 64, 2304, 4096}) {
      for (const int64_t vocab : {1, 1000, 32000, 50257, 128256, 256000}) {
        for (const int64_t element_size : {2, 4, 8}) {
          for (int flags = 0; flags < 16; ++flags) {
            LinearSizes s{rows, hidden, vocab, element_size, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
            if ((flags & 8) != 0) {  // a divergence from a dense teacher
              s.logits_per_row = 2;
              s.by_columns = false;
            }
            SCOPED_TRACE(::testing::Message()
                         << "N " << rows << ", H " << hidden << ", V " << vocab << ", bytes " << element_size
                         << (s.cpu ? ", CPU" : "") << (s.weight_grad ? ", weight_grad" : "")
                         << (s.low_precision_result ? ", low_precision_result" : "") << ", logits "
                         << s.logits_per_row);
            check(s);
            if (::testing::Test::HasFailure()) return;  // one failing size says enough
          }
        }
      }
    }
  }
}

/// Budgets around everything that the policy compares with.
std::vector<int64_t> budgets(const LinearSizes& s) {
  const int64_t accumulator = 4 * s.vocab * s.hidden, logits = s.rows * row_bytes(s);
  std::vector<int64_t> result{0, kMiB, 16 * kMiB, 100 * kMiB, 1000 * kMiB, int64_t{1} << 60};
  for (const int64_t edge : {logits, accumulator, accumulator + 1024 * row_bytes(s), accumulator + logits,
                             4 * s.rows * s.hidden + s.rows * s.vocab * s.element_size}) {
    for (const int64_t step : {-1, 0, 1}) result.push_back(std::max<int64_t>(0, edge + step));
  }
  std::sort(result.begin(), result.end());
  return result;
}

TEST(LinearPlan, BudgetIsKeptDownToTheSmallestChunk) {
  for_each_size([](const LinearSizes& s) {
    for (const int64_t budget : budgets(s)) {
      const auto plan = plan_linear(s, budget);
      if (plan.rows > std::min(minimum_rows(s), s.rows)) {
        EXPECT_LE(row_pass_bytes(s, plan), std::max(budget, row_bytes(s))) << ::testing::PrintToString(plan);
      }
      for (const int64_t columns : {plan.columns, plan_columns(s, budget)}) {
        if (columns > std::min<int64_t>(1024, s.vocab)) {
          EXPECT_LE(column_pass_bytes(s, columns), budget) << columns << " columns, budget " << budget;
        }
      }
    }
  });
}

TEST(LinearPlan, OneChunkWhereTheBudgetHoldsAllLogits) {
  for_each_size([](const LinearSizes& s) {
    const auto plan = plan_linear(s, s.rows * row_bytes(s));
    EXPECT_EQ(plan.rows, std::max<int64_t>(1, s.rows));
    EXPECT_EQ(plan.columns, 0);
    EXPECT_FALSE(plan.accumulator);
  });
}

TEST(LinearPlan, WithoutABudgetFewRowsAreOneChunk) {
  for_each_size([](const LinearSizes& s) {
    if (s.cpu || !s.weight_grad || !s.low_precision_result || s.rows * s.logits_per_row > 2 * s.hidden) return;
    const auto plan = plan_linear(s, std::nullopt);
    EXPECT_EQ(plan.rows, std::max<int64_t>(1, s.rows));
    EXPECT_FALSE(plan.accumulator);
  });
}

// The weight's gradient counts here: beside one chunk it lies there all along, while the accumulator is
// rounded into it when the logits are gone.
TEST(LinearPlan, WithoutABudgetThePeakIsAtMostThatOfOneChunk) {
  for_each_size([](const LinearSizes& s) {
    if (s.cpu || s.element_size != 2) return;
    const auto plan = plan_linear(s, std::nullopt);
    EXPECT_EQ(plan.columns, 0);
    if (plan.rows <= minimum_rows(s)) return;
    const int64_t result = s.weight_grad ? 2 * s.vocab * s.hidden : 0;
    const int64_t one_chunk = s.rows * row_bytes(s) + result;
    const int64_t chunks =
        plan.accumulator ? std::max(row_pass_bytes(s, plan), 3 * result) : row_pass_bytes(s, plan) + result;
    EXPECT_LE(chunks, one_chunk) << ::testing::PrintToString(plan);
  });
}

TEST(LinearPlan, AccumulatorOnlyForSeveralChunksOfALowPrecisionWeight) {
  for_each_size([](const LinearSizes& s) {
    auto all = std::vector<Budget>{std::nullopt};
    for (const int64_t budget : budgets(s)) all.emplace_back(budget);
    for (const auto& budget : all) {
      const auto plan = plan_linear(s, budget);
      const bool several = plan.rows < s.rows && plan.columns == 0;
      EXPECT_EQ(plan.accumulator, several && s.weight_grad && s.low_precision_result) << ::testing::PrintToString(plan);
    }
  });
}

TEST(LinearPlan, ChunksAreEvenAndCoverEverything) {
  for (const int64_t total : {0, 1, 63, 64, 65, 1000, 8192, 8193, 128256, 1000003}) {
    for (const int64_t unit : {1, 64, 256, 1024}) {
      for (const int64_t limit : {-5, 0, 1, 64, 255, 256, 257, 4000, 8192, 2000000}) {
        const int64_t chunk = balanced_chunk(total, limit, unit);
        SCOPED_TRACE(::testing::Message()
                     << total << " in chunks of " << chunk << ", limit " << limit << ", unit " << unit);
        ASSERT_GE(chunk, 1);
        EXPECT_LE(chunk, std::max({limit, unit, int64_t{1}}));
        EXPECT_TRUE(chunk % unit == 0 || chunk >= total);
        const int64_t chunks = (total + chunk - 1) / chunk;
        // No more chunks than the limit asks for, and no full unit missing from the last.
        const int64_t largest = std::max(limit, unit) / unit * unit;
        EXPECT_LE(chunks, std::max<int64_t>(1, (total + largest - 1) / largest));
        EXPECT_LE(chunk, std::max<int64_t>(1, total / std::max<int64_t>(1, chunks) + unit));
      }
    }
  }
}

// More budget: from columns to rows to one chunk, and never smaller ones on the way.
TEST(LinearPlan, MonotoneInTheBudget) {
  for_each_size([](const LinearSizes& s) {
    int64_t columns = 0;
    LinearPlan last;
    int last_kind = 0;
    for (const int64_t budget : budgets(s)) {
      EXPECT_GE(plan_columns(s, budget), columns);
      columns = plan_columns(s, budget);
      const auto plan = plan_linear(s, budget);
      const int kind = plan.columns != 0 ? 0 : plan.rows < s.rows ? 1 : 2;
      EXPECT_GE(kind, last_kind) << "budget " << budget;
      if (kind == last_kind) {
        EXPECT_GE(plan.rows, last.rows) << "budget " << budget;
        EXPECT_GE(plan.columns, last.columns) << "budget " << budget;
      }
      last = plan;
      last_kind = kind;
    }
  });
}

TEST(LinearPlan, BlocksOfColumnsCoverAllAndFitWhereTheyLie) {
  for_each_size([](const LinearSizes& s) {
    for (const auto& budget : {Budget(std::nullopt), Budget(0), Budget(16 * kMiB), Budget(265 * kMiB)}) {
      for (const bool use_gradient : {false, true}) {
        int64_t done = 0;
        bool own = !use_gradient;
        const int64_t widest = plan_columns(s, budget);
        for (const auto& block : column_blocks(s, budget, use_gradient)) {
          ASSERT_EQ(block.first, done);
          ASSERT_GT(block.count, 0);
          done += block.count;
          if (block.in_gradient) {
            EXPECT_FALSE(own) << "memory of its own is for the last blocks";
            const int64_t stride = logits_row_elements(block.count, s.element_size);
            EXPECT_LE(s.rows * stride + kGradientRoomAlign, (s.vocab - done) * s.hidden);
            EXPECT_GT(2 * block.count, std::min(widest, s.vocab - block.first));
          } else {
            own = true;
            if (budget && block.count > 1024) EXPECT_LE(column_pass_bytes(s, block.count), *budget);
          }
        }
        EXPECT_EQ(done, s.vocab);
      }
    }
  });
}

TEST(LinearPlan, BudgetsInBytes) {
  EXPECT_EQ(budget_bytes(std::nullopt), std::nullopt);
  EXPECT_EQ(budget_bytes(3), 3 * kMiB);
  EXPECT_GT(budget_bytes(std::numeric_limits<int64_t>::max()), int64_t{1} << 62);
}

TEST(LinearPlan, TheBenchmarkedSizes) {
  // rows, hidden, vocab, element_size, cpu, weight_grad, low_precision_result
  const LinearSizes llama{8192, 4096, 128256, 2, false, true, true};
  EXPECT_EQ(plan_linear(llama, std::nullopt).rows, 8192);
  EXPECT_FALSE(plan_linear(llama, std::nullopt).accumulator);
  LinearSizes lean = llama;
  lean.low_precision_result = false;
  EXPECT_EQ(plan_linear(lean, std::nullopt).rows, 4096);
  const LinearSizes gemma{8192, 2304, 256000, 2, false, true, true};
  EXPECT_TRUE(plan_linear(gemma, std::nullopt).accumulator);
  EXPECT_EQ(plan_linear(llama, 100 * kMiB).columns, 1024);
  EXPECT_EQ(column_blocks(llama, 265 * kMiB, false).size(), 15);
  EXPECT_LE(column_blocks(llama, 265 * kMiB, true).size(), 7);

  LinearSizes distilled{8192, 2048, 128256, 2, false, true, true, 2, false};
  const auto plan = plan_linear(distilled, std::nullopt);
  EXPECT_GE(plan.rows, 2048);
  EXPECT_LE(row_pass_bytes(distilled, plan), 2500 * kMiB);
  distilled.low_precision_result = false;
  EXPECT_EQ(plan_linear(distilled, 1100 * kMiB).rows, 2048);
}

}  // namespace
}  // namespace fusegrad
