#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/division.h"
#include "cuda/attention/captured/places.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using device::kPlaceTile, device::place_of_thread, device::PlaceOfThread, device::PlaceOrder;
using score_mod::DType;

constexpr int kThreads = 256;
constexpr int kMostTogether = 4;

struct Copies {
  FlexPlaces of[kMostTogether];
  unsigned vectors[kMostTogether];
};

__device__ __forceinline__ long long read(const FlexPlaces& p, long long at) {
  switch (p.dtype) {
    case DType::kInt64:
      return static_cast<const long long*>(p.from)[at];
    case DType::kInt32:
      return static_cast<const int*>(p.from)[at];
    case DType::kInt16:
      return static_cast<const short*>(p.from)[at];
    default:
      return static_cast<const signed char*>(p.from)[at];
  }
}

// A thread makes 16 bytes of the copy.
template <class T>
__device__ __forceinline__ void copy(const FlexPlaces& p, unsigned vector) {
  constexpr int kCount = 16 / sizeof(T);
  struct alignas(16) Vector {
    T element[kCount];
  } made;
  const int last = p.rank - 1;
  const int rows = p.sizes[last - 1], cols = p.sizes[last];
  const bool ordered = p.order != PlaceOrder::kRows;
  // Which 16 bytes of a row, or of a tile.
  const unsigned across = ordered ? kPlaceTile * kPlaceTile / kCount : ceil_div(cols, kCount);
  const unsigned part = vector % across;
  unsigned rest = vector / across;
  long long from = 0, to = 0;
  for (int d = ordered ? last - 2 : last - 1; d >= 0; --d) {
    const unsigned size = p.sizes[d], i = rest % size;
    rest /= size;
    from += i * p.from_strides[d];
    to += i * p.to_strides[d];
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    int row = 0, col = static_cast<int>(part) * kCount + j;
    bool there = col < cols;
    if (ordered) {
      const PlaceOfThread at = place_of_thread(static_cast<int>(part), j, kCount);
      row = p.order == PlaceOrder::kQueryRows ? at.row : at.col;
      col = p.order == PlaceOrder::kQueryRows ? at.col : at.row;
      there = row < rows && col < cols;
    }
    long long x = 0;  // a read of an integer beyond its tensor is 0
    if (there) {
      x = read(p, from + (ordered ? row * p.from_strides[last - 1] : 0) + col * p.from_strides[last]);
      if (x < -p.most || x >= p.most) x = std::numeric_limits<T>::min();
    }
    made.element[j] = static_cast<T>(x);
  }
  reinterpret_cast<Vector*>(static_cast<T*>(p.to) + to)[part] = made;
}

__global__ void __launch_bounds__(kThreads) places_kernel(const __grid_constant__ Copies copies) {
  const FlexPlaces& p = copies.of[blockIdx.y];
  const unsigned vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= copies.vectors[blockIdx.y]) return;
  if (p.to_bytes == 1) {
    copy<signed char>(p, vector);
  } else if (p.to_bytes == 2) {
    copy<short>(p, vector);
  } else {
    copy<int>(p, vector);
  }
}

unsigned vectors_of(const FlexPlaces& p) {
  const int64_t count = 16 / p.to_bytes;
  const bool ordered = p.order != PlaceOrder::kRows;
  int64_t vectors = ordered ? kPlaceTile * kPlaceTile / count : ceil_div<int64_t>(p.sizes[p.rank - 1], count);
  for (int d = 0; d < p.rank - (ordered ? 2 : 1); ++d) vectors *= p.sizes[d];
  return static_cast<unsigned>(vectors);
}

}  // namespace

void flex_copy_places(std::span<const FlexPlaces> all, void* stream) {
  for (size_t first = 0; first < all.size(); first += kMostTogether) {
    const size_t count = std::min<size_t>(kMostTogether, all.size() - first);
    Copies copies{};
    unsigned most = 0;
    for (size_t i = 0; i < count; ++i) {
      copies.of[i] = all[first + i];
      copies.vectors[i] = vectors_of(all[first + i]);
      most = std::max(most, copies.vectors[i]);
    }
    if (most == 0) continue;
    const Grid grid{
        .blocks = ceil_div(int64_t{most}, kThreads), .threads = kThreads, .blocks_y = static_cast<int64_t>(count)};
    launch("flex_copy_places", places_kernel, grid, stream, copies);
  }
}

}  // namespace fusegrad::cuda
