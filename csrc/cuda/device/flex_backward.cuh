// The backward of flex attention for every GPU from sm_80 on: a CTA owns kCols keys of a key head and goes over the
// tiles of queries of all query heads that share it. Five products a tile; scores and their gradients are transposed
// (keys are rows), so that from registers they are operands of the gradients of values and keys; through shared memory
// of that of the queries, which is added up in float32 in memory. See flex_scores.cuh and flex_buffers.cuh for Config;
// here also:
//   kShare                     warps that share keys, each with its part of the queries for the scores, and of the head
//                              sizes for the gradients of keys and values: 1, 2 or 4. Sharing halves what a warp keeps
//                              in registers, so that it has more keys, and reads shared memory less; but then
//                              probabilities go through shared memory too
//   kStages                    tiles of queries in shared memory
//   kGradQuery, kGradKey, kGradValue   which of them are wanted
//   kGradScores                whether anything but the values' gradient is
//   kMaxGradient               whether max_scores has a gradient
#pragma once

#include "cuda/device/flex_buffers.cuh"
#include "cuda/device/flex_gradient.cuh"

namespace fusegrad::device {

template <class Config>
class FlexBackward {
  using T = typename Config::Element;
  using Product = Mma<T, Config::kSplit>;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Sums = FlexBufferSums<Config>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using GradOutTile = Tile<T, Config::kRows, Config::kValue>;
  using ScoreTile = Tile<T, Config::kCols, Config::kRows>;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kPart = Config::kRows / Config::kShare;                           // queries of a warp's scores
  static constexpr int kBlocksM = Config::kCols * Config::kShare / Config::kWarps / 16;  // of 16 keys, of a warp
  static constexpr int kBlocksN = kPart / 8;
  static constexpr int kOperands = kBlocksN * kOperandWords<T>;
  // Blocks of 16 columns of a head, and how many of them a warp has.
  static constexpr int kBlocksD = Config::kHead / 16, kMineD = (kBlocksD + Config::kShare - 1) / Config::kShare;
  static constexpr int kBlocksE = Config::kValue / 16, kMineE = (kBlocksE + Config::kShare - 1) / Config::kShare;
  // For the queries' gradient: warps are groups of queries by parts of the head.
  static constexpr int kBlocksQ = Config::kRows % 32 == 0 ? 2 : 1;  // of 16 queries, of a warp
  static constexpr int kGroupsQ = Config::kRows / 16 / kBlocksQ;
  static constexpr int kPartsQ = Config::kWarps / kGroupsQ, kMineQ = (kBlocksD + kPartsQ - 1) / kPartsQ;
  static_assert(Config::kCols == 16 * kBlocksM * Config::kWarps / Config::kShare && kPart % 16 == 0);
  static_assert(Config::kWarps % kGroupsQ == 0);

  static constexpr int kRowBytes = Config::kRows * static_cast<int>(sizeof(FlexRow));
  static constexpr int kStageBytes = QueryTile::kBytes + GradOutTile::kBytes + kRowBytes;
  static constexpr int kScoreTiles = Config::kShare > 1 ? 2 : 1;

 public:
  static constexpr int kSharedBytes = KeyTile::kBytes + ValueTile::kBytes + Config::kStages * kStageBytes +
                                      kScoreTiles * ScoreTile::kBytes + Sums::kSharedBytes;

  __device__ __forceinline__ FlexBackward(const FlexBackwardArguments& a, const FlexSums* sums,
                                          const typename ScoreMod::Captured& score,
                                          const typename MaskMod::Captured& mask, char* shared)
      : a_(a),
        score_(score),
        mask_(mask),
        shared_(shared),
        key_(shared_address(shared)),
        value_(key_ + KeyTile::kBytes),
        stage_(value_ + ValueTile::kBytes),
        gradient_(stage_ + Config::kStages * kStageBytes),
        probability_(gradient_ + ScoreTile::kBytes),
        sums_(a, sums, score, shared + (kSharedBytes - Sums::kSharedBytes)) {}

  __device__ __forceinline__ void run() {
    const int col_tiles = (a_.keys + Config::kCols - 1) / Config::kCols;
    const int key_heads = a_.heads / a_.group;
    col_tile_ = static_cast<int>(blockIdx.x % col_tiles);
    const int head = static_cast<int>(blockIdx.x / col_tiles);
    key_batch_ = head / key_heads;
    key_head_ = head % key_heads;
    col_ = col_tile_ * Config::kCols;
    row_tiles_ = (a_.queries + Config::kRows - 1) / Config::kRows;
    load_tile<KeyTile, kThreads>(key_, a_.key, key_batch_, key_head_, col_, a_.keys, a_.head_size);
    load_tile<ValueTile, kThreads>(value_, a_.value, key_batch_, key_head_, col_, a_.keys, a_.value_size);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      zero(grad_key_[m]);
      zero(grad_value_[m]);
    }
    sums_.begin();

    Place place = first();
    if (place.b < last_batch_) load_stage(place, 0);
    commit_copies();
    int b = -1, h = -1;
    for (int i = 0; place.b < last_batch_; ++i) {
      const Place next = after(place);
      const int stage = i % Config::kStages;
      wait_copies<0>();
      __syncthreads();
      if (Config::kStages == 2 && next.b < last_batch_) load_stage(next, 1 - stage);
      commit_copies();
      if (b != place.b || h != place.h) {
        if (h >= 0) sums_.end_head(b, h, first_key());
        sums_.begin_head();
        b = place.b;
        h = place.h;
      }
      step(place, stage);
      if (Config::kStages == 1) {
        __syncthreads();
        if (next.b < last_batch_) load_stage(next, 0);
        commit_copies();
      }
      place = next;
    }
    if (h >= 0) sums_.end_head(b, h, first_key());
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      if constexpr (Config::kGradKey) store<kMineD, kBlocksD>(grad_key_[m], m, a_.grad_key, a_.head_size, a_.scale);
      if constexpr (Config::kGradValue) store<kMineE, kBlocksE>(grad_value_[m], m, a_.grad_value, a_.value_size, 1.0f);
    }
  }

 private:
  /// A tile of queries of one of the query heads that share the keys.
  struct Place {
    int b, h, i, tile;  // i: in the head's list; tile: 4 * row of tiles + kind
  };
  __device__ __forceinline__ Place first() {
    first_head_ = key_head_ * a_.group;
    last_batch_ = a_.key_batches == 1 ? a_.batches : key_batch_ + 1;
    return settle({key_batch_, first_head_, 0, 0});
  }
  __device__ __forceinline__ Place after(const Place& p) const { return settle({p.b, p.h, p.i + 1, 0}); }
  __device__ __forceinline__ Place settle(Place p) const {
    while (p.b < last_batch_) {
      const TileWalk tiles(a_.tiles, p.b, p.h, col_tile_, row_tiles_, (Config*)nullptr);
      if (p.i < tiles.count()) {
        p.tile = tiles[p.i];
        break;
      }
      p.i = 0;
      if (++p.h == first_head_ + a_.group) {
        p.h = first_head_;
        ++p.b;
      }
    }
    return p;
  }

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ int key_group() const {
    return warp() / Config::kShare * 16 * kBlocksM;
  }  // first key of the warp
  __device__ __forceinline__ int part() const { return warp() % Config::kShare; }
  __device__ __forceinline__ int first_key() const { return col_ + key_group() + lane() / 4; }

  __device__ __forceinline__ void load_stage(const Place& p, int stage) const {
    const unsigned to = stage_ + stage * kStageBytes;
    const int b = p.b, h = p.h, row = (p.tile >> 2) * Config::kRows;
    load_tile<QueryTile, kThreads>(to, a_.query, b, h, row, a_.queries, a_.head_size);
    load_tile<GradOutTile, kThreads>(to + QueryTile::kBytes, a_.grad_out, b, h, row, a_.queries, a_.value_size);
    const FlexRow* rows = a_.rows + static_cast<long long>(b * a_.heads + h) * a_.row_stride + row;
    for (int i = static_cast<int>(threadIdx.x); i < Config::kRows; i += kThreads) {
      const bool there = row + i < a_.queries;
      copy_async_pair(to + QueryTile::kBytes + GradOutTile::kBytes + i * sizeof(FlexRow), rows + (there ? i : 0),
                      there);
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void zero(float (&x)[kCount][2][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e / 4][e % 4] = 0.0f;
    }
  }

  __device__ __forceinline__ void step(const Place& place, int stage) {
    const unsigned query = stage_ + stage * kStageBytes, grad_out = query + QueryTile::kBytes;
    unsigned p[kBlocksM][kOperands], ds[kBlocksM][kOperands];
    scores(query, grad_out, place, p, ds);
    if constexpr (Config::kShare == 1) {
      if constexpr (Config::kGradValue) {
        accumulate<kMineE, kBlocksE>(grad_value_, p, probability_, grad_out, GradOutTile::kStride);
      }
    } else {
      keep(probability_, p);
    }
    if constexpr (Config::kGradScores) keep(gradient_, ds);
    __syncthreads();
    if constexpr (Config::kShare > 1 && Config::kGradValue) {
      accumulate<kMineE, kBlocksE>(grad_value_, p, probability_, grad_out, GradOutTile::kStride);
    }
    if constexpr (Config::kGradKey) accumulate<kMineD, kBlocksD>(grad_key_, ds, gradient_, query, QueryTile::kStride);
    if constexpr (Config::kGradQuery) add_grad_query(place.b, place.h, (place.tile >> 2) * Config::kRows);
    sums_.flush(place.b, place.h, (place.tile >> 2) * Config::kRows, col_);
  }

  // P and dS of the warp's keys and its part of the queries, as operands.
  __device__ __forceinline__ void scores(unsigned query, unsigned grad_out, const Place& place,
                                         unsigned (&p)[kBlocksM][kOperands], unsigned (&ds)[kBlocksM][kOperands]) {
    float s[kBlocksM][kBlocksN][4] = {}, d[kBlocksM][kBlocksN][4] = {};
    // Scores to the bit what the forward has: the gradient of max_scores asks for equality.
    multiply_rows<T, Config::kSplit, Config::kHead, true>(s, key_, KeyTile::kStride, key_group(), query,
                                                          QueryTile::kStride, part() * kPart, lane());
    if constexpr (Config::kGradScores) {
      multiply_rows<T, Config::kSplit, Config::kValue, true>(d, value_, ValueTile::kStride, key_group(), grad_out,
                                                             GradOutTile::kStride, part() * kPart, lane());
    }
    const int row = (place.tile >> 2) * Config::kRows;
    const bool masked =
        (place.tile & 3) != kTileFull || row + Config::kRows > a_.queries || col_ + Config::kCols > a_.keys;
    const auto* rows = reinterpret_cast<const FlexRow*>(shared_ + (grad_out + GradOutTile::kBytes - key_) +
                                                        (part() * kPart + lane() % 4 * 2) * sizeof(FlexRow));
    sums_.begin_tile();
    // The code of a score_mod is there once, so that it is compiled quickly.
    if (kHas<ScoreMod> || masked) {
      pairs<true>(place, masked, rows, s, d, p, ds);
    } else {
      pairs<false>(place, masked, rows, s, d, p, ds);
    }
    sums_.end_tile();
  }

  template <bool kMasked>
  __device__ __forceinline__ void pairs(const Place& place, bool masked, const FlexRow* rows,
                                        float (&s)[kBlocksM][kBlocksN][4], float (&d)[kBlocksM][kBlocksN][4],
                                        unsigned (&p)[kBlocksM][kOperands], unsigned (&ds)[kBlocksM][kOperands]) {
    const int b = place.b, h = place.h, q = (place.tile >> 2) * Config::kRows + part() * kPart + lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const int kv = first_key() + m * 16;
      const auto alive =
          pairs_that_take_part<Config, kBlocksN, true>(a_, mask_, place.tile & 3, kMasked && masked, b, h, q, kv);
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at_q = q + n * 8 + e % 2, at_kv = kv + e / 2 * 8;
          FlexQuery of{rows[n * 8 + e % 2], 0.0f, 0.0f};
          if constexpr (Config::kMaxGradient) {
            const bool there = at_q < a_.queries;
            const long long at = static_cast<long long>(b * a_.heads + h) * a_.queries + at_q;
            of.max = there ? a_.max_scores[at] : 0.0f;
            of.grad_max = there ? a_.grad_max[at] : 0.0f;
          }
          float value[Config::Derivative::kContributions + 1];
          const float score = s[m][n][e];
          const bool takes = !kMasked || (alive >> (n * 4 + e) & 1) != 0;
          d[m][n][e] = FlexPairGradient<Config>::apply(score_, a_.scale, score, d[m][n][e], of, b, h, at_q, at_kv,
                                                       takes, s[m][n][e], value);
          sums_.add(value, m, n, e, score * a_.scale, b, h, at_q, at_kv, takes);
        }
        sums_.end_block(m, n);
        put_operand<T>(p[m] + n * kOperandWords<T>, s[m][n]);
        if constexpr (Config::kGradScores) put_operand<T>(ds[m] + n * kOperandWords<T>, d[m][n]);
      }
    }
  }

  __device__ __forceinline__ void keep(unsigned tile, const unsigned (&words)[kBlocksM][kOperands]) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        store_operand<T>(tile, ScoreTile::kStride, key_group() + m * 16, part() * kBlocksN + n,
                         words[m] + n * kOperandWords<T>, lane());
      }
    }
  }

  // c += (P or dS) * (grad_out or query), for the warp's blocks of columns: the first factor from registers, or of all
  // queries from shared memory where warps share keys.
  template <int kMine, int kBlocks>
  __device__ __forceinline__ void accumulate(float (&c)[kBlocksM][kMine][2][4],
                                             const unsigned (&words)[kBlocksM][kOperands], unsigned tile, unsigned b,
                                             int b_stride) const {
#pragma unroll
    for (int k = 0; k < Config::kRows / Product::kDepth; ++k) {
      typename Product::Factor row[kBlocksM];
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        unsigned fragment[4];
        if constexpr (Config::kShare == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) fragment[i] = words[m][k * 4 + i];
        } else {
          load_transposed_order(fragment, tile, m, k);
        }
        row[m] = Product::factor(fragment);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int block = i * Config::kShare + part();
        if (kBlocks % Config::kShare != 0 && block >= kBlocks) break;
        unsigned col[4];
        keep_order<Config::kSplit>();
        Product::load_b_transposed(col, b, b_stride, k * Product::kDepth, block * 16, lane());
        const auto cols = Product::factor(col);
#pragma unroll
        for (int m = 0; m < kBlocksM; ++m) {
          Product::template step<0>(c[m][i][0], row[m], cols);
          Product::template step<1>(c[m][i][1], row[m], cols);
        }
      }
    }
  }
  // Operand A as it lies, with floats in the order of operands that are read transposed.
  __device__ __forceinline__ void load_transposed_order(unsigned (&a)[4], unsigned tile, int m, int step) const {
    if constexpr (sizeof(T) == 2) {
      load_a(a, tile, ScoreTile::kStride, key_group() + m * 16, step, lane());
    } else {
      const unsigned at = tile + (key_group() + m * 16 + lane() / 4) * ScoreTile::kStride + step * 32 + lane() % 4 * 8;
      a[0] = load_word(at);
      a[1] = load_word(at + 8 * ScoreTile::kStride);
      a[2] = load_word(at + 4);
      a[3] = load_word(at + 8 * ScoreTile::kStride + 4);
    }
  }

  __device__ __forceinline__ void add_grad_query(int b, int h, int row) const {
    const int part = warp() / kGroupsQ, group = warp() % kGroupsQ * 16 * kBlocksQ;
    float c[kBlocksQ][kMineQ][2][4];
#pragma unroll
    for (int j = 0; j < kBlocksQ; ++j) zero(c[j]);
#pragma unroll kUnrolledSteps < T>
    for (int k = 0; k < Config::kCols / Product::kDepth; ++k) {
      typename Product::Factor a[kBlocksQ];
#pragma unroll
      for (int j = 0; j < kBlocksQ; ++j) {
        unsigned row[4];
        Product::load_a_transposed(row, gradient_, ScoreTile::kStride, k * Product::kDepth, group + j * 16, lane());
        a[j] = Product::factor(row);
      }
#pragma unroll
      for (int i = 0; i < kMineQ; ++i) {
        const int block = i * kPartsQ + part;
        if (kBlocksD % kPartsQ != 0 && block >= kBlocksD) break;
        unsigned col[4];
        keep_order<Config::kSplit>();
        Product::load_b_transposed(col, key_, KeyTile::kStride, k * Product::kDepth, block * 16, lane());
        const auto cols = Product::factor(col);
#pragma unroll
        for (int j = 0; j < kBlocksQ; ++j) {
          Product::template step<0>(c[j][i][0], a[j], cols);
          Product::template step<1>(c[j][i][1], a[j], cols);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBlocksQ; ++j) {
      const int q = row + group + j * 16 + lane() / 4;
      float* to =
          a_.query_sum + (static_cast<long long>(b * a_.heads + h) * a_.queries + q) * Config::kHead + lane() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kMineQ; ++i) {
        const int block = i * kPartsQ + part;
        if (kBlocksD % kPartsQ != 0 && block >= kBlocksD) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (q < a_.queries) add_pair(to + block * 16 + n * 8, c[j][i][n][0], c[j][i][n][1]);
          if (q + 8 < a_.queries) add_pair(to + 8 * Config::kHead + block * 16 + n * 8, c[j][i][n][2], c[j][i][n][3]);
        }
      }
    }
  }

  template <int kMine, int kBlocks>
  __device__ __forceinline__ void store(const float (&c)[kMine][2][4], int m, const FlexTensor& to, int cols,
                                        float factor) const {
    T* out = static_cast<T*>(to.data) + key_batch_ * to.batch_stride + key_head_ * to.head_stride;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int block = i * Config::kShare + part();
      if (kBlocks % Config::kShare != 0 && block >= kBlocks) break;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int kv = first_key() + m * 16 + e / 2 % 2 * 8, col = block * 16 + e / 4 * 8 + lane() % 4 * 2 + e % 2;
        if (kv < a_.keys && col < cols)
          fusegrad::device::store(out + kv * to.row_stride + col * to.col_stride, c[i][e / 4][e % 4] * factor);
      }
    }
  }

  const FlexBackwardArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  char* const shared_;
  const unsigned key_, value_, stage_, gradient_, probability_;
  Sums sums_;
  int col_tile_, row_tiles_, col_, key_batch_, key_head_, first_head_, last_batch_;
  float grad_key_[kBlocksM][kMineD][2][4], grad_value_[kBlocksM][kMineE][2][4];
};

}  // namespace fusegrad::device
