// The derivative of a score_mod, as a graph.
#pragma once

#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// A graph of Kind::kDerivative with the input `grad`, the gradient by the score_mod's result: its result is the
/// gradient by `score`, and it has a contribution for every distinct read of a float buffer that `wants_grad` (one
/// value a buffer; missing ones are false). Reads of the same place are merged. Simplified.
///
/// Subgradients are PyTorch's: see docs/score_mod.md. What a branch not taken would contribute is replaced by 0, not
/// multiplied by it: no NaN or infinity comes out of it.
Graph differentiate(const Graph& score_mod, const std::vector<bool>& wants_grad);

}  // namespace fusegrad::score_mod
