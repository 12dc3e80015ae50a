// The states of a block mask's blocks, by the bounds of its mask_mod, and by its pairs where those do not say.
#pragma once

#include "cuda/attention/mask/block_states_arguments.cuh"
#include "cuda/device/score_mod.cuh"

namespace fusegrad::device {

/// Called by a warp: a block by its pairs. One pair that takes part and one that does not decide. Rows come from both
/// ends: the outermost often differ.
template <class Mask>
__device__ FlexBlock state_of_pairs(const BlockStatesArguments& a, const typename Mask::Captured& mask, int b, int h,
                                    int row, int col) {
  const int q = row * a.block_q, kv = col * a.block_kv;
  const int queries = min(a.block_q, a.queries - q), keys = min(a.block_kv, a.keys - kv);
  bool some = false, all = queries == a.block_q && keys == a.block_kv;
  for (int i = 0; i < queries && !(some && !all); ++i) {
    const int r = i % 2 == 0 ? i / 2 : queries - 1 - i / 2;
    bool found = false, missed = false;
    for (int k = static_cast<int>(threadIdx.x) % 32; k < keys; k += 32) {
      const bool takes_part = Mask::apply(mask, b, h, q + r, kv + k, true);
      found |= takes_part;
      missed |= !takes_part;
    }
    some |= __any_sync(~0u, found) != 0;
    all &= __any_sync(~0u, missed) == 0;
  }
  return !some ? kBlockNone : all ? kBlockFull : kBlockPartial;
}

template <class Mask, class Listed, class Full>
__device__ void block_states(const BlockStatesArguments& a, const typename Mask::Captured& mask,
                             const typename Listed::Captured& listed, const typename Full::Captured& full) {
  __shared__ int open[kBlockStateThreads];
  __shared__ int opened;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunks = (a.cols + kBlockStateThreads - 1) / kBlockStateThreads;
  const int chunk = static_cast<int>(blockIdx.x) % chunks;
  const int line = static_cast<int>(blockIdx.x) / chunks;
  const int row = line % a.rows, b = line / a.rows / a.heads, h = line / a.rows % a.heads;
  unsigned char* states = a.states + static_cast<long long>(line) * a.cols;
  if (thread == 0) opened = 0;
  __syncthreads();
  const int col = chunk * kBlockStateThreads + thread;
  if (col < a.cols) {
    const bool some = Listed::apply(listed, b, h, row, col, true);
    const bool all = Full::apply(full, b, h, row, col, true);
    if (some && !all) {
      open[atomicAdd(&opened, 1)] = col;
    } else {
      states[col] = some ? kBlockFull : kBlockNone;
    }
  }
  __syncthreads();
  for (int i = thread / 32; i < opened; i += kBlockStateThreads / 32) {
    const FlexBlock state = state_of_pairs<Mask>(a, mask, b, h, row, open[i]);
    if (thread % 32 == 0) states[open[i]] = state;
  }
}

}  // namespace fusegrad::device
