// Building blocks of sm_90a kernels on BFloat16 and Float16: WGMMA with operands in shared memory, TMA copies,
// mbarriers between copies and warps, named barriers, and the registers of warp-specialized CTAs.
//
// A tile in shared memory is a sequence of chunks of 64 columns. A chunk's rows have 128 bytes, whose 16-byte parts TMA
// swizzles; tiles begin at multiples of 1024 bytes. Where the columns are no multiple of 64, the last chunk has zeros
// behind them, which products leave out. The chunks of a narrow tile have 32 columns, so their rows 64 bytes
// (kNarrowBytes), and a swizzle of their own.
#pragma once

#include "cuda/device/low_part.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/tensor.cuh"

namespace fusegrad::device {

constexpr int kWarpgroup = 128;
constexpr int kChunk = 64;        // columns
constexpr int kChunkBytes = 128;  // of a row
constexpr int kNarrowBytes = 64;  // of a row of a narrow tile
constexpr int chunks_of(int cols, int row_bytes = kChunkBytes) { return (cols + row_bytes / 2 - 1) / (row_bytes / 2); }

/// The rows of a tile of kRows rows, a multiple of 8, that begins at a multiple of 1024 bytes.
template <int kRows>
struct SwizzledRows {};
template <int kRows>
__device__ __forceinline__ constexpr int place_in(SwizzledRows<kRows>, int row, int byte) {
  static_assert(kRows % 8 == 0);
  return (byte / kChunkBytes * kRows + row) * kChunkBytes + (byte % kChunkBytes ^ row % 8 * 16);
}

// --- barriers -----------------------------------------------------------------------------------------------

/// An mbarrier in shared memory, whose phases alternate: the full or the empty barrier of a pipeline's stage.
struct Barrier {
  static __device__ __forceinline__ void init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  }
  /// Called after the inits by the thread that made them; __syncthreads must follow.
  static __device__ __forceinline__ void fence_inits() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  static __device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  }
  static __device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
  /// Predicated: after a branch ptxas would assume that a warp's threads diverged.
  static __device__ __forceinline__ void arrive_if(bool arrives, unsigned barrier) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
        "r"(static_cast<int>(arrives))
        : "memory");
  }
  /// Waits until the phase of this parity is over.
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

/// A word of a stage, uniform in a warp and known to be. The lane that releases the stage reads it, predicated as
/// arrive_if.
__device__ __forceinline__ int load_by_first(int lane, unsigned address) {
  int word = 0;
  asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %2, 0;\n@p ld.shared.s32 %0, [%1];\n}"
               : "+r"(word)
               : "r"(address), "r"(lane)
               : "memory");
  return __shfl_sync(~0u, word, 0);
}

/// Four words side by side, read as load_by_first reads one.
__device__ __forceinline__ void load_four_by_first(int lane, unsigned address, int& x, int& y, int& z, int& w) {
  x = y = z = w = 0;
  asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %5, 0;\n@p ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(x), "+r"(y), "+r"(z), "+r"(w)
               : "r"(address), "r"(lane)
               : "memory");
  x = __shfl_sync(~0u, x, 0);
  y = __shfl_sync(~0u, y, 0);
  z = __shfl_sync(~0u, z, 0);
  w = __shfl_sync(~0u, w, 0);
}

// A pipeline of stages is counted in one of two ways, which compilers keep in different registers: kernels are 2 to 10%
// slower with the other one.

/// The stage of a pipeline and its phase (the parity of its barriers), a register each.
template <int kCount>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    stage = stage + 1 == kCount ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
};

/// The same from the number of stages so far, in one register.
template <int kCount>
struct Counted {
  unsigned i = 0;
  __device__ __forceinline__ int stage() const { return static_cast<int>(i % kCount); }
  __device__ __forceinline__ int parity() const { return static_cast<int>(i / kCount & 1); }
  __device__ __forceinline__ void next() { ++i; }
};

/// The named barrier `id` (1 to 15; 0 is __syncthreads) of so many threads, those that only arrive included.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// A named_sync that returns whether `x` is true in any of the threads. The result is uniform in a warp and known to
/// be.
__device__ __forceinline__ bool named_any(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<int>(x)), "r"(id), "r"(threads)
      : "memory");
  return __any_sync(~0u, any != 0);
}

/// The registers of a consumer's thread where a warpgroup of producers keeps so many a thread: multiples of 8. A
/// multiprocessor has 64 K, of which a CTA begins with as many for each thread.
constexpr int consumer_registers(int groups, int producers) {
  const int launched = 512 / (groups + 1) / 8 * 8;
  return (launched * (groups + 1) - producers) / groups / 8 * 8;
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// Programmatic dependent launch: waits until the kernel before has ended and its writes are visible.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- copies -------------------------------------------------------------------------------------------------

/// Whether the L2 cache evicts a line before others: of what is not read again.
enum class Evict { kNormal, kFirst };
__device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Copies a box of a [batch, head, row, column] tensor by TMA, counted at `barrier`; zeros beyond the tensor.
template <Evict kEvict = Evict::kNormal>
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap& from, unsigned barrier, int col, int row,
                                         int head, int batch) {
  if constexpr (kEvict == Evict::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(&from), "r"(barrier), "r"(col), "r"(row), "r"(head), "r"(batch)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&from), "r"(barrier), "r"(col), "r"(row), "r"(head), "r"(batch), "l"(evict_first())
        : "memory");
  }
}
/// Copies all chunks of a tile of kRows rows and kCols columns, whole ones.
template <int kRows, int kCols, Evict kEvict = Evict::kNormal, int kRowBytes = kChunkBytes>
__device__ __forceinline__ void copy_boxes(unsigned to, const TensorMap& from, unsigned barrier, int row, int head,
                                           int batch) {
#pragma unroll
  for (int c = 0; c < chunks_of(kCols, kRowBytes); ++c)
    copy_box<kEvict>(to + c * kRows * kRowBytes, from, barrier, c * (kRowBytes / 2), row, head, batch);
}
/// Called by one thread, which arrives at `barrier` too.
template <int kRows, int kCols>
__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap& from, unsigned barrier, int row, int head,
                                          int batch) {
  Barrier::expect(barrier, kRows * chunks_of(kCols) * kChunkBytes);
  copy_boxes<kRows, kCols>(to, from, barrier, row, head, batch);
}
/// Copies a box of a tensor of one dimension.
__device__ __forceinline__ void copy_line(unsigned to, const TensorMap& from, unsigned barrier, int at) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(to),
      "l"(&from), "r"(barrier), "r"(at)
      : "memory");
}
/// Copies floats that follow one another in global memory; bytes and addresses are multiples of 16.
__device__ __forceinline__ void copy_floats(unsigned to, const float* from, unsigned barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Stores a box to a [batch, head, row, column] tensor, but for what lies beyond it. Rules as for add_floats.
template <Evict kEvict = Evict::kNormal>
__device__ __forceinline__ void store_box(const TensorMap& to, unsigned from, int col, int row, int head, int batch) {
  if constexpr (kEvict == Evict::kNormal) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&to),
                 "r"(from), "r"(col), "r"(row), "r"(head), "r"(batch)
                 : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
        "%6;" ::"l"(&to),
        "r"(from), "r"(col), "r"(row), "r"(head), "r"(batch), "l"(evict_first())
        : "memory");
  }
}
/// Reduces floats into global memory by TMA; bytes and addresses are multiples of 16. One thread calls this, the commit
/// and the waits, after fence_before_copy() by all threads that wrote the floats, and a barrier.
__device__ __forceinline__ void add_floats(float* to, unsigned from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
      "r"(from), "r"(bytes)
      : "memory");
}
/// Stores floats. Rules as for add_floats.
__device__ __forceinline__ void store_floats(float* to, unsigned from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_sums() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until what the thread adds has been read, and may be overwritten.
__device__ __forceinline__ void wait_sums_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/// Waits until it has been added.
__device__ __forceinline__ void wait_sums_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Waits until a number that other CTAs count is `count`; what they wrote before is visible then, to TMA too.
__device__ __forceinline__ void wait_for_count(const int* number, int count) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
  } while (now != count);
  asm volatile("fence.proxy.async;" ::: "memory");
}
/// Counts one more. After wait_sums_added by the threads that added, and __syncwarp.
__device__ __forceinline__ void count_one(int* number) {
  asm volatile("fence.proxy.async;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(number) : "memory");
}

// --- products -----------------------------------------------------------------------------------------------

/// The WGMMA descriptor of a swizzled matrix of rows of kRowBytes. `chunk_stride`: bytes from one chunk of columns to
/// the next, for MN-major operands; K-major ones ignore it.
template <int kRowBytes = kChunkBytes>
__device__ __forceinline__ unsigned long long descriptor(unsigned address, int chunk_stride) {
  static_assert(kRowBytes == kChunkBytes || kRowBytes == kNarrowBytes);
  constexpr unsigned long long kSwizzle = (kRowBytes == kChunkBytes ? 1ull : 2ull) << 62;
  constexpr int kEightRows = 8 * kRowBytes;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(chunk_stride >> 4) << 16 |
         static_cast<unsigned long long>(kEightRows >> 4) << 32 | kSwizzle;
}
/// The same matrix `bytes` further on.
__device__ __forceinline__ unsigned long long advanced(unsigned long long descriptor, int bytes) {
  return descriptor + static_cast<unsigned long long>(bytes >> 4);
}
/// Bytes from a K-major operand in tiles of kRows rows to its step k (16 columns).
template <int kRows, int kRowBytes = kChunkBytes>
__device__ __forceinline__ constexpr int step_bytes(int k) {
  constexpr int kSteps = kRowBytes / 32;  // of a chunk
  return k / kSteps * kRows * kRowBytes + k % kSteps * 32;
}

/// Hides x from the compiler, so that it does not hold what follows from x in registers through a loop.
__device__ __forceinline__ unsigned anew(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// The thread's index, read anew for the same reason.
__device__ __forceinline__ int thread_anew() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

template <int kBlocks>
__device__ __forceinline__ void zero(float (&x)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) x[i / 4][i % 4] = 0.0f;
}

/// d += a * b of a warpgroup, 64 rows by kCols columns, 16 of the common dimension. Its specialisations are generated
/// with the kernel (csrc/cuda/attention/plan/program.cpp), since the instruction names each register:
///   static void run(float* d, a, unsigned long long b, bool accumulate)
/// with a: four words of operand A, or its descriptor. kTransposedB: b lies as [common dimension][column].
/// kTransposedA: a lies as [common dimension][row].
template <class T, int kCols, bool kRegisterA, bool kTransposedB, bool kTransposedA = false>
struct Wgmma;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving reads and writes of registers that WGMMAs in flight use.
template <int kCount>
__device__ __forceinline__ void pin(float* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// --- accumulators -------------------------------------------------------------------------------------------

/// Four matrices of 8 x 8 numbers of 16 bits: word i of each lane is of matrix i, as an accumulator's. Each lane has
/// the address of 16 bytes, lane l column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(unsigned address, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void add_pair(float& first, float& second, unsigned address) {
  float x, y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
  first += x;
  second += y;
}
__device__ __forceinline__ void store_pair(unsigned address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void store_if(bool there, void* to, const unsigned (&words)[4]) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n@there st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(static_cast<int>(there))
      : "memory");
}
/// Stores a warp's 16 rows of accumulators to a [batch, head, row, column] tensor of `rows` rows and `cols` columns.
/// `first`, `factor`: the thread's first row, and what its rows first and first + 8 are multiplied by.
template <class T, int kBlocks>
__device__ __forceinline__ void store_rows(const FlexTensor& to, int b, int h, int first, int rows, int cols,
                                           const float (&x)[kBlocks][4], const float (&factor)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  T* head = static_cast<T*>(to.data) + b * to.batch_stride + h * to.head_stride;
  const bool vectors = has_eights(to, cols, 16);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = first + 8 * r;
    T* row = head + at * to.row_stride;
    constexpr int kFours = (kBlocks + 3) / 4;
    unsigned words[kFours][4] = {};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      words[n / 4][n % 4] = pack(T{}, x[n][2 * r] * factor[r], x[n][2 * r + 1] * factor[r]);
#pragma unroll
    for (int i = 0; i < kFours; ++i) transpose_in_fours(words[i]);
    const int first_col = lane % 4 * 8;
    if (vectors) {
      // Predicated: branches would make the shuffles of one block wait for those of the block before.
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const int col = first_col + i * 32;
        store_if(at < rows && col < cols, row + col, words[i]);
      }
    } else if (at < rows) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const int col = first_col + i * 32;
        // Unrolled, this would be half of a kernel's code.
#pragma unroll 1
        for (int c = col; c < min(col + 8, cols); ++c) {
          row[c * to.col_stride] = T{static_cast<unsigned short>(words[i][0])};
#pragma unroll
          for (int w = 0; w < 4; ++w) words[i][w] = __funnelshift_r(words[i][w], w < 3 ? words[i][w + 1] : 0, 16);
        }
      }
    }
  }
}

}  // namespace fusegrad::device
