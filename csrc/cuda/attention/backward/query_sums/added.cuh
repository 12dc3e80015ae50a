// dQ is added, in any order, to sums that begin as zeros; and what the other ways have in common with this one.
#pragma once

#include "cuda/attention/device/arguments.cuh"
#include "cuda/device/hopper.cuh"

namespace fusegrad::device {

/// Kernel: FlexBackwardHopper, which has the places of tiles and of their dQ in shared memory. A lane has eight queries
/// of the warpgroup's part of a tile; where dQ lies upright, it is one piece of memory, and the first lane has all.
template <class Kernel>
class AddedSums {
 public:
  using Place = typename Kernel::Place;
  using Config = typename Kernel::Configured;

  __device__ __forceinline__ AddedSums(const Kernel& kernel, int group)
      : kernel_(kernel),
        group_(group),
        bytes_(min(kernel.a_.sum_cols - first_col(), 64) / 8 * Kernel::kBlockBytes * kBlocks),
        has_(kernel.lane() < kPieces * Kernel::chunks(group)) {}

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void give(const Place& place, int) const {
    const int row = this->row(place);
    float* to = sums(place, row);
    if (takes(place, row)) add_floats(to, from(), bytes_);
    commit_sums();
    wait_sums_read();
  }
  __device__ __forceinline__ void finish(const Place&) const {}
  __device__ __forceinline__ void look_ahead(const Place&, int) const {}
  __device__ __forceinline__ void end() const {
    if (has_) wait_sums_added();
  }
  /// Where the warpgroup adds a tile's dQ to the sums itself: loads them into its place in shared memory.
  __device__ __forceinline__ void load_sums(const Place&) const {}

 protected:
  static constexpr int kPieces = Kernel::kUpright ? 1 : Kernel::kSumRows / 8, kBlocks = Kernel::kSumRows / 8 / kPieces;

  __device__ __forceinline__ int first_row(const Place& place) const { return place.row() + Kernel::first_row(group_); }
  __device__ __forceinline__ int row(const Place& place) const { return first_row(place) + piece() * 8; }
  // The lane's part: of one chunk of columns after the other, each eight queries.
  __device__ __forceinline__ int piece() const {
    return Kernel::kChunks == 1 ? kernel_.lane() : kernel_.lane() % kPieces;
  }
  __device__ __forceinline__ int first_col() const {
    return Kernel::first_col(group_) + (Kernel::kChunks == 1 ? 0 : kernel_.lane() / kPieces * kChunk);
  }
  /// Where the lane's part of dQ lies in shared memory.
  __device__ __forceinline__ unsigned from() const { return kernel_.sum(group_) + kernel_.lane() * Kernel::kEightRows; }
  /// The first row of the sums of a tile's head.
  __device__ __forceinline__ long long head(const Place& place) const {
    const auto& a = kernel_.a_;
    return static_cast<long long>(place.b * a.heads + place.h) * a.sum_rows;
  }
  /// The lane's sums, from its first query, `row`, on.
  __device__ __forceinline__ float* sums(const Place& place, int row) const {
    return kernel_.a_.query_sum + (head(place) + row) * kernel_.a_.sum_cols + first_col() * 8;
  }
  /// Whether the lane has queries of a tile.
  __device__ __forceinline__ bool takes(const Place& place, int row) const {
    return has_ && place.tile >= 0 && row < kernel_.a_.queries;
  }

  const Kernel& kernel_;
  const int group_, bytes_;  // bytes_: of the lane's part
  const bool has_;           // the lane has a part of whole tiles
};

}  // namespace fusegrad::device
