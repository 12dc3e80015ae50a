// linear_cross_entropy's second derivatives: see linear_graph.h.
#include "pytorch/autograd/linear_graph.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

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
variable_list second_by_kernels(const LinearCrossEntropyBackward& call, const std::array<Tensor, 3>& v,
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
    variable_list stats(static_cast<size_t>(places.stats.count), at::zeros_like(values[kRowEntropy]));
    const auto put = [&](int64_t at, int64_t row) {
      if (at >= 0) stats[static_cast<size_t>(at)] = values[row];
    };
    put(places.stats.entropy, kRowEntropy);
    put(places.stats.token_log_prob, kRowLogProb);
    result[5] = at::stack(stats);  // not copies into one tensor, which a batch of values does not fit into
  }
  return result;
}

}  // namespace

template <>
struct LinearGraph<LinearCrossEntropyBackward> {
  static constexpr OpName kName = "linear_cross_entropy";

  static std::array<composite::Input, kGraphInputs> inputs(LinearCrossEntropyBackward& c,
                                                           const std::array<bool, kGraphInputs>& wanted) {
    return {{{&c.input, wanted[0]},
             {&c.linear_weight, wanted[1]},
             composite::input_of(c.linear_bias, wanted[2]),
             composite::input_of(c.grad_loss, wanted[3]),
             composite::input_of(c.grad_lse, wanted[4]),
             composite::input_of(c.grad_stats, wanted[5])}};
  }
  static variable_list by_kernels(const LinearCrossEntropyBackward& call, const std::array<Tensor, 3>& v,
                                  std::array<bool, 3> wanted) {
    return second_by_kernels(call, v, wanted);
  }
  static std::array<Tensor, 4> graph(const LinearCrossEntropyBackward& call, std::array<bool, 3> made) {
    return composite::linear_cross_entropy_gradients(call, {made[0], made[1], made[2], false});
  }
};

bool kernels_have_second(const LinearCrossEntropyBackward& call) {
  return !call.shards && call.linear.logit_scale == 1.0 && !call.row_scale && call.linear_weight.size(0) != 0 &&
         kernels_take(call, call.input);
}

LinearGradients linear_cross_entropy_graph(LinearCrossEntropyBackward call, const LinearGradients& made) {
  call.logits.reset();
  return in_graph(call, made);
}

}  // namespace fusegrad::autograd
