// Block masks: of each block of queries by keys whether no pair takes part, some, or all; and the lists of them that
// PyTorch's BlockMask has. On the CPU; cuda/attention/mask/block_states.h is the GPU's.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "common/division.h"
#include "common/host.h"
#include "score_mod/block_bounds.h"

namespace fusegrad {

enum class BlockState : uint8_t { kNone, kPartial, kFull };

/// A mask_mod with what it captures, and with its bounds, whose buffers and scalars are theirs.
struct BlockMaskProgram {
  const score_mod::Graph& mask_mod;
  const score_mod::BlockBounds& bounds;
  std::span<const score_mod::Buffer> buffers, bounds_buffers;
  std::span<const score_mod::Value> scalars, bounds_scalars;
  std::array<int64_t, 2> block_size{}, lengths{};  ///< of queries and of keys
  int64_t batches = 1, heads = 1;

  int64_t rows() const { return ceil_div(lengths[0], block_size[0]); }
  int64_t cols() const { return ceil_div(lengths[1], block_size[1]); }
};

/// For each row of blocks how many are listed, and all columns: the listed ones first, each part ascending. [.., rows]
/// and [.., rows, columns].
struct BlockList {
  int32_t *count, *index;
};

namespace cpu {

/// states[batches, heads, rows, cols]. A block that ends beyond the queries or keys is never full, as in PyTorch.
/// Returns what a pair read out of range, or nothing.
std::string block_states(const Host& host, const BlockMaskProgram& program, BlockState* states);

/// The lists of the blocks in that state of states[heads, rows, cols], by rows; by columns where `by_column`.
void block_list(const Host& host, const BlockState* states, int64_t heads, int64_t rows, int64_t cols, bool by_column,
                BlockState state, const BlockList& list);

}  // namespace cpu
}  // namespace fusegrad
