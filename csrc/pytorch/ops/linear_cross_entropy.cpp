#include "fusegrad/linear_cross_entropy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cmath>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/front.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

LinearOptions make_linear_options(const char* op, const Tensor& weight, double logit_scale,
                                  std::optional<at::ScalarType> accumulate_dtype,
                                  std::optional<int64_t> workspace_mib) {
  FUSEGRAD_CHECK_VALUE(std::isfinite(logit_scale), op, "logit_scale must be a finite number, but got ", logit_scale);
  check_budget(op, "linear_weight", weight, accumulate_dtype, workspace_mib);
  return {logit_scale, accumulate_dtype, workspace_mib, std::nullopt};
}

template <bool inplace>
LossTuple linear_cross_entropy_op(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                  const OptionalTensor& linear_bias, const OptionalTensor& weight,
                                  const OptionalTensor& token_weight, const OptionalTensor& normalizer,
                                  std::optional<int64_t> ignore_index, std::string_view reduction,
                                  double label_smoothing, double z_loss, std::optional<double> softcap, int64_t aux,
                                  double logit_scale, std::optional<at::ScalarType> accumulate_dtype,
                                  std::optional<int64_t> workspace_mib) {
  constexpr const char* op = "linear_cross_entropy";
  refuse_transforms(op, {input, linear_weight, target, linear_bias, weight, token_weight, normalizer});
  check_linear(op, "input", input, "linear_weight", linear_weight, "linear_bias", linear_bias);
  const auto options = make_loss_options(op, weight, token_weight, normalizer, ignore_index, reduction, label_smoothing,
                                         z_loss, softcap, aux);
  const auto linear = make_linear_options(op, linear_weight, logit_scale, accumulate_dtype, workspace_mib);
  // Under autocast only the input is cast here: the op itself rounds the weight, so that a float32 weight gets its
  // gradient in float32.
  const auto dtype = autocast_dtype(input).value_or(input.scalar_type());
  const auto cast = input.scalar_type() == at::kDouble ? input : input.to(dtype);
  const auto vocab = linear_weight.sym_size(0);
  std::vector<c10::SymInt> row_shape(input.sym_sizes().begin(), input.sym_sizes().end() - 1);
  const auto rows =
      make_row_arguments(op, input, target, options, std::move(row_shape), vocab, input.dim() - 1, cast.scalar_type());
  check_no_grad(op, "target", target);

  const bool recompute = options.reduction == at::Reduction::None || (aux & kAuxLse) != 0 || linear.workspace_mib == 0;
  const bool overwrite = inplace && cast.is_same(input) && !recompute &&
                         may_overwrite(input, {linear_weight, linear_bias, target, weight, token_weight, normalizer});
  const auto matrix = cast.dim() == 2 ? cast : cast.reshape_symint({-1, cast.sym_size(-1)});
  return to_front(
      op,
      autograd::linear_cross_entropy(matrix, linear_weight, linear_bias, rows, options, linear, recompute, overwrite),
      rows, options);
}

}  // namespace

LossOutput linear_cross_entropy_with_aux(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                         const LinearCrossEntropyOptions& options, const Aux& aux) {
  using Signature =
      LossTuple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                const OptionalTensor&, const OptionalTensor&, std::optional<int64_t>, std::string_view, double, double,
                std::optional<double>, int64_t, double, std::optional<at::ScalarType>, std::optional<int64_t>);
  static const auto functional =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::linear_cross_entropy", "").typed<Signature>();
  static const auto mutating =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::linear_cross_entropy_", "").typed<Signature>();
  return from_front(
      (options.inplace() ? mutating : functional)
          .call(input, linear_weight, target, options.linear_bias(), options.weight(), options.token_weight(),
                normalizer_on("linear_cross_entropy", options.normalizer(), input), options.ignore_index(),
                options.reduction(), options.label_smoothing(), options.z_loss(), options.softcap(), aux_bits(aux),
                options.logit_scale(), options.accumulate_dtype(), options.workspace_mib()),
      aux);
}

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy_with_aux(input, linear_weight, target, options, Aux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", named_kernel<"linear_cross_entropy", linear_cross_entropy_op<false>>());
  m.impl("linear_cross_entropy_", named_kernel<"linear_cross_entropy", linear_cross_entropy_op<true>>());
}

}  // namespace fusegrad
