// How a kernel of flex attention is launched, as a value: its CTAs, its lists of tiles, the order of its heads and the
// boxes that TMA copies. Needs no GPU.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "cuda/attention/plan/kernel_spec.h"
#include "cuda/attention/plan/plan.h"
#include "jit/driver.h"

namespace fusegrad::cuda {

/// The sizes of a call: query [batches, heads, queries, head_size], key [key_batches, key_heads, keys, head_size],
/// value likewise with value_size.
struct FlexShape {
  int64_t batches = 0, heads = 0, queries = 0;
  int64_t key_batches = 0, key_heads = 0, keys = 0;
  int64_t head_size = 0, value_size = 0;

  bool operator==(const FlexShape&) const = default;
  int64_t query_heads() const { return batches * heads; }
  int64_t group() const { return heads / key_heads; }
};

/// The block mask of a call, without its data: [batches, heads] lists of rows, each of so many columns at most.
struct BlockMaskShape {
  std::array<int64_t, 2> block_size{};  ///< queries and keys of a block
  int64_t rows = 0, cols = 0;           ///< blocks of queries and of keys
  int64_t partial_cols = 0, full_cols = 0;
  int64_t heads = 1;    ///< 1: the lists are the same for all heads
  int64_t batches = 1;  ///< likewise

  bool operator==(const BlockMaskShape&) const = default;
};

/// The lists of tiles that a kernel walks: for each of `rows` tiles of one kind which of `cols` tiles of the other.
struct TileListPlan {
  int tile_q = 0, tile_kv = 0;
  bool by_key = false;  ///< for each tile of keys its tiles of queries
  int parts = 1;        ///< of a tile's queries, each with a kind of its own
  int64_t rows = 0, cols = 0;
  bool direct = false;  ///< from the block mask's own lists, in one kernel instead of three

  bool operator==(const TileListPlan&) const = default;
};

struct LaunchPlan {
  KernelSpec spec;
  int64_t ctas = 0;      ///< of one launch
  int64_t launches = 1;  ///< one batch of keys after the other
  int section = 1;       ///< Hopper: heads whose tiles are begun together, in the order of their place in the head
  std::optional<TileListPlan> lists = std::nullopt;
  int splits = 1;    ///< parts of the keys of a row of tiles, each a CTA's
  int together = 1;  ///< of few queries: heads whose queries are the rows of a tile
};

/// An element of the Hopper family's operands.
constexpr int64_t kHopperElementBytes = 2;

/// Raises where there would be 2^31 CTAs or more.
void check_ctas(int64_t ctas);

/// The lists that a tile needs of a block mask.
TileListPlan plan_lists(const FlexTile& tile, bool by_key, const FlexShape& shape, const BlockMaskShape& mask);

/// `mask`: without a block mask there is none. `processors`: the GPU's multiprocessors, for persistent CTAs.
/// `launches`: of a backward by keys.
LaunchPlan plan_launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                       int64_t processors, int64_t launches = 1);

// For the rooms of kernels.

/// So many heads, each of which reads so many bytes, whose tiles are begun together, so that like tiles of a mask end
/// together while what they read stays in the L2 cache.
int64_t heads_together(int64_t heads, int64_t bytes);
/// CTAs that stay with a head for many batches: so many as fit `places`, as many for each head.
LaunchPlan launch_staying(KernelSpec spec, const FlexShape& shape, int64_t places);
/// CTAs that have tiles of queries, and all keys or a split of them.
LaunchPlan launch_by_query(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                           int64_t processors, int64_t section);

/// A [batch, head, row, column] tensor of 16-bit elements; sizes and strides in elements.
struct FlexBoxes {
  std::array<int64_t, 4> sizes{}, strides{};
};
/// Boxes of `rows` rows and columns that are 128 bytes, which TMA swizzles, or 64, swizzled likewise.
jit::TensorMapShape box_map(DType dtype, const FlexBoxes& tensor, int rows, int cols = 64);
/// Boxes of `rows` numbers of 8 bytes, of `count`: device::FlexRow.
jit::TensorMapShape row_map(int64_t count, int rows);

}  // namespace fusegrad::cuda
