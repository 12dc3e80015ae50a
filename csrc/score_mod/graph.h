// A score_mod or mask_mod as a graph of scalar operations in single static assignment.
//
// Nodes are hash-consed: the same operation on the same operands is one node, so that common subexpressions are shared
// from the start and two reads of one place in a buffer are one read. Operands come before their users; no walk over a
// graph needs recursion, however deep the text of a stranger is.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "score_mod/primitives.h"

namespace fusegrad::score_mod {

/// What a graph computes.
enum class Kind : uint8_t {
  kScoreMod,    ///< one float, from score, b, h, q_idx, kv_idx
  kMaskMod,     ///< one bool, from b, h, q_idx, kv_idx: whether the key takes part
  kDerivative,  ///< of a score_mod: d score, and what each captured read adds to its buffer's gradient
  kTangent,     ///< of a score_mod: the tangent of its result, from those of its score and of what it reads
};
std::string_view kind_name(Kind kind);  // "score_mod", "mask_mod", "derivative", "tangent"

/// `grad` is the gradient by the score_mod's result in a derivative, and the tangent of the score in a tangent; no
/// others have it. Masks have neither it nor the score.
enum class Input : uint8_t { kScore, kB, kH, kQ, kKv, kGrad };
inline constexpr int kInputCount = 6;
std::string_view input_name(Input input);  // "score", "b", "h", "q_idx", "kv_idx", "grad"

// Bounds on what is accepted from outside; what the library makes of it may be as large as a derivative.
inline constexpr int kMaxNodes = 4096;
inline constexpr int kMaxDerivativeNodes = 16 * kMaxNodes;
inline constexpr int kMaxDraftNodes = 32 * kMaxNodes;
inline constexpr int kMaxDepth = 2048;
inline constexpr int kMaxBuffers = 64;
inline constexpr int kMaxScalars = 256;
inline constexpr int kMaxRank = 8;
inline constexpr int kMaxUpstreams = kMaxNodes;
inline constexpr int kMaxAxes = 64;
inline constexpr int kMaxOpenAxes = 8;  ///< on which one value may depend
inline constexpr int64_t kMaxExtent = 1 << 16;
/// Operations for one pair, each as often as the axes that it depends on have it run; of a derivative 16 times as many.
inline constexpr int64_t kMaxSteps = 1 << 22;
inline constexpr size_t kMaxTextBytes = size_t{1} << 22;

using NodeId = int32_t;
/// A set of axes, by their numbers.
using AxisSet = uint64_t;
constexpr AxisSet set_of_axis(int64_t axis) { return AxisSet{1} << axis; }

struct Node {
  Op op;
  Type type;
  /// Constant: the bits of the double, or the integer; input: which; scalar, load: the index of the declaration; axis:
  /// its number; upstream, custom: the key.
  int64_t payload = 0;
  std::vector<NodeId> operands;  ///< of a load: its indices; of a reduction: the axis, and what is reduced

  bool operator==(const Node&) const = default;
};

/// A captured tensor: what kind of numbers and how many dimensions; sizes and strides are known when it is read.
struct BufferDeclaration {
  Type type;
  int rank;
  bool operator==(const BufferDeclaration&) const = default;
};

/// What one captured read adds to the gradient of its buffer, at `indices`, where the mask lets the pair through; for
/// every value of the axes that these depend on.
struct Contribution {
  int buffer;
  std::vector<NodeId> indices;
  NodeId value;
};

/// A violated rule of the language, said in its terms.
class GraphError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

class Graph {
 public:
  /// `draft`: as a tracer builds it, with what its result will not need. It may have up to kMaxDraftNodes, and more
  /// declarations than a text; what is made of it may not.
  explicit Graph(Kind kind, bool draft = false) : kind_(kind), draft_(draft) {}

  // Declarations; each returns its index.
  int add_buffer(Type type, int rank);
  int add_scalar(Type type);
  int add_axis(int64_t extent);

  // Each returns the node, an existing one where there is one like it. What breaks a rule raises GraphError.
  NodeId constant(double value);
  NodeId constant(int64_t value);
  NodeId constant(bool value);
  NodeId constant(const Value& value);
  NodeId input(Input input);
  NodeId scalar(int index);
  /// The variable of an axis: an integer from 0 to its extent, without that.
  NodeId axis(int number);
  /// The sum, the extremum or the product of a value over all values of an axis, on which the result does not depend.
  NodeId reduce(Op op, NodeId axis, NodeId value);
  NodeId load(int buffer, std::vector<NodeId> indices);
  // A value with a derivative of its own, in score_mods only. Nothing flows into the operands of `value`: the
  // backward's pairs (x, d) say what each x receives, d computed from the upstreams of all customs that share the
  // backward. An upstream without a custom is 0: that result is not used. What depends on an upstream is for the d of a
  // backward only.
  NodeId upstream(int64_t key);
  NodeId backward(std::vector<NodeId> pairs);
  NodeId custom(int64_t key, NodeId value, NodeId backward);
  /// Operands are promoted as the primitive's rule says, which may add casts; a cast to the operand's own type is
  /// the operand.
  NodeId apply(Op op, std::vector<NodeId> operands);
  /// A node of another graph with the same declarations, on operands of this one.
  NodeId copy(const Graph& from, NodeId id, std::vector<NodeId> operands);

  void set_result(NodeId node);
  void add_contribution(Contribution contribution);

  Kind kind() const { return kind_; }
  const std::vector<BufferDeclaration>& buffers() const { return buffers_; }
  const std::vector<Type>& scalars() const { return scalars_; }
  const std::vector<int64_t>& axes() const { return axes_; }  ///< the extent of each
  const std::vector<Node>& nodes() const { return nodes_; }
  const Node& operator[](NodeId id) const { return nodes_[id]; }
  Type type(NodeId id) const { return nodes_[id].type; }
  NodeId result() const { return result_; }  ///< -1: not set
  const std::vector<Contribution>& contributions() const { return contributions_; }

  /// The length of the longest chain of operations below a node.
  int depth(NodeId id) const { return depth_[id]; }

  /// Whether an upstream is below a node, outside of the backwards that are.
  bool on_upstream(NodeId id) const { return on_upstream_[id]; }
  /// The axes that a value depends on: not those over which it was reduced.
  AxisSet open_axes(NodeId id) const { return open_[id]; }
  /// How many values it has for one pair: the product of the extents of those axes.
  int64_t values(AxisSet axes) const;
  AxisSet open_axes(const Contribution& c) const;

  /// The number of a constant node.
  Value value(NodeId id) const;
  bool is_constant(NodeId id) const { return nodes_[id].op == Op::kConstant; }

 private:
  NodeId insert(Node node);
  NodeId promote(NodeId id, Type type);
  void check_ordinary(NodeId id) const;

  struct Hash {
    size_t operator()(const Node& node) const;
  };
  Kind kind_;
  bool draft_;
  std::vector<BufferDeclaration> buffers_;
  std::vector<Type> scalars_;
  std::vector<int64_t> axes_;
  std::vector<Node> nodes_;
  std::vector<AxisSet> open_;
  std::vector<int32_t> depth_;
  std::vector<bool> on_upstream_;
  std::unordered_map<Node, NodeId, Hash> known_;
  NodeId result_ = -1;
  std::vector<Contribution> contributions_;
};

/// Raises GraphError unless every custom has a key of its own, and a backward uses the upstreams of its own customs
/// only.
void check_customs(const Graph& graph);

/// What evaluators compute: every custom is its value, and what a score_mod detaches it keeps.
Graph lowered(const Graph& graph);

/// Raises GraphError where there is a custom: for what takes lowered graphs.
void check_lowered(const Graph& graph);

/// The same with the nodes that the results need, in the order of a walk from the results that visits operands from
/// left to right; keys of customs count from 0 in that order. Two graphs that are equal but for the order of their
/// construction become identical.
Graph canonical(const Graph& graph);

/// Whether the canonical graphs are identical.
bool operator==(const Graph& a, const Graph& b);

/// Raises GraphError where a score_mod or mask_mod has more nodes than allowed, or `id` is nested deeper.
void check_limits(const Graph& graph, NodeId id);
/// The operations for one pair, each counted as often as it runs.
int64_t steps(const Graph& graph);
/// Raises GraphError where these are more than allowed.
void check_steps(const Graph& graph);

/// Raises GraphError unless every rule of the language holds: types, arities, ranks, order, kinds, a result. What the
/// members of Graph build always passes.
void verify(const Graph& graph);

/// The ids of the nodes that the results need, operands first.
std::vector<NodeId> reachable(const Graph& graph);

/// The value with other nodes in the places of some: of axes on which it depends, and of values. Customs stay as they
/// are.
NodeId substitute(Graph& graph, NodeId id, const std::unordered_map<NodeId, NodeId>& images);

/// The canonical graph with its declarations in the order of their first use, those without a use dropped, and where
/// each of them was. What is captured in whatever order, the text is the same.
struct Compact {
  Graph graph;
  std::vector<int> buffers;  ///< of each buffer its index before
  std::vector<int> scalars;
};
Compact compact(const Graph& graph);

/// A new, empty graph with the same declarations, and the same axes if wanted.
Graph with_declarations_of(const Graph& graph, Kind kind, bool axes = true);

}  // namespace fusegrad::score_mod
