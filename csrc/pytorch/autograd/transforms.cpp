#include "pytorch/autograd/transforms.h"

#include <ATen/functorch/DynamicLayer.h>

namespace fusegrad {
namespace {

template <class Change>
void change_innermost(Change&& change) {
  auto layers = at::functorch::getDynamicLayerStack();
  change(layers.back().interpreter());
  at::functorch::setDynamicLayerStack(layers);
}

}  // namespace

AboveTransforms::AboveTransforms() {
  constexpr auto kFront = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  if (at::functorch::getDynamicLayerStack().empty() || !c10::impl::tls_is_dispatch_key_excluded(kFront)) return;
  // Ops of this level save the keys themselves, once at a time.
  change_innermost([&](at::functorch::Interpreter& innermost) {
    saved_ = innermost.getSavedLocalDispatchKeySet();
    innermost.clearSavedLocalDispatchKeySet();
  });
  guard_.emplace(*saved_);
}

AboveTransforms::~AboveTransforms() {
  if (!saved_) return;
  guard_.reset();
  change_innermost([&](at::functorch::Interpreter& innermost) { innermost.saveLocalDispatchKeySet(*saved_); });
}

}  // namespace fusegrad
