#include "score_mod/draft.h"

#include <algorithm>

#include "score_mod/walk.h"

namespace fusegrad::score_mod {

Draft::Draft(Graph graph) : graph_(std::move(graph)), active_buffers_(graph_.buffers().size(), false) {
  made(static_cast<NodeId>(graph_.nodes().size()) - 1);
}

// Notes what is asked of the nodes that are new.
NodeId Draft::made(NodeId id) {
  for (size_t i = active_.size(); i < graph_.nodes().size(); ++i) {
    const Node& node = graph_[static_cast<NodeId>(i)];
    const auto any = [&](const std::vector<bool>& of) {
      return std::any_of(node.operands.begin(), node.operands.end(),
                         [&](NodeId x) { return of[static_cast<size_t>(x)]; });
    };
    const bool score = node.op == Op::kInput && node.payload == static_cast<int64_t>(Input::kScore);
    bool active = score || node.op == Op::kUpstream || node.op == Op::kCustom;
    if (node.op == Op::kLoad) active = active_buffers_[static_cast<size_t>(node.payload)];
    if (is_primitive(node.op) || is_reduction(node.op)) {
      active = node.type == Type::kFloat && node.op != Op::kDetach && any(active_);
    }
    on_score_.push_back(score || (active && any(on_score_)));
    active_.push_back(active);
    int height = 0;
    for (const NodeId x : node.operands) height = std::max(height, height_[static_cast<size_t>(x)]);
    height_.push_back(height + (is_reduction(node.op) ? 1 : 0));
  }
  return id;
}

int Draft::add_buffer(Type type, int rank, bool active) {
  const int buffer = graph_.add_buffer(type, rank);
  active_buffers_.push_back(active);
  return buffer;
}

NodeId Draft::cast(NodeId id, Type type) {
  if (graph_.type(id) == type) return id;
  return apply(type == Type::kFloat ? Op::kToFloat : type == Type::kInt ? Op::kToInt : Op::kToBool, {id});
}

NodeId Draft::copy(const Draft& from, NodeId id, std::vector<NodeId> operands) {
  if (from.graph_[id].op == Op::kAxis) {  // of a number of its own, as in the other
    return axis(from.graph_.axes()[static_cast<size_t>(from.graph_[id].payload)], from.graph_[id].payload);
  }
  return made(graph_.copy(from.graph_, id, std::move(operands)));
}

NodeId Draft::axis(int64_t extent, int64_t place) {
  const auto key = std::pair(extent, place);
  auto found = axes_.find(key);
  if (found == axes_.end()) found = axes_.emplace(key, graph_.add_axis(extent)).first;
  return made(graph_.axis(found->second));
}

NodeId Draft::reduce(Op op, NodeId from, NodeId value) {
  value = cast(value, std::max(graph_.type(value), Type::kInt));
  const int64_t extent = graph_.axes()[static_cast<size_t>(graph_[from].payload)];
  const NodeId own = axis(extent, -1 - height_[static_cast<size_t>(value)]);
  return made(graph_.reduce(op, own, substitute(value, {{from, own}})));
}

int Draft::backward() {
  pairs_.emplace_back();
  return static_cast<int>(pairs_.size()) - 1;
}

void Draft::add_pair(int backward, NodeId x, NodeId gradient) {
  auto& pairs = pairs_.at(static_cast<size_t>(backward));
  pairs.insert(pairs.end(), {x, cast(gradient, Type::kFloat)});
}

NodeId Draft::custom(NodeId upstream, NodeId value, int backward) {
  value = stripped(cast(value, Type::kFloat), {});
  const NodeId id = made(graph_.custom(graph_[upstream].payload, value, graph_.backward({})));
  backward_of_.emplace(id, backward);
  return id;
}

NodeId Draft::substitute(NodeId id, const std::unordered_map<NodeId, NodeId>& images) {
  return made(score_mod::substitute(graph_, id, images));
}

NodeId Draft::stripped(NodeId root, std::span<const NodeId> kept) {
  // What has no exceptions is asked of ever longer values: what is known of it stays so.
  std::unordered_map<NodeId, NodeId> own;
  for (const NodeId id : kept) own.emplace(id, id);
  auto& image = kept.empty() ? stripped_ : own;
  std::vector<NodeId> order;
  const auto operands_of = [&](NodeId id) -> std::span<const NodeId> {
    if (image.contains(id)) return {};
    const std::span<const NodeId> operands = graph_[id].operands;
    return graph_[id].op == Op::kCustom ? operands.first(1) : operands;
  };
  walk(graph_, std::span(&root, 1), operands_of, [&](NodeId id) { order.push_back(id); });
  for (const NodeId id : order) {
    if (image.contains(id)) continue;
    const Op op = graph_[id].op;
    std::vector<NodeId> operands;
    if (op == Op::kCustom || op == Op::kDetach) {
      image.emplace(id, image.at(graph_[id].operands[0]));
      continue;
    }
    for (const NodeId operand : graph_[id].operands) operands.push_back(image.at(operand));
    image.emplace(id, operands == graph_[id].operands ? id : made(graph_.copy(graph_, id, std::move(operands))));
  }
  return image.at(root);
}

// All that a node is computed from, operands first; of a custom its backward too.
std::vector<NodeId> Draft::below(NodeId id) const {
  std::unordered_map<NodeId, std::vector<NodeId>> of_custom;
  for (const auto& [custom, backward] : backward_of_) {
    auto& operands = of_custom[custom] = {graph_[custom].operands[0]};
    const auto& pairs = pairs_[static_cast<size_t>(backward)];
    operands.insert(operands.end(), pairs.begin(), pairs.end());
  }
  std::vector<NodeId> order;
  const auto operands_of = [&](NodeId x) -> std::span<const NodeId> {
    const auto found = of_custom.find(x);
    return found == of_custom.end() ? graph_[x].operands : found->second;
  };
  walk(graph_, std::span(&id, 1), operands_of, [&](NodeId x) { order.push_back(x); });
  return order;
}

int64_t Draft::size(NodeId id) const { return static_cast<int64_t>(below(id).size()); }

Graph Draft::graph_of(NodeId result, const std::vector<Value>* scalars) const {
  Graph graph = with_declarations_of(graph_, graph_.kind(), /*axes=*/false);
  std::vector<NodeId> image(graph_.nodes().size(), -1);
  const auto images = [&](const std::vector<NodeId>& ids) {
    std::vector<NodeId> found;
    for (const NodeId id : ids) {
      if (image[id] < 0) throw GraphError("a value with a derivative of its own is needed by that derivative");
      found.push_back(image[id]);
    }
    return found;
  };
  for (const NodeId id : below(result)) {
    const Node& node = graph_[id];
    const auto own = backward_of_.find(id);
    if (own != backward_of_.end()) {
      const NodeId backward = graph.backward(images(pairs_[static_cast<size_t>(own->second)]));
      image[id] = graph.custom(node.payload, image[node.operands[0]], backward);
    } else if (node.op == Op::kScalar && scalars != nullptr) {
      image[id] = graph.constant(scalars->at(static_cast<size_t>(node.payload)));
    } else if (node.op == Op::kAxis) {
      image[id] = graph.axis(graph.add_axis(graph_.axes()[static_cast<size_t>(node.payload)]));
    } else {
      image[id] = graph.copy(graph_, id, images(node.operands));
    }
    check_limits(graph, image[id]);
  }
  graph.set_result(image[result]);
  check_customs(graph);
  check_steps(graph);
  return graph;
}

}  // namespace fusegrad::score_mod
