// The forward: its kernels of three families, as the planner knows them.
#include "cuda/attention/forward/forward.h"

#include <algorithm>
#include <utility>

#include "cuda/attention/captured/reads.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/tiles.h"
#include "score_mod/cache.h"
#include "score_mod/pair_reads.h"

namespace fusegrad::cuda {

using namespace planner;

using score_mod::Reads;

int line_bytes(const FlexCase& c) {
  const bool lines = reads_by(c.score_mod, {Reads::kKey, Reads::kDiagonal}) ||
                     reads_by(c.mask_mod, {Reads::kRow, Reads::kKey, Reads::kDiagonal});
  return lines ? 6 << 10 : 0;
}

int hopper_forward_bytes(const FlexCase& c, const FlexTile& t) {
  const HopperTile& own = t.hopper();
  return device::HopperForwardMemory({.rows = t.rows,
                                      .cols = t.cols,
                                      .head = head_cols(c),
                                      .value = value_cols(c),
                                      .stages = t.stages,
                                      .query_stages = own.query_stages,
                                      .parts = own.parts,
                                      .read_bytes = box_bytes(c, t) + own.line_bytes,
                                      .read_stages = own.read_stages})
      .bytes();
}

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

// Hopper forward: whether exponentials are relative to the first maximum of a row. BFloat16 does not overflow where
// Float16 would, and at larger head sizes it is slower. Scores are only scaled and masked, or changed by lines alone or
// boxes alone, by both in tiles of four warpgroups: a bias that grows with the key, such as ALiBi's, would have each
// tile computed twice.
bool first_maximum(const FlexCase& c, const FlexTile& t) {
  const auto reads_alone = [&] {
    if (c.score_mod.text.empty() || c.blocks || c.dropout) return false;
    if (!t.boxes && (t.hopper().line_bytes == 0 || reads_pairs(c.score_mod))) return false;
    if (t.boxes && t.hopper().line_bytes > 0 && t.rows < 256) return false;
    return are_places_alone(*score_mod::cached_graph(c.score_mod.text));
  };
  return ((c.unscaled && masks_alone(c)) || reads_alone()) && !c.max_scores && c.dtype == DType::kBFloat16 &&
         head_cols(c, kHopperCols) <= 192 && value_cols(c, kHopperCols) <= 128;
}
// Hopper forward: whether the first scores of the next queries run beside the last output. With two
// warpgroups larger heads are 1 to 3% slower so; other score_mods were not measured.
bool seamless(const FlexCase& c, const FlexTile& t) {
  if (consumer_warps(t) > 8) return true;
  return first_maximum(c, t) && std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols)) == kHopperCols &&
         !c.dropout && !c.key_splits;
}
// The keys of a tile of three warpgroups, of which a thread has 152 or 160 registers; 0: they do not pay. Scores that
// are changed leave room for 112 keys at head sizes up to 64, for 128 up to 48.
int keys_of_three(const FlexCase& c) {
  const int head = std::max(head_cols(c), value_cols(c));
  if (head > kHopperCols || c.max_scores || c.key_splits) return 0;
  const bool tall = c.forward_rows >= 192;
  if (masks_alone(c)) return tall ? 128 : 0;
  if (!tall || c.blocks || c.dropout) return 0;
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

// All that pairs read by themselves comes by TMA: warps that copy would need registers that four warpgroups have not
// left. Those that bring lines do with few.
bool has_tile_of_four(const FlexCase& c) {
  if (c.kernel != FlexKernel::kForward || c.dtype == DType::kFloat32) return false;
  if (std::max(head_cols(c), value_cols(c)) > 32 || c.blocks || c.dropout || c.max_scores || c.key_splits) return false;
  if (!has_hopper_boxes(c)) return false;
  const auto loads = score_mod::pair_reads(*score_mod::cached_graph(c.score_mod.text));
  return static_cast<int>(loads.size()) == box_maps(c, {256, 64, 0, 1, false, HopperTile{}});
}

int shared_bytes(const FlexCase& c, const FlexTile& t) {
  const int head = head_cols(c), value = value_cols(c), element = element_bytes(c.dtype);
  if (t.is_hopper()) return hopper_forward_bytes(c, t);
  if (t.family() == FlexFamily::kFew) {
    return device::FewForwardMemory({.rows = t.rows,
                                     .cols = t.cols,
                                     .head = head,
                                     .value = value,
                                     .element_bytes = element,
                                     .warps = t.warps,
                                     .stages = t.stages,
                                     .key_boxes = t.few().key_boxes})
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
}

std::vector<FlexTile> hopper_forward(const FlexCase& c) {
  const int head = std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols));
  const bool four = c.forward_rows == 256 && has_tile_of_four(c);
  const int keys = four ? 64 : keys_of_three(c), groups = four ? 4 : keys > 0 ? 3 : 2;
  FlexTile t{64 * groups, keys > 0 ? keys : 128, 4 * (groups + 1), 2, false, HopperTile{.line_bytes = line_bytes(c)}};
  const bool lines = t.hopper().line_bytes > 0;
  // 80 keys would leave no room for lines, and dropout is drawn for 64.
  // Two stages of 128 keys fit heads of 192 with values of 128, but not beside boxes.
  if (head > 192 || (head > 128 && (value_cols(c, kHopperCols) > 128 || has_hopper_boxes(c))))
    t.cols = c.blocks || c.dropout || lines ? 64 : 80;
  if (groups == 3 && c.blocks) t.hopper().parts = groups;
  std::vector<FlexTile> found;
  const auto add = [&](bool boxes, int read_stages) {
    FlexTile tile = t;
    tile.boxes = boxes;
    HopperTile& own = tile.hopper();
    own.read_stages = read_stages;
    if (boxes) own.maps = box_maps(c, tile);
    // A second tile of queries is slower for two warpgroups that look for the first maximum alone, but where the next
    // queries begin beside the last output.
    own.query_stages = first_maximum(c, t) && !seamless(c, t) ? 1 : 2;
    if (shared_bytes(c, tile) > flex_shared_limit(90)) own.query_stages = 1;
    // The next keys come while the last products of these queries run: of short sequences up to a tenth of the time.
    if (head == kHopperCols) tile.stages = 4;
    while (tile.stages > 2 && shared_bytes(c, tile) > flex_shared_limit(90)) --tile.stages;
    found.push_back(tile);
  };
  if (has_hopper_boxes(c)) {
    add(true, 2);
    add(true, 1);
  }
  if (lines) add(false, 4);
  add(false, lines ? 2 : 0);
  return found;
}

// Few queries: copies of many keys are under way, for two CTAs, so that one goes on where the other begins or ends.
std::vector<FlexTile> few_forward(const FlexCase& c, const std::string& architecture) {
  const int bytes = element_bytes(c.dtype) * std::max(head_cols(c), value_cols(c));
  const int keys = bytes <= 128 ? 32 : 16;  // of a warp
  std::vector<FlexTile> found;
  const bool boxes = architecture == "90a" && c.dtype != DType::kFloat32 && c.value_size > 0;
  for (const auto& [warps, stages] : {std::pair{4, 3}, {4, 2}, {2, 3}, {2, 2}, {1, 2}}) {
    found.push_back({c.few_rows, keys * warps, warps, stages, false, FewTile{boxes}});
  }
  const auto two = [&](const FlexTile& t) { return resident_ctas(shared_bytes(c, t), architecture) == 2; };
  if (!two(found[0]) && two(found[1])) std::swap(found[0], found[1]);
  return found;
}

// Whether a mask_mod is so few instructions, none of them a read or a loop, that all pairs of a thread have it in a
// row.
bool has_short_mask(const FlexCase& c) {
  constexpr size_t kMostNodes = 16;
  if (c.mask_mod.text.empty()) return true;
  if (!c.mask_mod.dtypes.empty()) return false;
  const auto graph = score_mod::cached_graph(c.mask_mod.text);
  return graph->axes().empty() && graph->nodes().size() <= kMostNodes;
}

// Tiles where scores are only scaled, and masked by few instructions at most: more keys at a time pay, and two CTAs a
// multiprocessor, of which one goes on where the other waits. Measured; a tile in several blocks of a mask does not
// pay.
std::vector<FlexTile> plain_portable_forward(const FlexCase& c, const std::string& architecture) {
  const int head = std::max(head_cols(c), value_cols(c));
  std::vector<FlexTile> twice, once;
  if (head <= 64) {
    twice = {{128, 128, 4}};
    if (!c.blocks) twice.push_back({128, 96, 4});
    once = {{128, 64, 4}};
  } else if (head <= 96) {
    twice = {{128, 64, 4}};
    if (!c.blocks) once = {{256, 64, 8}};
    once.insert(once.end(), {{128, 32, 4}, {64, 32, 4}});
  } else if (head <= 128) {
    // With a mask the compiler for sm_80 spills, and loads most operands when their products are due.
    twice = {{128, c.blocks && architecture == "80" ? 32 : 64, 4}};
    once = {{128, 64, 8}, {64, 32, 4}};
  } else {
    once = {{128, 64, 8}, {128, 32, 8}, {64, 32, 4}};
  }
  const auto fits = [&](const FlexTile& t) {
    return resident_ctas(shared_bytes(c, t), architecture) == 2 && !mixed(c, t);
  };
  const auto found = std::find_if(twice.begin(), twice.end(), fits);
  if (found != twice.end()) once.insert(once.begin(), *found);
  return once;
}

std::vector<FlexTile> portable_forward(const FlexCase& c, const std::string& architecture) {
  const int head = std::max(head_cols(c), value_cols(c));
  if (c.dtype == DType::kFloat32) return {{64, 32, 4}, {32, 32, 2}, {32, 16, 2}, {16, 16, 1}};
  if (head > kMostCols) return {{128, 32, 8}, {64, 32, 4}, {64, 16, 4}, {32, 32, 2}};
  const bool plain = c.score_mod.text.empty() && !c.max_scores && !c.dropout && (!c.blocks || has_short_mask(c));
  if (plain && head > 32 && c.most_queries != 64 && c.most_keys != 64 && !stays(c))
    return plain_portable_forward(c, architecture);
  if (head <= 64) {
    FlexTile t{c.most_queries == 64 ? 64 : 128, 64, 4};
    t.portable().keeps = stays(c);
    return {t};
  }
  if (head <= 128) return {{128, 32, 4}, {64, 32, 4}};
  return {{128, 32, 8}, {64, 32, 4}};
}

std::vector<FlexTile> tiles(const FlexCase& c, const std::string& architecture) {
  if (c.few_rows > 0) return few_forward(c, architecture);
  if (takes_hopper(c, architecture) && !boxes_pay(c)) return hopper_forward(c);
  return with_columns(c, with_boxes(c, portable_forward(c, architecture)));
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  text.choice("kUnscaled", c.unscaled);
  text.choice("kMaxScores", c.max_scores);
  if (!f.few()) text.choice("kOutLow", c.out_low);
  if (f.hopper()) {
    hopper_result_config(c, f, text);
    text.choice("kFirstMaximum", first_maximum(c, f.tile));
    text.choice("kSeamless", seamless(c, f.tile));
    return;
  }
  text.number("kWarps", f.warps);
  text.choice("kSplit", splits_products(c));
  if (f.few()) {
    text.number("kStages", f.tile.stages);
    text.choice("kKeyBoxes", f.tile.key_boxes());
    return;
  }
  text.choice("kKeySplits", f.key_splits);
  text.choice("kMaskInline", has_short_mask(c));
  text.choice("kBoxes", f.tile.boxes);
  text.choice("kKeeps", f.tile.keeps());
  text.numbers("kColumns", columns_of(c, f.tile));
  text.numbers("kPlaces", places_of(c));
}

int resident(const KernelFacts& f, const std::string& architecture) {
  return f.few() ? resident_ctas(f.shared_bytes, architecture) : 0;
}

KernelNames names(const KernelFacts& f) {
  if (f.few()) {
    return {"flex_forward_few", "cuda/attention/forward/few.cuh", "FlexForwardFew",
            f.tile.key_boxes() ? "FlexForwardFewArguments" : nullptr};
  }
  if (f.hopper()) {
    return {"flex_forward_hopper", "cuda/attention/forward/hopper.cuh", "FlexForwardHopper",
            "FlexForwardHopperArguments"};
  }
  return {"flex_forward", "cuda/attention/forward/portable.cuh", "FlexForward", nullptr};
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

LaunchPlan launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                  int64_t processors, int64_t /*launches*/) {
  const KernelFacts& f = spec.facts();
  if (f.few()) return plan_few(std::move(spec), shape, mask, processors);
  constexpr int64_t kStaying = 4;
  if (f.tile.keeps()) return launch_staying(std::move(spec), shape, kStaying * processors);
  const bool sections = f.hopper() && f.blocks;
  const int64_t section = sections ? forward_section(f, shape, processors) : 1;
  return launch_by_query(std::move(spec), shape, mask, processors, section);
}

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

int64_t forward_section(const KernelFacts& f, const FlexShape& n, int64_t processors) {
  const int64_t heads = n.query_heads(),
                bytes = kHopperElementBytes * n.keys * (n.head_size + n.value_size) / n.group();
  // With few rows of tiles a CTA, all heads are one section if the L2 cache holds what they read: the last of several
  // sections, begun late, would take too long. No section is much smaller than others.
  constexpr int64_t kCachedBytes = int64_t{48} << 20, kFewRows = 8, kFewHeads = 4;
  const int64_t rows = heads * tiles_in(n.queries, f.tile.rows);
  if (heads * bytes <= kCachedBytes && rows <= kFewRows * processors) return heads;
  const int64_t together = std::min(heads, std::max(heads_together(heads, bytes), kFewHeads));
  return tiles_in(heads, tiles_in(heads, together));
}

void hopper_result_config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  const HopperTile& own = f.tile.hopper();
  text.number("kGroups", f.groups);
  text.number("kStages", f.tile.stages);
  text.number("kQueryStages", own.query_stages);
  text.number("kParts", own.parts);
  text.choice("kKeySplits", f.key_splits);
  text.choice("kMaskAlone", masks_alone(c));
  text.choice("kCornersTell", corners_tell(c, f.tile));
  text.choice("kBoxes", f.tile.boxes);
  text.number("kReadStages", own.read_stages);
  text.number("kMaps", own.maps);
  text.number("kLineBytes", own.line_bytes);
}

std::string result_products(DType dtype, const KernelFacts& f) {
  return wgmma(dtype, f.tile.cols, false, false) + wgmma(dtype, f.value, true, true);
}

int forward_rows(const FlexCase& c, const FlexShape& shape, int64_t processors,
                 const std::function<double()>& share_of_pairs) {
  const auto most = [&](int64_t rows) {
    return tiles_in(shape.query_heads() * tiles_in(shape.queries, rows), processors);
  };
  if (!has_tile_of_four(c)) return forward_pays_tall(shape, most, share_of_pairs) ? 192 : 128;
  // Times of tiles of 128, 192 and 256 queries are as 100 to 137 to 174.
  const int64_t of_two = 100 * most(128), of_three = 137 * most(192), of_four = 174 * most(256);
  return of_four <= std::min(of_two, of_three) ? 256 : of_three <= of_two ? 192 : 128;
}

const Kernel& forward_kernel() {
  static const Kernel kernel{.arguments = "FlexForwardArguments",
                             .derives = false,
                             .predicates_reads = true,
                             .names = names,
                             .tiles = tiles,
                             .shared_bytes = shared_bytes,
                             .resident = resident,
                             .config = config,
                             .products = result_products,
                             .launch = launch};
  return kernel;
}

}  // namespace fusegrad::cuda
