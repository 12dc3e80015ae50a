#include "cuda/attention/host/few_queries.h"

#include <algorithm>

namespace fusegrad::cuda {
namespace {

// In tiles, as many of which a CTA's start takes, and merging.
int64_t time_of(int64_t units, int64_t tiles, int64_t places, int64_t splits) {
  constexpr int64_t kStart = 1, kMerge = 1;
  return tiles_in(units * splits, places) * (tiles_in(tiles, splits) + kStart) + (splits > 1 ? kMerge : 0);
}

}  // namespace

std::vector<int> few_query_tiles(int head_size, int value_size) {
  // Of wider heads the output of one more accumulator's rows would not fit the registers.
  if (std::max(head_size, value_size) > 128) return {16};
  return {16, 32};
}

int64_t heads_of_tile(int64_t rows, const FlexShape& shape, const std::optional<BlockMaskShape>& mask) {
  if (mask && mask->heads > 1) return 1;
  return std::clamp(rows / shape.queries, int64_t{1}, shape.group());
}

int few_query_rows(const FlexCase& c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                   const std::string& architecture) {
  if (c.kernel != FlexKernel::kForward || c.head_size == 0 || flex_family_is_forced()) return 0;
  // A backward compares scores with the largest one, which must have the same bits.
  if (c.max_scores && takes_hopper(c, architecture)) return 0;
  constexpr int64_t kManyKeys = 512;
  const std::vector<int> tiles = few_query_tiles(c.head_size, c.value_size);
  const int64_t heads = mask && mask->heads > 1 ? 1 : shape.group();
  if (shape.queries * heads <= tiles.front()) return tiles.front();
  const bool many = shape.queries <= tiles.back() && shape.keys >= kManyKeys;
  return shape.queries <= tiles.front() || many ? tiles.back() : 0;
}

bool pays_key_splits(const FlexShape& shape, int64_t processors) {
  constexpr int64_t kTile = 128;  // about that of the usual kernels
  const int64_t units = shape.query_heads() * tiles_in(shape.queries, kTile), tiles = tiles_in(shape.keys, kTile);
  if (units >= processors) return false;
  return 5 * time_of(units, tiles, processors, key_splits(units, tiles, processors)) <=
         4 * time_of(units, tiles, processors, 1);
}

int64_t key_splits(int64_t units, int64_t tiles, int64_t places) {
  constexpr int64_t kMostWaves = 8;
  int64_t best = 1, least = time_of(units, tiles, places, 1);
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t splits = std::min(waves * places / units, tiles);
    if (splits <= 1) continue;
    const int64_t time = time_of(units, tiles, places, splits);
    if (time >= least) continue;
    least = time;
    best = splits;
  }
  return best;
}

}  // namespace fusegrad::cuda
