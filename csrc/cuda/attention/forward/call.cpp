// The plan of a forward.
#include <algorithm>

#include "common/error.h"
#include "cuda/attention/captured/places.h"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/forward/forward.h"
#include "cuda/attention/forward/merge.h"
#include "cuda/attention/forward/segments.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/run.h"
#include "cuda/attention/plan/steps.h"
#include "jit/compile.h"

namespace fusegrad::cuda {
namespace {

using Now = Run<FlexForwardCall>;

FlexCase invariant_case(const Asked& asked, const Gpu& gpu, CallPlan& plan) {
  FUSEGRAD_CHECK(NotImplementedError, !asked.max_scores,
                 "flex_attention: batch_invariant on CUDA must not come with max_scores, but does");
  FlexCase c = segments_case(plan.common, plan.shape, plan.mask, gpu.multiprocessors, gpu.architecture);
  if (c.few_rows == 0) {
    align_boxes(asked, plan);
    c = segments_case(plan.common, plan.shape, plan.mask, gpu.multiprocessors, gpu.architecture);
  }
  c.out_low = asked.out_low;
  c.unscaled = asked.score_mod.text.empty() && asked.positive_scale;
  c.forward_rows = forward_rows(c, plan.shape, gpu.multiprocessors, [&] { return share_of_pairs(asked); });
  return c;
}

FlexCase forward_case(const Asked& asked, const Gpu& gpu, CallPlan& plan) {
  if (asked.batch_invariant) return invariant_case(asked, gpu, plan);
  FlexCase c = plan.common;
  c.kernel = FlexKernel::kForward;
  c.max_scores = asked.max_scores;
  const int few_rows = few_query_rows(c, plan.shape, plan.mask, gpu.architecture);
  if (few_rows == 0) {
    align_boxes(asked, plan);  // the kernels of few queries have none
    c = plan.common;
  }
  c.kernel = FlexKernel::kForward;
  c.max_scores = asked.max_scores;
  c.out_low = asked.out_low;
  c.unscaled = asked.score_mod.text.empty() && asked.positive_scale;
  c.few_rows = few_rows;
  c.key_splits = few_rows == 0 && pays_key_splits(plan.shape, gpu.multiprocessors);
  c.forward_rows = forward_rows(c, plan.shape, gpu.multiprocessors, [&] { return share_of_pairs(asked); });
  return c;
}

// The kernel of a part of the values' columns, of which each part gives the same lse. `merge`: what adds up segments,
// of a call with batch_invariant whose segments are CTAs.
struct Part {
  std::shared_ptr<const Program> program, merge;
  int64_t first, count;
};

device::FlexForwardArguments arguments_of(const Now& r, const Part& part, const device::FlexPartials& partials) {
  const FlexResults& results = r.call.results;
  device::FlexForwardArguments a{};
  r.fill(a);
  a.value = tensor_of(columns_of(r.value(), part.first, part.count));
  a.value_size = static_cast<int>(part.count);
  a.out = tensor_of(columns_of(results.out, part.first, part.count));
  a.out_low = tensor_of(columns_of(results.out_low, part.first, part.count));
  a.lse = static_cast<float*>(results.lse);
  a.lse_low = static_cast<float*>(results.lse_low);
  a.max_scores = static_cast<float*>(results.max_scores);
  a.max_ties = static_cast<float*>(results.max_ties);
  if (r.of().dropout) a.dropout = dropout_of(r.of());
  a.partials = partials;
  a.together = part.program->launch.together;
  a.tiles = r.tiles(*part.program);
  return a;
}

// The kernels of the backward that may follow, compiled while the forward's is.
void compile_backward(const Now& r, const Asked& asked, const Gpu& gpu) {
  if (r.call.needs_grad.empty()) return;
  const auto plan = plan_backward(backward_after(asked, r.call), gpu);
  for (const auto& program : programs_of(plan))
    jit::compile_ahead(flex_program(program->launch.spec, gpu.architecture).program);
}

}  // namespace

Plan<FlexForwardCall> plan_forward(const Asked& given, const Gpu& gpu) {
  Plan<FlexForwardCall> plan;
  begin_plan(given, plan);
  const Asked asked = narrow_places(given, gpu, plan);
  FlexCase c = forward_case(asked, gpu, plan);
  const auto kernels = [](const FlexCase& of) {
    return of.few_rows == 0 ? std::vector<FlexCase>{of} : std::vector<FlexCase>{};
  };
  take_places(given, gpu, device::PlaceOrder::kQueryRows, kernels, c, plan);
  align_inputs(asked, plan);
  std::vector<Part> parts;
  // Where CTAs of split keys write: outputs, and before them what belongs to them.
  const auto partial_rows = [&](const Program& program) {
    return plan.shape.query_heads() * plan.shape.queries * program.launch.splits;
  };
  const auto partial_cols = [](int64_t count) { return static_cast<int>(tiles_in(count, 4) * 4); };
  // A CTA that has several segments keeps their sum there too.
  const bool keeps = asked.batch_invariant && plan.shape.keys > segment_keys();
  const auto merges = [](const Program& program) {
    return program.launch.splits > 1 || program.launch.spec.facts().key_splits;
  };
  // Persistent CTAs keep what each of their accumulators' threads has, and no rows.
  const auto keeps_by_cta = [=](const Program& program) {
    return keeps && !merges(program) && program.launch.spec.tile().is_hopper();
  };
  const auto bytes_of = [=](const Program& program, int64_t count) -> int64_t {
    const KernelFacts& f = program.launch.spec.facts();
    if (!keeps && !merges(program)) return 0;
    if (keeps_by_cta(program)) return f.tile.hopper().kept_sums ? 0 : 4 * program.launch.ctas * f.tile.rows * f.value;
    return partial_rows(program) * (partial_cols(count) + 4) * 4;
  };
  int64_t partial_bytes = 0, first = 0;
  for (const int count : column_parts(c.value_size, kMostCols)) {
    c.value_size = count;
    FlexShape shape = plan.shape;
    shape.value_size = count;
    const auto make = [&](const FlexCase& of) {
      return make_program(plan_launch(plan_kernel(of, gpu.architecture), shape, plan.mask, gpu.multiprocessors), plan);
    };
    parts.push_back({make(c), nullptr, first, count});
    first += count;
    const Program& program = *parts.back().program;
    if (merges(program) && asked.batch_invariant) parts.back().merge = make(merge_segments_case(c));
    partial_bytes = std::max(partial_bytes, bytes_of(program, count));
  }
  const Region partial = partial_bytes > 0 ? plan.scratch.add("partial outputs", partial_bytes) : kNoRegion;
  add_copies(plan);
  for (const Part& part : parts) {
    const Program& program = *part.program;
    const bool split = merges(program), partials = bytes_of(program, part.count) > 0;
    const bool by_cta = keeps_by_cta(program);
    const auto partials_of = [=, splits = program.launch.splits, cols = partial_cols(part.count),
                              rows = partial_rows(program)](const Now& r) {
      device::FlexPartials p{nullptr, nullptr, splits, cols};
      if (!partials) return p;
      p.rows = r.at<device::FlexPartialRow>(partial);
      p.out = r.at<float>(partial) + (by_cta ? 0 : 4 * rows);
      return p;
    };
    add_lists(plan, part.program);
    const auto used = [&] { return partials ? std::vector<Region>{partial} : std::vector<Region>{}; };
    plan.steps.push_back({program.launch.spec.name(), part.program, used(), [=](Now& r) {
                            const Program& program = *part.program;
                            device::FlexForwardArguments a = arguments_of(r, part, partials_of(r));
                            const auto ahead = [&] { compile_backward(r, given, gpu); };
                            const FlexTile& tile = program.launch.spec.tile();
                            if (tile.is_hopper()) {
                              auto more = r.hopper_forward(program, r.value());
                              r.launch(program, &a, {&more}, ahead);
                            } else if (tile.key_boxes()) {
                              const int keys = tile.cols / tile.warps;
                              device::FlexForwardFewArguments more{boxes_of(r.key(), keys), boxes_of(r.value(), keys)};
                              r.launch(program, &a, {&more}, ahead);
                            } else {
                              r.launch(program, &a, {}, ahead);
                            }
                          }});
    if (!split) continue;
    if (part.merge != nullptr) {
      plan.steps.push_back({part.merge->launch.spec.name(), part.merge, {partial}, [=](Now& r) {
                              device::FlexForwardArguments a = arguments_of(r, part, partials_of(r));
                              r.launch(*part.merge, &a, {});
                            }});
      continue;
    }
    plan.steps.push_back({"flex_merge", nullptr, {partial}, [=, dtype = c.dtype, unscaled = c.unscaled](Now& r) {
                            const auto a = arguments_of(r, part, partials_of(r));
                            flex_merge(a.partials,
                                       {a.out, a.out_low, a.lse, a.max_scores, a.max_ties, a.lse_low, a.value_size,
                                        unscaled ? a.scale : 1.0f, r.of().dropout ? a.dropout.scale : 1.0f},
                                       a.batches, a.heads, a.queries, dtype, r.stream());
                          }});
  }
  plan.scratch.lay_out();
  return plan;
}

}  // namespace fusegrad::cuda
