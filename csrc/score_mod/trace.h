// A graph under construction by Expressions.
#pragma once

#include <fusegrad/expression.h>

#include <memory>
#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

struct Trace {
  explicit Trace(Kind kind) : graph(kind) {}

  Graph graph;
  std::vector<BufferKey> buffers;  // of the graph's declarations
  std::vector<BufferKey> scalars;
  int64_t upstreams = 0;
};

/// Makes a trace the one that constants and reads go to, on this thread, as long as it lives.
class TraceScope {
 public:
  explicit TraceScope(Kind kind);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  const std::shared_ptr<Trace>& trace() const { return trace_; }
  Expression input(Input input) const { return {trace_, trace_->graph.input(input)}; }
  /// The simplified and compact graph with this result.
  Compact finish(const Expression& result) const;

 private:
  std::shared_ptr<Trace> trace_;
  std::shared_ptr<Trace> outer_;
};

}  // namespace fusegrad::score_mod
