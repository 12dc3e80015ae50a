#include "pytorch/attention/cuda/aligned_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "cuda/attention/captured/copy_rows.h"

namespace fusegrad::cuda {

using at::Tensor;

bool has_aligned_rows(const Tensor& t) {
  const int64_t vector = 16 / t.element_size();
  const auto fits = [&](int64_t d) { return t.size(d) == 1 || t.stride(d) % vector == 0; };
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && (t.stride(3) == 1 || t.size(3) == 1) && fits(0) &&
         fits(1) && fits(2) && t.size(3) % vector == 0;
}

Tensor new_aligned_rows(const Tensor& t, bool zeros_beyond) {
  const int64_t vector = 16 / t.element_size(), size = t.size(3), cols = (size + vector - 1) / vector * vector;
  const std::array sizes{t.size(0), t.size(1), t.size(2), cols};
  const Tensor wide = zeros_beyond && cols > size ? at::zeros(sizes, t.options()) : at::empty(sizes, t.options());
  return wide.narrow(3, 0, size);
}

Tensor with_aligned_rows(const Tensor& t) {
  if (has_aligned_rows(t)) return t;
  const Tensor part = new_aligned_rows(t, true);
  part.copy_(t);
  return part;
}

bool has_box_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1, vector = 16 / t.element_size();
  if (t.numel() == 0 || t.stride(last) != 1) return false;
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < last; ++d) aligned &= t.size(d) == 1 || t.stride(d) % vector == 0;
  return aligned;
}

Tensor without_expanded(const Tensor& t) {
  Tensor part = t;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) {
    if (t.stride(d) == 0 && t.size(d) > 1) part = part.narrow(d, 0, 1);
  }
  return part;
}

namespace {

// Copies by flex_copy_rows: where the last dimension, or another one, is dense, and at most three others are there.
bool copy_rows(const Tensor& from, const Tensor& to, void* stream) {
  const int64_t last = from.dim() - 1;
  const bool dense_rows = from.stride(last) == 1;
  if (dense_rows && from.numel() > std::numeric_limits<int32_t>::max()) return false;
  std::vector<int64_t> others;
  for (int64_t d = 0; d < last; ++d) {
    if (from.size(d) != 1) others.push_back(d);
  }
  if (others.size() > 3) return false;
  if (!dense_rows) {
    // The dimension that is dense comes last of them.
    const auto is_dense = [&](int64_t d) { return from.stride(d) == 1; };
    const auto dense = std::find_if(others.begin(), others.end(), is_dense);
    if (dense == others.end()) return false;
    std::rotate(dense, dense + 1, others.end());
  }
  FlexCopiedRows p{.from = from.const_data_ptr(),
                   .to = to.mutable_data_ptr(),
                   .outer = {1, 1},
                   .from_outer = {},
                   .to_outer = {},
                   .inner = 1,
                   .from_inner = 0,
                   .to_inner = 0,
                   .last = from.size(last),
                   .from_last = from.stride(last)};
  if (!others.empty()) {
    p.inner = from.size(others.back());
    p.from_inner = from.stride(others.back());
    p.to_inner = to.stride(others.back());
    others.pop_back();
  }
  for (size_t i = 0; i < others.size(); ++i) {
    p.outer.at(i) = from.size(others[i]);
    p.from_outer.at(i) = from.stride(others[i]);
    p.to_outer.at(i) = to.stride(others[i]);
  }
  flex_copy_rows(p, static_cast<int>(from.element_size()), stream);
  return true;
}

}  // namespace

Tensor with_box_rows(const Tensor& t, void* stream) {
  const Tensor from = without_expanded(t);
  const int64_t last = from.dim() - 1, size = from.size(last), vector = 16 / from.element_size();
  auto sizes = from.sizes().vec();
  sizes.back() = (size + vector - 1) / vector * vector;
  const Tensor to = at::empty(sizes, from.options()).narrow(last, 0, size);
  // PyTorch's copy reads rows that begin anywhere, and what is dense along another dimension, a few bytes at a time.
  if (!copy_rows(from, to, stream)) to.copy_(from);
  return to.expand(t.sizes());
}

}  // namespace fusegrad::cuda
