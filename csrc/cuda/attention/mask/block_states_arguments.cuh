// The launch arguments of block_states.cuh's kernel; the host includes this too.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// states[batches, heads, rows, cols] (FlexBlock), a CTA for kBlockStateThreads blocks of a row.
struct BlockStatesArguments {
  unsigned char* states;
  int heads, rows, cols, queries, keys, block_q, block_kv;
};
constexpr int kBlockStateThreads = 256;

}  // namespace fusegrad::device
