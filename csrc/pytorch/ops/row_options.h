// The options and targets of the losses over class targets, checked: what cross_entropy and linear_cross_entropy share.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "pytorch/ops/arguments.h"

namespace fusegrad {

/// A normalizer that is a tensor, or none.
OptionalTensor tensor_of(const Normalizer& normalizer);

/// The numbers of a call's options as kernels take them, checked. Call: CrossEntropyCall or LinearCrossEntropyCall.
template <class Call>
RowOptions make_row_options(const char* op, const Call& call);

/// Targets and weights flattened to rows, in the dtypes that the kernels read.
struct RowArguments {
  at::Tensor target;  ///< [N] int32/int64, or [N, V] probabilities, see CrossEntropyForward
  OptionalTensor weight, token_weight, normalizer;  ///< [V], [N] and 0-d, acc, contiguous
  std::vector<c10::SymInt> row_shape;  ///< the shape of one value a row: what 'none' and the aux values have
};

/// What the options' tensors are checked against.
struct RowSizes {
  std::vector<c10::SymInt> row_shape;
  c10::SymInt columns;          ///< of the logits, and of a probability target
  c10::SymInt vocab;            ///< as many, but where processes share it
  int64_t class_dim;            ///< where the columns stand in a probability target
  at::ScalarType logits_dtype;  ///< in which the logits are stored
};

/// Checks the target and the options' tensors against logits of these sizes.
template <class Call>
RowArguments make_row_arguments(const char* op, const Call& call, const RowOptions& options, RowSizes sizes);

}  // namespace fusegrad
