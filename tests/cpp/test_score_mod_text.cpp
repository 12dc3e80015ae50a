// The text of a graph: print and parse are inverse, and what is wrong is refused with its position.
#include <gtest/gtest.h>

#include "score_mod/derivative.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"
#include "score_mod_examples.h"

namespace fusegrad::score_mod {
namespace {

void expect_inverse(const Graph& graph) {
  verify(graph);
  const std::string text = print(graph);
  const Graph again = parse(text);
  verify(again);
  EXPECT_TRUE(again == graph) << text;
  EXPECT_EQ(print(again), text);
}

TEST(Text, PrintAndParseAreInverse) {
  for (const auto& example : score_mod_examples()) {
    SCOPED_TRACE(example.name);
    const Graph graph = parse(example.mod.text);
    EXPECT_EQ(print(graph), example.mod.text);
    EXPECT_EQ(print(simplify(graph)), example.mod.text);
    expect_inverse(graph);
    expect_inverse(differentiate(graph, std::vector<bool>(example.mod.buffers.size(), true)));
  }
  for (const auto& example : mask_mod_examples()) {
    EXPECT_EQ(print(parse(example.mod.text)), example.mod.text);
    expect_inverse(parse(example.mod.text));
  }
}

TEST(Text, NumbersSurvive) {
  for (const char* number : {"0.0", "-0.0", "1.0", "0.1", "1e-05", "5e-324", "1.7976931348623157e+308", "inf", "-inf",
                             "nan", "3.141592653589793", "1e+16", "-2.5"}) {
    const std::string text = std::string("score_mod 1\n%0 = mul score ") + number + "\nreturn %0\n";
    EXPECT_EQ(print(parse(text)), text);
  }
  for (const char* number : {"0", "-1", "9223372036854775807", "-9223372036854775808"}) {
    const std::string text = std::string("mask_mod 1\n%0 = eq q_idx ") + number + "\nreturn %0\n";
    EXPECT_EQ(print(parse(text)), text);
  }
}

TEST(Text, WhatIsNotCanonicalBecomesSo) {
  EXPECT_EQ(print(parse("  # a comment\nscore_mod\t1  \r\n\nscalar $0 bool # unused\n%0 = neg q_idx\n%1 = add 1 score\n"
                        "%2 = add 1 score\n%3 = mul %1 %2\n  return %3")),
            "score_mod 1\nscalar $0 bool\n%0 = add 1.0 score\n%1 = mul %0 %0\nreturn %1\n");
  // Casts are made explicit, those of literals are made at once.
  EXPECT_EQ(print(parse("score_mod 1\n%0 = ge q_idx kv_idx\n%1 = add %0 true\n%2 = mul score %1\nreturn %2")),
            "score_mod 1\n%0 = ge q_idx kv_idx\n%1 = to_int %0\n%2 = add %1 1\n%3 = to_float %2\n%4 = mul score %3\n"
            "return %4\n");
  EXPECT_EQ(print(parse("score_mod 1;# a comment; %0 = neg score\n;return %0;")),
            "score_mod 1\n%0 = neg score\nreturn %0\n");
  EXPECT_EQ(print(parse("score_mod 1\nreturn q_idx")), "score_mod 1\n%0 = to_float q_idx\nreturn %0\n");
}

TEST(Text, OrderOfConstructionDoesNotMatter) {
  Graph a(Kind::kScoreMod), b(Kind::kScoreMod);
  const auto build = [](Graph& g, bool reversed) {
    const NodeId score = g.input(Input::kScore);
    const auto left = [&] { return g.apply(Op::kTanh, {score}); };
    const auto right = [&] { return g.apply(Op::kExp, {score}); };
    NodeId x = -1, y = -1;
    if (reversed) {
      y = right();
      x = left();
    } else {
      x = left();
      y = right();
    }
    g.apply(Op::kSin, {y});  // dead
    g.set_result(g.apply(Op::kAdd, {x, y}));
  };
  build(a, false);
  build(b, true);
  EXPECT_TRUE(a == b);
  EXPECT_EQ(print(a), print(b));
  EXPECT_EQ(print(compact(parse("score_mod 1\nbuffer @0 f 0\nbuffer @1 bool 1\nbuffer @2 f 1\nscalar $0 f\n"
                                "%0 = load @2 h\n%1 = load @0\n%2 = add %0 %1\nreturn %2\n"))
                      .graph),
            "score_mod 1\nbuffer @0 f 1\nbuffer @1 f 0\n%0 = load @0 h\n%1 = load @1\n%2 = add %0 %1\nreturn %2\n");
}

struct Wrong {
  const char* text;
  const char* message;
};

TEST(Text, ErrorsHaveAPosition) {
  const Wrong cases[] = {
      {"", "1:1: expected 'score_mod 1', 'mask_mod 1' or 'derivative 1', but got nothing"},
      {"\n# only\n", "1:1: expected 'score_mod 1', 'mask_mod 1' or 'derivative 1', but got nothing"},
      {"score 1", "1:1: expected 'score_mod', 'mask_mod', 'derivative' or 'tangent', but got 'score'"},
      {"score_mod 2", "1:11: expected version '1', but got '2'"},
      {"score_mod 1 x", "1:13: expected the end of the line, but got 'x'"},
      {"score_mod 1", "2:1: expected a statement or 'return', but got the end of the text"},
      {"score_mod 1\nbuffer $0 f 1", "2:8: expected a buffer such as '@0', but got '$0'"},
      {"score_mod 1\nbuffer @1 f 1", "2:8: expected '@0', but got '@1'"},
      {"score_mod 1\nbuffer @-1 f 1", "2:8: expected a buffer such as '@0', but got '@-1'"},
      {"score_mod 1\nbuffer @0 f32 1", "2:11: expected 'bool', 'i64' or 'f', but got 'f32'"},
      {"score_mod 1\nbuffer @0 f", "2:12: expected a rank, but got the end of the line"},
      {"score_mod 1\nbuffer @0 f 9", "2:13: the rank of a buffer must be 0 to 8, but got 9"},
      {"score_mod 1\nscalar @0 f", "2:8: expected a scalar such as '$0', but got '@0'"},
      {"score_mod 1\n%0 = neg score\nscalar $0 f", "3:1: expected declarations before the first statement"},
      {"score_mod 1\nfoo", "2:1: expected a declaration, a statement or 'return', a name such as '%0', but got 'foo'"},
      {"score_mod 1\n%1 = neg score", "2:1: expected '%0', but got '%1'"},
      {"score_mod 1\n%0 neg score", "2:4: expected '=', but got 'neg'"},
      {"score_mod 1\n%0 =", "2:5: expected a primitive, 'load', 'backward' or 'custom', but got the end of the line"},
      {"score_mod 1\n%0 = nag score", "2:6: expected a primitive, 'load', 'backward' or 'custom', but got 'nag'"},
      {"score_mod 1\n%0 = backward score", "2:6: 'backward' expects pairs of operands, but got 1"},
      {"score_mod 1\n%0 = backward q_idx ^0", "2:6: what a backward gives a gradient to must be f, but is i64"},
      {"score_mod 1\n%0 = backward ^0 ^0", "2:6: what depends on an upstream is for what a backward gives only"},
      {"score_mod 1\n%0 = custom ^0 score score", "2:6: 'custom' expects a 'backward' as its second operand"},
      {"score_mod 1\n%0 = custom ^0 score", "2:6: 'custom' expects a value and a backward"},
      {"score_mod 1\n%0 = custom 0 score", "2:13: expected an upstream such as '^0', but got '0'"},
      {"score_mod 1\n%0 = custom ^4096 score score", "2:6: more than 4096 upstreams"},
      {"score_mod 1\n%0 = backward score ^0\n%1 = custom ^0 ^0 %0",
       "3:6: what depends on an upstream is for what a backward gives only"},
      {"score_mod 1\n%0 = backward score ^0\n%1 = neg %0", "3:6: a backward is an operand of customs only"},
      {"score_mod 1\n%0 = backward score ^0\nreturn %0", "3:8: a backward is an operand of customs only"},
      {"score_mod 1\n%0 = sin ^0\nreturn %0", "3:8: what depends on an upstream is for what a backward gives only"},
      {"score_mod 1\n%0 = backward score ^0\n%1 = custom ^0 score %0\n%2 = sin score\n%3 = custom ^0 %2 %0\n"
       "%4 = add %1 %3\nreturn %4",
       "7:8: two customs of ^0"},
      {"score_mod 1\n%0 = backward score ^0\n%1 = custom ^0 score %0\n%2 = mul ^0 2.0\n%3 = backward %1 %2\n"
       "%4 = custom ^1 %1 %3\nreturn %4",
       "7:8: ^0 is used by another backward than that of its custom"},
      {"mask_mod 1\n%0 = backward q_idx ^0", "2:21: only a score_mod has upstreams"},
      {"score_mod 1\n%0 = neg score score", "2:16: expected at most 1 operand, but got 'score'"},
      {"score_mod 1\n%0 = add score", "2:6: 'add' expects 2 operands, but got 1"},
      {"score_mod 1\n%0 = add score %0", "2:16: expected a value that was computed before, but got '%0'"},
      {"score_mod 1\n%0 = add score $0", "2:16: scalar $0 is not declared"},
      {"score_mod 1\n%0 = add score grad", "2:16: 'grad' is not an input of a score_mod"},
      {"mask_mod 1\n%0 = gt score 0", "2:9: 'score' is not an input of a mask_mod"},
      {"score_mod 1\n%0 = add score 1x",
       "2:16: expected an operand (%value, $scalar, score, b, h, q_idx, kv_idx or a "
       "number), but got '1x'"},
      {"score_mod 1\n%0 = add score 9223372036854775808",
       "2:16: expected a number that fits 64 bits, but got '9223372036854775808'"},
      {"score_mod 1\n%0 = add score 1e999", "2:16: expected a number that fits 64 bits, but got '1e999'"},
      {"score_mod 1\n%0 = add score 1.2.3", "2:16: expected a number that fits 64 bits, but got '1.2.3'"},
      {"score_mod 1\n%0 = and score true", "2:6: 'and' expects integers or bools, but got f"},
      {"score_mod 1\n%0 = shl 1 score", "2:6: 'shl' expects integers or bools, but got f"},
      {"score_mod 1\n%0 = where q_idx 1 2", "2:6: 'where' expects a bool as its first operand, but got i64"},
      {"score_mod 1\n%0 = load @0 q_idx", "2:11: buffer @0 is not declared"},
      {"score_mod 1\nbuffer @0 f 1\n%0 = load @0", "3:11: buffer @0 expects 1 indices, but got 0"},
      {"score_mod 1\nbuffer @0 f 1\n%0 = load @0 score", "3:11: an index of buffer @0 must be i64, but is f"},
      {"mask_mod 1\nreturn q_idx", "2:8: a mask_mod must return bool, but returns i64"},
      {"score_mod 1\nreturn",
       "2:7: expected an operand (%value, $scalar, score, b, h, q_idx, kv_idx or a number), but "
       "got the end of the line"},
      {"score_mod 1\nreturn score\nscatter score @0", "3:1: expected the end of the text after 'return'"},
      {"derivative 1\nreturn grad\nreturn grad", "3:1: expected 'scatter', but got 'return'"},
      {"derivative 1\nbuffer @0 i64 0\nreturn grad\nscatter grad @0",
       "4:1: buffer @0 holds no floats and has no gradient"},
      {"score_mod 1\n\x01\xff\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
       "2:1: expected a declaration, a statement or 'return', a name such as '%0', but got "
       "'?\?\"aaaaaaaaaaaaaaaaaaaaa...'"},
  };
  for (const Wrong& wrong : cases) {
    try {
      parse(wrong.text);
      ADD_FAILURE() << "accepted: " << wrong.text;
    } catch (const ParseError& error) {
      EXPECT_STREQ(error.what(), wrong.message) << wrong.text;
    }
  }
}

TEST(Text, SizeIsBounded) {
  const auto chain = [](int length) {
    std::string text = "score_mod 1\n", last = "score";
    for (int i = 0; i < length; ++i) {
      const std::string name = std::string("%") + std::to_string(i);
      text.append(name).append(" = sin ").append(last).append("\n");
      last = name;
    }
    return text.append("return ").append(last);
  };
  // Deep, and its derivative is deeper: no walk may recurse.
  const Graph deep = parse(chain(kMaxDepth));
  EXPECT_EQ(parse(print(deep)).nodes().size(), deep.nodes().size());
  EXPECT_GT(differentiate(deep, {}).nodes().size(), deep.nodes().size());
  EXPECT_THROW(parse(chain(kMaxDepth + 1)), ParseError);

  std::string wide = "score_mod 1\n";
  for (int i = 0; i < kMaxNodes; ++i) {
    const std::string number = std::to_string(i);
    wide.append("%").append(number).append(" = add score ").append(number).append(".0\n");
  }
  EXPECT_THROW(parse(wide + "return %0"), ParseError);

  std::string buffers = "score_mod 1\n";
  for (int i = 0; i <= kMaxBuffers; ++i) buffers += "buffer @" + std::to_string(i) + " f 0\n";
  EXPECT_THROW(parse(buffers + "return score"), ParseError);
  EXPECT_THROW(parse("score_mod 1\n" + std::string(kMaxTextBytes, ' ') + "return score"), ParseError);
}

}  // namespace
}  // namespace fusegrad::score_mod
