#include "pytorch/rows/tiles.h"

#include "common/division.h"
#include "pytorch/rows/linear.h"

namespace fusegrad {
namespace {

using at::Tensor;

// Rows as our product takes them. CUDA's copies whole units of 16 bytes.
Tensor product_rows(const Tensor& matrix) {
  const auto rows = dense_rows(matrix);
  if (rows.is_cpu()) return rows;
  constexpr int64_t kUnit = 16;
  const bool fits = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kUnit == 0 && rows.stride(0) >= rows.size(1) &&
                    rows.stride(0) * rows.element_size() % kUnit == 0;
  return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// With `segments` of a vocabulary they are added up over it.
void own_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, const VocabNodes& segments) {
  const auto left = product_rows(a), right = product_rows(b), added = bias.defined() ? bias.contiguous() : bias;
  TORCH_INTERNAL_ASSERT(out.size(1) <= 1 || out.stride(1) == 1);
  const auto dtype = left.scalar_type();
  TORCH_INTERNAL_ASSERT(right.scalar_type() == dtype);
  Product p;
  p.rows = out.size(0);
  p.cols = out.size(1);
  p.terms = left.size(1);
  p.a = left.const_data_ptr();
  p.a_stride = left.stride(0);
  p.b = right.const_data_ptr();
  p.b_stride = right.stride(0);
  p.bias = added.defined() ? added.const_data_ptr() : nullptr;
  p.out = out.data_ptr();
  p.out_stride = out.stride(0);
  p.float_out = out.scalar_type() != dtype;
  TORCH_INTERNAL_ASSERT(!p.float_out || (segments && out.scalar_type() == at::kFloat));
  if (segments) {
    p.segment = segments.segment;
    p.segments = segments.mine().segments;
  }
  const auto device = row_device(out.device());
  Tensor room;
  if (device.kernels->product_workspace != nullptr) {
    room = at::empty({device.kernels->product_workspace(p)}, out.options().dtype(at::kByte));
    p.workspace = room.data_ptr();
  }
  device.kernels->product(p, to_dtype(dtype), device.stream);
}

// Libraries look at strides and alignment too, which differ between processes that have other segments. All of their
// matrices begin at multiples of 256 bytes, their rows at as many elements.
constexpr int64_t kRowUnit = 8;
constexpr size_t kAlignment = 256;

Tensor room_for(int64_t rows, int64_t columns, const at::TensorOptions& options) {
  return part(at::empty({rows, round_up(columns, kRowUnit)}, options), 1, 0, columns);
}

// Up to `tile` rows, filled up with zeros.
Tensor as_tile(const Tensor& rows, int64_t tile) {
  const int64_t count = rows.size(0), columns = rows.size(1);
  if (count == tile && columns % kRowUnit == 0 && rows.is_contiguous()) return aligned(rows, kAlignment);
  const auto filled = room_for(tile, columns, rows.options());
  part(filled, 0, 0, count).copy_(rows);
  filled.slice(0, count).zero_();
  return filled;
}

// body(first row, rows) for each tile.
template <class Body>
void each_tile(int64_t rows, int64_t tile, Body&& body) {
  for (int64_t first = 0; first < rows; first += tile) body(first, std::min(tile, rows - first));
}

// body(first column, columns) for each segment of this process.
template <class Body>
void each_segment(int64_t columns, const VocabNodes& nodes, Body&& body) {
  for (int64_t s = 0; s < nodes.mine().segments; ++s) {
    const int64_t first = std::min(s * nodes.segment, columns);
    body(first, std::min(nodes.segment, columns - first));
  }
}

}  // namespace

void fixed_logits(const Tensor& out, const Tensor& input, const Tensor& weight, const Tensor& bias,
                  const FixedProducts& fixed) {
  if (fixed.tile == 0) return own_product(out, input, weight, bias, {});
  each_tile(out.size(0), fixed.tile, [&](int64_t first, int64_t count) {
    const auto rows = as_tile(part(input, 0, first, count), fixed.tile);
    each_segment(out.size(1), fixed.nodes, [&](int64_t column, int64_t width) {
      if (width == 0) return;
      auto z = room_for(fixed.tile, width, out.options());
      const auto w = aligned(part(weight, 0, column, width), kAlignment).t();
      if (bias.defined()) {
        at::addmm_out(z, aligned(part(bias, 0, column, width), kAlignment), rows, w);
      } else {
        at::mm_out(z, rows, w);
      }
      part(part(out, 0, first, count), 1, column, width).copy_(part(z, 0, 0, count));
    });
  });
}

void fixed_sums(const Tensor& out, const Tensor& z, const Tensor& weight, const FixedProducts& fixed) {
  if (fixed.nodes.mine().segments == 0) {
    out.zero_();
    return;
  }
  if (fixed.tile == 0) return own_product(out, z, weight, {}, fixed.nodes);
  const auto acc = out.options().dtype(acc_type(z.scalar_type()));
  each_tile(out.size(0), fixed.tile, [&](int64_t first, int64_t count) {
    std::vector<Tensor> waiting;  // for their pair, as in a binary counter
    int64_t segments = 0;
    each_segment(z.size(1), fixed.nodes, [&](int64_t column, int64_t width) {
      auto sum = at::empty({fixed.tile, out.size(1)}, acc);
      if (width == 0) {
        sum.zero_();
      } else {
        const auto rows = as_tile(part(part(z, 0, first, count), 1, column, width), fixed.tile);
        multiply(sum, rows, aligned(part(weight, 0, column, width), kAlignment), /*add=*/false);
      }
      for (int64_t bits = segments++; bits % 2 == 1; bits /= 2) {
        sum = waiting.back() + sum;
        waiting.pop_back();
      }
      waiting.push_back(sum);
    });
    part(out, 0, first, count).copy_(part(waiting.front(), 0, 0, count));
  });
}

}  // namespace fusegrad
