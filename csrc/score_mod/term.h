// Arithmetic notation for building nodes inside the library: `v * (1.0 - square(y))`.
#pragma once

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// A node of a graph.
struct Term {
  Graph* graph;
  NodeId id;
};

inline Term apply(Op op, Term a) { return {a.graph, a.graph->apply(op, {a.id})}; }
inline Term apply(Op op, Term a, Term b) { return {a.graph, a.graph->apply(op, {a.id, b.id})}; }
inline Term apply(Op op, Term a, double b) { return {a.graph, a.graph->apply(op, {a.id, a.graph->constant(b)})}; }
inline Term apply(Op op, double a, Term b) { return {b.graph, b.graph->apply(op, {b.graph->constant(a), b.id})}; }

inline Term operator-(Term a) { return apply(Op::kNeg, a); }
inline Term operator+(Term a, Term b) { return apply(Op::kAdd, a, b); }
inline Term operator-(Term a, Term b) { return apply(Op::kSub, a, b); }
inline Term operator*(Term a, Term b) { return apply(Op::kMul, a, b); }
inline Term operator/(Term a, Term b) { return apply(Op::kDiv, a, b); }
inline Term operator+(Term a, double b) { return apply(Op::kAdd, a, b); }
inline Term operator-(Term a, double b) { return apply(Op::kSub, a, b); }
inline Term operator*(Term a, double b) { return apply(Op::kMul, a, b); }
inline Term operator/(Term a, double b) { return apply(Op::kDiv, a, b); }
inline Term operator+(double a, Term b) { return apply(Op::kAdd, a, b); }
inline Term operator-(double a, Term b) { return apply(Op::kSub, a, b); }
inline Term operator*(double a, Term b) { return apply(Op::kMul, a, b); }

inline Term operator<(Term a, Term b) { return apply(Op::kLt, a, b); }
inline Term operator>(Term a, Term b) { return apply(Op::kGt, a, b); }
inline Term operator<=(Term a, Term b) { return apply(Op::kLe, a, b); }
inline Term operator>=(Term a, Term b) { return apply(Op::kGe, a, b); }
inline Term operator<=(Term a, double b) { return apply(Op::kLe, a, b); }
inline Term operator>=(Term a, double b) { return apply(Op::kGe, a, b); }
inline Term operator!(Term a) { return apply(Op::kNot, a); }
inline Term operator&(Term a, Term b) { return apply(Op::kAnd, a, b); }
inline Term operator|(Term a, Term b) { return apply(Op::kOr, a, b); }

inline Term equal(Term a, Term b) { return apply(Op::kEq, a, b); }
inline Term equal(Term a, double b) { return apply(Op::kEq, a, b); }
inline Term square(Term a) { return apply(Op::kSquare, a); }
inline Term where(Term c, Term a, Term b) { return {c.graph, c.graph->apply(Op::kWhere, {c.id, a.id, b.id})}; }
inline Term where(Term c, Term a, double b) { return where(c, a, Term{c.graph, c.graph->constant(b)}); }

}  // namespace fusegrad::score_mod
