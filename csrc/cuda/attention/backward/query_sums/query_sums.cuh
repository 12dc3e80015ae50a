// The ways in which tiles of dQ become sums in global memory, a class each: what the warp does that issues a consumer
// warpgroup's reductions. A kernel has one of them (QuerySums), and calls for each tile:
//   begin()               before it waits for the warpgroup's dQ
//   give(place, i)        when dQ of tile i lies in shared memory, which may be overwritten afterwards
//   finish(place)         when the warpgroup may go on
//   look_ahead(place, i)  last: reads what concerns tile i, the next one
// and end() behind all tiles.
#pragma once

#include "cuda/attention/backward/query_sums/added.cuh"
#include "cuda/attention/backward/query_sums/ordered.cuh"
#include "cuda/attention/backward/query_sums/stored_first.cuh"
#include "cuda/attention/backward/query_sums/whole_head.cuh"

namespace fusegrad::device {

template <class Kernel, bool kOrdered, bool kStoresFirst, bool kWhole>
struct QuerySumsOf {
  static_assert(!kOrdered && !kStoresFirst && !kWhole, "a kernel has one way");
  using Type = AddedSums<Kernel>;
};
template <class Kernel>
struct QuerySumsOf<Kernel, true, false, false> {
  using Type = OrderedSums<Kernel>;
};
template <class Kernel>
struct QuerySumsOf<Kernel, false, true, false> {
  using Type = StoredFirst<Kernel>;
};
template <class Kernel>
struct QuerySumsOf<Kernel, false, false, true> {
  using Type = WholeHeadSums<Kernel>;
};
template <class Kernel, class Config>
using QuerySums = typename QuerySumsOf<Kernel, Config::kOrdered, Config::kStoresFirst, Config::kWhole>::Type;

}  // namespace fusegrad::device
