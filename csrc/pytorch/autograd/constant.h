// Values that an op returns beside its loss and that have no gradient. They must not enter a loss silently: each
// requires grad where the loss does, and raises where a backward reaches it.
#pragma once

#include <ATen/ATen.h>

namespace fusegrad {

/// `value`, a constant that came with `loss`. Where the loss requires grad the value does too, and a backward that
/// reaches it raises an error that names `op` and `name`.
///
/// A compiler asks for the gradients of all outputs when it traces them, long before a backward, so its graph has the
/// op refuse_gradient instead, which acts on the gradient's values: zeros, what an output gets that nothing reached,
/// are fine. Else the CPU raises; on a GPU the gradient is NaN, unless set_check_targets(true) asks for the error.
at::Tensor constant_beside(const at::Tensor& value, const at::Tensor& loss, const char* op, const char* name);

}  // namespace fusegrad
