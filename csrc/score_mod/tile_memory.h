// What of the evaluator's loops touches captured buffers and their gradients. Part of tile_kernel.cpp, and compiled
// with it once per instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

#include "score_mod/tile_kernels.h"

namespace fusegrad::score_mod {
namespace {  // NOLINT(google-build-namespaces): see functors.h

// --- reads --------------------------------------------------------------------------------------------------

template <class O>
constexpr O kNoOffset = sizeof(O) == 4 ? static_cast<O>(kNoOffset32) : static_cast<O>(kNoOffset64);

// I is at most as wide as O unless the index does not fit; then the comparison is made in 64 bits first.
template <class I, class O>
void offset_of(void* out, const void* index, int64_t lanes, int64_t size, int64_t stride) {
  auto* __restrict o = static_cast<O*>(out);
  const auto* x = static_cast<const I*>(index);
  using Wide = std::conditional_t<sizeof(I) == 4 && sizeof(O) == 4, int32_t, int64_t>;
  const auto n = static_cast<Wide>(size);
  const auto step = static_cast<O>(stride);
  for (int64_t i = 0; i < lanes; ++i) {
    const Wide wrapped = static_cast<Wide>(x[i]) < 0 ? static_cast<Wide>(x[i]) + n : static_cast<Wide>(x[i]);
    const bool inside = wrapped >= 0 && wrapped < n;
    o[i] = inside ? static_cast<O>(static_cast<O>(inside ? wrapped : 0) * step) : kNoOffset<O>;
  }
}

OffsetKernel offset(Lane index, Lane offset) {
  if (offset == Lane::kInt32) return index == Lane::kInt32 ? offset_of<int32_t, int32_t> : offset_of<int64_t, int32_t>;
  return index == Lane::kInt32 ? offset_of<int32_t, int64_t> : offset_of<int64_t, int64_t>;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Boolean {
  uint8_t byte;
};

inline float widened(BFloat16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
// The exponent is moved by a multiplication, which gives subnormals their value too; infinity and NaN are put right.
inline float widened(Float16 x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7FFF) << 13;
  const float scaled = __builtin_bit_cast(float, magnitude) * 0x1p112f;
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t result = (x.bits & 0x7C00) == 0x7C00 ? special : __builtin_bit_cast(uint32_t, scaled);
  return __builtin_bit_cast(float, result | static_cast<uint32_t>(x.bits & 0x8000) << 16);
}
inline uint8_t widened(Boolean x) { return x.byte != 0; }
template <class T>
T widened(T x) {
  return x;
}

template <class O>
bool any_negative(const O* offset, int64_t lanes) {
  O smallest = 0;
  for (int64_t i = 0; i < lanes; ++i) smallest = offset[i] < smallest ? offset[i] : smallest;
  return smallest < 0;
}

// Whether offset[i] == offset[0] + step * i.
template <class O>
bool is_run(const O* offset, int64_t lanes, O step) {
  if (lanes < 2 || offset[lanes - 1] - offset[0] != step * static_cast<O>(lanes - 1)) return lanes == 1;
  O difference = 0;
  for (int64_t i = 1; i < lanes; ++i) difference |= (offset[i] - offset[i - 1]) ^ step;
  return difference == 0;
}

template <class S, class R, class O>
bool gather_of(void* out, const void* data, const void* offset, int64_t lanes) {
  auto* __restrict o = static_cast<R*>(out);
  const auto* d = static_cast<const S*>(data);
  const auto* at = static_cast<const O*>(offset);
  if (at == nullptr) {
    for (int64_t i = 0; i < lanes; ++i) o[i] = static_cast<R>(widened(d[i]));
    return false;
  }
  if (any_negative(at, lanes)) {
    for (int64_t i = 0; i < lanes; ++i) o[i] = at[i] < 0 ? R(0) : static_cast<R>(widened(d[at[i]]));
    return true;
  }
  if (is_run<O>(at, lanes, 1)) {
    for (int64_t i = 0; i < lanes; ++i) o[i] = static_cast<R>(widened(d[at[0] + i]));
  } else {
    for (int64_t i = 0; i < lanes; ++i) o[i] = static_cast<R>(widened(d[at[i]]));
  }
  return false;
}

template <class S, class R>
GatherKernel gather_as(Lane offset) {
  return offset == Lane::kInt32 ? gather_of<S, R, int32_t> : gather_of<S, R, int64_t>;
}
template <class S>
GatherKernel gather_float(Lane out, Lane offset) {
  if (out == Lane::kFloat32) return gather_as<S, float>(offset);
  return out == Lane::kFloat64 ? gather_as<S, double>(offset) : nullptr;
}
template <class S>
GatherKernel gather_integer(Lane out, Lane offset) {
  if (out == Lane::kInt64) return gather_as<S, int64_t>(offset);
  return out == Lane::kInt32 && sizeof(S) <= 4 ? gather_as<S, int32_t>(offset) : nullptr;
}

GatherKernel gather(Storage storage, Lane out, Lane offset) {
  switch (storage) {
    case Storage::kFloat64:
      return gather_float<double>(out, offset);
    case Storage::kFloat32:
      return gather_float<float>(out, offset);
    case Storage::kBFloat16:
      return gather_float<BFloat16>(out, offset);
    case Storage::kFloat16:
      return gather_float<Float16>(out, offset);
    case Storage::kInt64:
      return gather_integer<int64_t>(out, offset);
    case Storage::kInt32:
      return gather_integer<int32_t>(out, offset);
    case Storage::kInt16:
      return gather_integer<int16_t>(out, offset);
    case Storage::kInt8:
      return gather_integer<int8_t>(out, offset);
    case Storage::kUInt8:
      return gather_integer<uint8_t>(out, offset);
    default:
      return out == Lane::kBool ? gather_as<Boolean, uint8_t>(offset) : nullptr;
  }
}

void iota(void* out, Lane lane, int64_t begin, int64_t lanes) {
  if (lane == Lane::kInt32) {
    for (int64_t i = 0; i < lanes; ++i) static_cast<int32_t*>(out)[i] = static_cast<int32_t>(begin + i);
  } else {
    for (int64_t i = 0; i < lanes; ++i) static_cast<int64_t*>(out)[i] = begin + i;
  }
}

// --- sums ---------------------------------------------------------------------------------------------------

template <class T>
void select(T* out, const T* x, const uint8_t* mask, T other, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) out[i] = mask[i] != 0 ? x[i] : other;
}

template <class T>
void fill(T* out, T value, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) out[i] = value;
}

// Several sums side by side, in a fixed order, so that the loop is vectorised without licence to reorder.
template <class T>
double sum(const T* x, int64_t lanes) {
  constexpr int kSums = 16;
  T part[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= lanes; i += kSums) {
    for (int j = 0; j < kSums; ++j) part[j] += x[i + j];
  }
  double total = 0;
  for (; i < lanes; ++i) total += static_cast<double>(x[i]);
  for (int j = 0; j < kSums; ++j) total += static_cast<double>(part[j]);
  return total;
}

template <class T>
void add(T* __restrict out, const T* x, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) out[i] += x[i];
}

template <class Sum, class T, class O>
bool scatter_to(Sum* __restrict sum, const O* offset, const T* x, int64_t lanes) {
  if (any_negative(offset, lanes)) {
    for (int64_t i = 0; i < lanes; ++i) {
      if (offset[i] >= 0) sum[offset[i]] += static_cast<Sum>(x[i]);
    }
    return true;
  }
  if (is_run<O>(offset, lanes, 1)) {
    for (int64_t i = 0; i < lanes; ++i) sum[offset[0] + i] += static_cast<Sum>(x[i]);
  } else if (is_run<O>(offset, lanes, -1)) {
    for (int64_t i = 0; i < lanes; ++i) sum[offset[0] - i] += static_cast<Sum>(x[i]);
  } else {
    for (int64_t i = 0; i < lanes; ++i) sum[offset[i]] += static_cast<Sum>(x[i]);
  }
  return false;
}

template <class T>
bool scatter(T* sum, double* wide_sum, const void* offset, Lane offset_lane, const T* x, int64_t lanes) {
  if (offset_lane == Lane::kInt32) {
    const auto* at = static_cast<const int32_t*>(offset);
    return sum != nullptr ? scatter_to(sum, at, x, lanes) : scatter_to(wide_sum, at, x, lanes);
  }
  const auto* at = static_cast<const int64_t*>(offset);
  return sum != nullptr ? scatter_to(sum, at, x, lanes) : scatter_to(wide_sum, at, x, lanes);
}

template <class T>
constexpr ScatterKernels<T> kScatterKernels{select<T>, fill<T>, sum<T>, add<T>, scatter<T>};

}  // namespace
}  // namespace fusegrad::score_mod
