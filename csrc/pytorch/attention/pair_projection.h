// The bias of scores from a pair representation, by PyTorch's ops.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

#include "pytorch/ops/arguments.h"

namespace fusegrad {

/// Of pair, norm_weight, norm_bias, projection_weight, projection_bias; empty where not wanted.
using PairProjectionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// As pair_projection_forward, differentiable to any order.
at::Tensor pair_projection_formula(const PairProjection& call);

namespace autograd {
at::Tensor pair_projection(const PairProjection& call);
}

}  // namespace fusegrad
