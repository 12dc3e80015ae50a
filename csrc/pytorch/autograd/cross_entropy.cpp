#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "cross_entropy";

// Saves the logits and one lse a row; the gradient is computed in the backward, for whatever upstream gradient.
struct CrossEntropy : NamedFunction<CrossEntropy, "cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*logits: edge*/, const Tensor& /*target: edge*/,
                               const CrossEntropyForward& call) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::cross_entropy_forward(call, /*inplace=*/false);
    ctx->set_materialize_grads(false);
    save_arguments(ctx, CrossEntropyBackward{.grad_loss = {},
                                             .grad_lse = {},
                                             .logits = call.logits,
                                             .target = call.target,
                                             .weight = call.weight,
                                             .lse = out.lse,
                                             .stats = out.stats,
                                             .scales = out.scales,
                                             .token_weight = call.token_weight,
                                             .options = call.options,
                                             .grad_stats = {},
                                             .shards = call.shards,
                                             .different = call.different});
    return visible(out, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    auto call = load_arguments<CrossEntropyBackward>(ctx);
    variable_list result(3);
    if (!put_upstream(kOp, grads, call)) return result;
    if (at::GradMode::is_enabled()) {  // create_graph=True
      const std::array wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
      const auto graph = composite::cross_entropy_gradients(call, wanted);
      result[0] = graph[0];
      result[1] = graph[1];
      return result;
    }
    if (ctx->needs_input_grad(0)) {
      const BelowAutogradUnlessRecording below;
      result[0] = dispatch::cross_entropy_backward(call);
    }
    if (ctx->needs_input_grad(1) && call.grad_loss) {
      result[1] = target_gradient(call);
    }
    return result;
  }

  // d/dt of sum_c w[c] * ((1 - e) * t[c] + e / V) * (lse - z[c]), for targets of class probabilities.
  static Tensor target_gradient(const CrossEntropyBackward& call) {
    const auto& o = call.options;
    auto z = call.logits.to(call.lse.scalar_type());
    if (o.softcap != 0.0) z = (z / o.softcap).tanh() * o.softcap;
    auto gradient = (call.lse.unsqueeze(1) - z) + call.stats[StatRows(true, 0).lse_low].unsqueeze(1);
    if (call.weight) gradient = gradient * *call.weight;
    auto scale = *call.grad_loss * (1.0 - o.label_smoothing);
    if (call.token_weight) scale = scale * *call.token_weight;
    if (call.scales.numel() != 0) scale = scale / call.scales[3];
    return (gradient * (scale.dim() == 0 ? scale : scale.unsqueeze(1))).to(call.target.scalar_type());
  }
};

// The forward writes the gradient for an upstream gradient of 1 into the logits, which are what is saved.
struct CrossEntropyInplace : NamedFunction<CrossEntropyInplace, "cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const CrossEntropyForward& call) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::cross_entropy_forward(call, /*inplace=*/true);
    ctx->set_materialize_grads(false);
    // Saved after the write, so that its version counter is the one that the write left.
    variable_list saved{logits, out.scales};
    if (call.options.reduction == at::Reduction::None && !call.target.is_floating_point()) {
      saved.push_back(call.target);
      ctx->saved_data["ignore_index"] = call.options.ignore_index;
    }
    ctx->save_for_backward(std::move(saved));
    return visible(out, call.options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    variable_list result(2);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return result;
    const auto upstream =
        saved.size() > 2 ? of_kept_rows(grads[0], saved[2], ctx->saved_data["ignore_index"].toInt()) : grads[0];
    const auto gradient = scale_saved(saved[0], upstream, deferred_factor(saved[1], saved[0].scalar_type()),
                                      /*hooks_were_active=*/false);
    result[0] = refuse_double_backward(kOp, gradient, {saved[0]});
    return result;
  }
};

}  // namespace

RowOutputs cross_entropy(const CrossEntropyForward& call, bool inplace) {
  if (!is_recorded(call.logits, call.target)) {
    return unrecorded([&] { return dispatch::cross_entropy_forward(call, inplace); });
  }
  return from_visible(inplace ? CrossEntropyInplace::apply(call.logits, call)
                              : CrossEntropy::apply(call.logits, call.target, call));
}

}  // namespace fusegrad::autograd
