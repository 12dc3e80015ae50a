#include <algorithm>
#include <cstdint>

#include "cuda/attention/captured/copy_rows.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(T);
  T element[kCount];
};

// A thread has 16 bytes of a row, whose dimensions but the last it finds from its number. Index: 32 bits where they
// suffice, as divisions of 64 take longer than the copy.
template <class T, bool kIntoRows, class Index>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ FlexRowsCopy p, Index across, Index vectors) {
  using V = Vector<T>;
  const Index id = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (id >= vectors) return;
  const int64_t k = static_cast<int64_t>(id % across) * V::kCount;
  Index row = id / across;
  int64_t from_at = 0, to_at = 0;
  for (int d = p.rank - 2; d >= 0; --d) {
    const Index size = static_cast<Index>(p.sizes[d]), i = row % size;
    row /= size;
    from_at += static_cast<int64_t>(i) * p.from_strides[d];
    to_at += static_cast<int64_t>(i) * p.to_strides[d];
  }
  const int last = p.rank - 1;
  const auto left = static_cast<int>(min(p.sizes[last] - k, static_cast<int64_t>(V::kCount)));
  if constexpr (kIntoRows) {
    const T* from = static_cast<const T*>(p.from) + from_at + k * p.from_strides[last];
    V read;
#pragma unroll
    for (int j = 0; j < V::kCount; ++j) read.element[j] = j < left ? from[j * p.from_strides[last]] : T{};
    *reinterpret_cast<V*>(static_cast<T*>(p.to) + to_at + k) = read;
  } else {
    const V read = *reinterpret_cast<const V*>(static_cast<const T*>(p.from) + from_at + k);
    T* to = static_cast<T*>(p.to) + to_at + k * p.to_strides[last];
#pragma unroll
    for (int j = 0; j < V::kCount; ++j) {
      if (j < left) to[j * p.to_strides[last]] = read.element[j];
    }
  }
}

template <class T, bool kIntoRows>
void copy(const FlexRowsCopy& p, void* stream) {
  const char* name = kIntoRows ? "flex_copy_into_rows" : "flex_copy_from_rows";
  const int64_t across = (p.sizes[p.rank - 1] + Vector<T>::kCount - 1) / Vector<T>::kCount;
  int64_t vectors = across;
  for (int d = 0; d + 1 < p.rank; ++d) vectors *= p.sizes[d];
  if (vectors == 0) return;
  const Grid grid{(vectors + kThreads - 1) / kThreads, kThreads};
  if (vectors + kThreads <= INT32_MAX) {
    launch(name, copy_kernel<T, kIntoRows, unsigned>, grid, stream, p, across, vectors);
  } else {
    launch(name, copy_kernel<T, kIntoRows, uint64_t>, grid, stream, p, across, vectors);
  }
}

}  // namespace

void flex_copy_into_rows(const FlexRowsCopy& p, int64_t element_bytes, void* stream) {
  element_bytes == 2 ? copy<uint16_t, true>(p, stream) : copy<uint32_t, true>(p, stream);
}
void flex_copy_from_rows(const FlexRowsCopy& p, int64_t element_bytes, void* stream) {
  element_bytes == 2 ? copy<uint16_t, false>(p, stream) : copy<uint32_t, false>(p, stream);
}

}  // namespace fusegrad::cuda
