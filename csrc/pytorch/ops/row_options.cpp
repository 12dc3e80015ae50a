#include "pytorch/ops/row_options.h"

#include "pytorch/ops/check.h"

namespace fusegrad {
namespace {

using at::Tensor;

Tensor make_probabilities(const char* op, const Tensor& target, const RowOptions& options, const RowSizes& sizes,
                          at::ScalarType acc) {
  std::vector<c10::SymInt> expected(sizes.row_shape);
  expected.insert(expected.begin() + sizes.class_dim, sizes.columns);
  FUSEGRAD_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(expected), op,
                       "a target of class probabilities must have the shape of the logits ",
                       c10::SymIntArrayRef(expected), ", but got ", target.sym_sizes());
  FUSEGRAD_CHECK_VALUE((options.aux & (kAuxTokenAccuracy | kAuxTokenLogProb)) == 0, op,
                       "token_accuracy and token_log_prob must come with class indices, but got a target of "
                       "class probabilities");
  FUSEGRAD_CHECK_VALUE(options.ignore_index < 0, op, "an ignore_index >= 0 must come with class indices, but got ",
                       options.ignore_index, " and a target of class probabilities, none of which it can leave out");
  c10::SymInt rows = 1;
  for (const auto& size : sizes.row_shape) rows = rows * size;
  const auto dtype = target.scalar_type() == sizes.logits_dtype ? sizes.logits_dtype : acc;
  return target.to(dtype).movedim(sizes.class_dim, -1).reshape_symint({rows, sizes.columns}).contiguous();
}

Tensor make_indices(const char* op, const Tensor& input, const Tensor& target, const RowSizes& sizes) {
  const auto dtype = target.scalar_type();
  FUSEGRAD_CHECK_TYPE(
      dtype == at::kLong || dtype == at::kInt || dtype == at::kByte, op,
      "target must be int64, int32 or uint8 class indices or floating-point class probabilities, but got ", dtype);
  const c10::SymIntArrayRef rows(sizes.row_shape);
  const auto shape = target.sym_sizes();
  // Where classes come second, [B, S, V] with [B, S] is meant for rows of V.
  const bool classes_last =
      sizes.class_dim == 1 && input.dim() > 2 && shape == input.sym_sizes().slice(0, input.dim() - 1);
  FUSEGRAD_CHECK_VALUE(shape == rows, op, "a target of class indices must have shape ", rows, ", but got ", shape,
                       classes_last ? ": the classes are the input's dimension 1; where they are its last, flatten "
                                      "both, input.flatten(0, -2) and target.flatten(), or transpose the input, "
                                      "input.movedim(-1, 1)"
                                    : "");
  const auto indices = (target.dim() == 1 ? target : target.reshape({-1})).contiguous();
  return dtype == at::kByte ? indices.to(at::kLong) : indices;
}

}  // namespace

OptionalTensor tensor_of(const Normalizer& normalizer) {
  const auto* tensor = std::get_if<Tensor>(&normalizer);
  return tensor != nullptr ? OptionalTensor(*tensor) : std::nullopt;
}

template <class Call>
RowOptions make_row_options(const char* op, const Call& call) {
  const auto& o = call.options;
  RowOptions options{.ignore_index = o.ignore_index(),
                     .reduction = parse_reduction(op, o.reduction()),
                     .label_smoothing = o.label_smoothing(),
                     .z_loss = o.z_loss(),
                     .softcap = o.softcap().value_or(0.0),
                     .aux = call.aux};
  check_numbers(op, call);
  FUSEGRAD_CHECK_VALUE(
      std::holds_alternative<std::monostate>(o.normalizer()) || options.reduction == at::Reduction::Mean, op,
      "a normalizer must come with reduction 'mean', whose divisor it replaces, but got reduction '", o.reduction(),
      "'");
  FUSEGRAD_CHECK_VALUE(call.aux >= 0 && call.aux < 64, op, "aux must be a set of the six AuxBit bits, but got ",
                       call.aux);
  return options;
}

template <class Call>
RowArguments make_row_arguments(const char* op, const Call& call, const RowOptions& options, RowSizes sizes) {
  const auto acc = acc_type(sizes.logits_dtype);
  const Tensor &input = call.input, &target = call.target;
  RowArguments rows;
  check_dense(op, "target", target);
  check_same_device(op, "target", target, input);
  rows.target = target.is_floating_point() ? make_probabilities(op, target, options, sizes, acc)
                                           : make_indices(op, input, target, sizes);
  if (call.options.weight().has_value()) {
    const auto& weight = *call.options.weight();
    check_dense(op, "weight", weight);
    FUSEGRAD_CHECK_TYPE(weight.is_floating_point(), op, "weight must be floating-point, but got ",
                        weight.scalar_type());
    FUSEGRAD_CHECK_VALUE(weight.dim() == 1 && weight.sym_size(0) == sizes.vocab, op, "weight must have shape [",
                         sizes.vocab, "], but got ", weight.sym_sizes());
    check_same_device(op, "weight", weight, input);
    check_no_grad(op, "weight", weight);
    rows.weight = weight.to(acc).contiguous();
  }
  rows.token_weight = make_row_value(op, "token_weight", input, call.options.token_weight(), sizes.row_shape, acc);
  rows.normalizer = make_normalizer(op, input, tensor_of(call.options.normalizer()), acc);
  rows.row_shape = std::move(sizes.row_shape);
  return rows;
}

template RowOptions make_row_options(const char*, const CrossEntropyCall&);
template RowOptions make_row_options(const char*, const LinearCrossEntropyCall&);
template RowArguments make_row_arguments(const char*, const CrossEntropyCall&, const RowOptions&, RowSizes);
template RowArguments make_row_arguments(const char*, const LinearCrossEntropyCall&, const RowOptions&, RowSizes);

}  // namespace fusegrad
