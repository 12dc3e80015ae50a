#include "pytorch/autograd/constant.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <string>

#include "fusegrad/check_targets.h"
#include "pytorch/autograd/inplace.h"

namespace fusegrad {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void refuse(bool reached, std::string_view op, std::string_view name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!reached, op, ": ", name,
                              " must not be differentiated, since it is a constant, but a backward reached it: use ",
                              name, ".detach() where it is only logged, and leave it out of what is minimised");
}

// 0, or what refuses a gradient other than 0.
Tensor refuse_gradient(const Tensor& gradient, std::string_view op, std::string_view name) {
  const auto reached = gradient.ne(0).any();
  if (gradient.is_cpu() || check_targets_enabled()) {
    refuse(reached.item<bool>(), op, name);
    return at::zeros({}, gradient.options());
  }
  return at::zeros({}, gradient.options()).masked_fill_(reached, std::numeric_limits<double>::quiet_NaN());
}

Tensor refuse_gradient_meta(const Tensor& gradient, std::string_view /*op*/, std::string_view /*name*/) {
  return at::empty({}, gradient.options());
}

// `loss`, one value, is an edge only: the value depends on what the loss does.
struct ConstantBeside : torch::autograd::Function<ConstantBeside> {
  static Tensor forward(AutogradContext* ctx, const Tensor& value, const Tensor& /*loss*/, const std::string& op,
                        const std::string& name) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["op"] = op;
    ctx->saved_data["name"] = name;
    return value.detach();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const auto &op = ctx->saved_data["op"].toStringRef(), &name = ctx->saved_data["name"].toStringRef();
    refuse(!is_traced(grads[0]), op, name);
    static const auto recorded = c10::Dispatcher::singleton()
                                     .findSchemaOrThrow("fusegrad::refuse_gradient", "")
                                     .typed<Tensor(const Tensor&, std::string_view, std::string_view)>();
    // Part of the loss's gradient, so that a compiler cannot drop it.
    result[1] = recorded.call(grads[0], op, name);
    return result;
  }
};

Tensor constant_beside_op(const Tensor& value, const Tensor& loss, std::string_view op, std::string_view name) {
  return constant_beside(value, loss, std::string(op).c_str(), std::string(name).c_str());
}

}  // namespace

Tensor constant_beside(const Tensor& value, const Tensor& loss, const char* op, const char* name) {
  if (!at::GradMode::is_enabled() || !loss.requires_grad()) return value.detach();
  return ConstantBeside::apply(value.detach(), loss.dim() == 0 ? loss : loss.sum(), std::string(op), std::string(name));
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) { m.impl("constant_beside", TORCH_FN(constant_beside_op)); }
TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { m.impl("refuse_gradient", TORCH_FN(refuse_gradient)); }
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { m.impl("refuse_gradient", TORCH_FN(refuse_gradient)); }
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) { m.impl("refuse_gradient", TORCH_FN(refuse_gradient_meta)); }

}  // namespace fusegrad
