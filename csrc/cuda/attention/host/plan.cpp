#include "cuda/attention/host/plan.h"

#include <atomic>
#include <bit>
#include <functional>
#include <utility>

#include "attention/flex_attention.h"
#include "common/error.h"
#include "cuda/attention/device/arguments.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "score_mod/cache.h"
#include "score_mod/derivative.h"
#include "score_mod/index_analysis.h"
#include "score_mod/render_cuda.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda {
namespace {

using score_mod::Reads;

std::atomic<char> forced_scheme{0};
std::atomic<std::optional<FlexFamily>> forced_family{};

// Products round head sizes up to kCols. In shared memory the Hopper kernels have whole chunks of kHopperCols columns.
constexpr int kCols = 16, kHopperCols = 64;
int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
int head_cols(const FlexCase& c, int multiple = kCols) { return device::round_up_to(c.head_size, multiple); }
int value_cols(const FlexCase& c, int multiple = kCols) {
  return device::round_up_to(std::max(c.value_size, 1), multiple);
}
bool has_mods(const FlexCase& c) {
  return !c.score_mod.text.empty() || c.blocks || c.max_scores || c.max_gradient || c.dropout;
}

bool mixed(const FlexCase& c, const FlexTileSize& t) {
  return c.blocks && (c.block_size[0] % (t.rows / t.parts) != 0 || c.block_size[1] % t.cols != 0);
}
// Whether masks are all that is done to scores, and a mask_mod reads no buffer.
bool masks_alone(const FlexCase& c) { return c.score_mod.text.empty() && c.mask_mod.dtypes.empty(); }
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

// Hopper forward: whether exponentials are relative to the first maximum of a row. BFloat16 does not overflow where
// Float16 would, and at larger head sizes it is slower. Scores are only scaled and masked, or changed by boxes alone:
// a bias that grows with the key, such as ALiBi's, would have each tile computed twice.
bool first_maximum(const FlexCase& c, const FlexTileSize& t) {
  const auto boxes_alone = [&] {
    if (!t.boxes || t.line_bytes > 0 || c.blocks || c.dropout) return false;
    return are_places_alone(*score_mod::cached_graph(c.score_mod.text));
  };
  return ((c.unscaled && masks_alone(c)) || boxes_alone()) && !c.max_scores && c.dtype == DType::kBFloat16 &&
         std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols)) <= 128;
}
bool has_derivative(const FlexCase& c) {
  return c.kernel != FlexKernel::kForward && c.kernel != FlexKernel::kTangents && !c.score_mod.text.empty();
}
// The other warpgroup of the Hopper kernels is the producer.
int consumer_warps(const FlexTileSize& t) { return t.family == FlexFamily::kHopper ? t.warps - 4 : t.warps; }
// Backward: both consumer warpgroups have the same 64 keys, and one of them the captured buffers' sums.
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
// Whether the backward stores dK and dV by TMA.
bool stores_boxes(const FlexCase& c, const FlexTileSize& t) {
  return t.family == FlexFamily::kHopper && c.kernel == FlexKernel::kBackward && adds_grad_query(c, t) &&
         (c.score_mod.text.empty() || t.key_stages == 2);
}

// Portable: whether a CTA of the backward has all keys of each of its queries, and there are any.
bool stores_query(const FlexCase& c, const FlexTileSize& t) {
  return t.family == FlexFamily::kPortable && c.kernel == FlexKernel::kBackward && c.grad_query && !c.blocks &&
         c.most_keys != 0 && c.most_keys <= t.cols;
}

// What a contribution's scheme takes of shared memory.
int scheme_bytes(const FlexCase& c, const FlexTileSize& t, char scheme, int table) {
  const bool hopper = t.family == FlexFamily::kHopper;
  const int warps = warps_with_keys(c, t);
  const device::CapturedMemory memory{.warps = warps,
                                      .teams = hopper ? warps / 4 : 1,
                                      .sets = hopper ? 2 : 1,
                                      .queries = t.rows / t.share,
                                      .keys = t.cols * t.share / warps};
  return memory.bytes(scheme, table);
}

// Whether a read of a pair by itself is a number that is the same in every batch.
bool is_kept(const score_mod::Graph& graph, score_mod::NodeId read) {
  const auto on = score_mod::dependences(graph)[read].on();
  return graph.type(read) == score_mod::Type::kFloat && (on & score_mod::set_of(score_mod::kVarB)) == 0;
}
int kept_reads(const FlexMod& mod) {
  if (mod.text.empty()) return 0;
  const auto graph = score_mod::cached_graph(mod.text);
  const auto loads = score_mod::pair_reads(*graph);
  return static_cast<int>(
      std::count_if(loads.begin(), loads.end(), [&](score_mod::NodeId id) { return is_kept(*graph, id); }));
}

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
// Of the column of a table that a (b, h) reaches; 0 where it is the whole table.
int column_elements(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer) {
  return step.has_column ? small_table(c, buffer, step.column) : 0;
}
bool sums_columns(const FlexCase& c) {
  if (c.score_mod.text.empty() || !c.wants_buffers()) return false;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  for (size_t k = 0; k < steps.size(); ++k) {
    if (column_elements(c, steps[k], static_cast<size_t>(derivative->contributions()[k].buffer)) > 0) return true;
  }
  return false;
}
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

// Portable: whether a CTA stays with a head for many batches, whose reads or sums are partly the same.
bool stays(const FlexCase& c) {
  if (!c.many_batches || c.key_splits || c.blocks || c.most_queries != 64 || c.most_keys != 64) return false;
  FlexTileSize with_columns;
  with_columns.keeps = with_columns.columns = true;
  return kept_reads(c.score_mod) > 0 || column_bytes(c, with_columns) > 0 ||
         (c.kernel == FlexKernel::kBackward && sums_columns(c));
}

// What the kept reads of a tile take.
int kept_bytes(const FlexCase& c, const FlexTileSize& t) {
  return t.keeps ? 4 * t.rows * t.cols * kept_reads(c.score_mod) : 0;
}
// What the boxes of a tile of the score_mod's reads take.
int box_bytes(const FlexCase& c, const FlexTileSize& t) {
  if (!t.boxes) return 0;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  int bytes = 0;
  for (const score_mod::NodeId id : score_mod::pair_reads(*graph)) {
    if (t.keeps && is_kept(*graph, id)) continue;
    bytes += device::box_tile_bytes(t.rows, t.cols, score_mod::box_bytes(*graph, id, c.score_mod.dtypes));
  }
  return bytes;
}
enum class Boxes : uint8_t { kAny, kNumbers };
bool has_boxes(const FlexMod& mod, Boxes of = Boxes::kAny) {
  if (mod.dtypes.empty()) return false;
  const auto graph = score_mod::cached_graph(mod.text);
  const auto loads = score_mod::pair_reads(*graph);
  return std::any_of(loads.begin(), loads.end(), [&](score_mod::NodeId id) {
    const bool counts = of == Boxes::kAny || graph->type(id) == score_mod::Type::kFloat;
    return counts && score_mod::box_bytes(*graph, id, mod.dtypes) > 0;
  });
}

// The dynamic shared memory of a kernel, but for what schemes take.
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
                                         .stages = t.stages})
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
                                                .kept = kept_reads(c.score_mod)})
            .bytes();
      }
      return device::GradBuffersMemory({.rows = t.rows,
                                        .cols = t.cols,
                                        .head = head,
                                        .value = value,
                                        .element_bytes = element,
                                        .kept = kept_reads(c.score_mod)})
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

// Whether a score_mod or mask_mod has a read of one of these kinds.
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

// Of a tile, for lines of what mods read.
int line_bytes(const FlexCase& c) {
  const bool lines = reads_by(c.score_mod, {Reads::kKey, Reads::kDiagonal}) ||
                     reads_by(c.mask_mod, {Reads::kRow, Reads::kKey, Reads::kDiagonal});
  return lines ? 6 << 10 : 0;
}

// Whether 64 keys' gradients fit the registers of one warpgroup.
bool fits_hopper_backward(const FlexCase& c) {
  const int head = head_cols(c, kHopperCols);
  return head <= 128 && value_cols(c, kHopperCols) <= head;
}
// Whether the Hopper forward or backward has boxes of what a score_mod reads.
bool has_hopper_boxes(const FlexCase& c) {
  const bool backward = c.kernel == FlexKernel::kBackward && fits_hopper_backward(c) && (c.grad_query || c.grad_key);
  return (c.kernel == FlexKernel::kForward || backward) && c.aligned_boxes && has_boxes(c.score_mod);
}

// The keys of a tile of three warpgroups, of which a thread has 152 or 160 registers; 0: they do not pay. Scores that
// are changed leave room for 112 keys at head sizes up to 64, for 128 up to 48.
int keys_of_three(const FlexCase& c) {
  const int head = std::max(head_cols(c), value_cols(c));
  if (head > kHopperCols || c.max_scores || c.key_splits) return 0;
  if (masks_alone(c)) return c.tall ? 128 : 0;
  if (!c.tall || c.blocks || c.dropout) return 0;
  if (!has_hopper_boxes(c)) return head > 48 ? 112 : 128;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  int bytes = 0;
  for (const score_mod::NodeId load : score_mod::pair_reads(*graph)) {
    const int element = score_mod::box_bytes(*graph, load, c.score_mod.dtypes);
    if (element > 0 && graph->type(load) != score_mod::Type::kFloat) return 0;
    bytes = std::max(bytes, element);
  }
  return bytes == 4 ? 96 : head > 48 ? 0 : 128;
}

std::vector<FlexTileSize> hopper_forward(const FlexCase& c) {
  const int head = std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols));
  const int keys = keys_of_three(c), groups = keys > 0 ? 3 : 2;
  FlexTileSize t{64 * groups, keys > 0 ? keys : 128, 4 * (groups + 1), 1, 2, FlexFamily::kHopper};
  // 80 keys would leave no room for lines, and dropout is drawn for 64.
  t.line_bytes = line_bytes(c);
  if (head > 128) t.cols = c.blocks || c.dropout || t.line_bytes > 0 ? 64 : 80;
  if (groups == 3 && c.blocks) t.parts = groups;
  std::vector<FlexTileSize> found;
  const auto add = [&](bool boxes, int read_stages) {
    FlexTileSize tile = t;
    tile.boxes = boxes;
    tile.read_stages = read_stages;
    // A second tile of queries is slower for two warpgroups that look for the first maximum alone, but where the next
    // queries begin beside the last output.
    const bool seamless = head == kHopperCols && !c.dropout && !c.key_splits;
    tile.query_stages = groups == 2 && first_maximum(c, t) && !seamless ? 1 : 2;
    if (shared_bytes(c, tile) > flex_shared_limit(90)) tile.query_stages = 1;
    found.push_back(tile);
  };
  if (has_hopper_boxes(c)) {
    add(true, 2);
    add(true, 1);
  }
  if (t.line_bytes > 0) add(false, 4);
  add(false, t.line_bytes > 0 ? 2 : 0);
  return found;
}

// Each of two warpgroups has 64 keys, whose gradients stay in registers, and scores of as many queries as then fit;
// else both share 64 keys.
std::vector<FlexTileSize> hopper_backward(const FlexCase& c) {
  if (!fits_hopper_backward(c)) return {{64, 64, 12, 1, 2, FlexFamily::kHopper, 2}};
  const int rows = head_cols(c, kHopperCols) == 64 ? 128 : 64;
  // With tall tiles products read less of keys and values per query; there are registers for it where pairs need few.
  const bool takes_tall = c.tall && !c.max_gradient && (c.grad_query || (rows == 64 && (!c.blocks || c.grad_key)));
  if (const auto tall = backward_tall_tile(c); tall && takes_tall) return {*tall};
  // The next keys beside the present ones, where they fit.
  std::vector<FlexTileSize> found;
  const auto add = [&](int tile_rows, int key_stages, int query_stages, int read_stages = 0) {
    FlexTileSize t{tile_rows, 128, 12, 1, 2, FlexFamily::kHopper, query_stages, key_stages};
    t.boxes = read_stages > 0;
    t.read_stages = read_stages;
    if (key_stages == 1 || c.grad_query) found.push_back(t);
  };
  if (has_hopper_boxes(c)) {
    // Tall tiles fit beside boxes where those of queries and keys are narrow.
    if (c.grad_query && std::max(head_cols(c), value_cols(c)) <= 32) {
      for (const int query_stages : {3, 2}) add(128, 2, query_stages, 2);
      for (const int read_stages : {2, 1}) add(128, 1, 2, read_stages);
    }
    for (const int query_stages : {3, 2}) add(64, 2, query_stages, 2);
    for (const int query_stages : {3, 2}) add(64, 1, query_stages, 2);
    add(64, 1, 2, 1);
  }
  for (const int query_stages : {3, 2}) add(rows, 2, query_stages);
  if (c.score_mod.text.empty() && c.grad_query) return found;
  for (const int query_stages : {3, 2}) add(rows, 1, query_stages);
  return found;
}
std::vector<FlexTileSize> hopper_grad_query(const FlexCase& c) {
  if (fits_hopper_backward(c)) {
    // What a score_mod reads for each pair by itself is prefetched a tile ahead, and should stay in the L1 cache.
    if (reads_pairs(c.score_mod)) return {{128, 64, 12, 1, 2, FlexFamily::kHopper}};
    return {{128, 128, 12, 1, 2, FlexFamily::kHopper, 2}, {128, 128, 12, 1, 2, FlexFamily::kHopper}};
  }
  return {{128, 64, 12, 1, 2, FlexFamily::kHopper}, {128, 64, 12, 1, 1, FlexFamily::kHopper}};
}

std::vector<FlexTileSize> portable_backward(const FlexCase& c, int head) {
  if (c.dtype == DType::kFloat32) {
    if (head <= 64) return {{32, 64, 4, 1, 1}, {32, 32, 4, 2, 1}};
    if (head <= 128) return {{32, 64, 8, 2, 1}, {32, 32, 4, 2, 1}};
    return {{64, 32, 8, 4, 1}, {32, 32, 4, 2, 1}, {32, 16, 2, 2, 1}};
  }
  if (head > 128) return {{64, 64, 8, 2, 1}, {32, 32, 4, 2, 1}};
  // The gradients of captured buffers need the shared memory, and their sums a barrier after each tile anyway.
  const bool delayed = c.grad_query && !c.wants_buffers();
  std::vector<FlexTileSize> found;
  const auto add = [&](FlexTileSize t) {
    if (t.stages == 2 && delayed) {
      t.gradient_stages = 2;
      found.push_back(t);
      t.gradient_stages = 1;
    }
    found.push_back(t);
  };
  if (head <= 64) {
    const bool few = c.most_queries == 64;
    if (few && c.most_keys == 64) {
      if (FlexTileSize t{64, 64, 4, 1, 1}; stays(c)) {
        t.keeps = true;
        add(t);
      }
      add({64, 64, 4, 1, 1});
    }
    if (!few) add({128, 128, 8, 2, 2});
    add({64, 128, 8, 2, 1});
  } else {
    add({64, 128, 8, 2, 2});
    add({64, 128, 8, 2, 1});
    add({32, 64, 4, 1, 2});
    add({32, 64, 4, 1, 1});
  }
  return found;
}

// CTAs of a multiprocessor. More than two would leave each thread fewer registers than it needs.
int resident_ctas(int shared_bytes, const std::string& architecture) {
  constexpr int kReserved = 1 << 10;
  return std::clamp((flex_shared_limit(std::stoi(architecture)) + kReserved) / (shared_bytes + kReserved), 1, 2);
}

// Of few queries: copies of many keys under way, of two CTAs, so that one goes on where the other begins or ends.
std::vector<FlexTileSize> few_forward(const FlexCase& c, const std::string& architecture) {
  const int bytes = element_bytes(c.dtype) * std::max(head_cols(c), value_cols(c));
  const int keys = bytes <= 128 ? 32 : 16;  // of a warp
  std::vector<FlexTileSize> found;
  for (const auto& [warps, stages] : {std::pair{4, 3}, {4, 2}, {2, 3}, {2, 2}, {1, 2}})
    found.push_back({c.few_rows, keys * warps, warps, 1, stages, FlexFamily::kFew});
  const auto two = [&](const FlexTileSize& t) { return resident_ctas(shared_bytes(c, t), architecture) == 2; };
  if (!two(found[0]) && two(found[1])) std::swap(found[0], found[1]);
  return found;
}

int contributions(const FlexCase& c) {
  return static_cast<int>(score_mod::cached_derivative(c.score_mod.text, c.wants_grad)->contributions().size());
}
// Reads from the L2 cache limit it at small heads: taller tiles read each batch's keys fewer times. They must fit the
// shared memory of every GPU.
FlexTileSize grad_buffers_tile(const FlexCase& c, const std::string& architecture) {
  const int cols = std::max(head_cols(c), value_cols(c));
  const bool small = c.most_queries == 64 || c.most_keys == 64 || cols > kHopperCols,
             one = kept_reads(c.score_mod) <= 1;
  const bool hopper = architecture == "90a" && forced_family.load() != FlexFamily::kPortable;
  // Sums of a second contribution would not fit the registers.
  if (hopper && !small && one && contributions(c) == 1)
    return {128, 128, 12, 1, cols <= 32 ? 4 : 2, FlexFamily::kHopper};
  return !small && one && cols <= 32 ? FlexTileSize{128, 64, 8} : FlexTileSize{64, 64, 4};
}
// CTAs of a multiprocessor, by registers.
int grad_buffers_ctas(const FlexTileSize& tile) {
  return tile.family == FlexFamily::kHopper ? 1 : tile.rows == 64 ? 3 : 2;
}

// A warp has 16 queries, as registers hold two outputs and two tiles of scores of them. Values come in parts
// (tangents_parts).
std::vector<FlexTileSize> tangents(const FlexCase& c, const std::string& architecture) {
  const int most = std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols));
  if (takes_hopper(c, architecture) && most <= 128) {
    const bool large = most <= 64 && !c.blocks && !c.dropout && c.score_mod.text.empty();
    return {{128, large ? 96 : 64, 12, 1, 2, FlexFamily::kHopper}};
  }
  const bool wide = c.dtype == DType::kFloat32;
  if (!wide && std::max(head_cols(c), value_cols(c)) <= 64) return {{64, 64, 4}, {32, 32, 2}};
  if (wide) return {{64, 16, 4}, {32, 16, 2}, {16, 16, 1}};
  return {{64, 32, 4}, {32, 32, 2}};
}

// Four tiles of scores are in registers.
std::vector<FlexTileSize> pair_tangents(const FlexCase& c) {
  if (c.dtype == DType::kFloat32) return {{64, 16, 4}, {32, 16, 2}, {16, 16, 1}};
  if (std::max(head_cols(c), value_cols(c)) <= 64) return {{64, 64, 4}, {32, 32, 2}, {16, 16, 1}};
  return {{128, 64, 8}, {64, 32, 4}, {32, 32, 2}, {16, 16, 1}};
}

// Each of the portable tiles with columns of tables first, where the score_mod has reads for them.
std::vector<FlexTileSize> with_columns(const FlexCase& c, const std::vector<FlexTileSize>& tiles) {
  if (c.kernel != FlexKernel::kForward && c.kernel != FlexKernel::kBackward) return tiles;
  std::vector<FlexTileSize> found;
  for (FlexTileSize t : tiles) {
    t.columns = true;
    if (column_bytes(c, t) > 0) found.push_back(t);
    t.columns = false;
    found.push_back(t);
  }
  return found;
}

// Each of the portable tiles with boxes first, where the score_mod has reads for them.
std::vector<FlexTileSize> with_boxes(const FlexCase& c, std::vector<FlexTileSize> tiles) {
  if (c.kernel == FlexKernel::kGradQuery || !has_boxes(c.score_mod)) return tiles;
  std::vector<FlexTileSize> found;
  for (FlexTileSize& t : tiles) {
    // Of places of reads that are kept, boxes would be copied for each batch in vain.
    t.boxes = !t.keeps || kept_reads(c.score_mod) == 0;
    found.push_back(t);
  }
  for (FlexTileSize& t : tiles) {
    t.boxes = false;
    found.push_back(t);
  }
  return found;
}

// Whether boxes are worth more than the Hopper kernels that have none: measured with biases of pairs, without block
// masks, where sums are in any order. The gradient of max_scores needs the forward's scores to the bit, of one family.
bool boxes_pay(const FlexCase& c) {
  const std::optional<FlexFamily> forced = forced_family;
  if (forced || c.max_scores || c.max_gradient || c.blocks || c.fixed_point || c.partial_sums ||
      !has_boxes(c.score_mod, Boxes::kNumbers))
    return false;
  const int head = std::max(head_cols(c), value_cols(c));
  return (c.kernel == FlexKernel::kForward && head <= 48 && !has_hopper_boxes(c)) ||
         (c.kernel == FlexKernel::kBackward && c.grad_query && head <= 64 && !has_hopper_boxes(c));
}

// From the best to the least demanding. Where a score_mod or a mask needs registers, tiles are smaller.
std::vector<FlexTileSize> portable(const FlexCase& c);
std::vector<FlexTileSize> candidates(const FlexCase& c, const std::string& architecture) {
  if (c.kernel == FlexKernel::kForward && c.few_rows > 0) return few_forward(c, architecture);
  if (c.kernel == FlexKernel::kGradBuffers) return {grad_buffers_tile(c, architecture)};
  if (c.kernel == FlexKernel::kTangents) return tangents(c, architecture);
  if (c.kernel == FlexKernel::kPairTangents) return pair_tangents(c);
  if (takes_hopper(c, architecture) && !boxes_pay(c)) {
    switch (c.kernel) {
      case FlexKernel::kForward:
        return hopper_forward(c);
      case FlexKernel::kGradQuery:
        return hopper_grad_query(c);
      case FlexKernel::kBackward:
        return hopper_backward(c);
      case FlexKernel::kGradBuffers:
      case FlexKernel::kTangents:
      case FlexKernel::kPairTangents:
        break;
    }
  }
  return with_columns(c, with_boxes(c, portable(c)));
}
std::vector<FlexTileSize> portable(const FlexCase& c) {
  const int head = std::max(head_cols(c), value_cols(c));
  const bool wide = c.dtype == DType::kFloat32, mods = has_mods(c);
  switch (c.kernel) {
    case FlexKernel::kForward:
      if (wide) return {{64, 32, 4}, {32, 32, 2}, {32, 16, 2}};
      if (head <= 64) {
        FlexTileSize t{c.most_queries == 64 ? 64 : 128, 64, 4};
        t.keeps = stays(c);
        return {t};
      }
      if (head <= 128) return {mods ? FlexTileSize{128, 32, 4} : FlexTileSize{128, 64, 4}, {64, 32, 4}};
      return {mods ? FlexTileSize{128, 32, 8} : FlexTileSize{128, 64, 8}, {64, 32, 4}};
    case FlexKernel::kGradQuery:
      if (wide) return {{64, 32, 4}, {32, 32, 2}, {32, 16, 2}, {16, 16, 1}};
      if (head <= 128) return {{128, 32, 4}, {64, 32, 4}};
      return {{64, 32, 4}, {32, 32, 2}};
    case FlexKernel::kBackward:
      return portable_backward(c, head);
    case FlexKernel::kGradBuffers:
    case FlexKernel::kTangents:
    case FlexKernel::kPairTangents:
      break;
  }
  return {};
}

// The classes whose schemes are right for a contribution of a class, which are its special cases.
bool allows(char scheme, char wanted) {
  if (wanted == 'G' || wanted == 'F') return true;
  return scheme == wanted || (scheme == 'A' && (wanted == 'B' || wanted == 'C' || wanted == 'D'));
}

char scheme_of(score_mod::ScatterClass planned) {
  const char scheme = static_cast<char>(planned), forced = forced_scheme;
  return forced != 0 && allows(scheme, forced) ? forced : scheme;
}
// The scheme of contributions that are added element by element (device::FlexBufferSums).
char vector_scheme(char scheme) { return scheme == 'A' ? 'a' : scheme == 'B' ? 'b' : scheme == 'C' ? 'c' : 'g'; }

// Whether contribution k is stored, as every element of its buffer gets one.
bool is_stored(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer) {
  if (forced_scheme != 0 || c.blocks || step.inputs.empty() || buffer >= c.covered.size() || !c.covered[buffer])
    return false;
  const score_mod::DType dtype = c.score_mod.dtypes[buffer];
  return dtype == score_mod::DType::kFloat32 || dtype == score_mod::DType::kBFloat16 ||
         dtype == score_mod::DType::kFloat16;
}

// Of a stored contribution, whether it is dS itself, of the same type, whose tiles TMA can store. One of them: there is
// one tensor map.
bool stores_tiles(const FlexCase& c, const KernelFacts& facts, const score_mod::Graph& derivative,
                  const score_mod::ScatterStep& step, size_t buffer) {
  using score_mod::Input;
  const auto same = c.dtype == DType::kBFloat16 ? score_mod::DType::kBFloat16 : score_mod::DType::kFloat16;
  const std::vector<Input> pairs{Input::kB, Input::kH, Input::kQ, Input::kKv};
  return facts.hopper() && facts.grad_query && c.dtype != DType::kFloat32 && c.score_mod.dtypes[buffer] == same &&
         derivative.contributions().size() == 1 && score_mod::passes_gradient(derivative) && step.inputs == pairs &&
         buffer < c.sizes.size() && c.sizes[buffer][3] % 8 == 0;
}

// The schemes, and what they take; what does not fit or has no scheme of its own adds pair by pair. Whether all fit.
bool choose_schemes(const FlexCase& c, int left, KernelFacts& facts) {
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto& contributions = derivative->contributions();
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  bool all_fit = true;
  for (size_t k = 0; k < steps.size(); ++k) {
    char scheme = scheme_of(steps[k].scheme);
    const int64_t elements = c.elements[static_cast<size_t>(contributions[k].buffer)];
    if (scheme == 'F' && elements > score_mod::kSmallTableElements) scheme = 'G';
    if (steps[k].is_vector) scheme = vector_scheme(scheme);
    if (const auto buffer = static_cast<size_t>(contributions[k].buffer);
        c.kernel == FlexKernel::kBackward && is_stored(c, steps[k], buffer))
      scheme = stores_tiles(c, facts, *derivative, steps[k], buffer) ? 'T' : 'S';
    constexpr int64_t kLeastTable = 32;  // a place for each lane
    int table = scheme == 'F' ? static_cast<int>(std::max(elements, kLeastTable)) : 0;
    const int column = column_elements(c, steps[k], static_cast<size_t>(contributions[k].buffer));
    if (column > 0 && forced_scheme == 0) scheme = 'F';
    if (column > 0 && scheme == 'F') table = column;
    int bytes = scheme_bytes(c, facts.tile, scheme, table);
    if (bytes > left) {
      all_fit = false;
      scheme = 'G';
      table = bytes = 0;
    }
    left -= bytes;
    facts.schemes += scheme;
    facts.tables.push_back(table);
    facts.shared_bytes += bytes;
  }
  return all_fit;
}

// All but the schemes.
KernelFacts facts_of(const FlexCase& c, const FlexTileSize& tile) {
  KernelFacts f;
  f.kernel = c.kernel;
  f.dtype = c.dtype;
  f.tile = tile;
  f.head = head_cols(c);
  f.value = value_cols(c);
  f.warps = warps_with_keys(c, tile);
  f.groups = tile.family == FlexFamily::kHopper ? consumer_warps(tile) / 4 : 0;
  f.keys_shared = keys_shared(c, tile);
  f.narrow = narrow(c, tile);
  f.key_splits = c.key_splits && c.kernel != FlexKernel::kBackward;
  f.blocks = c.blocks;
  f.mixed = mixed(c, tile);
  f.split = c.dtype == DType::kFloat32 && c.split;
  f.mask_alone = masks_alone(c);
  f.dropout = c.dropout;
  if (c.kernel == FlexKernel::kForward) {
    f.unscaled = c.unscaled;
    f.first_maximum = first_maximum(c, tile);
    f.max_scores = c.max_scores;
    f.out_low = c.out_low;
  } else if (c.kernel == FlexKernel::kTangents) {
    f.tangents_of = c.tangents_of;
    f.unscaled = c.unscaled;
    f.out_low = c.out_low;
  } else {
    f.grad_query = adds_grad_query(c, tile);
    f.stores_boxes = stores_boxes(c, tile);
    f.stores_query = stores_query(c, tile);
    f.grad_key = c.grad_key;
    f.grad_value = c.grad_value;
    f.grad_scores = c.grad_query || c.grad_key;  // choose_schemes may add to it
    f.max_gradient = c.max_gradient;
    f.fixed_point = c.fixed_point;
    f.partial_sums = c.partial_sums;
    f.has_derivative = has_derivative(c);
    f.grad_out_tangent = c.grad_out_tangent;
    f.wants_grad = c.wants_grad;
  }
  f.columns = columns_of(c, tile);
  f.score_mod = c.score_mod;
  f.mask_mod = c.mask_mod;
  f.small_lengths = c.small_lengths;
  f.shared_bytes = shared_bytes(c, tile);
  return f;
}

}  // namespace

bool takes_hopper(const FlexCase& c, const std::string& architecture) {
  if (architecture != "90a" || c.dtype == DType::kFloat32) return false;
  if (c.head_size == 0 || c.value_size == 0) return false;  // the copy engine has no empty tensors
  if (const std::optional<FlexFamily> forced = forced_family; forced) return *forced == FlexFamily::kHopper;
  // Of small heads the portable kernels have tiles for short sequences, and boxes in all kernels. The gradient of
  // max_scores needs forward and backward of one family.
  const int cols = head_cols(c) + value_cols(c);
  if (c.most_queries == 64 && c.most_keys == 64) return cols > 96;
  const bool boxes_too = has_hopper_boxes(c) && !c.max_scores;
  return cols >= 96 || (c.most_queries == 0 && c.most_keys == 0 && (boxes_too || !has_boxes(c.score_mod)));
}
std::optional<FlexTileSize> backward_tall_tile(const FlexCase& c) {
  if (!fits_hopper_backward(c) || !masks_alone(c) || c.dropout) return std::nullopt;
  const bool small = head_cols(c, kHopperCols) == 64;
  const FlexTileSize t{small ? 144 : 80, 128, 12, 1, 2, FlexFamily::kHopper, 2, 1, c.blocks ? 5 : 1};
  if (c.blocks && (small || c.block_size[0] < t.rows || mixed(c, t))) return std::nullopt;
  return t;
}
int most_of(int64_t length) { return length <= 64 ? 64 : length <= 128 ? 128 : 0; }
bool reads_pairs(const FlexMod& mod) { return reads_by(mod, {Reads::kPair}); }

int flex_shared_limit(int capability) {
  constexpr int kReserved = 1 << 10;  // of a multiprocessor's, for each CTA
  const int kib = capability == 80 || capability == 87                                 ? 164
                  : capability == 90 || capability / 10 == 10 || capability / 10 == 11 ? 228
                                                                                       : 100;
  return (kib << 10) - kReserved;
}

KernelSpec plan_kernel(const FlexCase& c, const std::string& architecture) {
  const int limit = flex_shared_limit(std::stoi(architecture));
  const std::vector<FlexTileSize> tiles = candidates(c, architecture);
  for (size_t i = 0; i < tiles.size(); ++i) {
    KernelFacts facts = facts_of(c, tiles[i]);
    if (facts.shared_bytes > limit) continue;
    if (facts.few()) facts.resident = resident_ctas(facts.shared_bytes, architecture);
    if (c.kernel == FlexKernel::kGradBuffers && !facts.hopper()) facts.resident = grad_buffers_ctas(tiles[i]);
    if (facts.has_derivative) {
      const bool sums = c.kernel == FlexKernel::kBackward;
      const int left = sums ? limit - facts.shared_bytes : 0;
      // Sums in shared memory are worth more than a stage, boxes, or columns.
      const auto stages = [&](size_t of) { return tiles[of].query_stages + tiles[of].key_stages; };
      const bool another = sums && i + 1 < tiles.size() && stages(i + 1) < stages(i);
      if (!choose_schemes(c, left, facts) && (another || tiles[i].boxes || tiles[i].columns)) continue;
      facts.grad_scores |= !facts.schemes.empty();
      // As many as plan_launch counts; without histograms they fit anyway, and would spill.
      if (tiles[i].keeps && facts.schemes.find('F') != std::string::npos) facts.resident = 3;
    }
    return KernelSpec(std::move(facts));
  }
  fail<NotImplementedError>("flex_attention: head sizes must be such that tiles fit the GPU's ", limit,
                            " bytes of shared memory a CTA, but got D = ", c.head_size, " and E = ", c.value_size,
                            " of ", element_bytes(c.dtype), " bytes");
}

std::vector<FlexCase> backward_kernels(FlexCase c, const std::vector<bool>& needs_grad, bool deterministic,
                                       const std::string& architecture) {
  c.kernel = FlexKernel::kBackward;
  const bool apart = deterministic || (takes_hopper(c, architecture) && !fits_hopper_backward(c));
  std::vector<FlexCase> kernels;
  // In fixed point the contributions' largest must be known before they are added up.
  if (c.fixed_point || (apart && needs_grad[0])) {
    FlexCase query = c;
    query.kernel = FlexKernel::kGradQuery;
    query.grad_query = needs_grad[0];
    query.grad_key = query.grad_value = false;
    if (!c.fixed_point) query.wants_grad.assign(c.wants_grad.size(), false);
    kernels.push_back(std::move(query));
  }
  c.grad_query = needs_grad[0] && !apart;
  c.grad_key = needs_grad[1];
  c.grad_value = needs_grad[2];
  if (c.grad_query || c.grad_key || c.grad_value || c.wants_buffers()) kernels.push_back(c);
  return kernels;
}

std::vector<int> tangents_parts(int value_size) {
  constexpr int kMost = 128;
  std::vector<int> parts;
  for (int first = 0; first == 0 || first < value_size; first += kMost)
    parts.push_back(std::min(kMost, value_size - first));
  return parts;
}

void BatchSums::leave_out(FlexCase& c) const {
  for (size_t i = 0; i < c.wants_grad.size(); ++i) {
    if (common.wants_grad[i]) c.wants_grad[i] = false;
  }
}

std::optional<BatchSums> sums_over_batches(const FlexCase& c, const std::vector<bool>& needs_grad, int64_t batches,
                                           int64_t heads, int64_t queries, int64_t keys, int64_t processors,
                                           bool deterministic, const std::string& architecture) {
  constexpr int64_t kLeastBatches = 4;
  constexpr int kMostCols = 64, kMostContributions = 2;
  if (c.score_mod.text.empty() || c.dtype == DType::kFloat32 || batches < kLeastBatches) return std::nullopt;
  if (forced_scheme != 0) return std::nullopt;
  if (c.blocks || c.dropout || c.max_gradient || head_cols(c) > kMostCols || value_cols(c) > kMostCols)
    return std::nullopt;
  if (!needs_grad[0] && !needs_grad[1] && !needs_grad[2]) return std::nullopt;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto& contributions = derivative->contributions();
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  BatchSums found{c};
  found.common.kernel = FlexKernel::kGradBuffers;
  found.common.fixed_point = found.common.key_splits = false;
  found.common.partial_sums = true;
  for (size_t k = 0; k < steps.size(); ++k) {
    if (!steps[k].over_batches) found.common.wants_grad[static_cast<size_t>(contributions[k].buffer)] = false;
  }
  int count = 0;
  bool once = true;
  for (size_t k = 0; k < steps.size(); ++k) {
    if (!found.common.wants_grad[static_cast<size_t>(contributions[k].buffer)]) continue;
    ++count;
    once = once && steps[k].once_a_batch;
  }
  if (count == 0 || count > kMostContributions) return std::nullopt;
  // As many CTAs a tile as fill the GPU, each of some batches.
  const FlexTileSize tile = grad_buffers_tile(found.common, architecture);
  const int64_t tiles = heads * tiles_in(queries, tile.rows) * tiles_in(keys, tile.cols);
  constexpr int64_t kMostParts = 64, kEnoughTiles = 1024;
  const int64_t places = grad_buffers_ctas(tile) * processors;
  if (tiles < kEnoughTiles) {
    double best = 0;
    for (int64_t parts = 1; parts <= std::min(kMostParts, batches / kLeastBatches); ++parts) {
      const int64_t ctas = tiles * parts, waves = tiles_in(ctas, places);
      const double filled = static_cast<double>(ctas) / static_cast<double>(waves * places);
      if (filled <= best) continue;
      best = filled;
      found.parts = parts;
      if (filled >= 0.9) break;
    }
  }
  found.ctas = tiles * found.parts;
  // Where a place gets one sum of a CTA, the few of several CTAs are added to memory, unless in one order.
  if (once && (found.parts == 1 || !deterministic)) found.common.partial_sums = false;
  constexpr int64_t kMostSums = int64_t{1} << 24;
  found.sums = found.ctas * tile.rows * tile.cols;
  if (found.common.partial_sums && found.sums > kMostSums) return std::nullopt;
  return found;
}

std::vector<bool> covered_buffers(const FlexCase& c, const std::array<int64_t, 4>& lengths) {
  std::vector<bool> covered(c.sizes.size(), false);
  if (c.score_mod.text.empty()) return covered;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto& inputs = steps[k].inputs;
    const auto buffer = static_cast<size_t>(derivative->contributions()[k].buffer);
    if (inputs.empty() || buffer >= covered.size()) continue;
    const auto length_of = [&](score_mod::Input input) {
      return input == score_mod::Input::kB   ? lengths[0]
             : input == score_mod::Input::kH ? lengths[1]
             : input == score_mod::Input::kQ ? lengths[2]
                                             : lengths[3];
    };
    covered[buffer] = true;
    for (size_t d = 0; d < inputs.size(); ++d) {
      if (c.sizes[buffer][d] != length_of(inputs[d])) covered[buffer] = false;
    }
  }
  return covered;
}

int64_t ordered_launches(const FlexCase& c, int64_t batches, int64_t heads, int64_t keys, int64_t processors,
                         const std::string& architecture) {
  if (c.score_mod.text.empty()) return 0;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  auto steps = score_mod::plan_scatter(*derivative, c.elements);
  if (std::any_of(steps.begin(), steps.end(), [](const auto& step) { return step.is_vector; })) return 0;
  for (size_t k = steps.size(); k-- > 0;) {
    const bool stored = is_stored(c, steps[k], static_cast<size_t>(derivative->contributions()[k].buffer));
    if (stored || scheme_of(steps[k].scheme) <= 'B') steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(k));
  }
  if (steps.empty()) return 1;
  if (!takes_hopper(c, architecture)) return 0;
  const auto all = [&](auto member) { return std::all_of(steps.begin(), steps.end(), std::mem_fn(member)); };
  if (!all(&score_mod::ScatterStep::once_a_batch)) return 0;
  if (batches == 1 || all(&score_mod::ScatterStep::exclusive)) return 1;
  // Fixed point takes one and a half times as long at least: so much may wait for the last CTAs of a launch.
  const int cols = hopper_backward(c).front().cols;
  const int64_t ctas = heads * ((keys + cols - 1) / cols);
  const int64_t waves = (ctas + processors - 1) / processors;
  return 2 * waves * processors <= 3 * ctas ? batches : 0;
}

void force_flex_family(std::optional<FlexFamily> family) { forced_family = family; }
bool flex_family_is_forced() { return forced_family.load().has_value(); }
void force_flex_scheme(char scheme) { forced_scheme = scheme; }

}  // namespace fusegrad::cuda
