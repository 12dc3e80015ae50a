// The dispatcher keys that every op has alike.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "pytorch/autograd/inplace.h"

namespace fusegrad {
namespace {

// Functorch can make no batching rule for backwards that return a list of tensors, nor for those that add to one
// tensor.
void refuse_batched_gradients(torch::Library& m) {
  for (const auto* op : {"flex_attention_backward_", "linear_cross_entropy_backward_into",
                         "linear_cross_entropy_backward_into_", "support_logits_backward_into"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_batched_gradient>());
  }
}

}  // namespace

// What front ends call. They are composite, so autograd needs no kernel here.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  m.impl("flex_attention", torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
}

// torch.vmap has the first key, is_grads_batched the second. flex_attention_backward's rules are in
// fusegrad/_attention_transforms.py and in flex_attention.cpp.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) { refuse_batched_gradients(m); }
TORCH_LIBRARY_IMPL(fusegrad, Batched, m) { refuse_batched_gradients(m); }

// The ops below cannot be differentiated: a graph through them (create_graph=True) raises an error with their name.
// Not those that mutate: this kernel would skip the one that raises versions.
TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) {
  for (const auto* op :
       {"cross_entropy_forward", "cross_entropy_backward", "flex_attention_forward", "flex_attention_backward",
        "flex_attention_dropout_mask", "flex_attention_jvp", "jsd_forward", "linear_cross_entropy_forward",
        "linear_cross_entropy_backward", "linear_cross_entropy_second", "linear_jsd_forward", "linear_jsd_backward",
        "linear_log_prob_forward", "pair_projection_forward", "pair_projection_backward", "refuse_gradient",
        "scale_gradient", "support_logits", "support_logits_backward"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(fusegrad, ADInplaceOrView, m) {
  for (const auto* op :
       {"cross_entropy_forward_", "flex_attention_backward_", "flex_attention_merge_", "jsd_forward_",
        "linear_cross_entropy_backward_", "linear_cross_entropy_backward_into", "linear_cross_entropy_backward_into_",
        "linear_cross_entropy_forward_", "linear_jsd_forward_", "scale_gradient_", "support_logits_backward_into"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&bump_overwritten>());
  }
}

}  // namespace fusegrad
