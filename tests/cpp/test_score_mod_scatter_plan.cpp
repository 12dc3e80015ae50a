// The scatter class of every example, and what explain() says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "score_mod/derivative.h"
#include "score_mod/scatter_plan.h"
#include "score_mod/text.h"
#include "score_mod_examples.h"

namespace fusegrad::score_mod {
namespace {

TEST(ScatterPlan, ClassesOfTheExamples) {
  for (const auto& example : score_mod_examples()) {
    SCOPED_TRACE(example.name);
    const Graph derivative =
        differentiate(parse(example.mod.text), std::vector<bool>(example.mod.buffers.size(), true));
    std::string classes;
    for (const ScatterStep& step : plan_scatter(derivative)) {
      const char letter = static_cast<char>(step.scheme);
      classes += static_cast<char>(step.exclusive ? letter : std::tolower(letter));
    }
    EXPECT_EQ(classes, example.classes) << explain(example.mod.text, {true, true, true});
  }
}

TEST(ScatterPlan, OnceABatch) {
  const auto once = [](const std::string& buffer, const std::string& body) {
    const Graph derivative = differentiate(parse("score_mod 1\nbuffer @0 f " + buffer + "\n" + body), {true});
    const auto steps = plan_scatter(derivative);
    return std::pair(steps.at(0).once_a_batch, steps.at(0).exclusive);
  };
  EXPECT_EQ(once("3", "%0 = load @0 h q_idx kv_idx\n%1 = add score %0\nreturn %1"), std::pair(true, false));
  EXPECT_EQ(once("4", "%0 = load @0 b h q_idx kv_idx\n%1 = add score %0\nreturn %1"), std::pair(true, true));
  EXPECT_EQ(once("2", "%0 = load @0 q_idx kv_idx\n%1 = add score %0\nreturn %1"), std::pair(false, false));
  EXPECT_EQ(once("2", "%0 = load @0 h kv_idx\n%1 = add score %0\nreturn %1"), std::pair(false, false));
  // Two reads of one buffer.
  EXPECT_EQ(once("3",
                 "%0 = load @0 h q_idx kv_idx\n%1 = load @0 h kv_idx q_idx\n%2 = mul %0 %1\n%3 = add score %2\n"
                 "return %3"),
            std::pair(false, false));
}

TEST(ScatterPlan, SmallTablesGetAHistogram) {
  const Graph derivative =
      differentiate(parse("score_mod 1\nbuffer @0 i64 2\nbuffer @1 f 1\n"
                          "%0 = load @0 q_idx kv_idx\n%1 = load @1 %0\n%2 = add score %1\nreturn %2"),
                    {false, true});
  const auto class_for = [&](std::vector<int64_t> elements) { return plan_scatter(derivative, elements).at(0).scheme; };
  EXPECT_EQ(class_for({}), ScatterClass::kGeneral);
  EXPECT_EQ(class_for({1 << 20, -1}), ScatterClass::kGeneral);
  EXPECT_EQ(class_for({1 << 20, kSmallTableElements}), ScatterClass::kSmallTable);
  EXPECT_EQ(class_for({1 << 20, kSmallTableElements + 1}), ScatterClass::kGeneral);
}

// Whether batches share places, of classes E to G.
TEST(ScatterPlan, OverBatches) {
  const auto over = [](const std::string& body) {
    const Graph derivative = differentiate(parse("score_mod 1\nbuffer @0 f 2\nbuffer @1 i64 2\nbuffer @2 f 3\n" + body),
                                           {true, false, true});
    return plan_scatter(derivative).at(0).over_batches;
  };
  EXPECT_TRUE(over("%0 = load @0 q_idx kv_idx\n%1 = add score %0\nreturn %1\n"));
  EXPECT_TRUE(over("%0 = load @2 h q_idx kv_idx\n%1 = mul score %0\nreturn %1\n"));
  EXPECT_TRUE(over("%0 = load @1 q_idx kv_idx\n%1 = load @0 %0 h\n%2 = add score %1\nreturn %2\n"));
  EXPECT_FALSE(over("%0 = load @2 b q_idx kv_idx\n%1 = add score %0\nreturn %1\n"));
  EXPECT_FALSE(over("%0 = load @1 b kv_idx\n%1 = load @0 %0 q_idx\n%2 = add score %1\nreturn %2\n"));
  EXPECT_FALSE(over("%0 = to_int score\n%1 = load @0 %0 kv_idx\n%2 = add score %1\nreturn %2\n"));
  // Keys are fewer sums than pairs.
  EXPECT_FALSE(over("%0 = load @0 h kv_idx\n%1 = add score %0\nreturn %1\n"));
}

// Which groups of batches share places.
TEST(ScatterPlan, Groups) {
  const auto groups = [](const std::string& first, const std::string& second = "h") -> std::string {
    const std::string body =
        "%0 = " + first + "\n%1 = abs " + second + "\n%2 = load @0 %0 %1 q_idx kv_idx\n%3 = add score %2\nreturn %3\n";
    const Graph derivative =
        differentiate(parse("score_mod 1\nbuffer @0 f 4\nbuffer @1 i64 1\nscalar $0 i64\n" + body), {true, false});
    const auto found = plan_scatter(derivative).at(0).groups;
    if (!found) return "none";
    return std::string(found->op == Op::kMod ? "% " : "// ") + (found->scalar ? "$" : "") +
           std::to_string(found->divisor);
  };
  EXPECT_EQ(groups("floor_div b 8"), "// 8");
  EXPECT_EQ(groups("floor_div b $0"), "// $0");
  EXPECT_EQ(groups("mod b 8"), "% 8");
  EXPECT_EQ(groups("abs h"), "none");
  EXPECT_EQ(groups("floor_div h 8"), "none");
  EXPECT_EQ(groups("floor_div 8 b"), "none");
  EXPECT_EQ(groups("add b 1"), "none");
  EXPECT_EQ(groups("load @1 b"), "none");
  EXPECT_EQ(groups("floor_div b 8", "b"), "none");
}

// Which lengths a buffer has that gets one contribution an element, of the batches that share it.
TEST(ScatterPlan, Inputs) {
  const auto inputs = [](const std::string& indices, const std::string& more = "") {
    const Graph derivative = differentiate(
        parse("score_mod 1\nbuffer @0 f " + std::to_string(std::count(indices.begin(), indices.end(), ' ') + 1) +
              "\n%0 = floor_div b 8\n%1 = mod b 8\n%2 = load @0 " + indices + "\n%3 = add score %2\n" +
              (more.empty() ? "return %3\n" : more)),
        {true});
    const ScatterStep step = plan_scatter(derivative).at(0);
    std::string names;
    for (const auto& input : step.inputs)
      names += (names.empty() ? "" : " ") + (input ? std::string(input_name(*input)) : "0");
    return names;
  };
  EXPECT_EQ(inputs("b h q_idx kv_idx"), "b h q_idx kv_idx");
  EXPECT_EQ(inputs("kv_idx 0 q_idx h b 0"), "kv_idx 0 q_idx h b 0");
  EXPECT_EQ(inputs("h q_idx kv_idx"), "h q_idx kv_idx");
  EXPECT_EQ(inputs("0 h q_idx kv_idx"), "0 h q_idx kv_idx");
  EXPECT_EQ(inputs("%0 h q_idx kv_idx"), "b h q_idx kv_idx");
  EXPECT_EQ(inputs("h %1 q_idx kv_idx"), "h b q_idx kv_idx");
  for (const auto* none : {"q_idx kv_idx", "b q_idx kv_idx", "1 h q_idx kv_idx", "b b h q_idx kv_idx",
                           "%0 b h q_idx kv_idx", "%0 %1 h q_idx kv_idx", "%0 %0 h q_idx kv_idx", "h h q_idx kv_idx"})
    EXPECT_EQ(inputs(none), "") << none;
  // Two reads of one buffer.
  EXPECT_EQ(inputs("h q_idx kv_idx", "%4 = load @0 h kv_idx q_idx\n%5 = add %3 %4\nreturn %5\n"), "");
}

// Whether neighbouring diagonals may have one element.
TEST(ScatterPlan, RepeatedDiagonals) {
  const auto repeats = [](const std::string& body) {
    const Graph derivative = differentiate(parse("score_mod 1\nbuffer @0 f 2\n%0 = sub q_idx kv_idx\n" + body), {true});
    const ScatterStep step = plan_scatter(derivative).at(0);
    EXPECT_EQ(step.scheme, ScatterClass::kDiagonal);
    return step.repeats;
  };
  EXPECT_FALSE(repeats("%1 = add %0 128\n%2 = load @0 h %1\n%3 = add score %2\nreturn %3\n"));
  EXPECT_FALSE(repeats("%1 = mul %0 3\n%2 = add %1 128\n%3 = load @0 h %2\n%4 = add score %3\nreturn %4\n"));
  EXPECT_TRUE(repeats("%1 = floor_div %0 16\n%2 = add %1 128\n%3 = load @0 h %2\n%4 = add score %3\nreturn %4\n"));
  EXPECT_TRUE(repeats("%1 = abs %0\n%2 = load @0 h %1\n%3 = add score %2\nreturn %3\n"));
}

TEST(ScatterPlan, ExplainNamesEveryWantedGradient) {
  const std::string text = explain(
      "score_mod 1\nbuffer @0 i64 1\nbuffer @1 f 1\nbuffer @2 f 0\n"
      "%0 = load @0 q_idx\n%1 = load @1 %0\n%2 = add score %1\nreturn %2",
      {false, true, true});
  EXPECT_NE(text.find("scatter grad @1 %0"), std::string::npos) << text;
  EXPECT_NE(text.find("gradient of @1: class C: the index depends on q_idx: one sum a row; shared by different b, h\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("gradient of @2: zero"), std::string::npos) << text;
  EXPECT_EQ(text.find("gradient of @0"), std::string::npos) << text;
}

}  // namespace
}  // namespace fusegrad::score_mod
