// Flex attention on CUDA, as front ends call it: they plan a call, allocate the plan's scratch memory, and run it.
//
// Read in this order: plan/asked.h (what a call asks), plan/call_plan.h (steps and scratch), a room's call.cpp
// (forward/, backward/, tangents/, pair_tangents/: the plan of a call), plan/run.h; below them plan/plan.h (which
// family, tile and schemes), kernel_spec.h (what a kernel is compiled for), program.h (its source), launch_plan.h (its
// CTAs, lists and maps). Then device/arguments.cuh, shared_memory.cuh and tile_entry.cuh, and a room's kernels.
#pragma once

#include <memory>

#include "cuda/attention/plan/run.h"

namespace fusegrad::cuda {

/// The plan of a call on the current device, whose lse and keys are not empty. A known call's is not made again.
/// Raises ValueError and NotImplementedError where a call is too large or no tile fits the GPU.
std::shared_ptr<const Plan<FlexForwardCall>> plan_of(const FlexForwardCall& call);
std::shared_ptr<const Plan<FlexBackwardCall>> plan_of(const FlexBackwardCall& call);
std::shared_ptr<const Plan<FlexTangentCall>> plan_of(const FlexTangentCall& call);
std::shared_ptr<const Plan<FlexPairTangentsCall>> plan_of(const FlexPairTangentsCall& call);

/// run() of plan_of(call). allocate(bytes): memory on the device that begins at a multiple of 256 bytes and stays until
/// the stream has run the call; not called for none.
template <class Call, class Allocate>
void plan_and_run(const Call& call, const Allocate& allocate, CUstream_st* stream) {
  const auto plan = plan_of(call);
  const int64_t bytes = plan->scratch.bytes();
  run(*plan, call, bytes == 0 ? nullptr : allocate(bytes), stream);
}

}  // namespace fusegrad::cuda
