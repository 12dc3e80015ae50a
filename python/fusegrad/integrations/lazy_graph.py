"""The nodes of the autograd graph around logits that are not computed.

A lazy tensor is the output of :class:`Placeholder`. Whatever else of the graph stands between the head and a loss, a
custom Function or a hook, must see the gradient: :class:`Link` and :class:`Through` lead it there, and so does
:class:`Rewire` where the logits were computed first.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["Link", "Placeholder", "Rewire", "Through", "Tie", "is_own", "is_timing", "passes_gradients"]


class Placeholder(torch.autograd.Function):
    """Ties a lazy tensor to the graph: a gradient by the logits themselves goes where it would have gone."""

    @staticmethod
    def forward(ctx: Any, kind: Any, lazy: Any, *tensors: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        # What is there to compute, whose tensors are checked for writes when they are used. Not the record itself: its
        # link holds this node, and a cycle through nodes is never collected.
        ctx.lazy, ctx.owner = copy.copy(lazy), weakref.ref(lazy)
        return Tensor._make_wrapper_subclass(kind, lazy.shape, dtype=lazy.dtype, device=lazy.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        record = ctx.owner() or ctx.lazy
        record.warn_of("a gradient by them")
        if any(r.watched for r, _ in record._line()):
            raise RuntimeError(
                "LazyLogits: a custom Function must get logits to which nothing was attached, but a hook or a change "
                "of their graph was: give it their materialize()"
            )
        wanted = ctx.needs_input_grad[2:]
        tensors = [None if t is None else t.detach() for t in ctx.lazy._operands()]
        leaves = [t.requires_grad_() for t, wants in zip(tensors, wanted, strict=True) if wants and t is not None]
        with torch.enable_grad():
            value = ctx.lazy._compute(*tensors)
        made = iter(torch.autograd.grad(value, leaves, grad))
        return None, None, *(next(made) if wants else None for wants in wanted)


def _refuse_node_hooks(kind: Any) -> None:
    """A loss without the logits has no gradient that a hook of their node could be given."""

    def refused(name: str) -> Any:
        def method(node: Any, *_: Any) -> Any:
            raise NotImplementedError(
                f"LazyLogits: grad_fn.{name} must be called of computed logits, but got those of "
                f"{type(node).__name__}, which a loss may do without: call their materialize() first, or give the hook "
                "to the logits (register_hook)"
            )

        return method

    for name in ("register_hook", "register_prehook"):
        setattr(kind._backward_cls, name, refused(name))


_refuse_node_hooks(Placeholder)


class Link(torch.autograd.Function):
    """A tensor without memory in a lazy tensor's place in the graph, as it is now."""

    @staticmethod
    def forward(ctx: Any, lazy: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, device = lazy.shape, lazy.dtype, lazy.device
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class Through(torch.autograd.Function):
    """Computed logits whose gradient is that of a link."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


class Rewire(torch.autograd.Function):
    """A lazy tensor whose gradient is that of its computed value from here on, and of the hooks there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, lazy: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        ctx.owner = weakref.ref(lazy)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, None]:
        return None, grad, None


class Tie(torch.autograd.Function):
    """A loss that was computed without the links' logits, in whose backward their nodes and hooks run all the same,
    without a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *links: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in ctx.needs_input_grad[1:])


def is_own(node: Any, lazy: Any) -> bool:
    """Whether a node is the one that a lazy tensor was given with its record."""
    owner = getattr(node, "owner", None)
    return node is None or (isinstance(owner, weakref.ref) and owner() is lazy)


def passes_gradients(node: Any) -> bool:
    """Whether a node hands on gradients, None too, as they are: DDP's around a model's outputs, which is there for
    the time at which it runs."""
    kind = getattr(type(node), "_forward_cls", None)
    return kind is not None and (kind.__module__, kind.__name__) == ("torch.nn.parallel.distributed", "_DDPSink")


def is_timing(hook: Any) -> bool:
    """Whether a tensor's hook is there for the time at which it runs, and neither reads nor changes the gradient:
    FSDP's that gathers parameters before a backward, Fabric's that asks whether the backward is Fabric's."""
    hook = getattr(hook, "func", hook)
    module = getattr(hook, "__module__", None) or ""
    return module.startswith(("torch.distributed.fsdp.", "lightning.fabric.", "lightning_fabric."))
