// The backward by keys: its kernels of both families, as the planner knows them.
#include "cuda/attention/backward/backward.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "cuda/attention/captured/reads.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/tiles.h"
#include "score_mod/cache.h"
#include "score_mod/pair_reads.h"

namespace fusegrad::cuda {
namespace planner {

bool fits_hopper_backward(const FlexCase& c) {
  const int head = head_cols(c, kHopperCols);
  return head <= 128 && value_cols(c, kHopperCols) <= head;
}

bool keys_shared(const FlexCase& c, const FlexTile& t) {
  return t.is_hopper() && c.kernel == FlexKernel::kBackward && t.cols < 16 * consumer_warps(t);
}
namespace {

// Whether TMA brings a box of float32.
bool floats_by_maps(const FlexCase& c) {
  const auto graph = score_mod::cached_graph(c.score_mod.text);
  const auto reads = score_mod::mapped_reads(*graph, c.score_mod.dtypes);
  return std::any_of(reads.begin(), reads.end(), [&](score_mod::NodeId load) {
    return score_mod::box_bytes(*graph, load, c.score_mod.dtypes) == 4;
  });
}

}  // namespace

// Each of two warpgroups has 64 keys, whose gradients stay in registers, and scores of as many queries as then fit;
// else both share 64 keys.
std::vector<FlexTile> hopper_backward(const FlexCase& c) {
  if (!fits_hopper_backward(c)) {
    if (const auto own = backward_tall_tile(c); own && c.tall && !c.max_gradient && c.grad_key && c.grad_value) {
      FlexTile more = *own;
      more.hopper().query_stages = 3;
      return {more, *own};
    }
    return {{64, 64, 12, 2, false, HopperTile{.query_stages = 2}}};
  }
  const int rows = head_cols(c, kHopperCols) == 64 ? 128 : 64;
  // With tall tiles products read less of keys and values per query; there are registers for it where pairs need few.
  const bool takes_tall = c.tall && !c.max_gradient && (c.grad_query || (rows == 64 && (!c.blocks || c.grad_key)));
  if (const auto tall = backward_tall_tile(c); tall && takes_tall) return {*tall};
  // The next keys beside the present ones, where they fit.
  std::vector<FlexTile> found;
  const auto add = [&](int tile_rows, int key_stages, int query_stages, int read_stages = 0, bool own_places = false) {
    FlexTile t{.rows = tile_rows,
               .cols = 128,
               .warps = 12,
               .stages = 2,
               .boxes = read_stages > 0,
               .own = HopperTile{.query_stages = query_stages,
                                 .key_stages = key_stages,
                                 .read_stages = read_stages,
                                 .own_places = own_places}};
    if (t.boxes) t.hopper().maps = box_maps(c, t);
    if (key_stages == 1 || c.grad_query) found.push_back(t);
  };
  if (has_hopper_boxes(c)) {
    // Tall tiles fit beside boxes where those of queries and keys are narrow.
    if (c.grad_query && std::max(head_cols(c), value_cols(c)) <= 32) {
      for (const int query_stages : {3, 2}) add(128, 2, query_stages, 2, true);
      for (const int query_stages : {3, 2}) add(128, 2, query_stages, 2);
      add(128, 1, 2, 2);
      // One tile of floats comes only when the one before is read: of many queries products that read less outweigh it.
      if (!floats_by_maps(c) || c.tall) add(128, 1, 2, 1);
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

}  // namespace planner

using namespace planner;

namespace {

// CTAs that stay with a head for many batches, of a multiprocessor: as many as registers must allow.
constexpr int kStaying = 3;

// Where keys are shared, dQ is left to a kernel of its own.
bool adds_grad_query(const FlexCase& c, const FlexTile& t) { return c.grad_query && !keys_shared(c, t); }
bool stores_boxes(const FlexCase& c, const FlexTile& t) {
  return t.is_hopper() && c.kernel == FlexKernel::kBackward && adds_grad_query(c, t) && fits_hopper_backward(c) &&
         (c.score_mod.text.empty() || t.hopper().key_stages == 2);
}

bool stores_query(const FlexCase& c, const FlexTile& t) {
  return t.family() == FlexFamily::kPortable && c.kernel == FlexKernel::kBackward && c.grad_query && !c.blocks &&
         c.most_keys != 0 && c.most_keys <= t.cols;
}

int shared_bytes(const FlexCase& c, const FlexTile& t) {
  const int head = head_cols(c), value = value_cols(c), element = element_bytes(c.dtype);
  if (t.is_hopper()) {
    const HopperTile& own = t.hopper();
    return device::HopperBackwardMemory({.rows = t.rows,
                                         .cols = t.cols,
                                         .head = head,
                                         .value = value,
                                         .stages = t.stages,
                                         .query_stages = own.query_stages,
                                         .key_stages = own.key_stages,
                                         .narrow = narrow_heads(c, t) && !keys_shared(c, t),
                                         .adds_grad_query = adds_grad_query(c, t),
                                         .own_keys = !keys_shared(c, t),
                                         .own_places = own.own_places,
                                         .has_score_mod = !c.score_mod.text.empty(),
                                         .has_dropout = c.dropout,
                                         .box_bytes = box_bytes(c, t),
                                         .read_stages = own.read_stages,
                                         .captured_bytes = 0})
        .bytes();
  }
  return device::BackwardMemory({.rows = t.rows,
                                 .cols = t.cols,
                                 .head = head,
                                 .value = value,
                                 .element_bytes = element,
                                 .stages = t.stages,
                                 .gradient_stages = t.portable().gradient_stages,
                                 .shares_keys = t.share() > 1,
                                 .box_bytes = box_bytes(c, t),
                                 .kept_bytes = kept_bytes(c, t),
                                 .column_bytes = column_bytes(c, t),
                                 .captured_bytes = 0})
      .bytes();
}

// Whether a multiprocessor has room for one CTA alone, as those of sm_86, sm_89 and sm_120.
bool has_small_shared(const std::string& architecture) {
  constexpr int kSmall = 100 << 10;
  return flex_shared_limit(std::stoi(architecture)) < kSmall;
}

std::vector<FlexTile> portable_backward(const FlexCase& c, int head, const std::string& architecture) {
  // Measured where scores are only scaled: the one CTA has eight warps with keys of their own.
  const bool plain = c.score_mod.text.empty() && !c.dropout && !c.max_gradient;
  const bool small = plain && has_small_shared(architecture);
  const auto tile = [](int rows, int cols, int warps, int share, int stages) {
    return FlexTile{rows, cols, warps, stages, false, PortableTile{.share = share}};
  };
  if (c.dtype == DType::kFloat32) {
    if (head <= 64) return {tile(32, 64, 4, 1, 1), tile(32, 32, 4, 2, 1)};
    if (head <= 128) return {tile(32, 64, 8, 2, 1), tile(32, 32, 4, 2, 1)};
    return {tile(64, 32, 8, 4, 1), tile(32, 32, 4, 2, 1), tile(32, 16, 2, 2, 1)};
  }
  if (head > kMostCols) {
    // Four warps that share keys have a quarter of dK each. A half, of two warps, fits registers up to 512 columns, and
    // so does a part of dV.
    const bool all = c.grad_query || c.grad_key || c.wants_buffers();
    std::vector<FlexTile> found{tile(64, 32, 8, 4, 1)};
    if (!all) found.insert(found.begin(), tile(64, 64, 8, 2, 1));
    if (!all || head <= 512) found.insert(found.end(), {tile(32, 32, 4, 2, 1), tile(32, 16, 2, 2, 1)});
    return found;
  }
  if (head > 128) return {tile(64, 64, 8, 2, 1), tile(32, 32, 4, 2, 1)};
  // The gradients of captured buffers need the shared memory, and their sums a barrier after each tile anyway.
  const bool delayed = c.grad_query && !c.wants_buffers();
  std::vector<FlexTile> found;
  const auto add = [&](FlexTile t) {
    if (t.stages == 2 && delayed) {
      t.portable().gradient_stages = 2;
      found.push_back(t);
      t.portable().gradient_stages = 1;
    }
    found.push_back(t);
  };
  if (head <= 64) {
    const bool few = c.most_queries == 64;
    if (few && c.most_keys == 64) {
      if (FlexTile t = tile(64, 64, 4, 1, 1); stays(c)) {
        t.portable().keeps = true;
        add(t);
      }
      add(tile(64, 64, 4, 1, 1));
    }
    if (!few) add(tile(128, 128, 8, 2, 2));
    if (!few && small && head <= 32) add(tile(128, 128, 8, 1, 1));
    add(tile(64, 128, 8, 2, 1));
  } else {
    add(tile(64, 128, 8, 2, 2));
    add(tile(64, 128, 8, 2, 1));
    if (small) add(tile(32, 128, 8, 1, 2));
    if (small) add(tile(32, 128, 8, 1, 1));
    add(tile(32, 64, 4, 1, 2));
    add(tile(32, 64, 4, 1, 1));
  }
  return found;
}

std::vector<FlexTile> tiles(const FlexCase& c, const std::string& architecture) {
  if (takes_hopper(c, architecture) && !boxes_pay(c)) return hopper_backward(c);
  const int head = std::max(head_cols(c), value_cols(c));
  std::vector<FlexTile> found = with_columns(c, with_boxes(c, portable_backward(c, head, architecture)));
  // Leaves room for sums of diagonals where a CTA has 99 KiB.
  if (head <= 64 && c.dtype != DType::kFloat32) found.push_back({64, 64, 4});
  // One warp, where nothing else fits: it has accumulators for all columns.
  if (shared_bytes(c, found.back()) > flex_shared_limit(std::stoi(architecture))) found.push_back({16, 16, 1});
  return found;
}

void add_facts(const FlexCase& c, KernelFacts& f) {
  f.keys_shared = keys_shared(c, f.tile);
  f.places = !c.place_bytes.empty();
  if (f.keys_shared) f.warps /= 2;
  f.narrow = narrow_heads(c, f.tile) && !f.keys_shared;
  f.grad_query = adds_grad_query(c, f.tile);
  f.stores_boxes = stores_boxes(c, f.tile);
  f.stores_query = stores_query(c, f.tile);
  f.key_splits = false;
  f.whole = c.whole && f.grad_query && c.grad_key && c.grad_value && f.stores_boxes && f.tile.hopper().key_stages == 2;
  f.ordered = c.ordered && f.hopper() && f.grad_query && !c.blocks && !f.whole;
  // Beside tall tiles it costs more than zeros.
  f.stores_first = c.stores_first && f.hopper() && f.grad_query && !f.whole && !f.ordered && f.tile.rows % 64 == 0;
  f.upright =
      (f.narrow && f.head <= 32) || (f.hopper() && f.grad_query && !f.whole && f.tile.rows == 128 && f.head <= 48);
  add_gradient_facts(c, f);
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  gradient_config(c, f, text);
  text.number("kShare", f.tile.share());
  text.number("kStages", f.tile.stages);
  text.choice("kBoxes", f.tile.boxes);
  text.choice("kKeeps", f.tile.keeps());
  text.choice("kGradQuery", f.grad_query);
  text.choice("kGradKey", c.grad_key);
  text.choice("kGradValue", c.grad_value);
  text.choice("kGradScores", c.grad_query || c.grad_key || !f.schemes.empty());
  if (!f.hopper()) {
    text.number("kGradientStages", f.tile.portable().gradient_stages);
    text.choice("kSplit", splits_products(c));
    text.numbers("kColumns", columns_of(c, f.tile));
    text.numbers("kPlaces", places_of(c));
    text.choice("kStoresQuery", f.stores_query);
    return;
  }
  const HopperTile& own = f.tile.hopper();
  text.number("kGroups", f.groups);
  text.number("kQueryStages", own.query_stages);
  text.number("kKeyStages", own.key_stages);
  text.number("kParts", own.parts);
  text.choice("kMaskAlone", masks_alone(c));
  text.number("kReadStages", own.read_stages);
  text.number("kMaps", own.maps);
  text.choice("kNarrow", f.narrow);
  text.choice("kUpright", f.upright);
  text.choice("kStoresBoxes", f.stores_boxes);
  text.choice("kOwnPlaces", own.own_places);
  text.choice("kOrdered", f.ordered);
  text.choice("kStoresFirst", f.stores_first);
  text.choice("kWhole", f.whole);
}

int resident(const KernelFacts& f, const std::string& /*architecture*/) {
  // Without histograms they fit anyway, and would spill.
  const bool counts = std::find(f.schemes.begin(), f.schemes.end(), device::Scheme::kSmallTable) != f.schemes.end();
  return f.tile.keeps() && (counts || f.places) ? kStaying : 0;
}

KernelNames names(const KernelFacts& f) {
  if (f.keys_shared) {
    return {"flex_backward_wide_hopper", "cuda/attention/backward/hopper_wide.cuh", "FlexBackwardWideHopper",
            "FlexBackwardHopperArguments"};
  }
  if (f.hopper()) {
    return {"flex_backward_hopper", "cuda/attention/backward/hopper.cuh", "FlexBackwardHopper",
            "FlexBackwardHopperArguments"};
  }
  return {"flex_backward", "cuda/attention/backward/portable.cuh", "FlexBackward", nullptr};
}

// S and dP: both operands in shared memory, K-major. dV and dK: P or dS in registers by an operand in shared memory,
// MN-major. dQ: both in shared memory, transposed, K by dS; upright dS by K.
std::string products(DType dtype, const KernelFacts& f) {
  return wgmma(dtype, f.tile.rows, false, false) + wgmma(dtype, f.value, true, true) +
         (f.head == f.value ? "" : wgmma(dtype, f.head, true, true)) +
         (f.upright ? wgmma(dtype, f.head, false, true)
                    : wgmma(dtype, f.head <= 64 ? f.tile.rows / 2 : f.tile.rows, false, false, true));
}

LaunchPlan launch(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                  int64_t processors, int64_t launches) {
  const KernelFacts& f = spec.facts();
  if (f.tile.keeps()) return launch_staying(std::move(spec), shape, kStaying * processors);
  const int64_t heads = shape.key_batches * shape.key_heads, tiles = heads * tiles_in(shape.keys, f.tile.cols);
  const bool persistent = f.hopper() && !f.keys_shared && launches == 1;
  check_ctas(persistent ? tiles + processors : tiles / launches);  // persistent CTAs count on from their number
  const int64_t work = f.whole ? heads : tiles;
  const int64_t section = f.hopper() && f.blocks && !f.whole ? backward_section(shape) : 1;
  std::optional<TileListPlan> lists;
  if (mask) lists = plan_lists(f.tile, /*by_key=*/true, shape, *mask);
  return {.spec = std::move(spec),
          .ctas = persistent ? std::min(work, processors) : work / launches,
          .launches = launches,
          .section = static_cast<int>(section),
          .lists = lists};
}

std::atomic<int> forced_whole{-1};

}  // namespace

// The CTAs of a group of query heads are at about the same one: it counts once, with its gradient in float32.
int64_t backward_section(const FlexShape& n) {
  const int64_t bytes = n.queries * (kHopperElementBytes * (n.head_size + n.value_size) + 4 * n.head_size);
  return heads_together(n.key_batches * n.key_heads, bytes);
}

void add_gradient_facts(const FlexCase& c, KernelFacts& f) {
  f.fixed_point = c.fixed_point;
  f.partial_sums = c.partial_sums;
  f.wants_grad = c.wants_grad;
}

void gradient_config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  text.type("Derivative", "::Derivative");
  text.numbers("kWantsGrad", c.wants_grad);
  text.line("  struct Schemes {");
  text.list("fusegrad::device::Scheme", "kScheme", f.schemes, [](device::Scheme scheme) {
    return std::string("fusegrad::device::Scheme('") + static_cast<char>(scheme) + "')";
  });
  text.numbers("kTable", f.tables);
  text.line("  };");
  text.number("kWarps", f.warps);
  text.choice("kMaxGradient", c.max_gradient);
  text.choice("kFixedPoint", c.fixed_point);
  text.choice("kPartialSums", c.partial_sums);
}

bool one_warp_alone_fits(FlexCase c, const std::string& architecture) {
  if (c.wide || takes_hopper(c, architecture)) return false;
  c.kernel = FlexKernel::kBackward;
  const int head = std::max(head_cols(c), value_cols(c));
  return shared_bytes(c, portable_backward(c, head, architecture).back()) > flex_shared_limit(std::stoi(architecture));
}

int backward_value_cols(const FlexCase& c, const std::string& architecture) {
  // Wider tiles of float32 do not fit small shared memory.
  return c.dtype == DType::kFloat32 && has_small_shared(architecture) ? kMostCols / 2 : kMostCols;
}

std::optional<FlexTile> backward_tall_tile(const FlexCase& c) {
  if (!masks_alone(c) || c.dropout) return std::nullopt;
  if (!fits_hopper_backward(c)) {
    // Each warpgroup has registers for dK and dV of 64 keys beside the scores of 48 queries.
    if (head_cols(c, kHopperCols) != 192 || value_cols(c, kHopperCols) > 128) return std::nullopt;
    const FlexTile t{48, 128, 12, 2, false, HopperTile{.query_stages = 2, .parts = c.blocks ? 3 : 1}};
    if (c.blocks && (c.block_size[0] < t.rows || mixed(c, t))) return std::nullopt;
    return t;
  }
  const bool small = head_cols(c, kHopperCols) == 64;
  // 96 queries fit where tiles are narrow. Without a mask heads of up to 80 columns are slower so.
  const int widest = std::max(head_cols(c), value_cols(c));
  const int rows = small ? 144 : widest <= 96 && (c.blocks || widest > 80) ? 96 : 80;
  const FlexTile t{rows, 128, 12, 2, false, HopperTile{.query_stages = 2, .parts = c.blocks ? rows / 16 : 1}};
  if (c.blocks && (small || c.block_size[0] < t.rows || mixed(c, t))) return std::nullopt;
  return t;
}
// A tile of 80 takes 7/6 of the time of one of 64, one of 96 11/8, one of 144 11/10 of one of 128. Where the others
// have room for the next keys beside the present ones, keys cost half a tile of 64 more, or 4/5 of one of 128; with a
// block mask it depends on how many queries they have. For heads above 128 columns 48 queries of 128 keys take three
// quarters of what 64 of 64 keys do, as scores are not computed twice.
bool pays_tall(const FlexCase& c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
               const std::function<double()>& share_of_pairs, const std::string& architecture) {
  constexpr int64_t kManyQueries = 512;
  if (!c.score_mod.dtypes.empty() && floats_by_maps(c)) return shape.queries >= kManyQueries;
  const auto tile = backward_tall_tile(c);
  if (!tile || !takes_hopper(c, architecture)) return false;
  if (tile->rows == 48) {
    // Keys of 64 keep twice as many CTAs busy.
    constexpr int64_t kLeastCtas = 96;
    const bool many = shape.key_batches * shape.key_heads * tiles_in(shape.keys, tile->cols) >= kLeastCtas;
    return many && (!mask || plan_lists(*tile, /*by_key=*/true, shape, *mask).direct);
  }
  const int64_t queries = shape.queries;
  if (tile->rows == 144)
    return 11 * shape.group() * tiles_in(queries, 144) + 8 <= 10 * shape.group() * tiles_in(queries, 128);
  if (!mask && tile->rows == 96) return 11 * tiles_in(queries, 96) <= 8 * tiles_in(queries, 64);
  if (!mask) return 7 * tiles_in(queries, 80) <= 6 * tiles_in(queries, 64);
  // Queries a key from which fewer steps make up for sums that begin as zeros.
  const int64_t least = c.head_size <= 96 ? 1024 : 1152;
  if (queries < least || !plan_lists(*tile, /*by_key=*/true, shape, *mask).direct) return false;
  return c.mask_mod.text.empty() || share_of_pairs() * static_cast<double>(queries) >= static_cast<double>(least);
}

bool sums_wide_query(const FlexCase& c) {
  return c.tall && c.sums_wide && !c.max_gradient && !fits_hopper_backward(c) && backward_tall_tile(c);
}
// Sums go through memory three times: with few keys that takes longer than to compute scores again.
bool pays_sums_wide(const FlexCase& c, const FlexShape& shape, const std::function<double()>& share_of_pairs) {
  constexpr double kLeast = 768;
  return c.tall && !fits_hopper_backward(c) && share_of_pairs() * static_cast<double>(shape.keys) >= kLeast;
}

// States are read and claimed for each tile, zeros are written once: measured for causal masks of 512 to 8192 queries
// and for windows. Without a mask, and for wider heads, neither is better throughout.
bool pays_stores_first(const FlexCase& c, const FlexShape& shape, const std::function<double()>& share_of_pairs) {
  constexpr double kMostQueries = 1024;
  if (!c.blocks || !masks_alone(c) || c.mask_mod.text.empty() || head_cols(c, kHopperCols) > 64) return true;
  return share_of_pairs() * static_cast<double>(shape.queries) < kMostQueries;
}

// It needs as many heads as keep the CTAs busy. Each reads a head's queries for every tile of keys, and adds to their
// sums: they are to be in the L2 cache meanwhile, of all CTAs together. Under a mask a tile of keys reads a part of the
// head's queries. That makes up for more bytes where heads are short; causal heads of 1024 queries were slower.
bool pays_whole(const FlexCase& c, const FlexShape& shape, int64_t processors,
                const std::function<double()>& share_of_pairs) {
  if (forced_whole == 0 || shape.key_batches != shape.batches) return false;
  // What the producer can count with a block mask, of the smallest tiles.
  constexpr int64_t kMostQueries = 64 / device::kWholeHeadBits * int64_t{64};
  constexpr int64_t kMostKeys = ((1 << device::kWholeHeadBits) - 1) * int64_t{128};
  if (c.blocks && (shape.group() > 1 || shape.queries > kMostQueries || shape.keys > kMostKeys)) return false;
  if (forced_whole == 1) return true;
  const int64_t heads = shape.key_batches * shape.key_heads, turns = tiles_in(heads, processors);
  if (10 * heads < 9 * turns * processors) return false;
  constexpr int64_t kMostBytes = int64_t{40} << 20, kShort = 512;
  const int64_t row = 4 * shape.head_size + kHopperElementBytes * (shape.head_size + shape.value_size);
  const int64_t bytes = processors * shape.group() * shape.queries * row;
  if (bytes <= kMostBytes) return true;
  return c.blocks && shape.queries <= kShort && share_of_pairs() * static_cast<double>(bytes) <= kMostBytes;
}

void force_flex_whole(int whole) {
  forced_whole = whole;
  count_forced();
}

const Kernel& backward_kernel() {
  static const Kernel kernel{.arguments = "FlexBackwardArguments",
                             .sums = true,
                             .shared_pointer = true,
                             .names = names,
                             .tiles = tiles,
                             .shared_bytes = shared_bytes,
                             .add_facts = add_facts,
                             .resident = resident,
                             .config = config,
                             .products = products,
                             .launch = launch};
  return kernel;
}

}  // namespace fusegrad::cuda
