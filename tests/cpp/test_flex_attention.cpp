// flex_attention's C++ API against float64 formulas in plain ATen.
#include <limits>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Dense {
  Tensor out, lse, max_scores;
};

// (softmax(scale * q k^T + bias, -inf where not allowed) * weight) v in the dtype of the arguments.
Dense dense(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& allowed,
            const Tensor& weight = {}) {
  const int64_t group = query.size(1) / key.size(1);
  const auto k = key.repeat_interleave(group, 1), v = value.repeat_interleave(group, 1);
  auto score = at::matmul(query, k.transpose(-1, -2)) / std::sqrt(static_cast<double>(query.size(3)));
  if (bias.defined()) score = score + bias;
  if (allowed.defined()) score = score.masked_fill(allowed.logical_not(), -kInfinity);
  const auto alive = score.amax(-1, true).gt(-kInfinity);
  auto p = at::where(alive, at::where(alive, score, 0.0).softmax(-1), 0.0);
  if (weight.defined()) p = p * weight;
  return {at::matmul(p, v), score.logsumexp(-1), score.amax(-1)};
}

std::vector<Tensor> inputs(const Place& place, int64_t heads, int64_t key_heads, int64_t queries, int64_t keys) {
  std::vector<Tensor> result;
  for (const auto& shape :
       {std::vector<int64_t>{2, heads, queries, 16}, {2, key_heads, keys, 16}, {2, key_heads, keys, 24}}) {
    result.push_back(random(shape, place).requires_grad_());
  }
  return result;
}

std::vector<Tensor> leaves(const std::vector<Tensor>& tensors, at::ScalarType dtype) {
  std::vector<Tensor> result;
  for (const auto& t : tensors) result.push_back(leaf(t, dtype));
  return result;
}

ScoreMod causal() {
  return trace_mask_mod([](auto, auto, auto q_idx, auto kv_idx) { return q_idx >= kv_idx; });
}

Tensor tril(int64_t queries, int64_t keys) { return at::ones({queries, keys}, at::kBool).tril(); }

double error(const Tensor& a, const Tensor& truth) {
  return ((a.to(at::kDouble) - truth).norm() / truth.norm()).item<double>();
}

class FlexAttention : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  Place place{at::kCPU, GetParam()};
  double tolerance() const {
    return GetParam() == at::kDouble ? 1e-12 : GetParam() == at::kFloat ? 2e-6 : GetParam() == at::kHalf ? 2e-3 : 1e-2;
  }
};

TEST_P(FlexAttention, MatchesDenseAttention) {
  at::manual_seed(0);
  auto given = inputs(place, 4, 2, 70, 90);
  given.push_back(random({4, 90}, place).requires_grad_());
  const Captured bias(given[3]);
  const auto score_mod =
      trace_score_mod([&](auto score, auto, auto h, auto, auto kv_idx) { return score + bias(h, kv_idx); });
  const auto options = FlexAttentionOptions()
                           .score_mod(score_mod)
                           .block_mask(create_block_mask(causal(), std::nullopt, std::nullopt, 70, 90, {32, 16}))
                           .enable_gqa(true);
  const auto ours = flex_attention_with_aux(given[0], given[1], given[2], options);
  const auto upstream = random(ours.out.sizes(), place);
  const auto grads = torch::autograd::grad({ours.out}, given, {upstream});

  const auto wide = leaves(given, at::kDouble);
  const auto truth = dense(wide[0], wide[1], wide[2], wide[3].unsqueeze(1), tril(70, 90));
  const auto truth_grads = torch::autograd::grad({truth.out}, wide, {upstream.to(at::kDouble)});
  EXPECT_LT(error(ours.out, truth.out), tolerance());
  EXPECT_LT(error(ours.lse, truth.lse), 1e-6);
  EXPECT_LT(error(ours.max_scores, truth.max_scores), 1e-6);
  for (size_t i = 0; i < given.size(); ++i) {
    EXPECT_EQ(grads[i].scalar_type(), GetParam());
    EXPECT_LT(error(grads[i], truth_grads[i]), tolerance()) << "gradient " << i;
  }
  EXPECT_TRUE(at::equal(flex_attention(given[0], given[1], given[2], options), ours.out));
}

TEST_P(FlexAttention, DifferentiatesLseAndMaxScores) {
  at::manual_seed(1);
  const auto given = inputs(place, 2, 2, 20, 30);
  const auto ours = flex_attention_with_aux(given[0], given[1], given[2]);
  const auto wide = leaves(given, at::kDouble);
  const auto truth = dense(wide[0], wide[1], wide[2], {}, {});
  const auto grads = torch::autograd::grad({ours.lse.sum() + ours.max_scores.sum()}, {given[0], given[1]});
  const auto truth_grads = torch::autograd::grad({truth.lse.sum() + truth.max_scores.sum()}, {wide[0], wide[1]});
  for (size_t i = 0; i < 2; ++i) EXPECT_LT(error(grads[i], truth_grads[i]), tolerance());
}

TEST_P(FlexAttention, DropsPairsAndScalesTheRest) {
  constexpr double kP = 0.25;
  constexpr int64_t kQueries = 60, kKeys = 70;
  at::manual_seed(5);
  const auto given = inputs(place, 2, 2, kQueries, kKeys);
  const auto options = FlexAttentionOptions().dropout_p(kP);
  // For values that are the identity the output is the weights.
  const auto identity = at::eye(kKeys, at::dtype(place.dtype).device(place.device)).expand({2, 2, kKeys, kKeys});
  at::manual_seed(11);
  const auto kept = flex_attention(given[0].detach(), given[1].detach(), identity, options).ne(0).to(at::kDouble);
  const double deviation = std::sqrt(kP * (1 - kP) / static_cast<double>(kept.numel()));
  EXPECT_NEAR(kept.mean().item<double>(), 1 - kP, 4 * deviation);

  at::manual_seed(11);
  const auto ours = flex_attention_with_aux(given[0], given[1], given[2], options);
  const auto upstream = random(ours.out.sizes(), place);
  const auto wide = leaves(given, at::kDouble);
  const auto truth = dense(wide[0], wide[1], wide[2], {}, {}, kept / (1 - kP));
  EXPECT_LT(error(ours.out, truth.out), tolerance());
  EXPECT_LT(error(ours.lse, truth.lse), 1e-6);
  const auto grads = torch::autograd::grad({ours.out}, given, {upstream});
  const auto truth_grads = torch::autograd::grad({truth.out}, wide, {upstream.to(at::kDouble)});
  for (size_t i = 0; i < given.size(); ++i) EXPECT_LT(error(grads[i], truth_grads[i]), tolerance()) << "gradient " << i;
  // The next call draws another number.
  EXPECT_FALSE(at::equal(flex_attention(given[0], given[1], given[2], options), ours.out));
}

TEST_P(FlexAttention, AQueryAloneHasTheSameBits) {
  constexpr int64_t kLength = 300, kQuery = 200;
  at::manual_seed(7);
  const auto given = inputs(place, 4, 2, kLength, kLength);
  const auto lets = create_block_mask(causal(), {}, {}, kLength, kLength);
  const auto options = FlexAttentionOptions().enable_gqa(true).batch_invariant(true);
  const auto whole =
      flex_attention_with_aux(given[0], given[1], given[2], FlexAttentionOptions(options).block_mask(lets));
  const auto alone = flex_attention_with_aux(given[0].slice(2, kQuery, kQuery + 1), given[1].slice(2, 0, kQuery + 1),
                                             given[2].slice(2, 0, kQuery + 1), options);
  EXPECT_TRUE(at::equal(alone.out, whole.out.slice(2, kQuery, kQuery + 1)));
  EXPECT_TRUE(at::equal(alone.lse, whole.lse.slice(2, kQuery, kQuery + 1)));
}

TEST_P(FlexAttention, InPlaceGivesTheSameBits) {
  at::manual_seed(2);
  const auto given = inputs(place, 2, 2, 40, 50);
  std::vector<std::vector<Tensor>> found;
  for (const bool inplace : {false, true}) {
    const auto fresh = leaves(given, GetParam());
    std::vector<Tensor> activations;
    for (const auto& t : fresh) activations.push_back(t * 1);
    flex_attention(activations[0], activations[1], activations[2], FlexAttentionOptions().inplace(inplace))
        .square()
        .sum()
        .backward();
    found.emplace_back();
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(activations[i]._version(), inplace ? 1 : 0);
      found.back().push_back(fresh[i].grad());
    }
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(found[0][i], found[1][i]));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FlexAttention, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(at::toString(info.param)); });

TEST(CreateBlockMask, ListsWhatTheMaskLetsThrough) {
  const int64_t queries = 70, keys = 100;
  const auto heads = at::tensor({3, 40}, at::kLong);
  const Captured window(heads);
  const auto mask = create_block_mask(trace_mask_mod([&](auto, auto h, auto q_idx, auto kv_idx) {
                                        return (q_idx >= kv_idx) && (q_idx - kv_idx <= window[h]);
                                      }),
                                      std::nullopt, 2, queries, keys, {16, 8});
  const auto q = at::arange(queries).view({-1, 1}), kv = at::arange(keys).view({1, -1});
  for (int64_t h = 0; h < 2; ++h) {
    const auto pairs = (q >= kv).logical_and(q - kv <= heads[h].item<int64_t>());
    for (int64_t row = 0; row < 5; ++row) {
      std::vector<int32_t> partial, full;
      for (int64_t col = 0; col < 13; ++col) {
        const auto block = pairs.slice(0, row * 16, std::min<int64_t>(row * 16 + 16, queries))
                               .slice(1, col * 8, std::min<int64_t>(col * 8 + 8, keys));
        const bool whole = block.size(0) == 16 && block.size(1) == 8;
        if (whole && block.all().item<bool>()) {
          full.push_back(static_cast<int32_t>(col));
        } else if (block.any().item<bool>()) {
          partial.push_back(static_cast<int32_t>(col));
        }
      }
      const auto listed = [&](const Tensor& count, const Tensor& index) {
        const auto found = index[0][h][row].slice(0, 0, count[0][h][row].item<int32_t>()).contiguous();
        const auto* data = found.const_data_ptr<int32_t>();
        return std::vector<int32_t>(data, data + found.numel());
      };
      EXPECT_EQ(listed(mask.kv_num_blocks, mask.kv_indices), partial);
      EXPECT_EQ(listed(mask.full_kv_num_blocks, mask.full_kv_indices), full);
    }
  }
  EXPECT_EQ(mask.lengths, (std::array<int64_t, 2>{queries, keys}));
}

TEST(VarlenMask, KeepsSequencesApart) {
  const auto ends_q = at::tensor({0, 10, 10, 40}, at::kInt), ends_k = at::tensor({0, 16, 20, 50}, at::kInt);
  const auto options = VarlenMaskOptions().causal(true).window({7, -1}).block_size({16, 8});
  const auto mask = varlen_mask(ends_q, ends_k, VarlenMaskOptions(options).lengths({{44, 50}}));
  EXPECT_EQ(mask.lengths, (std::array<int64_t, 2>{44, 50}));
  EXPECT_EQ(varlen_mask(ends_q, ends_k, options).lengths, (std::array<int64_t, 2>{40, 50}));
  const auto pairs = at::zeros({44, 50}, at::kBool);
  for (const auto& [begin_q, end_q, begin_k, end_k] : {std::array{0, 10, 0, 16}, {10, 40, 20, 50}}) {
    const auto own = at::arange(begin_q, end_q).view({-1, 1}) + (end_k - end_q), kv = at::arange(begin_k, end_k);
    pairs.slice(0, begin_q, end_q).slice(1, begin_k, end_k).copy_((kv <= own).logical_and(kv >= own - 7));
  }
  at::manual_seed(0);
  const auto query = at::randn({1, 2, 44, 8}), key = at::randn({1, 2, 50, 8}), value = at::randn({1, 2, 50, 8});
  const auto ours = flex_attention(query, key, value, FlexAttentionOptions().block_mask(mask));
  const auto truth = at::scaled_dot_product_attention(query.slice(2, 0, 40), key, value, pairs.slice(0, 0, 40));
  EXPECT_TRUE(at::allclose(ours.slice(2, 0, 40), truth, 1e-5, 1e-5));
  EXPECT_TRUE(at::equal(ours.slice(2, 40), at::zeros({1, 2, 4, 8})));
}

TEST(FlexAttentionErrors, SayWhatMustHold) {
  const auto x = at::ones({1, 2, 8, 4});
  const auto expect = [&](const auto& call, const std::string& message) {
    try {
      call();
      ADD_FAILURE() << "no error: " << message;
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  expect([&] { flex_attention(x[0], x, x); }, "flex_attention: query must have shape [B, H, M, D], but got [2, 8, 4]");
  expect([&] { flex_attention(x, x, x, FlexAttentionOptions().score_mod(causal())); },
         "flex_attention: score_mod must be a score_mod, but got a mask_mod");
  const auto shorter = create_block_mask(causal(), std::nullopt, std::nullopt, 8, 4);
  expect([&] { flex_attention(x, x, x, FlexAttentionOptions().block_mask(shorter)); },
         "flex_attention: block_mask must be made for 8 queries and 8 keys, but got one for 8 and 4");
  expect([&] { flex_attention(x, x, x, FlexAttentionOptions().block_mask(BlockMask{})); }, "but got one for 0 and 0");
  expect([&] { create_block_mask(causal(), 0, 1, 8, 8); }, "create_block_mask: lengths must be at least 0, B and H");
  expect([&] { create_block_mask(causal(), 1, 1, 8, 8, {0, 8}); },
         "block_size must be two positive numbers, but got [0");
  expect([&] { create_block_mask(ScoreMod{"", {}, {}}, 1, 1, 8, 8); }, "mask_mod must be a text of the score_mod");
  const Captured table(at::ones({3}));
  const auto reads = trace_score_mod([&](auto score, auto, auto, auto, auto kv_idx) { return score + table[kv_idx]; });
  EXPECT_THROW(flex_attention(x, x, x, FlexAttentionOptions().score_mod(reads)), c10::IndexError);
}

}  // namespace
}  // namespace fusegrad::testing
