#include "cuda/attention/host/transpose.h"

#include <cstdint>
#include <type_traits>

#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256, kElements = 2048;  // of a CTA's tile
constexpr int kLanes = 32;

// A tile passes through shared memory: a warp reads kInner neighbours of each place of the last dimension, and writes
// neighbours of that one. The pitch keeps both apart in the banks.
template <class T, int kInner>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const __grid_constant__ FlexTransposed p, unsigned inner_tiles, unsigned last_tiles) {
  constexpr int kTogether = 4 / static_cast<int>(sizeof(T)), kLast = kElements / kInner;
  constexpr int kPitch = kLast + (kLanes / kInner > kTogether ? kLanes / kInner : kTogether);
  __shared__ alignas(4) T tile[kInner][kPitch];
  unsigned id = blockIdx.x;
  const int64_t first = int64_t{id % last_tiles} * kLast;
  id /= last_tiles;
  const int64_t inner = int64_t{id % inner_tiles} * kInner;
  id /= inner_tiles;
  const auto outer = static_cast<unsigned>(p.outer[1]);
  const int64_t o0 = id / outer, o1 = id % outer;
  const T* from = static_cast<const T*>(p.from) + o0 * p.from_outer[0] + o1 * p.from_outer[1];
#pragma unroll
  for (int n = 0; n < kElements; n += kThreads) {
    const int at = n + static_cast<int>(threadIdx.x), i = at % kInner, k = at / kInner;
    const bool inside = inner + i < p.inner && first + k < p.last;
    tile[i][k] = inside ? from[inner + i + (first + k) * p.from_last] : T{};
  }
  __syncthreads();
  T* to = static_cast<T*>(p.to) + o0 * p.to_outer[0] + o1 * p.to_outer[1];
#pragma unroll
  for (int n = 0; n < kElements; n += kThreads * kTogether) {
    const int at = n + static_cast<int>(threadIdx.x) * kTogether, i = at / kLast, k = at % kLast;
    if (inner + i < p.inner && first + k < p.last) {
      *reinterpret_cast<unsigned*>(to + (inner + i) * p.to_inner + first + k) =
          *reinterpret_cast<const unsigned*>(&tile[i][k]);
    }
  }
}

}  // namespace

void flex_transpose(const FlexTransposed& p, int element_bytes, void* stream) {
  const auto run = [&]<class T, int kInner>(TypeTag<T>, std::integral_constant<int, kInner>) {
    constexpr int kLast = kElements / kInner;
    const int64_t inner_tiles = (p.inner + kInner - 1) / kInner, last_tiles = (p.last + kLast - 1) / kLast;
    launch("flex_transpose", transpose_kernel<T, kInner>,
           Grid{p.outer[0] * p.outer[1] * inner_tiles * last_tiles, kThreads}, stream, p, inner_tiles, last_tiles);
  };
  const auto of = [&](auto type) {
    if (p.inner <= 4) {
      run(type, std::integral_constant<int, 4>{});
    } else if (p.inner <= 8) {
      run(type, std::integral_constant<int, 8>{});
    } else if (p.inner <= 16) {
      run(type, std::integral_constant<int, 16>{});
    } else {
      run(type, std::integral_constant<int, 32>{});
    }
  };
  if (element_bytes == 2) {
    of(TypeTag<uint16_t>{});
  } else {
    of(TypeTag<uint32_t>{});
  }
}

}  // namespace fusegrad::cuda
