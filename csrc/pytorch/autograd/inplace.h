// The gradient contract, once: when an op may write into an input, what it checks before, how the write is made
// known to autograd, and what a backward may do with its own buffers. Every op uses these; none has its own.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace fusegrad {

/// May `op` overwrite `tensor` now? False, quietly, where autograd could not notice or nothing is gained:
/// gradients disabled, no gradient wanted, an inference tensor, saved-tensor hooks active, a trace, a layout that rows
/// cannot be written in, an overlap that PyTorch cannot decide. Raises PyTorch's own errors where the write would
/// corrupt: a leaf that requires grad, a view of one, a view made under no_grad or by unbind/split, an expanded
/// tensor, an overlap with another one of the call's `arguments`, of which it is one. Nothing has been written then.
bool may_overwrite(const at::Tensor& tensor, at::ArrayRef<const at::Tensor*> arguments);

/// The same for an op that writes tensors of any strides.
bool may_overwrite_strided(const at::Tensor& tensor, at::ArrayRef<const at::Tensor*> arguments);

/// Raises unless a backward may add to `tensor`, an argument `name` of `op`: contiguous, without requiring grad, with a
/// version counter, of memory that none of the call's other `arguments` shares, in no compiler's graph.
void check_may_add_to(const char* op, const char* name, const at::Tensor& tensor,
                      at::ArrayRef<const at::Tensor*> arguments);

/// Saved-tensor hooks (save_on_cpu, activation checkpointing) are active: what is saved may be somebody else's.
bool saved_tensor_hooks_active();

/// In backward: may the buffer that the forward saved be overwritten with this gradient? Only in the last backward
/// (the graph is not kept), with gradients off, no hook active when it was saved, no mode, subclass or transform
/// (batched gradients are a transform).
bool may_reuse_saved(const at::Tensor& saved, bool hooks_were_active);

/// `gradient` as the result of a backward that cannot be differentiated: where a graph of the backward is recorded
/// (create_graph=True), differentiating through it raises an error that names the op. `inputs` are the forward's.
at::Tensor refuse_double_backward(const char* op, const at::Tensor& gradient, at::TensorList inputs);

/// Whether one of the tensors carries a forward-mode tangent or belongs to a functorch transform.
bool is_transformed(at::ArrayRef<const at::Tensor*> tensors);

/// Raises where one of them does.
void refuse_transforms(const char* op, at::ArrayRef<const at::Tensor*> tensors);

/// Kernel at ADInplaceOrView of every op that mutates: runs the op below, then raises the version counter of each
/// argument that its schema marks (a!), also where the op fails after it began to write (begin_overwriting,
/// pytorch/ops/faults.h). Without it a mutated argument that is not returned keeps its version.
void bump_overwritten(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Kernel at FuncTorchBatched of every op that front ends call: vmap raises an error that names the op.
void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Kernel at FuncTorchBatched of backwards without a batching rule, which functorch could not make one for.
void refuse_batched_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// A compiler traces what is done with the tensor (torch.compile, torch.export): it is a wrapper.
bool is_traced(const at::Tensor& tensor);

/// The dtype that autocast wants for matmuls on this device; nothing where autocast is off.
std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor);

/// Raises unless only outputs [0, count) of `op` received an upstream gradient.
void check_differentiable_outputs(const char* op, const torch::autograd::variable_list& grads, size_t count);

}  // namespace fusegrad
