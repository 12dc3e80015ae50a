#include "ops/front.h"

namespace fusegrad {

using at::Tensor;

LossTuple to_front(const RowOutputs& out, const RowArguments& rows, const LossOptions& options) {
  const c10::SymIntArrayRef shape(rows.row_shape);
  std::vector<Tensor> aux;
  if (options.aux != 0) {
    const StatRows stat_rows(dense_target(rows.target, rows.weight.has_value(), options.label_smoothing), options.aux);
    // Values without a gradient are cut off the graph, so that a gradient for them cannot be asked for.
    const auto put = [&](int64_t bit, const auto& value) {
      if ((options.aux & bit) != 0) aux.push_back(value().reshape_symint(shape));
    };
    const auto stat = [&](int64_t row) { return out.stats.detach().select(0, row); };
    put(kAuxLse, [&] { return out.lse; });
    put(kAuxZLoss, [&] { return stat(stat_rows.z_loss); });
    put(kAuxTokenAccuracy, [&] {
      // At ignored rows the prediction is -1: it must not equal an ignore_index of -1.
      const auto right = out.predicted_tokens.eq(rows.target).logical_and(rows.target.ne(options.ignore_index));
      return right.to(out.lse.scalar_type());
    });
    put(kAuxPredictedTokens, [&] { return out.predicted_tokens; });
    put(kAuxEntropy, [&] { return stat(stat_rows.entropy); });
    put(kAuxTokenLogProb, [&] { return stat(stat_rows.token_log_prob); });
  }
  return {options.reduction == at::Reduction::None ? out.loss.reshape_symint(shape) : out.loss, std::move(aux)};
}

LossTuple to_front(const JsdOutputs& out, const JsdRows& rows, const JsdSettings& settings) {
  const c10::SymIntArrayRef shape(rows.row_shape);
  std::vector<Tensor> aux;
  for (int64_t i = 0; i < jsd_stat_count(settings.aux); ++i) {
    aux.push_back(out.stats.detach().select(0, i).reshape_symint(shape));
  }
  return {settings.reduction == at::Reduction::None ? out.loss.reshape_symint(shape) : out.loss, std::move(aux)};
}

LossOutput from_front(const LossTuple& out, const Aux& aux) {
  auto next = std::get<1>(out).begin();
  const auto take = [&](bool wanted) { return wanted ? *next++ : Tensor(); };
  LossOutput result{std::get<0>(out), {}};
  result.aux.lse = take(aux.lse());
  result.aux.z_loss = take(aux.z_loss());
  result.aux.token_accuracy = take(aux.token_accuracy());
  result.aux.predicted_tokens = take(aux.predicted_tokens());
  result.aux.entropy = take(aux.entropy());
  result.aux.token_log_prob = take(aux.token_log_prob());
  return result;
}

int64_t aux_bits(const Aux& aux) {
  int64_t bits = 0;
  const auto add = [&](bool wanted, int64_t bit) { bits |= wanted ? bit : 0; };
  add(aux.lse(), kAuxLse);
  add(aux.z_loss(), kAuxZLoss);
  add(aux.token_accuracy(), kAuxTokenAccuracy);
  add(aux.predicted_tokens(), kAuxPredictedTokens);
  add(aux.entropy(), kAuxEntropy);
  add(aux.token_log_prob(), kAuxTokenLogProb);
  return bits;
}

JSDOutput from_front(const LossTuple& out, const JSDAux& aux) {
  auto next = std::get<1>(out).begin();
  const auto take = [&](bool wanted) { return wanted ? *next++ : Tensor(); };
  JSDOutput result{std::get<0>(out), {}};
  result.aux.soft_loss = take(aux.soft_loss());
  result.aux.hard_loss = take(aux.hard_loss());
  return result;
}

int64_t aux_bits(const JSDAux& aux) {
  int64_t bits = 0;
  if (aux.soft_loss()) bits |= kJSDAuxSoftLoss;
  if (aux.hard_loss()) bits |= kJSDAuxHardLoss;
  return bits;
}

std::optional<Tensor> normalizer_on(const Normalizer& normalizer, const Tensor& input) {
  if (const auto* number = std::get_if<double>(&normalizer)) {
    return at::full({}, *number, input.options().dtype(acc_type(input.scalar_type())).requires_grad(false));
  }
  if (const auto* tensor = std::get_if<Tensor>(&normalizer)) return *tensor;
  return std::nullopt;
}

}  // namespace fusegrad
