#include "pytorch/attention/block_tables.h"

#include <algorithm>
#include <bit>

#include "common/division.h"
#include "pytorch/score_mod/tensors.h"

namespace fusegrad {
namespace {

using at::Tensor;
using score_mod::BoundsBuffer;
using score_mod::BoundsScalar;
using score_mod::TableAxis;

int64_t levels_of(int64_t parts) { return std::bit_width(static_cast<uint64_t>(parts)); }

// The least or the largest element of each part along a dimension.
using Extreme = Tensor (*)(const Tensor&, at::IntArrayRef, bool);
Tensor along(Extreme extreme, const Tensor& t, int64_t dim, int64_t part) {
  const int64_t size = t.size(dim), whole = size / part;
  if (part >= size) return extreme(t, dim, /*keepdim=*/true);
  const Tensor first = extreme(t.narrow(dim, 0, whole * part).unflatten(dim, {whole, part}), dim + 1, false);
  if (whole * part == size) return first;
  return at::cat({first, extreme(t.narrow(dim, whole * part, size - whole * part), dim, true)}, dim);
}

Tensor extremes(Extreme extreme, Tensor t, const BoundsBuffer& table) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    const auto axis = static_cast<size_t>(d);
    const int64_t part = table.axes[axis] == TableAxis::kWhole ? t.size(d) : table.parts[axis];
    if (part > 1) t = along(extreme, t, d, part);
  }
  return t;
}

Tensor inverted(const Tensor& t) { return at::isFloatingType(t.scalar_type()) ? t.neg() : t.bitwise_not(); }

at::ScalarType dtype_of_table(const Tensor& captured) {
  switch (score_mod::table_dtype(score_mod::dtype_of(captured))) {
    case score_mod::DType::kBool:
      return at::kBool;
    case score_mod::DType::kInt64:
      return at::kLong;
    case score_mod::DType::kInt32:
      return at::kInt;
    case score_mod::DType::kFloat64:
      return at::kDouble;
    default:
      return at::kFloat;
  }
}

Tensor table_of(const BoundsBuffer& table, const Tensor& captured) {
  const auto dtype = dtype_of_table(captured);
  const Tensor low = extremes(at::amin, captured, table).to(dtype);
  const Tensor high = inverted(extremes(at::amax, captured, table).to(dtype));
  Tensor both = at::stack({low, high});
  // Levels are made for the last dimension first: each stands before all others.
  int64_t levels_before = 0;
  for (int64_t d = captured.dim() - 1; d >= 0; --d) {
    if (table.axes[static_cast<size_t>(d)] != TableAxis::kRange) continue;
    const int64_t at = 1 + levels_before + d, parts = both.size(at), count = levels_of(parts);
    std::vector<int64_t> sizes = both.sizes().vec();
    sizes.insert(sizes.begin() + 1, count);
    const Tensor all = at::empty(sizes, both.options());
    all.select(1, 0).copy_(both);
    for (int64_t level = 1; level < count; ++level) {
      const int64_t step = int64_t{1} << (level - 1), reached = parts - 2 * step + 1;
      const Tensor from = all.select(1, level - 1);
      Tensor to = all.select(1, level).narrow(at, 0, reached);
      at::minimum_out(to, from.narrow(at, 0, reached), from.narrow(at, step, reached));
    }
    both = all;
    ++levels_before;
  }
  return both;
}

// floor(log2(i + 1)), exact: float64 has room for what the logarithm of an integer below 2^48 lacks to the next one.
Tensor logarithms(int64_t count, const Tensor& like) {
  return at::arange(1, count + 1, like.options().dtype(at::kDouble)).log2_().floor_().to(at::kInt);
}

}  // namespace

std::vector<Tensor> block_tables(const score_mod::BlockBounds& bounds, at::TensorList captured, const Tensor& like) {
  std::vector<Tensor> made;
  for (const BoundsBuffer& b : bounds.buffers) {
    const Tensor source = captured[static_cast<size_t>(b.source)].detach();
    switch (b.content) {
      case BoundsBuffer::Content::kValues:
        made.push_back(source);
        break;
      case BoundsBuffer::Content::kTable:
        made.push_back(table_of(b, source));
        break;
      case BoundsBuffer::Content::kLogarithms: {
        const int64_t part = b.parts[0];
        made.push_back(logarithms(ceil_div(source.size(b.dimension), part), like));
      }
    }
  }
  return made;
}

std::vector<at::Scalar> block_scalars(const score_mod::BlockBounds& bounds, at::TensorList captured,
                                      at::ArrayRef<at::Scalar> scalars, std::array<int64_t, 2> lengths) {
  std::vector<at::Scalar> made = scalars.vec();
  for (const BoundsScalar& s : bounds.scalars) {
    const auto value = [&] {
      switch (s.content) {
        case BoundsScalar::Content::kQueries:
          return lengths[0];
        case BoundsScalar::Content::kKeys:
          return lengths[1];
        default:
          return captured[static_cast<size_t>(s.buffer)].size(s.dimension);
      }
    };
    made.emplace_back(value());
  }
  return made;
}

}  // namespace fusegrad
