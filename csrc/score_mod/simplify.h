// Rewriting a graph into a smaller one that gives the same numbers.
#pragma once

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// Constants folded (in float64), what is not needed dropped, and identities applied that hold bit for bit in IEEE
/// arithmetic, NaN, infinities and signed zeros included (but for the bits of a NaN). So x * 0 stays, and x + 0 too:
/// -0 + 0 is not -0. The result is canonical, and simplify(simplify(g)) == simplify(g).
Graph simplify(const Graph& graph);

}  // namespace fusegrad::score_mod
