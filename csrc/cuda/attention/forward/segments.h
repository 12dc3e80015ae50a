// The forward with batch_invariant, whose keys are summed in segments of a fixed length (segments.cuh): which tiles a
// call takes, and when segments are CTAs of their own. Needs no GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/attention/plan/launch_plan.h"
#include "cuda/attention/plan/plan.h"

namespace fusegrad::cuda {

/// Keys of a segment, a multiple of 128. Results depend on it.
int64_t segment_keys();
/// For tests and benchmarks: another number of keys; 0: the usual one.
void force_segment_keys(int64_t keys);

/// What a call with batch_invariant asks of its kernel, from what all kernels of the call have in common.
FlexCase segments_case(FlexCase c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                       int64_t processors, const std::string& architecture);
/// What adds up segments that are CTAs of their own; it is the same for all score_mods.
FlexCase merge_segments_case(const FlexCase& segments);

}  // namespace fusegrad::cuda
