// Few queries and many keys: which calls are such, and how their keys are split over CTAs. Needs no GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/attention/plan/launch_plan.h"
#include "cuda/attention/plan/plan.h"

namespace fusegrad::cuda {

/// The rows that tiles of few queries may have, ascending.
std::vector<int> few_query_tiles(int head_size, int value_size);

/// The rows of a tile in which queries of several heads are the rows (FlexCase::few_rows) for a forward; 0: the usual
/// kernels take it.
int few_query_rows(const FlexCase& c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                   const std::string& architecture);

/// The heads of a group that share a tile of so many rows: none, where lists of a block mask differ from head to head.
int64_t heads_of_tile(int64_t rows, const FlexShape& shape, const std::optional<BlockMaskShape>& mask);

/// Whether the keys of the usual tiles are split over CTAs (FlexCase::key_splits), as those would not fill the GPU.
bool pays_key_splits(const FlexShape& shape, int64_t processors);

/// Rows of tiles whose keys may be split.
struct SplitWork {
  int64_t units = 0;                     ///< rows of tiles
  int64_t tiles = 0;                     ///< of each
  int64_t outputs = 0;                   ///< numbers that each split of all rows gives
  int64_t processors = 0, resident = 1;  ///< multiprocessors, and CTAs of each
};
/// In how many parts the keys of each row of tiles are split, so that the multiprocessors end together.
int64_t key_splits(const SplitWork& work);

/// SplitWork::outputs of a call.
int64_t outputs_of(const FlexShape& shape);

}  // namespace fusegrad::cuda
