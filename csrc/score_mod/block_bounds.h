// What a mask_mod says of whole blocks of queries and keys, without asking their pairs: graphs over rows and columns of
// blocks, made by interval arithmetic (ranges.h) from the mask_mod's graph. What they read of captured tensors are
// minima and maxima of parts of them.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "score_mod/captured.h"

namespace fusegrad::score_mod {

/// How an index of a captured tensor becomes one of its table of extrema.
enum class TableAxis : uint8_t {
  kEach,   ///< the index itself
  kPart,   ///< a part of `part` elements
  kRange,  ///< any number of parts: the table has the extrema of 2^k successive ones, by k
  kWhole,  ///< one part
};

/// A buffer of the bounds' graphs, made of a buffer of the mask_mod. A table has the shape [2, levels of each kRange,
/// parts of each dimension]: at 0 the minima; at 1 the maxima, each as -x (floats), ~x (integers) or not x (bools), so
/// that all are minima. Bools stay bools, integers are int32 or int64, floats float32. What of level k begins at one of
/// the last 2^k - 1 parts is never read.
struct BoundsBuffer {
  enum class Content : uint8_t { kValues, kTable, kLogarithms };
  Content content = Content::kValues;
  int source = -1;  ///< of kLogarithms, floor(log2(i + 1)) at i: the buffer and dimension whose parts it must reach
  std::vector<TableAxis> axes;
  std::vector<int64_t> parts;  ///< elements of a part, of each dimension
  int dimension = 0;

  bool operator==(const BoundsBuffer&) const = default;
};

/// What a table of such numbers holds.
inline DType table_dtype(DType dtype) {
  if (dtype == DType::kBool || dtype == DType::kInt64 || dtype == DType::kFloat64) return dtype;
  return type_of(dtype) == Type::kFloat ? DType::kFloat32 : DType::kInt32;
}

/// A scalar of the bounds' graphs that is none of the mask_mod's.
struct BoundsScalar {
  enum class Content : uint8_t { kQueries, kKeys, kSize };
  Content content;
  int buffer = 0, dimension = 0;  ///< of kSize

  bool operator==(const BoundsScalar&) const = default;
};

/// mask_mods of (b, h, row of blocks, column of blocks), with the same declarations: the mask_mod's scalars, then
/// `scalars`.
struct BlockBounds {
  Graph listed;  ///< false: no pair takes part, and every read is in range
  Graph full;    ///< true: the block ends before the queries and keys do, and all its pairs take part
  Graph safe;    ///< true: every read of every pair is in range
  std::vector<BoundsBuffer> buffers;
  std::vector<BoundsScalar> scalars;
  std::string text;  ///< of the three
};

/// The bounds of a mask_mod (simplified, lowered) for blocks of so many queries and keys. Where they would be too large
/// they know nothing. `buffers`: their dtypes and sizes are read.
BlockBounds block_bounds(const Graph& mask_mod, std::array<int64_t, 2> block_size, std::span<const Buffer> buffers);

/// block_bounds(*cached_graph(text), ...), kept as cached_graph keeps graphs. Other sizes of captured tensors are other
/// bounds only where a dimension passes one of a few thresholds.
std::shared_ptr<const BlockBounds> cached_block_bounds(std::string_view text, std::array<int64_t, 2> block_size,
                                                       std::span<const Buffer> buffers);

}  // namespace fusegrad::score_mod
