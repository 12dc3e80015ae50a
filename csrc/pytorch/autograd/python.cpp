// The gradient contract for autograd Functions that are written in Python, as an op: pytorch/autograd/inplace.h.
#include <torch/library.h>

#include "pytorch/autograd/inplace.h"

namespace fusegrad {
namespace {

at::Tensor refuse_double_backward_op(std::string_view op, const at::Tensor& gradient, at::TensorList inputs) {
  return refuse_double_backward(std::string(op).c_str(), gradient, inputs);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("refuse_double_backward", TORCH_FN(refuse_double_backward_op));
}

}  // namespace fusegrad
