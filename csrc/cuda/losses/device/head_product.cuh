// The head's product with the statistics of its rows, on Hopper: logits = input @ weight^T + bias in bfloat16 or
// float16, and of each row and each tile of the vocabulary the largest logit and the sums that count from it.
//
// Every element is a chain of one instruction (m64n256k16) over the hidden dimension from 0 on, whatever row of a tile
// it is in and however many rows there are: rows beyond the last are zeros. A tile's sums over columns are in one
// order, and head_states_kernel merges tiles in their order and segments by pairs (losses/product.h). So a row's bits
// depend on the row alone. Few rows are one tile of rows, for which the weight is read once.
//
// CTAs are persistent: a warpgroup of producers copies tiles by TMA, two of consumers multiply, 64 rows each.
#pragma once

#include "cuda/device/hopper.cuh"

namespace fusegrad::device::head {

constexpr int kRows = 128, kCols = 256, kDepth = 64, kStages = 4;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kInputBytes = kRows * kChunkBytes, kWeightBytes = kCols * kChunkBytes;
constexpr int kStageBytes = kInputBytes + kWeightBytes;
// Stages begin at a multiple of 1024; a full and an empty barrier a stage behind them.
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 16 * kStages;
constexpr int kProducerRegisters = 40;
/// Tiles of rows that CTAs walk side by side for one tile of the vocabulary, so that both stay in the L2 cache.
constexpr int kRowGroup = 16;

/// What a tile of the vocabulary leaves of each row, [kTileSums, N] floats.
enum TileSum { kTileMax, kTileSum, kTileDot, kTileSums };

struct Params {
  TensorMap input, weight;  // [1, 1, N, H], boxes of kRows and kCols rows of a chunk of columns
  int rows, hidden, cols;   // cols: of the weight's part of the vocabulary
  int segment, segments;    // columns of a segment, and how many the part has
  const void* bias;         // [cols] T, or null
  void* logits;             // [N, cols] T, or null
  long long logits_stride;
  const float* row_scale;  // [N], or null: all 1
  float scale, cap;        // z = cap * tanh(scale * x / cap); cap 0: none
  const int* target;       // [N], columns of the part; outside of it: none
  float* tile_sums;        // [tiles, kTileSums, N]
  float* at_target;        // [N], zero before the kernel
  float* states;           // [kTileSums, N]
};

__host__ __device__ constexpr int tiles_of(int segment) { return (segment + kCols - 1) / kCols; }

// Tile `i` of all: kRowGroup tiles of rows at a time, of these all for a tile of the vocabulary, then the next.
struct Place {
  int row, tile, col, width;
};
__device__ __forceinline__ Place place_of(const Params& p, int i) {
  const int row_tiles = (p.rows + kRows - 1) / kRows, tiles = tiles_of(p.segment) * p.segments;
  const int group = i / (kRowGroup * tiles), first = group * kRowGroup;
  const int height = min(kRowGroup, row_tiles - first), rest = i - group * kRowGroup * tiles;
  Place place;
  place.row = (first + rest % height) * kRows;
  place.tile = rest / height;
  const int segment = place.tile / tiles_of(p.segment), begin = place.tile % tiles_of(p.segment) * kCols;
  place.col = segment * p.segment + begin;
  place.width = max(0, min(min(kCols, p.segment - begin), p.cols - place.col));
  return place;
}

template <class T>
__device__ __forceinline__ void produce(const Params& p, unsigned stages, unsigned full, unsigned empty, int tiles) {
  Ring<kStages> ring;
  const int steps = (p.hidden + kDepth - 1) / kDepth;
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    const Place place = place_of(p, i);
    if (place.width == 0) continue;
    for (int k = 0; k < steps; ++k) {
      const unsigned stage = stages + ring.stage * kStageBytes, barrier = full + 8 * ring.stage;
      Barrier::wait(empty + 8 * ring.stage, ring.parity ^ 1);
      Barrier::expect(barrier, kStageBytes);
      copy_box(stage, p.input, barrier, k * kDepth, place.row, 0, 0);
      copy_box(stage + kInputBytes, p.weight, barrier, k * kDepth, place.col, 0, 0);
      ring.next();
    }
  }
}

// z of a stored logit. A cap's tanh(u) = 1 - 2 / (e^2u + 1), from u^3 on where that would cancel.
template <bool kCapped>
__device__ __forceinline__ float transformed(float x, float scale, float cap) {
  const float z = x * scale;
  if constexpr (!kCapped) return z;
  const float u = z / cap, square = u * u;
  const float small = u - u * square * (0.33333333f - square * (0.13333334f - square * 0.053968254f));
  const float large = 1.0f - __fdividef(2.0f, exp2f(fabsf(u) * 2.8853900817779268f) + 1.0f);
  return cap * (square < 0.01f ? small : copysignf(large, u));
}

// The sums of a warpgroup's rows. Accumulator 4 j + 2 r + c of a thread is row 8 r of its two, column 8 j + 2 t + c.
template <class T, bool kCapped>
__device__ __forceinline__ void finish(const Params& p, const Place& place, int first_row, float (&x)[kCols / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, t = lane % 4;
  // Columns are compared as constants with these.
  const int bound = place.width - 2 * t;
  const auto* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + place.col + 2 * t;
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float b = bias != nullptr && 8 * j + c < bound ? score_mod::from_bits(bias[8 * j + c]) : 0.0f;
      // Rounded as they are stored: who reads them again sees these.
      x[j][c] = rounded<T>(x[j][c] + b);
      x[j][2 + c] = rounded<T>(x[j][2 + c] + b);
    }
  }
  if (p.logits != nullptr) {
    const float ones[2] = {1.0f, 1.0f};
    // A quarter at a time: words for all columns would take the registers that are left.
    constexpr int kBlocks = kCols / 32;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int first = quarter * kBlocks * 8;
      const FlexTensor to{static_cast<T*>(p.logits) + place.col + first, 0, 0, p.logits_stride, 1};
      auto& some = reinterpret_cast<float (&)[kBlocks][4]>(x[quarter * kBlocks]);
      store_rows<false, T>(to, 0, 0, first_row, p.rows, max(0, place.width - first), some, ones);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    const bool there = row < p.rows;
    const float scale = p.row_scale != nullptr && there ? p.scale * p.row_scale[row] : p.scale;
    const int target = there ? p.target[row] - place.col - 2 * t : -1;
    float largest = -FUSEGRAD_INFINITY, at_target = 0.0f;
    bool found = false;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& z = x[j][2 * r + c];
        z = 8 * j + c < bound ? transformed<kCapped>(z, scale, p.cap) : -FUSEGRAD_INFINITY;
        largest = fmaxf(largest, z);  // a NaN is one in the sums below
        if (8 * j + c == target && 8 * j + c < bound) at_target = z, found = true;
      }
    }
    if (found) p.at_target[row] = at_target;
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float from = largest == -FUSEGRAD_INFINITY ? 0.0f : largest;
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float away = x[j][2 * r + c] - from, e = exp2f(away * 1.4426950408889634f);
        sum += e;
        dot += e == 0.0f ? 0.0f : e * away;
      }
    }
    // a + b = b + a, so all four lanes have the same bits.
    sum += __shfl_xor_sync(~0u, sum, 1);
    dot += __shfl_xor_sync(~0u, dot, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    dot += __shfl_xor_sync(~0u, dot, 2);
    if (there && t == 0) {
      float* out = p.tile_sums + static_cast<long long>(place.tile) * kTileSums * p.rows + row;
      out[0] = largest;
      out[p.rows] = sum;
      out[2ll * p.rows] = dot;
    }
  }
}

template <class T, bool kCapped>
__device__ __forceinline__ void consume(const Params& p, unsigned stages, unsigned full, unsigned empty, int tiles) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  const int warp = static_cast<int>(threadIdx.x) / kLanes % 4, lane = static_cast<int>(threadIdx.x) % kLanes;
  Ring<kStages> ring;
  const int steps = (p.hidden + kDepth - 1) / kDepth;
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    const Place place = place_of(p, i);
    if (place.width == 0) continue;
    float x[kCols / 8][4];
    zero(x);
    int before = 0;
    for (int k = 0; k < steps; ++k) {
      const unsigned stage = stages + ring.stage * kStageBytes;
      Barrier::wait(full + 8 * ring.stage, ring.parity);
      const auto a = descriptor(stage + group * 64 * kChunkBytes, 0), b = descriptor(stage + kInputBytes, 0);
      pin<kCols / 2>(&x[0][0]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDepth / 16; ++step) {
        Wgmma<T, kCols, false, false>::run(&x[0][0], advanced(a, 32 * step), advanced(b, 32 * step), true);
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
    finish<T, kCapped>(p, place, place.row + group * 64 + warp * 16 + lane / 4, x);
  }
}

template <class T, bool kCapped>
__global__ void __launch_bounds__(kThreads, 1) head_product_kernel(const __grid_constant__ Params p) {
  extern __shared__ char shared[];
  const unsigned stages = (static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023) / 1024 * 1024;
  const unsigned full = stages + kStages * kStageBytes, empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      Barrier::init(full + 8 * i, 1);
      Barrier::init(empty + 8 * i, kConsumers);
    }
    Barrier::fence_inits();
  }
  __syncthreads();
  const int tiles = (p.rows + kRows - 1) / kRows * tiles_of(p.segment) * p.segments;
  if (threadIdx.x < kWarpgroup) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<T>(p, stages, full, empty, tiles);
  } else {
    take_registers<consumer_registers(kConsumers, kProducerRegisters)>();
    consume<T, kCapped>(p, stages, full, empty, tiles);
  }
}

// --- the merge ----------------------------------------------------------------------------------------------

struct Sums {
  float max, sum, dot;
};

// Of a, and then b. Rounded as it is written: contracted otherwise, the order of the two would count.
__device__ __forceinline__ Sums merged(const Sums& a, const Sums& b) {
  Sums both;
  both.max = a.max >= b.max || a.max != a.max ? a.max : b.max;
  const auto add = [&](const Sums& s, float& sum, float& dot) {
    const float away = s.max - both.max;
    const float factor = s.max == -FUSEGRAD_INFINITY ? 0.0f : exp2f(away * 1.4426950408889634f);
    sum = __fmul_rn(factor, s.sum);
    dot = factor == 0.0f ? 0.0f : __fmul_rn(factor, __fadd_rn(s.dot, __fmul_rn(away, s.sum)));
  };
  float sum[2], dot[2];
  add(a, sum[0], dot[0]);
  add(b, sum[1], dot[1]);
  both.sum = __fadd_rn(sum[0], sum[1]);
  both.dot = __fadd_rn(dot[0], dot[1]);
  return both;
}

constexpr int kMergeThreads = 128, kMergeLanes = 16;

/// Tiles of each segment in their order, a lane each, then the segments by pairs. Rows of 16 lanes.
static __global__ void __launch_bounds__(kMergeThreads) head_states_kernel(const __grid_constant__ Params p) {
  const int lane = static_cast<int>(threadIdx.x) % kMergeLanes;
  const int row = static_cast<int>(blockIdx.x * kMergeThreads + threadIdx.x) / kMergeLanes;
  const int tiles = tiles_of(p.segment);
  Sums sums{-FUSEGRAD_INFINITY, 0.0f, 0.0f};
  if (row < p.rows && lane < p.segments) {
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile * kCols >= p.segment || lane * p.segment + tile * kCols >= p.cols) break;
      const float* in = p.tile_sums + static_cast<long long>(lane * tiles + tile) * kTileSums * p.rows + row;
      const Sums next{in[0], in[p.rows], in[2ll * p.rows]};
      sums = tile == 0 ? next : merged(sums, next);
    }
  }
#pragma unroll
  for (int far = 1; far < kMergeLanes; far *= 2) {
    const Sums other{__shfl_down_sync(~0u, sums.max, far, kMergeLanes),
                     __shfl_down_sync(~0u, sums.sum, far, kMergeLanes),
                     __shfl_down_sync(~0u, sums.dot, far, kMergeLanes)};
    if (far < p.segments) sums = merged(sums, other);
  }
  if (row < p.rows && lane == 0) {
    p.states[row] = sums.max;
    p.states[p.rows + row] = sums.sum;
    p.states[2ll * p.rows + row] = sums.dot;
  }
}

}  // namespace fusegrad::device::head
