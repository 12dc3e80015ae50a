// The evaluator over tiles against the definition, one pair at a time; and the derivative against differences.
#include <gtest/gtest.h>

#include <cmath>

#include "pytorch/score_mod/tensors.h"
#include "score_mod/derivative.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"
#include "score_mod_examples.h"

namespace fusegrad::score_mod {
namespace {

constexpr Lengths kLengths{2, 4, 128, 128};

// One pair by the table's functors, in float64.
class Pointwise {
 public:
  Pointwise(const Graph& graph, const CapturedTensors& captured) : graph_(graph), captured_(captured) {}

  Value operator()(double score, int64_t b, int64_t h, int64_t q, int64_t kv) const {
    const int64_t index[] = {0, b, h, q, kv};
    std::vector<Value> values(graph_.nodes().size());
    std::vector<int64_t> axes(graph_.axes().size());
    evaluate(reachable(graph_), score, index, axes, values);
    return values[graph_.result()];
  }

 private:
  // Nodes in an order, operands first; what depends on an axis that nothing has given a value yet means nothing.
  void evaluate(const std::vector<NodeId>& order, double score, const int64_t* index, std::vector<int64_t>& axes,
                std::vector<Value>& values) const {
    for (const NodeId id : order) {
      const Node& node = graph_[id];
      if (node.op == Op::kConstant) {
        values[id] = graph_.value(id);
      } else if (node.op == Op::kAxis) {
        values[id] = {Type::kInt, 0, axes[node.payload]};
      } else if (is_reduction(node.op)) {
        const auto axis = static_cast<size_t>(graph_[node.operands[0]].payload);
        std::vector<NodeId> before(order.begin(), std::find(order.begin(), order.end(), id));
        std::erase_if(before, [&](NodeId n) { return graph_.open_axes(n) == 0; });
        Value total = identity_of(node.op, node.type);
        std::vector<Value> inside = values;
        std::vector<int64_t> at = axes;
        for (at[axis] = 0; at[axis] < graph_.axes()[axis]; ++at[axis]) {
          evaluate(before, score, index, at, inside);
          const Value x[] = {total, inside[node.operands[1]]};
          total = primitive(combining(node.op)).fold(x);
        }
        values[id] = total;
      } else if (node.op == Op::kInput) {
        values[id] = node.payload == 0 ? Value{Type::kFloat, score, 0} : Value{Type::kInt, 0, index[node.payload]};
      } else if (node.op == Op::kScalar) {
        values[id] = captured_.scalars()[node.payload];
      } else if (node.op == Op::kLoad) {
        const Buffer& buffer = captured_.buffers()[node.payload];
        int64_t offset = 0;
        for (size_t k = 0; k < node.operands.size(); ++k) {
          int64_t i = values[node.operands[k]].i;
          if (i < 0) i += buffer.sizes[k];
          EXPECT_TRUE(i >= 0 && i < buffer.sizes[k]);
          offset += i * buffer.strides[k];
        }
        if (buffer.dtype == DType::kFloat32)
          values[id] = {Type::kFloat, static_cast<const float*>(buffer.data)[offset], 0};
        if (buffer.dtype == DType::kInt64)
          values[id] = {Type::kInt, 0, static_cast<const int64_t*>(buffer.data)[offset]};
        if (buffer.dtype == DType::kInt32)
          values[id] = {Type::kInt, 0, static_cast<const int32_t*>(buffer.data)[offset]};
        if (buffer.dtype == DType::kBool)
          values[id] = {Type::kBool, 0, static_cast<const uint8_t*>(buffer.data)[offset]};
      } else {
        Value x[kMaxArity];
        for (size_t i = 0; i < node.operands.size(); ++i) x[i] = values[node.operands[i]];
        values[id] = primitive(node.op).fold(x);
      }
    }
  }

  const Graph& graph_;
  const CapturedTensors& captured_;
};

double score_at(int64_t q, int64_t kv) { return std::sin(static_cast<double>(7 * q + 3 * kv)) * 40; }

template <class T>
void expect_example(const ScoreModExample& example, double tolerance) {
  SCOPED_TRACE(example.name);
  const Graph graph = parse(example.mod.text);
  const CapturedTensors captured(example.mod.buffers, example.mod.scalars);
  const Pointwise pointwise(graph, captured);
  const TileProgram<T> program(graph, kLengths, captured.buffers(), captured.scalars());
  TileEvaluator<T> evaluator(program, 16, 48);
  for (const Tile& tile : {Tile{1, 3, 96, 64, 16, 48}, Tile{0, 1, 0, 0, 3, 17}, Tile{1, 2, 127, 127, 1, 1}}) {
    std::vector<T> scores(static_cast<size_t>(tile.rows * 50)), out(scores.size(), T(-7));
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) scores[r * 50 + c] = static_cast<T>(score_at(tile.q + r, tile.kv + c));
    }
    ASSERT_TRUE(evaluator.score_mod(tile, {scores.data(), 50}, {}, {out.data(), 50}))
        << evaluator.out_of_range().message();
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) {
        const double expected = pointwise(scores[r * 50 + c], tile.b, tile.h, tile.q + r, tile.kv + c).f;
        const double got = out[r * 50 + c];
        if (std::isinf(expected)) {
          EXPECT_EQ(got, expected);
        } else {
          EXPECT_NEAR(got, expected, tolerance * std::max(1.0, std::abs(expected)));
        }
      }
      for (int64_t c = tile.cols; c < 50; ++c) EXPECT_EQ(out[r * 50 + c], T(-7));  // not written
    }
    // In place.
    ASSERT_TRUE(evaluator.score_mod(tile, {scores.data(), 50}, {}, {scores.data(), 50}));
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) EXPECT_EQ(scores[r * 50 + c], out[r * 50 + c]);
    }
  }
}

TEST(EvaluateCpu, Examples) {
  for (const auto& example : score_mod_examples()) {
    expect_example<double>(example, 1e-12);
    expect_example<float>(example, 1e-5);
  }
}

TEST(EvaluateCpu, Masks) {
  for (const auto& example : mask_mod_examples()) {
    SCOPED_TRACE(example.name);
    const Graph graph = parse(example.mod.text);
    const CapturedTensors captured(example.mod.buffers, example.mod.scalars);
    const Pointwise pointwise(graph, captured);
    const TileProgram<float> program(graph, kLengths, captured.buffers(), captured.scalars());
    TileEvaluator<float> evaluator(program, 16, 48);
    const Tile tile{1, 2, 60, 40, 16, 48};
    std::vector<uint8_t> out(static_cast<size_t>(tile.rows * tile.cols), 7);
    ASSERT_TRUE(evaluator.mask_mod(tile, {out.data(), tile.cols}));
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < tile.cols; ++c) {
        EXPECT_EQ(out[r * tile.cols + c], pointwise(0, tile.b, tile.h, tile.q + r, tile.kv + c).i);
      }
    }
  }
}

// The gradient of sum(grad * mask * f) by every element of every float buffer, by central differences.
TEST(EvaluateCpu, GradientsOfBuffersMatchDifferences) {
  const Tile tile{1, 2, 8, 4, 5, 9};
  const auto size = static_cast<size_t>(tile.rows * tile.cols);
  std::vector<double> scores(size), grad(size), out(size), grad_score(size);
  std::vector<uint8_t> mask(size);
  for (size_t i = 0; i < size; ++i) {
    scores[i] = std::sin(static_cast<double>(3 * i)) * 3 + 10;
    grad[i] = std::cos(static_cast<double>(5 * i));
    mask[i] = i % 4 != 1;
  }
  for (auto& example : score_mod_examples()) {
    if (example.classes.empty() || example.name == "index from the score") continue;
    SCOPED_TRACE(example.name);
    for (at::Tensor& buffer : example.mod.buffers) {
      if (at::isFloatingType(buffer.scalar_type())) buffer = buffer.to(at::kDouble);
    }
    const Graph graph = parse(example.mod.text);
    const Graph derivative = differentiate(graph, std::vector<bool>(example.mod.buffers.size(), true));
    const CapturedTensors captured(example.mod.buffers, example.mod.scalars);
    const TileProgram<double> forward(graph, kLengths, captured.buffers(), captured.scalars());
    const TileProgram<double> backward(derivative, kLengths, captured.buffers(), captured.scalars());
    TileEvaluator<double> f(forward, tile.rows, tile.cols), d(backward, tile.rows, tile.cols);

    std::vector<at::Tensor> sums, wide_sums;
    std::vector<GradientSink<double>> sinks, wide_sinks;
    for (const at::Tensor& buffer : example.mod.buffers) {
      sums.push_back(at::zeros(buffer.sizes(), at::kDouble));
      wide_sums.push_back(at::zeros(buffer.sizes(), at::kDouble));
      sinks.push_back({sums.back().data_ptr<double>(), nullptr});
      wide_sinks.push_back({nullptr, wide_sums.back().data_ptr<double>()});
    }
    const Rectangle<const uint8_t> on{mask.data(), tile.cols};
    ASSERT_TRUE(d.backward(tile, {scores.data(), tile.cols}, {grad.data(), tile.cols}, on,
                           {grad_score.data(), tile.cols}, sinks));
    ASSERT_TRUE(d.backward(tile, {scores.data(), tile.cols}, {grad.data(), tile.cols}, on, {}, wide_sinks));

    const auto total = [&] {
      EXPECT_TRUE(f.score_mod(tile, {scores.data(), tile.cols}, {}, {out.data(), tile.cols}));
      double sum = 0;
      for (size_t i = 0; i < size; ++i) sum += mask[i] != 0 ? grad[i] * out[i] : 0.0;
      return sum;
    };
    constexpr double kStep = 1e-5;
    for (size_t k = 0; k < sums.size(); ++k) {
      if (!at::isFloatingType(example.mod.buffers[k].scalar_type())) continue;
      EXPECT_TRUE(at::allclose(sums[k], wide_sums[k], 1e-12, 1e-12));
      auto* buffer = example.mod.buffers[k].data_ptr<double>();
      const auto* got = sums[k].const_data_ptr<double>();
      const int64_t elements = example.mod.buffers[k].numel();
      for (int64_t i = 0; i < elements; i += 1 + elements / 2000) {
        const double before = buffer[i];
        buffer[i] = before + kStep;
        const double high = total();
        buffer[i] = before - kStep;
        const double low = total();
        buffer[i] = before;
        ASSERT_NEAR(got[i], (high - low) / (2 * kStep), 1e-6 * std::max(1.0, std::abs(got[i])))
            << "@" << k << "[" << i << "]";
      }
    }
    for (size_t i = 0; i < size; ++i) {
      const double before = scores[i];
      scores[i] = before + kStep;
      const double high = total();
      scores[i] = before - kStep;
      const double low = total();
      scores[i] = before;
      ASSERT_NEAR(grad_score[i], (high - low) / (2 * kStep), 1e-6) << "score " << i;
    }
  }
}

// Wrong indices of pairs that are masked out are no error, whatever is evaluated once a row or a column.
TEST(EvaluateCpu, MaskedPairsReadNothing) {
  const struct {
    const char* index;
    int64_t bad_row, bad_col;  // -1: all
  } cases[] = {{"q_idx", 3, -1}, {"kv_idx", -1, 3}};
  const float data[] = {1, 2, 3};
  const int64_t sizes[] = {3}, strides[] = {1};
  const Buffer buffer{data, DType::kFloat32, sizes, strides};
  for (const auto& c : cases) {
    const Graph graph =
        parse("score_mod 1\nbuffer @0 f 1\n%0 = load @0 " + std::string(c.index) + "\n%1 = add score %0\nreturn %1");
    const TileProgram<float> forward(graph, {1, 1, 4, 4}, {&buffer, 1}, {});
    const TileProgram<float> backward(differentiate(graph, {true}), {1, 1, 4, 4}, {&buffer, 1}, {});
    TileEvaluator<float> f(forward, 4, 4), d(backward, 4, 4);
    const Tile tile{0, 0, 0, 0, 4, 4};
    std::vector<float> scores(16, 0), ones(16, 1), out(16);
    std::vector<uint8_t> mask(16, 1);
    EXPECT_FALSE(f.score_mod(tile, {scores.data(), 4}, {}, {out.data(), 4}));
    EXPECT_EQ(f.out_of_range().message(),
              "index 3 is out of range for dimension 0 of captured buffer 0, which has size 3");
    EXPECT_FALSE(f.score_mod(tile, {scores.data(), 4}, {mask.data(), 4}, {out.data(), 4}));
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t k = 0; k < 4; ++k) mask[r * 4 + k] = r != c.bad_row && k != c.bad_col;
    }
    EXPECT_TRUE(f.score_mod(tile, {scores.data(), 4}, {mask.data(), 4}, {out.data(), 4}));
    for (int i = 0; i < 16; ++i) EXPECT_EQ(std::isinf(out[i]), mask[i] == 0);
    float sum[3] = {};
    const GradientSink<float> sink{sum, nullptr};
    EXPECT_FALSE(d.backward(tile, {scores.data(), 4}, {ones.data(), 4}, {}, {out.data(), 4}, {&sink, 1}));
    std::fill(sum, sum + 3, 0.f);
    EXPECT_TRUE(d.backward(tile, {scores.data(), 4}, {ones.data(), 4}, {mask.data(), 4}, {out.data(), 4}, {&sink, 1}));
    for (const float s : sum) EXPECT_EQ(s, 4.f);
  }
}

// NaN and infinity in the gradient, the score or a buffer of a masked pair stay there.
TEST(EvaluateCpu, MaskedPairsContributeNothing) {
  const Graph graph = parse("score_mod 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\n%1 = div score %0\nreturn %1");
  const double data[] = {0, 2};
  const int64_t sizes[] = {2}, strides[] = {1};
  const Buffer buffer{data, DType::kFloat64, sizes, strides};
  const TileProgram<double> program(differentiate(graph, {true}), {1, 1, 1, 2}, {&buffer, 1}, {});
  TileEvaluator<double> evaluator(program, 1, 2);
  const double score[] = {NAN, 6}, grad[] = {INFINITY, 1};
  const uint8_t mask[] = {0, 1};
  double grad_score[2], sum[2] = {};
  const GradientSink<double> sink{sum, nullptr};
  EXPECT_TRUE(evaluator.backward({0, 0, 0, 0, 1, 2}, {score, 2}, {grad, 2}, {mask, 2}, {grad_score, 2}, {&sink, 1}));
  EXPECT_EQ(grad_score[0], 0);
  EXPECT_EQ(grad_score[1], 0.5);
  EXPECT_EQ(sum[0], 0);
  EXPECT_EQ(sum[1], -1.5);
}

TEST(EvaluateCpu, ShareOfPairs) {
  const auto share = [](const std::string& body, std::vector<Value> scalars = {}) {
    return share_of_pairs(parse("mask_mod 1\n" + body), scalars, 4096, 8192);
  };
  EXPECT_EQ(share("%0 = ge q_idx 0\nreturn %0"), 1);
  EXPECT_EQ(share("%0 = lt q_idx 2048\nreturn %0"), 0.5);
  EXPECT_EQ(share("%0 = lt kv_idx 2048\nreturn %0"), 0.25);
  EXPECT_NEAR(share("%0 = mul q_idx 2\n%1 = ge %0 kv_idx\nreturn %1"), 0.5, 0.1);
  EXPECT_EQ(share("scalar $0 i64\n%0 = lt q_idx $0\nreturn %0", {{Type::kInt, 0, 1024}}), 0.25);
}

TEST(EvaluateCpu, WrongCaptures) {
  const Graph graph = parse("score_mod 1\nbuffer @0 f 1\nscalar $0 f\n%0 = load @0 q_idx\n%1 = add %0 $0\nreturn %1");
  const float data[1] = {};
  const int64_t one[] = {1, 1}, negative[] = {-1};
  const auto make = [&](std::vector<Buffer> buffers, std::vector<Value> scalars) {
    TileProgram<float>(graph, kLengths, buffers, scalars);
  };
  const std::span<const int64_t> rank1(one, 1), rank2(one, 2);
  const Value number{Type::kFloat, 1, 0};
  EXPECT_NO_THROW(make({{data, DType::kFloat32, rank1, rank1}}, {number}));
  EXPECT_THROW(make({}, {number}), GraphError);
  EXPECT_THROW(make({{data, DType::kFloat32, rank1, rank1}}, {}), GraphError);
  EXPECT_THROW(make({{data, DType::kInt32, rank1, rank1}}, {number}), GraphError);
  EXPECT_THROW(make({{data, DType::kFloat32, rank2, rank2}}, {number}), GraphError);
  EXPECT_THROW(make({{data, DType::kFloat32, rank1, negative}}, {number}), GraphError);
  EXPECT_THROW(make({{data, DType::kFloat32, rank1, rank1}}, {{Type::kInt, 0, 1}}), GraphError);
}

}  // namespace
}  // namespace fusegrad::score_mod
