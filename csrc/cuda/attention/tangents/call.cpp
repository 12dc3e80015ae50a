// The plan of forward mode: one kernel for each part of the values' columns.
#include "cuda/attention/plan/run.h"
#include "cuda/attention/plan/steps.h"
#include "cuda/attention/tangents/arguments.cuh"
#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

using Now = Run<FlexTangentCall>;

// What the score_mod's tangent captures: the score_mod's buffers, behind them their tangents, and its numbers.
std::vector<int64_t> tangent_words(const Now& r, const score_mod::Graph* tangent) {
  if (tangent == nullptr) return {0};
  return score_mod::pack_captured(*tangent, r.call.buffers, r.of().score_mod.scalars);
}

}  // namespace

Plan<FlexTangentCall> plan_tangents(const Asked& asked, const Gpu& gpu) {
  Plan<FlexTangentCall> plan;
  begin_plan(asked, plan);
  align_inputs(asked, plan);
  const FlexShape& n = plan.shape;
  align_operand(asked, kQueryTangent, {n.batches, n.heads, n.queries, n.head_size}, "query's tangent", plan);
  align_operand(asked, kKeyTangent, {n.key_batches, n.key_heads, n.keys, n.head_size}, "key's tangent", plan);
  align_operand(asked, kValueTangent, {n.key_batches, n.key_heads, n.keys, n.value_size}, "value's tangent", plan);
  add_copies(plan);
  add_copy(plan, kQueryTangent, "query's tangent", [](const auto& c) -> const TensorView& { return c.query; });
  add_copy(plan, kKeyTangent, "key's tangent", [](const auto& c) -> const TensorView& { return c.key; });
  add_copy(plan, kValueTangent, "value's tangent", [](const auto& c) -> const TensorView& { return c.value; });
  std::shared_ptr<const score_mod::Graph> tangent;
  if (!asked.score_mod.text.empty()) tangent = score_mod::cached_tangent(asked.score_mod.text, asked.buffer_tangents);
  int64_t first = 0;
  constexpr int kMostValues = 128;  // two outputs of them are in registers
  for (const int64_t count : column_parts(static_cast<int>(n.value_size), kMostValues)) {
    FlexCase c = plan.common;
    c.kernel = FlexKernel::kTangents;
    c.value_size = static_cast<int>(count);
    c.unscaled = asked.score_mod.text.empty() && asked.positive_scale;
    c.out_low = asked.out_low;
    c.tangents_of = {asked.there[kQueryTangent], asked.there[kKeyTangent], asked.there[kValueTangent],
                     asked.buffer_tangents, asked.small_tangent_buffers};
    FlexShape shape = n;
    shape.value_size = count;
    const auto program =
        make_program(plan_launch(plan_kernel(c, gpu.architecture), shape, plan.mask, gpu.multiprocessors), plan);
    add_lists(plan, program);
    plan.steps.push_back({program->launch.spec.name(), program, {}, [=](Now& r) {
                            const FlexTangentCall& call = r.call;
                            const TensorView value = columns_of(r.value(), first, count);
                            const TensorView of_query = r.operand(kQueryTangent, call.query),
                                             of_key = r.operand(kKeyTangent, call.key),
                                             of_value = columns_of(r.operand(kValueTangent, call.value), first, count);
                            device::FlexTangentsArguments a{};
                            r.fill(a);
                            a.value = tensor_of(value);
                            a.value_size = static_cast<int>(count);
                            a.out = tensor_of(columns_of(call.results.out, first, count));
                            a.out_low = tensor_of(columns_of(call.results.out_low, first, count));
                            a.out_tangent = tensor_of(columns_of(call.out, first, count));
                            a.query_tangent = tensor_of(of_query);
                            a.key_tangent = tensor_of(of_key);
                            a.value_tangent = tensor_of(of_value);
                            a.lse = static_cast<float*>(call.results.lse);
                            a.lse_low = static_cast<float*>(call.results.lse_low);
                            a.lse_tangent = static_cast<float*>(call.lse);
                            if (r.of().dropout) a.dropout = dropout_of(r.of());
                            a.tiles = r.tiles(*program);
                            std::vector<int64_t> words = tangent_words(r, tangent.get());
                            std::vector<void*> more{words.data()};
                            const FlexTile& tile = program->launch.spec.tile();
                            device::FlexTangentsHopperArguments hopper{};
                            if (program->launch.spec.facts().hopper()) {
                              const auto operands = r.hopper_forward(*program, value);
                              hopper = {operands.query,
                                        operands.key,
                                        operands.value,
                                        boxes_of(of_query, tile.rows),
                                        boxes_of(of_key, tile.cols),
                                        boxes_of(of_value, tile.cols),
                                        operands.next,
                                        operands.section};
                              more.push_back(&hopper);
                            }
                            r.launch(*program, &a, more);
                          }});
    first += count;
  }
  plan.scratch.lay_out();
  return plan;
}

}  // namespace fusegrad::cuda
