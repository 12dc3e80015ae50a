#include "fusegrad/cross_entropy.h"

#include <torch/library.h>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/front.h"
#include "pytorch/ops/support.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr const char* kOp = "cross_entropy";

template <bool inplace>
LossTuple cross_entropy_op(const CrossEntropyCall& call) {
  const auto tensors = tensors_of(call);
  const bool transformed = is_transformed(tensors);
  const auto& input = call.input;
  check_floating(kOp, "input", input);
  FUSEGRAD_CHECK_VALUE(input.dim() >= 1, kOp,
                       "input must have shape [V], [N, V] or [N, V, d1, ...], but got a 0-d tensor");
  const auto options = make_row_options(kOp, call);
  const int64_t class_dim = input.dim() == 1 ? 0 : 1;
  const auto vocab = input.sym_size(class_dim);
  std::vector<c10::SymInt> row_shape(input.sym_sizes().begin(), input.sym_sizes().end());
  row_shape.erase(row_shape.begin() + class_dim);
  const auto rows =
      make_row_arguments(kOp, call, options, {std::move(row_shape), vocab, class_dim, input.scalar_type()});

  // A gradient of an aux value, or of probabilities, needs the logits themselves in the backward. Only [N, V] and [V]
  // are rows in memory.
  const bool overwrite = inplace && !transformed && input.dim() <= 2 && !call.options.support() &&
                         (options.aux & kAuxDifferentiable) == 0 && !rows.target.requires_grad() &&
                         may_overwrite(input, tensors);
  const auto logits = input.dim() == 2   ? input
                      : input.dim() == 1 ? input.unsqueeze(0)
                                         : input.movedim(class_dim, -1).reshape_symint({-1, vocab});
  if (call.options.support()) {
    if (transformed) refuse_transforms("cross_entropy with a support", tensors);
    const auto support = make_support(kOp, call, rows);
    const auto some = logits.gather(1, support.clamp_min(0).clamp_max(vocab.guard_int(__FILE__, __LINE__) - 1));
    return support_loss(kOp, some.to(acc_type(input.scalar_type())), support, vocab, rows, options);
  }
  const CrossEntropyForward forward{logits, rows.target, rows.weight, rows.token_weight, rows.normalizer, options};
  if (transformed) return to_front(kOp, composite::cross_entropy(kOp, forward), rows, options, /*constants=*/false);
  return to_front(kOp, autograd::cross_entropy(forward, overwrite), rows, options);
}

}  // namespace

LossOutput cross_entropy_with_aux(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options,
                                  const Aux& aux) {
  static const Twins<CrossEntropyCall, LossTuple> op("fusegrad::cross_entropy");
  CrossEntropyCall call{input, target, options, aux_bits(aux)};
  put_on_device(kOp, call.options.normalizer(), input);
  return from_front(op(call, options.inplace()), aux);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  return cross_entropy_with_aux(input, target, options, Aux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", named_kernel<"cross_entropy", unpacked<cross_entropy_op<false>>()>());
  m.impl("cross_entropy_", named_kernel<"cross_entropy", unpacked<cross_entropy_op<true>>()>());
}

// Under torch.vmap too they are compositions of other ops.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  m.impl("cross_entropy", named_kernel<"cross_entropy", unpacked<cross_entropy_op<false>>()>());
  m.impl("cross_entropy_", named_kernel<"cross_entropy", unpacked<cross_entropy_op<true>>()>());
}

}  // namespace fusegrad
