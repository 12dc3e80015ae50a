"""What PyTorch's function transforms, forward-mode automatic differentiation and autocast ask of an op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

__all__ = ["as_autocast_wants", "is_transformed", "outside_transforms", "primal_of"]


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is inside a ``torch.func`` transform, or has a forward-mode tangent."""
    in_level = forward_ad._current_level >= 0
    for t in tensors:
        if _functorch.is_functorch_wrapped_tensor(t):
            return True
        if in_level and forward_ad.unpack_dual(t).tangent is not None:
            return True
    return False


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """A context in which no ``torch.func`` transform is active: for work on tensors that are none of the transform's,
    such as tracing a function with symbolic ones."""
    if _functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def primal_of(tensor: Tensor) -> Tensor:
    """Without the forward-mode tangent of the present level."""
    return forward_ad.unpack_dual(tensor).primal if forward_ad._current_level >= 0 else tensor


def as_autocast_wants(t: Tensor) -> Tensor:
    """In autocast's dtype, where it is on and casts such a tensor."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t if t.element_size() == 1 else t.to(torch.get_autocast_dtype(kind))
