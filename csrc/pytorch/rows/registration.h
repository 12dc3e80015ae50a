// The tuples that the ops below the front ends return; schemas in pytorch/library.cpp.
#pragma once

#include <tuple>

#include "pytorch/ops/dispatch.h"

namespace fusegrad {

using RowTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using RowValuesTuple = std::tuple<at::Tensor, at::Tensor>;
using LinearGradientTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using LinearTuple = decltype(std::tuple_cat(RowTuple(), std::tuple<at::Tensor>(), LinearGradientTuple()));

using LinearSecondTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using JsdTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using LinearJsdTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline RowTuple to_tuple(const RowOutputs& out) {
  return {out.loss, out.lse, out.stats, out.predicted_tokens, out.scales};
}

}  // namespace fusegrad
