// linear_log_prob_forward: linear_log_prob as engines call it, without a graph.
#include <torch/library.h>

#include "fusegrad/linear_cross_entropy.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/ops/renamed.h"

namespace fusegrad {
namespace {

using at::Tensor;
using LogProbTuple = std::tuple<Tensor, Tensor, Tensor>;

Tensor values_like(const LinearLogProbForward& call) {
  const auto acc = acc_type(call.input.scalar_type());
  return at::empty_symint(call.target.sym_sizes(), call.input.options().dtype(acc).requires_grad(false));
}

Tensor nothing_like(const Tensor& values) { return at::empty({0}, values.options()); }

LogProbTuple forward_without_graph(const LinearLogProbForward& call) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_graph;
  auto options = LinearCrossEntropyOptions()
                     .linear_bias(call.linear_bias)
                     .ignore_index(call.ignore_index)
                     .reduction("none")
                     .softcap(call.softcap)
                     .logit_scale(call.logit_scale)
                     .row_scale(call.row_scale)
                     .workspace_mib(call.workspace_mib)
                     .batch_invariant(call.batch_invariant);
  const auto& shards = call.shards;
  if (shards) {
    options.vocab_parallel(VocabParallel().group(shards.group).rank(shards.rank).bounds(shards.bounds));
  }
  const auto aux = errors_name("linear_log_prob_forward", "linear_cross_entropy", [&] {
    return linear_cross_entropy_with_aux(call.input, call.linear_weight, call.target, options,
                                         Aux().lse(true).token_log_prob(true).entropy(call.return_entropy))
        .aux;
  });
  // Two are rows of one tensor, and outputs of an op must not alias.
  return {aux.token_log_prob.clone(), call.return_entropy ? aux.entropy.clone() : nothing_like(aux.lse), aux.lse};
}

LogProbTuple linear_log_prob_forward_meta(const LinearLogProbForward& call) {
  const auto values = values_like(call);
  return {values, call.return_entropy ? values_like(call) : nothing_like(values), values_like(call)};
}

}  // namespace

LogProbForward linear_log_prob_forward(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                       const LinearLogProbOptions& options) {
  static const Op<LinearLogProbForward, LogProbTuple> op("fusegrad::linear_log_prob_forward");
  FUSEGRAD_CHECK_VALUE(!options.support() && !options.grad_weight_into(), "linear_log_prob_forward",
                       "support and grad_weight_into must be absent, but got one");
  const at::AutoDispatchBelowADInplaceOrView below;
  auto [log_prob, entropy, lse] = op({.input = input,
                                      .linear_weight = linear_weight,
                                      .target = target,
                                      .linear_bias = options.linear_bias(),
                                      .ignore_index = options.ignore_index(),
                                      .softcap = options.softcap(),
                                      .logit_scale = options.logit_scale(),
                                      .row_scale = options.row_scale(),
                                      .workspace_mib = options.workspace_mib(),
                                      .return_entropy = options.return_entropy(),
                                      .batch_invariant = options.batch_invariant().value_or(true),
                                      .shards = {}});
  return {log_prob, options.return_entropy() ? entropy : Tensor(), lse};
}

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { m.impl("linear_log_prob_forward", TORCH_FN(unpacked<forward_without_graph>())); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("linear_log_prob_forward", TORCH_FN(unpacked<forward_without_graph>()));
}
#endif
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("linear_log_prob_forward", TORCH_FN(unpacked<linear_log_prob_forward_meta>()));
}

}  // namespace fusegrad
