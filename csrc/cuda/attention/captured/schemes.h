// How contributions to captured buffers' gradients are summed, and in how many launches. For the planner alone.
#pragma once

#include "cuda/attention/plan/kernel_spec.h"
#include "cuda/attention/plan/plan.h"

namespace fusegrad::cuda::planner {

/// Which contributions' sums fit the shared memory: others add pair by pair. kNotCrowded: of those that do not, some
/// belong to classes A to D, where a tile's pairs share elements.
enum class SchemesFit { kAll, kNotAll, kNotCrowded };
/// Puts into `facts` the schemes, and what they take of `left` bytes of shared memory; what does not fit or has no
/// scheme of its own adds pair by pair.
SchemesFit choose_schemes(const FlexCase& c, int left, KernelFacts& facts);
/// force_flex_scheme.
bool scheme_is_forced();

}  // namespace fusegrad::cuda::planner
