#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_cross_entropy";

// Computes the gradients for an upstream gradient of 1 in the forward, chunk by chunk, and scales them in the
// backward. With `inplace` the input's gradient lies in the input.
struct LinearCrossEntropy : NamedFunction<LinearCrossEntropy, "linear_cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const LinearCrossEntropyForward& call, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, gradients] = dispatch::linear_cross_entropy_forward(call, inplace);
    save_linear_gradients(ctx, input, weight, bias, gradients, out.scales, inplace);
    return visible(out, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return scale_linear_gradients(kOp, ctx, grads, 5);
  }
};

// Keeps one lse a row and computes the logits a second time in the backward: reduction 'none', a differentiable
// lse, and where memory must be least.
struct LinearCrossEntropyRecompute : NamedFunction<LinearCrossEntropyRecompute, "linear_cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                               const OptionalTensor& /*bias: edge*/, const LinearCrossEntropyForward& call) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::linear_cross_entropy_forward(call, /*inplace=*/false).first;
    ctx->set_materialize_grads(false);
    save_arguments(ctx, LinearCrossEntropyBackward{.grad_loss = {},
                                                   .grad_lse = {},
                                                   .input = call.input,
                                                   .linear_weight = call.linear_weight,
                                                   .target = call.target,
                                                   .linear_bias = call.linear_bias,
                                                   .weight = call.weight,
                                                   .lse = out.lse,
                                                   .stats = out.stats,
                                                   .scales = out.scales,
                                                   .token_weight = call.token_weight,
                                                   .options = call.options,
                                                   .linear = call.linear});
    return visible(out, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 2);
    auto call = load_arguments<LinearCrossEntropyBackward>(ctx);
    call.grad_loss = optional_of(grads[0]);
    call.grad_lse = optional_of(lse_gradient(grads));
    if (!call.grad_loss && !call.grad_lse) return variable_list(4);
    call.needs_grad = needed_gradients(ctx, call.linear_bias.has_value());
    return linear_result(dispatch::linear_cross_entropy_backward(call), call.needs_grad, 4);
  }
};

}  // namespace

RowOutputs linear_cross_entropy(LinearCrossEntropyForward call, bool recompute, bool inplace) {
  const auto &input = call.input, &weight = call.linear_weight;
  if (recompute) return from_visible(LinearCrossEntropyRecompute::apply(input, weight, call.linear_bias, call));
  call.needs_grad = wanted_gradients(input, weight, call.linear_bias);
  return from_visible(LinearCrossEntropy::apply(input, weight, call.linear_bias, call, inplace));
}

}  // namespace fusegrad::autograd
