// Products of a fixed number of rows each. A product's shape decides which kernel a library takes and in which order it
// adds up; with one shape for all, a row's bits depend on the row alone, not on how many others there are.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "pytorch/rows/job.h"
#include "pytorch/rows/segments.h"

namespace fusegrad {

/// How the products of a call are made whose rows must be the same whatever others there are; by default it need not
/// be.
struct FixedProducts {
  int64_t tile = 0;  ///< libraries' products, of so many rows each: what a device without products of ours has
  VocabNodes nodes;  ///< else ours, with sums over the vocabulary by these

  /// For a head's weight, or this process's part of it, in the products' dtype; `vocab` counts the columns of all.
  static FixedProducts of(const char* op, int64_t aux, const at::Tensor& weight, at::ScalarType dtype,
                          const Shards& shards, int64_t vocab) {
    if ((aux & kBatchInvariant) == 0) return {};
    const auto& kernels = *row_device(weight.device()).kernels;
    const bool takes = kernels.product_takes == nullptr || kernels.product_takes(to_dtype(dtype), weight.size(1));
    if (kernels.product != nullptr && takes) return {0, vocab_nodes(op, shards, vocab, kernels.product_unit)};
    // Few rows make products slow, and many make small calls slow, whose rows are filled up (docs/losses.md).
    return {512, {}};
  }
  explicit operator bool() const { return tile != 0 || nodes; }
};

/// Our product of a [N, K] with the columns of b^T, b [M, K], and a bias [M] where it is defined; or with `nodes` of
/// this process's part of a vocabulary, K, with b [K, M]. All of one dtype, into `out` [N, M].
void fixed_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {},
                   const VocabNodes& nodes = {});

/// Rows of a chunk as whole tiles, at least one.
inline int64_t whole_tiles(int64_t rows, int64_t tile) {
  return tile == 0 ? rows : std::max(rows / tile, int64_t{1}) * tile;
}

/// The rows as products of tiles take them: libraries look at strides and alignment too.
inline at::Tensor tile_input(const at::Tensor& x, int64_t tile) {
  if (tile == 0) return x;
  const uintptr_t alignment = x.is_cpu() ? 64 : 256;
  const bool fits =
      x.is_contiguous() && x.stride(0) == x.size(1) && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % alignment == 0;
  return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}

/// product(out, in) for rows [N, ...] of both, `tile` of them at a time; the last ones are filled up with zeros.
template <class Product>
void by_tiles(const at::Tensor& out, const at::Tensor& in, int64_t tile, Product&& product) {
  if (tile == 0) return product(out, in);
  const auto room = [tile](const at::Tensor& like) {
    return part(at::empty({tile, like.stride(0)}, like.options()), 1, 0, like.size(1));
  };
  for (int64_t first = 0; first < in.size(0); first += tile) {
    const int64_t count = std::min(tile, in.size(0) - first);
    const auto o = part(out, 0, first, count), i = part(in, 0, first, count);
    if (count == tile) {
      product(o, i);
      continue;
    }
    const auto filled_in = room(in), filled_out = room(out);
    part(filled_in, 0, 0, count).copy_(i);
    filled_in.slice(0, count).zero_();
    product(filled_out, filled_in);
    o.copy_(part(filled_out, 0, 0, count));
  }
}

}  // namespace fusegrad
