#include "cuda/attention/plan/plan.h"

#include <algorithm>
#include <utility>

#include "attention/flex_attention.h"
#include "common/division.h"
#include "common/error.h"
#include "common/recent.h"
#include "cuda/attention/backward/backward.h"
#include "cuda/attention/captured/reads.h"
#include "cuda/attention/captured/schemes.h"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "score_mod/cache.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda {

using namespace planner;

namespace {

// All but the schemes.
KernelFacts facts_of(const FlexCase& c, const FlexTile& tile) {
  KernelFacts f;
  f.kernel = c.kernel;
  f.tile = tile;
  f.head = head_cols(c);
  f.value = value_cols(c);
  f.warps = consumer_warps(tile);
  f.groups = f.hopper() ? f.warps / 4 : 0;
  f.key_splits = c.key_splits;
  f.blocks = c.blocks;
  const Kernel& kernel = kernel_of(c.kernel);
  f.shared_bytes = kernel.shared_bytes(c, tile);
  if (kernel.add_facts != nullptr) kernel.add_facts(c, f);
  return f;
}

KernelSpec planned(const FlexCase& c, const std::string& architecture) {
  const int limit = flex_shared_limit(std::stoi(architecture));
  const Kernel& kernel = kernel_of(c.kernel);
  const std::vector<FlexTile> tiles = kernel.tiles(c, architecture);
  std::optional<KernelFacts> crowded;
  for (size_t i = 0; i < tiles.size(); ++i) {
    KernelFacts facts = facts_of(c, tiles[i]);
    if (facts.shared_bytes > limit) continue;
    const bool sums = c.kernel == FlexKernel::kBackward;
    SchemesFit fit = SchemesFit::kAll;
    if (has_derivative(c)) {
      const int left = sums ? limit - facts.shared_bytes : 0;
      // Sums in shared memory are worth more than stages, boxes, or columns.
      const auto stages = [](const FlexTile& t) {
        return t.is_hopper() ? t.hopper().query_stages + t.hopper().key_stages : 0;
      };
      const bool another = sums && std::any_of(tiles.begin() + static_cast<std::ptrdiff_t>(i), tiles.end(),
                                               [&](const FlexTile& t) { return stages(t) < stages(tiles[i]); });
      fit = choose_schemes(c, left, facts);
      if (fit != SchemesFit::kAll && (another || tiles[i].boxes || tiles[i].columns())) continue;
    }
    if (kernel.resident != nullptr) facts.resident = kernel.resident(facts, architecture);
    // Where pairs share elements, sums are worth more than a larger tile.
    if (sums && fit == SchemesFit::kNotCrowded) {
      if (!crowded) crowded = std::move(facts);
      continue;
    }
    return {c, std::move(facts)};
  }
  if (crowded) return {c, std::move(*crowded)};
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

const Kernel& kernel_of(FlexKernel kernel) {
  switch (kernel) {
    case FlexKernel::kForward:
      return forward_kernel();
    case FlexKernel::kBackward:
      return backward_kernel();
    case FlexKernel::kGradQuery:
      return grad_query_kernel();
    case FlexKernel::kGradBuffers:
      return grad_buffers_kernel();
    case FlexKernel::kTangents:
      return tangents_kernel();
    case FlexKernel::kPairTangents:
      return pair_tangents_kernel();
    case FlexKernel::kSegments:
      return segments_kernel();
    case FlexKernel::kMergeSegments:
      return merge_segments_kernel();
  }
  fail<NotImplementedError>("flex_attention: no such kernel");
}

KernelSpec plan_kernel(const FlexCase& c, const std::string& architecture) {
  // Tests force what decides beside the case.
  if (flex_family_is_forced() || scheme_is_forced() || flex_shared_limit_is_forced()) return planned(c, architecture);
  auto& known = of_this_process<Recent<Asked, KernelSpec, 128>>();
  return *known.get({c, architecture}, [&] { return planned(c, architecture); });
}

std::vector<int> column_parts(int columns, int most) {
  // Parts alike are one kernel.
  const int count = std::max(1, ceil_div(columns, most)), each = std::max(16, round_up(ceil_div(columns, count), 16));
  std::vector<int> parts;
  for (int first = 0; first == 0 || first < columns; first += each) parts.push_back(std::min(each, columns - first));
  return parts;
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
  const bool value_apart = c.wide && needs_grad[2];
  // Where heads are not wide by themselves, a warp has no registers for dQ beside dK (one_warp_alone_fits).
  const bool crowded = c.wide && std::max(c.head_size, c.value_size) <= kMostCols;
  const bool all = needs_grad[0] && needs_grad[1] && needs_grad[2];
  bool apart = deterministic || crowded || (hopper && !fits_hopper_backward(c) && !(all && sums_wide_query(c)));
  if (c.whole && !c.fixed_point) {
    apart = false;
  } else if (deterministic && !c.wide && needs_grad[0] && !c.fixed_point && !c.blocks &&
             (!hopper || fits_hopper_backward(c))) {
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
  if (value_apart) {
    FlexCase value = c;
    value.wants_grad.assign(c.wants_grad.size(), false);
    value.grad_query = value.grad_key = value.max_gradient = value.fixed_point = value.partial_sums = false;
    value.grad_value = true;
    for (const int count : column_parts(c.value_size, backward_value_cols(c, architecture))) {
      value.value_size = count;
      kernels.push_back(value);
    }
  }
  c.grad_query = needs_grad[0] && !apart;
  c.grad_key = needs_grad[1];
  c.grad_value = needs_grad[2] && !value_apart;
  if (c.grad_query || c.grad_key || c.grad_value || c.wants_buffers()) kernels.push_back(c);
  return kernels;
}

}  // namespace fusegrad::cuda
