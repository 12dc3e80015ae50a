// The launch arguments of the kernels of forward mode (portable.cuh, hopper.cuh); the host includes
// this too.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// Tangents of operands that have none are null, and are not read: the kernel's Config says which there are.
struct FlexTangentsArguments {
  FlexTensor query, key, value, out, out_low, query_tangent, key_tangent, value_tangent, out_tangent;
  float *lse, *lse_low, *lse_tangent;  // [B, H, M]; lse_low may be null
  FlexTiles tiles;
  int batches, key_batches, heads, group, queries, keys, head_size, value_size;
  float scale;
  FlexDropout dropout;
};

/// What the Hopper kernel takes besides: as FlexForwardHopperArguments, with the maps of the tangents that there are.
struct FlexTangentsHopperArguments {
  TensorMap query, key, value, query_tangent, key_tangent, value_tangent;
  int* next;
  int section;
};

}  // namespace fusegrad::device
