// From what a call asks of a kernel to the KernelSpec that answers it: family, tile, schemes of the captured buffers'
// gradients. Needs no GPU.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/attention/device/arguments.cuh"
#include "cuda/attention/plan/kernel_spec.h"
#include "score_mod/captured.h"

namespace fusegrad::cuda {

/// The largest dynamic shared memory of a CTA on GPUs of a capability such as 80 or 90.
int flex_shared_limit(int capability);

/// Whether the Hopper kernels take it, and do not compute too much for head sizes between theirs. `architecture`: as
/// jit::current_architecture has it.
bool takes_hopper(const FlexCase& c, const std::string& architecture);

/// Throws where no tile fits the GPU's shared memory. What was asked last is kept: a plan takes as long as a small
/// kernel.
KernelSpec plan_kernel(const FlexCase& c, const std::string& architecture);

/// What the kernels of a backward are asked, in their order, from what they have in common. `needs_grad`: of query, key
/// and value first. dQ has a kernel of its own (kGradQuery) for D or E above 128 in the Hopper family, where two
/// kernels are faster than one though each computes the scores, and where sums must come in one order: but for where
/// one CTA has all keys, and in the Hopper family beside boxes without a block mask. There tiles of keys wait for one
/// another, which takes longer than a second kernel where scores are cheap, and less where it would read all pairs
/// again. With wide heads dV has kernels of its own, for parts of its columns, before the one by keys that has the
/// rest: dK and dV together would not fit registers.
std::vector<FlexCase> backward_kernels(FlexCase c, const std::vector<bool>& needs_grad, bool deterministic,
                                       const std::string& architecture);

/// So many columns, in parts of at most `most`, of one size where they can be: at least one part. Kernels that have
/// outputs in registers run for each part of the values' columns, and compute the scores anew.
std::vector<int> column_parts(int columns, int most);

/// Tiles of so many that hold n.
constexpr int64_t tiles_in(int64_t n, int64_t size) { return (n + size - 1) / size; }

/// FlexCase::covered for so many b, or groups of them, h, q_idx and kv_idx.
std::vector<bool> covered_buffers(const FlexCase& c, const std::array<int64_t, 4>& lengths);

/// In how many launches, one batch after the other or all at once, the backward's sums of the buffers' gradients come
/// in one order without fixed point: where each place gets one contribution a launch, and a launch fills the GPU's
/// `processors`, or gets partial sums of heads or CTAs; else 0. `batches`, `heads`, `keys`: those of key and value.
int64_t ordered_launches(const FlexCase& c, int64_t batches, int64_t heads, int64_t keys, int64_t processors,
                         const std::string& architecture);

/// Whether a score_mod has reads of each pair by itself.
bool reads_pairs(const FlexMod& mod);

/// For tests.
void force_flex_family(std::optional<FlexFamily> family);
bool flex_family_is_forced();
/// For tests and benchmarks: forced_limits() of the kernels of attention and of the losses.
void force_limits(int cluster, int shared_bytes);
/// What a launch asks for where the limit is forced: as many CTAs run on a multiprocessor as there would.
int flex_launched_bytes(int bytes, int capability);
bool flex_shared_limit_is_forced();
/// For tests: the scheme of contributions for which it is right, instead of the planner's.
void force_flex_scheme(std::optional<device::Scheme> scheme);
/// Counts what is forced, force_flex_whole too: what was planned before is not asked for again.
void count_forced();
uint64_t forced_changes();

}  // namespace fusegrad::cuda
