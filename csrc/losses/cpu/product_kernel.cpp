// Blocks of a product. This file is compiled once per instruction set, with CPU_CAPABILITY set: keep library templates
// and inline functions of other headers out.
#include "common/products.h"
#include "losses/cpu/product.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `width` rows of b, `terms` of each, as a panel.
template <class T>
void pack_rows(T* panel, const T* b, int64_t stride, int64_t width, int64_t terms) {
  if (width == kPanel<T>) return transpose_panel(b, stride, terms, panel);
  for (int64_t k = 0; k < terms; ++k) {
    for (int64_t r = 0; r < kPanel<T>; ++r) panel[k * kPanel<T> + r] = r < width ? b[r * stride + k] : T(0);
  }
}

// `width` columns of b as panels, row by row: the rows lie far apart.
template <class T>
void pack_columns(T* panels, const T* b, int64_t stride, int64_t width, int64_t terms) {
  using Vec = at::vec::Vectorized<T>;
  for (int64_t k = 0; k < terms; ++k, b += stride) {
    T* out = panels + k * kPanel<T>;
    int64_t c = 0;
    for (; c + kPanel<T> <= width; c += kPanel<T>, out += terms * kPanel<T>) {
      Vec::loadu(b + c).store(out);
      Vec::loadu(b + c + Vec::size()).store(out + Vec::size());
    }
    for (int64_t r = 0; c < width && r < kPanel<T>; ++r) out[r] = c + r < width ? b[c + r] : T(0);
  }
}

template <class T>
void copy_rows(T* out, int64_t out_stride, const T* in, int64_t in_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) out[r * out_stride + c] = in[r * in_stride + c];
  }
}

// a @ b^T + bias.
template <class T>
void by_rows(const Product& p, const ProductBlock& block, T* scratch) {
  T* panel = scratch;
  T* last = scratch + kBlockTerms * kPanel<T>;  // a panel that is wider than what is left of the output
  const T* a = static_cast<const T*>(p.a) + block.row * p.a_stride;
  const auto* bias = static_cast<const T*>(p.bias);
  for (int64_t c = block.column; c < block.column + block.columns; c += kPanel<T>) {
    const int64_t width = least(kPanel<T>, block.column + block.columns - c);
    T* out = static_cast<T*>(p.out) + block.row * p.out_stride + c;
    T* to = width == kPanel<T> ? out : last;
    const int64_t stride = width == kPanel<T> ? p.out_stride : kPanel<T>;
    int64_t k = 0;
    do {  // once at least: a sum of no terms is 0
      const int64_t terms = least(kBlockTerms, p.terms - k);
      pack_rows(panel, static_cast<const T*>(p.b) + c * p.b_stride + k, p.b_stride, width, terms);
      multiply(block.rows, kPanel<T>, terms, a + k, p.a_stride, 1, panel, 0, to, stride, k > 0);
      k += kBlockTerms;
    } while (k < p.terms);
    if (to == last) copy_rows(out, p.out_stride, last, kPanel<T>, block.rows, width);
    for (int64_t r = 0; bias != nullptr && r < block.rows; ++r) {
      for (int64_t i = 0; i < width; ++i) out[r * p.out_stride + i] += bias[c + i];
    }
  }
}

// a @ b: the terms of each segment, then the segments by pairs.
template <class T>
void by_segments(const Product& p, const ProductBlock& block, T* scratch) {
  const int64_t stride = (block.columns + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
  const int64_t size = block.rows * stride;
  T* panels = scratch;
  T* sums = scratch + kSegmentTerms * stride;
  const T* a = static_cast<const T*>(p.a) + block.row * p.a_stride;
  const T* b = static_cast<const T*>(p.b) + block.column;
  int64_t waiting = 0;
  for (int64_t s = 0; s < p.segments; ++s) {
    T* sum = sums + waiting * size;
    const int64_t begin = least(s * p.segment, p.terms), end = least(begin + p.segment, p.terms);
    for (int64_t i = 0; begin == end && i < size; ++i) sum[i] = 0;
    for (int64_t k = begin; k < end; k += kSegmentTerms) {
      const int64_t terms = least(kSegmentTerms, end - k);
      pack_columns(panels, b + k * p.b_stride, p.b_stride, block.columns, terms);
      multiply(block.rows, (block.columns + kPanel<T> - 1) / kPanel<T> * kPanel<T>, terms, a + k, p.a_stride, 1, panels,
               terms * kPanel<T>, sum, stride, k > begin);
    }
    // As in a binary counter: two sums of as many segments become one.
    for (int64_t bits = s; bits % 2 == 1; bits /= 2, --waiting, sum -= size) {
      for (int64_t i = 0; i < size; ++i) sum[i - size] += sum[i];
    }
    ++waiting;
  }
  copy_rows(static_cast<T*>(p.out) + block.row * p.out_stride + block.column, p.out_stride, sums, stride, block.rows,
            block.columns);
}

void product(const Product& p, DType dtype, const ProductBlock& block, void* scratch) {
  const auto run = [&](auto* typed) { p.segments == 0 ? by_rows(p, block, typed) : by_segments(p, block, typed); };
  dtype == DType::kFloat64 ? run(static_cast<double*>(scratch)) : run(static_cast<float*>(scratch));
}

}  // namespace

const ProductKernel kProductKernel = product;

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
