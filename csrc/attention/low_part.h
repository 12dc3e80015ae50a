// Low parts (FlexResults::out_low): a result less the same result rounded to 16 bits, in 8 bits. The unit is a 252nd of
// the distance between numbers of the dtype where the rounded result lies. So a low part is 126 at most: 127 is what
// PyTorch fills new memory with when asked to. cuda/device/low_part.cuh has the same for kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace fusegrad {

/// The unit at a rounded result of bfloat16 or else float16. Infinite or NaN where the result is.
inline float low_unit(float rounded, bool bfloat16) {
  const uint32_t least = (bfloat16 ? 1u : 127u - 14u) << 23;  // the smallest normal number
  const float power = std::bit_cast<float>(std::max(std::bit_cast<uint32_t>(rounded) & 0x7f800000u, least));
  return power * ((bfloat16 ? 0x1p-7f : 0x1p-10f) / 252);
}

/// The number that `rounded`, finite, and its low part are of.
inline float with_low(float rounded, int8_t low, bool bfloat16) {
  return rounded + static_cast<float>(low) * low_unit(rounded, bfloat16);
}

inline int8_t low_part(float exact, float rounded, bool bfloat16) {
  const float units = (exact - rounded) / low_unit(rounded, bfloat16);
  return std::isfinite(units) ? static_cast<int8_t>(std::lrint(std::clamp(units, -126.0f, 126.0f))) : int8_t{0};
}

}  // namespace fusegrad
