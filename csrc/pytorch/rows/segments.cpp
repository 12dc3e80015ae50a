#include "pytorch/rows/segments.h"

#include <algorithm>

#include "pytorch/ops/check.h"
#include "pytorch/rows/tiles.h"

namespace fusegrad {

using at::Tensor;

VocabNodes vocab_nodes(const char* op, const Shards& shards, int64_t vocab, int64_t unit) {
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
                           at::IntArrayRef(shards.bounds), ": pad the vocabulary to a multiple of 16");
      nodes.order.push_back(r);
    }
    nodes.of_ranks.push_back(node);
  }
  std::sort(nodes.order.begin(), nodes.order.end(),
            [&](int64_t a, int64_t b) { return nodes.of_rank(a).first < nodes.of_rank(b).first; });
  return nodes;
}

namespace {

// Rows as the product takes them. CUDA's copies whole units of 16 bytes.
Tensor product_rows(const Tensor& matrix) {
  const auto rows = dense_rows(matrix);
  if (rows.is_cpu()) return rows;
  constexpr int64_t kUnit = 16;
  const bool fits = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kUnit == 0 && rows.stride(0) >= rows.size(1) &&
                    rows.stride(0) * rows.element_size() % kUnit == 0;
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

void fixed_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, const VocabNodes& nodes) {
  const auto left = product_rows(a), right = product_rows(b), added = bias.defined() ? bias.contiguous() : bias;
  TORCH_INTERNAL_ASSERT(out.size(1) <= 1 || out.stride(1) == 1);
  const auto dtype = out.scalar_type();
  TORCH_INTERNAL_ASSERT(left.scalar_type() == dtype && right.scalar_type() == dtype);
  Product p;
  p.rows = out.size(0);
  p.cols = out.size(1);
  p.terms = left.size(1);
  p.a = left.const_data_ptr();
  p.a_stride = left.stride(0);
  p.b = right.const_data_ptr();
  p.b_stride = right.stride(0);
  p.bias = added.defined() ? added.const_data_ptr() : nullptr;
  p.out = out.data_ptr();
  p.out_stride = out.stride(0);
  if (nodes) {
    p.segment = nodes.segment;
    p.segments = std::max<int64_t>(nodes.mine().segments, 1);
  }
  const auto device = row_device(out.device());
  Tensor room;
  if (device.kernels->product_workspace != nullptr) {
    room = at::empty({device.kernels->product_workspace(p)}, out.options().dtype(at::kByte));
    p.workspace = room.data_ptr();
  }
  device.kernels->product(p, to_dtype(dtype), device.stream);
}

Tensor in_order(const Tensor& parts, const VocabNodes& nodes) {
  bool as_it_is = static_cast<int64_t>(nodes.order.size()) == parts.size(0);
  for (size_t i = 0; as_it_is && i < nodes.order.size(); ++i) as_it_is = nodes.order[i] == static_cast<int64_t>(i);
  if (as_it_is) return parts.contiguous();
  std::vector<Tensor> ordered;
  for (const int64_t r : nodes.order) ordered.push_back(parts[r]);
  return ordered.empty() ? parts.slice(0, 0, 0) : at::stack(ordered);
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
