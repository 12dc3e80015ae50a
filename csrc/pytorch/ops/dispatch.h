// Typed calls into the dispatcher for the ops below the front ends; schemas in pytorch/library.cpp.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

#include "fusegrad/jsd.h"
#include "fusegrad/options.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/jsd_settings.h"

namespace fusegrad {

/// Which row of a forward's `stats` holds what; -1: it is not there.
struct StatRows {
  int64_t lse_low = 0;  // what rounding took from lse
  int64_t mass = -1;    // dense targets: the sum of a row's coefficients
  int64_t z_loss = -1;  // the others are aux values
  int64_t entropy = -1;
  int64_t token_log_prob = -1;
  int64_t count = 1;

  StatRows(bool dense, int64_t aux) {
    const auto next = [&](bool wanted) { return wanted ? count++ : -1; };
    mass = next(dense);
    z_loss = next((aux & kAuxZLoss) != 0);
    entropy = next((aux & kAuxEntropy) != 0);
    token_log_prob = next((aux & kAuxTokenLogProb) != 0);
  }
};

/// Whether every column has a coefficient: class probabilities, or class weights together with smoothing.
inline bool dense_target(const at::Tensor& target, bool class_weights, double label_smoothing) {
  return target.is_floating_point() || (class_weights && label_smoothing > 0.0);
}

/// What a forward over rows returns beside gradients.
struct RowOutputs {
  at::Tensor loss;              // acc: [N] for reduction 'none', else 0-d
  at::Tensor lse;               // acc [N]
  at::Tensor stats;             // acc [StatRows::count, N]
  at::Tensor predicted_tokens;  // int64 [N], empty if not asked for
  at::Tensor scales;            // acc [4], see RowScales; empty but for reduction 'mean'
};

/// Gradients of input, weight and bias; empty where not wanted.
struct LinearGradients {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
};

/// The linear losses' own options.
struct LinearOptions {
  double logit_scale = 1.0;
  std::optional<at::ScalarType> accumulate_dtype;
  std::optional<int64_t> workspace_mib;
  std::optional<int64_t> vocab_size;  // only the first so many rows of the weights count
};

/// linear_jsd's teacher: hidden states [N, H] and their head, or a top-k teacher's log-probabilities [N, K] acc.
struct JsdTeacher {
  at::Tensor input;
  std::optional<at::Tensor> weight;
  std::optional<at::Tensor> bias;
};

/// Rows of a divergence's `stats`.
inline int64_t jsd_stat_count(int64_t aux) {
  return ((aux & kJSDAuxSoftLoss) != 0 ? 1 : 0) + ((aux & kJSDAuxHardLoss) != 0 ? 1 : 0);
}

/// What a divergence's forward returns beside gradients.
struct JsdOutputs {
  at::Tensor loss;    // acc: [N] for reduction 'none', else 0-d
  at::Tensor stats;   // acc [k, N]: the soft and the hard loss, those that the aux bits ask for
  at::Tensor scales;  // acc [4], see RowScales; empty but for the means
};

namespace dispatch {

RowOutputs cross_entropy_forward(const at::Tensor& logits, const RowArguments& rows, const LossOptions& options,
                                 bool inplace);
at::Tensor cross_entropy_backward(const at::Tensor& grad_loss, const at::Tensor& grad_lse, const at::Tensor& logits,
                                  const RowArguments& rows, const LossOptions& options, const RowOutputs& saved);

std::pair<RowOutputs, LinearGradients> linear_cross_entropy_forward(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const RowArguments& rows,
    const LossOptions& options, const LinearOptions& linear, std::array<bool, 3> needs_grad, bool inplace);
LinearGradients linear_cross_entropy_backward(const at::Tensor& grad_loss, const at::Tensor& grad_lse,
                                              const at::Tensor& input, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, const RowArguments& rows,
                                              const LossOptions& options, const LinearOptions& linear,
                                              const RowOutputs& saved, std::array<bool, 3> needs_grad);

std::pair<JsdOutputs, std::array<at::Tensor, 2>> jsd_forward(const at::Tensor& student, const at::Tensor& teacher,
                                                             const JsdRows& rows, const JsdSettings& settings,
                                                             std::array<bool, 2> needs_grad, bool inplace);

std::pair<JsdOutputs, LinearGradients> linear_jsd_forward(const at::Tensor& input, const at::Tensor& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const JsdTeacher& teacher, const JsdRows& rows,
                                                          const JsdSettings& settings, const LinearOptions& linear,
                                                          std::array<bool, 3> needs_grad, bool inplace);
LinearGradients linear_jsd_backward(const at::Tensor& grad_loss, const at::Tensor& input, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias, const JsdTeacher& teacher,
                                    const JsdRows& rows, const at::Tensor& scales, const JsdSettings& settings,
                                    const LinearOptions& linear, std::array<bool, 3> needs_grad);

at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& scale, const std::optional<at::Tensor>& factor);
void scale_gradient_(const at::Tensor& gradient, const at::Tensor& scale, const std::optional<at::Tensor>& factor);

}  // namespace dispatch
}  // namespace fusegrad
