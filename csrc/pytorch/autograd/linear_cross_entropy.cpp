#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
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
    if (!any_of(call.needs_grad)) return visible(out.rows, call.options);
    save_linear_gradients(ctx, input, weight, bias, out.gradients, out.rows.scales, inplace,
                          LinearCrossEntropyBackward{.grad_loss = {},
                                                     .grad_lse = {},
                                                     .input = input,
                                                     .linear_weight = weight,
                                                     .target = call.target,
                                                     .linear_bias = bias,
                                                     .weight = call.weight,
                                                     .lse = {},
                                                     .stats = {},
                                                     .scales = out.rows.scales,
                                                     .token_weight = call.token_weight,
                                                     .options = call.options,
                                                     .linear = call.linear,
                                                     .logits = {},
                                                     .grad_stats = {},
                                                     .row_scale = call.row_scale,
                                                     .shards = call.shards,
                                                     .different = call.different});
    return visible(out.rows, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kArguments = 5;  // of forward()
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    if (!grads[0].defined()) return variable_list(kArguments);
    if (!makes_graph(ctx)) return scale_linear_gradients(kOp, ctx, saved, grads[0], kArguments);
    auto call = load_arguments<LinearCrossEntropyBackward>(ctx, saved, kMade);
    call.grad_loss = grads[0];
    const auto wanted = needed_gradients(ctx, call.linear_bias.has_value());
    if (kernels_have_second(call)) {
      return linear_result(linear_cross_entropy_graph(call, scaled_gradients(saved, grads[0], wanted)), wanted,
                           kArguments);
    }
    const auto graph = composite::linear_cross_entropy_gradients(call, {wanted[0], wanted[1], wanted[2], false});
    return linear_result({graph[0], graph[1], graph[2]}, wanted, kArguments);
  }
};

// Computes the gradients in the backward, for whatever upstream gradient, from what is known of each row and the
// logits, which were kept or are computed a second time.
struct LinearCrossEntropyDeferred : NamedFunction<LinearCrossEntropyDeferred, "linear_cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                               const OptionalTensor& /*bias: edge*/, const OptionalTensor& /*row_scale: edge*/,
                               const LinearCrossEntropyForward& call, const OptionalTensor& grad_weight_into) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, logits, gradients] = dispatch::linear_cross_entropy_forward(call, /*inplace=*/false);
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
                                                   .linear = call.linear,
                                                   .logits = call.keep_logits ? OptionalTensor(logits) : std::nullopt,
                                                   .grad_stats = {},
                                                   .row_scale = call.row_scale,
                                                   .shards = call.shards,
                                                   .different = call.different});
    save_grad_weight_into(ctx, grad_weight_into);
    return visible(out, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kArguments = 6;  // of forward()
    auto call = load_arguments<LinearCrossEntropyBackward>(ctx);
    if (!put_upstream(kOp, grads, call)) return variable_list(kArguments);
    call.needs_grad = needed_gradients(ctx, call.linear_bias.has_value());
    const bool scale_wanted = call.row_scale && ctx->needs_input_grad(call.linear_bias ? kBias + 1 : kBias);
    const auto into = saved_grad_weight_into(ctx);
    const bool adds = into && call.needs_grad[kWeight];
    if (at::GradMode::is_enabled() && !adds && (call.options.aux & kBatchInvariant) == 0) {  // create_graph=True
      const auto [input, weight, bias] = call.needs_grad;
      if (!scale_wanted && kernels_have_second(call)) {
        auto made = [&] {
          const at::NoGradGuard first;
          at::AutoDispatchBelowAutograd guard;
          return dispatch::linear_cross_entropy_backward(call, /*inplace=*/false);
        }();
        if (!input) made.input.reset();
        if (!weight) made.weight.reset();
        if (!bias) made.bias.reset();
        return linear_result(linear_cross_entropy_graph(call, made), call.needs_grad, kArguments);
      }
      const auto graph = composite::linear_cross_entropy_gradients(call, {input, weight, bias, scale_wanted});
      auto result = linear_result({graph[0], graph[1], graph[2]}, call.needs_grad, kArguments);
      if (scale_wanted) result[kBias + 1] = graph[3];
      return result;
    }
    const bool inplace = call.logits && may_reuse_saved(*call.logits, hooks_were_active(ctx));
    auto result =
        adds ? added_result(kOp, dispatch::linear_cross_entropy_backward_into({*into, call}, inplace), call.needs_grad,
                            kArguments, {call.input, call.linear_weight})
             : linear_result(dispatch::linear_cross_entropy_backward(call, inplace), call.needs_grad, kArguments);
    if (scale_wanted) {
      result[kBias + 1] = refuse_double_backward(kOp, scale_gradient(call), {call.input, *call.row_scale});
    }
    return result;
  }

  // The gradient of row_scale. With z = s * x, by the chain rule over z:
  //   s * d lse = mean of z,  s * d log p[y] = z[y] - mean = log p[y] + H,  s * d H = -variance of z.
  static Tensor scale_gradient(const LinearCrossEntropyBackward& call) {
    const auto& o = call.options;
    const StatRows rows(dense_target(call.target, call.weight.has_value(), o.label_smoothing), o.aux);
    const auto stat = [&](int64_t row) { return call.stats.select(0, row); };
    auto gradient = at::zeros_like(call.lse);
    if (call.grad_loss) {
      auto each = stat(rows.slope);
      auto penalty = 2 * o.z_loss * call.lse * stat(rows.mean);
      if (!call.target.is_floating_point()) penalty = penalty.masked_fill(call.target.eq(o.ignore_index), 0);
      if (call.scales.numel() != 0) {
        each = each * call.scales[0];
        penalty = penalty * call.scales[1];
      }
      if (o.z_loss != 0.0) each = each + penalty;
      gradient = gradient + *call.grad_loss * (call.token_weight ? each * *call.token_weight : each);
    }
    if (call.grad_lse) gradient = gradient + *call.grad_lse * stat(rows.mean);
    if (call.grad_stats) {
      if (rows.token_log_prob >= 0) {
        gradient = gradient +
                   call.grad_stats->select(0, rows.token_log_prob) * (stat(rows.token_log_prob) + stat(rows.entropy));
      }
      gradient = gradient - call.grad_stats->select(0, rows.entropy) * stat(rows.variance);
    }
    return gradient / *call.row_scale;
  }
};

}  // namespace

RowOutputs linear_cross_entropy(LinearCrossEntropyForward call, bool deferred, bool inplace,
                                const OptionalTensor& grad_weight_into) {
  const auto &input = call.input, &weight = call.linear_weight;
  const auto wanted = wanted_gradients(input, weight, call.linear_bias);
  if (!any_of(wanted) && !is_recorded(call.row_scale)) {
    call.keep_logits = false;
    return unrecorded([&] { return dispatch::linear_cross_entropy_forward(call, inplace).rows; });
  }
  if (deferred) {
    call.keep_logits &= any_of(wanted);
    return from_visible(
        LinearCrossEntropyDeferred::apply(input, weight, call.linear_bias, call.row_scale, call, grad_weight_into));
  }
  call.needs_grad = wanted;
  return from_visible(LinearCrossEntropy::apply(input, weight, call.linear_bias, call, inplace));
}

}  // namespace fusegrad::autograd
