// linear_cross_entropy_second on the CPU and on CUDA: chunks of logits and their tangents, matrix products by ATen
// around the row kernels. With z = x W^T + b, g the gradient of the logits, and a dot for a tangent (g. is of the row
// kernels):
//
//   z. = x. W^T + x W.^T + b.
//   of input: g. W + g W.      of weight: g.^T x + g^T x.      of bias: sum of g.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/linear.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

LinearSecondTuple linear_cross_entropy_second(const LinearCrossEntropySecond& call) {
  BelowAutogradAndAutocast below;
  const auto& [input, linear_weight, linear_bias, input_tangent, weight_tangent, bias_tangent, upstream, of_square,
               settings, linear, needs_grad] = call;
  const c10::OptionalDeviceGuard device(at::device_of(input));
  const int64_t rows = input.size(0), vocab = linear_weight.size(0);
  const auto dtype = product_type(input);
  const auto in = [&](const OptionalTensor& t) { return t ? t->to(dtype) : Tensor(); };

  LinearSizes sizes;
  sizes.rows = rows;
  sizes.hidden = input.size(1);
  sizes.vocab = vocab;
  sizes.element_size = static_cast<int64_t>(at::elementSize(dtype));
  sizes.cpu = input.is_cpu();
  sizes.weight_grad = needs_grad[1];
  sizes.low_precision_result = linear_weight.scalar_type() != acc_type(dtype);
  sizes.logits_per_row = 3;
  sizes.by_columns = false;
  const auto plan = plan_linear(sizes, budget_bytes(linear.workspace_mib));
  const Head head(linear_weight, linear_bias, dtype);
  const auto weight_moved = in(weight_tangent), bias_moved = in(bias_tangent);
  ChunkGradients chunks(input, linear_weight, linear_bias, vocab, plan, needs_grad, /*inplace=*/false);
  const bool more = weight_moved.defined() || input_tangent.has_value();
  const auto values = at::zeros({kRowValues + 1, rows}, upstream.options());
  const auto options = input.options().dtype(dtype);
  const int64_t most = std::min(plan.rows, rows);
  const auto buffer = logits_buffer(most, vocab, options), moved = logits_buffer(most, vocab, options);

  for (int64_t first = 0; vocab != 0 && first < rows; first += plan.rows) {
    const int64_t count = std::min(plan.rows, rows - first);
    const auto rows_of = [&](const Tensor& t, int64_t dim = 0) { return part(t, dim, first, count); };
    const auto x = rows_of(input).to(dtype), z = part(buffer, 0, 0, count), z_moved = part(moved, 0, 0, count);
    const auto x_moved = input_tangent ? rows_of(*input_tangent).to(dtype) : Tensor();
    head.logits(z, x, 0);
    logits_tangent(z_moved, x, x_moved, head.weight, weight_moved, bias_moved);
    auto s = settings;
    s.target = rows_of(settings.target);
    const auto stats = std::get<1>(dispatch::cross_entropy_rows(CrossEntropyRows{z, s}));
    const auto tangents = dispatch::cross_entropy_rows(CrossEntropyRowsTangent{z, z_moved, stats, s});
    rows_of(values, 1).narrow(0, 0, kRowValues).copy_(tangents);
    rows_of(values[kRowValues], 0).copy_(stats[kStatLse]);
    if (!needs_grad[0] && !needs_grad[1] && !needs_grad[2]) continue;
    auto u = rows_of(upstream, 1);
    OptionalTensor u_moved;
    if (of_square) {  // d lse^2 = 2 lse d lse
      const auto twice = rows_of(*of_square) * 2;
      u = u.clone();
      u[kRowLse].add_(twice * stats[kStatLse]);
      u_moved = at::zeros_like(u);
      (*u_moved)[kRowLse].copy_(twice * tangents[kRowLse]);
    }
    chunks.add(head, x, dispatch::cross_entropy_rows(CrossEntropyRowsSecond{z, u, z_moved, u_moved, stats, s}), first);
    if (more) {
      const auto g = dispatch::cross_entropy_rows(CrossEntropyRowsGradient{z, u, stats, s});
      chunks.add_more(weight_moved, x_moved, g, first);
    }
  }
  return std::tuple_cat(std::tuple(values), to_tuple(chunks.finish(), input, linear_weight, linear_bias));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) {
  m.impl("linear_cross_entropy_second",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_second>()>());
}
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("linear_cross_entropy_second",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_second>()>());
}
#endif

}  // namespace fusegrad
