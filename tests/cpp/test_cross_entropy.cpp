// fusegrad::cross_entropy against torch::nn::functional::cross_entropy.
#include <functional>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int64_t kN = 37, kV = 101;

struct Data {
  explicit Data(const Place& place)
      : logits(random({kN, kV}, place, 3.0)),
        target(random_target(kN, kV, place.device)),
        probabilities(random({kN, kV}, place).to(at::kDouble).softmax(1).to(place.dtype)),
        weight(random({kV}, place).abs() + 0.5),
        token_weight(random({kN}, place).abs()),
        upstream_rows(powers_of_two({kN}, place)) {}

  Tensor logits, target, probabilities, weight, token_weight, upstream_rows;
};

struct Feature {
  const char* name;
  std::function<void(CrossEntropyOptions&, const Data&)> set;
};

const std::vector<Feature> kFeatures{
    {"plain", [](auto&, auto&) {}},
    {"weight", [](auto& o, auto& d) { o.weight(d.weight); }},
    {"label_smoothing", [](auto& o, auto&) { o.label_smoothing(0.2); }},
    {"label_smoothing of 1", [](auto& o, auto&) { o.label_smoothing(1.0); }},
    {"weight, label_smoothing", [](auto& o, auto& d) { o.weight(d.weight).label_smoothing(0.2); }},
    {"z_loss", [](auto& o, auto&) { o.z_loss(1e-2); }},
    {"softcap", [](auto& o, auto&) { o.softcap(4.0); }},
    {"token_weight", [](auto& o, auto& d) { o.token_weight(d.token_weight); }},
    {"weight, token_weight", [](auto& o, auto& d) { o.weight(d.weight).token_weight(d.token_weight); }},
    {"everything",
     [](auto& o, auto& d) {
       o.weight(d.weight).token_weight(d.token_weight).label_smoothing(0.1).z_loss(1e-2).softcap(8.0);
     }},
};

// Loss and gradient of ours and of PyTorch, each against PyTorch in float64.
void expect_parity(const std::string& what, const Tensor& logits, const Tensor& target,
                   const CrossEntropyOptions& options, const Tensor& upstream) {
  const auto truth_input = leaf(logits, at::kDouble), eager_input = leaf(logits, logits.scalar_type());
  const auto truth = reference_loss(truth_input, target, options);
  const auto eager = reference_loss(eager_input, target, options);
  const auto truth_gradient = gradients(truth, {truth_input}, upstream)[0];
  const auto eager_gradient = gradients(eager, {eager_input}, upstream)[0];
  for (const bool inplace : {false, true}) {
    const auto name = what + (inplace ? ", in place" : "");
    const auto input = leaf(logits, logits.scalar_type());
    const auto loss = cross_entropy(input.clone(), target, CrossEntropyOptions(options).inplace(inplace));
    EXPECT_EQ(loss.scalar_type(), logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat) << name;
    expect_accurate(name + ": loss", loss, eager, truth);
    const auto gradient = gradients(loss, {input}, upstream)[0];
    EXPECT_EQ(gradient.scalar_type(), logits.scalar_type()) << name;
    expect_accurate(name + ": gradient", gradient, eager_gradient, truth_gradient);
  }
}

class CrossEntropy : public ::testing::TestWithParam<Place> {
 protected:
  CrossEntropy() : data((at::manual_seed(0), GetParam())), scalar(at::full({}, 0.5, data.logits.options())) {}
  Data data;
  Tensor scalar;
};

TEST_P(CrossEntropy, EveryOptionWithEveryReduction) {
  for (const auto& feature : kFeatures) {
    for (const std::string reduction : {"none", "mean", "sum"}) {
      auto options = CrossEntropyOptions().reduction(reduction);
      feature.set(options, data);
      const auto& upstream = reduction == "none" ? data.upstream_rows : scalar;
      const auto name = std::string(feature.name) + ", " + reduction;
      expect_parity(name, data.logits, data.target, options, upstream);
      if (!options.token_weight()) {
        expect_parity(name + ", probabilities", data.logits, data.probabilities, options, upstream);
      }
    }
  }
}

TEST_P(CrossEntropy, Targets) {
  const auto& logits = data.logits;
  expect_parity("int32", logits, data.target.to(at::kInt), {}, scalar);
  const auto other = random_target(kN, kV, logits.device(), /*ignore_index=*/7);
  expect_parity("ignore_index", logits, other, CrossEntropyOptions().ignore_index(7), scalar);
  expect_parity("float32 weight", logits, data.target, CrossEntropyOptions().weight(data.weight.to(at::kFloat)),
                scalar);
  for (const std::string reduction : {"none", "mean", "sum"}) {
    const auto options = CrossEntropyOptions().reduction(reduction);
    expect_parity("unbatched, " + reduction, logits[0], data.target[0], options, scalar);
    expect_parity("unbatched probabilities, " + reduction, logits[0], data.probabilities[0], options, scalar);
  }
}

TEST_P(CrossEntropy, Layouts) {
  const auto wide = random({kN, kV + 6}, GetParam(), 3.0);
  expect_parity("rows apart", wide.narrow(1, 3, kV), data.target, {}, scalar);
  expect_parity("transposed", data.logits.t().contiguous().t(), data.target, {}, scalar);
  const auto volume = random({5, 11, 3, 7}, GetParam(), 3.0);
  const auto target = random_target(5 * 3 * 7, 11, volume.device()).view({5, 3, 7});
  const auto probabilities = volume.to(at::kDouble).mul(0.5).softmax(1).to(volume.scalar_type());
  for (const std::string reduction : {"none", "mean", "sum"}) {
    const auto options = CrossEntropyOptions().reduction(reduction).label_smoothing(0.1);
    const auto upstream = reduction == "none" ? powers_of_two({5, 3, 7}, GetParam()) : scalar;
    expect_parity("[N, V, d1, d2], " + reduction, volume, target, options, upstream);
    expect_parity("[N, V, d1, d2] probabilities, " + reduction, volume, probabilities, options, upstream);
  }
}

TEST_P(CrossEntropy, Normalizer) {
  const auto divisor = at::full({}, 12.5, data.logits.options().dtype(at::kFloat));
  for (const Normalizer& normalizer : {Normalizer(12.5), Normalizer(divisor)}) {
    auto options = CrossEntropyOptions().normalizer(normalizer).z_loss(1e-2).token_weight(data.token_weight);
    expect_parity("normalizer", data.logits, data.target, options, scalar);
  }
}

TEST_P(CrossEntropy, LargeOffsetsAndInfinities) {
  auto logits = data.logits.clone();
  logits.slice(0, 0, kN, 3).add_(200.0);
  logits.slice(0, 1, kN, 3).select(1, 5).fill_(-std::numeric_limits<double>::infinity());
  const auto target = at::where(data.target.eq(5), 6, data.target);
  expect_parity("offsets", logits, target, CrossEntropyOptions().z_loss(1e-5), scalar);
}

TEST_P(CrossEntropy, AuxiliaryValues) {
  const auto z = leaf(data.logits, at::kDouble);
  const auto log_p = z.log_softmax(1);
  const auto kept = data.target.ne(-100);
  const auto lse = z.logsumexp(1);
  const auto all =
      Aux().lse(true).z_loss(true).token_accuracy(true).predicted_tokens(true).entropy(true).token_log_prob(true);
  const auto close = [](const Tensor& ours, const Tensor& truth) {
    return at::allclose(ours.to(at::kDouble), truth, /*rtol=*/1e-5, /*atol=*/1e-6);
  };
  for (const std::string reduction : {"none", "mean"}) {
    const auto input = leaf(data.logits, data.logits.scalar_type());
    const auto options = CrossEntropyOptions().z_loss(0.5).reduction(reduction).inplace(true);
    const auto [loss, aux] = cross_entropy_with_aux(input.clone(), data.target, options, all);
    EXPECT_TRUE(close(aux.lse, lse));
    EXPECT_TRUE(close(aux.z_loss, 0.5 * lse.square() * kept));
    EXPECT_TRUE(close(aux.entropy, -(log_p.exp() * log_p).sum(1) * kept));
    EXPECT_TRUE(close(aux.token_log_prob, log_p.gather(1, data.target.clamp_min(0).unsqueeze(1)).squeeze(1) * kept));
    EXPECT_TRUE(at::equal(aux.predicted_tokens, at::where(kept, data.logits.argmax(1), -1)));
    EXPECT_TRUE(close(aux.token_accuracy, data.logits.argmax(1).eq(data.target).to(at::kDouble)));
    for (const auto& constant : {aux.z_loss, aux.token_accuracy}) {
      EXPECT_TRUE(constant.requires_grad());
      EXPECT_THROW(gradients(loss.sum() + constant.sum(), {input}, at::ones_like(loss.sum()), /*retain_graph=*/true),
                   c10::NotImplementedError);
    }
    // lse, entropy and token_log_prob are differentiable, alone and beside the loss.
    const auto upstream = data.upstream_rows.to(aux.lse.scalar_type());
    const double tolerance = data.logits.scalar_type() == at::kBFloat16 ? 4e-3 : 1e-3;
    const std::vector<std::pair<Tensor, Tensor>> values{
        {aux.lse, lse},
        {aux.entropy, -(log_p.exp() * log_p).sum(1) * kept},
        {aux.token_log_prob, log_p.gather(1, data.target.clamp_min(0).unsqueeze(1)).squeeze(1) * kept}};
    for (const auto& [value, right] : values) {
      const auto truth = gradients(right, {z}, upstream.to(at::kDouble), /*retain_graph=*/true)[0];
      const auto ours = gradients(value, {input}, upstream, /*retain_graph=*/true)[0];
      EXPECT_TRUE(at::allclose(ours.to(at::kDouble), truth, tolerance, 1e-5));
    }
    const auto both = gradients(loss.sum() + (aux.lse * upstream).sum(), {input}, at::ones_like(loss.sum()))[0];
    const auto expected = gradients(reference_loss(z, data.target, options).sum() + (lse * upstream).sum(), {z},
                                    at::ones({}, z.options().requires_grad(false)), /*retain_graph=*/true)[0];
    EXPECT_TRUE(at::allclose(both.to(at::kDouble), expected, tolerance, 1e-5));
  }
}

TEST_P(CrossEntropy, OnlyWhatIsAskedForIsReturned) {
  const auto [loss, aux] = cross_entropy_with_aux(data.logits, data.probabilities, {}, Aux().entropy(true));
  EXPECT_TRUE(loss.defined() && aux.entropy.defined());
  EXPECT_EQ(aux.entropy.sizes(), at::IntArrayRef({kN}));
  for (const auto& other : {aux.lse, aux.z_loss, aux.token_accuracy, aux.predicted_tokens, aux.token_log_prob}) {
    EXPECT_FALSE(other.defined());
  }
}

TEST_P(CrossEntropy, ProbabilitiesGetTheirGradient) {
  for (const std::string reduction : {"none", "mean", "sum"}) {
    const auto options = CrossEntropyOptions().reduction(reduction).label_smoothing(0.1).weight(data.weight);
    const auto& upstream = reduction == "none" ? data.upstream_rows : scalar;
    std::vector<std::vector<Tensor>> results;
    for (const auto dtype : {at::kDouble, GetParam().dtype}) {
      const std::vector<Tensor> inputs{leaf(data.logits, dtype), leaf(data.probabilities, dtype)};
      results.push_back(gradients(reference_loss(inputs[0], inputs[1], options), inputs, upstream));
    }
    const std::vector<Tensor> inputs{leaf(data.logits, GetParam().dtype), leaf(data.probabilities, GetParam().dtype)};
    const auto ours = gradients(cross_entropy(inputs[0], inputs[1], options), inputs, upstream);
    for (size_t i = 0; i < 2; ++i)
      expect_accurate("gradient of " + std::to_string(i), ours[i], results[1][i], results[0][i]);
  }
}

TEST_P(CrossEntropy, NoRowsAndNoKeptRows) {
  const auto ignored = at::full_like(data.target, -100);
  const auto empty = data.logits.narrow(0, 0, 0);
  for (const bool inplace : {false, true}) {
    for (const std::string reduction : {"none", "mean", "sum"}) {
      const auto options = CrossEntropyOptions().reduction(reduction).z_loss(1e-3).inplace(inplace);
      for (const auto& [logits, target] : {std::pair(data.logits, ignored), {empty, ignored.narrow(0, 0, 0)}}) {
        const auto input = leaf(logits, logits.scalar_type());
        const auto loss = cross_entropy(input.clone(), target, options);
        EXPECT_TRUE(reduction == "mean" ? loss.isnan().item<bool>() : loss.eq(0).all().item<bool>()) << reduction;
        EXPECT_TRUE(gradients(loss, {input}, scalar)[0].eq(0).all().item<bool>()) << reduction;
      }
    }
  }
}

TEST_P(CrossEntropy, RepeatedBackward) {
  for (const bool inplace : {false, true}) {
    for (const std::string reduction : {"none", "mean"}) {
      const auto input = leaf(data.logits, GetParam().dtype);
      const auto options = CrossEntropyOptions().reduction(reduction).inplace(inplace);
      const auto upstream =
          reduction == "none" ? data.upstream_rows : at::full({}, 0.37, input.options().requires_grad(false));
      expect_accumulates(cross_entropy(input.clone(), data.target, options), {input}, upstream);
      expect_repeatable(cross_entropy(input.clone(), data.target, options), {input}, upstream);
    }
  }
}

TEST_P(CrossEntropy, DoubleBackward) {
  const auto twice = [](const at::Tensor& loss, const at::Tensor& input) {
    const auto first = torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {input})[0];
  };
  const auto dtype = GetParam().dtype;
  const double most = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-4 : 5e-2;
  const auto input = leaf(data.logits, dtype);
  const auto exact = input.detach().to(at::kDouble).requires_grad_();
  const auto expected = twice(at::cross_entropy_loss(exact, data.target), exact);
  const auto found = twice(cross_entropy(input.clone(), data.target), input);
  EXPECT_LE(((found.to(at::kDouble) - expected).norm() / expected.norm()).item<double>(), most);
}

TEST_P(CrossEntropy, DoubleBackwardInplaceRaises) {
  const auto input = leaf(data.logits, GetParam().dtype);
  const auto loss = cross_entropy(input.clone(), data.target, CrossEntropyOptions().inplace(true));
  const auto gradient = gradients(loss, {input}, scalar, /*retain_graph=*/true, /*create_graph=*/true)[0];
  try {
    gradients(gradient.square().sum(), {input}, scalar);
    ADD_FAILURE() << "differentiated twice";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find("cross_entropy"), std::string::npos)
        << error.what_without_backtrace();
  }
}

INSTANTIATE_TEST_SUITE_P(Places, CrossEntropy, ::testing::ValuesIn(places()), place_name);

TEST(CrossEntropyGpu, TargetsOutOfRange) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const Place place{at::Device(at::kCUDA, 0), at::kFloat};
  const auto input = leaf(random({4, 9}, place), at::kFloat);
  const auto target = at::tensor({1, 9, -5, 8}, at::kLong).to(place.device);
  const auto loss = cross_entropy(input, target, CrossEntropyOptions().reduction("none"));
  EXPECT_TRUE(at::equal(loss.isnan().cpu(), at::tensor({0, 1, 1, 0}).to(at::kBool)));
  const auto gradient = gradients(loss, {input}, at::ones({}, input.options().requires_grad(false)))[0];
  EXPECT_TRUE(at::equal(gradient.isnan().all(1).cpu(), at::tensor({0, 1, 1, 0}).to(at::kBool)));
  set_check_targets(true);
  EXPECT_THROW(cross_entropy(input, target), c10::IndexError);
  set_check_targets(false);
}

}  // namespace
}  // namespace fusegrad::testing
