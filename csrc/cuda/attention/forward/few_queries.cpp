#include "cuda/attention/forward/few_queries.h"

#include <algorithm>

namespace fusegrad::cuda {
namespace {

// In times that a multiprocessor takes for a tile: 0.75 to 1.2 us on an H200.
double time_of(const SplitWork& work, int64_t splits) {
  constexpr double kStart = 2.5, kMerge = 2.5;  // of a CTA; of another kernel
  constexpr double kMergeFloat = 2e-6;          // of a partial output, written and read
  const int64_t ctas = work.units * splits;
  // A multiprocessor's CTAs share its rate, and one begins beside another's products.
  const double time = static_cast<double>(tiles_in(ctas, work.processors) * tiles_in(work.tiles, splits)) +
                      kStart * static_cast<double>(tiles_in(ctas, work.processors * work.resident));
  if (splits == 1) return time;
  return time + kMerge + kMergeFloat * static_cast<double>(work.outputs * splits);
}

}  // namespace

std::vector<int> few_query_tiles(int head_size, int value_size) {
  // The output of one more accumulator's rows would not fit the registers of wider heads.
  if (std::max(head_size, value_size) > 128) return {16};
  return {16, 32};
}

int64_t heads_of_tile(int64_t rows, const FlexShape& shape, const std::optional<BlockMaskShape>& mask) {
  if (mask && mask->heads > 1) return 1;
  return std::clamp(rows / shape.queries, int64_t{1}, shape.group());
}

int few_query_rows(const FlexCase& c, const FlexShape& shape, const std::optional<BlockMaskShape>& mask,
                   const std::string& architecture) {
  if (c.kernel != FlexKernel::kForward || c.head_size == 0 || c.wide || flex_family_is_forced()) return 0;
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
  constexpr int64_t kTile = 128;   // about that of the usual kernels
  constexpr double kEnough = 0.8;  // of the time without
  const SplitWork work{.units = shape.query_heads() * tiles_in(shape.queries, kTile),
                       .tiles = tiles_in(shape.keys, kTile),
                       .outputs = outputs_of(shape),
                       .processors = processors};
  if (work.units >= processors) return false;
  return time_of(work, key_splits(work)) <= kEnough * time_of(work, 1);
}

int64_t key_splits(const SplitWork& work) {
  constexpr int64_t kMostWaves = 16;
  int64_t best = 1;
  double least = time_of(work, 1);
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t splits = std::min(waves * work.processors / work.units, work.tiles);
    if (splits <= 1) continue;
    const double time = time_of(work, splits);
    if (time >= least) continue;
    least = time;
    best = splits;
  }
  return best;
}

int64_t outputs_of(const FlexShape& shape) {
  return shape.query_heads() * shape.queries * std::max(shape.head_size, shape.value_size);
}

}  // namespace fusegrad::cuda
