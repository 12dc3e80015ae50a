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
                               const std::optional<Tensor>& bias, const RowArguments& rows, const LossOptions& options,
                               const LinearOptions& linear, std::array<bool, 3> needs_grad, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, gradients] =
        dispatch::linear_cross_entropy_forward(input, weight, bias, rows, options, linear, needs_grad, inplace);
    save_linear_gradients(ctx, input, weight, bias, gradients, out.scales, inplace);
    return visible(out, options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return scale_linear_gradients(kOp, ctx, grads, 8);
  }
};

// Keeps one lse a row and computes the logits a second time in the backward: reduction 'none', a differentiable
// lse, and where memory must be least.
struct LinearCrossEntropyRecompute : NamedFunction<LinearCrossEntropyRecompute, "linear_cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const std::optional<Tensor>& bias, const RowArguments& rows, const LossOptions& options,
                               const LinearOptions& linear) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::linear_cross_entropy_forward(input, weight, bias, rows, options, linear,
                                                            {false, false, false}, /*inplace=*/false)
                         .first;
    ctx->set_materialize_grads(false);
    save_options(ctx, options);
    ctx->saved_data["logit_scale"] = linear.logit_scale;
    ctx->saved_data["workspace_mib"] = linear.workspace_mib;
    ctx->save_for_backward({input, weight, bias.value_or(Tensor()), rows.target, rows.weight.value_or(Tensor()),
                            rows.token_weight.value_or(Tensor()), out.lse, out.stats, out.scales});
    return visible(out, options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 2);
    const auto saved = ctx->get_saved_variables();
    variable_list result(6);
    const auto grad_lse = lse_gradient(grads);
    if (!grads[0].defined() && !grad_lse.defined()) return result;
    RowArguments rows;
    rows.target = saved[3];
    rows.weight = optional_of(saved[4]);
    rows.token_weight = optional_of(saved[5]);
    RowOutputs forward;
    forward.lse = saved[6];
    forward.stats = saved[7];
    forward.scales = saved[8];
    LinearOptions linear;
    linear.logit_scale = ctx->saved_data["logit_scale"].toDouble();
    linear.workspace_mib = ctx->saved_data["workspace_mib"].toOptional<int64_t>();
    std::array<bool, 3> needs_grad{};
    for (size_t i = 0; i < kInputs; ++i) needs_grad[i] = saved[i].defined() && ctx->needs_input_grad(i);
    const auto gradients = dispatch::linear_cross_entropy_backward(grads[0], grad_lse, saved[kInput], saved[kWeight],
                                                                   optional_of(saved[kBias]), rows, load_options(ctx),
                                                                   linear, forward, needs_grad);
    if (needs_grad[kInput]) result[kInput] = gradients.input;
    if (needs_grad[kWeight]) result[kWeight] = gradients.weight;
    if (needs_grad[kBias]) result[kBias] = gradients.bias;
    return result;
  }
};

}  // namespace

RowOutputs linear_cross_entropy(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                const RowArguments& rows, const LossOptions& options, const LinearOptions& linear,
                                bool recompute, bool inplace) {
  const auto out = recompute ? LinearCrossEntropyRecompute::apply(input, weight, bias, rows, options, linear)
                             : LinearCrossEntropy::apply(input, weight, bias, rows, options, linear,
                                                         wanted_gradients(input, weight, bias), inplace);
  return from_visible(out);
}

}  // namespace fusegrad::autograd
