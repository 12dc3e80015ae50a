#include "cuda/attention/pair_projection/pair_projection.h"

#include <algorithm>
#include <type_traits>

#include "cuda/attention/device/scores.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

using device::Mma;
using device::pack;
using device::score_mod::from_bits;

constexpr int kWarps = 4, kThreads = kWarps * device::kLanes;
constexpr int kRows = 16;      // pairs of a warp's tile
constexpr int kHeads = 16;     // those beyond the call's are zeros
constexpr int kChannels = 32;  // that a vector of 16 bytes a lane holds of a row
constexpr int kMostChannels = 128;
constexpr int kForwardCtas = 4, kBackwardCtas = 3;      // of a multiprocessor
constexpr int kForwardStages = 2, kBackwardStages = 3;  // of a warp's reads

// Lane g = lane / 4 has rows g and g + 8 of a tile. In vector v the lane t = lane % 4 has channels 32v + 8t to 32v + 8t
// + 7, so that memory is read and written 64 bytes a row at a time. Products do not mind in which order they add
// channels up: word w of a vector holds what a fragment's columns 2t and 2t + 1 are, of its own block of eight channels
// (v, w), and column n of that block is channel 32v + n / 2 * 8 + 2w + n % 2.
__device__ __forceinline__ unsigned word_of(const uint4& vector, int w) {
  return w == 0 ? vector.x : w == 1 ? vector.y : w == 2 ? vector.z : vector.w;
}

template <class T>
__device__ __forceinline__ float first_of(unsigned word) {
  return from_bits(T{static_cast<unsigned short>(word)});
}
template <class T>
__device__ __forceinline__ float second_of(unsigned word) {
  return from_bits(T{static_cast<unsigned short>(word >> 16)});
}

// Tiles of 16 pairs of a batch, a warp each. They are fewer than 2^31: a tile has 2 KiB and more.
__host__ __device__ constexpr int64_t tiles_of(int64_t pairs) { return (pairs + kRows - 1) / kRows; }

// Goes from tile to tile of a warp, which are `step` apart, without a division for each.
struct Walk {
  int batch, tile;  // of the batch
  int tiles, step_batches, step_tiles;

  __device__ __forceinline__ explicit Walk(int64_t pairs) : tiles(static_cast<int>(tiles_of(pairs))) {
    const int first = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / device::kLanes);
    const int step = static_cast<int>(gridDim.x) * kWarps;
    batch = first / tiles;
    tile = first % tiles;
    step_batches = step / tiles;
    step_tiles = step % tiles;
  }
  __device__ __forceinline__ Walk next() const {
    Walk result = *this;
    result.batch += step_batches;
    result.tile += step_tiles;
    if (result.tile >= tiles) {
      result.tile -= tiles;
      ++result.batch;
    }
    return result;
  }
  __device__ __forceinline__ int64_t pair() const { return int64_t{tile} * kRows; }  // the first one, in the batch
  __device__ __forceinline__ int rows(int64_t pairs) const {                         // that there are
    const int64_t left = pairs - pair();
    return left < kRows ? static_cast<int>(left) : kRows;
  }
};

// Tiles of pairs on their way to the lanes, through shared memory: each lane reads what it has copied itself, so that
// warps wait for nobody.
template <int kVectors, int kStages>
struct Reads {
  static constexpr int kVector = device::kLanes * 16, kStage = 2 * kVectors * kVector;  // bytes of a warp
  static constexpr int kBytes = kWarps * kStages * kStage;
  const PairProjectionCall& p;
  unsigned place;  // the lane's in its warp's first stage

  __device__ __forceinline__ Reads(const PairProjectionCall& p, const void* shared) : p(p) {
    const unsigned thread = threadIdx.x;
    place = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + thread / device::kLanes * (kStages * kStage) +
            thread % device::kLanes * 16;
  }
  __device__ __forceinline__ void begin(const Walk& at, int stage) const {
    if (at.batch < p.batches) {
      const int lane = static_cast<int>(threadIdx.x) % device::kLanes, rows = at.rows(p.pairs);
      const auto* from =
          static_cast<const uint4*>(p.pair) + (at.batch * p.pairs + at.pair()) * (kVectors * 4) + lane % 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4 + 8 * i;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          device::copy_async(place + stage * kStage + (i * kVectors + v) * kVector, from + row * (kVectors * 4) + v * 4,
                             row < rows);
        }
      }
    }
    device::commit_copies();
  }
  /// Vector v of row g + 8 * i. Volatile, or the compiler would keep a tile in registers, and spill.
  __device__ __forceinline__ uint4 take(int i, int v, int stage) const {
    uint4 x;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(place + stage * kStage + (i * kVectors + v) * kVector)
                 : "memory");
    return x;
  }
};

// A row's norm without its parameters: x is value * rate + shift.
struct Norm {
  float rate, shift;
  template <class T>
  __device__ __forceinline__ float first(unsigned word) const {
    return first_of<T>(word) * rate + shift;
  }
  template <class T>
  __device__ __forceinline__ float second(unsigned word) const {
    return second_of<T>(word) * rate + shift;
  }
};

template <class T, bool kCentered, int kVectors, int kStages>
__device__ __forceinline__ Norm norm_of(const Reads<kVectors, kStages>& reads, int i, int stage) {
  constexpr float kShare = 1.0f / (kVectors * kChannels);
  unsigned word[kVectors * 4];
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint4 vector = reads.take(i, v, stage);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      word[v * 4 + w] = word_of(vector, w);
      sum += first_of<T>(word[v * 4 + w]) + second_of<T>(word[v * 4 + w]);
    }
  }
  const float mean = kCentered ? device::row_sum(sum) * kShare : 0.0f;
#pragma unroll
  for (int w = 0; w < kVectors * 4; ++w) {
    const float first = first_of<T>(word[w]) - mean, second = second_of<T>(word[w]) - mean;
    squares += first * first + second * second;
  }
  const float rate = rsqrtf(device::row_sum(squares) * kShare + reads.p.eps);
  return {rate, -mean * rate};
}

template <class T>
__device__ __forceinline__ float parameter(const void* values, int i, float otherwise) {
  return values == nullptr ? otherwise : from_bits(static_cast<const T*>(values)[i]);
}

template <class T, bool kCentered, int kVectors>
__global__ void __launch_bounds__(kThreads, kForwardCtas)
    project_kernel(const __grid_constant__ PairProjectionCall p, T* out) {
  constexpr int kAll = kVectors * kChannels;
  __shared__ float2 norm[kAll];  // weight and bias
  for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
    norm[i] = {parameter<T>(p.norm_weight, i, 1.0f), parameter<T>(p.norm_bias, i, 0.0f)};
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % device::kLanes, t = lane % 4;
  uint4 weight[2][kVectors];  // of heads g and g + 8, as operand B
  float bias[2][2];           // of heads 2t and 2t + 1, and eight more
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = 8 * j + lane / 4;
    const auto* from = static_cast<const uint4*>(p.weight) + head * (kVectors * 4) + t;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) weight[j][v] = head < p.heads ? from[v * 4] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * j + 2 * t + i;
      bias[j][i] = column < p.heads ? parameter<T>(p.bias, column, 0.0f) : 0.0f;
    }
  }
  extern __shared__ uint4 stages[];
  constexpr int kStages = kForwardStages;
  const Reads<kVectors, kStages> reads(p, stages);
  Walk at(p.pairs), ahead = at;
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i, ahead = ahead.next()) reads.begin(ahead, i);
  for (int stage = 0; at.batch < p.batches; at = at.next(), ahead = ahead.next(), stage = (stage + 1) % kStages) {
    reads.begin(ahead, (stage + kStages - 1) % kStages);
    device::wait_copies<kStages - 1>();
    const Norm first = norm_of<T, kCentered>(reads, 0, stage);
    const Norm second = norm_of<T, kCentered>(reads, 1, stage);
    float c[2][4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 row[2] = {reads.take(0, v, stage), reads.take(1, v, stage)};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        unsigned a[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float4 n = *reinterpret_cast<const float4*>(norm + v * kChannels + 8 * t + 2 * (w + k));
          const unsigned one = word_of(row[0], w + k), other = word_of(row[1], w + k);
          a[2 * k] = pack(T{}, first.first<T>(one) * n.x + n.y, first.second<T>(one) * n.z + n.w);
          a[2 * k + 1] = pack(T{}, second.first<T>(other) * n.x + n.y, second.second<T>(other) * n.z + n.w);
        }
        const unsigned b[4] = {word_of(weight[0][v], w), word_of(weight[0][v], w + 1), word_of(weight[1][v], w),
                               word_of(weight[1][v], w + 1)};
        const auto rows = Mma<T>::factor(a), heads = Mma<T>::factor(b);
        Mma<T>::template step<0>(c[0], rows, heads);
        Mma<T>::template step<1>(c[1], rows, heads);
      }
    }
    T* to = out + at.batch * p.heads * p.pairs + at.pair();
    const int rows_there = at.rows(p.pairs);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = 8 * j + 2 * t + i % 2, row = lane / 4 + i / 2 * 8;
        if (head < p.heads && row < rows_there) device::store(to + head * p.pairs + row, c[j][i] + bias[j][i % 2]);
      }
    }
  }
}

// A block of 8 x 8 from one distribution over the lanes to the other: rows to columns.
__device__ __forceinline__ unsigned transposed(unsigned word) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(word));
  return r;
}

// The gradient of out by the pairs of a tile, [pairs x heads] as operand A: a lane has rows g and g + 8 of heads 2t and
// 2t + 1, and eight more.
template <class T>
struct Upstream {
  unsigned short bits[2][2][2];  // block of heads, row, head

  __device__ __forceinline__ void load(const T* grad, const PairProjectionCall& p, const Walk& at, int lane) {
    const T* from = grad + at.batch * p.heads * p.pairs + at.pair();
    const int rows = at.batch < p.batches ? at.rows(p.pairs) : 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int head = 8 * j + 2 * (lane % 4) + k, row = lane / 4 + 8 * i;
          bits[j][i][k] = head < p.heads && row < rows ? from[head * p.pairs + row].bits : 0;
        }
      }
    }
  }
  __device__ __forceinline__ unsigned word(int j, int i) const {
    return bits[j][i][0] | static_cast<unsigned>(bits[j][i][1]) << 16;
  }
};

// With x the normalized row, xn = x * norm_weight, and d = sum_h grad[h] * weight[h] * norm_weight, all by channels:
//   grad of the row   rate * (d - mean(d) - x * mean(d * x)), without mean(d) where nothing is centered
//   mean(d)           sum_h grad[h] * mean(weight[h] * norm_weight)
//   mean(d * x)       sum_h grad[h] * mean(weight[h] * xn): products, so that d is needed once, 8 channels at a time
//   sums              [h, c]: sum over pairs of grad[h] * x[c], and behind them sum of grad[h]
template <class T, bool kCentered, int kVectors>
__global__ void __launch_bounds__(kThreads, kBackwardCtas)
    backward_kernel(const __grid_constant__ PairProjectionCall p, const T* grad, T* grad_pair, float* parts) {
  constexpr int kAll = kVectors * kChannels, kBlocks = kVectors * 4;
  constexpr float kShare = 1.0f / kAll;
  __shared__ float norm[kAll];
  __shared__ uint2 weight[kBlocks][device::kLanes];       // operand B of each block of channels
  __shared__ uint4 by_head[kBlocks / 2][device::kLanes];  // of each two blocks: operand B of heads
  __shared__ float means[kHeads];                         // of weight * norm_weight
  __shared__ float sums[kHeads][kAll + 1];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % device::kLanes, t = lane % 4, g = lane / 4;
  const auto weight_bits = [&](int head, int channel) {
    return head < p.heads ? static_cast<const T*>(p.weight)[head * kAll + channel].bits : 0u;
  };
  for (int i = thread; i < kAll; i += kThreads) norm[i] = parameter<T>(p.norm_weight, i, 1.0f);
  for (int block = thread / device::kLanes; block < kBlocks; block += kWarps) {
    const int channel = block / 4 * kChannels + g / 2 * 8 + block % 4 * 2 + g % 2;
    const auto bits = [&](int head) { return weight_bits(head, channel) | weight_bits(head + 1, channel) << 16; };
    weight[block][lane] = {bits(2 * t), bits(2 * t + 8)};
  }
  for (int two = thread / device::kLanes; two < kBlocks / 2; two += kWarps) {
    const int channel = two / 2 * kChannels + 8 * t + two % 2 * 4;
    const auto bits = [&](int head, int at) { return weight_bits(head, at) | weight_bits(head, at + 1) << 16; };
    by_head[two][lane] = {bits(g, channel), bits(g, channel + 2), bits(g + 8, channel), bits(g + 8, channel + 2)};
  }
  __syncthreads();
  for (int head = thread / device::kLanes; head < kHeads; head += kWarps) {
    float sum = 0.0f;
    for (int c = lane; c < kAll; c += device::kLanes) {
      sum += from_bits(T{static_cast<unsigned short>(weight_bits(head, c))}) * norm[c];
    }
    for (int lanes = 1; lanes < device::kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) means[head] = sum * kShare;
  }
  __syncthreads();
  float sum[kBlocks][4] = {}, sum_of_grad[2][2] = {};
  extern __shared__ uint4 stages[];
  constexpr int kStages = kBackwardStages;
  const Reads<kVectors, kStages> reads(p, stages);
  Walk at(p.pairs), ahead = at;
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i, ahead = ahead.next()) reads.begin(ahead, i);
  Upstream<T> next_grad;
  next_grad.load(grad, p, at, lane);
  for (int stage = 0; at.batch < p.batches; ahead = ahead.next(), stage = (stage + 1) % kStages) {
    reads.begin(ahead, (stage + kStages - 1) % kStages);
    device::wait_copies<kStages - 1>();
    const Norm norms[2] = {norm_of<T, kCentered>(reads, 0, stage), norm_of<T, kCentered>(reads, 1, stage)};
    const unsigned a[4] = {next_grad.word(0, 0), next_grad.word(0, 1), next_grad.word(1, 0), next_grad.word(1, 1)};
    const Walk now = at;
    at = at.next();
    next_grad.load(grad, p, at, lane);
    const auto upstream = Mma<T>::factor(a);
    const unsigned turned[4] = {transposed(a[0]), transposed(a[2]), transposed(a[1]), transposed(a[3])};
    const auto heads = Mma<T>::factor(turned);
    float projected[2][4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 row[2] = {reads.take(0, v, stage), reads.take(1, v, stage)};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        unsigned xn[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          unsigned pairs[4] = {};
          const float2 n = *reinterpret_cast<const float2*>(norm + v * kChannels + 8 * t + 2 * (w + k));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned word = word_of(row[i], w + k);
            const float one = norms[i].template first<T>(word), other = norms[i].template second<T>(word);
            pairs[i] = transposed(pack(T{}, one, other));
            xn[2 * k + i] = pack(T{}, one * n.x, other * n.y);
          }
          Mma<T>::template step<0>(sum[4 * v + w + k], heads, Mma<T>::factor(pairs));
        }
        const uint4 words = by_head[2 * v + w / 2][lane];
        const unsigned columns[4] = {words.x, words.y, words.z, words.w};
        const auto of_rows = Mma<T>::factor(xn), of_heads = Mma<T>::factor(columns);
        Mma<T>::template step<0>(projected[0], of_rows, of_heads);
        Mma<T>::template step<1>(projected[1], of_rows, of_heads);
        device::hold_order();
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum_of_grad[j][0] += first_of<T>(a[2 * j + i]);
        sum_of_grad[j][1] += second_of<T>(a[2 * j + i]);
      }
    }
    if (grad_pair == nullptr) continue;
    float mean[2] = {}, slope[2] = {};  // at last what is taken off: of each row, and times its values
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float first = first_of<T>(a[2 * j + i]), second = second_of<T>(a[2 * j + i]);
        const float2 m = *reinterpret_cast<const float2*>(means + 8 * j + 2 * t);
        if constexpr (kCentered) mean[i] += first * m.x + second * m.y;
        slope[i] += first * projected[j][2 * i] + second * projected[j][2 * i + 1];
      }
      if constexpr (kCentered) mean[i] = device::row_sum(mean[i]) * norms[i].rate;
      slope[i] = device::row_sum(slope[i]) * kShare * norms[i].rate;
      mean[i] += slope[i] * norms[i].shift;
      slope[i] *= norms[i].rate;
    }
    auto* to = reinterpret_cast<uint4*>(grad_pair) + (now.batch * p.pairs + now.pair()) * (kVectors * 4) + t;
    const int rows_there = now.rows(p.pairs);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 row[2] = {reads.take(0, v, stage), reads.take(1, v, stage)};
      unsigned out[2][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint2 words = weight[4 * v + w][lane];
        const unsigned columns[4] = {words.x, words.y, 0, 0};
        float d[4] = {};
        Mma<T>::template step<0>(d, upstream, Mma<T>::factor(columns));
        const float2 n = *reinterpret_cast<const float2*>(norm + v * kChannels + 8 * t + 2 * w);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned word = word_of(row[i], w);
          out[i][w] = pack(T{}, d[2 * i] * n.x * norms[i].rate - (mean[i] + first_of<T>(word) * slope[i]),
                           d[2 * i + 1] * n.y * norms[i].rate - (mean[i] + second_of<T>(word) * slope[i]));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = g + 8 * i;
        if (row < rows_there) to[row * (kVectors * 4) + v * 4] = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
      }
    }
  }
  if (parts == nullptr) return;
  // Warps add theirs one after the other.
  for (int i = thread; i < kHeads * (kAll + 1); i += kThreads) (&sums[0][0])[i] = 0.0f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      for (int lanes = 4; lanes < device::kLanes; lanes *= 2) {
        sum_of_grad[j][k] += __shfl_xor_sync(~0u, sum_of_grad[j][k], lanes);
      }
    }
  }
  for (int warp = 0; warp < kWarps; ++warp) {
    __syncthreads();
    if (warp != thread / device::kLanes) continue;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int channel = b / 4 * kChannels + 8 * t + b % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[g + i / 2 * 8][channel + i % 2] += sum[b][i];
    }
    if (g == 0) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[8 * j + 2 * t][kAll] += sum_of_grad[j][0];
        sums[8 * j + 2 * t + 1][kAll] += sum_of_grad[j][1];
      }
    }
  }
  __syncthreads();
  float* to = parts + int64_t{blockIdx.x} * p.heads * (kAll + 1);
  for (int i = thread; i < p.heads * (kAll + 1); i += kThreads) to[i] = (&sums[0][0])[i];
}

constexpr int kSlices = 8;  // of the parts, whose sums are added up in their order

// A CTA for each head.
template <class T>
__global__ void __launch_bounds__(kSlices* kMostChannels)
    weight_kernel(const __grid_constant__ PairProjectionCall p, const __grid_constant__ PairProjectionGradients to,
                  int64_t count, float* totals) {
  __shared__ float slices[kSlices][kMostChannels + 1];
  const int all = p.channels + 1, h = static_cast<int>(blockIdx.x);
  const float* from = to.parts + h * all;
  for (int i = static_cast<int>(threadIdx.x); i < kSlices * all; i += static_cast<int>(blockDim.x)) {
    const int slice = i / all, c = i % all;
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t part = slice; part < count; part += kSlices) sum += from[part * p.heads * all + c];
    slices[slice][c] = sum;
  }
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= all) return;
  const auto total = [&](int channel) {
    float sum = 0.0f;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) sum += slices[slice][channel];
    return sum;
  };
  const float sum = total(c), of_grad = total(p.channels);
  totals[h * all + c] = sum;
  if (c == p.channels) {
    if (to.bias != nullptr) device::store(static_cast<T*>(to.bias) + h, of_grad);
  } else if (to.weight != nullptr) {
    device::store(static_cast<T*>(to.weight) + h * p.channels + c,
                  sum * parameter<T>(p.norm_weight, c, 1.0f) + of_grad * parameter<T>(p.norm_bias, c, 0.0f));
  }
}

template <class T>
__global__ void __launch_bounds__(kMostChannels)
    norm_kernel(const __grid_constant__ PairProjectionCall p, const __grid_constant__ PairProjectionGradients to,
                const float* totals) {
  const int all = p.channels + 1, c = static_cast<int>(threadIdx.x);
  if (c >= p.channels) return;
  float of_weight = 0.0f, of_bias = 0.0f;
  for (int h = 0; h < p.heads; ++h) {
    const float w = from_bits(static_cast<const T*>(p.weight)[h * p.channels + c]);
    of_weight += w * totals[h * all + c];
    of_bias += w * totals[h * all + p.channels];
  }
  if (to.norm_weight != nullptr) device::store(static_cast<T*>(to.norm_weight) + c, of_weight);
  if (to.norm_bias != nullptr) device::store(static_cast<T*>(to.norm_bias) + c, of_bias);
}

// CTAs that are on the GPU at once, each of which takes tile after tile.
template <int kCtas, int kStages>
Grid grid_of(const PairProjectionCall& p) {
  const int64_t wanted = (p.batches * tiles_of(p.pairs) + kWarps - 1) / kWarps;
  return {.blocks = std::min(wanted, int64_t{current_device().multiprocessors} * kCtas),
          .threads = kThreads,
          .shared_bytes = p.channels == 64 ? Reads<2, kStages>::kBytes : Reads<4, kStages>::kBytes};
}
Grid forward_grid(const PairProjectionCall& p) { return grid_of<kForwardCtas, kForwardStages>(p); }
Grid backward_grid(const PairProjectionCall& p) { return grid_of<kBackwardCtas, kBackwardStages>(p); }

// run(element, centered, vectors), each as a type.
template <class Run>
void with_kernel(const PairProjectionCall& p, const Run& run) {
  const auto with_vectors = [&](auto element, auto centered) {
    if (p.channels == 64) return run(element, centered, std::integral_constant<int, 2>());
    return run(element, centered, std::integral_constant<int, 4>());
  };
  const auto with_norm = [&](auto element) {
    return p.centered ? with_vectors(element, std::true_type()) : with_vectors(element, std::false_type());
  };
  return p.dtype == DType::kBFloat16 ? with_norm(device::BFloat16()) : with_norm(device::Float16());
}

}  // namespace

bool pair_projection_takes(DType dtype, int64_t channels, int64_t heads) {
  return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) && (channels == 64 || channels == 128) && heads > 0 &&
         heads <= kHeads;
}

void pair_projection(const PairProjectionCall& p, void* out, void* stream) {
  if (p.batches * p.pairs == 0) return;
  with_kernel(p, [&](auto element, auto centered, auto vectors) {
    using T = decltype(element);
    launch("pair_projection", project_kernel<T, centered.value, vectors.value>, forward_grid(p), stream, p,
           static_cast<T*>(out));
  });
}

int64_t pair_projection_parts(const PairProjectionCall& p) { return backward_grid(p).blocks + 1; }

void pair_projection_backward(const PairProjectionCall& p, const PairProjectionGradients& to, void* stream) {
  const Grid grid = backward_grid(p);
  with_kernel(p, [&](auto element, auto centered, auto vectors) {
    using T = decltype(element);
    if (grid.blocks > 0) {
      launch("pair_projection_backward", backward_kernel<T, centered.value, vectors.value>, grid, stream, p,
             static_cast<const T*>(to.grad), static_cast<T*>(to.pair), to.parts);
    }
    if (to.parts == nullptr) return;
    float* totals = to.parts + grid.blocks * p.heads * (p.channels + 1);
    launch("pair_projection_weight", weight_kernel<T>, Grid{p.heads, kSlices * kMostChannels}, stream, p, to,
           grid.blocks, totals);
    if (to.norm_weight == nullptr && to.norm_bias == nullptr) return;
    launch("pair_projection_norm", norm_kernel<T>, Grid{1, kMostChannels}, stream, p, to, totals);
  });
}

}  // namespace fusegrad::cuda
