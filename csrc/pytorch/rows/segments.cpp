#include "pytorch/rows/segments.h"

#include <algorithm>

#include "pytorch/ops/check.h"

namespace fusegrad {

using at::Tensor;

VocabNodes vocab_nodes(const char* op, const Shards& shards, int64_t vocab, const at::Device& device) {
  const int64_t unit = device.is_cpu() ? 1 : kGpuSegmentUnit;
  VocabNodes nodes;
  nodes.segment = vocab_segment(vocab, unit);
  nodes.rank = shards.rank;
  if (!shards) {
    nodes.of_ranks = {{0, kVocabSegments}};
    nodes.order = {0};
    return nodes;
  }
  for (int64_t r = 0; r < shards.world(); ++r) {
    const int64_t start = shards.start(r), stop = shards.stop(r);
    VocabNodes::Node node;
    if (start < stop) {
      node.first = start / nodes.segment;
      node.segments = (stop == vocab ? kVocabSegments : stop / nodes.segment) - node.first;
      const bool whole = start % nodes.segment == 0 && (stop == vocab || stop % nodes.segment == 0);
      const bool power = node.segments > 0 && (node.segments & (node.segments - 1)) == 0;
      FUSEGRAD_CHECK_VALUE(whole && power && node.first % node.segments == 0, op,
                           "vocab_parallel's parts must be 1, 2, 4, 8 or 16 of the vocabulary's sixteenths of ",
                           nodes.segment, " columns, from a multiple of as many on, with batch_invariant, but got ",
                           at::IntArrayRef(shards.bounds), ": pad the vocabulary to a multiple of ",
                           kVocabSegments * unit);
      nodes.order.push_back(r);
    }
    nodes.of_ranks.push_back(node);
  }
  std::sort(nodes.order.begin(), nodes.order.end(),
            [&](int64_t a, int64_t b) { return nodes.of_rank(a).first < nodes.of_rank(b).first; });
  return nodes;
}

int64_t VocabNodes::most_segments() const {
  int64_t most = 0;
  for (const auto& node : of_ranks) most = std::max(most, node.segments);
  return most;
}

Tensor segments_of_all(const Tensor& parts, const VocabNodes& nodes) {
  std::vector<Tensor> ordered;
  for (const int64_t r : nodes.order) ordered.push_back(parts[r].narrow(0, 0, nodes.of_rank(r).segments));
  return at::cat(ordered);
}

Tensor sum_by_pairs(const Tensor& parts, const VocabNodes& nodes) {
  std::vector<std::pair<Tensor, int64_t>> waiting;
  for (const int64_t r : nodes.order) {
    std::pair<Tensor, int64_t> sum{parts[r], nodes.of_rank(r).segments};
    while (!waiting.empty() && waiting.back().second == sum.second) {
      sum = {waiting.back().first + sum.first, 2 * sum.second};
      waiting.pop_back();
    }
    waiting.push_back(std::move(sum));
  }
  return waiting.empty() ? at::zeros_like(parts[0]) : waiting.front().first;
}

}  // namespace fusegrad
