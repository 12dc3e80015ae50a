// Attention dropout: which pairs a call drops. A pair's number follows from the call's seed and the pair's place
// (batch, head, query and key) alone, so it is the same in every tiling, family and direction, and on the CPU
// (attention/cpu/attention_kernel.cpp).
//
// Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") runs twice:
//   per head     10 rounds, counter (b * H + h, 0, 0, 0), key = seed; two words of the result are the head's key
//   per block    16 queries by 16 keys on 32 lanes; 7 rounds, the fewest that pass BigCrush; counter (32 * block of
//                keys + lane, block of queries, the head's key), key 0. A constant key saves two additions a round.
//                Four words are eight numbers of 16 bits
// Word i + 2 * j of a lane belongs to queries from 8 * i on and keys from 8 * j on: query lane / 4, key lane % 4 * 2 in
// the lower half and the next key in the upper half. So numbers lie as accumulators of 16 queries by 8 keys do; where
// keys are rows, transposing each 8 x 8 block brings them there.
//
// A pair is dropped where the lower 15 bits of its number are below the threshold. They are compared as float16, two at
// a time: NaNs, the numbers above 0x7c00, count as large. For a threshold beyond that (kMost) the comparison is turned
// round: a pair is dropped unless its number is below 0x8000 - threshold.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// A product of 64 bits in halves. Shifted out of one, ptxas would add 0 to the upper half.
__device__ __forceinline__ void multiply_wide(unsigned x, unsigned y, unsigned& low, unsigned& high) {
  asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x), "r"(y));
}
template <int kRounds>
__device__ __forceinline__ void philox(unsigned (&x)[4], unsigned key0, unsigned key1) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    unsigned low[2], high[2];
    multiply_wide(x[0], 0xD2511F53, low[0], high[0]);
    multiply_wide(x[2], 0xCD9E8D57, low[1], high[1]);
    x[0] = high[1] ^ x[1] ^ key0;
    x[1] = low[1];
    x[2] = high[0] ^ x[3] ^ key1;
    x[3] = low[0];
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

/// The numbers of eight of a thread's pairs: two accumulators, side by side along their columns. kKeyRows: keys are the
/// accumulators' rows, and queries their columns.
template <bool kMost>
class FlexDropoutPairs {
 public:
  /// Whether pairs (first, second) of words accumulator n % 2 and row half r are kept.
  __device__ __forceinline__ void keeps(int n, int r, bool& first, bool& second) const {
    int a, b;
    if constexpr (kMost) {
      asm("{\n.reg .b32 x;\n.reg .pred p, q;\nabs.f16x2 x, %2;\nsetp.lt.f16x2 p|q, x, %3;\nselp.b32 %0, 1, 0, p;\n"
          "selp.b32 %1, 1, 0, q;\n}"
          : "=r"(a), "=r"(b)
          : "r"(word_[n % 2 * 2 + r]), "r"(threshold_));
    } else {
      asm("{\n.reg .b32 x;\n.reg .pred p, q;\nabs.f16x2 x, %2;\nsetp.geu.f16x2 p|q, x, %3;\nselp.b32 %0, 1, 0, p;\n"
          "selp.b32 %1, 1, 0, q;\n}"
          : "=r"(a), "=r"(b)
          : "r"(word_[n % 2 * 2 + r]), "r"(threshold_));
    }
    first = a != 0;
    second = b != 0;
  }
  /// All bits of the kept ones' halves.
  __device__ __forceinline__ unsigned mask(int n, int r) const {
    unsigned bits;
    if constexpr (kMost) {
      asm("{\n.reg .b32 x;\nabs.f16x2 x, %1;\nset.lt.u32.f16x2 %0, x, %2;\n}"
          : "=r"(bits)
          : "r"(word_[n % 2 * 2 + r]), "r"(threshold_));
    } else {
      asm("{\n.reg .b32 x;\nabs.f16x2 x, %1;\nset.geu.u32.f16x2 %0, x, %2;\n}"
          : "=r"(bits)
          : "r"(word_[n % 2 * 2 + r]), "r"(threshold_));
    }
    return bits;
  }
  /// An accumulator, 0 where dropped.
  __device__ __forceinline__ void drop(int n, float (&x)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bool first, second;
      keeps(n, r, first, second);
      x[2 * r] = first ? x[2 * r] : 0.0f;
      x[2 * r + 1] = second ? x[2 * r + 1] : 0.0f;
    }
  }

 private:
  template <class Config>
  friend class FlexDropoutHead;
  template <class Config>
  friend class FlexDropoutRows;
  unsigned word_[4], threshold_;
};

/// A thread's part of a head's key, from which the numbers of a block follow.
template <class Config>
class FlexDropoutHead {
 public:
  using Pairs = FlexDropoutPairs<Config::kMostDropped>;

  /// `head`: b * H + h.
  __device__ __forceinline__ void begin(const FlexDropout& dropout, int head) {
    if constexpr (Config::kDropout) {
      unsigned x[4] = {static_cast<unsigned>(head), 0, 0, 0}, low, high;
      // Volatile, so that the seed is not held in registers from one head to the next.
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(dropout.seed));
      philox<10>(x, low, high);
      key_[0] = x[0];
      key_[1] = x[1];
    }
  }
  /// The numbers of 16 queries from q on and 16 keys from kv on. Called by all lanes of a warp.
  template <bool kKeyRows>
  __device__ __forceinline__ Pairs pairs(const FlexDropout& dropout, int q, int kv, int lane) const {
    Pairs pairs;
    unsigned x[4] = {static_cast<unsigned>(kv) / 16 * 32 + lane, static_cast<unsigned>(q) / 16, key_[0], key_[1]};
    philox<7>(x, 0, 0);
    pairs.threshold_ = dropout.threshold;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned& word = pairs.word_[n * 2 + r];
        if constexpr (kKeyRows) {
          asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(word) : "r"(x[n + 2 * r]));
        } else {
          word = x[n * 2 + r];
        }
      }
    }
    return pairs;
  }

  /// Those of query q alone, as accumulators have them in the lanes of its row.
  struct Row {
    unsigned word[2];
  };
  __device__ __forceinline__ Row row(int q, int kv, int lane) const {
    unsigned x[4] = {static_cast<unsigned>(kv) / 16 * 32 + q % 8 * 4 + lane % 4, static_cast<unsigned>(q) / 16, key_[0],
                     key_[1]};
    philox<7>(x, 0, 0);
    const bool lower = q % 16 < 8;
    return {{lower ? x[0] : x[1], lower ? x[2] : x[3]}};
  }

 private:
  unsigned key_[2];
};

/// The same where the two rows of a thread's accumulators are queries of any heads.
template <class Config>
class FlexDropoutRows {
 public:
  using Pairs = FlexDropoutPairs<Config::kMostDropped>;

  /// Row `r`, 0 or 1: query q of `head`, b * H + h.
  __device__ __forceinline__ void begin(const FlexDropout& dropout, int r, int head, int q) {
    if constexpr (Config::kDropout) {
      head_[r].begin(dropout, head);
      query_[r] = q;
    }
  }
  /// The numbers of 16 keys from kv on.
  __device__ __forceinline__ Pairs pairs(const FlexDropout& dropout, int kv, int lane) const {
    Pairs pairs;
    pairs.threshold_ = dropout.threshold;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto half = head_[r].row(query_[r], kv, lane);
#pragma unroll
      for (int n = 0; n < 2; ++n) pairs.word_[n * 2 + r] = half.word[n];
    }
    return pairs;
  }

 private:
  FlexDropoutHead<Config> head_[2];
  int query_[2];
};

}  // namespace fusegrad::device
