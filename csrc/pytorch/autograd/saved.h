// How the losses' Functions keep what their backward needs.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstring>

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

/// Whether autograd records a call with these inputs, absent ones among them.
inline bool requires_grad(const at::Tensor& input) { return input.requires_grad(); }
inline bool requires_grad(const std::optional<at::Tensor>& input) { return input && input->requires_grad(); }
inline bool requires_grad(at::TensorList inputs) {
  return std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) { return input.requires_grad(); });
}
template <class... Inputs>
bool is_recorded(const Inputs&... inputs) {
  return at::GradMode::is_enabled() && (requires_grad(inputs) || ...);
}

/// A forward's outputs where autograd has nothing to record, without the node of a Function, which takes a microsecond.
template <class Forward>
auto unrecorded(Forward&& forward) {
  at::AutoDispatchBelowAutograd below;
  return forward();
}

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

/// A number as an integer of the same bits.
template <class T>
int64_t bits_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(int64_t));
  int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T from_bits(int64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

/// Keeps a backward's arguments: tensors that are there as the Function's saved variables, behind the `first` ones, the
/// rest as one list of integers, the first of which has a bit for each tensor that is there. Which gradients are wanted
/// (bool[3]) the backward finds out itself. Every call pays for this, so it is one list, and of the cheapest kind.
template <class Backward>
void save_arguments(torch::autograd::AutogradContext* ctx, const Backward& arguments,
                    torch::autograd::variable_list first = {}) {
  auto tensors = std::move(first);
  tensors.reserve(tensors.size() + 8);
  c10::List<int64_t> numbers;
  numbers.reserve(24);
  int64_t bit = 1, there = saved_tensor_hooks_active() ? bit : 0;
  numbers.push_back(there);
  const auto put = [&](const at::Tensor& tensor) {
    bit *= 2;
    if (!tensor.defined()) return;
    there += bit;
    tensors.push_back(tensor);
  };
  for_each_field<Backward>([&](const auto& field) {
    using Value = typename std::decay_t<decltype(field)>::Value;
    const auto& value = field.of(arguments);
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      put(value);
    } else if constexpr (std::is_same_v<Value, std::optional<at::Tensor>>) {
      put(value ? *value : at::Tensor());
    } else if constexpr (requires { value.has_value(); }) {
      numbers.push_back(value.has_value());
      if (value.has_value()) numbers.push_back(bits_of(*value));
    } else if constexpr (requires { value.begin(); } && !std::is_same_v<Value, std::array<bool, 3>>) {
      numbers.push_back(static_cast<int64_t>(value.size()));
      for (const auto each : value) numbers.push_back(each);
    } else if constexpr (!std::is_same_v<Value, std::array<bool, 3>>) {
      numbers.push_back(bits_of(value));
    }
  });
  numbers.set(0, there);
  ctx->saved_data["arguments"] = std::move(numbers);
  ctx->save_for_backward(std::move(tensors));
}

/// `saved`: the Function's saved variables, of which the first `skipped` are others.
template <class Backward>
Backward load_arguments(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list saved,
                        ptrdiff_t skipped = 0) {
  Backward arguments;
  auto tensor = saved.begin() + skipped;
  const auto numbers = ctx->saved_data["arguments"].toIntVector();
  auto number = numbers.begin() + 1;
  int64_t there = numbers.front();
  for_each_field<Backward>([&](const auto& field) {
    using Value = typename std::decay_t<decltype(field)>::Value;
    auto& value = field.of(arguments);
    if constexpr (std::is_same_v<Value, at::Tensor> || std::is_same_v<Value, std::optional<at::Tensor>>) {
      there /= 2;
      if (there % 2 != 0) value = std::move(*tensor++);
    } else if constexpr (requires { value.has_value(); }) {
      if (*number++ != 0) value = from_bits<typename Value::value_type>(*number++);
    } else if constexpr (requires { value.begin(); } && !std::is_same_v<Value, std::array<bool, 3>>) {
      const auto count = *number++;
      value.assign(number, number + count);
      number += count;
    } else if constexpr (!std::is_same_v<Value, std::array<bool, 3>>) {
      value = from_bits<Value>(*number++);
    }
  });
  return arguments;
}

/// Whether saved-tensor hooks were active when save_arguments() was called.
inline bool hooks_were_active(torch::autograd::AutogradContext* ctx) {
  return ctx->saved_data["arguments"].toIntList().get(0) % 2 != 0;
}

template <class Backward>
Backward load_arguments(torch::autograd::AutogradContext* ctx) {
  return load_arguments<Backward>(ctx, ctx->get_saved_variables());
}

/// Which gradients of a linear loss are wanted. Inside Function::forward nothing requires grad any more: asked here, by
/// the arguments themselves.
inline std::array<bool, 3> wanted_gradients(const at::Tensor& input, const at::Tensor& weight,
                                            const std::optional<at::Tensor>& bias) {
  return {is_recorded(input), is_recorded(weight), is_recorded(bias)};
}

inline bool any_of(std::array<bool, 3> wanted) { return wanted[0] || wanted[1] || wanted[2]; }

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

/// An upstream gradient for each row, 0 for ignored ones: what was saved for them is 0, whose product with NaN is not.
inline at::Tensor of_kept_rows(const at::Tensor& upstream, const at::Tensor& labels, int64_t ignore_index) {
  return upstream.masked_fill(labels.eq(ignore_index), 0);
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

/// Whether a backward is to make its gradients as a graph (create_graph=True), of the arguments that it kept.
inline bool makes_graph(torch::autograd::AutogradContext* ctx) {
  return at::GradMode::is_enabled() && ctx->saved_data.count("arguments") != 0;
}

/// Whether saved-tensor hooks were active in a forward that keeps arguments but where it writes in place.
inline bool hooks_of_either(torch::autograd::AutogradContext* ctx) {
  const auto inplace = ctx->saved_data.find("hooks");
  return inplace == ctx->saved_data.end() ? hooks_were_active(ctx) : inplace->second.toBool();
}

/// Keeps the gradients that a linear loss made for an upstream gradient of 1, and the arguments that a graph of them is
/// made of. With `inplace` the input's gradient lies in the input, and there is no such graph.
constexpr ptrdiff_t kMade = 4;  // saved variables before the arguments
template <class Backward>
void save_linear_gradients(torch::autograd::AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, const LinearGradients& gradients,
                           const at::Tensor& scales, bool inplace, const Backward& arguments) {
  ctx->set_materialize_grads(false);
  const bool half = input.scalar_type() == at::kHalf;
  torch::autograd::variable_list saved{inplace ? input : gradients.input, gradients.weight,
                                       bias ? gradients.bias : at::Tensor(), half ? scales : at::Tensor()};
  if (!inplace) return save_arguments(ctx, arguments, std::move(saved));
  // The inputs are saved for their place in the graph: a second differentiation must find its way to the error.
  saved.insert(saved.end(), {input, weight});
  if (bias) saved.push_back(*bias);
  ctx->saved_data["hooks"] = saved_tensor_hooks_active();
  ctx->save_for_backward(std::move(saved));
}

/// The backward of what save_linear_gradients() kept, for a Function of `arguments` arguments.
inline torch::autograd::variable_list scale_linear_gradients(const char* op, torch::autograd::AutogradContext* ctx,
                                                             const torch::autograd::variable_list& saved,
                                                             const at::Tensor& upstream, size_t arguments) {
  torch::autograd::variable_list result(arguments);
  const bool hooks = hooks_of_either(ctx);
  const auto factor = saved[3].defined() ? deferred_factor(saved[3], at::kHalf) : std::nullopt;
  const at::TensorList inputs = at::TensorList(saved).slice(kMade);
  for (size_t i = 0; i < kInputs; ++i) {
    if (!saved[i].defined() || !ctx->needs_input_grad(i)) continue;
    result[i] = refuse_double_backward(op, scale_saved(saved[i], upstream, factor, hooks), inputs);
  }
  return result;
}

/// The same in fresh tensors, for a graph.
inline LinearGradients scaled_gradients(const torch::autograd::variable_list& saved, const at::Tensor& upstream,
                                        std::array<bool, 3> wanted) {
  at::AutoDispatchBelowAutograd guard;
  const auto factor = saved[3].defined() ? deferred_factor(saved[3], at::kHalf) : std::nullopt;
  const auto of = [&](size_t i) {
    return wanted[i] ? dispatch::scale_gradient(saved[i].detach(), upstream, factor) : at::Tensor();
  };
  return {of(kInput), of(kWeight), of(kBias)};
}

}  // namespace fusegrad::autograd
