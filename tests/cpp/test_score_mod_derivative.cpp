// The text of derivatives: what is merged, what is selected, PyTorch's subgradients.
#include <gtest/gtest.h>

#include "score_mod/derivative.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

std::string derivative(const std::string& text, const std::vector<bool>& wants_grad = {true, true}) {
  return print(differentiate(parse(text), wants_grad));
}

TEST(Derivative, OfTheWorkedExample) {
  EXPECT_EQ(derivative("score_mod 1\nbuffer @0 i64 1\nbuffer @1 f 1\n%0 = load @0 q_idx\n%1 = load @1 %0\n"
                       "%2 = add score %1\nreturn %2\n"),
            "derivative 1\nbuffer @0 i64 1\nbuffer @1 f 1\n%0 = load @0 q_idx\nreturn grad\nscatter grad @1 %0\n");
}

TEST(Derivative, ReadsOfOnePlaceAreOneContribution) {
  EXPECT_EQ(derivative("score_mod 1\nbuffer @0 f 1\n%0 = load @0 h\n%1 = add score %0\n%2 = load @0 h\n"
                       "%3 = mul %1 %2\nreturn %3\n"),
            "derivative 1\nbuffer @0 f 1\n%0 = load @0 h\n%1 = mul grad %0\n%2 = add score %0\n%3 = mul grad %2\n"
            "%4 = add %3 %1\nreturn %1\nscatter %4 @0 h\n");
}

TEST(Tangent, IsTheSumOfProductsWithTheGradients) {
  const auto text = [](const std::string& mod, const std::vector<bool>& has_tangent) {
    return print(tangent(parse(mod), has_tangent));
  };
  const std::string product =
      "score_mod 1\nbuffer @0 f 1\nbuffer @1 i64 1\n%0 = load @1 q_idx\n%1 = load @0 %0\n%2 = mul score %1\n"
      "return %2\n";
  const std::string declared = "tangent 1\nbuffer @0 f 1\nbuffer @1 i64 1\n";
  EXPECT_EQ(text(product, {}), declared + "%0 = load @1 q_idx\n%1 = load @0 %0\n%2 = mul %1 grad\nreturn %2\n");
  // The tangent of buffer 0 is a buffer behind the others, and is read where that is.
  const std::string both = text(product, {true, true});
  EXPECT_EQ(both.find(declared + "buffer @2 f 1\n"), 0u);
  EXPECT_NE(both.find("load @2 %0"), std::string::npos);
  EXPECT_EQ(print(parse(both)), both);
  // A branch that is not taken adds nothing.
  EXPECT_NE(text("score_mod 1\n%0 = gt score 0.0\n%1 = log score\n%2 = where %0 %1 0.0\nreturn %2\n", {}).find("where"),
            std::string::npos);
  EXPECT_THROW(text("derivative 1\nreturn grad\n", {}), GraphError);
}

TEST(Curvature, IsTheDerivativeOfTheDerivative) {
  const auto text = [](const std::string& mod) { return print(curvature(parse(mod))); };
  EXPECT_EQ(text("score_mod 1\nbuffer @0 f 1\n%0 = load @0 h\n%1 = mul score %0\nreturn %1\n"),
            "derivative 1\nbuffer @0 f 1\nreturn 0.0\n");
  EXPECT_EQ(text("score_mod 1\n%0 = square score\n%1 = mul %0 3.0\nreturn %1\n"),
            "derivative 1\n%0 = mul grad 3.0\n%1 = mul %0 2.0\nreturn %1\n");
  // What is detached is a number, in the derivative too.
  EXPECT_EQ(text("score_mod 1\n%0 = detach score\n%1 = mul score %0\nreturn %1\n"), "derivative 1\nreturn 0.0\n");
  EXPECT_THROW(text("score_mod 1\n%0 = mul ^0 2.0\n%1 = backward score %0\n%2 = custom ^0 score %1\nreturn %2\n"),
               GraphError);
}

TEST(Derivative, PassesTheGradientOrZero) {
  const auto passes = [](const std::string& body) {
    return passes_gradient(differentiate(
        parse("score_mod 1\nbuffer @0 f 1\nbuffer @1 bool 1\n%0 = load @0 kv_idx\n%1 = load @1 kv_idx\n" + body),
        {true, false}));
  };
  const std::string sum = "%2 = add score %0\n";
  EXPECT_TRUE(passes(sum + "return %2\n"));
  EXPECT_TRUE(passes(sum + "%3 = where %1 %2 -1e9\nreturn %3\n"));
  EXPECT_TRUE(passes(sum + "%3 = where %1 -inf %2\nreturn %3\n"));
  EXPECT_TRUE(passes(sum + "%3 = gt score 0.0\n%4 = where %3 %2 0.0\n%5 = where %1 %4 -inf\nreturn %5\n"));
  EXPECT_FALSE(passes("%2 = mul score %0\nreturn %2\n"));
  EXPECT_FALSE(passes(sum + "%3 = mul %2 2.0\n%4 = where %1 %3 -inf\nreturn %4\n"));
  EXPECT_FALSE(passes(sum + "%3 = where %1 %2 %0\n%4 = tanh %3\nreturn %4\n"));
  // The contribution alone has a factor.
  EXPECT_FALSE(passes("%2 = mul %0 3.0\n%3 = add score %2\nreturn %3\n"));
}

TEST(Derivative, OnlyWantedBuffersContribute) {
  const std::string text =
      "score_mod 1\nbuffer @0 f 1\nbuffer @1 f 1\n%0 = load @0 h\n%1 = load @1 b\n%2 = mul %0 %1\n%3 = add score %2\n"
      "return %3\n";
  EXPECT_EQ(derivative(text, {false, true}),
            "derivative 1\nbuffer @0 f 1\nbuffer @1 f 1\n%0 = load @0 h\n%1 = mul grad %0\nreturn grad\n"
            "scatter %1 @1 b\n");
  EXPECT_EQ(derivative(text, {}), "derivative 1\nbuffer @0 f 1\nbuffer @1 f 1\nreturn grad\n");
}

TEST(Derivative, ScoreIndependent) {
  EXPECT_EQ(derivative("score_mod 1\nbuffer @0 f 1\n%0 = load @0 h\nreturn %0\n"),
            "derivative 1\nbuffer @0 f 1\nreturn 0.0\nscatter grad @0 h\n");
  EXPECT_EQ(derivative("score_mod 1\nreturn 1.5\n"), "derivative 1\nreturn 0.0\n");
}

// The selection comes after the products: 0 * inf of a branch not taken is NaN.
TEST(Derivative, BranchesAreSelectedLast) {
  EXPECT_EQ(
      derivative("score_mod 1\n%0 = gt score 0.0\n%1 = log score\n%2 = mul %1 3.0\n%3 = where %0 %2 0.0\nreturn %3\n"),
      "derivative 1\n%0 = gt score 0.0\n%1 = mul grad 3.0\n%2 = div %1 score\n%3 = where %0 %2 0.0\nreturn %3\n");
  // One selection where both branches use the score.
  EXPECT_EQ(derivative("score_mod 1\n%0 = ge q_idx kv_idx\n%1 = mul score 2.0\n%2 = where %0 %1 score\nreturn %2\n"),
            "derivative 1\n%0 = ge q_idx kv_idx\n%1 = mul grad 2.0\n%2 = where %0 %1 grad\nreturn %2\n");
}

TEST(Derivative, Subgradients) {
  EXPECT_EQ(derivative("score_mod 1\n%0 = relu score\nreturn %0\n"),
            "derivative 1\n%0 = le score 0.0\n%1 = where %0 0.0 grad\nreturn %1\n");
  EXPECT_EQ(derivative("score_mod 1\n%0 = clamp score -1.0 1.0\nreturn %0\n"),
            "derivative 1\n%0 = ge score -1.0\n%1 = le score 1.0\n%2 = and %0 %1\n%3 = where %2 grad 0.0\nreturn %3\n");
  EXPECT_EQ(derivative("score_mod 1\n%0 = max score 0.0\nreturn %0\n"),
            "derivative 1\n%0 = lt score 0.0\n%1 = eq score 0.0\n%2 = mul grad 0.5\n%3 = where %1 %2 grad\n"
            "%4 = where %0 0.0 %3\nreturn %4\n");
  EXPECT_EQ(derivative("score_mod 1\n%0 = abs score\nreturn %0\n"),
            "derivative 1\n%0 = sign score\n%1 = mul grad %0\nreturn %1\n");
  for (const char* flat : {"floor", "ceil", "trunc", "round", "sign", "detach"}) {
    EXPECT_EQ(derivative(std::string("score_mod 1\n%0 = ") + flat + " score\nreturn %0\n"),
              "derivative 1\nreturn 0.0\n");
  }
}

TEST(Derivative, OfItsOwn) {
  // Straight through: nothing flows into what the value is computed from.
  EXPECT_EQ(derivative("score_mod 1\n%0 = round score\n%1 = backward score ^0\n%2 = custom ^0 %0 %1\n%3 = mul %2 3.0\n"
                       "return %3\n"),
            "derivative 1\n%0 = mul grad 3.0\nreturn %0\n");
  // Not linear, of a branch: an upstream that is not taken is 0.
  EXPECT_EQ(derivative("score_mod 1\n%0 = clamp ^0 -1.0 1.0\n%1 = backward score %0\n%2 = custom ^0 score %1\n"
                       "%3 = gt score 0.0\n%4 = where %3 %2 1.0\nreturn %4\n"),
            "derivative 1\n%0 = gt score 0.0\n%1 = where %0 grad 0.0\n%2 = clamp %1 -1.0 1.0\nreturn %2\n");
}

TEST(Derivative, OfItsOwnWithSeveralResults) {
  const std::string head =
      "score_mod 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\n%1 = mul score %0\n%2 = add score %0\n"
      "%3 = mul ^0 ^1\n%4 = backward score %3 %0 ^1\n%5 = custom ^0 %1 %4\n%6 = custom ^1 %2 %4\n";
  EXPECT_EQ(derivative(head + "%7 = sin %6\n%8 = add %5 %7\nreturn %8\n"),
            "derivative 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\n%1 = add score %0\n%2 = cos %1\n%3 = mul grad %2\n"
            "%4 = mul grad %3\nreturn %4\nscatter %3 @0 kv_idx\n");
  // What is not used has the upstream 0.
  EXPECT_EQ(derivative(head + "return %5\n"), "derivative 1\nbuffer @0 f 1\n%0 = mul grad 0.0\nreturn %0\n");
  const std::string forward = print(simplify(lowered(parse(head + "return %5\n"))));
  EXPECT_EQ(forward, "score_mod 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\n%1 = mul score %0\nreturn %1\n");
}

TEST(Derivative, KeysFollowTheOrderOfTheWalk) {
  const auto text = [](const std::string& a, const std::string& b) {
    return "score_mod 1\n%0 = backward score ^" + a + "\n%1 = custom ^" + a + " score %0\n%2 = sin %1\n" +
           "%3 = backward %2 ^" + b + "\n%4 = custom ^" + b + " %2 %3\nreturn %4\n";
  };
  EXPECT_EQ(print(parse(text("7", "2"))), print(parse(text("0", "1"))));
  EXPECT_EQ(print(simplify(parse("score_mod 1\n%0 = backward score 0.0\n%1 = custom ^0 score %0\nreturn %1\n"))),
            "score_mod 1\n%0 = detach score\nreturn %0\n");
}

TEST(Derivative, Refusals) {
  EXPECT_THROW(derivative("mask_mod 1\nreturn true\n"), GraphError);
  EXPECT_THROW(derivative("derivative 1\nreturn grad\n"), GraphError);
  EXPECT_THROW(differentiate(Graph(Kind::kScoreMod), {}), GraphError);
}

}  // namespace
}  // namespace fusegrad::score_mod
