// What the backward by keys shares with the other kernels of gradients, and what a call decides for it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/attention/plan/config_text.h"
#include "cuda/attention/plan/launch_plan.h"

namespace fusegrad::cuda {
namespace planner {

/// Hopper: whether 64 keys' gradients fit the registers of one warpgroup.
bool fits_hopper_backward(const FlexCase& c);
/// Both consumer warpgroups have the same 64 keys, and one of them the captured buffers' sums.
bool keys_shared(const FlexCase& c, const FlexTile& t);
std::vector<FlexTile> hopper_backward(const FlexCase& c);

}  // namespace planner

/// What all kernels of gradients have: of their facts and of Config (Kernel::add_facts, Kernel::config).
void add_gradient_facts(const FlexCase& c, KernelFacts& f);
void gradient_config(const FlexCase& c, const KernelFacts& f, ConfigText& text);

/// Hopper: heads of keys whose tiles are begun together (LaunchPlan::section).
int64_t backward_section(const FlexShape& n);

/// Hopper: a backward's tile of more queries, which needs the registers that a score_mod takes and the shared memory of
/// the next keys. For head sizes of 65 to 128 it has 80 queries instead of 64, in parts of 16 that lie in a block of
/// the block mask each, so that tiles need not begin where blocks do. For smaller head sizes, without a block mask, it
/// has 144 instead of 128. For heads of 129 to 192 columns and values of up to 128 it has 48 instead of 64, in such
/// parts, but 64 keys for each warpgroup.
std::optional<FlexTile> backward_tall_tile(const FlexCase& c);
/// Whether the kernel by keys adds up dQ of heads of more than 128 columns, which else has a kernel of its own. It
/// needs all of the gradients of query, key and value.
bool sums_wide_query(const FlexCase& c);

/// Whether a warp alone would have all gradients of a tile, of heads that are not wide: float32 of 256 columns where a
/// CTA has 99 KiB. Its accumulators would spill, so dQ, dK and dV have kernels of their own, as of wide heads.
bool one_warp_alone_fits(FlexCase c, const std::string& architecture);
/// Wide heads: the columns of values of a kernel that makes dV alone.
int backward_value_cols(const FlexCase& c, const std::string& architecture);

/// Whether a backward's tall tile takes less time than others. `share_of_pairs`: of all pairs those that the mask_mod
/// allows; asked only where it matters.
bool pays_tall(const FlexCase& c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
               const std::function<double()>& share_of_pairs, const std::string& architecture);

/// FlexCase::sums_wide. `share_of_pairs`: as pays_tall.
bool pays_sums_wide(const FlexCase& c, const FlexShape& shape, const std::function<double()>& share_of_pairs);

/// FlexCase::stores_first. `share_of_pairs`: as pays_tall.
bool pays_stores_first(const FlexCase& c, const FlexShape& shape, const std::function<double()>& share_of_pairs);

/// Whether a backward takes less time where a CTA has all keys of a head, as far as lengths and the mask decide.
/// `processors`, `share_of_pairs`: as plan_launch and pays_tall.
bool pays_whole(const FlexCase& c, const FlexShape& shape, int64_t processors,
                const std::function<double()>& share_of_pairs);

/// For tests: 1: a CTA takes all keys of a head wherever it can; 0: nowhere; -1: where it pays.
void force_flex_whole(int whole);

}  // namespace fusegrad::cuda
