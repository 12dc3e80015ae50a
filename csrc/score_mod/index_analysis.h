// What is known of integer values before any is computed: their range, and how they depend on b, h, q_idx and kv_idx.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// Every index of a call is below these.
struct Lengths {
  int64_t b = int64_t{1} << 30;
  int64_t h = int64_t{1} << 30;
  int64_t q = int64_t{1} << 30;
  int64_t kv = int64_t{1} << 30;
};

/// A value's bounds, both included.
struct Interval {
  int64_t low = std::numeric_limits<int64_t>::min();
  int64_t high = std::numeric_limits<int64_t>::max();

  bool nonnegative() const { return low >= 0; }
  bool fits_int32() const {
    return low >= std::numeric_limits<int32_t>::min() && high <= std::numeric_limits<int32_t>::max();
  }
};

/// The interval of every integer node; of a float's node it means nothing. `buffers`: bounds of what each buffer holds,
/// `scalars`: of each scalar; none are known where empty.
std::vector<Interval> intervals(const Graph& graph, const Lengths& lengths, std::span<const Interval> buffers = {},
                                std::span<const Interval> scalars = {});

/// Whether an integer node needs 64 bits: its values may not fit 32, or it is computed from something that does not.
std::vector<bool> needs_int64(const Graph& graph, std::span<const Interval> intervals);

/// The four indices, what differs from pair to pair besides them (the score and its gradient), and axes.
enum Variable : int { kVarB, kVarH, kVarQ, kVarKv, kVarLane, kVarAxis };
inline constexpr int kVariables = 4;
using VariableSet = uint8_t;
constexpr VariableSet set_of(Variable v) { return static_cast<VariableSet>(1 << v); }
inline constexpr VariableSet kPairSet = set_of(kVarQ) | set_of(kVarKv);

/// value = sum over v of coefficient[v] * v + f(rest), where f is any function. For values that are no integers all
/// coefficients are 0.
struct Dependence {
  std::array<int64_t, kVariables> coefficient{};
  VariableSet rest = 0;
  bool rest_diagonal = true;  ///< f depends on q_idx and kv_idx only through their difference, if at all

  /// What the value depends on.
  VariableSet on() const;
  /// Whether q_idx and kv_idx enter through their difference only.
  bool diagonal() const;
};

std::vector<Dependence> dependences(const Graph& graph);

/// Groups of batches that share what they read or add to: those of one b // divisor or of one b % divisor.
struct BatchGroups {
  Op op = Op::kFloorDiv;  ///< or Op::kMod
  bool scalar = false;    ///< whether the divisor is a scalar of the call, of the number `divisor`
  int64_t divisor = 1;

  bool operator==(const BatchGroups&) const = default;
};
/// The groups of a place, if every index that depends on b is the same b // divisor or b % divisor. None if no index
/// depends on b, or one does in another way.
std::optional<BatchGroups> batch_groups(const Graph& graph, std::span<const NodeId> indices,
                                        std::span<const Dependence> dependences);

/// What of a load's place is known before any score is.
enum class Reads : uint8_t {
  kLater,  ///< it needs a score, or what is read for each pair by itself, or an axis
  kRow,    ///< the key plays no part
  kKey,    ///< of keys alone
  kDiagonal,
  kPair,  ///< of each pair its own
};
/// For every node; for one that is no load it means nothing.
std::vector<Reads> reads(const Graph& graph);

/// The loads of numbers and integers, of those that the result needs, at places that q_idx and kv_idx give, each for
/// itself, and no score: what a score_mod reads of a pair, and other batches perhaps too.
std::vector<NodeId> pair_reads(const Graph& graph);

/// A dimension of a buffer.
struct Dimension {
  int buffer;
  size_t dimension;
};
/// What the integers of a buffer are indices of, where they are nothing else: an index that is out of range may then be
/// another one that is. A derivative's contributions count too. None where they are compared or counted with, or
/// are not read.
std::vector<Dimension> indexed_by(const Graph& graph, int buffer);

/// The groups of the first of pair_reads that has any.
std::optional<BatchGroups> batch_groups(const Graph& graph);
/// Whether these are the groups of a load's place.
bool reads_by_groups(const Graph& graph, NodeId load);

/// Whether a mask_mod is known to allow all pairs between queries and keys of which it allows the corners: comparisons
/// of numbers that grow evenly with q_idx and kv_idx, all of which must hold. False where nothing is known.
bool allows_between_corners(const Graph& mask_mod);

/// The variables that a tuple of indices determines: v is in the set if no two tuples are equal that differ in v.
VariableSet determined(std::span<const NodeId> indices, std::span<const Dependence> dependences,
                       std::span<const Interval> intervals);

}  // namespace fusegrad::score_mod
