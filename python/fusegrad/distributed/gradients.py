"""What autograd Functions of calls that processes share have alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.fusegrad


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def on_meta(tensor: Any, shape: Any = None) -> Any:
    """A tensor without data for the unsharded op to check; anything else as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    made = torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def refuse_double_backward(
    op: str, made: Iterable[Tensor | None], inputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients, each as one that raises where it is differentiated again."""
    known = [tensor for tensor in inputs if tensor is not None]
    return [None if gradient is None else _ops.refuse_double_backward(op, gradient, known) for gradient in made]
