#include "cuda/flex_prepare.h"

#include <algorithm>
#include <type_traits>

#include "cuda/device/vector.cuh"
#include "cuda/dtype.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kDirectBytes = 16 << 10;        // of shared memory
constexpr int64_t kDirectEntries = 64 << 10;  // of a block mask's lists that each CTA reads
constexpr int kPartialSums = 16;              // that a thread adds up

// The kernel that is launched next may begin, if it was launched so that it may: it waits for this one's end before it
// reads anything.
__device__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The states of a row of blocks, of those that its lists name, by all threads of a CTA. A block in both lists is full.
// Returns whether a list is wrong, to those threads that found it.
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

// A CTA a row of blocks.
__global__ void __launch_bounds__(kThreads)
    block_map_kernel(const __grid_constant__ FlexBlockMap p, unsigned char* blocks) {
  unsigned char* states = blocks + static_cast<int64_t>(blockIdx.x) * p.cols;
  if (__syncthreads_or(mark_blocks(p, blockIdx.x, states)) != 0 && threadIdx.x == 0) states[0] = device::kBlockBad;
}

// The state of `rows` queries of a tile: FlexTileKind, or -1 where no pair takes part, or -2 where a list is wrong. By
// keys, queries with a wrong list take part in every tile: their lse is NaN, and so become the gradients that they have
// a part in.
__device__ int tile_state(const device::FlexTiles& t, const FlexTileLists& p, const unsigned char* blocks, int q,
                          int rows, int kv) {
  if (q >= p.queries) return -1;
  const int first_row = static_cast<int>(q / t.block_size_q);
  const int last_row = static_cast<int>((min(q + rows, p.queries) - 1) / t.block_size_q);
  const int first_col = static_cast<int>(kv / t.block_size_kv);
  const int last_col = static_cast<int>((min(kv + p.tile_kv, p.keys) - 1) / t.block_size_kv);
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

// The parts' kinds in one number, or as tile_state.
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

// A list, in order, by all threads of a CTA. `state_of(col)`: of a tile, as tile_kinds.
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
    if (state >= 0) list[id * t.cols + before + __popc(takes & ((1u << lane) - 1))] = (col << 2 * p.parts) + state;
    __syncthreads();
  }
  bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == 0) {
    count[id] = bad ? -1 : found;
    if (id == 0 && p.zero != nullptr) *p.zero = 0;
  }
}

// A CTA a list.
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

// As above, where parts of tiles lie in a block each: from the block mask's own lists.
__global__ void __launch_bounds__(kThreads)
    direct_lists_kernel(const __grid_constant__ device::FlexTiles t, const __grid_constant__ FlexTileLists p,
                        const __grid_constant__ FlexBlockMap map, int* count, int* list) {
  __shared__ unsigned char states[kDirectBytes];  // [parts, map.cols]
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
    const unsigned char* block = states + col * p.tile_kv / static_cast<int>(t.block_size_kv);
    bool some = false;
    int kinds = 0;
    for (int i = 0; i < p.parts; ++i, block += map.cols) {
      some |= *block != device::kBlockNone;
      kinds |= kind_of(*block) << 2 * i;
    }
    return some ? kinds : -1;
  });
}

// The same by keys: of each row of blocks the state of the one that the tile of keys lies in. A row whose list is wrong
// takes part fully, see tile_state.
__global__ void __launch_bounds__(kThreads)
    direct_lists_by_key_kernel(const __grid_constant__ device::FlexTiles t, const __grid_constant__ FlexTileLists p,
                               const __grid_constant__ FlexBlockMap map, int* count, int* list) {
  __shared__ unsigned char states[kDirectBytes];  // [map.rows]
  __shared__ bool wrong[kDirectBytes];
  const int64_t first = static_cast<int64_t>(blockIdx.x / t.rows) * map.rows;
  const int col = static_cast<int>(blockIdx.x % t.rows) * p.tile_kv / static_cast<int>(t.block_size_kv);
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
  write_list(t, p, false, count, list, [&](int row) {
    const int r = row * p.tile_q / static_cast<int>(t.block_size_q);
    return wrong[r] ? device::kTileFull : states[r] != device::kBlockNone ? kind_of(states[r]) : -1;
  });
}

template <class T>
__device__ const T* row_of(const device::FlexTensor& t, int64_t b, int64_t h, int64_t row) {
  return static_cast<const T*>(t.data) + b * t.batch_stride + h * t.head_stride + row * t.row_stride;
}

// Of a CTA that has kThreads / kLanes rows. All are of one head: a division a thread would cost as much as the rows.
template <int kLanes>
struct RowPlace {
  int first, h, b;  // `first`: its first row
  int64_t head;     // b * heads + h
  static constexpr int kRows = kThreads / kLanes;
  __device__ RowPlace(int heads, int queries) {
    const unsigned tiles = static_cast<unsigned>((queries + kRows - 1) / kRows);
    head = blockIdx.x / tiles;
    first = static_cast<int>(blockIdx.x % tiles) * kRows;
    b = static_cast<int>(head) / heads;
    h = static_cast<int>(head) % heads;
  }
};

// kLanes lanes a row. kWidth: values that a lane reads at once, from rows whose values lie side by side, or 1.
template <class T, int kWidth, int kLanes>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ FlexRows p, device::FlexRow* out) {
  using Values = device::Pack<T, kWidth>;
  const RowPlace<kLanes> place(p.heads, p.queries);
  const auto [first, h, b, head] = place;
  const int q = first + static_cast<int>(threadIdx.x) / kLanes;
  const bool there = q < p.queries;
  const int64_t row = head * p.queries + q;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (p.query_sum != nullptr) {
    // Of the CTA's rows, the last one's of a head with those beyond.
    const int end = first + place.kRows < p.queries ? first + place.kRows : p.sum_rows;
    float4* sums = reinterpret_cast<float4*>(p.query_sum + (head * p.sum_rows + first) * p.sum_cols);
    for (int i = static_cast<int>(threadIdx.x); i < (end - first) * p.sum_cols / 4; i += kThreads)
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  float sum = 0.0f;
  if (there && p.grad_out.data != nullptr) {
    const auto values = [&](const device::FlexTensor& t, int col) {
      return Values::load(row_of<T>(t, b, h, q) + (kWidth == 1 ? col * t.col_stride : col));
    };
    // The low part by itself: added to out in float32 it would not be lost, but to their product it is nearer.
    float low = 0.0f;
    for (int col = lane * kWidth; col < p.value_size; col += kLanes * kWidth) {
      const Values g = values(p.grad_out, col), o = values(p.out, col);
      Values l{};
      if (p.out_low.data != nullptr) l = values(p.out_low, col);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sum = fmaf(static_cast<float>(g.get(i)), static_cast<float>(o.get(i)), sum);
        low = fmaf(static_cast<float>(g.get(i)), static_cast<float>(l.get(i)), low);
      }
    }
    sum += low;
  }
  for (int bit = kLanes / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (!there || lane != 0) return;
  constexpr float kUnit = std::is_same_v<T, float> ? 1.0f : 1.4426950408889634f;
  const float lse = p.lse[row];
  const bool none = lse == -__int_as_float(0x7f800000);
  if (p.grad_lse != nullptr) sum -= p.grad_lse[row];
  out[head * p.row_stride + q] = {none ? -lse : lse * kUnit, none ? 0.0f : sum};
}

// Four lanes a row: a warp has four blocks of 8 rows and 8 columns at a time, a lane one row of one of them.
constexpr int kSumLanes = 4;
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) query_sum_kernel(const __grid_constant__ FlexQuerySum p) {
  const RowPlace<kSumLanes> place(p.heads, p.queries);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane % 8;
  const int eight = place.first + static_cast<int>(threadIdx.x) / kWarp * 8;
  if (eight + row >= p.queries) return;
  const float* from = p.sum + (place.head * p.sum_rows + eight) * p.sum_cols;
  T* to = static_cast<T*>(p.grad_query.data) + place.b * p.grad_query.batch_stride +
          place.h * p.grad_query.head_stride + (eight + row) * p.grad_query.row_stride;
  for (int col = lane / 8 * 8; col < p.head_size; col += kWarp) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float* at = from + col * 8;
      float4 four;
      if (p.transposed) {
        at += i * 8 + row;
        four = make_float4(at[0], at[8], at[16], at[24]);
      } else {
        four = *reinterpret_cast<const float4*>(at + row * 8 + i);
      }
      x[i] = four.x * p.scale;
      x[i + 1] = four.y * p.scale;
      x[i + 2] = four.z * p.scale;
      x[i + 3] = four.w * p.scale;
    }
#pragma unroll
    for (int i = 0; i < 8; i += kWidth) {
      if (col + i >= p.head_size) break;
      float part[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) part[k] = x[i + k];
      device::packed<T>(part).store(to + (kWidth == 1 ? (col + i) * p.grad_query.col_stride : col + i));
    }
  }
}

// Whether every row begins at a multiple of 16 bytes and is `size` values side by side that fill whole vectors.
bool has_vector_rows(const device::FlexTensor& t, int64_t size, int64_t element) {
  const auto whole = [&](int64_t values) { return values * element % 16 == 0; };
  return t.data == nullptr || (t.col_stride == 1 && whole(size) && whole(t.row_stride) && whole(t.head_stride) &&
                               whole(t.batch_stride) && reinterpret_cast<uintptr_t>(t.data) % 16 == 0);
}

// As RowPlace has them.
template <class Rows>
int64_t row_ctas(const Rows& p, int lanes) {
  const int64_t each = kThreads / lanes;
  return int64_t{p.batches} * p.heads * ((p.queries + each - 1) / each);
}

// Of fixed point.
struct Unit {
  int exponent;
  bool finite;
  __device__ Unit(const float* largest, int bits) {
    const int most = static_cast<int>(__float_as_uint(*largest) >> 23 & 255);
    // As device::FlexBufferSums::limit_above has it.
    exponent = min(max(most + 1, 27), 254) - 127 - bits;
    finite = most < 255;
  }
};
__device__ double power_of_two(int exponent) {
  return __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
}

__global__ void __launch_bounds__(kThreads) largest_kernel(const float* sums, int64_t count, float* largest) {
  unsigned most = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t{kThreads} * gridDim.x) {
    most = max(most, __float_as_uint(fabsf(sums[i])));
  }
  for (int bit = kWarp / 2; bit > 0; bit /= 2) most = max(most, __shfl_xor_sync(~0u, most, bit));
  auto* to = reinterpret_cast<unsigned*>(largest);
  if (threadIdx.x % kWarp == 0 && most > *static_cast<volatile unsigned*>(to)) atomicMax(to, most);
}

// A thread's sums of one element after the other are added together first, and a warp's: additions to one place of
// memory come one after the other.
__global__ void __launch_bounds__(kThreads)
    add_partial_sums_kernel(const float* sums, const int64_t* elements, int64_t count, const float* largest, int bits,
                            int64_t* out) {
  const double scale = power_of_two(-Unit(largest, bits).exponent);
  const auto add = [&](int64_t at, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(out + at), static_cast<unsigned long long>(x));
  };
  int64_t at = -1;
  long long sum = 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kPartialSums + threadIdx.x;
#pragma unroll 4
  for (int64_t i = first; i < min(first + kThreads * kPartialSums, count); i += kThreads) {
    const float x = sums[i];
    if (x == 0.0f) continue;
    if (elements[i] != at) {
      if (at >= 0) add(at, sum);
      at = elements[i];
      sum = 0;
    }
    sum += __double2ll_rn(x * scale);
  }
  const unsigned some = __ballot_sync(~0u, at >= 0);
  if (some == 0) return;
  const int64_t one = __shfl_sync(~0u, at, __ffs(some) - 1);
  if (!__all_sync(~0u, at < 0 || at == one)) {
    if (at >= 0) add(at, sum);
    return;
  }
  for (int bit = kWarp / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (threadIdx.x % kWarp == 0) add(one, sum);
}

__global__ void __launch_bounds__(kThreads)
    fixed_to_float_kernel(const int64_t* sums, const float* largest, int bits, int64_t elements, float* out) {
  const auto [exponent, finite] = Unit(largest, bits);
  const double unit = power_of_two(exponent);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements;
       i += int64_t{kThreads} * gridDim.x) {
    out[i] = finite ? static_cast<float>(static_cast<double>(sums[i]) * unit) : __int_as_float(0x7fffffff);
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
  launch("flex_tile_lists", tile_lists_kernel, {rows, kThreads}, stream, tiles, lists, count, list);
}

bool takes_direct_lists(const FlexBlockMap& map, const FlexTileLists& lists, int64_t block_size_q,
                        int64_t block_size_kv) {
  if (block_size_q % (lists.tile_q / lists.parts) != 0 || block_size_kv % lists.tile_kv != 0) return false;
  if (std::max(block_size_q, block_size_kv) > INT32_MAX) return false;
  if (!lists.by_key) return int64_t{lists.parts} * map.cols <= kDirectBytes;
  const int64_t entries = int64_t{map.rows} * std::max(map.list_cols_partial, map.list_cols_full);
  return map.rows <= kDirectBytes && entries <= kDirectEntries;
}
void flex_direct_lists(const device::FlexTiles& tiles, const FlexTileLists& lists, const FlexBlockMap& map, int* count,
                       int* list, void* stream) {
  const int64_t rows = static_cast<int64_t>(tiles.batches) * tiles.heads * tiles.rows;
  if (rows == 0) return;
  launch("flex_direct_lists", lists.by_key ? direct_lists_by_key_kernel : direct_lists_kernel, {rows, kThreads}, stream,
         tiles, lists, map, count, list);
}

void flex_rows(const FlexRows& rows, device::FlexRow* out, DType dtype, void* stream) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel, int lanes) {
      launch("flex_rows", kernel, {row_ctas(rows, lanes), kThreads}, stream, rows, out);
    };
    bool vectors = true;
    for (const auto& t : {rows.grad_out, rows.out, rows.out_low}) {
      vectors = vectors && has_vector_rows(t, rows.value_size, sizeof(T));
    }
    vectors ? run(rows_kernel<T, 16 / sizeof(T), 8>, 8) : run(rows_kernel<T, 1, kWarp>, kWarp);
  });
}

void flex_scale_query_sum(const FlexQuerySum& p, DType dtype, void* stream) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel) {
      launch("flex_scale_query_sum", kernel, {row_ctas(p, kSumLanes), kThreads}, stream, p);
    };
    has_vector_rows(p.grad_query, p.head_size, sizeof(T)) ? run(query_sum_kernel<T, 16 / sizeof(T)>)
                                                          : run(query_sum_kernel<T, 1>);
  });
}

void flex_largest(const float* sums, int64_t count, float* largest, void* stream) {
  if (count == 0) return;
  launch("flex_largest", largest_kernel, {std::min<int64_t>((count + kThreads - 1) / kThreads, 256), kThreads}, stream,
         sums, count, largest);
}
void flex_add_partial_sums(const float* sums, const int64_t* elements, int64_t count, const float* largest,
                           int fixed_bits, int64_t* out, void* stream) {
  if (count == 0) return;
  constexpr int kEach = kThreads * kPartialSums;
  launch("flex_add_partial_sums", add_partial_sums_kernel, {(count + kEach - 1) / kEach, kThreads}, stream, sums,
         elements, count, largest, fixed_bits, out);
}

void flex_fixed_to_float(const int64_t* sums, const float* largest, int fixed_bits, int64_t elements, float* out,
                         void* stream) {
  if (elements == 0) return;
  launch("flex_fixed_to_float", fixed_to_float_kernel,
         {std::min<int64_t>((elements + kThreads - 1) / kThreads, 4096), kThreads}, stream, sums, largest, fixed_bits,
         elements, out);
}

}  // namespace fusegrad::cuda
