// In which loops a graph's nodes run: each in those over the axes that it depends on, and in no other.
#pragma once

#include <span>
#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// Statements in their order.
struct Block {
  struct Item {
    NodeId node = -1;  ///< to be computed; or there is a loop:
    int axis = -1;
    std::vector<NodeId> reductions;  ///< over the axis, which are made within it
    std::vector<Block> body;         ///< one
  };
  std::vector<Item> items;
};

/// What a block must give, within loops over `inner` that begin after it.
struct BlockRoot {
  NodeId node;
  AxisSet inner = 0;
};

class Loops {
 public:
  explicit Loops(const Graph& graph);

  /// What is computed already, of each node.
  using Done = std::vector<bool>;
  Done nothing() const { return Done(graph_.nodes().size(), false); }
  /// What of it stays so within a loop over an axis.
  Done within(Done done, int axis) const;

  /// All that the roots need and that does not depend on their inner axes. Leaves are no statements. Reductions over
  /// one axis of which none needs another one share a loop.
  Block block(std::span<const BlockRoot> roots, Done& done) const;

  /// The axes in an order in which loops that lie in one another run through as little as possible for these roots.
  std::vector<int> order(AxisSet axes, std::span<const NodeId> roots) const;

 private:
  std::vector<bool> needed(std::span<const BlockRoot> roots, const Done& done) const;

  const Graph& graph_;
  std::vector<int> level_;  // how many reductions one after the other a node waits for
};

}  // namespace fusegrad::score_mod
