// The products of the linear losses whose rows have the same bits in every call (losses/product.h), on Hopper, in
// bfloat16 or float16:
//   logits   out = a @ b^T + bias,   b [cols, terms]
//   sums     out = a @ b,            b [terms, cols], over up to sixteen segments of the terms, which add up by pairs
//
// An element is a chain of one instruction (m64n256k16) over its terms from the first on; what is beyond the last is
// zero. Rows and columns of the instruction do not see one another, so neither the place in a tile nor what stands
// beside it changes an element's bits, and tiles may have other sizes where there are few rows. Segments add up by the
// same pairs whether a CTA has all of a tile or one.
//
// CTAs are persistent: a warpgroup of producers copies tiles by TMA, each of the others multiplies 64 rows. Up to 64
// rows are a tile for one, and the weight is read once.
#pragma once

#include "cuda/device/hopper.cuh"

namespace fusegrad::device::head {

constexpr int kCols = 256, kDepth = 64;
constexpr int kWeightBytes = kCols * kChunkBytes;
constexpr int kProducerRegisters = 40;
/// Tiles of rows that CTAs walk side by side for one tile of columns, so that both stay in the L2 cache.
constexpr int kRowGroup = 16;
constexpr int kSegments = 16, kLevels = 4;

/// The sizes of CTAs whose tiles have 64 rows for each of so many warpgroups.
template <int kGroups>
struct Shape {
  static constexpr int kRows = 64 * kGroups, kThreads = (1 + kGroups) * kWarpgroup;
  static constexpr int kStages = kGroups == 1 ? 5 : 4;
  static constexpr int kInputBytes = kRows * kChunkBytes, kStageBytes = kInputBytes + kWeightBytes;
  // Stages begin at a multiple of 1024; a full and an empty barrier a stage behind them.
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 16 * kStages;
  // What a CTA keeps of a tile's segments until their pairs are there.
  static constexpr long long kKeptFloats = static_cast<long long>(kLevels) * kRows * kCols;
};

struct Params {
  TensorMap a;     // [1, 1, rows, terms], boxes of a tile's rows and kDepth columns
  TensorMap b;     // logits: [1, 1, cols, terms], boxes of `width` rows and kDepth columns
                   // sums: [1, segments, terms of one, cols], boxes of kDepth rows and a chunk of columns
  TensorMap last;  // sums: [1, 1, terms, cols], the last segment that has terms ends where they end
  int rows, cols, terms;
  int width;         // columns of a tile, a multiple of 8: kCols, or fewer for logits
  int segment;       // terms of one; logits: all terms
  int segments;      // a power of two
  int used;          // segments that have terms, at least 1; logits: 1
  bool split;        // sums: a CTA has one segment of a tile, and add_parts_kernel adds them up. True for one group
  const void* bias;  // [cols] T, or null
  void* out;         // T; sums: float where float_out
  bool float_out;
  long long out_stride;
  float* parts;  // sums, split: [segments, rows, cols]; otherwise kKeptFloats a CTA
};

template <int kGroups>
struct Place {
  int row, col;
  int first, end;  // segments

  // Item `i` of all: kRowGroup tiles of rows at a time, of these all for a tile of columns, then the next.
  __device__ __forceinline__ Place(const Params& p, int i) {
    constexpr int kRows = Shape<kGroups>::kRows;
    const int row_tiles = (p.rows + kRows - 1) / kRows, col_tiles = (p.cols + p.width - 1) / p.width;
    const int tile = i % (row_tiles * col_tiles);
    const int group = tile / (kRowGroup * col_tiles), height = min(kRowGroup, row_tiles - group * kRowGroup);
    const int rest = tile - group * kRowGroup * col_tiles;
    row = (group * kRowGroup + rest % height) * kRows;
    col = rest / height * p.width;
    first = p.split ? i / (row_tiles * col_tiles) : 0;
    end = p.split ? first + 1 : p.segments;
  }
};
template <int kGroups>
__host__ __device__ __forceinline__ int items_of(const Params& p) {
  constexpr int kRows = Shape<kGroups>::kRows;
  return (p.rows + kRows - 1) / kRows * ((p.cols + p.width - 1) / p.width) * (p.split ? p.segments : 1);
}
__device__ __forceinline__ int steps_of(const Params& p, int segment) {
  if (segment >= p.used) return 0;
  return (min(p.segment, p.terms - segment * p.segment) + kDepth - 1) / kDepth;
}

template <bool kSums, int kGroups>
__device__ __forceinline__ void produce(const Params& p, unsigned stages, unsigned full, unsigned empty) {
  using S = Shape<kGroups>;
  // With one tile of rows no part of b is read again.
  constexpr Evict kEvict = kGroups == 1 ? Evict::kFirst : Evict::kNormal;
  Ring<S::kStages> ring;
  const int items = items_of<kGroups>(p), bytes = S::kInputBytes + (kSums ? kWeightBytes : p.width * kChunkBytes);
  for (int i = static_cast<int>(blockIdx.x); i < items; i += static_cast<int>(gridDim.x)) {
    const Place<kGroups> place(p, i);
    for (int s = place.first; s < (kSums ? place.end : 1); ++s) {
      const int steps = steps_of(p, s), begin = s * p.segment;
      for (int k = 0; k < steps; ++k) {
        const unsigned stage = stages + ring.stage * S::kStageBytes, barrier = full + 8 * ring.stage;
        Barrier::wait(empty + 8 * ring.stage, ring.parity ^ 1);
        Barrier::expect(barrier, bytes);
        // The terms of the next segment meet zeros.
        copy_box(stage, p.a, barrier, begin + k * kDepth, place.row, 0, 0);
        const unsigned to = stage + S::kInputBytes;
        if constexpr (!kSums) {
          copy_box<kEvict>(to, p.b, barrier, k * kDepth, place.col, 0, 0);
        } else {
          const bool last = s == p.used - 1;
#pragma unroll
          for (int c = 0; c < kCols / kChunk; ++c) {
            copy_box<kEvict>(to + c * kDepth * kChunkBytes, last ? p.last : p.b, barrier, place.col + c * kChunk,
                             k * kDepth + (last ? begin : 0), last ? 0 : s, 0);
          }
        }
        ring.next();
      }
    }
  }
}

/// Stores a warp's rows to `out` [rows, cols].
template <class T>
__device__ __forceinline__ void store(const Params& p, int first_row, int col, float (&x)[kCols / 8][4]) {
  const float ones[2] = {1.0f, 1.0f};
  // A quarter at a time: words for all columns would take the registers that are left.
  constexpr int kBlocks = kCols / 32;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    const int first = quarter * kBlocks * 8;
    const FlexTensor to{static_cast<T*>(p.out) + col + first, 0, 0, p.out_stride, 1};
    auto& some = reinterpret_cast<float (&)[kBlocks][4]>(x[quarter * kBlocks]);
    store_rows<T>(to, 0, 0, first_row, p.rows, max(0, min(p.width, p.cols - col) - first), some, ones);
  }
}

template <class T>
__device__ __forceinline__ void add_bias(const Params& p, int col, float (&x)[kCols / 8][4]) {
  if (p.bias == nullptr) return;
  const int from = col + static_cast<int>(threadIdx.x) % 4 * 2;
  const auto* bias = static_cast<const T*>(p.bias) + from;
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float b = 8 * j + c < p.cols - from ? score_mod::from_bits(bias[8 * j + c]) : 0.0f;
      x[j][c] += b;
      x[j][2 + c] += b;
    }
  }
}

/// Sums of a tile to `out` [rows, cols]. Columns are even.
__device__ __forceinline__ void store_floats(const Params& p, float* out, long long stride, int first_row, int col,
                                             const float (&x)[kCols / 8][4]) {
  const int from = col + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    if (row >= p.rows) continue;
    float* to = out + row * stride + from;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      if (8 * j < p.cols - from) *reinterpret_cast<float2*>(to + 8 * j) = {x[j][2 * r], x[j][2 * r + 1]};
    }
  }
}

/// Segment `s` of a tile, after those before it: adds to it what it is the second of a pair with, and keeps the sum if
/// it is the first of one. All are there after the last. A thread reads what it wrote.
template <int kGroups>
__device__ __forceinline__ void add_pairs(const Params& p, int s, float (&x)[kCols / 8][4]) {
  constexpr int kThreads = kGroups * kWarpgroup, kBlocks = kCols / 8;
  auto* kept = reinterpret_cast<float4*>(p.parts + blockIdx.x * Shape<kGroups>::kKeptFloats) + threadIdx.x - kWarpgroup;
  int level = 0;
#pragma unroll 1
  for (; (s >> level & 1) != 0; ++level) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float4 first = kept[(level * kBlocks + j) * kThreads];
      x[j][0] = first.x + x[j][0];
      x[j][1] = first.y + x[j][1];
      x[j][2] = first.z + x[j][2];
      x[j][3] = first.w + x[j][3];
    }
  }
  if (s == p.segments - 1) return;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    kept[(level * kBlocks + j) * kThreads] = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
  }
}

template <class T, bool kSums, int kGroups>
__device__ __forceinline__ void consume(const Params& p, unsigned stages, unsigned full, unsigned empty) {
  using S = Shape<kGroups>;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const int warp = static_cast<int>(threadIdx.x) / kLanes % 4, lane = static_cast<int>(threadIdx.x) % kLanes;
  Ring<S::kStages> ring;
  const int items = items_of<kGroups>(p);
  for (int i = static_cast<int>(blockIdx.x); i < items; i += static_cast<int>(gridDim.x)) {
    const Place<kGroups> place(p, i);
    const int row = place.row + group * 64 + warp * 16 + lane / 4;
    for (int s = place.first; s < (kSums ? place.end : 1); ++s) {
      float x[kCols / 8][4];
      zero(x);
      const int steps = steps_of(p, s);
      int before = 0;
      for (int k = 0; k < steps; ++k) {
        const unsigned stage = stages + ring.stage * S::kStageBytes;
        Barrier::wait(full + 8 * ring.stage, ring.parity);
        const auto a = descriptor(stage + group * 64 * kChunkBytes, 0);
        const auto b = descriptor(stage + S::kInputBytes, kSums ? kDepth * kChunkBytes : 0);
        pin<kCols / 2>(&x[0][0]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) {
          Wgmma<T, kCols, false, kSums>::run(&x[0][0], advanced(a, 32 * step),
                                             advanced(b, step * (kSums ? 16 * kChunkBytes : 32)), true);
        }
        wgmma_commit();
        // The products of the step before have been read when those of this one alone are under way.
        wgmma_wait<1>();
        pin<kCols / 2>(&x[0][0]);
        Barrier::arrive_if(k > 0 && threadIdx.x % kWarpgroup == 0, empty + 8 * before);
        before = ring.stage;
        ring.next();
      }
      wgmma_wait<0>();
      pin<kCols / 2>(&x[0][0]);
      Barrier::arrive_if(steps > 0 && threadIdx.x % kWarpgroup == 0, empty + 8 * before);
      if constexpr (!kSums) {
        add_bias<T>(p, place.col, x);
        store<T>(p, row, place.col, x);
      } else {
        const bool split = kGroups == 1 || p.split;
        if (!split) add_pairs<kGroups>(p, s, x);
        if (split || (p.float_out && s == p.segments - 1)) {
          store_floats(p, split ? p.parts + static_cast<long long>(s) * p.rows * p.cols : static_cast<float*>(p.out),
                       split ? p.cols : p.out_stride, row, place.col, x);
        } else if (s == p.segments - 1) {
          store<T>(p, row, place.col, x);
        }
      }
    }
  }
}

template <class T, bool kSums, int kGroups>
__global__ void __launch_bounds__(Shape<kGroups>::kThreads, 1) head_product_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<kGroups>;
  extern __shared__ char shared[];
  const unsigned stages = (static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023) / 1024 * 1024;
  const unsigned full = stages + S::kStages * S::kStageBytes, empty = full + 8 * S::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      Barrier::init(full + 8 * i, 1);
      Barrier::init(empty + 8 * i, kGroups);
    }
    Barrier::fence_inits();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    if constexpr (kGroups > 1) give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kSums, kGroups>(p, stages, full, empty);
  } else {
    if constexpr (kGroups > 1) take_registers<consumer_registers(kGroups, kProducerRegisters)>();
    consume<T, kSums, kGroups>(p, stages, full, empty);
  }
#endif
}

constexpr int kAddThreads = 256;

/// The segments of each element by pairs: four columns a thread.
template <class T>
__global__ void __launch_bounds__(kAddThreads) add_parts_kernel(const __grid_constant__ Params p) {
  const int fours = p.cols / 4;
  const long long i = static_cast<long long>(blockIdx.x) * kAddThreads + threadIdx.x, all = 1ll * p.rows * fours;
  if (i >= all) return;
  float4 x[kSegments];
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    if (s < p.segments) x[s] = reinterpret_cast<const float4*>(p.parts)[s * all + i];
  }
#pragma unroll
  for (int far = 1; far < kSegments; far *= 2) {
#pragma unroll
    for (int s = 0; s < kSegments; s += 2 * far) {
      if (far >= p.segments) continue;
      x[s].x += x[s + far].x;
      x[s].y += x[s + far].y;
      x[s].z += x[s + far].z;
      x[s].w += x[s + far].w;
    }
  }
  const long long at = i / fours * p.out_stride + i % fours * 4;
  if (p.float_out) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = x[0];
  } else {
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + at) = {pack(T{}, x[0].x, x[0].y), pack(T{}, x[0].z, x[0].w)};
  }
}

}  // namespace fusegrad::device::head
