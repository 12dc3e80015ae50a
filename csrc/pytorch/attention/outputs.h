// The outputs and gradients of flex_attention as tensors without values: what kernels fill, and what Meta kernels
// return.
#pragma once

#include "pytorch/attention/flex_attention.h"

namespace fusegrad {

/// [B, H, M, E] with dimensions in the order of the query's strides, the last one dense, as PyTorch's flex_attention
/// returns it.
at::Tensor empty_attention_output(const at::Tensor& query, const at::Tensor& value, at::ScalarType dtype);

/// The outputs of the forward.
FlexOutputs empty_flex_outputs(const at::Tensor& query, const at::Tensor& value, int64_t aux);

/// The gradients; those not wanted are empty, and so are the first three in place.
FlexGradients empty_flex_gradients(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   at::TensorList buffers, const std::vector<bool>& needs_grad, bool inplace);

}  // namespace fusegrad
