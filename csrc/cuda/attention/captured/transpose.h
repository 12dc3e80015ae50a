// Copies of buffers whose rows, along the last dimension, lie as boxes cannot take them: other dimensions are dense,
// such as heads, or rows begin anywhere. Compiled ahead of time.
#pragma once

#include <array>
#include <cstdint>

namespace fusegrad::cuda {

/// Two outer dimensions, another one, which may be dense in `from`, and the last one, which is dense in `to`. Strides
/// in elements.
struct FlexCopiedRows {
  const void* from;
  void* to;
  std::array<int64_t, 2> outer, from_outer, to_outer;  // sizes and strides
  int64_t inner, from_inner, to_inner;                 // size and strides
  int64_t last, from_last;                             // size and stride; one of the two strides in `from` is 1
};
/// Copies elements of 2 or 4 bytes. Rows of `to` begin at multiples of 8 bytes and are filled up to one with zeros.
/// Where the last dimension is dense in `from`, there are less than 2^31 elements.
void flex_transpose_rows(const FlexCopiedRows& p, int element_bytes, void* stream);

}  // namespace fusegrad::cuda
