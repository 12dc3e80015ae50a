// Evaluates a score_mod over all of [B, H, M, N]: the definition in slow motion, for tests and for looking at a mask or
// a bias. Attention never holds all scores.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "pytorch/score_mod/tensors.h"
#include "score_mod/derivative.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

constexpr int64_t kRows = 64, kCols = 256;

struct Sizes {
  int64_t b, h, m, n;
};

template <class Function>
void for_each_tile(const Sizes& s, Function&& function) {
  for (int64_t b = 0; b < s.b; ++b) {
    for (int64_t h = 0; h < s.h; ++h) {
      for (int64_t q = 0; q < s.m; q += kRows) {
        for (int64_t kv = 0; kv < s.n; kv += kCols) {
          const Tile tile{b, h, q, kv, std::min(kRows, s.m - q), std::min(kCols, s.n - kv)};
          function(tile, ((b * s.h + h) * s.m + q) * s.n + kv);
        }
      }
    }
  }
}

Sizes sizes_of(const at::Tensor& score) {
  TORCH_CHECK(score.dim() == 4 && score.device().is_cpu() &&
                  (score.scalar_type() == at::kFloat || score.scalar_type() == at::kDouble),
              "evaluate_score_mod: score must be a float32 or float64 tensor [B, H, M, N] on the CPU, but got ",
              score.toString(), " of shape ", score.sizes());
  return {score.size(0), score.size(1), score.size(2), score.size(3)};
}

// Nothing records these ops: a gradient that is expected of them must not be missing in silence.
void refuse_autograd(const at::Tensor& score, at::TensorList buffers) {
  const auto requires_grad = [](const at::Tensor& t) { return t.requires_grad(); };
  TORCH_CHECK(!at::GradMode::is_enabled() ||
                  !(requires_grad(score) || std::any_of(buffers.begin(), buffers.end(), requires_grad)),
              "evaluate_score_mod: score and buffers must not require grad; call evaluate_score_mod_backward, or use "
              "torch.no_grad()");
}

Lengths lengths_of(const Sizes& s) { return {s.b, s.h, s.m, s.n}; }

at::Tensor contiguous_mask(const std::optional<at::Tensor>& mask, const at::Tensor& score) {
  if (!mask) return {};
  TORCH_CHECK(mask->scalar_type() == at::kBool && mask->device().is_cpu(),
              "evaluate_score_mod: mask must be a bool tensor on the CPU, but got ", mask->toString());
  return mask->expand(score.sizes()).contiguous();
}

Rectangle<const uint8_t> mask_at(const at::Tensor& mask, int64_t offset, int64_t stride) {
  if (!mask.defined()) return {};
  return {reinterpret_cast<const uint8_t*>(mask.const_data_ptr<bool>()) + offset, stride};
}

at::Tensor evaluate(const std::string& graph, const at::Tensor& score, at::TensorList buffers,
                    at::ArrayRef<double> floats, at::IntArrayRef ints, const std::optional<at::Tensor>& mask) {
  refuse_autograd(score, buffers);
  const Sizes s = sizes_of(score);
  const Graph parsed = simplify(lowered(parse(graph)));
  TORCH_CHECK_VALUE(parsed.kind() == Kind::kScoreMod, "evaluate_score_mod: the graph must be a score_mod");
  const CapturedTensors captured(buffers, scalars_of(parsed, floats, ints));
  const at::Tensor x = score.contiguous(), m = contiguous_mask(mask, score);
  at::Tensor out = at::empty_like(x);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const TileProgram<T> program(parsed, lengths_of(s), captured.buffers(), captured.scalars());
    TileEvaluator<T> evaluator(program, kRows, kCols);
    for_each_tile(s, [&](const Tile& tile, int64_t at) {
      const bool ok = evaluator.score_mod(tile, {x.const_data_ptr<T>() + at, s.n}, mask_at(m, at, s.n),
                                          {out.mutable_data_ptr<T>() + at, s.n});
      TORCH_CHECK_INDEX(ok, "evaluate_score_mod: ", evaluator.out_of_range().message());
    });
  };
  x.scalar_type() == at::kFloat ? run(float{}) : run(double{});
  return out;
}

std::tuple<at::Tensor, std::vector<at::Tensor>> evaluate_backward(const at::Tensor& grad, const std::string& graph,
                                                                  const at::Tensor& score, at::TensorList buffers,
                                                                  at::ArrayRef<double> floats, at::IntArrayRef ints,
                                                                  const std::optional<at::Tensor>& mask) {
  const Sizes s = sizes_of(score);
  TORCH_CHECK_VALUE(grad.sizes() == score.sizes() && grad.scalar_type() == score.scalar_type(),
                    "evaluate_score_mod_backward: grad must be as score, but got ", grad.toString(), " of shape ",
                    grad.sizes());
  std::vector<bool> wants_grad;
  for (const at::Tensor& b : buffers) wants_grad.push_back(at::isFloatingType(b.scalar_type()));
  const Graph derivative = differentiate(parse(graph), wants_grad);
  const CapturedTensors captured(buffers, scalars_of(derivative, floats, ints));
  const at::Tensor x = score.contiguous(), g = grad.contiguous(), m = contiguous_mask(mask, score);
  at::Tensor grad_score = at::empty_like(x);
  std::vector<at::Tensor> sums, grads;
  for (const at::Tensor& b : buffers) sums.push_back(at::zeros(b.sizes(), b.options().dtype(at::kDouble)));
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const TileProgram<T> program(derivative, lengths_of(s), captured.buffers(), captured.scalars());
    TileEvaluator<T> evaluator(program, kRows, kCols);
    std::vector<GradientSink<T>> sinks;
    for (const at::Tensor& sum : sums) sinks.push_back({nullptr, sum.mutable_data_ptr<double>()});
    for_each_tile(s, [&](const Tile& tile, int64_t at) {
      const bool ok = evaluator.backward(tile, {x.const_data_ptr<T>() + at, s.n}, {g.const_data_ptr<T>() + at, s.n},
                                         mask_at(m, at, s.n), {grad_score.mutable_data_ptr<T>() + at, s.n}, sinks);
      TORCH_CHECK_INDEX(ok, "evaluate_score_mod_backward: ", evaluator.out_of_range().message());
    });
  };
  x.scalar_type() == at::kFloat ? run(float{}) : run(double{});
  for (size_t i = 0; i < sums.size(); ++i) {
    grads.push_back(wants_grad[i] ? sums[i].to(buffers[i].scalar_type()) : at::zeros({0}, buffers[i].options()));
  }
  return {grad_score, grads};
}

at::Tensor evaluate_mask(const std::string& graph, at::IntArrayRef sizes, at::TensorList buffers,
                         at::ArrayRef<double> floats, at::IntArrayRef ints) {
  TORCH_CHECK_VALUE(sizes.size() == 4 && std::all_of(sizes.begin(), sizes.end(), [](int64_t n) { return n >= 0; }),
                    "evaluate_mask_mod: sizes must be B, H, M and N, but got ", sizes);
  const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3]};
  const Graph parsed = simplify(parse(graph));
  TORCH_CHECK_VALUE(parsed.kind() == Kind::kMaskMod, "evaluate_mask_mod: the graph must be a mask_mod");
  const CapturedTensors captured(buffers, scalars_of(parsed, floats, ints));
  at::Tensor out = at::empty(sizes, at::kBool);
  const MaskProgram program(parsed, lengths_of(s), captured.buffers(), captured.scalars());
  MaskEvaluator evaluator(program, kRows, kCols);
  for_each_tile(s, [&](const Tile& tile, int64_t at) {
    const bool ok = evaluator.mask_mod(tile, {reinterpret_cast<uint8_t*>(out.mutable_data_ptr<bool>()) + at, s.n});
    TORCH_CHECK_INDEX(ok, "evaluate_mask_mod: ", evaluator.out_of_range().message());
  });
  return out;
}

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) {
  m.impl("evaluate_score_mod", &evaluate);
  m.impl("evaluate_score_mod_backward", &evaluate_backward);
}
TORCH_LIBRARY_IMPL(fusegrad, CompositeExplicitAutograd, m) { m.impl("evaluate_mask_mod", &evaluate_mask); }

}  // namespace
}  // namespace fusegrad::score_mod
