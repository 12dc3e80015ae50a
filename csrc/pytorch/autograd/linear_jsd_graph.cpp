// linear_jsd's second derivatives: see linear_graph.h.
#include "pytorch/autograd/linear_graph.h"
#include "pytorch/ops/jsd_settings.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// The tangents of the gradients along v, and the gradient of grad_loss.
variable_list second_by_kernels(const LinearJsdBackward& call, const std::array<Tensor, 3>& v,
                                std::array<bool, 3> wanted) {
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
  const auto [values, gradients] = dispatch::linear_jsd_second({.student_input = call.student_input,
                                                                .heads = call.heads,
                                                                .input_tangent = given(v[0]),
                                                                .weight_tangent = given(v[1]),
                                                                .bias_tangent = given(v[2]),
                                                                .upstream = upstream,
                                                                .settings = soft_settings(call.rows, s),
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

}  // namespace

template <>
struct LinearGraph<LinearJsdBackward> {
  static constexpr OpName kName = "linear_jsd";

  static std::array<composite::Input, kGraphInputs> inputs(LinearJsdBackward& c,
                                                           const std::array<bool, kGraphInputs>& wanted) {
    return {{{&c.student_input, wanted[0]},
             {&c.heads.student_weight, wanted[1]},
             composite::input_of(c.heads.student_bias, wanted[2]),
             {&c.grad_loss, wanted[3]},
             {nullptr, false},
             {nullptr, false}}};
  }
  static variable_list by_kernels(const LinearJsdBackward& call, const std::array<Tensor, 3>& v,
                                  std::array<bool, 3> wanted) {
    return second_by_kernels(call, v, wanted);
  }
  static std::array<Tensor, 3> graph(LinearJsdBackward call, std::array<bool, 3> made) {
    call.needs_grad = made;
    const auto found = composite::linear_jsd_gradients(call);
    return {found.input, found.weight, found.bias};
  }
};

bool kernels_have_second(const LinearJsdBackward& call) {
  const auto& s = call.settings;
  const bool scaled_labels = s.hard_weight != 0.0 && s.student_logit_scale != 1.0;
  return !call.shards && !call.rows.teacher_index && call.heads.teacher_weight && !scaled_labels &&
         call.linear.vocab_size.value_or(call.heads.student_weight.size(0)) != 0 &&
         kernels_take(call, call.student_input);
}

LinearGradients linear_jsd_graph(const LinearJsdBackward& call, LinearGradients made) {
  if (!call.needs_grad[kInput]) made.input.reset();
  if (!call.needs_grad[kWeight]) made.weight.reset();
  if (!call.needs_grad[kBias]) made.bias.reset();
  return in_graph(call, made);
}

}  // namespace fusegrad::autograd
