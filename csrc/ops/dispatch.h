// Typed calls into the dispatcher for the ops below the front ends; schemas in library.cpp.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

#include "ops/check.h"

namespace fusegrad {

/// What a forward over rows returns beside gradients. Values are [N]; those not asked for are empty.
struct RowOutputs {
  at::Tensor loss;              // acc: [N] for reduction 'none', else 0-d
  at::Tensor lse;               // acc
  at::Tensor z_loss;            // acc
  at::Tensor predicted_tokens;  // int64
  at::Tensor entropy;           // acc
  at::Tensor token_log_prob;    // acc
  at::Tensor lse_low;           // acc; what rounding took from lse
  at::Tensor mass;              // acc; what the backward needs of dense targets
  at::Tensor scales;            // acc [4]; what reduction 'mean' divides by, see RowScales; else empty
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
};

namespace dispatch {

RowOutputs cross_entropy_forward(const at::Tensor& logits, const RowArguments& rows, const LossOptions& options,
                                 bool inplace);
at::Tensor cross_entropy_backward(const at::Tensor& grad_loss, const at::Tensor& grad_lse, const at::Tensor& logits,
                                  const RowArguments& rows, const LossOptions& options, const RowOutputs& saved);

std::pair<RowOutputs, LinearGradients> linear_cross_entropy_forward(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const RowArguments& rows, const LossOptions& options, const LinearOptions& linear,
    std::array<bool, 3> needs_grad, bool inplace);
LinearGradients linear_cross_entropy_backward(const at::Tensor& grad_loss, const at::Tensor& grad_lse,
                                              const at::Tensor& input, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, const RowArguments& rows,
                                              const LossOptions& options, const LinearOptions& linear,
                                              const RowOutputs& saved, std::array<bool, 3> needs_grad);

at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& scale,
                          const std::optional<at::Tensor>& factor);
void scale_gradient_(const at::Tensor& gradient, const at::Tensor& scale, const std::optional<at::Tensor>& factor);

}  // namespace dispatch
}  // namespace fusegrad
