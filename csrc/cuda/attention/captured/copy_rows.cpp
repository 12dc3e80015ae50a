#include "cuda/attention/captured/copy_rows.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "cuda/attention/captured/transpose.h"

namespace fusegrad::cuda {

BoxCopy::BoxCopy(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t element_bytes)
    : sizes_(sizes.begin(), sizes.end()),
      strides_(strides.begin(), strides.end()),
      to_(sizes.size()),
      expanded_(sizes.size(), false),
      element_bytes_(element_bytes) {
  for (size_t d = 0; d + 1 < sizes_.size(); ++d) {
    expanded_[d] = strides_[d] == 0 && sizes_[d] > 1;
    if (expanded_[d]) sizes_[d] = 1;
  }
  const int64_t vector = 16 / element_bytes;
  int64_t stride = 1;
  for (size_t d = sizes_.size(); d-- > 0;) {
    to_[d] = stride;
    stride *= d + 1 == sizes_.size() ? (sizes_[d] + vector - 1) / vector * vector : sizes_[d];
  }
}

int64_t BoxCopy::elements() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}
int64_t BoxCopy::bytes() const {
  const int64_t vector = 16 / element_bytes_, last = sizes_.back();
  return last == 0 ? 0 : elements() / last * ((last + vector - 1) / vector * vector) * element_bytes_;
}
std::vector<int64_t> BoxCopy::strides() const {
  std::vector<int64_t> strides = to_;
  for (size_t d = 0; d < strides.size(); ++d) {
    if (expanded_[d]) strides[d] = 0;
  }
  return strides;
}

// By flex_transpose_rows: where the last dimension, or another one, is dense, and at most three others are there.
bool BoxCopy::run_fast(const void* from, void* to, void* stream) const {
  const size_t last = sizes_.size() - 1;
  const bool dense_rows = strides_[last] == 1;
  if (dense_rows && elements() > std::numeric_limits<int32_t>::max()) return false;
  std::vector<size_t> others;
  for (size_t d = 0; d < last; ++d) {
    if (sizes_[d] != 1) others.push_back(d);
  }
  if (others.size() > 3) return false;
  if (!dense_rows) {
    // The dimension that is dense comes last of them.
    const auto dense = std::find_if(others.begin(), others.end(), [&](size_t d) { return strides_[d] == 1; });
    if (dense == others.end()) return false;
    std::rotate(dense, dense + 1, others.end());
  }
  FlexCopiedRows p{.from = from,
                   .to = to,
                   .outer = {1, 1},
                   .from_outer = {},
                   .to_outer = {},
                   .inner = 1,
                   .from_inner = 0,
                   .to_inner = 0,
                   .last = sizes_[last],
                   .from_last = strides_[last]};
  if (!others.empty()) {
    p.inner = sizes_[others.back()];
    p.from_inner = strides_[others.back()];
    p.to_inner = to_[others.back()];
    others.pop_back();
  }
  for (size_t i = 0; i < others.size(); ++i) {
    p.outer.at(i) = sizes_[others[i]];
    p.from_outer.at(i) = strides_[others[i]];
    p.to_outer.at(i) = to_[others[i]];
  }
  flex_transpose_rows(p, static_cast<int>(element_bytes_), stream);
  return true;
}

void BoxCopy::run(const void* from, void* to, void* stream) const {
  if (run_fast(from, to, stream)) return;
  FlexRowsCopy copy{from, to, static_cast<int>(sizes_.size()), {}, {}, {}};
  std::copy(sizes_.begin(), sizes_.end(), copy.sizes.begin());
  std::copy(strides_.begin(), strides_.end(), copy.from_strides.begin());
  std::copy(to_.begin(), to_.end(), copy.to_strides.begin());
  flex_copy_into_rows(copy, element_bytes_, stream);
}

}  // namespace fusegrad::cuda
