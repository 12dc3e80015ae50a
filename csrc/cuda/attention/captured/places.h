// Tensors of integers that are indices of tables and nothing else, which all heads read for each pair: copied once a
// call with fewer bytes, and where one CTA has all pairs of a head in the order of its threads.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cuda/attention/captured/place_order.cuh"
#include "cuda/attention/plan/call_plan.h"

namespace fusegrad::cuda {

/// A copy. Integers from -most to most - 1 stay. Others index no dimension of at most `most` elements, and become the
/// least number of their type, which does not either: types are such that -most is above it.
struct FlexPlaces {
  static constexpr size_t kMostRank = 6;

  const void* from;
  void* to;
  score_mod::DType dtype;  ///< of `from`
  int to_bytes;            ///< of an element of `to`: 1, 2 or 4
  long long most;
  device::PlaceOrder order;
  int rank;
  std::array<int, kMostRank> sizes;
  std::array<long long, kMostRank> from_strides, to_strides;  ///< in elements
};
/// How many elements of a dimension are copied: of one that is expanded, but for the last two, one.
inline int copied_size(std::span<const int64_t> sizes, std::span<const int64_t> strides, size_t d) {
  return d + 2 < sizes.size() && strides[d] == 0 ? 1 : static_cast<int>(sizes[d]);
}
void flex_copy_places(std::span<const FlexPlaces> copies, void* stream);

/// What a forward or backward asks where tensors are copied so, which it adds to `plan`. Comes behind begin_plan.
Asked narrow_places(const Asked& asked, const Gpu& gpu, CallPlan& plan);
/// Gives the copies regions, in `order` where the kernels of the call take it, which `common` then says. `kernels` of a
/// case: none where they take rows alone.
void take_places(const Asked& given, const Gpu& gpu, device::PlaceOrder order,
                 const std::function<std::vector<FlexCase>(const FlexCase&)>& kernels, FlexCase& common,
                 CallPlan& plan);

}  // namespace fusegrad::cuda
