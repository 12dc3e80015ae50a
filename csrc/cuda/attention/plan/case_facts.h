// What follows from a FlexCase and a tile, whatever the kernel. For the planner and the rooms of kernels.
#pragma once

#include <cstdint>

#include "cuda/attention/plan/plan.h"

namespace fusegrad::cuda::planner {

/// Products round head sizes up to kCols. In shared memory the Hopper kernels have whole chunks of kHopperCols columns.
inline constexpr int kCols = 16, kHopperCols = 64;
int head_cols(const FlexCase& c, int multiple = kCols);
int value_cols(const FlexCase& c, int multiple = kCols);

bool mixed(const FlexCase& c, const FlexTile& t);
/// Whether masks are all that is done to scores, and a mask_mod reads no buffer.
bool masks_alone(const FlexCase& c);
/// Whether a partial tile is whole where the mask_mod allows its corners: it reads no buffer, allows all pairs between
/// pairs that it allows, and decides alone about a tile's pairs.
bool corners_tell(const FlexCase& c, const FlexTile& t);
bool has_derivative(const FlexCase& c);
/// float32: whether products are made of six in TF32.
bool splits_products(const FlexCase& c);
/// But for the producer of the Hopper kernels.
int consumer_warps(const FlexTile& t);
/// Hopper, kernels of gradients: whether a head is one chunk of 32 columns. A warpgroup has 64 queries of dQ.
bool narrow_heads(const FlexCase& c, const FlexTile& t);

}  // namespace fusegrad::cuda::planner
