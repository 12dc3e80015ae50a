// Reductions over lanes, a CTA and a cluster, each in a fixed order. A State has
//   template <class Over> void merge(const Over& over)
// which replaces each of its values by over.sum(value), over.max(value) or over.min(value). State{} is neutral.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cstring>

#include "cuda/device/bulk.cuh"

namespace fusegrad::device {

constexpr int kMaxCluster = 16;

/// The State of a loss that has nothing to reduce.
struct NoParts {
  template <class Over>
  __device__ void merge(const Over&) {}
};

/// Shared memory for States. Raw bytes: shared variables cannot run the States' initialisers.
template <class State, int kCount>
struct alignas(16) SharedSlots {
  unsigned char bytes[kCount * sizeof(State)];
  __device__ State* get() { return reinterpret_cast<State*>(bytes); }
};

/// Reduces over groups of `group` neighbouring lanes (a power of 2, at most 32). All lanes of the warp must take part,
/// and all lanes of a group get the same bits, as both lanes of a pair add the same two values.
struct OverLanes {
  int group;

  template <class Value, class Operation>
  __device__ Value reduce(Value x, const Operation& operation) const {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      if (lanes < group) x = operation(x, __shfl_xor_sync(~0u, x, lanes));
    }
    return x;
  }
  template <class Value>
  __device__ Value sum(Value x) const {
    return reduce(x, [](Value a, Value b) { return a + b; });
  }
  __device__ float max(float x) const {
    return reduce(x, [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ int min(int x) const {
    return reduce(x, [](int a, int b) { return a < b ? a : b; });
  }
};

/// Merges groups of `group` threads (a power of 2); every thread of a group gets its result. `warp_states` is shared
/// memory for one State a warp of the CTA. All threads of the CTA must take part, with the same `group`.
template <class State>
__device__ void merge_threads(State& state, State* warp_states, int group) {
  state.merge(OverLanes{min(group, 32)});
  if (group <= 32) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = group / 32;
  if (threadIdx.x % 32 == 0) warp_states[warp] = state;
  __syncthreads();
  state = warp_states[(warp & -warps) + (static_cast<int>(threadIdx.x) & (warps - 1))];
  state.merge(OverLanes{warps});
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

/// Shared memory through which the threads of a cluster's CTAs (a power of 2 of them, of kWarps warps each) merge their
/// States, once. One warp of each CTA does what lies above the warps, while the others leave the pipes to other CTAs.
/// Each CTA stores its own State into every other's slots. No CTA leaves before it has got all of them, and none is
/// sent anything later: so shared memory of CTAs that have left is not touched.
template <class State, int kWarps>
class RowMerge {
 public:
  /// Called by one thread; Arrival::fence_init() and a barrier of the cluster must follow, unless it is a single CTA.
  __device__ void init() { arrival_.init(); }

  /// Every thread brings its state and gets the cluster's. `add(state)` adds, in all lanes of a warp, what a CTA has
  /// beside its threads' states.
  template <class Add>
  __device__ void merge(State& state, const Add& add) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    State* states = warp_states_.get();
    state.merge(OverLanes{32});
    if (lane == 0) states[warp] = state;
    __syncthreads();
    if (warp == 0) {
      state = states[lane & (kWarps - 1)];
      state.merge(OverLanes{kWarps});
      add(state);
      if (cluster_size() > 1) merge_cluster(state, lane);
      __syncwarp();  // all lanes have read
      if (lane == 0) states[0] = state;
    }
    __syncthreads();
    state = states[0];
  }

 private:
  __device__ void merge_cluster(State& state, int lane) {
#if __CUDA_ARCH__ >= 900
    const int size = cluster_size();
    if (lane == 0) arrival_.expect(size * kBytes);
    if (lane < size) {
      uint4 words[kBytes / 16] = {};
      memcpy(words, &state, sizeof(State));
      const uint32_t slot = remote_address(slots_[cluster_rank()], lane);
      const uint32_t arrival = remote_address(&arrival_, lane);
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) store_counted(slot + 16 * i, words[i], arrival);
    }
    arrival_.wait();
    memcpy(&state, slots_[lane & (size - 1)], sizeof(State));
    state.merge(OverLanes{size});
#endif
  }

  static constexpr int kBytes = (sizeof(State) + 15) / 16 * 16;
  SharedSlots<State, kWarps> warp_states_;
  uint4 slots_[kMaxCluster][kBytes / 16];
  Arrival arrival_;
};

}  // namespace fusegrad::device
