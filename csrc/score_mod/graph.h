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
};
std::string_view kind_name(Kind kind);  // "score_mod", "mask_mod", "derivative"

/// `grad` is the gradient by the score_mod's result; only derivatives have it. Masks have neither it nor the score.
enum class Input : uint8_t { kScore, kB, kH, kQ, kKv, kGrad };
inline constexpr int kInputCount = 6;
std::string_view input_name(Input input);  // "score", "b", "h", "q_idx", "kv_idx", "grad"

// Bounds on what is accepted from outside; what the library makes of it may be as large as a derivative.
inline constexpr int kMaxNodes = 4096;
inline constexpr int kMaxDerivativeNodes = 16 * kMaxNodes;
inline constexpr int kMaxDepth = 2048;
inline constexpr int kMaxBuffers = 64;
inline constexpr int kMaxScalars = 256;
inline constexpr int kMaxRank = 8;
inline constexpr size_t kMaxTextBytes = size_t{1} << 22;

using NodeId = int32_t;

struct Node {
  Op op;
  Type type;
  /// Constant: the bits of the double, or the integer; input: which; scalar, load: the index of the declaration.
  int64_t payload = 0;
  std::vector<NodeId> operands;  ///< of a load: its indices

  bool operator==(const Node&) const = default;
};

/// A captured tensor: what kind of numbers and how many dimensions; sizes and strides are known when it is read.
struct BufferDeclaration {
  Type type;
  int rank;
  bool operator==(const BufferDeclaration&) const = default;
};

/// What one captured read adds to the gradient of its buffer, at `indices`, where the mask lets the pair through.
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
  explicit Graph(Kind kind) : kind_(kind) {}

  // Declarations; each returns its index.
  int add_buffer(Type type, int rank);
  int add_scalar(Type type);

  // Each returns the node, an existing one where there is one like it. What breaks a rule raises GraphError.
  NodeId constant(double value);
  NodeId constant(int64_t value);
  NodeId constant(bool value);
  NodeId constant(const Value& value);
  NodeId input(Input input);
  NodeId scalar(int index);
  NodeId load(int buffer, std::vector<NodeId> indices);
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
  const std::vector<Node>& nodes() const { return nodes_; }
  const Node& operator[](NodeId id) const { return nodes_[id]; }
  Type type(NodeId id) const { return nodes_[id].type; }
  NodeId result() const { return result_; }  ///< -1: not set
  const std::vector<Contribution>& contributions() const { return contributions_; }

  /// The length of the longest chain of operations below a node.
  int depth(NodeId id) const { return depth_[id]; }

  /// The number of a constant node.
  Value value(NodeId id) const;
  bool is_constant(NodeId id) const { return nodes_[id].op == Op::kConstant; }

 private:
  NodeId insert(Node node);
  NodeId promote(NodeId id, Type type);

  struct Hash {
    size_t operator()(const Node& node) const;
  };
  Kind kind_;
  std::vector<BufferDeclaration> buffers_;
  std::vector<Type> scalars_;
  std::vector<Node> nodes_;
  std::vector<int32_t> depth_;
  std::unordered_map<Node, NodeId, Hash> known_;
  NodeId result_ = -1;
  std::vector<Contribution> contributions_;
};

/// The same with the nodes that the results need, in the order of a walk from the results that visits operands from
/// left to right. Two graphs that are equal but for the order of their construction become identical.
Graph canonical(const Graph& graph);

/// Whether the canonical graphs are identical.
bool operator==(const Graph& a, const Graph& b);

/// Raises GraphError where a score_mod or mask_mod has more nodes than allowed, or `id` is nested deeper.
void check_limits(const Graph& graph, NodeId id);

/// Raises GraphError unless every rule of the language holds: types, arities, ranks, order, kinds, a result. What the
/// members of Graph build always passes.
void verify(const Graph& graph);

/// The ids of the nodes that the results need, operands first.
std::vector<NodeId> reachable(const Graph& graph);

/// The canonical graph with its declarations in the order of their first use, those without a use dropped, and where
/// each of them was. What is captured in whatever order, the text is the same.
struct Compact {
  Graph graph;
  std::vector<int> buffers;  ///< of each buffer its index before
  std::vector<int> scalars;
};
Compact compact(const Graph& graph);

/// A new, empty graph with the same declarations.
Graph with_declarations_of(const Graph& graph, Kind kind);

}  // namespace fusegrad::score_mod
