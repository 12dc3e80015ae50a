// Walks the table of primitives: no column may have a hole.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "score_mod/derivative.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/text.h"
#include "score_mod/tile_kernels.h"

namespace fusegrad::score_mod {
namespace {

bool takes_floats(Rule rule) { return rule != Rule::kBitwise && rule != Rule::kInteger && rule != Rule::kToFloat; }
bool takes_integers(Rule rule) { return rule != Rule::kFloat; }

TEST(Primitives, NamesAreDistinctAndFound) {
  std::set<std::string_view> names;
  for (const Primitive& p : kPrimitives) {
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    EXPECT_EQ(find_primitive(p.name), &p) << p.name;
    EXPECT_EQ(&primitive(p.op), &p) << p.name;
    EXPECT_GE(p.arity, 1);
    EXPECT_LE(p.arity, kMaxArity);
  }
  EXPECT_EQ(find_primitive("load"), nullptr);
}

TEST(Primitives, CudaSpellingsUseEveryOperand) {
  const auto check = [](const Primitive& p, std::string_view spelling, bool taken) {
    EXPECT_EQ(!spelling.empty(), taken) << p.name;
    for (int i = 0; taken && i < kMaxArity; ++i) {
      EXPECT_EQ(spelling.find(std::string("$") + std::to_string(i)) != std::string_view::npos, i < p.arity) << p.name;
    }
  };
  for (const Primitive& p : kPrimitives) {
    check(p, p.cuda_float, takes_floats(p.rule));
    check(p, p.cuda_integer, takes_integers(p.rule));
  }
}

// The result of a primitive on constants by the table's functor.
Value folded(const Primitive& p, std::vector<Value> x) { return p.fold(x.data()); }

TEST(Primitives, EveryFunctorHasEveryKernel) {
  const auto lanes_of = [](const Primitive& p) {
    std::vector<Lane> lanes;
    if (takes_floats(p.rule)) lanes.insert(lanes.end(), {Lane::kFloat32, Lane::kFloat64});
    if (takes_integers(p.rule)) lanes.insert(lanes.end(), {Lane::kInt32, Lane::kInt64});
    if (p.rule == Rule::kBitwise || p.rule == Rule::kWhere) lanes.push_back(Lane::kBool);
    return lanes;
  };
  for (const Primitive& p : kPrimitives) {
    ASSERT_NE(p.fold, nullptr) << p.name;
    if (p.rule == Rule::kToFloat || p.rule == Rule::kToInt || p.rule == Rule::kToBool) continue;  // TileKernels::cast
    for (const Lane lane : lanes_of(p)) {
      for (unsigned broadcast = 0; broadcast == 0 || broadcast + 1 < 1u << p.arity; ++broadcast) {
        EXPECT_NE(tile_kernels().find(p.op, lane, broadcast), nullptr) << p.name << " " << static_cast<int>(lane);
      }
    }
  }
}

// The vectorised kernel and the functor agree, for every combination of arrays and single values.
TEST(Primitives, KernelsAgreeWithFunctors) {
  constexpr int kLanes = 19;
  const double kSamples[] = {-2.5, -1.0, -0.5, 0.0, 0.25, 1.0, 1.5, 3.0};
  for (const Primitive& p : kPrimitives) {
    if (!takes_floats(p.rule) || p.rule == Rule::kToInt || p.rule == Rule::kToBool) continue;
    for (unsigned broadcast = 0; broadcast == 0 || broadcast + 1 < 1u << p.arity; ++broadcast) {
      double x[kMaxArity][kLanes], out[kLanes];
      uint8_t condition[kLanes], flags[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        condition[i] = i % 3 == 0;
        for (int k = 0; k < p.arity; ++k) x[k][i] = kSamples[(i * (k + 1) + k) % 8];
      }
      const bool where = p.rule == Rule::kWhere;
      const void* operands[] = {where ? static_cast<const void*>(condition) : x[0], x[1], x[2]};
      const bool compares = p.rule == Rule::kCompare;
      tile_kernels().find(p.op, Lane::kFloat64, broadcast)(compares ? static_cast<void*>(flags) : out, operands,
                                                           kLanes);
      for (int i = 0; i < kLanes; ++i) {
        std::vector<Value> values;
        for (int k = 0; k < p.arity; ++k) {
          const int lane = (broadcast >> k & 1) != 0 ? 0 : i;
          values.push_back(where && k == 0 ? Value{Type::kBool, 0, condition[lane]}
                                           : Value{Type::kFloat, x[k][lane], 0});
        }
        const Value expected = folded(p, values);
        if (compares) {
          EXPECT_EQ(flags[i], expected.i) << p.name;
        } else if (std::isnan(expected.f)) {
          EXPECT_TRUE(std::isnan(out[i])) << p.name << " of " << values[0].f;
        } else if (out[i] != expected.f) {  // equal infinities have no distance
          EXPECT_NEAR(out[i], expected.f, 1e-14 * std::max(1.0, std::abs(expected.f)))
              << p.name << " of " << values[0].f;
        }
      }
    }
  }
}

// Values of the functor that the type rules promise (docs/design/score_mod.md).
TEST(Primitives, PromisedValues) {
  const auto f = [](double x) { return Value{Type::kFloat, x, 0}; };
  const auto i = [](int64_t x) { return Value{Type::kInt, 0, x}; };
  const auto on_floats = [&](std::string_view name, double a, double b) {
    return folded(*find_primitive(name), {f(a), f(b)}).f;
  };
  const auto on_integers = [&](std::string_view name, int64_t a, int64_t b) {
    return folded(*find_primitive(name), {i(a), i(b)}).i;
  };
  const double nan = NAN;
  EXPECT_EQ(on_integers("floor_div", -7, 2), -4);
  EXPECT_EQ(on_integers("floor_div", 7, 0), 0);
  EXPECT_EQ(on_integers("floor_div", INT64_MIN, -1), INT64_MIN);
  EXPECT_EQ(on_integers("mod", -7, 3), 2);
  EXPECT_EQ(on_integers("mod", 7, -3), -2);
  EXPECT_EQ(on_integers("mod", INT64_MIN, -1), 0);
  EXPECT_EQ(on_integers("pow", 3, 4), 81);
  EXPECT_EQ(on_integers("pow", -1, -3), -1);
  EXPECT_EQ(on_integers("pow", 2, -1), 0);
  EXPECT_EQ(on_integers("shl", 1, 64), 0);
  EXPECT_EQ(on_integers("shl", 1, -1), 0);
  EXPECT_EQ(on_integers("shr", -8, 100), -1);
  EXPECT_EQ(on_integers("add", INT64_MAX, 1), INT64_MIN);
  EXPECT_EQ(on_floats("floor_div", -7.0, 2.0), -4.0);
  EXPECT_EQ(on_floats("floor_div", 1.0, 0.1), 9.0);  // as in Python
  EXPECT_EQ(on_floats("mod", -1.0, 3.0), 2.0);
  EXPECT_TRUE(std::isnan(on_floats("mod", 1.0, 0.0)));
  EXPECT_TRUE(std::isnan(on_floats("min", nan, 1.0)) && std::isnan(on_floats("min", 1.0, nan)));
  EXPECT_TRUE(std::isnan(on_floats("max", nan, 1.0)) && std::isnan(on_floats("max", 1.0, nan)));
  const Primitive& to_int = *find_primitive("to_int");
  EXPECT_EQ(folded(to_int, {f(-2.9)}).i, -2);
  EXPECT_EQ(folded(to_int, {f(nan)}).i, 0);
  EXPECT_EQ(folded(to_int, {f(1e30)}).i, INT64_MAX);
  EXPECT_EQ(folded(to_int, {f(-INFINITY)}).i, INT64_MIN);
  EXPECT_EQ(folded(*find_primitive("round"), {f(2.5)}).f, 2.0);
}

// d result / d operand by central differences, where the primitive is smooth.
TEST(Primitives, DerivativesMatchDifferences) {
  const std::set<std::string_view> kConstant = {"floor_div", "sign", "floor", "ceil", "trunc", "round", "detach"};
  for (const Primitive& p : kPrimitives) {
    if (p.rule != Rule::kFloat && p.rule != Rule::kNumeric) continue;
    for (int wanted = 0; wanted < p.arity; ++wanted) {
      std::string text = "score_mod 1\n%0 = " + std::string(p.name);
      const char* others[] = {"0.7", "1.3", "2.1"};
      for (int k = 0; k < p.arity; ++k) text += k == wanted ? " score" : std::string(" ") + others[k];
      const Graph graph = parse(text + "\nreturn %0\n");
      const Graph derivative = differentiate(graph, {});
      const TileProgram<double> forward(graph, {1, 1, 1, 1}, {}, {});
      const TileProgram<double> backward(derivative, {1, 1, 1, 1}, {}, {});
      TileEvaluator<double> f(forward, 1, 1), d(backward, 1, 1);
      const Tile tile{0, 0, 0, 0, 1, 1};
      for (double x : {0.31, 0.83, 1.71}) {
        if (p.name == "asin" || p.name == "acos" || p.name == "atanh") x /= 2;  // where they are defined
        if (p.name == "acosh") x += 1;
        const double step = 1e-6, grad = 0.37;
        const auto value = [&](double at) {
          double out = 0;
          EXPECT_TRUE(f.score_mod(tile, {&at, 1}, {}, {&out, 1}));
          return out;
        };
        const double expected =
            kConstant.contains(p.name) ? 0 : grad * (value(x + step) - value(x - step)) / (2 * step);
        double got = NAN;
        EXPECT_TRUE(d.backward(tile, {&x, 1}, {&grad, 1}, {}, {&got, 1}, {}));
        EXPECT_NEAR(got, expected, 1e-8 * std::max(1.0, std::abs(expected))) << text << " at " << x;
      }
    }
  }
}

}  // namespace
}  // namespace fusegrad::score_mod
