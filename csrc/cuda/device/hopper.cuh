// What sm_90a alone has: products of a warpgroup (wgmma) with operands in shared memory, tiles that the copy engine
// brings (TMA), and barriers between its copies and the warps (mbarrier). For BFloat16 and Float16.
//
// Tiles in shared memory are chunks of 64 columns, one after the other, each of rows of 128 bytes whose 16-byte parts
// the copy engine has swizzled; they begin at multiples of 1024 bytes.
#pragma once

#include "cuda/device/flex_arguments.cuh"
#include "cuda/device/mma.cuh"

namespace fusegrad::device {

constexpr int kWarpgroup = 128;
constexpr int kChunk = 64;        // columns
constexpr int kChunkBytes = 128;  // of a row

// --- barriers -----------------------------------------------------------------------------------------------

/// An mbarrier in shared memory, whose phases alternate: full and empty of a stage of a pipeline.
struct Barrier {
  static __device__ __forceinline__ void init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  }
  /// After the inits, by the thread that made them; then __syncthreads.
  static __device__ __forceinline__ void fence_inits() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  static __device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  }
  static __device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
  /// Until the phase of this parity is over.
  static __device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
};

/// Hardware barrier `id` (1 to 15; 0 is __syncthreads) of so many threads, those that only arrive included.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// --- copies -------------------------------------------------------------------------------------------------

/// A box of a [batch, head, row, column] tensor, counted at `barrier`. Beyond the tensor there are zeros.
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap& from, unsigned barrier, int col, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&from), "r"(barrier), "r"(col), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
/// All chunks of a tile of kRows rows and kCols columns, kRows * kCols * 2 bytes.
template <int kRows, int kCols>
__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap& from, unsigned barrier, int row, int head,
                                          int batch) {
  Barrier::expect(barrier, kRows * kCols * 2);
#pragma unroll
  for (int c = 0; c < kCols / kChunk; ++c)
    copy_box(to + c * kRows * kChunkBytes, from, barrier, c * kChunk, row, head, batch);
}

// --- products -----------------------------------------------------------------------------------------------

/// Of a matrix of 128-byte rows, swizzled. `chunk_stride`: bytes from one chunk of columns to the next, for operands
/// whose rows are the common dimension; others ignore it.
__device__ __forceinline__ unsigned long long descriptor(unsigned address, int chunk_stride) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr int kEightRows = 8 * kChunkBytes;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(chunk_stride >> 4) << 16 |
         static_cast<unsigned long long>(kEightRows >> 4) << 32 | kSwizzle128;
}
/// The same matrix `bytes` further on.
__device__ __forceinline__ unsigned long long advanced(unsigned long long descriptor, int bytes) {
  return descriptor + static_cast<unsigned long long>(bytes >> 4);
}
/// From an operand that lies as [row][common dimension], in tiles of kRows rows, to its step k (16 columns).
template <int kRows>
__device__ __forceinline__ constexpr int step_bytes(int k) {
  return k / 4 * kRows * kChunkBytes + k % 4 * 32;
}

/// d += a * b of a warpgroup, 64 rows by kCols columns, 16 of the common dimension. Its specialisations are generated
/// with the kernel (csrc/cuda/flex_program.cpp), since the instruction names each register:
///   static void run(float* d, a, unsigned long long b, bool accumulate)
/// with a: four words of operand A, or its descriptor. kTransposed: b lies as [common dimension][column].
template <class T, int kCols, bool kRegisterA, bool kTransposed>
struct Wgmma;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving reads and writes of registers that products in flight use.
template <int kCount>
__device__ __forceinline__ void pin(float* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

}  // namespace fusegrad::device
