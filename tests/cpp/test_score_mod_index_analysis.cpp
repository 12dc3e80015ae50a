// Bounds of integer values, against all values of their operands.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "score_mod/index_analysis.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  const int64_t q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
int64_t mod(int64_t a, int64_t b) { return b == 0 ? 0 : a - b * floor_div(a, b); }

// The bounds of an operation on two scalars of these bounds.
Interval bounds(const std::string& op, Interval a, Interval b) {
  const Graph graph =
      parse("score_mod 1\nscalar $0 i64\nscalar $1 i64\n%0 = " + op + " $0 $1\n%1 = mul score %0\nreturn %1\n");
  const Interval scalars[] = {a, b};
  const auto found = intervals(graph, {}, {}, scalars);
  for (NodeId id = 0; id < static_cast<NodeId>(found.size()); ++id) {
    if (graph[id].op == Op::kFloorDiv || graph[id].op == Op::kMod) return found[id];
  }
  ADD_FAILURE() << "there is no " << op;
  return {};
}

TEST(Intervals, HoldQuotientsAndRemainders) {
  constexpr int64_t kMost = 5;
  for (int64_t low = -kMost; low <= kMost; ++low) {
    for (int64_t high = low; high <= kMost; ++high) {
      for (int64_t least = -kMost; least <= kMost; ++least) {
        for (int64_t most = least; most <= kMost; ++most) {
          const Interval quotient = bounds("floor_div", {low, high}, {least, most});
          const Interval remainder = bounds("mod", {low, high}, {least, most});
          for (int64_t a = low; a <= high; ++a) {
            for (int64_t b = least; b <= most; ++b) {
              ASSERT_TRUE(quotient.low <= floor_div(a, b) && floor_div(a, b) <= quotient.high) << a << " // " << b;
              ASSERT_TRUE(remainder.low <= mod(a, b) && mod(a, b) <= remainder.high) << a << " % " << b;
            }
          }
        }
      }
    }
  }
}

// b // n and b % n of a number n of the call are no more than 32 bits, whatever its sign.
TEST(Intervals, OfQuotientsBySmallNumbersAreSmall) {
  constexpr Interval kIndex{0, (int64_t{1} << 30) - 1}, kSmall{-(int64_t{1} << 30), int64_t{1} << 30}, kAny{};
  for (const char* op : {"floor_div", "mod"}) EXPECT_TRUE(bounds(op, kIndex, kSmall).fits_int32()) << op;
  EXPECT_TRUE(bounds("floor_div", kIndex, kAny).fits_int32());
  EXPECT_FALSE(bounds("mod", kIndex, kAny).fits_int32());
  EXPECT_FALSE(bounds("floor_div", kAny, kSmall).fits_int32());
}

// The buffers and dimensions that integers of buffer 0 index.
std::vector<std::pair<int, size_t>> indexed(const std::string& body) {
  const Graph graph =
      parse("score_mod 1\nbuffer @0 i64 2\nbuffer @1 f 2\nbuffer @2 f 1\n%0 = load @0 q_idx kv_idx\n" + body);
  std::vector<std::pair<int, size_t>> found;
  for (const auto& [buffer, dimension] : indexed_by(graph, 0)) found.emplace_back(buffer, dimension);
  return found;
}

TEST(IndexedBy, NamesDimensionsWhereIntegersAreIndicesAlone) {
  using Found = std::vector<std::pair<int, size_t>>;
  EXPECT_EQ(indexed("%1 = load @1 h %0\n%2 = add score %1\nreturn %2\n"), (Found{{1, 1}}));
  EXPECT_EQ(indexed("%1 = load @1 %0 h\n%2 = load @2 %0\n%3 = add %1 %2\n%4 = add score %3\nreturn %4\n"),
            (Found{{1, 0}, {2, 0}}));
  EXPECT_EQ(indexed("%1 = to_float %0\n%2 = add score %1\nreturn %2\n"), Found());
  EXPECT_EQ(indexed("%1 = add %0 1\n%2 = load @2 %1\n%3 = add score %2\nreturn %3\n"), Found());
  EXPECT_EQ(indexed("%1 = load @2 %0\n%2 = to_float %0\n%3 = mul %1 %2\n%4 = add score %3\nreturn %4\n"), Found());
  EXPECT_EQ(indexed("%1 = load @0 %0 kv_idx\n%2 = load @2 %1\n%3 = add score %2\nreturn %3\n"), Found());
  EXPECT_EQ(indexed("return score\n"), Found());
}

TEST(AllowsBetweenCorners, HoldsForConvexMasksAlone) {
  const auto holds = [](const std::string& body) { return allows_between_corners(parse("mask_mod 1\n" + body)); };
  EXPECT_TRUE(holds("%0 = ge q_idx kv_idx\nreturn %0\n"));
  EXPECT_TRUE(holds("%0 = ge q_idx kv_idx\n%1 = sub q_idx kv_idx\n%2 = lt %1 100\n%3 = and %0 %2\nreturn %3\n"));
  EXPECT_TRUE(holds("%0 = mul h 3\n%1 = add kv_idx %0\n%2 = mul q_idx 2\n%3 = le %1 %2\nreturn %3\n"));
  EXPECT_TRUE(holds("%0 = sub q_idx kv_idx\n%1 = abs %0\n%2 = gt 70 %1\nreturn %2\n"));
  EXPECT_TRUE(holds("%0 = eq q_idx kv_idx\nreturn %0\n"));
  EXPECT_TRUE(holds("%0 = mod b 2\n%1 = ne %0 0\nreturn %1\n"));
  // Not the outside of a band, two halves, steps, or what a buffer says.
  EXPECT_FALSE(holds("%0 = sub q_idx kv_idx\n%1 = abs %0\n%2 = lt 70 %1\nreturn %2\n"));
  EXPECT_FALSE(holds("%0 = ge q_idx kv_idx\n%1 = lt kv_idx 4\n%2 = or %0 %1\nreturn %2\n"));
  EXPECT_FALSE(holds("%0 = ne q_idx kv_idx\nreturn %0\n"));
  EXPECT_FALSE(holds("%0 = ge q_idx kv_idx\n%1 = not %0\nreturn %1\n"));
  EXPECT_FALSE(holds("%0 = floor_div q_idx 128\n%1 = floor_div kv_idx 128\n%2 = eq %0 %1\nreturn %2\n"));
  EXPECT_FALSE(holds("%0 = mul q_idx kv_idx\n%1 = lt %0 100\nreturn %1\n"));
  EXPECT_FALSE(holds("buffer @0 i64 1\n%0 = load @0 q_idx\n%1 = ge %0 kv_idx\nreturn %1\n"));
  EXPECT_FALSE(holds("%0 = sub q_idx kv_idx\n%1 = abs %0\n%2 = lt %1 kv_idx\nreturn %2\n"));
}

}  // namespace
}  // namespace fusegrad::score_mod
