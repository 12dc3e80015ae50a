// What the forward shares with forward mode, and what a call decides for it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cuda/attention/plan/config_text.h"
#include "cuda/attention/plan/launch_plan.h"

namespace fusegrad::cuda {

/// Hopper: the bytes of a tile's lines of what mods read.
int line_bytes(const FlexCase& c);
/// Hopper: the shared memory of a tile of the kernels whose producers bring boxes and lines.
int hopper_forward_bytes(const FlexCase& c, const FlexTile& t);
/// Kernel::config of what the Hopper kernels with results have in common.
void hopper_result_config(const FlexCase& c, const KernelFacts& f, ConfigText& text);
/// Kernel::products: S, both operands in shared memory, K-major; O, P in registers by values, MN-major.
std::string result_products(DType dtype, const KernelFacts& f);

/// Hopper: heads whose tiles are begun together (LaunchPlan::section).
int64_t forward_section(const KernelFacts& f, const FlexShape& n, int64_t processors);

/// FlexCase::forward_rows. `share_of_pairs`, `processors`: as pays_tall and plan_launch.
int forward_rows(const FlexCase& c, const FlexShape& shape, int64_t processors,
                 const std::function<double()>& share_of_pairs);

}  // namespace fusegrad::cuda
