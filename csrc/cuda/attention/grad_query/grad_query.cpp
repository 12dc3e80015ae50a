// dQ by itself: its kernels of both families, as the planner knows them.
#include <algorithm>
#include <utility>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/tiles.h"

namespace fusegrad::cuda {

using namespace planner;

namespace {

int shared_bytes(const FlexCase& c, const FlexTile& t) {
  const int head = head_cols(c), value = value_cols(c), element = element_bytes(c.dtype);
  if (t.is_hopper()) {
    return device::HopperGradQueryMemory({.rows = t.rows,
                                          .cols = t.cols,
                                          .head = head,
                                          .value = value,
                                          .stages = t.stages,
                                          .query_stages = t.hopper().query_stages})
        .bytes();
  }
  return device::GradQueryMemory(
             {.rows = t.rows, .cols = t.cols, .head = head, .value = value, .element_bytes = element})
      .bytes();
}

std::vector<FlexTile> hopper_grad_query(const FlexCase& c) {
  const auto tile = [](int cols, int stages, int query_stages) {
    return FlexTile{128, cols, 12, stages, false, HopperTile{.query_stages = query_stages}};
  };
  if (fits_hopper_backward(c)) {
    // What a score_mod reads for each pair by itself is prefetched a tile ahead, and should stay in the L1 cache.
    if (reads_pairs(c.score_mod)) return {tile(64, 2, 1)};
    return {tile(128, 2, 2), tile(128, 2, 1)};
  }
  return {tile(64, 2, 1), tile(64, 1, 1)};
}

std::vector<FlexTile> tiles(const FlexCase& c, const std::string& architecture) {
  if (takes_hopper(c, architecture)) return hopper_grad_query(c);
  if (c.dtype == DType::kFloat32) return {{64, 32, 4}, {32, 32, 2}, {32, 16, 2}, {16, 16, 1}};
  if (std::max(head_cols(c), value_cols(c)) <= 128) return {{128, 32, 4}, {64, 32, 4}};
  return {{64, 32, 4}, {32, 32, 2}, {32, 16, 2}, {16, 16, 1}};
}

void add_facts(const FlexCase& c, KernelFacts& f) {
  f.grad_query = c.grad_query;
  add_gradient_facts(c, f);
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  gradient_config(c, f, text);
  text.choice("kGradQuery", f.grad_query);
  text.choice("kKeySplits", f.key_splits);
  if (f.hopper()) {
    text.number("kGroups", f.groups);
    text.number("kStages", f.tile.stages);
    text.number("kQueryStages", f.tile.hopper().query_stages);
  } else {
    text.choice("kSplit", splits_products(c));
  }
}

KernelNames names(const KernelFacts& f) {
  if (f.hopper()) {
    return {"flex_grad_query_hopper", "cuda/attention/grad_query/hopper.cuh", "FlexGradQueryHopper",
            "FlexBackwardHopperArguments"};
  }
  return {"flex_grad_query", "cuda/attention/grad_query/portable.cuh", "FlexGradQuery", nullptr};
}

// S and dP: both operands in shared memory, K-major. dQ: dS in registers by keys, MN-major.
std::string products(DType dtype, const KernelFacts& f) {
  return wgmma(dtype, f.tile.cols, false, false) + wgmma(dtype, f.head, true, true);
}

LaunchPlan launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                  int64_t processors, int64_t /*launches*/) {
  const bool sections = spec.facts().hopper() && spec.facts().blocks;
  const int64_t section = sections ? backward_section(shape) : 1;
  return launch_by_query(std::move(spec), shape, mask, processors, section);
}

}  // namespace

const Kernel& grad_query_kernel() {
  static const Kernel kernel{.arguments = "FlexBackwardArguments",
                             .names = names,
                             .tiles = tiles,
                             .shared_bytes = shared_bytes,
                             .add_facts = add_facts,
                             .config = config,
                             .products = products,
                             .launch = launch};
  return kernel;
}

}  // namespace fusegrad::cuda
