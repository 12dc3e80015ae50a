// The rendered CUDA source, compiled for the host, gives what the evaluator gives: for every example and every
// primitive.
#include <gtest/gtest.h>

#include <cmath>

#include "pytorch/score_mod/tensors.h"
#include "rendered_score_mods.h"
#include "score_mod/derivative.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::score_mod {
namespace {

constexpr Lengths kLengths{2, 4, 128, 128};
constexpr Tile kTile{1, 2, 57, 60, 9, 14};
constexpr int64_t kPairs = kTile.rows * kTile.cols;

void expect_close(double got, double expected, const char* what) {
  if (std::isnan(expected) ? std::isnan(got) : got == expected) return;
  EXPECT_NEAR(got, expected, 2e-5 * std::max(1.0, std::abs(expected))) << what;
}

template <class Function>
void for_each_pair(Function&& function) {
  for (int64_t r = 0; r < kTile.rows; ++r) {
    for (int64_t c = 0; c < kTile.cols; ++c) {
      function(r * kTile.cols + c, static_cast<int>(kTile.q + r), static_cast<int>(kTile.kv + c));
    }
  }
}

TEST(Rendered, ScoreMods) {
  const auto examples = rendered_examples();
  float scores[kPairs], grad[kPairs], out[kPairs], grad_score[kPairs];
  uint8_t mask[kPairs];
  for (int64_t i = 0; i < kPairs; ++i) {
    scores[i] = static_cast<float>(i % 29) / 4 - 3;
    grad[i] = std::cos(static_cast<float>(3 * i));
    mask[i] = i % 5 != 2;
  }
  for (size_t e = 0; e < examples.size(); ++e) {
    const ScoreModExample& example = examples[e];
    SCOPED_TRACE(example.name);
    const RenderedScoreMod& rendered = kRenderedScoreMods[e];
    const Graph graph = parse(example.mod.text);
    const Graph derivative = differentiate(graph, std::vector<bool>(example.mod.buffers.size(), true));
    const CapturedTensors captured(example.mod.buffers, example.mod.scalars);
    const auto words = pack_captured(graph, captured.buffers(), captured.scalars());
    const TileProgram<float> forward(graph, kLengths, captured.buffers(), captured.scalars());
    const TileProgram<float> backward(derivative, kLengths, captured.buffers(), captured.scalars());
    TileEvaluator<float> f(forward, kTile.rows, kTile.cols), d(backward, kTile.rows, kTile.cols);
    std::vector<at::Tensor> expected, got;
    std::vector<GradientSink<float>> sinks;
    for (const at::Tensor& buffer : example.mod.buffers) {
      expected.push_back(at::zeros(buffer.sizes(), at::kDouble));
      got.push_back(at::zeros(buffer.sizes(), at::kDouble));
      sinks.push_back({nullptr, expected.back().data_ptr<double>()});
    }
    const Rectangle<const float> score_tile{scores, kTile.cols}, grad_tile{grad, kTile.cols};
    const Rectangle<const uint8_t> mask_tile{mask, kTile.cols};
    ASSERT_TRUE(f.score_mod(kTile, score_tile, {}, {out, kTile.cols}));
    ASSERT_TRUE(d.backward(kTile, score_tile, grad_tile, mask_tile, {grad_score, kTile.cols}, sinks));
    for_each_pair([&](int64_t i, int q, int kv) {
      expect_close(rendered.apply(words.data(), scores[i], kTile.b, kTile.h, q, kv, true), out[i], "value");
      float value[8] = {};
      long long offset[8] = {};
      const float ds =
          rendered.derivative(words.data(), scores[i], grad[i], kTile.b, kTile.h, q, kv, mask[i] != 0, value, offset);
      expect_close(ds, grad_score[i], "d score");
      std::vector<double*> sums;
      for (const at::Tensor& sum : got) sums.push_back(sum.data_ptr<double>());
      rendered.scatter(words.data(), scores[i], grad[i], kTile.b, kTile.h, q, kv, mask[i] != 0, sums.data());
      for (size_t k = 0; k < derivative.contributions().size(); ++k) {
        const bool vector = derivative.open_axes(derivative.contributions()[k]) != 0;
        EXPECT_EQ(offset[k] >= 0, !vector && mask[i] != 0);
        if (offset[k] >= 0) got[derivative.contributions()[k].buffer].data_ptr<double>()[offset[k]] += value[k];
      }
    });
    for (size_t k = 0; k < got.size(); ++k) {
      EXPECT_TRUE(at::allclose(got[k], expected[k], 1e-4, 1e-4)) << "gradient of @" << k;
    }
  }
}

TEST(Rendered, MaskMods) {
  const auto examples = mask_mod_examples();
  for (size_t e = 0; e < examples.size(); ++e) {
    SCOPED_TRACE(examples[e].name);
    const Graph graph = parse(examples[e].mod.text);
    const CapturedTensors captured(examples[e].mod.buffers, examples[e].mod.scalars);
    const auto words = pack_captured(graph, captured.buffers(), captured.scalars());
    const TileProgram<float> program(graph, kLengths, captured.buffers(), captured.scalars());
    TileEvaluator<float> evaluator(program, kTile.rows, kTile.cols);
    uint8_t out[kPairs];
    ASSERT_TRUE(evaluator.mask_mod(kTile, {out, kTile.cols}));
    for_each_pair([&](int64_t i, int q, int kv) {
      EXPECT_EQ(kRenderedMaskMods[e].apply(words.data(), kTile.b, kTile.h, q, kv, true), out[i] != 0);
    });
  }
}

// Out of range: NaN, and nowhere to add to; nothing is read for a pair that takes no part.
TEST(Rendered, OutOfRange) {
  const auto examples = rendered_examples();
  for (size_t e = 0; e < examples.size(); ++e) {
    if (examples[e].name != "key bias") continue;
    const Graph graph = parse(examples[e].mod.text);
    const float data[3] = {1, 2, 3};
    const int64_t sizes[] = {3}, strides[] = {1};
    const Buffer buffer{data, DType::kFloat32, sizes, strides};
    const auto words = pack_captured(graph, {&buffer, 1}, {});
    EXPECT_EQ(kRenderedScoreMods[e].apply(words.data(), 1, 0, 0, 0, 2, true), 4);
    EXPECT_TRUE(std::isnan(kRenderedScoreMods[e].apply(words.data(), 1, 0, 0, 0, 3, true)));
    kRenderedScoreMods[e].apply(words.data(), 1, 0, 0, 0, 1 << 20, false);
    float value[1];
    long long offset[1];
    EXPECT_EQ(kRenderedScoreMods[e].derivative(words.data(), 1, 5, 0, 0, 0, 3, true, value, offset), 5);
    EXPECT_EQ(offset[0], -1);
  }
}

}  // namespace
}  // namespace fusegrad::score_mod
