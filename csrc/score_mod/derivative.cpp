#include "score_mod/derivative.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "score_mod/derivative_rules.h"
#include "score_mod/simplify.h"

namespace fusegrad::score_mod {
namespace {

// The gradient by a node: `value` where `condition` holds, 0 elsewhere, where `value` may be anything. Conditions are
// carried along and applied at the end: a product with a local derivative after their application would make NaN of
// 0 * inf, and one selection serves a whole chain of products.
struct Adjoint {
  std::optional<Term> condition;  // none: everywhere
  Term value;
};

Term applied(const Adjoint& a) { return a.condition ? where(*a.condition, a.value, 0.0) : a.value; }

bool same(const std::optional<Term>& a, const std::optional<Term>& b) {
  return a.has_value() == b.has_value() && (!a || a->id == b->id);
}

// Whether b is `not a`.
bool is_negation(const Adjoint& a, const Adjoint& b) {
  if (!a.condition || !b.condition) return false;
  const Node& node = (*b.condition->graph)[b.condition->id];
  return node.op == Op::kNot && node.operands[0] == a.condition->id;
}

Adjoint sum(const Adjoint& a, const Adjoint& b) {
  if (same(a.condition, b.condition)) return {a.condition, a.value + b.value};
  if (is_negation(a, b)) return {std::nullopt, where(*a.condition, a.value, b.value)};
  if (is_negation(b, a)) return {std::nullopt, where(*b.condition, b.value, a.value)};
  const Term value = applied(a) + applied(b);
  if (a.condition && b.condition) return {*a.condition | *b.condition, value};
  return {std::nullopt, value};
}

class Backward {
 public:
  Backward(const Graph& forward, const std::vector<bool>& wants_grad)
      : forward_(forward), graph_(with_declarations_of(forward, Kind::kDerivative)) {
    const std::vector<NodeId> order = reachable(forward);
    image_.assign(forward.nodes().size(), -1);
    active_.assign(forward.nodes().size(), false);
    adjoint_.resize(forward.nodes().size());
    for (const NodeId id : order) {
      const Node& node = forward[id];
      if (forward.on_upstream(id)) continue;  // made of the adjoints, when they are known
      if (node.op == Op::kCustom) image_[id] = image_[node.operands[0]];
      if (node.op != Op::kCustom && node.op != Op::kBackward) image_[id] = image(id);
      active_[id] = is_active(id, wants_grad);
    }
    accumulate(forward.result(), {std::nullopt, Term{&graph_, graph_.input(Input::kGrad)}}, 0);
    NodeId score = -1;
    std::vector<NodeId> reads;
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      if (!adjoint_[*it]) continue;
      const Op op = forward[*it].op;
      if (op == Op::kCustom) deliver(*it);
      if (op == Op::kBackward) pull_back_custom(*it);
      if (op == Op::kInput) score = *it;
      if (op == Op::kLoad) reads.push_back(*it);
      if (is_primitive(op) || is_reduction(op)) pull_back(*it);
    }
    graph_.set_result(score >= 0 ? applied(*adjoint_[score]).id : graph_.constant(0.0));
    for (auto it = reads.rbegin(); it != reads.rend(); ++it) {  // in the order of the forward
      const Node& read = forward[*it];
      Contribution c{static_cast<int>(read.payload), {}, applied(*adjoint_[*it]).id};
      for (const NodeId index : read.operands) c.indices.push_back(image_[index]);
      graph_.add_contribution(std::move(c));
    }
  }

  Graph take() && { return std::move(graph_); }

 private:
  // Whether a gradient is wanted by something below: the score, or a read of a buffer that wants one.
  bool is_active(NodeId id, const std::vector<bool>& wants_grad) const {
    const Node& node = forward_[id];
    if (node.type != Type::kFloat) return false;
    if (node.op == Op::kInput) return true;
    if (node.op == Op::kLoad) {
      const auto buffer = static_cast<size_t>(node.payload);
      return buffer < wants_grad.size() && wants_grad[buffer];
    }
    if (node.op == Op::kCustom) return active_[node.operands[1]];
    const int step = node.op == Op::kBackward ? 2 : 1;
    for (size_t i = 0; i < node.operands.size(); i += step) {
      if (active_[node.operands[i]]) return true;
    }
    return false;
  }

  // A node of the forward on the images of its operands.
  NodeId image(NodeId id) {
    std::vector<NodeId> operands;
    for (const NodeId operand : forward_[id].operands) operands.push_back(image_[operand]);
    return graph_.copy(forward_, id, std::move(operands));
  }

  // The adjoint of a custom is the upstream of its backward, which comes when those of all its customs are known.
  void deliver(NodeId id) {
    const Node& node = forward_[id];
    upstream_[node.payload] = applied(*adjoint_[id]).id;
    adjoint_[node.operands[1]] = Adjoint{std::nullopt, Term{&graph_, upstream_[node.payload]}};
  }

  void pull_back_custom(NodeId id) {
    const auto& pairs = forward_[id].operands;
    std::vector<NodeId> cone;
    for (size_t i = 0; i < pairs.size(); i += 2) {
      if (active_[pairs[i]]) cone.push_back(pairs[i + 1]);
    }
    std::set<NodeId> found;  // ascending: operands first
    while (!cone.empty()) {
      const NodeId at = cone.back();
      cone.pop_back();
      if (!forward_.on_upstream(at) || !found.insert(at).second) continue;
      cone.insert(cone.end(), forward_[at].operands.begin(), forward_[at].operands.end());
    }
    for (const NodeId at : found) {
      if (forward_[at].op != Op::kUpstream) {
        image_[at] = image(at);
        continue;
      }
      const auto known = upstream_.find(forward_[at].payload);
      image_[at] = known == upstream_.end() ? graph_.constant(0.0) : known->second;
    }
    for (size_t i = 0; i < pairs.size(); i += 2) {
      if (active_[pairs[i]])
        accumulate(pairs[i], {std::nullopt, Term{&graph_, image_[pairs[i + 1]]}}, forward_.open_axes(id));
    }
  }

  // What a user of the node has for it, whose value depends on the axes `open`: those on which the node itself does not
  // depend are summed over.
  void accumulate(NodeId id, Adjoint adjoint, AxisSet open) {
    if (!active_[id]) return;
    const AxisSet summed = open & ~forward_.open_axes(id);
    if (adjoint.condition && (graph_.open_axes(adjoint.condition->id) & summed) != 0)
      adjoint = {std::nullopt, applied(adjoint)};
    for (int axis = 0; axis < static_cast<int>(forward_.axes().size()); ++axis) {
      if ((summed & set_of_axis(axis)) == 0) continue;
      adjoint.value.id = graph_.reduce(Op::kSum, graph_.axis(axis), adjoint.value.id);
    }
    adjoint_[id] = adjoint_[id] ? sum(*adjoint_[id], adjoint) : adjoint;
  }

  // For a sum each summand has its gradient; for an extremum those that are equal to it share it evenly. Not those that
  // are beaten, so that a NaN passes.
  void pull_back_reduction(NodeId id) {
    const Node& node = forward_[id];
    const NodeId value = node.operands[1];
    const AxisSet open = forward_.open_axes(value);
    const Adjoint& of = *adjoint_[id];
    if (node.op == Op::kSum) return accumulate(value, of, open);
    if (node.op == Op::kProd) return pull_back_product(id);
    const Term x{&graph_, image_[value]}, y{&graph_, image_[id]};
    const Term equals = apply(Op::kToFloat, equal(x, y));
    const Term ties{&graph_, graph_.reduce(Op::kSum, image_[node.operands[0]], equals.id)};
    const Term stays = !apply(node.op == Op::kAmax ? Op::kLt : Op::kGt, x, y);
    accumulate(value, {of.condition ? *of.condition & stays : stays, of.value / ties}, open);
  }

  // Each factor has the product of the others: that of all factors but zeros by its own, where no other one is zero.
  void pull_back_product(NodeId id) {
    const NodeId value = forward_[id].operands[1], axis = image_[forward_[id].operands[0]];
    const auto reduced = [&](Op op, Term x) { return Term{&graph_, graph_.reduce(op, axis, x.id)}; };
    const Adjoint& of = *adjoint_[id];
    const Term x{&graph_, image_[value]};
    const Term is_zero = equal(x, 0.0), zero = apply(Op::kToInt, is_zero);
    const Term factor = where(is_zero, Term{&graph_, graph_.constant(1.0)}, x);
    const Term others = equal(reduced(Op::kSum, zero), zero);
    accumulate(value,
               {of.condition ? *of.condition & others : others, of.value * (reduced(Op::kProd, factor) / factor)},
               forward_.open_axes(value));
  }

  class Step final : public Pullback {
   public:
    Step(Backward& backward, NodeId id) : b_(backward), id_(id) {}
    Term x(int i) const override { return {&b_.graph_, b_.image_[operand(i)]}; }
    Term y() const override { return {&b_.graph_, b_.image_[id_]}; }
    Term v() const override { return b_.adjoint_[id_]->value; }
    bool wants(int i) const override { return b_.active_[operand(i)]; }
    void add(int i, Term value) override { accumulate(i, {b_.adjoint_[id_]->condition, value}); }
    void add_where(int i, Term condition, Term value) override {
      const auto& outer = b_.adjoint_[id_]->condition;
      accumulate(i, {outer ? *outer & condition : condition, value});
    }

   private:
    void accumulate(int i, const Adjoint& adjoint) { b_.accumulate(operand(i), adjoint, b_.forward_.open_axes(id_)); }
    NodeId operand(int i) const { return b_.forward_[id_].operands[i]; }
    Backward& b_;
    NodeId id_;
  };

  void pull_back(NodeId id) {
    if (is_reduction(forward_[id].op)) return pull_back_reduction(id);
    Step step(*this, id);
    switch (forward_[id].op) {
#define PRIMITIVE(Id, name, arity, rule, cuda_float, cuda_integer) \
  case Op::k##Id:                                                  \
    return derive(Tag<Op::k##Id>(), step);
#include "score_mod/primitives.def"
#undef PRIMITIVE
      default:
        return;
    }
  }

  const Graph& forward_;
  Graph graph_;
  std::vector<NodeId> image_;  // in graph_, of each node of forward_
  std::vector<bool> active_;
  std::vector<std::optional<Adjoint>> adjoint_;
  std::map<int64_t, NodeId> upstream_;  // in graph_, by the customs' keys
};

}  // namespace

Graph differentiate(const Graph& score_mod, const std::vector<bool>& wants_grad) {
  if (score_mod.kind() != Kind::kScoreMod) throw GraphError("only a score_mod has a derivative");
  if (score_mod.result() < 0) throw GraphError("there is no result");
  check_customs(score_mod);
  return simplify(Backward(simplify(score_mod), wants_grad).take());
}

namespace {

// Whether a node is linear in the upstreams below it. Nodes that are not on one are constants here.
bool is_linear_step(const Graph& graph, NodeId id) {
  const Node& node = graph[id];
  const auto on = [&](size_t i) { return graph.on_upstream(node.operands[i]); };
  const auto zero_or_on = [&](size_t i) {
    const NodeId operand = node.operands[i];
    return on(i) || (graph.is_constant(operand) && graph.type(operand) == Type::kFloat && graph.value(operand).f == 0);
  };
  switch (node.op) {
    case Op::kUpstream:
    case Op::kNeg:
    case Op::kDetach:
    case Op::kSum:
      return true;
    case Op::kAdd:
    case Op::kSub:
      return zero_or_on(0) && zero_or_on(1);
    case Op::kMul:
      return on(0) != on(1);
    case Op::kDiv:
      return !on(1);
    case Op::kWhere:
      return !on(0) && zero_or_on(1) && zero_or_on(2);
    default:
      return false;
  }
}

std::vector<NodeId> images_of(const std::vector<NodeId>& image, const std::vector<NodeId>& ids) {
  std::vector<NodeId> found;
  for (const NodeId id : ids) found.push_back(image[id]);
  return found;
}

// The derivative's nodes in another graph, for the gradient 1.
std::vector<NodeId> with_unit_gradient(const Graph& derivative, Graph& graph) {
  std::vector<NodeId> image(derivative.nodes().size(), -1);
  for (const NodeId id : reachable(derivative)) {
    const Node& node = derivative[id];
    const bool grad = node.op == Op::kInput && node.payload == static_cast<int64_t>(Input::kGrad);
    image[id] = grad ? graph.constant(1.0) : graph.copy(derivative, id, images_of(image, node.operands));
  }
  return image;
}

}  // namespace

bool passes_gradient(const Graph& derivative) {
  const auto is_zero = [&](NodeId id) { return derivative.is_constant(id) && derivative.value(id).f == 0.0; };
  const std::function<bool(NodeId)> passes = [&](NodeId id) {
    const Node& node = derivative[id];
    if (node.op == Op::kInput) return static_cast<Input>(node.payload) == Input::kGrad;
    if (node.op != Op::kWhere) return false;
    return std::all_of(node.operands.begin() + 1, node.operands.end(),
                       [&](NodeId branch) { return is_zero(branch) || passes(branch); });
  };
  const auto& contributions = derivative.contributions();
  return passes(derivative.result()) && std::all_of(contributions.begin(), contributions.end(), [&](const auto& c) {
           return passes(c.value) && derivative.open_axes(c) == 0;
         });
}

// A score_mod has one result, so its gradient by everything is known from one backward, of the gradient 1: the tangent
// is the sum of its products with the tangents.
Graph tangent(const Graph& score_mod, const std::vector<bool>& has_tangent) {
  const Graph simple = simplify(score_mod);
  for (const NodeId id : reachable(simple)) {
    if (simple.on_upstream(id) && !is_linear_step(simple, id))
      throw GraphError("in forward mode a backward of one's own must be linear in its upstream gradients");
  }
  const Graph derivative = differentiate(score_mod, has_tangent);
  Graph graph = with_declarations_of(derivative, Kind::kTangent);
  std::vector<int> tangent_of(derivative.buffers().size(), -1);
  for (size_t i = 0; i < tangent_of.size() && i < has_tangent.size(); ++i) {
    const auto [type, rank] = derivative.buffers()[i];
    if (has_tangent[i] && type == Type::kFloat) tangent_of[i] = graph.add_buffer(type, rank);
  }
  const std::vector<NodeId> image = with_unit_gradient(derivative, graph);
  Term sum = Term{&graph, image[derivative.result()]} * Term{&graph, graph.input(Input::kGrad)};
  for (const Contribution& c : derivative.contributions()) {
    const Term read{&graph, graph.load(tangent_of[c.buffer], images_of(image, c.indices))};
    Term part = Term{&graph, image[c.value]} * read;
    const AxisSet open = graph.open_axes(part.id);
    for (int axis = 0; axis < static_cast<int>(graph.axes().size()); ++axis) {
      if ((open & set_of_axis(axis)) != 0) part.id = graph.reduce(Op::kSum, graph.axis(axis), part.id);
    }
    sum = sum + part;
  }
  graph.set_result(sum.id);
  return simplify(graph);
}

Graph curvature(const Graph& score_mod) {
  const Graph simple = simplify(score_mod);
  for (const NodeId id : reachable(simple)) {
    if (simple[id].op == Op::kCustom) throw GraphError("a derivative of one's own has no second derivative");
  }
  const Graph derivative = differentiate(score_mod, {});
  Graph slope = with_declarations_of(derivative, Kind::kScoreMod);
  slope.set_result(with_unit_gradient(derivative, slope)[derivative.result()]);
  return differentiate(slope, {});
}

}  // namespace fusegrad::score_mod
