// The tiles of each kernel, from the best to the least demanding, and the family that a call takes. For the planner
// alone.
#pragma once

#include <string>
#include <vector>

#include "cuda/attention/host/plan.h"

namespace fusegrad::cuda::planner {

/// Whether 64 keys' gradients fit the registers of one warpgroup.
bool fits_hopper_backward(const FlexCase& c);
/// Whether the Hopper forward has a tile of 256 queries, of four warpgroups with 64 keys at a time.
bool has_tile_of_four(const FlexCase& c);
std::vector<FlexTileSize> hopper_backward(const FlexCase& c);
/// CTAs of a multiprocessor.
int resident_ctas(int shared_bytes, const std::string& architecture);
/// The tile of a kernel of sums over batches, and its CTAs of a multiprocessor.
FlexTileSize grad_buffers_tile(const FlexCase& c, const std::string& architecture);
int grad_buffers_ctas(const FlexTileSize& tile);

/// Where a score_mod or a mask needs registers, tiles are smaller.
std::vector<FlexTileSize> candidates(const FlexCase& c, const std::string& architecture);

}  // namespace fusegrad::cuda::planner
