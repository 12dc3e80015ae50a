// What a score_mod may call in C++ against libtorch's functions of the same names and their autograd, in float64.
#include <ATen/core/dispatch/Dispatcher.h>
#include <fusegrad/reductions.h>
#include <fusegrad/score_mod.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <string>
#include <tuple>

namespace fusegrad {
namespace {

using E = const Expression&;
using T = const at::Tensor&;
using Mod = std::function<Expression(E score, E q_idx, E kv_idx)>;
using Function = std::function<at::Tensor(T score)>;

constexpr int64_t kQueries = 5, kKeys = 7;

at::Tensor evaluate(const ScoreMod& mod, const at::Tensor& score) {
  using Op = at::Tensor(const std::string&, T, at::TensorList, at::ArrayRef<double>, at::IntArrayRef,
                        const std::optional<at::Tensor>&);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::evaluate_score_mod", "").typed<Op>();
  const at::NoGradGuard guard;
  return op.call(mod.text, score, mod.buffers, {}, {}, std::nullopt);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> pulled_back(const at::Tensor& grad, const ScoreMod& mod, T score) {
  using Op =
      std::tuple<at::Tensor, std::vector<at::Tensor>>(T, const std::string&, T, at::TensorList, at::ArrayRef<double>,
                                                      at::IntArrayRef, const std::optional<at::Tensor>&);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::evaluate_score_mod_backward", "").typed<Op>();
  const at::NoGradGuard guard;
  return op.call(grad, mod.text, score, mod.buffers, {}, {}, std::nullopt);
}

// The value, and the gradients by the score and by `vectors`, [kQueries, n], whose rows the mod reads by q_idx.
void expect_like(const Mod& mod, const Function& function, const at::Tensor& score,
                 const std::vector<at::Tensor>& vectors = {}) {
  const ScoreMod traced = trace_score_mod([&](E s, E, E, E q, E kv) { return mod(s, q, kv); });
  SCOPED_TRACE(traced.text);
  const at::Tensor x = score.detach().clone().requires_grad_(true);
  const at::Tensor expected = function(x).expand_as(x);
  EXPECT_TRUE(at::allclose(evaluate(traced, score), expected, 1e-12, 1e-12, /*equal_nan=*/true))
      << evaluate(traced, score) << expected;
  const at::Tensor upstream = at::randn_like(score);
  std::vector<at::Tensor> inputs = {x};
  for (const at::Tensor& vector : vectors) inputs.push_back(vector);
  const auto wanted = torch::autograd::grad({expected}, inputs, {upstream}, std::nullopt, false, /*allow_unused=*/true);
  const auto [grad_score, grads] = pulled_back(upstream, traced, score.detach());
  const auto expect_close = [](const at::Tensor& got, const at::Tensor& want) {
    EXPECT_TRUE(at::allclose(got, want.defined() ? want : at::zeros_like(got), 1e-11, 1e-11, true)) << got << want;
  };
  expect_close(grad_score, wanted[0]);
  for (size_t i = 0; i < vectors.size(); ++i) {
    size_t place = 0;
    while (!traced.buffers[place].is_same(vectors[i])) ++place;
    expect_close(grads[place], wanted[i + 1]);
  }
}

at::Tensor scores() { return at::randn({1, 1, kQueries, kKeys}, at::kDouble); }

struct FunctionsTest : testing::Test {
  void SetUp() override { at::manual_seed(3); }
};

TEST_F(FunctionsTest, OfANumber) {
  const at::Tensor any = scores(), small = at::rand_like(any) * 1.8 - 0.9, above = at::rand_like(any) + 1.1;
  expect_like([](E s, E, E) { return asin(s); }, [](T s) { return s.asin(); }, small);
  expect_like([](E s, E, E) { return acos(s); }, [](T s) { return s.acos(); }, small);
  expect_like([](E s, E, E) { return atanh(s); }, [](T s) { return s.atanh(); }, small);
  expect_like([](E s, E, E) { return acosh(s); }, [](T s) { return s.acosh(); }, above);
  expect_like([](E s, E, E) { return atan(s); }, [](T s) { return s.atan(); }, any);
  expect_like([](E s, E, E) { return sinh(s); }, [](T s) { return s.sinh(); }, any);
  expect_like([](E s, E, E) { return cosh(s); }, [](T s) { return s.cosh(); }, any);
  expect_like([](E s, E, E) { return asinh(s); }, [](T s) { return s.asinh(); }, any);
  expect_like([](E s, E, E) { return erfc(s); }, [](T s) { return s.erfc(); }, any);
}

TEST_F(FunctionsTest, OfTwoNumbers) {
  const at::Tensor bias = at::randn({kKeys}, at::kDouble).requires_grad_(true);
  const Captured b(bias);
  expect_like([&](E s, E, E kv) { return atan2(s, b[kv]); }, [&](T s) { return at::atan2(s, bias); }, scores(), {bias});
  expect_like([&](E s, E, E kv) { return hypot(s, b[kv]); }, [&](T s) { return at::hypot(s, bias); }, scores(), {bias});
}

struct VectorsTest : FunctionsTest {
  // As what a mod reads and, once more, as [kQueries, 1, n] for broadcasting over keys.
  void use(const at::Tensor& values) {
    vector = values.to(at::kDouble).detach().requires_grad_(true);
    v = [captured = Captured(vector)](E q) { return [=](E i) { return captured(q, i); }; };
    n = vector.size(1);
  }
  at::Tensor rows() const { return vector.unsqueeze(1); }
  void expect(const std::function<Expression(const Element&)>& mod, const std::function<at::Tensor(T)>& function) {
    expect_like([&](E s, E q, E) { return s * mod(v(q)); }, [&](T s) { return s * function(rows()); }, scores(),
                {vector});
  }
  // For a function that gives a vector: an element, and all of them with different weights.
  void expect_vector(const std::function<Element(const Element&)>& mod, const std::function<at::Tensor(T)>& function) {
    expect([&](const Element& x) { return mod(x)(n - 2); }, [&](T x) { return function(x).select(-1, n - 2); });
    const at::Tensor weights = at::arange(1, n + 1, at::kDouble);
    expect(
        [&](const Element& x) {
          const Element y = mod(x);
          return sum_over(n, [&](E i) { return y(i) * (i + 1); });
        },
        [&](T x) { return (function(x) * weights).sum(-1); });
  }
  at::Tensor vector;
  std::function<Element(E)> v;
  int64_t n = 0;
};

TEST_F(VectorsTest, Reductions) {
  use(at::randn({kQueries, 24}));
  expect([&](const Element& x) { return prod_over(n, x); }, [](T x) { return x.prod(-1); });
  expect([&](const Element& x) { return mean_over(n, x); }, [](T x) { return x.mean(-1); });
  expect([&](const Element& x) { return var_over(n, x); }, [](T x) { return x.var(-1); });
  expect([&](const Element& x) { return std_over(n, x, 0); }, [](T x) { return x.std(-1, false); });
  expect([&](const Element& x) { return logsumexp_over(n, x); }, [](T x) { return x.logsumexp(-1); });
  expect([&](const Element& x) { return argmax_over(n, x); }, [](T x) { return x.argmax(-1).to(at::kDouble); });
  expect([&](const Element& x) { return argmin_over(n, x); }, [](T x) { return x.argmin(-1).to(at::kDouble); });
  expect([&](const Element& x) { return median_over(n, x); }, [](T x) { return std::get<0>(x.median(-1)); });
  expect([&](const Element& x) { return kthvalue_over(n, 5, x); }, [](T x) { return std::get<0>(x.kthvalue(5, -1)); });
  const auto positive = [](const Element& x) { return Element([=](E i) { return x(i) > 2; }); };
  expect([&](const Element& x) { return where(any_over(n, positive(x)), 2.0, 3.0); },
         [](T x) { return 3.0 - (x > 2).any(-1).to(at::kDouble); });
  expect([&](const Element& x) { return where(all_over(n, positive(x)), 2.0, 3.0); },
         [](T x) { return 3.0 - (x > 2).all(-1).to(at::kDouble); });
}

// The product of all other factors, where one, two, all or none of them are zero.
TEST_F(VectorsTest, ProductsWithZeros) {
  at::Tensor values = at::randn({kQueries, 9});
  values.index_put_({0, 3}, 0.0);
  values.index_put_({1, 0}, 0.0);
  values.index_put_({1, 8}, -0.0);
  values.index_put_({2, torch::indexing::Slice()}, 0.0);
  use(values);
  expect([&](const Element& x) { return prod_over(n, x); }, [](T x) { return x.prod(-1); });
  // A factor from outside of the loop, and a power of it.
  expect_like([&](E s, E q, E) { return prod_over(n, [&](E i) { return v(q)(i) + s; }); },
              [&](T s) { return (rows() + s.unsqueeze(-1)).prod(-1); }, scores(), {vector});
  expect_like([&](E s, E, E) { return prod_over(3, [&](E) { return s; }); }, [](T s) { return s.pow(3); }, scores());
}

TEST_F(VectorsTest, Integers) {
  use(at::ones({kQueries, 20}));
  // 20! needs 62 bits.
  expect([&](const Element& x) { return to_float(prod_over(20, [](E i) { return i + 1; })) * x(0) * 1e-18; },
         [](T x) { return x.select(-1, 0) * 2432902008176640000.0 * 1e-18; });
  expect([&](const Element& x) { return prod_over(20, [](E i) { return where(i % 2 == 0, -1, 1); }) * x(0); },
         [](T x) { return x.select(-1, 0); });
}

TEST_F(VectorsTest, Vectors) {
  use(at::randn({kQueries, 6}));
  expect_vector([&](const Element& x) { return softmax(n, x); }, [](T x) { return x.softmax(-1); });
  expect_vector([&](const Element& x) { return layer_norm(n, x); }, [&](T x) { return at::layer_norm(x, {n}); });
  expect_vector([&](const Element& x) { return cumsum(n, x); }, [](T x) { return x.cumsum(-1); });
  expect_vector([&](const Element& x) { return cumprod(n, x); }, [](T x) { return x.cumprod(-1); });
  for (const bool descending : {false, true}) {
    expect_vector([&](const Element& x) { return sort(n, x, descending); },
                  [&](T x) { return std::get<0>(x.sort(-1, descending)); });
    expect_vector([&](const Element& x) { return argsort(n, x, descending); },
                  [&](T x) { return x.argsort(-1, descending).to(at::kDouble); });
  }
}

TEST_F(VectorsTest, OrderOfEqualsAndNaN) {
  at::Tensor values = at::randn({kQueries, 6});
  values.index_put_({torch::indexing::Slice(), 1}, NAN);
  values.index_put_({1, 3}, NAN);
  values.index_put_({2, 4}, values.index({2, 0}));
  values.index_put_({3, 5}, -INFINITY);
  use(values);
  for (const bool descending : {false, true}) {
    for (const int64_t place : {0, 1, 4, 5}) {
      expect([&](const Element& x) { return argsort(n, x, descending)(place); },
             [&](T x) { return at::argsort(x, true, -1, descending).select(-1, place).to(at::kDouble); });
    }
  }
  const ScoreMod median = trace_score_mod([&](E, E, E, E q, E) { return median_over(n, v(q)); });
  EXPECT_TRUE(evaluate(median, scores()).isnan().all().item<bool>());
  EXPECT_THROW(trace_score_mod([&](E, E, E, E q, E) { return kthvalue_over(n, 7, v(q)); }), std::invalid_argument);
}

TEST_F(VectorsTest, Bucketize) {
  use(std::get<0>(at::randn({kQueries, 10}).sort(-1)));
  const at::Tensor boundaries = vector.detach().select(0, 0).contiguous();
  at::Tensor x = scores();
  x.index_put_({0, 0, 0, 0}, boundaries[3]);
  x.index_put_({0, 0, 0, 1}, NAN);
  for (const bool right : {false, true}) {
    const ScoreMod mod =
        trace_score_mod([&](E s, E, E, E, E) { return bucketize(s, 10, [&](E i) { return v(0)(i); }, right); });
    EXPECT_TRUE(evaluate(mod, x).equal(at::bucketize(x, boundaries, false, right).to(at::kDouble)));
  }
}

// --- with_gradient ---

TEST(WithGradient, IsStraightThrough) {
  const ScoreMod mod = trace_score_mod(
      [](E s, E, E, E, E) { return 3.0 * with_gradient(round(s), s, [](E upstream) { return upstream; }); });
  EXPECT_EQ(mod.text,
            "score_mod 1\n%0 = round score\n%1 = backward score ^0\n%2 = custom ^0 %0 %1\n%3 = mul %2 3.0\n"
            "return %3\n");
  const at::Tensor score = scores() * 3, upstream = at::randn_like(score);
  EXPECT_TRUE(evaluate(mod, score).equal(score.round() * 3));
  EXPECT_TRUE(std::get<0>(pulled_back(upstream, mod, score)).equal(upstream * 3));
}

struct Clipped : torch::autograd::Function<Clipped> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& scale) {
    ctx->save_for_backward({x, scale});
    return x * scale;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {(grads[0] * saved[1]).clamp(-0.5, 0.5), (grads[0].square() * saved[0]).sum(at::IntArrayRef{0, 1, 2})};
  }
};

TEST(WithGradient, OfSeveralInputsIsThatOfAnAutogradFunction) {
  const at::Tensor scale = at::randn({kKeys}, at::kDouble).requires_grad_(true);
  const Captured captured(scale);
  expect_like(
      [&](E s, E, E kv) {
        const Expression x = sin(s), c = captured[kv];
        return with_gradients({x * c}, {x, c}, [&](const std::vector<Expression>& g) {
          return std::vector<Expression>{clamp(g[0] * c, -0.5, 0.5), square(g[0]) * x};
        })[0];
      },
      [&](T s) { return Clipped::apply(s.sin(), scale); }, scores(), {scale});
}

TEST(WithGradient, OfSeveralValuesHasTheirUpstreams) {
  const ScoreMod mod = trace_score_mod([](E s, E, E, E, E) {
    const auto values = with_gradients({s * 2, s * 5, s * 7}, {s}, [](const std::vector<Expression>& g) {
      return std::vector<Expression>{g[0] + 10 * g[1] + 100 * g[2]};
    });
    return values[0] + 3.0 * values[1];
  });
  const at::Tensor score = scores(), upstream = at::randn_like(score);
  EXPECT_TRUE(at::allclose(evaluate(mod, score), score * 17));
  EXPECT_TRUE(at::allclose(std::get<0>(pulled_back(upstream, mod, score)), upstream * 31));
}

TEST(WithGradient, Misuse) {
  const auto traced = [](const std::function<Expression(E, E)>& mod) {
    return trace_score_mod([&](E s, E, E, E q, E) { return mod(s, q); });
  };
  const auto same = [](E g) { return g; };
  EXPECT_THROW(traced([&](E s, E q) { return with_gradient(s, q, same); }), std::invalid_argument);
  EXPECT_THROW(traced([&](E s, E) {
                 return with_gradients({s}, {s}, [](const auto&) { return std::vector<Expression>(); })[0];
               }),
               std::invalid_argument);
  EXPECT_THROW(traced([&](E s, E) {
                 Expression escaped = s;
                 with_gradient(s, s, [&](E g) { return escaped = g; });
                 return escaped;
               }),
               std::invalid_argument);
  EXPECT_THROW(traced([&](E s, E) { return sum_over(8, [&](E i) { return with_gradient(s * i, s, same); }); }),
               std::invalid_argument);
  EXPECT_THROW(traced([&](E s, E) { return sum_over(8, [&](E i) { return with_gradient(s, s * i, same); }); }),
               std::invalid_argument);
}

}  // namespace
}  // namespace fusegrad
