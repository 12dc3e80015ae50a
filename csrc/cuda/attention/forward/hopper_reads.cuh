// What mods read of a tile's pairs, in shared memory before its scores are multiplied: lines of what is read by keys,
// diagonals or queries (TileLines), and boxes of what is read for each pair by itself (PairBoxes). Three warps beside
// the producer bring them into a ring of stages, a tile or two ahead, so that consumers neither compute indices nor
// wait for global memory.
//
// scores.cuh and hopper.cuh describe Config; this file adds:
//   kReadStages                tiles of reads in shared memory; 0: every read is from where it is
//   kLineBytes                 of a stage, for lines
//   kBoxes                     whether a stage has boxes
//   kMaps                      of boxes so many by TMA
#pragma once

#include "cuda/attention/captured/pair_boxes.cuh"
#include "cuda/attention/device/scores.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

/// In place of a score_mod's tangent, where there is none.
struct NoTangent {
  struct Captured {};
  static constexpr int kLineCount = 0;
  static constexpr score_mod::LineRead kLine[1] = {};
  template <int k>
  static __device__ float line(const Captured&, int, int, int, int, bool);
};

template <class Config, class Tangent = NoTangent>
class FlexForwardReads {
  using ScoreMod = typename Config::ScoreMod;
  using MaskMod = typename Config::MaskMod;
  static constexpr int kThreads = kWarpgroup - kLanes;
  using ScoreLines = TileLines<ScoreMod, Config::kRows, Config::kCols, kThreads, kSame<Tangent, NoTangent>>;
  using MaskLines = TileLines<MaskMod, Config::kRows, Config::kCols, kThreads>;
  using TangentLines = TileLines<Tangent, Config::kRows, Config::kCols, kThreads>;
  using Boxes = PairBoxes<ScoreMod, Config::kRows, Config::kCols, KeptReads<ScoreMod, 1, 1, false>, Config::kBoxes,
                          Config::kMaps>;
  // Forward mode has no lines for masks.
  static constexpr bool kMaskLines = kSame<Tangent, NoTangent> && Config::kReadStages > 0 && MaskLines::kWords > 0 &&
                                     4 * MaskLines::kWords <= Config::kLineBytes;
  static constexpr int kMaskLineBytes = kMaskLines ? 4 * MaskLines::kWords : 0;
  static constexpr bool kScoreLines = Config::kReadStages > 0 && ScoreLines::kWords > 0 &&
                                      kMaskLineBytes + 4 * ScoreLines::kWords <= Config::kLineBytes;
  static constexpr int kScoreLineBytes = kScoreLines ? 4 * ScoreLines::kWords : 0;
  static constexpr bool kTangentLines =
      Config::kReadStages > 0 && TangentLines::kWords > 0 &&
      kMaskLineBytes + kScoreLineBytes + 4 * TangentLines::kWords <= Config::kLineBytes;
  static_assert(Config::kLineBytes % 16 == 0 && (Config::kReadStages > 0 || !Config::kBoxes));

 public:
  static constexpr bool kLines = kMaskLines || kScoreLines || kTangentLines;
  static constexpr bool kUsed = kLines || Boxes::kBytes > 0;
  /// Whether a score_mod reads of each pair by itself nothing but boxes.
  static constexpr bool kBoxesAlone = Config::kBoxes && Boxes::all();
  /// Whether are_masks_true() may be asked.
  static constexpr bool kScoreMasks = kScoreLines && ScoreLines::kMasks;
  /// Warps that bring a stage, and arrivals at its barrier.
  static constexpr int kWarps = !kUsed ? 0 : kLines || Boxes::kCopies ? kThreads / kLanes : 1;
  static constexpr int kArrivals = kWarps + (Boxes::kCopies ? kThreads : 0) + (Boxes::kMapped ? 1 : 0);
  static constexpr int kStageBytes = Boxes::kBytes + Config::kLineBytes;

  /// Called by the kWarps warps, thread being the number of each of their threads: brings the reads of a tile of a head
  /// from (q, kv) on. `full`: the stage's barrier, at which threads arrive with their copies; each warp is to arrive
  /// with what else it wrote. wait(): until the stage is free; what goes through registers is read before.
  template <class Arguments, class HopperArguments, class Wait>
  static __device__ __forceinline__ void bring(unsigned stage, unsigned full, const Arguments& a,
                                               const HopperArguments& more, const typename ScoreMod::Captured& score,
                                               const typename MaskMod::Captured& mask,
                                               const typename Tangent::Captured& tangent, int b, int h, int q, int kv,
                                               bool masked, int thread, const Wait& wait) {
    ScoreLines of_score;
    MaskLines of_mask;
    TangentLines of_tangent;
    if constexpr (kTangentLines) of_tangent.load(tangent, b, h, q, kv, thread);
    if constexpr (kScoreLines) of_score.load(score, b, h, q, kv, thread);
    if constexpr (kMaskLines) {
      if (masked) of_mask.load(mask, b, h, q, kv, thread);
    }
    wait();
    if constexpr (Boxes::kMapped) {
      if (thread == 0) Boxes::bring_mapped(stage, full, more.boxes, score, b, h, q, kv);
    }
    Boxes::template bring<kThreads>(stage, full, score, b, h, q, kv, a.queries, a.keys, thread);
    if constexpr (kScoreLines) of_score.store(stage + Boxes::kBytes + kMaskLineBytes, thread);
    if constexpr (kMaskLines) {
      if (masked) of_mask.store(stage + Boxes::kBytes, thread);
    }
    if constexpr (kTangentLines) of_tangent.store(stage + Boxes::kBytes + kMaskLineBytes + kScoreLineBytes, thread);
  }

  /// Reads of the lines of a score_mod, of its tangent and of a mask_mod: of the pair of query `q` and key `kv` of the
  /// tile.
  template <bool kTrue = false>
  static __device__ __forceinline__ auto score_lines(unsigned stage, int q, int kv) {
    if constexpr (kScoreLines) {
      return typename ScoreLines::template ReadsOf<kTrue>(stage + Boxes::kBytes + kMaskLineBytes, q, kv);
    } else {
      return score_mod::ReadThere<ScoreMod::kUnread>();
    }
  }
  /// Whether the masks that a score_mod reads by keys are true in all of the tile: reads of them are constants then
  /// (score_lines<true>), and instructions that choose by them none.
  static __device__ __forceinline__ bool are_masks_true(unsigned stage) {
    return ScoreLines::are_true(stage + Boxes::kBytes + kMaskLineBytes);
  }
  static __device__ __forceinline__ auto tangent_lines(unsigned stage, int q, int kv) {
    if constexpr (kTangentLines) {
      return typename TangentLines::Reads(stage + Boxes::kBytes + kMaskLineBytes + kScoreLineBytes, q, kv);
    } else {
      return score_mod::ReadThere<ScoreMod::kUnread>();
    }
  }
  static __device__ __forceinline__ auto mask_lines(unsigned stage, int q, int kv) {
    if constexpr (kMaskLines) {
      return typename MaskLines::Reads(stage + Boxes::kBytes, q, kv);
    } else {
      return score_mod::ReadThere<ScoreMod::kUnread>();
    }
  }
  /// Called by whole warps: the boxes' reads of 16 queries by 8 keys from (q, kv) of the tile on.
  static __device__ __forceinline__ auto boxes(unsigned stage, int q, int kv, int lane) {
    return reads_of_boxes<Boxes, false>(stage, q, kv, lane);
  }
};

}  // namespace fusegrad::device
