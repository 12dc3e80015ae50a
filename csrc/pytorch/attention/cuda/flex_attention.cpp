#include "pytorch/attention/cuda/flex_attention.h"

#include <ATen/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "attention/flex_attention.h"
#include "cuda/attention/backward/prepare.h"
#include "cuda/attention/forward/merge.h"
#include "cuda/attention/grad_buffers/grad_buffers.h"
#include "cuda/attention/mask/dropout.h"
#include "cuda/attention/plan/program.h"
#include "jit/compile.h"
#include "pytorch/attention/cuda/aligned_rows.h"
#include "pytorch/attention/cuda/buffer_sums.h"
#include "pytorch/attention/cuda/call.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/gpu.h"
#include "pytorch/ops/faults.h"

namespace fusegrad::cuda {
namespace {

using at::Tensor;
using device::FlexTensor;

FlexCase forward_case(FlexCall& call, const FlexScores& scores, bool max_scores, bool out_low) {
  const int few_rows = call.few_rows(max_scores);
  if (few_rows == 0) call.align_boxes();  // the kernels of few queries have none
  FlexCase c = call.common();
  c.kernel = FlexKernel::kForward;
  c.max_scores = max_scores;
  c.out_low = out_low;
  c.unscaled = scores.score_mod.text.empty() && scores.scale > 0;
  c.few_rows = few_rows;
  c.key_splits = few_rows == 0 && call.key_splits();
  c.forward_rows = call.forward_rows(c);
  return c;
}

/// What the kernels of a backward have in common, the launches of the one by keys, and the kernel for buffers alone.
struct Backward {
  FlexCase common;
  int64_t launches = 1;
  std::optional<BatchSums> apart = std::nullopt;

  std::vector<FlexCase> kernels(const std::vector<bool>& needs_grad, bool deterministic,
                                const std::string& architecture) const {
    auto found = backward_kernels(common, needs_grad, deterministic, architecture);
    if (apart) found.push_back(apart->common);
    return found;
  }
};
Backward backward_case(FlexCall& call, const FlexScores& scores, const std::vector<bool>& needs_grad,
                       bool deterministic, bool max_gradient) {
  call.align_boxes();
  Backward made{call.common()};
  FlexCase& c = made.common;
  c.kernel = FlexKernel::kBackward;
  c.tall = call.pays_tall();
  c.key_splits = call.key_splits();
  c.max_gradient = max_gradient;
  c.wants_grad.assign(needs_grad.begin() + 3, needs_grad.end());
  for (const auto& b : scores.score_mod.buffers) c.elements.push_back(b.numel());
  c.whole = needs_grad[0] && needs_grad[1] && needs_grad[2] && call.pays_whole(c);
  const FlexShape& n = call.shape();
  if (c.wants_buffers()) {
    c.covered = covered_buffers(c, {n.batches, n.heads, n.queries, n.keys});
    const score_mod::CapturedTensors captured({}, scores.score_mod.scalars);
    made.apart = sums_over_batches(c, needs_grad, captured.scalars(), n.batches, n.heads, n.queries, n.keys,
                                   gpu::multiprocessors(), deterministic, jit::current_architecture());
  }
  if (made.apart) made.apart->leave_out(c);
  if (!deterministic || !c.wants_buffers()) return made;
  const int64_t launches =
      ordered_launches(c, n.key_batches, n.key_heads, n.keys, gpu::multiprocessors(), jit::current_architecture());
  c.fixed_point = launches == 0;
  c.partial_sums = !c.fixed_point;
  made.launches = std::max<int64_t>(launches, 1);
  return made;
}

/// Where a kernel that stores boxes writes a gradient, whose rows may not be as those are.
Tensor rows_for(const Tensor& grad) {
  return grad.numel() == 0 || has_aligned_rows(grad) ? grad : new_aligned_rows(grad, false);
}

/// Where the CTAs of split keys write, kept by `keep`; nowhere, if they write the results themselves.
device::FlexPartials partials_of(const LaunchPlan& plan, const Tensor& lse, int value_size, Tensor& keep) {
  device::FlexPartials p{nullptr, nullptr, plan.splits, (value_size + 3) / 4 * 4};
  if (plan.splits == 1 && !plan.spec.facts().key_splits) return p;
  const int64_t rows = lse.numel() * plan.splits;
  keep = at::empty({rows, p.cols + 4}, lse.options());
  p.rows = reinterpret_cast<device::FlexPartialRow*>(keep.mutable_data_ptr<float>());
  p.out = keep.mutable_data_ptr<float>() + 4 * rows;
  return p;
}

}  // namespace

void flex_attention_dropout_mask(const Tensor& seed, double p, int64_t first_query, const Tensor& mask) {
  const c10::DeviceGuard guard(seed.device());
  flex_dropout_mask(dropout_of(seed, p), mask.mutable_data_ptr<bool>(), mask.size(0) * mask.size(1), first_query,
                    mask.size(2), mask.size(3), gpu::current_stream());
}

FlexOutputTuple flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const FlexScores& scores, int64_t aux) {
  const c10::DeviceGuard guard(query.device());
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux);
  if (outputs.lse.numel() != 0 && key.numel() == 0) {
    outputs.out.zero_();
    outputs.out_low.zero_();
    outputs.lse.fill_(-INFINITY);
    outputs.lse_low.zero_();
    outputs.max_scores.fill_(-INFINITY);
    outputs.max_ties.zero_();
  } else if (outputs.lse.numel() != 0) {
    FlexCall call(query, key, value, scores);
    const FlexCase c = forward_case(call, scores, outputs.max_scores.numel() != 0, outputs.out_low.numel() != 0);
    const LaunchPlan plan = call.plan(c);
    device::FlexForwardArguments a{};
    call.fill(a);
    a.out = view(outputs.out);
    a.out_low = view(outputs.out_low);
    a.lse = outputs.lse.mutable_data_ptr<float>();
    if (outputs.lse_low.numel() != 0) a.lse_low = outputs.lse_low.mutable_data_ptr<float>();
    if (c.max_scores) {
      a.max_scores = outputs.max_scores.mutable_data_ptr<float>();
      a.max_ties = outputs.max_ties.mutable_data_ptr<float>();
    }
    if (c.dropout) a.dropout = dropout_of(scores.dropout_seed, scores.dropout_p);
    Tensor partials;
    a.partials = partials_of(plan, outputs.lse, c.value_size, partials);
    a.together = plan.together;
    const FlexCall::Lists lists = call.lists(plan);
    a.tiles = lists.tiles;
    // The kernels of a backward for gradients of the output alone.
    const auto ahead = [&](const std::string& architecture) {
      if ((aux & kFlexBackward) == 0) return;
      std::vector<bool> needs_grad;
      for (const auto& t : {query, key, value}) needs_grad.push_back(t.requires_grad());
      for (const auto& t : scores.score_mod.buffers) needs_grad.push_back(t.requires_grad());
      const bool ordered = (aux & kFlexOrdered) != 0;
      FlexCall later(query, key, value, scores);
      const Backward backward = backward_case(later, scores, needs_grad, ordered, /*max_gradient=*/false);
      for (const FlexCase& next : backward.kernels(needs_grad, ordered, architecture)) {
        jit::compile_ahead(flex_program(plan_kernel(next, jit::current_architecture()), architecture).program);
      }
    };
    if (plan.spec.facts().hopper()) {
      auto more = call.hopper_forward(plan, lists);
      call.launch(plan, &a, {&more}, ahead);
    } else if (plan.spec.tile().key_boxes) {
      auto more = call.few_forward(plan);
      call.launch(plan, &a, {&more}, ahead);
    } else {
      call.launch(plan, &a, {}, ahead);
    }
    if (partials.defined()) {
      flex_merge(a.partials,
                 {a.out, a.out_low, a.lse, a.max_scores, a.max_ties, a.lse_low, c.value_size,
                  c.unscaled ? a.scale : 1.0f, c.dropout ? a.dropout.scale : 1.0f},
                 a.batches, a.heads, a.queries, c.dtype, call.stream());
    }
  }
  return {outputs.out, outputs.lse, outputs.max_scores, outputs.max_ties, outputs.out_low, outputs.lse_low};
}

void flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key, const Tensor& value,
                             const FlexOutputs& saved, const FlexScores& scores, bool deterministic,
                             const std::vector<bool>& needs_grad, const FlexGradients& grads, bool inplace) {
  const c10::DeviceGuard guard(query.device());
  const Tensor grad_query = inplace ? query : grads.query, grad_key = inplace ? key : grads.key,
               grad_value = inplace ? value : grads.value;
  if (saved.lse.numel() == 0 || key.numel() == 0) {
    if (inplace) begin_overwriting("query, key and value");
    for (const auto& t : {grad_query, grad_key, grad_value}) t.zero_();
    for (const auto& t : grads.buffers) t.zero_();
    return;
  }
  FlexCall call(query, key, value, scores);
  const auto [c, launches, apart] =
      backward_case(call, scores, needs_grad, deterministic, upstream.max_scores.defined());
  std::vector<LaunchPlan> plans;
  for (const FlexCase& kernel : backward_kernels(c, needs_grad, deterministic, jit::current_architecture()))
    plans.push_back(call.plan(kernel, launches));
  std::optional<LaunchPlan> of_buffers;
  if (apart)
    of_buffers = LaunchPlan{plan_kernel(apart->common, jit::current_architecture()), apart->ctas, 1, 1, std::nullopt};
  const KernelFacts& last = plans.back().spec.facts();
  const bool own_kernel = plans.front().spec.facts().kernel == FlexKernel::kGradQuery;  // for dQ

  const Tensor grad_out = with_aligned_rows(upstream.out.defined() ? upstream.out : at::zeros_like(saved.out));
  const auto floats = query.options().dtype(at::kFloat);
  const int64_t row_stride = (query.size(2) + 1) / 2 * 2;
  const int64_t heads = query.size(0) * query.size(1);
  // Behind the rows: whether one is far from 0. Numbers of calls tell it from what was there before.
  const Tensor row_values = at::empty({heads * row_stride + 1, 2}, floats);
  static std::atomic<unsigned> calls = 0;
  const unsigned number = ++calls;
  const Tensor key_rows = last.stores_boxes && needs_grad[1] ? rows_for(grad_key) : grad_key,
               value_rows = last.stores_boxes && needs_grad[2] ? rows_for(grad_value) : grad_value;
  const int64_t sum_rows = tiles_in(query.size(2), last.tile.rows) * last.tile.rows,
                sum_cols = tiles_in(query.size(3), 16) * 16;
  // A kernel of its own writes the queries' gradient itself, but not over what it and the next kernel read.
  Tensor query_sum, query_out;
  const bool stored = own_kernel || last.stores_query;
  const int64_t sum_heads = last.whole ? plans.back().ctas * (query.size(1) / key.size(1)) : heads;
  if (needs_grad[0] && !stored) query_sum = at::empty({sum_heads, sum_rows, sum_cols}, floats);
  Tensor sum_states;
  if (query_sum.defined() && last.stores_first) {
    const int64_t states = heads * sum_rows / 8 * sum_chunks(static_cast<int>(sum_cols));
    sum_states = at::empty({states}, query.options().dtype(at::kInt));
  }
  if (needs_grad[0] && stored) query_out = inplace ? at::empty(query.sizes(), query.options()) : grad_query;
  const Tensor query_rows = last.whole ? rows_for(grad_query) : Tensor();
  const Tensor lse = saved.lse.contiguous(), lse_low = saved.lse_low.contiguous();
  const Tensor grad_lse = upstream.lse.defined() ? upstream.lse.contiguous() : Tensor();
  auto* row_data = reinterpret_cast<device::FlexRow*>(row_values.mutable_data_ptr<float>());
  auto* far = reinterpret_cast<unsigned*>(row_data + heads * row_stride);
  flex_rows({upstream.out.defined() ? view(grad_out) : FlexTensor{}, view(saved.out), view(saved.out_low), data_of(lse),
             data_of(grad_lse), c.dropout ? static_cast<float>(FlexDropoutRule(scores.dropout_p).scale) : 1.0f,
             static_cast<int>(query.size(0)), static_cast<int>(query.size(1)), static_cast<int>(query.size(2)),
             c.value_size, static_cast<int>(row_stride),
             query_sum.defined() && !last.whole && !last.stores_first ? query_sum.mutable_data_ptr<float>() : nullptr,
             static_cast<int>(sum_rows), static_cast<int>(sum_cols),
             sum_states.defined() ? sum_states.mutable_data_ptr<int>() : nullptr, far, number},
            row_data, c.dtype, call.stream());
  const Tensor grad_max = c.max_gradient ? (upstream.max_scores / saved.max_ties).contiguous() : Tensor();
  const Tensor max_scores = saved.max_scores.contiguous();
  const FlexBufferSums sums(scores, last, query, key, grads.buffers, plans.back().ctas);

  device::FlexBackwardArguments a{};
  call.fill(a);
  a.grad_out = view(grad_out);
  a.grad_query = view(query_out);
  a.grad_key = view(key_rows);
  a.grad_value = view(value_rows);
  a.rows = row_data;
  a.row_stride = static_cast<int>(row_stride);
  a.lse = data_of(lse);
  a.lse_low = data_of(lse_low);
  a.far = far;
  a.call = number;
  a.max_scores = data_of(max_scores);
  a.grad_max = data_of(grad_max);
  a.query_sum = query_sum.defined() ? query_sum.mutable_data_ptr<float>() : nullptr;
  a.sum_rows = static_cast<int>(sum_rows);
  a.sum_cols = static_cast<int>(sum_cols);
  a.largest = sums.largest();
  a.fixed_bits = sums.fixed_bits();
  if (c.dropout) a.dropout = dropout_of(scores.dropout_seed, scores.dropout_p);

  // Of dQ in one order: what has been added, and behind it what CTAs of each launch take their tiles of keys from.
  const int64_t counts = heads * tiles_in(query.size(2), last.tile.rows) * 2;
  const Tensor added =
      last.ordered ? at::zeros({counts + 2 * plans.back().launches}, query.options().dtype(at::kInt)) : Tensor();
  auto sum_arguments = sums.arguments();
  Tensor query_parts;
  if (own_kernel && plans.front().spec.facts().key_splits && query_out.defined()) {
    const int64_t cols = (query.size(3) + 3) / 4 * 4;
    query_parts = at::empty({plans.front().splits * query.size(0), query.size(1), query.size(2), cols}, floats);
    a.grad_query = view(query_parts);
  }
  a.splits = plans.front().splits;
  if (inplace) {
    // A kernel that cannot be compiled or loaded must not be found after another has begun to write.
    for (const LaunchPlan& plan : plans) call.kernel(plan.spec);
  }
  if (of_buffers) {
    const FlexBufferSums over_batches(scores, of_buffers->spec.facts(), query, key, grads.buffers, apart->ctas);
    auto arguments = over_batches.arguments();
    a.batch_groups = apart->groups;
    std::vector<void*> further{arguments.data()};
    device::FlexBackwardHopperArguments more{};
    if (of_buffers->spec.facts().hopper()) {
      more = call.hopper_backward(*of_buffers, {}, grad_out, row_values, {}, {}, {}, {});
      further.push_back(&more);
    }
    call.launch(*of_buffers, &a, further);
    over_batches.finish(grads.buffers, call.stream());
  }
  for (const LaunchPlan& plan : plans) {
    const bool by_key = plan.spec.facts().kernel == FlexKernel::kBackward;
    const FlexCall::Lists lists = call.lists(plan);
    a.tiles = lists.tiles;
    std::vector<void*> further;
    if (by_key) further.push_back(sum_arguments.data());
    device::FlexBackwardHopperArguments more{};
    if (plan.spec.facts().hopper()) {
      more = call.hopper_backward(plan, lists, grad_out, row_values, query_rows, key_rows, value_rows, sums.tiles());
      if (sum_states.defined()) more.sum_states = sum_states.mutable_data_ptr<int>();
      if (added.defined()) {
        more.added = added.mutable_data_ptr<int>();
        more.next = more.added + counts;
      }
      further.push_back(&more);
    }
    if (by_key && inplace) begin_overwriting("query, key and value");
    for (int64_t i = 0; i < plan.launches; ++i) {
      call.launch(plan, &a, further);
      more.first_head += more.heads;
      if (added.defined()) more.next += 2;
    }
  }
  if (query_sum.defined() && !last.whole) {
    flex_scale_query_sum(
        {view(grad_query), a.query_sum, a.batches, a.heads, a.queries, a.head_size, a.sum_rows, a.sum_cols,
         sum_states.defined() ? sum_states.const_data_ptr<int>() : nullptr, last.hopper() && !last.narrow, a.scale},
        c.dtype, call.stream());
  }
  if (query_parts.defined()) {
    flex_add_query_parts({view(query_out), query_parts.const_data_ptr<float>(), a.splits, a.batches, a.heads, a.queries,
                          a.head_size, static_cast<int>(query_parts.size(3))},
                         c.dtype, call.stream());
  }
  if (query_out.defined() && inplace) {
    grad_query.copy_(query_out);
  }
  if (last.whole && !query_rows.is_same(grad_query)) grad_query.copy_(query_rows);
  if (!key_rows.is_same(grad_key)) grad_key.copy_(key_rows);
  if (!value_rows.is_same(grad_value)) grad_value.copy_(value_rows);
  sums.finish(grads.buffers, call.stream());
}

}  // namespace fusegrad::cuda
