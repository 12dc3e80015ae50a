#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The logits of a few columns of each row: two products carry their gradient back, whatever the budget.
struct SupportLogitsOf : NamedFunction<SupportLogitsOf, "linear_cross_entropy"> {
  static Tensor forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                        const OptionalTensor& /*bias: edge*/, const SupportLogits& call,
                        std::optional<at::ScalarType> accumulate_dtype, const OptionalTensor& grad_weight_into) {
    at::AutoDispatchBelowAutograd guard;
    static const Op<SupportLogits, Tensor> op("fusegrad::support_logits");
    ctx->set_materialize_grads(false);
    save_arguments(ctx, SupportLogitsBackward{.grad = Tensor(),
                                              .input = call.input,
                                              .linear_weight = call.linear_weight,
                                              .linear_bias = call.linear_bias,
                                              .index = call.index,
                                              .accumulate_dtype = accumulate_dtype,
                                              .workspace_mib = call.workspace_mib,
                                              .aux = call.aux,
                                              .shards = call.shards});
    save_grad_weight_into(ctx, grad_weight_into);
    return op(call);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    static const Op<SupportLogitsBackward, std::tuple<Tensor, Tensor, Tensor>> op("fusegrad::support_logits_backward");
    auto call = load_arguments<SupportLogitsBackward>(ctx);
    if (!grads[0].defined()) return variable_list(kArguments);
    call.grad = grads[0];
    call.needs_grad = needed_gradients(ctx, call.linear_bias.has_value());
    const auto into = saved_grad_weight_into(ctx);
    if (!into || !call.needs_grad[kWeight]) {
      return linear_result(std::make_from_tuple<LinearGradients>(op(call)), call.needs_grad, kArguments);
    }
    const auto out = std::make_from_tuple<LinearGradients>(add(SupportLogitsBackwardInto{*into, call}));
    return added_result("linear_cross_entropy", out, call.needs_grad, kArguments, {call.input, call.linear_weight});
  }

 private:
  static constexpr size_t kArguments = 6;  // of forward()

  static std::tuple<Tensor, Tensor, Tensor> add(const SupportLogitsBackwardInto& call) {
    static const Op<SupportLogitsBackwardInto, std::tuple<Tensor, Tensor, Tensor>> op(
        "fusegrad::support_logits_backward_into");
    return op(call);
  }
};

}  // namespace

Tensor support_logits(const SupportLogits& call, std::optional<at::ScalarType> accumulate_dtype,
                      const OptionalTensor& grad_weight_into) {
  return SupportLogitsOf::apply(call.input, call.linear_weight, call.linear_bias, call, accumulate_dtype,
                                grad_weight_into);
}

}  // namespace fusegrad::autograd
