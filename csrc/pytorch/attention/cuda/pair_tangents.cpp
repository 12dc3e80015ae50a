// Second derivatives of flex attention on CUDA: what pairs give to products of matrices, by one kernel.
#include <ATen/DeviceGuard.h>

#include <algorithm>

#include "cuda/attention/pair_tangents/arguments.cuh"
#include "cuda/attention/plan/plan.h"
#include "pytorch/attention/cuda/aligned_rows.h"
#include "pytorch/attention/cuda/call.h"
#include "pytorch/attention/cuda/flex_attention.h"
#include "pytorch/gpu.h"

namespace fusegrad::cuda {

using at::Tensor;

void flex_attention_pair_tangents(const FlexPairTangentsCall& call, const FlexScores& scores,
                                  const FlexPairTangentsResults& results) {
  const c10::DeviceGuard guard(call.query.device());
  const bool of_grad_out = call.grad_out_tangent.defined();
  if (!scores.kv_blocks.empty()) {
    for (const Tensor& t : {results.weights, results.gradients, results.seen}) t.zero_();
  }
  FlexCall flex(call.query, call.key, call.value, scores);
  FlexCase c = flex.common();
  c.kernel = FlexKernel::kPairTangents;
  c.grad_out_tangent = of_grad_out;
  c.wants_grad.assign(scores.score_mod.buffers.size(), false);
  for (const Tensor& t : scores.score_mod.buffers) c.elements.push_back(t.numel());
  LaunchPlan plan = flex.plan(c);
  const int rows = plan.spec.tile().rows;  // 128 is a multiple
  // CTAs end at different times: a GPU has many of them, one after the other.
  constexpr int64_t kWaves = 8, kLeastTiles = 4;
  const int64_t units = call.head_count * tiles_in(call.row_count, rows);
  const int64_t most = tiles_in(tiles_in(call.key.size(2), plan.spec.tile().cols), kLeastTiles);
  const int64_t splits = std::clamp(tiles_in(kWaves * gpu::multiprocessors(), units), int64_t{1}, most);
  plan.ctas = units * splits;
  check_ctas(plan.ctas);

  const Tensor grad_out = with_aligned_rows(call.grad_out), of_query = with_aligned_rows(call.query_tangent),
               of_key = with_aligned_rows(call.key_tangent), of_value = with_aligned_rows(call.value_tangent),
               of_out = of_grad_out ? with_aligned_rows(call.grad_out_tangent) : Tensor();
  device::FlexPairTangentsArguments a{};
  flex.fill(a);
  a.grad_out = view(grad_out);
  a.query_tangent = view(of_query);
  a.key_tangent = view(of_key);
  a.value_tangent = view(of_value);
  a.grad_out_tangent = view(of_out);
  a.rows = reinterpret_cast<const device::FlexPairRow*>(call.rows.const_data_ptr<float>());
  a.score_tangent = call.score_tangent.defined() ? call.score_tangent.const_data_ptr<float>() : nullptr;
  a.weights = results.weights.mutable_data_ptr();
  a.gradients = results.gradients.mutable_data_ptr();
  a.seen = results.seen.mutable_data_ptr<uint8_t>();
  a.first_head = static_cast<int>(call.first_head);
  a.head_count = static_cast<int>(call.head_count);
  a.first_row = static_cast<int>(call.first_row);
  a.row_count = static_cast<int>(call.row_count);
  a.splits = static_cast<int>(splits);
  a.columns = static_cast<int>(results.gradients.size(3));
  const FlexCall::Lists lists = flex.lists(plan);
  a.tiles = lists.tiles;
  flex.launch(plan, &a, {});
}

}  // namespace fusegrad::cuda
