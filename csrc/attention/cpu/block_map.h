// Which pairs take part, by PyTorch's BlockMask: a map of the blocks, and the mask of a tile.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention/block_states.h"
#include "attention/flex_attention.h"
#include "score_mod/evaluate_cpu.h"

namespace fusegrad::cpu {

/// A range of queries or keys.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// The state of every block of every head. Without a block mask one block of the whole size is full.
class BlockMap {
 public:
  /// Raises IndexError where a listed block does not exist. `masked`: there is a mask_mod.
  BlockMap(const BlockLists& lists, bool masked, int64_t queries, int64_t keys);

  BlockState at(int64_t b, int64_t h, int64_t row, int64_t col) const {
    return states_[((b % batches_ * heads_ + h % heads_) * rows_ + row) * cols_ + col];
  }
  int64_t block_rows() const { return block_rows_; }
  int64_t block_cols() const { return block_cols_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  /// The keys that some of the queries may see, as ranges in order: one of each `tile` keys from a multiple of it on.
  /// It begins at a multiple of `step`, so that a query's keys are summed in the same order whatever other queries see.
  std::vector<Range> keys_of(int64_t b, int64_t h, Range queries, int64_t tile, int64_t step) const;

  /// How many of the pairs lie in blocks that are not excluded; block by block, so that it is quick.
  int64_t listed_pairs(int64_t b, int64_t h, Range queries, Range keys) const;

 private:
  int64_t queries_, keys_, batches_ = 1, heads_ = 1, rows_ = 1, cols_ = 1, block_rows_, block_cols_;
  std::vector<BlockState> states_;
};

/// The part of a tile's columns where pairs take part, and which do: null where all of them. `step`: the TileMasker's.
struct TileMask {
  int64_t begin = 0, end = 0;      ///< columns of the tile, begin a multiple of the step; empty: no pair takes part
  const uint8_t* bytes = nullptr;  ///< of (row, begin)
  int64_t stride = 0;
};

/// One thread's evaluator of masks.
class TileMasker {
 public:
  /// `program`: the mask_mod's, or null. `step`: a multiple of the products' panel.
  TileMasker(const BlockMap& blocks, const score_mod::MaskProgram* program, int64_t max_rows, int64_t max_cols,
             int64_t step);

  /// The result lives until the next call. Raises IndexError where the mask_mod reads out of range.
  TileMask mask(int64_t b, int64_t h, Range queries, Range keys);

 private:
  const BlockMap& blocks_;
  int64_t step_, stride_;
  std::unique_ptr<score_mod::MaskEvaluator> evaluator_;
  std::vector<uint8_t> bytes_, any_;
};

}  // namespace fusegrad::cpu
