// Options of the losses, in libtorch's style: chained setters, `Options().reduction("sum").z_loss(1e-4)`.
#pragma once

#include <ATen/ATen.h>
#include <torch/arg.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fusegrad {

/// The part of a vocabulary that this process has; the other processes of a group have the rest. The logits or the rows
/// of a head's weight and bias are this part, class weights are the whole vocabulary's, and all else (hidden states,
/// targets, options) is the same in all processes, which make the same calls.
struct VocabParallel {
  /// The process group's name, by which torch.distributed finds it: c10d::ProcessGroup::getGroupName().
  TORCH_ARG(std::string, group);
  TORCH_ARG(int64_t, rank) = 0;  ///< this process's, in the group
  /// Where the part of each rank starts and stops: {0, 5, 5, 13} for two. They are [0, V) without gaps and overlaps.
  TORCH_ARG(std::vector<int64_t>, bounds);
};

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
