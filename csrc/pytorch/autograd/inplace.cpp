#include "pytorch/autograd/inplace.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pytorch/ops/check.h"
#include "pytorch/ops/faults.h"

namespace fusegrad {
namespace {

constexpr c10::DispatchKeySet kTransformKeys({c10::DispatchKey::FuncTorchBatched,
                                              c10::DispatchKey::FuncTorchGradWrapper,
                                              c10::DispatchKey::FuncTorchVmapMode});

// Rows of a [.., C] tensor can be written by the kernels: the last dimension is dense, and the others are as if
// contiguous, but for a free row stride of a matrix. No two of its elements share memory then.
bool rows_writable(const at::Tensor& tensor) {
  if (tensor.dim() == 2) {
    return tensor.sym_stride(1) == 1 && tensor.sym_stride(0) >= tensor.sym_size(1);
  }
  return tensor.is_contiguous();
}

// Raises where `tensor` shares elements with `other`. False where that cannot be decided: the two share a storage,
// and ATen cannot say or sizes are symbolic (torch.compile, dynamic shapes).
bool surely_apart(const at::Tensor& tensor, const at::Tensor& other) {
  if (!tensor.is_alias_of(other)) return true;
  const bool symbolic = tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
                        other.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  if (symbolic) return false;
  at::assert_no_overlap(tensor, other);
  return at::get_overlap_status(tensor, other) != at::MemOverlapStatus::TooHard;
}

bool autograd_allows(const at::Tensor& tensor, at::ArrayRef<const at::Tensor*> arguments) {
  if (!at::GradMode::is_enabled() || tensor.is_inference() || !tensor.requires_grad()) return false;
  torch::autograd::check_inplace(tensor, /*requires_grad=*/true);
  at::assert_no_internal_overlap(tensor);
  bool decidable = true;
  for (const auto* other : arguments) {
    if (other != &tensor) decidable &= surely_apart(tensor, *other);
  }
  // AOTAutograd does not check the versions of what a custom Function saved, so a write could go unseen; without one
  // memory is the compiler's matter.
  return decidable && !saved_tensor_hooks_active() && !is_traced(tensor);
}

// Strides grow so fast that no two elements can share memory.
bool elements_apart(const at::Tensor& tensor) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.sym_size(d) != 1) dims.push_back(d);
  }
  std::sort(dims.begin(), dims.end(),
            [&](int64_t a, int64_t b) { return tensor.sym_stride(a) < tensor.sym_stride(b); });
  c10::SymInt extent = 1;
  for (const int64_t d : dims) {
    if (tensor.sym_stride(d) < extent) return false;
    extent = extent + tensor.sym_stride(d) * (tensor.sym_size(d) - 1);
  }
  return true;
}

// fusegrad::flex_attention_backward_ as its users know it.
std::string front_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  name.erase(0, name.find("::") + 2);
  if (name.back() == '_') name.pop_back();
  const auto backward = name.rfind("_backward");
  return backward == std::string::npos ? name : name.substr(0, backward);
}

// Passes a gradient on; its own backward raises.
struct RefuseDoubleBackward : torch::autograd::Function<RefuseDoubleBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gradient,
                            at::TensorList /*inputs: edges only*/, const std::string& op) {
    ctx->saved_data["op"] = op;
    return gradient.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& /*grads*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, ctx->saved_data["op"].toStringRef(),
                                ": the gradient must not be differentiated a second time, but a double backward "
                                "reached it");
  }
};

}  // namespace

bool is_traced(const at::Tensor& tensor) {
  return tensor.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

bool saved_tensor_hooks_active() { return at::SavedTensorDefaultHooks::get_hooks().has_value(); }

bool may_overwrite(const at::Tensor& tensor, at::ArrayRef<const at::Tensor*> arguments) {
  return autograd_allows(tensor, arguments) && rows_writable(tensor);
}

bool may_overwrite_strided(const at::Tensor& tensor, at::ArrayRef<const at::Tensor*> arguments) {
  return autograd_allows(tensor, arguments) && elements_apart(tensor);
}

void check_may_add_to(const char* op, const char* name, const at::Tensor& tensor,
                      at::ArrayRef<const at::Tensor*> arguments) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_traced(tensor), op, ": ", name,
                              " must not come into a compiler's graph, which does not see that a backward writes to "
                              "it, but it does");
  FUSEGRAD_CHECK_VALUE(tensor.is_contiguous(), op, name, " must be contiguous, but got strides ", tensor.strides());
  FUSEGRAD_CHECK_VALUE(!tensor.requires_grad(), op, name, " must not require grad, but got a tensor that does");
  FUSEGRAD_CHECK_VALUE(!tensor.is_inference(), op, name,
                       " must have a version counter, but got a tensor that was made in inference mode");
  for (const auto* other : arguments) {
    if (other->is_same(tensor)) continue;
    const bool apart =
        !tensor.is_alias_of(*other) || at::get_overlap_status(tensor, *other) == at::MemOverlapStatus::No;
    FUSEGRAD_CHECK_VALUE(apart, op, name, " must not share memory with another argument, but it does");
  }
}

bool may_reuse_saved(const at::Tensor& saved, bool hooks_were_active) {
  // Without a node that the engine runs, as in compiled autograd, upstream nodes may have unpacked what they saved, and
  // checked its version, before this one.
  return !hooks_were_active && !at::GradMode::is_enabled() && torch::autograd::get_current_node() &&
         !torch::autograd::get_current_graph_task_keep_graph() && !c10::impl::dispatch_mode_enabled() &&
         !saved.key_set().has(c10::DispatchKey::Python) && !saved.key_set().has_any(kTransformKeys) &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::VmapMode);  // is_grads_batched's own
}

at::Tensor refuse_double_backward(const char* op, const at::Tensor& gradient, at::TensorList inputs) {
  if (!gradient.defined() || !at::GradMode::is_enabled()) return gradient;
  return RefuseDoubleBackward::apply(gradient, inputs, std::string(op));
}

bool is_transformed(at::ArrayRef<const at::Tensor*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) {
    return tensor->key_set().has_any(kTransformKeys) || tensor->_fw_grad(/*level=*/0).defined();
  });
}

void refuse_transforms(const char* op, at::ArrayRef<const at::Tensor*> tensors) {
  for (const auto* tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor->key_set().has_any(kTransformKeys), op,
                                ": torch.func transforms (grad, vjp, vmap, ...) must not be applied, but one is "
                                "active; use torch.autograd");
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor->_fw_grad(/*level=*/0).defined(), op,
                                ": inputs must not carry forward-mode tangents, but one does; only reverse-mode "
                                "gradients are implemented");
  }
}

void bump_overwritten(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  c10::SmallVector<at::Tensor, 2> overwritten;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    const auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      overwritten.push_back(value.toTensor());
    } else if (!value.isNone()) {
      for (const auto& tensor : value.toTensorVector()) overwritten.push_back(tensor);
    }
  }
  const auto raise_versions = [&] {
    for (const auto& tensor : overwritten) torch::autograd::increment_version(tensor);
  };
  const OverwriteScope scope;
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  } catch (...) {
    if (scope.overwritten() != nullptr) raise_versions();
    throw;
  }
  raise_versions();
}

void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, front_name(op),
                              ": torch.vmap must not be applied, but it is; the op takes batch dimensions itself");
}

void refuse_batched_gradient(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, front_name(op),
                              ": the upstream gradient must not be batched (is_grads_batched=True, vmap over a "
                              "backward), but got a batched one: run one backward for each");
}

std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  // Devices without autocast (meta tensors) may not even be asked.
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return std::nullopt;
  return at::autocast::get_autocast_dtype(device);
}

void check_differentiable_outputs(const char* op, const torch::autograd::variable_list& grads, size_t count) {
  for (size_t i = count; i < grads.size(); ++i) {
    TORCH_CHECK(!grads[i].defined(), op, ": output ", i, " must not be differentiated, but it received a gradient");
  }
}

}  // namespace fusegrad
