"""Attention over rows that processes share, as triangle attention's: each has its rows of query, key and value, and all
of them read one bias. Its gradient is a sum over all rows, so over all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import checked
from .._eager import eager_only
from .gradients import acc_of, refuse_double_backward
from .shards import KeptGroup, agree, is_dtensor, process_group

__all__ = ["gather_bias", "whole_bias"]


class _Group:
    group = KeptGroup()

    def __init__(self, op: str, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{op}: torch.distributed must be initialised (torch.distributed.init_process_group), but got no "
                "default group"
            )
        self.group = process_group(op, group)
        self.world, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)


@checked
@eager_only
def whole_bias(bias: Tensor, group: Any = None) -> Tensor:
    """A bias that all processes of a group have, for attention over this process's rows: its gradient is the sum of
    theirs, the same in all of them.

    ``fusegrad.triangle_attention(q, k, v, whole_bias(bias, group))`` with this process's ``q``, ``k``, ``v``
    ``[B, rows, H, Q, D]`` has the rows of the call with all rows, and its bias the gradient of that call. All processes
    must make the call and its backward.

    Args:
        bias: the same in all processes.
        group: a process group that this process belongs to, a device mesh of one dimension, or None: all processes.

    Returns:
        The bias; of 16 bits in float32, so that its gradient is summed there and rounded once.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError, TypeError: in all processes, where shapes, dtypes or what requires grad differ.
    """
    of = _Group("whole_bias", group)
    different = _check("whole_bias", bias, of, {"shape": list(bias.shape)})
    return bias if of.world == 1 else _Whole.apply(bias, of, different)


@checked
@eager_only
def gather_bias(bias: Tensor, group: Any = None, *, dim: int = -2, sizes: Sequence[int] | None = None) -> Tensor:
    """The whole bias, of which each process has a part along a dimension, as it makes it of its own rows of pairs. A
    part's gradient is the sum of what all processes' rows contribute to it.

    Args:
        bias: this process's part; the parts in the order of the ranks are the whole.
        group: as of :func:`whole_bias`.
        dim: which dimension; that of the queries by default, ``[B, 1, H, Q, K]``.
        sizes: of all parts, in the order of the ranks; None: all as large as this one.

    Returns:
        The whole; of 16 bits in float32, as of :func:`whole_bias`.

    Raises:
        RuntimeError, ValueError, TypeError: as :func:`whole_bias`.
    """
    of = _Group("gather_bias", group)
    error: Exception | None = None
    if not -bias.dim() <= dim < bias.dim():
        error = ValueError(f"gather_bias: dim must be one of {bias.dim()} dimensions, but got {dim}")
        dim = 0
    dim %= max(bias.dim(), 1)
    own = bias.shape[dim] if bias.dim() else 0
    all_sizes = [own] * of.world if sizes is None else list(sizes)
    if error is None and (len(all_sizes) != of.world or all_sizes[of.rank] != own):
        error = ValueError(
            f"gather_bias: sizes must be {of.world}, and {own} in place {of.rank}, as this process's part is, but got "
            f"{all_sizes}"
        )
    shape = list(bias.shape)
    told: dict[str, Any] = {"dim": dim, "sizes": all_sizes if sizes is None else list(sizes)}
    different = _check("gather_bias", bias, of, {**told, "the shape without it": shape[:dim] + shape[dim + 1 :]}, error)
    return bias if of.world == 1 else _Gathered.apply(bias, of, dim, all_sizes, different)


def _check(op: str, bias: Tensor, of: _Group, told: dict[str, Any], error: Exception | None = None) -> Tensor | None:
    """Raises this process's error, after the others know of it, or that of all where they were given what differs. On a
    GPU, whether they were may be a 0-d tensor, that nothing waits for: the result must be NaN then."""
    if is_dtensor(bias):
        error = TypeError(f"{op}: bias must be a plain tensor, but got a DTensor: give full_tensor() or to_local()")
    elif not bias.dtype.is_floating_point:
        error = TypeError(f"{op}: bias must be floating-point, but got {bias.dtype}")
    different = None
    if of.world > 1:
        wants = bias.requires_grad and torch.is_grad_enabled()
        told = {**told, "dtype": bias.dtype, "requires_grad": wants}
        different = agree(op, "that share rows", of.group, bias.device, told, failed=error is not None)
    if error is not None:
        raise error
    return different


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, of: _Group, different: Tensor | None) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(bias)
        made = bias.to(acc_of(bias.dtype), copy=True)
        return made if different is None else made.masked_fill_(different, torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (gradient,), (bias,) = grads, ctx.saved_tensors
        with torch.no_grad():
            # A gradient of its own layout may be another one in another process.
            total = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=ctx.of.group)
            total = total.to(bias.dtype)
        return (*refuse_double_backward("whole_bias", [total], [bias]), None, None)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, of: _Group, dim: int, sizes: list[int], different: Tensor | None) -> Tensor:
        ctx.of, ctx.dim, ctx.sizes = of, dim, sizes
        ctx.save_for_backward(bias)
        largest = max(*sizes, 1)
        part = _padded(bias.movedim(dim, 0), largest)
        everyone = part.new_empty(of.world * largest, *part.shape[1:])
        if everyone.numel():
            dist.all_gather_into_tensor(everyone, part, group=of.group)
        parts = [
            t[:n] for t, n in zip(everyone.split(largest) if largest else [everyone] * of.world, sizes, strict=True)
        ]
        return torch.cat([t.to(acc_of(bias.dtype)) for t in parts]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (gradient,), (bias,) = grads, ctx.saved_tensors
        largest, own = max(*ctx.sizes, 1), ctx.sizes[ctx.of.rank]
        with torch.no_grad():
            parts = torch.cat([_padded(t, largest) for t in gradient.movedim(ctx.dim, 0).split(ctx.sizes)])
            made = parts.new_empty(largest, *parts.shape[1:])
            if made.numel():
                dist.reduce_scatter_tensor(made, parts, group=ctx.of.group)
            total = made[:own].movedim(0, ctx.dim).to(bias.dtype)
        return (*refuse_double_backward("gather_bias", [total], [bias]), None, None, None, None)


def _padded(rows: Tensor, largest: int) -> Tensor:
    """A collective has one size for all."""
    more = largest - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]) if more else rows.contiguous()
