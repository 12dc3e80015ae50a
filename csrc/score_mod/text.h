// The canonical text of a graph: what crosses every boundary (the ops' `str`, the key of compiled kernels, what is
// shown to people). docs/design/score_mod.md has the grammar.
#pragma once

#include <string>
#include <string_view>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// Where a text breaks the grammar or a rule; what() is "line:column: what was expected, but got what".
class ParseError : public GraphError {
 public:
  ParseError(int line, int column, const std::string& message)
      : GraphError(std::to_string(line) + ":" + std::to_string(column) + ": " + message), line(line), column(column) {}
  int line;    // from 1
  int column;  // from 1, in bytes
};

/// The canonical text: the same for graphs that are equal. parse(print(g)) == g.
std::string print(const Graph& graph);

/// A graph from a text that nobody vouches for. Numbering must be in order; comments and blank lines may stand between
/// lines, and operands may need promotion: print(parse(text)) is the canonical text, equal to `text` if that is
/// canonical already.
Graph parse(std::string_view text);

}  // namespace fusegrad::score_mod
