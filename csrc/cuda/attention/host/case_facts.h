// What follows from a FlexCase and a tile of its kernel: widths, what a CTA does, what a score_mod reads and what lies
// in shared memory. For the planner alone.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "cuda/attention/host/plan.h"
#include "score_mod/graph.h"
#include "score_mod/index_analysis.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda::planner {

/// Products round head sizes up to kCols. In shared memory the Hopper kernels have whole chunks of kHopperCols columns.
inline constexpr int kCols = 16, kHopperCols = 64;
int element_bytes(DType dtype);
int head_cols(const FlexCase& c, int multiple = kCols);
int value_cols(const FlexCase& c, int multiple = kCols);

bool has_mods(const FlexCase& c);
bool mixed(const FlexCase& c, const FlexTileSize& t);
/// Whether masks are all that is done to scores, and a mask_mod reads no buffer.
bool masks_alone(const FlexCase& c);
/// Hopper forward: whether exponentials are relative to the first maximum of a row.
bool first_maximum(const FlexCase& c, const FlexTileSize& t);
bool seamless(const FlexCase& c, const FlexTileSize& t);
bool has_derivative(const FlexCase& c);
/// But for the producer of the Hopper kernels.
int consumer_warps(const FlexTileSize& t);
/// Backward: both consumer warpgroups have the same 64 keys, and one of them the captured buffers' sums.
bool keys_shared(const FlexCase& c, const FlexTileSize& t);
int warps_with_keys(const FlexCase& c, const FlexTileSize& t);
bool adds_grad_query(const FlexCase& c, const FlexTileSize& t);
/// Hopper: whether a head is one chunk of 32 columns.
bool narrow(const FlexCase& c, const FlexTileSize& t);
/// Whether the backward stores dK and dV by TMA.
bool stores_boxes(const FlexCase& c, const FlexTileSize& t);
/// Portable: whether a CTA of the backward has all keys of each of its queries, and there are any.
bool stores_query(const FlexCase& c, const FlexTileSize& t);

/// Reads of pairs that are the same in every batch, or, where CTAs have groups of batches, in every batch of a group.
int kept_reads(const FlexCase& c);
/// Of the column of a table that a (b, h) reaches; 0 where it is the whole table.
int column_elements(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer);
/// Of each read of a pair the elements of the column of its table, where that pays.
std::vector<int> columns_of(const FlexCase& c, const FlexTileSize& t);
int column_bytes(const FlexCase& c, const FlexTileSize& t);
/// Portable: whether a CTA stays with a head for many batches, whose reads or sums are partly the same.
bool stays(const FlexCase& c);
enum class Boxes : uint8_t { kAny, kNumbers };
bool has_boxes(const FlexMod& mod, Boxes of = Boxes::kAny);
/// Whether a score_mod or mask_mod has a read of one of these kinds.
bool reads_by(const FlexMod& mod, std::initializer_list<score_mod::Reads> kinds);

/// The dynamic shared memory of a kernel, but for what schemes take.
int shared_bytes(const FlexCase& c, const FlexTileSize& t);

}  // namespace fusegrad::cuda::planner
