// support_logits, its backward and support_positions on the CPU and on CUDA: the logits of the few columns of each row
// that a softmax is over, and where the targets stand among them.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/linear.h"
#include "pytorch/rows/registration.h"
#include "pytorch/rows/tiles.h"

namespace fusegrad {
namespace {

using at::Tensor;

template <class Call>
LinearSizes linear_sizes(const Call& call) {
  LinearSizes sizes;
  sizes.rows = call.input.size(0);
  sizes.hidden = call.input.size(1);
  sizes.vocab = call.shards ? call.shards.largest() : call.linear_weight.size(0);
  sizes.element_size = static_cast<int64_t>(at::elementSize(product_type(call.input)));
  sizes.cpu = call.input.is_cpu();
  sizes.by_columns = false;
  return sizes;
}

template <class Call>
FixedProducts fixed_products(const Call& call) {
  const int64_t vocab = call.shards ? call.shards.vocab() : call.linear_weight.size(0);
  return FixedProducts::of("linear_cross_entropy", call.aux, call.linear_weight, product_type(call.input), call.shards,
                           vocab);
}

Tensor support_logits(const SupportLogits& call) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(call.input));
  const auto sizes = linear_sizes(call);
  const auto dtype = product_type(call.input);
  const auto options = call.input.options().dtype(dtype);
  auto plan = plan_linear(sizes, budget_bytes(call.workspace_mib));
  const auto fixed = fixed_products(call);
  plan.rows = whole_tiles(plan.rows, fixed.tile);
  const Head head(call.linear_weight, call.linear_bias, dtype, fixed);
  const auto out = at::empty({sizes.rows, call.index.size(1)}, options.dtype(acc_type(dtype)));
  const int64_t vocab = call.linear_weight.size(0);
  const auto columns = call.index.clamp(0, vocab - 1);
  const auto buffer = logits_buffer(std::min(plan.rows, sizes.rows), vocab, options);
  for (int64_t first = 0; vocab != 0 && first < sizes.rows; first += plan.rows) {
    const int64_t count = std::min(plan.rows, sizes.rows - first);
    const auto z = part(buffer, 0, 0, count);
    head.logits(z, part(call.input, 0, first, count).to(dtype), 0, fixed);
    part(out, 0, first, count).copy_(z.gather(1, part(columns, 0, first, count)));
  }
  if (call.shards) {
    out.masked_fill_(call.index.lt(0).logical_or_(call.index.ge(vocab)), 0);
    start_sum(out, call.shards);
    finish_sum(out, call.shards);
  }
  return out;
}

LinearGradientTuple support_gradients(const SupportLogitsBackward& call, const Tensor& into) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(call.input));
  const auto& [grad, input, weight, bias, index, accumulate_dtype, workspace_mib, needs_grad, aux, shards] = call;
  const int64_t vocab = weight.size(0);
  auto sizes = linear_sizes(call);
  const auto dtype = product_type(input);
  sizes.weight_grad = needs_grad[1];
  sizes.low_precision_result = !into.defined() && weight.scalar_type() != accumulate_dtype.value_or(acc_type(dtype));
  auto plan = plan_linear(sizes, budget_bytes(workspace_mib));
  const auto fixed = fixed_products(call);
  plan.rows = whole_tiles(plan.rows, fixed.tile);
  const Head head(weight, bias, dtype, fixed);
  ChunkGradients chunks(input, weight, bias, vocab, plan, needs_grad, /*inplace=*/false, into, fixed);
  chunks.set_shards(shards, accumulate_dtype);
  // What is no column goes to one behind the last.
  const auto none = index.lt(0).logical_or_(index.ge(vocab));
  const auto columns = index.masked_fill(none, vocab);
  const auto buffer = padded_logits(std::min(plan.rows, sizes.rows), vocab + 1, input.options().dtype(dtype));
  for (int64_t first = 0; first < sizes.rows; first += plan.rows) {
    const int64_t count = std::min(plan.rows, sizes.rows - first);
    const auto z = part(buffer, 0, 0, count);
    z.zero_();
    z.scatter_(1, part(columns, 0, first, count), part(grad, 0, first, count).to(dtype));
    chunks.add(head, part(input, 0, first, count).to(dtype), part(z, 1, 0, vocab), first);
  }
  return to_tuple(chunks.finish(), input, weight, bias);
}

LinearGradientTuple support_logits_backward(const SupportLogitsBackward& call) {
  return support_gradients(call, Tensor());
}

LinearGradientTuple support_logits_backward_into(const SupportLogitsBackwardInto& call) {
  check_grad_weight_into(call.grad_weight_into, call.backward.linear_weight);
  return support_gradients(call.backward, call.grad_weight_into);
}

// On the CPU, and on the GPU where set_check_targets asks for it: an error where a row's target is not among its
// columns, or a column comes twice.
void check_support(const Tensor& support, const Tensor& wrong, const Tensor& target) {
  if (const auto rows = wrong.nonzero(); rows.size(0) != 0) {
    const auto row = rows[0].item<int64_t>();
    TORCH_CHECK_INDEX(false,
                      "support: each row must have the row's target, and columns of the vocabulary or -1 alone, "
                      "but got ",
                      support[row].max().item<int64_t>(), " as the largest column and ", target[row].item<int64_t>(),
                      " as the target of row ", row);
  }
  const auto sorted = std::get<0>(support.sort(1));
  const auto next = sorted.slice(1, 1), twice = next.eq(sorted.slice(1, 0, -1)).logical_and_(next.ge(0)).any(1);
  if (const auto rows = twice.nonzero(); rows.size(0) != 0) {
    TORCH_CHECK_VALUE(false, "support: a row must have a column once, but got one twice in row ",
                      rows[0].item<int64_t>());
  }
}

Tensor support_positions(const SupportPositions& call) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(call.target));
  const auto& [target, support, vocab, ignore_index] = call;
  const auto ignored = target.eq(ignore_index), match = support.eq(target.unsqueeze(1));
  auto wrong = support.lt(-1).logical_or_(support.ge(vocab)).any(1);
  wrong = wrong.logical_or_(match.any(1).logical_not_()).logical_and_(ignored.logical_not());
  if (target.is_cpu() || check_targets_enabled()) check_support(support, wrong, target);
  const auto position = match.to(at::kByte).argmax(1);
  return position.masked_fill_(wrong, support.size(1)).masked_fill_(ignored, -100);
}

Tensor support_logits_meta(const SupportLogits& call) {
  const auto acc = acc_type(call.input.scalar_type());
  return at::empty_symint(call.index.sym_sizes(), call.input.options().dtype(acc).requires_grad(false));
}

LinearGradientTuple support_logits_backward_meta(const SupportLogitsBackward& call) {
  const auto like = [&](bool wanted, const Tensor& tensor) {
    const auto options = tensor.options().requires_grad(false);
    return wanted ? at::empty_symint(tensor.sym_sizes(), options) : at::empty({0}, options);
  };
  return {like(call.needs_grad[0], call.input), like(call.needs_grad[1], call.linear_weight),
          like(call.needs_grad[2], call.linear_bias.value_or(call.input))};
}

LinearGradientTuple support_logits_backward_into_meta(const SupportLogitsBackwardInto& call) {
  auto backward = call.backward;
  backward.needs_grad[1] = false;
  return support_logits_backward_meta(backward);
}

Tensor support_positions_meta(const SupportPositions& call) {
  return at::empty_symint(call.target.sym_sizes(), call.target.options().dtype(at::kLong));
}

void implement_support(torch::Library& m) {
  m.impl("support_logits", named_kernel<"linear_cross_entropy", unpacked<support_logits>()>());
  m.impl("support_logits_backward", named_kernel<"linear_cross_entropy", unpacked<support_logits_backward>()>());
  m.impl("support_logits_backward_into",
         named_kernel<"linear_cross_entropy", unpacked<support_logits_backward_into>()>());
  m.impl("support_positions", TORCH_FN(unpacked<support_positions>()));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_support(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_support(m); }
#endif
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("support_logits", TORCH_FN(unpacked<support_logits_meta>()));
  m.impl("support_logits_backward", TORCH_FN(unpacked<support_logits_backward_meta>()));
  m.impl("support_logits_backward_into", TORCH_FN(unpacked<support_logits_backward_into_meta>()));
  m.impl("support_positions", TORCH_FN(unpacked<support_positions_meta>()));
}

}  // namespace fusegrad
