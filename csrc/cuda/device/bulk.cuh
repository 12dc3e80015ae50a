// Asynchronous copies into shared memory for sm_90 and later, counted by mbarriers: bulk copies (cp.async.bulk), and
// stores from other CTAs of the cluster.
#pragma once

#include <cstdint>

namespace fusegrad::device {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/// Counts the arrival of one thread and the bytes that come, again and again: its rounds have parities 0, 1, 0...
class Arrival {
 public:
  __device__ void init() {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state_)), "r"(1) : "memory");
  }
  /// Makes inits visible to bulk copies and to the cluster; a barrier must follow for other threads.
  __device__ static void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

  /// One thread arrives. Bytes may come before.
  __device__ void expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state_)), "r"(bytes)
                 : "memory");
  }
  /// Starts a copy of `bytes` (a multiple of 16, between multiples of 16) that counts here.
  __device__ void copy(void* shared, const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(&state_))
                 : "memory");
  }
  /// Waits until all expected bytes are there for the calling thread to read. Empty for GPUs without bulk copies:
  /// kernels with them are compiled for all GPUs and launched only where they exist.
  __device__ void wait(uint32_t parity = 0) {
    // Each try at the cluster's scope empties the L1 cache: one is enough.
    wait_own(parity);
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again%=:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=;\n"
        "}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
#endif
  }
  /// The same where all that comes is from this CTA, its copies among it. A try may sleep for long (nanoseconds): loops
  /// take issue slots from other warps.
  __device__ void wait_own(uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again%=:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1, 10000000;\n"
        "@!done bra again%=;\n"
        "}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
#endif
  }

 private:
  uint64_t state_;
};

/// Orders a thread's own accesses to shared memory before a later TMA or bulk copy of the same place.
__device__ inline void fence_before_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The address of `p` in the shared memory of another CTA of the cluster.
__device__ inline uint32_t remote_address(const void* p, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}
/// Stores 16 bytes there, counted by the Arrival at `arrival`, also there.
__device__ inline void store_counted(uint32_t address, const uint4& x, uint32_t arrival) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(arrival)
      : "memory");
}

// A barrier of the cluster in two halves. It orders the inits of mbarriers before fence_init(), and nothing else: with
// release semantics every warp would wait for its own accesses to global memory.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace fusegrad::device
