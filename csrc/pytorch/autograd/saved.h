// How the losses' Functions keep what their backward needs.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/ops/faults.h"

namespace fusegrad::autograd {

/// An autograd Function whose backward is `T::gradients`, in whose errors the op has its name.
template <class T, OpName kOp>
struct NamedFunction : torch::autograd::Function<T> {
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    return named_errors(kOp.text, [&] { return T::gradients(ctx, grads); });
  }
};

/// In a backward that records no graph, the ops below skip autograd's keys, whose kernels are boxed and slow.
struct BelowAutogradUnlessRecording {
  std::optional<at::AutoDispatchBelowAutograd> guard;
  BelowAutogradUnlessRecording() {
    if (!at::GradMode::is_enabled()) guard.emplace();
  }
};

/// What a Function returns: the loss alone, which costs least, or with it what aux values are made of.
inline torch::autograd::variable_list visible(const RowOutputs& out, const RowOptions& options) {
  if (options.aux == 0) return {out.loss};
  return {out.loss, out.lse, out.stats, out.predicted_tokens};
}

inline RowOutputs from_visible(const torch::autograd::variable_list& out) {
  if (out.size() == 1) return {out[0], {}, {}, {}, {}};
  return {out[0], out[1], out[2], out[3], {}};
}

inline torch::autograd::variable_list visible(const JsdOutputs& out, const JsdSettings& settings) {
  if (settings.aux == 0) return {out.loss};
  return {out.loss, out.stats};
}

inline JsdOutputs from_visible_jsd(const torch::autograd::variable_list& out) {
  return {out[0], out.size() == 1 ? at::Tensor() : out[1], {}};
}

/// The upstream gradients of what visible() returned, put where a backward takes them. False: there are none.
template <class Backward>
bool put_upstream(const char* op, const torch::autograd::variable_list& grads, Backward& call) {
  check_differentiable_outputs(op, grads, 3);
  const auto gradient = [&](size_t i) {
    return i < grads.size() && grads[i].defined() ? std::optional<at::Tensor>(grads[i]) : std::nullopt;
  };
  call.grad_loss = gradient(0);
  call.grad_lse = gradient(1);
  call.grad_stats = gradient(2);
  return call.grad_loss || call.grad_lse || call.grad_stats;
}

/// Keeps a backward's arguments: tensors as the Function's saved variables, the rest in one list. Which gradients are
/// wanted (bool[3]) the backward finds out itself.
template <class Backward>
void save_arguments(torch::autograd::AutogradContext* ctx, const Backward& arguments) {
  torch::autograd::variable_list tensors;
  c10::List<c10::IValue> values(c10::AnyType::get());
  for_each_field<Backward>([&](const auto& field) {
    using Value = typename std::decay_t<decltype(field)>::Value;
    const auto& value = field.of(arguments);
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      tensors.push_back(value);
    } else if constexpr (std::is_same_v<Value, std::optional<at::Tensor>>) {
      tensors.push_back(value.value_or(at::Tensor()));
    } else if constexpr (!std::is_same_v<Value, std::array<bool, 3>>) {
      values.push_back(c10::IValue(value));
    }
  });
  ctx->saved_data["arguments"] = std::move(values);
  ctx->save_for_backward(std::move(tensors));
}

template <class Backward>
Backward load_arguments(torch::autograd::AutogradContext* ctx) {
  Backward arguments;
  auto tensors = ctx->get_saved_variables();
  auto tensor = tensors.begin();
  const auto values = ctx->saved_data["arguments"].toListRef();
  auto next = values.begin();
  for_each_field<Backward>([&](const auto& field) {
    using Value = typename std::decay_t<decltype(field)>::Value;
    auto& value = field.of(arguments);
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      value = std::move(*tensor++);
    } else if constexpr (std::is_same_v<Value, std::optional<at::Tensor>>) {
      if (tensor->defined()) value = std::move(*tensor);
      ++tensor;
    } else if constexpr (!std::is_same_v<Value, std::array<bool, 3>>) {
      value = (next++)->template to<Value>();
    }
  });
  return arguments;
}

/// Which gradients of a linear loss are wanted. Inside Function::forward nothing requires grad any more: asked here, by
/// the arguments themselves.
inline std::array<bool, 3> wanted_gradients(const at::Tensor& input, const at::Tensor& weight,
                                            const std::optional<at::Tensor>& bias) {
  const bool enabled = at::GradMode::is_enabled();
  return {enabled && input.requires_grad(), enabled && weight.requires_grad(),
          enabled && bias.has_value() && bias->requires_grad()};
}

/// The factor that the forward left out of a saved gradient: it applies 1 / D itself, but for float16, whose range
/// is too small for it (see RowScales).
inline std::optional<at::Tensor> deferred_factor(const at::Tensor& scales, at::ScalarType dtype) {
  if (scales.numel() == 0 || dtype != at::kHalf) return std::nullopt;
  return scales.narrow(0, 2, 1);
}

/// A gradient saved for an upstream gradient of 1, times the upstream gradient: in the buffer itself where this
/// is its last use, else in a fresh tensor, since AccumulateGrad steals what it is given.
inline at::Tensor scale_saved(const at::Tensor& saved, const at::Tensor& upstream,
                              const std::optional<at::Tensor>& factor, bool hooks_were_active) {
  const BelowAutogradUnlessRecording below;
  if (!may_reuse_saved(saved, hooks_were_active)) return dispatch::scale_gradient(saved.detach(), upstream, factor);
  dispatch::scale_gradient_(saved, upstream, factor);
  return saved.detach();
}

/// Places of the linear losses' differentiable arguments in their Functions, and of what their backwards return. An
/// absent bias has no edge, and the last place.
enum { kInput, kWeight, kBias, kInputs };

/// Which of them the engine asks for, in a backward.
inline std::array<bool, 3> needed_gradients(torch::autograd::AutogradContext* ctx, bool bias) {
  return {ctx->needs_input_grad(kInput), ctx->needs_input_grad(kWeight), bias && ctx->needs_input_grad(kBias)};
}

/// The tensor to which a backward adds the weight's gradient. It is no saved variable: other backwards that add to it
/// in between raise its version, which is no error here.
inline void save_grad_weight_into(torch::autograd::AutogradContext* ctx, const std::optional<at::Tensor>& into) {
  if (into) ctx->saved_data["grad_weight_into"] = *into;
}
inline std::optional<at::Tensor> saved_grad_weight_into(torch::autograd::AutogradContext* ctx) {
  const auto found = ctx->saved_data.find("grad_weight_into");
  if (found == ctx->saved_data.end()) return std::nullopt;
  return found->second.toTensor();
}

/// What a backward returns for a Function of `arguments` arguments.
inline torch::autograd::variable_list linear_result(const LinearGradients& gradients, std::array<bool, 3> needs_grad,
                                                    size_t arguments) {
  torch::autograd::variable_list result(arguments);
  if (needs_grad[kInput]) result[kInput] = gradients.input;
  if (needs_grad[kWeight]) result[kWeight] = gradients.weight;
  if (needs_grad[kBias]) result[kBias] = gradients.bias;
  return result;
}

/// The same from an op that added the weight's gradient to another tensor. Ops that mutate have no kernel at autograd's
/// keys that would refuse a second differentiation.
inline torch::autograd::variable_list added_result(const char* op, const LinearGradients& gradients,
                                                   std::array<bool, 3> needs_grad, size_t arguments,
                                                   at::TensorList inputs) {
  needs_grad[kWeight] = false;
  auto result = linear_result(gradients, needs_grad, arguments);
  for (auto& gradient : result) gradient = refuse_double_backward(op, gradient, inputs);
  return result;
}

/// Keeps the gradients that a linear loss made for an upstream gradient of 1, and `more` behind them; in place the
/// input's lies in the input.
inline void save_linear_gradients(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  const LinearGradients& gradients, const at::Tensor& scales, bool inplace,
                                  const std::vector<at::Tensor>& more = {}) {
  ctx->set_materialize_grads(false);
  ctx->saved_data["hooks"] = saved_tensor_hooks_active();
  ctx->saved_data["half"] = input.scalar_type() == at::kHalf;
  // The inputs are saved for their place in the graph: a second differentiation must find its way to the error.
  torch::autograd::variable_list saved{
      input,          weight, bias.value_or(at::Tensor()), inplace ? input : gradients.input, gradients.weight,
      gradients.bias, scales};
  saved.insert(saved.end(), more.begin(), more.end());
  ctx->save_for_backward(std::move(saved));
}

/// The backward of what save_linear_gradients() kept, for a Function of `arguments` arguments.
inline torch::autograd::variable_list scale_linear_gradients(const char* op, torch::autograd::AutogradContext* ctx,
                                                             const torch::autograd::variable_list& grads,
                                                             size_t arguments) {
  check_differentiable_outputs(op, grads, 1);
  const auto saved = ctx->get_saved_variables();
  torch::autograd::variable_list result(arguments);
  if (!grads[0].defined()) return result;
  const bool hooks = ctx->saved_data["hooks"].toBool();
  const auto factor = deferred_factor(saved[6], ctx->saved_data["half"].toBool() ? at::kHalf : at::kFloat);
  const std::vector<at::Tensor> inputs(saved.begin(), saved.begin() + (saved[kBias].defined() ? 3 : 2));
  for (size_t i = 0; i < kInputs; ++i) {
    if (!saved[i].defined() || !ctx->needs_input_grad(i)) continue;
    result[i] = refuse_double_backward(op, scale_saved(saved[kInputs + i], grads[0], factor, hooks), inputs);
  }
  return result;
}

}  // namespace fusegrad::autograd
