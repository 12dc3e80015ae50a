// PyTorch's two kinds of batched tensors: of torch.vmap (at::functorch), and of torch.autograd's vectorized functions.
// The first header must come first: what it calls would be ambiguous with the second one's functions.
#pragma once

// clang-format off
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/LegacyBatchedTensorImpl.h>
// clang-format on
