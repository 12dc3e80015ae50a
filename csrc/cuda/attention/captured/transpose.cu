#include "cuda/attention/captured/transpose.h"

#include <cstdint>

#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4096;  // of a CTA's tile
constexpr int kStores = 2;       // of a thread that copies rows

/// Neighbours that are read or written at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T element[kCount];
};
template <class T>
constexpr int kStored = 8 / static_cast<int>(sizeof(T));  // a thread stores 8 bytes

// A tile passes through shared memory: threads read kTogether of kInner neighbours of each place of the last dimension,
// and write neighbours of that one.
template <class T, int kInner, int kTogether>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const __grid_constant__ FlexCopiedRows p, unsigned inner_tiles, unsigned last_tiles) {
  constexpr int kLast = kElements / kInner, kAcross = kInner / kTogether, kReads = kElements / kTogether / kThreads;
  // Rows of a tile begin an odd multiple of 8 bytes apart, so that lanes that store to several meet in few banks.
  constexpr int kPitch = kLast + kStored<T>;
  static_assert(kPitch * sizeof(T) % 16 == 8);
  using Read = Vector<T, kTogether>;
  using Stored = Vector<T, kStored<T>>;
  __shared__ alignas(8) T tile[kInner][kPitch];
  unsigned id = blockIdx.x;
  const int64_t first = int64_t{id % last_tiles} * kLast;
  id /= last_tiles;
  const int64_t inner = int64_t{id % inner_tiles} * kInner;
  id /= inner_tiles;
  const auto outer = static_cast<unsigned>(p.outer[1]);
  const int64_t o0 = id / outer, o1 = id % outer;
  const T* from = static_cast<const T*>(p.from) + o0 * p.from_outer[0] + o1 * p.from_outer[1] + inner;
  Read read[kReads];
#pragma unroll
  for (int n = 0; n < kReads; ++n) {
    const int at = n * kThreads + static_cast<int>(threadIdx.x), i = at % kAcross * kTogether;
    const int64_t k = first + at / kAcross;
    read[n] = Read{};
    if (inner + i < p.inner && k < p.last) read[n] = *reinterpret_cast<const Read*>(from + i + k * p.from_last);
  }
#pragma unroll
  for (int n = 0; n < kReads; ++n) {
    const int at = n * kThreads + static_cast<int>(threadIdx.x), i = at % kAcross * kTogether;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) tile[i + j][at / kAcross] = read[n].element[j];
  }
  __syncthreads();
  T* to = static_cast<T*>(p.to) + o0 * p.to_outer[0] + o1 * p.to_outer[1] + inner * p.to_inner + first;
#pragma unroll
  for (int n = 0; n < kElements; n += kThreads * kStored<T>) {
    const int at = n + static_cast<int>(threadIdx.x) * kStored<T>, i = at / kLast, k = at % kLast;
    if (inner + i < p.inner && first + k < p.last) {
      *reinterpret_cast<Stored*>(to + i * p.to_inner + k) = *reinterpret_cast<const Stored*>(&tile[i][k]);
    }
  }
}

// Rows that begin anywhere: a thread reads element by element and stores 8 bytes at each of kStores places.
template <class T>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ FlexCopiedRows p, unsigned across) {
  using Stored = Vector<T, kStored<T>>;
  Stored read[kStores];
  T* to[kStores];
#pragma unroll
  for (int n = 0; n < kStores; ++n) {
    // 32 bits: divisions of 64 take longer than the copy.
    const unsigned id = (blockIdx.x * kStores + n) * kThreads + threadIdx.x, row = id / across;
    const auto inners = static_cast<unsigned>(p.inner), outers = static_cast<unsigned>(p.outer[1]);
    const int64_t k = id % across * kStored<T>;
    const int64_t inner = row % inners, o1 = row / inners % outers, o0 = row / inners / outers;
    to[n] = nullptr;
    if (o0 >= p.outer[0]) continue;
    to[n] = static_cast<T*>(p.to) + o0 * p.to_outer[0] + o1 * p.to_outer[1] + inner * p.to_inner + k;
    const T* from =
        static_cast<const T*>(p.from) + o0 * p.from_outer[0] + o1 * p.from_outer[1] + inner * p.from_inner + k;
#pragma unroll
    for (int j = 0; j < kStored<T>; ++j) read[n].element[j] = k + j < p.last ? from[j] : T{};
  }
#pragma unroll
  for (int n = 0; n < kStores; ++n) {
    if (to[n] != nullptr) *reinterpret_cast<Stored*>(to[n]) = read[n];
  }
}

template <class T>
void copy_rows(const FlexCopiedRows& p, void* stream) {
  if (p.from_last == 1) {
    constexpr int64_t kOfCta = kStores * kThreads;
    const int64_t across = (p.last + kStored<T> - 1) / kStored<T>;
    const int64_t stores = p.outer[0] * p.outer[1] * p.inner * across;
    launch("flex_transpose_rows", rows_kernel<T>, Grid{(stores + kOfCta - 1) / kOfCta, kThreads}, stream, p, across);
    return;
  }
  const auto run = [&]<int kInner, int kTogether>() {
    constexpr int kLast = kElements / kInner;
    const int64_t inner_tiles = (p.inner + kInner - 1) / kInner, last_tiles = (p.last + kLast - 1) / kLast;
    launch("flex_transpose_rows", transpose_kernel<T, kInner, kTogether>,
           Grid{p.outer[0] * p.outer[1] * inner_tiles * last_tiles, kThreads}, stream, p, inner_tiles, last_tiles);
  };
  const auto of = [&]<int kTogether>() {
    if (p.inner <= 4) {
      run.template operator()<4, kTogether>();
    } else if (p.inner <= 8) {
      run.template operator()<8, kTogether>();
    } else if (p.inner <= 16) {
      run.template operator()<16, kTogether>();
    } else {
      run.template operator()<32, kTogether>();
    }
  };
  const auto whole = [](int64_t size, int64_t stride) { return size == 1 || stride % kStored<T> == 0; };
  if (p.inner % kStored<T> == 0 && p.from_last % kStored<T> == 0 && whole(p.outer[0], p.from_outer[0]) &&
      whole(p.outer[1], p.from_outer[1]) && reinterpret_cast<uintptr_t>(p.from) % 8 == 0) {
    of.template operator()<kStored<T>>();
  } else {
    of.template operator()<1>();
  }
}

}  // namespace

void flex_transpose_rows(const FlexCopiedRows& p, int element_bytes, void* stream) {
  if (element_bytes == 2) {
    copy_rows<uint16_t>(p, stream);
  } else {
    copy_rows<uint32_t>(p, stream);
  }
}

}  // namespace fusegrad::cuda
