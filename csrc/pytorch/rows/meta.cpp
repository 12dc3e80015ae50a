// Meta kernels: the shapes and dtypes that the ops of rows/ return.
#include <torch/library.h>

#include <type_traits>

#include "fusegrad/options.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

RowTuple row_outputs(const c10::SymInt& rows, const Tensor& like, const Tensor& target, const OptionalTensor& weight,
                     int64_t reduction, double label_smoothing, int64_t aux) {
  const auto acc = like.options().dtype(acc_type(like.scalar_type())).requires_grad(false);
  const StatRows stat_rows(dense_target(target, weight.has_value(), label_smoothing), aux);
  const bool predict = (aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0;
  return {reduction == at::Reduction::None ? at::empty_symint({rows}, acc) : at::empty({}, acc),
          at::empty_symint({rows}, acc), at::empty_symint({c10::SymInt(stat_rows.count), rows}, acc),
          at::empty_symint({predict ? rows : c10::SymInt(0)}, acc.dtype(at::kLong)),
          at::empty({reduction == at::Reduction::Mean ? 4 : 0}, acc)};
}

Tensor gradient_like(bool wanted, const Tensor& tensor) {
  const auto options = tensor.options().requires_grad(false);
  return wanted ? at::empty_symint(tensor.sym_sizes(), options) : at::empty({0}, options);
}

RowTuple cross_entropy_forward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                               const OptionalTensor& /*token_weight*/, const OptionalTensor& /*normalizer*/,
                               int64_t /*ignore_index*/, int64_t reduction, double label_smoothing, double /*z_loss*/,
                               double /*softcap*/, int64_t aux) {
  return row_outputs(logits.sym_size(0), logits, target, weight, reduction, label_smoothing, aux);
}

Tensor cross_entropy_backward(const OptionalTensor& /*grad_loss*/, const OptionalTensor& /*grad_lse*/,
                              const Tensor& logits, const Tensor& /*target*/, const OptionalTensor& /*weight*/,
                              const Tensor& /*lse*/, const Tensor& /*stats*/, const Tensor& /*scales*/,
                              const OptionalTensor& /*token_weight*/, int64_t /*ignore_index*/,
                              double /*label_smoothing*/, double /*z_loss*/, double /*softcap*/) {
  return gradient_like(true, logits);
}

template <bool inplace>
LinearTuple linear_cross_entropy_forward(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                         const OptionalTensor& linear_bias, const OptionalTensor& weight,
                                         const OptionalTensor& /*token_weight*/, const OptionalTensor& /*normalizer*/,
                                         int64_t /*ignore_index*/, int64_t reduction, double label_smoothing,
                                         double /*z_loss*/, double /*softcap*/, int64_t aux, double /*logit_scale*/,
                                         std::optional<at::ScalarType> /*accumulate_dtype*/,
                                         std::optional<int64_t> /*workspace_mib*/, std::array<bool, 3> needs_grad) {
  return std::tuple_cat(
      row_outputs(input.sym_size(0), input, target, weight, reduction, label_smoothing, aux),
      std::make_tuple(gradient_like(needs_grad[0] && !inplace, input), gradient_like(needs_grad[1], linear_weight),
                      gradient_like(needs_grad[2], linear_bias.value_or(input))));
}

LinearGradientTuple linear_cross_entropy_backward(
    const OptionalTensor& /*grad_loss*/, const OptionalTensor& /*grad_lse*/, const Tensor& input,
    const Tensor& linear_weight, const Tensor& /*target*/, const OptionalTensor& linear_bias,
    const OptionalTensor& /*weight*/, const Tensor& /*lse*/, const Tensor& /*stats*/, const Tensor& /*scales*/,
    const OptionalTensor& /*token_weight*/, int64_t /*ignore_index*/, double /*label_smoothing*/, double /*z_loss*/,
    double /*softcap*/, double /*logit_scale*/, std::optional<int64_t> /*workspace_mib*/,
    std::array<bool, 3> needs_grad) {
  return {gradient_like(needs_grad[0], input), gradient_like(needs_grad[1], linear_weight),
          gradient_like(needs_grad[2], linear_bias.value_or(input))};
}

JsdOutputs jsd_outputs(const c10::SymInt& rows, const Tensor& like, int64_t reduction, int64_t aux) {
  const auto acc = like.options().dtype(acc_type(like.scalar_type())).requires_grad(false);
  const bool averaged = reduction == at::Reduction::Mean || reduction == kBatchMean;
  return {reduction == at::Reduction::None ? at::empty_symint({rows}, acc) : at::empty({}, acc),
          at::empty_symint({c10::SymInt(jsd_stat_count(aux)), rows}, acc), at::empty({averaged ? 4 : 0}, acc)};
}

template <bool inplace>
JsdTuple jsd_forward(const Tensor& student, const Tensor& teacher, const OptionalTensor& /*teacher_index*/,
                     const OptionalTensor& /*tail_log_prob*/, const OptionalTensor& /*labels*/,
                     const OptionalTensor& /*token_weight*/, const OptionalTensor& /*normalizer*/,
                     at::ArrayRef<double> /*numbers*/, bool /*log_probs*/, bool /*renormalize*/,
                     int64_t /*ignore_index*/, int64_t reduction, int64_t aux, std::array<bool, 2> needs_grad,
                     bool /*partial*/) {
  const auto out = jsd_outputs(student.sym_size(0), student, reduction, aux);
  return {out.loss, out.stats, out.scales, gradient_like(needs_grad[0] && !inplace, student),
          gradient_like(needs_grad[1], teacher)};
}

template <bool inplace>
LinearJsdTuple linear_jsd_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                  const Tensor& /*teacher*/, const OptionalTensor& /*teacher_weight*/,
                                  const OptionalTensor& /*teacher_bias*/, const OptionalTensor& /*teacher_index*/,
                                  const OptionalTensor& /*tail_log_prob*/, const OptionalTensor& /*labels*/,
                                  const OptionalTensor& /*token_weight*/, const OptionalTensor& /*normalizer*/,
                                  at::ArrayRef<double> /*numbers*/, bool /*log_probs*/, bool /*renormalize*/,
                                  int64_t /*ignore_index*/, int64_t reduction, int64_t aux,
                                  std::optional<int64_t> /*vocab_size*/,
                                  std::optional<at::ScalarType> /*accumulate_dtype*/,
                                  std::optional<int64_t> /*workspace_mib*/, std::array<bool, 3> needs_grad) {
  const auto out = jsd_outputs(input.sym_size(0), input, reduction, aux);
  return {out.loss,
          out.stats,
          out.scales,
          gradient_like(needs_grad[0] && !inplace, input),
          gradient_like(needs_grad[1], weight),
          gradient_like(needs_grad[2], bias.value_or(input))};
}

LinearGradientTuple linear_jsd_backward(const Tensor& /*grad_loss*/, const Tensor& input, const Tensor& weight,
                                        const OptionalTensor& bias, const Tensor& /*teacher*/,
                                        const OptionalTensor& /*teacher_weight*/,
                                        const OptionalTensor& /*teacher_bias*/, const OptionalTensor& /*teacher_index*/,
                                        const OptionalTensor& /*tail_log_prob*/, const OptionalTensor& /*labels*/,
                                        const OptionalTensor& /*token_weight*/, const Tensor& /*scales*/,
                                        at::ArrayRef<double> /*numbers*/, bool /*renormalize*/,
                                        int64_t /*ignore_index*/, std::optional<int64_t> /*vocab_size*/,
                                        std::optional<at::ScalarType> /*accumulate_dtype*/,
                                        std::optional<int64_t> /*workspace_mib*/, std::array<bool, 3> needs_grad) {
  return {gradient_like(needs_grad[0], input), gradient_like(needs_grad[1], weight),
          gradient_like(needs_grad[2], bias.value_or(input))};
}

Tensor scale_gradient(const Tensor& gradient, const Tensor& /*scale*/, const OptionalTensor& /*factor*/) {
  return gradient_like(true, gradient);
}

template <class Result>
Result cross_entropy_shard_gradient(const Tensor& logits, const OptionalTensor& /*grad_loss*/,
                                    const OptionalTensor& /*grad_lse*/, const Tensor& /*target*/,
                                    const OptionalTensor& /*weight*/, const Tensor& /*lse*/, const Tensor& /*lse_low*/,
                                    const OptionalTensor& /*mass*/, const Tensor& /*scales*/,
                                    const OptionalTensor& /*token_weight*/, int64_t /*ignore_index*/,
                                    double /*label_smoothing*/, double /*z_loss*/, double /*softcap*/,
                                    int64_t /*vocab_start*/, int64_t /*vocab*/) {
  if constexpr (!std::is_void_v<Result>) return gradient_like(true, logits);
}

void scale_gradient_(const Tensor& /*gradient*/, const Tensor& /*scale*/, const OptionalTensor& /*factor*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("cross_entropy_forward", TORCH_FN(cross_entropy_forward));
  m.impl("cross_entropy_forward_", TORCH_FN(cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_FN(cross_entropy_backward));
  m.impl("cross_entropy_shard_gradient", TORCH_FN(cross_entropy_shard_gradient<Tensor>));
  m.impl("cross_entropy_shard_gradient_", TORCH_FN(cross_entropy_shard_gradient<void>));
  m.impl("jsd_forward", TORCH_FN(jsd_forward<false>));
  m.impl("jsd_forward_", TORCH_FN(jsd_forward<true>));
  m.impl("linear_cross_entropy_forward", TORCH_FN(linear_cross_entropy_forward<false>));
  m.impl("linear_cross_entropy_forward_", TORCH_FN(linear_cross_entropy_forward<true>));
  m.impl("linear_cross_entropy_backward", TORCH_FN(linear_cross_entropy_backward));
  m.impl("linear_jsd_forward", TORCH_FN(linear_jsd_forward<false>));
  m.impl("linear_jsd_forward_", TORCH_FN(linear_jsd_forward<true>));
  m.impl("linear_jsd_backward", TORCH_FN(linear_jsd_backward));
  m.impl("scale_gradient", TORCH_FN(scale_gradient));
  m.impl("scale_gradient_", TORCH_FN(scale_gradient_));
}

}  // namespace fusegrad
