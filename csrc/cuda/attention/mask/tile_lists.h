// Makes the lists of tiles that flex attention's kernels walk, from a block mask. Compiled ahead of time.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::cuda {

/// The lists of a block mask as PyTorch has them: [batches, heads, rows] and [batches, heads, rows, cols].
struct FlexBlockList {
  const int *count, *index;
};

/// blocks[batches, heads, rows, cols] (device::FlexBlock), zeros before. A block that is not below `cols` makes its row
/// begin with kBlockBad.
struct FlexBlockMap {
  FlexBlockList partial, full;  // full.count may be null
  int batches, heads, rows, cols;
  int list_cols_partial, list_cols_full;
  bool distinguish;  // false: partial blocks count as full, since there is no mask_mod
};
void flex_block_map(const FlexBlockMap& map, unsigned char* blocks, void* stream);

/// Lists of tiles of `tile_q` queries and `tile_kv` keys; by_key: for each tile of keys its tiles of queries.
struct FlexTileLists {
  int queries, keys, tile_q, tile_kv;
  bool by_key;
  // Parts of a tile's queries, each with a kind of its own. Tiles by key then begin at any part, which only direct
  // lists can say, and blocks have at least as many queries as a tile.
  int parts = 1;
  int* zero = nullptr;  // a number that becomes 0, where a kernel wants one
};
void flex_tile_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, int* count, int* list, void* stream);

/// The states of blocks that a direct list keeps in shared memory, a byte each.
inline constexpr int kDirectListBytes = 16 << 10;
/// The same lists without the states of blocks, in one kernel instead of three: where the plan says so (launch_plan.h).
void flex_direct_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, const FlexBlockMap& map, int* count,
                       int* list, void* stream);

}  // namespace fusegrad::cuda
