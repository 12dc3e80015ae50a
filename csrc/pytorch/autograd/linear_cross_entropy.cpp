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
    const auto out = dispatch::linear_cross_entropy_forward(call, inplace);
    save_linear_gradients(ctx, input, weight, bias, out.gradients, out.rows.scales, inplace);
    return visible(out.rows, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return scale_linear_gradients(kOp, ctx, grads, 5);
  }
};

// Computes the gradients in the backward, for whatever upstream gradient, from what is known of each row and the
// logits, which were kept or are computed a second time.
struct LinearCrossEntropyDeferred : NamedFunction<LinearCrossEntropyDeferred, "linear_cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                               const OptionalTensor& /*bias: edge*/, const LinearCrossEntropyForward& call) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, logits, gradients] = dispatch::linear_cross_entropy_forward(call, /*inplace=*/false);
    ctx->set_materialize_grads(false);
    ctx->saved_data["hooks"] = saved_tensor_hooks_active();
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
                                                   .linear = call.linear,
                                                   .logits = call.keep_logits ? OptionalTensor(logits) : std::nullopt,
                                                   .grad_stats = {}});
    return visible(out, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    auto call = load_arguments<LinearCrossEntropyBackward>(ctx);
    if (!put_upstream(kOp, grads, call)) return variable_list(4);
    call.needs_grad = needed_gradients(ctx, call.linear_bias.has_value());
    const bool inplace = call.logits && may_reuse_saved(*call.logits, ctx->saved_data["hooks"].toBool());
    return linear_result(dispatch::linear_cross_entropy_backward(call, inplace), call.needs_grad, 4);
  }
};

}  // namespace

RowOutputs linear_cross_entropy(LinearCrossEntropyForward call, bool deferred, bool inplace) {
  const auto &input = call.input, &weight = call.linear_weight;
  const auto wanted = wanted_gradients(input, weight, call.linear_bias);
  if (deferred) {
    call.keep_logits &= wanted[0] || wanted[1] || wanted[2];
    return from_visible(LinearCrossEntropyDeferred::apply(input, weight, call.linear_bias, call));
  }
  call.needs_grad = wanted;
  return from_visible(LinearCrossEntropy::apply(input, weight, call.linear_bias, call, inplace));
}

}  // namespace fusegrad::autograd
