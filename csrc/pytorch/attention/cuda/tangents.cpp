// Forward mode of flex attention on CUDA: one kernel for each part of the values' columns.
#include <ATen/DeviceGuard.h>

#include "cuda/attention/plan/plan.h"
#include "cuda/attention/tangents/arguments.cuh"
#include "pytorch/attention/cuda/aligned_rows.h"
#include "pytorch/attention/cuda/call.h"
#include "pytorch/attention/cuda/flex_attention.h"
#include "pytorch/attention/outputs.h"
#include "pytorch/score_mod/tensors.h"
#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

using at::Tensor;

// What the score_mod's tangent captures: the score_mod's buffers, behind them their tangents, and its numbers.
struct TangentMod {
  std::vector<bool> has_tangent;
  bool small_buffers = true;
  std::vector<int64_t> words{0};

  TangentMod(const ScoreMod& mod, const FlexInputTangents& tangents) : has_tangent(mod.buffers.size(), false) {
    for (const int64_t i : tangents.with_tangent) has_tangent[static_cast<size_t>(i)] = true;
    if (mod.text.empty()) return;
    std::vector<Tensor> buffers = mod.buffers;
    buffers.insert(buffers.end(), tangents.buffers.begin(), tangents.buffers.end());
    const score_mod::CapturedTensors captured(buffers, mod.scalars);
    small_buffers = score_mod::small_buffers(captured.buffers());
    words = score_mod::pack_captured(*score_mod::cached_tangent(mod.text, has_tangent), captured.buffers(),
                                     captured.scalars());
  }
};

Tensor aligned(const Tensor& t) { return t.defined() ? with_aligned_rows(t) : t; }
Tensor columns(const Tensor& t, int64_t first, int64_t count) { return t.defined() ? t.narrow(3, first, count) : t; }

}  // namespace

FlexTangentTuple flex_attention_jvp(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const FlexInputTangents& tangents, const FlexScores& scores, int64_t aux) {
  const c10::DeviceGuard guard(query.device());
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux), results = empty_flex_outputs(query, value, 0);
  const FlexTangentTuple found{outputs.out, outputs.lse, results.out, results.lse, outputs.out_low, outputs.lse_low};
  if (outputs.lse.numel() == 0) return found;
  if (key.numel() == 0) {
    for (const Tensor& t : {outputs.out, outputs.out_low, outputs.lse_low, results.out, results.lse}) t.zero_();
    outputs.lse.fill_(-INFINITY);
    return found;
  }
  TangentMod mod(scores.score_mod, tangents);
  const Tensor of_query = aligned(tangents.query), of_key = aligned(tangents.key);
  int64_t first = 0;
  for (const int64_t count : tangents_parts(static_cast<int>(value.size(3)))) {
    const Tensor of_value = aligned(columns(tangents.value, first, count));
    FlexCall call(query, key, columns(value, first, count), scores);
    FlexCase c = call.common();
    c.kernel = FlexKernel::kTangents;
    c.unscaled = scores.score_mod.text.empty() && scores.scale > 0;
    c.out_low = outputs.out_low.numel() != 0;
    c.tangents_of = {of_query.defined(), of_key.defined(), of_value.defined(), mod.has_tangent, mod.small_buffers};
    const LaunchPlan plan = call.plan(c);
    device::FlexTangentsArguments a{};
    call.fill(a);
    a.out = view(columns(outputs.out, first, count));
    if (c.out_low) a.out_low = view(columns(outputs.out_low, first, count));
    a.out_tangent = view(columns(results.out, first, count));
    a.query_tangent = view(of_query);
    a.key_tangent = view(of_key);
    a.value_tangent = view(of_value);
    a.lse = outputs.lse.mutable_data_ptr<float>();
    if (outputs.lse_low.numel() != 0) a.lse_low = outputs.lse_low.mutable_data_ptr<float>();
    a.lse_tangent = results.lse.mutable_data_ptr<float>();
    if (c.dropout) a.dropout = dropout_of(scores.dropout_seed, scores.dropout_p);
    const FlexCall::Lists lists = call.lists(plan);
    a.tiles = lists.tiles;
    std::vector<void*> more{mod.words.data()};
    device::FlexTangentsHopperArguments hopper{};
    if (plan.spec.facts().hopper()) {
      hopper = call.hopper_tangents(plan, lists, of_query, of_key, of_value);
      more.push_back(&hopper);
    }
    call.launch(plan, &a, more);
    first += count;
  }
  return found;
}

}  // namespace fusegrad::cuda
