// The bias of scores from a pair representation on CUDA. cuda/attention/pair_projection has the kernels.
#pragma once

#include "pytorch/attention/pair_projection.h"

namespace fusegrad::cuda {

/// Whether there are kernels for such tensors.
bool pair_projection_takes(const PairProjection& call);
void pair_projection(const PairProjection& call, const at::Tensor& out);
void pair_projection_backward(const PairProjectionBackward& call, const PairProjectionGradients& gradients);

}  // namespace fusegrad::cuda
