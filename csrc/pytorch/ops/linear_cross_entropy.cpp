#include "fusegrad/linear_cross_entropy.h"

#include <torch/library.h>

#include <limits>

#include "losses/linear_plan.h"
#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/loss_front.h"
#include "pytorch/ops/renamed.h"
#include "pytorch/ops/support.h"
#include "pytorch/rows/collectives.h"
#include "pytorch/rows/segments.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr const char* kOp = "linear_cross_entropy";

// Whether all logits may be kept for the backward: where the budget holds them, and without one, since PyTorch keeps
// them too. Not the CPU's of low precision, which are float32 and so larger than PyTorch's.
bool logits_fit(const Tensor& input, const Tensor& weight, std::optional<int64_t> workspace_mib) {
  if (product_type(input) != input.scalar_type()) return false;
  if (!workspace_mib.has_value()) return true;
  const auto size = static_cast<int64_t>(input.element_size());
  return input.sym_size(0) * logits_row_elements(weight.sym_size(0), size) * size <= *budget_bytes(workspace_mib);
}

// Python has one argument for a number and a tensor.
constexpr auto kScaleName = "logit_scale (C++: row_scale)";

// row_scale as [N] acc, differentiably.
OptionalTensor make_row_scale(const Tensor& input, const LinearCrossEntropyOptions& options, const RowArguments& rows) {
  const auto& scale = options.row_scale();
  if (!scale) return std::nullopt;
  const c10::SymIntArrayRef shape(rows.row_shape);
  check_dense(kOp, kScaleName, *scale);
  FUSEGRAD_CHECK_TYPE(scale->is_floating_point(), kOp, kScaleName, " must be floating-point, but got ",
                      scale->scalar_type());
  FUSEGRAD_CHECK_VALUE(scale->dim() == 0 || scale->sym_sizes() == shape, kOp, kScaleName, " must be 0-d or have shape ",
                       shape, ", but got ", scale->sym_sizes());
  check_same_device(kOp, kScaleName, *scale, input);
  FUSEGRAD_CHECK_VALUE(!options.softcap() || options.support() || !scale->requires_grad(), kOp, kScaleName,
                       " must not require grad beside a softcap, where it gets no gradient, but got a "
                       "tensor that does: detach it");
  return scale->to(acc_type(input.scalar_type())).expand_symint(shape).reshape({-1}).contiguous();
}

// Checks the tensor to which the weight's gradient is to be added.
void check_buffer(const LinearCrossEntropyCall& call, at::ArrayRef<const Tensor*> arguments) {
  const auto& into = *call.options.grad_weight_into();
  const auto& weight = call.linear_weight;
  const auto acc = acc_type(call.input.scalar_type());
  check_dense(kOp, "grad_weight_into", into);
  FUSEGRAD_CHECK_TYPE(into.scalar_type() == acc, kOp, "grad_weight_into must be ", acc, ", but got ",
                      into.scalar_type());
  FUSEGRAD_CHECK_VALUE(into.sym_sizes() == weight.sym_sizes(), kOp, "grad_weight_into must have linear_weight's shape ",
                       weight.sym_sizes(), ", but got ", into.sym_sizes());
  check_same_device(kOp, "grad_weight_into", into, call.input);
  check_may_add_to(kOp, "grad_weight_into", into, arguments);
  FUSEGRAD_CHECK_VALUE(!at::GradMode::is_enabled() || weight.requires_grad(), kOp,
                       "linear_weight must require grad with grad_weight_into, but got one that does not");
  const auto& accumulate = call.options.accumulate_dtype();
  FUSEGRAD_CHECK_VALUE(!accumulate || *accumulate == acc, kOp, "accumulate_dtype must be None or ", acc,
                       " with grad_weight_into, but got ", *accumulate);
}

// A call, checked.
struct CheckedLinearCall {
  RowOptions options;
  RowArguments rows;
  LinearOptions linear;
  Tensor matrix, support;
  OptionalTensor row_scale;
  bool deferred = false, overwrite = false;
};

CheckedLinearCall prepare(const LinearCrossEntropyCall& call, const Shards& shards, bool inplace) {
  const auto tensors = tensors_of(call);
  const bool transformed = is_transformed(tensors);
  const auto &input = call.input, &linear_weight = call.linear_weight, &target = call.target;
  const auto& o = call.options;
  if (transformed && o.support()) refuse_transforms("linear_cross_entropy with a support", tensors);
  if (transformed && (o.grad_weight_into() || o.batch_invariant()))
    refuse_transforms("linear_cross_entropy with grad_weight_into or batch_invariant", tensors);
  check_linear(kOp, "input", input, "linear_weight", linear_weight, "linear_bias", o.linear_bias());
  if (shards && o.batch_invariant()) vocab_nodes(kOp, shards, shards.vocab(), input.device());  // raises
  CheckedLinearCall made;
  made.options = make_row_options(kOp, call);
  auto& options = made.options;
  check_budget(kOp, "linear_weight", linear_weight, o.accumulate_dtype(), o.workspace_mib());
  if (o.grad_weight_into()) check_buffer(call, tensors);
  made.linear = {o.logit_scale(), o.accumulate_dtype(), o.workspace_mib()};
  // Under autocast only the input is cast here: the op itself rounds the weight, so that a float32 weight gets its
  // gradient in float32.
  const auto dtype = autocast_dtype(input).value_or(input.scalar_type());
  const auto cast = input.scalar_type() == at::kDouble ? input : input.to(dtype);
  std::vector<c10::SymInt> row_shape(input.sym_sizes().begin(), input.sym_sizes().end() - 1);
  const auto columns = linear_weight.sym_size(0);
  made.rows = make_row_arguments(kOp, call, options,
                                 {std::move(row_shape), columns, shards ? c10::SymInt(shards.vocab()) : columns,
                                  input.dim() - 1, cast.scalar_type()});
  check_no_grad(kOp, "target", target);

  made.row_scale = make_row_scale(input, o, made.rows);
  if (made.row_scale && at::GradMode::is_enabled() && made.row_scale->requires_grad()) options.aux |= kScaleGradient;
  if (o.batch_invariant()) {
    FUSEGRAD_CHECK_VALUE(!made.rows.target.is_floating_point(), kOp,
                         "batch_invariant must be False with class probabilities, but got True");
    options.aux |= kBatchInvariant;
  }
  made.deferred = options.reduction == at::Reduction::None || o.workspace_mib() == 0 || o.grad_weight_into() ||
                  (options.aux & (kAuxDifferentiable | kScaleGradient | kBatchInvariant)) != 0;
  made.overwrite =
      inplace && !transformed && !o.support() && cast.is_same(input) && !made.deferred && may_overwrite(input, tensors);
  made.matrix = cast.dim() == 2 ? cast : cast.reshape_symint({-1, cast.sym_size(-1)});
  if (o.support()) made.support = make_support(kOp, call, made.rows);
  return made;
}

LossTuple loss_of_support(const LinearCrossEntropyCall& call, const CheckedLinearCall& of, const Shards& shards,
                          const OptionalTensor& different) {
  auto options = of.options;
  auto some = autograd::support_logits({of.matrix, call.linear_weight, call.options.linear_bias(),
                                        shards ? columns_of(of.support, shards, -1) : of.support,
                                        of.linear.workspace_mib, options.aux & kBatchInvariant, shards},
                                       of.linear.accumulate_dtype, call.options.grad_weight_into());
  if (of.linear.logit_scale != 1.0) some = some * of.linear.logit_scale;
  if (of.row_scale) some = some * of.row_scale->unsqueeze(1);
  if (different) some = some.masked_fill(*different, std::numeric_limits<double>::quiet_NaN());
  options.aux &= ~kScaleGradient;
  const auto vocab = shards ? c10::SymInt(shards.vocab()) : call.linear_weight.sym_size(0);
  return support_loss(kOp, some, of.support, vocab, of.rows, options);
}

LossTuple run(const LinearCrossEntropyCall& call, const Shards& shards, bool inplace) {
  const Parts parts{{"linear_weight", 0},
                    {"linear_bias", 0},
                    {"grad_weight_into", 0},
                    {call.target.is_floating_point() ? "target" : "", call.target.dim() - 1}};
  const auto [made, different] =
      prepared_by_all(kOp, call, shards, parts, [&] { return prepare(call, shards, inplace); });
  if (call.options.support()) return loss_of_support(call, made, shards, different);
  const auto& [options, rows, linear, matrix, support, row_scale, deferred, overwrite] = made;
  const bool keep = !shards && deferred && logits_fit(matrix, call.linear_weight, linear.workspace_mib);
  LinearCrossEntropyForward forward{.input = matrix,
                                    .linear_weight = call.linear_weight,
                                    .target = rows.target,
                                    .linear_bias = call.options.linear_bias(),
                                    .weight = rows.weight,
                                    .token_weight = rows.token_weight,
                                    .normalizer = rows.normalizer,
                                    .options = options,
                                    .linear = linear,
                                    .keep_logits = keep,
                                    .row_scale = row_scale,
                                    .shards = shards,
                                    .different = different};
  if (is_transformed(tensors_of(call)))
    return to_front(kOp, composite::linear_cross_entropy(kOp, forward), rows, options, /*constants=*/false);
  return to_front(kOp, autograd::linear_cross_entropy(forward, deferred, overwrite, call.options.grad_weight_into()),
                  rows, options);
}

}  // namespace

LossOutput linear_cross_entropy_with_aux(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                         const LinearCrossEntropyOptions& options, const Aux& aux) {
  return call_loss<"linear_cross_entropy">(LinearCrossEntropyCall{input, linear_weight, target, options}, input, aux);
}

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy_with_aux(input, linear_weight, target, options, Aux()).loss;
}

LogProb linear_log_prob(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                        const LinearLogProbOptions& options) {
  const auto rows = LinearCrossEntropyOptions()
                        .linear_bias(options.linear_bias())
                        .ignore_index(options.ignore_index())
                        .reduction("none")
                        .softcap(options.softcap())
                        .logit_scale(options.logit_scale())
                        .row_scale(options.row_scale())
                        .workspace_mib(options.workspace_mib())
                        .support(options.support())
                        .grad_weight_into(options.grad_weight_into())
                        .batch_invariant(options.batch_invariant().value_or(false));
  const auto out = errors_name("linear_log_prob", kOp, [&] {
    return linear_cross_entropy_with_aux(input, linear_weight, target, rows,
                                         Aux().token_log_prob(true).entropy(options.return_entropy()));
  });
  return {out.aux.token_log_prob, out.aux.entropy};
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  LossOps<"linear_cross_entropy", LinearCrossEntropyCall, run>::implement(m);
}
// Under torch.vmap too they are compositions of other ops.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  LossOps<"linear_cross_entropy", LinearCrossEntropyCall, run>::implement(m);
}

}  // namespace fusegrad
