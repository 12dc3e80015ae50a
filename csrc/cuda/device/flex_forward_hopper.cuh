// The forward of flex attention on sm_90a. A CTA computes kRows queries of a head: a producer warp brings keys and
// values by the copy engine, kGroups warpgroups compute 64 queries each. While a warpgroup's tensor cores work at the
// scores of a tile and the output of the one before, the other's warps are at their exponentials: they take turns in
// issuing products (ping-pong). See flex_scores.cuh for Config and flex_forward.cuh; here also:
//   kGroups                    warpgroups that compute, 2 or 3; kRows = 64 * kGroups
//   kStages                    tiles of keys and of values in shared memory
#pragma once

#include "cuda/device/flex_scores.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

struct FlexForwardMaps {
  TensorMap query, key, value;
};

template <class Config>
class FlexForwardHopper {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using ScoreProduct = Wgmma<T, Config::kCols, false, false>;
  using OutProduct = Wgmma<T, Config::kValue, true, true>;
  static constexpr int kThreads = (Config::kGroups + 1) * kWarpgroup;
  static constexpr int kBlocksN = Config::kCols / 8, kBlocksE = Config::kValue / 8;
  static constexpr int kQueryBytes = Config::kRows * Config::kHead * 2;
  static constexpr int kKeyBytes = Config::kCols * Config::kHead * 2;
  static constexpr int kValueBytes = Config::kCols * Config::kValue * 2;
  static constexpr int kAlignment = 1024;
  // Of the pairs that a mask_mod is asked for at once.
  static constexpr int kTogether = Config::kCols % 32 == 0 ? 16 : 8;
  // Named barriers: each warpgroup's turn to issue products.
  static constexpr int kTurn = 1;
  static_assert(Config::kRows == 64 * Config::kGroups && Config::kHead % kChunk == 0 && Config::kValue % kChunk == 0);
  static_assert(Config::kCols % 16 == 0);

 public:
  static constexpr int kSharedBytes =
      kAlignment + kQueryBytes + Config::kStages * (kKeyBytes + kValueBytes) + 8 * (1 + 4 * Config::kStages);

  __device__ __forceinline__ FlexForwardHopper(const FlexForwardArguments& a, const FlexForwardMaps& maps,
                                               const typename ScoreMod::Captured& score,
                                               const typename MaskMod::Captured& mask, unsigned shared)
      : a_(a),
        maps_(maps),
        score_(score),
        mask_(mask),
        query_((shared + kAlignment - 1) / kAlignment * kAlignment),
        key_(query_ + kQueryBytes),
        value_(key_ + Config::kStages * kKeyBytes),
        query_full_(value_ + Config::kStages * kValueBytes) {}

  __device__ __forceinline__ void run() {
    const int row_tiles = (a_.queries + Config::kRows - 1) / Config::kRows;
    // The last queries first: under a causal mask they have the most keys.
    const int row_tile = row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles);
    const int head = static_cast<int>(blockIdx.x / row_tiles);
    b_ = head / a_.heads;
    h_ = head % a_.heads;
    row_ = row_tile * Config::kRows;
    if (threadIdx.x == 0) {
      Barrier::init(query_full_, 1);
      for (int s = 0; s < Config::kStages; ++s) {
        Barrier::init(key_full(s), 1);
        Barrier::init(value_full(s), 1);
        Barrier::init(key_empty(s), Config::kGroups);
        Barrier::init(value_empty(s), Config::kGroups);
      }
      Barrier::fence_inits();
    }
    __syncthreads();
    const TileWalk walk(a_.tiles, b_, h_, row_tile, (a_.keys + Config::kCols - 1) / Config::kCols, (Config*)nullptr);
    // The same in all threads of a warp, and known to be.
    group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group_ == Config::kGroups) {
      give_registers<Config::kGroups == 3 ? 32 : 24>();
      if (threadIdx.x == Config::kGroups * kWarpgroup) produce(walk);
    } else {
      take_registers<Config::kGroups == 3 ? 160 : 240>();
      consume(walk);
    }
  }

 private:
  __device__ __forceinline__ unsigned key_full(int s) const { return query_full_ + 8 * (1 + s); }
  __device__ __forceinline__ unsigned key_empty(int s) const { return key_full(Config::kStages + s); }
  __device__ __forceinline__ unsigned value_full(int s) const { return key_full(2 * Config::kStages + s); }
  __device__ __forceinline__ unsigned value_empty(int s) const { return key_full(3 * Config::kStages + s); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  /// The thread's first query.
  __device__ __forceinline__ int first_query() const {
    return row_ + static_cast<int>(threadIdx.x) / kLanes * 16 + lane() / 4;
  }

  // --- the producer: one thread ---

  __device__ __forceinline__ void produce(const TileWalk& walk) const {
    if (walk.count() <= 0) return;
    const int key_head = h_ / a_.group, key_batch = a_.key_batches == 1 ? 0 : b_;
    copy_tile<Config::kRows, Config::kHead>(query_, maps_.query, query_full_, row_, h_, b_);
    for (int i = 0; i < walk.count(); ++i) {
      const int stage = i % Config::kStages, empty = i / Config::kStages % 2 ^ 1, col = (walk[i] >> 2) * Config::kCols;
      Barrier::wait(key_empty(stage), empty);
      copy_tile<Config::kCols, Config::kHead>(key_ + stage * kKeyBytes, maps_.key, key_full(stage), col, key_head,
                                              key_batch);
      Barrier::wait(value_empty(stage), empty);
      copy_tile<Config::kCols, Config::kValue>(value_ + stage * kValueBytes, maps_.value, value_full(stage), col,
                                               key_head, key_batch);
    }
  }

  // --- a consumer warpgroup ---

  __device__ __forceinline__ void consume(const TileWalk& walk) {
    float out[kBlocksE][4], s[kBlocksN][4];
    unsigned p[kBlocksN * 2];
#pragma unroll
    for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.0f;
    }
    const int count = walk.count();
    if (count > 0) {
      Barrier::wait(query_full_, 0);
      if (group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
      // Nothing to overlap the first tile's scores with.
      int tile = walk[0];
      Barrier::wait(key_full(0), 0);
      issue_scores(s, 0);
      wgmma_wait<0>();
      pin<kBlocksN * 4>(s[0]);
      release(key_empty(0));
      float rescale[2];
      apply_mods(s, tile);
      softmax(s, rescale);
      pack(p, s);
      for (int i = 1; i < count; ++i) {
        const int stage = i % Config::kStages, before = (i - 1) % Config::kStages;
        tile = walk[i];
        Barrier::wait(key_full(stage), i / Config::kStages % 2);
        begin_turn();
        pin<kBlocksN * 4>(s[0]);
        issue_scores(s, stage);
        Barrier::wait(value_full(before), (i - 1) / Config::kStages % 2);
        pin<kBlocksE * 4>(out[0]);
        issue_out(out, p, before);
        end_turn();
        wgmma_wait<1>();
        pin<kBlocksN * 4>(s[0]);
        release(key_empty(stage));
        apply_mods(s, tile);
        softmax(s, rescale);
        wgmma_wait<0>();
        pin<kBlocksE * 4>(out[0]);
        release(value_empty(before));
        multiply(out, rescale);
        pack(p, s);
      }
      const int last = (count - 1) % Config::kStages;
      Barrier::wait(value_full(last), (count - 1) / Config::kStages % 2);
      pin<kBlocksE * 4>(out[0]);
      issue_out(out, p, last);
      wgmma_wait<0>();
      pin<kBlocksE * 4>(out[0]);
      // The turn that nobody took.
      if (group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
    }
    finish(out, count < 0);
  }

  // Warpgroup 0 begins; each gives the turn to the next.
  __device__ __forceinline__ void begin_turn() const { named_sync(kTurn + group_, 2 * kWarpgroup); }
  __device__ __forceinline__ void end_turn() const {
    named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void release(unsigned barrier) const {
    if (threadIdx.x % kWarpgroup == 0) Barrier::arrive(barrier);
  }

  __device__ __forceinline__ void issue_scores(float (&s)[kBlocksN][4], int stage) const {
    const unsigned query = query_ + group_ * 64 * kChunkBytes, key = key_ + stage * kKeyBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kHead / 16; ++k) {
      ScoreProduct::run(s[0], descriptor(step_address<Config::kRows>(query, k), 16),
                        descriptor(step_address<Config::kCols>(key, k), 16), k != 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_out(float (&out)[kBlocksE][4], const unsigned (&p)[kBlocksN * 2],
                                            int stage) const {
    const unsigned value = value_ + stage * kValueBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kCols / 16; ++k) {
      OutProduct::run(out[0], p + 4 * k, descriptor(value + k * 16 * kChunkBytes, Config::kCols * kChunkBytes), true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void apply_mods(float (&s)[kBlocksN][4], int tile) const {
    const int kind = tile & 3, col = (tile >> 2) * Config::kCols;
    const bool masked = kind != kTileFull || col + Config::kCols > a_.keys || row_ + Config::kRows > a_.queries;
    const int q = first_query(), kv = col + lane() % 4 * 2;
    if (masked) {
      change<true>(s, masked_pairs<Config, kBlocksN, false, kTogether>(a_, mask_, kind, b_, h_, q, kv), q, kv);
    } else if constexpr (!Config::kUnscaled) {
      change<false>(s, 0, q, kv);
    }
  }
  // Masked or not is code of its own: what most tiles run tests no bits.
  template <bool kMasked>
  __device__ __forceinline__ void change(float (&s)[kBlocksN][4], Bits<kBlocksN * 4> alive, int q, int kv) const {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool takes = !kMasked || (alive >> (n * 4 + e) & 1) != 0;
        float x = s[n][e];
        if constexpr (!Config::kUnscaled) x *= a_.scale;
        if constexpr (kHas<ScoreMod>) {
          x = ScoreMod::apply(score_, x, b_, h_, q + e / 2 * 8, kv + n * 8 + e % 2, takes);
        }
        s[n][e] = takes ? x : -FUSEGRAD_INFINITY;
      }
    }
  }

  __device__ __forceinline__ float unit() const { return Config::kUnscaled ? a_.scale : 1.0f; }
  static constexpr float kSlack = Config::kMaxScores ? 0.0f : 8.0f;

  // As FlexForward::softmax; the output is rescaled later, when the product in flight is done with it.
  __device__ __forceinline__ void softmax(float (&s)[kBlocksN][4], float (&rescale)[2]) {
    const float factor = unit() * kLog2E;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = max_[r];
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n)
        max = score_mod::maximum(max, score_mod::maximum(s[n][2 * r], s[n][2 * r + 1]));
      max = row_max(max);
      if constexpr (Config::kMaxScores) {
        if (max != max_[r]) ties_[r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) ties_[r] += (s[n][2 * r] == max) + (s[n][2 * r + 1] == max);
      }
      rescale[r] = 1.0f;
      if (!((max - max_[r]) * factor <= kSlack)) {
        rescale[r] = max == -FUSEGRAD_INFINITY ? 0.0f : power_of_two((max_[r] - max) * factor);
        max_[r] = max;
      }
      const float origin = max_[r] == -FUSEGRAD_INFINITY ? 0.0f : max_[r] * factor;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[n][e] = power_of_two(s[n][e] * factor - origin);
          sum += s[n][e];
        }
      }
      sum_[r] = sum_[r] * rescale[r] + sum;
    }
  }
  __device__ __forceinline__ void multiply(float (&out)[kBlocksE][4], const float (&rescale)[2]) const {
    if (!__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kBlocksE; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= rescale[e / 2];
    }
  }
  __device__ __forceinline__ void pack(unsigned (&p)[kBlocksN * 2], const float (&s)[kBlocksN][4]) const {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) put_operand<T>(p + 2 * n, s[n]);
  }

  __device__ __forceinline__ void finish(const float (&out)[kBlocksE][4], bool bad) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int q = first_query() + 8 * r;
      const bool none = max_[r] == -FUSEGRAD_INFINITY;
      const float nan = __int_as_float(0x7fffffff);
      const float sum = row_sum(sum_[r]), ties = Config::kMaxScores ? row_sum(ties_[r]) : 0.0f;
      const float factor = bad ? nan : none ? 0.0f : 1.0f / sum;
      if (q >= a_.queries) continue;
      if (lane() % 4 == 0) {
        const long long at = static_cast<long long>(b_ * a_.heads + h_) * a_.queries + q;
        const float max = max_[r] * unit();
        a_.lse[at] = bad ? nan : none ? -FUSEGRAD_INFINITY : max + logf(sum);
        if constexpr (Config::kMaxScores) {
          a_.max_scores[at] = none ? -FUSEGRAD_INFINITY : max;
          a_.max_ties[at] = ties;
        }
      }
      store_row(a_.out, out, r, q, factor, [](float x) { return x; });
      if constexpr (Config::kOutLow)
        store_row(a_.out_low, out, r, q, factor, [](float x) { return x - rounded<T>(x); });
    }
  }
  template <class F>
  __device__ __forceinline__ void store_row(const FlexTensor& to, const float (&out)[kBlocksE][4], int r, int q,
                                            float factor, F&& part) const {
    T* row = static_cast<T*>(to.data) + b_ * to.batch_stride + h_ * to.head_stride + q * to.row_stride;
    const bool pairs =
        to.col_stride == 1 && a_.value_size % 2 == 0 && reinterpret_cast<unsigned long long>(row) % 4 == 0;
#pragma unroll
    for (int n = 0; n < kBlocksE; ++n) {
      const int col = n * 8 + lane() % 4 * 2;
      const float first = part(out[n][2 * r] * factor), second = part(out[n][2 * r + 1] * factor);
      if (pairs) {
        if (col < a_.value_size) *reinterpret_cast<unsigned*>(row + col) = device::pack(T{}, first, second);
      } else {
        if (col < a_.value_size) store(row + col * to.col_stride, first);
        if (col + 1 < a_.value_size) store(row + (col + 1) * to.col_stride, second);
      }
    }
  }

  const FlexForwardArguments& a_;
  const FlexForwardMaps& maps_;
  const typename ScoreMod::Captured& score_;
  const typename MaskMod::Captured& mask_;
  const unsigned query_, key_, value_, query_full_;
  int b_, h_, row_, group_;
  float max_[2] = {-FUSEGRAD_INFINITY, -FUSEGRAD_INFINITY}, sum_[2] = {}, ties_[2] = {};
};

}  // namespace fusegrad::device
