#include "cuda/attention/plan/launch_plan.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/mask/tile_lists.h"
#include "cuda/attention/plan/kernel.h"

namespace fusegrad::cuda {
namespace {

bool lists_are_direct(const TileListPlan& lists, const BlockMaskShape& mask) {
  const auto [block_q, block_kv] = mask.block_size;
  if (block_q % (lists.tile_q / lists.parts) != 0 || block_kv % lists.tile_kv != 0) return false;
  if (std::max(block_q, block_kv) > INT32_MAX) return false;
  if (!lists.by_key) return lists.parts * mask.cols <= kDirectListBytes;
  constexpr int64_t kMostEntries = 64 << 10;  // that each CTA reads
  return mask.rows <= kDirectListBytes && mask.rows * std::max(mask.partial_cols, mask.full_cols) <= kMostEntries;
}

}  // namespace

void check_ctas(int64_t ctas) {
  FUSEGRAD_CHECK(ValueError, ctas <= INT32_MAX, "flex_attention: B * H * tiles must be below 2^31, but got ", ctas);
}

TileListPlan plan_lists(const FlexTile& tile, bool by_key, const FlexShape& shape, const BlockMaskShape& mask) {
  TileListPlan lists{tile.rows, tile.cols, by_key, tile.parts()};
  lists.rows = tiles_in(shape.queries, tile.rows);
  lists.cols = tiles_in(shape.keys, tile.cols);
  if (by_key) std::swap(lists.rows, lists.cols);
  lists.direct = lists_are_direct(lists, mask);
  return lists;
}

// So many heads, each of which reads so many bytes, whose tiles are begun together, so that like tiles of a mask end
// together while what they read stays in the L2 cache.
int64_t heads_together(int64_t heads, int64_t bytes) {
  constexpr int64_t kSectionBytes = int64_t{16} << 20;
  return std::clamp(kSectionBytes / std::max(bytes, int64_t{1}), int64_t{1}, heads);
}

LaunchPlan launch_staying(KernelSpec spec, const FlexShape& shape, int64_t places) {
  const int64_t ctas = shape.heads * std::clamp(places / shape.heads, int64_t{1}, shape.batches);
  check_ctas(ctas);
  return {.spec = std::move(spec), .ctas = ctas};
}

LaunchPlan launch_by_query(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                           int64_t processors, int64_t section) {
  const KernelFacts& f = spec.facts();
  int64_t work = shape.query_heads() * tiles_in(shape.queries, f.tile.rows), splits = 1;
  if (f.key_splits) {
    splits = key_splits({.units = work,
                         .tiles = tiles_in(shape.keys, f.tile.cols),
                         .outputs = outputs_of(shape),
                         .processors = processors});
  }
  work *= splits;
  check_ctas(f.hopper() ? work + processors : work);  // persistent CTAs count on from their number
  std::optional<TileListPlan> lists;
  if (mask) lists = plan_lists(f.tile, /*by_key=*/false, shape, *mask);
  return {.spec = std::move(spec),
          .ctas = f.hopper() ? std::min(work, processors) : work,
          .section = static_cast<int>(section),
          .lists = lists,
          .splits = static_cast<int>(splits)};
}

LaunchPlan plan_launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                       int64_t processors, int64_t launches) {
  const Kernel& kernel = kernel_of(spec.facts().kernel);
  return kernel.launch(std::move(spec), shape, mask, processors, launches);
}

jit::TensorMapShape box_map(DType dtype, const FlexBoxes& tensor, int rows, int cols) {
  jit::TensorMapShape shape;
  shape.dtype = dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  shape.rank = 4;
  for (size_t d = 0; d < 4; ++d) {
    shape.sizes[d] = static_cast<uint64_t>(tensor.sizes[3 - d]);
    // A stride that is never taken must be valid too.
    const int64_t stride = tensor.sizes[3 - d] == 1 ? 8 : tensor.strides[3 - d];
    shape.stride_bytes[d] = static_cast<uint64_t>(stride * element_bytes(dtype));
  }
  shape.box = {static_cast<uint32_t>(cols), static_cast<uint32_t>(rows), 1, 1};
  shape.swizzle = cols * element_bytes(dtype) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
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
