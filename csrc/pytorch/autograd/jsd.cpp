#include <algorithm>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
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
  static constexpr ptrdiff_t kSaved = 3;  // variables before the arguments

  static variable_list forward(AutogradContext* ctx, const Tensor& student, const Tensor& teacher,
                               const JsdForward& call, bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, gradients] = dispatch::jsd_forward(call, inplace);
    const auto& wanted = call.needs_grad;
    if (!wanted[0] && !wanted[1]) return visible(out, call.settings);
    ctx->set_materialize_grads(false);
    const auto made = [&](size_t i) { return wanted[i] ? gradients[i] : Tensor(); };
    const bool half = student.scalar_type() == at::kHalf;
    variable_list saved{inplace ? student : made(0), made(1), half ? out.scales : Tensor()};
    if (inplace) {
      ctx->saved_data["hooks"] = saved_tensor_hooks_active();
      // Those that get a gradient are saved for their place in the graph: a second differentiation must find its way to
      // the error. Saved after the write, so that the version counter is the one that the write left.
      if (wanted[0]) saved.push_back(student);
      if (wanted[1]) saved.push_back(teacher);
      if (call.settings.reduction == at::Reduction::None && call.rows.labels) {
        saved.push_back(*call.rows.labels);
        ctx->saved_data["ignore_index"] = call.settings.ignore_index;
      }
      ctx->save_for_backward(std::move(saved));
    } else {
      save_arguments(ctx,
                     JsdBackward{.grad_loss = {},
                                 .student = student,
                                 .teacher = teacher,
                                 .rows = call.rows,
                                 .scales = out.scales,
                                 .settings = call.settings,
                                 .shards = call.shards,
                                 .different = call.different},
                     std::move(saved));
    }
    return visible(out, call.settings);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const std::array wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    if (makes_graph(ctx)) {
      auto call = load_arguments<JsdBackward>(ctx, saved, kSaved);
      call.grad_loss = grads[0];
      const auto graph = composite::jsd_gradients(call, wanted);
      std::copy(graph.begin(), graph.end(), result.begin());
      return result;
    }
    auto upstream = grads[0];
    if (const auto at = ctx->saved_data.find("ignore_index"); at != ctx->saved_data.end()) {
      upstream = of_kept_rows(upstream, saved.back(), at->second.toInt());
    } else if (upstream.dim() != 0 && ctx->saved_data.count("arguments") != 0) {
      const auto call = load_arguments<JsdBackward>(ctx, saved, kSaved);
      if (call.rows.labels) upstream = of_kept_rows(upstream, *call.rows.labels, call.settings.ignore_index);
    }
    const bool hooks = hooks_of_either(ctx);
    const auto factor = saved[2].defined() ? deferred_factor(saved[2], at::kHalf) : std::nullopt;
    const at::TensorList inputs = at::TensorList(saved).slice(kSaved);
    for (size_t i = 0; i < 2; ++i) {
      if (!wanted[i]) continue;
      result[i] = refuse_double_backward(kOp, scale_saved(saved[i], upstream, factor, hooks), inputs);
    }
    return result;
  }
};

}  // namespace

JsdOutputs jsd(JsdForward call, bool inplace) {
  // Inside Function::forward nothing requires grad any more.
  call.needs_grad = {is_recorded(call.student), is_recorded(call.teacher)};
  if (!call.needs_grad[0] && !call.needs_grad[1]) {
    return unrecorded([&] { return dispatch::jsd_forward(call, inplace).first; });
  }
  return from_visible_jsd(Jsd::apply(call.student, call.teacher, call, inplace));
}

}  // namespace fusegrad::autograd
