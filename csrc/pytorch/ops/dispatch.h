// Calls into the dispatcher for the ops below the front ends, and what they return; arguments in
// pytorch/ops/arguments.h.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <utility>

#include "pytorch/ops/arguments.h"

namespace fusegrad {

/// Which row of a forward's `stats` holds what; -1: it is not there.
struct StatRows {
  int64_t lse_low = 0;  // what rounding took from lse
  int64_t mass = -1;    // dense targets: the sum of a row's coefficients
  int64_t z_loss = -1;  // the others are aux values
  int64_t entropy = -1;
  int64_t entropy_low = -1;  // what rounding took from entropy
  int64_t token_log_prob = -1;
  int64_t mean = -1;  // of the logits, with their variance and their slope: see RowForward
  int64_t variance = -1;
  int64_t slope = -1;
  int64_t count = 1;

  StatRows(bool dense, int64_t aux) {
    const auto next = [&](bool wanted) { return wanted ? count++ : -1; };
    mass = next(dense);
    z_loss = next((aux & kAuxZLoss) != 0);
    const bool scale = (aux & kScaleGradient) != 0;
    entropy = next((aux & kAuxEntropy) != 0 || scale);
    entropy_low = next((aux & kAuxEntropy) != 0 || scale);
    token_log_prob = next((aux & kAuxTokenLogProb) != 0);
    mean = next(scale);
    variance = next(scale);
    slope = next(scale);
  }
};

/// Rows of the values and of the constants of CrossEntropyRows.
enum RowValue : int64_t { kRowCrossEntropy, kRowLse, kRowEntropy, kRowLogProb, kRowValues };
enum RowConstant : int64_t { kStatLse, kStatLseLow, kStatMass, kStatEntropy, kStatEntropyLow, kRowConstants };

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

RowOutputs cross_entropy_forward(const CrossEntropyForward& call, bool inplace);
at::Tensor cross_entropy_backward(const CrossEntropyBackward& call);

std::tuple<at::Tensor, at::Tensor> cross_entropy_rows(const CrossEntropyRows& call);
at::Tensor cross_entropy_rows(const CrossEntropyRowsGradient& call);
at::Tensor cross_entropy_rows(const CrossEntropyRowsTangent& call);
at::Tensor cross_entropy_rows(const CrossEntropyRowsSecond& call);

/// `logits` are those that were kept, or empty.
struct LinearCrossEntropyOutputs {
  RowOutputs rows;
  at::Tensor logits;
  LinearGradients gradients;
};
LinearCrossEntropyOutputs linear_cross_entropy_forward(const LinearCrossEntropyForward& call, bool inplace);
LinearGradients linear_cross_entropy_backward(const LinearCrossEntropyBackward& call, bool inplace);
LinearGradients linear_cross_entropy_backward_into(const LinearCrossEntropyBackwardInto& call, bool inplace);

struct LinearSecond {
  at::Tensor values;  // [5, N] acc of cross entropy
  LinearGradients gradients;
};
LinearSecond linear_cross_entropy_second(const LinearCrossEntropySecond& call);

std::pair<JsdOutputs, std::array<at::Tensor, 2>> jsd_forward(const JsdForward& call, bool inplace);

at::Tensor jsd_soft(const JsdSoft& call);
std::vector<at::Tensor> jsd_soft(const JsdSoftGradient& call);
at::Tensor jsd_soft(const JsdSoftTangent& call);
std::vector<at::Tensor> jsd_soft(const JsdSoftSecond& call);

std::pair<JsdOutputs, LinearGradients> linear_jsd_forward(const LinearJsdForward& call, bool inplace);
LinearGradients linear_jsd_backward(const LinearJsdBackward& call);
LinearSecond linear_jsd_second(const LinearJsdSecond& call);  // values: [2, N] acc

at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& scale, const std::optional<at::Tensor>& factor);
void scale_gradient_(const at::Tensor& gradient, const at::Tensor& scale, const std::optional<at::Tensor>& factor);

}  // namespace dispatch
}  // namespace fusegrad
