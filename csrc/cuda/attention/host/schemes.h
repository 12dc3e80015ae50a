// How contributions to captured buffers' gradients are summed, and in how many launches. For the planner alone.
#pragma once

#include "cuda/attention/host/kernel_spec.h"
#include "cuda/attention/host/plan.h"

namespace fusegrad::cuda::planner {

/// Puts into `facts` the schemes, and what they take of `left` bytes of shared memory; what does not fit or has no
/// scheme of its own adds pair by pair. Whether all fit.
bool choose_schemes(const FlexCase& c, int left, KernelFacts& facts);
/// force_flex_scheme.
bool scheme_is_forced();

}  // namespace fusegrad::cuda::planner
