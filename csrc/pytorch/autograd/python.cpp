// The gradient contract for autograd Functions that are written in Python, as ops: pytorch/autograd/inplace.h says what
// each is.
#include <torch/library.h>

#include "losses/linear_plan.h"
#include "pytorch/autograd/inplace.h"

namespace fusegrad {
namespace {

using at::Tensor;

bool may_overwrite_op(const Tensor& tensor, at::TensorList others) {
  std::vector<const Tensor*> arguments;
  for (const auto& other : others) arguments.push_back(&other);
  return may_overwrite(tensor, arguments);
}

void check_may_add_to_op(std::string_view op, std::string_view name, const Tensor& tensor, at::TensorList others) {
  std::vector<const Tensor*> arguments;
  for (const auto& other : others) arguments.push_back(&other);
  check_may_add_to(std::string(op).c_str(), std::string(name).c_str(), tensor, arguments);
}

Tensor refuse_double_backward_op(std::string_view op, const Tensor& gradient, at::TensorList inputs) {
  return refuse_double_backward(std::string(op).c_str(), gradient, inputs);
}

std::tuple<int64_t, bool> plan_linear_op(int64_t rows, int64_t hidden, int64_t vocab, int64_t element_size, bool cpu,
                                         bool weight_grad, bool low_precision_result, int64_t logits_per_row,
                                         std::optional<int64_t> workspace_mib) {
  LinearSizes sizes{rows, hidden, vocab, element_size, cpu, weight_grad, low_precision_result, logits_per_row};
  sizes.by_columns = false;
  const auto plan = plan_linear(sizes, budget_bytes(workspace_mib));
  return {plan.rows, plan.accumulator};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("may_overwrite", TORCH_FN(may_overwrite_op));
  m.impl("check_may_add_to", TORCH_FN(check_may_add_to_op));
  m.impl("may_reuse_saved", TORCH_FN(may_reuse_saved));
  m.impl("saved_tensor_hooks_active", TORCH_FN(saved_tensor_hooks_active));
  m.impl("refuse_double_backward", TORCH_FN(refuse_double_backward_op));
  m.impl("plan_linear", TORCH_FN(plan_linear_op));
}

}  // namespace fusegrad
