// How the linear losses cut their logits, decided by one function of the sizes and the budget.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "common/division.h"

namespace fusegrad {

struct LinearSizes {
  int64_t rows = 0;          // N
  int64_t hidden = 0;        // H
  int64_t vocab = 0;         // V
  int64_t element_size = 0;  // of the logits in memory
  bool cpu = false;
  bool weight_grad = false;           // the weight's gradient is wanted
  bool low_precision_result = false;  // more than one chunk needs a float32 accumulator beside the gradient
  int64_t logits_per_row = 1;         // so many rows of logits are held for one row: a teacher's beside the student's
  bool by_columns = true;             // gradients can be made from columns of logits that are computed again
};

struct LinearPlan {
  int64_t rows = 1;          // rows of logits that are held at a time
  int64_t columns = 0;       // 0: the gradients come from those rows. Else: the logits are computed a second time,
                             // so many columns of all rows at a time
  bool accumulator = false;  // the weight's gradient accumulates in a float32 tensor beside the result
};

constexpr int64_t kMiB = int64_t{1} << 20;

/// A budget in bytes; more than there can be is as good as the largest.
inline std::optional<int64_t> budget_bytes(std::optional<int64_t> mib) {
  if (!mib.has_value()) return std::nullopt;
  return std::min(*mib, std::numeric_limits<int64_t>::max() / kMiB) * kMiB;
}

constexpr int64_t kLogitsUnit = 16;  // bytes

/// Elements of one row of logits as the losses store it: rows start at multiples of 16 bytes, which matrix products
/// and vector loads are several times faster with.
template <class Size>
Size logits_row_elements(Size vocab, int64_t element_size) {
  const int64_t align = std::max<int64_t>(1, kLogitsUnit / element_size);
  return round_up(vocab, align);
}

/// Chunks of equal size, at most `limit` each, in multiples of `unit`.
inline int64_t balanced_chunk(int64_t total, int64_t limit, int64_t unit) {
  limit = std::max(limit, unit);
  if (total <= limit) return std::max<int64_t>(total, 1);
  const int64_t floor_limit = limit / unit * unit;
  const int64_t chunks = ceil_div(total, floor_limit);
  return std::min(round_up(ceil_div(total, chunks), unit), floor_limit);
}

/// Columns of all rows at a time where lse is known, at least 1024. Without a budget 512 MiB of logits (32 MiB on the
/// CPU).
///
/// The block's rows are as far apart as they are long. Where that is a multiple of 4 KiB, the products with the block
/// are some 4% slower on an H200 (docs/lab/linear_losses.md).
inline int64_t plan_columns(const LinearSizes& s, std::optional<int64_t> budget) {
  constexpr int64_t kUnit = 128, kLeast = 1024, kSlowBytes = 4096;
  const int64_t fallback = (s.cpu ? 32 : 512) * kMiB;
  const int64_t accumulator = 4 * s.rows * s.hidden;  // the input's gradient, float32
  const int64_t bytes = budget.has_value() ? *budget - accumulator : fallback;
  const int64_t limit = std::max(kLeast, bytes / std::max<int64_t>(1, s.rows * s.element_size));
  // The padding of a row counts too: all columns are one block only where it fits.
  const int64_t columns = logits_row_elements(s.vocab, s.element_size);
  int64_t block = balanced_chunk(columns, limit, kUnit);
  if (block < columns && block > kLeast && block * s.element_size % kSlowBytes == 0) {
    block = balanced_chunk(columns, block - kUnit, kUnit);
  }
  return std::min(s.vocab, block);
}

/// Columns of all rows whose logits are computed again, and where they lie meanwhile.
struct ColumnBlock {
  int64_t first = 0;
  int64_t count = 0;
  bool in_gradient = false;  // in the last part of the weight's gradient; else in memory of their own
};

constexpr int64_t kGradientRoomAlign = 64;  // elements: where logits begin in the weight's gradient

/// All columns, in order. Each block completes as many rows of the weight's gradient, and the rows behind them are not
/// written yet: with `use_gradient` (the gradient is a new tensor [V, H] of the logits' dtype) wide blocks lie there
/// first, for as long as they are wider than those that the budget holds. Products of a few wide blocks are faster, and
/// the input's gradient is read and written as often as there are blocks.
inline std::vector<ColumnBlock> column_blocks(const LinearSizes& s, std::optional<int64_t> budget, bool use_gradient) {
  constexpr int64_t kUnit = 128, kSlowBytes = 4096;
  std::vector<ColumnBlock> blocks;
  auto left = s;
  const auto add = [&](int64_t count, bool in_gradient) {
    blocks.push_back({s.vocab - left.vocab, count, in_gradient});
    left.vocab -= count;
  };
  while (use_gradient && s.rows > 0 && left.vocab > 0) {
    // rows * count + align <= (left - count) * hidden
    int64_t count = (left.vocab * s.hidden - kGradientRoomAlign) / (s.rows + s.hidden) / kUnit * kUnit;
    if (count * s.element_size % kSlowBytes == 0) count -= kUnit;
    if (count <= plan_columns(left, budget)) break;
    add(count, true);
  }
  const int64_t columns = plan_columns(left, budget);
  while (left.vocab > 0) add(std::min(columns, left.vocab), false);
  return blocks;
}

/// The plan of a forward that computes the gradients too.
///
/// One chunk, whose weight gradient is rounded once and needs no accumulator, where the budget holds all logits;
/// without a budget where N <= 2 H, since a float32 accumulator (4 V H bytes) would be larger than the bfloat16
/// logits that chunks save. Otherwise chunks of rows: without a budget so many that the peak stays below that of
/// one chunk (rows + H <= N), at most 8192 (4096 where no accumulator is needed; 256 on the CPU, where a chunk
/// should stay near the caches). With a teacher's logits beside them N counts twice, and chunks are at most 3072
/// (2048). A budget too small for the accumulator and 1024 rows beside it: the logits are computed twice, and the
/// gradients made from columns, where the loss can. Never less than 256 rows or 1024 columns.
inline LinearPlan plan_linear(const LinearSizes& s, std::optional<int64_t> budget) {
  const int64_t per_row = s.logits_per_row;
  const int64_t row_bytes =
      std::max<int64_t>(1, per_row * logits_row_elements(s.vocab, s.element_size) * s.element_size);
  const bool needs_accumulator = s.weight_grad && s.low_precision_result;
  const int64_t accumulator_bytes = needs_accumulator ? 4 * s.vocab * s.hidden : 0;
  const int64_t unit = s.cpu ? 64 : 256;
  if (budget.has_value()) {
    if (s.rows * row_bytes <= *budget) return {std::max<int64_t>(s.rows, 1), 0, false};
    const int64_t rows = (*budget - accumulator_bytes) / row_bytes;
    if (s.by_columns && needs_accumulator && rows < std::min<int64_t>(1024, s.rows)) {
      return {balanced_chunk(s.rows, *budget / row_bytes, unit), plan_columns(s, budget), false};
    }
    const int64_t chunk = balanced_chunk(s.rows, rows, unit);
    return {chunk, 0, needs_accumulator && chunk < s.rows};
  }
  if (s.cpu) {
    const int64_t rows = balanced_chunk(s.rows, std::max<int64_t>(64, 32 * kMiB / row_bytes), unit);
    return {rows, 0, needs_accumulator && rows < s.rows};
  }
  if (!needs_accumulator) return {balanced_chunk(s.rows, 4096 / per_row, unit), 0, false};
  if (s.rows * per_row <= 2 * s.hidden) return {std::max<int64_t>(s.rows, 1), 0, false};
  const int64_t most = per_row == 1 ? 8192 : 6144 / per_row;
  const int64_t rows = balanced_chunk(s.rows, std::min(most, s.rows - s.hidden / per_row), unit);
  return {rows, 0, rows < s.rows};
}

}  // namespace fusegrad
