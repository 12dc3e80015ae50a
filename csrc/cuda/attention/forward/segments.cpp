#include "cuda/attention/forward/segments.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "common/error.h"
#include "cuda/attention/captured/reads.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/forward/forward.h"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "cuda/attention/plan/tiles.h"

namespace fusegrad::cuda {

using namespace planner;

namespace {

int portable_bytes(const FlexCase& c, int rows, int cols) {
  return device::ForwardMemory({.rows = rows,
                                .cols = cols,
                                .head = head_cols(c),
                                .value = value_cols(c),
                                .element_bytes = element_bytes(c.dtype),
                                .box_bytes = 0,
                                .kept_bytes = 0,
                                .column_bytes = 0})
      .bytes();
}
int shared_bytes(const FlexCase& c, const FlexTile& t) {
  if (!t.is_hopper()) return portable_bytes(c, t.rows, t.cols);
  return hopper_forward_bytes(c, t) + (t.hopper().kept_sums ? 16 + 4 * t.rows * value_cols(c) : 0);
}

// Results depend on the family and on the keys of a tile: whatever the call's lengths, masks and dropout, these are the
// same.
bool takes_hopper_segments(const FlexCase& c, const std::string& architecture) {
  if (architecture != "90a" || c.dtype == DType::kFloat32 || c.wide || c.head_size == 0 || c.value_size == 0)
    return false;
  return forced_family().value_or(FlexFamily::kHopper) == FlexFamily::kHopper;
}
int hopper_cols(const FlexCase& c) {
  const int head = std::max(head_cols(c, kHopperCols), value_cols(c, kHopperCols));
  return head > 192 || (head > 128 && value_cols(c, kHopperCols) > 128) ? 64 : 128;
}
int portable_cols(const FlexCase& c, const std::string& architecture) {
  const int cols = c.dtype != DType::kFloat32 && std::max(head_cols(c), value_cols(c)) <= 64 ? 64 : 32;
  return portable_bytes(c, 16, cols) <= flex_shared_limit(std::stoi(architecture)) ? cols : 16;
}

std::vector<FlexTile> hopper_tiles(const FlexCase& c) {
  const int limit = flex_shared_limit(90), cols = hopper_cols(c);
  const auto with_stages = [&](FlexTile t, int most) {
    t.stages = most;
    while (t.stages > 2 && shared_bytes(c, t) > limit) --t.stages;
    return t;
  };
  if (c.few_rows > 0) return {with_stages({64, cols, 8, 1, false, HopperTile{}}, 6)};
  const bool small = std::max(head_cols(c), value_cols(c)) <= kHopperCols;
  // A thread has 160 registers then. With a mask three groups are slower.
  const bool plain = c.score_mod.text.empty() && c.mask_mod.text.empty();
  const int groups = small && plain && c.forward_rows >= 192 ? 3 : 2;
  std::vector<FlexTile> found;
  const auto add = [&](bool boxes, int lines, int read_stages) {
    FlexTile tile{64 * groups, cols, 4 * (groups + 1), 2, boxes, HopperTile{.line_bytes = lines}};
    HopperTile& own = tile.hopper();
    own.read_stages = read_stages;
    if (boxes) own.maps = box_maps(c, tile);
    for (const bool kept : {true, false}) {
      if (kept && !c.many_segments) continue;
      own.kept_sums = kept;
      own.query_stages = 2;
      if (shared_bytes(c, tile) > limit) own.query_stages = 1;
      found.push_back(with_stages(tile, small ? 4 : 2));
    }
  };
  const int lines = line_bytes(c);
  if (has_hopper_boxes(c)) {
    for (const int stages : {2, 1}) add(true, lines, stages);
  }
  if (lines > 0) {
    for (const int stages : {4, 2, 1}) add(false, lines, stages);
  }
  add(false, 0, 0);
  return found;
}

std::vector<FlexTile> tiles(const FlexCase& c, const std::string& architecture) {
  if (takes_hopper_segments(c, architecture)) return hopper_tiles(c);
  const int cols = portable_cols(c, architecture);
  if (c.few_rows > 0) return {{c.few_rows, cols, c.few_rows / 16}};
  if (c.dtype == DType::kFloat32) return {{64, cols, 4}, {32, cols, 2}, {16, cols, 1}};
  return {{128, cols, 8}, {64, cols, 4}, {32, cols, 2}, {16, cols, 1}};
}

KernelNames names(const KernelFacts& f) {
  if (f.hopper()) {
    return {"flex_segments_hopper", "cuda/attention/forward/segments_hopper.cuh", "FlexSegmentsHopper",
            "FlexForwardHopperArguments"};
  }
  return {"flex_forward_segments", "cuda/attention/forward/segments_portable.cuh", "FlexForwardSegments", nullptr};
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  text.choice("kUnscaled", c.unscaled);
  text.choice("kMaxScores", c.max_scores);
  text.choice("kOutLow", c.out_low);
  text.number("kSegment", static_cast<int>(c.segment_keys) / f.tile.cols);
  if (f.hopper()) {
    text.choice("kManySegments", c.many_segments);
    text.choice("kKeptSums", f.tile.hopper().kept_sums);
    return hopper_result_config(c, f, text);
  }
  text.choice("kKeySplits", f.key_splits);
  text.choice("kPacked", c.few_rows > 0);
  text.number("kWarps", f.warps);
  text.choice("kSplit", splits_products(c));
}

LaunchPlan launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                  int64_t processors, int64_t /*launches*/) {
  const FlexCase& c = spec.asked();
  const KernelFacts& f = spec.facts();
  if (f.hopper() && c.few_rows == 0) {
    const int64_t section = f.blocks ? forward_section(f, shape, processors) : 1;
    return launch_by_query(std::move(spec), shape, mask, processors, section);
  }
  const FlexTile& tile = f.tile;
  const int64_t together = c.few_rows > 0 ? heads_of_tile(tile.rows, shape, mask) : 1;
  const int64_t units = shape.batches * shape.key_heads * tiles_in(shape.group(), together) *
                        (together > 1 ? 1 : tiles_in(shape.queries, tile.rows));
  const int64_t splits = c.key_splits ? tiles_in(shape.keys, c.segment_keys) : 1, work = units * splits;
  check_ctas(f.hopper() ? work + processors : work);  // persistent CTAs count on from their number
  std::optional<TileListPlan> lists;
  if (mask) lists = plan_lists(tile, /*by_key=*/false, shape, *mask);
  return {.spec = std::move(spec),
          .ctas = f.hopper() ? std::min(work, processors) : work,
          .lists = lists,
          .splits = static_cast<int>(splits),
          .together = static_cast<int>(together)};
}

// --- the kernel that merges ---

constexpr int kMergeWarps = 4;

int no_shared_bytes(const FlexCase& /*c*/, const FlexTile& /*t*/) { return 0; }
std::vector<FlexTile> merge_tiles(const FlexCase& /*c*/, const std::string& /*architecture*/) {
  return {{16, 16, kMergeWarps}};
}
KernelNames merge_names(const KernelFacts& /*f*/) {
  return {"flex_merge_segments", "cuda/attention/forward/segments_merge.cuh", "FlexMergeSegments", nullptr};
}
void merge_config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  text.choice("kUnscaled", c.unscaled);
  text.choice("kOutLow", c.out_low);
  text.number("kWarps", f.warps);
}
LaunchPlan merge_launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& /*mask*/,
                        int64_t /*processors*/, int64_t /*launches*/) {
  constexpr int64_t kThreads = 32 * kMergeWarps;
  const int64_t vectors = std::max<int64_t>(tiles_in(shape.value_size, 4), 1);
  const int64_t ctas = tiles_in(shape.query_heads() * shape.queries * vectors, kThreads);
  check_ctas(ctas);
  return {.spec = std::move(spec), .ctas = ctas};
}

std::atomic<int64_t> forced_keys{0};

}  // namespace

int64_t segment_keys() {
  constexpr int64_t kKeys = 1024;
  const int64_t forced = forced_keys;
  return forced > 0 ? forced : kKeys;
}
void force_segment_keys(int64_t keys) {
  FUSEGRAD_CHECK(ValueError, keys >= 0 && keys % 128 == 0,
                 "force_segment_keys: keys must be a multiple of 128, but got ", keys);
  forced_keys = keys;
  count_forced();
}

FlexCase segments_case(FlexCase c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                       int64_t processors, const std::string& architecture) {
  c.kernel = FlexKernel::kSegments;
  c.segment_keys = segment_keys();
  // The shape alone decides which rows are a tile's, and whether segments are CTAs: neither changes a bit.
  const bool segments = shape.keys > c.segment_keys;
  const auto fills = [&](int64_t rows) { return shape.query_heads() * tiles_in(shape.queries, rows) >= processors; };
  constexpr int64_t kFew = 32;
  if (takes_hopper_segments(c, architecture)) {
    constexpr int64_t kMostBatches = 1 << 16;  // Work::kSplitShift
    const bool split = shape.batches < kMostBatches && (shape.queries <= kFew || (segments && !fills(128)));
    c.few_rows = split ? 64 : 0;
    c.key_splits = split;
    c.many_segments = segments && !split;
    return c;
  }
  const int cols = portable_cols(c, architecture), limit = flex_shared_limit(std::stoi(architecture));
  const int64_t heads = mask && mask->heads > 1 ? 1 : shape.group();
  for (const int rows : {16, 32, 64}) {
    if (shape.queries > kFew || shape.queries > rows || portable_bytes(c, rows, cols) > limit) continue;
    c.few_rows = rows;
    if (shape.queries * heads <= rows) break;
  }
  c.key_splits = segments && !fills(c.few_rows > 0 ? kFew : 128);
  return c;
}

FlexCase merge_segments_case(const FlexCase& segments) {
  FlexCase c;
  c.kernel = FlexKernel::kMergeSegments;
  c.dtype = segments.dtype;
  c.head_size = segments.head_size;
  c.value_size = segments.value_size;
  c.wide = segments.wide;
  c.unscaled = segments.unscaled;
  c.dropout = segments.dropout;
  c.out_low = segments.out_low;
  return c;
}

const Kernel& segments_kernel() {
  static const Kernel kernel{.arguments = "FlexForwardArguments",
                             .derives = false,
                             .exact = true,
                             .predicates_reads = true,
                             .names = names,
                             .tiles = tiles,
                             .shared_bytes = shared_bytes,
                             .config = config,
                             .products = result_products,
                             .launch = launch};
  return kernel;
}

const Kernel& merge_segments_kernel() {
  static const Kernel kernel{.arguments = "FlexForwardArguments",
                             .derives = false,
                             .exact = true,
                             .names = merge_names,
                             .tiles = merge_tiles,
                             .shared_bytes = no_shared_bytes,
                             .config = merge_config,
                             .launch = merge_launch};
  return kernel;
}

}  // namespace fusegrad::cuda
