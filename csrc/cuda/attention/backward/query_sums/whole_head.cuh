// A CTA has all keys of a head (kWhole): it stores its first part of dQ, adds the next ones, loads the sums for the
// last one, to which the warpgroup adds them, and stores the rounded dQ. backward/whole_head.cuh says which is which.
#pragma once

#include "cuda/attention/backward/query_sums/added.cuh"
#include "cuda/attention/backward/whole_head.cuh"

namespace fusegrad::device {

template <class Kernel>
class WholeHeadSums : public AddedSums<Kernel> {
  using Base = AddedSums<Kernel>;
  using Base::kernel_, Base::group_, Base::bytes_, Base::has_;
  using typename Base::Config, typename Base::Place;

 public:
  using Base::Base;

  // A lane stores sums, adds to them and loads them: each only when the one before is in memory.
  __device__ __forceinline__ void begin() const { wait_sums_added(); }
  __device__ __forceinline__ void give(const Place& place, int i) const {
    const auto& a = kernel_.a_;
    const int first = Base::first_row(place), row = first + kernel_.lane() * 8;
    if (place.has(kRounds)) {
      const int lacking = Config::kBlocks ? WholeHead<Config>::lacking_row(place.row(), a.queries) : -1;
      const int to = lacking >= 0 ? lacking + Kernel::first_row(group_) : first;
      if (kernel_.lane() == 0)
        store_box<Kernel::kUsedOnce>(kernel_.more_.grad_query, kernel_.sum(group_), Kernel::first_col(group_), to,
                                     place.h, place.b);
    } else if (has_ && row < a.queries) {
      float* to = own_sums(place) + kernel_.lane() * 8 * a.sum_cols;
      if (place.has(kBeginsSums)) {
        store_floats(to, Base::from(), bytes_);
      } else {
        add_floats(to, Base::from(), bytes_);
      }
    }
    commit_sums();
    wait_sums_read();
    __syncwarp();
    if (const Place next = kernel_.place_of(i + 1); Config::kOwnPlaces || !next.last()) load_sums(next);
  }
  __device__ __forceinline__ void load_sums(const Place& place) const {
    if (!place.has(kRounds) || place.has(kBeginsSums)) return;
    const auto& a = kernel_.a_;
    const int rows = a.queries - place.row() - Kernel::first_row(group_);
    const int pieces = min(max(rows + 7, 0) / 8, Base::kPieces);
    const unsigned full = kernel_.sums_full(group_);
    if (kernel_.lane() == 0) Barrier::expect(full, pieces * bytes_);
    __syncwarp();
    if (kernel_.lane() < pieces)
      copy_floats(Base::from(), own_sums(place) + kernel_.lane() * 8 * a.sum_cols, full, bytes_);
  }

 private:
  // Where the CTA sums up dQ of a tile, the warpgroup's part of it.
  __device__ __forceinline__ float* own_sums(const Place& place) const {
    const auto& a = kernel_.a_;
    const long long head = static_cast<int>(blockIdx.x) * a.group + place.h % a.group;
    return a.query_sum + (head * a.sum_rows + place.row() + Kernel::first_row(group_)) * a.sum_cols +
           Kernel::first_col(group_) * 8;
  }
};

}  // namespace fusegrad::device
