// Low parts (out_low): a result less the same result rounded to 16 bits, in 8 bits. The unit is a 252nd of the distance
// between numbers of the dtype where the rounded result lies. attention/low_part.h has the same for the CPU.
#pragma once

#include "cuda/device/mma.cuh"
#include "cuda/device/tensor.cuh"

namespace fusegrad::device {

template <class T>
struct LowPart {
  static constexpr int kFraction = kSame<T, BFloat16> ? 7 : 10;                     // bits
  static constexpr unsigned kLeast = (kSame<T, BFloat16> ? 1u : 127u - 14u) << 23;  // the smallest normal number
  static constexpr float kUnits = 252.0f * (1 << kFraction);                        // in the power of 2 below a number

  /// The power of 2 below a rounded number, in a float's bits.
  static __device__ __forceinline__ unsigned power(float near) {
    return max(__float_as_uint(near) & 0x7f800000u, kLeast);
  }
  /// In the lowest byte.
  static __device__ __forceinline__ unsigned of(float x) {
    const float near = rounded<T>(x);
    const float inverse = __uint_as_float(0x7f000000u - power(near));
    constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer, its last bits
    return __float_as_uint(fmaf((x - near) * inverse, kUnits, kInteger));
  }
};

template <class T>
__device__ __forceinline__ void store_low(signed char* to, float x) {
  if constexpr (!kSame<T, float>) *to = static_cast<signed char>(LowPart<T>::of(x));
}

/// Whether a tensor's rows of `cols` columns are eights of elements side by side, each at a multiple of `bytes`.
__device__ __forceinline__ bool has_eights(const FlexTensor& t, int cols, int bytes) {
  return t.col_stride == 1 && cols % 8 == 0 && (t.row_stride | t.head_stride | t.batch_stride) % 8 == 0 &&
         reinterpret_cast<unsigned long long>(t.data) % bytes == 0;
}

/// Transposes four lanes' four words: lane i gets word i of all four.
__device__ __forceinline__ void transpose_in_fours(unsigned (&words)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const unsigned got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + bit], bit);
      words[i] = upper ? got : words[i];
      words[i + bit] = upper ? words[i + bit] : got;
    }
  }
}

// Predicated: behind a branch the shuffles of one block would wait for those of the block before.
__device__ __forceinline__ void store_if(bool there, void* to, const uint2& words) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n@there st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to),
               "r"(words.x), "r"(words.y), "r"(static_cast<int>(there))
               : "memory");
}
/// Stores the low parts of a warp's 16 rows of accumulators to a [batch, head, row, column] tensor of `rows` rows and
/// `cols` columns. `first`, `factor`: the thread's first row, and what its rows first and first + 8 are multiplied by.
template <class T, int kBlocks>
__device__ __forceinline__ void store_low_rows(const FlexTensor& to, int b, int h, int first, int rows, int cols,
                                               const float (&x)[kBlocks][4], const float (&factor)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  signed char* head = static_cast<signed char*>(to.data) + b * to.batch_stride + h * to.head_stride;
  const bool vectors = has_eights(to, cols, 8);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = first + 8 * r;
    signed char* row = head + at * to.row_stride;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 8) {
      unsigned words[4] = {};
#pragma unroll
      for (int n = block; n < min(block + 8, kBlocks); ++n) {
        const unsigned pair = __byte_perm(LowPart<T>::of(x[n][2 * r] * factor[r]),
                                          LowPart<T>::of(x[n][2 * r + 1] * factor[r]), n % 2 == 0 ? 0x7740 : 0x4077);
        unsigned& word = words[n / 2 % 4];
        word = n % 2 == 0 ? pair : __byte_perm(word, pair, 0x7610);
      }
      transpose_in_fours(words);
      // 8 columns of a block, then those of the next one.
      const uint2 eight[2] = {{__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410)},
                              {__byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)}};
      const int col = block * 8 + lane % 4 * 16;
#pragma unroll
      for (int k = 0; k < 2; ++k) store_if(vectors && at < rows && col + k * 8 < cols, row + col + k * 8, eight[k]);
      if (vectors || at >= rows) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        unsigned long long bytes = static_cast<unsigned long long>(eight[k].y) << 32 | eight[k].x;
#pragma unroll 1
        for (int c = col + k * 8; c < min(col + k * 8 + 8, cols); ++c, bytes >>= 8)
          row[c * to.col_stride] = static_cast<signed char>(bytes);
      }
    }
  }
}

}  // namespace fusegrad::device
