// What a score_mod reads of each pair by itself (pair_reads, index_analysis.h), and how that lies in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "score_mod/captured.h"

namespace fusegrad::score_mod {

/// The bytes of an element of one of pair_reads where a query's elements for all keys are a row of the buffer, key by
/// key, and have 2 or 4 bytes each; else 0.
int box_bytes(const Graph& graph, NodeId load, std::span<const DType> dtypes);

/// Whether one of pair_reads reads integers at [..., q_idx, kv_idx], the indices before depending on neither.
bool reads_places(const Graph& graph, NodeId load);

/// The dimensions of a buffer of floats whose boxes are its own, as they lie. -1: none.
struct BoxDimensions {
  int batch = -1;  ///< whose index depends on b and the call's numbers alone, such as b or b // 2
  int h = -1;
  int q = 0;  ///< kv_idx is behind it, the last one
};
/// Those of one of pair_reads, where they come in this order; other indices are the constant 0.
std::optional<BoxDimensions> box_dimensions(const Graph& graph, NodeId load, std::span<const DType> dtypes);
/// Those of pair_reads that have box_dimensions, in their order.
std::vector<NodeId> mapped_reads(const Graph& graph, std::span<const DType> dtypes);

/// The dimensions of the buffer of one of pair_reads, which reads numbers and has no box, a bit each: those whose
/// indices tell pairs apart, where the others' depend on h alone. All pairs of a head read in a column of the product
/// of these sizes. 0: they do not.
uint32_t column_dimensions(const Graph& graph, NodeId load, std::span<const DType> dtypes);

}  // namespace fusegrad::score_mod
