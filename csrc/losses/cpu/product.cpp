// The split of a product into blocks, over threads.
#include "losses/cpu/product.h"

#include <algorithm>
#include <memory>

#include "common/capability.h"
#include "common/division.h"
#include "losses/row_kernels.h"

namespace fusegrad::cpu {

void product(const Product& p, DType dtype, void* stream) {
  static const ProductKernel kernel =
      for_this_machine(DEFAULT::kProductKernel, AVX2::kProductKernel, AVX512::kProductKernel);
  if (p.rows == 0 || p.cols == 0) return;
  const auto& host = *static_cast<const Host*>(stream);
  // Sums that wait for their pair should stay in the caches; the blocks' sizes change no bits.
  const int64_t rows = std::min<int64_t>(p.rows, p.segments == 0 ? 256 : 64);
  const int64_t row_blocks = ceil_div(p.rows, rows), least_blocks = 4 * threads(host);
  int64_t columns = std::min<int64_t>(round_up(p.cols, kBlockColumns), 4 * kBlockColumns);
  while (columns > kBlockColumns && row_blocks * ceil_div(p.cols, columns) < least_blocks) columns -= kBlockColumns;
  const int64_t column_blocks = ceil_div(p.cols, columns);
  const int64_t work = rows * columns * std::max<int64_t>(p.terms, 1);
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 17) / work);
  parallel_for(host, row_blocks * column_blocks, grain, [&](int64_t begin, int64_t end) {
    const int64_t size = dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
    const std::unique_ptr<double[]> scratch(
        new double[ceil_div(static_cast<size_t>(product_scratch(p, rows, columns) * size), sizeof(double))]);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % row_blocks * rows, column = i / row_blocks * columns;
      kernel(p, dtype, {row, std::min(rows, p.rows - row), column, std::min(columns, p.cols - column)}, scratch.get());
    }
  });
}

}  // namespace fusegrad::cpu
