// What mods read of captured buffers, and where a kernel keeps it: reads of pairs in boxes, columns of tables, and what
// is the same in every batch. For the planner and the rooms of kernels.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "cuda/attention/plan/plan.h"
#include "score_mod/index_analysis.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda::planner {

/// Whether a score_mod or mask_mod has a read of one of these kinds.
bool reads_by(const FlexMod& mod, std::initializer_list<score_mod::Reads> kinds);

/// Reads of pairs that are the same in every batch, or, where CTAs have groups of batches, in every batch of a group.
int kept_reads(const FlexCase& c);
/// Portable: whether a CTA stays with a head for many batches, whose reads or sums are partly the same.
bool stays(const FlexCase& c);
/// The shared memory that a tile's kept reads take.
int kept_bytes(const FlexCase& c, const FlexTile& t);

/// The elements of the column of a table that a (b, h) reaches; 0 where it is the whole table.
int column_elements(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer);
/// The elements of the column of the table of each read of a pair, 0 where it does not pay.
std::vector<int> columns_of(const FlexCase& c, const FlexTile& t);
/// The shared memory that they take.
int column_bytes(const FlexCase& c, const FlexTile& t);

/// The bytes of each read of a pair in the order of threads, or 0 (FlexCase::place_bytes).
std::vector<int> places_of(const FlexCase& c);

/// Whether a mod reads numbers of pairs, or anything, that boxes can hold.
enum class Boxes : uint8_t { kAny, kNumbers };
bool has_boxes(const FlexMod& mod, Boxes of = Boxes::kAny);
/// The shared memory that the boxes of a tile take.
int box_bytes(const FlexCase& c, const FlexTile& t);
/// How many reads of pairs have boxes that TMA copies.
int box_maps(const FlexCase& c, const FlexTile& t);

}  // namespace fusegrad::cuda::planner
