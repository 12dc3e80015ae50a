// Interval arithmetic whose bounds are nodes of a graph: what a value can be over a rectangle of pairs, computed by the
// language's own primitives, so that whatever evaluates or renders graphs does so with bounds too.
//
// The bounds of floats are computed in the precision of the values themselves: rounding is monotone. What a compiler
// may contract (a product with what it is added to) or approximate is widened.
#pragma once

#include "score_mod/index_analysis.h"

namespace fusegrad::score_mod {

/// Bounds of a value, both included. For a bool: whether it is true of every pair, and whether it may be of any. For a
/// float: both finite and the value too, or both NaN where nothing is known, a NaN included. A value that is the same
/// for all pairs has one node for both.
struct Range {
  NodeId low = -1;  ///< -1: nothing is known
  NodeId high = -1;
  Interval known;  ///< of an integer: what is known of its bounds when the graph is built

  bool nothing() const { return low < 0; }
  bool point() const { return low >= 0 && low == high; }
};

class Ranges {
 public:
  /// Adds nodes to `graph`.
  explicit Ranges(Graph& graph) : graph_(graph), wild_(graph.constant(false)) {}

  Range constant(const Value& value);
  /// Between two floats, which may be infinite or NaN.
  Range floats(NodeId low, NodeId high);

  /// For a primitive by the types of its last operand and of its result. `value`: what is known of every value that it
  /// can have. Nothing is known of what has no rule.
  Range apply(Op op, Type operand, Type result, Interval value, std::span<const Range> x);
  /// For a sum, an extremum or a product over an axis of so many values.
  Range reduce(Op op, Type type, const Range& x, int64_t extent);

  /// Whether, over the rectangle, some integer was beyond what the bounds were computed for: nothing holds then.
  NodeId wild() const { return wild_; }
  /// Adds to it.
  void add_wild(NodeId condition) { wild_ = graph_.apply(Op::kOr, {wild_, condition}); }

  // Nodes.
  NodeId integer(int64_t value) { return graph_.constant(value); }
  NodeId min(NodeId a, NodeId b) { return a == b ? a : graph_.apply(Op::kMin, {a, b}); }
  NodeId max(NodeId a, NodeId b) { return a == b ? a : graph_.apply(Op::kMax, {a, b}); }
  Graph& graph() { return graph_; }

 private:
  Range booleans(Op op, std::span<const Range> x);
  Range comparison(Op op, std::span<const Range> x);
  Range integers(Op op, std::span<const Range> x);
  Range quotient(Op op, const Range& a, const Range& b);
  Range bits(Op op, const Range& a, const Range& b);
  Range of_floats(Op op, std::span<const Range> x);
  Range cast(Op op, Type operand, const Range& x);
  Range where(Type type, std::span<const Range> x);
  Range product(const Range& a, const Range& b, bool integers);
  Range tame(const Range& x, int64_t limit);
  Range widened(const Range& x, double relative, double absolute);
  /// x where a condition holds, and NaN elsewhere.
  NodeId only(NodeId condition, NodeId x);
  NodeId both(NodeId a, NodeId b) { return graph_.apply(Op::kAnd, {a, b}); }
  NodeId negate(NodeId x) { return graph_.apply(Op::kNot, {x}); }

  Graph& graph_;
  NodeId wild_;
};

}  // namespace fusegrad::score_mod
