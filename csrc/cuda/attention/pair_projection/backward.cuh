// The gradients of a pair projection by the pairs and, in parts, by its parameters.
#pragma once

#include "cuda/attention/pair_projection/tiles.cuh"

namespace fusegrad::device::pair_projection {

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
template <class T, bool kCentered, int kVectors, int kStages>
class Backward {
  static constexpr int kAll = kVectors * kChannels, kBlocks = kVectors * 4;
  static constexpr float kShare = 1.0f / kAll;

 public:
  struct Shared {
    uint2 weight[kBlocks][kLanes];       // operand B of each block of channels
    uint4 by_head[kBlocks / 2][kLanes];  // of each two blocks: operand B of heads
    float norm[kAll];
    float means[kHeads];  // of weight * norm_weight
    float sums[kHeads][kAll + 1];
  };

  /// `stages`: Reads::kBytes.
  __device__ __forceinline__ Backward(const PairProjectionCall& p, Shared& shared, const void* stages)
      : p_(p), shared_(shared), reads_(p, stages) {}

  /// parts: of each CTA its sums.
  __device__ __forceinline__ void run(const T* grad, T* grad_pair, float* parts) {
    load_parameters();
    Upstream<T> next_grad;
    next_grad.load(grad, p_, Walk(p_.pairs), lane());
    reads_.for_each_tile([&](const Walk& at, int stage) {
      const Norm norms[2] = {norm_of<T, kCentered>(reads_, 0, stage), norm_of<T, kCentered>(reads_, 1, stage)};
      const unsigned a[4] = {next_grad.word(0, 0), next_grad.word(0, 1), next_grad.word(1, 0), next_grad.word(1, 1)};
      next_grad.load(grad, p_, at.next(), lane());
      float projected[2][4] = {};
      add(a, norms, stage, projected);
      if (grad_pair != nullptr) store_gradient(a, norms, stage, projected, at, grad_pair);
    });
    if (parts != nullptr) store_sums(parts + int64_t{blockIdx.x} * p_.heads * (kAll + 1));
  }

 private:
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int warp() { return thread() / kLanes; }
  static __device__ __forceinline__ int lane() { return thread() % kLanes; }
  static __device__ __forceinline__ int t() { return lane() % 4; }
  static __device__ __forceinline__ int g() { return lane() / 4; }
  __device__ __forceinline__ unsigned weight_bits(int head, int channel) const {
    return head < p_.heads ? static_cast<const T*>(p_.weight)[head * kAll + channel].bits : 0u;
  }

  __device__ __forceinline__ void load_parameters() const {
    for (int i = thread(); i < kAll; i += kThreads) shared_.norm[i] = parameter<T>(p_.norm_weight, i, 1.0f);
    for (int block = warp(); block < kBlocks; block += kWarps) {
      const int channel = block / 4 * kChannels + g() / 2 * 8 + block % 4 * 2 + g() % 2;
      const auto bits = [&](int head) { return weight_bits(head, channel) | weight_bits(head + 1, channel) << 16; };
      shared_.weight[block][lane()] = {bits(2 * t()), bits(2 * t() + 8)};
    }
    for (int two = warp(); two < kBlocks / 2; two += kWarps) {
      const int channel = two / 2 * kChannels + 8 * t() + two % 2 * 4;
      const auto bits = [&](int head, int at) { return weight_bits(head, at) | weight_bits(head, at + 1) << 16; };
      shared_.by_head[two][lane()] = {bits(g(), channel), bits(g(), channel + 2), bits(g() + 8, channel),
                                      bits(g() + 8, channel + 2)};
    }
    __syncthreads();
    for (int head = warp(); head < kHeads; head += kWarps) {
      float sum = 0.0f;
      for (int c = lane(); c < kAll; c += kLanes) {
        sum += from_bits(T{static_cast<unsigned short>(weight_bits(head, c))}) * shared_.norm[c];
      }
      for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (lane() == 0) shared_.means[head] = sum * kShare;
    }
    __syncthreads();
  }

  /// Adds a tile's sums of the parameters, and projects: `projected` is of each head the sum of weight * xn.
  __device__ __forceinline__ void add(const unsigned (&a)[4], const Norm (&norms)[2], int stage,
                                      float (&projected)[2][4]) {
    const unsigned turned[4] = {transposed(a[0]), transposed(a[2]), transposed(a[1]), transposed(a[3])};
    const auto heads = Mma<T>::factor(turned);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 row[2] = {reads_.take(0, v, stage), reads_.take(1, v, stage)};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        unsigned xn[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          unsigned pairs[4] = {};
          const float2 n = *reinterpret_cast<const float2*>(shared_.norm + v * kChannels + 8 * t() + 2 * (w + k));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned word = word_of(row[i], w + k);
            const float one = norms[i].template first<T>(word), other = norms[i].template second<T>(word);
            pairs[i] = transposed(pack(T{}, one, other));
            xn[2 * k + i] = pack(T{}, one * n.x, other * n.y);
          }
          Mma<T>::template step<0>(sum_[4 * v + w + k], heads, Mma<T>::factor(pairs));
        }
        const uint4 words = shared_.by_head[2 * v + w / 2][lane()];
        const unsigned columns[4] = {words.x, words.y, words.z, words.w};
        const auto of_rows = Mma<T>::factor(xn), of_heads = Mma<T>::factor(columns);
        Mma<T>::template step<0>(projected[0], of_rows, of_heads);
        Mma<T>::template step<1>(projected[1], of_rows, of_heads);
        hold_order();
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum_of_grad_[j][0] += first_of<T>(a[2 * j + i]);
        sum_of_grad_[j][1] += second_of<T>(a[2 * j + i]);
      }
    }
  }

  __device__ __forceinline__ void store_gradient(const unsigned (&a)[4], const Norm (&norms)[2], int stage,
                                                 const float (&projected)[2][4], const Walk& at, T* grad_pair) const {
    const auto upstream = Mma<T>::factor(a);
    float mean[2] = {}, slope[2] = {};  // at last what is taken off: of each row, and times its values
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float first = first_of<T>(a[2 * j + i]), second = second_of<T>(a[2 * j + i]);
        const float2 m = *reinterpret_cast<const float2*>(shared_.means + 8 * j + 2 * t());
        if constexpr (kCentered) mean[i] += first * m.x + second * m.y;
        slope[i] += first * projected[j][2 * i] + second * projected[j][2 * i + 1];
      }
      if constexpr (kCentered) mean[i] = row_sum(mean[i]) * norms[i].rate;
      slope[i] = row_sum(slope[i]) * kShare * norms[i].rate;
      mean[i] += slope[i] * norms[i].shift;
      slope[i] *= norms[i].rate;
    }
    auto* to = reinterpret_cast<uint4*>(grad_pair) + (at.batch * p_.pairs + at.pair()) * (kVectors * 4) + t();
    const int rows_there = at.rows(p_.pairs);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 row[2] = {reads_.take(0, v, stage), reads_.take(1, v, stage)};
      unsigned out[2][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint2 words = shared_.weight[4 * v + w][lane()];
        const unsigned columns[4] = {words.x, words.y, 0, 0};
        float d[4] = {};
        Mma<T>::template step<0>(d, upstream, Mma<T>::factor(columns));
        const float2 n = *reinterpret_cast<const float2*>(shared_.norm + v * kChannels + 8 * t() + 2 * w);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned word = word_of(row[i], w);
          out[i][w] = pack(T{}, d[2 * i] * n.x * norms[i].rate - (mean[i] + first_of<T>(word) * slope[i]),
                           d[2 * i + 1] * n.y * norms[i].rate - (mean[i] + second_of<T>(word) * slope[i]));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = g() + 8 * i;
        if (row < rows_there) to[row * (kVectors * 4) + v * 4] = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
      }
    }
  }

  /// Warps add theirs one after the other.
  __device__ __forceinline__ void store_sums(float* to) {
    float* all = &shared_.sums[0][0];
    for (int i = thread(); i < kHeads * (kAll + 1); i += kThreads) all[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        for (int lanes = 4; lanes < kLanes; lanes *= 2) {
          sum_of_grad_[j][k] += __shfl_xor_sync(~0u, sum_of_grad_[j][k], lanes);
        }
      }
    }
    for (int turn = 0; turn < kWarps; ++turn) {
      __syncthreads();
      if (turn != warp()) continue;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int channel = b / 4 * kChannels + 8 * t() + b % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) shared_.sums[g() + i / 2 * 8][channel + i % 2] += sum_[b][i];
      }
      if (g() == 0) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          shared_.sums[8 * j + 2 * t()][kAll] += sum_of_grad_[j][0];
          shared_.sums[8 * j + 2 * t() + 1][kAll] += sum_of_grad_[j][1];
        }
      }
    }
    __syncthreads();
    for (int i = thread(); i < p_.heads * (kAll + 1); i += kThreads) to[i] = all[i];
  }

  const PairProjectionCall& p_;
  Shared& shared_;
  const Reads<kVectors, kStages> reads_;
  float sum_[kBlocks][4] = {}, sum_of_grad_[2][2] = {};
};

}  // namespace fusegrad::device::pair_projection
