#include "cuda/attention/host/case_facts.h"

#include <algorithm>
#include <bit>

#include "cuda/attention/device/shared_memory.cuh"
#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda::planner {

using score_mod::Reads;

int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
int head_cols(const FlexCase& c, int multiple) { return device::round_up_to(c.head_size, multiple); }
int value_cols(const FlexCase& c, int multiple) { return device::round_up_to(std::max(c.value_size, 1), multiple); }
bool has_mods(const FlexCase& c) {
  return !c.score_mod.text.empty() || c.blocks || c.max_scores || c.max_gradient || c.dropout;
}

bool mixed(const FlexCase& c, const FlexTileSize& t) {
  return c.blocks && (c.block_size[0] % (t.rows / t.parts) != 0 || c.block_size[1] % t.cols != 0);
}
bool masks_alone(const FlexCase& c) { return c.score_mod.text.empty() && c.mask_mod.dtypes.empty(); }

namespace {

// Whether a score_mod uses q_idx and kv_idx for nothing but places of reads.
bool are_places_alone(const score_mod::Graph& graph) {
  using score_mod::Input, score_mod::Op;
  std::vector<bool> on_place(graph.nodes().size(), false);  // other than through a read
  for (size_t id = 0; id < on_place.size(); ++id) {
    const auto& node = graph.nodes()[id];
    if (node.op == Op::kLoad) continue;
    const auto input = static_cast<Input>(node.payload);
    on_place[id] = node.op == Op::kInput && (input == Input::kQ || input == Input::kKv);
    for (const score_mod::NodeId operand : node.operands) on_place[id] = on_place[id] || on_place[operand];
  }
  return !on_place[graph.result()];
}

}  // namespace

// Hopper forward: whether exponentials are relative to the first maximum of a row. BFloat16 does not overflow where
// Float16 would, and at larger head sizes it is slower. Scores are only scaled and masked, or changed by boxes alone:
// a bias that grows with the key, such as ALiBi's, would have each tile computed twice.
bool first_maximum(const FlexCase& c, const FlexTileSize& t) {
  const auto boxes_alone = [&] {
    if (!t.boxes || t.line_bytes > 0 || c.blocks || c.dropout) return false;
    return are_places_alone(*score_mod::cached_graph(c.score_mod.text));
  };
  return ((c.unscaled && masks_alone(c)) || boxes_alone()) && !c.max_scores && c.dtype == DType::kBFloat16 &&
         head_cols(c, kHopperCols) <= 192 && value_cols(c, kHopperCols) <= 128;
}
// Hopper forward: whether the first scores of the next queries run beside the last output. Of two warpgroups larger
// heads are 1 to 3% slower so; other score_mods were not measured.
bool seamless(const FlexCase& c, const FlexTileSize& t) {
  if (consumer_warps(t) > 8) return true;
  return first_maximum(c, t) && std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols)) == kHopperCols &&
         !c.dropout && !c.key_splits;
}
bool has_derivative(const FlexCase& c) {
  return c.kernel != FlexKernel::kForward && c.kernel != FlexKernel::kTangents && !c.score_mod.text.empty();
}
// The other warpgroup of the Hopper kernels is the producer.
int consumer_warps(const FlexTileSize& t) { return t.family == FlexFamily::kHopper ? t.warps - 4 : t.warps; }
bool keys_shared(const FlexCase& c, const FlexTileSize& t) {
  return t.family == FlexFamily::kHopper && c.kernel == FlexKernel::kBackward && t.cols < 16 * consumer_warps(t);
}
int warps_with_keys(const FlexCase& c, const FlexTileSize& t) {
  return consumer_warps(t) / (keys_shared(c, t) ? 2 : 1);
}
// Where keys are shared, dQ is left to a kernel of its own.
bool adds_grad_query(const FlexCase& c, const FlexTileSize& t) { return c.grad_query && !keys_shared(c, t); }
// Hopper backward: whether a head is one chunk of 32 columns. A warpgroup has 64 queries of dQ.
bool narrow(const FlexCase& c, const FlexTileSize& t) {
  const bool has_narrow = c.kernel == FlexKernel::kBackward || c.kernel == FlexKernel::kGradBuffers;
  return t.family == FlexFamily::kHopper && has_narrow && !keys_shared(c, t) && t.rows == 128 &&
         std::max(head_cols(c), value_cols(c)) <= 32;
}
bool stores_boxes(const FlexCase& c, const FlexTileSize& t) {
  return t.family == FlexFamily::kHopper && c.kernel == FlexKernel::kBackward && adds_grad_query(c, t) &&
         (c.score_mod.text.empty() || t.key_stages == 2);
}

bool stores_query(const FlexCase& c, const FlexTileSize& t) {
  return t.family == FlexFamily::kPortable && c.kernel == FlexKernel::kBackward && c.grad_query && !c.blocks &&
         c.most_keys != 0 && c.most_keys <= t.cols;
}

namespace {

// Whether a read of a pair by itself is a number that is the same in every batch, or every batch of a group.
bool is_kept(const score_mod::Graph& graph, score_mod::NodeId read, bool grouped = false) {
  if (graph.type(read) != score_mod::Type::kFloat) return false;
  const auto on = score_mod::dependences(graph)[read].on();
  return (on & score_mod::set_of(score_mod::kVarB)) == 0 || (grouped && score_mod::reads_by_groups(graph, read));
}

}  // namespace

int kept_reads(const FlexCase& c) {
  if (c.score_mod.text.empty()) return 0;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  const auto loads = score_mod::pair_reads(*graph);
  return static_cast<int>(
      std::count_if(loads.begin(), loads.end(), [&](score_mod::NodeId id) { return is_kept(*graph, id, c.grouped); }));
}

namespace {

// The elements of a buffer by some of its dimensions, a bit each, rounded up so that other sizes take the same kernel;
// 0 where they are no small table, or not known.
int small_table(const FlexCase& c, size_t buffer, uint32_t dimensions) {
  if (buffer >= c.sizes.size()) return 0;
  int64_t elements = 1;
  for (size_t d = 0; d < c.sizes[buffer].size(); ++d) {
    if (c.sizes[buffer][d] == 0) return 0;
    if ((dimensions >> d & 1) != 0) elements *= c.sizes[buffer][d];
    if (elements > score_mod::kSmallTableElements) return 0;
  }
  return static_cast<int>(std::bit_ceil(static_cast<uint32_t>(std::max<int64_t>(elements, 64))));
}

}  // namespace

int column_elements(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer) {
  return step.has_column ? small_table(c, buffer, step.column) : 0;
}

namespace {

bool sums_columns(const FlexCase& c) {
  if (c.score_mod.text.empty() || !c.wants_buffers()) return false;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  for (size_t k = 0; k < steps.size(); ++k) {
    if (column_elements(c, steps[k], static_cast<size_t>(derivative->contributions()[k].buffer)) > 0) return true;
  }
  return false;
}

}  // namespace

// Of each read of a pair the elements of the column of its table where that pays: a CTA reads a column once, and has
// some thousand pairs of a tile at least. No more than fit the shared memory of every GPU beside the rest.
std::vector<int> columns_of(const FlexCase& c, const FlexTileSize& t) {
  constexpr int kMostElements = 2048;
  std::vector<int> columns;
  if (c.score_mod.dtypes.empty()) return columns;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  int all = 0;
  for (const score_mod::NodeId id : score_mod::pair_reads(*graph)) {
    int elements = 0;
    if (t.columns && !(t.keeps && is_kept(*graph, id))) {
      const uint32_t dimensions = score_mod::column_dimensions(*graph, id, c.score_mod.dtypes);
      if (dimensions != 0) elements = small_table(c, static_cast<size_t>((*graph)[id].payload), dimensions);
    }
    if (all + elements > kMostElements) elements = 0;
    all += elements;
    columns.push_back(elements);
  }
  return columns;
}
int column_bytes(const FlexCase& c, const FlexTileSize& t) {
  int bytes = 0;
  for (const int elements : columns_of(c, t)) bytes += device::column_bytes(elements);
  return bytes;
}

bool stays(const FlexCase& c) {
  if (!c.many_batches || c.key_splits || c.blocks || c.most_queries != 64 || c.most_keys != 64) return false;
  FlexTileSize with_columns;
  with_columns.keeps = with_columns.columns = true;
  return kept_reads(c) > 0 || column_bytes(c, with_columns) > 0 ||
         (c.kernel == FlexKernel::kBackward && sums_columns(c));
}

namespace {

// What the kept reads of a tile take.
int kept_bytes(const FlexCase& c, const FlexTileSize& t) { return t.keeps ? 4 * t.rows * t.cols * kept_reads(c) : 0; }
// What the boxes of a tile of the score_mod's reads take.
int box_bytes(const FlexCase& c, const FlexTileSize& t) {
  if (!t.boxes) return 0;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  auto mapped = score_mod::mapped_reads(*graph, c.score_mod.dtypes);
  mapped.resize(static_cast<size_t>(t.maps));
  int bytes = 0;
  for (const score_mod::NodeId id : score_mod::pair_reads(*graph)) {
    if (t.keeps && is_kept(*graph, id)) continue;
    if (std::find(mapped.begin(), mapped.end(), id) != mapped.end()) continue;
    bytes += device::box_tile_bytes(t.rows, t.cols, score_mod::box_bytes(*graph, id, c.score_mod.dtypes));
  }
  return device::mapped_box_bytes(t.rows, t.cols, t.maps, bytes);
}

}  // namespace

bool has_boxes(const FlexMod& mod, Boxes of) {
  if (mod.dtypes.empty()) return false;
  const auto graph = score_mod::cached_graph(mod.text);
  const auto loads = score_mod::pair_reads(*graph);
  return std::any_of(loads.begin(), loads.end(), [&](score_mod::NodeId id) {
    const bool counts = of == Boxes::kAny || graph->type(id) == score_mod::Type::kFloat;
    return counts && score_mod::box_bytes(*graph, id, mod.dtypes) > 0;
  });
}

int shared_bytes(const FlexCase& c, const FlexTileSize& t) {
  const int head = head_cols(c), value = value_cols(c), element = element_bytes(c.dtype);
  const bool hopper = t.family == FlexFamily::kHopper;
  switch (c.kernel) {
    case FlexKernel::kForward:
      if (hopper) {
        return device::HopperForwardMemory({.rows = t.rows,
                                            .cols = t.cols,
                                            .head = head,
                                            .value = value,
                                            .stages = t.stages,
                                            .query_stages = t.query_stages,
                                            .parts = t.parts,
                                            .read_bytes = box_bytes(c, t) + t.line_bytes,
                                            .read_stages = t.read_stages})
            .bytes();
      }
      if (t.family == FlexFamily::kFew) {
        return device::FewForwardMemory({.rows = t.rows,
                                         .cols = t.cols,
                                         .head = head,
                                         .value = value,
                                         .element_bytes = element,
                                         .warps = t.warps,
                                         .stages = t.stages,
                                         .key_boxes = t.key_boxes})
            .bytes();
      }
      return device::ForwardMemory({.rows = t.rows,
                                    .cols = t.cols,
                                    .head = head,
                                    .value = value,
                                    .element_bytes = element,
                                    .box_bytes = box_bytes(c, t),
                                    .kept_bytes = kept_bytes(c, t),
                                    .column_bytes = column_bytes(c, t)})
          .bytes();
    case FlexKernel::kGradQuery:
      if (hopper) {
        return device::HopperGradQueryMemory({.rows = t.rows,
                                              .cols = t.cols,
                                              .head = head,
                                              .value = value,
                                              .stages = t.stages,
                                              .query_stages = t.query_stages})
            .bytes();
      }
      return device::GradQueryMemory(
                 {.rows = t.rows, .cols = t.cols, .head = head, .value = value, .element_bytes = element})
          .bytes();
    case FlexKernel::kPairTangents:
      return device::PairTangentsMemory({.rows = t.rows,
                                         .cols = t.cols,
                                         .head = head,
                                         .value = value,
                                         .element_bytes = element,
                                         .grad_out_tangent = c.grad_out_tangent})
          .bytes();
    case FlexKernel::kGradBuffers:
      if (hopper) {
        return device::HopperGradBuffersMemory({.rows = t.rows,
                                                .cols = t.cols,
                                                .head = head,
                                                .value = value,
                                                .stages = t.stages,
                                                .narrow = narrow(c, t),
                                                .kept = kept_reads(c)})
            .bytes();
      }
      return device::GradBuffersMemory({.rows = t.rows,
                                        .cols = t.cols,
                                        .head = head,
                                        .value = value,
                                        .element_bytes = element,
                                        .kept = kept_reads(c)})
          .bytes();
    case FlexKernel::kTangents:
      if (hopper) {
        return device::HopperForwardMemory({.rows = t.rows,
                                            .cols = t.cols,
                                            .head = head,
                                            .value = value,
                                            .stages = t.stages,
                                            .query_stages = t.query_stages,
                                            .parts = t.parts,
                                            .read_bytes = 0,
                                            .read_stages = 0,
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
    case FlexKernel::kBackward:
      if (hopper) {
        return device::HopperBackwardMemory({.rows = t.rows,
                                             .cols = t.cols,
                                             .head = head,
                                             .value = value,
                                             .stages = t.stages,
                                             .query_stages = t.query_stages,
                                             .key_stages = t.key_stages,
                                             .narrow = narrow(c, t),
                                             .adds_grad_query = adds_grad_query(c, t),
                                             .own_keys = !keys_shared(c, t),
                                             .own_places = t.own_places,
                                             .has_score_mod = !c.score_mod.text.empty(),
                                             .has_dropout = c.dropout,
                                             .box_bytes = box_bytes(c, t),
                                             .read_stages = t.read_stages,
                                             .captured_bytes = 0})
            .bytes();
      }
      return device::BackwardMemory({.rows = t.rows,
                                     .cols = t.cols,
                                     .head = head,
                                     .value = value,
                                     .element_bytes = element,
                                     .stages = t.stages,
                                     .gradient_stages = t.gradient_stages,
                                     .shares_keys = t.share > 1,
                                     .box_bytes = box_bytes(c, t),
                                     .kept_bytes = kept_bytes(c, t),
                                     .column_bytes = column_bytes(c, t),
                                     .captured_bytes = 0})
          .bytes();
  }
  return 0;
}

bool reads_by(const FlexMod& mod, std::initializer_list<Reads> kinds) {
  if (mod.dtypes.empty()) return false;
  const auto graph = score_mod::cached_graph(mod.text);
  const auto reads = score_mod::reads(*graph);
  for (size_t id = 0; id < reads.size(); ++id) {
    const bool load = graph->nodes()[id].op == score_mod::Op::kLoad;
    if (load && std::find(kinds.begin(), kinds.end(), reads[id]) != kinds.end()) return true;
  }
  return false;
}

}  // namespace fusegrad::cuda::planner
