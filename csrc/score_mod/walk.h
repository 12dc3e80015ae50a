// A walk over a graph without recursion.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// From `roots` to the leaves; calls visit(id) once a node, operands first and left to right. operands_of(id): a
/// sequence of ids that stays where it is.
template <class Operands, class Visit>
void walk(const Graph& graph, std::span<const NodeId> roots, Operands&& operands_of, Visit&& visit) {
  std::vector<uint8_t> done(graph.nodes().size(), 0);
  std::vector<std::pair<NodeId, size_t>> stack;  // a node and how many of its operands were visited
  for (const NodeId root : roots) {
    if (done[root] != 0) continue;
    stack.emplace_back(root, 0);
    done[root] = 1;
    while (!stack.empty()) {
      auto& [id, next] = stack.back();
      const std::span<const NodeId> operands = operands_of(id);
      while (next < operands.size() && done[operands[next]] != 0) ++next;
      if (next == operands.size()) {
        const NodeId visited = id;
        stack.pop_back();
        visit(visited);
      } else {
        const NodeId operand = operands[next++];
        done[operand] = 1;
        stack.emplace_back(operand, 0);
      }
    }
  }
}

}  // namespace fusegrad::score_mod
