"""What PyTorch's function transforms, forward-mode automatic differentiation and autocast ask of an op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

__all__ = [
    "as_autocast_wants",
    "back_in",
    "differentiated",
    "is_transformed",
    "outside_transforms",
    "primal_of",
    "unwrapped",
]


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is inside a ``torch.func`` transform, or has a forward-mode tangent."""
    in_level = forward_ad._current_level >= 0
    for t in tensors:
        if _functorch.is_functorch_wrapped_tensor(t):
            return True
        if in_level and forward_ad.unpack_dual(t).tangent is not None:
            return True
    return False


def unwrapped(tensor: Tensor) -> Tensor:
    """Below all levels of ``torch.func``."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def differentiated(tensor: Tensor) -> bool:
    """Whether a derivative by the tensor may be taken, at any level: requires_grad alone says what the innermost
    ``torch.func.grad`` does, nothing of a vmap within one, or of forward mode."""
    if tensor.requires_grad:
        return True
    if not tensor.is_floating_point():
        return False
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad or _functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad or (forward_ad._current_level >= 0 and _has_tangent(tensor))


def _has_tangent(tensor: Tensor) -> bool:
    # Within __torch_dispatch__ the keys that unpack are excluded.
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.AutogradFunctionality):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return forward_ad.unpack_dual(tensor).tangent is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """A context in which no ``torch.func`` transform is active: for work on tensors that are none of the transform's,
    such as running a function with symbolic ones. What it yields is for back_in."""
    if _functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def back_in(transforms: Any) -> contextlib.AbstractContextManager[None]:
    """A context with the transforms that outside_transforms put aside."""
    if transforms is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_restore_interpreter_stack

    return temporarily_restore_interpreter_stack(transforms)


def primal_of(tensor: Tensor) -> Tensor:
    """Without the forward-mode tangent of the present level."""
    return forward_ad.unpack_dual(tensor).primal if forward_ad._current_level >= 0 else tensor


def as_autocast_wants(t: Tensor) -> Tensor:
    """In autocast's dtype, where it is on and casts such a tensor."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t if t.element_size() == 1 else t.to(torch.get_autocast_dtype(kind))
