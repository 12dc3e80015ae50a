// The derivative of a score_mod, as a graph.
#pragma once

#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// A graph of Kind::kDerivative with the input `grad`, the gradient by the score_mod's result: its result is the
/// gradient by `score`, and it has a contribution for every distinct read of a float buffer that `wants_grad` (one
/// value a buffer; missing ones are false). Reads of the same place are merged. Simplified.
///
/// Subgradients are PyTorch's: see docs/design/score_mod.md. What a branch not taken would contribute is replaced by 0,
/// not multiplied by it: no NaN or infinity comes out of it.
Graph differentiate(const Graph& score_mod, const std::vector<bool>& wants_grad);

/// Whether the result of such a graph and each of its contributions is `grad` itself, or by conditions `grad` or 0: as
/// of a bias that is added, where a mask is true.
bool passes_gradient(const Graph& derivative);

/// A graph of Kind::kTangent with the input `grad`, the tangent of `score`: its result is the tangent of the
/// score_mod's result. Behind the score_mod's buffers it has one for each float buffer that `has_tangent` (one value a
/// buffer; missing ones are false), in their order: its tangent, of its sizes, read where the buffer is read. Made of
/// differentiate's graph, so with the same subgradients, and with those of custom backwards; GraphError where one of
/// these is not linear in its upstreams. Simplified.
Graph tangent(const Graph& score_mod, const std::vector<bool>& has_tangent);

/// A graph of Kind::kDerivative without contributions: its result is `grad` times the score_mod's second derivative by
/// `score`. That is the derivative of differentiate's graph, so with the same subgradients; GraphError where there is a
/// derivative of one's own. Simplified.
Graph curvature(const Graph& score_mod);

}  // namespace fusegrad::score_mod
