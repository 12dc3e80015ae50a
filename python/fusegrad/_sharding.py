"""What the ops know of processes that share a call. fusegrad.distributed computes such calls, and registers itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["ContextParallel", "VocabParallel", "attend", "is_dtensor", "loss", "register"]


class VocabParallel:
    """Of :class:`fusegrad.VocabParallel`."""


class ContextParallel:
    """Of :class:`fusegrad.ContextParallel`."""


_registered: dict[str, Callable[..., Any]] = {}


def register(*, loss: Callable[..., Any], attend: Callable[..., Any]) -> None:
    """What the functions below call."""
    _registered.update(loss=loss, attend=attend)


def loss(op: str, arguments: tuple[Any, ...], inplace: bool, shards: VocabParallel | None) -> Any:
    """A loss over a sharded vocabulary: the outputs of the op, of its arguments."""
    return _registered["loss"](op, arguments, inplace, shards)


def attend(*arguments: Any, context: ContextParallel | None, **options: Any) -> Any:
    """flex_attention over a sharded sequence: out, lse, max_scores."""
    return _registered["attend"](*arguments, context=context, **options)


def is_dtensor(*tensors: Any) -> bool:
    """Whether one of them is a torch.distributed.tensor.DTensor; without that module none can be, and it is slow to
    import."""
    for tensor in tensors:
        if type(tensor) is not Tensor:
            # While another thread imports it, the module is there and has no such class yet.
            kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
            return kind is not None and any(isinstance(t, kind) for t in tensors)
    return False
