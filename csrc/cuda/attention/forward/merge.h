// Merges outputs over parts of the keys: of a call's splits, and of two calls. Compiled ahead of time.
#pragma once

#include <cstdint>

#include "attention/flex_attention.h"
#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::cuda {

/// In the splits' order. The kernel before it on the stream may be one that lets it begin ahead.
void flex_merge(const device::FlexPartials& partials, const device::FlexRowResults& results, int64_t batches, int heads,
                int queries, DType dtype, void* stream);

/// There are outputs.
void flex_merge(const FlexMergeCall& call, void* stream);

/// grad_query[b, h, m, d] = sum over splits of parts[split, b, h, m, d], in their order, rounded once.
struct FlexQueryParts {
  device::FlexTensor grad_query;
  const float* parts;  // [splits, batches, heads, queries, cols]
  int splits, batches, heads, queries, head_size;
  int cols;  // head_size rounded up to a multiple of 4
};
void flex_add_query_parts(const FlexQueryParts& p, DType dtype, void* stream);

}  // namespace fusegrad::cuda
