// A vocabulary's segments (losses/product.h) among the processes that share it.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "losses/product.h"
#include "pytorch/ops/arguments.h"

namespace fusegrad {

/// Which segments each process has; false: the call does not ask for the same bits of a row in all calls.
struct VocabNodes {
  struct Node {
    int64_t first = 0, segments = 0;  ///< 0 segments: the process has no columns
  };
  int64_t segment = 0;  ///< columns
  int64_t rank = 0;
  std::vector<Node> of_ranks;
  std::vector<int64_t> order;  ///< ranks that have segments, by these

  explicit operator bool() const { return !of_ranks.empty(); }
  const Node& of_rank(int64_t r) const { return of_ranks[static_cast<size_t>(r)]; }
  const Node& mine() const { return of_rank(rank); }
  int64_t most_segments() const;
};

/// Those of a vocabulary; of all processes, with shards. Raises a ValueError that begins with `op` where a part is none
/// of the sums.
VocabNodes vocab_nodes(const char* op, const Shards& shards, int64_t vocab, const at::Device& device);

/// [kVocabSegments, ...] contiguous, in the vocabulary's order, from the processes' [processes, most_segments(), ...].
at::Tensor segments_of_all(const at::Tensor& parts, const VocabNodes& nodes);

/// The sum of all segments from those of the processes, [processes, ...].
at::Tensor sum_by_pairs(const at::Tensor& parts, const VocabNodes& nodes);

}  // namespace fusegrad
