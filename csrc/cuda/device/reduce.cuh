// Reductions of a State with `merge(const State&)` over lanes, a CTA and a cluster, each in a fixed order.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace fusegrad::device {

/// Shared memory for States. Raw bytes: shared variables cannot run the States' initialisers.
template <class State, int kCount>
struct alignas(8) SharedSlots {
  unsigned char bytes[kCount * sizeof(State)];
  __device__ State* get() { return reinterpret_cast<State*>(bytes); }
};

/// A trivially copyable struct of 32-bit words, taken from another lane.
template <class State>
__device__ State shuffle_xor(const State& state, int lanes) {
  static_assert(sizeof(State) % 4 == 0);
  State other;
  const auto* from = reinterpret_cast<const uint32_t*>(&state);
  auto* to = reinterpret_cast<uint32_t*>(&other);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(State) / 4); ++i) to[i] = __shfl_xor_sync(~0u, from[i], lanes);
  return other;
}

/// Merges groups of `group` neighbouring lanes (a power of 2, at most 32). All lanes of the warp must take part.
template <class State>
__device__ void merge_lanes(State& state, int group) {
  for (int lanes = group / 2; lanes > 0; lanes /= 2) {
    State other = shuffle_xor(state, lanes);
    // Both lanes of a pair must merge in the same order, or rounding would leave them with different results.
    if ((threadIdx.x & lanes) == 0) {
      state.merge(other);
    } else {
      other.merge(state);
      state = other;
    }
  }
}

/// Every thread gets the result. `warp_states` is shared memory for one State a warp.
template <int kThreads, class State>
__device__ void merge_block(State& state, State* warp_states) {
  constexpr int kWarps = kThreads / 32;
  merge_lanes(state, 32);
  if (threadIdx.x % 32 == 0) warp_states[threadIdx.x / 32] = state;
  __syncthreads();
  state = warp_states[threadIdx.x % kWarps];
  merge_lanes(state, kWarps);
}

/// Merges the CTAs' states over the cluster, in the order of their ranks. The caller must run cluster_leave() before
/// it exits: others may still be reading its shared memory.
template <class State>
__device__ void merge_cluster(State& state, State* slot) {
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (cluster.num_blocks() == 1) return;
  if (threadIdx.x == 0) *slot = state;
  cluster.sync();
  state = *cluster.map_shared_rank(slot, 0);
  for (unsigned rank = 1; rank < cluster.num_blocks(); ++rank) state.merge(*cluster.map_shared_rank(slot, rank));
  cluster.barrier_arrive();
#endif
}

__device__ inline void cluster_leave() {
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (cluster.num_blocks() > 1) cluster.barrier_wait();
#endif
}

__device__ inline int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
#else
  return 0;
#endif
}

__device__ inline int cluster_size() {
#if __CUDA_ARCH__ >= 900
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
#else
  return 1;
#endif
}

}  // namespace fusegrad::device
