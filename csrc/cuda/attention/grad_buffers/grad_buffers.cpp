// Gradients of captured buffers by themselves, summed over batches: the kernels of both families, as the planner knows
// them, and where they pay.
#include "cuda/attention/grad_buffers/grad_buffers.h"

#include <algorithm>
#include <utility>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/captured/reads.h"
#include "cuda/attention/captured/schemes.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/tiles.h"
#include "score_mod/cache.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda {

using namespace planner;

namespace {

int shared_bytes(const FlexCase& c, const FlexTile& t) {
  const int head = head_cols(c), value = value_cols(c), element = element_bytes(c.dtype);
  if (t.is_hopper()) {
    return device::HopperGradBuffersMemory({.rows = t.rows,
                                            .cols = t.cols,
                                            .head = head,
                                            .value = value,
                                            .stages = t.stages,
                                            .narrow = narrow_heads(c, t),
                                            .line_bytes = t.hopper().line_bytes,
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
}

int contributions(const FlexCase& c) {
  return static_cast<int>(score_mod::cached_derivative(c.score_mod.text, c.wants_grad)->contributions().size());
}

// Room for two lines by keys and one by diagonals.
int line_bytes(const FlexCase& c) {
  return reads_by(c.score_mod, {score_mod::Reads::kKey, score_mod::Reads::kDiagonal}) ? 2 << 10 : 0;
}

// Reads from the L2 cache limit it at small heads: taller tiles read each batch's keys fewer times. They must fit the
// shared memory of every GPU.
FlexTile tile_of(const FlexCase& c, const std::string& architecture) {
  const int cols = std::max(head_cols(c), value_cols(c));
  const bool one = kept_reads(c) <= 1, long_queries = c.most_queries != 64;
  const bool hopper = architecture == "90a" && forced_family() != FlexFamily::kPortable && cols <= kHopperCols;
  // Sums of a second contribution would not fit the registers.
  if (hopper && long_queries && c.most_keys != 64 && one && contributions(c) == 1)
    return {128, 128, 12, cols <= 32 ? 4 : 2, false, HopperTile{.line_bytes = line_bytes(c)}};
  return long_queries && one && cols <= 32 ? FlexTile{128, 64, 8} : FlexTile{64, 64, 4};
}
// CTAs of a multiprocessor, by registers.
int ctas_of_registers(const FlexTile& tile) { return tile.is_hopper() ? 1 : tile.rows == 64 ? 3 : 2; }

std::vector<FlexTile> tiles(const FlexCase& c, const std::string& architecture) { return {tile_of(c, architecture)}; }

void add_facts(const FlexCase& c, KernelFacts& f) {
  f.narrow = narrow_heads(c, f.tile);
  add_gradient_facts(c, f);
}

void config(const FlexCase& c, const KernelFacts& f, ConfigText& text) {
  gradient_config(c, f, text);
  text.number("kShare", f.tile.share());
  text.choice("kKeeps", f.tile.keeps());
  text.choice("kGrouped", c.grouped);
  if (f.hopper()) {
    text.number("kGroups", f.groups);
    text.number("kStages", f.tile.stages);
    text.number("kLineBytes", f.tile.hopper().line_bytes);
    text.choice("kNarrow", f.narrow);
  } else {
    text.choice("kSplit", splits_products(c));
  }
}

int resident(const KernelFacts& f, const std::string& /*architecture*/) {
  return f.hopper() ? 0 : ctas_of_registers(f.tile);
}

KernelNames names(const KernelFacts& f) {
  if (f.hopper()) {
    return {"flex_grad_buffers_hopper", "cuda/attention/grad_buffers/hopper.cuh", "FlexGradBuffersHopper",
            "FlexBackwardHopperArguments"};
  }
  return {"flex_grad_buffers", "cuda/attention/grad_buffers/portable.cuh", "FlexGradBuffers", nullptr};
}

// S and dP: both operands in shared memory, K-major, of one half of the keys after the other.
std::string products(DType dtype, const KernelFacts& f) { return wgmma(dtype, f.tile.cols / 2, false, false); }

// sums_over_batches has its CTAs.
LaunchPlan launch(KernelSpec spec, const FlexShape& /*shape*/, const std::optional<BlockMaskShape>& /*mask*/,
                  int64_t /*processors*/, int64_t /*launches*/) {
  return {.spec = std::move(spec)};
}

}  // namespace

namespace {

constexpr int64_t kLeastBatches = 4;

// The groups of a call's batches, where they are large enough for sums over each.
std::optional<device::FlexBatchGroups> groups_of(const score_mod::BatchGroups& read,
                                                 std::span<const score_mod::Value> scalars, int64_t batches) {
  const int64_t divisor = read.scalar ? scalars[static_cast<size_t>(read.divisor)].i : read.divisor;
  if (divisor < 1) return std::nullopt;
  const auto most = static_cast<int>(std::min(divisor, batches)), rest = static_cast<int>(tiles_in(batches, most));
  const bool neighbours = read.op == score_mod::Op::kFloorDiv;
  if ((neighbours ? most : rest) < kLeastBatches) return std::nullopt;
  return neighbours ? device::FlexBatchGroups{rest, most, 1} : device::FlexBatchGroups{most, 1, most};
}

// The time of kGradBuffers in batches of a CTA: waves of CTAs, each of which starts, walks its batches and puts its
// sums. Where sums are not stored as the gradient, one kernel makes zeros before and another rounds after.
// docs/lab/learned_biases.md has the measurements.
int64_t time_of_sums(int64_t waves, int64_t batches, bool stored, bool partial) {
  constexpr int64_t kStored = 4, kAdded = 7, kPartial = 40, kTwoKernels = 8;
  return waves * (batches + (stored ? kStored : partial ? kPartial : kAdded)) + (stored ? 0 : kTwoKernels);
}

}  // namespace

void BatchSums::leave_out(FlexCase& c) const {
  for (size_t i = 0; i < c.wants_grad.size(); ++i) {
    if (common.wants_grad[i]) c.wants_grad[i] = false;
  }
}

std::optional<BatchSums> sums_over_batches(const FlexCase& c, const std::vector<bool>& needs_grad,
                                           std::span<const score_mod::Value> scalars, int64_t batches, int64_t heads,
                                           int64_t queries, int64_t keys, int64_t processors, bool deterministic,
                                           const std::string& architecture) {
  constexpr int kMostCols = 64, kMostContributions = 2;
  if (c.score_mod.text.empty() || c.dtype == DType::kFloat32 || batches < kLeastBatches) return std::nullopt;
  if (scheme_is_forced()) return std::nullopt;
  if (c.blocks || c.dropout || c.max_gradient || head_cols(c) > kMostCols || value_cols(c) > kMostCols)
    return std::nullopt;
  if (!needs_grad[0] && !needs_grad[1] && !needs_grad[2]) return std::nullopt;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto& contributions = derivative->contributions();
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  const auto read_groups = score_mod::batch_groups(*score_mod::cached_graph(c.score_mod.text));
  // Groups that no gradient asks for would be more CTAs, and sums, in vain.
  const bool grouped =
      read_groups && std::any_of(steps.begin(), steps.end(), [&](const auto& s) { return s.groups == read_groups; });
  const auto groups = grouped ? groups_of(*read_groups, scalars, batches) : std::nullopt;
  BatchSums found{c, groups.value_or(device::FlexBatchGroups{1, static_cast<int>(batches), 1})};
  found.common.grouped = groups.has_value();
  found.common.kernel = FlexKernel::kGradBuffers;
  // One program, whatever the other kernels are to do.
  found.common.grad_query = found.common.grad_key = found.common.grad_value = found.common.whole = false;
  found.common.fixed_point = found.common.key_splits = found.common.ordered = false;
  found.common.tall = found.common.stores_first = true;
  found.common.partial_sums = true;
  for (size_t k = 0; k < steps.size(); ++k) {
    const bool of_groups = groups && steps[k].groups == read_groups;
    if (!steps[k].over_batches && !of_groups)
      found.common.wants_grad[static_cast<size_t>(contributions[k].buffer)] = false;
  }
  int count = 0;
  // Whether a place gets one contribution of a batch, and contributions of one group.
  bool once = true, one_group = true;
  for (size_t k = 0; k < steps.size(); ++k) {
    if (!found.common.wants_grad[static_cast<size_t>(contributions[k].buffer)]) continue;
    ++count;
    once = once && steps[k].once_a_batch;
    one_group = one_group && (found.groups.groups == 1 || !steps[k].over_batches);
  }
  if (count == 0 || count > kMostContributions) return std::nullopt;
  const FlexTile tile = tile_of(found.common, architecture);
  // A tile keeps what the score_mod reads of each pair.
  if (shared_bytes(found.common, tile) > flex_shared_limit(std::stoi(architecture))) return std::nullopt;
  const int64_t members = tiles_in(batches, found.groups.groups);
  const int64_t tiles = found.groups.groups * heads * tiles_in(queries, tile.rows) * tiles_in(keys, tile.cols);
  const int64_t places = ctas_of_registers(tile) * processors;
  const auto covered = covered_buffers(found.common, {found.groups.groups, heads, queries, keys});
  const auto& wanted = found.common.wants_grad;
  const bool all_covered = std::equal(wanted.begin(), wanted.end(), covered.begin(), covered.end(),
                                      [](bool wants, bool covers) { return !wants || covers; });
  constexpr int64_t kMostParts = 64, kMostSums = int64_t{1} << 24;
  std::optional<int64_t> best;
  for (int64_t parts = 1; parts <= std::min(kMostParts, members / kLeastBatches); ++parts) {
    const int64_t ctas = tiles * parts, sums = ctas * tile.rows * tile.cols;
    // Where a place gets one sum of a CTA, the few of several CTAs are added to memory, unless in one order.
    const bool alone = once && one_group && parts == 1, partial = !alone && (!once || deterministic);
    if (partial && sums > kMostSums) break;
    const int64_t time = time_of_sums(tiles_in(ctas, places), tiles_in(members, parts), alone && all_covered, partial);
    if (best && time >= *best) continue;
    best = time;
    found.parts = parts;
    found.ctas = ctas;
    found.sums = sums;
    found.common.partial_sums = partial;
    found.common.covered = alone ? covered : std::vector<bool>{};
  }
  if (!best) return std::nullopt;
  return found;
}

const Kernel& grad_buffers_kernel() {
  static const Kernel kernel{.arguments = "FlexBackwardArguments",
                             .sums = true,
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
