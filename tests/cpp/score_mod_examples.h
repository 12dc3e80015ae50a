// score_mods from the field, each with the scatter classes that its captured reads should get.
#pragma once

#include <fusegrad/reductions.h>
#include <fusegrad/score_mod.h>

#include <cmath>
#include <string>
#include <vector>

namespace fusegrad {

struct ScoreModExample {
  std::string name;
  ScoreMod mod;
  std::string classes;  // of the derivative's contributions, in their order; small letters: not exclusive
};

inline at::Tensor floats(at::IntArrayRef sizes) { return at::randn(sizes); }
inline at::Tensor integers(int64_t high, at::IntArrayRef sizes) { return at::randint(high, sizes, at::kLong); }

/// For B2 H4 S128, captured tensors of the right shapes.
inline std::vector<ScoreModExample> score_mod_examples() {
  constexpr int64_t B = 2, H = 4, S = 128;
  std::vector<ScoreModExample> examples;
  const auto add = [&](std::string name, std::string classes, const ScoreModFunction& function) {
    examples.push_back({std::move(name), trace_score_mod(function), std::move(classes)});
  };
  using E = const Expression&;

  const Captured slope(floats({H})), scalar(at::scalar_tensor(20.0)), per_batch(floats({B}));
  add("causal", "", [](E s, E, E, E q, E kv) { return where(q >= kv, s, -INFINITY); });
  add("ALiBi", "", [](E s, E, E h, E q, E kv) { return s + exp2(-((h + 1) * 8.0 / H)) * (kv - q); });
  add("ALiBi, learned", "a", [&](E s, E, E h, E q, E kv) { return s + slope[h] * (kv - q); });
  add("softcap", "", [](E s, E, E, E, E) { return tanh(s / 20.0) * 20.0; });
  add("softcap, learned", "a", [&](E s, E, E, E, E) { return tanh(s / scalar) * scalar; });
  add("scale a batch", "a", [&](E s, E b, E, E, E) { return s * per_batch[b]; });
  const Captured per_head(floats({B, H}));
  add("scale a batch and head", "A", [&](E s, E b, E h, E, E) { return s * per_head(b, h); });
  add("sinks", "a", [&](E s, E, E h, E, E kv) { return where(kv == 0, slope[h], s); });

  const Captured bias(floats({S})), head_bias(floats({H, S})), full_bias(floats({B, H, S}));
  const Captured offset(integers(S, {S})), document(integers(8, {B, S}));
  add("key bias", "b", [&](E s, E, E, E, E kv) { return s + bias[kv]; });
  add("key bias of all", "B", [&](E s, E b, E h, E, E kv) { return s + full_bias(b, h, kv); });
  add("query bias", "c", [&](E s, E, E, E q, E) { return s + bias[q]; });
  add("gather of a gather", "c", [&](E s, E, E, E q, E) { return s + bias[offset[q]]; });
  add("document bias", "c", [&](E s, E b, E, E q, E) { return s + bias[document(b, q)]; });
  add("product", "cb", [&](E s, E, E h, E q, E kv) { return s + head_bias(h, q) * bias[kv]; });
  add("two reads", "cb", [&](E s, E, E, E q, E kv) { return s + bias[q] * bias[kv]; });
  add("one read twice", "c", [&](E s, E, E, E q, E) { return (s + bias[q]) * bias[q]; });
  add("literal", "a", [&](E s, E, E, E, E) { return s * bias[-1]; });

  constexpr int64_t D = 24, W = 10;
  const Captured query(floats({B, H, S, D})), key(floats({B, 2, S, D})), inner(floats({W, D})), outer(floats({W}));
  const Captured chosen(integers(D, {S, W}));
  const auto row = [&](E b, E h, E q) { return [&](Expression i) { return query(b, h, q, i); }; };
  add("dot product", "Cb", [&](E s, E b, E h, E q, E kv) {
    return s + 0.125 * sum_over(D, [&](E i) { return query(b, h, q, i) * key(b, floor_div(h, 2), kv, i); });
  });
  add("dot product of what is chosen", "cb", [&](E s, E b, E, E q, E kv) {
    return s + sum_over(W, [&](E i) { return query(b, 1, q, chosen(q, i)) * key(b, 0, kv, i); });
  });
  add("softmax of a vector", "ccc", [&](E s, E b, E h, E q, E) {
    const Expression most = amax_over(D, row(b, h, q));
    const Expression total = sum_over(D, [&](E i) { return exp(query(b, h, q, i) - most); });
    return s * exp(query(b, h, q, 3) - most) / total - amin_over(D, row(b, h, q));
  });
  add("product of a vector", "C",
      [&](E s, E b, E h, E q, E) { return s + prod_over(W, [&](E i) { return query(b, h, q, i); }); });
  add("two layers", "aaC", [&](E s, E b, E h, E q, E kv) {
    return s + sum_over(W, [&](E w) {
             return outer[w] * tanh(sum_over(D, [&](E i) { return inner(w, i) * query(b, h, q, i); }) + 0.01 * kv);
           });
  });
  add("an index from a vector", "g", [&](E s, E b, E h, E q, E kv) {
    return s + bias[kv + sum_over(D, [&](E i) { return to_int(query(b, h, q, i) > 9) * i; })];
  });

  const Captured relative(floats({2 * S})), head_relative(floats({H, 2 * S}));
  const CapturedNumber length(S);
  add("relative bias", "d", [&](E s, E, E, E q, E kv) { return s + relative[q - kv + S]; });
  add("relative bias of a head", "d", [&](E s, E, E h, E q, E kv) { return s + head_relative(h, q - kv + length); });
  add("relative bias, negative indices", "d", [&](E s, E, E, E q, E kv) { return s + relative[kv - q]; });
  add("relative bias, clamped", "d", [&](E s, E, E, E q, E kv) { return s + relative[clamp(q - kv, -16, 16) + 16]; });
  add("relative bias times a key bias", "db",
      [&](E s, E, E, E q, E kv) { return s + relative[q + 5 - kv + S] * bias[kv]; });
  const Captured buckets(floats({32, H})), bucket_of(integers(32, {2 * S}));
  add("T5, table of buckets", "d", [&](E s, E, E h, E q, E kv) { return s + buckets(bucket_of[q - kv + S], h); });
  add("T5", "d", [&](E s, E, E h, E q, E kv) {
    const Expression n = max(q - kv, 0);
    const Expression large = 16 + to_int(log(to_float(max(n, 1)) / 16) / std::log(128.0 / 16) * 16);
    return s + buckets(where(n < 16, n, min(large, 31)), h);
  });

  const Captured square(floats({S, S})), skewed(floats({S, 2 * S})), head_square(floats({H, S, S})),
      all(floats({B, H, S, S}));
  add("full bias", "E", [&](E s, E b, E h, E q, E kv) { return s + all(b, h, q, kv); });
  add("full bias of a head", "e", [&](E s, E, E h, E q, E kv) { return s + head_square(h, q, kv); });
  add("full bias, transposed", "e", [&](E s, E, E, E q, E kv) { return s + square(kv, q); });
  add("full bias, skewed", "e", [&](E s, E, E, E q, E kv) { return s + skewed(q, q + kv); });
  add("full bias, wrapping around", "g", [&](E s, E, E, E q, E kv) { return s + square(q, kv - q); });
  add("two reads of a full bias", "ee",
      [&](E s, E b, E h, E q, E kv) { return s + all(b, h, q, kv) * all(b, h, kv, q); });

  const Captured distance(integers(20, {B, S, S})), spatial(floats({20})), pair_bias(floats({8, 8}));
  add("Graphormer", "g", [&](E s, E b, E, E q, E kv) { return s + spatial[distance(b, q, kv)]; });
  add("bias of two documents", "g",
      [&](E s, E b, E, E q, E kv) { return s + pair_bias(document(b, q), document(b, kv)); });
  const Captured window(floats({H, 16, 16}));
  add("NATTEN with relative bias", "g",
      [&](E s, E, E h, E q, E kv) { return s + window(h, floor_div(q, 16) - floor_div(kv, 16), q % 16 - kv % 16); });
  add("index from the score", "g", [&](E s, E, E, E, E) { return s + bias[clamp(to_int(s), 0, S - 1)]; });

  add("bias without the score", "d", [&](E, E, E, E q, E kv) { return relative[q - kv]; });
  add("not differentiable", "", [&](E s, E, E, E q, E) { return s + floor(bias[q]); });
  return examples;
}

struct MaskModExample {
  std::string name;
  ScoreMod mod;
};

inline std::vector<MaskModExample> mask_mod_examples() {
  constexpr int64_t B = 2, S = 128;
  std::vector<MaskModExample> examples;
  const auto add = [&](std::string name, const MaskModFunction& function) {
    examples.push_back({std::move(name), trace_mask_mod(function)});
  };
  using E = const Expression&;
  const Captured document(integers(8, {S})), prefix(integers(S, {B})), allowed(at::rand({S, S}) < 0.5);
  add("causal", [](E, E, E q, E kv) { return q >= kv; });
  add("sliding window", [](E, E, E q, E kv) { return (q >= kv) & (q - kv <= 16); });
  add("dilated sliding window", [](E, E, E q, E kv) { return (abs(q - kv) <= 32) & ((q - kv) % 4 == 0); });
  add("prefix-LM", [&](E b, E, E q, E kv) { return kv < prefix[b] || q >= kv; });
  add("document", [&](E, E, E q, E kv) { return (document[q] == document[kv]) & (q >= kv); });
  add("NATTEN",
      [](E, E, E q, E kv) { return (abs(floor_div(q, 16) - floor_div(kv, 16)) <= 2) & (abs(q % 16 - kv % 16) <= 2); });
  add("attention sink", [](E, E, E q, E kv) { return (kv < 4) | ((q >= kv) & (q - kv < 32)); });
  add("captured mask", [&](E, E, E q, E kv) { return allowed(q, kv); });
  // Neighbours that float32 does not tell apart.
  const at::Tensor ids = integers(8, {S});
  const Captured wide((int64_t{1} << 62) + ids), narrow((int64_t{1} << 30) + ids.to(at::kInt));
  add("identifiers of 64 bits", [&](E, E, E q, E kv) { return wide[q] == wide[kv]; });
  add("identifiers of 32 bits", [&](E, E, E q, E kv) { return narrow[q] >= narrow[kv]; });
  add("of a head", [](E, E h, E q, E kv) { return where(h % 2 == 0, q >= kv, q <= kv); });
  add("everything", [](E, E, E, E) { return true; });
  return examples;
}

}  // namespace fusegrad
