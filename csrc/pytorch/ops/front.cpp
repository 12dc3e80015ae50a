#include "pytorch/ops/front.h"

#include <cmath>
#include <limits>

#include "pytorch/autograd/constant.h"

namespace fusegrad {

using at::Tensor;

LossTuple to_front(const char* op, const RowOutputs& out, const RowArguments& rows, const RowOptions& options,
                   bool constants) {
  const c10::SymIntArrayRef shape(rows.row_shape);
  std::vector<Tensor> aux;
  if (options.aux != 0) {
    const StatRows stat_rows(dense_target(rows.target, rows.weight.has_value(), options.label_smoothing), options.aux);
    const auto put = [&](int64_t bit, const auto& value) {
      if ((options.aux & bit) != 0) aux.push_back(value().reshape_symint(shape));
    };
    const auto put_constant = [&](int64_t bit, const char* name, const auto& value) {
      put(bit, [&] { return constants ? constant_beside(value(), out.loss, op, name) : value(); });
    };
    const auto stat = [&](int64_t row) { return (constants ? out.stats.detach() : out.stats).select(0, row); };
    put(kAuxLse, [&] { return out.lse; });
    put_constant(kAuxZLoss, "aux.z_loss", [&] { return stat(stat_rows.z_loss); });
    put_constant(kAuxTokenAccuracy, "aux.token_accuracy", [&] {
      // At ignored rows the prediction is -1: it must not equal an ignore_index of -1.
      const auto right = out.predicted_tokens.eq(rows.target).logical_and(rows.target.ne(options.ignore_index));
      return right.to(out.lse.scalar_type());
    });
    put(kAuxPredictedTokens, [&] { return out.predicted_tokens; });
    put(kAuxEntropy, [&] { return out.stats.select(0, stat_rows.entropy); });
    put(kAuxTokenLogProb, [&] { return out.stats.select(0, stat_rows.token_log_prob); });
  }
  return {options.reduction == at::Reduction::None ? out.loss.reshape_symint(shape) : out.loss, std::move(aux)};
}

LossTuple to_front(const char* op, const JsdOutputs& out, c10::SymIntArrayRef row_shape, const JsdSettings& settings,
                   bool constants) {
  std::vector<Tensor> aux;
  const auto put = [&](int64_t bit, const char* name) {
    if ((settings.aux & bit) == 0) return;
    const auto row = static_cast<int64_t>(aux.size());
    const auto value = (constants ? out.stats.detach() : out.stats).select(0, row).reshape_symint(row_shape);
    aux.push_back(constants ? constant_beside(value, out.loss, op, name) : value);
  };
  put(kJSDAuxSoftLoss, "aux.soft_loss");
  put(kJSDAuxHardLoss, "aux.hard_loss");
  return {settings.reduction == at::Reduction::None ? out.loss.reshape_symint(row_shape) : out.loss, std::move(aux)};
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

void put_on_device(const char* op, Normalizer& normalizer, const Tensor& input) {
  const auto* number = std::get_if<double>(&normalizer);
  if (number == nullptr) return;
  if (!input.defined()) {  // which the op refuses
    normalizer = {};
    return;
  }
  const auto dtype = acc_type(input.scalar_type());
  const double most = dtype == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  FUSEGRAD_CHECK_VALUE(std::abs(*number) <= most, op, "normalizer must be a finite number in ", dtype, ", but got ",
                       *number);
  normalizer = at::full({}, *number, input.options().dtype(dtype).requires_grad(false));
}

}  // namespace fusegrad
