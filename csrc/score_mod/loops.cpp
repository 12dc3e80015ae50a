#include "score_mod/loops.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

namespace fusegrad::score_mod {
namespace {

int axis_of(const Graph& graph, NodeId reduction) {
  return static_cast<int>(graph[graph[reduction].operands[0]].payload);
}

}  // namespace

Loops::Loops(const Graph& graph) : graph_(graph), level_(graph.nodes().size(), 0) {
  for (NodeId id = 0; id < static_cast<NodeId>(level_.size()); ++id) {
    int& level = level_[static_cast<size_t>(id)];
    for (const NodeId operand : graph[id].operands) level = std::max(level, level_[static_cast<size_t>(operand)]);
    if (is_reduction(graph[id].op)) ++level;
  }
}

Loops::Done Loops::within(Done done, int axis) const {
  for (NodeId id = 0; id < static_cast<NodeId>(done.size()); ++id) {
    if ((graph_.open_axes(id) & set_of_axis(axis)) != 0) done[static_cast<size_t>(id)] = false;
  }
  return done;
}

// A walk that knows of each node on which of the axes that are not bound yet it depends.
std::vector<bool> Loops::needed(std::span<const BlockRoot> roots, const Done& done) const {
  std::vector<bool> here(graph_.nodes().size(), false);
  std::set<std::pair<NodeId, AxisSet>> seen;
  std::vector<BlockRoot> stack(roots.begin(), roots.end());
  while (!stack.empty()) {
    auto [id, inner] = stack.back();
    stack.pop_back();
    inner &= graph_.open_axes(id);
    const auto at = static_cast<size_t>(id);
    if (inner == 0) {
      if (done[at] || here[at]) continue;
      here[at] = true;
    } else if (!seen.emplace(id, inner).second) {
      continue;
    }
    const Node& node = graph_[id];
    if (is_reduction(node.op)) inner |= set_of_axis(axis_of(graph_, id));
    for (const NodeId operand : node.operands) stack.push_back({operand, inner});
  }
  return here;
}

Block Loops::block(std::span<const BlockRoot> roots, Done& done) const {
  const std::vector<bool> here = needed(roots, done);
  std::vector<NodeId> nodes;
  for (NodeId id = 0; id < static_cast<NodeId>(here.size()); ++id) {
    const Node& node = graph_[id];
    if (!here[static_cast<size_t>(id)]) continue;
    if (is_primitive(node.op) || is_reduction(node.op) || node.op == Op::kLoad) nodes.push_back(id);
  }
  const auto level = [&](NodeId id) { return level_[static_cast<size_t>(id)]; };
  std::stable_sort(nodes.begin(), nodes.end(), [&](NodeId a, NodeId b) {
    return std::pair(level(a), !is_reduction(graph_[a].op)) < std::pair(level(b), !is_reduction(graph_[b].op));
  });
  Block block;
  for (auto it = nodes.begin(); it != nodes.end();) {
    if (!is_reduction(graph_[*it].op)) {
      block.items.push_back({*it, -1, {}, {}});
      done[static_cast<size_t>(*it++)] = true;
      continue;
    }
    std::vector<NodeId> together;
    for (const int first = level(*it); it != nodes.end() && is_reduction(graph_[*it].op) && level(*it) == first; ++it)
      together.push_back(*it);
    while (!together.empty()) {
      Block::Item loop;
      loop.axis = axis_of(graph_, together.front());
      std::vector<BlockRoot> values;
      std::erase_if(together, [&](NodeId id) {
        if (axis_of(graph_, id) != loop.axis) return false;
        loop.reductions.push_back(id);
        values.push_back({graph_[id].operands[1]});
        return true;
      });
      Done inside = within(done, loop.axis);
      loop.body.push_back(this->block(values, inside));
      for (const NodeId id : loop.reductions) done[static_cast<size_t>(id)] = true;
      block.items.push_back(std::move(loop));
    }
  }
  return block;
}

std::vector<int> Loops::order(AxisSet axes, std::span<const NodeId> roots) const {
  std::vector<int> order;
  for (int axis = 0; axis < kMaxAxes; ++axis) {
    if ((axes & set_of_axis(axis)) != 0) order.push_back(axis);
  }
  constexpr size_t kTried = 4;  // 24 orders
  if (order.size() < 2 || order.size() > kTried) return order;
  // What depends on these axes alone, and how long it takes.
  std::vector<bool> below(graph_.nodes().size(), false);
  for (const NodeId root : roots) below[static_cast<size_t>(root)] = true;
  std::vector<std::pair<AxisSet, double>> work;
  for (auto id = static_cast<NodeId>(below.size()) - 1; id >= 0; --id) {
    if (!below[static_cast<size_t>(id)]) continue;
    const Node& node = graph_[id];
    for (const NodeId operand : node.operands) below[static_cast<size_t>(operand)] = true;
    const AxisSet open = graph_.open_axes(id);
    const AxisSet reduced = is_reduction(node.op) ? set_of_axis(axis_of(graph_, id)) : 0;
    if ((open & ~axes) == 0) work.emplace_back(open, static_cast<double>(graph_.values(reduced)));
  }
  std::vector<int> best = order;
  double least = std::numeric_limits<double>::infinity();
  do {
    double sum = 0;
    for (const auto& [open, each] : work) {
      AxisSet left = open;
      double times = 1;
      for (size_t i = 0; i < order.size() && left != 0; ++i) {
        times *= static_cast<double>(graph_.values(set_of_axis(order[i])));
        left &= ~set_of_axis(order[i]);
      }
      sum += times * each;
    }
    if (sum < least) {
      least = sum;
      best = order;
    }
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

}  // namespace fusegrad::score_mod
