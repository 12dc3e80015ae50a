#include "cuda/attention/captured/reads.h"

#include <algorithm>
#include <bit>

#include "cuda/attention/device/shared_memory.cuh"
#include "score_mod/cache.h"
#include "score_mod/index_analysis.h"
#include "score_mod/pair_reads.h"

namespace fusegrad::cuda::planner {

using score_mod::Reads;

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

// It pays since a CTA reads a column once, and has some thousand pairs of a tile at least. No more than fit the shared
// memory of every GPU beside the rest.
std::vector<int> columns_of(const FlexCase& c, const FlexTile& t) {
  constexpr int kMostElements = 2048;
  std::vector<int> columns;
  if (c.score_mod.dtypes.empty()) return columns;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  int all = 0;
  for (const score_mod::NodeId id : score_mod::pair_reads(*graph)) {
    int elements = 0;
    if (t.columns() && !(t.keeps() && is_kept(*graph, id))) {
      const uint32_t dimensions = score_mod::column_dimensions(*graph, id, c.score_mod.dtypes);
      if (dimensions != 0) elements = small_table(c, static_cast<size_t>((*graph)[id].payload), dimensions);
    }
    if (all + elements > kMostElements) elements = 0;
    all += elements;
    columns.push_back(elements);
  }
  return columns;
}
int column_bytes(const FlexCase& c, const FlexTile& t) {
  int bytes = 0;
  for (const int elements : columns_of(c, t)) bytes += device::column_bytes(elements);
  return bytes;
}

std::vector<int> places_of(const FlexCase& c) {
  std::vector<int> bytes;
  if (c.score_mod.dtypes.empty()) return bytes;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  for (const score_mod::NodeId id : score_mod::pair_reads(*graph))
    bytes.push_back(c.place_bytes.empty() ? 0 : c.place_bytes[static_cast<size_t>((*graph)[id].payload)]);
  return bytes;
}

bool stays(const FlexCase& c) {
  if (!c.many_batches || c.key_splits || c.blocks || c.most_queries != 64 || c.most_keys != 64) return false;
  FlexTile with_columns;
  with_columns.own = PortableTile{.keeps = true, .columns = true};
  return kept_reads(c) > 0 || column_bytes(c, with_columns) > 0 ||
         (c.kernel == FlexKernel::kBackward && sums_columns(c));
}

int kept_bytes(const FlexCase& c, const FlexTile& t) { return t.keeps() ? 4 * t.rows * t.cols * kept_reads(c) : 0; }
int box_bytes(const FlexCase& c, const FlexTile& t) {
  if (!t.boxes) return 0;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  auto mapped = score_mod::mapped_reads(*graph, c.score_mod.dtypes);
  mapped.resize(static_cast<size_t>(t.maps()));
  int by_maps = 0, others = 0;
  for (const score_mod::NodeId id : score_mod::pair_reads(*graph)) {
    if (t.keeps() && is_kept(*graph, id)) continue;
    const int element = score_mod::box_bytes(*graph, id, c.score_mod.dtypes);
    if (std::find(mapped.begin(), mapped.end(), id) != mapped.end()) {
      by_maps += device::mapped_tile_bytes(t.rows, t.cols, element);
    } else {
      others += device::box_tile_bytes(t.rows, t.cols, element);
    }
  }
  return device::mapped_box_bytes(by_maps, others);
}

bool has_boxes(const FlexMod& mod, Boxes of) {
  if (mod.dtypes.empty()) return false;
  const auto graph = score_mod::cached_graph(mod.text);
  const auto loads = score_mod::pair_reads(*graph);
  return std::any_of(loads.begin(), loads.end(), [&](score_mod::NodeId id) {
    const bool counts = of == Boxes::kAny || graph->type(id) == score_mod::Type::kFloat;
    return counts && score_mod::box_bytes(*graph, id, mod.dtypes) > 0;
  });
}

int box_maps(const FlexCase& c, const FlexTile& t) {
  if (c.score_mod.dtypes.empty()) return 0;
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  int maps = 0;
  for (const score_mod::NodeId id : score_mod::mapped_reads(*graph, c.score_mod.dtypes)) {
    // TMA brings whole chunks of 128 bytes.
    if (maps == device::kMostBoxMaps || t.cols * score_mod::box_bytes(*graph, id, c.score_mod.dtypes) % 128 != 0) break;
    ++maps;
  }
  return maps;
}

}  // namespace fusegrad::cuda::planner
