// Rows of logits as 16-byte vectors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fusegrad::device {

template <class T>
__device__ inline uint32_t to_bits(T x) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(x);
  } else {
    return *reinterpret_cast<const unsigned short*>(&x);
  }
}
template <class T>
__device__ inline T from_bits(uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else {
    const auto low = static_cast<unsigned short>(bits);
    return *reinterpret_cast<const T*>(&low);
  }
}

/// kWidth values of T in 32-bit words: 16 bytes, or a single value where two rows do not share their alignment. Words,
/// because the compiler takes an array of 16-bit values apart and then moves each with an instruction of its own.
template <class T, int kWidth>
struct Pack {
  static_assert(kWidth * sizeof(T) == 16);
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kBits = 8 * sizeof(T);
  uint4 words;

  __device__ static Pack load(const T* from) { return {*reinterpret_cast<const uint4*>(from)}; }
  // Spelled out: the compiler splits this store into four, of a word each, in some of the kernels.
  __device__ void store(T* to) const {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  }
  __device__ uint32_t word(int i) const { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }
  __device__ uint32_t& word(int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }
  __device__ T get(int i) const { return from_bits<T>(word(i / kPerWord) >> (i % kPerWord * kBits)); }
  __device__ void set(int i, T x) {
    if constexpr (kPerWord == 1) {
      word(i) = to_bits(x);
    } else {
      const int shift = i % kPerWord * kBits;
      word(i / kPerWord) = (word(i / kPerWord) & ~(0xffffu << shift)) | (to_bits(x) << shift);
    }
  }
};

template <class T>
struct Pack<T, 1> {
  T value;
  __device__ static Pack load(const T* from) { return {*from}; }
  __device__ void store(T* to) const { *to = value; }
  __device__ T get(int) const { return value; }
  __device__ void set(int, T x) { value = x; }
};

/// What stands in for columns outside a row.
template <class T>
__device__ T lowest_pad() {
  return static_cast<T>(__int_as_float(0xff800000));
}

template <class T, int kWidth>
__device__ inline Pack<T, kWidth> filled(T x) {
  Pack<T, kWidth> pack{};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.set(i, x);
  return pack;
}

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }

template <class T, int kWidth>
__device__ inline void unpack(const Pack<T, kWidth>& pack, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (kWidth == 1 || sizeof(T) == 4) {
      x[i] = widen(pack.get(i));
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // A bfloat16 is the upper half of a float.
      x[i] = __uint_as_float(i % 2 == 0 ? pack.word(i / 2) << 16 : pack.word(i / 2) & 0xffff0000u);
    } else {
      const uint32_t bits = pack.word(i / 2);
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&bits));
      x[i] = i % 2 == 0 ? both.x : both.y;
    }
  }
}

template <class T, int kWidth>
__device__ inline Pack<T, kWidth> packed(const float (&x)[kWidth]) {
  Pack<T, kWidth> pack{};
  if constexpr (kWidth == 1 || sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.set(i, static_cast<T>(x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const auto both = __floats2bfloat162_rn(x[i], x[i + 1]);
        pack.word(i / 2) = *reinterpret_cast<const uint32_t*>(&both);
      } else {
        const auto both = __floats2half2_rn(x[i], x[i + 1]);
        pack.word(i / 2) = *reinterpret_cast<const uint32_t*>(&both);
      }
    }
  }
  return pack;
}

/// packs[i] for an index that the compiler does not know: registers cannot be indexed.
template <class P, int kCount>
__device__ inline P chosen(const P (&packs)[kCount], int i) {
  P pack = packs[0];
#pragma unroll
  for (int j = 1; j < kCount; ++j) {
    if (i == j) pack = packs[j];
  }
  return pack;
}

/// The largest of several vectors' values; NaN counts for nothing.
template <class T, int kWidth, int kCount>
__device__ inline float largest_of(const Pack<T, kWidth> (&packs)[kCount]) {
  if constexpr (kWidth == 1 || sizeof(T) == 4) {
    float largest = __int_as_float(0xff800000);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, widen(packs[j].get(i)));
    }
    return largest;
  } else {
    // Two values at a time, before they are widened.
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto pair = [&](int j, int i) {
      const uint32_t bits = packs[j].word(i);
      return *reinterpret_cast<const Pair*>(&bits);
    };
    Pair largest = pair(0, 0);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) largest = __hmax2(largest, pair(j, i));
    }
    return fmaxf(widen(largest.x), widen(largest.y));
  }
}

/// Where vector 0 of a row starts: at a multiple of so many bytes: of lines, so that a warp's accesses fill whole
/// ones, or of units where rows are short.
constexpr int kUnitBytes = 16, kLineBytes = 128;

/// A row as vectors that are aligned in memory: vector v holds columns [v * kWidth - lead, ...). The row's first and
/// last vector may be cut, and those before its first are empty.
template <class T, int kWidth>
struct RowVectors {
  int cols, lead, count;
  int whole_begin, whole_end;  // vectors without a cut

  __device__ RowVectors(const T* row, int64_t columns, int align)
      : cols(static_cast<int>(columns)),
        lead(kWidth == 1
                 ? 0
                 : static_cast<int>(reinterpret_cast<uintptr_t>(row) & (align - 1)) / static_cast<int>(sizeof(T))),
        count((cols + lead + kWidth - 1) / kWidth),
        whole_begin((lead + kWidth - 1) / kWidth),
        whole_end((cols + lead) / kWidth) {}

  __device__ int column(int v) const { return v * kWidth - lead; }
  __device__ bool whole(int v) const { return v >= whole_begin && v < whole_end; }
  __device__ bool has(int c) const { return c >= 0 && c < cols; }

  /// Columns outside the row are `pad`.
  __device__ Pack<T, kWidth> load(const T* row, int v, T pad) const {
    const int c = column(v);
    if (whole(v)) return Pack<T, kWidth>::load(row + c);
    Pack<T, kWidth> pack{};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.set(i, has(c + i) ? row[c + i] : pad);
    return pack;
  }
  __device__ void store(T* row, int v, const Pack<T, kWidth>& pack) const {
    const int c = column(v);
    if (whole(v)) {
      pack.store(row + c);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kWidth; ++i) {  // rare, so little code
      if (has(c + i)) row[c + i] = pack.get(i);
    }
  }
};

}  // namespace fusegrad::device
