// The order of threads in which copies of tables' indices lie (places.h), of tiles of 64 queries by 64 keys that four
// warps have: what a thread reads for its pairs are whole vectors of 16 bytes, side by side with those of its warp.
#pragma once

namespace fusegrad::device {

/// kRows: as any tensor. Else a tile is where a 64 x 64 tile of rows would be; the accumulators' rows are queries, as
/// the forward has them, or keys, as the backward.
enum class PlaceOrder : unsigned char { kRows, kQueryRows, kKeyRows };

constexpr int kPlaceTile = 64, kPlaceThreads = 128;

struct PlaceOfThread {
  int row, col;
};
/// Element j of vector `part`, of `count` elements, of a tile: thread by thread the first vector of each, then the
/// second.
constexpr PlaceOfThread place_of_thread(int part, int j, int count) {
  const int thread = part % kPlaceThreads, lane = thread % 32, i = part / kPlaceThreads * count + j;
  return {thread / 32 * 16 + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

}  // namespace fusegrad::device
