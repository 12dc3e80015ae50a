#include "score_mod/derivative.h"

#include <optional>

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
      std::vector<NodeId> operands;
      for (const NodeId operand : forward[id].operands) operands.push_back(image_[operand]);
      image_[id] = graph_.copy(forward, id, std::move(operands));
      active_[id] = is_active(id, wants_grad);
    }
    accumulate(forward.result(), {std::nullopt, Term{&graph_, graph_.input(Input::kGrad)}});
    NodeId score = -1;
    std::vector<NodeId> reads;
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      if (!adjoint_[*it]) continue;
      const Op op = forward[*it].op;
      if (op == Op::kInput) score = *it;
      if (op == Op::kLoad) reads.push_back(*it);
      if (!is_leaf(op)) pull_back(*it);
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
    for (const NodeId operand : node.operands) {
      if (active_[operand]) return true;
    }
    return false;
  }

  void accumulate(NodeId id, const Adjoint& adjoint) {
    if (!active_[id]) return;
    adjoint_[id] = adjoint_[id] ? sum(*adjoint_[id], adjoint) : adjoint;
  }

  class Step final : public Pullback {
   public:
    Step(Backward& backward, NodeId id) : b_(backward), id_(id) {}
    Term x(int i) const override { return {&b_.graph_, b_.image_[operand(i)]}; }
    Term y() const override { return {&b_.graph_, b_.image_[id_]}; }
    Term v() const override { return b_.adjoint_[id_]->value; }
    bool wants(int i) const override { return b_.active_[operand(i)]; }
    void add(int i, Term value) override { b_.accumulate(operand(i), {b_.adjoint_[id_]->condition, value}); }
    void add_where(int i, Term condition, Term value) override {
      const auto& outer = b_.adjoint_[id_]->condition;
      b_.accumulate(operand(i), {outer ? *outer & condition : condition, value});
    }

   private:
    NodeId operand(int i) const { return b_.forward_[id_].operands[i]; }
    Backward& b_;
    NodeId id_;
  };

  void pull_back(NodeId id) {
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
};

}  // namespace

Graph differentiate(const Graph& score_mod, const std::vector<bool>& wants_grad) {
  if (score_mod.kind() != Kind::kScoreMod) throw GraphError("only a score_mod has a derivative");
  if (score_mod.result() < 0) throw GraphError("there is no result");
  return simplify(Backward(simplify(score_mod), wants_grad).take());
}

}  // namespace fusegrad::score_mod
