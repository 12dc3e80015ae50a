// Building score_mods from C++ expressions.
#include <fusegrad/score_mod.h>
#include <gtest/gtest.h>

#include <cmath>

#include "score_mod/text.h"

namespace fusegrad {
namespace {

TEST(Expression, PrintsTheCanonicalText) {
  const Captured bias(at::randn({8})), offset(at::arange(8));
  const auto mod =
      trace_score_mod([&](const auto& score, const auto&, const auto&, const auto& q_idx, const auto& kv_idx) {
        return where(q_idx >= kv_idx, score + bias[offset[q_idx]], -INFINITY);
      });
  EXPECT_EQ(mod.text,
            "score_mod 1\n"
            "buffer @0 i64 1\n"
            "buffer @1 f 1\n"
            "%0 = ge q_idx kv_idx\n"
            "%1 = load @0 q_idx\n"
            "%2 = load @1 %1\n"
            "%3 = add score %2\n"
            "%4 = where %0 %3 -inf\n"
            "return %4\n");
  ASSERT_EQ(mod.buffers.size(), 2u);
  EXPECT_TRUE(mod.buffers[0].is_same(offset.tensor()));
  EXPECT_TRUE(mod.buffers[1].is_same(bias.tensor()));
  EXPECT_EQ(score_mod::print(score_mod::parse(mod.text)), mod.text);
}

TEST(Expression, NumbersArePartOfTheTextOrScalars) {
  const CapturedNumber cap(20.0), shift(3);
  const auto mod = trace_score_mod([&](const auto& score, const auto&, const auto&, const auto& q_idx, const auto&) {
    return 2.0 * tanh(score / cap) * cap + (q_idx + shift) * 0.5;
  });
  EXPECT_EQ(mod.text,
            "score_mod 1\nscalar $0 f\nscalar $1 i64\n%0 = div score $0\n%1 = tanh %0\n%2 = mul %1 2.0\n"
            "%3 = mul %2 $0\n%4 = add q_idx $1\n%5 = to_float %4\n%6 = mul %5 0.5\n%7 = add %3 %6\nreturn %7\n");
  ASSERT_EQ(mod.scalars.size(), 2u);
  EXPECT_EQ(mod.scalars[0].toDouble(), 20.0);
  EXPECT_EQ(mod.scalars[1].toLong(), 3);
}

TEST(Expression, Masks) {
  const Captured prefix(at::arange(2)), on(at::ones({}, at::kBool));
  const auto mod = trace_mask_mod([&](const auto& b, const auto&, const auto& q_idx, const auto& kv_idx) {
    return (kv_idx < prefix[b] || q_idx >= kv_idx) && on;
  });
  EXPECT_EQ(mod.text,
            "mask_mod 1\nbuffer @0 i64 1\nbuffer @1 bool 0\n%0 = load @0 b\n%1 = lt kv_idx %0\n%2 = ge q_idx kv_idx\n"
            "%3 = or %1 %2\n%4 = load @1\n%5 = and %3 %4\nreturn %5\n");
}

TEST(Expression, Misuse) {
  EXPECT_THROW(Expression(1.0), std::invalid_argument);  // outside
  const Captured bias(at::randn({8}));
  EXPECT_THROW(trace_score_mod(
                   [&](const auto& score, const auto&, const auto&, const auto&, const auto&) { return bias[score]; }),
               std::invalid_argument);
  EXPECT_THROW(
      trace_score_mod([&](const auto&, const auto& b, const auto& h, const auto&, const auto&) { return bias(b, h); }),
      c10::IndexError);
  EXPECT_THROW(trace_mask_mod([&](const auto&, const auto&, const auto& q_idx, const auto&) { return q_idx; }),
               std::invalid_argument);
  EXPECT_THROW(Captured(at::randn({2}, at::kComplexFloat)), c10::ValueError);
  // One that escaped from its function.
  std::vector<Expression> escaped;
  trace_score_mod([&](const auto& score, const auto&, const auto&, const auto&, const auto&) {
    escaped.push_back(score);
    return score;
  });
  EXPECT_THROW(trace_score_mod([&](const auto& score, const auto&, const auto&, const auto&, const auto&) {
                 return score + escaped[0];
               }),
               std::invalid_argument);
  EXPECT_THROW(escaped[0] + 1.0, std::invalid_argument);
}

}  // namespace
}  // namespace fusegrad
