// The dispatcher keys that every op has alike.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "autograd/inplace.h"

namespace fusegrad {

// What front ends call. They are composite, so autograd needs no kernel here.
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  for (const auto* op : {"cross_entropy", "cross_entropy_", "flex_attention", "jsd", "jsd_", "linear_cross_entropy",
                         "linear_cross_entropy_", "linear_jsd", "linear_jsd_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
  }
}

// The ops below cannot be differentiated: a graph through them (create_graph=True) raises an error with their name.
TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) {
  for (const auto* op :
       {"cross_entropy_forward", "cross_entropy_backward", "cross_entropy_shard_gradient", "flex_attention_forward",
        "flex_attention_backward", "jsd_forward", "linear_cross_entropy_forward", "linear_cross_entropy_backward",
        "linear_jsd_forward", "linear_jsd_backward", "scale_gradient"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(fusegrad, ADInplaceOrView, m) {
  for (const auto* op : {"cross_entropy_forward_", "cross_entropy_shard_gradient_", "flex_attention_backward_",
                         "jsd_forward_", "linear_cross_entropy_forward_", "linear_jsd_forward_", "scale_gradient_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&bump_overwritten>());
  }
}

}  // namespace fusegrad
