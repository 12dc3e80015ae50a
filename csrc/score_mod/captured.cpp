#include "score_mod/captured.h"

#include <algorithm>
#include <string>
#include <vector>

namespace fusegrad::score_mod {

namespace {

// Whether a little less or more may be something else altogether.
bool jumps(Op op) {
  switch (op) {
    case Op::kFloor:
    case Op::kCeil:
    case Op::kTrunc:
    case Op::kRound:
    case Op::kSign:
    case Op::kFloorDiv:
    case Op::kMod:
    case Op::kSin:
    case Op::kCos:
    case Op::kTan:
    case Op::kToInt:
    case Op::kToBool:
      return true;
    default:
      return is_primitive(op) && primitive(op).rule == Rule::kCompare;
  }
}

}  // namespace

Type type_of(DType dtype) {
  if (dtype == DType::kBool) return Type::kBool;
  return dtype <= DType::kFloat16 ? Type::kFloat : Type::kInt;
}

int element_bytes(DType dtype) {
  constexpr int kBytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1};
  return kBytes[static_cast<int>(dtype)];
}

Interval interval_of(DType dtype) {
  switch (dtype) {
    case DType::kInt32:
      return {INT32_MIN, INT32_MAX};
    case DType::kInt16:
      return {INT16_MIN, INT16_MAX};
    case DType::kInt8:
      return {INT8_MIN, INT8_MAX};
    case DType::kUInt8:
      return {0, UINT8_MAX};
    case DType::kBool:
      return {0, 1};
    default:
      return {};
  }
}

bool computes_in_float64(std::span<const Buffer> buffers) {
  return std::ranges::any_of(buffers, [](const Buffer& b) { return b.dtype == DType::kFloat64; });
}

int needs_float64(const Graph& graph, std::span<const DType> dtypes) {
  struct Value {
    int exact = -1;  // the float64 buffer that it was computed from, if no score was
    bool score = false;
  };
  std::vector<Value> values(graph.nodes().size());
  for (const NodeId id : reachable(graph)) {
    const Node& node = graph[id];
    Value& value = values[static_cast<size_t>(id)];
    if (node.op == Op::kInput) {
      value.score = node.type == Type::kFloat;
      continue;
    }
    if (node.op == Op::kLoad) {
      const auto buffer = static_cast<size_t>(node.payload);
      if (dtypes[buffer] == DType::kFloat64) value.exact = static_cast<int>(buffer);
      continue;
    }
    int exact = -1, others = 0;  // of the operands, and how many besides the first
    for (const NodeId operand : node.operands) {
      const Value& x = values[static_cast<size_t>(operand)];
      value.score = value.score || x.score;
      if (x.exact < 0) continue;
      others += exact < 0 ? 0 : 1;
      if (exact < 0) exact = x.exact;
    }
    if (exact < 0 || value.score) continue;
    if (jumps(node.op) || node.op == Op::kSum || ((node.op == Op::kAdd || node.op == Op::kSub) && others > 0)) {
      return exact;
    }
    value.exact = exact;
  }
  return -1;
}

void check_captured(const Graph& graph, std::span<const Buffer> buffers, std::span<const Value> scalars) {
  check_lowered(graph);
  const auto fail = [](size_t i, const std::string& what) {
    throw GraphError("captured buffer @" + std::to_string(i) + " " + what);
  };
  if (buffers.size() != graph.buffers().size() || scalars.size() != graph.scalars().size()) {
    throw GraphError("expected " + std::to_string(graph.buffers().size()) + " captured buffers and " +
                     std::to_string(graph.scalars().size()) + " scalars, but got " + std::to_string(buffers.size()) +
                     " and " + std::to_string(scalars.size()));
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto [type, rank] = graph.buffers()[i];
    if (type_of(buffers[i].dtype) != type) fail(i, "must hold " + std::string(type_name(type)));
    if (static_cast<int>(buffers[i].sizes.size()) != rank || buffers[i].strides.size() != buffers[i].sizes.size()) {
      fail(i, "must have " + std::to_string(rank) + " dimensions");
    }
    for (const int64_t stride : buffers[i].strides) {
      if (stride < 0) fail(i, "must not have negative strides");
    }
  }
  for (size_t i = 0; i < scalars.size(); ++i) {
    if (scalars[i].type != graph.scalars()[i]) {
      throw GraphError("scalar $" + std::to_string(i) + " must be " + std::string(type_name(graph.scalars()[i])));
    }
  }
}

}  // namespace fusegrad::score_mod
