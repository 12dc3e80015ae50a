// dQ is added in the order of the tiles of keys (kOrdered): a tile's warp waits for the one before.
#pragma once

#include "cuda/attention/backward/query_sums/added.cuh"

namespace fusegrad::device {

template <class Kernel>
class OrderedSums : public AddedSums<Kernel> {
  using Base = AddedSums<Kernel>;
  using Base::kernel_, Base::group_, Base::has_;
  using typename Base::Config, typename Base::Place;

 public:
  using Base::Base;

  __device__ __forceinline__ void give(const Place& place, int i) {
    const auto& a = kernel_.a_;
    some_ = place.tile >= 0 && Base::first_row(place) < a.queries;
    const int tiles = (a.queries + Config::kRows - 1) / Config::kRows;
    added_ = kernel_.more_.added + ((place.b * a.heads + place.h) * tiles + place.row() / Config::kRows) * 2 + group_;
    if (some_ && kernel_.lane() == 0) wait_for_count(added_, place.col() / Config::kCols);
    __syncwarp();
    Base::give(place, i);
  }
  __device__ __forceinline__ void finish(const Place&) const {
    if (has_) wait_sums_added();
    __syncwarp();
    if (some_ && kernel_.lane() == 0) count_one(added_);
  }

 private:
  bool some_ = false;     // the warpgroup has queries of the tile
  int* added_ = nullptr;  // how many tiles of keys have been added to its part (FlexBackwardHopperArguments::added)
};

}  // namespace fusegrad::device
