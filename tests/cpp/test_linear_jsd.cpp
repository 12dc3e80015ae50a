// fusegrad::linear_jsd against its definition in PyTorch's ops.
#include <functional>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int64_t kN = 41, kH = 24, kTeacherH = 16, kV = 103;

struct Data {
  explicit Data(const Place& place)
      : input(random({kN, kH}, place)),
        weight(random({kV, kH}, place, 0.3)),
        bias(random({kV}, place)),
        teacher(random({kN, kTeacherH}, place)),
        teacher_weight(random({kV, kTeacherH}, place, 0.3)),
        teacher_bias(random({kV}, place)),
        labels(random_target(kN, kV, place.device)),
        token_weight(random({kN}, place).abs()),
        upstream_rows(powers_of_two({kN}, place)),
        scalar(at::full({}, 0.5, input.options())) {}

  Tensor input, weight, bias, teacher, teacher_weight, teacher_bias, labels, token_weight, upstream_rows, scalar;
};

struct Feature {
  const char* name;
  std::function<void(LinearJSDOptions&, const Data&)> set;
};

const std::vector<Feature> kFeatures{
    {"plain", [](auto&, auto&) {}},
    {"biases", [](auto& o, auto& d) { o.student_bias(d.bias).teacher_bias(d.teacher_bias); }},
    {"beta 0", [](auto& o, auto&) { o.beta(0); }},
    {"temperatures", [](auto& o, auto&) { o.beta(1).temperature(2).teacher_temperature(0.8); }},
    {"softcaps, scales",
     [](auto& o, auto&) { o.student_softcap(3).teacher_softcap(4).student_logit_scale(0.7).teacher_logit_scale(1.2); }},
    {"hard part", [](auto& o, auto& d) { o.labels(d.labels).hard_weight(0.5).token_weight(d.token_weight); }},
    {"vocab_size", [](auto& o, auto&) { o.vocab_size(90); }},
    {"least workspace", [](auto& o, auto& d) { o.workspace_mib(0).labels(d.labels).student_bias(d.bias); }},
};

Tensor logits(const Tensor& input, const Tensor& weight, const Tensor& bias, double scale,
              std::optional<double> softcap, std::optional<int64_t> vocab) {
  auto z = at::matmul(input, weight.t());
  if (bias.defined()) z = z + bias;
  z = z.narrow(1, 0, vocab.value_or(z.size(1))) * scale;
  return softcap ? *softcap * (z / *softcap).tanh() : z;
}

Tensor reference(const Data& data, const std::vector<Tensor>& leaves, const LinearJSDOptions& o) {
  const auto dtype = leaves[0].scalar_type();
  const auto bias = o.teacher_bias() ? o.teacher_bias()->to(dtype) : Tensor();
  const auto student = logits(leaves[0], leaves[1], leaves.size() == 3 ? leaves[2] : Tensor(), o.student_logit_scale(),
                              o.student_softcap(), o.vocab_size());
  const auto teacher = logits(data.teacher.to(dtype), data.teacher_weight.to(dtype), bias, o.teacher_logit_scale(),
                              o.teacher_softcap(), o.vocab_size());
  auto rest = JSDOptions().beta(o.beta()).temperature(o.temperature()).labels(o.labels()).reduction(o.reduction());
  rest.hard_weight(o.hard_weight()).soft_weight(o.soft_weight()).token_weight(o.token_weight());
  return reference_divergence(student, teacher, o.teacher_temperature().value_or(o.temperature()), rest);
}

// The loss and the student's gradients.
using Loss = std::function<Tensor(const std::vector<Tensor>&)>;
std::vector<Tensor> loss_and_gradients(const Loss& loss_of, const Data& data, bool bias, at::ScalarType dtype,
                                       const Tensor& upstream) {
  std::vector<Tensor> leaves{leaf(data.input, dtype), leaf(data.weight, dtype)};
  if (bias) leaves.push_back(leaf(data.bias, dtype));
  const auto loss = loss_of(leaves);
  auto result = gradients(loss, leaves, upstream);
  result.insert(result.begin(), loss.detach());
  return result;
}

Tensor ours(const Data& data, const std::vector<Tensor>& leaves, LinearJSDOptions options) {
  if (leaves.size() == 3) options.student_bias(leaves[2]);
  return linear_jsd(leaves[0].clone(), leaves[1], data.teacher, data.teacher_weight, options);
}

class LinearJsd : public ::testing::TestWithParam<Place> {
 protected:
  LinearJsd() : data((at::manual_seed(1), GetParam())) {}

  void expect_parity(const std::string& what, const LinearJSDOptions& options) {
    const auto dtype = GetParam().dtype;
    const bool bias = options.student_bias().has_value();
    const auto& upstream = options.reduction() == "none" ? data.upstream_rows : data.scalar;
    const Loss plain = [&](auto& leaves) { return reference(data, leaves, options); };
    const auto truth = loss_and_gradients(plain, data, bias, at::kDouble, upstream);
    const auto eager = loss_and_gradients(plain, data, bias, dtype, upstream);
    for (const bool inplace : {false, true}) {
      const Loss fused = [&](auto& leaves) { return ours(data, leaves, LinearJSDOptions(options).inplace(inplace)); };
      const auto result = loss_and_gradients(fused, data, bias, dtype, upstream);
      const std::string part[] = {"loss", "input", "weight", "bias"};
      for (size_t i = 0; i < result.size(); ++i) {
        expect_accurate(what + (inplace ? ", in place: " : ": ") + part[i], result[i], eager[i], truth[i]);
      }
    }
  }

  Data data;
};

TEST_P(LinearJsd, EveryOptionWithEveryReduction) {
  for (const auto& feature : kFeatures) {
    for (const std::string reduction : {"none", "sum", "mean", "batchmean"}) {
      LinearJSDOptions options;
      feature.set(options, data);
      expect_parity(feature.name + (", " + reduction), options.reduction(reduction));
    }
  }
}

TEST_P(LinearJsd, ATopKTeacherIsThatOfTheLogits) {
  const auto acc = GetParam().dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto [log_probs, indices] = at::matmul(data.teacher, data.teacher_weight.t()).to(acc).log_softmax(1).topk(5, 1);
  for (const std::string reduction : {"none", "batchmean"}) {
    const TopK teacher{log_probs, indices};
    const auto x = leaf(data.input, at::kDouble), y = leaf(data.input, GetParam().dtype);
    const auto z = at::matmul(x, data.weight.to(at::kDouble).t());
    const auto truth = jsd(z, TopK{log_probs.to(at::kDouble), indices}, JSDOptions().reduction(reduction));
    const auto loss = linear_jsd(y, data.weight, teacher, LinearJSDOptions().reduction(reduction));
    const double bound = GetParam().dtype == at::kDouble ? 1e-12 : GetParam().dtype == at::kFloat ? 1e-5 : 2e-2;
    EXPECT_LE(l2(loss - truth), bound * l2(truth));
    const auto expected = gradients(truth, {x}, data.scalar)[0], got = gradients(loss, {y}, data.scalar)[0];
    EXPECT_LE(l2(got - expected), bound * l2(expected));
  }
}

TEST_P(LinearJsd, EachGradientDependsOnItsOwnInput) {
  for (const std::string reduction : {"none", "batchmean"}) {
    const auto options = LinearJSDOptions().reduction(reduction);
    const std::vector<Tensor> leaves{leaf(data.input, GetParam().dtype), leaf(data.weight, GetParam().dtype)};
    const auto both = gradients(ours(data, leaves, options), leaves, data.scalar);
    const auto input = gradients(ours(data, {leaves[0], data.weight}, options), {leaves[0]}, data.scalar)[0];
    const auto weight = gradients(ours(data, {data.input, leaves[1]}, options), {leaves[1]}, data.scalar)[0];
    EXPECT_TRUE(at::equal(input, both[0]));
    EXPECT_TRUE(at::equal(weight, both[1]));
    EXPECT_FALSE(ours(data, {data.input, data.weight}, options).requires_grad());
  }
}

TEST_P(LinearJsd, NoRowsAndNoKeptRows) {
  for (const std::string reduction : {"none", "sum", "mean", "batchmean"}) {
    for (const int64_t rows : {int64_t{0}, kN}) {
      const auto input = leaf(data.input.narrow(0, 0, rows), GetParam().dtype);
      const auto weight = leaf(data.weight, GetParam().dtype);
      const auto labels = at::full({rows}, -100, data.labels.options());
      const auto options = LinearJSDOptions().labels(labels).hard_weight(1).reduction(reduction);
      const auto loss = linear_jsd(input, weight, data.teacher.narrow(0, 0, rows), data.teacher_weight, options);
      EXPECT_TRUE(at::equal(loss, at::zeros_like(loss))) << reduction << rows;
      for (const auto& gradient : gradients(loss, {input, weight}, data.scalar)) {
        EXPECT_TRUE(at::equal(gradient, at::zeros_like(gradient))) << reduction << rows;
      }
    }
  }
}

TEST_P(LinearJsd, DoubleBackward) {
  const auto twice = [](const Tensor& loss, const std::vector<Tensor>& leaves) {
    const auto first = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, leaves);
  };
  const auto dtype = GetParam().dtype;
  const double most = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-4 : 5e-2;
  const std::vector<Tensor> leaves{leaf(data.input, dtype), leaf(data.weight, dtype)};
  const std::vector<Tensor> exact{leaves[0].detach().to(at::kDouble).requires_grad_(),
                                  leaves[1].detach().to(at::kDouble).requires_grad_()};
  for (const bool recompute : {false, true}) {
    auto options = LinearJSDOptions().labels(data.labels).hard_weight(0.5).reduction("sum");
    const auto expected = twice(reference(data, exact, options), exact);
    if (recompute) options.workspace_mib(0);
    const auto found = twice(ours(data, leaves, options), leaves);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_LE(l2(found[i].to(at::kDouble) - expected[i]), most * l2(expected[i])) << recompute << ", gradient " << i;
    }
  }
}

TEST_P(LinearJsd, RepeatedBackward) {
  const auto upstream = at::full({}, 0.37, data.scalar.options());
  for (const bool inplace : {false, true}) {
    for (const std::string reduction : {"none", "batchmean"}) {
      const std::vector<Tensor> leaves{leaf(data.input, GetParam().dtype), leaf(data.weight, GetParam().dtype)};
      const auto options = LinearJSDOptions().inplace(inplace).reduction(reduction);
      expect_repeatable(ours(data, leaves, options), leaves, upstream);
      expect_accumulates(ours(data, leaves, options), leaves, upstream);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, LinearJsd, ::testing::ValuesIn(places()), place_name);

}  // namespace
}  // namespace fusegrad::testing
