#include "pytorch/attention/pair_projection.h"

#include <torch/library.h>

#ifdef FUSEGRAD_WITH_CUDA
#include "pytorch/attention/cuda/pair_projection.h"
#endif
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/faults.h"
#include "pytorch/rows/job.h"

namespace fusegrad {

using at::Tensor;

namespace {

constexpr const char* kProjection = "pair_projection";

void check_projection(const PairProjection& c) {
  check_dense(kProjection, "pair", c.pair);
  FUSEGRAD_CHECK_VALUE(c.pair.dim() == 4, kProjection, "pair must have shape [B, M, N, c], but got ",
                       c.pair.sym_sizes());
  FUSEGRAD_CHECK_TYPE(c.pair.is_floating_point(), kProjection, "pair must be floating-point, but got ",
                      c.pair.scalar_type());
  const auto& channels = c.pair.sym_size(3);
  FUSEGRAD_CHECK_VALUE(c.projection_weight.dim() == 2 && c.projection_weight.sym_size(1) == channels, kProjection,
                       "projection_weight must have shape [H, c], c = ", channels, ", but got ",
                       c.projection_weight.sym_sizes());
  const auto check_parameter = [&](const char* name, const OptionalTensor& t, const c10::SymInt& size) {
    if (!t) return;
    FUSEGRAD_CHECK_VALUE(t->dim() == 1 && t->sym_size(0) == size, kProjection, name, " must have shape [", size,
                         "], but got ", t->sym_sizes());
  };
  check_parameter("norm_weight", c.norm_weight, channels);
  check_parameter("norm_bias", c.norm_bias, channels);
  check_parameter("projection_bias", c.projection_bias, c.projection_weight.sym_size(0));
  FUSEGRAD_CHECK_VALUE(c.centered || !c.norm_bias, kProjection,
                       "norm_bias must be None without centered, but got a tensor");
  for (const auto* t : tensors_of(c)) {
    FUSEGRAD_CHECK_TYPE(t->scalar_type() == c.pair.scalar_type(), kProjection,
                        "all tensors must have the dtype of pair, ", c.pair.scalar_type(), ", but got ",
                        t->scalar_type());
    check_same_device(kProjection, "a parameter", *t, c.pair);
  }
}

Tensor empty_bias(const PairProjection& c) {
  const auto& n = c.pair;
  return at::empty_symint({n.sym_size(0), c.projection_weight.sym_size(0), n.sym_size(1), n.sym_size(2)},
                          n.options().requires_grad(false));
}

PairProjectionGradients empty_projection_gradients(const PairProjectionBackward& c) {
  const auto made = [&](size_t i, const OptionalTensor& t) {
    const auto options = c.of.pair.options().requires_grad(false);
    return c.needs_grad[i] && t ? at::empty_symint(t->sym_sizes(), options) : at::empty({0}, options);
  };
  return {made(0, c.of.pair), made(1, c.of.norm_weight), made(2, c.of.norm_bias), made(3, c.of.projection_weight),
          made(4, c.of.projection_bias)};
}

// The norm in acc without its weight and bias, and the rate by which each row was multiplied.
struct Norm {
  Tensor rows, rate;
  explicit Norm(const PairProjection& c) {
    const auto pair = c.pair.to(acc_type(c.pair.scalar_type()));
    const auto centered = c.centered ? pair - pair.mean(-1, /*keepdim=*/true) : pair;
    rate = (centered.square().mean(-1, /*keepdim=*/true) + c.eps).rsqrt();
    rows = centered * rate;
  }
  // With its weight and bias.
  Tensor result(const PairProjection& c) const {
    const auto scaled = c.norm_weight ? rows * *c.norm_weight : rows;
    return c.norm_bias ? scaled + *c.norm_bias : scaled;
  }
};

Tensor normed_pair(const PairProjection& c) {
  // On CUDA tangents of PyTorch's norms are float32 where their inputs have 16 bits, and linear() raises an error.
  if (acc_type(c.pair.scalar_type()) != c.pair.scalar_type() && is_transformed(tensors_of(c))) {
    return Norm(c).result(c).to(c.pair.scalar_type());
  }
  const std::array channels{c.pair.sym_size(3)};
  return c.centered ? at::layer_norm_symint(c.pair, channels, c.norm_weight, c.norm_bias, c.eps)
                    : at::rms_norm_symint(c.pair, channels, c.norm_weight, c.eps);
}

Tensor forward_of_formula(const PairProjection& c) { return pair_projection_formula(c).contiguous(); }

PairProjectionGradients backward_of_formula(const PairProjectionBackward& c) {
  const auto& of = c.of;
  const auto acc = acc_type(of.pair.scalar_type());
  const Norm norm(of);
  const auto &x = norm.rows, &rate = norm.rate;
  // [H, B M N] and [B M N, c].
  const auto grad = c.grad.to(acc).movedim(1, 0).flatten(1);
  const auto weight = of.projection_weight.to(acc);
  const auto d = grad.mT().matmul(weight).view_as(x);
  const auto made = [&](size_t i, const auto& value) {
    return c.needs_grad[i] ? value().to(of.pair.scalar_type()) : at::empty({0}, of.pair.options());
  };
  const auto to_pair = [&] {
    const auto by_norm = of.norm_weight ? d * *of.norm_weight : d, slope = (by_norm * x).mean(-1, true);
    return rate * ((of.centered ? by_norm - by_norm.mean(-1, true) : by_norm) - x * slope);
  };
  const auto to_projection = [&] { return grad.matmul(norm.result(of).flatten(0, 2)); };
  return {made(0, to_pair), made(1, [&] { return (d * x).sum({0, 1, 2}); }), made(2, [&] { return d.sum({0, 1, 2}); }),
          made(3, to_projection), made(4, [&] { return grad.sum(1); })};
}

Tensor projection_cpu(const PairProjection& c) {
  BelowAutogradAndAutocast below;
  check_projection(c);
  return forward_of_formula(c);
}

PairProjectionGradients projection_backward_cpu(const PairProjectionBackward& c) {
  BelowAutogradAndAutocast below;
  return backward_of_formula(c);
}

#ifdef FUSEGRAD_WITH_CUDA
Tensor projection_cuda(const PairProjection& c) {
  BelowAutogradAndAutocast below;
  check_projection(c);
  if (!cuda::pair_projection_takes(c)) return forward_of_formula(c);
  const auto out = empty_bias(c);
  cuda::pair_projection(c, out);
  return out;
}

PairProjectionGradients projection_backward_cuda(const PairProjectionBackward& c) {
  BelowAutogradAndAutocast below;
  if (!cuda::pair_projection_takes(c.of)) return backward_of_formula(c);
  const auto made = empty_projection_gradients(c);
  cuda::pair_projection_backward(c, made);
  return made;
}
#endif

Tensor projection_meta(const PairProjection& c) {
  check_projection(c);
  return empty_bias(c);
}

Tensor pair_projection_op(const PairProjection& c) {
  check_projection(c);
  // Transforms and forward mode take PyTorch's ops.
  return is_transformed(tensors_of(c)) ? pair_projection_formula(c) : autograd::pair_projection(c);
}

}  // namespace

Tensor pair_projection_formula(const PairProjection& c) {
  return at::linear(normed_pair(c), c.projection_weight, c.projection_bias).permute({0, 3, 1, 2});
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("pair_projection", named_kernel<"pair_projection", unpacked<pair_projection_op>()>());
}
TORCH_LIBRARY_IMPL(fusegrad, CPU, m) {
  m.impl("pair_projection_forward", named_kernel<"pair_projection", unpacked<projection_cpu>()>());
  m.impl("pair_projection_backward", named_kernel<"pair_projection", unpacked<projection_backward_cpu>()>());
}
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("pair_projection_forward", named_kernel<"pair_projection", unpacked<projection_cuda>()>());
  m.impl("pair_projection_backward", named_kernel<"pair_projection", unpacked<projection_backward_cuda>()>());
}
#endif
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("pair_projection_forward", TORCH_FN(unpacked<projection_meta>()));
  m.impl("pair_projection_backward", TORCH_FN(unpacked<empty_projection_gradients>()));
}

}  // namespace fusegrad
