// fusegrad::jsd against its definition in PyTorch's ops.
#include <functional>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int64_t kN = 23, kV = 517;

struct Data {
  explicit Data(const Place& place)
      : student(random({kN, kV}, place, 2.0)),
        teacher((student + random({kN, kV}, place)).to(place.dtype)),
        labels(random_target(kN, kV, place.device)),
        token_weight(random({kN}, place).abs()),
        upstream_rows(powers_of_two({kN}, place)),
        scalar(at::full({}, 0.5, student.options())) {}

  Tensor student, teacher, labels, token_weight, upstream_rows, scalar;
};

struct Feature {
  const char* name;
  std::function<void(JSDOptions&, const Data&)> set;
};

const std::vector<Feature> kFeatures{
    {"plain", [](auto&, auto&) {}},
    {"beta 0", [](auto& o, auto&) { o.beta(0); }},
    {"beta 1", [](auto& o, auto&) { o.beta(1); }},
    {"temperature", [](auto& o, auto&) { o.beta(0.3).temperature(2); }},
    {"labels", [](auto& o, auto& d) { o.labels(d.labels); }},
    {"hard part", [](auto& o, auto& d) { o.labels(d.labels).hard_weight(0.5).soft_weight(0.25); }},
    {"log_probs", [](auto& o, auto&) { o.log_probs(true); }},
    {"everything",
     [](auto& o, auto& d) {
       o.labels(d.labels).token_weight(d.token_weight).hard_weight(0.7).beta(0.9).temperature(1.5);
     }},
};

Tensor reference(const Tensor& student, const Tensor& teacher, const JSDOptions& options) {
  return reference_divergence(student, teacher, options.temperature(), options);
}

// The loss and both gradients.
using Loss = std::function<Tensor(const Tensor&, const Tensor&)>;
std::vector<Tensor> loss_and_gradients(const Loss& loss_of, const Data& data, at::ScalarType dtype,
                                       const Tensor& upstream) {
  const auto student = leaf(data.student, dtype), teacher = leaf(data.teacher, dtype);
  const auto loss = loss_of(student, teacher);
  auto result = gradients(loss, {student, teacher}, upstream);
  result.insert(result.begin(), loss.detach());
  return result;
}

void expect_parity(const std::string& what, const Data& data, const JSDOptions& options) {
  const auto dtype = data.student.scalar_type();
  const auto& upstream = options.reduction() == "none" ? data.upstream_rows : data.scalar;
  const auto plain = [&](auto& s, auto& t) { return reference(s, t, options); };
  const auto truth = loss_and_gradients(plain, data, at::kDouble, upstream);
  const auto eager = loss_and_gradients(plain, data, dtype, upstream);
  for (const bool inplace : {false, true}) {
    const auto fused = [&](auto& s, auto& t) { return jsd(s.clone(), t, JSDOptions(options).inplace(inplace)); };
    const auto result = loss_and_gradients(fused, data, dtype, upstream);
    const std::string part[] = {"loss", "student", "teacher"};
    for (size_t i = 0; i < result.size(); ++i) {
      expect_accurate(what + (inplace ? ", in place: " : ": ") + part[i], result[i], eager[i], truth[i]);
    }
  }
}

class Jsd : public ::testing::TestWithParam<Place> {
 protected:
  Jsd() : data((at::manual_seed(1), GetParam())) {}
  Data data;
};

TEST_P(Jsd, EveryOptionWithEveryReduction) {
  for (const auto& feature : kFeatures) {
    for (const std::string reduction : {"none", "sum", "mean", "batchmean"}) {
      JSDOptions options;
      feature.set(options, data);
      options.reduction(reduction);
      auto given = data;
      if (options.log_probs()) {
        given.student = data.student.to(at::kDouble).log_softmax(1).to(data.student.scalar_type());
        given.teacher = data.teacher.to(at::kDouble).log_softmax(1).to(data.student.scalar_type());
      }
      expect_parity(feature.name + (", " + reduction), given, options);
    }
  }
  expect_parity("normalizer", data, JSDOptions().labels(data.labels).normalizer(37.0).reduction("mean"));
}

// The K largest of the teacher, and one class for the rest: the dense divergence of the bucketed distributions.
TEST_P(Jsd, TopK) {
  constexpr int64_t kK = 7;
  const auto acc = GetParam().dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto [log_probs, indices] = data.teacher.to(at::kDouble).log_softmax(1).to(acc).topk(kK, 1);
  const auto outside = at::ones({kN, kV}, data.student.options().dtype(at::kBool)).scatter(1, indices, false);
  for (const double beta : {0.0, 0.5, 1.0}) {
    for (const std::string tail : {"bucket", "renormalize"}) {
      if (tail == "renormalize" && beta == 1) continue;
      const auto bucketed = [&, p = log_probs.to(at::kDouble), i = indices](const Tensor& student) {
        const auto log_q = student.log_softmax(1);
        const auto rest = log_q.masked_fill(outside.logical_not(), -INFINITY).logsumexp(1, true);
        const auto q = at::cat({log_q.gather(1, i), rest}, 1);
        const auto other =
            tail == "bucket" ? (1 - p.exp().sum(1, true)).clamp_min(0).log() : at::full_like(rest, -INFINITY);
        const auto teacher = at::cat({tail == "bucket" ? p : p.log_softmax(1), other}, 1);
        return reference_divergence(q, teacher, 1, JSDOptions().beta(beta).log_probs(true));
      };
      const auto x = leaf(data.student, at::kDouble), y = leaf(data.student, GetParam().dtype);
      const auto truth = bucketed(x);
      const auto loss = jsd(y, TopK{log_probs, indices}, JSDOptions().beta(beta).tail(tail));
      EXPECT_LE(l2(loss - truth), 1e-5 * l2(truth)) << beta << tail;
      const auto expected = gradients(truth, {x}, data.scalar)[0], got = gradients(loss, {y}, data.scalar)[0];
      const double bound = GetParam().dtype == at::kBFloat16 ? 5e-3 : GetParam().dtype == at::kHalf ? 3e-3 : 2e-6;
      EXPECT_LE(l2(got - expected), bound * l2(expected)) << beta << tail;
    }
  }
}

// What was stored of the rest counts; an index of -1 contributes nothing, whatever stands beside it.
TEST_P(Jsd, TopKWithATailAndPadding) {
  constexpr int64_t kK = 7;
  const auto acc = GetParam().dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto whole = data.teacher.to(at::kDouble).log_softmax(1);
  const auto [exact, indices] = whole.topk(kK, 1);
  const auto log_probs = exact.to(acc), tail = whole.scatter(1, indices, -INFINITY).logsumexp(1).to(acc);
  const auto loss_of = [&](const TopK& teacher) {
    const auto student = leaf(data.student, GetParam().dtype);
    const auto loss = jsd(student, teacher, JSDOptions().beta(1).temperature(2));
    return std::make_pair(loss.detach(), gradients(loss, {student}, data.scalar)[0]);
  };
  const auto [loss, gradient] = loss_of({log_probs, indices, tail});
  const auto [plain, of_plain] = loss_of({log_probs, indices});
  EXPECT_TRUE(at::allclose(loss, plain, 1e-4)) << loss << plain;
  const auto [less, of_less] = loss_of({log_probs, indices, tail - 3});
  EXPECT_GT(less.item<double>(), loss.item<double>());
  const auto padding = at::full({kN, 1}, NAN, log_probs.options());
  const auto none = at::full({kN, 1}, -1, indices.options());
  const auto [padded, of_padded] =
      loss_of({at::cat({padding, log_probs}, 1), at::cat({none, indices}, 1).to(at::kInt), tail});
  EXPECT_TRUE(at::allclose(loss, padded, 1e-6));
  EXPECT_LE(l2(gradient - of_padded), 1e-6 * l2(gradient));
}

TEST_P(Jsd, EqualRowsCostNothing) {
  for (const double beta : {0.0, 0.4, 1.0}) {
    const auto student = leaf(data.student, GetParam().dtype), teacher = leaf(data.student, GetParam().dtype);
    const auto loss = jsd(student, teacher, JSDOptions().beta(beta));
    EXPECT_EQ(loss.item<double>(), 0) << beta;
    for (const auto& gradient : gradients(loss, {student, teacher}, data.scalar)) {
      EXPECT_TRUE(at::equal(gradient, at::zeros_like(gradient))) << beta;
    }
  }
}

TEST_P(Jsd, AuxiliaryValues) {
  const auto options = JSDOptions().labels(data.labels).soft_weight(0.5).hard_weight(0.25).reduction("none");
  const auto out = jsd_with_aux(data.student, data.teacher, options, JSDAux().soft_loss(true).hard_loss(true));
  EXPECT_TRUE(at::allclose(out.loss, 0.5 * out.aux.soft_loss + 0.25 * out.aux.hard_loss));
  const auto student = leaf(data.student, GetParam().dtype);
  const auto constants = jsd_with_aux(student, data.teacher, options, JSDAux().soft_loss(true)).aux;
  EXPECT_THROW(constants.soft_loss.sum().backward(), c10::NotImplementedError);
  const auto hard = jsd_with_aux(data.student, data.teacher, options, JSDAux().hard_loss(true));
  EXPECT_FALSE(hard.aux.soft_loss.defined());
  EXPECT_TRUE(at::equal(hard.aux.hard_loss, out.aux.hard_loss));
}

TEST_P(Jsd, NoRowsAndNoKeptRows) {
  for (const std::string reduction : {"none", "sum", "mean", "batchmean"}) {
    for (const int64_t rows : {int64_t{0}, kN}) {
      const auto student = leaf(data.student.narrow(0, 0, rows), GetParam().dtype);
      const auto labels = at::full({rows}, -100, data.labels.options());
      const auto options = JSDOptions().labels(labels).hard_weight(1).reduction(reduction);
      const auto loss = jsd(student, data.teacher.narrow(0, 0, rows), options);
      const auto gradient = gradients(loss, {student}, data.scalar)[0];
      EXPECT_TRUE(at::equal(loss, at::zeros_like(loss))) << reduction << rows;
      EXPECT_TRUE(at::equal(gradient, at::zeros_like(gradient))) << reduction << rows;
    }
  }
}

TEST_P(Jsd, DoubleBackward) {
  const auto twice = [](const Tensor& loss, const std::vector<Tensor>& leaves) {
    const auto first = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, leaves);
  };
  const auto dtype = GetParam().dtype;
  const double most = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-4 : 5e-2;
  const auto student = leaf(data.student, dtype), teacher = leaf(data.teacher, dtype);
  const auto x = student.detach().to(at::kDouble).requires_grad_(),
             y = teacher.detach().to(at::kDouble).requires_grad_();
  for (const double beta : {0.0, 0.5, 1.0}) {
    const auto options = JSDOptions().beta(beta).labels(data.labels).hard_weight(0.5).reduction("sum");
    const auto expected = twice(reference(x, y, options), {x, y});
    const auto found = twice(jsd(student.clone(), teacher, options), {student, teacher});
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_LE(l2(found[i].to(at::kDouble) - expected[i]), most * l2(expected[i])) << beta << ", gradient " << i;
    }
  }
}

TEST_P(Jsd, RepeatedBackward) {
  const auto upstream = at::full({}, 0.37, data.scalar.options());
  for (const bool inplace : {false, true}) {
    for (const std::string reduction : {"none", "batchmean"}) {
      const auto student = leaf(data.student, GetParam().dtype), teacher = leaf(data.teacher, GetParam().dtype);
      const auto loss_of = [&] {
        return jsd(student.clone(), teacher, JSDOptions().inplace(inplace).reduction(reduction));
      };
      expect_repeatable(loss_of(), {student, teacher}, upstream);
      expect_accumulates(loss_of(), {student, teacher}, upstream);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, Jsd, ::testing::ValuesIn(places()), place_name);

}  // namespace
}  // namespace fusegrad::testing
