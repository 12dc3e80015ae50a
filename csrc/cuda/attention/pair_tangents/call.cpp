// The plan of what second derivatives ask of pairs: one kernel.
#include <algorithm>

#include "cuda/attention/captured/convert.h"
#include "cuda/attention/pair_tangents/arguments.cuh"
#include "cuda/attention/plan/run.h"
#include "cuda/attention/plan/steps.h"

namespace fusegrad::cuda {

using Now = Run<FlexPairTangentsCall>;

Plan<FlexPairTangentsCall> plan_pair_tangents(const Asked& asked, const Gpu& gpu) {
  Plan<FlexPairTangentsCall> plan;
  begin_plan(asked, plan);
  align_inputs(asked, plan);
  const FlexShape& n = plan.shape;
  const std::array<int64_t, 4> queries{n.batches, n.heads, n.queries, n.head_size},
      outputs{n.batches, n.heads, n.queries, n.value_size};
  align_operand(asked, kGradOut, outputs, "grad_out", plan);
  align_operand(asked, kQueryTangent, queries, "query's tangent", plan);
  align_operand(asked, kKeyTangent, {n.key_batches, n.key_heads, n.keys, n.head_size}, "key's tangent", plan);
  align_operand(asked, kValueTangent, {n.key_batches, n.key_heads, n.keys, n.value_size}, "value's tangent", plan);
  align_operand(asked, kGradOutTangent, outputs, "grad_out's tangent", plan);
  FlexCase c = plan.common;
  c.kernel = FlexKernel::kPairTangents;
  c.grad_out_tangent = asked.there[kGradOutTangent];
  c.wants_grad.assign(asked.score_mod.buffers.size(), false);
  for (const AskedBuffer& b : asked.score_mod.buffers) c.elements.push_back(elements_of(b));
  LaunchPlan launch = plan_launch(plan_kernel(c, gpu.architecture), n, plan.mask, gpu.multiprocessors);
  const int rows = launch.spec.tile().rows;  // 128 is a multiple
  // CTAs end at different times: a GPU has many of them, one after the other.
  constexpr int64_t kWaves = 8, kLeastTiles = 4;
  const int64_t units = asked.head_count * tiles_in(asked.row_count, rows);
  const int64_t most = tiles_in(tiles_in(n.keys, launch.spec.tile().cols), kLeastTiles);
  const int64_t splits = std::clamp(tiles_in(kWaves * gpu.multiprocessors, units), int64_t{1}, most);
  launch.ctas = units * splits;
  check_ctas(launch.ctas);
  const auto program = make_program(std::move(launch), plan);
  add_copies(plan);
  add_copy(plan, kGradOut, "grad_out", [](const auto& call) -> const TensorView& { return call.grad_out; });
  add_copy(plan, kQueryTangent, "query's tangent", [](const auto& call) -> const TensorView& { return call.query; });
  add_copy(plan, kKeyTangent, "key's tangent", [](const auto& call) -> const TensorView& { return call.key; });
  add_copy(plan, kValueTangent, "value's tangent", [](const auto& call) -> const TensorView& { return call.value; });
  add_copy(plan, kGradOutTangent, "grad_out's tangent",
           [](const auto& call) -> const TensorView& { return call.grad_out_tangent; });
  if (plan.mask) {
    // Pairs of blocks that take no part are not visited.
    const bool two = asked.there[kGradOutTangent];
    plan.steps.push_back({"zeros of results", nullptr, {}, [two, group = n.group()](Now& r) {
                            const FlexPairTangentsCall& call = r.call;
                            const int64_t part =
                                call.head_count * call.row_count * call.columns * element_bytes(call.of.query.dtype);
                            flex_fill_zeros(call.weights, (two ? 2 : 1) * part, r.stream());
                            flex_fill_zeros(call.gradients, 2 * part, r.stream());
                            flex_fill_zeros(call.seen, call.head_count / group * call.columns, r.stream());
                          }});
  }
  add_lists(plan, program);
  plan.steps.push_back({program->launch.spec.name(), program, {}, [=](Now& r) {
                          const FlexPairTangentsCall& call = r.call;
                          device::FlexPairTangentsArguments a{};
                          r.fill(a);
                          a.grad_out = tensor_of(r.operand(kGradOut, call.grad_out));
                          a.query_tangent = tensor_of(r.operand(kQueryTangent, call.query));
                          a.key_tangent = tensor_of(r.operand(kKeyTangent, call.key));
                          a.value_tangent = tensor_of(r.operand(kValueTangent, call.value));
                          a.grad_out_tangent = tensor_of(r.operand(kGradOutTangent, call.grad_out_tangent));
                          a.rows = reinterpret_cast<const device::FlexPairRow*>(call.rows);
                          a.score_tangent = call.score_tangent;
                          a.weights = call.weights;
                          a.gradients = call.gradients;
                          a.seen = call.seen;
                          a.first_head = static_cast<int>(call.first_head);
                          a.head_count = static_cast<int>(call.head_count);
                          a.first_row = static_cast<int>(call.first_row);
                          a.row_count = static_cast<int>(call.row_count);
                          a.splits = static_cast<int>(splits);
                          a.columns = static_cast<int>(call.columns);
                          a.tiles = r.tiles(*program);
                          r.launch(*program, &a, {});
                        }});
  plan.scratch.lay_out();
  return plan;
}

}  // namespace fusegrad::cuda
