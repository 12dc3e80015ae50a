#include "attention/cpu/block_map.h"

#include <algorithm>
#include <cstring>

#include "common/division.h"
#include "common/error.h"

namespace fusegrad::cpu {

BlockMap::BlockMap(const BlockLists& lists, bool masked, int64_t queries, int64_t keys)
    : queries_(queries),
      keys_(keys),
      block_rows_(std::max<int64_t>(queries, 1)),
      block_cols_(std::max<int64_t>(keys, 1)) {
  if (!lists) {
    states_.assign(1, BlockState::kFull);
    return;
  }
  block_rows_ = lists.block_size[0];
  block_cols_ = lists.block_size[1];
  batches_ = lists.batches;
  heads_ = lists.heads;
  rows_ = lists.rows;
  cols_ = ceil_div(keys, block_cols_);
  states_.assign(static_cast<size_t>(batches_ * heads_ * rows_ * cols_), BlockState::kNone);
  for (const BlockListView* list : {&lists.partial, &lists.full}) {
    if (list->count == nullptr) continue;
    const auto state = list == &lists.partial && masked ? BlockState::kPartial : BlockState::kFull;
    const auto* counts = list->count;
    const auto* indices = list->index;
    const int64_t listed = list->columns;
    for (int64_t row = 0; row < batches_ * heads_ * rows_; ++row) {
      FUSEGRAD_CHECK(IndexError, counts[row] >= 0 && counts[row] <= listed,
                     "flex_attention: the block mask must list 0 to ", listed, " blocks in a row, but got ",
                     counts[row]);
      for (int64_t i = 0; i < counts[row]; ++i) {
        const int64_t col = indices[row * listed + i];
        FUSEGRAD_CHECK(IndexError, col >= 0 && col < cols_,
                       "flex_attention: the block mask must list key blocks in [0, ", cols_, "), but got ", col);
        auto& at = states_[static_cast<size_t>(row * cols_ + col)];
        at = std::max(at, state);
      }
    }
  }
}

std::vector<Range> BlockMap::keys_of(int64_t b, int64_t h, Range queries, int64_t tile, int64_t step) const {
  std::vector<Range> result;
  const int64_t first = queries.begin / block_rows_, last = (queries.end - 1) / block_rows_;
  const auto seen = [&](int64_t col) {
    for (int64_t row = first; row <= last; ++row) {
      if (at(b, h, row, col) != BlockState::kNone) return true;
    }
    return false;
  };
  for (int64_t col = 0; col < cols_; ++col) {
    if (!seen(col)) continue;
    const Range block{col * block_cols_, std::min((col + 1) * block_cols_, keys_)};
    for (int64_t k = block.begin; k < block.end; k = (k / tile + 1) * tile) {
      const int64_t end = std::min((k / tile + 1) * tile, block.end);
      if (!result.empty() && result.back().begin / tile == k / tile) {
        result.back().end = end;
      } else {
        result.push_back({k / step * step, end});
      }
    }
  }
  return result;
}

int64_t BlockMap::listed_pairs(int64_t b, int64_t h, Range queries, Range keys) const {
  if (queries.size() <= 0 || keys.size() <= 0) return 0;
  int64_t pairs = 0;
  for (int64_t row = queries.begin / block_rows_; row <= (queries.end - 1) / block_rows_; ++row) {
    const int64_t height = std::min((row + 1) * block_rows_, queries.end) - std::max(row * block_rows_, queries.begin);
    for (int64_t col = keys.begin / block_cols_; col <= (keys.end - 1) / block_cols_; ++col) {
      if (at(b, h, row, col) == BlockState::kNone) continue;
      pairs += height * (std::min((col + 1) * block_cols_, keys.end) - std::max(col * block_cols_, keys.begin));
    }
  }
  return pairs;
}

TileMasker::TileMasker(const BlockMap& blocks, const score_mod::MaskProgram* program, int64_t max_rows,
                       int64_t max_cols, int64_t step)
    : blocks_(blocks), step_(step), stride_(max_cols) {
  if (program != nullptr) evaluator_ = std::make_unique<score_mod::MaskEvaluator>(*program, max_rows, max_cols);
  bytes_.resize(static_cast<size_t>(max_rows * max_cols));
  any_.resize(static_cast<size_t>(max_cols));
}

TileMask TileMasker::mask(int64_t b, int64_t h, Range queries, Range keys) {
  const int64_t block_rows = blocks_.block_rows(), block_cols = blocks_.block_cols();
  const Range rows{queries.begin / block_rows, (queries.end - 1) / block_rows + 1};
  Range cols{keys.begin / block_cols, (keys.end - 1) / block_cols + 1};
  const auto column_is = [&](int64_t col, BlockState state) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (blocks_.at(b, h, row, col) != state) return false;
    }
    return true;
  };
  while (cols.begin < cols.end && column_is(cols.begin, BlockState::kNone)) ++cols.begin;
  while (cols.begin < cols.end && column_is(cols.end - 1, BlockState::kNone)) --cols.end;
  if (cols.begin == cols.end) return {};
  TileMask result;
  result.begin = std::max<int64_t>(cols.begin * block_cols - keys.begin, 0) / step_ * step_;
  result.end = std::min(cols.end * block_cols - keys.begin, keys.size());
  bool full = result.begin + keys.begin >= cols.begin * block_cols;
  for (int64_t col = cols.begin; full && col < cols.end; ++col) full = column_is(col, BlockState::kFull);
  if (full) return result;

  // Rectangles of blocks in the same state, row of blocks by row of blocks.
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const Range q{std::max(row * block_rows, queries.begin), std::min((row + 1) * block_rows, queries.end)};
    uint8_t* first = &bytes_[static_cast<size_t>((q.begin - queries.begin) * stride_)];
    const auto fill = [&](int64_t begin, int64_t end, uint8_t value) {
      for (int64_t r = 0; r < q.size(); ++r)
        std::memset(first + r * stride_ + begin, value, static_cast<size_t>(end - begin));
    };
    fill(result.begin, result.end, 0);
    for (int64_t col = cols.begin; col < cols.end;) {
      const BlockState state = blocks_.at(b, h, row, col);
      int64_t next = col + 1;
      while (next < cols.end && blocks_.at(b, h, row, next) == state) ++next;
      const Range k{std::max(col * block_cols, keys.begin), std::min(next * block_cols, keys.end)};
      col = next;
      if (state == BlockState::kNone) continue;
      const int64_t at = k.begin - keys.begin;
      if (state == BlockState::kFull) {
        fill(at, at + k.size(), 1);
        continue;
      }
      const bool in_range = evaluator_->mask_mod({b, h, q.begin, k.begin, q.size(), k.size()}, {first + at, stride_});
      FUSEGRAD_CHECK(IndexError, in_range, "flex_attention: mask_mod: ", evaluator_->out_of_range().message());
    }
  }

  // What no row of the tile needs is cut off, and a mask that excludes nothing is none.
  std::fill(any_.begin(), any_.end(), uint8_t{0});
  uint8_t all = 1;
  for (int64_t r = 0; r < queries.size(); ++r) {
    const uint8_t* row = &bytes_[static_cast<size_t>(r * stride_)];
    uint8_t every = 1;
    for (int64_t c = result.begin; c < result.end; ++c) {
      any_[static_cast<size_t>(c)] |= row[c];
      every &= row[c];
    }
    all &= every;
  }
  if (all != 0) return result;
  const auto needed = [&](int64_t c) { return any_[static_cast<size_t>(c)] != 0; };
  while (result.begin < result.end && !needed(result.end - 1)) --result.end;
  if (result.begin == result.end) return {};
  int64_t begin = result.begin;
  while (!needed(begin)) ++begin;
  result.begin = begin / step_ * step_;
  result.bytes = bytes_.data() + result.begin;
  result.stride = stride_;
  return result;
}

}  // namespace fusegrad::cpu
