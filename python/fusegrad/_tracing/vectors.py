"""Tensors whose elements are one term: of a dimension of more than SMALL elements the terms are those of an axis, a
variable of the language, so that neither the trace nor the kernels grow with it.

`packed` are the terms of a tensor of `shape`: in a dimension with an axis there is one, of an element at the axis's
value. The axis of a dimension goes by its extent and its place from the last, so that tensors which are broadcast
together have the same ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusegrad._C.score_mod import MAX_EXTENT, Graph

from .errors import Refused

__all__ = [
    "MAX_ELEMENTS",
    "MAX_UNROLLED",
    "SMALL",
    "Source",
    "axes_of",
    "axis_of",
    "check_size",
    "common_axes",
    "coordinates",
    "packed_shape",
    "result_axes",
    "taken",
    "terms_of",
    "unrolled",
]

SMALL = 2
"""Dimensions of more elements have an axis: one by one, a dot product of four that require gradients takes NVRTC three
times as long."""
MAX_ELEMENTS = MAX_EXTENT
"""The most elements that a value may have."""
MAX_UNROLLED = 64
"""An operation that has no loop along an axis is done element by element, for at most so many of them. So many numbers
that the function itself writes down are part of the text."""


def terms_of(values: Any, shape: Sequence[int] = ()) -> Tensor:
    """A tensor of terms, whatever device and dtype are the defaults."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").reshape(tuple(shape))


def axis_of(g: Graph, shape: Sequence[int], dim: int) -> int:
    return g.axis(shape[dim], len(shape) - 1 - dim)


def axes_of(packed: Tensor, shape: Sequence[int]) -> list[int]:
    """The dimensions that have an axis."""
    return [d for d, n in enumerate(shape) if packed.shape[d] != n]


def packed_shape(shape: Sequence[int], axes: Sequence[int] | None = None) -> list[int]:
    """The tensor with axes in these dimensions, or in all that are not small."""
    check_size(shape)
    return [1 if (n > SMALL if axes is None else d in axes) else n for d, n in enumerate(shape)]


def check_size(shape: Sequence[int]) -> None:
    if math.prod(shape) > MAX_ELEMENTS:
        raise Refused(
            f"a value of {math.prod(shape)} elements, shape {list(shape)}",
            f"index it, such as by [q_idx] or [h, kv_idx], or leave at most {MAX_ELEMENTS} elements",
        )


def unrolled(g: Graph, packed: Tensor, shape: Sequence[int], dims: Sequence[int], what: str = "") -> Tensor:
    """The tensor with the elements of these dimensions one by one."""
    dims = [d for d in dims if packed.shape[d] != shape[d]]
    if not dims:
        return packed
    count = math.prod(shape[d] for d in dims)
    if count > MAX_UNROLLED:
        raise Refused(
            f"{what or 'an operation'} on a vector of {count} elements, which would be computed one by one",
            f"use at most {MAX_UNROLLED} elements there, or sums, products of matrices, means and extrema, which take "
            "vectors of any length",
        )
    for d in dims:
        axis = axis_of(g, shape, d)
        numbers = [g.constant(i) for i in range(shape[d])]
        parts = [[g.substitute(t, {axis: i}) for t in packed.reshape(-1).tolist()] for i in numbers]
        packed = torch.cat([terms_of(part, packed.shape) for part in parts], dim=d)
    return packed


def common_axes(g: Graph, operands: Sequence[tuple[Tensor, Sequence[int]]], shape: Sequence[int]) -> list[Tensor]:
    """The packed terms of operands that are broadcast to `shape`, with axes where all have them, else one by one."""
    result = []
    for packed, own in operands:
        offset = len(shape) - len(own)
        apart = [
            d
            for d in axes_of(packed, own)
            if any(p.dim() + d + offset >= len(shape) and p.shape[d + offset - len(shape)] > 1 for p, _ in operands)
        ]
        result.append(unrolled(g, packed, own, apart, "an operation with single numbers"))
    return result


@dataclass
class Source:
    """Values and where each element of a result is among them: of each dimension a tensor of places."""

    packed: Tensor
    shape: Sequence[int]
    places: Sequence[Tensor]

    def explicit(self) -> list[int]:
        own = axes_of(self.packed, self.shape)
        return [d for d in range(len(self.shape)) if d not in own and self.shape[d] > 1]


def _affine(place: Tensor, dims: Sequence[int]) -> tuple[Tensor, list[int]] | None:
    """place = base + the sum of coefficient * index of a dimension, if it is so."""
    base = place
    for d in dims:
        base = base.narrow(d, 0, 1)
    total, coefficients = base, []
    if place.numel() == 0:
        return base, [0] * len(dims)
    for d in dims:
        first = place[(0,) * place.dim()]
        second = place[tuple(1 if i == d else 0 for i in range(place.dim()))]
        step = int(second - first)
        view = [1] * place.dim()
        view[d] = place.shape[d]
        total = total + step * torch.arange(place.shape[d], device="cpu").view(view)
        coefficients.append(step)
    return (base, coefficients) if bool((total == place).all()) else None


def _linear_place(source: Source) -> Tensor:
    total: Tensor | int = 0
    for place, size in zip(source.places, source.shape, strict=True):
        total = total * size + place
    assert isinstance(total, Tensor)
    return total


def _fits(source: Source, dims: Sequence[int]) -> bool:
    """Whether the result can have axes in these dimensions."""
    for d in source.explicit():
        if any(not bool((source.places[d] == source.places[d].narrow(o, 0, 1)).all()) for o in dims):
            return False
    own = axes_of(source.packed, source.shape)
    if all(_affine(source.places[d], dims) is not None for d in own):
        return True
    return not source.explicit() and _affine(_linear_place(source), dims) is not None


def result_axes(shape: Sequence[int], sources: Sequence[Source]) -> list[int]:
    """The dimensions of a result that have axes."""
    check_size(shape)
    dims = [d for d, n in enumerate(shape) if n > SMALL]
    for count in range(len(dims), -1, -1):
        for chosen in itertools.combinations(dims, count):
            if all(_fits(source, chosen) for source in sources):
                left = math.prod(n for d, n in enumerate(shape) if d in dims and d not in chosen)
                if left > MAX_UNROLLED and any(axes_of(s.packed, s.shape) for s in sources):
                    raise Refused(
                        f"a vector of {left} elements, which would be computed one by one",
                        f"leave at most {MAX_UNROLLED} elements there",
                    )
                return list(chosen)
    return []


def taken(g: Graph, source: Source, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """The packed terms of the result, with axes in `dims`."""
    out_shape = packed_shape(shape, dims)
    out_axes = [axis_of(g, shape, d) for d in dims]
    own = axes_of(source.packed, source.shape)

    def expressions(place: Tensor) -> list[int] | None:
        affine = _affine(place, dims)
        if affine is None:
            return None
        base, coefficients = affine
        terms = []
        for start in base.reshape(-1).tolist():
            term = None if start == 0 and any(coefficients) else g.constant(start)
            for axis, coefficient in zip(out_axes, coefficients, strict=True):
                if coefficient == 0:
                    continue
                part = axis if coefficient == 1 else g.apply("mul", axis, g.constant(coefficient))
                term = part if term is None else g.apply("add", part, term)
            assert term is not None
            terms.append(term)
        return terms

    of_axis: dict[int, list[int]] = {}
    for d in own:
        terms = expressions(source.places[d])
        if terms is None:
            linear = expressions(_linear_place(source))
            assert linear is not None
            stride = math.prod(source.shape[d + 1 :])
            terms = [
                g.apply("mod", g.apply("floor_div", t, g.constant(stride)), g.constant(source.shape[d])) for t in linear
            ]
        of_axis[d] = terms
    flat: Tensor | int = 0
    for d, n in enumerate(source.packed.shape):
        place = source.places[d]
        for o in dims:
            place = place.narrow(o, 0, 1)
        flat = flat * n + (torch.zeros_like(place) if d in own else place)
    count = math.prod(out_shape)
    values = source.packed.reshape(-1)
    picked = values.tolist() * count if isinstance(flat, int) else values[flat.reshape(-1)].tolist()
    axes = {d: axis_of(g, source.shape, d) for d in own}
    terms = [g.substitute(t, {axes[d]: of_axis[d][i] for d in own}) for i, t in enumerate(picked)]
    return terms_of(terms, out_shape)


def coordinates(shape: Sequence[int]) -> Iterator[Tensor]:
    """The index of every element, for each dimension."""
    for d, n in enumerate(shape):
        view = [1] * len(shape)
        view[d] = n
        yield torch.arange(n, device="cpu").view(view).expand(tuple(shape)).contiguous()
