#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_jsd";

LinearJsdBackward kept(const LinearJsdForward& call, const Tensor& scales) {
  return {.grad_loss = {},
          .student_input = call.student_input,
          .heads = call.heads,
          .rows = call.rows,
          .scales = scales,
          .settings = call.settings,
          .linear = call.linear,
          .shards = call.shards,
          .different = call.different};
}

// Computes the gradients for an upstream gradient of 1 in the forward, chunk by chunk, and scales them in the
// backward. With `inplace` the input's gradient lies in the input.
struct LinearJsd : NamedFunction<LinearJsd, "linear_jsd"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias, const LinearJsdForward& call, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, gradients] = dispatch::linear_jsd_forward(call, inplace);
    if (any_of(call.needs_grad)) {
      save_linear_gradients(ctx, input, weight, bias, gradients, out.scales, inplace, kept(call, out.scales));
    }
    return visible(out, call.settings);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kArguments = 5;  // of forward()
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    if (!grads[0].defined()) return variable_list(kArguments);
    if (!makes_graph(ctx)) return scale_linear_gradients(kOp, ctx, saved, grads[0], kArguments);
    auto call = load_arguments<LinearJsdBackward>(ctx, saved, kMade);
    call.grad_loss = grads[0];
    call.needs_grad = needed_gradients(ctx, call.heads.student_bias.has_value());
    const auto graph = kernels_have_second(call)
                           ? linear_jsd_graph(call, scaled_gradients(saved, grads[0], call.needs_grad))
                           : composite::linear_jsd_gradients(call);
    return linear_result(graph, call.needs_grad, kArguments);
  }
};

// Keeps no gradients and computes the logits of both a second time in the backward: reduction 'none', and where memory
// must be least.
struct LinearJsdRecompute : NamedFunction<LinearJsdRecompute, "linear_jsd"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                               const OptionalTensor& /*bias: edge*/, const LinearJsdForward& call) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::linear_jsd_forward(call, /*inplace=*/false).first;
    ctx->set_materialize_grads(false);
    save_arguments(ctx, kept(call, out.scales));
    return visible(out, call.settings);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 1);
    if (!grads[0].defined()) return variable_list(4);
    auto call = load_arguments<LinearJsdBackward>(ctx);
    call.grad_loss = grads[0];
    call.needs_grad = needed_gradients(ctx, call.heads.student_bias.has_value());
    const auto made = [&] {
      const at::NoGradGuard first;
      at::AutoDispatchBelowAutograd guard;
      return dispatch::linear_jsd_backward(call);
    };
    if (!at::GradMode::is_enabled()) return linear_result(dispatch::linear_jsd_backward(call), call.needs_grad, 4);
    const auto graph =
        kernels_have_second(call) ? linear_jsd_graph(call, made()) : composite::linear_jsd_gradients(call);
    return linear_result(graph, call.needs_grad, 4);
  }
};

}  // namespace

JsdOutputs linear_jsd(LinearJsdForward call, bool recompute, bool inplace) {
  const auto &input = call.student_input, &weight = call.heads.student_weight;
  const auto& bias = call.heads.student_bias;
  const auto wanted = wanted_gradients(input, weight, bias);
  if (!any_of(wanted)) return unrecorded([&] { return dispatch::linear_jsd_forward(call, inplace).first; });
  if (recompute) return from_visible_jsd(LinearJsdRecompute::apply(input, weight, bias, call));
  call.needs_grad = wanted;
  return from_visible_jsd(LinearJsd::apply(input, weight, bias, call, inplace));
}

}  // namespace fusegrad::autograd
