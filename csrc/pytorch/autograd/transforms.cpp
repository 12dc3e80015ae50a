#include "pytorch/autograd/transforms.h"

#include <ATen/ATen.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/TensorWrapper.h>

#include <algorithm>

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

int64_t running_level() {
  const auto layer = at::functorch::maybeCurrentDynamicLayer();
  TORCH_INTERNAL_ASSERT(layer.has_value());
  return layer->layerId();
}

bool within_functorch(at::ArrayRef<at::Tensor> tensors) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  return at::functorch::maybeCurrentDynamicLayer().has_value() ||
         std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& t) { return t.defined() && t.key_set().has_any(kWrapped); });
}

ReverseLevel::ReverseLevel(bool graph_outside)
    : level_(at::functorch::initAndPushDynamicLayer(at::functorch::TransformType::Grad, std::nullopt, std::nullopt,
                                                    graph_outside)) {}

ReverseLevel::~ReverseLevel() { at::functorch::popDynamicLayerAndDeleteMetadata(); }

at::Tensor ReverseLevel::variable(at::Tensor tensor) const {
  while (at::functorch::isDeadTensorWrapper(tensor)) tensor = at::functorch::unwrapIfDead(tensor);
  return at::functorch::makeTensorWrapper(tensor, level_).requires_grad_();
}

at::Tensor ReverseLevel::outside(const at::Tensor& tensor) const {
  const auto* wrapper = at::functorch::maybeGetTensorWrapper(tensor);
  return wrapper != nullptr && wrapper->level() == level_ ? wrapper->value() : tensor;
}

}  // namespace fusegrad
