// Forward mode, results and their tangents: the kernels of both families, as the planner knows them.
#include <algorithm>
#include <utility>

#include "cuda/attention/captured/reads.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/forward.h"
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
  if (t.is_hopper()) {
    return device::HopperForwardMemory({.rows = t.rows,
                                        .cols = t.cols,
                                        .head = head,
                                        .value = value,
                                        .stages = t.stages,
                                        .query_stages = t.hopper().query_stages,
                                        .parts = t.parts(),
                                        .read_bytes = t.hopper().line_bytes,
                                        .read_stages = t.hopper().read_stages,
                                        .query_tiles = c.tangents_of.query ? 2 : 1,
                                        .key_tiles = c.tangents_of.key ? 2 : 1,
                                        .value_tiles = c.tangents_of.value ? 2 : 1})
        .bytes();
  }
  return device::TangentsMemory({.rows = t.rows,
                                 .cols = t.cols,
                                 .head = head,
                                 .value = value,
                                 .element_bytes = element,
                                 .query_tangent = c.tangents_of.query,
                                 .key_tangent = c.tangents_of.key,
                                 .value_tangent = c.tangents_of.value})
      .bytes();
}

// A warp has 16 queries, as registers hold two outputs and two tiles of scores of them. Values come in parts
// (column_parts).
std::vector<FlexTile> tiles(const FlexCase& c, const std::string& architecture) {
  const int most = std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols));
  if (takes_hopper(c, architecture) && most <= 128) {
    const bool large = most <= 64 && !c.blocks && !c.dropout && c.score_mod.text.empty();
    FlexTile t{128, large ? 96 : 64, 12, 2, false, HopperTile{}};
    // Larger heads leave the warps that bring lines too few registers.
    using score_mod::Reads;
    if (most <= 64 && !c.dropout && reads_by(c.score_mod, {Reads::kKey, Reads::kDiagonal})) {
      t.hopper().read_stages = 4;
      t.hopper().line_bytes = 4 << 10;
    }
    return {t};
  }
  const bool wide = c.dtype == DType::kFloat32;
  if (!wide && std::max(head_cols(c), value_cols(c)) <= 64) return {{64, 64, 4}, {32, 32, 2}};
  if (wide) return {{64, 16, 4}, {32, 16, 2}, {16, 16, 1}};
  if (c.head_size > kMostCols) return {{64, 16, 4}, {32, 32, 2}, {32, 16, 2}, {16, 16, 1}};  // {64, 32, 4} spills
  return {{64, 32, 4}, {32, 32, 2}};
}

KernelNames names(const KernelFacts& f) {
  if (f.hopper()) {
    return {"flex_tangents_hopper", "cuda/attention/tangents/hopper.cuh", "FlexTangentsHopper",
            "FlexTangentsHopperArguments"};
  }
  return {"flex_tangents", "cuda/attention/tangents/portable.cuh", "FlexTangents", nullptr};
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  text.type("Tangent", "::Tangent");
  text.numbers("kTangentsOf", c.tangents_of.buffers);
  text.choice("kTangentSmallBuffers", c.tangents_of.small_buffers);
  text.choice("kQueryTangent", c.tangents_of.query);
  text.choice("kKeyTangent", c.tangents_of.key);
  text.choice("kValueTangent", c.tangents_of.value);
  text.choice("kOutLow", c.out_low);
  if (f.hopper()) {
    text.choice("kUnscaled", c.unscaled);
    text.choice("kMaxScores", false);
    hopper_result_config(c, f, text);
  } else {
    text.number("kWarps", f.warps);
    text.choice("kSplit", splits_products(c));
  }
}

std::string structs(const FlexCase& c, score_mod::Unread unread) {
  // Behind the score_mod's buffers come their tangents, of the same dtypes.
  FlexMod tangent = c.score_mod;
  tangent.small_buffers = c.tangents_of.small_buffers;
  for (size_t i = 0; i < c.tangents_of.buffers.size(); ++i) {
    if (c.tangents_of.buffers[i]) tangent.dtypes.push_back(c.score_mod.dtypes.at(i));
  }
  return rendered(c, tangent, *score_mod::cached_tangent(score_text(c), c.tangents_of.buffers), "Tangent", unread);
}

LaunchPlan launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                  int64_t processors, int64_t /*launches*/) {
  const bool sections = spec.facts().hopper() && spec.facts().blocks;
  const int64_t section = sections ? forward_section(spec.facts(), shape, processors) : 1;
  return launch_by_query(std::move(spec), shape, mask, processors, section);
}

}  // namespace

const Kernel& tangents_kernel() {
  static const Kernel kernel{.arguments = "FlexTangentsArguments",
                             .tangent = true,
                             .derives = false,
                             .names = names,
                             .tiles = tiles,
                             .shared_bytes = shared_bytes,
                             .config = config,
                             .products = result_products,
                             .structs = structs,
                             .launch = launch};
  return kernel;
}

}  // namespace fusegrad::cuda
