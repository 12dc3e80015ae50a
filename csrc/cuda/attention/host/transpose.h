// Copies buffers of which another dimension than the last is dense, such as biases with their heads last. Compiled
// ahead of time.
#pragma once

#include <array>
#include <cstdint>

namespace fusegrad::cuda {

/// Two outer dimensions, one that is dense in `from`, and the last one, which is dense in `to`. Strides in elements.
struct FlexTransposed {
  const void* from;
  void* to;
  std::array<int64_t, 2> outer, from_outer, to_outer;  // sizes and strides
  int64_t inner, last;                                 // sizes
  int64_t from_last, to_inner;                         // strides
};
/// Copies elements of 2 or 4 bytes. Rows of `to` begin at multiples of 4 bytes; a last odd element of 2 bytes is
/// followed by a zero.
void flex_transpose(const FlexTransposed& p, int element_bytes, void* stream);

}  // namespace fusegrad::cuda
