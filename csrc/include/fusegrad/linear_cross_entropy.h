#pragma once

#include "fusegrad/options.h"

namespace fusegrad {

/// Options of linear_cross_entropy; those it shares with CrossEntropyOptions mean the same.
struct LinearCrossEntropyOptions {
  /// [V], floating, on the input's device.
  TORCH_ARG(std::optional<at::Tensor>, linear_bias);
  TORCH_ARG(std::optional<at::Tensor>, weight);
  TORCH_ARG(std::optional<at::Tensor>, token_weight);
  TORCH_ARG(Normalizer, normalizer);
  TORCH_ARG(int64_t, ignore_index) = -100;
  TORCH_ARG(std::string, reduction) = "mean";
  TORCH_ARG(double, label_smoothing) = 0.0;
  TORCH_ARG(double, z_loss) = 0.0;
  TORCH_ARG(std::optional<double>, softcap);
  /// z = softcap(logit_scale * (input @ linear_weight.T + linear_bias)).
  TORCH_ARG(double, logit_scale) = 1.0;
  /// Another factor beside logit_scale: 0-d, or one a row, in the shape of a class-index target; any floating dtype, on
  /// the input's device. Gets a gradient, without a softcap or with a support, where it is not 0.
  TORCH_ARG(std::optional<at::Tensor>, row_scale);
  TORCH_ARG(std::optional<at::Tensor>, support);
  /// Permission to overwrite the input with its gradient.
  TORCH_ARG(bool, inplace) = false;
  /// linear_weight, linear_bias and the columns of class probabilities are a part of the vocabulary's.
  TORCH_ARG(std::optional<VocabParallel>, vocab_parallel);
  /// float32 (the default): the weight's gradient accumulates in float32. The weight's own low-precision dtype: it
  /// accumulates in that, chunk by chunk, which saves 4 * V * H bytes and costs accuracy (docs/guarantees.md).
  TORCH_ARG(std::optional<at::ScalarType>, accumulate_dtype);
  /// Budget for temporary tensors, in MiB, above the gradients themselves. The smallest chunks may exceed it.
  TORCH_ARG(std::optional<int64_t>, workspace_mib);
  /// [V, H], float32 (float64 for float64), contiguous, on the weight's device, without requiring grad: each backward
  /// adds the weight's gradient to it, in float32, and gives the weight itself none. Its version counter is raised. The
  /// gradients are computed in the backward then. Shares no memory with another argument; not for a compiler's graph.
  TORCH_ARG(std::optional<at::Tensor>, grad_weight_into);
  /// A row's loss, aux values and gradient of the input are bitwise the same whatever other rows are in the call,
  /// however many there are, however workspace_mib cuts them and whichever outputs are asked for. The gradients are
  /// computed in the backward. Class indices alone. With vocab_parallel of whichever number of processes, whose parts
  /// are 1, 2, 4, 8 or 16 of the vocabulary's sixteenths. docs/losses.md has the price.
  TORCH_ARG(bool, batch_invariant) = false;
};

/// cross_entropy(linear(input, linear_weight, linear_bias), target) without keeping the logits for the backward.
///
/// input: [..., H]; linear_weight: [V, H]; target: class indices [...] or class probabilities [..., V] (which get no
/// gradient). The products are computed in the input's dtype (autocast's under autocast); every gradient has its
/// own tensor's dtype. Errors as in cross_entropy.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& linear_weight, const at::Tensor& target,
                                const LinearCrossEntropyOptions& options = {});

/// The same, with per-row values beside the loss. Where one of them is differentiable, and with reduction "none", the
/// gradients are computed in the backward, from logits that are kept where workspace_mib holds all of them, and without
/// a budget; otherwise they are computed a second time.
LossOutput linear_cross_entropy_with_aux(const at::Tensor& input, const at::Tensor& linear_weight,
                                         const at::Tensor& target, const LinearCrossEntropyOptions& options,
                                         const Aux& aux);

/// Options of linear_log_prob, as in LinearCrossEntropyOptions.
struct LinearLogProbOptions {
  TORCH_ARG(std::optional<at::Tensor>, linear_bias);
  TORCH_ARG(int64_t, ignore_index) = -100;
  TORCH_ARG(std::optional<double>, softcap);
  TORCH_ARG(double, logit_scale) = 1.0;
  TORCH_ARG(std::optional<at::Tensor>, row_scale);
  TORCH_ARG(std::optional<int64_t>, workspace_mib);
  TORCH_ARG(std::optional<at::Tensor>, support);
  TORCH_ARG(std::optional<at::Tensor>, grad_weight_into);
  /// Without a value: true for linear_log_prob_forward, false for linear_log_prob.
  TORCH_ARG(std::optional<bool>, batch_invariant);
  /// false: the entropy is undefined and costs nothing.
  TORCH_ARG(bool, return_entropy) = true;
};

struct LogProb {
  at::Tensor log_prob, entropy;
};

/// log p[target] of each row and the entropy of p = softmax(z), in nats, both differentiable: linear_cross_entropy with
/// reduction "none" and those aux values. float32 (float64 for float64), of the target's shape; 0 at ignored rows.
/// target: class indices [...]. Errors as in linear_cross_entropy, under this function's name.
LogProb linear_log_prob(const at::Tensor& input, const at::Tensor& linear_weight, const at::Tensor& target,
                        const LinearLogProbOptions& options = {});

struct LogProbForward {
  at::Tensor log_prob, entropy, lse;
};

/// linear_log_prob without a graph, for inference engines: no gradient is recorded whatever requires one, nothing waits
/// for the device. The values are linear_log_prob's, bit by bit. Not with a support or grad_weight_into. From Python:
/// torch.ops.fusegrad.linear_log_prob_forward.
LogProbForward linear_log_prob_forward(const at::Tensor& input, const at::Tensor& linear_weight,
                                       const at::Tensor& target, const LinearLogProbOptions& options = {});

}  // namespace fusegrad
