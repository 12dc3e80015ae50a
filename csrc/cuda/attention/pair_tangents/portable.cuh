// Second derivatives of flex attention for every GPU from sm_80 on: what each pair has to give to the tangents of the
// gradients of query, key and value, which products of matrices make of it. A CTA has kRows queries of one head, kRows
// / kWarps a warp, and walks some of their tiles of keys; nothing is summed up here.
//
// For a pair with score s and weight p = exp(s - lse), d = grad_out * value, and dots for tangents:
//
//   p'  = p (s' - lse')                     e  = p (d - delta)
//   d'  = grad_out * value' + grad_out' * value
//   e'  = p' (d - delta) + p (d' - delta')
//
// and by x = scale * query * key, of which the score_mod f makes s: s' = f_x x' (and what tangents of captured tensors
// add, where f_x does not depend on these), and the gradients by x and their
// tangents are f_x e and f_x e' + f_xx x' e. gradient.cuh describes Config; this file adds:
//   Curvature                  the rendered second derivative of the score_mod
//   kGradOutTangent            whether grad_out has a tangent
#pragma once

#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/pair_tangents/arguments.cuh"

namespace fusegrad::device {

template <class Config>
class FlexPairTangents {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Derivative = typename Config::Derivative;
  using Curvature = typename Config::Curvature;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using GradOutTile = Tile<T, Config::kRows, Config::kValue>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using ScoreTile = Tile<T, Config::kRows, Config::kCols>;
  using Entry = TileEntry<>;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksM = Config::kRows / Config::kWarps / 16;  // of 16 queries, of a warp
  static constexpr int kBlocksN = Config::kCols / 8;
  static constexpr PairTangentsMemory kMemory{{.rows = Config::kRows,
                                               .cols = Config::kCols,
                                               .head = Config::kHead,
                                               .value = Config::kValue,
                                               .element_bytes = static_cast<int>(sizeof(T)),
                                               .grad_out_tangent = Config::kGradOutTangent}};
  static_assert(Config::kRows == 16 * kBlocksM * Config::kWarps && !Config::kDropout);

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexPairTangents(const FlexPairTangentsArguments& a,
                                              const typename ScoreMod::Captured& score,
                                              const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a), score_(score), mask_(mask), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int row_tiles = (a_.row_count + Config::kRows - 1) / Config::kRows;
    // The last queries come first: under a causal mask they have the most keys.
    const int id = static_cast<int>(blockIdx.x);
    const HeadTile work(a_.head_count, row_tiles, id / a_.splits);
    head_ = work.head;
    b_ = (a_.first_head + head_) / a_.heads;
    h_ = (a_.first_head + head_) % a_.heads;
    row_ = a_.first_row + (row_tiles - 1 - work.tile) * Config::kRows;
    TileWalk walk(a_.tiles, b_, h_, row_ / Config::kRows, (a_.keys + Config::kCols - 1) / Config::kCols,
                  (Config*)nullptr);
    walk.keep(id % a_.splits, a_.splits);
    if (walk.count() <= 0) return;
    load_tile<QueryTile, kThreads>(at(kMemory.query), a_.query, b_, h_, row_, a_.queries, a_.head_size);
    load_tile<QueryTile, kThreads>(at(kMemory.query_tangent), a_.query_tangent, b_, h_, row_, a_.queries, a_.head_size);
    load_tile<GradOutTile, kThreads>(at(kMemory.grad_out), a_.grad_out, b_, h_, row_, a_.queries, a_.value_size);
    if constexpr (Config::kGradOutTangent) {
      load_tile<GradOutTile, kThreads>(at(kMemory.grad_out_tangent), a_.grad_out_tangent, b_, h_, row_, a_.queries,
                                       a_.value_size);
    }
    int tile = walk[0];
    load_keys(tile);
    load_rows();
    for (int i = 0; i < walk.count(); ++i) {
      const bool more = i + 1 < walk.count();
      const int next = more ? walk[i + 1] : 0;
      step(tile, next, more);
      tile = next;
    }
  }

 private:
  using Scores = float[kBlocksM][kBlocksN][4];

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * kBlocksM * 16; }
  __device__ __forceinline__ unsigned at(const Region& region) const { return shared_ + region.offset; }

  __device__ __forceinline__ void load_rows() {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int q = row_ + first_row() + m * 16 + r * 8 + lane() / 4;
        const long long head = static_cast<long long>(b_) * a_.heads + h_;
        rows_[m][r] = q < a_.queries ? a_.rows[head * a_.queries + q] : FlexPairRow{};
      }
    }
  }
  __device__ __forceinline__ void load_keys(int tile) const {
    const int col = Entry::column(tile) * Config::kCols, head = h_ / a_.group;
    load_tile<KeyTile, kThreads>(at(kMemory.key), a_.key, b_, head, col, a_.keys, a_.head_size);
    load_tile<KeyTile, kThreads>(at(kMemory.key_tangent), a_.key_tangent, b_, head, col, a_.keys, a_.head_size);
    commit_copies();
  }
  __device__ __forceinline__ void load_values(int col) const {
    const int head = h_ / a_.group;
    load_tile<ValueTile, kThreads>(at(kMemory.value), a_.value, b_, head, col, a_.keys, a_.value_size);
    load_tile<ValueTile, kThreads>(at(kMemory.value_tangent), a_.value_tangent, b_, head, col, a_.keys, a_.value_size);
    commit_copies();
  }

  // Computes one tile, whose keys are being copied; leaves the copies of the next tile's keys under way.
  __device__ __forceinline__ void step(int tile, int next, bool more) {
    const int col = Entry::column(tile) * Config::kCols;
    wait_copies<0>();
    __syncthreads();
    load_values(col);
    Scores s = {}, of_s = {}, d = {}, of_d = {};
    multiply<Config::kHead, QueryTile, KeyTile>(s, kMemory.query, kMemory.key);
    multiply<Config::kHead, QueryTile, KeyTile>(of_s, kMemory.query_tangent, kMemory.key);
    multiply<Config::kHead, QueryTile, KeyTile>(of_s, kMemory.query, kMemory.key_tangent);
    wait_copies<0>();
    __syncthreads();
    if (more) load_keys(next);
    multiply<Config::kValue, GradOutTile, ValueTile>(d, kMemory.grad_out, kMemory.value);
    multiply<Config::kValue, GradOutTile, ValueTile>(of_d, kMemory.grad_out, kMemory.value_tangent);
    if constexpr (Config::kGradOutTangent)
      multiply<Config::kValue, GradOutTile, ValueTile>(of_d, kMemory.grad_out_tangent, kMemory.value);
    pairs(s, of_s, d, of_d, Entry::kind(tile), col);
    constexpr int kWeights = Config::kGradOutTangent ? 2 : 1;
    store(of_s, a_.weights, kWeights, 0, col);
    if constexpr (Config::kGradOutTangent) store(s, a_.weights, kWeights, 1, col);
    store(of_d, a_.gradients, 2, 0, col);
    store(d, a_.gradients, 2, 1, col);
  }
  template <int kCommon, class A, class B>
  __device__ __forceinline__ void multiply(Scores& to, const Region& a, const Region& b) const {
    multiply_rows<T, Config::kSplit, kCommon>(to, at(a), A::kStride, first_row(), at(b), B::kStride, 0, lane());
  }

  // Turns s into the weights, of_s into their tangents, d into the gradients by scale * query * key, times the scale,
  // and of_d into the tangents of these. All are 0 for a pair that takes no part, whatever they were.
  __device__ __forceinline__ void pairs(Scores& s, Scores& of_s, Scores& d, Scores& of_d, int kind, int col) const {
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
          pair(s[m][n][e], of_s[m][n][e], d[m][n][e], of_d[m][n][e], rows_[m][e / 2], row + m * 16 + e / 2 * 8,
               col + n * 8 + e % 2, takes);
        }
        if constexpr (Config::kBlocks) {
          // All who store here store the same.
          unsigned char* seen = a_.seen + static_cast<long long>(head_ / a_.group) * a_.columns + col + n * 8;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (((alive >> (n * 4 + e) | alive >> (n * 4 + e + 2)) & 1) != 0) seen[e] = 1;
          }
        }
      }
    }
  }
  __device__ __forceinline__ void pair(float& s, float& of_s, float& d, float& of_d, const FlexPairRow& row, int q,
                                       int kv, bool takes) const {
    const float x = s * a_.scale, of_x = of_s * a_.scale;
    float changed = x, of_changed = of_x;
    if constexpr (kHas<ScoreMod>) {
      changed = ScoreMod::apply(score_, x, b_, h_, q, kv, takes);
      takes = takes && changed != -FUSEGRAD_INFINITY;  // what the score_mod made -inf counts as masked
      of_changed = slope(x, of_x, q, kv, takes);
      if (a_.score_tangent != nullptr && takes) {
        const long long row = static_cast<long long>(head_) * a_.row_count + (q - a_.first_row);
        of_changed += a_.score_tangent[row * a_.columns + kv];
      }
    }
    const float above = (changed - row.lse) - row.lse_low;
    const float p = kSame<T, float> ? expf(above) : power_of_two(above * kLog2E);
    const float of_p = p * (of_changed - row.lse_tangent);
    float g = p * (d - row.delta);
    float of_g = of_p * (d - row.delta) + p * (of_d - row.delta_tangent);
    if constexpr (kHas<ScoreMod>) {
      float none[1];
      of_g = slope(x, of_g, q, kv, takes) +
             Curvature::apply(captured_of<Curvature>(score_), x, of_x * g, b_, h_, q, kv, takes, none);
      g = slope(x, g, q, kv, takes);
    }
    s = takes ? p : 0.0f;
    of_s = takes ? of_p : 0.0f;
    d = takes ? g * a_.scale : 0.0f;
    of_d = takes ? of_g * a_.scale : 0.0f;
  }
  // The score_mod's derivative times a number.
  __device__ __forceinline__ float slope(float x, float by, int q, int kv, bool takes) const {
    float none[1];
    return Derivative::apply(captured_of<Derivative>(score_), x, by, b_, h_, q, kv, takes, none);
  }

  // By way of shared memory, each warp its own rows, so that lanes store 16 bytes.
  __device__ __forceinline__ void store(const Scores& from, void* to, int parts, int part, int col) const {
    const unsigned tile = at(kMemory.scores);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        unsigned words[kOperandWords<T>];
        put_operand<T>(words, from[m][n]);
        store_operand<T>(tile, ScoreTile::kStride, first_row() + m * 16, n, words, lane());
      }
    }
    __syncwarp();
    const long long stride = static_cast<long long>(parts) * a_.columns;
    const FlexTensor rows{static_cast<T*>(to) + static_cast<long long>(part) * a_.columns + col, 0,
                          a_.row_count * stride, stride, 1};
    store_tile<ScoreTile, 16 * kBlocksM, kLanes>(rows, 0, head_, row_ - a_.first_row + first_row(), a_.row_count,
                                                 a_.columns - col, tile + first_row() * ScoreTile::kStride);
    __syncwarp();
  }

  const FlexPairTangentsArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned shared_;
  int head_, b_, h_, row_;
  FlexPairRow rows_[kBlocksM][2];
};

}  // namespace fusegrad::device
