// linear_cross_entropy_forward(_) and linear_cross_entropy_backward on the CPU and on CUDA: matrix products by
// ATen, in chunks, around the row kernels.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/linear.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

// Logits that a forward kept, [N, V]; those of a backward that may write over them are written over.
struct Kept {
  Tensor logits;
  bool overwrite = false;
};

// Room for logits [rows, columns] at the end of a gradient of their dtype.
Tensor last_part(const Tensor& gradient, int64_t rows, int64_t columns) {
  const int64_t stride = logits_row_elements(columns, static_cast<int64_t>(gradient.element_size()));
  const int64_t first = (gradient.numel() - rows * stride) / kGradientRoomAlign * kGradientRoomAlign;
  return gradient.as_strided({rows, columns}, {stride, 1}, gradient.storage_offset() + first);
}

// Gradients from saved statistics: the logits a block of columns at a time, so that each block of the weight's
// gradient is complete, in one product, and only the input's needs an accumulator. Logits that were not kept are
// computed again, in as much memory as `budget` (bytes) allows. The weight's gradient is added to `into` where that is
// defined.
LinearGradients gradients_by_columns(RowJob& job, const Head& head, const Upstream& upstream, const Tensor& input,
                                     std::optional<int64_t> budget, const at::TensorOptions& weight_options,
                                     const at::TensorOptions& bias_options, const at::TensorOptions& input_options,
                                     std::array<bool, 3> needs_grad, const Kept& kept = {}, const Tensor& into = {}) {
  const auto x = input.to(head.weight.scalar_type());
  const int64_t rows = x.size(0), hidden = x.size(1), vocab = head.weight.size(0);
  const auto acc = acc_type(x.scalar_type());
  LinearSizes sizes;
  sizes.rows = rows;
  sizes.hidden = hidden;
  sizes.vocab = vocab;
  sizes.element_size = static_cast<int64_t>(x.element_size());
  sizes.cpu = x.is_cpu();
  // On the CPU a block should stay near the caches.
  const bool use_gradient = needs_grad[1] && !into.defined() && !sizes.cpu &&
                            weight_options.dtype() == x.options().dtype() && weight_options.layout() == at::kStrided;
  // Logits that were kept are one block, whether or not they may be written over: the bits must be the same.
  const auto blocks = kept.logits.defined() ? std::vector<ColumnBlock>(vocab == 0 ? 0 : 1, ColumnBlock{0, vocab, false})
                                            : column_blocks(sizes, budget, use_gradient);
  LinearGradients gradients;
  Sum input_sum;
  if (needs_grad[0]) {
    input_sum.allocate({rows, hidden}, input_options, blocks.size() <= 1 ? x.scalar_type() : acc, rows);
  }
  if (needs_grad[1] && !into.defined()) gradients.weight = empty_result({vocab, hidden}, weight_options);
  if (needs_grad[2]) gradients.bias = at::empty({vocab}, bias_options);
  {
    auto buffer = kept.overwrite ? kept.logits : Tensor();
    if (kept.overwrite) begin_overwriting("the logits that the forward kept");
    for (const auto [column, width, in_gradient] : blocks) {
      if (!in_gradient && !buffer.defined()) buffer = logits_buffer(rows, width, x.options());
      const auto z = in_gradient ? last_part(gradients.weight, rows, width) : part(buffer, 1, 0, width);
      if (!kept.logits.defined()) head.logits(z, x, column);
      job.gradient(upstream, kept.logits.defined() ? part(kept.logits, 1, column, width) : z, column, z);
      if (needs_grad[0]) input_sum.add_product(z, part(head.weight, 0, column, width));
      if (into.defined()) {
        begin_overwriting(kGradWeightInto);
        multiply(part(into, 0, column, width), z.t(), x, /*add=*/true);
      } else if (needs_grad[1]) {
        const auto block = part(gradients.weight, 0, column, width);
        if (block.scalar_type() == x.scalar_type() || (block.is_cuda() && block.scalar_type() == at::kFloat)) {
          multiply(block, z.t(), x, /*add=*/false);
        } else {
          block.copy_(at::mm(z.t(), x));
        }
      }
      if (needs_grad[2]) part(gradients.bias, 0, column, width).copy_(z.sum(0, /*keepdim=*/false, acc));
    }
  }
  if (needs_grad[0]) gradients.input = input_sum.finish();
  return gradients;
}

// The same in chunks of rows, whose logits and whose gradient of the input come from fixed products where they must.
LinearGradients gradients_by_rows(RowJob& job, const Head& head, const Upstream& upstream,
                                  const LinearCrossEntropyBackward& call, LinearPlan plan, const FixedProducts& fixed,
                                  const Kept& kept, const Tensor& into) {
  const auto& input = call.input;
  const int64_t rows = input.size(0), columns = head.weight.size(0);
  const auto dtype = head.weight.scalar_type();
  plan.rows = kept.logits.defined() ? std::max<int64_t>(rows, 1) : whole_tiles(plan.rows, fixed.tile);
  plan.accumulator &= plan.rows < rows;
  ChunkGradients chunks(input, call.linear_weight, call.linear_bias, columns, plan, call.needs_grad, /*inplace=*/false,
                        call.needs_grad[1] ? into : Tensor(), fixed);
  chunks.set_shards(call.shards, call.linear.accumulate_dtype);
  const auto buffer =
      kept.overwrite ? kept.logits : logits_buffer(std::min(plan.rows, rows), columns, head.weight.options());
  if (kept.overwrite) begin_overwriting("the logits that the forward kept");
  const bool any = columns != 0 || call.shards;  // a process without columns takes part in the sums
  for (int64_t first = 0; any && first < rows; first += plan.rows) {
    const int64_t count = std::min(plan.rows, rows - first);
    const auto x = part(input, 0, first, count).to(dtype), z = part(buffer, 0, 0, count);
    if (!kept.logits.defined()) head.logits(z, x, 0, fixed);
    job.gradient(upstream, kept.logits.defined() ? kept.logits : z, 0, z, first);
    chunks.add(head, x, z, first);
  }
  return chunks.finish();
}

template <bool inplace>
LinearTuple linear_cross_entropy_forward(const LinearCrossEntropyForward& call) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(call.input));
  const auto& [input, linear_weight, target, linear_bias, weight, token_weight, normalizer, options, linear, needs_grad,
               keep, row_scale, shards, different] = call;
  const int64_t rows = input.size(0), hidden = input.size(1), columns = linear_weight.size(0);
  const int64_t vocab = shards ? shards.vocab() : columns;
  check_target_range("linear_cross_entropy", target, vocab, options.ignore_index);
  const auto dtype = product_type(input);
  const auto acc = acc_type(dtype);
  const bool any_gradient = needs_grad[0] || needs_grad[1] || needs_grad[2];

  LinearSizes sizes;
  sizes.rows = rows;
  sizes.hidden = hidden;
  sizes.vocab = shards ? shards.largest() : vocab;
  sizes.element_size = static_cast<int64_t>(at::elementSize(dtype));
  sizes.cpu = input.is_cpu();
  sizes.weight_grad = needs_grad[1];
  sizes.low_precision_result = linear_weight.scalar_type() != linear.accumulate_dtype.value_or(acc);
  sizes.by_columns = !shards;
  auto plan = plan_linear(sizes, budget_bytes(linear.workspace_mib));
  const auto fixed = FixedProducts::of("linear_cross_entropy", options.aux, linear_weight, dtype, shards, vocab);
  plan.rows = keep ? std::max<int64_t>(rows, 1) : whole_tiles(plan.rows, fixed.tile);
  const bool over_rows = any_gradient && plan.columns == 0;

  const Head head(linear_weight, linear_bias, dtype, fixed);
  RowJob job(target, weight, token_weight, options, linear.logit_scale, rows, vocab, dtype);
  job.set_row_scale(row_scale);
  job.set_shards(shards, different);
  job.set_segments(fixed.nodes);
  using Gradients = RowJob::Gradients;
  job.begin_forward(normalizer, !any_gradient                      ? Gradients::kNone
                                : input.scalar_type() == at::kHalf ? Gradients::kDeferred
                                                                   : Gradients::kStored);

  const std::array<bool, 3> over = over_rows ? needs_grad : std::array<bool, 3>{};
  ChunkGradients chunks(input, linear_weight, linear_bias, columns, plan, over, inplace, /*grad_weight_into=*/{},
                        fixed);
  chunks.set_shards(shards, linear.accumulate_dtype);
  auto kept = at::empty({0}, input.options());
  if (vocab != 0 || keep) {
    const auto padded = padded_logits(std::min(plan.rows, rows), columns, input.options().dtype(dtype));
    const auto buffer = part(padded, 1, 0, columns);
    if (keep) {
      kept = padded;
      part(padded, 1, columns, padded.size(1) - columns).zero_();  // an output has no unwritten elements
    }
    for (int64_t first = 0; vocab != 0 && first < rows; first += plan.rows) {
      const int64_t count = std::min(plan.rows, rows - first);
      const auto z = part(buffer, 0, 0, count);
      const auto x = part(input, 0, first, count).to(dtype);
      head.logits(z, x, 0, fixed);
      job.forward(z, first, over_rows);
      if (over_rows) chunks.add(head, x, z, first);
    }
  }
  auto out = job.finish_forward();
  auto gradients = chunks.finish();
  if (!over_rows && any_gradient) {
    job.resume(out.lse, out.stats, out.scales);
    gradients = gradients_by_columns(
        job, head, {.loss = job.unit_gradient()}, input, budget_bytes(linear.workspace_mib), linear_weight.options(),
        linear_bias ? linear_bias->options() : at::TensorOptions(), input.options(), needs_grad);
    if (inplace && needs_grad[0]) {
      begin_overwriting("the input");
      input.copy_(gradients.input);
    }
  }
  if (inplace) gradients.input = Tensor();
  return std::tuple_cat(fusegrad::to_tuple(out), std::tuple(kept),
                        to_tuple(gradients, input, linear_weight, linear_bias));
}

LinearGradientTuple linear_cross_entropy_gradients(const LinearCrossEntropyBackward& call, bool inplace,
                                                   const Tensor& into) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(call.input));
  const auto &input = call.input, &linear_weight = call.linear_weight;
  const auto& linear_bias = call.linear_bias;
  const auto dtype = product_type(input);
  const auto& shards = call.shards;
  RowJob job(call.target, call.weight, call.token_weight, call.options, call.linear.logit_scale, input.size(0),
             shards ? shards.vocab() : linear_weight.size(0), dtype);
  job.set_row_scale(call.row_scale);
  job.set_shards(shards);
  job.resume(call.lse, call.stats, call.scales);
  const auto kept = call.logits ? Kept{part(*call.logits, 1, 0, linear_weight.size(0)), inplace} : Kept();
  const auto fixed = FixedProducts::of("linear_cross_entropy", call.options.aux, linear_weight, dtype, shards,
                                       shards ? shards.vocab() : linear_weight.size(0));
  const Head head(linear_weight, linear_bias, dtype, fixed);
  if (fixed || shards) {
    LinearSizes sizes;
    sizes.rows = input.size(0);
    sizes.hidden = input.size(1);
    sizes.vocab = shards ? shards.largest() : linear_weight.size(0);
    sizes.element_size = static_cast<int64_t>(at::elementSize(dtype));
    sizes.cpu = input.is_cpu();
    sizes.weight_grad = call.needs_grad[1];
    sizes.low_precision_result =
        !into.defined() && linear_weight.scalar_type() != call.linear.accumulate_dtype.value_or(acc_type(dtype));
    sizes.by_columns = false;
    const auto plan = plan_linear(sizes, budget_bytes(call.linear.workspace_mib));
    return to_tuple(gradients_by_rows(job, head, Upstream::of(call), call, plan, fixed, kept, into), input,
                    linear_weight, linear_bias);
  }
  const auto gradients = gradients_by_columns(
      job, head, Upstream::of(call), input, budget_bytes(call.linear.workspace_mib), linear_weight.options(),
      linear_bias ? linear_bias->options() : at::TensorOptions(), input.options(), call.needs_grad, kept, into);
  return to_tuple(gradients, input, linear_weight, linear_bias);
}

template <bool inplace>
LinearGradientTuple linear_cross_entropy_backward(const LinearCrossEntropyBackward& call) {
  return linear_cross_entropy_gradients(call, inplace, Tensor());
}

template <bool inplace>
LinearGradientTuple linear_cross_entropy_backward_into(const LinearCrossEntropyBackwardInto& call) {
  check_grad_weight_into(call.grad_weight_into, call.backward.linear_weight);
  return linear_cross_entropy_gradients(call.backward, inplace, call.grad_weight_into);
}

void implement_linear_cross_entropy(torch::Library& m) {
  m.impl("linear_cross_entropy_forward",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_forward<false>>()>());
  m.impl("linear_cross_entropy_forward_",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_forward<true>>()>());
  m.impl("linear_cross_entropy_backward",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_backward<false>>()>());
  m.impl("linear_cross_entropy_backward_",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_backward<true>>()>());
  m.impl("linear_cross_entropy_backward_into",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_backward_into<false>>()>());
  m.impl("linear_cross_entropy_backward_into_",
         named_kernel<"linear_cross_entropy", unpacked<linear_cross_entropy_backward_into<true>>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_linear_cross_entropy(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_linear_cross_entropy(m); }
#endif

}  // namespace fusegrad
