// Tiles in shared memory and tensor-core products on them for every GPU from sm_80 on (mma.sync, ldmatrix, cp.async),
// for BFloat16, Float16 and float. NVRTC compiles it too: it includes only embedded headers.
//
// Lane g = lane / 4 is a row of a fragment, t = lane % 4 a pair of its columns. An accumulator C of 16 x 8 holds (g,
// 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/score_mod.cuh"

namespace fusegrad::device {

using score_mod::BFloat16;
using score_mod::Float16;

constexpr int kLanes = 32;
#define FUSEGRAD_INFINITY __int_as_float(0x7f800000)

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// --- copies -------------------------------------------------------------------------------------------------

/// The first `bytes` of 16, and zeros behind them; without any the source is not read.
__device__ __forceinline__ void copy_async_some(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// 16 bytes, or zeros where not `there`.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool there) {
  copy_async_some(to, from, there ? 16 : 0);
}
/// 8 bytes, or zeros.
__device__ __forceinline__ void copy_async_pair(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}
/// sm_90: copies bytes as they lie, a multiple of 16 at such places, and has them counted at an mbarrier.
__device__ __forceinline__ void copy_counted(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Arrives at an mbarrier once all copies that the thread has begun are there; the mbarrier counts it as any arrival.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all but the last kPending groups.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// kRows rows of kCols elements in shared memory. A row takes an odd multiple of 16 bytes, so that neither eight rows
/// nor the four of a transposed read of floats meet in a bank.
template <class T, int kRows, int kCols>
struct Tile {
  using Element = T;
  static_assert(kCols * sizeof(T) % 32 == 0);
  static constexpr int kStride = kCols * static_cast<int>(sizeof(T)) + 16;  // bytes
  static constexpr int kBytes = kRows * kStride;
  static constexpr int kVectors = kCols * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kGroup = kVectors & -kVectors;  // a power of two that divides them

  /// Copies from a matrix whose rows begin at multiples of 16 bytes: its first `rows` rows, `vectors` times 16 bytes of
  /// each; the rest becomes zeros.
  template <int kThreads>
  static __device__ __forceinline__ void load(unsigned to, const char* from, long long stride, int rows, int vectors,
                                              int thread) {
    if constexpr (kThreads % kGroup == 0 && (kGroup >= 4 || kGroup == kVectors)) {
      // A thread stays in its columns: one pointer, which walks.
      constexpr int kStep = kThreads / kGroup;
      const int first = thread / kGroup, vector = thread % kGroup;
      from += first * stride + vector * 16;
      to += first * kStride + vector * 16;
#pragma unroll
      for (int row = 0; row < kRows; row += kStep) {
#pragma unroll
        for (int more = 0; more < kVectors; more += kGroup) {
          if (kRows % kStep == 0 || first + row < kRows) {
            copy_async(to + row * kStride + more * 16, from + more * 16, vector + more < vectors && first + row < rows);
          }
        }
        from += kStep * stride;
      }
    } else {
#pragma unroll 4
      for (int i = thread; i < kRows * kVectors; i += kThreads) {
        const int row = i / kVectors, vector = i % kVectors;
        copy_async(to + row * kStride + vector * 16, from + row * stride + vector * 16, row < rows && vector < vectors);
      }
    }
  }
};

// --- fragments ----------------------------------------------------------------------------------------------

/// Called by all lanes of a warp: a block of 8 x 8 elements of 16 bits, two of which are a lane's word, transposed.
__device__ __forceinline__ unsigned transposed(unsigned word) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
  return word;
}
/// Where byte `byte` of a row of a tile lies, of rows that are `stride` bytes apart. SwizzledRows (hopper.cuh) can take
/// the place of a stride.
__device__ __forceinline__ constexpr int place_in(int stride, int row, int byte) { return row * stride + byte; }

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ unsigned load_word(unsigned address) {
  unsigned word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
/// An element, or 16 bytes.
template <class X>
__device__ __forceinline__ X load_shared(unsigned address) {
  X x;
  if constexpr (sizeof(X) == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
  } else if constexpr (sizeof(X) == 4) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x.bits) : "r"(address) : "memory");
  }
  return x;
}

/// Two numbers in the order of memory.
__device__ __forceinline__ unsigned pack(BFloat16, float first, float second) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
__device__ __forceinline__ unsigned pack(Float16, float first, float second) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}

/// The products of a type. A step takes kDepth of the common dimension, 32 bytes of a row. Operands are fragments of
/// four words: A of 16 rows, B of 16 columns. Those that are read transposed, and A made of accumulators, have the
/// common dimension of floats in another order than those read as they lie: only like goes with like.
///
/// A step takes columns 8 * kHalf on of B. kSwapped: A and B are the other way round than in another product that must
/// come to the same bits.
template <int kParts>
struct Parts {
  unsigned word[kParts][4];
};
template <class T, bool kSplit = false>
struct Mma {
  static constexpr int kDepth = 16;
  using Factor = Parts<1>;

  static __device__ __forceinline__ Factor factor(const unsigned (&word)[4]) {
    return {{{word[0], word[1], word[2], word[3]}}};
  }
  template <int kHalf, bool kSwapped = false>
  static __device__ __forceinline__ void step(float (&c)[4], const Factor& x, const Factor& y) {
    const unsigned (&a)[4] = x.word[0];
    const unsigned b0 = y.word[0][2 * kHalf], b1 = y.word[0][2 * kHalf + 1];
    if constexpr (kSame<T, BFloat16>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }
  /// A[k, m] from memory where it lies as [k][m].
  static __device__ __forceinline__ void load_a_transposed(unsigned (&a)[4], unsigned tile, int stride, int k, int m,
                                                           int lane) {
    load_matrices_transposed(a, tile + (k + lane % 8 + lane / 16 * 8) * stride + (m + lane / 8 % 2 * 8) * 2);
  }
  template <class Rows>
  static __device__ __forceinline__ void load_b_transposed(unsigned (&b)[4], unsigned tile, Rows rows, int k, int n,
                                                           int lane) {
    load_matrices_transposed(b, tile + place_in(rows, k + lane % 16, (n + lane / 16 * 8) * 2));
  }
};

/// Products in TF32. kSplit: each number as a sum of three, and six products, for float32's accuracy.
template <bool kSplit>
struct Mma<float, kSplit> {
  static constexpr int kDepth = 8;
  using Factor = Parts<kSplit ? 3 : 1>;

  // Tensor cores cut off what they add up, they do not round. So the high parts have 8 bits, of which a step's sum is
  // exact; what is cut off the sum of the others lies beyond float32; and the steps are added as float32 is.
  static __device__ __forceinline__ Factor factor(const unsigned (&word)[4]) {
    Factor result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = __uint_as_float(word[i]);
      if constexpr (kSplit) {
        result.word[0][i] = word[i] & 0xffff0000;
        const float rest = x - __uint_as_float(result.word[0][i]);
        result.word[1][i] = round(rest);
        result.word[2][i] = __float_as_uint(rest - __uint_as_float(result.word[1][i]));
      } else {
        result.word[0][i] = round(x);
      }
    }
    return result;
  }
  template <int kHalf, bool kSwapped = false>
  static __device__ __forceinline__ void step(float (&c)[4], const Factor& a, const Factor& b) {
    if constexpr (kSplit) {
      float sum[4] = {}, rest[4] = {};
      constexpr int kFirst[] = {kSwapped ? 0 : 2, kSwapped ? 2 : 0, 1, kSwapped ? 0 : 1, kSwapped ? 1 : 0};
      constexpr int kSecond[] = {kSwapped ? 2 : 0, kSwapped ? 0 : 2, 1, kSwapped ? 1 : 0, kSwapped ? 0 : 1};
#pragma unroll
      for (int i = 0; i < 5; ++i) product(rest, a.word[kFirst[i]], b.word[kSecond[i]] + 2 * kHalf);
      product(sum, a.word[0], b.word[0] + 2 * kHalf);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += sum[i] + rest[i];
    } else {
      product(c, a.word[0], b.word[0] + 2 * kHalf);
    }
  }
  static __device__ __forceinline__ void load_a_transposed(unsigned (&a)[4], unsigned tile, int stride, int k, int m,
                                                           int lane) {
    const unsigned at = tile + (k + lane % 4 * 2) * stride + (m + lane / 4) * 4;
    a[0] = load_word(at);
    a[1] = load_word(at + 32);
    a[2] = load_word(at + stride);
    a[3] = load_word(at + stride + 32);
  }
  static __device__ __forceinline__ void load_b_transposed(unsigned (&b)[4], unsigned tile, int stride, int k, int n,
                                                           int lane) {
    const unsigned at = tile + (k + lane % 4 * 2) * stride + (n + lane / 4) * 4;
    b[0] = load_word(at);
    b[1] = load_word(at + stride);
    b[2] = load_word(at + 32);
    b[3] = load_word(at + stride + 32);
  }

 private:
  static __device__ __forceinline__ unsigned round(float x) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
  }
  static __device__ __forceinline__ void product(float (&c)[4], const unsigned* a, const unsigned* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

/// A[m, k] where it lies as [m][k]: step `step` of the common dimension, rows from m on.
__device__ __forceinline__ void load_a(unsigned (&a)[4], unsigned tile, int stride, int m, int step, int lane) {
  load_matrices(a, tile + (m + lane % 16) * stride + step * 32 + lane / 16 * 16);
}
/// B[k, n] where it lies as [n][k]: words 0 and 1 are columns n to n + 7, words 2 and 3 the next eight.
template <class Rows>
__device__ __forceinline__ void load_b(unsigned (&b)[4], unsigned tile, Rows rows, int n, int step, int lane) {
  load_matrices(b, tile + place_in(rows, n + lane % 8 + lane / 16 * 8, step * 32 + lane / 8 % 2 * 16));
}

/// Words that an accumulator of 16 x 8 takes as operand A: two accumulators make a step of 16-bit numbers, one a step
/// of floats.
template <class T>
__device__ __forceinline__ void put_operand(unsigned* words, const float (&c)[4]) {
  if constexpr (sizeof(T) == 2) {
    words[0] = pack(T{}, c[0], c[1]);
    words[1] = pack(T{}, c[2], c[3]);
  } else {
    words[0] = __float_as_uint(c[0]);
    words[1] = __float_as_uint(c[2]);
    words[2] = __float_as_uint(c[1]);
    words[3] = __float_as_uint(c[3]);
  }
}
/// How far loops over the steps of a product are unrolled: a step of floats is many instructions, and all of them in a
/// row take seconds to compile.
template <class T>
constexpr int kUnrolledSteps = sizeof(T) == 2 ? 64 : 2;

template <class T>
constexpr int kOperandWords = sizeof(T) == 2 ? 2 : 4;

/// A fragment of two words or four (kOperandWords) back into shared memory where it lies as [m][k]: operand A of rows
/// m to m + 15, accumulator `block` of 8 columns.
template <class T>
__device__ __forceinline__ void store_operand(unsigned tile, int stride, int m, int block, const unsigned* words,
                                              int lane) {
  const unsigned at = tile + (m + lane / 4) * stride + block * 8 * static_cast<int>(sizeof(T));
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + lane % 4 * 4), "r"(words[0]) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 8 * stride + lane % 4 * 4), "r"(words[1]) : "memory");
  } else {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + lane % 4 * 8), "r"(words[0]), "r"(words[2]) : "memory");
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + 8 * stride + lane % 4 * 8), "r"(words[1]), "r"(words[3])
                 : "memory");
  }
}

// --- products of a warp -------------------------------------------------------------------------------------

/// Keeps the compiler from loading ahead: split floats would spill.
template <bool kSplit>
__device__ __forceinline__ void keep_order() {
  if constexpr (kSplit) __syncwarp();
}

/// c += the rows of a from `a_row` on, 16 for each kBlocksM, by those of b from `b_row` on, 8 for each kBlocksN, over
/// kCommon columns; both lie as [row][column].
template <class T, bool kSplit, int kCommon, bool kSwapped = false, int kBlocksM, int kBlocksN, class Rows>
__device__ __forceinline__ void multiply_rows(float (&c)[kBlocksM][kBlocksN][4], unsigned a, int a_stride, int a_row,
                                              unsigned b, Rows b_rows, int b_row, int lane) {
  using Product = Mma<T, kSplit>;
#pragma unroll kUnrolledSteps < T>
  for (int k = 0; k < kCommon / Product::kDepth; ++k) {
    typename Product::Factor row[kBlocksM];
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      unsigned words[4];
      load_a(words, a, a_stride, a_row + m * 16, k, lane);
      row[m] = Product::factor(words);
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; n += 2) {
      unsigned col[4];
      keep_order<kSplit>();
      load_b(col, b, b_rows, b_row + n * 8, k, lane);
      const auto cols = Product::factor(col);
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        Product::template step<0, kSwapped>(c[m][n], row[m], cols);
        Product::template step<1, kSwapped>(c[m][n + 1], row[m], cols);
      }
    }
  }
}

/// c += a * b over kSteps steps of 16-bit elements: rows(words, step, block) and cols(words, step, block) load operands
/// of 16 rows and of 16 columns. Columns are loaded a block ahead of their products: where accumulators take nearly all
/// registers, compilers load into the same ones again and again, and wait each time. kBuffers: registers for so many
/// steps' rows; of small heads one of them leaves more for the rest.
template <class T, int kSteps, int kBuffers, int kBlocksM, int kBlocksN, class Rows, class Cols>
__device__ __forceinline__ void multiply_ahead(float (&c)[kBlocksM][kBlocksN][4], const Rows& rows, const Cols& cols) {
  using Product = Mma<T>;
  constexpr int kEach = kBlocksN / 2, kAll = kSteps * kEach;
  unsigned row[kBuffers][kBlocksM][4], col[2][4];
  const auto load_rows = [&](int k) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) rows(row[k % kBuffers][m], k, m);
  };
  cols(col[0], 0, 0);
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    const int k = i / kEach, n = i % kEach, next = i + 1;
    if (n == 0) load_rows(k);
    if (next < kAll) cols(col[next % 2], next / kEach, next % kEach);
    const auto factor = Product::factor(col[i % 2]);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      Product::template step<0>(c[m][2 * n], Product::factor(row[k % kBuffers][m]), factor);
      Product::template step<1>(c[m][2 * n + 1], Product::factor(row[k % kBuffers][m]), factor);
    }
  }
}

/// c += a * b over kSteps steps, for blocks of 16 rows and of 16 columns: row(words, step, block) and
/// col(words, step, block) load operands, there(block) says which columns the warp has. kAhead, of 16-bit elements: a
/// step's operands are loaded before the products of the step before it.
template <class T, bool kSplit, int kSteps, int kUnroll, bool kSwapped, bool kAhead, int kBlocksM, int kBlocksN,
          class Row, class Col, class There>
__device__ __forceinline__ void multiply_loaded(float (&c)[kBlocksM][kBlocksN][2][4], const Row& row, const Col& col,
                                                const There& there) {
  using Product = Mma<T, kSplit>;
  if constexpr (kAhead) {
    unsigned rows[2][kBlocksM][4], cols[2][kBlocksN][4];
    const auto load = [&](int k) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) row(rows[k % 2][m], k, m);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        if (!there(n)) break;
        col(cols[k % 2][n], k, n);
      }
    };
    load(0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k + 1 < kSteps) load(k + 1);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        if (!there(n)) break;
        const auto factor = Product::factor(cols[k % 2][n]);
#pragma unroll
        for (int m = 0; m < kBlocksM; ++m) {
          Product::template step<0, kSwapped>(c[m][n][0], Product::factor(rows[k % 2][m]), factor);
          Product::template step<1, kSwapped>(c[m][n][1], Product::factor(rows[k % 2][m]), factor);
        }
      }
    }
  } else {
#pragma unroll kUnroll
    for (int k = 0; k < kSteps; ++k) {
      typename Product::Factor rows[kBlocksM];
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        unsigned words[4];
        row(words, k, m);
        rows[m] = Product::factor(words);
      }
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        if (!there(n)) break;
        unsigned words[4];
        keep_order<kSplit>();
        col(words, k, n);
        const auto factor = Product::factor(words);
#pragma unroll
        for (int m = 0; m < kBlocksM; ++m) {
          Product::template step<0, kSwapped>(c[m][n][0], rows[m], factor);
          Product::template step<1, kSwapped>(c[m][n][1], rows[m], factor);
        }
      }
    }
  }
}

/// c += p * b, where p is made of accumulators, and b lies as [common dimension][column].
template <class T, bool kSplit, int kBlocksM, int kBlocksN, int kBlocksK, class Rows>
__device__ __forceinline__ void multiply_accumulators(float (&c)[kBlocksM][kBlocksN][4],
                                                      const float (&p)[kBlocksM][kBlocksK][4], unsigned b, Rows b_rows,
                                                      int lane) {
  using Product = Mma<T, kSplit>;
  constexpr int kBlocks = Product::kDepth / 8;  // accumulators of a step
#pragma unroll
  for (int k = 0; k < kBlocksK / kBlocks; ++k) {
    typename Product::Factor a[kBlocksM];
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) put_operand<T>(words + i * kOperandWords<T>, p[m][k * kBlocks + i]);
      a[m] = Product::factor(words);
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; n += 2) {
      unsigned col[4];
      keep_order<kSplit>();
      Product::load_b_transposed(col, b, b_rows, k * Product::kDepth, n * 8, lane);
      const auto cols = Product::factor(col);
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        Product::template step<0>(c[m][n], a[m], cols);
        Product::template step<1>(c[m][n + 1], a[m], cols);
      }
    }
  }
}

// --- numbers ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float power_of_two(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// x rounded to T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (kSame<T, float>) {
    return x;
  } else {
    return score_mod::from_bits(T{static_cast<unsigned short>(pack(T{}, x, 0.0f))});
  }
}
template <class T>
__device__ __forceinline__ void store(T* to, float x) {
  if constexpr (kSame<T, float>) {
    *to = x;
  } else {
    to->bits = static_cast<unsigned short>(pack(T{}, x, 0.0f));
  }
}

/// Two neighbours in memory, at a multiple of 8 bytes.
__device__ __forceinline__ void add_pair(float* to, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
#else
  atomicAdd(to, first);
  atomicAdd(to + 1, second);
#endif
}

/// Reduce over the four lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
  x = score_mod::maximum(x, __shfl_xor_sync(~0u, x, 1));
  return score_mod::maximum(x, __shfl_xor_sync(~0u, x, 2));
}

}  // namespace fusegrad::device
