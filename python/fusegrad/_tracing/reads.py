"""Operations that read elements at indices which a score_mod computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusegrad._C.score_mod import INT

from .bounds import bounds, checked
from .elements import bound, each, traced
from .errors import Refused
from .indexing import index_by_terms
from .tensor import TracedTensor
from .trace import Trace
from .vectors import SMALL, axis_of, terms_of

__all__ = ["embedding", "gather", "index", "index_select", "numbers_along", "take"]


def _integers(trace: Trace, x: Tensor) -> TracedTensor:
    if x.dtype.is_floating_point or x.dtype == torch.bool:
        raise Refused(f"an index of {x.dtype}", "index by integers, see .long() and torch.where")
    return traced(trace, x)


def _counted(trace: Trace, x: Tensor, size: int) -> TracedTensor:
    """An index that does not count from the end where it is negative. Too large ones are found where they are used."""
    g, places = trace.graph, _integers(trace, x)

    def place(term: int) -> int:
        term = g.cast(term, INT)
        return term if bounds(g, term)[0] >= 0 else checked(g, term, size)

    return trace.wrap(each(places.packed, place), torch.int64, places.shape)


def numbers_along(trace: Trace, shape: Sequence[int], dim: int) -> TracedTensor:
    """The index in one dimension, of size 1 in the others."""
    g, n = trace.graph, shape[dim]
    numbers = [axis_of(g, shape, dim)] if n > SMALL else [g.constant(i) for i in range(n)]
    view = [1] * len(shape)
    view[dim] = len(numbers)
    return trace.wrap(terms_of(numbers, view), torch.int64, [n if d == dim else 1 for d in range(len(shape))])


def index(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, indices = args
    items = [slice(None) if x is None else _integers(trace, x) for x in indices]
    items += [slice(None)] * (tensor.dim() - len(items))
    return index_by_terms(trace, traced(trace, tensor), items)


def index_select(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, dim = traced(trace, args[0]), args[1]
    items: list[Any] = [slice(None)] * tensor.dim()
    items[dim] = torch.ops.aten.reshape(_counted(trace, args[2], tensor.shape[dim]), [-1])
    return index_by_terms(trace, tensor, items)


def take(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor = traced(trace, args[0])
    if tensor.dim() != 1:
        tensor = torch.ops.aten.reshape(tensor, [-1])
    return index_by_terms(trace, tensor, [_integers(trace, args[1])])


def gather(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor = traced(trace, args[0])
    if tensor.dim() == 0:
        return tensor
    dim = args[1] % tensor.dim()
    places = _counted(trace, args[2], tensor.shape[dim])
    items = [
        places if d == dim else torch.ops.aten.expand(numbers_along(trace, places.shape, d), list(places.shape))
        for d in range(tensor.dim())
    ]
    return index_by_terms(trace, tensor, items)


def embedding(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    aten = torch.ops.aten
    given = bound(func, args, kwargs)
    weight = traced(trace, given["weight"])
    indices = _counted(trace, given["indices"], weight.shape[0])
    rows = index_by_terms(trace, weight, [indices, slice(None)])
    if given["padding_idx"] < 0 or not trace.is_active(rows):
        return rows
    padding = aten.unsqueeze(aten.eq(indices, given["padding_idx"]), -1)
    return aten.where(padding, aten.detach(rows), rows)
