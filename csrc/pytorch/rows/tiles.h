// Products of the linear losses whose rows have the same bits in every call, and in every process that has a part of
// the vocabulary (losses/product.h).
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "pytorch/rows/job.h"
#include "pytorch/rows/segments.h"

namespace fusegrad {

/// How the products of a call are made whose rows must be the same in all; false: they need not be.
struct FixedProducts {
  VocabNodes nodes;
  /// 0: products of ours. Else a library's, of so many rows and one segment each: a product's shape decides which
  /// kernel it takes and in which order it adds up.
  int64_t tile = 0;

  /// For a head's weight, or this process's part of it, in the products' dtype; `vocab` counts the columns of all.
  static FixedProducts of(const char* op, int64_t aux, const at::Tensor& weight, at::ScalarType dtype,
                          const Shards& shards, int64_t vocab) {
    if ((aux & kBatchInvariant) == 0) return {};
    const auto& kernels = *row_device(weight.device()).kernels;
    const bool takes = kernels.product_takes == nullptr || kernels.product_takes(to_dtype(dtype), weight.size(1));
    // Few rows make products slow, and many make small calls slow, whose rows are filled up (docs/losses.md).
    return {vocab_nodes(op, shards, vocab, weight.device()), takes ? 0 : 512};
  }
  explicit operator bool() const { return static_cast<bool>(nodes); }
};

/// out [n, columns] = input [n, H] @ weight [columns, H]^T + bias [columns], where it is defined. All of one dtype.
void fixed_logits(const at::Tensor& out, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                  const FixedProducts& fixed);

/// out [n, H] = z [n, columns] @ weight [columns, H]: the sum of this process's segments, in the factors' dtype or in
/// acc.
void fixed_sums(const at::Tensor& out, const at::Tensor& z, const at::Tensor& weight, const FixedProducts& fixed);

/// Rows of a chunk as whole tiles, at least one.
inline int64_t whole_tiles(int64_t rows, int64_t tile) {
  return tile == 0 ? rows : std::max(rows / tile, int64_t{1}) * tile;
}

}  // namespace fusegrad
