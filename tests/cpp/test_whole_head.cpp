// What the producer of a backward tells of the tiles of a head whose keys its CTA has all, on the host.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#define __device__              // NOLINT(bugprone-reserved-identifier)
#define __forceinline__ inline  // NOLINT(bugprone-reserved-identifier)
#include "cuda/attention/backward/whole_head.cuh"

namespace fusegrad::device {
namespace {

template <bool kMasked>
struct Config {
  static constexpr int kParts = 1, kRows = 128;
  static constexpr bool kBlocks = kMasked, kWhole = true;
};

// The tiles of queries of a tile of keys, by their words.
struct Walk {
  const std::vector<int>* words;
  int count() const { return static_cast<int>(words->size()); }
  int operator[](int i) const { return (*words)[static_cast<size_t>(i)]; }
};

// What happens to dQ of each tile of queries.
struct Seen {
  int added = 0, begun = 0, rounded = 0, zeroed = 0;
};

// Goes through a head as FlexBackwardHopperTiles::produce does, and checks that the flags of a tile agree with those
// that the next one has of it.
template <bool kMasked>
std::vector<Seen> go_through(WholeHead<Config<kMasked>>& head, const std::vector<std::vector<int>>& lists, int queries,
                             bool same) {
  using Head = WholeHead<Config<kMasked>>;
  const int cols = static_cast<int>(lists.size()), rows = (queries + 127) / 128;
  std::vector<Seen> seen(static_cast<size_t>(rows));
  bool after_rounds = false, after_sums = false;
  const auto tell = [&](int word, int row, int col) {
    const int flags = head.next(word, row, queries, col == 0, col + 1 == cols);
    EXPECT_EQ((flags & device::kAfterRounds) != 0, after_rounds);
    EXPECT_EQ((flags & device::kAfterSums) != 0, after_sums);
    after_rounds = (flags & device::kRounds) != 0;
    after_sums = after_rounds && (flags & device::kBeginsSums) == 0;
    return flags;
  };
  for (int col = 0; col < cols; ++col) {
    const auto walk_of = [&](int of) { return Walk{&lists[static_cast<size_t>(of)]}; };
    if (col == 0) head.begin(rows, cols, same, walk_of);
    const Walk walk = walk_of(col);
    for (int tile = 0; tile < walk.count() || head.lacks_keys(rows) || tile < 2; ++tile) {
      const int word = tile < walk.count() ? walk[tile] : head.tile_beyond(rows);
      const int row = TileEntry<>::column(word) * 128, lacking = Head::lacking_row(row, queries);
      const int flags = tell(word, row, col);
      const bool begins = (flags & device::kBeginsSums) != 0, rounds = (flags & device::kRounds) != 0;
      if (kMasked && lacking >= 0) {
        EXPECT_TRUE(begins && rounds && col == 0);
        ++seen.at(static_cast<size_t>(lacking / 128)).zeroed;
      } else if (row >= queries) {
        EXPECT_FALSE(begins || rounds);
      } else {
        Seen& of = seen.at(static_cast<size_t>(row / 128));
        EXPECT_EQ(begins, of.added == 0);
        EXPECT_EQ(of.rounded, 0);
        ++of.added;
        of.begun += begins ? 1 : 0;
        of.rounded += rounds ? 1 : 0;
      }
    }
  }
  EXPECT_EQ(tell(-1, 0, cols - 1) & (device::kBeginsSums | device::kRounds), 0);
  return seen;
}

TEST(WholeHead, StoresTheFirstAndRoundsTheLastOfAllKeys) {
  for (const int queries : {1, 128, 129, 700}) {
    const int rows = (queries + 127) / 128;
    std::vector<int> words;
    for (int row = 0; row < rows; ++row) words.push_back(row << TileEntry<>::kKindBits);
    for (const int cols : {1, 2, 5}) {
      WholeHead<Config<false>> head;
      for (const Seen& of : go_through(head, std::vector(static_cast<size_t>(cols), words), queries, true)) {
        EXPECT_EQ(of.added, cols);
        EXPECT_TRUE(of.begun == 1 && of.rounded == 1 && of.zeroed == 0);
      }
    }
  }
}

// Random block masks of one head after the other: what the lists name begins and is rounded once, the rest is zero.
TEST(WholeHead, CountsTheKeysThatListsName) {
  std::mt19937 random(0);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int n = 0; n < 5000; ++n) {
    const int rows = 1 + below(16), cols = 1 + below(15), share = below(101);
    const bool same = below(2) == 0;
    WholeHead<Config<true>> head;
    std::vector<std::vector<int>> lists;
    for (int of = 0; of < 3; ++of) {
      std::vector<int> wanted(static_cast<size_t>(rows));
      if (of == 0 || !same) {
        lists.assign(static_cast<size_t>(cols), {});
        for (auto& list : lists) {
          for (int row = 0; row < rows; ++row) {
            if (below(100) < share) list.push_back(row << TileEntry<>::kKindBits | below(2));
          }
        }
      }
      for (const auto& list : lists) {
        for (const int word : list) ++wanted[static_cast<size_t>(TileEntry<>::column(word))];
      }
      const auto seen = go_through(head, lists, (rows - 1) * 128 + 1 + below(128), same);
      for (size_t row = 0; row < seen.size(); ++row) {
        const int some = wanted[row] > 0 ? 1 : 0;
        EXPECT_EQ(seen[row].added, wanted[row]);
        EXPECT_TRUE(seen[row].begun == some && seen[row].rounded == some && seen[row].zeroed == 1 - some);
      }
    }
  }
}

}  // namespace
}  // namespace fusegrad::device
