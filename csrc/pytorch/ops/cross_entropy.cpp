#include "fusegrad/cross_entropy.h"

#include <torch/library.h>

#include <limits>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/loss_front.h"
#include "pytorch/ops/support.h"
#include "pytorch/rows/collectives.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr const char* kOp = "cross_entropy";

// A call, checked.
struct CheckedCall {
  RowOptions options;
  RowArguments rows;
  Tensor logits, support;
  bool overwrite = false;
};

CheckedCall prepare(const CrossEntropyCall& call, const Shards& shards, bool inplace) {
  const auto tensors = tensors_of(call);
  const bool transformed = is_transformed(tensors);
  const auto& input = call.input;
  check_floating(kOp, "input", input);
  FUSEGRAD_CHECK_VALUE(input.dim() >= 1, kOp,
                       "input must have shape [V], [N, V] or [N, V, d1, ...], but got a 0-d tensor");
  CheckedCall made;
  made.options = make_row_options(kOp, call);
  const int64_t class_dim = input.dim() == 1 ? 0 : 1;
  const auto columns = input.sym_size(class_dim);
  std::vector<c10::SymInt> row_shape(input.sym_sizes().begin(), input.sym_sizes().end());
  row_shape.erase(row_shape.begin() + class_dim);
  made.rows = make_row_arguments(
      kOp, call, made.options,
      {std::move(row_shape), columns, shards ? c10::SymInt(shards.vocab()) : columns, class_dim, input.scalar_type()});
  FUSEGRAD_CHECK_VALUE(!shards || !call.target.requires_grad(), kOp,
                       "target must not require grad with vocab_parallel, since it gets no gradient there, but got a "
                       "tensor that does: detach it");

  // A gradient of an aux value, or of probabilities, needs the logits themselves in the backward. Only [N, V] and [V]
  // are rows in memory.
  made.overwrite = inplace && !transformed && input.dim() <= 2 && !call.options.support() &&
                   (made.options.aux & kAuxDifferentiable) == 0 && !made.rows.target.requires_grad() &&
                   may_overwrite(input, tensors);
  made.logits = input.dim() == 2   ? input
                : input.dim() == 1 ? input.unsqueeze(0)
                                   : as_rows(input.movedim(class_dim, -1));
  if (transformed && call.options.support()) refuse_transforms("cross_entropy with a support", tensors);
  if (call.options.support()) made.support = make_support(kOp, call, made.rows);
  return made;
}

LossTuple loss_of_support(const CheckedCall& of, const Shards& shards, const OptionalTensor& different) {
  const auto acc = acc_type(of.logits.scalar_type());
  const auto columns = of.logits.sym_size(1);
  if (!shards) {
    const auto some = of.logits.gather(1, of.support.clamp_min(0).clamp_max(columns.guard_int(__FILE__, __LINE__) - 1));
    return support_loss(kOp, some.to(acc), of.support, columns, of.rows, of.options);
  }
  const auto index = columns_of(of.support, shards, -1);
  auto some = shards.size() == 0 ? at::zeros_symint(index.sym_sizes(), of.logits.options().dtype(acc)) + of.logits.sum()
                                 : of.logits.gather(1, index.clamp_min(0)).to(acc);
  some = sum_of_parts(some.masked_fill(index.lt(0), 0), shards);
  if (different) some = some.masked_fill(*different, std::numeric_limits<double>::quiet_NaN());
  return support_loss(kOp, some, of.support, shards.vocab(), of.rows, of.options);
}

LossTuple run(const CrossEntropyCall& call, const Shards& shards, bool inplace) {
  const Parts parts{{"input", call.input.dim() <= 1 ? 0 : 1},
                    {call.target.is_floating_point() ? "target" : "", call.input.dim() <= 1 ? 0 : 1}};
  const auto [made, different] =
      prepared_by_all(kOp, call, shards, parts, [&] { return prepare(call, shards, inplace); });
  if (call.options.support()) return loss_of_support(made, shards, different);
  const auto& [options, rows, logits, support, overwrite] = made;
  const CrossEntropyForward forward{logits,          rows.target, rows.weight, rows.token_weight,
                                    rows.normalizer, options,     shards,      different};
  if (is_transformed(tensors_of(call)))
    return to_front(kOp, composite::cross_entropy(kOp, forward), rows, options, /*constants=*/false);
  return to_front(kOp, autograd::cross_entropy(forward, overwrite), rows, options);
}

}  // namespace

LossOutput cross_entropy_with_aux(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options,
                                  const Aux& aux) {
  return call_loss<"cross_entropy">(CrossEntropyCall{input, target, options}, input, aux);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  return cross_entropy_with_aux(input, target, options, Aux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  LossOps<"cross_entropy", CrossEntropyCall, run>::implement(m);
}
// Under torch.vmap too they are compositions of other ops.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) { LossOps<"cross_entropy", CrossEntropyCall, run>::implement(m); }

}  // namespace fusegrad
