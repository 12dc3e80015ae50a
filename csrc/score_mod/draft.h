// A graph in the making, as a tracer builds it: node by node, with derivatives of its own that are known last, and with
// what is asked of a value before the graph is complete.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

class Draft {
 public:
  explicit Draft(Kind kind) : graph_(kind, /*draft=*/true) {}
  /// To be read.
  explicit Draft(Graph graph);

  const Graph& graph() const { return graph_; }

  /// `active`: whether a gradient flows to the buffer.
  int add_buffer(Type type, int rank, bool active);
  int add_scalar(Type type) { return graph_.add_scalar(type); }

  NodeId input(Input input) { return made(graph_.input(input)); }
  NodeId constant(const Value& value) { return made(graph_.constant(value)); }
  NodeId scalar(int index) { return made(graph_.scalar(index)); }
  NodeId load(int buffer, std::vector<NodeId> indices) { return made(graph_.load(buffer, std::move(indices))); }
  NodeId apply(Op op, std::vector<NodeId> operands) { return made(graph_.apply(op, std::move(operands))); }
  NodeId cast(NodeId id, Type type);
  NodeId copy(const Draft& from, NodeId id, std::vector<NodeId> operands);
  /// The variable of an axis, the same for the same extent and place.
  NodeId axis(int64_t extent, int64_t place);
  /// The reduction over all values of an axis. It has an axis of its own, that of no value which depends on it: in the
  /// place of the axis another value may come.
  NodeId reduce(Op op, NodeId axis, NodeId value);

  // A value with a derivative of its own: the backward's pairs may be added when what uses the value is there.
  NodeId upstream() { return made(graph_.upstream(upstreams_++)); }
  int backward();
  void add_pair(int backward, NodeId x, NodeId gradient);
  NodeId custom(NodeId upstream, NodeId value, int backward);

  /// The value with other nodes in the places of some, as fusegrad::score_mod::substitute.
  NodeId substitute(NodeId id, const std::unordered_map<NodeId, NodeId>& images);
  /// The value without derivatives of its own and detachments, but for those of the `kept` nodes.
  NodeId stripped(NodeId id, std::span<const NodeId> kept);

  /// Whether a gradient flows through a node: from the score, or a buffer to which one flows.
  bool active(NodeId id) const { return active_[static_cast<size_t>(id)]; }
  /// Whether a gradient flows through it to the score.
  bool on_score(NodeId id) const { return on_score_[static_cast<size_t>(id)]; }
  /// How many nodes a value needs.
  int64_t size(NodeId id) const;
  /// The graph of a result, within a text's bounds. `scalars`: the numbers in their places, where not null.
  Graph graph_of(NodeId result, const std::vector<Value>* scalars) const;

 private:
  NodeId made(NodeId id);
  std::vector<NodeId> below(NodeId id) const;

  Graph graph_;
  std::vector<bool> active_buffers_;
  std::vector<bool> active_;
  std::vector<bool> on_score_;
  std::map<std::pair<int64_t, int64_t>, int> axes_;  // by extents and places
  std::vector<int> height_;                          // how many reductions lie in one another below a node
  int64_t upstreams_ = 0;
  std::vector<std::vector<NodeId>> pairs_;       // of each backward
  std::unordered_map<NodeId, int> backward_of_;  // of each custom, whose node has one without pairs
  std::unordered_map<NodeId, NodeId> stripped_;
};

}  // namespace fusegrad::score_mod
