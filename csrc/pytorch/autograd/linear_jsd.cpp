#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/saved.h"

namespace fusegrad::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_jsd";

// Computes the gradients for an upstream gradient of 1 in the forward, chunk by chunk, and scales them in the
// backward. With `inplace` the input's gradient lies in the input.
struct LinearJsd : NamedFunction<LinearJsd, "linear_jsd"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const std::optional<Tensor>& bias, const JsdTeacher& teacher, const JsdRows& rows,
                               const JsdSettings& settings, const LinearOptions& linear, std::array<bool, 3> needs_grad,
                               bool inplace) {
    at::AutoDispatchBelowAutograd guard;
    const auto [out, gradients] =
        dispatch::linear_jsd_forward(input, weight, bias, teacher, rows, settings, linear, needs_grad, inplace);
    save_linear_gradients(ctx, input, weight, bias, gradients, out.scales, inplace);
    return visible(out, settings);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    return scale_linear_gradients(kOp, ctx, grads, 9);
  }
};

// Keeps no gradients and computes the logits of both a second time in the backward: reduction 'none', and where memory
// must be least.
struct LinearJsdRecompute : NamedFunction<LinearJsdRecompute, "linear_jsd"> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                               const std::optional<Tensor>& bias, const JsdTeacher& teacher, const JsdRows& rows,
                               const JsdSettings& settings, const LinearOptions& linear) {
    at::AutoDispatchBelowAutograd guard;
    const auto out = dispatch::linear_jsd_forward(input, weight, bias, teacher, rows, settings, linear,
                                                  {false, false, false}, /*inplace=*/false)
                         .first;
    ctx->set_materialize_grads(false);
    auto& data = ctx->saved_data;
    data["numbers"] = settings.numbers();
    data["renormalize"] = settings.renormalize;
    data["ignore_index"] = settings.ignore_index;
    data["vocab_size"] = linear.vocab_size;
    data["workspace_mib"] = linear.workspace_mib;
    data["accumulate_dtype"] = linear.accumulate_dtype.has_value()
                                   ? std::optional<int64_t>(static_cast<int64_t>(*linear.accumulate_dtype))
                                   : std::nullopt;
    ctx->save_for_backward({input, weight, bias.value_or(Tensor()), teacher.input, teacher.weight.value_or(Tensor()),
                            teacher.bias.value_or(Tensor()), rows.teacher_index.value_or(Tensor()),
                            rows.labels.value_or(Tensor()), rows.token_weight.value_or(Tensor()), out.scales,
                            rows.tail_log_prob.value_or(Tensor())});
    return visible(out, settings);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    check_differentiable_outputs(kOp, grads, 1);
    const auto saved = ctx->get_saved_variables();
    variable_list result(7);
    if (!grads[0].defined()) return result;
    auto& data = ctx->saved_data;
    const JsdTeacher teacher{saved[3], optional_of(saved[4]), optional_of(saved[5])};
    JsdRows rows;
    rows.teacher_index = optional_of(saved[6]);
    rows.labels = optional_of(saved[7]);
    rows.token_weight = optional_of(saved[8]);
    rows.tail_log_prob = optional_of(saved[10]);
    const auto settings = JsdSettings::from(data["numbers"].toDoubleVector(), /*log_probs=*/false,
                                            data["renormalize"].toBool(), data["ignore_index"].toInt(), 0, 0);
    LinearOptions linear;
    linear.vocab_size = data["vocab_size"].toOptional<int64_t>();
    linear.workspace_mib = data["workspace_mib"].toOptional<int64_t>();
    if (const auto dtype = data["accumulate_dtype"].toOptional<int64_t>()) {
      linear.accumulate_dtype = static_cast<at::ScalarType>(*dtype);
    }
    std::array<bool, 3> needs_grad{};
    for (size_t i = 0; i < kInputs; ++i) needs_grad[i] = saved[i].defined() && ctx->needs_input_grad(i);
    const auto gradients =
        dispatch::linear_jsd_backward(grads[0], saved[kInput], saved[kWeight], optional_of(saved[kBias]), teacher, rows,
                                      saved[9], settings, linear, needs_grad);
    if (needs_grad[kInput]) result[kInput] = gradients.input;
    if (needs_grad[kWeight]) result[kWeight] = gradients.weight;
    if (needs_grad[kBias]) result[kBias] = gradients.bias;
    return result;
  }
};

}  // namespace

JsdOutputs linear_jsd(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const JsdTeacher& teacher, const JsdRows& rows, const JsdSettings& settings,
                      const LinearOptions& linear, bool recompute, bool inplace) {
  return from_visible_jsd(recompute ? LinearJsdRecompute::apply(input, weight, bias, teacher, rows, settings, linear)
                                    : LinearJsd::apply(input, weight, bias, teacher, rows, settings, linear,
                                                       wanted_gradients(input, weight, bias), inplace));
}

}  // namespace fusegrad::autograd
