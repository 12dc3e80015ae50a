#include "cuda/attention/host/plan.h"

#include <algorithm>
#include <utility>

#include "attention/flex_attention.h"
#include "common/error.h"
#include "common/recent.h"
#include "cuda/attention/host/case_facts.h"
#include "cuda/attention/host/schemes.h"
#include "cuda/attention/host/tiles.h"
#include "score_mod/cache.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda {

using namespace planner;

namespace {

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
    f.seamless = f.hopper() && seamless(c, tile);
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
    f.whole = c.whole && f.grad_query && f.grad_key && f.grad_value && f.stores_boxes && tile.key_stages == 2;
    f.ordered = c.ordered && f.hopper() && f.grad_query && !c.blocks && !f.whole;
    // Beside tall tiles the warps that add have too few registers for it.
    f.stores_first = f.hopper() && f.grad_query && !f.whole && !f.ordered && tile.rows % 64 == 0;
    f.grad_scores = c.grad_query || c.grad_key;  // choose_schemes may add to it
    f.max_gradient = c.max_gradient;
    f.fixed_point = c.fixed_point;
    f.partial_sums = c.partial_sums;
    f.grouped = c.grouped;
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

KernelSpec planned(const FlexCase& c, const std::string& architecture) {
  const int limit = flex_shared_limit(std::stoi(architecture));
  const std::vector<FlexTileSize> tiles = candidates(c, architecture);
  std::optional<KernelFacts> crowded;
  for (size_t i = 0; i < tiles.size(); ++i) {
    KernelFacts facts = facts_of(c, tiles[i]);
    if (facts.shared_bytes > limit) continue;
    if (facts.few()) facts.resident = resident_ctas(facts.shared_bytes, architecture);
    if (c.kernel == FlexKernel::kGradBuffers && !facts.hopper()) facts.resident = grad_buffers_ctas(tiles[i]);
    if (facts.has_derivative) {
      const bool sums = c.kernel == FlexKernel::kBackward;
      const int left = sums ? limit - facts.shared_bytes : 0;
      // Sums in shared memory are worth more than stages, boxes, or columns.
      const auto stages = [](const FlexTileSize& t) { return t.query_stages + t.key_stages; };
      const bool another = sums && std::any_of(tiles.begin() + static_cast<std::ptrdiff_t>(i), tiles.end(),
                                               [&](const FlexTileSize& t) { return stages(t) < stages(tiles[i]); });
      const SchemesFit fit = choose_schemes(c, left, facts);
      if (fit != SchemesFit::kAll && (another || tiles[i].boxes || tiles[i].columns)) continue;
      facts.grad_scores |= !facts.schemes.empty();
      // As many as plan_launch counts; without histograms they fit anyway, and would spill.
      if (tiles[i].keeps && facts.schemes.find('F') != std::string::npos) facts.resident = 3;
      // Where pairs share elements, sums are worth more than a larger tile.
      if (sums && fit == SchemesFit::kNotCrowded) {
        if (!crowded) crowded = std::move(facts);
        continue;
      }
    }
    return KernelSpec(std::move(facts));
  }
  if (crowded) return KernelSpec(std::move(*crowded));
  fail<NotImplementedError>("flex_attention: head sizes must be such that tiles fit the GPU's ", limit,
                            " bytes of shared memory a CTA, but got D = ", c.head_size, " and E = ", c.value_size,
                            " of ", element_bytes(c.dtype), " bytes");
}

struct Asked {
  FlexCase of;
  std::string architecture;

  bool operator==(const Asked&) const = default;
};

}  // namespace

KernelSpec plan_kernel(const FlexCase& c, const std::string& architecture) {
  // Tests force what decides beside the case.
  if (flex_family_is_forced() || scheme_is_forced()) return planned(c, architecture);
  auto& known = of_this_process<Recent<Asked, KernelSpec, 128>>();
  return *known.get({c, architecture}, [&] { return planned(c, architecture); });
}

std::vector<FlexCase> backward_kernels(FlexCase c, const std::vector<bool>& needs_grad, bool deterministic,
                                       const std::string& architecture) {
  c.kernel = FlexKernel::kBackward;
  if (c.whole) {
    FlexCase one = c;
    one.grad_query = one.grad_key = one.grad_value = true;
    one.tall = false;
    c.whole = plan_kernel(one, architecture).facts().whole;
    c.tall = c.tall && !c.whole;
  }
  const bool hopper = takes_hopper(c, architecture);
  bool apart = deterministic || (hopper && !fits_hopper_backward(c));
  if (c.whole && !c.fixed_point) {
    apart = false;
  } else if (deterministic && needs_grad[0] && !c.fixed_point && !c.blocks && (!hopper || fits_hopper_backward(c))) {
    FlexCase one = c;
    one.ordered = one.grad_query = true;
    one.grad_key = needs_grad[1];
    one.grad_value = needs_grad[2];
    const KernelFacts facts = plan_kernel(one, architecture).facts();
    c.ordered = facts.ordered && facts.tile.boxes;
    apart = !c.ordered && !facts.stores_query;
  }
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
  found.common.tall = true;
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
  const FlexTileSize tile = grad_buffers_tile(found.common, architecture);
  // A tile keeps what the score_mod reads of each pair.
  if (shared_bytes(found.common, tile) > flex_shared_limit(std::stoi(architecture))) return std::nullopt;
  const int64_t members = tiles_in(batches, found.groups.groups);
  const int64_t tiles = found.groups.groups * heads * tiles_in(queries, tile.rows) * tiles_in(keys, tile.cols);
  const int64_t places = grad_buffers_ctas(tile) * processors;
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

}  // namespace fusegrad::cuda
