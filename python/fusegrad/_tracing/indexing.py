"""What `tensor[index]` reads, by PyTorch's rules for the shapes, where indices are terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusegrad._C.score_mod import FLOAT, Graph

from .bounds import inside
from .errors import Refused
from .lifted import Lifted
from .tensor import Read, TracedTensor, load
from .vectors import Source, axis_of, check_size, packed_shape, result_axes, taken, terms_of

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["index", "index_by_terms"]


def index(trace: Trace, tensor: TracedTensor, index: Any) -> TracedTensor:
    """tensor[index], as Python writes it."""
    items = _normalized(index, tensor.dim())
    found = index_by_terms(trace, tensor, [_item(trace, item) for item in items])
    if not any(isinstance(item, (Tensor, list, range)) for item in items):
        tensor.viewed = found.viewed = True
    return found


def _normalized(index: Any, dims: int) -> list[Any]:
    """An index of a tensor of `dims` dimensions as a list with one item for each, and None for new ones."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, bool) for item in items):
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


def _item(trace: Trace, item: Any) -> Any:
    if isinstance(item, slice) and any(isinstance(x, TracedTensor) for x in (item.start, item.stop, item.step)):
        raise Refused("a slice whose bounds depend on an index", "index single elements: their number must be fixed")
    if item is None or isinstance(item, slice):
        return item
    if isinstance(item, (Lifted, list, range, Tensor)):
        item = trace.stacked(list(item) if isinstance(item, range) else item)
        if item.dtype.is_floating_point:
            raise Refused("a float as an index", "convert it: .long()")
        if item.dtype == torch.bool:
            raise Refused("a bool tensor as an index", "use torch.where, or .long() to index by 0 and 1")
        return item
    if hasattr(item, "__index__"):
        return int(item)
    raise TypeError(f"a tensor cannot be indexed by {type(item).__name__}")


def index_by_terms(trace: Trace, tensor: TracedTensor, items: Sequence[Any]) -> TracedTensor:
    """tensor[items]: None, slices, ints, and traced integers."""
    read = tensor.read
    if read is None:
        shape, packed, terms = _read_terms(trace.graph, tensor.packed, tensor.shape, items)
        picked = [_pick(trace.graph, tensor, list(place)) for place in _columns(terms, packed)]
        return trace.wrap(terms_of(picked, packed), tensor.dtype, shape)
    if all(item == slice(None) if isinstance(item, slice) else _is_single(item) for item in items):
        return _partly_read(trace, tensor, read, items)
    shape, packed, terms = _read_terms(trace.graph, None, tensor.shape, items)
    loads = []
    for place in _columns(terms, packed):
        free = iter(place)
        loads.append(load(trace, read.buffer, [next(free) if t is None else t for t in read.fixed]))
    return trace.wrap(terms_of(loads, packed), tensor.dtype, shape)


def _is_single(item: Any) -> bool:
    return isinstance(item, int) or (isinstance(item, Tensor) and item.dim() == 0)


def _partly_read(trace: Trace, tensor: TracedTensor, read: Read, items: Sequence[Any]) -> TracedTensor:
    """Some dimensions of a captured tensor are indexed, the others stay as they are."""
    new = iter(items)
    fixed: list[int | None] = []
    for term in read.fixed:
        item = next(new) if term is None else None
        if isinstance(item, int):
            term = trace.graph.constant(item)
        elif isinstance(item, TracedTensor):
            term = int(item.packed)
        fixed.append(term)
    if None not in fixed:
        return trace.wrap(terms_of(load(trace, read.buffer, [x for x in fixed if x is not None])), tensor.dtype)
    return TracedTensor(trace, None, tensor.dtype, Read(read.buffer, read.shape, tuple(fixed)))


def _read_terms(
    g: Graph, packed: Tensor | None, shape: Sequence[int], items: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...], list[Tensor]]:
    """The shape of the result, that of its packed terms, and for each dimension of the tensor the packed terms that
    index it. `packed`: the tensor's own, None: each dimension may get an axis.

    PyTorch itself places the dimensions: it indexes tensors of coordinates, in which a dimension that is indexed by n
    terms has n places.
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
            size = item.numel()
            item = torch.arange(size, device="cpu").reshape(item.shape)
        stand_ins.append(item)
        sizes.append(size)
    result_shape = tuple(torch.empty((), device="cpu").expand(sizes)[tuple(stand_ins)].shape)
    check_size(result_shape)

    def source_of(dim: int, item: Any) -> Source | int:
        if isinstance(item, int):
            return item
        view = [1] * len(sizes)
        view[dim] = sizes[dim]
        place = torch.arange(sizes[dim], device="cpu").reshape(view).expand(sizes)[tuple(stand_ins)]
        if isinstance(item, TracedTensor):
            at: list[Tensor] = []
            for size in reversed(item.shape):
                at.insert(0, place % size)
                place = place // size
            return Source(item.packed, tuple(item.shape), at)
        single = sizes[dim] == 1 or (packed is not None and packed.shape[dim] == sizes[dim])
        numbers = [g.constant(i) for i in range(sizes[dim])] if single else [g.axis(sizes[dim], 0)]
        return Source(terms_of(numbers, (-1,)), [sizes[dim]], [place])

    sources = [source_of(*x) for x in enumerate(item for item in items if item is not None)]
    axes = result_axes(result_shape, [x for x in sources if isinstance(x, Source)])
    out_shape = tuple(packed_shape(result_shape, axes))
    terms = [
        taken(g, x, result_shape, axes) if isinstance(x, Source) else terms_of(g.constant(x)).expand(out_shape)
        for x in sources
    ]
    return result_shape, out_shape, terms


def _pick(g: Graph, tensor: TracedTensor, place: list[int]) -> int:
    """The element at a place that may depend on indices: of an axis the term there, of single elements a choice
    between all of them. Out of range, where that is no error: NaN, 0 or false, as of a captured tensor."""
    place = [inside(g, index, size) for index, size in zip(place, tensor.shape, strict=True)]
    images = {axis_of(g, tensor.shape, d): place[d] for d in tensor.axes}
    result = _chosen(g, tensor.packed, place, images)
    for index in place:
        operation, _, _, operands = g.node(index)
        if operation == "within":
            nothing = g.constant(math.nan if g.type(result) == FLOAT else False)
            outside = g.apply("eq", index, operands[1])
            result = g.apply("where", outside, g.cast(nothing, g.type(result)), result)
    return result


def _chosen(g: Graph, terms: Tensor, place: Sequence[int], images: dict[int, int]) -> int:
    if not place:
        return g.substitute(int(terms), images)
    value, size = g.value(place[0]), terms.shape[0]
    if value is not None or size == 1:
        return _chosen(g, terms[int(value or 0) if size > 1 else 0], place[1:], images)
    result = _chosen(g, terms[size - 1], place[1:], images)
    for i in reversed(range(size - 1)):
        here = g.apply("eq", place[0], g.constant(i))
        result = g.apply("where", here, _chosen(g, terms[i], place[1:], images), result)
    return result


def _columns(terms: Sequence[Tensor], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not terms:
        return iter([()] * math.prod(shape))
    return zip(*(t.reshape(-1).tolist() for t in terms), strict=True)
