// dQ by itself for every GPU from sm_80 on, where it must be the same in every run: a CTA owns kRows queries, kRows /
// kWarps per warp, and walks their tiles of keys in order. It also finds the largest contribution to each captured
// buffer, from which fixed point takes its unit. backward.cuh describes Config; lists have tiles of keys, and there are
// neither kShare nor kStages.
#pragma once

#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/merge.cuh"

namespace fusegrad::device {

template <class Config>
class FlexGradQuery {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Derivative = typename Config::Derivative;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using GradOutTile = Tile<T, Config::kRows, Config::kValue>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using Entry = TileEntry<>;
  static constexpr int kNone = -1;  // in place of an entry's word
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksM = Config::kRows / Config::kWarps / 16;  // of 16 queries, of a warp
  static constexpr int kBlocksN = Config::kCols / 8;
  static constexpr int kBlocksD = Config::kHead / 8;
  static constexpr GradQueryMemory kMemory{{.rows = Config::kRows,
                                            .cols = Config::kCols,
                                            .head = Config::kHead,
                                            .value = Config::kValue,
                                            .element_bytes = static_cast<int>(sizeof(T))}};
  static_assert(Config::kRows == 16 * kBlocksM * Config::kWarps);

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexGradQuery(const FlexBackwardArguments& a, const typename ScoreMod::Captured& score,
                                           const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        score_(score),
        mask_(mask),
        query_(shared),
        grad_out_(query_ + kMemory.query.piece),
        stage_(grad_out_ + kMemory.grad_out.piece) {}

  __device__ __forceinline__ void run() {
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    int id = static_cast<int>(blockIdx.x);
    if constexpr (Config::kKeySplits) {
      split_ = id % a_.splits;
      id /= a_.splits;
    }
    const HeadTile work(a_.batches * a_.heads, row_tiles, id);
    const int row_tile = row_tiles - 1 - work.tile;
    b_ = work.head / a_.heads;
    h_ = work.head % a_.heads;
    row_ = row_tile * Config::kRows;
    dropout_.begin(a_.dropout, work.head);
    largest_.begin();
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) begin(m);
    TileWalk walk(a_.tiles, b_, h_, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    if constexpr (Config::kKeySplits) walk.keep(split_, a_.splits);
    load_tile<QueryTile, kThreads>(query_, a_.query, b_, h_, row_, a_.queries, a_.head_size);
    load_tile<GradOutTile, kThreads>(grad_out_, a_.grad_out, b_, h_, row_, a_.queries, a_.value_size);
    int tile = walk.count() > 0 ? walk[0] : kNone;
    if (tile >= 0) load_stage(tile, 0);
    commit_copies();
    for (int i = 0; i < walk.count(); ++i) {
      wait_copies<0>();
      __syncthreads();
      const int next = i + 1 < walk.count() ? walk[i + 1] : kNone;
      if (next >= 0) load_stage(next, (i + 1) % 2);
      commit_copies();
      step(tile, stage_ + i % 2 * kMemory.stages.piece);
      tile = next;
    }
    wait_copies<0>();
    __syncthreads();  // the queries are there, if no tile was waited for either
    finish(walk.count() < 0);
  }

 private:
  __device__ __forceinline__ void begin(int m) {
#pragma unroll
    for (int n = 0; n < kBlocksD; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_[m][n][e] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = row_ + first_row() + m * 16 + r * 8 + lane() / 4;
      const bool there = q < a_.queries;
      const long long head = b_ * a_.heads + h_, at = head * a_.queries + q;
      rows_[m][r] = {there ? a_.rows[head * a_.row_stride + q] : FlexRow{0.0f, 0.0f}, 0.0f, 0.0f, 0.0f};
      if constexpr (Config::kMaxGradient) {
        rows_[m][r].max = there ? a_.max_scores[at] : 0.0f;
        rows_[m][r].grad_max = there ? a_.grad_max[at] : 0.0f;
      }
    }
  }

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * 16 * kBlocksM; }

  __device__ __forceinline__ void load_stage(int tile, int stage) const {
    const unsigned key = stage_ + stage * kMemory.stages.piece;
    const int b = a_.key_batches == 1 ? 0 : b_, h = h_ / a_.group, col = (tile >> Entry::kKindBits) * Config::kCols;
    load_tile<KeyTile, kThreads>(key, a_.key, b, h, col, a_.keys, a_.head_size);
    load_tile<ValueTile, kThreads>(key + KeyTile::kBytes, a_.value, b, h, col, a_.keys, a_.value_size);
  }

  __device__ __forceinline__ void step(int tile, unsigned key) {
    const int kind = tile & 3, col = (tile >> Entry::kKindBits) * Config::kCols;
    float s[kBlocksM][kBlocksN][4] = {}, d[kBlocksM][kBlocksN][4] = {};
    multiply_rows<T, Config::kSplit, Config::kHead>(s, query_, QueryTile::kStride, first_row(), key, KeyTile::kStride,
                                                    0, lane());
    multiply_rows<T, Config::kSplit, Config::kValue>(d, grad_out_, GradOutTile::kStride, first_row(),
                                                     key + KeyTile::kBytes, ValueTile::kStride, 0, lane());
    const bool masked = kind != kTileFull || col + Config::kCols > a_.keys || row_ + Config::kRows > a_.queries;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const bool far = __any_sync(~0u, is_far(rows_[m][0].row) || is_far(rows_[m][1].row));
      const int kv = col + lane() % 4 * 2;
      far ? pairs<true>(m, kind, masked, kv, s[m], d[m]) : pairs<false>(m, kind, masked, kv, s[m], d[m]);
    }
    if constexpr (Config::kGradQuery) {
      multiply_accumulators<T, Config::kSplit>(sum_, d, key, KeyTile::kStride, lane());
    }
  }

  // Turns s into P, and d into dS. kFar: one of the rows is.
  template <bool kFar>
  __device__ __forceinline__ void pairs(int m, int kind, bool masked, int kv, float (&s)[kBlocksN][4],
                                        float (&d)[kBlocksN][4]) {
    const int q = row_ + first_row() + m * 16 + lane() / 4;
    const auto alive = pairs_that_take_part<Config, kBlocksN, false>(a_, mask_, kind, masked, b_, h_, q, kv);
    static_assert(!Config::kDropout || 64 % Config::kCols == 0);
    FlexKept<false> kept;
    if constexpr (Config::kDropout) kept = dropout_.to_end(a_.dropout, q - lane() / 4, kv - lane() % 4 * 2, lane());
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      if constexpr (Config::kDropout) {
        hold_order();
        kept.drop(n, d[n]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float value[Derivative::kContributions + 1];
        const bool takes = (alive >> (n * 4 + e) & 1) != 0;
        const int at_q = q + e / 2 * 8, at_kv = kv + n * 8 + e % 2;
        const float score = s[n][e] * a_.scale;
        FlexQuery of = rows_[m][e / 2];
        if constexpr (kFar) of.origin = take_origin<Config>(a_, of.row, b_, h_, at_q);
        d[n][e] = FlexPairGradient<Config>::template apply<kFar>(score_, a_.scale, s[n][e], d[n][e], of, b_, h_, at_q,
                                                                 at_kv, takes, s[n][e], value);
        largest_.add(e, value, score, at_q, at_kv);
      }
      largest_.end_pairs(score_, b_, h_);
    }
  }

  // dQ goes through the warp's queries in shared memory, which nobody else reads. Stored from registers in any strides,
  // it would cost the loop up to 40 registers more.
  __device__ __forceinline__ void store_sum(float factor) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksD; ++n) {
        unsigned words[kOperandWords<T>];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum_[m][n][e] *= factor;
        put_operand<T>(words, sum_[m][n]);
        store_operand<T>(query_, QueryTile::kStride, first_row() + m * 16, n, words, lane());
      }
    }
    __syncwarp();
    store_tile<QueryTile, 16 * kBlocksM, kLanes>(a_.grad_query, b_, h_, row_ + first_row(), a_.queries, a_.head_size,
                                                 query_ + first_row() * QueryTile::kStride);
  }

  __device__ __forceinline__ void store_split(float factor) {
    const FlexTensor& to = a_.grad_query;
    float* head = static_cast<float*>(to.data) + (split_ * a_.batches + b_) * to.batch_stride + h_ * to.head_stride;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int q = row_ + first_row() + m * 16 + r * 8 + lane() / 4;
        store_floats(q < a_.queries, head + q * to.row_stride, static_cast<int>(to.row_stride), sum_[m], r, factor,
                     lane());
      }
    }
  }

  __device__ __forceinline__ void finish(bool bad) {
    const float factor = bad ? __int_as_float(0x7fffffff) : a_.scale;
    if constexpr (Config::kGradQuery && Config::kKeySplits) {
      store_split(factor);
    } else if constexpr (Config::kGradQuery) {
      store_sum(factor);
    }
    largest_.finish(a_.largest);
  }

  const FlexBackwardArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, grad_out_, stage_;
  int b_, h_, row_, split_;
  FlexDropoutHead<Config> dropout_;
  FlexQuery rows_[kBlocksM][2];
  float sum_[kBlocksM][kBlocksD][4];
  FlexLargest<Config> largest_;
};

}  // namespace fusegrad::device
