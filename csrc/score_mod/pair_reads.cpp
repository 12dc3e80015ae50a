#include "score_mod/pair_reads.h"

#include <algorithm>

#include "score_mod/index_analysis.h"

namespace fusegrad::score_mod {
namespace {

// Whether a value depends on b and the call's numbers alone.
bool is_of_batch(const Graph& graph, NodeId id) {
  const Node& node = graph[id];
  if (node.op == Op::kConstant || node.op == Op::kScalar) return true;
  if (node.op == Op::kInput) return static_cast<Input>(node.payload) == Input::kB;
  constexpr int kMostDepth = 8;  // an operand is looked at once for each of its uses
  return node.type == Type::kInt && node.op != Op::kLoad && node.op != Op::kAxis && graph.depth(id) <= kMostDepth &&
         std::all_of(node.operands.begin(), node.operands.end(), [&](NodeId of) { return is_of_batch(graph, of); });
}

}  // namespace

int box_bytes(const Graph& graph, NodeId load, std::span<const DType> dtypes) {
  const Node& node = graph[load];
  const DType dtype = dtypes[static_cast<size_t>(node.payload)];
  const bool takes =
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kInt32;
  if (node.operands.empty() || !takes) return 0;
  const Node& last = graph[node.operands.back()];
  if (last.op != Op::kInput || static_cast<Input>(last.payload) != Input::kKv) return 0;
  const auto dependence = dependences(graph);
  for (size_t k = 0; k + 1 < node.operands.size(); ++k) {
    if ((dependence[node.operands[k]].on() & set_of(kVarKv)) != 0) return 0;
  }
  return element_bytes(dtype);
}

bool reads_places(const Graph& graph, NodeId load) {
  const Node& node = graph[load];
  const size_t rank = node.operands.size();
  if (node.type != Type::kInt || rank < 2) return false;
  const auto is = [&](size_t d, Input input) {
    const Node& index = graph[node.operands[d]];
    return index.op == Op::kInput && static_cast<Input>(index.payload) == input;
  };
  if (!is(rank - 2, Input::kQ) || !is(rank - 1, Input::kKv)) return false;
  const auto dependence = dependences(graph);
  return std::all_of(node.operands.begin(), node.operands.end() - 2,
                     [&](NodeId index) { return (dependence[index].on() & ~(set_of(kVarB) | set_of(kVarH))) == 0; });
}

std::optional<BoxDimensions> box_dimensions(const Graph& graph, NodeId load, std::span<const DType> dtypes) {
  const Node& node = graph[load];
  const size_t rank = node.operands.size();
  if (node.type != Type::kFloat || rank < 2 || box_bytes(graph, load, dtypes) == 0) return std::nullopt;
  const auto is = [&](size_t d, Input input) {
    const Node& index = graph[node.operands[d]];
    return index.op == Op::kInput && static_cast<Input>(index.payload) == input;
  };
  if (!is(rank - 2, Input::kQ)) return std::nullopt;
  BoxDimensions found;
  found.q = static_cast<int>(rank) - 2;
  for (size_t d = 0; d + 2 < rank; ++d) {
    const Node& index = graph[node.operands[d]];
    if (index.op == Op::kConstant && index.payload == 0) continue;
    if (found.h >= 0) return std::nullopt;
    if (is(d, Input::kH)) {
      found.h = static_cast<int>(d);
    } else if (found.batch < 0 && is_of_batch(graph, node.operands[d])) {
      found.batch = static_cast<int>(d);
    } else {
      return std::nullopt;
    }
  }
  return found;
}

std::vector<NodeId> mapped_reads(const Graph& graph, std::span<const DType> dtypes) {
  std::vector<NodeId> reads = pair_reads(graph);
  std::erase_if(reads, [&](NodeId load) { return !box_dimensions(graph, load, dtypes); });
  return reads;
}

uint32_t column_dimensions(const Graph& graph, NodeId load, std::span<const DType> dtypes) {
  const Node& node = graph[load];
  if (node.type != Type::kFloat || node.operands.size() > 32 || box_bytes(graph, load, dtypes) != 0) return 0;
  const auto dependence = dependences(graph);
  uint32_t dimensions = 0;
  for (size_t d = 0; d < node.operands.size(); ++d) {
    if ((dependence[node.operands[d]].on() & ~set_of(kVarH)) != 0) dimensions |= uint32_t{1} << d;
  }
  return dimensions;
}

}  // namespace fusegrad::score_mod
