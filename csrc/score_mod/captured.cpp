#include "score_mod/captured.h"

#include <string>

namespace fusegrad::score_mod {

Type type_of(DType dtype) {
  if (dtype == DType::kBool) return Type::kBool;
  return dtype <= DType::kFloat16 ? Type::kFloat : Type::kInt;
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
