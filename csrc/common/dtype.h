// The dtypes of logits, hidden states, queries, keys and values.
#pragma once

#include <cstdint>

namespace fusegrad {

enum class DType : int8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt8 };  // kInt8: low parts alone

}  // namespace fusegrad
