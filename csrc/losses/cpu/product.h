// Blocks of a product, compiled once for each instruction set.
#pragma once

#include "common/capability.h"
#include "losses/product.h"

namespace fusegrad::cpu {

/// The whole product: RowKernels' entry.
void product(const Product& p, DType dtype, void* stream);

/// Rows [row, row + rows) and columns [column, column + columns) of a product.
struct ProductBlock {
  int64_t row, rows, column, columns;
};

/// Columns of blocks begin at multiples of this, and scratch has whole multiples.
constexpr int64_t kBlockColumns = 32;
/// Terms for which b is packed at a time: a multiple of the terms that are added up first (common/products.h).
constexpr int64_t kBlockTerms = 512, kSegmentTerms = 128;
/// Sums that wait for their pair, and the one that is being made.
constexpr int64_t kWaitingSums = 5;

/// Elements of scratch that a block needs.
inline int64_t product_scratch(const Product& p, int64_t rows, int64_t columns) {
  columns = (columns + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
  return p.segments == 0 ? (kBlockTerms + rows) * kBlockColumns : (kSegmentTerms + kWaitingSums * rows) * columns;
}

using ProductKernel = void (*)(const Product&, DType, const ProductBlock&, void* scratch);

FUSEGRAD_EACH_CAPABILITY(extern const ProductKernel kProductKernel;)

}  // namespace fusegrad::cpu
