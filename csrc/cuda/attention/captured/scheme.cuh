// How the contributions to a captured buffer's gradient reach their elements; the host includes this too.
#pragma once

namespace fusegrad::device {

/// The scheme of one contribution. Its value is the letter by which plans print it and tests force it: that of the
/// class (csrc/score_mod/scatter_plan.h) whose contributions it takes, if it has one.
enum class Scheme : char {
  kInvariant = 'A',    ///< one sum for the pairs of a head
  kKv = 'B',           ///< one sum for a key's
  kQ = 'C',            ///< one sum for a query's, of each tile
  kDiagonal = 'D',     ///< one sum for a diagonal's, of each tile
  kInjective = 'E',    ///< each pair by itself, added to memory
  kSmallTable = 'F',   ///< a histogram in shared memory
  kGeneral = 'G',      ///< each pair by itself, added to memory, where others may have the same element
  kOverBatches = 'R',  ///< one sum for a pair of a CTA that stays with a head for many batches
  kStored = 'S',       ///< each pair by itself, stored: every element gets one contribution of one pair
  kStoredTiles = 'T',  ///< the same of contributions that are dS itself, of whose tiles the kernel stores them
  // Contributions to several elements along axes: a warp sums up an element over its 16 keys by 8 queries as far as the
  // class allows, then adds it to memory.
  kInvariantVector = 'a',
  kKvVector = 'b',
  kQVector = 'c',
  kGeneralVector = 'g',
};

constexpr bool is_vector(Scheme scheme) {
  return scheme == Scheme::kInvariantVector || scheme == Scheme::kKvVector || scheme == Scheme::kQVector ||
         scheme == Scheme::kGeneralVector;
}
/// Whether sums live in registers until all of a head's queries are done.
constexpr bool sums_over_queries(Scheme scheme) { return scheme == Scheme::kInvariant || scheme == Scheme::kKv; }
/// Whether sums live in registers for the pairs of a tile, or of a head, and need nothing from pair to pair.
constexpr bool sums_in_registers(Scheme scheme) { return sums_over_queries(scheme) || scheme == Scheme::kQ; }
/// Whether contributions become the gradient as they are.
constexpr bool is_stored(Scheme scheme) { return scheme == Scheme::kStored || scheme == Scheme::kStoredTiles; }

}  // namespace fusegrad::device
