// Attention dropout: which pairs a call drops. That follows from the call's seed and the pair's place (batch, head,
// query and key) alone, so it is the same in every tiling, family and direction, and on the CPU
// (attention/cpu/attention_kernel.cpp).
//
// Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") runs
//   per head     once, 10 rounds, counter (b * H + h, 0, 0, 0), key = seed; two words of the result are the head's key
//   per block    16 queries by 64 keys on 32 lanes, 32 pairs each; 9 rounds, counter (32 * block of queries + lane,
//   block
//                of keys, the head's key), key 0. A constant key saves two additions a round, and of the first three
//                rounds most is the same for all keys. The words after 9 rounds and those after 7, the fewest that pass
//                BigCrush, are eight words: in two rounds each bit has met others of all four words
//
// A lane's 32 pairs have a bit each of the eight words, which are the digits of their numbers from the highest one on:
// so 32 numbers are compared by eight instructions. A pair is dropped where its number is below the threshold; where
// it equals the threshold's eight digits, the lane's rest decides for all of its pairs, 32 bits that are made of the
// words. So each pair is dropped with the probability 2^-40 * threshold; that two pairs of a lane's 32 both depend on
// the rest has the probability 2^-16.
//
// Query q and key k of a block belong to lane q % 8 * 4 + k % 8 / 2 and bit 16 * (k % 2) + 8 * (q / 8) + k / 8, as
// accumulators of 16 queries by 8 keys have them. Where keys are rows, the halves of all lanes' words, transposed as
// 8 x 8 numbers of 16 bits, are those of lane k % 8 * 4 + q % 8 / 2, and q % 2 takes the place of k % 2.
#pragma once

#include "cuda/attention/device/arguments.cuh"
#include "cuda/device/mma.cuh"

namespace fusegrad::device {

/// A product of 64 bits in halves. Shifted out of one, ptxas would add 0 to the upper half.
__device__ __forceinline__ void multiply_wide(unsigned x, unsigned y, unsigned& low, unsigned& high) {
  asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x), "r"(y));
}
__device__ __forceinline__ void philox_round(unsigned (&x)[4], unsigned key0, unsigned key1) {
  unsigned low[2], high[2];
  multiply_wide(x[0], 0xD2511F53, low[0], high[0]);
  multiply_wide(x[2], 0xCD9E8D57, low[1], high[1]);
  x[0] = high[1] ^ x[1] ^ key0;
  x[1] = low[1];
  x[2] = high[0] ^ x[3] ^ key1;
  x[3] = low[0];
}
/// Rounds `first` to `last` of those with a key.
__device__ __forceinline__ void philox(unsigned (&x)[4], unsigned key0, unsigned key1, int first, int last) {
#pragma unroll
  for (int round = first; round <= last; ++round)
    philox_round(x, key0 + (round - 1) * 0x9E3779B9, key1 + (round - 1) * 0xBB67AE85);
}

/// For each of bits x and x + 16 of a word all bits of a half if it is set, else none.
__device__ __forceinline__ unsigned mask_of_bits(unsigned word, int x) {
  unsigned mask;
  if (x < 8) {
    asm("prmt.b32 %0, %1, 0, 0xaa88;" : "=r"(mask) : "r"(word << (7 - x)));
  } else {
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(word << (15 - x)));
  }
  return mask;
}

/// Each bit is y's where the mask's is not set, else x's.
__device__ __forceinline__ unsigned select_bits(unsigned mask, unsigned x, unsigned y) {
  unsigned z;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(z) : "r"(mask), "r"(x), "r"(y));
  return z;
}
/// Whether a bit is set, by one instruction.
__device__ __forceinline__ bool test_bit(unsigned word, int bit) {
  int set;
  asm("{\n.reg .pred set;\n.reg .b32 masked;\nand.b32 masked, %1, %2;\nsetp.ne.b32 set, masked, 0;\n"
      "selp.b32 %0, 1, 0, set;\n}"
      : "=r"(set)
      : "r"(word), "r"(1u << bit));
  return set != 0;
}

/// Which of a thread's pairs are kept, in accumulators of 16 rows side by side, 64 columns a word. kKeyRows: keys are
/// the accumulators' rows, and queries their columns.
template <bool kKeyRows, int kWords = 1>
struct FlexKept {
  /// All bits of the kept ones' halves, of accumulator n and row half r.
  __device__ __forceinline__ unsigned mask(int n, int r) const { return mask_of_bits(word[n / 8], bit(n, r)); }
  /// Whether pairs (first, second) are kept.
  __device__ __forceinline__ void keeps(int n, int r, bool& first, bool& second) const {
    first = test_bit(word[n / 8], bit(n, r));
    second = test_bit(word[n / 8], bit(n, r) + 16);
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
  static __device__ __forceinline__ constexpr int bit(int n, int r) {
    return kKeyRows ? n % 2 * 8 + n / 2 % 4 * 2 + r : r * 8 + n % 8;
  }
  /// Where keys are rows: of four blocks, 64 queries by 64 keys, the `part`-th 16 keys. Called by all lanes of a warp.
  static __device__ __forceinline__ unsigned transposed(const unsigned (&blocks)[4], int part) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (blocks[i] >> 2 * part & 0x03030303) << 2 * i;
    return device::transposed(word);
  }

  unsigned word[kWords];
};

/// Draws which pairs of a block are kept, in steps between which a thread can issue other work.
class FlexDropoutDraw {
 public:
  static constexpr int kSteps = 8;
  FlexDropoutDraw() = default;
  __device__ __forceinline__ FlexDropoutDraw(unsigned key0, unsigned key1, int q, int kv, int lane)
      : x_{static_cast<unsigned>(q) / 16 * 32 + lane, static_cast<unsigned>(kv) / 64, key0, key1} {}
  __device__ __forceinline__ void step(const FlexDropout& dropout, int i) {
    if (i == 0) philox(x_, 0, 0, 1, 4);
    if (1 <= i && i < 4) philox(x_, 0, 0, 4 + i, 4 + i);
    if (i == 4) {
      kept_ = x_[1] * x_[2] + x_[3] < dropout.rest ? 0 : ~0u;
      compare(dropout, 4);
    }
    if (4 < i && i < 7) philox(x_, 0, 0, 3 + i, 3 + i);
    if (i == 7) compare(dropout, 0);
  }
  /// Keeps a step where it is.
  __device__ __forceinline__ void pin(int i) {
    if (i < 7) {
#pragma unroll
      for (int w = 0; w < 4; ++w) asm volatile("" : "+r"(x_[w]));
    }
    if (i >= 4) asm volatile("" : "+r"(kept_));
  }
  __device__ __forceinline__ unsigned kept() const { return kept_; }

 private:
  // The words are digits first + 3 to first.
  __device__ __forceinline__ void compare(const FlexDropout& dropout, int first) {
#pragma unroll
    for (int w = 3; w >= 0; --w)  // the majority
      asm("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(kept_) : "r"(x_[w]), "r"(dropout.above[first + w]));
  }
  unsigned x_[4], kept_;
};

/// A thread's part of a head's key, from which the numbers of a block follow.
template <class Config>
class FlexDropoutHead {
 public:
  /// `head`: b * H + h.
  __device__ __forceinline__ void begin(const FlexDropout& dropout, int head) {
    if constexpr (Config::kDropout) {
      unsigned x[4] = {static_cast<unsigned>(head), 0, 0, 0}, low, high;
      // Volatile, so that the seed is not held in registers from one head to the next.
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(dropout.seed));
      philox(x, low, high, 1, 10);
      key_[0] = x[0];
      key_[1] = x[1];
    }
  }
  __device__ __forceinline__ FlexDropoutDraw draw(int q, int kv, int lane) const {
    return FlexDropoutDraw(key_[0], key_[1], q, kv, lane);
  }
  /// Which pairs of a block are kept: 16 queries from q on, 64 keys from kv on.
  __device__ __forceinline__ unsigned block(const FlexDropout& dropout, int q, int kv, int lane) const {
    FlexDropoutDraw draw = this->draw(q, kv, lane);
#pragma unroll
    for (int i = 0; i < FlexDropoutDraw::kSteps; ++i) draw.step(dropout, i);
    return draw.kept();
  }
  /// The same from kv on, which may lie inside of a block, to its end.
  __device__ __forceinline__ FlexKept<false> to_end(const FlexDropout& dropout, int q, int kv, int lane) const {
    return {{block(dropout, q, kv, lane) >> kv % 64 / 8}};
  }
  /// Those of 16 queries from q on and 16 keys from kv on, keys as rows. Called by all lanes of a warp.
  __device__ __forceinline__ FlexKept<true> key_rows(const FlexDropout& dropout, int q, int kv, int lane) const {
    return {{device::transposed(block(dropout, q, kv, lane) >> kv % 64 / 8 & 0x03030303)}};
  }

 private:
  unsigned key_[2];
};

/// The same where the two rows of a thread's accumulators are queries of any heads.
template <class Config>
class FlexDropoutRows {
 public:
  /// Row `r`, 0 or 1: query q of `head`, b * H + h.
  __device__ __forceinline__ void begin(const FlexDropout& dropout, int r, int head, int q) {
    if constexpr (Config::kDropout) {
      head_[r].begin(dropout, head);
      query_[r] = q;
    }
  }
  /// Which pairs are kept from kv on, which may lie inside of a block, to the block's end.
  __device__ __forceinline__ FlexKept<false> to_end(const FlexDropout& dropout, int kv, int lane) const {
    unsigned word = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // That of the lane whose row the query is in its block, of which half of the bits are the query's.
      const unsigned block = head_[r].block(dropout, query_[r], kv, query_[r] % 8 * 4 + lane % 4);
      word |= (block >> query_[r] % 16 / 8 * 8 & 0x00ff00ff) << 8 * r;
    }
    return {{word >> kv % 64 / 8}};
  }

 private:
  FlexDropoutHead<Config> head_[2];
  int query_[2];
};

}  // namespace fusegrad::device
