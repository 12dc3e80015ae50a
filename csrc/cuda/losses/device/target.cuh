// The targets of a row, and the options as the kernels use them. losses/row_kernels.h has the formulas.
//
// Exponentials are base 2. With k = scale * log2(e), (z[c] - m) * log2(e) is x[c] * k - m2: one fused multiply-add
// whose result is exact to float32 whatever the offset of the logits, because m2 is itself a float.
#pragma once

#include <cstdint>

#include "cuda/device/vector.cuh"
#include "losses/row_kernels.h"

namespace fusegrad::device {

constexpr float kLog2E = 1.4426950408889634f;
// The inverse of the float kLog2E, not of log2(e): base-2 and natural values convert back and forth exactly.
constexpr double kInverseLog2E = 1.0 / static_cast<double>(kLog2E);

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// log2 of a positive float, to a few 1e-8: the exponent, which would cost the result its last bits, is added in
/// double.
__device__ inline double log2_exact(float x) {
  if (!(x > 0.f && x <= 3e38f)) return log2f(x);
  const int exponent = (__float_as_int(x) - 0x3f3504f3) >> 23;  // leaves a factor in [sqrt(1/2), sqrt(2))
  const float factor = __int_as_float(__float_as_int(x) - (exponent << 23));
  return static_cast<double>(exponent) + static_cast<double>(log2f(factor));
}
__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }

/// A LogitTransform as the kernels use it.
struct LogitConstants {
  float scale, cap, inverse_cap;
  float k;  // scale * log2(e)

  explicit LogitConstants(const LogitTransform& transform)
      : scale(static_cast<float>(transform.scale)),
        cap(static_cast<float>(transform.cap)),
        inverse_cap(transform.cap == 0.0 ? 0.f : static_cast<float>(1.0 / transform.cap)),
        k(static_cast<float>(transform.scale) * kLog2E) {}
};

/// The options as the kernels use them, computed once on the host.
struct Constants : LogitConstants {
  float uniform;  // smoothing / V
  float keep;     // 1 - smoothing
  float z_loss;

  Constants(const RowTargets& targets, const LogitTransform& transform, double z_loss, int64_t vocab)
      : LogitConstants(transform),
        uniform(static_cast<float>(targets.smoothing / static_cast<double>(vocab))),
        keep(static_cast<float>(1.0 - targets.smoothing)),
        z_loss(static_cast<float>(z_loss)) {}
};

/// tanh to the accuracy of the logits' dtype: 1 - 2 / (1 + e^2x) is absolute to 1e-7, which low precision cannot see.
template <class T>
__device__ inline float tanh_for(float x) {
  return 1.f - __fdividef(2.f, 1.f + exp2_fast(fminf(2.f * kLog2E * x, 80.f)));
}
template <>
__device__ inline float tanh_for<float>(float x) {
  return tanhf(x);
}

/// 2^x and e^x are 0 in float32 from here down.
constexpr float kVanishes = -256.f;

/// e^(z - lse - low), to the accuracy of the logits' dtype. z - lse first: exact for large offsets, where lse * log2(e)
/// would not be.
template <class T>
__device__ inline float probability(float z, float lse, float low) {
  return exp2_fast(fmaf(z - lse, kLog2E, -low * kLog2E));
}
/// float32 can see how the difference is rounded: the rest of it comes as a factor.
template <>
__device__ inline float probability<float>(float z, float lse, float low) {
  const float d = z - lse, lost = d - z, rest = (z - (d - lost)) - (lse + lost);
  const float p = expf(d);
  return d < -110.f ? 0.f : fmaf(p, rest - low, p);  // at -inf the rest is NaN
}

/// A stored logit as x with z * log2(e) = x * k, and dz/dx / scale: with the softcap and without.
struct Logit {
  float x, k, slope;

  template <class T>
  __device__ static Logit capped(const LogitConstants& constants, float x) {
    const float t = tanh_for<T>(x * constants.scale * constants.inverse_cap);
    return {constants.cap * t, kLog2E, 1.f - t * t};
  }
  __device__ static Logit plain(const LogitConstants& constants, float x) { return {x, constants.k, 1.f}; }
};

/// kWidth floats from `from` on; those at and after `count` are 0.
template <int kWidth>
__device__ inline void load_floats(const float* from, float (&x)[kWidth], int count) {
  if constexpr (kWidth % 4 == 0) {
    if (count >= kWidth && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = i < count ? from[i] : 0.f;
}

/// A row's target.
template <class T>
struct RowTarget {
  int index = -1;        // class index; -1 for probabilities, and where there is none to read at
  bool kept = true;      // not ignored
  bool in_range = true;  // false: the row's loss and gradient are NaN
  float token_weight = 1.f;
  float at_index = 0.f;  // a[index] without its share of smoothing
  const float* class_weight;
  const T* low = nullptr;       // probabilities in the logits' dtype,
  const float* full = nullptr;  // or in float32

  __device__ RowTarget(const RowTargets& t, const Constants& constants, int64_t row, int64_t vocab)
      : class_weight(static_cast<const float*>(t.class_weight)) {
    if (t.token_weight != nullptr) token_weight = static_cast<const float*>(t.token_weight)[row];
    if (t.index != nullptr) {
      const int64_t y =
          t.index_is_int32 ? static_cast<const int32_t*>(t.index)[row] : static_cast<const int64_t*>(t.index)[row];
      kept = y != t.ignore_index;
      in_range = !kept || (y >= 0 && y < vocab);
      if (kept && in_range) {
        index = static_cast<int>(y);
        at_index = constants.keep * (class_weight != nullptr ? class_weight[y] : 1.f);
      }
    } else if (t.probability_is_acc) {
      full = static_cast<const float*>(t.probability) + row * t.probability_stride;
    } else {
      low = static_cast<const T*>(t.probability) + row * t.probability_stride;
    }
  }

  /// a[first .. first + kWidth) of dense targets, without at_index, and 0 outside columns [0, cols). The row's pointers
  /// start at column `offset` of the vocabulary.
  template <int kWidth>
  __device__ void coefficients(const Constants& constants, int first, int cols, int offset, float (&a)[kWidth]) const {
    if (first < 0) {  // the first vector of a row that starts inside a 16-byte unit
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        float one[1] = {0.f};
        if (first + i >= 0) coefficients(constants, first + i, cols, offset, one);
        a[i] = one[0];
      }
      return;
    }
    const int count = cols - first;
    if (full != nullptr) {
      load_floats(full + first, a, count);
    } else if (low != nullptr) {
      const T* from = low + first;
      Pack<T, kWidth> pack{};
      if (count >= kWidth && reinterpret_cast<uintptr_t>(from) % (kWidth * sizeof(T)) == 0) {
        pack = Pack<T, kWidth>::load(from);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (i < count) pack.set(i, from[i]);
        }
      }
      unpack(pack, a);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) a[i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) a[i] = i < count ? fmaf(a[i], constants.keep, constants.uniform) : 0.f;
    if (class_weight != nullptr) {
      float weight[kWidth];
      load_floats(class_weight + offset + first, weight, count);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) a[i] *= weight[i];
    }
  }

  /// A of sparse targets.
  __device__ float sparse_mass(const Constants& constants, int64_t vocab) const {
    return at_index + constants.uniform * static_cast<float>(vocab);
  }
};

}  // namespace fusegrad::device
