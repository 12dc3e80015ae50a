// Forward mode of flex attention for sm_90a, persistent CTAs of kRows queries: portable.cuh says what it
// computes, forward_tiles.cuh has the producer, which brings each operand's tangent behind the operand.
//
// A warpgroup's products of a tile are S = Q K^T, then dS = dQ K^T + Q dK^T, then O += P V and dO += P dV, then
// dO += (P * dS) V. Exponentials are computed beside the second, P * dS beside the third, and both beside the other
// warpgroup's. Between these two pairs all products are waited for: ptxas makes each product wait for the one before
// where other instructions read or change an accumulator in between.
#pragma once

#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/forward/hopper_tiles.cuh"
#include "cuda/attention/forward/softmax.cuh"
#include "cuda/attention/tangents/arguments.cuh"

namespace fusegrad::device {

/// FlexForwardHopperTiles: how many tiles a stage has.
template <class Config>
struct FlexTangentsOperands {
  using Arguments = FlexTangentsArguments;
  using HopperArguments = FlexTangentsHopperArguments;
  using Tangent = typename Config::Tangent;
  static constexpr int kQuery = Config::kQueryTangent ? 2 : 1;
  static constexpr int kKey = Config::kKeyTangent ? 2 : 1;
  static constexpr int kValue = Config::kValueTangent ? 2 : 1;
};

template <class Config>
class FlexTangentsHopper : FlexForwardHopperTiles<Config, FlexTangentsOperands<Config>> {
  using Tiles = FlexForwardHopperTiles<Config, FlexTangentsOperands<Config>>;
  using Tiles::a_, Tiles::mask_, Tiles::score_;
  using Tiles::key, Tiles::kMemory, Tiles::query, Tiles::value;
  using Tiles::key_empty, Tiles::key_full, Tiles::query_empty, Tiles::query_full, Tiles::value_empty, Tiles::value_full;
  using Tiles::lane, Tiles::produce, Tiles::release, Tiles::entry, Tiles::work, Tiles::work_empty, Tiles::work_full;
  using typename Tiles::Entry, typename Tiles::MaskMod, typename Tiles::QueryStages, typename Tiles::ScoreMod,
      typename Tiles::Stages;
  using typename Tiles::Reads, typename Tiles::Work, typename Tiles::Works;
  using T = typename Config::Element;
  using Tangent = typename Config::Tangent;
  // Float16 has no room for products of larger weights with tangents.
  using Softmax = FlexHopperSoftmax<Config, FlexTangentsArguments, kSame<T, Float16> ? 0 : 8>;
  using ScoreProduct = Wgmma<T, Config::kCols, false, false>;
  using OutProduct = Wgmma<T, Config::kValue, true, true>;
  static constexpr int kBlocksN = Config::kCols / 8, kBlocksE = Config::kValue / 8;
  static constexpr int kScoreProducts = Config::kHead / 16, kOutProducts = Config::kCols / 16;
  static constexpr int kTogether = 16;  // pairs for which a mask_mod is called at a time
  static constexpr int kWords = Config::kDropout ? Config::kCols / 64 : 1;  // of dropout, of a tile
  static_assert(Config::kGroups == 2 && Config::kParts == 1 && Config::kQueryStages == 1 && !Config::kKeySplits);
  static_assert(!Config::kDropout || Config::kCols % 64 == 0);
  static constexpr int kProducerRegisters = Reads::kUsed ? 56 : 24;

 public:
  using Tiles::kSharedBytes;

  __device__ __forceinline__ FlexTangentsHopper(const FlexTangentsArguments& a, const FlexTangentsHopperArguments& more,
                                                const typename ScoreMod::Captured& score,
                                                const typename MaskMod::Captured& mask,
                                                const typename Tangent::Captured& tangent, unsigned shared)
      : Tiles(a, more, score, mask, shared), tangent_(tangent), softmax_(a) {}

  __device__ __forceinline__ void run() {
    Tiles::begin();
    // The shuffle tells the compiler that it is uniform in a warp.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group_ == Config::kGroups) {
      give_registers<kProducerRegisters>();
      if (threadIdx.x == Config::kGroups * kWarpgroup) produce();
      if constexpr (Reads::kUsed) {
        if (threadIdx.x >= Config::kGroups * kWarpgroup + kLanes) Tiles::bring_reads(tangent_);
      }
    } else {
      take_registers<consumer_registers(Config::kGroups, kProducerRegisters)>();
      consume();
    }
  }

 private:
  using Scores = float[kBlocksN][4];
  using Outputs = float[kBlocksE][4];
  using Weights = unsigned[kBlocksN * 2];  // as an operand

  __device__ __forceinline__ void consume() {
    Stages keys, values;
    QueryStages queries;
    Works works;
    while (true) {
      const int tiles = take(works);
      if (row_ == Work::kNoMore) break;
      compute(tiles, keys, values, queries);
    }
  }
  /// Takes the next work from the producer. Returns how many tiles it has.
  __device__ __forceinline__ int take(Works& works) {
    int tiles;
    Barrier::wait(work_full(works.stage()), works.parity());
    load_four_by_first(lane(), work(works.stage()), b_, h_, row_, tiles);
    release(work_empty(works.stage()));
    works.next();
    return tiles;
  }

  __device__ __forceinline__ void compute(int tiles, Stages& keys, Stages& values, QueryStages& queries) {
    Outputs out, of_out;
    Scores s, d;
    Weights p, pd;
    zero(out);
    zero(of_out);
    softmax_.begin();
    of_lse_[0] = of_lse_[1] = 0.0f;
    if (tiles > 0) {
      dropout_.begin(a_.dropout, b_ * a_.heads + h_);
      Barrier::wait(query_full(queries.stage()), queries.parity());
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        issue_scores(s, d, keys);
        const int now = Tiles::kEntries ? load_by_first(lane(), entry(keys.stage)) : i << Entry::kKindBits;
        const bool masked =
            Entry::kind(now) != kTileFull || Entry::column(now) * Config::kCols + Config::kCols > a_.keys;
        wgmma_wait<kHas<ScoreMod> ? 0 : 1>();
        pin<kBlocksN * 4>(s[0]);
        if constexpr (kHas<ScoreMod>) pin<kBlocksN * 4>(d[0]);
        change(s, d, now);
        if (masked) mask(s, now);
        float rescale[2];
        softmax_.add(s, rescale, [] {});
        Softmax::pack(p, s);
        draw(now);
        drop(p);
        Barrier::wait(value_full(values.stage), values.parity);
        wgmma_wait<0>();
        pin<kBlocksN * 4>(d[0]);
        Softmax::multiply(out, rescale);
        Softmax::multiply(of_out, rescale);
        release(key_empty(keys.stage));
        keys.next();
        wgmma_fence();
        issue_values(out, p, values, 0);
        if constexpr (Config::kValueTangent) issue_values(of_out, p, values, kMemory.value.piece / 2);
        wgmma_commit();
        weigh(pd, d, s, rescale, masked);
        drop(pd);
        wgmma_fence();
        issue_values(of_out, pd, values, 0);
        wgmma_commit();
        if (i + 1 == tiles) release(query_empty(queries.stage()));
        wgmma_wait<0>();
        // Else ptxas would put the second operand into the registers of the first, which products may still read.
        hold(p);
        pin<kBlocksE * 4>(out[0]);
        pin<kBlocksE * 4>(of_out[0]);
        release_values(values);
      }
      queries.next();
    }
    finish(out, of_out, tiles < 0);
  }
  __device__ __forceinline__ void release_values(Stages& values) const {
    release(value_empty(values.stage));
    values.next();
  }

  /// In two groups: the scores, and their tangents.
  __device__ __forceinline__ void issue_scores(Scores& s, Scores& d, const Stages& keys) const {
    Barrier::wait(key_full(keys.stage), keys.parity);
    const unsigned first = this->query(0) + group_ * 64 * kChunkBytes;
    const auto query = descriptor(first, 16), query_tangent = descriptor(first + kMemory.query.piece / 2, 16);
    const auto key = descriptor(this->key(keys.stage), 16);
    const auto key_tangent = descriptor(this->key(keys.stage) + kMemory.key.piece / 2, 16);
    const auto multiply = [](Scores& to, unsigned long long query, unsigned long long key, bool adds) {
#pragma unroll
      for (int k = 0; k < kScoreProducts; ++k) {
        ScoreProduct::run(to[0], advanced(query, step_bytes<Config::kRows>(k)),
                          advanced(key, step_bytes<Config::kCols>(k)), adds || k != 0);
      }
    };
    wgmma_fence();
    multiply(s, query, key, false);
    wgmma_commit();
    if constexpr (!Config::kQueryTangent && !Config::kKeyTangent) zero(d);
    if constexpr (Config::kQueryTangent) multiply(d, query_tangent, key, false);
    if constexpr (Config::kKeyTangent) multiply(d, query, key_tangent, Config::kQueryTangent);
    wgmma_commit();
  }
  /// `offset`: of the values in their stage.
  __device__ __forceinline__ void issue_values(Outputs& to, const Weights& weights, const Stages& values,
                                               int offset) const {
    const auto value = descriptor(this->value(values.stage) + offset, Config::kCols * kChunkBytes);
#pragma unroll
    for (int k = 0; k < kOutProducts; ++k)
      OutProduct::run(to[0], weights + 4 * k, advanced(value, k * 16 * kChunkBytes), true);
  }

  static __device__ __forceinline__ void hold(const Weights& weights) {
#pragma unroll
    for (int i = 0; i < kBlocksN * 2; ++i) asm volatile("" ::"r"(weights[i]));
  }

  /// The thread's first query.
  __device__ __forceinline__ int first_query() const {
    return row_ + static_cast<int>(threadIdx.x) / kLanes * 16 + lane() / 4;
  }
  // All pairs are changed, masked ones too: they read inside its buffers.
  __device__ __forceinline__ void change(Scores& s, Scores& d, int tile) {
    if constexpr (Config::kUnscaled) return;
    const int q = first_query(), kv = Entry::column(tile) * Config::kCols + lane() % 4 * 2;
    if constexpr (Reads::kUsed) Barrier::wait(Tiles::reads_full(reads_.stage()), reads_.parity());
    const unsigned reads = Tiles::reads(reads_.stage());
    const auto lines = Reads::score_lines(reads, q - row_, lane() % 4 * 2);
    const auto of_tangent = Reads::tangent_lines(reads, q - row_, lane() % 4 * 2);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] *= a_.scale;
        if constexpr (kHas<ScoreMod>) {
          const int at_q = q + e / 2 * 8, at_kv = kv + n * 8 + e % 2;
          d[n][e] = Tangent::apply(tangent_, s[n][e], d[n][e] * a_.scale, b_, h_, at_q, at_kv, true,
                                   of_tangent.at(e / 2 * 8, n * 8 + e % 2));
          s[n][e] = ScoreMod::apply(score_, s[n][e], b_, h_, at_q, at_kv, true, lines.at(e / 2 * 8, n * 8 + e % 2));
        }
      }
      if constexpr (kHas<ScoreMod>) hold_order();
    }
    if constexpr (Reads::kUsed) {
      release(Tiles::reads_empty(reads_.stage()));
      reads_.next();
    }
  }
  // Rows beyond the queries may get any result, which nobody stores.
  __device__ __forceinline__ void mask(Scores& s, int tile) const {
    const int kv = Entry::column(tile) * Config::kCols + lane() % 4 * 2;
    const auto alive =
        masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, Entry::kind(tile), b_, h_, first_query(), kv);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = (alive >> (n * 4 + e) & 1) != 0 ? s[n][e] : -FUSEGRAD_INFINITY;
    }
  }
  // The products of weights with tangents as an operand.
  __device__ __forceinline__ void weigh(Weights& to, const Scores& d, const Scores& p, const float (&rescale)[2],
                                        bool masked) {
    // A pair that takes no part, or whose score the score_mod made -inf, may have any tangent.
    const bool some = kHas<ScoreMod> || masked;
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = kHas<ScoreMod> ? p[n][e] * d[n][e] : p[n][e] * a_.scale * d[n][e];
        if (some) x[e] = p[n][e] != 0.0f ? x[e] : 0.0f;
        sum[e / 2] += x[e];
      }
      put_operand<T>(to + 2 * n, x);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) of_lse_[r] = of_lse_[r] * rescale[r] + sum[r];
  }
  __device__ __forceinline__ void draw(int tile) {
    if constexpr (Config::kDropout) {
      const int q = first_query() - lane() / 4, kv = Entry::column(tile) * Config::kCols;
#pragma unroll
      for (int w = 0; w < kWords; ++w) kept_.word[w] = dropout_.block(a_.dropout, q, kv + w * 64, lane());
      pin_words(kept_.word);
    }
  }
  __device__ __forceinline__ void drop(Weights& p) const {
    if constexpr (Config::kDropout) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) p[2 * n + r] &= kept_.mask(n, r);
      }
    }
  }

  // A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish(Outputs& out, Outputs& of_out, bool bad) const {
    const float nan = __int_as_float(0x7fffffff), ones[2] = {1.0f, 1.0f};
    const float sum[2] = {row_sum(softmax_.sum(0)), row_sum(softmax_.sum(1))};
    float lse[2], low[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) lse[r] = softmax_.max(r) * softmax_.unit() + logf(sum[r]);
    softmax_.correct_far(sum, lse, low);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first_query() + 8 * r;
      const bool none = softmax_.max(r) == -FUSEGRAD_INFINITY;
      const float inverse = bad ? nan : none ? 0.0f : 1.0f / sum[r];
      const float of_lse = row_sum(of_lse_[r]) * inverse;
      const float factor = Config::kDropout ? inverse * a_.dropout.scale : inverse;
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          out[n][e] *= factor;
          of_out[n][e] = of_out[n][e] * factor - of_lse * out[n][e];
        }
      }
      if (lane() % 4 != 0 || q >= a_.queries) continue;
      const long long at = static_cast<long long>(b_ * a_.heads + h_) * a_.queries + q;
      a_.lse[at] = bad ? nan : none ? -FUSEGRAD_INFINITY : lse[r];
      if (a_.lse_low != nullptr) a_.lse_low[at] = none ? 0.0f : low[r];
      a_.lse_tangent[at] = of_lse;
    }
    store_rows<T>(a_.out, b_, h_, first_query(), a_.queries, a_.value_size, out, ones);
    if constexpr (Config::kOutLow)
      store_low_rows<T>(a_.out_low, b_, h_, first_query(), a_.queries, a_.value_size, out, ones);
    store_rows<T>(a_.out_tangent, b_, h_, first_query(), a_.queries, a_.value_size, of_out, ones);
  }

  const typename Tangent::Captured& tangent_;
  Softmax softmax_;
  FlexDropoutHead<Config> dropout_;
  FlexKept<false, kWords> kept_;
  typename Tiles::ReadStages reads_;
  float of_lse_[2];
  int b_, h_, row_, group_;
};

}  // namespace fusegrad::device
