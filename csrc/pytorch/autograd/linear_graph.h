// The linear losses' gradients in the graph (create_graph=True): as the kernels made them, with a backward of kernels.
// With L the rows' values weighted by the upstream gradients, the gradients of input, weight and bias are L's, and its
// second derivatives are symmetric: what a backward gives them for upstream gradients v is the gradients' tangent along
// v, and what it gives the upstream gradients is the tangent of the values.
#pragma once

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/composite_parts.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {

/// How many upstream gradients a loss has at the most.
constexpr size_t kUpstream = 3;
constexpr size_t kGraphInputs = kInputs + kUpstream;  ///< input, weight, bias, then these

/// Specialised for each loss by the arguments of its backward:
///   kName                                in errors
///   inputs(call, wanted)                 what is differentiated: pointers into the call, null where a tensor is absent
///   by_kernels(call, v, wanted)          the gradients of all inputs, those of the first three where wanted
///   graph(call, made)                    the gradients of input, weight and bias that were made, as a composition
template <class Call>
struct LinearGraph;

/// Whether a second derivative may be by kernels, as far as the tensors that are differentiated say.
template <class Call>
bool kernels_take(const Call& call, const at::Tensor& input) {
  std::vector<const at::Tensor*> given;
  auto copy = call;
  for (const auto& [tensor, wanted] : LinearGraph<Call>::inputs(copy, {})) {
    if (tensor != nullptr) given.push_back(tensor);
  }
  const bool on_device = input.is_cpu() || (input.is_cuda() && input.scalar_type() != at::kDouble);
  return on_device && !is_transformed(given) && !saved_tensor_hooks_active();
}

/// The gradients as they are, [those that are defined].
template <class Call>
struct LinearGradient : NamedFunction<LinearGradient<Call>, LinearGraph<Call>::kName> {
  using Context = torch::autograd::AutogradContext;
  using List = torch::autograd::variable_list;
  using Graph = LinearGraph<Call>;

  /// The tensors are for their places in the graph alone; one that is absent has none.
  static List forward(Context* ctx, const at::Tensor& /*input*/, const at::Tensor& /*weight*/,
                      const OptionalTensor& /*bias*/, const OptionalTensor& /*upstream*/,
                      const OptionalTensor& /*upstream*/, const OptionalTensor& /*upstream*/, const Call& call,
                      const LinearGradients& made) {
    ctx->set_materialize_grads(false);
    save_arguments(ctx, call);
    List result;
    for (const auto& t : {made.input, made.weight, made.bias}) {
      if (t.defined()) result.push_back(t);
    }
    ctx->saved_data["made"] = std::vector<bool>{made.input.defined(), made.weight.defined(), made.bias.defined()};
    return result;
  }

  static List gradients(Context* ctx, const List& grads) {
    List result(kGraphInputs + 2);  // as many as forward() has arguments
    auto call = load_arguments<Call>(ctx);
    const auto made = ctx->saved_data["made"].toBoolList();
    std::array<at::Tensor, kInputs> v;
    bool any = false, transformed = false;
    for (size_t i = 0, next = 0; i < kInputs; ++i) {
      if (made[i]) v[i] = grads[next++];
      if (!v[i].defined()) continue;
      any = true;
      transformed = transformed || is_transformed({&v[i]});
    }
    if (!any) return result;
    std::array<bool, kGraphInputs> wanted{};
    const auto inputs = Graph::inputs(call, wanted);
    for (size_t i = 0, edge = 0; i < inputs.size(); ++i) {
      if (inputs.begin()[i].tensor != nullptr) wanted[i] = ctx->needs_input_grad(edge++);
    }
    const bool composed = at::GradMode::is_enabled() || transformed;
    auto found = composed ? by_composition(call, v, wanted)
                          : Graph::by_kernels(call, v, {wanted[kInput], wanted[kWeight], wanted[kBias]});
    for (size_t i = 0; i < found.size(); ++i) {
      if (wanted[i]) result[i] = found[i];
    }
    return result;
  }

 private:
  // As a graph of any order.
  static List by_composition(Call& call, const std::array<at::Tensor, kInputs>& v,
                             const std::array<bool, kGraphInputs>& wanted) {
    const bool again = at::GradMode::is_enabled();
    const at::AutoGradMode enabled(true);
    const auto inputs = composite::aliases(Graph::inputs(call, wanted));
    const auto graph = Graph::graph(call, {v[kInput].defined(), v[kWeight].defined(), v[kBias].defined()});
    List outputs, upstream;
    for (size_t i = 0; i < kInputs; ++i) {
      if (!v[i].defined()) continue;
      outputs.push_back(graph[i]);
      upstream.push_back(v[i]);
    }
    return composite::differentiate(outputs, upstream, inputs, again);
  }
};

/// The gradients `made`, undefined where they are not wanted, in the graph.
template <class Call>
LinearGradients in_graph(const Call& call, const LinearGradients& made) {
  auto copy = call;
  std::array<OptionalTensor, kGraphInputs> edges;
  size_t i = 0;
  for (const auto& [tensor, wanted] : LinearGraph<Call>::inputs(copy, {})) {
    if (tensor != nullptr) edges[i] = *tensor;
    ++i;
  }
  const auto results = LinearGradient<Call>::apply(*edges[kInput], *edges[kWeight], edges[kBias], edges[kInputs],
                                                   edges[kInputs + 1], edges[kInputs + 2], call, made);
  auto next = results.begin();
  const auto take = [&](const at::Tensor& t) { return t.defined() ? *next++ : at::Tensor(); };
  LinearGradients graph;
  graph.input = take(made.input);
  graph.weight = take(made.weight);
  graph.bias = take(made.bias);
  return graph;
}

}  // namespace fusegrad::autograd
