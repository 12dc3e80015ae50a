// The first CTA that has dQ of some queries stores it as the sum (kStoresFirst), and the others add theirs: sums need
// not begin as zeros.
#pragma once

#include "cuda/attention/backward/query_sums/added.cuh"

namespace fusegrad::device {

template <class Kernel>
class StoredFirst : public AddedSums<Kernel> {
  using Base = AddedSums<Kernel>;
  using Base::kernel_, Base::group_, Base::bytes_, Base::has_;
  using typename Base::Config, typename Base::Place;

 public:
  using Base::Base;

  __device__ __forceinline__ void give(const Place& place, int) {
    const int row = Base::row(place);
    float* to = Base::sums(place, row);
    stored_ = store_or_add(Base::takes(place, row), place, to);
    commit_sums();
    wait_sums_read();
  }
  __device__ __forceinline__ void finish(const Place& place) const {
    if (stored_) publish(place);
  }
  // Consumers that gave a tile's dQ have read the next Place.
  __device__ __forceinline__ void look_ahead(const Place& place, int i) {
    state_ = kSumMissing;
    if (place.tile >= 0) {
      const Place next = kernel_.place_of(i);
      if (Base::takes(next, Base::row(next)))
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(state_) : "l"(state_of(next)));
    }
  }

 private:
  // The state of the lane's sums.
  __device__ __forceinline__ int* state_of(const Place& place) const {
    return kernel_.more_.sum_states + (Base::head(place) + Base::row(place)) / 8 * chunks_of(Config::kHead) +
           Kernel::first_col(group_) / kChunk;
  }
  // Called by whole warps: stores the lane's part of dQ where no CTA has stored its own before, else adds it. The
  // caller commits. Returns whether the lane is to publish what it stored.
  //
  // States are read without acquiring, which would empty the L1 cache: reductions are done in the L2 cache, and where a
  // state says so, what they add to is there.
  __device__ __forceinline__ bool store_or_add(bool has, const Place& place, float* to) const {
    int state = state_;
    const unsigned from = Base::from();
    if (has && state != kSumStored) state = atomicCAS(state_of(place), kSumMissing, kSumBeingStored);
    const bool stores = has && state == kSumMissing, waits = has && state == kSumBeingStored;
    if (stores) store_floats(to, from, bytes_);
    const bool some_wait = __any_sync(~0u, waits) != 0;
    if (some_wait) {
      // Two warps may wait for each other's lanes: these publish first.
      commit_sums();
      if (stores) publish(place);
      __syncwarp();
      while (waits && state != kSumStored)
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(state) : "l"(state_of(place)) : "memory");
    }
    if (has && !stores) add_floats(to, from, bytes_);
    return stores && !some_wait;
  }
  // Tells that the lane's sums are in memory, when they are.
  __device__ __forceinline__ void publish(const Place& place) const {
    wait_sums_added();
    asm volatile("fence.proxy.async;\nst.release.gpu.global.s32 [%0], %1;" ::"l"(state_of(place)),
                 "r"(static_cast<int>(kSumStored))
                 : "memory");
  }

  int state_ = kSumMissing;  // FlexSumState of the lane's sums of the next tile
  bool stored_ = false;      // the lane has stored sums and is to publish it
};

}  // namespace fusegrad::device
