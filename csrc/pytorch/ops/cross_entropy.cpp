#include "fusegrad/cross_entropy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/front.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <bool inplace>
LossTuple cross_entropy_op(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                           const OptionalTensor& token_weight, const OptionalTensor& normalizer,
                           std::optional<int64_t> ignore_index, std::string_view reduction, double label_smoothing,
                           double z_loss, std::optional<double> softcap, int64_t aux) {
  constexpr const char* op = "cross_entropy";
  refuse_transforms(op, {input, target, weight, token_weight, normalizer});
  check_floating(op, "input", input);
  FUSEGRAD_CHECK_VALUE(input.dim() >= 1, op,
                       "input must have shape [V], [N, V] or [N, V, d1, ...], but got a 0-d tensor");
  const auto options = make_loss_options(op, weight, token_weight, normalizer, ignore_index, reduction, label_smoothing,
                                         z_loss, softcap, aux);
  const int64_t class_dim = input.dim() == 1 ? 0 : 1;
  const auto vocab = input.sym_size(class_dim);
  std::vector<c10::SymInt> row_shape(input.sym_sizes().begin(), input.sym_sizes().end());
  row_shape.erase(row_shape.begin() + class_dim);
  const auto rows =
      make_row_arguments(op, input, target, options, std::move(row_shape), vocab, class_dim, input.scalar_type());

  // A gradient to lse, or to probabilities, needs the logits themselves in the backward. Only [N, V] and [V] are
  // rows in memory.
  const bool overwrite = inplace && input.dim() <= 2 && (aux & kAuxLse) == 0 && !rows.target.requires_grad() &&
                         may_overwrite(input, {target, weight, token_weight, normalizer});
  const auto logits = input.dim() == 2   ? input
                      : input.dim() == 1 ? input.unsqueeze(0)
                                         : input.movedim(class_dim, -1).reshape_symint({-1, vocab});
  return to_front(op, autograd::cross_entropy(logits, rows, options, overwrite), rows, options);
}

}  // namespace

LossOutput cross_entropy_with_aux(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options,
                                  const Aux& aux) {
  using Signature =
      LossTuple(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                std::optional<int64_t>, std::string_view, double, double, std::optional<double>, int64_t);
  static const auto functional =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::cross_entropy", "").typed<Signature>();
  static const auto mutating =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusegrad::cross_entropy_", "").typed<Signature>();
  return from_front(
      (options.inplace() ? mutating : functional)
          .call(input, target, options.weight(), options.token_weight(),
                normalizer_on("cross_entropy", options.normalizer(), input), options.ignore_index(),
                options.reduction(), options.label_smoothing(), options.z_loss(), options.softcap(), aux_bits(aux)),
      aux);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  return cross_entropy_with_aux(input, target, options, Aux()).loss;
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", named_kernel<"cross_entropy", cross_entropy_op<false>>());
  m.impl("cross_entropy_", named_kernel<"cross_entropy", cross_entropy_op<true>>());
}

}  // namespace fusegrad
