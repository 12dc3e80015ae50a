// linear_cross_entropy's gradients in the graph (create_graph=True): as the kernels made them, with a backward of
// kernels. With L the values' sum weighted by the upstream gradients, the gradients of input, weight and bias are L's,
// and its second derivatives are symmetric: what a backward gives them for upstream gradients v is the gradients'
// tangent along v, and what it gives the upstream gradients is the tangent of the values.
#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/composite_parts.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_cross_entropy";

// One of RowScales', or 1 for a reduction without.
Tensor scale_in(const LinearCrossEntropyBackward& call, int64_t i, const at::TensorOptions& acc) {
  return call.scales.numel() == 0 ? at::ones({}, acc) : composite::scale_of(call.scales, i);
}

// What the upstream gradients of the outputs are to the rows' values: linear in them, with these factors.
struct Factors {
  Tensor loss, square;  // [N] or 0-d: of a row's cross entropy and of its lse^2 in the loss

  explicit Factors(const LinearCrossEntropyBackward& call) {
    const auto acc = call.input.options().dtype(acc_type(call.input.scalar_type()));
    const auto of_row = [&](const Tensor& scale) { return call.token_weight ? scale * *call.token_weight : scale; };
    loss = of_row(scale_in(call, 0, acc));
    if (call.options.z_loss == 0.0) return;
    square = of_row(scale_in(call, 1, acc)) * call.options.z_loss;
    if (call.target.is_floating_point()) return;
    square = square.expand({call.target.size(0)}).masked_fill(call.target.eq(call.options.ignore_index), 0);
  }
};

struct Places {
  StatRows stats;
  explicit Places(const LinearCrossEntropyBackward& call)
      : stats(dense_target(call.target, call.weight.has_value(), call.options.label_smoothing), call.options.aux) {}
};

// The tangents of the gradients along v, and the gradients of the upstream gradients.
variable_list by_kernels(const LinearCrossEntropyBackward& call, const std::array<Tensor, 3>& v,
                         std::array<bool, 3> wanted) {
  at::AutoDispatchBelowAutograd guard;
  const Factors factors(call);
  const Places places(call);
  const int64_t rows = call.input.size(0);
  const auto acc = call.input.options().dtype(acc_type(call.input.scalar_type()));
  const auto given = [&](const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
  LinearCrossEntropySecond second{.input = call.input,
                                  .linear_weight = call.linear_weight,
                                  .linear_bias = call.linear_bias,
                                  .input_tangent = given(v[0]),
                                  .weight_tangent = given(v[1]),
                                  .bias_tangent = given(v[2]),
                                  .upstream = at::zeros({kRowValues, rows}, acc),
                                  .upstream_of_square = {},
                                  .settings = {.target = call.target,
                                               .weight = call.weight,
                                               .ignore_index = call.options.ignore_index,
                                               .label_smoothing = call.options.label_smoothing,
                                               .softcap = call.options.softcap,
                                               .aux = call.options.aux & (kAuxEntropy | kAuxTokenLogProb)},
                                  .linear = call.linear,
                                  .needs_grad = wanted};
  auto& u = second.upstream;
  if (call.grad_lse) second.settings.aux |= kAuxLse;
  if (call.grad_loss) {
    u[kRowCrossEntropy].copy_(*call.grad_loss * factors.loss);
    if (factors.square.defined()) second.upstream_of_square = (*call.grad_loss * factors.square).expand({rows});
  }
  if (call.grad_lse) u[kRowLse].copy_(*call.grad_lse);
  if (call.grad_stats) {
    if (places.stats.entropy >= 0) u[kRowEntropy].copy_((*call.grad_stats)[places.stats.entropy]);
    if (places.stats.token_log_prob >= 0) u[kRowLogProb].copy_((*call.grad_stats)[places.stats.token_log_prob]);
  }
  const auto [values, gradients] = dispatch::linear_cross_entropy_second(second);

  variable_list result{wanted[0] ? gradients.input : Tensor(),
                       wanted[1] ? gradients.weight : Tensor(),
                       wanted[2] ? gradients.bias : Tensor(),
                       {},
                       {},
                       {}};
  if (call.grad_loss) {
    auto loss = values[kRowCrossEntropy] * factors.loss;
    if (factors.square.defined()) loss = loss + 2 * values[kRowValues] * values[kRowLse] * factors.square;
    result[3] = call.grad_loss->dim() == 0 ? loss.sum() : loss;
  }
  if (call.grad_lse) result[4] = values[kRowLse];
  if (call.grad_stats) {
    result[5] = at::zeros_like(*call.grad_stats);
    if (places.stats.entropy >= 0) result[5][places.stats.entropy].copy_(values[kRowEntropy]);
    if (places.stats.token_log_prob >= 0) result[5][places.stats.token_log_prob].copy_(values[kRowLogProb]);
  }
  return result;
}

// The same of the composition, as a graph of any order.
variable_list by_composition(LinearCrossEntropyBackward call, const std::array<Tensor, 3>& v,
                             std::array<bool, 6> wanted) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode enabled(true);
  const auto inputs = composite::aliases({{&call.input, wanted[0]},
                                          {&call.linear_weight, wanted[1]},
                                          composite::input_of(call.linear_bias, wanted[2]),
                                          composite::input_of(call.grad_loss, wanted[3]),
                                          composite::input_of(call.grad_lse, wanted[4]),
                                          composite::input_of(call.grad_stats, wanted[5])});
  const auto graph =
      composite::linear_cross_entropy_gradients(call, {v[0].defined(), v[1].defined(), v[2].defined(), false});
  variable_list outputs, upstream;
  for (size_t i = 0; i < 3; ++i) {
    if (!v[i].defined()) continue;
    outputs.push_back(graph[i]);
    upstream.push_back(v[i]);
  }
  auto found = composite::differentiate(outputs, upstream, inputs);
  for (auto& g : found) {
    if (!again && g.defined()) g = g.detach();
  }
  return found;
}

// The gradients as they are, [those that are defined].
struct LinearCrossEntropyGradient : NamedFunction<LinearCrossEntropyGradient, "linear_cross_entropy"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input: edge*/, const Tensor& /*weight: edge*/,
                               const OptionalTensor& /*bias: edge*/, const OptionalTensor& /*grad_loss: edge*/,
                               const OptionalTensor& /*grad_lse: edge*/, const OptionalTensor& /*grad_stats: edge*/,
                               const LinearCrossEntropyBackward& call, const LinearGradients& made) {
    ctx->set_materialize_grads(false);
    save_arguments(ctx, call);
    variable_list result;
    for (const auto& t : {made.input, made.weight, made.bias}) {
      if (t.defined()) result.push_back(t);
    }
    ctx->saved_data["made"] = std::vector<bool>{made.input.defined(), made.weight.defined(), made.bias.defined()};
    return result;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kArguments = 8;  // of forward()
    variable_list result(kArguments);
    const auto call = load_arguments<LinearCrossEntropyBackward>(ctx);
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
    size_t edge = 2;
    const auto needs = [&](bool there) { return there && ctx->needs_input_grad(edge++); };
    std::array<bool, 6> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    wanted[2] = needs(call.linear_bias.has_value());
    wanted[3] = needs(call.grad_loss.has_value());
    wanted[4] = needs(call.grad_lse.has_value());
    wanted[5] = needs(call.grad_stats.has_value());
    const bool composed = at::GradMode::is_enabled() || transformed;
    auto found = composed ? by_composition(call, v, wanted) : by_kernels(call, v, {wanted[0], wanted[1], wanted[2]});
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) result[i] = found[i];
    }
    return result;
  }
};

}  // namespace

bool kernels_have_second(const LinearCrossEntropyBackward& call) {
  const auto& input = call.input;
  const bool on_device = input.is_cpu() || (input.is_cuda() && input.scalar_type() != at::kDouble);
  std::vector<const Tensor*> given{&input, &call.linear_weight};
  for (const auto* t : {&call.linear_bias, &call.grad_loss, &call.grad_lse, &call.grad_stats}) {
    if (*t) given.push_back(&**t);
  }
  return on_device && call.linear.logit_scale == 1.0 && !call.row_scale && call.linear_weight.size(0) != 0 &&
         !is_transformed(given) && !saved_tensor_hooks_active();
}

LinearGradients linear_cross_entropy_graph(LinearCrossEntropyBackward call, const LinearGradients& made) {
  call.logits.reset();
  auto results = LinearCrossEntropyGradient::apply(call.input, call.linear_weight, call.linear_bias, call.grad_loss,
                                                   call.grad_lse, call.grad_stats, call, made);
  auto next = results.begin();
  const auto take = [&](const Tensor& t) { return t.defined() ? *next++ : Tensor(); };
  LinearGradients graph;
  graph.input = take(made.input);
  graph.weight = take(made.weight);
  graph.bias = take(made.bias);
  return graph;
}

}  // namespace fusegrad::autograd
