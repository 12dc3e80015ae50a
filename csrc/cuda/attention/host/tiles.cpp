#include "cuda/attention/host/tiles.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/host/case_facts.h"
#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace planner {

using score_mod::Reads;

namespace {

std::atomic<std::optional<FlexFamily>> forced_family{};

// Of a tile, for lines of what mods read.
int line_bytes(const FlexCase& c) {
  const bool lines = reads_by(c.score_mod, {Reads::kKey, Reads::kDiagonal}) ||
                     reads_by(c.mask_mod, {Reads::kRow, Reads::kKey, Reads::kDiagonal});
  return lines ? 6 << 10 : 0;
}

}  // namespace

bool fits_hopper_backward(const FlexCase& c) {
  const int head = head_cols(c, kHopperCols);
  return head <= 128 && value_cols(c, kHopperCols) <= head;
}

namespace {

// Whether the Hopper forward or backward has boxes of what a score_mod reads.
bool has_hopper_boxes(const FlexCase& c) {
  const bool backward = c.kernel == FlexKernel::kBackward && fits_hopper_backward(c) && (c.grad_query || c.grad_key);
  return (c.kernel == FlexKernel::kForward || backward) && c.aligned_boxes && has_boxes(c.score_mod);
}

// Of reads of pairs, how many tiles TMA copies.
int box_maps(const FlexCase& c, const FlexTileSize& t) {
  if (t.cols % 64 != 0 || c.score_mod.dtypes.empty()) return 0;
  const auto reads = score_mod::mapped_reads(*score_mod::cached_graph(c.score_mod.text), c.score_mod.dtypes);
  return std::min(static_cast<int>(reads.size()), device::kMostBoxMaps);
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

}  // namespace

// All that pairs read comes by TMA: a warp that copies would need registers that four warpgroups have not left.
bool has_tile_of_four(const FlexCase& c) {
  if (c.kernel != FlexKernel::kForward || c.dtype == DType::kFloat32) return false;
  if (std::max(head_cols(c), value_cols(c)) > 32 || c.blocks || c.dropout || c.max_scores || c.key_splits) return false;
  if (!has_hopper_boxes(c) || line_bytes(c) > 0) return false;
  const auto loads = score_mod::pair_reads(*score_mod::cached_graph(c.score_mod.text));
  return static_cast<int>(loads.size()) == box_maps(c, {256, 64});
}

namespace {

std::vector<FlexTileSize> hopper_forward(const FlexCase& c) {
  const int head = std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols));
  const bool four = c.forward_rows == 256 && has_tile_of_four(c);
  const int keys = four ? 64 : keys_of_three(c), groups = four ? 4 : keys > 0 ? 3 : 2;
  FlexTileSize t{64 * groups, keys > 0 ? keys : 128, 4 * (groups + 1), 1, 2, FlexFamily::kHopper};
  // 80 keys would leave no room for lines, and dropout is drawn for 64.
  t.line_bytes = line_bytes(c);
  // Two stages of 128 keys fit heads of 192 with values of 128, but not beside boxes.
  if (head > 192 || (head > 128 && (value_cols(c, kHopperCols) > 128 || has_hopper_boxes(c))))
    t.cols = c.blocks || c.dropout || t.line_bytes > 0 ? 64 : 80;
  if (groups == 3 && c.blocks) t.parts = groups;
  std::vector<FlexTileSize> found;
  const auto add = [&](bool boxes, int read_stages) {
    FlexTileSize tile = t;
    tile.boxes = boxes;
    tile.read_stages = read_stages;
    if (boxes) tile.maps = box_maps(c, tile);
    // A second tile of queries is slower for two warpgroups that look for the first maximum alone, but where the next
    // queries begin beside the last output.
    tile.query_stages = first_maximum(c, t) && !seamless(c, t) ? 1 : 2;
    if (shared_bytes(c, tile) > flex_shared_limit(90)) tile.query_stages = 1;
    // The next keys come while the last products of these queries run: of short sequences up to a tenth of the time.
    if (head == kHopperCols) tile.stages = 4;
    while (tile.stages > 2 && shared_bytes(c, tile) > flex_shared_limit(90)) --tile.stages;
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

}  // namespace

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
  const auto add = [&](int tile_rows, int key_stages, int query_stages, int read_stages = 0, bool own_places = false) {
    FlexTileSize t{tile_rows, 128, 12, 1, 2, FlexFamily::kHopper, query_stages, key_stages};
    t.boxes = read_stages > 0;
    t.read_stages = read_stages;
    t.own_places = own_places;
    if (t.boxes) t.maps = box_maps(c, t);
    if (key_stages == 1 || c.grad_query) found.push_back(t);
  };
  if (has_hopper_boxes(c)) {
    // Tall tiles fit beside boxes where those of queries and keys are narrow.
    if (c.grad_query && std::max(head_cols(c), value_cols(c)) <= 32) {
      for (const int query_stages : {3, 2}) add(128, 2, query_stages, 2, true);
      for (const int query_stages : {3, 2}) add(128, 2, query_stages, 2);
      for (const int read_stages : {2, 1}) add(128, 1, 2, read_stages);
    }
    for (const int query_stages : {3, 2}) add(64, 2, query_stages, 2);
    for (const int query_stages : {3, 2}) add(64, 1, query_stages, 2);
    add(64, 1, 2, 1);
  }
  if (std::max(head_cols(c), value_cols(c)) <= 32) add(128, 2, 3, 0, true);
  for (const int query_stages : {3, 2}) add(rows, 2, query_stages);
  if (c.score_mod.text.empty() && c.grad_query) return found;
  for (const int query_stages : {3, 2}) add(rows, 1, query_stages);
  return found;
}

namespace {

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

}  // namespace

// CTAs of a multiprocessor. More than two would leave each thread fewer registers than it needs.
int resident_ctas(int shared_bytes, const std::string& architecture) {
  constexpr int kReserved = 1 << 10;
  return std::clamp((flex_shared_limit(std::stoi(architecture)) + kReserved) / (shared_bytes + kReserved), 1, 2);
}

namespace {

// Of few queries: copies of many keys under way, of two CTAs, so that one goes on where the other begins or ends.
std::vector<FlexTileSize> few_forward(const FlexCase& c, const std::string& architecture) {
  const int bytes = element_bytes(c.dtype) * std::max(head_cols(c), value_cols(c));
  const int keys = bytes <= 128 ? 32 : 16;  // of a warp
  std::vector<FlexTileSize> found;
  const bool boxes = architecture == "90a" && c.dtype != DType::kFloat32 && c.value_size > 0;
  for (const auto& [warps, stages] : {std::pair{4, 3}, {4, 2}, {2, 3}, {2, 2}, {1, 2}}) {
    found.push_back({c.few_rows, keys * warps, warps, 1, stages, FlexFamily::kFew});
    found.back().key_boxes = boxes;
  }
  const auto two = [&](const FlexTileSize& t) { return resident_ctas(shared_bytes(c, t), architecture) == 2; };
  if (!two(found[0]) && two(found[1])) std::swap(found[0], found[1]);
  return found;
}

int contributions(const FlexCase& c) {
  return static_cast<int>(score_mod::cached_derivative(c.score_mod.text, c.wants_grad)->contributions().size());
}

}  // namespace

// Reads from the L2 cache limit it at small heads: taller tiles read each batch's keys fewer times. They must fit the
// shared memory of every GPU.
FlexTileSize grad_buffers_tile(const FlexCase& c, const std::string& architecture) {
  const int cols = std::max(head_cols(c), value_cols(c));
  const bool one = kept_reads(c) <= 1, long_queries = c.most_queries != 64;
  const bool hopper = architecture == "90a" && forced_family.load() != FlexFamily::kPortable && cols <= kHopperCols;
  // Sums of a second contribution would not fit the registers.
  if (hopper && long_queries && c.most_keys != 64 && one && contributions(c) == 1)
    return {128, 128, 12, 1, cols <= 32 ? 4 : 2, FlexFamily::kHopper};
  return long_queries && one && cols <= 32 ? FlexTileSize{128, 64, 8} : FlexTileSize{64, 64, 4};
}
// CTAs of a multiprocessor, by registers.
int grad_buffers_ctas(const FlexTileSize& tile) {
  return tile.family == FlexFamily::kHopper ? 1 : tile.rows == 64 ? 3 : 2;
}

namespace {

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
    t.boxes = !t.keeps || kept_reads(c) == 0;
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

}  // namespace

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
  std::vector<FlexTileSize> found = with_columns(c, with_boxes(c, portable(c)));
  // Leaves room for sums of diagonals where a CTA has 99 KiB.
  const bool narrow_backward = c.kernel == FlexKernel::kBackward && std::max(head_cols(c), value_cols(c)) <= 64;
  if (narrow_backward && c.dtype != DType::kFloat32) found.push_back({64, 64, 4, 1, 1});
  return found;
}

}  // namespace planner

using namespace planner;

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

std::vector<int> tangents_parts(int value_size) {
  constexpr int kMost = 128;
  std::vector<int> parts;
  for (int first = 0; first == 0 || first < value_size; first += kMost)
    parts.push_back(std::min(kMost, value_size - first));
  return parts;
}

void force_flex_family(std::optional<FlexFamily> family) { forced_family = family; }
bool flex_family_is_forced() { return forced_family.load().has_value(); }

}  // namespace fusegrad::cuda
