// Fills, copies and conversions of dense memory. Compiled ahead of time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "score_mod/captured.h"

namespace fusegrad::cuda {

void flex_fill_zeros(void* data, int64_t bytes, void* stream);
/// All bits, which are NaN as floats of every type.
void flex_fill_ones(void* data, int64_t bytes, void* stream);
/// What lies there when the stream has come so far. It must not be captured.
std::vector<std::byte> flex_read(const void* data, int64_t bytes, void* stream);
void flex_copy_bytes(const void* from, void* to, int64_t bytes, void* stream);
/// Rounds once to `dtype`, a floating one.
void flex_convert(const float* from, void* to, score_mod::DType dtype, int64_t count, void* stream);
/// out[i] = a[i] / b[i].
void flex_divide(const float* a, const float* b, float* out, int64_t count, void* stream);

}  // namespace fusegrad::cuda
