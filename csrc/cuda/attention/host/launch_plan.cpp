#include "cuda/attention/host/launch_plan.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/error.h"
#include "cuda/attention/host/few_queries.h"
#include "cuda/attention/host/tile_lists.h"
#include "cuda/attention/host/tiles.h"

namespace fusegrad::cuda {
namespace {

constexpr int64_t kElementBytes = 2;  // of the Hopper family

// So many heads, each of which reads so many bytes, whose tiles are begun together, so that like tiles of a mask end
// together while what they read stays in the L2 cache.
int64_t heads_together(int64_t heads, int64_t bytes) {
  constexpr int64_t kSectionBytes = int64_t{16} << 20;
  return std::clamp(kSectionBytes / std::max(bytes, int64_t{1}), int64_t{1}, heads);
}

int64_t forward_section(const KernelFacts& f, const FlexShape& n, int64_t processors) {
  const int64_t heads = n.query_heads(), bytes = kElementBytes * n.keys * (n.head_size + n.value_size) / n.group();
  // With few rows of tiles a CTA, all heads are one section if the L2 cache holds what they read: the last of several
  // sections, begun late, would take too long. No section is much smaller than others.
  constexpr int64_t kCachedBytes = int64_t{48} << 20, kFewRows = 8, kFewHeads = 4;
  const int64_t rows = heads * tiles_in(n.queries, f.tile.rows);
  if (heads * bytes <= kCachedBytes && rows <= kFewRows * processors) return heads;
  const int64_t together = std::min(heads, std::max(heads_together(heads, bytes), kFewHeads));
  return tiles_in(heads, tiles_in(heads, together));
}

// The CTAs of a group of query heads are at about the same one: it counts once, with its gradient in float32.
int64_t backward_section(const FlexShape& n) {
  const int64_t bytes = n.queries * (kElementBytes * (n.head_size + n.value_size) + 4 * n.head_size);
  return heads_together(n.key_batches * n.key_heads, bytes);
}

std::atomic<int> forced_whole{-1};

bool lists_are_direct(const TileListPlan& lists, const BlockMaskShape& mask) {
  const auto [block_q, block_kv] = mask.block_size;
  if (block_q % (lists.tile_q / lists.parts) != 0 || block_kv % lists.tile_kv != 0) return false;
  if (std::max(block_q, block_kv) > INT32_MAX) return false;
  if (!lists.by_key) return lists.parts * mask.cols <= kDirectListBytes;
  constexpr int64_t kMostEntries = 64 << 10;  // that each CTA reads
  return mask.rows <= kDirectListBytes && mask.rows * std::max(mask.partial_cols, mask.full_cols) <= kMostEntries;
}

LaunchPlan plan_few(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                    int64_t processors) {
  const KernelFacts& f = spec.facts();
  const int64_t together = heads_of_tile(f.tile.rows, shape, mask);
  const int64_t units = shape.batches * shape.key_heads * tiles_in(shape.group(), together);
  const int64_t splits = key_splits({.units = units,
                                     .tiles = tiles_in(shape.keys, f.tile.cols),
                                     .outputs = outputs_of(shape),
                                     .processors = processors,
                                     .resident = f.resident});
  check_ctas(units * splits);
  std::optional<TileListPlan> lists;
  if (mask) lists = plan_lists(f.tile, /*by_key=*/false, shape, *mask);
  return {std::move(spec),           units * splits, /*launches=*/1, /*section=*/1, lists, static_cast<int>(splits),
          static_cast<int>(together)};
}

}  // namespace

void check_ctas(int64_t ctas) {
  FUSEGRAD_CHECK(ValueError, ctas <= INT32_MAX, "flex_attention: B * H * tiles must be below 2^31, but got ", ctas);
}

TileListPlan plan_lists(const FlexTileSize& tile, bool by_key, const FlexShape& shape, const BlockMaskShape& mask) {
  TileListPlan lists{tile.rows, tile.cols, by_key, tile.parts};
  lists.rows = tiles_in(shape.queries, tile.rows);
  lists.cols = tiles_in(shape.keys, tile.cols);
  if (by_key) std::swap(lists.rows, lists.cols);
  lists.direct = lists_are_direct(lists, mask);
  return lists;
}

LaunchPlan plan_launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                       int64_t processors, int64_t launches) {
  const KernelFacts& f = spec.facts();
  if (f.few()) return plan_few(std::move(spec), shape, mask, processors);
  const bool by_key = f.kernel == FlexKernel::kBackward;
  if (!by_key) launches = 1;
  if (f.tile.keeps) {
    // CTAs that fit the GPU at once, as many for each head.
    const int64_t places = (by_key ? 3 : 4) * processors;
    const int64_t parts = std::clamp(places / shape.heads, int64_t{1}, shape.batches);
    check_ctas(shape.heads * parts);
    return {std::move(spec), shape.heads * parts, 1, 1, std::nullopt};
  }
  int64_t work = by_key ? shape.key_batches * shape.key_heads * tiles_in(shape.keys, f.tile.cols)
                        : shape.query_heads() * tiles_in(shape.queries, f.tile.rows);
  int64_t splits = 1;
  if (f.key_splits) {
    splits = key_splits({.units = work,
                         .tiles = tiles_in(shape.keys, f.tile.cols),
                         .outputs = outputs_of(shape),
                         .processors = processors});
  }
  work *= splits;
  const bool persistent = f.hopper() && !f.keys_shared && launches == 1;
  check_ctas(persistent ? work + processors : work / launches);  // persistent CTAs count on from their number
  if (f.whole) work = shape.key_batches * shape.key_heads;
  int64_t section = 1;
  if (f.hopper() && f.blocks && !f.whole) {
    section = f.backward() ? backward_section(shape) : forward_section(f, shape, processors);
  }
  std::optional<TileListPlan> lists;
  if (mask) lists = plan_lists(f.tile, by_key, shape, *mask);
  return {std::move(spec), persistent ? std::min(work, processors) : work / launches,
          launches,        static_cast<int>(section),
          lists,           static_cast<int>(splits),
          /*together=*/1};
}

namespace {

// Whether tiles of 192 queries take less time than those of 128: one takes 5/4 of the time of the other, or 9/7 of what
// lies below the diagonal. most(rows): the tiles of the CTA that has the most.
template <class Most>
bool forward_pays_tall(const FlexShape& shape, const Most& most, const std::function<double()>& share_of_pairs) {
  const int64_t queries = shape.queries, keys = shape.keys;
  const bool of_all = 5 * most(192) <= 4 * most(128);
  // Under a causal mask: the tiles of 64 queries by 128 keys, of which taller tiles have more beyond the diagonal.
  const auto causal = [&](int64_t rows) {
    int64_t sum = 0;
    for (int64_t row = rows; row < queries + rows; row += rows)
      sum += rows / 64 * std::min(tiles_in(std::min(row, queries), 128), tiles_in(keys, 128));
    return sum;
  };
  constexpr int64_t kMostQueries = 1536;  // beyond, all is as without a mask
  if (queries > kMostQueries) return of_all;
  const bool of_causal = 7 * causal(192) <= 9 * causal(128);
  constexpr double kMostOfCausal = 0.75;
  return of_causal == of_all || share_of_pairs() > kMostOfCausal ? of_all : of_causal;
}

}  // namespace

int forward_rows(const FlexCase& c, const FlexShape& shape, int64_t processors,
                 const std::function<double()>& share_of_pairs) {
  const auto most = [&](int64_t rows) {
    return tiles_in(shape.query_heads() * tiles_in(shape.queries, rows), processors);
  };
  if (!planner::has_tile_of_four(c)) return forward_pays_tall(shape, most, share_of_pairs) ? 192 : 128;
  // Times of tiles of 128, 192 and 256 queries are as 100 to 137 to 174.
  const int64_t of_two = 100 * most(128), of_three = 137 * most(192), of_four = 174 * most(256);
  return of_four <= std::min(of_two, of_three) ? 256 : of_three <= of_two ? 192 : 128;
}

// A tile of 80 takes 7/6 of the time of one of 64, one of 144 11/10 of one of 128. Where the others have room for the
// next keys beside the present ones, keys cost half a tile of 64 more, or 4/5 of one of 128; with a block mask it
// depends on how many queries they have.
bool pays_tall(const FlexCase& c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
               const std::function<double()>& share_of_pairs, const std::string& architecture) {
  const auto tile = backward_tall_tile(c);
  if (!tile || !takes_hopper(c, architecture)) return false;
  const int64_t queries = shape.queries;
  if (tile->rows == 144)
    return 11 * shape.group() * tiles_in(queries, 144) + 8 <= 10 * shape.group() * tiles_in(queries, 128);
  if (!mask) return 7 * tiles_in(queries, 80) <= 6 * tiles_in(queries, 64);
  constexpr int64_t kLeast = 1536;
  if (queries < kLeast || !plan_lists(*tile, /*by_key=*/true, shape, *mask).direct) return false;
  return c.mask_mod.text.empty() || share_of_pairs() * static_cast<double>(queries) >= kLeast;
}

// It needs as many heads as keep the CTAs busy. Each reads a head's queries for every tile of keys, and adds to their
// sums: they are to be in the L2 cache meanwhile, of all CTAs together. Under a mask a tile of keys reads a part of the
// head's queries. That makes up for more bytes where heads are short; causal heads of 1024 queries were slower.
bool pays_whole(const FlexCase& c, const FlexShape& shape, int64_t processors,
                const std::function<double()>& share_of_pairs) {
  if (forced_whole == 0 || shape.key_batches != shape.batches) return false;
  // With a block mask the producer counts in 64 bits of how many tiles of keys each tile of queries has some.
  constexpr int64_t kMostQueries = 16 * 64, kMostKeys = 15 * 128;
  if (c.blocks && (shape.group() > 1 || shape.queries > kMostQueries || shape.keys > kMostKeys)) return false;
  if (forced_whole == 1) return true;
  const int64_t heads = shape.key_batches * shape.key_heads, turns = tiles_in(heads, processors);
  if (10 * heads < 9 * turns * processors) return false;
  constexpr int64_t kMostBytes = int64_t{40} << 20, kShort = 512;
  const int64_t row = 4 * shape.head_size + kElementBytes * (shape.head_size + shape.value_size);
  const int64_t bytes = processors * shape.group() * shape.queries * row;
  if (bytes <= kMostBytes) return true;
  return c.blocks && shape.queries <= kShort && share_of_pairs() * static_cast<double>(bytes) <= kMostBytes;
}

void force_flex_whole(int whole) { forced_whole = whole; }

jit::TensorMapShape box_map(DType dtype, const FlexBoxes& tensor, int rows, int cols) {
  jit::TensorMapShape shape;
  shape.dtype = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  shape.rank = 4;
  for (size_t d = 0; d < 4; ++d) {
    shape.sizes[d] = static_cast<uint64_t>(tensor.sizes[3 - d]);
    // A stride that is never taken must be valid too.
    const int64_t stride = tensor.sizes[3 - d] == 1 ? 8 : tensor.strides[3 - d];
    shape.stride_bytes[d] = static_cast<uint64_t>(stride * kElementBytes);
  }
  shape.box = {static_cast<uint32_t>(cols), static_cast<uint32_t>(rows), 1, 1};
  shape.swizzle = cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  return shape;
}

jit::TensorMapShape row_map(int64_t count, int rows) {
  FUSEGRAD_CHECK(ValueError, count <= INT32_MAX, "flex_attention: B * H * M must be below 2^31, but got ", count);
  jit::TensorMapShape shape;
  shape.dtype = CU_TENSOR_MAP_DATA_TYPE_FLOAT64;  // 8 bytes that are only copied
  shape.rank = 1;
  shape.sizes = {static_cast<uint64_t>(count)};
  shape.box = {static_cast<uint32_t>(rows)};
  shape.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  return shape;
}

}  // namespace fusegrad::cuda
