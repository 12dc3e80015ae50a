// linear_jsd's gradients in the graph (create_graph=True), as linear_cross_entropy_graph.cpp has them.
#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/composite_parts.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_jsd";

// The tangents of the gradients along v, and the gradient of grad_loss.
variable_list by_kernels(const LinearJsdBackward& call, const std::array<Tensor, 3>& v, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowAutograd guard;
  const auto& s = call.settings;
  const int64_t rows = call.student_input.size(0);
  const auto acc = call.student_input.options().dtype(acc_type(call.student_input.scalar_type()));
  // What a row's parts are multiplied by in the loss, but for their weights.
  auto factor = call.scales.numel() == 0 ? at::ones({}, acc) : composite::scale_of(call.scales, 0);
  if (call.rows.token_weight) factor = factor * *call.rows.token_weight;
  const auto upstream = at::zeros({2, rows}, acc);
  upstream[0].copy_(call.grad_loss * factor * s.soft_weight);
  upstream[1].copy_(call.grad_loss * factor * s.hard_weight);
  const auto given = [](const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
  const auto [values, gradients] =
      dispatch::linear_jsd_second({.student_input = call.student_input,
                                   .heads = call.heads,
                                   .input_tangent = given(v[0]),
                                   .weight_tangent = given(v[1]),
                                   .bias_tangent = given(v[2]),
                                   .upstream = upstream,
                                   .settings = {.labels = call.rows.labels,
                                                .ignore_index = s.ignore_index,
                                                .beta = s.beta,
                                                .student_temperature = s.student_temperature,
                                                .teacher_temperature = s.teacher_temperature,
                                                .student_softcap = s.student_softcap,
                                                .teacher_softcap = s.teacher_softcap,
                                                .student_logit_scale = s.student_logit_scale,
                                                .teacher_logit_scale = s.teacher_logit_scale,
                                                .log_probs = false},
                                   .hard = s.hard_weight != 0.0,
                                   .linear = call.linear,
                                   .needs_grad = wanted});
  // A part without weight may be infinite.
  auto loss = at::zeros({rows}, acc);
  if (s.soft_weight != 0.0) loss = loss + values[0] * s.soft_weight;
  if (s.hard_weight != 0.0) loss = loss + values[1] * s.hard_weight;
  loss = loss * factor;
  return {wanted[0] ? gradients.input : Tensor(), wanted[1] ? gradients.weight : Tensor(),
          wanted[2] ? gradients.bias : Tensor(), call.grad_loss.dim() == 0 ? loss.sum() : loss};
}

// The same of the composition, as a graph of any order.
variable_list by_composition(LinearJsdBackward call, const std::array<Tensor, 3>& v, std::array<bool, 4> wanted) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode enabled(true);
  const auto inputs = composite::aliases({{&call.student_input, wanted[0]},
                                          {&call.heads.student_weight, wanted[1]},
                                          composite::input_of(call.heads.student_bias, wanted[2]),
                                          {&call.grad_loss, wanted[3]}});
  call.needs_grad = {v[0].defined(), v[1].defined(), v[2].defined()};
  const auto graph = composite::linear_jsd_gradients(call);
  const std::array made{graph.input, graph.weight, graph.bias};
  variable_list outputs, upstream;
  for (size_t i = 0; i < 3; ++i) {
    if (!v[i].defined()) continue;
    outputs.push_back(made[i]);
    upstream.push_back(v[i]);
  }
  auto found = composite::differentiate(outputs, upstream, inputs);
  for (auto& g : found) {
    if (!again && g.defined()) g = g.detach();
  }
  return found;
}

// The gradients as they are, [those that are defined].
struct LinearJsdGradient : NamedFunction<LinearJsdGradient, "linear_jsd"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                               const OptionalTensor& /*bias: edge*/, const Tensor& /*grad_loss: edge*/,
                               const LinearJsdBackward& call, const LinearGradients& made) {
    ctx->set_materialize_grads(false);
    save_arguments(ctx, call);
    variable_list result;
    std::vector<bool> there;
    const std::array all{made.input, made.weight, made.bias};
    for (size_t i = 0; i < 3; ++i) {
      there.push_back(call.needs_grad[i]);
      if (call.needs_grad[i]) result.push_back(all[i]);
    }
    ctx->saved_data["made"] = there;
    return result;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kArguments = 6;  // of forward()
    variable_list result(kArguments);
    const auto call = load_arguments<LinearJsdBackward>(ctx);
    const auto made = ctx->saved_data["made"].toBoolList();
    std::array<Tensor, 3> v;
    bool any = false, transformed = false;
    for (size_t i = 0, next = 0; i < 3; ++i) {
      if (made[i]) v[i] = grads[next++];
      if (!v[i].defined()) continue;
      any = true;
      transformed = transformed || is_transformed({&v[i]});
    }
    if (!any) return result;
    const bool bias = call.heads.student_bias.has_value();
    const std::array wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1), bias && ctx->needs_input_grad(2),
                            ctx->needs_input_grad(bias ? 3 : 2)};
    const bool composed = at::GradMode::is_enabled() || transformed;
    auto found = composed ? by_composition(call, v, wanted) : by_kernels(call, v, {wanted[0], wanted[1], wanted[2]});
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) result[i] = found[i];
    }
    return result;
  }
};

}  // namespace

bool kernels_have_second(const LinearJsdBackward& call) {
  const auto& s = call.settings;
  const auto &input = call.student_input, &weight = call.heads.student_weight;
  const bool on_device = input.is_cpu() || (input.is_cuda() && input.scalar_type() != at::kDouble);
  std::vector<const Tensor*> given{&input, &weight, &call.grad_loss};
  if (call.heads.student_bias) given.push_back(&*call.heads.student_bias);
  const bool scaled_labels = s.hard_weight != 0.0 && s.student_logit_scale != 1.0;
  return on_device && !call.rows.teacher_index && call.heads.teacher_weight && !scaled_labels &&
         call.linear.vocab_size.value_or(weight.size(0)) != 0 && !is_transformed(given) && !saved_tensor_hooks_active();
}

LinearGradients linear_jsd_graph(const LinearJsdBackward& call, const LinearGradients& made) {
  auto results = LinearJsdGradient::apply(call.student_input, call.heads.student_weight, call.heads.student_bias,
                                          call.grad_loss, call, made);
  auto next = results.begin();
  const auto take = [&](bool there) { return there ? *next++ : Tensor(); };
  LinearGradients graph;
  graph.input = take(call.needs_grad[0]);
  graph.weight = take(call.needs_grad[1]);
  graph.bias = take(call.needs_grad[2]);
  return graph;
}

}  // namespace fusegrad::autograd
