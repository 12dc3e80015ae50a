// What the front ends of the losses share: from per-row outputs to what a caller gets, and back from an op's tuple.
#pragma once

#include <tuple>
#include <vector>

#include "fusegrad/jsd.h"
#include "fusegrad/options.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/ops/row_options.h"

namespace fusegrad {

/// The loss, and the aux values that were asked for in the order of their bits, as the schemas have it.
using LossTuple = std::tuple<at::Tensor, std::vector<at::Tensor>>;

/// Aux values in the shape of a row's target. Those that are constants raise where a backward reaches them; without
/// `constants` all of them are differentiable.
LossTuple to_front(const char* op, const RowOutputs& out, const RowArguments& rows, const RowOptions& options,
                   bool constants = true);
LossTuple to_front(const char* op, const JsdOutputs& out, c10::SymIntArrayRef row_shape, const JsdSettings& settings,
                   bool constants = true);

LossOutput from_front(const LossTuple& out, const Aux& aux);
JSDOutput from_front(const LossTuple& out, const JSDAux& aux);

int64_t aux_bits(const Aux& aux);
int64_t aux_bits(const JSDAux& aux);

/// Makes a number a 0-d tensor on the input's device, without a copy from the host.
void put_on_device(const char* op, Normalizer& normalizer, const at::Tensor& input);

}  // namespace fusegrad
