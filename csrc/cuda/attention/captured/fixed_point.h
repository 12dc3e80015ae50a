// Sums in fixed point, which are the same in every order (device::FlexBufferSums). Compiled ahead of time.
#pragma once

#include <cstdint>

namespace fusegrad::cuda {

/// Partial sums (device::FlexSums), `count` of them: the largest of the magnitudes and `largest`, NaN above all; and
/// their own sums, added to those of the elements, in fixed point.
void flex_largest(const float* sums, int64_t count, float* largest, void* stream);
void flex_add_partial_sums(const float* sums, const int64_t* elements, int64_t count, const float* largest,
                           int fixed_bits, int64_t* out, void* stream);

/// out[i] = sums[i] as a float: fixed point made for `largest` (device::FlexSums).
void flex_fixed_to_float(const int64_t* sums, const float* largest, int fixed_bits, int64_t elements, float* out,
                         void* stream);

}  // namespace fusegrad::cuda
