// What the front ends of the losses share: from per-row outputs to what a caller gets, and back from an op's tuple.
#pragma once

#include <tuple>

#include "fusegrad/options.h"
#include "ops/dispatch.h"

namespace fusegrad {

/// (loss, lse, z_loss, token_accuracy, predicted_tokens, entropy, token_log_prob), as the schemas name them.
using LossTuple =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Values in the shape of a row's target; those not asked for are empty.
LossTuple to_front(const RowOutputs& out, const RowArguments& rows, const LossOptions& options);

LossOutput from_front(const LossTuple& out, const Aux& aux);

int64_t aux_bits(const Aux& aux);

/// A normalizer given as a number, as a 0-d tensor on the input's device, without a copy from the host.
std::optional<at::Tensor> normalizer_on(const Normalizer& normalizer, const at::Tensor& input);

}  // namespace fusegrad
