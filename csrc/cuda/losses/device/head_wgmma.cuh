// WGMMA of head_product.cuh: the instruction names each of its registers, as csrc/cuda/attention/plan/program.cpp
// writes those of attention.
#pragma once

#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

// Registers %i to %(i + 7), and what they are.
#define FUSEGRAD_EIGHT(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define FUSEGRAD_EIGHT_OF(i)                                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// clang-format off
#define FUSEGRAD_HEAD_WGMMA(T, type, transposed_b, flag)                                                        \
  template <>                                                                                                   \
  struct Wgmma<T, 256, false, transposed_b, false> {                                                            \
    static __device__ __forceinline__ void run(float* d, unsigned long long a, unsigned long long b, bool accumulate) { \
      asm volatile(                                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                         \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"                                     \
          FUSEGRAD_EIGHT(0, 1, 2, 3, 4, 5, 6, 7) "," FUSEGRAD_EIGHT(8, 9, 10, 11, 12, 13, 14, 15) ","           \
          FUSEGRAD_EIGHT(16, 17, 18, 19, 20, 21, 22, 23) "," FUSEGRAD_EIGHT(24, 25, 26, 27, 28, 29, 30, 31) "," \
          FUSEGRAD_EIGHT(32, 33, 34, 35, 36, 37, 38, 39) "," FUSEGRAD_EIGHT(40, 41, 42, 43, 44, 45, 46, 47) "," \
          FUSEGRAD_EIGHT(48, 49, 50, 51, 52, 53, 54, 55) "," FUSEGRAD_EIGHT(56, 57, 58, 59, 60, 61, 62, 63) "," \
          FUSEGRAD_EIGHT(64, 65, 66, 67, 68, 69, 70, 71) "," FUSEGRAD_EIGHT(72, 73, 74, 75, 76, 77, 78, 79) "," \
          FUSEGRAD_EIGHT(80, 81, 82, 83, 84, 85, 86, 87) "," FUSEGRAD_EIGHT(88, 89, 90, 91, 92, 93, 94, 95) "," \
          FUSEGRAD_EIGHT(96, 97, 98, 99, 100, 101, 102, 103) ","                                                \
          FUSEGRAD_EIGHT(104, 105, 106, 107, 108, 109, 110, 111) ","                                            \
          FUSEGRAD_EIGHT(112, 113, 114, 115, 116, 117, 118, 119) ","                                            \
          FUSEGRAD_EIGHT(120, 121, 122, 123, 124, 125, 126, 127)                                                \
          "}, %128, %129, p, 1, 1, 0, " flag ";\n}"                                                             \
          : FUSEGRAD_EIGHT_OF(0), FUSEGRAD_EIGHT_OF(8), FUSEGRAD_EIGHT_OF(16), FUSEGRAD_EIGHT_OF(24),           \
            FUSEGRAD_EIGHT_OF(32), FUSEGRAD_EIGHT_OF(40), FUSEGRAD_EIGHT_OF(48), FUSEGRAD_EIGHT_OF(56),         \
            FUSEGRAD_EIGHT_OF(64), FUSEGRAD_EIGHT_OF(72), FUSEGRAD_EIGHT_OF(80), FUSEGRAD_EIGHT_OF(88),         \
            FUSEGRAD_EIGHT_OF(96), FUSEGRAD_EIGHT_OF(104), FUSEGRAD_EIGHT_OF(112), FUSEGRAD_EIGHT_OF(120)       \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                 \
    }                                                                                                           \
  };
// clang-format on

FUSEGRAD_HEAD_WGMMA(BFloat16, "bf16", false, "0")
FUSEGRAD_HEAD_WGMMA(BFloat16, "bf16", true, "1")
FUSEGRAD_HEAD_WGMMA(Float16, "f16", false, "0")
FUSEGRAD_HEAD_WGMMA(Float16, "f16", true, "1")
#undef FUSEGRAD_HEAD_WGMMA
#undef FUSEGRAD_EIGHT_OF
#undef FUSEGRAD_EIGHT

}  // namespace fusegrad::device
