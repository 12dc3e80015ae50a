// What the simplifier does, and what it must leave alone because IEEE arithmetic says so.
#include <gtest/gtest.h>

#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

// The simplified operand of 'return' for an expression of `score` (as statements), printed.
std::string simplified(const std::string& body) {
  const std::string text = print(simplify(parse("score_mod 1\nscalar $0 i64\nscalar $1 bool\n" + body)));
  return text.substr(text.find("scalar $1 bool\n") + 15);
}

TEST(Simplify, Applies) {
  const struct {
    const char *before, *after;
  } cases[] = {
      {"%0 = add 1.5 2.5\n%1 = mul score %0\nreturn %1", "%0 = mul score 4.0\nreturn %0\n"},
      {"%0 = mul 2.0 score\nreturn %0", "%0 = mul score 2.0\nreturn %0\n"},
      {"%0 = mul score 1.0\n%1 = div %0 1.0\n%2 = sub %1 0.0\n%3 = add %2 -0.0\nreturn %3", "return score\n"},
      {"%0 = mul score -1.0\n%1 = neg %0\nreturn %1", "return score\n"},
      {"%0 = div score 8.0\nreturn %0", "%0 = mul score 0.125\nreturn %0\n"},
      {"%0 = neg h\n%1 = to_float %0\n%2 = neg %1\n%3 = add score %2\nreturn %3",
       "%0 = neg h\n%1 = to_float %0\n%2 = sub score %1\nreturn %2\n"},
      {"%0 = pow score 2.0\nreturn %0", "%0 = square score\nreturn %0\n"},
      {"%0 = sub q_idx kv_idx\n%1 = neg %0\n%2 = add %1 3\n%3 = sub %2 5\n%4 = to_float %3\nreturn %4",
       "%0 = sub kv_idx q_idx\n%1 = add %0 -2\n%2 = to_float %1\nreturn %2\n"},
      {"%0 = mul $0 0\n%1 = to_float %0\n%2 = sub score %1\nreturn %2", "return score\n"},
      {"%0 = ge q_idx kv_idx\n%1 = not %0\n%2 = where %1 score 0.0\nreturn %2",
       "%0 = lt q_idx kv_idx\n%1 = where %0 score 0.0\nreturn %1\n"},
      {"%0 = where true score 0.0\n%1 = where $1 %0 %0\nreturn %1", "return score\n"},
      {"%0 = where $1 score 0.0\n%1 = where $1 %0 1.0\nreturn %1", "%0 = where $1 score 1.0\nreturn %0\n"},
      {"%0 = where $1 true false\n%1 = and %0 true\n%2 = or %1 false\n%3 = xor %2 true\n%4 = not %3\n"
       "%5 = where %4 score 0.0\nreturn %5",
       "%0 = where $1 score 0.0\nreturn %0\n"},
      {"%0 = to_int $1\n%1 = ne %0 0\n%2 = where %1 score 0.0\nreturn %2", "%0 = where $1 score 0.0\nreturn %0\n"},
      {"%0 = lt score score\n%1 = where %0 1.0 score\nreturn %1", "return score\n"},
      {"%0 = relu score\n%1 = relu %0\n%2 = neg %1\n%3 = abs %2\nreturn %3",
       "%0 = relu score\n%1 = abs %0\nreturn %1\n"},
  };
  for (const auto& c : cases) EXPECT_EQ(simplified(c.before), c.after) << c.before;
}

TEST(Simplify, LeavesAlone) {
  for (const char* body : {
           "%0 = mul score 0.0\nreturn %0\n",                          // inf, NaN, -1
           "%0 = add score 0.0\nreturn %0\n",                          // -0 + 0 is 0
           "%0 = sub score -0.0\nreturn %0\n",                         // the same
           "%0 = sub score score\nreturn %0\n",                        // inf, NaN
           "%0 = div score score\nreturn %0\n",                        // 0, inf, NaN
           "%0 = div score 3.0\nreturn %0\n",                          // rounds twice
           "%0 = div score 1e-40\nreturn %0\n",                        // its reciprocal is infinite in float32
           "%0 = ge score score\n%1 = where %0 1.0 2.0\nreturn %1\n",  // NaN
           "%0 = ge score 0.0\n%1 = not %0\n%2 = where %1 1.0 2.0\nreturn %2\n",  // see below
           "%0 = mul score 0.1\n%1 = mul %0 10.0\nreturn %1\n",                   // rounds twice
           "%0 = detach score\nreturn %0\n",
       }) {
    if (std::string_view(body).find("not") != std::string_view::npos) {
      // The negation of a comparison of floats is not the opposite one; exchanging the branches is right.
      EXPECT_EQ(simplified(body), "%0 = ge score 0.0\n%1 = where %0 2.0 1.0\nreturn %1\n");
    } else {
      EXPECT_EQ(simplified(body), body);
    }
  }
}

TEST(Simplify, MergesContributions) {
  const std::string text =
      print(simplify(parse("derivative 1\nbuffer @0 f 1\n%0 = mul grad 2.0\n%1 = sub q_idx 0\n"
                           "return 0.0\nscatter grad @0 q_idx\nscatter 0.0 @0 kv_idx\n"
                           "scatter %0 @0 %1\n")));
  EXPECT_EQ(text,
            "derivative 1\nbuffer @0 f 1\n%0 = mul grad 2.0\n%1 = add grad %0\nreturn 0.0\nscatter %1 @0 q_idx\n");
}

}  // namespace
}  // namespace fusegrad::score_mod
