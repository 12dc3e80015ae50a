// The gradient contract of inplace=true, the same tests for every loss.
#include <c10/core/InferenceMode.h>

#include <functional>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int64_t kRows = 10, kColumns = 16;

/// A loss of an input [kRows, kColumns], everything else given.
struct Loss {
  const char* name;
  std::function<Tensor(const Tensor& input, bool inplace)> of;
  /// The same with a second argument that the input must not overlap.
  std::function<Tensor(const Tensor& input, const Tensor& other)> inplace_beside;
};

Loss make_cross_entropy(const at::Device& device) {
  const auto target = random_target(kRows, kColumns, device);
  return {"cross_entropy",
          [=](const Tensor& input, bool inplace) {
            return cross_entropy(input, target, CrossEntropyOptions().inplace(inplace));
          },
          [](const Tensor& input, const Tensor& other) {
            return cross_entropy(input, other, CrossEntropyOptions().inplace(true));
          }};
}

Loss make_linear_cross_entropy(const at::Device& device) {
  constexpr int64_t kV = 33;
  const auto target = random_target(kRows, kV, device);
  const auto weight = random({kV, kColumns}, {device, at::kFloat});
  return {"linear_cross_entropy",
          [=](const Tensor& input, bool inplace) {
            const auto options = LinearCrossEntropyOptions().inplace(inplace);
            return linear_cross_entropy(input, weight.to(input.scalar_type()), target, options);
          },
          [=](const Tensor& input, const Tensor& other) {
            const auto options = LinearCrossEntropyOptions().inplace(true);
            return linear_cross_entropy(input, other, target.fmod(other.size(0)), options);
          }};
}

Loss make_jsd(const at::Device& device) {
  const auto teacher = random({kRows, kColumns}, {device, at::kFloat});
  const auto options = JSDOptions().labels(random_target(kRows, kColumns, device)).hard_weight(0.5);
  return {
      "jsd",
      [=](const Tensor& input, bool inplace) { return jsd(input, teacher, JSDOptions(options).inplace(inplace)); },
      [=](const Tensor& input, const Tensor& other) { return jsd(input, other, JSDOptions(options).inplace(true)); }};
}

Loss make_linear_jsd(const at::Device& device) {
  constexpr int64_t kV = 33;
  const auto weight = random({kV, kColumns}, {device, at::kFloat});
  const auto teacher = random({kRows, kColumns}, {device, at::kFloat});
  const auto teacher_weight = random({kV, kColumns}, {device, at::kFloat});
  const auto of = [=](const Tensor& input, const Tensor& other, bool inplace) {
    return linear_jsd(input, weight, other, teacher_weight, LinearJSDOptions().inplace(inplace));
  };
  return {"linear_jsd", [=](const Tensor& input, bool inplace) { return of(input, teacher, inplace); },
          [=](const Tensor& input, const Tensor& other) { return of(input, other, true); }};
}

struct Parameter {
  Loss (*make)(const at::Device&);
  at::Device device;
};

class Inplace : public ::testing::TestWithParam<Parameter> {
 protected:
  Inplace() {
    at::manual_seed(3);
    loss = GetParam().make(GetParam().device);
    x = leaf(random({kRows, kColumns}, {GetParam().device, at::kFloat}), at::kFloat);
    upstream = at::full({}, 0.37, x.options().requires_grad(false));
  }

  /// The gradient for `x` of the loss of f(x), out of place.
  Tensor functional_gradient(const std::function<Tensor(const Tensor&)>& f) {
    return gradients(loss.of(f(x), /*inplace=*/false), {x}, upstream)[0];
  }

  /// In place on `input` raises `message`, and leaves it as it was.
  void expect_refused(const char* what, const Tensor& input, const std::string& message) {
    SCOPED_TRACE(what);
    const auto before = input.detach().clone();
    const auto version = input._version();
    try {
      loss.of(input, /*inplace=*/true);
      ADD_FAILURE() << "not refused";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find(message), std::string::npos)
          << error.what_without_backtrace();
    }
    EXPECT_TRUE(at::equal(input.detach(), before));
    EXPECT_EQ(input._version(), version);
  }

  /// With `inplace` or without, nothing is written to `input`. Returns the loss of the former.
  Tensor expect_out_of_place(const char* what, const Tensor& input) {
    SCOPED_TRACE(what);
    const auto before = input.detach().clone();
    const auto version = input.is_inference() ? 0 : input._version();
    const auto expected = loss.of(input, /*inplace=*/false), result = loss.of(input, /*inplace=*/true);
    EXPECT_TRUE(at::equal(result, expected));
    EXPECT_TRUE(at::equal(input.detach(), before));
    if (!input.is_inference()) {
      EXPECT_EQ(input._version(), version);
    }
    return result;
  }

  Loss loss;
  Tensor x, upstream;
};

TEST_P(Inplace, OffWritesNothing) {
  const auto input = x.clone();
  const auto before = input.detach().clone();
  const auto result = loss.of(input, /*inplace=*/false);
  gradients(result, {x}, upstream);
  EXPECT_TRUE(at::equal(input.detach(), before));
  EXPECT_EQ(input._version(), 0);
}

TEST_P(Inplace, WritesTheGradientForAnUpstreamOfOneAndRaisesTheVersion) {
  const auto input = x.clone();
  const auto graph = input.grad_fn();
  const auto result = loss.of(input, /*inplace=*/true);
  EXPECT_GT(input._version(), 0);
  EXPECT_EQ(input.grad_fn(), graph);
  EXPECT_TRUE(at::allclose(result, loss.of(x, /*inplace=*/false)));
  const auto expected = gradients(loss.of(x.clone(), /*inplace=*/false), {x}, at::ones_like(upstream))[0];
  EXPECT_TRUE(at::allclose(input.detach(), expected, 1e-5, 1e-7));
  const auto identity = [](const Tensor& tensor) { return tensor.clone(); };
  EXPECT_TRUE(at::allclose(gradients(result, {x}, upstream)[0], functional_gradient(identity), 1e-5, 1e-7));
}

TEST_P(Inplace, TheLastBackwardNeedsNoMemory) {
  const auto input = x.clone();
  const auto result = loss.of(input, /*inplace=*/true);
  const auto kept = gradients(result, {input}, upstream, /*retain_graph=*/true)[0];
  EXPECT_NE(kept.data_ptr(), input.data_ptr());
  const auto last = gradients(result, {input}, upstream)[0];
  EXPECT_EQ(last.data_ptr(), input.data_ptr());
  EXPECT_TRUE(at::equal(last, kept));
}

TEST_P(Inplace, RaisesWhereAnUpstreamOpHasSavedTheInput) {
  const std::vector<std::function<Tensor(const Tensor&)>> ops{
      [](auto& t) { return t.softmax(1); }, [](auto& t) { return t.exp(); }, [](auto& t) { return t.tanh(); }};
  for (const auto& op : ops) {
    const auto result = loss.of(op(x), /*inplace=*/true);
    try {
      gradients(result, {x}, upstream);
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find("modified by an inplace operation"), std::string::npos)
          << error.what_without_backtrace();
    }
    const auto input = leaf(op(x), at::kFloat);
    const auto by_hand = gradients(op(x), {x}, gradients(loss.of(input, /*inplace=*/false), {input}, upstream)[0])[0];
    EXPECT_TRUE(at::allclose(functional_gradient(op), by_hand));
  }
}

TEST_P(Inplace, RefusesWhatPyTorchRefuses) {
  expect_refused("leaf", x, "a leaf Variable that requires grad");
  expect_refused("view of a leaf", x.view({kRows, kColumns}), "a view of a leaf Variable that requires grad");
  const auto base = x.clone();
  Tensor hidden_view;
  {
    const at::NoGradGuard no_grad;
    hidden_view = base.view({kRows, kColumns});
  }
  expect_refused("view made under no_grad", hidden_view, "no_grad mode");
  const auto both = at::stack({x, x});
  expect_refused("output of unbind", both.unbind(0)[0], "multiple views");
  expect_refused("output of split", at::cat({x, x}).split(kRows)[0], "multiple views");
  const auto expanded = x.narrow(0, 0, 1).clone().expand({kRows, kColumns});
  expect_refused("expanded", expanded, "more than one element of the written-to tensor");
}

TEST_P(Inplace, RefusesAnOverlapWithAnotherArgument) {
  const auto storage = at::cat({x, x}).softmax(1);
  const auto input = storage.narrow(0, 0, kRows);
  const auto before = storage.detach().clone();
  for (const int64_t first : {int64_t{0}, kRows / 2}) {
    EXPECT_THROW(loss.inplace_beside(input, storage.detach().narrow(0, first, kRows)), c10::Error);
    EXPECT_TRUE(at::equal(storage.detach(), before));
    EXPECT_EQ(storage._version(), 0);
  }
  loss.inplace_beside(input, storage.detach().narrow(0, kRows, kRows));  // apart: fine
  EXPECT_GT(storage._version(), 0);
}

TEST_P(Inplace, OutOfPlaceWhereTheWriteBuysNothingOrCannotBeChecked) {
  expect_out_of_place("no gradient wanted", x.detach());
  expect_out_of_place("transposed", x.t().contiguous().t().mul(1));
  {
    const at::NoGradGuard no_grad;
    expect_out_of_place("no_grad", x);
  }
  const c10::InferenceMode inference;
  expect_out_of_place("inference tensor", x.detach().clone());
}

TEST_P(Inplace, OutOfPlaceUnderAutocastThatCasts) {
  if (std::string(loss.name).find("linear") == std::string::npos) GTEST_SKIP() << "reads logits of any dtype";
  const Autocast autocast(GetParam().device, at::kBFloat16);
  const auto result = expect_out_of_place("autocast", x.clone());
  EXPECT_EQ(result.scalar_type(), at::kFloat);
}

TEST_P(Inplace, ViewsAndRetainGradStayRight) {
  const auto input = x.clone();
  input.retain_grad();
  const auto view = input.view({-1});
  const auto factor = at::randn({kRows * kColumns}, at::kDouble).to(x.options().requires_grad(false));
  const auto through_view = (view * factor).sum();
  const auto total = loss.of(input, /*inplace=*/true) * upstream + through_view;
  total.backward();
  const auto expected = functional_gradient([](auto& tensor) { return tensor.clone(); }) + factor.view_as(x);
  EXPECT_TRUE(at::allclose(x.grad(), expected, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(input.grad(), expected, 1e-5, 1e-6));
}

TEST_P(Inplace, RowsOfAWiderTensor) {
  const auto wide = at::cat({x, x}, 1);
  const auto input = wide.narrow(1, kColumns, kColumns);
  const auto result = loss.of(input, /*inplace=*/true);
  EXPECT_GT(wide._version(), 0);
  EXPECT_TRUE(at::equal(wide.detach().narrow(1, 0, kColumns), x.detach()));
  const auto expected = functional_gradient([](auto& tensor) { return tensor.clone(); });
  EXPECT_TRUE(at::allclose(gradients(result, {x}, upstream)[0], expected, 1e-5, 1e-7));
}

TEST_P(Inplace, CreateGraphAloneWorksAndTwiceRaises) {
  const auto result = loss.of(x.clone(), /*inplace=*/true);
  const auto gradient = gradients(result, {x}, upstream, /*retain_graph=*/true, /*create_graph=*/true)[0];
  const auto expected = functional_gradient([](auto& tensor) { return tensor.clone(); });
  EXPECT_TRUE(at::allclose(gradient, expected, 1e-5, 1e-7));
  try {
    gradients(gradient.square().sum(), {x}, upstream);
    ADD_FAILURE() << "differentiated twice";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(loss.name), std::string::npos)
        << error.what_without_backtrace();
  }
}

std::vector<Parameter> parameters() {
  std::vector<Parameter> result;
  for (const auto& device : devices()) {
    for (const auto make : {&make_cross_entropy, &make_linear_cross_entropy, &make_jsd, &make_linear_jsd}) {
      result.push_back({make, device});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Losses, Inplace, ::testing::ValuesIn(parameters()), [](const auto& info) {
  return std::string(info.param.make(at::kCPU).name) + (info.param.device.is_cpu() ? "_cpu" : "_cuda");
});

// What only one of the losses has: a recomputation, or a later backward, that will need the input.
TEST(InplaceNeedsTheInput, StaysOutOfPlace) {
  for (const auto& device : devices()) {
    const Place place{device, at::kFloat};
    const auto x = leaf(random({kRows, kColumns}, place), at::kFloat);
    const auto weight = random({33, kColumns}, place);
    const auto target = random_target(kRows, kColumns, device);
    const auto linear = LinearCrossEntropyOptions().inplace(true);
    const auto plain = CrossEntropyOptions().inplace(true);
    const auto probabilities = leaf(x.softmax(1), at::kFloat);
    const auto heads = LinearJSDOptions().inplace(true);
    const auto teacher = random({kRows, kColumns}, place);
    const std::vector<std::function<void(const Tensor&)>> calls{
        [&](auto& t) { linear_cross_entropy(t, weight, target, LinearCrossEntropyOptions(linear).reduction("none")); },
        [&](auto& t) { linear_cross_entropy(t, weight, target, LinearCrossEntropyOptions(linear).workspace_mib(0)); },
        [&](auto& t) { linear_cross_entropy_with_aux(t, weight, target, linear, Aux().lse(true)); },
        [&](auto& t) { cross_entropy_with_aux(t, target, plain, Aux().lse(true)); },
        [&](auto& t) { linear_jsd(t, weight, teacher, weight, LinearJSDOptions(heads).reduction("none")); },
        [&](auto& t) { linear_jsd(t, weight, teacher, weight, LinearJSDOptions(heads).workspace_mib(0)); },
        [&](auto& t) { cross_entropy(t, probabilities, plain); },
        [&](auto& t) { cross_entropy(t.view({2, 5, kColumns}), at::ones({2, kColumns}, target.options()), plain); }};
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto input = x.clone();
      calls[i](input);
      EXPECT_EQ(input._version(), 0) << "call " << i;
      EXPECT_TRUE(at::equal(input.detach(), x.detach())) << "call " << i;
    }
  }
}

}  // namespace
}  // namespace fusegrad::testing
