// What post-training asks of fusegrad::linear_log_prob: factors of each row, a support, a buffer for the weight's
// gradient, and the same bits in every batch; against formulas of PyTorch's ops in float64.
#include <limits>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int64_t kN = 30, kH = 24, kV = 103, kK = 7;

class LinearLogProb : public ::testing::TestWithParam<Place> {
 protected:
  LinearLogProb() {
    at::manual_seed(3);
    const auto& place = GetParam();
    input = random({kN, kH}, place);
    weight = random({kV, kH}, place, 0.5);
    target = random_target(kN, kV, place.device);
    scale = random({kN}, place).abs() + 0.5;
    // The target among K columns, of which some are padding.
    const auto steps = at::arange(kK, target.options());
    support = (target.clamp_min(0).unsqueeze(1) + steps * 3).remainder(kV);
    support.select(1, 2).fill_(-1);
  }

  struct Values {
    Tensor log_prob, entropy;
  };

  // By plain formulas, in the dtype of the leaves: logits times a factor of each row, -inf outside of the support.
  Values plain(const std::vector<Tensor>& leaves, const std::optional<Tensor>& factor, bool masked) const {
    auto z = at::matmul(leaves[0], leaves[1].t());
    if (factor) z = z * factor->unsqueeze(1);
    if (masked) {
      const auto keep = at::zeros({kN, kV + 1}, z.options().dtype(at::kBool))
                            .scatter_(1, support.where(support.ge(0), at::full_like(support, kV)), true)
                            .narrow(1, 0, kV);
      z = z.masked_fill(keep.logical_not(), -std::numeric_limits<double>::infinity());
    }
    const auto log_p = z.log_softmax(1), kept = target.ne(-100).to(z.scalar_type());
    const auto entropy = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(1);
    return {log_p.gather(1, target.clamp_min(0).unsqueeze(1)).squeeze(1) * kept, entropy * kept};
  }

  static std::vector<Tensor> results(const Values& out, const std::vector<Tensor>& leaves) {
    auto made = gradients((out.log_prob * 2 - out.entropy).sum(), leaves, at::ones({}, leaves[0].options()));
    made.push_back(out.log_prob.detach());
    made.push_back(out.entropy.detach());
    return made;
  }

  // `leaves`: input, weight and, where it is asked for, the factor of each row.
  void expect_parity(const std::string& what, LinearLogProbOptions options, bool scaled) const {
    const auto leaves_in = [&](at::ScalarType dtype) {
      std::vector<Tensor> leaves{leaf(input, dtype), leaf(weight, dtype)};
      if (scaled) leaves.push_back(leaf(scale, dtype));
      return leaves;
    };
    const auto by_formula = [&](at::ScalarType dtype) {
      const auto leaves = leaves_in(dtype);
      const auto factor = scaled ? std::optional<Tensor>(leaves[2]) : std::nullopt;
      return results(plain(leaves, factor, options.support().has_value()), leaves);
    };
    const auto leaves = leaves_in(GetParam().dtype);
    if (scaled) options.row_scale(leaves[2]);
    const auto out = linear_log_prob(leaves[0], leaves[1], target, options);
    const auto ours = results({out.log_prob, out.entropy}, leaves);
    const auto eager = by_formula(GetParam().dtype), truth = by_formula(at::kDouble);
    for (size_t i = 0; i < ours.size(); ++i)
      expect_accurate(what + " " + std::to_string(i), ours[i], eager[i], truth[i]);
  }

  Tensor input, weight, target, scale, support;
};

TEST_P(LinearLogProb, RowScaleAndSupport) {
  for (const std::optional<int64_t> mib : {std::optional<int64_t>(), std::optional<int64_t>(0)}) {
    const auto options = LinearLogProbOptions().workspace_mib(mib);
    expect_parity("plain", options, false);
    expect_parity("row_scale", options, true);
    expect_parity("support", LinearLogProbOptions(options).support(support), false);
    expect_parity("support and row_scale", LinearLogProbOptions(options).support(support.to(at::kInt)), true);
    expect_parity("batch_invariant", LinearLogProbOptions(options).batch_invariant(true), true);
  }
}

TEST_P(LinearLogProb, SupportOfCrossEntropy) {
  const auto logits = leaf(at::matmul(input, weight.t()), GetParam().dtype), wide = leaf(logits, at::kDouble);
  const auto loss = cross_entropy(logits, target, CrossEntropyOptions().support(support).reduction("sum"));
  const auto masked = [&](const Tensor& z) {
    const auto inside = at::zeros({kN, kV + 1}, z.options().dtype(at::kBool))
                            .scatter_(1, support.where(support.ge(0), at::full_like(support, kV)), true)
                            .narrow(1, 0, kV);
    return z.masked_fill(inside.logical_not(), -std::numeric_limits<double>::infinity());
  };
  const auto right = at::cross_entropy_loss(masked(wide), target, {}, at::Reduction::Sum);
  EXPECT_TRUE(at::allclose(loss.to(at::kDouble), right, 1e-3, 1e-3));
  const auto one = at::ones({}, input.options());
  const auto tolerance = GetParam().dtype == at::kBFloat16 ? 1e-2 : 2e-3;
  EXPECT_TRUE(at::allclose(gradients(loss, {logits}, one)[0].to(at::kDouble), gradients(right, {wide}, one)[0],
                           tolerance, tolerance));
}

TEST_P(LinearLogProb, WeightGradientIntoABuffer) {
  const auto x = leaf(input, GetParam().dtype), w = leaf(weight, GetParam().dtype);
  const auto acc = GetParam().dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto into = at::ones({kV, kH}, input.options().dtype(acc));
  const auto version = into._version();
  const auto options = LinearLogProbOptions().return_entropy(false);
  const auto out = linear_log_prob(x, w, target, LinearLogProbOptions(options).grad_weight_into(into));
  for (int i = 0; i < 2; ++i) out.log_prob.sum().backward({}, /*retain_graph=*/true);
  EXPECT_FALSE(w.grad().defined());
  EXPECT_GT(into._version(), version);
  const auto wide = std::vector<Tensor>{leaf(input, at::kDouble), leaf(weight, at::kDouble)};
  const auto truth = gradients(plain(wide, std::nullopt, false).log_prob.sum(), wide, at::ones({}, wide[0].options()));
  const auto tolerance = acc == at::kDouble ? 1e-12 : GetParam().dtype == at::kFloat ? 1e-4 : 5e-2;
  EXPECT_TRUE(at::allclose(into.to(at::kDouble) - 1, 2 * truth[1], tolerance, tolerance));
  EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), 2 * truth[0], tolerance, tolerance));
  EXPECT_THROW(linear_log_prob(x, w, target, LinearLogProbOptions(options).grad_weight_into(w.detach())), c10::Error);
  EXPECT_THROW(linear_log_prob(x, w.detach(), target, LinearLogProbOptions(options).grad_weight_into(into)),
               c10::ValueError);
}

TEST_P(LinearLogProb, TheSameBitsInEveryBatch) {
  const auto options = LinearLogProbOptions().batch_invariant(true);
  const auto x = leaf(input, GetParam().dtype), row = leaf(input.narrow(0, 6, 1), GetParam().dtype);
  const auto whole = linear_log_prob(x, weight, target, options);
  const auto alone = linear_log_prob(row, weight, target.narrow(0, 6, 1), options);
  EXPECT_TRUE(alone.log_prob.equal(whole.log_prob.narrow(0, 6, 1)));
  EXPECT_TRUE(alone.entropy.equal(whole.entropy.narrow(0, 6, 1)));
  const auto one = at::ones({}, input.options());
  const auto gradient = gradients((alone.log_prob + alone.entropy).sum(), {row}, one)[0];
  EXPECT_TRUE(gradient.equal(gradients((whole.log_prob + whole.entropy).sum(), {x}, one)[0].narrow(0, 6, 1)));
  const auto called = linear_log_prob_forward(row, weight, target.narrow(0, 6, 1), options);
  EXPECT_FALSE(called.log_prob.requires_grad());
  EXPECT_TRUE(called.log_prob.equal(alone.log_prob));
  EXPECT_TRUE(called.entropy.equal(alone.entropy));
  EXPECT_FALSE(
      linear_log_prob_forward(row, weight, target.narrow(0, 6, 1), LinearLogProbOptions(options).return_entropy(false))
          .entropy.defined());
  EXPECT_THROW(linear_log_prob_forward(x, weight, target, LinearLogProbOptions(options).support(target.unsqueeze(1))),
               c10::ValueError);
  EXPECT_TRUE(linear_log_prob_forward(row, weight, target.narrow(0, 6, 1)).lse.equal(called.lse));
  const auto text_of = [&](const auto& op) -> std::string {
    try {
      op(x, weight, target.narrow(0, 0, 1), options);
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_EQ(text_of(linear_log_prob).rfind("linear_log_prob: a target", 0), 0);
  EXPECT_EQ(text_of(linear_log_prob_forward).rfind("linear_log_prob_forward: a target", 0), 0);
}

INSTANTIATE_TEST_SUITE_P(Places, LinearLogProb, ::testing::ValuesIn(places()), place_name);

}  // namespace
}  // namespace fusegrad::testing
