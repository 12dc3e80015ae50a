#include "score_mod/graph.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

namespace fusegrad::score_mod {
namespace {

[[noreturn]] void fail(const std::string& message) { throw GraphError(message); }

std::string quoted(std::string_view name) { return std::string("'").append(name).append("'"); }

bool allowed(Kind kind, Input input) {
  if (input == Input::kGrad) return kind == Kind::kDerivative || kind == Kind::kTangent;
  if (input == Input::kScore) return kind != Kind::kMaskMod;
  return true;
}

Type input_type(Input input) { return input == Input::kScore || input == Input::kGrad ? Type::kFloat : Type::kInt; }

// What the operands become and what the primitive gives.
struct Signature {
  Type operand;
  Type result;
};
Signature signature(const Primitive& p, std::span<const Type> types) {
  const bool where = p.rule == Rule::kWhere;
  Type common = Type::kBool;
  for (const Type type : types.subspan(where ? 1 : 0)) common = std::max(common, type);
  const Type number = std::max(common, Type::kInt);
  const auto refuse_float = [&] {
    if (common == Type::kFloat) fail(quoted(p.name) + " expects integers or bools, but got f");
  };
  switch (p.rule) {
    case Rule::kNumeric:
      return {number, number};
    case Rule::kFloat:
      return {Type::kFloat, Type::kFloat};
    case Rule::kCompare:
      return {number, Type::kBool};
    case Rule::kBitwise:
      refuse_float();
      return {common, common};
    case Rule::kInteger:
      refuse_float();
      return {Type::kInt, Type::kInt};
    case Rule::kWhere:
      if (types[0] != Type::kBool) {
        fail(quoted(p.name) + " expects a bool as its first operand, but got " + std::string(type_name(types[0])));
      }
      return {common, common};
    case Rule::kToFloat:
      return {common, Type::kFloat};
    case Rule::kToInt:
      return {common, Type::kInt};
    default:
      return {common, Type::kBool};
  }
}

Op cast_to(Type type) { return type == Type::kFloat ? Op::kToFloat : type == Type::kInt ? Op::kToInt : Op::kToBool; }

}  // namespace

std::string_view kind_name(Kind kind) {
  constexpr std::string_view kNames[] = {"score_mod", "mask_mod", "derivative", "tangent"};
  return kNames[static_cast<int>(kind)];
}

std::string_view input_name(Input input) {
  constexpr std::string_view kNames[kInputCount] = {"score", "b", "h", "q_idx", "kv_idx", "grad"};
  return kNames[static_cast<int>(input)];
}

size_t Graph::Hash::operator()(const Node& node) const {
  uint64_t hash = static_cast<uint64_t>(node.op) << 8 | static_cast<uint64_t>(node.type);
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  };
  mix(static_cast<uint64_t>(node.payload));
  for (const NodeId operand : node.operands) mix(static_cast<uint64_t>(operand) + 1);
  return static_cast<size_t>(hash);
}

int Graph::add_buffer(Type type, int rank) {
  if (!draft_ && buffers_.size() >= kMaxBuffers) fail("more than " + std::to_string(kMaxBuffers) + " captured buffers");
  if (rank < 0 || rank > kMaxRank) {
    fail("the rank of a buffer must be 0 to " + std::to_string(kMaxRank) + ", but got " + std::to_string(rank));
  }
  buffers_.push_back({type, rank});
  return static_cast<int>(buffers_.size()) - 1;
}

int Graph::add_scalar(Type type) {
  if (!draft_ && scalars_.size() >= kMaxScalars) fail("more than " + std::to_string(kMaxScalars) + " scalars");
  scalars_.push_back(type);
  return static_cast<int>(scalars_.size()) - 1;
}

int Graph::add_axis(int64_t extent) {
  if (axes_.size() >= kMaxAxes) fail("more than " + std::to_string(kMaxAxes) + " axes");
  if (extent < 1 || extent > kMaxExtent) {
    fail("the extent of an axis must be 1 to " + std::to_string(kMaxExtent) + ", but got " + std::to_string(extent));
  }
  axes_.push_back(extent);
  return static_cast<int>(axes_.size()) - 1;
}

NodeId Graph::insert(Node node) {
  const auto found = known_.find(node);
  if (found != known_.end()) return found->second;
  if (draft_ && nodes_.size() >= kMaxDraftNodes) {
    fail("more than " + std::to_string(kMaxDraftNodes) + " operations; a score_mod has at most " +
         std::to_string(kMaxNodes));
  }
  if (!draft_ && nodes_.size() >= kMaxDerivativeNodes) {
    fail("more than " + std::to_string(kMaxDerivativeNodes) + " nodes");
  }
  int32_t depth = 0;
  bool on_upstream = node.op == Op::kUpstream;
  AxisSet open = node.op == Op::kAxis ? set_of_axis(node.payload) : 0;
  for (const NodeId operand : node.operands) {
    depth = std::max(depth, depth_[operand] + 1);
    if (nodes_[operand].op == Op::kBackward && node.op != Op::kCustom) fail("a backward is an operand of customs only");
    on_upstream = on_upstream || (node.op != Op::kBackward && on_upstream_[operand]);
    open |= open_[operand];
  }
  if (is_reduction(node.op)) open &= ~set_of_axis(nodes_[node.operands[0]].payload);
  if (std::popcount(open) > kMaxOpenAxes) {
    fail("a value that depends on more than " + std::to_string(kMaxOpenAxes) + " axes");
  }
  const auto id = static_cast<NodeId>(nodes_.size());
  known_.emplace(node, id);
  nodes_.push_back(std::move(node));
  depth_.push_back(depth);
  on_upstream_.push_back(on_upstream);
  open_.push_back(open);
  return id;
}

NodeId Graph::constant(double value) {
  if (value != value) value = std::numeric_limits<double>::quiet_NaN();  // one NaN, whatever its bits were
  return insert({Op::kConstant, Type::kFloat, std::bit_cast<int64_t>(value), {}});
}
NodeId Graph::constant(int64_t value) { return insert({Op::kConstant, Type::kInt, value, {}}); }
NodeId Graph::constant(bool value) { return insert({Op::kConstant, Type::kBool, value ? 1 : 0, {}}); }
NodeId Graph::constant(const Value& value) {
  if (value.type == Type::kFloat) return constant(value.f);
  if (value.type == Type::kInt) return constant(value.i);
  return constant(value.i != 0);
}

Value Graph::value(NodeId id) const {
  const Node& node = nodes_[id];
  if (node.type == Type::kFloat) return {Type::kFloat, std::bit_cast<double>(node.payload), 0};
  return {node.type, 0, node.payload};
}

NodeId Graph::input(Input input) {
  if (!allowed(kind_, input))
    fail(quoted(input_name(input)) + " is not an input of a " + std::string(kind_name(kind_)));
  return insert({Op::kInput, input_type(input), static_cast<int64_t>(input), {}});
}

NodeId Graph::scalar(int index) {
  if (index < 0 || index >= static_cast<int>(scalars_.size())) {
    fail("scalar $" + std::to_string(index) + " is not declared");
  }
  return insert({Op::kScalar, scalars_[index], index, {}});
}

NodeId Graph::axis(int number) {
  if (number < 0 || number >= static_cast<int>(axes_.size())) fail("an axis is not declared");
  return insert({Op::kAxis, Type::kInt, number, {}});
}

NodeId Graph::reduce(Op op, NodeId axis, NodeId value) {
  if (nodes_[axis].op != Op::kAxis) fail(quoted(reduction_name(op)) + " expects an axis as its first operand");
  value = promote(value, std::max(nodes_[value].type, Type::kInt));
  return insert({op, nodes_[value].type, 0, {axis, value}});
}

int64_t Graph::values(AxisSet axes) const {
  int64_t product = 1;
  for (; axes != 0; axes &= axes - 1) {
    product *= axes_[static_cast<size_t>(std::countr_zero(axes))];
    if (product > int64_t{1} << 40) return int64_t{1} << 40;  // more than any bound
  }
  return product;
}

AxisSet Graph::open_axes(const Contribution& c) const {
  AxisSet open = open_[c.value];
  for (const NodeId index : c.indices) open |= open_[index];
  return open;
}

NodeId Graph::load(int buffer, std::vector<NodeId> indices) {
  if (buffer < 0 || buffer >= static_cast<int>(buffers_.size())) {
    fail("buffer @" + std::to_string(buffer) + " is not declared");
  }
  const auto [type, rank] = buffers_[buffer];
  if (static_cast<int>(indices.size()) != rank) {
    fail("buffer @" + std::to_string(buffer) + " expects " + std::to_string(rank) + " indices, but got " +
         std::to_string(indices.size()));
  }
  for (const NodeId index : indices) {
    if (nodes_[index].type != Type::kInt) {
      fail("an index of buffer @" + std::to_string(buffer) + " must be i64, but is " +
           std::string(type_name(nodes_[index].type)));
    }
  }
  return insert({Op::kLoad, type, buffer, std::move(indices)});
}

// What depends on an upstream has no value but within its backward, and a backward has none at all.
void Graph::check_ordinary(NodeId id) const {
  if (nodes_[id].op == Op::kBackward) fail("a backward is an operand of customs only");
  if (on_upstream_[id]) fail("what depends on an upstream is for what a backward gives only");
}

NodeId Graph::upstream(int64_t key) {
  if (kind_ != Kind::kScoreMod) fail("only a score_mod has upstreams");
  if (key < 0 || key >= kMaxUpstreams) fail("more than " + std::to_string(kMaxUpstreams) + " upstreams");
  return insert({Op::kUpstream, Type::kFloat, key, {}});
}

NodeId Graph::backward(std::vector<NodeId> pairs) {
  if (kind_ != Kind::kScoreMod) fail("only a score_mod has a 'backward'");
  if (pairs.size() % 2 != 0) fail("'backward' expects pairs of operands, but got " + std::to_string(pairs.size()));
  for (size_t i = 0; i < pairs.size(); i += 2) {
    check_ordinary(pairs[i]);
    if (nodes_[pairs[i]].type != Type::kFloat) {
      fail("what a backward gives a gradient to must be f, but is " + std::string(type_name(nodes_[pairs[i]].type)));
    }
    if ((open_[pairs[i]] | open_[pairs[i + 1]]) != 0) fail("a backward must not depend on an axis");
    pairs[i + 1] = promote(pairs[i + 1], Type::kFloat);
  }
  return insert({Op::kBackward, Type::kFloat, 0, std::move(pairs)});
}

NodeId Graph::custom(int64_t key, NodeId value, NodeId backward) {
  if (kind_ != Kind::kScoreMod) fail("only a score_mod has a 'custom'");
  if (key < 0 || key >= kMaxUpstreams) fail("more than " + std::to_string(kMaxUpstreams) + " upstreams");
  check_ordinary(value);
  if (nodes_[backward].op != Op::kBackward) fail("'custom' expects a 'backward' as its second operand");
  if (open_[value] != 0) fail("a custom must not depend on an axis");
  value = promote(value, Type::kFloat);
  return insert({Op::kCustom, Type::kFloat, key, {value, backward}});
}

NodeId Graph::promote(NodeId id, Type type) {
  if (nodes_[id].type == type) return id;
  const Op op = cast_to(type);
  if (is_constant(id)) {
    const Value from = value(id);
    return constant(primitive(op).fold(&from));
  }
  return insert({op, type, 0, {id}});
}

NodeId Graph::apply(Op op, std::vector<NodeId> operands) {
  if (!is_primitive(op)) fail("not a primitive");
  const Primitive& p = primitive(op);
  if (static_cast<int>(operands.size()) != p.arity) {
    fail(quoted(p.name) + " expects " + std::to_string(p.arity) + (p.arity == 1 ? " operand" : " operands") +
         ", but got " + std::to_string(operands.size()));
  }
  std::vector<Type> types;
  for (const NodeId operand : operands) types.push_back(nodes_[operand].type);
  const Signature s = signature(p, types);
  if (op == cast_to(s.result)) return promote(operands[0], s.result);
  for (int i = p.rule == Rule::kWhere ? 1 : 0; i < p.arity; ++i) operands[i] = promote(operands[i], s.operand);
  return insert({op, s.result, 0, std::move(operands)});
}

NodeId Graph::copy(const Graph& from, NodeId id, std::vector<NodeId> operands) {
  const Node& node = from[id];
  switch (node.op) {
    case Op::kConstant:
      return constant(from.value(id));
    case Op::kInput:
      return input(static_cast<Input>(node.payload));
    case Op::kScalar:
      return scalar(static_cast<int>(node.payload));
    case Op::kLoad:
      return load(static_cast<int>(node.payload), std::move(operands));
    case Op::kUpstream:
      return upstream(node.payload);
    case Op::kBackward:
      return backward(std::move(operands));
    case Op::kCustom:
      return custom(node.payload, operands[0], operands[1]);
    case Op::kAxis:
      return axis(static_cast<int>(node.payload));
    case Op::kSum:
    case Op::kAmax:
    case Op::kAmin:
    case Op::kProd:
      return reduce(node.op, operands[0], operands[1]);
    default:
      return apply(node.op, std::move(operands));
  }
}

void Graph::set_result(NodeId node) {
  check_ordinary(node);
  const Type wanted = kind_ == Kind::kMaskMod ? Type::kBool : Type::kFloat;
  const Type got = nodes_[node].type;
  if (open_[node] != 0) fail("the result depends on an axis over which nothing reduces it");
  if (kind_ != Kind::kMaskMod && got != wanted) node = promote(node, wanted);
  if (kind_ == Kind::kMaskMod && got != wanted) {
    fail("a mask_mod must return bool, but returns " + std::string(type_name(got)));
  }
  result_ = node;
}

void Graph::add_contribution(Contribution c) {
  if (kind_ != Kind::kDerivative) fail("only a derivative has contributions");
  if (c.buffer < 0 || c.buffer >= static_cast<int>(buffers_.size())) {
    fail("buffer @" + std::to_string(c.buffer) + " is not declared");
  }
  const auto [type, rank] = buffers_[c.buffer];
  if (type != Type::kFloat) fail("buffer @" + std::to_string(c.buffer) + " holds no floats and has no gradient");
  if (static_cast<int>(c.indices.size()) != rank) {
    fail("buffer @" + std::to_string(c.buffer) + " expects " + std::to_string(rank) + " indices, but got " +
         std::to_string(c.indices.size()));
  }
  for (const NodeId index : c.indices) {
    if (nodes_[index].type != Type::kInt) fail("an index must be i64");
  }
  if (nodes_[c.value].type != Type::kFloat) fail("what is added to a gradient must be f");
  if (std::popcount(open_axes(c)) > kMaxOpenAxes) {
    fail("a value that depends on more than " + std::to_string(kMaxOpenAxes) + " axes");
  }
  contributions_.push_back(std::move(c));
}

Graph with_declarations_of(const Graph& graph, Kind kind, bool axes) {
  Graph result(kind);
  for (const BufferDeclaration& b : graph.buffers()) result.add_buffer(b.type, b.rank);
  for (const Type s : graph.scalars()) result.add_scalar(s);
  for (const int64_t extent : graph.axes()) {
    if (axes) result.add_axis(extent);
  }
  return result;
}

}  // namespace fusegrad::score_mod
