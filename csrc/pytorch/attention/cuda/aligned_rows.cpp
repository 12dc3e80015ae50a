#include "pytorch/attention/cuda/aligned_rows.h"

#include <ATen/ATen.h>

#include <array>
#include <vector>

#include "cuda/attention/host/transpose.h"

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

// Copies by flex_transpose, if a dimension before the last one is dense and at most two others are there.
bool transpose(const Tensor& from, const Tensor& to, void* stream) {
  const int64_t last = from.dim() - 1;
  if (from.stride(last) == 1) return false;
  std::vector<int64_t> outer;
  int64_t dense = -1;
  for (int64_t d = 0; d < last; ++d) {
    if (from.size(d) == 1) continue;
    if (dense < 0 && from.stride(d) == 1) {
      dense = d;
    } else {
      outer.push_back(d);
    }
  }
  if (dense < 0 || outer.size() > 2) return false;
  FlexTransposed p{.from = from.const_data_ptr(),
                   .to = to.mutable_data_ptr(),
                   .outer = {1, 1},
                   .from_outer = {},
                   .to_outer = {},
                   .inner = from.size(dense),
                   .last = from.size(last),
                   .from_last = from.stride(last),
                   .to_inner = to.stride(dense)};
  for (size_t i = 0; i < outer.size(); ++i) {
    p.outer.at(i) = from.size(outer[i]);
    p.from_outer.at(i) = from.stride(outer[i]);
    p.to_outer.at(i) = to.stride(outer[i]);
  }
  flex_transpose(p, static_cast<int>(from.element_size()), stream);
  return true;
}

}  // namespace

Tensor with_box_rows(const Tensor& t, void* stream) {
  const Tensor from = without_expanded(t);
  const int64_t last = from.dim() - 1, size = from.size(last), vector = 16 / from.element_size();
  auto sizes = from.sizes().vec();
  sizes.back() = (size + vector - 1) / vector * vector;
  const Tensor to = at::empty(sizes, from.options()).narrow(last, 0, size);
  // PyTorch's copy reads what is dense along another dimension than the last one a few bytes at a time.
  if (!transpose(from, to, stream)) to.copy_(from);
  return to.expand(t.sizes());
}

}  // namespace fusegrad::cuda
