#pragma once

#include "fusegrad/options.h"

namespace fusegrad {

/// Options of cross_entropy. Those of torch::nn::functional::cross_entropy mean the same here.
struct CrossEntropyOptions {
  /// Class weights, [V], any floating dtype, on the input's device. Gets no gradient.
  TORCH_ARG(std::optional<at::Tensor>, weight);
  /// Scales each row's loss before the reduction: the shape of a class-index target, any floating dtype.
  TORCH_ARG(std::optional<at::Tensor>, token_weight);
  /// Replaces the divisor of reduction "mean": a number, or a 0-d tensor on the input's device.
  TORCH_ARG(Normalizer, normalizer);
  /// Rows with this class index count for nothing.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "none", "mean" (divides by the kept rows' summed class weights) or "sum".
  TORCH_ARG(std::string, reduction) = "mean";
  /// In [0, 1].
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// Adds z_loss * lse^2 to each row; its mean divides by the number of kept rows.
  TORCH_ARG(double, z_loss) = 0.0;
  /// z = softcap * tanh(input / softcap).
  TORCH_ARG(std::optional<double>, softcap);
  /// The softmax is over these columns of each row alone, as over logits that are -inf elsewhere: the shape of a
  /// class-index target and K, int64 or int32, -1 pads, each column at most once in a row, the target's among them.
  TORCH_ARG(std::optional<at::Tensor>, support);
  /// Permission to overwrite the input with its gradient. The input's version counter is raised then, and PyTorch
  /// raises where another op has saved it for its backward.
  TORCH_ARG(bool, inplace) = false;
  /// The input's classes are a part of the vocabulary's.
  TORCH_ARG(std::optional<VocabParallel>, vocab_parallel);
};

/// Cross entropy between logits and targets; a drop-in for torch::nn::functional::cross_entropy whose gradients
/// stay right under any number of backwards.
///
/// input: [V], [N, V] or [N, V, d1, ...]; float32, bfloat16, float16 (float64 on the CPU).
/// target: class indices (int64, int32) of shape [], [N] or [N, d1, ...], or class probabilities of the input's shape.
/// Returns the loss, float32 (float64 for float64): 0-d, or the row shape for reduction "none".
/// Raises c10::ValueError, c10::TypeError or c10::IndexError (a CPU target out of range) as
/// `cross_entropy: what must hold, but got <value>`, before anything is written.
at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target, const CrossEntropyOptions& options = {});

/// The same, with per-row values beside the loss.
LossOutput cross_entropy_with_aux(const at::Tensor& input, const at::Tensor& target, const CrossEntropyOptions& options,
                                  const Aux& aux);

}  // namespace fusegrad
