#include "ops/front.h"

namespace fusegrad {

using at::Tensor;

LossTuple to_front(const RowOutputs& out, const RowArguments& rows, const LossOptions& options) {
  const c10::SymIntArrayRef shape(rows.row_shape);
  const auto empty = [&] { return at::empty({0}, out.lse.options()); };
  // Values without a gradient are cut off the graph, so that a gradient for them cannot be asked for.
  const auto value = [&](int64_t bit, const Tensor& tensor) {
    return (options.aux & bit) != 0 ? tensor.detach().reshape_symint(shape) : empty();
  };
  auto accuracy = empty();
  if ((options.aux & kAuxTokenAccuracy) != 0) {
    // At ignored rows the prediction is -1: it must not equal an ignore_index of -1.
    const auto right =
        out.predicted_tokens.eq(rows.target).logical_and(rows.target.ne(options.ignore_index));
    accuracy = right.to(out.lse.scalar_type()).reshape_symint(shape);
  }
  return {options.reduction == at::Reduction::None ? out.loss.reshape_symint(shape) : out.loss,
          (options.aux & kAuxLse) != 0 ? out.lse.reshape_symint(shape) : empty(),
          value(kAuxZLoss, out.z_loss),
          accuracy,
          value(kAuxPredictedTokens, out.predicted_tokens),
          value(kAuxEntropy, out.entropy),
          value(kAuxTokenLogProb, out.token_log_prob)};
}

LossOutput from_front(const LossTuple& out, const Aux& aux) {
  const auto& [loss, lse, z_loss, token_accuracy, predicted_tokens, entropy, token_log_prob] = out;
  const auto wanted = [](bool flag, const Tensor& tensor) { return flag ? tensor : Tensor(); };
  return {loss,
          {wanted(aux.lse(), lse), wanted(aux.z_loss(), z_loss), wanted(aux.token_accuracy(), token_accuracy),
           wanted(aux.predicted_tokens(), predicted_tokens), wanted(aux.entropy(), entropy),
           wanted(aux.token_log_prob(), token_log_prob)}};
}

int64_t aux_bits(const Aux& aux) {
  return (aux.lse() ? kAuxLse : 0) | (aux.z_loss() ? kAuxZLoss : 0) |
         (aux.token_accuracy() ? kAuxTokenAccuracy : 0) | (aux.predicted_tokens() ? kAuxPredictedTokens : 0) |
         (aux.entropy() ? kAuxEntropy : 0) | (aux.token_log_prob() ? kAuxTokenLogProb : 0);
}

std::optional<Tensor> normalizer_on(const Normalizer& normalizer, const Tensor& input) {
  if (const auto* number = std::get_if<double>(&normalizer)) {
    return at::full({}, *number, input.options().dtype(acc_type(input.scalar_type())).requires_grad(false));
  }
  if (const auto* tensor = std::get_if<Tensor>(&normalizer)) return *tensor;
  return std::nullopt;
}

}  // namespace fusegrad
