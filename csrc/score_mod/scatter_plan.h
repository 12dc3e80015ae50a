// How the contributions of a derivative reach the gradients of the captured buffers: which scheme is the cheapest
// exact one, from what the indices of each read depend on. docs/design/score_mod.md explains the classes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "score_mod/index_analysis.h"

namespace fusegrad::score_mod {

enum class ScatterClass : char {
  kInvariant = 'A',   ///< neither q_idx nor kv_idx: one sum for the whole loop
  kKv = 'B',          ///< kv_idx only: one sum a column
  kQ = 'C',           ///< q_idx only: one sum a row
  kDiagonal = 'D',    ///< a function of q_idx - kv_idx: one sum a diagonal
  kInjective = 'E',   ///< no two pairs (q_idx, kv_idx) of one head meet: no sum at all
  kSmallTable = 'F',  ///< any index into few elements: a histogram
  kGeneral = 'G',     ///< the rest
};

/// A buffer of at most so many elements is worth a histogram in fast memory.
inline constexpr int64_t kSmallTableElements = 4096;

/// The scheme of one contribution of the derivative, in their order.
struct ScatterStep {
  ScatterClass scheme;
  std::string reason;
  /// No other (b, h) writes to the places of this one, nor does another contribution: what is summed over the loop may
  /// be stored instead of added.
  bool exclusive = false;
  /// Within a batch no other pair or h writes to a place of this one, nor does another contribution: added batch after
  /// batch, the sums are in one order.
  bool once_a_batch = false;
  /// Classes E to G: b plays no part in its place, so that what a pair contributes may be summed over b first.
  bool over_batches = false;
  /// Classes E to G: the groups of batches, if b plays a part by them alone: what pairs contribute may be summed over
  /// the batches of a group first.
  std::optional<BatchGroups> groups = std::nullopt;
  /// Class D: several diagonals may have one element, such as a bucket. Neighbours then are added up first.
  bool repeats = false;
  /// Which kInput each index is, none for an index of 0, if they are h, q_idx and kv_idx, each once, b or its group at
  /// most once, and zeros, and no other contribution writes there; else empty. Where the sizes are the call's lengths,
  /// or the number of groups, and 1 at zeros, every element gets one contribution of the batches that share it.
  std::vector<std::optional<Input>> inputs = {};
  /// Classes F and G: the dimensions, a bit each, whose indices tell pairs of a (b, h) apart. A tile reaches only a
  /// column of a table with others too, such as t[i, h], of the product of these sizes.
  uint32_t column = 0;
  /// Whether there are others.
  bool has_column = false;
  /// Classes F and G: whether the column, or the table, is the same for all b.
  bool one_column = false;
  /// Whether there are axes, and to how many places a pair contributes by them.
  bool is_vector = false;
  int64_t places = 1;
};

/// `elements`: how many elements each buffer has, where known; without it a class-F candidate is G.
std::vector<ScatterStep> plan_scatter(const Graph& derivative, std::span<const int64_t> elements = {});

/// For people: the simplified graph, its derivative, and what each captured gradient costs and why.
std::string explain(std::string_view text, const std::vector<bool>& wants_grad);

}  // namespace fusegrad::score_mod
