// What tiles of several kernels have in common: the family that a call takes, boxes and columns. For the planner and
// the rooms of kernels.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/attention/plan/plan.h"

namespace fusegrad::cuda::planner {

/// For tests (force_flex_family): the family that takes all calls that it can.
std::optional<FlexFamily> forced_family();
/// Whether the Hopper forward or backward has boxes of what a score_mod reads.
bool has_hopper_boxes(const FlexCase& c);
/// Whether boxes are worth more than the Hopper kernels that have none.
bool boxes_pay(const FlexCase& c);
/// Each of the portable tiles with boxes first, and with columns of tables, where the score_mod has reads for them.
std::vector<FlexTile> with_boxes(const FlexCase& c, std::vector<FlexTile> tiles);
std::vector<FlexTile> with_columns(const FlexCase& c, const std::vector<FlexTile>& tiles);
/// CTAs of a multiprocessor, by shared memory.
int resident_ctas(int shared_bytes, const std::string& architecture);

}  // namespace fusegrad::cuda::planner
