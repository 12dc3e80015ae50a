// Flex attention forward with batch_invariant for every GPU from sm_80 on (segments.cuh says what that asks): a CTA has
// kRows rows and their tiles of keys, all of them or those of one segment (kKeySplits). It is FlexForward
// (portable.cuh) without what depends on the shape of the call.
//
// scores.cuh and portable.cuh describe Config; this file adds:
//   kSegment                   tiles of a segment
//   kPacked                    rows are all queries of several heads that share their keys, at most kRows; else queries
//                              of one head
#pragma once

#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/segments.cuh"
#include "cuda/device/low_part.cuh"

namespace fusegrad::device {

template <class Config>
class FlexForwardSegments {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using QueryTile = Tile<T, Config::kRows, Config::kHead>;
  using KeyTile = Tile<T, Config::kCols, Config::kHead>;
  using ValueTile = Tile<T, Config::kCols, Config::kValue>;
  using Entry = TileEntry<>;
  static constexpr int kNone = -1;  // in place of an entry's word
  static constexpr int kThreads = kLanes * Config::kWarps;
  static constexpr int kBlocksM = Config::kRows / Config::kWarps / 16;  // of 16 rows, of a warp
  static constexpr int kBlocksN = Config::kCols / 8;
  static constexpr int kBlocksE = Config::kValue / 8;
  using Softmax = FlexSegmentSoftmax<Config, kBlocksN>;
  static constexpr ForwardMemory kMemory{{.rows = Config::kRows,
                                          .cols = Config::kCols,
                                          .head = Config::kHead,
                                          .value = Config::kValue,
                                          .element_bytes = static_cast<int>(sizeof(T)),
                                          .box_bytes = 0,
                                          .kept_bytes = 0,
                                          .column_bytes = 0}};
  static_assert(kBlocksM * 16 * Config::kWarps == Config::kRows && kBlocksN * kBlocksM * 4 <= 128);
  static_assert(!Config::kMaxScores && (!Config::kDropout || 64 % Config::kCols == 0));

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexForwardSegments(const FlexForwardArguments& a,
                                                 const typename ScoreMod::Captured& score,
                                                 const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        score_(score),
        mask_(mask),
        query_(shared),
        key_(shared + kMemory.key.offset),
        value_(shared + kMemory.value.offset) {}

  __device__ __forceinline__ void run() {
    int id = static_cast<int>(blockIdx.x);
    if constexpr (Config::kKeySplits) {
      split_ = id % a_.partials.splits;
      id /= a_.partials.splits;
    }
    const int row_tile = place(id);
    start_rows();
    const TileWalk walk(a_.tiles, b_, h_, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    int first = 0, last = walk.count();
    if constexpr (Config::kKeySplits) {
      const SegmentTiles of_split(walk, Config::kBlocks, split_ * Config::kSegment, (split_ + 1) * Config::kSegment,
                                  lane());
      first = of_split.first;
      last = of_split.last;
    }
    if (first < last) {
      int tile = walk[first];
      segment_ = Entry::column(tile) / Config::kSegment;
      load_queries();
      load_keys(tile);
      commit_copies();
      for (int i = first; i < last; ++i) {
        const int next = i + 1 < last ? walk[i + 1] : kNone;
        step(tile, next);
        tile = next;
      }
    }
    wait_copies<0>();
    finish(walk.count() < 0);
  }

 private:
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * kBlocksM * 16; }
  __device__ __forceinline__ float unit() const { return Config::kUnscaled ? a_.scale : 1.0f; }

  // Which rows the CTA has. Returns the row of tiles of a block mask's list.
  __device__ __forceinline__ int place(int id) {
    if constexpr (Config::kPacked) {
      const int tiles = (a_.group + a_.together - 1) / a_.together, key_heads = a_.heads / a_.group;
      const int first = id % tiles * a_.together;
      key_head_ = id / tiles % key_heads;
      b_ = id / tiles / key_heads;
      h_ = key_head_ * a_.group + first;
      row_ = 0;
      rows_ = min(a_.together, a_.group - first) * a_.queries;
      return 0;
    } else {
      const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
      const HeadTile work(a_.batches * a_.heads, row_tiles, id);
      // The last queries come first: under a causal mask they have the most keys.
      const int row_tile = row_tiles - 1 - work.tile;
      b_ = work.head / a_.heads;
      h_ = work.head % a_.heads;
      key_head_ = h_ / a_.group;
      row_ = row_tile * Config::kRows;
      rows_ = a_.queries;
      return row_tile;
    }
  }
  // Head and query of the thread's row r of block m.
  __device__ __forceinline__ int head_of(int m, int r) const { return Config::kPacked ? head_[m][r] : h_; }
  __device__ __forceinline__ int query_of(int m, int r) const {
    return Config::kPacked ? place_[m][r] : row_ + first_row() + m * 16 + r * 8 + lane() / 4;
  }
  __device__ __forceinline__ bool is_row(int m, int r) const {
    return row_ + first_row() + m * 16 + r * 8 + lane() / 4 < rows_;
  }
  // Its place in [B, H, M].
  __device__ __forceinline__ long long at(int m, int r) const {
    return static_cast<long long>(b_ * a_.heads + head_of(m, r)) * a_.queries + query_of(m, r);
  }

  __device__ __forceinline__ void start_rows() {
    segments_ = 0;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (Config::kPacked) {
          const int row = is_row(m, r) ? first_row() + m * 16 + r * 8 + lane() / 4 : 0;
          head_[m][r] = h_ + row / a_.queries;
          place_[m][r] = row % a_.queries;
          dropped_rows_[m].begin(a_.dropout, r, b_ * a_.heads + head_[m][r], place_[m][r]);
        }
        total_[m][r] = {-FUSEGRAD_INFINITY, 0.0f};
      }
    }
    if constexpr (!Config::kPacked) dropped_head_.begin(a_.dropout, b_ * a_.heads + h_);
    start_segment();
  }
  __device__ __forceinline__ void start_segment() {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      softmax_[m].begin();
#pragma unroll
      for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[m][n][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void load_queries() const {
    if constexpr (!Config::kPacked) {
      load_tile<QueryTile, kThreads>(query_, a_.query, b_, h_, row_, a_.queries, a_.head_size);
    } else {
      constexpr int kVector = 16 / sizeof(T);
      const int vectors = (a_.head_size + kVector - 1) / kVector;
      const T* query = static_cast<const T*>(a_.query.data) + b_ * a_.query.batch_stride;
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < Config::kRows * QueryTile::kVectors; i += kThreads) {
        const int row = i / QueryTile::kVectors, vector = i % QueryTile::kVectors;
        const bool there = row < rows_ && vector < vectors;
        const int head = there ? row / a_.queries : 0, q = there ? row - head * a_.queries : 0;
        copy_async(
            query_ + row * QueryTile::kStride + vector * 16,
            query + (h_ + head) * a_.query.head_stride + q * a_.query.row_stride + (there ? vector * kVector : 0),
            there);
      }
    }
  }
  __device__ __forceinline__ void load_keys(int tile) const {
    load_tile<KeyTile, kThreads>(key_, a_.key, b_, key_head_, Entry::column(tile) * Config::kCols, a_.keys,
                                 a_.head_size);
  }

  // Computes one tile, whose keys are being copied; leaves the copies of the next tile's keys under way.
  __device__ __forceinline__ void step(int tile, int next) {
    const int col = Entry::column(tile) * Config::kCols;
    wait_copies<0>();
    __syncthreads();
    load_tile<ValueTile, kThreads>(value_, a_.value, b_, key_head_, col, a_.keys, a_.value_size);
    commit_copies();
    float s[kBlocksM][kBlocksN][4] = {};
    multiply_rows<T, Config::kSplit, Config::kHead>(s, query_, QueryTile::kStride, first_row(), key_, KeyTile::kStride,
                                                    0, lane());
    wait_copies<0>();
    __syncthreads();
    if (next >= 0) {
      load_keys(next);
      commit_copies();
    }
    if constexpr (!Config::kKeySplits) {
      if (const int segment = Entry::column(tile) / Config::kSegment; segment != segment_) {
        segment_ = segment;
        keep_segment();
        start_segment();
      }
    }
    apply_mods(s, Entry::kind(tile), col);
    softmax(s);
    if constexpr (Config::kDropout) drop(s, col);
    multiply_accumulators<T, Config::kSplit>(out_, s, value_, ValueTile::kStride, lane());
  }

  // Bit 4 * n + e of the result: whether element e of accumulator n takes part.
  __device__ __forceinline__ Bits<kBlocksN * 4> pairs_of(int m, int kind, bool masked, int kv) const {
    using Result = Bits<kBlocksN * 4>;
    if (!masked) return ~Result(0);
    Result alive = 0;
#pragma unroll 1
    for (int n = 0; n < kBlocksN; ++n) {
      unsigned some = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = e / 2, at = kv + n * 8 + e % 2;
        const bool inside = is_row(m, r) && at < a_.keys;
        some |= static_cast<unsigned>(
                    takes_part<Config>(a_.tiles, mask_, kind, b_, head_of(m, r), query_of(m, r), at, inside))
                << e;
      }
      alive |= static_cast<Result>(some) << 4 * n;
    }
    return alive;
  }
  __device__ __forceinline__ void apply_mods(float (&s)[kBlocksM][kBlocksN][4], int kind, int col) const {
    const bool masked = kind != kTileFull || col + Config::kCols > a_.keys || row_ + Config::kRows > rows_;
    if (Config::kUnscaled && !masked) return;
    col += lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const Tested alive(pairs_of(m, kind, masked, col));
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool takes = alive[n * 4 + e];
          float x = s[m][n][e];
          if constexpr (!Config::kUnscaled) x *= a_.scale;
          if constexpr (kHas<ScoreMod>) {
            x = ScoreMod::apply(score_, x, b_, head_of(m, e / 2), query_of(m, e / 2), col + n * 8 + e % 2, takes);
          }
          s[m][n][e] = takes ? x : -FUSEGRAD_INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void softmax(float (&s)[kBlocksM][kBlocksN][4]) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      float rescale[2];
      softmax_[m].add(s[m], rescale, unit(), [] {});
      Softmax::multiply(out_[m], rescale);
    }
  }

  // Drops probabilities, which are in the sums already.
  __device__ __forceinline__ void drop(float (&s)[kBlocksM][kBlocksN][4], int col) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      const auto kept = [&] {
        if constexpr (Config::kPacked) {
          return dropped_rows_[m].to_end(a_.dropout, col, lane());
        } else {
          return dropped_head_.to_end(a_.dropout, row_ + first_row() + m * 16, col, lane());
        }
      }();
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) kept.drop(n, s[m][n]);
      hold_order();
    }
  }

  // --- segments ---

  // The thread's four columns 8 * n and 8 * n + 1 of rows r of block m, of the outputs of the segments before.
  __device__ __forceinline__ float2* kept_at(int m, int r, int n) const {
    return reinterpret_cast<float2*>(a_.partials.out + at(m, r) * a_.partials.cols + n * 8 + lane() % 4 * 2);
  }
  __device__ __forceinline__ bool is_kept(int m, int r, int n) const {
    return is_row(m, r) && n * 8 + lane() % 4 * 2 < a_.partials.cols;
  }
  // Adds the segment to those before; the sum's output becomes the accumulators.
  __device__ __forceinline__ void add_kept() {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const FlexSegmentWeights w = add_segment(total_[m][r], softmax_[m].row(r), unit());
        if (segments_ == 0) continue;
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
          const float2 before = is_kept(m, r, n) ? *kept_at(m, r, n) : make_float2(0.0f, 0.0f);
          out_[m][n][2 * r] = w.add(before.x, out_[m][n][2 * r]);
          out_[m][n][2 * r + 1] = w.add(before.y, out_[m][n][2 * r + 1]);
          if (n % 4 == 3) hold_order();
        }
      }
    }
  }
  // The same, and stores it: each thread's own columns, which no other reads.
  __device__ __forceinline__ void keep_segment() {
    add_kept();
    ++segments_;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
          if (is_kept(m, r, n)) *kept_at(m, r, n) = make_float2(out_[m][n][2 * r], out_[m][n][2 * r + 1]);
        }
      }
    }
  }

  // A list that is wrong makes the row NaN.
  __device__ __forceinline__ void finish(bool bad) {
    const float nan = __int_as_float(0x7fffffff);
    if constexpr (Config::kKeySplits) {
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const FlexSegmentRow row = softmax_[m].row(r);
          store_partial(is_row(m, r), a_.partials, at(m, r), split_,
                        {bad ? nan : row.max, bad ? nan : row.sum, 0.0f, 0.0f}, out_[m], r, lane());
        }
      }
    } else {
      add_kept();
      float factor[kBlocksM][2];
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const FlexSegmentRow row{bad ? nan : total_[m][r].max, bad ? nan : total_[m][r].sum};
          const FlexSegmentResult result = segment_result(row, unit(), Config::kDropout ? a_.dropout.scale : 1.0f);
          factor[m][r] = result.factor;
          if (lane() % 4 == 0 && is_row(m, r)) store_segment_lse(a_, at(m, r), result);
        }
      }
      write<T>(a_.out, factor, [](T* to, float x) { store(to, x); });
      if constexpr (Config::kOutLow)
        write<signed char>(a_.out_low, factor, [](signed char* to, float x) { store_low<T>(to, x); });
    }
  }
  template <class Element, class Store>
  __device__ __forceinline__ void write(const FlexTensor& to, const float (&factor)[kBlocksM][2],
                                        const Store& store) const {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_row(m, r)) continue;
        Element* row = static_cast<Element*>(to.data) + b_ * to.batch_stride + head_of(m, r) * to.head_stride +
                       query_of(m, r) * to.row_stride;
#pragma unroll
        for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int col = n * 8 + lane() % 4 * 2 + e;
            const float x = out_[m][n][2 * r + e] * factor[m][r];
            if (col < a_.value_size) store(row + col * to.col_stride, x);
          }
        }
      }
    }
  }

  const FlexForwardArguments& a_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, key_, value_;
  int b_, h_, key_head_, row_, rows_, split_, segment_, segments_;
  int head_[kBlocksM][2], place_[kBlocksM][2];
  FlexDropoutHead<Config> dropped_head_;
  FlexDropoutRows<Config> dropped_rows_[kBlocksM];
  FlexSegmentRow total_[kBlocksM][2];
  Softmax softmax_[kBlocksM];
  float out_[kBlocksM][kBlocksE][4];
};

}  // namespace fusegrad::device
