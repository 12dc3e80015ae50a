// A call of flex attention as a plan: steps in their order, and the scratch memory that they need. A plan is made of
// what the call asks alone (asked.h), without a GPU, and kept: a known call is planned once. Each room plans its calls
// (forward/call.cpp, backward/call.cpp, …); run.h executes them.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/captured/place_order.cuh"
#include "cuda/attention/plan/asked.h"
#include "cuda/attention/plan/scratch.h"
#include "jit/kernel_cache.h"
#include "score_mod/graph.h"

namespace fusegrad::cuda {

/// A kernel that is compiled at run time, and its launch.
struct Program {
  explicit Program(LaunchPlan plan) : launch(std::move(plan)), id(launch.spec.key()) {}

  const LaunchPlan launch;
  const std::string id;                                     ///< of jit::kernel
  Region count = kNoRegion, list = kNoRegion;               ///< its lists of tiles
  mutable std::atomic<const jit::Kernel*> kernel{nullptr};  ///< in the context that the plan is made for
};

template <class Call>
class Run;

/// A kernel, a copy, or a fill. A step waits for those before it.
template <class Call>
struct Step {
  std::string name;
  std::shared_ptr<const Program> program;  ///< null: built with the library
  std::vector<Region> regions;             ///< that it reads or writes
  std::function<void(Run<Call>&)> run;
};

/// A copy of one of the score_mod's tensors of integers with fewer bytes (places.h).
struct PlannedPlaces {
  score_mod::DType dtype;
  int64_t most;
  device::PlaceOrder order = device::PlaceOrder::kRows;
};

/// What the plans of all calls have in common.
struct CallPlan {
  FlexCase common;  ///< what all kernels of the call have in common
  FlexShape shape;
  std::optional<BlockMaskShape> mask;
  Scratch scratch;
  std::array<Region, kFlexOperands> operands;     ///< copies with rows as kernels read them
  std::vector<Region> buffers;                    ///< copies of the score_mod's, for boxes or as places
  std::vector<std::vector<int64_t>> box_strides;  ///< theirs
  std::vector<std::optional<PlannedPlaces>> places;
  Region states = kNoRegion;  ///< of the blocks of the mask
  std::shared_ptr<const score_mod::Graph> score_mod, mask_mod;
};

template <class Call>
struct Plan : CallPlan {
  std::vector<Step<Call>> steps;
};

/// For people: a line a step with its kernel, tile, CTAs and regions, and a line for the scratch memory.
struct PrintedStep {
  const std::string& name;
  const Program* program;
  const std::vector<Region>& regions;
};
std::string printed(const char* call, const CallPlan& plan, const std::vector<PrintedStep>& steps);
template <class Call>
std::string printed(const char* call, const Plan<Call>& plan) {
  std::vector<PrintedStep> steps;
  for (const auto& step : plan.steps) steps.push_back({step.name, step.program.get(), step.regions});
  return printed(call, plan, steps);
}

/// Plans, without looking for a kept one. Raise where no tile fits the GPU, or there are too many CTAs.
Plan<FlexForwardCall> plan_forward(const Asked& asked, const Gpu& gpu);
Plan<FlexBackwardCall> plan_backward(const Asked& asked, const Gpu& gpu);
Plan<FlexTangentCall> plan_tangents(const Asked& asked, const Gpu& gpu);
Plan<FlexPairTangentsCall> plan_pair_tangents(const Asked& asked, const Gpu& gpu);

/// The programs of a plan's steps, each once.
template <class Call>
std::vector<std::shared_ptr<const Program>> programs_of(const Plan<Call>& plan) {
  std::vector<std::shared_ptr<const Program>> programs;
  for (const auto& step : plan.steps) {
    if (step.program) programs.push_back(step.program);
  }
  return programs;
}

}  // namespace fusegrad::cuda
