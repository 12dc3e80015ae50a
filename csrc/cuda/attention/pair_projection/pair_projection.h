// The bias of scores from a pair representation, of 16 bits: a norm over channels and a projection to heads in one pass
// over memory each way. Compiled ahead of time.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fusegrad::cuda {

/// y = (x - mean) / sqrt(variance + eps) * norm_weight + norm_bias by channels, rounded to the dtype, or without
/// `centered` x / sqrt(mean square + eps) * norm_weight; out[b, h, p] = sum_c weight[h, c] * y[b, p, c] + bias[h]. All
/// are contiguous and of one dtype.
struct PairProjectionCall {
  DType dtype{};
  int64_t batches = 0;
  int64_t pairs = 0;  // of a batch
  int channels = 0;
  int heads = 0;
  float eps = 0.0f;
  bool centered = true;
  const void* pair = nullptr;         // [batches, pairs, channels], at a multiple of 16 bytes
  const void* norm_weight = nullptr;  // [channels]; null: 1
  const void* norm_bias = nullptr;    // [channels]; null: 0
  const void* weight = nullptr;       // [heads, channels], at a multiple of 16 bytes
  const void* bias = nullptr;         // [heads]; null: 0
};

/// Gradients, each null where it is not wanted.
struct PairProjectionGradients {
  const void* grad = nullptr;  // of out
  void* pair = nullptr;        // at a multiple of 16 bytes
  float* parts = nullptr;      // pair_projection_parts; null: no parameter's is wanted
  void* norm_weight = nullptr;
  void* norm_bias = nullptr;
  void* weight = nullptr;
  void* bias = nullptr;
};

/// Whether there are kernels for it.
bool pair_projection_takes(DType dtype, int64_t channels, int64_t heads);
void pair_projection(const PairProjectionCall& call, void* out, void* stream);

/// How many parts of heads * (channels + 1) floats the gradients of the parameters are summed up from: in a fixed
/// order, so that a GPU gives the same bits each time.
int64_t pair_projection_parts(const PairProjectionCall& call);
void pair_projection_backward(const PairProjectionCall& call, const PairProjectionGradients& gradients, void* stream);

}  // namespace fusegrad::cuda
