#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "jsd";

// Computes the gradients for an upstream gradient of 1 in the forward, since they need the divergence of whole rows,
// and scales them in the backward. With `inplace` the student's lies in the student.
struct Jsd : NamedFunction<Jsd, "jsd"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& student, const Tensor& teacher,
                               const JsdForward& call, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, gradients] = dispatch::jsd_forward(call, inplace);
    ctx->set_materialize_grads(false);
    ctx->saved_data["hooks"] = saved_tensor_hooks_active();
    // Those that get a gradient are saved for their place in the graph: a second differentiation must find its way to
    // the error. Saved after the write, so that the version counter is the one that the write left.
    ctx->save_for_backward({call.needs_grad[0] ? student : Tensor(), call.needs_grad[1] ? teacher : Tensor(),
                            inplace ? student : gradients[0], gradients[1], out.scales});
    return visible(out, call.settings);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const bool hooks = ctx->saved_data["hooks"].toBool();
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < 2; ++i) {
      if (saved[i].defined()) inputs.push_back(saved[i]);
    }
    for (size_t i = 0; i < 2; ++i) {
      if (!saved[i].defined() || !ctx->needs_input_grad(i)) continue;
      const auto& gradient = saved[2 + i];
      const auto scaled = scale_saved(gradient, grads[0], deferred_factor(saved[4], gradient.scalar_type()), hooks);
      result[i] = refuse_double_backward(kOp, scaled, inputs);
    }
    return result;
  }
};

}  // namespace

JsdOutputs jsd(JsdForward call, bool inplace) {
  // Inside Function::forward nothing requires grad any more.
  const bool enabled = at::GradMode::is_enabled();
  call.needs_grad = {enabled && call.student.requires_grad(), enabled && call.teacher.requires_grad()};
  return from_visible_jsd(Jsd::apply(call.student, call.teacher, call, inplace));
}

}  // namespace fusegrad::autograd
