// The gradients of captured buffers by themselves, as portable.cuh, for sm_90a: a CTA has kRows queries by
// kCols keys of one query head, 64 queries a consumer warpgroup, and walks batches, whose contributions to one buffer
// it adds up in registers. One producer thread brings the tiles of each batch by TMA, up to kStages batches ahead, and
// a warp beside it the lines that the score_mod reads (TileLines), into kLineBytes of a stage. A warpgroup's keys are
// two halves: the products of one run beside the pairs of the other. Pairs beyond the lengths are computed too,
// whatever they give: each has a sum of its own, which is left out at the end.
//
// portable.cuh describes kPartialSums and the order of CTAs, backward/hopper_tiles.cuh kNarrow and kGroups.
#pragma once

#include "cuda/attention/captured/pair_boxes.cuh"
#include "cuda/attention/captured/pair_sums.cuh"
#include "cuda/attention/device/gradient.cuh"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

template <class Config>
class FlexGradBuffersHopper {
  using T = typename Config::Element;
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  using Derivative = typename Config::Derivative;
  using Product = Wgmma<T, Config::kCols / 2, false, false>;
  static constexpr int kThreads = Config::kGroups * kWarpgroup;  // of the consumers
  static constexpr int kBlocksN = Config::kCols / 8, kHalf = kBlocksN / 2;
  static constexpr int kRowBytes = Config::kNarrow ? kNarrowBytes : kChunkBytes;
  static_assert(Config::kRows == 64 * Config::kGroups && Derivative::kContributions == 1);
  static_assert(!Config::kBlocks && !Config::kDropout && Config::kHead <= kChunk && Config::kValue <= kChunk);
  using Kept = KeptReads<ScoreMod, kBlocksN, kThreads, true, Config::kGrouped>;
  using Batches = BatchWalk<Config::kGrouped>;
  using Lines = TileLines<ScoreMod, Config::kRows, Config::kCols, kLanes, true>;
  static constexpr bool kLines = Lines::all() && 4 * Lines::kWords <= Config::kLineBytes;
  static constexpr bool kMasks = kLines && Lines::kMasks;
  static constexpr HopperGradBuffersMemory kMemory{{.rows = Config::kRows,
                                                    .cols = Config::kCols,
                                                    .head = Config::kHead,
                                                    .value = Config::kValue,
                                                    .stages = Config::kStages,
                                                    .narrow = Config::kNarrow,
                                                    .line_bytes = Config::kLineBytes,
                                                    .kept = Kept::kCount}};
  static_assert(Kept::kBytes == kMemory.kept.bytes());

 public:
  static constexpr int kSharedBytes = kMemory.bytes();

  __device__ __forceinline__ FlexGradBuffersHopper(const FlexBackwardArguments& a, const FlexSums* sums,
                                                   const FlexBackwardHopperArguments& more,
                                                   const typename ScoreMod::Captured& score,
                                                   const typename MaskMod::Captured&, unsigned shared)
      : a_(a), sums_(sums), more_(more), score_(score), shared_(shared), far_(a) {}

  __device__ __forceinline__ void run() {
    const int col_tiles = (a_.keys + Config::kCols - 1) / Config::kCols;
    const int tiles = (a_.queries + Config::kRows - 1) / Config::kRows * col_tiles;
    const Batches batches(a_, a_.heads * tiles);
    const int place = batches.place;
    h_ = place / tiles;
    row_ = place % tiles / col_tiles * Config::kRows;
    col_ = place % tiles % col_tiles * Config::kCols;
    if (threadIdx.x == 0) {
      for (int s = 0; s < Config::kStages; ++s) {
        Barrier::init(full(s), kLines ? 2 : 1);
        Barrier::init(empty(s), kThreads / kLanes);
      }
      Barrier::fence_inits();
    }
    __syncthreads();
    if (__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0) == Config::kGroups) {
      give_registers<24>();
      if (threadIdx.x == kThreads) {
        produce(batches);
      } else if (kLines && threadIdx.x / kLanes == kThreads / kLanes + 1) {
        bring_lines(batches);
      }
    } else {
      take_registers<240>();
      Kept::load(
          shared_ + kMemory.kept.offset, score_, batches.first, h_,
          [&](int n, int e) { return PairPlace{query(e), key(n, e)}; }, [&](int n, int e) { return is_inside(n, e); });
      zero(sum_);
      Counted<Config::kStages> i;
      for (int b = batches.first; b < batches.end;) {
        // A loop for each: several ways in one loop cost the common one.
        if (is_far(b)) {
          consume<true, 0>(batches, b, i);
        } else if (const int halves = true_halves(i); kMasks && halves == 2) {
          consume<false, kMasks ? 2 : 0>(batches, b, i);
        } else if (kMasks && halves == 1) {
          consume<false, kMasks ? 1 : 0>(batches, b, i);
        } else {
          consume<false, 0>(batches, b, i);
        }
      }
      put_pair_sums<Config, 0, kThreads>(
          sums_[0], sum_, score_, batches.first, h_, [&](int e) { return query(e); },
          [&](int n, int e) { return key(n, e); }, [&](int n, int e) { return is_inside(n, e); });
    }
  }

 private:
  __device__ __forceinline__ unsigned piece(const Region& region, int s) const {
    return shared_ + region.offset + s * region.piece;
  }
  __device__ __forceinline__ unsigned full(int s) const { return piece(kMemory.barriers, s); }
  __device__ __forceinline__ unsigned empty(int s) const { return full(Config::kStages + s); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ int group() const { return static_cast<int>(threadIdx.x) / kWarpgroup; }
  /// The thread's first row of the tile.
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / kLanes * 16 + lane() / 4; }
  __device__ __forceinline__ int query(int e) const { return row_ + first_row() + e / 2 * 8; }
  __device__ __forceinline__ int key(int n, int e) const { return col_ + n * 8 + lane() % 4 * 2 + e % 2; }
  __device__ __forceinline__ bool is_inside(int n, int e) const { return query(e) < a_.queries && key(n, e) < a_.keys; }

  __device__ __forceinline__ void produce(const Batches& batches) const {
    const int key_head = h_ / a_.group;
    Counted<Config::kStages> i;
    for (int b = batches.first; b < batches.end; b += batches.step, i.next()) {
      const int s = i.stage(), key_batch = a_.key_batches == 1 ? 0 : b;
      const unsigned barrier = full(s);
      Barrier::wait(empty(s), i.parity() ^ 1);
      Barrier::expect(barrier, kMemory.query.piece + kMemory.grad_out.piece + kMemory.key.piece + kMemory.value.piece +
                                   kMemory.statistics.piece);
      copy_box(piece(kMemory.query, s), more_.query, barrier, 0, row_, h_, b);
      copy_box(piece(kMemory.key, s), more_.key, barrier, 0, col_, key_head, key_batch);
      copy_box(piece(kMemory.grad_out, s), more_.grad_out, barrier, 0, row_, h_, b);
      copy_box(piece(kMemory.value, s), more_.value, barrier, 0, col_, key_head, key_batch);
      // Rows beyond the head's last one are the next head's; their pairs take no part.
      copy_line(piece(kMemory.statistics, s), more_.rows, barrier, (b * a_.heads + h_) * a_.row_stride + row_);
    }
    // In place of the batch behind the last one: consumers wait for it, as a condition would make compilers wait for
    // their products.
    Barrier::wait(empty(i.stage()), i.parity() ^ 1);
    Barrier::arrive(full(i.stage()));
  }

  __device__ __forceinline__ void bring_lines(const Batches& batches) const {
    Counted<Config::kStages> i;
    for (int b = batches.first; b < batches.end; b += batches.step, i.next()) {
      Lines lines;
      lines.load(score_, b, h_, row_, col_, lane());
      Barrier::wait(empty(i.stage()), i.parity() ^ 1);
      lines.store(piece(kMemory.lines, i.stage()), lane());
      __syncwarp();
      if (lane() == 0) Barrier::arrive(full(i.stage()));
    }
    Barrier::wait(empty(i.stage()), i.parity() ^ 1);
    if (lane() == 0) Barrier::arrive(full(i.stage()));
  }

  __device__ __forceinline__ bool is_far(int b) const { return far_ && head_has_far(a_, b * a_.heads + h_); }
  /// For how many halves of the tile's keys, from the first one on, the masks are true that the score_mod reads by keys
  /// in the batch of a stage.
  __device__ __forceinline__ int true_halves(const Counted<Config::kStages>& i) const {
    if constexpr (!kMasks) return 0;
    constexpr int kKeys = Config::kCols / 2;
    Barrier::wait(full(i.stage()), i.parity());
    const unsigned lines = piece(kMemory.lines, i.stage());
    if (!Lines::template are_true<0, kKeys>(lines)) return 0;
    return Lines::template are_true<kKeys, kKeys>(lines) ? 2 : 1;
  }
  // Called by each warp when all its lanes are done with the stage.
  __device__ __forceinline__ void release(int s) const {
    __syncwarp();
    if (lane() == 0) Barrier::arrive(empty(s));
  }
  /// From batch `b` on, which has stage i, for as long as heads have far rows, or have none, and masks are true for
  /// kTrue halves of the keys.
  template <bool kFar, int kTrue>
  __device__ __forceinline__ void consume(const Batches& batches, int& b, Counted<Config::kStages>& i) {
    float score[2][kHalf][4], grad[2][kHalf][4];
    Barrier::wait(full(i.stage()), i.parity());
    multiply(score[0], grad[0], i.stage(), 0);
    wait_products(score[0], grad[0]);
    for (bool goes_on = true; goes_on;) {
      const int s = i.stage(), next = b + batches.step;
      FlexQuery rows[2];
      multiply(score[1], grad[1], s, 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(rows[r].row.lse), "=f"(rows[r].row.delta)
                     : "r"(piece(kMemory.statistics, s) + (first_row() + r * 8) * kRowStatisticsBytes));
        rows[r].origin = 0.0f;
        if constexpr (kFar) rows[r].origin = take_origin<Config>(a_, rows[r].row, b, h_, query(2 * r));
      }
      goes_on = next < batches.end && is_far(next) == kFar;
      add_pairs<kFar, 0>(score[0], grad[0], rows, b, line_reads<(kTrue > 0)>(s));
      wait_products(score[1], grad[1]);
      if constexpr (!kLines) release(s);
      i.next();
      Barrier::wait(full(i.stage()), i.parity());
      if constexpr (kMasks && !kFar) goes_on = goes_on && true_halves(i) == kTrue;
      multiply(score[0], grad[0], i.stage(), 0);
      add_pairs<kFar, 1>(score[1], grad[1], rows, b, line_reads<(kTrue > 1)>(s));
      if constexpr (kLines) release(s);
      wait_products(score[0], grad[0]);
      b = next;
    }
  }
  /// Issues scores and dP of the warpgroup's queries and one half of the keys, of stage s.
  __device__ __forceinline__ void multiply(float (&score)[kHalf][4], float (&grad)[kHalf][4], int s, int half) const {
    const int row = group() * 64 * kRowBytes, col = half * (Config::kCols / 2) * kRowBytes;
    wgmma_fence();
    multiply<Config::kHead>(score[0], piece(kMemory.query, s) + row, piece(kMemory.key, s) + col);
    multiply<Config::kValue>(grad[0], piece(kMemory.grad_out, s) + row, piece(kMemory.value, s) + col);
    wgmma_commit();
  }
  template <int kCommon>
  static __device__ __forceinline__ void multiply(float* c, unsigned a, unsigned b) {
    const auto row = descriptor<kRowBytes>(a, 16), col = descriptor<kRowBytes>(b, 16);
#pragma unroll
    for (int k = 0; k < kCommon / 16; ++k) Product::run(c, advanced(row, k * 32), advanced(col, k * 32), k != 0);
  }
  static __device__ __forceinline__ void wait_products(float (&score)[kHalf][4], float (&grad)[kHalf][4]) {
    wgmma_wait<0>();
    pin<kHalf * 4>(score[0]);
    pin<kHalf * 4>(grad[0]);
  }
  /// Where the thread's first pair reads lines.
  template <bool kTrue>
  __device__ __forceinline__ auto line_reads(int s) const {
    if constexpr (kLines) {
      return typename Lines::template ReadsOf<kTrue>(piece(kMemory.lines, s), first_row(), lane() % 4 * 2);
    } else {
      return score_mod::ReadThere<ScoreMod::kUnread>();
    }
  }
  template <bool kFar, int kWhich, class LineReads>
  __device__ __forceinline__ void add_pairs(const float (&score)[kHalf][4], const float (&grad)[kHalf][4],
                                            const FlexQuery (&rows)[2], int b, const LineReads& lines) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int n = kWhich * kHalf + i;
      const auto kept = Kept::reads(shared_ + kMemory.kept.offset, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float value[2], p;
        FlexPairGradient<Config>::template apply<kFar>(score_, a_.scale, score[i][e], grad[i][e], rows[e / 2], b, h_,
                                                       query(e), key(n, e), true, p, value,
                                                       reads_of_pair(lines.at(e / 2 * 8, n * 8 + e % 2), kept, e));
        sum_[n][e] += value[0];
      }
    }
  }

  const FlexBackwardArguments& a_;
  const FlexSums* sums_;
  const FlexBackwardHopperArguments& more_;
  const typename ScoreMod::Captured& score_;
  const unsigned shared_;
  int h_, row_, col_;
  float sum_[kBlocksN][4];
  const AnyFar far_;
};

}  // namespace fusegrad::device
