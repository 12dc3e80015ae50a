// Flex attention forward of few queries and many keys, for every GPU from sm_80 on, where reading the keys once is the
// limit. The rows of a CTA's tile are all queries of several heads that share their keys; the CTA has a split of the
// keys, and each warp some keys of each tile, which it copies and multiplies without waiting for other warps. In the
// end the warps' outputs are merged, and where there are several splits written to be merged by another kernel
// (cuda/attention/forward/merge.h): both in a fixed order.
//
// scores.cuh and portable.cuh describe Config; of few queries kCols are the keys of all warps, and kStages the
// stages of each warp. There are at most kRows queries. This file adds:
//   kKeyBoxes                  sm_90a, 16-bit elements: TMA copies keys and values. It reads an H100's memory at
//                              3.1 TB/s, cp.async at 2.9
#pragma once

#include "cuda/attention/device/far_rows.cuh"
#include "cuda/attention/device/scores.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/merge.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

template <class Config>
class FlexForwardFew {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  static constexpr int kKeys = Config::kCols / Config::kWarps;  // of a warp
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using KeyTile = Tile<T, kKeys, Config::kHead>;
  using ValueTile = Tile<T, kKeys, Config::kValue>;
  using Entry = TileEntry<>;
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksM = Config::kRows / 16;
  static constexpr int kBlocksN = kKeys / 8;
  static constexpr int kBlocksE = Config::kValue / 8;
  static constexpr FewForwardMemory kMemory{{.rows = Config::kRows,
                                             .cols = Config::kCols,
                                             .head = Config::kHead,
                                             .value = Config::kValue,
                                             .element_bytes = static_cast<int>(sizeof(T)),
                                             .warps = Config::kWarps,
                                             .stages = Config::kStages,
                                             .key_boxes = Config::kKeyBoxes}};
  static_assert(kBlocksM * 16 == Config::kRows && kBlocksN % 2 == 0 && kBlocksN * 8 * Config::kWarps == Config::kCols);
  static_assert(Config::kStages >= 2 && kBlocksN <= 8);

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexForwardFew(const FlexForwardArguments& a, const typename ScoreMod::Captured& score,
                                            const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a), more_(nullptr), score_(score), mask_(mask), shared_(shared) {}
  /// With kKeyBoxes.
  __device__ __forceinline__ FlexForwardFew(const FlexForwardArguments& a, const FlexForwardFewArguments& more,
                                            const typename ScoreMod::Captured& score,
                                            const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a), more_(&more), score_(score), mask_(mask), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int unit = static_cast<int>(blockIdx.x) / a_.partials.splits;
    const int split = static_cast<int>(blockIdx.x) - unit * a_.partials.splits;
    place(unit);
    begin_stages();
#if __CUDA_ARCH__ >= 900
    // This kernel may have begun before the one before it ended, and so may the one that merges the splits.
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
    TileWalk walk(a_.tiles, b_, h_, 0, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    walk.keep(split, a_.partials.splits);
    int next = 0;  // to be loaded
#pragma unroll
    for (int i = 0; i < Config::kStages - 1; ++i) {
      if (next < walk.count()) load(walk[next++], i);
      if (i == 0) load_queries();
      commit_copies();
    }
    start_rows();
    wait_copies<Config::kKeyBoxes ? 0 : Config::kStages - 2>();
    __syncthreads();
    Ring<Config::kStages> stages;
    int free = Config::kStages - 1;
    for (int i = 0; i < walk.count(); ++i) {
      const int tile = walk[i];
      wait_stage(stages);
      __syncwarp();  // all lanes' copies are there, and all have read the stage that is loaded now
      if (next < walk.count()) load(walk[next++], free);
      if constexpr (!Config::kKeyBoxes) commit_copies();
      step(tile, stages.stage);
      free = stages.stage;
      stages.next();
    }
    finish(split, walk.count() < 0);
  }

 private:
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kLanes; }

  // The heads of tile `id`: of a group as many as fit, of which the last tile may have fewer.
  __device__ __forceinline__ void place(int id) {
    const int tiles = (a_.group + a_.together - 1) / a_.together, key_heads = a_.heads / a_.group;
    const int first = id % tiles * a_.together;
    key_head_ = id / tiles % key_heads;
    b_ = id / tiles / key_heads;
    h_ = key_head_ * a_.group + first;
    rows_ = min(a_.together, a_.group - first) * a_.queries;
  }

  __device__ __forceinline__ void load_queries() const {
    constexpr int kVector = 16 / sizeof(T);
    const int vectors = (a_.head_size + kVector - 1) / kVector;
    const T* query = static_cast<const T*>(a_.query.data) + b_ * a_.query.batch_stride;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Config::kRows * QueryTile::kVectors; i += kThreads) {
      const int row = i / QueryTile::kVectors, vector = i % QueryTile::kVectors;
      const bool there = row < rows_ && vector < vectors;
      const int head = there ? row / a_.queries : 0, q = there ? row - head * a_.queries : 0;
      copy_async(shared_ + row * QueryTile::kStride + vector * 16,
                 query + (h_ + head) * a_.query.head_stride + q * a_.query.row_stride + (there ? vector * kVector : 0),
                 there);
    }
  }

  // --- a warp's stages ---

  static constexpr int kKeyBytes = Config::kKeyBoxes ? swizzled_tile_bytes(kKeys, Config::kHead) : KeyTile::kBytes;
  static __device__ __forceinline__ constexpr auto rows_of(int stride) {
    if constexpr (Config::kKeyBoxes) {
      return SwizzledRows<kKeys>{};
    } else {
      return stride;
    }
  }
  __device__ __forceinline__ unsigned stage_at(int stage) const {
    return shared_ + kMemory.stages.offset + (warp() * Config::kStages + stage) * kMemory.stages.piece;
  }
  __device__ __forceinline__ unsigned full(int stage) const {
    return shared_ + kMemory.barriers.offset + (warp() * Config::kStages + stage) * kMemory.barriers.piece;
  }

  __device__ __forceinline__ void begin_stages() const {
    if constexpr (Config::kKeyBoxes) {
      if (lane() == 0) {
        for (int s = 0; s < Config::kStages; ++s) Barrier::init(full(s), 1);
        Barrier::fence_inits();
      }
      __syncwarp();
    }
  }
  // Begins the copies of the warp's keys of a tile.
  __device__ __forceinline__ void load(int tile, int stage) const {
    const unsigned to = stage_at(stage);
    const int col = Entry::column(tile) * Config::kCols + warp() * kKeys;
    if constexpr (Config::kKeyBoxes) {
      if (lane() != 0) return;
      const int batch = a_.key_batches == 1 ? 0 : b_;
      Barrier::expect(full(stage), kMemory.stages.piece);
      copy_boxes<kKeys, Config::kHead>(to, more_->key, full(stage), col, key_head_, batch);
      copy_boxes<kKeys, Config::kValue>(to + kKeyBytes, more_->value, full(stage), col, key_head_, batch);
    } else {
      copy_rows<KeyTile>(to, a_.key, col, a_.head_size);
      copy_rows<ValueTile>(to + kKeyBytes, a_.value, col, a_.value_size);
    }
  }
  __device__ __forceinline__ void wait_stage(const Ring<Config::kStages>& stages) const {
    if constexpr (Config::kKeyBoxes) {
      Barrier::wait(full(stages.stage), stages.parity);
    } else {
      wait_copies<Config::kStages - 2>();
    }
  }
  template <class Into>
  __device__ __forceinline__ void copy_rows(unsigned to, const FlexTensor& from, int row, int cols) const {
    constexpr int kVector = 16 / sizeof(T);
    const T* p = static_cast<const T*>(from.data) + b_ * from.batch_stride + key_head_ * from.head_stride +
                 row * from.row_stride;
    Into::template load<kLanes>(to, reinterpret_cast<const char*>(p),
                                from.row_stride * static_cast<long long>(sizeof(T)), a_.keys - row,
                                (cols + kVector - 1) / kVector, lane());
  }

  __device__ __forceinline__ void start_rows() {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + r * 8 + lane() / 4;
        there_[m][r] = row < rows_;
        const int head = there_[m][r] ? row / a_.queries : 0;
        head_[m][r] = h_ + head;
        query_[m][r] = there_[m][r] ? row - head * a_.queries : 0;
        dropout_[m].begin(a_.dropout, r, b_ * a_.heads + head_[m][r], query_[m][r]);
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

  __device__ __forceinline__ void step(int tile, int stage) {
    const unsigned key = stage_at(stage);
    const int col = Entry::column(tile) * Config::kCols + warp() * kKeys;
    float s[kBlocksM][kBlocksN][4] = {};
    multiply_rows<T, Config::kSplit, Config::kHead>(s, shared_, QueryTile::kStride, 0, key, rows_of(KeyTile::kStride),
                                                    0, lane());
    const bool masked = Entry::kind(tile) != kTileFull || col + kKeys > a_.keys;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      apply_mods(m, s[m], Entry::kind(tile), masked, col + lane() % 4 * 2);
      softmax(m, s[m]);
      if constexpr (Config::kDropout) drop(m, s[m], col);
    }
    multiply_accumulators<T, Config::kSplit>(out_, s, key + kKeyBytes, rows_of(ValueTile::kStride), lane());
  }

  // Bit 4 * n + e of the result: whether element e of accumulator n takes part.
  __device__ __forceinline__ Bits<kBlocksN * 4> pairs_of(int m, int kind, bool masked, int kv) const {
    using Result = Bits<kBlocksN * 4>;
    Result alive = 0;
    if (!masked) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n)
        alive |= static_cast<Result>((there_[m][0] ? 3u : 0u) | (there_[m][1] ? 12u : 0u)) << 4 * n;
      return alive;
    }
#pragma unroll 1
    for (int n = 0; n < kBlocksN; ++n) {
      unsigned some = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = e / 2, at = kv + n * 8 + e % 2;
        const bool inside = there_[m][r] && at < a_.keys;
        some |=
            static_cast<unsigned>(takes_part<Config>(a_.tiles, mask_, kind, b_, head_[m][r], query_[m][r], at, inside))
            << e;
      }
      alive |= static_cast<Result>(some) << 4 * n;
    }
    return alive;
  }

  __device__ __forceinline__ void apply_mods(int m, float (&s)[kBlocksN][4], int kind, bool masked, int kv) const {
    const auto alive = pairs_of(m, kind, masked, kv);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool takes = (alive >> (n * 4 + e) & 1) != 0;
        float x = s[n][e];
        if constexpr (!Config::kUnscaled) x *= a_.scale;
        if constexpr (kHas<ScoreMod>)
          x = ScoreMod::apply(score_, x, b_, head_[m][e / 2], query_[m][e / 2], kv + n * 8 + e % 2, takes);
        s[n][e] = takes ? x : -FUSEGRAD_INFINITY;
      }
    }
  }

  __device__ __forceinline__ float unit() const { return Config::kUnscaled ? a_.scale : 1.0f; }

  // Exponentials are relative to the largest score so far. The output is rescaled only where a row of the warp has a
  // larger one.
  __device__ __forceinline__ void softmax(int m, float (&s)[kBlocksN][4]) {
    const float factor = unit() * kLog2E;
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = max_[m][r];
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n)
        max = score_mod::maximum(max, score_mod::maximum(s[n][2 * r], s[n][2 * r + 1]));
      max = row_max(max);
      if constexpr (Config::kMaxScores) {
        if (max != max_[m][r]) ties_[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) ties_[m][r] += (s[n][2 * r] == max) + (s[n][2 * r + 1] == max);
      }
      // Without a score yet all exponentials are 0 (-inf less -inf would be NaN). Negated, so that NaN is followed.
      rescale[r] = 1.0f;
      if (!(max <= max_[m][r])) rescale[r] = power_of_two((max_[m][r] - max) * factor);
      max_[m][r] = max;
    }
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[m][n][e] *= rescale[e / 2];
      }
    }
    float most[2], origin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = max_[m][r] == -FUSEGRAD_INFINITY ? 0.0f : max_[m][r];
      origin[r] = most[r] * factor;
    }
    if constexpr (!kSame<T, float>) subtract_far(s, most, origin);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          if constexpr (kSame<T, float>) {
            s[n][e] = expf((s[n][e] - most[r]) * unit());
          } else {
            s[n][e] = power_of_two(s[n][e] * factor - origin[r]);
          }
          sum += s[n][e];
        }
      }
      sum_[m][r] = sum_[m][r] * rescale[r] + sum;
    }
  }

  // Drops probabilities, which are in the sums already.
  __device__ __forceinline__ void drop(int m, float (&s)[kBlocksN][4], int col) const {
    static_assert(64 % kKeys == 0);
    const auto kept = dropout_[m].to_end(a_.dropout, col, lane());
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) kept.drop(n, s[n]);
    hold_order();
  }

  __device__ __forceinline__ FlexPartialRow* results_of(int warp) const {
    extern __shared__ __align__(16) char memory[];
    return reinterpret_cast<FlexPartialRow*>(memory + kMemory.results.offset) + warp * Config::kRows;
  }
  __device__ __forceinline__ float* outputs_of(int warp) const {
    extern __shared__ __align__(16) char memory[];
    return reinterpret_cast<float*>(memory + kMemory.outputs.offset + warp * kMemory.outputs.piece);
  }
  static constexpr int kOutputStride = FewForwardMemory::output_stride(Config::kValue);

  // Merges what the warps have. A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish(int split, bool bad) {
    wait_copies<0>();
    __syncthreads();  // the outputs take the stages' place
    float* mine = outputs_of(warp());
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + r * 8 + lane() / 4;
        const float sum = row_sum(sum_[m][r]);
        const float ties = Config::kMaxScores ? row_sum(ties_[m][r]) : 0.0f;
        if (lane() % 4 == 0) results_of(warp())[row] = {bad ? __int_as_float(0x7fffffff) : max_[m][r], sum, ties, 0.0f};
        if (!there_[m][r]) continue;
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
          *reinterpret_cast<float2*>(mine + row * kOutputStride + n * 8 + lane() % 4 * 2) =
              make_float2(out_[m][n][2 * r], out_[m][n][2 * r + 1]);
        }
      }
    }
    __syncthreads();
    const FlexPartials& partials = a_.partials;
    const FlexRowResults to{
        a_.out,     a_.out_low,    a_.lse, Config::kMaxScores ? a_.max_scores : nullptr, a_.max_ties,
        a_.lse_low, a_.value_size, unit(), Config::kDropout ? a_.dropout.scale : 1.0f};
    const int vectors = max(partials.cols / 4, 1);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows_ * vectors; i += kThreads) {
      const int row = i / vectors, col = i % vectors * 4;
      const int head = h_ + row / a_.queries, q = row % a_.queries;
      const long long at = (static_cast<long long>(b_) * a_.heads + head) * a_.queries + q;
      FlexRowMerge merged;
      merged.merge(
          Config::kWarps, unit(), [&](int w) { return results_of(w)[row]; },
          [&](int w) { return *reinterpret_cast<const float4*>(outputs_of(w) + row * kOutputStride + col); });
      if (partials.splits == 1) {
        merged.template finish<T>(to, b_, head, q, at, col);
        continue;
      }
      const long long place = at * partials.splits + split;
      if (col == 0) partials.rows[place] = merged.row;
      if (col < partials.cols) {
        *reinterpret_cast<float4*>(partials.out + place * partials.cols + col) =
            make_float4(merged.out[0], merged.out[1], merged.out[2], merged.out[3]);
      }
    }
  }

  const FlexForwardArguments& a_;
  const FlexForwardFewArguments* more_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned shared_;
  int b_, h_, key_head_, rows_;
  bool there_[kBlocksM][2];
  int head_[kBlocksM][2], query_[kBlocksM][2];
  FlexDropoutRows<Config> dropout_[kBlocksM];
  float out_[kBlocksM][kBlocksE][4], max_[kBlocksM][2], sum_[kBlocksM][2], ties_[kBlocksM][2];
};

}  // namespace fusegrad::device
