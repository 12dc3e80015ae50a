// Forward mode of flex attention for every GPU from sm_80 on: the output, lse and their tangents in one walk over the
// tiles of keys. A CTA has kRows queries of one head, kRows / kWarps a warp.
//
// For a row with scores s, weights p = exp(s - lse) and tangents ds of the scores: r = sum p ds, d lse = r,
// d out = sum p (ds v + dv) - r out. So the online softmax has three sums beside that of p: of p v, of p (ds v + dv),
// and of p ds, all relative to a score that the row has had.
//
// scores.cuh describes Config; this file adds:
//   Tangent                    the rendered tangent of the score_mod
//   kOutLow                    whether out_low, what rounding took from the output, is wanted
//   kQueryTangent, kKeyTangent, kValueTangent  which operands have a tangent
#pragma once

#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/tangents/arguments.cuh"
#include "cuda/device/low_part.cuh"

namespace fusegrad::device {

template <class Config>
class FlexTangents {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Tangent = typename Config::Tangent;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using OutTile = Tile<T, Config::kRows, Config::kValue>;
  using Entry = TileEntry<>;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksM = Config::kRows / Config::kWarps / 16;  // of 16 rows, of a warp
  static constexpr int kBlocksN = Config::kCols / 8;
  static constexpr int kBlocksE = Config::kValue / 8;
  static constexpr TangentsMemory kMemory{{.rows = Config::kRows,
                                           .cols = Config::kCols,
                                           .head = Config::kHead,
                                           .value = Config::kValue,
                                           .element_bytes = static_cast<int>(sizeof(T)),
                                           .query_tangent = Config::kQueryTangent,
                                           .key_tangent = Config::kKeyTangent,
                                           .value_tangent = Config::kValueTangent}};
  static_assert(kBlocksM * 16 * Config::kWarps == Config::kRows && kBlocksN * kBlocksM * 4 <= 64);

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexTangents(const FlexTangentsArguments& a, const typename ScoreMod::Captured& score,
                                          const typename MaskMod::Captured& mask,
                                          const typename Tangent::Captured& tangent, unsigned shared)
      : a_(a), score_(score), mask_(mask), tangent_(tangent), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    // The last queries come first: under a causal mask they have the most keys.
    const HeadTile work(a_.batches * a_.heads, row_tiles);
    const int row_tile = row_tiles - 1 - work.tile;
    b_ = work.head / a_.heads;
    h_ = work.head % a_.heads;
    row_ = row_tile * Config::kRows;
    dropout_.begin(a_.dropout, work.head);
    const TileWalk walk(a_.tiles, b_, h_, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    begin();
    if (walk.count() > 0) {
      load_tile<QueryTile, kThreads>(at(kMemory.query), a_.query, b_, h_, row_, a_.queries, a_.head_size);
      if constexpr (Config::kQueryTangent) {
        load_tile<QueryTile, kThreads>(at(kMemory.query_tangent), a_.query_tangent, b_, h_, row_, a_.queries,
                                       a_.head_size);
      }
      int tile = walk[0];
      load_keys(tile);
      for (int i = 0; i < walk.count(); ++i) {
        const bool more = i + 1 < walk.count();
        const int next = more ? walk[i + 1] : 0;
        step(tile, next, more);
        tile = next;
      }
    }
    finish(walk.count() < 0);
  }

 private:
  using Scores = float[kBlocksM][kBlocksN][4];
  using Outputs = float[kBlocksM][kBlocksE][4];

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * kBlocksM * 16; }
  __device__ __forceinline__ unsigned at(const Region& region) const { return shared_ + region.offset; }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[m][r] = -FUSEGRAD_INFINITY;
        sum_[m][r] = of_lse_[m][r] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[m][n][e] = of_out_[m][n][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void load_keys(int tile) const {
    const int col = Entry::column(tile) * Config::kCols, head = h_ / a_.group;
    load_tile<KeyTile, kThreads>(at(kMemory.key), a_.key, b_, head, col, a_.keys, a_.head_size);
    if constexpr (Config::kKeyTangent)
      load_tile<KeyTile, kThreads>(at(kMemory.key_tangent), a_.key_tangent, b_, head, col, a_.keys, a_.head_size);
    commit_copies();
  }
  __device__ __forceinline__ void load_values(int col) const {
    const int head = h_ / a_.group;
    load_tile<ValueTile, kThreads>(at(kMemory.value), a_.value, b_, head, col, a_.keys, a_.value_size);
    if constexpr (Config::kValueTangent)
      load_tile<ValueTile, kThreads>(at(kMemory.value_tangent), a_.value_tangent, b_, head, col, a_.keys,
                                     a_.value_size);
    commit_copies();
  }

  // Computes one tile, whose keys are being copied; leaves the copies of the next tile's keys under way.
  __device__ __forceinline__ void step(int tile, int next, bool more) {
    const int col = Entry::column(tile) * Config::kCols;
    wait_copies<0>();
    __syncthreads();
    load_values(col);
    float s[kBlocksM][kBlocksN][4] = {}, d[kBlocksM][kBlocksN][4] = {};
    multiply_scores(s, kMemory.query, kMemory.key);
    if constexpr (Config::kQueryTangent) multiply_scores(d, kMemory.query_tangent, kMemory.key);
    if constexpr (Config::kKeyTangent) multiply_scores(d, kMemory.query, kMemory.key_tangent);
    wait_copies<0>();
    __syncthreads();
    if (more) load_keys(next);
    apply_mods(s, d, Entry::kind(tile), col);
    softmax(s, d);
    if constexpr (Config::kDropout) drop(s, d, col);
    multiply_values(out_, s, kMemory.value);
    multiply_values(of_out_, d, kMemory.value);
    if constexpr (Config::kValueTangent) multiply_values(of_out_, s, kMemory.value_tangent);
  }
  __device__ __forceinline__ void multiply_scores(Scores& to, const Region& query, const Region& key) const {
    multiply_rows<T, Config::kSplit, Config::kHead>(to, at(query), QueryTile::kStride, first_row(), at(key),
                                                    KeyTile::kStride, 0, lane());
  }
  __device__ __forceinline__ void multiply_values(Outputs& to, const Scores& weights, const Region& value) const {
    multiply_accumulators<T, Config::kSplit>(to, weights, at(value), ValueTile::kStride, lane());
  }

  // The score of a pair that takes no part becomes -inf, and its tangent 0, whatever it was.
  __device__ __forceinline__ void apply_mods(Scores& s, Scores& d, int kind, int col) const {
    const bool masked = kind != kTileFull || col + Config::kCols > a_.keys || row_ + Config::kRows > a_.queries;
    const int row = row_ + first_row() + lane() / 4;
    col += lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const auto alive =
          pairs_that_take_part<Config, kBlocksN, false>(a_, mask_, kind, masked, b_, h_, row + m * 16, col);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool takes = (alive >> (n * 4 + e) & 1) != 0;
          const int q = row + m * 16 + e / 2 * 8, kv = col + n * 8 + e % 2;
          float x = s[m][n][e] * a_.scale, dx = d[m][n][e] * a_.scale;
          if constexpr (kHas<ScoreMod>) {
            dx = Tangent::apply(tangent_, x, dx, b_, h_, q, kv, takes);
            x = ScoreMod::apply(score_, x, b_, h_, q, kv, takes);
          }
          s[m][n][e] = takes ? x : -FUSEGRAD_INFINITY;
          d[m][n][e] = takes ? dx : 0.0f;
        }
      }
    }
  }

  // As FlexForward has it: exponentials follow a score that is larger by 2^kSlack. Float16 has no room for products of
  // larger weights with tangents.
  static constexpr float kSlack = kSame<T, Float16> ? 0.0f : 8.0f;

  // In place of scores their exponentials, in place of tangents the products with these.
  __device__ __forceinline__ void softmax(Scores& s, Scores& d) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      float rescale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float max = max_[m][r];
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n)
          max = score_mod::maximum(max, score_mod::maximum(s[m][n][2 * r], s[m][n][2 * r + 1]));
        max = row_max(max);
        // Negated, so that NaN and the first score (infinity) are followed.
        rescale[r] = 1.0f;
        if (!((max - max_[m][r]) * kLog2E <= kSlack)) {
          // Without a score yet all exponentials are 0 (-inf less -inf would be NaN).
          rescale[r] = max == -FUSEGRAD_INFINITY ? 0.0f : power_of_two((max_[m][r] - max) * kLog2E);
          max_[m][r] = max;
        }
      }
      if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            out_[m][n][e] *= rescale[e / 2];
            of_out_[m][n][e] *= rescale[e / 2];
          }
        }
      }
      float most[2], origin[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[r] = max_[m][r] == -FUSEGRAD_INFINITY ? 0.0f : max_[m][r];
        origin[r] = most[r] * kLog2E;
      }
      if constexpr (!kSame<T, float>) subtract_far(s[m], most, origin);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = 0.0f, of_lse = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            const float p =
                kSame<T, float> ? expf(s[m][n][e] - most[r]) : power_of_two(s[m][n][e] * kLog2E - origin[r]);
            s[m][n][e] = p;
            // A score that the score_mod made -inf may have any tangent.
            d[m][n][e] = p != 0.0f ? p * d[m][n][e] : 0.0f;
            sum += p;
            of_lse += d[m][n][e];
          }
        }
        sum_[m][r] = sum_[m][r] * rescale[r] + sum;
        of_lse_[m][r] = of_lse_[m][r] * rescale[r] + of_lse;
      }
    }
  }

  // Drops weights, which are in the rows' sums already.
  __device__ __forceinline__ void drop(Scores& s, Scores& d, int col) const {
    static_assert(!Config::kDropout || 64 % Config::kCols == 0);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const auto kept = dropout_.to_end(a_.dropout, row_ + first_row() + m * 16, col, lane());
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        kept.drop(n, s[m][n]);
        kept.drop(n, d[m][n]);
      }
      hold_order();
    }
  }

  // A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish(bool bad) {
    wait_copies<0>();
    __syncthreads();  // the outputs take the queries' place
    const float nan = __int_as_float(0x7fffffff);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_ + first_row() + m * 16 + r * 8 + lane() / 4;
        const bool none = max_[m][r] == -FUSEGRAD_INFINITY;
        const float sum = row_sum(sum_[m][r]), inverse = bad ? nan : none ? 0.0f : 1.0f / sum;
        const float of_lse = row_sum(of_lse_[m][r]) * inverse;
        const float factor = Config::kDropout ? inverse * a_.dropout.scale : inverse;
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            out_[m][n][e] *= factor;
            of_out_[m][n][e] = of_out_[m][n][e] * factor - of_lse * out_[m][n][e];
          }
        }
        if (lane() % 4 != 0 || row >= a_.queries) continue;
        const long long place = static_cast<long long>(b_ * a_.heads + h_) * a_.queries + row;
        const FlexLse lse = lse_of(max_[m][r], 1.0f, logf(sum));
        a_.lse[place] = bad ? nan : none ? -FUSEGRAD_INFINITY : lse.lse;
        if (a_.lse_low != nullptr) a_.lse_low[place] = none ? 0.0f : lse.low;
        a_.lse_tangent[place] = of_lse;
      }
    }
    write(a_.out, out_);
    if constexpr (Config::kOutLow) {
      constexpr float kOnes[2] = {1.0f, 1.0f};
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
        store_low_rows<T>(a_.out_low, b_, h_, row_ + first_row() + m * 16 + lane() / 4, a_.queries, a_.value_size,
                          out_[m], kOnes);
    }
    __syncwarp();
    write(a_.out_tangent, of_out_);
  }

  // By way of shared memory, each warp its own rows, so that lanes store 16 bytes.
  __device__ __forceinline__ void write(const FlexTensor& to, const Outputs& from) const {
    extern __shared__ __align__(16) char shared[];
    const int mine = first_row() * OutTile::kStride;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          char* row = shared + mine + (m * 16 + e / 2 * 8 + lane() / 4) * OutTile::kStride;
          store(reinterpret_cast<T*>(row) + n * 8 + lane() % 4 * 2 + e % 2, from[m][n][e]);
        }
      }
    }
    __syncwarp();
    store_tile<OutTile, kBlocksM * 16, kLanes>(to, b_, h_, row_ + first_row(), a_.queries, a_.value_size,
                                               shared_ + mine);
  }

  const FlexTangentsArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const typename Tangent::Captured& tangent_;
  const unsigned shared_;
  int b_, h_, row_;
  FlexDropoutHead<Config> dropout_;
  Outputs out_, of_out_;
  float max_[kBlocksM][2], sum_[kBlocksM][2], of_lse_[kBlocksM][2];
};

}  // namespace fusegrad::device
