"""Operations that only move elements: PyTorch itself applies them to the tensors of terms, or where there are axes to
the elements' indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .elements import each, name_of, on_ones, result, traced, unknown_op
from .errors import Refused
from .tensor import TracedTensor
from .trace import Trace
from .trees import contains, mapped, tensors_of
from .vectors import Source, axes_of, axis_of, coordinates, result_axes, taken, terms_of

__all__ = ["move"]


def move(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func in (torch.ops.aten.view.dtype, torch.ops.aten.repeat_interleave.Tensor):
        raise unknown_op(func)  # it does more than move elements
    if contains((args[1:], kwargs), TracedTensor):
        raise Refused("a number of elements that differs from score to score", "their number must be fixed")
    out = on_ones(func, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    if name_of(func) in ("alias", "lift_fresh") and isinstance(args[0], TracedTensor) and args[0].read is not None:
        return args[0]
    if any(x.axes for x in tensors_of(args) if isinstance(x, TracedTensor)):
        return _move_axes(trace, func, args, kwargs, out)
    moved = func(*mapped(args, lambda x: traced(trace, x).terms if isinstance(x, Tensor) else x), **kwargs)
    if isinstance(out, Tensor):
        return result(trace, moved, out.dtype)
    return [result(trace, terms, like.dtype) for terms, like in zip(moved, out, strict=True)]


def _move_axes(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """PyTorch moves the indices of the elements: an element of the result is that of the indices which come there."""
    name = name_of(func)
    if name in ("cat", "stack"):
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        parts = [traced(trace, x) for x in args[0]]
        if name == "stack":
            parts = [torch.ops.aten.unsqueeze(x, dim) for x in parts]
        return _joined(trace, [x for x in parts if x.shape != (0,)], dim, out)
    tensor, *rest = args
    places = [func(place, *rest, **kwargs) for place in coordinates(tensor.shape)]
    if isinstance(out, Tensor):
        return _moved(trace, tensor, places, out)
    return [_moved(trace, tensor, [of_dim[i] for of_dim in places], like) for i, like in enumerate(out)]


def _moved(trace: Trace, tensor: TracedTensor, places: Sequence[Tensor], out: Tensor) -> TracedTensor:
    source = Source(tensor.packed, tuple(tensor.shape), places)
    axes = result_axes(out.shape, [source])
    return result(trace, taken(trace.graph, source, out.shape, axes), out.dtype, shape=out.shape)


def _joined(trace: Trace, parts: Sequence[TracedTensor], dim: int, out: Tensor) -> TracedTensor:
    """Parts one after the other. Along an axis an element is a choice of theirs, each at a place that it has."""
    g = trace.graph
    apart = [d for d in range(out.dim()) if d != dim and any(x.shape[d] > 1 and x.packed.shape[d] > 1 for x in parts)]
    packed = [x.unrolled("cat", apart) for x in parts]
    if all(dim not in axes_of(terms, x.shape) for terms, x in zip(packed, parts, strict=True)):
        return result(trace, torch.cat(packed, dim), out.dtype, shape=out.shape)
    axis = axis_of(g, out.shape, dim)
    begin, chosen = out.shape[dim], None
    for terms, x in zip(reversed(packed), reversed(parts), strict=True):
        size = x.shape[dim]
        begin -= size
        if dim in axes_of(terms, x.shape):
            place = g.apply("sub", axis, g.constant(begin))
            images = {axis_of(g, x.shape, dim): g.apply("clamp", place, g.constant(0), g.constant(size - 1))}
            elements = [(begin + size, each(terms, lambda t, images=images: g.substitute(t, images)))]  # type: ignore[misc]
        else:
            elements = [(begin + i + 1, terms.narrow(dim, i, 1)) for i in reversed(range(size))]
        for end, element in elements:
            if chosen is None:
                chosen = element
                continue
            here = g.apply("ge", axis, g.constant(end))
            pairs = zip(chosen.reshape(-1).tolist(), element.reshape(-1).tolist(), strict=True)
            chosen = terms_of([g.apply("where", here, later, term) for later, term in pairs], element.shape)
    assert chosen is not None
    return result(trace, chosen, out.dtype, shape=out.shape)
