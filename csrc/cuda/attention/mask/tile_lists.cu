#include "cuda/attention/mask/tile_lists.h"

#include <stdexcept>

#include "cuda/attention/mask/tile_entry.cuh"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// The kernel that is launched next may begin, if it was launched so that it may: it waits for this one's end before it
// reads anything.
__device__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Called by all threads of a CTA: writes the states of a row of blocks that its lists name. A block in both lists is
// full. Returns whether a list is wrong, to those threads that found it.
__device__ bool mark_blocks(const FlexBlockMap& p, int64_t row, unsigned char* states) {
  bool bad = false;
  const auto mark = [&](const FlexBlockList& list, int list_cols, device::FlexBlock state) {
    const int count = list.count[row];
    bad |= count < 0 || count > list_cols;
    for (int i = static_cast<int>(threadIdx.x); i < min(count, list_cols); i += kThreads) {
      const int col = list.index[row * list_cols + i];
      const bool there = col >= 0 && col < p.cols;
      bad |= !there;
      if (there) states[col] = state;
    }
    __syncthreads();
  };
  mark(p.partial, p.list_cols_partial, p.distinguish ? device::kBlockPartial : device::kBlockFull);
  if (p.full.count != nullptr) mark(p.full, p.list_cols_full, device::kBlockFull);
  return bad;
}

// One CTA per row of blocks.
__global__ void __launch_bounds__(kThreads)
    block_map_kernel(const __grid_constant__ FlexBlockMap p, unsigned char* blocks) {
  unsigned char* states = blocks + static_cast<int64_t>(blockIdx.x) * p.cols;
  if (__syncthreads_or(mark_blocks(p, blockIdx.x, states)) != 0 && threadIdx.x == 0) states[0] = device::kBlockBad;
}

// Returns the FlexTileKind of `rows` queries of a tile, or -1 where no pair takes part, or -2 where a list is wrong. By
// keys, queries with a wrong list take part in every tile: their lse is NaN, and so become the gradients that they
// contribute to.
__device__ int tile_state(const device::FlexTiles& t, const FlexTileLists& p, const unsigned char* blocks, int q,
                          int rows, int kv) {
  if (q >= p.queries) return -1;
  const int first_row = q / t.block_size_q;
  const int last_row = (min(q + rows, p.queries) - 1) / t.block_size_q;
  const int first_col = kv / t.block_size_kv;
  const int last_col = (min(kv + p.tile_kv, p.keys) - 1) / t.block_size_kv;
  bool some = false, all = true, partial = false, bad = false;
  for (int r = first_row; r <= last_row; ++r) {
    if (blocks[static_cast<int64_t>(r) * t.block_cols] == device::kBlockBad) {
      if (!p.by_key) return -2;
      some = bad = true;
    }
    for (int c = first_col; c <= last_col; ++c) {
      const unsigned char state = blocks[static_cast<int64_t>(r) * t.block_cols + c];
      some |= state != device::kBlockNone;
      all &= state != device::kBlockNone;
      partial |= state == device::kBlockPartial;
    }
  }
  if (!some) return -1;
  const bool one = first_row == last_row && first_col == last_col;
  if ((all && !partial) || (one && bad)) return device::kTileFull;
  return one ? device::kTilePartial : device::kTileMixed;
}

__device__ int kind_of(unsigned char block) {
  return block == device::kBlockFull      ? device::kTileFull
         : block == device::kBlockPartial ? device::kTilePartial
                                          : device::kTileNone;
}

// Returns the parts' kinds as TileEntry has them, or what tile_state returns.
__device__ int tile_kinds(const device::FlexTiles& t, const FlexTileLists& p, const unsigned char* blocks, int q,
                          int kv) {
  if (p.parts == 1) return tile_state(t, p, blocks, q, p.tile_q, kv);
  const int rows = p.tile_q / p.parts;
  bool some = false;
  int kinds = 0;
  for (int i = 0; i < p.parts; ++i) {
    const int state = tile_state(t, p, blocks, q + i * rows, rows, kv);
    if (state == -2) return -2;
    some |= state >= 0;
    kinds |= (state < 0 ? device::kTileNone : state) << 2 * i;
  }
  return some ? kinds : -1;
}

// Called by one thread: stores a list's number of entries.
__device__ void put_count(const FlexTileLists& p, int* count, int entries) {
  count[blockIdx.x] = entries;
  if (blockIdx.x == 0 && p.zero != nullptr) *p.zero = 0;
}

// Called by all threads of a CTA: writes a list in order. `state_of(col)` is of a tile what tile_kinds returns.
template <class StateOf>
__device__ void write_list(const device::FlexTiles& t, const FlexTileLists& p, bool bad, int* count, int* list,
                           const StateOf& state_of) {
  __shared__ int warps[kThreads / kWarp];
  const int64_t id = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int found = 0;
  for (int begin = 0; begin < t.cols; begin += kThreads) {
    const int col = begin + static_cast<int>(threadIdx.x);
    const int state = col < t.cols ? state_of(col) : -1;
    bad |= state == -2;
    const unsigned takes = __ballot_sync(~0u, state >= 0);
    if (lane == 0) warps[warp] = __popc(takes);
    __syncthreads();
    int before = found;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) before += warps[w];
      found += warps[w];
    }
    if (state >= 0)
      list[id * t.cols + before + __popc(takes & ((1u << lane) - 1))] = device::tile_entry_word(p.parts, col, state);
    __syncthreads();
  }
  bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == 0) put_count(p, count, bad ? -1 : found);
}

// Called by all threads of a CTA: writes a list of tiles of queries whose parts have kinds of their own, in order. The
// tiles begin where a run of blocks with pairs does, so that they have hardly more rows than the run. `kinds` is in
// shared memory, one for each block of queries. What a run's last tile has beyond the run lies in one more block, which
// is kTileNone.
__device__ void write_runs(const device::FlexTiles& t, const FlexTileLists& p, const unsigned char* kinds, int* count,
                           int* list) {
  __shared__ int warps[kThreads / kWarp];
  const int64_t id = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int size = t.block_size_q, part = p.tile_q / p.parts;
  const auto kind_of_block = [&](int r) { return r < t.block_rows ? kinds[r] : device::kTileNone; };
  int found = 0;
  for (int begin = 0; begin < t.block_rows; begin += kThreads) {
    const int block = begin + static_cast<int>(threadIdx.x);
    int run = block, first = 0, last = 0;  // the first block of the run; its tiles that begin in this block
    if (kind_of_block(block) != device::kTileNone) {
      while (run > 0 && kinds[run - 1] != device::kTileNone) --run;
      first = ((block - run) * size + p.tile_q - 1) / p.tile_q;
      last = (min((block + 1) * size, p.queries) - run * size + p.tile_q - 1) / p.tile_q;
    }
    int sum = last - first;
    for (int d = 1; d < kWarp; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == kWarp - 1) warps[warp] = sum;
    __syncthreads();
    int before = found + sum - last;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) before += warps[w];
      found += warps[w];
    }
    for (int i = first; i < last; ++i) {
      const int q = run * size + i * p.tile_q;
      int state = 0;
      for (int k = 0; k < p.parts; ++k) {
        const int at = q + k * part;
        state |= (at < p.queries ? kind_of_block(at / size) : device::kTileNone) << 2 * k;
      }
      list[id * t.cols + before + i] = device::tile_entry_word(p.parts, q / part, state);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) put_count(p, count, found);
}

// One CTA per list.
__global__ void __launch_bounds__(kThreads)
    tile_lists_kernel(const __grid_constant__ device::FlexTiles t, const __grid_constant__ FlexTileLists p, int* count,
                      int* list) {
  let_next_begin();
  const int row = static_cast<int>(blockIdx.x % t.rows);
  const unsigned char* blocks = t.blocks + static_cast<int64_t>(blockIdx.x / t.rows) * t.block_rows * t.block_cols;
  write_list(t, p, false, count, list, [&](int col) {
    return p.by_key ? tile_kinds(t, p, blocks, col * p.tile_q, row * p.tile_kv)
                    : tile_kinds(t, p, blocks, row * p.tile_q, col * p.tile_kv);
  });
}

// The same from the block mask's own lists, where each part of a tile lies in one block.
__global__ void __launch_bounds__(kThreads)
    direct_lists_kernel(const __grid_constant__ device::FlexTiles t, const __grid_constant__ FlexTileLists p,
                        const __grid_constant__ FlexBlockMap map, int* count, int* list) {
  __shared__ unsigned char states[kDirectListBytes];  // [parts, map.cols]
  let_next_begin();
  for (int i = static_cast<int>(threadIdx.x); i < p.parts * map.cols; i += kThreads) states[i] = device::kBlockNone;
  __syncthreads();
  bool bad = false;
  for (int i = 0; i < p.parts; ++i) {
    const int q = static_cast<int>(blockIdx.x % t.rows) * p.tile_q + i * (p.tile_q / p.parts);
    if (q >= p.queries) break;
    const int64_t row = static_cast<int64_t>(blockIdx.x / t.rows) * map.rows + q / t.block_size_q;
    bad |= mark_blocks(map, row, states + i * map.cols);
  }
  write_list(t, p, bad, count, list, [&](int col) {
    const unsigned char* block = states + col * p.tile_kv / t.block_size_kv;
    bool some = false;
    int kinds = 0;
    for (int i = 0; i < p.parts; ++i, block += map.cols) {
      some |= *block != device::kBlockNone;
      kinds |= kind_of(*block) << 2 * i;
    }
    return some ? kinds : -1;
  });
}

// The same by keys: a tile of keys lies in one column of blocks, whose state in each row is wanted. A row whose list is
// wrong takes part fully, as in tile_state.
__global__ void __launch_bounds__(kThreads)
    direct_lists_by_key_kernel(const __grid_constant__ device::FlexTiles t, const __grid_constant__ FlexTileLists p,
                               const __grid_constant__ FlexBlockMap map, int* count, int* list) {
  __shared__ unsigned char states[kDirectListBytes];  // [map.rows]
  __shared__ bool wrong[kDirectListBytes];
  const int64_t first = static_cast<int64_t>(blockIdx.x / t.rows) * map.rows;
  const int col = static_cast<int>(blockIdx.x % t.rows) * p.tile_kv / t.block_size_kv;
  for (int r = static_cast<int>(threadIdx.x); r < map.rows; r += kThreads) {
    states[r] = device::kBlockNone;
    wrong[r] = false;
  }
  __syncthreads();
  const auto look = [&](const FlexBlockList& from, int list_cols, device::FlexBlock state) {
    for (int r = static_cast<int>(threadIdx.x); r < map.rows; r += kThreads) {
      const int entries = from.count[first + r];
      if (entries < 0 || entries > list_cols) wrong[r] = true;
    }
    for (int i = static_cast<int>(threadIdx.x); i < map.rows * list_cols; i += kThreads) {
      const int r = i / list_cols;
      if (i - r * list_cols >= from.count[first + r]) continue;
      const int block = from.index[first * list_cols + i];
      if (block < 0 || block >= map.cols) wrong[r] = true;
      if (block == col) states[r] = state;
    }
    __syncthreads();
  };
  look(map.partial, map.list_cols_partial, map.distinguish ? device::kBlockPartial : device::kBlockFull);
  if (map.full.count != nullptr) look(map.full, map.list_cols_full, device::kBlockFull);
  for (int r = static_cast<int>(threadIdx.x); r < map.rows; r += kThreads)
    states[r] = wrong[r] ? device::kTileFull : kind_of(states[r]);
  __syncthreads();
  if (p.parts > 1) {
    write_runs(t, p, states, count, list);
  } else {
    write_list(t, p, false, count, list, [&](int row) {
      const int kind = states[row * p.tile_q / t.block_size_q];
      return kind == device::kTileNone ? -1 : kind;
    });
  }
}

}  // namespace

void flex_block_map(const FlexBlockMap& map, unsigned char* blocks, void* stream) {
  const int64_t rows = static_cast<int64_t>(map.batches) * map.heads * map.rows;
  if (rows == 0 || map.cols == 0) return;
  launch("flex_block_map", block_map_kernel, {rows, kThreads}, stream, map, blocks);
}

void flex_tile_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, int* count, int* list, void* stream) {
  const int64_t rows = static_cast<int64_t>(tiles.batches) * tiles.heads * tiles.rows;
  if (rows == 0) return;
  if (lists.by_key && lists.parts > 1) throw std::logic_error("flex_tile_lists: by key, parts need direct lists");
  launch("flex_tile_lists", tile_lists_kernel, {rows, kThreads}, stream, tiles, lists, count, list);
}

void flex_direct_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, const FlexBlockMap& map, int* count,
                       int* list, void* stream) {
  const int64_t rows = static_cast<int64_t>(tiles.batches) * tiles.heads * tiles.rows;
  if (rows == 0) return;
  launch("flex_direct_lists", lists.by_key ? direct_lists_by_key_kernel : direct_lists_kernel, {rows, kThreads}, stream,
         tiles, lists, map, count, list);
}

}  // namespace fusegrad::cuda
