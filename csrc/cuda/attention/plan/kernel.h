// A kernel of flex attention, as its room describes it to the planner. Each room, a folder beside this one, has one
// constant of it in its host file; what plans, renders and launches kernels knows no more of one than this.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/attention/plan/config_text.h"
#include "cuda/attention/plan/kernel_spec.h"
#include "cuda/attention/plan/launch_plan.h"
#include "cuda/attention/plan/plan.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {

/// The kernel in a family: its own name, the header and the class that it is an instance of, and what it takes after
/// the arguments of all families (device::Flex...Arguments), or null.
struct KernelNames {
  const char *name, *header, *type, *more;
};

struct Kernel {
  const char* arguments;          ///< device::Flex...Arguments
  bool sums = false;              ///< takes device::FlexSums of each contribution
  bool tangent = false;           ///< takes what the score_mod's tangent captures
  bool shared_pointer = false;    ///< its class takes shared memory as a pointer, not as an address
  bool derives = true;            ///< takes the score_mod's derivative
  bool exact = false;             ///< nothing becomes one rounding that does not say so: no contraction
  bool predicates_reads = false;  ///< Hopper: reads of each pair by itself are predicated, else shared where equal
  KernelNames (*names)(const KernelFacts& f);

  /// Tiles, from the best to the least demanding: where a score_mod or a mask needs registers, they are smaller.
  std::vector<FlexTile> (*tiles)(const FlexCase& c, const std::string& architecture);
  /// The dynamic shared memory, but for what schemes take.
  int (*shared_bytes)(const FlexCase& c, const FlexTile& t);
  /// KernelFacts beside those that all kernels have, which `f` has, and the tile; null: none.
  void (*add_facts)(const FlexCase& c, KernelFacts& f) = nullptr;
  /// KernelFacts::resident, with the schemes chosen; null: 0.
  int (*resident)(const KernelFacts& f, const std::string& architecture) = nullptr;

  /// The members of Config, behind those that all kernels have.
  void (*config)(const FlexCase& c, const KernelFacts& f, ConfigText& text);
  /// The Hopper kernel's products of matrices (device::Wgmma).
  std::string (*products)(DType dtype, const KernelFacts& f) = nullptr;
  /// Structs beside those of the mods and the derivative.
  std::string (*structs)(const FlexCase& c, score_mod::Unread unread) = nullptr;

  /// CTAs, splits and lists. `mask`, `processors`, `launches`: as plan_launch.
  LaunchPlan (*launch)(KernelSpec spec, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                       int64_t processors, int64_t launches);
};

const Kernel& kernel_of(FlexKernel kernel);

/// The constants of the rooms.
const Kernel& forward_kernel();
const Kernel& backward_kernel();
const Kernel& grad_query_kernel();
const Kernel& grad_buffers_kernel();
const Kernel& tangents_kernel();
const Kernel& pair_tangents_kernel();
const Kernel& segments_kernel();
const Kernel& merge_segments_kernel();

}  // namespace fusegrad::cuda
