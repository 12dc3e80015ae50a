// Values with a derivative of their own: their rules, and the graph without them.
#include <map>
#include <utility>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {
namespace {

[[noreturn]] void fail(const std::string& message) { throw GraphError(message); }

std::string named(int64_t key) { return "^" + std::to_string(key); }

}  // namespace

void check_customs(const Graph& graph) {
  std::map<int64_t, NodeId> backward_of;
  const auto count = static_cast<NodeId>(graph.nodes().size());
  for (NodeId id = 0; id < count; ++id) {
    const Node& node = graph[id];
    if (node.op != Op::kCustom) continue;
    if (!backward_of.emplace(node.payload, node.operands[1]).second) fail("two customs of " + named(node.payload));
  }
  std::vector<NodeId> seen_by(graph.nodes().size(), -1);
  std::vector<NodeId> pending;
  for (NodeId id = 0; id < count; ++id) {
    if (graph[id].op != Op::kBackward) continue;
    for (size_t i = 1; i < graph[id].operands.size(); i += 2) pending.push_back(graph[id].operands[i]);
    while (!pending.empty()) {
      const NodeId at = pending.back();
      pending.pop_back();
      if (!graph.on_upstream(at) || seen_by[at] == id) continue;
      seen_by[at] = id;
      const Node& node = graph[at];
      const auto owner = node.op == Op::kUpstream ? backward_of.find(node.payload) : backward_of.end();
      if (owner != backward_of.end() && owner->second != id) {
        fail(named(node.payload) + " is used by another backward than that of its custom");
      }
      pending.insert(pending.end(), node.operands.begin(), node.operands.end());
    }
  }
}

Graph lowered(const Graph& graph) {
  if (graph.kind() != Kind::kScoreMod) return canonical(graph);
  Graph result = with_declarations_of(graph, graph.kind());
  std::vector<NodeId> image(graph.nodes().size(), -1);
  for (const NodeId id : reachable(graph)) {
    const Node& node = graph[id];
    if (graph.on_upstream(id) || node.op == Op::kBackward) continue;
    if (node.op == Op::kCustom || node.op == Op::kDetach) {
      image[id] = image[node.operands[0]];
      continue;
    }
    std::vector<NodeId> operands;
    for (const NodeId operand : node.operands) operands.push_back(image[operand]);
    image[id] = result.copy(graph, id, std::move(operands));
  }
  if (graph.result() >= 0) result.set_result(image[graph.result()]);
  return canonical(result);
}

void check_lowered(const Graph& graph) {
  for (const Node& node : graph.nodes()) {
    if (node.op == Op::kCustom) fail("a custom must be lowered before it is evaluated");
  }
}

}  // namespace fusegrad::score_mod
