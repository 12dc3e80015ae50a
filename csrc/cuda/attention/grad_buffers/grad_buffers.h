// Which buffers' gradients are summed over batches by a kernel of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/attention/plan/plan.h"

namespace fusegrad::cuda {

/// A kernel (kGradBuffers) for the gradients of buffers in whose places b plays no part, or the same one for all
/// batches of a group.
struct BatchSums {
  FlexCase common;  ///< wants the gradients of these buffers alone
  device::FlexBatchGroups groups;
  int64_t parts = 1;  ///< CTAs for each tile of a head's pairs, which share the batches of a group
  int64_t ctas = 0, sums = 0;

  /// Leaves these buffers out of what the backward's other kernels are to do.
  void leave_out(FlexCase& c) const;
};
/// Which buffers' gradients are better summed over batches first: those that every batch, or each of a group, shares,
/// of small heads. `c` is what the kernels of a backward have in common, `needs_grad` of query, key and value,
/// `scalars` the score_mod's.
std::optional<BatchSums> sums_over_batches(const FlexCase& c, const std::vector<bool>& needs_grad,
                                           std::span<const score_mod::Value> scalars, int64_t batches, int64_t heads,
                                           int64_t queries, int64_t keys, int64_t processors, bool deterministic,
                                           const std::string& architecture);

}  // namespace fusegrad::cuda
