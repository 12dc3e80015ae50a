// Attention dropout: which pairs a call drops. A pair's number follows from the call's seed and the pair's place
// (batch, head, query and key) alone, so it is the same in every tiling, family and direction, and on the CPU
// (attention/cpu/attention_kernel.cpp).
//
// Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") runs
//   per head     once, 10 rounds, counter (b * H + h, 0, 0, 0), key = seed; two words of the result are the head's key
//   per block    32 queries by 32 keys on 32 lanes, 32 pairs each; twice, 7 rounds, the fewest that pass BigCrush;
//                counter (64 * block of keys + 32 * i + lane, block of queries, the head's key), i = 0 and 1, key 0. A
//                constant key saves two additions a round
//
// A lane's 32 pairs have a bit each of 15 words, which are the digits of their numbers: from the highest one on words
// 3, 2, 1 and 0 of the second result, those of the first one, and of the first run words 3 and 1 after round 6, their
// halves exchanged, words 3 and 1 after rounds 5 and 4, and word 1 after round 3. So 32 numbers are compared by 15
// instructions. The lower seven digits, of fewer rounds, decide for one pair of 256. A pair is dropped where its number
// is below the threshold.
//
// Query q and key k of a block belong to lane q % 8 * 4 + k % 8 / 2 and bit
//   16 * (k % 2) + 8 * (q / 16) + 4 * (k / 16) + 2 * (k / 8 % 2) + q / 8 % 2
// as accumulators of 16 queries by 8 keys have them. Where keys are rows, the halves of all lanes' words, transposed as
// 8 x 8 numbers of 16 bits, are the bits of lane k % 8 * 4 + q % 8 / 2, and q % 2 takes the place of k % 2.
#pragma once

#include "cuda/attention/device/arguments.cuh"

namespace fusegrad::device {

/// A product of 64 bits in halves. Shifted out of one, ptxas would add 0 to the upper half.
__device__ __forceinline__ void multiply_wide(unsigned x, unsigned y, unsigned& low, unsigned& high) {
  asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x), "r"(y));
}
/// after(round, x) is called behind each round.
template <int kRounds, class After>
__device__ __forceinline__ void philox(unsigned (&x)[4], unsigned key0, unsigned key1, const After& after) {
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
    after(round);
  }
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
template <bool kKeyRows, int kWords>
struct FlexKept {
  /// All bits of the kept ones' halves, of accumulator n and row half r.
#ifdef FUSEGRAD_X_NOAPPLY  // EXPERIMENT
  __device__ __forceinline__ unsigned mask(int n, int r) const { return ~0u; }
#else
  __device__ __forceinline__ unsigned mask(int n, int r) const { return mask_of_bits(word[n / 8], bit(n, r)); }
#endif
  /// Whether pairs (first, second) are kept.
  __device__ __forceinline__ void keeps(int n, int r, bool& first, bool& second) const {
#ifdef FUSEGRAD_X_NOAPPLY  // EXPERIMENT
    first = second = true;
    return;
#endif
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
  /// The words of 32 rows and 64 columns, for threads that have the first 16 rows and for those that have the others.
  static __device__ __forceinline__ void combine(unsigned first, unsigned second, unsigned (&words)[2]) {
    if constexpr (kKeyRows) {
      words[0] = (first & 0x0f0f0f0f) | (second << 4 & 0xf0f0f0f0);
      words[1] = (first >> 4 & 0x0f0f0f0f) | (second & 0xf0f0f0f0);
    } else {
      words[0] = __byte_perm(first, second, 0x6240);
      words[1] = __byte_perm(first, second, 0x7351);
    }
  }

  static __device__ __forceinline__ constexpr int bit(int n, int r) {
    return kKeyRows ? n / 2 % 2 * 8 + n / 4 % 2 * 4 + r * 2 + n % 2 : n % 8 * 2 + r;
  }
  unsigned word[kWords];
};

/// The same of two accumulators alone.
template <bool kKeyRows>
class FlexDropoutPairs {
 public:
  __device__ __forceinline__ void keeps(int n, int r, bool& first, bool& second) const {
    const int bit = kKeyRows ? r * 2 + n % 2 : n % 2 * 2 + r;
    first = test_bit(bits_, bit);
    second = test_bit(bits_, bit + 16);
  }
  __device__ __forceinline__ unsigned mask(int n, int r) const {
    return mask_of_bits(bits_, kKeyRows ? r * 2 + n % 2 : n % 2 * 2 + r);
  }
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
  unsigned bits_;
};

/// A thread's part of a head's key, from which the numbers of a block follow.
template <class Config>
class FlexDropoutHead {
 public:
  template <bool kKeyRows>
  using Pairs = FlexDropoutPairs<kKeyRows>;

  /// `head`: b * H + h.
  __device__ __forceinline__ void begin(const FlexDropout& dropout, int head) {
    if constexpr (Config::kDropout) {
      unsigned x[4] = {static_cast<unsigned>(head), 0, 0, 0}, low, high;
      // Volatile, so that the seed is not held in registers from one head to the next.
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(dropout.seed));
      philox<10>(x, low, high, [](int) {});
      key_[0] = x[0];
      key_[1] = x[1];
    }
  }
  /// Which pairs of a block are kept: 32 queries from 32 * q on, 32 keys from 32 * kv on. kKeyRows: called by all lanes
  /// of a warp.
  template <bool kKeyRows>
  __device__ __forceinline__ unsigned block(const FlexDropout& dropout, unsigned q, unsigned kv, int lane) const {
    unsigned kept = ~0u;
    // The digits from the lowest one on. The threshold's are uniform, and masks in uniform registers.
    const auto compare = [&](unsigned digit, int place) {
      const int above = static_cast<int>(~dropout.threshold << (31 - place)) >> 31;
      asm("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(kept) : "r"(digit), "r"(above));  // the majority
    };
#pragma unroll
#ifdef FUSEGRAD_X_ONE  // EXPERIMENT
    for (int i = 1; i < 2; ++i) {
#else
    for (int i = 0; i < 2; ++i) {
#endif
      unsigned x[4] = {kv * 64 + i * 32 + lane, q, key_[0], key_[1]};
      philox<7>(x, 0, 0, [&](int round) {
        if (i != 0 || round < 2 || round == 6) return;
        // Halves are exchanged, as the result's words 0 and 2 are these words with bits inverted, some of them more
        // often than not.
        const auto word = [&](int w) { return round == 5 ? __byte_perm(x[w], 0, 0x1032) : x[w]; };
        compare(word(1), round * 2 - 4 - (round > 2));
        if (round > 2) compare(word(3), round * 2 - 4);
      });
#pragma unroll
      for (int w = 0; w < 4; ++w) compare(x[w], 7 + i * 4 + w);
    }
    if constexpr (kKeyRows) asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(kept));
    return kept;
  }
  /// Those of 16 queries from q on and kWords * 64 keys from kv on.
  template <int kWords>
  __device__ __forceinline__ FlexKept<false, kWords> row(const FlexDropout& dropout, int q, int kv, int lane) const {
    FlexKept<false, kWords> kept;
    const unsigned row = static_cast<unsigned>(q) / 32, col = static_cast<unsigned>(kv) / 32;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      unsigned words[2];
      const unsigned first = block<false>(dropout, row, col + 2 * w, lane);
      FlexKept<false, kWords>::combine(first, block<false>(dropout, row, col + 2 * w + 1, lane), words);
      kept.word[w] = q / 16 % 2 == 0 ? words[0] : words[1];
    }
    return kept;
  }
  /// The pairs of 16 queries from q on and 16 keys from kv on. Called by all lanes of a warp.
  template <bool kKeyRows>
  __device__ __forceinline__ Pairs<kKeyRows> pairs(const FlexDropout& dropout, int q, int kv, int lane) const {
    Pairs<kKeyRows> pairs;
    pairs.bits_ = block<kKeyRows>(dropout, static_cast<unsigned>(q) / 32, static_cast<unsigned>(kv) / 32, lane) >>
                  (q / 16 % 2 * 8 + kv / 16 % 2 * 4);
    return pairs;
  }

 private:
  unsigned key_[2];
};

}  // namespace fusegrad::device
