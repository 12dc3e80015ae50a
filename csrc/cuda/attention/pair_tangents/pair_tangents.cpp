// Second derivatives, what each pair gives to the tangents of the gradients: the kernel, as the planner knows it.
#include <algorithm>
#include <utility>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/tiles.h"
#include "score_mod/cache.h"

namespace fusegrad::cuda {

using namespace planner;

namespace {

int shared_bytes(const FlexCase& c, const FlexTile& t) {
  const int head = head_cols(c), value = value_cols(c), element = element_bytes(c.dtype);
  return device::PairTangentsMemory({.rows = t.rows,
                                     .cols = t.cols,
                                     .head = head,
                                     .value = value,
                                     .element_bytes = element,
                                     .grad_out_tangent = c.grad_out_tangent})
      .bytes();
}

// Four tiles of scores are in registers.
std::vector<FlexTile> tiles(const FlexCase& c, const std::string& /*architecture*/) {
  if (c.dtype == DType::kFloat32) return {{64, 16, 4}, {32, 16, 2}, {16, 16, 1}};
  if (std::max(head_cols(c), value_cols(c)) <= 64) return {{64, 64, 4}, {32, 32, 2}, {16, 16, 1}};
  return {{128, 64, 8}, {64, 32, 4}, {32, 32, 2}, {16, 16, 1}};
}

KernelNames names(const KernelFacts&) {
  return {"flex_pair_tangents", "cuda/attention/pair_tangents/portable.cuh", "FlexPairTangents", nullptr};
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  gradient_config(c, f, text);
  text.type("Curvature", "::Curvature");
  text.choice("kGradOutTangent", c.grad_out_tangent);
  text.choice("kSplit", splits_products(c));
}

std::string structs(const FlexCase& c, score_mod::Unread unread) {
  return rendered(c, c.score_mod, *score_mod::cached_curvature(score_text(c)), "Curvature", unread);
}

LaunchPlan launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                  int64_t processors, int64_t /*launches*/) {
  return launch_by_query(std::move(spec), shape, mask, processors, /*section=*/1);
}

}  // namespace

const Kernel& pair_tangents_kernel() {
  static const Kernel kernel{.arguments = "FlexPairTangentsArguments",
                             .names = names,
                             .tiles = tiles,
                             .shared_bytes = shared_bytes,
                             .add_facts = add_gradient_facts,
                             .config = config,
                             .structs = structs,
                             .launch = launch};
  return kernel;
}

}  // namespace fusegrad::cuda
