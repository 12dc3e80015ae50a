#include "fusegrad/linear_cross_entropy.h"

#include <torch/library.h>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/front.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr const char* kOp = "linear_cross_entropy";

template <bool inplace>
LossTuple linear_cross_entropy_op(const LinearCrossEntropyCall& call) {
  const auto tensors = tensors_of(call);
  refuse_transforms(kOp, tensors);
  const auto& [input, linear_weight, target, o, aux] = call;
  check_linear(kOp, "input", input, "linear_weight", linear_weight, "linear_bias", o.linear_bias());
  const auto options = make_row_options(kOp, call);
  check_budget(kOp, "linear_weight", linear_weight, o.accumulate_dtype(), o.workspace_mib());
  const LinearOptions linear{o.logit_scale(), o.accumulate_dtype(), o.workspace_mib()};
  // Under autocast only the input is cast here: the op itself rounds the weight, so that a float32 weight gets its
  // gradient in float32.
  const auto dtype = autocast_dtype(input).value_or(input.scalar_type());
  const auto cast = input.scalar_type() == at::kDouble ? input : input.to(dtype);
  std::vector<c10::SymInt> row_shape(input.sym_sizes().begin(), input.sym_sizes().end() - 1);
  const auto rows = make_row_arguments(
      kOp, call, options, {std::move(row_shape), linear_weight.sym_size(0), input.dim() - 1, cast.scalar_type()});
  check_no_grad(kOp, "target", target);

  const bool recompute = options.reduction == at::Reduction::None || (aux & kAuxLse) != 0 || linear.workspace_mib == 0;
  const bool overwrite = inplace && cast.is_same(input) && !recompute && may_overwrite(input, tensors);
  const auto matrix = cast.dim() == 2 ? cast : cast.reshape_symint({-1, cast.sym_size(-1)});
  LinearCrossEntropyForward forward{.input = matrix,
                                    .linear_weight = linear_weight,
                                    .target = rows.target,
                                    .linear_bias = o.linear_bias(),
                                    .weight = rows.weight,
                                    .token_weight = rows.token_weight,
                                    .normalizer = rows.normalizer,
                                    .options = options,
                                    .linear = linear};
  return to_front(kOp, autograd::linear_cross_entropy(forward, recompute, overwrite), rows, options);
}

}  // namespace

LossOutput linear_cross_entropy_with_aux(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                         const LinearCrossEntropyOptions& options, const Aux& aux) {
  static const Twins<LinearCrossEntropyCall, LossTuple> op("fusegrad::linear_cross_entropy");
  LinearCrossEntropyCall call{input, linear_weight, target, options, aux_bits(aux)};
  put_on_device(kOp, call.options.normalizer(), input);
  return from_front(op(call, options.inplace()), aux);
}

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy_with_aux(input, linear_weight, target, options, Aux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_op<false>>()>());
  m.impl("linear_cross_entropy_", named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_op<true>>()>());
}

}  // namespace fusegrad
