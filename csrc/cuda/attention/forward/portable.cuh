// Flex attention forward for every GPU from sm_80 on: a CTA has kRows queries of one head, kRows / kWarps per warp, and
// walks their tiles of keys in order with an online softmax.
//
// scores.cuh describes Config; this file adds:
//   kUnscaled                  the scale is positive and left to the exponent: there is no score_mod
//   kMaxScores                 whether max_scores and max_ties are wanted
//   kOutLow                    whether out_low, what rounding took from the output, is wanted
//   kMaskInline                whether the mask_mod is a few instructions without reads, computed pair by pair
//   kKeeps                     whether a CTA has all queries and keys of a head, of one batch after the other, and
//                              keeps what the score_mod reads of their pairs where that is the same in all of them
//   kBoxes                     whether what the score_mod reads of pairs comes by way of shared memory, where it can
//   kColumns                   of each pair_read the elements of the column of its table in shared memory, or 0
//   kPlaces                    of each pair_read the bytes of an element in the order of threads (PairPlaces), or 0
#pragma once

#include "cuda/attention/captured/pair_boxes.cuh"
#include "cuda/attention/captured/pair_columns.cuh"
#include "cuda/attention/captured/pair_places.cuh"
#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/merge.cuh"
#include "cuda/device/low_part.cuh"

namespace fusegrad::device {

template <class Config>
class FlexForward {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using OutTile = Tile<T, Config::kRows, Config::kValue>;
  using Entry = TileEntry<>;
  static constexpr int kNone = -1;  // in place of an entry's word
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksM = Config::kRows / Config::kWarps / 16;  // of 16 rows, of a warp
  static constexpr int kBlocksN = Config::kCols / 8;
  static constexpr int kBlocksE = Config::kValue / 8;
  // A warp with 16 rows has registers to spare, and compilers load ahead by themselves.
  static constexpr bool kAhead = sizeof(T) == 2 && kBlocksM > 1;
  // Measured: steps of products whose rows have registers of their own, and stores of a thread at a time.
  static constexpr int kBuffers = Config::kValue > 96 ? 2 : 1, kStores = Config::kValue > 96 ? 4 : 1;
  using Kept = KeptReads<ScoreMod, kBlocksM * kBlocksN, kThreads, Config::kKeeps>;
  using Boxes = PairBoxes<ScoreMod, Config::kRows, Config::kCols, Kept, Config::kBoxes>;
  using Columns = PairColumns<Config>;
  using Places = PairPlaces<Config>;
  static constexpr ForwardMemory kMemory{{.rows = Config::kRows,
                                          .cols = Config::kCols,
                                          .head = Config::kHead,
                                          .value = Config::kValue,
                                          .element_bytes = static_cast<int>(sizeof(T)),
                                          .box_bytes = Boxes::kBytes,
                                          .kept_bytes = Kept::kBytes,
                                          .column_bytes = Columns::kBytes}};
  static_assert(kBlocksM * 16 * Config::kWarps == Config::kRows && kBlocksN * kBlocksM * 4 <= 128);
  static_assert(!kHasPlaces<Config> ||
                (Config::kRows == kPlaceTile && Config::kCols == kPlaceTile && kThreads == kPlaceThreads));

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexForward(const FlexForwardArguments& a, const typename ScoreMod::Captured& score,
                                         const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        score_(score),
        mask_(mask),
        query_(shared),
        key_(shared + kMemory.key.offset),
        value_(shared + kMemory.value.offset) {}

  __device__ __forceinline__ void run() {
    if constexpr (Config::kKeeps) return run_batches();
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    // The last queries come first: under a causal mask they have the most keys.
    int id = static_cast<int>(blockIdx.x);
    if constexpr (Config::kKeySplits) {
      split_ = id % a_.partials.splits;
      id /= a_.partials.splits;
    }
    const HeadTile work(a_.batches * a_.heads, row_tiles, id);
    const int row_tile = row_tiles - 1 - work.tile;
    b_ = work.head / a_.heads;
    h_ = work.head % a_.heads;
    row_ = row_tile * Config::kRows;
    dropout_.begin(a_.dropout, work.head);
    // Not after the list of tiles, for which the keys wait.
    load_tile<QueryTile, kThreads>(query_, a_.query, b_, h_, row_, a_.queries, a_.head_size);
    TileWalk walk(a_.tiles, b_, h_, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    if constexpr (Config::kKeySplits) walk.keep(split_, a_.partials.splits);
    begin();
    load_columns();
    if (walk.count() > 0) {
      int tile = walk[0];
      load_tile<KeyTile, kThreads>(key_, a_.key, b_, h_ / a_.group, Entry::column(tile) * Config::kCols, a_.keys,
                                   a_.head_size);
      commit_copies();
      places_.load(score_, b_, h_);
      for (int i = 0; i < walk.count(); ++i) {
        const int next = i + 1 < walk.count() ? walk[i + 1] : kNone;
        step(tile, next);
        tile = next;
      }
    } else {
      // Before the output takes their place.
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
    finish(walk.count() < 0);
  }

 private:
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * kBlocksM * 16; }
  __device__ __forceinline__ unsigned kept() const { return query_ + kMemory.kept.offset; }
  __device__ __forceinline__ unsigned columns() const { return query_ + kMemory.columns.offset; }
  __device__ __forceinline__ void load_columns() const {
    Columns::template load<kThreads>(columns(), score_, h_, static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ unsigned boxes() const { return query_ + kMemory.boxes.offset; }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[m][r] = -FUSEGRAD_INFINITY;
        sum_[m][r] = 0.0f;
        ties_[m][r] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[m][n][e] = 0.0f;
      }
    }
  }

  // The CTAs of a head have every n-th batch each, of n.
  __device__ __forceinline__ void run_batches() {
    const int parts = static_cast<int>(gridDim.x) / a_.heads;
    h_ = static_cast<int>(blockIdx.x) / parts;
    row_ = 0;
    const auto place = [&](int block, int e) {
      return PairPlace{first_row() + block / kBlocksN * 16 + lane() / 4 + e / 2 * 8,
                       block % kBlocksN * 8 + lane() % 4 * 2 + e % 2};
    };
    Kept::load(kept(), score_, 0, h_, place, [&](int block, int e) {
      const PairPlace at = place(block, e);
      return at.q < a_.queries && at.kv < a_.keys;
    });
    load_columns();
#pragma unroll 1
    for (b_ = static_cast<int>(blockIdx.x) % parts; b_ < a_.batches; b_ += parts) {
      dropout_.begin(a_.dropout, b_ * a_.heads + h_);
      begin();
      load_tile<QueryTile, kThreads>(query_, a_.query, b_, h_, row_, a_.queries, a_.head_size);
      load_tile<KeyTile, kThreads>(key_, a_.key, b_, h_ / a_.group, 0, a_.keys, a_.head_size);
      commit_copies();
      places_.load(score_, b_, h_);
      step(0, kNone);
      finish(false);
      __syncthreads();
    }
  }

  // Computes one tile, whose keys are being copied; leaves the copies of the next tile's keys under way.
  __device__ __forceinline__ void step(int tile, int next) {
    const int col = Entry::column(tile) * Config::kCols;
    wait_copies<0>();
    __syncthreads();
    load_tile<ValueTile, kThreads>(value_, a_.value, b_, h_ / a_.group, col, a_.keys, a_.value_size);
    Boxes::template load<kThreads>(boxes(), score_, b_, h_, row_, col, a_.queries, a_.keys,
                                   static_cast<int>(threadIdx.x));
    commit_copies();
    float s[kBlocksM][kBlocksN][4] = {};
    multiply_queries(s);
    wait_copies<0>();
    __syncthreads();
    if (next >= 0) {
      load_tile<KeyTile, kThreads>(key_, a_.key, b_, h_ / a_.group, Entry::column(next) * Config::kCols, a_.keys,
                                   a_.head_size);
      commit_copies();
    }
    apply_mods(s, Entry::kind(tile), col);
    softmax(s);
    if constexpr (Config::kDropout) drop(s, col);
    multiply_values(s);
  }

  __device__ __forceinline__ void multiply_queries(float (&s)[kBlocksM][kBlocksN][4]) const {
    if constexpr (kAhead) {
      multiply_ahead<T, Config::kHead / 16, kBuffers>(
          s,
          [&](unsigned (&words)[4], int k, int m) {
            load_a(words, query_, QueryTile::kStride, first_row() + m * 16, k, lane());
          },
          [&](unsigned (&words)[4], int k, int n) { load_b(words, key_, KeyTile::kStride, n * 16, k, lane()); });
    } else {
      multiply_rows<T, Config::kSplit, Config::kHead>(s, query_, QueryTile::kStride, first_row(), key_,
                                                      KeyTile::kStride, 0, lane());
    }
  }

  __device__ __forceinline__ void multiply_values(const float (&s)[kBlocksM][kBlocksN][4]) {
    if constexpr (kAhead) {
      multiply_ahead<T, Config::kCols / 16, kBuffers>(
          out_,
          [&](unsigned (&words)[4], int k, int m) {
            put_operand<T>(words, s[m][2 * k]);
            put_operand<T>(words + 2, s[m][2 * k + 1]);
          },
          [&](unsigned (&words)[4], int k, int n) {
            Mma<T>::load_b_transposed(words, value_, ValueTile::kStride, k * 16, n * 16, lane());
          });
    } else {
      multiply_accumulators<T, Config::kSplit>(out_, s, value_, ValueTile::kStride, lane());
    }
  }

  __device__ __forceinline__ void apply_mods(float (&s)[kBlocksM][kBlocksN][4], int kind, int col) const {
    // Rows beyond the queries are zeros and not written: only a score_mod would read for them.
    const bool rows_masked = !Config::kUnscaled && row_ + Config::kRows > a_.queries;
    const bool masked = kind != kTileFull || col + Config::kCols > a_.keys || rows_masked;
    if (Config::kUnscaled && !masked) return;
    const int row = row_ + first_row() + lane() / 4;
    col += lane() % 4 * 2;
    if constexpr (Config::kUnscaled && Config::kMaskInline && !Config::kMixed) {
      mask_alone(s, kind, row, col);
    } else {
      apply_to_each(s, kind, masked, row, col);
    }
  }

  // (row, col): the thread's first pair, here and below.
  __device__ __forceinline__ void apply_to_each(float (&s)[kBlocksM][kBlocksN][4], int kind, bool masked, int row,
                                                int col) const {
    // Pairs of a step of the loop over a mask_mod.
    constexpr int kTogether = !Config::kMaskInline ? 2 : kBlocksN * 4 < 16 ? kBlocksN * 4 : 16;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const Tested alive(
          masked ? masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, kind, b_, h_, row + m * 16, col)
                 : ~Bits<kBlocksN * 4>(0));
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        auto reads = this->reads(m, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool takes = alive[n * 4 + e];
          float x = s[m][n][e];
          if constexpr (!Config::kUnscaled) x *= a_.scale;
          if constexpr (kHas<ScoreMod>) {
            reads.of(e);
            x = ScoreMod::apply(score_, x, b_, h_, row + m * 16 + e / 2 * 8, col + n * 8 + e % 2, takes, reads);
          }
          s[m][n][e] = takes ? x : -FUSEGRAD_INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void mask_alone(float (&s)[kBlocksM][kBlocksN][4], int kind, int row, int col) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int q = row + m * 16 + e / 2 * 8, kv = col + n * 8 + e % 2;
          if (!takes_part<Config>(a_.tiles, mask_, kind, b_, h_, q, kv, kv < a_.keys)) s[m][n][e] = -FUSEGRAD_INFINITY;
        }
      }
    }
  }

  // The score_mod's of four pairs.
  __device__ __forceinline__ PairReads<Kept, Boxes, Columns, Places> reads(int m, int n) const {
    return {Kept::reads(kept(), m * kBlocksN + n),
            Boxes::template reads<false>(boxes(), first_row() + m * 16, n * 8, lane()), columns(),
            places_.reads(m * kBlocksN + n)};
  }

  __device__ __forceinline__ float unit() const { return Config::kUnscaled ? a_.scale : 1.0f; }

  // Exponentials are relative to `max_`, a score that the row has had: not always the largest, since to follow each new
  // one means to rescale the output. It follows where a score is larger by 2^kSlack in the exponential, so that neither
  // sums nor 16-bit probabilities overflow. Rescaling a small output costs less than the branch around it.
  static constexpr bool kLazy = Config::kValue > 64;
  static constexpr float kSlack = kLazy && !Config::kMaxScores ? 8.0f : 0.0f;

  // All rows of a thread side by side: with few warps a multiprocessor waits for each shuffle and each branch.
  __device__ __forceinline__ void softmax(float (&s)[kBlocksM][kBlocksN][4]) {
    const float factor = unit() * kLog2E;
    float rescale[kBlocksM][2], most[kBlocksM][2], origin[kBlocksM][2];
    find_maxima(s, most);
    bool rescales = false;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float max = most[m][r];
        if constexpr (Config::kMaxScores) {
          if (max != max_[m][r]) ties_[m][r] = 0.0f;
#pragma unroll
          for (int n = 0; n < kBlocksN; ++n) ties_[m][r] += (s[m][n][2 * r] == max) + (s[m][n][2 * r + 1] == max);
        }
        // Negated, so that NaN and the first score (infinity) are followed.
        rescale[m][r] = 1.0f;
        if (!((max - max_[m][r]) * factor <= kSlack)) {
          // Without a score yet all exponentials are 0 (-inf less -inf would be NaN).
          rescale[m][r] = max == -FUSEGRAD_INFINITY ? 0.0f : power_of_two((max_[m][r] - max) * factor);
          max_[m][r] = max;
        }
        rescales |= rescale[m][r] != 1.0f;
        most[m][r] = max_[m][r] == -FUSEGRAD_INFINITY ? 0.0f : max_[m][r];
        origin[m][r] = most[m][r] * factor;
      }
    }
    // Few tiles but the first have such a score in any of a warp's rows.
    if (!kLazy || __any_sync(~0u, rescales)) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out_[m][n][e] *= rescale[m][e / 2];
        }
      }
    }
    if constexpr (!kSame<T, float>) subtract_far(s, most, origin);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum_[m][r] *= rescale[m][r];
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kSame<T, float>) {
            s[m][n][e] = expf((s[m][n][e] - most[m][e / 2]) * unit());
          } else {
            s[m][n][e] = power_of_two(s[m][n][e] * factor - origin[m][e / 2]);
          }
          sum_[m][e / 2] += s[m][n][e];
        }
      }
    }
  }

  // The maxima of the thread's rows, of the warp's four columns of threads and of the tiles before.
  __device__ __forceinline__ void find_maxima(const float (&s)[kBlocksM][kBlocksN][4], float (&most)[kBlocksM][2]) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[m][r] = max_[m][r];
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n)
          most[m][r] = score_mod::maximum(most[m][r], score_mod::maximum(s[m][n][2 * r], s[m][n][2 * r + 1]));
      }
    }
#pragma unroll
    for (int step = 1; step <= 2; ++step) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) most[m][r] = score_mod::maximum(most[m][r], __shfl_xor_sync(~0u, most[m][r], step));
      }
    }
  }

  // Drops probabilities, which are in the sums already.
  __device__ __forceinline__ void drop(float (&s)[kBlocksM][kBlocksN][4], int col) const {
    static_assert(!Config::kDropout || 64 % Config::kCols == 0);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const auto kept = dropout_.to_end(a_.dropout, row_ + first_row() + m * 16, col, lane());
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) kept.drop(n, s[m][n]);
      hold_order();
    }
  }

  // What the split gives. A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish_split(bool bad) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_ + first_row() + m * 16 + r * 8 + lane() / 4;
        const float sum = row_sum(sum_[m][r]), ties = Config::kMaxScores ? row_sum(ties_[m][r]) : 0.0f;
        store_partial(row < a_.queries, a_.partials, static_cast<long long>(b_ * a_.heads + h_) * a_.queries + row,
                      split_, {bad ? __int_as_float(0x7fffffff) : max_[m][r], sum, ties, 0.0f}, out_[m], r, lane());
      }
    }
  }

  __device__ __forceinline__ void finish(bool bad) {
    wait_copies<0>();
    if constexpr (Config::kKeySplits) {
      finish_split(bad);
    } else {
      finish_whole(bad);
    }
  }
  __device__ __forceinline__ void finish_whole(bool bad) {
    // The output takes the queries' place, of which a warp has its own rows where both are as wide.
    if constexpr (QueryTile::kStride == OutTile::kStride) {
      __syncwarp();
    } else {
      __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_ + first_row() + m * 16 + r * 8 + lane() / 4;
        const bool none = max_[m][r] == -FUSEGRAD_INFINITY;
        const float sum = row_sum(sum_[m][r]);
        const float ties = Config::kMaxScores ? row_sum(ties_[m][r]) : 0.0f;
        sum_[m][r] = bad    ? __int_as_float(0x7fffffff)
                     : none ? 0.0f
                            : (Config::kDropout ? a_.dropout.scale : 1.0f) / sum;
        if (lane() % 4 != 0 || row >= a_.queries) continue;
        const long long at = static_cast<long long>(b_ * a_.heads + h_) * a_.queries + row;
        const float max = max_[m][r] * unit();
        const FlexLse lse = lse_of(max_[m][r], unit(), logf(sum));
        a_.lse[at] = bad ? __int_as_float(0x7fffffff) : none ? -FUSEGRAD_INFINITY : lse.lse;
        if (a_.lse_low != nullptr) a_.lse_low[at] = none ? 0.0f : lse.low;
        if constexpr (Config::kMaxScores) {
          a_.max_scores[at] = none ? -FUSEGRAD_INFINITY : max;
          a_.max_ties[at] = ties;
        }
      }
    }
    write(a_.out);
    if constexpr (Config::kOutLow) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
        store_low_rows<T>(a_.out_low, b_, h_, row_ + first_row() + m * 16 + lane() / 4, a_.queries, a_.value_size,
                          out_[m], sum_[m]);
    }
  }

  // Writes by way of shared memory, each warp its own rows, so that lanes store 16 bytes.
  __device__ __forceinline__ void write(const FlexTensor& to) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = out_[m][n][e] * sum_[m][e / 2];
        unsigned words[kOperandWords<T>];
        put_operand<T>(words, x);
        store_operand<T>(query_, OutTile::kStride, first_row() + m * 16, n, words, lane());
      }
    }
    __syncwarp();
    store_tile<OutTile, kBlocksM * 16, kLanes, kStores>(to, b_, h_, row_ + first_row(), a_.queries, a_.value_size,
                                                        query_ + first_row() * OutTile::kStride);
  }

  const FlexForwardArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, key_, value_;
  int b_, h_, row_, split_;
  FlexDropoutHead<Config> dropout_;
  Places places_;
  float out_[kBlocksM][kBlocksE][4], max_[kBlocksM][2], sum_[kBlocksM][2], ties_[kBlocksM][2];
};

}  // namespace fusegrad::device
