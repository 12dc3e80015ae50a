#include "pytorch/attention/pair_projection.h"

#include "pytorch/autograd/composite_parts.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr size_t kTensors = 5;

Tensor forward_op(const PairProjection& call) {
  static const Op<PairProjection, Tensor> op("fusegrad::pair_projection_forward");
  return op(call);
}

// Keeps its inputs: what the backward needs of the norm is computed again.
struct PairProjectionOf : NamedFunction<PairProjectionOf, "pair_projection"> {
  static Tensor forward(AutogradContext* ctx, const Tensor& /*pair: edge*/, const OptionalTensor& /*norm_weight*/,
                        const OptionalTensor& /*norm_bias*/, const Tensor& /*projection_weight*/,
                        const OptionalTensor& /*projection_bias*/, const PairProjection& call) {
    at::AutoDispatchBelowAutograd guard;
    ctx->set_materialize_grads(false);
    save_arguments(ctx, call);
    return forward_op(call);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    static const Op<PairProjectionBackward, PairProjectionGradients> op("fusegrad::pair_projection_backward");
    variable_list result(kTensors + 1);
    if (!grads[0].defined()) return result;
    PairProjectionBackward call{.grad = grads[0], .of = load_arguments<PairProjection>(ctx), .needs_grad = {}};
    PairProjection& of = call.of;
    // Edges are counted without those that are absent.
    size_t edge = 0;
    const auto wanted = [&](const OptionalTensor& t) { return t.has_value() && ctx->needs_input_grad(edge++); };
    call.needs_grad = {wanted(of.pair), wanted(of.norm_weight), wanted(of.norm_bias), wanted(of.projection_weight),
                       wanted(of.projection_bias)};
    if (at::GradMode::is_enabled()) {  // create_graph=True
      const auto pointer = [](OptionalTensor& t) { return t ? &*t : nullptr; };
      const std::array<composite::Input, kTensors> inputs{{{&of.pair, call.needs_grad[0]},
                                                           {pointer(of.norm_weight), call.needs_grad[1]},
                                                           {pointer(of.norm_bias), call.needs_grad[2]},
                                                           {&of.projection_weight, call.needs_grad[3]},
                                                           {pointer(of.projection_bias), call.needs_grad[4]}}};
      auto found = composite::pulled([&] { return variable_list{pair_projection_formula(of)}; }, grads, inputs);
      found.resize(result.size());
      return found;
    }
    const BelowAutogradUnlessRecording below;
    const auto made = op(call);
    const std::array all{std::get<0>(made), std::get<1>(made), std::get<2>(made), std::get<3>(made), std::get<4>(made)};
    for (size_t i = 0; i < kTensors; ++i) {
      if (call.needs_grad[i]) result[i] = all[i];
    }
    return result;
  }
};

}  // namespace

Tensor pair_projection(const PairProjection& c) {
  if (!is_recorded(c.pair, c.norm_weight, c.norm_bias, c.projection_weight, c.projection_bias)) {
    return unrecorded([&] { return forward_op(c); });
  }
  return PairProjectionOf::apply(c.pair, c.norm_weight, c.norm_bias, c.projection_weight, c.projection_bias, c);
}

}  // namespace fusegrad::autograd
