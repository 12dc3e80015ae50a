"""The elements that `tensor[index]` reads, by PyTorch's rules for the shapes, where indices are terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusegrad._C.score_mod import Graph

from .errors import Refused
from .tensor import MAX_ELEMENTS, TracedTensor
from .vectors import Source, check_size, packed_shape, result_axes, taken, terms_of

__all__ = ["is_full_slice", "normalized", "read_terms"]


def is_full_slice(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def normalized(index: Any, dims: int) -> list[Any]:
    """An index of a tensor of `dims` dimensions as a list with one item for each, and None for new ones."""
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        if isinstance(item, bool):
            raise Refused("an index that is True or False", "index by integers, or use torch.where")
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > dims:
        raise IndexError(f"too many indices for a tensor of {dims} dimensions: {used}")
    fill = [slice(None)] * (dims - used)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if at is None:
        return items + fill
    if any(item is Ellipsis for item in items[at + 1 :]):
        raise IndexError("an index can only have a single ellipsis ('...')")
    return items[:at] + fill + items[at + 1 :]


def read_terms(
    g: Graph, packed: Tensor | None, shape: Sequence[int], items: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...], list[Tensor]]:
    """The shape of the result, that of its packed terms, and for each dimension of the tensor the packed terms that
    index it. `packed`: the tensor's own, None: each dimension may get an axis.

    An item is None, a slice, an int, or a traced tensor of integers. PyTorch itself places the dimensions: it indexes
    tensors of coordinates, in which a dimension that is indexed by n terms has n places.
    """
    sizes: list[int] = []
    stand_ins: list[Any] = []
    dims = iter(shape)
    for item in items:
        if item is None:
            stand_ins.append(None)
            continue
        size = next(dims)
        if isinstance(item, Tensor):
            stand_ins.append(torch.arange(item.numel(), device="cpu").reshape(item.shape))
            size = item.numel()
        else:
            stand_ins.append(item)
        sizes.append(size)

    def places(dim: int) -> Tensor:
        view = [1] * len(sizes)
        view[dim] = sizes[dim]
        return torch.arange(sizes[dim], device="cpu").reshape(view).expand(sizes)[tuple(stand_ins)]

    if not sizes:
        result = tuple(torch.empty((), device="cpu")[tuple(stand_ins)].shape)
        return result, result, []
    result_shape = tuple(torch.empty((), device="cpu").expand(sizes)[tuple(stand_ins)].shape)
    check_size(result_shape)
    sources: list[Source | int] = []
    for dim, item in enumerate(item for item in items if item is not None):
        if isinstance(item, int):
            sources.append(item)
            continue
        place = places(dim)
        if isinstance(item, TracedTensor):
            at: list[Tensor] = []
            for size in reversed(item.shape):
                at.insert(0, place % size)
                place = place // size
            sources.append(Source(item.packed, tuple(item.shape), at))
        elif sizes[dim] == 1 or (packed is not None and packed.shape[dim] == sizes[dim]):
            sources.append(Source(terms_of([g.constant(i) for i in range(sizes[dim])], (-1,)), [sizes[dim]], [place]))
        else:
            sources.append(Source(terms_of([g.axis(sizes[dim], 0)], (1,)), [sizes[dim]], [place]))
    axes = result_axes(result_shape, [x for x in sources if isinstance(x, Source)])
    out_shape = tuple(packed_shape(result_shape, axes))
    if math.prod(out_shape) > MAX_ELEMENTS:
        raise Refused(
            f"an index that leaves {math.prod(out_shape)} elements, shape {list(result_shape)}",
            f"index every dimension, or leave at most {MAX_ELEMENTS} elements",
        )
    terms = [
        taken(g, x, result_shape, axes) if isinstance(x, Source) else terms_of(g.constant(x)).expand(out_shape)
        for x in sources
    ]
    return result_shape, out_shape, terms
