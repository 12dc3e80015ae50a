#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "cross_entropy";

// Saves the logits and one lse a row; the gradient is computed in the backward, for whatever upstream gradient.
struct CrossEntropy : NamedFunction<CrossEntropy, "cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                               const RowArguments& rows, const LossOptions& options) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::cross_entropy_forward(logits, rows, options, /*inplace=*/false);
    ctx->set_materialize_grads(false);
    save_options(ctx, options);
    ctx->save_for_backward({logits, target, rows.weight.value_or(Tensor()), rows.token_weight.value_or(Tensor()),
                            out.lse, out.stats, out.scales});
    return visible(out, options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 2);
    const auto saved = ctx->get_saved_variables();
    const auto options = load_options(ctx);
    RowArguments rows;
    rows.target = saved[1];
    rows.weight = optional_of(saved[2]);
    rows.token_weight = optional_of(saved[3]);
    RowOutputs forward;
    forward.lse = saved[4];
    forward.stats = saved[5];
    forward.scales = saved[6];
    const auto& logits = saved[0];
    variable_list result(4);
    const auto grad_lse = lse_gradient(grads);
    if (!grads[0].defined() && !grad_lse.defined()) return result;
    if (ctx->needs_input_grad(0)) {
      const BelowAutogradUnlessRecording below;
      result[0] = dispatch::cross_entropy_backward(grads[0], grad_lse, logits, rows, options, forward);
    }
    if (ctx->needs_input_grad(1) && grads[0].defined()) {
      result[1] =
          refuse_double_backward(kOp, target_gradient(grads[0], logits, rows, options, forward), {logits, saved[1]});
    }
    return result;
  }

  // d/dt of sum_c w[c] * ((1 - e) * t[c] + e / V) * (lse - z[c]), for targets of class probabilities.
  static Tensor target_gradient(const Tensor& grad_loss, const Tensor& logits, const RowArguments& rows,
                                const LossOptions& options, const RowOutputs& forward) {
    auto z = logits.to(forward.lse.scalar_type());
    if (options.softcap != 0.0) z = (z / options.softcap).tanh() * options.softcap;
    auto gradient = (forward.lse.unsqueeze(1) - z) + forward.stats[StatRows(true, 0).lse_low].unsqueeze(1);
    if (rows.weight) gradient = gradient * *rows.weight;
    auto scale = grad_loss * (1.0 - options.label_smoothing);
    if (rows.token_weight) scale = scale * *rows.token_weight;
    if (forward.scales.numel() != 0) scale = scale / forward.scales[3];
    return (gradient * (scale.dim() == 0 ? scale : scale.unsqueeze(1))).to(rows.target.scalar_type());
  }
};

// The forward writes the gradient for an upstream gradient of 1 into the logits, which are what is saved.
struct CrossEntropyInplace : NamedFunction<CrossEntropyInplace, "cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const RowArguments& rows,
                               const LossOptions& options) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::cross_entropy_forward(logits, rows, options, /*inplace=*/true);
    ctx->set_materialize_grads(false);
    // Saved after the write, so that its version counter is the one that the write left.
    ctx->save_for_backward({logits, out.scales});
    return visible(out, options);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    variable_list result(3);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return result;
    const auto gradient = scale_saved(saved[0], grads[0], deferred_factor(saved[1], saved[0].scalar_type()),
                                      /*hooks_were_active=*/false);
    result[0] = refuse_double_backward(kOp, gradient, {saved[0]});
    return result;
  }
};

}  // namespace

RowOutputs cross_entropy(const Tensor& logits, const RowArguments& rows, const LossOptions& options, bool inplace) {
  return from_visible(inplace ? CrossEntropyInplace::apply(logits, rows, options)
                              : CrossEntropy::apply(logits, rows.target, rows, options));
}

}  // namespace fusegrad::autograd
