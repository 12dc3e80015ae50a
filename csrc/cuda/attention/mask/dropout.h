// The mask of attention dropout, for tests. Compiled ahead of time.
#pragma once

#include <cstdint>

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::cuda {

/// mask[head, q, kv] of `heads` heads and the queries from `first` on, a multiple of 16; contiguous.
void flex_dropout_mask(const device::FlexDropout& dropout, bool* mask, int64_t heads, int64_t first, int64_t queries,
                       int64_t keys, void* stream);

}  // namespace fusegrad::cuda
