"""What `tensor[index]` reads, by PyTorch's rules for the shapes, where indices are terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import Refused
from .graph import Graph
from .tensor import MAX_ELEMENTS, terms_of

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


def read_terms(g: Graph, shape: Sequence[int], items: Sequence[Any]) -> tuple[tuple[int, ...], list[Tensor]]:
    """The shape of the result, and for each dimension of the tensor the terms that index it, of that shape.

    An item is None, a slice, an int, or an int64 tensor of terms. PyTorch itself places the dimensions: it indexes
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
        return tuple(torch.empty((), device="cpu")[tuple(stand_ins)].shape), []
    result_shape = torch.empty((), device="cpu").expand(sizes)[tuple(stand_ins)].shape
    if math.prod(result_shape) > MAX_ELEMENTS:
        raise Refused(
            f"an index that leaves {math.prod(result_shape)} elements, shape {list(result_shape)}",
            f"index every dimension, or leave at most {MAX_ELEMENTS} elements",
        )
    terms = []
    for dim, item in enumerate(item for item in items if item is not None):
        if isinstance(item, Tensor):
            terms.append(item.reshape(-1)[places(dim)])
        elif isinstance(item, int):
            terms.append(terms_of(g.constant(item)).expand(result_shape))
        else:
            constants = terms_of([g.constant(i) for i in range(sizes[dim])], (-1,))
            terms.append(constants[places(dim)])
    return tuple(result_shape), terms
