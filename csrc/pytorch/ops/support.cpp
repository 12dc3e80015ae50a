#include "pytorch/ops/support.h"

#include <limits>

#include "pytorch/autograd/autograd.h"

namespace fusegrad {

using at::Tensor;

template <class Call>
Tensor make_support(const char* op, const Call& call, const RowArguments& rows) {
  const auto& support = *call.options.support();
  check_dense(op, "support", support);
  const auto dtype = support.scalar_type();
  FUSEGRAD_CHECK_TYPE(dtype == at::kLong || dtype == at::kInt, op, "support must be int64 or int32, but got ", dtype);
  const c10::SymIntArrayRef shape(rows.row_shape);
  FUSEGRAD_CHECK_VALUE(support.dim() == static_cast<int64_t>(shape.size()) + 1 &&
                           support.sym_sizes().slice(0, shape.size()) == shape && support.sym_size(-1) >= 1,
                       op, "support must have K >= 1 columns for each row, the shape ", shape, " and K, but got ",
                       support.sym_sizes());
  check_same_device(op, "support", support, call.input);
  FUSEGRAD_CHECK_VALUE(!rows.target.is_floating_point(), op,
                       "a support must come with class indices, but got class probabilities");
  FUSEGRAD_CHECK_VALUE(call.options.label_smoothing() == 0.0, op,
                       "label_smoothing must be 0 with a support, outside of which the logits are -inf, but got ",
                       call.options.label_smoothing());
  FUSEGRAD_CHECK_VALUE(!rows.weight.has_value(), op, "weight must be None with a support, but got a tensor");
  return support.to(at::kLong).reshape_symint({-1, support.sym_size(-1)}).contiguous();
}

LossTuple support_loss(const char* op, const Tensor& logits, const Tensor& support, const c10::SymInt& vocab,
                       const RowArguments& rows, const RowOptions& options) {
  static const Op<SupportPositions, Tensor> positions("fusegrad::support_positions");
  auto z = logits;
  if (options.softcap != 0.0) {
    // The softcap's slope at NaN, times an ignored row's gradient of 0, would be NaN.
    if ((options.aux & kAuxLse) == 0) z = z.masked_fill(rows.target.eq(options.ignore_index).unsqueeze(1), 0);
    z = (z / options.softcap).tanh() * options.softcap;
  }
  z = z.masked_fill(support.lt(0), -std::numeric_limits<double>::infinity());
  auto inner = options;
  inner.softcap = 0.0;
  inner.ignore_index = -100;
  const auto columns = vocab.guard_int(__FILE__, __LINE__);
  const CrossEntropyForward forward{.logits = z,
                                    .target = positions({rows.target, support, columns, options.ignore_index}),
                                    .weight = {},
                                    .token_weight = rows.token_weight,
                                    .normalizer = rows.normalizer,
                                    .options = inner};
  auto out = autograd::cross_entropy(forward, /*inplace=*/false);
  if ((options.aux & (kAuxPredictedTokens | kAuxTokenAccuracy)) != 0) {
    const auto& best = out.predicted_tokens;
    const auto token = support.gather(1, best.clamp_min(0).unsqueeze(1)).squeeze(1);
    out.predicted_tokens = token.masked_fill(best.lt(0), -1);
  }
  return to_front(op, out, rows, options);
}

template Tensor make_support(const char*, const CrossEntropyCall&, const RowArguments&);
template Tensor make_support(const char*, const LinearCrossEntropyCall&, const RowArguments&);

}  // namespace fusegrad
