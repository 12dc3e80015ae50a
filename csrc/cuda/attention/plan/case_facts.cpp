#include "cuda/attention/plan/case_facts.h"

#include <algorithm>

#include "cuda/attention/device/shared_memory.cuh"
#include "score_mod/cache.h"
#include "score_mod/index_analysis.h"

namespace fusegrad::cuda {

int element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

namespace planner {

int head_cols(const FlexCase& c, int multiple) { return device::round_up_to(c.head_size, multiple); }
int value_cols(const FlexCase& c, int multiple) { return device::round_up_to(std::max(c.value_size, 1), multiple); }
bool mixed(const FlexCase& c, const FlexTile& t) {
  return c.blocks && (c.block_size[0] % (t.rows / t.parts()) != 0 || c.block_size[1] % t.cols != 0);
}
bool masks_alone(const FlexCase& c) { return c.score_mod.text.empty() && c.mask_mod.dtypes.empty(); }
bool corners_tell(const FlexCase& c, const FlexTile& t) {
  if (!c.blocks || mixed(c, t) || c.mask_mod.text.empty() || !c.mask_mod.dtypes.empty()) return false;
  return score_mod::allows_between_corners(*score_mod::cached_graph(c.mask_mod.text));
}

bool has_derivative(const FlexCase& c) {
  const bool results = c.kernel == FlexKernel::kForward || c.kernel == FlexKernel::kTangents ||
                       c.kernel == FlexKernel::kSegments || c.kernel == FlexKernel::kMergeSegments;
  return !results && !c.score_mod.text.empty();
}
bool splits_products(const FlexCase& c) { return c.dtype == DType::kFloat32 && c.split; }
// The other warpgroup of the Hopper kernels is the producer.
int consumer_warps(const FlexTile& t) { return t.is_hopper() ? t.warps - 4 : t.warps; }
bool narrow_heads(const FlexCase& c, const FlexTile& t) {
  const int widest = std::max(head_cols(c), value_cols(c));
  return t.is_hopper() && ((t.rows == 128 && widest <= 32) || (t.rows == 96 && widest <= 96));
}

}  // namespace planner
}  // namespace fusegrad::cuda
