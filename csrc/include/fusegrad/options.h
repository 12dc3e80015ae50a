// Options of the losses, in libtorch's style: chained setters, `Options().reduction("sum").z_loss(1e-4)`.
#pragma once

#include <ATen/ATen.h>
#include <torch/arg.h>

#include <optional>
#include <string>
#include <variant>

namespace fusegrad {

/// What replaces the divisor of reduction "mean": nothing, a number, or a 0-d tensor on the input's device.
using Normalizer = std::variant<std::monostate, double, at::Tensor>;

/// Per-row values beside a loss: one a row whatever the reduction, float32 (float64 for float64), in the shape of the
/// class-index target. At ignored rows predicted_tokens is -1, lse is the row's own and the others are 0. lse, entropy
/// and token_log_prob are differentiable; a backward that reaches another float raises c10::NotImplementedError:
/// detach() what is logged.
struct Aux {
  TORCH_ARG(bool, lse) = false;               ///< log(sum(exp(z))) of the row
  TORCH_ARG(bool, z_loss) = false;            ///< z_loss * lse^2
  TORCH_ARG(bool, token_accuracy) = false;    ///< 1 where the largest logit is the target's; indices only
  TORCH_ARG(bool, predicted_tokens) = false;  ///< int64, the first index of the largest logit
  TORCH_ARG(bool, entropy) = false;           ///< of softmax(z), in nats
  TORCH_ARG(bool, token_log_prob) = false;    ///< z[target] - lse; indices only
};

/// What was asked for in Aux; the others are undefined tensors.
struct AuxOutput {
  at::Tensor lse;
  at::Tensor z_loss;
  at::Tensor token_accuracy;
  at::Tensor predicted_tokens;
  at::Tensor entropy;
  at::Tensor token_log_prob;
};

struct LossOutput {
  at::Tensor loss;
  AuxOutput aux;
};

/// The bits of Aux in an op's `aux` argument.
enum AuxBit : int64_t {
  kAuxLse = 1,
  kAuxZLoss = 2,
  kAuxTokenAccuracy = 4,
  kAuxPredictedTokens = 8,
  kAuxEntropy = 16,
  kAuxTokenLogProb = 32,
};
/// Those that are differentiable: gradients are computed in the backward where one of them is asked for.
constexpr int64_t kAuxDifferentiable = kAuxLse | kAuxEntropy | kAuxTokenLogProb;

}  // namespace fusegrad
