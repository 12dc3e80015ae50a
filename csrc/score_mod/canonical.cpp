// The order in which equal graphs become identical, and what rests on it: comparison, verification.
#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "score_mod/walk.h"

namespace fusegrad::score_mod {
namespace {

[[noreturn]] void fail(const std::string& message) { throw GraphError(message); }

template <class Visit>
void walk_all(const Graph& graph, std::span<const NodeId> roots, Visit&& visit) {
  walk(graph, roots, [&](NodeId id) { return std::span<const NodeId>(graph[id].operands); }, visit);
}

std::vector<NodeId> roots_of(const Graph& graph) {
  std::vector<NodeId> roots;
  if (graph.result() >= 0) roots.push_back(graph.result());
  for (const Contribution& c : graph.contributions()) {
    roots.insert(roots.end(), c.indices.begin(), c.indices.end());
    roots.push_back(c.value);
  }
  return roots;
}

}  // namespace

std::vector<NodeId> reachable(const Graph& graph) {
  std::vector<NodeId> order;
  walk_all(graph, roots_of(graph), [&order](NodeId id) { order.push_back(id); });
  return order;
}

NodeId substitute(Graph& graph, NodeId root, const std::unordered_map<NodeId, NodeId>& images) {
  AxisSet axes = 0;
  bool others = false;
  for (const auto& [id, given] : images) {
    if (graph[id].op == Op::kAxis) axes |= set_of_axis(graph[id].payload);
    others = others || graph[id].op != Op::kAxis;
  }
  // By ids: what is in the way comes before. Only what depends on one of them is built anew.
  std::vector<NodeId> order;
  walk_all(graph, std::span(&root, 1), [&](NodeId id) {
    if (others || (graph.open_axes(id) & axes) != 0) order.push_back(id);
  });
  std::vector<NodeId> image(graph.nodes().size());
  for (size_t id = 0; id < image.size(); ++id) image[id] = static_cast<NodeId>(id);
  for (const NodeId id : order) {
    if (const auto given = images.find(id); given != images.end()) {
      image[id] = given->second;
      continue;
    }
    const Op op = graph[id].op;
    std::vector<NodeId> operands;
    for (const NodeId operand : graph[id].operands) operands.push_back(image[operand]);
    if (operands == graph[id].operands || op == Op::kCustom || op == Op::kBackward) continue;
    if (is_reduction(op) && images.contains(graph[id].operands[0])) fail("the axis of a reduction was to be replaced");
    image[id] = graph.copy(graph, id, std::move(operands));
  }
  return image[root];
}

// Axes are numbered in the order of the walk.
Graph canonical(const Graph& graph) {
  Graph result = with_declarations_of(graph, graph.kind(), /*axes=*/false);
  std::vector<NodeId> image(graph.nodes().size(), -1);
  std::map<int64_t, int64_t> keys;  // of customs: in the order of the walk
  const auto key = [&keys](int64_t old) {
    return keys.try_emplace(old, static_cast<int64_t>(keys.size())).first->second;
  };
  for (const NodeId id : reachable(graph)) {
    const Node& node = graph[id];
    std::vector<NodeId> operands;
    for (const NodeId operand : node.operands) operands.push_back(image[operand]);
    image[id] = node.op == Op::kUpstream ? result.upstream(key(node.payload))
                : node.op == Op::kCustom ? result.custom(key(node.payload), operands[0], operands[1])
                : node.op == Op::kAxis   ? result.axis(result.add_axis(graph.axes()[static_cast<size_t>(node.payload)]))
                                         : result.copy(graph, id, std::move(operands));
  }
  if (graph.result() >= 0) result.set_result(image[graph.result()]);
  for (const Contribution& c : graph.contributions()) {
    Contribution mapped{c.buffer, {}, image[c.value]};
    for (const NodeId index : c.indices) mapped.indices.push_back(image[index]);
    result.add_contribution(std::move(mapped));
  }
  return result;
}

Compact compact(const Graph& original) {
  const Graph graph = canonical(original);
  Compact result{Graph(graph.kind()), {}, {}};
  const auto place = [](std::vector<int>& order, int index) {
    const auto found = std::find(order.begin(), order.end(), index);
    if (found == order.end()) order.push_back(index);
    return static_cast<int>(std::find(order.begin(), order.end(), index) - order.begin());
  };
  for (const Node& node : graph.nodes()) {
    if (node.op == Op::kLoad) place(result.buffers, static_cast<int>(node.payload));
    if (node.op == Op::kScalar) place(result.scalars, static_cast<int>(node.payload));
  }
  for (const Contribution& c : graph.contributions()) place(result.buffers, c.buffer);
  for (const int i : result.buffers) result.graph.add_buffer(graph.buffers()[i].type, graph.buffers()[i].rank);
  for (const int i : result.scalars) result.graph.add_scalar(graph.scalars()[i]);
  for (const int64_t extent : graph.axes()) result.graph.add_axis(extent);

  // The nodes keep their ids: they come in the same order.
  for (NodeId id = 0; id < static_cast<NodeId>(graph.nodes().size()); ++id) {
    const Node& node = graph[id];
    if (node.op == Op::kLoad) {
      result.graph.load(place(result.buffers, static_cast<int>(node.payload)), node.operands);
    } else if (node.op == Op::kScalar) {
      result.graph.scalar(place(result.scalars, static_cast<int>(node.payload)));
    } else {
      result.graph.copy(graph, id, node.operands);
    }
  }
  if (graph.result() >= 0) result.graph.set_result(graph.result());
  for (Contribution c : graph.contributions()) {
    c.buffer = place(result.buffers, c.buffer);
    result.graph.add_contribution(std::move(c));
  }
  return result;
}

bool operator==(const Graph& a, const Graph& b) {
  if (a.kind() != b.kind() || a.buffers() != b.buffers() || a.scalars() != b.scalars()) return false;
  const Graph x = canonical(a), y = canonical(b);
  if (x.nodes() != y.nodes() || x.axes() != y.axes() || x.result() != y.result()) return false;
  return std::equal(x.contributions().begin(), x.contributions().end(), y.contributions().begin(),
                    y.contributions().end(), [](const Contribution& c, const Contribution& d) {
                      return c.buffer == d.buffer && c.indices == d.indices && c.value == d.value;
                    });
}

void check_limits(const Graph& graph, NodeId id) {
  if (graph.kind() == Kind::kDerivative || graph.kind() == Kind::kTangent) return;
  if (graph.nodes().size() > kMaxNodes) fail("expected at most " + std::to_string(kMaxNodes) + " nodes");
  if (graph.depth(id) > kMaxDepth) fail("expected at most " + std::to_string(kMaxDepth) + " operations in a chain");
}

int64_t steps(const Graph& graph) {
  int64_t sum = 0;
  for (const NodeId id : reachable(graph)) {
    const Node& node = graph[id];
    const AxisSet reduced = is_reduction(node.op) ? set_of_axis(graph[node.operands[0]].payload) : 0;
    if (!node.operands.empty()) sum += graph.values(graph.open_axes(id) | reduced);
  }
  for (const Contribution& c : graph.contributions()) sum += graph.values(graph.open_axes(c));
  return sum;
}

void check_steps(const Graph& graph) {
  const bool made = graph.kind() == Kind::kDerivative || graph.kind() == Kind::kTangent;
  const int64_t most = made ? 16 * kMaxSteps : kMaxSteps;
  if (const int64_t count = steps(graph); count > most) {
    fail("expected at most " + std::to_string(most) + " operations for a pair of a query and a key, but got " +
         std::to_string(count));
  }
}

void verify(const Graph& graph) {
  // Rebuilding checks every rule; what remains is that the stored nodes are in order and as typed as they claim.
  const auto count = static_cast<NodeId>(graph.nodes().size());
  for (NodeId id = 0; id < count; ++id) {
    for (const NodeId operand : graph[id].operands) {
      if (operand < 0 || operand >= id) fail("node " + std::to_string(id) + " uses a node that comes after it");
    }
  }
  if (graph.result() < 0) fail("there is no result");
  check_customs(graph);
  const Graph rebuilt = canonical(graph);
  const std::vector<NodeId> order = reachable(graph);
  if (order.size() != rebuilt.nodes().size()) fail("nodes that are alike are not shared, or a cast is missing");
  for (size_t i = 0; i < order.size(); ++i) {
    if (graph[order[i]].type != rebuilt[static_cast<NodeId>(i)].type) {
      fail("node " + std::to_string(order[i]) + " has the wrong type");
    }
  }
}

}  // namespace fusegrad::score_mod
