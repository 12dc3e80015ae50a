// What a call supplies for the declarations of a graph: captured tensors without PyTorch, and numbers.
#pragma once

#include <cstdint>
#include <span>

#include "score_mod/index_analysis.h"

namespace fusegrad::score_mod {

enum class DType : uint8_t { kFloat64, kFloat32, kBFloat16, kFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8, kBool };

/// The declared type of a buffer that holds such numbers.
Type type_of(DType dtype);
/// Bytes of one.
int element_bytes(DType dtype);

/// A captured tensor; sizes and strides in elements, as many as its rank. A negative index counts from the end, as in
/// Python, whether it is a literal or computed. Out of range: see docs/design/score_mod.md.
struct Buffer {
  const void* data;
  DType dtype;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
};

/// The bounds of what such numbers can be.
Interval interval_of(DType dtype);

/// Whether a mask_mod that captures these computes in float64: where one of them is. Only then are comparisons of what
/// it holds exact.
bool computes_in_float64(std::span<const Buffer> buffers);

/// The first float64 buffer that a computation in float32 may not round: where it would be compared, made an integer, a
/// part of a sum or an angle. What only scales or shifts a score may be rounded as the score is. -1: none.
int needs_float64(const Graph& graph, std::span<const DType> dtypes);

/// Raises GraphError unless buffers and scalars are as many and of the types and ranks that the graph declares, and no
/// stride is negative.
void check_captured(const Graph& graph, std::span<const Buffer> buffers, std::span<const Value> scalars);

}  // namespace fusegrad::score_mod
