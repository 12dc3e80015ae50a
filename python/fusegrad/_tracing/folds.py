"""Operations that make one element of several: loops over axes, of single elements one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusegrad._C.score_mod import BOOL, INT, Graph

from .elements import bound, name_of, on_ones, result, traced
from .tensor import TracedTensor
from .trace import Trace, category
from .vectors import axes_of, axis_of, terms_of

__all__ = ["FOLDS", "dims_of", "extreme", "fold", "matrix_product"]

_FOLDED = 64
"""The place of an axis that no dimension has."""
FOLDS = {
    "sum": ("add", "sum", 0),
    "mean": ("add", "sum", math.nan),
    "prod": ("mul", "prod", 1),
    "amax": ("max", "amax", None),
    "amin": ("min", "amin", None),
    "any": ("or", "amax", False),
    "all": ("and", "amin", True),
}
"""For two elements, along an axis, and for none."""


def dims_of(x: TracedTensor, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions that an argument names; none are all."""
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def fold(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """A reduction over dimensions: in order, from the first element."""
    given = bound(func, args, kwargs)
    tensor, out = traced(trace, given["self"]), on_ones(func, args, kwargs)
    return _folded(trace, name_of(func), tensor, dims_of(tensor, given.get("dim")), out, given.get("dtype"))


def _folded(
    trace: Trace, name: str, tensor: TracedTensor, dims: list[int], out: torch.Tensor, dtype: torch.dtype | None
) -> TracedTensor:
    g = trace.graph
    kept = [d for d in range(tensor.dim()) if d not in dims]
    packed, shape = tensor.packed, tuple(tensor.shape)
    extents = {axis_of(g, shape, d): shape[d] for d in axes_of(packed, shape) if d in dims}
    left = [packed.shape[d] for d in kept]
    of_two, of_axis, nothing = FOLDS[name]
    rows = packed.permute(kept + dims).reshape(math.prod(left), -1).tolist()
    terms = []
    for row in rows:
        if dtype is not None:
            row = [g.cast(t, category(dtype)) for t in row]
        if name in ("any", "all"):
            row = [g.cast(t, BOOL) for t in row]
        elif name in ("sum", "prod"):
            row = [g.cast(t, max(INT, g.type(t))) for t in row]
        axes = list(extents)
        if name in ("amax", "amin") and len(row) + len(axes) > 2 and any(map(g.active, row)):
            # In several steps, equals would not share the gradient evenly.
            axis, total = _along(g, row, extents)
            row, axes = row[:1], [axis]
        else:
            total = row[0] if row else g.constant(nothing)
        for term in row[1:]:
            total = g.apply(of_two, total, term)
        for axis in axes:
            total = g.reduce(of_axis, axis, total)
        if name == "mean" and row:
            total = g.apply("div", total, g.constant(float(math.prod(shape[d] for d in dims))))
        terms.append(total)
    if out.dim() == tensor.dim():
        left = [1 if d in dims else n for d, n in enumerate(packed.shape)]
    else:  # the axes that are left are those of dimensions at other places from the last
        new = [shape[d] for d in kept]
        images = {axis_of(g, shape, d): axis_of(g, new, i) for i, d in enumerate(kept) if packed.shape[d] != shape[d]}
        terms = [g.substitute(t, images) for t in terms]
    return result(trace, terms_of(terms, left), out.dtype, True, out.shape)


def _along(g: Graph, row: Sequence[int], extents: dict[int, int]) -> tuple[int, int]:
    """An axis for all elements of a row of terms with axes of these extents, and the element there."""
    size = math.prod(extents.values())
    axis = g.axis(len(row) * size, _FOLDED)
    images, rest = {}, axis
    for own, extent in reversed(extents.items()):
        images[own] = g.apply("mod", rest, g.constant(extent))
        rest = g.apply("floor_div", rest, g.constant(extent))
    chosen, *others = (g.substitute(term, images) for term in row)
    for i, term in enumerate(others, 1):
        chosen = g.apply("where", g.apply("ge", axis, g.constant(i * size)), term, chosen)
    return axis, chosen


def extreme(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """max and min: of all, or of a dimension with the place of the first; argmax and argmin. NaN comes before all."""
    g, name = trace.graph, name_of(func)
    out, given = on_ones(func, args, kwargs), bound(func, args, kwargs)
    tensor, most = traced(trace, given["self"]), "amax" if name.endswith("max") else "amin"
    if "dim" not in given:  # equals share the gradient
        return _folded(trace, most, tensor, list(range(tensor.dim())), out, None)
    if given["dim"] is None:
        tensor = torch.ops.aten.reshape(tensor, [-1])
    dims = dims_of(tensor, given["dim"])
    kept = [d for d in range(tensor.dim()) if d not in dims]
    packed, shape = tensor.packed, tuple(tensor.shape)
    extents = {axis_of(g, shape, d): shape[d] for d in tensor.axes if d in dims}
    values, places = [], []
    for row in packed.permute(kept + dims).reshape(math.prod(packed.shape[d] for d in kept), -1).tolist():
        if not extents:
            value, place = _first(g, row, "gt" if most == "amax" else "lt")
            values.append(value)
            places.append(place)
            continue
        axis, term = _along(g, row, extents)
        found = g.apply("or", g.apply("eq", term, g.reduce(most, axis, term)), g.apply("ne", term, term))
        last = g.constant(math.prod(shape[d] for d in dims) - 1)
        places.append(g.reduce("amin", axis, g.apply("where", found, axis, last)))
        values.append(g.substitute(term, {axis: places[-1]}))

    def reshaped(terms: list[int], dtype: torch.dtype) -> TracedTensor:
        left, sizes = ([1 if d in dims else n for d, n in enumerate(x)] for x in (packed.shape, shape))
        whole = result(trace, terms_of(terms, left), dtype, shape=sizes)
        return torch.ops.aten.reshape(whole, list((out if name.startswith("arg") else out[0]).shape))

    where = reshaped(places, torch.int64)
    return where if name.startswith("arg") else (reshaped(values, tensor.dtype), where)


def _first(g: Graph, row: Sequence[int], beats: str) -> tuple[int, int]:
    """The first extremum of single elements, and its place."""
    value, place = row[0], g.constant(0)
    for i, term in enumerate(row[1:], 1):
        nan = g.apply("and", g.apply("ne", term, term), g.apply("eq", value, value))
        better = g.apply("or", g.apply(beats, term, value), nan)
        value, place = g.apply("where", better, term, value), g.apply("where", better, g.constant(i), place)
    return value, place


def matrix_product(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """[..., n, k] by [..., k, m] as sums over the last dimension of [..., n, m, k]."""
    aten = torch.ops.aten
    a, b = (traced(trace, x) for x in args[:2])
    # Floats of one kind: a score in float32 and a captured tensor in float64 are the same to the language.
    given: Sequence[Any] = (a, b)
    if a.dtype.is_floating_point and b.dtype.is_floating_point:
        dtype = torch.promote_types(a.dtype, b.dtype)
        given = [torch.ones(x.shape, dtype=dtype, device="cpu") for x in (a, b)]
    out = on_ones(func, [*given, *args[2:]], kwargs)
    if b.dim() == 1:
        products = aten.mul(a, b)
    else:
        products = aten.mul(aten.unsqueeze(a, -2), aten.unsqueeze(aten.transpose(b, -2, -1), -3))
    total = aten.sum(products, [-1])
    return result(trace, total.packed, out.dtype, True, out.shape)
