// Graphs and derivatives by their text, made once for a process.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// simplify(parse(text)). What was used last is kept, up to a bounded number of graphs and of bytes of text; any thread
/// may call it. Errors (text.h, graph.h) are not kept.
std::shared_ptr<const Graph> cached_graph(std::string_view text);

/// differentiate(*cached_graph(text), wants_grad), kept in the same way.
std::shared_ptr<const Graph> cached_derivative(std::string_view text, const std::vector<bool>& wants_grad);

/// tangent(*cached_graph(text), has_tangent), kept in the same way.
std::shared_ptr<const Graph> cached_tangent(std::string_view text, const std::vector<bool>& has_tangent);

/// curvature(*cached_graph(text)), kept in the same way.
std::shared_ptr<const Graph> cached_curvature(std::string_view text);

}  // namespace fusegrad::score_mod
