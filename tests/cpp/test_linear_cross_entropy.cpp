// fusegrad::linear_cross_entropy against torch::linear and torch::nn::functional::cross_entropy.
#include <functional>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int64_t kN = 41, kH = 24, kV = 103;

struct Data {
  Data(const Place& place, int64_t rows, int64_t hidden, int64_t vocab)
      : input(random({rows, hidden}, place)),
        linear_weight(random({vocab, hidden}, place, 0.5)),
        linear_bias(random({vocab}, place)),
        target(random_target(rows, vocab, place.device)),
        probabilities(random({rows, vocab}, place).to(at::kDouble).softmax(1).to(place.dtype)),
        weight(random({vocab}, place).abs() + 0.5),
        token_weight(random({rows}, place).abs()),
        upstream_rows(powers_of_two({rows}, place)),
        scalar(at::full({}, 0.5, input.options())) {}

  Tensor input, linear_weight, linear_bias, target, probabilities, weight, token_weight, upstream_rows, scalar;
};

struct Feature {
  const char* name;
  std::function<void(LinearCrossEntropyOptions&, const Data&)> set;
};

const std::vector<Feature> kFeatures{
    {"plain", [](auto&, auto&) {}},
    {"linear_bias", [](auto& o, auto& d) { o.linear_bias(d.linear_bias); }},
    {"weight", [](auto& o, auto& d) { o.weight(d.weight); }},
    {"label_smoothing", [](auto& o, auto&) { o.label_smoothing(0.2); }},
    {"z_loss", [](auto& o, auto&) { o.z_loss(1e-2); }},
    {"softcap, logit_scale", [](auto& o, auto&) { o.softcap(4.0).logit_scale(0.7); }},
    {"token_weight", [](auto& o, auto& d) { o.token_weight(d.token_weight); }},
    {"everything",
     [](auto& o, auto& d) {
       o.linear_bias(d.linear_bias).weight(d.weight).token_weight(d.token_weight).label_smoothing(0.1);
       o.z_loss(1e-2).softcap(8.0).logit_scale(1.3);
     }},
};

// The loss made of PyTorch's ops, with the products in the input's dtype.
Tensor linear_reference(const Tensor& input, const Tensor& linear_weight, const Tensor& linear_bias,
                        const Tensor& target, const LinearCrossEntropyOptions& options) {
  const auto dtype = input.scalar_type();
  auto logits = at::matmul(input, linear_weight.to(dtype).t());
  if (linear_bias.defined()) logits = logits + linear_bias.to(dtype);
  logits = logits * options.logit_scale();
  auto rest =
      CrossEntropyOptions().weight(options.weight()).normalizer(options.normalizer()).softcap(options.softcap());
  rest.ignore_index(options.ignore_index()).reduction(options.reduction()).z_loss(options.z_loss());
  rest.label_smoothing(options.label_smoothing()).token_weight(options.token_weight());
  return reference_loss(logits, target, rest);
}

// A loss and its gradients of input, weight and, where there is one, bias.
using Loss = std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>;
std::vector<Tensor> loss_and_gradients(const Loss& loss_of, const std::vector<Tensor>& leaves, const Tensor& upstream) {
  const auto loss = loss_of(leaves[0], leaves[1], leaves.size() == 3 ? leaves[2] : Tensor());
  auto result = gradients(loss, leaves, upstream);
  result.insert(result.begin(), loss.detach());
  return result;
}

std::vector<Tensor> leaves_of(const Data& data, const LinearCrossEntropyOptions& options,
                              std::optional<at::ScalarType> dtype = std::nullopt) {
  std::vector<Tensor> result{data.input, data.linear_weight};
  if (options.linear_bias()) result.push_back(*options.linear_bias());
  for (auto& tensor : result) tensor = leaf(tensor, dtype.value_or(tensor.scalar_type()));
  return result;
}

Tensor ours(const Tensor& input, const Tensor& linear_weight, const Tensor& linear_bias, const Tensor& target,
            LinearCrossEntropyOptions options) {
  if (linear_bias.defined()) options.linear_bias(linear_bias);
  return linear_cross_entropy(input, linear_weight, target, options);
}

void expect_parity(const std::string& what, const Data& data, const Tensor& target,
                   const LinearCrossEntropyOptions& options) {
  const auto reference = [&](auto& x, auto& w, auto& b) { return linear_reference(x, w, b, target, options); };
  const auto& upstream = options.reduction() == "none" ? data.upstream_rows : data.scalar;
  const auto truth = loss_and_gradients(reference, leaves_of(data, options, at::kDouble), upstream);
  const auto eager = loss_and_gradients(reference, leaves_of(data, options), upstream);
  for (const bool inplace : {false, true}) {
    const auto fused = [&](auto& x, auto& w, auto& b) {
      return ours(x.clone(), w, b, target, LinearCrossEntropyOptions(options).inplace(inplace));
    };
    const auto leaves = leaves_of(data, options);
    const auto result = loss_and_gradients(fused, leaves, upstream);
    for (size_t i = 0; i < result.size(); ++i) {
      const std::string part[] = {"loss", "input", "linear_weight", "linear_bias"};
      const auto name = what + (inplace ? ", in place: " : ": ") + part[i];
      if (i > 0) {
        EXPECT_EQ(result[i].scalar_type(), leaves[i - 1].scalar_type()) << name;
      }
      expect_accurate(name, result[i], eager[i], truth[i]);
    }
  }
}

class LinearCrossEntropy : public ::testing::TestWithParam<Place> {
 protected:
  LinearCrossEntropy() : data((at::manual_seed(1), GetParam()), kN, kH, kV) {}
  Data data;
};

TEST_P(LinearCrossEntropy, EveryOptionWithEveryReduction) {
  for (const auto& feature : kFeatures) {
    for (const std::string reduction : {"none", "mean", "sum"}) {
      auto options = LinearCrossEntropyOptions().reduction(reduction);
      feature.set(options, data);
      const auto name = std::string(feature.name) + ", " + reduction;
      expect_parity(name, data, data.target, options);
      if (!options.token_weight()) expect_parity(name + ", probabilities", data, data.probabilities, options);
    }
  }
}

TEST_P(LinearCrossEntropy, TargetsAndNormalizer) {
  expect_parity("int32", data, data.target.to(at::kInt), {});
  const auto other = random_target(kN, kV, data.input.device(), /*ignore_index=*/7);
  expect_parity("ignore_index", data, other, LinearCrossEntropyOptions().ignore_index(7));
  expect_parity("number", data, data.target, LinearCrossEntropyOptions().normalizer(12.5).z_loss(1e-2));
  const auto divisor = at::full({}, 12.5, data.input.options().dtype(at::kFloat));
  expect_parity("tensor", data, data.target, LinearCrossEntropyOptions().normalizer(divisor).z_loss(1e-2));
}

// Several chunks of rows, of columns, with and without an accumulator.
TEST_P(LinearCrossEntropy, Workspace) {
  const Data large(GetParam(), /*rows=*/3000, /*hidden=*/8, /*vocab=*/257);
  for (const std::optional<int64_t> mib : {std::optional<int64_t>(), {0}, {1}, {2}, {1000000000000000}}) {
    for (const std::string reduction : {"none", "mean"}) {
      auto options = LinearCrossEntropyOptions().workspace_mib(mib).reduction(reduction);
      options.linear_bias(large.linear_bias);
      expect_parity("workspace_mib " + std::to_string(mib.value_or(-1)) + ", " + reduction, large, large.target,
                    options);
    }
  }
}

TEST_P(LinearCrossEntropy, AccumulateDtype) {
  const Data large(GetParam(), /*rows=*/3000, /*hidden=*/8, /*vocab=*/257);
  const auto wide = GetParam().dtype == at::kDouble ? at::kDouble : at::kFloat;
  expect_parity("wide", large, large.target, LinearCrossEntropyOptions().accumulate_dtype(wide).workspace_mib(2));
  // The lean choice is exact to the dtype, no more.
  const auto options = LinearCrossEntropyOptions().accumulate_dtype(GetParam().dtype).workspace_mib(1);
  const auto fused = [&](auto& x, auto& w, auto& b) { return ours(x, w, b, large.target, options); };
  const auto reference = [&](auto& x, auto& w, auto& b) { return linear_reference(x, w, b, large.target, options); };
  const auto truth = loss_and_gradients(reference, leaves_of(large, options, at::kDouble), large.scalar);
  const auto result = loss_and_gradients(fused, leaves_of(large, options), large.scalar);
  EXPECT_LE(l2(result[2].to(at::kDouble) - truth[2]), 0.02 * l2(truth[2]));
}

TEST_P(LinearCrossEntropy, AnyLeadingDimensions) {
  const auto flat_weight = leaf(data.linear_weight, GetParam().dtype);
  const auto input = data.input.narrow(0, 0, 40), target = data.target.narrow(0, 0, 40);
  const auto flat = linear_cross_entropy(input, flat_weight, target, LinearCrossEntropyOptions().reduction("none"));
  for (const auto& shape : std::vector<std::vector<int64_t>>{{40}, {5, 8}, {2, 5, 4}}) {
    auto full = shape;
    full.push_back(kH);
    const auto options = LinearCrossEntropyOptions().reduction("none");
    const auto loss = linear_cross_entropy(input.view(full), flat_weight, target.view(shape), options);
    EXPECT_EQ(loss.sizes(), at::IntArrayRef(shape));
    EXPECT_TRUE(at::equal(loss.flatten(), flat));
  }
  const auto single =
      linear_cross_entropy(input[0], flat_weight, target[0], LinearCrossEntropyOptions().reduction("none"));
  EXPECT_EQ(single.dim(), 0);
  EXPECT_TRUE(at::allclose(single, flat[0]));
}

TEST_P(LinearCrossEntropy, EachGradientDependsOnItsOwnInput) {
  for (const std::string reduction : {"none", "mean"}) {
    const auto options = LinearCrossEntropyOptions().reduction(reduction).linear_bias(data.linear_bias);
    const auto& upstream = reduction == "none" ? data.upstream_rows : data.scalar;
    const auto fused = [&](auto& x, auto& w, auto& b) { return ours(x, w, b, data.target, options); };
    const auto all = loss_and_gradients(fused, leaves_of(data, options), upstream);
    for (int wanted = 1; wanted < 8; ++wanted) {
      auto leaves = leaves_of(data, options);
      std::vector<Tensor> inputs, expected;
      for (size_t i = 0; i < 3; ++i) {
        leaves[i].requires_grad_((wanted >> i & 1) != 0);
        if (!leaves[i].requires_grad()) continue;
        inputs.push_back(leaves[i]);
        expected.push_back(all[i + 1]);
      }
      const auto result = gradients(fused(leaves[0], leaves[1], leaves[2]), inputs, upstream);
      for (size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_TRUE(at::allclose(result[i], expected[i], 1e-2, 1e-4)) << reduction << ", wanted " << wanted;
      }
    }
  }
}

TEST_P(LinearCrossEntropy, AuxiliaryValues) {
  const auto all =
      Aux().lse(true).z_loss(true).token_accuracy(true).predicted_tokens(true).entropy(true).token_log_prob(true);
  const auto z = at::matmul(data.input.to(at::kDouble), data.linear_weight.to(at::kDouble).t());
  const auto kept = data.target.ne(-100);
  const auto log_p = z.log_softmax(1), lse = z.logsumexp(1);
  // On CUDA the logits are rounded to the dtype.
  const double tolerance = GetParam().device.is_cpu() || GetParam().dtype == at::kFloat ? 1e-4 : 3e-2;
  const auto close = [&](const Tensor& value, const Tensor& truth) {
    return at::allclose(value.to(at::kDouble), truth, tolerance, tolerance);
  };
  const auto leaves = leaves_of(data, {});
  const auto options = LinearCrossEntropyOptions().z_loss(0.5);
  const auto [loss, aux] = linear_cross_entropy_with_aux(leaves[0], leaves[1], data.target, options, all);
  EXPECT_TRUE(close(aux.lse, lse));
  EXPECT_TRUE(close(aux.z_loss, 0.5 * lse.square() * kept));
  EXPECT_TRUE(close(aux.entropy, -(log_p.exp() * log_p).sum(1) * kept));
  EXPECT_TRUE(close(aux.token_log_prob, log_p.gather(1, data.target.clamp_min(0).unsqueeze(1)).squeeze(1) * kept));
  if (GetParam().device.is_cpu()) {
    EXPECT_TRUE(at::equal(aux.predicted_tokens, at::where(kept, z.argmax(1), -1)));
  }
  EXPECT_TRUE(at::equal(aux.token_accuracy, aux.predicted_tokens.eq(data.target).to(aux.lse.scalar_type())));

  const auto truth_leaves = leaves_of(data, {}, at::kDouble);
  const auto truth_lse = at::matmul(truth_leaves[0], truth_leaves[1].t()).logsumexp(1);
  const auto truth = gradients(truth_lse, truth_leaves, data.upstream_rows);
  const auto result = gradients(aux.lse, leaves, data.upstream_rows);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(result[i].to(at::kDouble), truth[i], 3e-2, 3e-2)) << i;
}

TEST_P(LinearCrossEntropy, LogProbabilitiesAndEntropies) {
  for (const std::optional<int64_t> workspace_mib : {std::optional<int64_t>(), std::optional<int64_t>(0)}) {
    const auto leaves = leaves_of(data, {}), truth_leaves = leaves_of(data, {}, at::kDouble);
    auto options = LinearLogProbOptions().logit_scale(0.5).workspace_mib(workspace_mib);
    const auto out = linear_log_prob(leaves[0], leaves[1], data.target, options);
    const auto log_p = (0.5 * at::matmul(truth_leaves[0], truth_leaves[1].t())).log_softmax(1);
    const auto kept = data.target.ne(-100);
    const auto right = log_p.gather(1, data.target.clamp_min(0).unsqueeze(1)).squeeze(1) * kept;
    const auto entropy = -(log_p.exp() * log_p).sum(1) * kept;
    EXPECT_TRUE(at::allclose(out.log_prob.to(at::kDouble), right, 3e-2, 3e-2));
    EXPECT_TRUE(at::allclose(out.entropy.to(at::kDouble), entropy, 3e-2, 3e-2));
    const auto one = at::ones({}, data.input.options());
    const auto ours = gradients((out.log_prob * 2 - out.entropy).sum(), leaves, one);
    const auto truth = gradients((right * 2 - entropy).sum(), truth_leaves, one);
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(ours[i].to(at::kDouble), truth[i], 3e-2, 3e-2)) << i;
    EXPECT_FALSE(linear_log_prob(leaves[0], leaves[1], data.target, options.return_entropy(false)).entropy.defined());
  }
}

TEST_P(LinearCrossEntropy, NoRowsAndNoKeptRows) {
  const auto ignored = at::full_like(data.target, -100);
  for (const std::string reduction : {"none", "mean", "sum"}) {
    for (const int64_t rows : {int64_t{0}, kN}) {
      const auto options = LinearCrossEntropyOptions().reduction(reduction);
      const auto leaves = leaves_of(data, options);
      const auto loss =
          linear_cross_entropy(leaves[0].narrow(0, 0, rows), leaves[1], ignored.narrow(0, 0, rows), options);
      EXPECT_TRUE(reduction == "mean" ? loss.isnan().item<bool>() : loss.eq(0).all().item<bool>()) << reduction;
      for (const auto& gradient : gradients(loss, leaves, data.scalar)) {
        EXPECT_TRUE(gradient.eq(0).all().item<bool>()) << reduction << ", " << rows << " rows";
      }
    }
  }
}

TEST_P(LinearCrossEntropy, RepeatedBackward) {
  for (const bool inplace : {false, true}) {
    for (const std::string reduction : {"none", "mean"}) {
      for (const bool recompute : {false, true}) {
        auto options = LinearCrossEntropyOptions().reduction(reduction).inplace(inplace).linear_bias(data.linear_bias);
        if (recompute) options.workspace_mib(0);
        const auto leaves = leaves_of(data, options);
        const auto upstream = reduction == "none" ? data.upstream_rows : at::full({}, 0.37, data.input.options());
        const auto loss = [&] { return ours(leaves[0].clone(), leaves[1], leaves[2], data.target, options); };
        expect_accumulates(loss(), leaves, upstream);
        expect_repeatable(loss(), leaves, upstream);
      }
    }
  }
}

TEST_P(LinearCrossEntropy, DoubleBackward) {
  const auto twice = [](const at::Tensor& loss, const at::Tensor& input, const at::Tensor& weight) {
    const auto first = torch::autograd::grad({loss}, {input, weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {input, weight});
  };
  const auto dtype = GetParam().dtype;
  const double most = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-4 : 5e-2;
  for (const std::string reduction : {"sum", "mean"}) {
    const auto leaves = leaves_of(data, {});
    const auto found =
        twice(linear_cross_entropy(leaves[0], leaves[1], data.target, LinearCrossEntropyOptions().reduction(reduction)),
              leaves[0], leaves[1]);
    const auto input = leaves[0].detach().to(at::kDouble).requires_grad_();
    const auto weight = leaves[1].detach().to(at::kDouble).requires_grad_();
    const auto rows = at::cross_entropy_loss(at::linear(input, weight), data.target, {},
                                             reduction == "sum" ? at::Reduction::Sum : at::Reduction::Mean);
    const auto expected = twice(rows, input, weight);
    for (size_t i = 0; i < 2; ++i) {
      const double error = ((found[i].to(at::kDouble) - expected[i]).norm() / expected[i].norm()).item<double>();
      EXPECT_LE(error, most) << reduction << ", gradient " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, LinearCrossEntropy, ::testing::ValuesIn(places()), place_name);

// A float32 weight with low-precision products: its gradient is float32, and as exact as the products.
TEST(LinearCrossEntropyMixed, AutocastAndLowPrecisionInput) {
  for (const auto& device : devices()) {
    at::manual_seed(2);
    Data data({device, at::kBFloat16}, kN, kH, kV);
    data.linear_weight = data.linear_weight.to(at::kFloat);
    expect_parity("bfloat16 input", data, data.target, {});
    data.input = data.input.to(at::kFloat);
    const Autocast autocast(device, at::kBFloat16);
    expect_parity("autocast", data, data.target, {});
  }
}

}  // namespace
}  // namespace fusegrad::testing
