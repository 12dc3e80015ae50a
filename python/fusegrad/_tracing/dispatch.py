"""ATen operations on traced tensors.

An elementwise operation is looked up in ops.py. An operation that only moves elements is applied, by PyTorch itself, to
the tensors of terms, or to the indices where there are axes. Reductions and matrix products are loops over axes, or for
few elements unrolled. All else is decomposed by PyTorch's own rules.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegrad._C.score_mod import BOOL, INT, Graph

from .errors import Refused, RefusedWrite, unknown
from .names import words
from .ops import ELEMENTWISE, FOLDS, bounds, checked, inside, wrapped
from .tensor import TracedTensor
from .trace import Trace, category
from .trees import mapped, tensors_of
from .vectors import SMALL, Source, axes_of, axis_of, common_axes, coordinates, result_axes, taken, terms_of

__all__ = ["dispatch"]

Handler = Callable[[Trace, Any, Sequence[Any], dict[str, Any]], Any]

_MOVES = words(
    """
    view _unsafe_view reshape expand permute t transpose select slice unsqueeze squeeze cat stack flip repeat split
    split_with_sizes unbind diagonal roll movedim alias clone _reshape_alias tile unfold view_as squeeze_
    repeat_interleave lift_fresh lift lift_fresh_copy _conj resolve_conj contiguous _to_copy_same chunk unsafe_split
    swapaxes
    """
)
_FILLS = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "full_like": None, "new_full": None}
_RANKED, _BEFORE, _FOLDED = 64, 65, 66
"""Places of axes that no dimension has."""
_NARROW = {torch.int8: (8, True), torch.int16: (16, True), torch.uint8: (8, False), torch.int32: (32, True)}


def dispatch(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An ATen operation on values of the trace."""
    namespace, name = func._schema.name.split("::")
    if namespace not in ("aten", "prims"):
        return trace.python_op(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise Refused(f"random numbers ({name})", "draw them outside and capture the tensor")
    if func._schema.is_mutable:
        return _in_place(trace, func, name, args, kwargs)
    out = _functional(trace, func, name, args, kwargs)
    if any(r.alias_info is not None for r in func._schema.returns):
        mapped((args, out), _mark_viewed)
    return out


def _mark_viewed(x: Any) -> None:
    if isinstance(x, TracedTensor):
        x.viewed = True


def _functional(trace: Trace, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(name)
    if handler is not None and not func._schema.name.startswith("prims::"):
        _check_all_read(func, _READ[name], args, kwargs)
        return handler(trace, func, args, kwargs)
    if name in ELEMENTWISE:
        return _elementwise(trace, func, ELEMENTWISE[name], args, kwargs)
    if name in _MOVES:
        return _move(trace, func, args, kwargs)
    if name in FOLDS and not func._schema.name.startswith("prims::"):
        _check_all_read(func, _READ_BY_FOLDS, args, kwargs)
        return _fold(trace, func, name, args, kwargs)
    decomposed = _decomposed(func, args, kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    raise _unknown(func)


_WITHOUT_EFFECT = words("device pin_memory non_blocking memory_format stable sorted")
"""Arguments that say nothing of the elements: where they lie, and an order that they have anyway."""


def _check_all_read(func: Any, read: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """An argument that is not read must be as if it were left out."""
    for argument in func._schema.arguments:
        if argument.name in read or argument.name in _WITHOUT_EFFECT:
            continue
        value = _bound(func, args, kwargs)[argument.name]
        if value is None or (argument.name == "layout" and value == torch.strided):
            continue
        if not argument.has_default_value() or value != argument.default_value:
            name = func._schema.name.removeprefix("aten::")
            raise Refused(f"{argument.name}={value} of {name}, which score_mods do not have", "leave it out")


def _unknown(func: Any) -> Refused:
    name = func._schema.name.removeprefix("aten::")
    name = f"{name}.{func._overloadname}" if func._overloadname not in ("default", "Tensor") else name
    return unknown(name)


def _decomposed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._decomp import decomposition_table  # takes half a second to import

    rule = decomposition_table.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func._can_decompose():
        return func.decompose(*args, **kwargs)
    return NotImplemented


def _on_ones(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The results for ones: their shapes and dtypes, with PyTorch's checks of the arguments. On the CPU, as many meta
    kernels are Python, which imports torch._dynamo."""

    def stand_in(x: Any) -> Any:
        return torch.ones(x.shape, dtype=x.dtype, device="cpu") if isinstance(x, Tensor) else x

    args, kwargs = mapped((args, kwargs), stand_in)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    return func(*args, **kwargs)


def _terms(trace: Trace, x: Any) -> Tensor:
    if isinstance(x, TracedTensor):
        return x.terms
    if isinstance(x, Tensor):
        # PyTorch made it within an operation: captured ones were replaced before.
        return trace.constants(x).terms
    return terms_of(trace.graph.constant(x))


def _packed(trace: Trace, x: Any) -> Tensor:
    return x.packed if isinstance(x, TracedTensor) else _terms(trace, x)


def _result(
    trace: Trace, terms: Tensor, dtype: torch.dtype, arithmetic: bool = False, shape: Sequence[int] | None = None
) -> TracedTensor:
    """A value of these packed terms."""
    g = trace.graph

    def fitting(term: int) -> int:
        term = g.cast(term, category(dtype))
        if arithmetic and dtype in _NARROW:
            term = wrapped(g, term, *_NARROW[dtype])
        return term

    return trace.wrap(_each(terms, fitting), dtype, shape)


def _each(terms: Tensor, function: Callable[[int], int]) -> Tensor:
    return terms_of([function(t) for t in terms.reshape(-1).tolist()], terms.shape)


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names in the schema."""
    bound = {}
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


_signature = functools.lru_cache(inspect.signature)


def _elementwise(trace: Trace, func: Any, emit: Callable[..., int], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    out = _on_ones(func, args, kwargs)
    first = out[0] if isinstance(out, tuple) else out
    bound = _bound(func, args, kwargs)
    try:
        _signature(emit).bind(trace.graph, **bound)
        fits = all(x is None or isinstance(x, (Tensor, int, float, str)) for x in bound.values())
    except TypeError:
        fits = False
    if not fits:
        raise _unknown(func)
    named = {k: v for k, v in bound.items() if v is None or isinstance(v, str)}
    given = {k: v for k, v in bound.items() if isinstance(v, (Tensor, int, float))}
    packed = common_axes(
        trace.graph,
        [(_packed(trace, v), v.shape if isinstance(v, Tensor) else ()) for v in given.values()],
        first.shape,
    )
    packed = list(torch.broadcast_tensors(*packed))
    operands = {k: terms.reshape(-1).tolist() for k, terms in zip(given, packed, strict=True)}
    terms = [
        emit(trace.graph, **named, **dict(zip(operands, column, strict=True)))
        for column in zip(*operands.values(), strict=True)
    ]
    result = _result(trace, terms_of(terms, packed[0].shape), first.dtype, True, first.shape)
    if isinstance(out, tuple):  # log_sigmoid_forward's second result is for its backward
        return (result, result)
    return result


def _move(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func in (torch.ops.aten.view.dtype, torch.ops.aten.repeat_interleave.Tensor):
        raise _unknown(func)  # it does more than move elements
    mapped((args[1:], kwargs), _no_tensor)
    out = _on_ones(func, args, kwargs)
    given = [x for x in args[:1] if isinstance(x, TracedTensor)]
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    if given and given[0].read is not None and func._schema.name in ("aten::alias", "aten::lift_fresh"):
        return given[0]
    if any(x.axes for x in tensors_of(args) if isinstance(x, TracedTensor)):
        return _move_axes(trace, func, args, kwargs, out)
    moved = func(*mapped(args, lambda x: _terms(trace, x) if isinstance(x, Tensor) else x), **kwargs)
    if isinstance(out, Tensor):
        return _result(trace, moved, out.dtype)
    return [_result(trace, terms, meta.dtype) for terms, meta in zip(moved, out, strict=True)]


def _move_axes(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """PyTorch moves the indices of the elements: an element of the result is that of the indices which come there."""
    name = func._schema.name.removeprefix("aten::")
    if name in ("cat", "stack"):
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        parts = [_traced(trace, x) for x in args[0]]
        if name == "stack":
            parts = [torch.ops.aten.unsqueeze(x, dim) for x in parts]
        return _joined(trace, [x for x in parts if x.shape != (0,)], dim, out)
    tensor, *rest = args
    places = [func(place, *rest, **kwargs) for place in coordinates(tensor.shape)]
    if isinstance(out, Tensor):
        return _moved(trace, tensor, places, out)
    return [_moved(trace, tensor, [of_dim[i] for of_dim in places], meta) for i, meta in enumerate(out)]


def _no_tensor(x: Any) -> Any:
    if isinstance(x, TracedTensor):
        raise Refused("a number of elements that differs from score to score", "their number must be fixed")
    return x


def _moved(trace: Trace, tensor: TracedTensor, places: Sequence[Tensor], out: Tensor) -> TracedTensor:
    source = Source(tensor.packed, tuple(tensor.shape), places)
    axes = result_axes(out.shape, [source])
    return _result(trace, taken(trace.graph, source, out.shape, axes), out.dtype, shape=out.shape)


def _joined(trace: Trace, parts: Sequence[TracedTensor], dim: int, out: Tensor) -> TracedTensor:
    """Parts one after the other. Along an axis an element is a choice of theirs, each at a place that it has."""
    g = trace.graph
    apart = [d for d in range(out.dim()) if d != dim and any(x.shape[d] > 1 and x.packed.shape[d] > 1 for x in parts)]
    packed = [x.unrolled("cat", apart) for x in parts]
    if all(dim not in axes_of(terms, x.shape) for terms, x in zip(packed, parts, strict=True)):
        return _result(trace, torch.cat(packed, dim), out.dtype, shape=out.shape)
    axis = axis_of(g, out.shape, dim)
    begin, chosen = out.shape[dim], None
    for terms, x in zip(reversed(packed), reversed(parts), strict=True):
        size = x.shape[dim]
        begin -= size
        if dim in axes_of(terms, x.shape):
            place = g.apply("sub", axis, g.constant(begin))
            place = g.apply("clamp", place, g.constant(0), g.constant(size - 1))
            own = axis_of(g, x.shape, dim)
            elements = [(begin, _each(terms, lambda t, own=own, place=place: g.substitute(t, {own: place})))]  # type: ignore[misc]
        else:
            elements = [(begin + i, terms.narrow(dim, i, 1)) for i in reversed(range(size))]
        for first, element in elements:
            if chosen is None:
                chosen = element
                continue
            here = g.apply("ge", axis, g.constant(first + (size if len(elements) == 1 else 1)))
            chosen = terms_of(
                [
                    g.apply("where", here, later, term)
                    for later, term in zip(chosen.reshape(-1).tolist(), element.reshape(-1).tolist(), strict=True)
                ],
                element.shape,
            )
    assert chosen is not None
    return _result(trace, chosen, out.dtype, shape=out.shape)


def _in_place(trace: Trace, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`score += x` is a new value under the old name, as long as nothing else may show the old one."""
    trace.functions.adopt_all()
    target = args[0] if args else None
    base = name[:-1]
    if not (isinstance(target, TracedTensor) and name.endswith("_") and hasattr(torch.ops.aten, base)):
        raise RefusedWrite("a write into a captured tensor", "compute a new value, such as a + b for a += b")
    if target.viewed:
        raise RefusedWrite("a write into a value that has views", "compute a new value, such as a + b for a += b")
    if name == "copy_":
        value = torch.ops.aten._to_copy(args[1], dtype=target.dtype)
        value = torch.ops.aten.expand(value, list(target.shape))
    elif name in ("fill_", "zero_"):
        value = torch.ops.aten.full_like(target, args[1] if len(args) > 1 else 0)
    else:
        overload = getattr(getattr(torch.ops.aten, base), func._overloadname)
        value = overload(*args, **kwargs)
    if value.shape != target.shape or category(value.dtype) > category(target.dtype):
        raise RefusedWrite(
            f"an in-place operation whose result is {value!r}, not {target!r}", "compute a new value: a = a + b"
        )
    target.assign(_result(trace, value.packed, target.dtype, shape=target.shape))
    return target


# --- single operations ----------------------------------------------------------------------------------------


def _to_copy(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    dtype = kwargs.get("dtype") or args[0].dtype
    if dtype.is_complex:
        raise Refused(f"a cast to {dtype}", "scores are real")
    g, source = trace.graph, args[0].dtype
    fits = not source.is_floating_point and (source == torch.bool or source.itemsize < dtype.itemsize)
    if dtype not in _NARROW or fits or (dtype == torch.int32 and source.is_floating_point):
        packed = args[0].packed if dtype != torch.float64 else _each(args[0].packed, trace.in_float64)
        return _result(trace, packed, dtype, shape=args[0].shape)
    narrowed = _each(args[0].packed, lambda t: wrapped(g, g.cast(t, INT), *_NARROW[dtype], from_wider=source != dtype))
    return _result(trace, narrowed, dtype, shape=args[0].shape)


def _fill(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    bound = _bound(func, args, kwargs)
    value = _FILLS[func._schema.name.removeprefix("aten::")]
    out = _on_ones(func, args, kwargs)
    term = trace.graph.constant(bound["fill_value"] if value is None else value)
    return trace.filled(trace.graph.cast(term, category(out.dtype)), out.shape, out.dtype)


def _empty(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    out = _on_ones(func, args, kwargs)
    number = float("nan") if out.dtype.is_floating_point else 0
    return trace.filled(trace.graph.cast(trace.graph.constant(number), category(out.dtype)), out.shape, out.dtype)


def _index(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, indices = args
    items = [slice(None) if x is None else _integers(trace, x) for x in indices]
    items += [slice(None)] * (tensor.dim() - len(items))
    return trace.index_by_terms(_traced(trace, tensor), items)


def _integers(trace: Trace, x: Tensor) -> TracedTensor:
    if x.dtype.is_floating_point or x.dtype == torch.bool:
        raise Refused(f"an index of {x.dtype}", "index by integers, see .long() and torch.where")
    return _traced(trace, x)


def _counted(trace: Trace, x: Tensor, size: int) -> TracedTensor:
    """An index that does not count from the end where it is negative. Too large ones are found where they are used."""
    g, index = trace.graph, _integers(trace, x)

    def place(term: int) -> int:
        term = g.cast(term, INT)
        return term if bounds(g, term)[0] >= 0 else checked(g, term, size)

    return trace.wrap(_each(index.packed, place), torch.int64, index.shape)


def _traced(trace: Trace, x: Tensor) -> TracedTensor:
    return x if isinstance(x, TracedTensor) else trace.constants(x)


def _index_select(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, dim = _traced(trace, args[0]), args[1]
    items: list[Any] = [slice(None)] * tensor.dim()
    items[dim] = torch.ops.aten.reshape(_counted(trace, args[2], tensor.shape[dim]), [-1])
    return trace.index_by_terms(tensor, items)


def _take(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, index = _traced(trace, args[0]), args[1]
    g = trace.graph
    items: list[Any] = []
    index = _integers(trace, index)
    if tensor.dim() == 0:
        tensor = torch.ops.aten.unsqueeze(tensor, 0)
    if tensor.dim() == 1:
        return trace.index_by_terms(tensor, [index])
    rest = _each(index.packed, lambda t: t if bounds(g, t)[0] >= 0 else inside(g, t, tensor.numel()))
    for size in reversed(tensor.shape[1:]):
        place = _each(rest, lambda t, n=size: g.apply("mod", t, g.constant(n)))  # type: ignore[misc]
        items.insert(0, trace.wrap(place, torch.int64, index.shape))
        rest = _each(rest, lambda t, n=size: g.apply("floor_div", t, g.constant(n)))  # type: ignore[misc]
    return trace.index_by_terms(tensor, [trace.wrap(rest, torch.int64, index.shape), *items])


def _gather(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, dim = _traced(trace, args[0]), args[1]
    if tensor.dim() == 0:
        return tensor
    dim %= tensor.dim()
    index = _counted(trace, args[2], tensor.shape[dim])
    items: list[Any] = []
    for d in range(tensor.dim()):
        if d == dim:
            items.append(index)
            continue
        n = index.shape[d]
        axis = n > SMALL
        numbers = [axis_of(trace.graph, index.shape, d)] if axis else [trace.graph.constant(i) for i in range(n)]
        view = [len(numbers) if i == d else 1 for i in range(index.dim())]
        places = trace.wrap(terms_of(numbers, view), torch.int64, [n if i == d else 1 for i in range(index.dim())])
        items.append(torch.ops.aten.expand(places, list(index.shape)))
    return trace.index_by_terms(tensor, items)


def _embedding(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    weight = _traced(trace, bound["weight"])
    indices = _counted(trace, bound["indices"], weight.shape[0])
    rows = trace.index_by_terms(weight, [indices, slice(None)])
    if bound["padding_idx"] < 0 or not trace.is_active(rows):
        return rows
    padding = aten.unsqueeze(aten.eq(indices, bound["padding_idx"]), -1)
    return aten.where(padding, aten.detach(rows), rows)


def _local_scalar(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    value = trace.graph.value(int(args[0].terms))
    if value is not None:
        return value
    raise Refused(
        "a value that differs from score to score as a Python number",
        "keep it a tensor: .long() for int(), x[index] for an element, torch.where for a branch",
    )


def _fold(trace: Trace, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """A reduction over dimensions: in order, from the first element."""
    g = trace.graph
    out = _on_ones(func, args, kwargs)
    bound = _bound(func, args, kwargs)
    tensor = _traced(trace, bound["self"])
    dims = bound.get("dim")
    dims = list(range(tensor.dim())) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    dims = [d % max(tensor.dim(), 1) for d in dims] if tensor.dim() else []
    kept = [d for d in range(tensor.dim()) if d not in dims]
    packed, shape = tensor.packed, tuple(tensor.shape)
    axes = [axis_of(g, shape, d) for d in axes_of(packed, shape) if d in dims]
    count = math.prod(shape[d] for d in dims)
    left = [packed.shape[d] for d in kept]
    rows = packed.permute(kept + dims).reshape(math.prod(left), -1).tolist()
    if bound.get("dtype") is not None:
        rows = [[g.cast(t, category(bound["dtype"])) for t in row] for row in rows]
    empty = {"sum": 0, "prod": 1, "any": False, "all": True, "mean": float("nan")}
    terms = []
    for row in rows:
        if name in ("any", "all"):
            row = [g.cast(t, BOOL) for t in row]
        elif name in ("sum", "prod"):
            row = [g.cast(t, max(INT, g.type(t))) for t in row]
        total = row[0] if row else g.constant(empty[name])
        if name in ("amax", "amin") and len(row) + len(axes) > 2 and any(map(g.active, row)):
            # In several steps, equals would not share the gradient evenly.
            axis, total = _along_one_axis(g, row, axes, [shape[d] for d in axes_of(packed, shape) if d in dims])
            row, axes_of_row = row[:1], [axis]
        else:
            axes_of_row = axes
        for term in row[1:]:
            total = FOLDS[name](g, total, term)
        for axis in axes_of_row:
            total = g.reduce(_ALONG[name], axis, total)
        if name == "mean" and row:
            total = g.apply("div", total, g.constant(float(count)))
        terms.append(total)
    if out.dim() == tensor.dim():
        left = [1 if d in dims else n for d, n in enumerate(packed.shape)]
    else:
        terms = _at_new_places(g, terms, [shape[d] for d in kept], left, [len(shape) - 1 - d for d in kept])
    return _result(trace, terms_of(terms, left), out.dtype, True, out.shape)


def _element(g: Graph, row: Sequence[int], place: int, step: int = 1) -> int:
    """The term of a row at a place, each for so many places."""
    chosen = row[0]
    for i, term in enumerate(row[1:], 1):
        chosen = g.apply("where", g.apply("ge", place, g.constant(i * step)), term, chosen)
    return chosen


def _along_one_axis(g: Graph, row: Sequence[int], axes: Sequence[int], extents: Sequence[int]) -> tuple[int, int]:
    """An axis for all elements of a row of terms with axes of these extents, and the element there."""
    size = math.prod(extents)
    axis = g.axis(len(row) * size, _FOLDED)
    images, rest = {}, axis
    for own, extent in zip(reversed(axes), reversed(extents), strict=True):
        images[own] = g.apply("mod", rest, g.constant(extent))
        rest = g.apply("floor_div", rest, g.constant(extent))
    return axis, _element(g, [g.substitute(term, images) for term in row], axis, size)


_ALONG = {
    "sum": "sum",
    "mean": "sum",
    "prod": "prod",
    "amax": "amax",
    "amin": "amin",
    "any": "amax",
    "all": "amin",
}
"""What each fold is along an axis."""


def _at_new_places(
    g: Graph, terms: Sequence[int], shape: Sequence[int], packed: Sequence[int], places: Sequence[int]
) -> list[int]:
    """The terms with the axes of `shape`, which were at these places from the last dimension."""
    images = {g.axis(n, places[d]): axis_of(g, shape, d) for d, n in enumerate(shape) if packed[d] != n}
    return [g.substitute(t, images) for t in terms]


def _extreme(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """max and min: of all, or of a dimension with the place of the first; argmax and argmin."""
    g = trace.graph
    name = func._schema.name.removeprefix("aten::")
    out = _on_ones(func, args, kwargs)
    bound = _bound(func, args, kwargs)
    tensor = _traced(trace, bound["self"])
    beats = "gt" if name.endswith("max") else "lt"
    if "dim" not in bound:  # as amax: equals share the gradient
        return _fold(trace, getattr(torch.ops.aten, f"a{name}").default, f"a{name}", [tensor], {})
    dim = bound["dim"]
    if dim is None and tensor.axes:
        dim, tensor = 0, torch.ops.aten.reshape(tensor, [-1])
        if bound["keepdim"]:
            raise Refused(f"{name} over all dimensions that keeps them", "give the dimension")
    if dim is not None and dim % max(tensor.dim(), 1) in tensor.axes:
        return _extreme_along(trace, name, tensor, dim % tensor.dim(), bound["keepdim"], beats)
    if tensor.axes:
        tensor = trace.wrap(tensor.unrolled(name), tensor.dtype)
    rows = tensor.terms.reshape(-1) if dim is None else tensor.terms.movedim(dim, -1) if tensor.dim() else tensor.terms
    values, places = [], []
    for row in rows.reshape(-1, rows.shape[-1] if rows.dim() else 1).tolist():
        value, place = row[0], g.constant(0)
        for i, term in enumerate(row[1:], 1):
            better = g.apply("or", g.apply(beats, term, value), g.apply("ne", term, term))
            value, place = g.apply("where", better, term, value), g.apply("where", better, g.constant(i), place)
        values.append(value)
        places.append(place)
    shape = out.shape if isinstance(out, Tensor) else out[0].shape
    where = _result(trace, terms_of(places, shape), torch.int64)
    if name.startswith("arg"):
        return where
    return _result(trace, terms_of(values, shape), tensor.dtype), where


def _extreme_along(trace: Trace, name: str, tensor: TracedTensor, dim: int, keepdim: bool, beats: str) -> Any:
    """The first place of the extremum along an axis, NaN before all, and the element there."""
    g = trace.graph
    shape = [1 if d == dim else n for d, n in enumerate(tensor.shape)]
    axis, end = axis_of(g, tensor.shape, dim), g.constant(tensor.shape[dim] - 1)
    values, places = [], []
    for term in tensor.packed.reshape(-1).tolist():
        most = g.reduce("amax" if beats == "gt" else "amin", axis, term)
        found = g.apply("or", g.apply("eq", term, most), g.apply("ne", term, term))
        place = g.reduce("amin", axis, g.apply("where", found, axis, end))
        places.append(place)
        values.append(g.substitute(term, {axis: place}))
    where = trace.wrap(terms_of(places, tensor.packed.shape), torch.int64, shape)
    value = trace.wrap(terms_of(values, tensor.packed.shape), tensor.dtype, shape)
    if not keepdim:
        where, value = (torch.ops.aten.squeeze(x, dim) for x in (where, value))
    return where if name.startswith("arg") else (value, where)


def _products(trace: Trace, a: Tensor, b: Tensor) -> Tensor:
    """The terms of a matrix product [..., n, k] × [..., k, m]."""
    g = trace.graph

    def dot(row: list[int], column: list[int]) -> int:
        total = None
        for x, y in zip(row, column, strict=True):
            product = ELEMENTWISE["mul"](g, x, y)
            total = product if total is None else g.apply("add", total, product)
        return g.constant(0) if total is None else total

    products = [dot(row, column) for row in a.tolist() for column in b.t().tolist()]
    return terms_of(products, (a.shape[0], b.shape[1]))


def _matrix_product(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    # Floats of one kind: a score in float32 and a captured tensor in float64 are the same to the language.
    dtype = torch.promote_types(args[0].dtype, args[1].dtype)
    if args[0].dtype.is_floating_point and args[1].dtype.is_floating_point:
        out = _on_ones(func, [torch.ones(x.shape, dtype=dtype, device="cpu") for x in args[:2]], kwargs)
    else:
        out = _on_ones(func, args, kwargs)
    left, right = (_traced(trace, x) for x in args[:2])
    if left.axes or right.axes:
        return _product_along(trace, left, right, out.dtype)
    a, b = left.terms, right.terms
    if a.dim() == 3:  # bmm
        terms = torch.stack([_products(trace, x, y) for x, y in zip(a, b, strict=True)])
    else:
        left = a if a.dim() == 2 else a[None]
        right = b if b.dim() == 2 else b[:, None]
        terms = _products(trace, left, right).reshape(out.shape)
    return _result(trace, terms, out.dtype, True)


def _product_along(trace: Trace, a: TracedTensor, b: TracedTensor, dtype: torch.dtype) -> TracedTensor:
    aten = torch.ops.aten
    if a.dim() == 1 or b.dim() == 1:  # dot
        products = aten.mul(a, b)
    else:  # [..., n, k] by [..., k, m] as [..., n, m, k]
        products = aten.mul(aten.unsqueeze(a, -2), aten.unsqueeze(aten.transpose(b, -2, -1), -3))
    total = aten.sum(products, [-1])
    return _result(trace, total.packed, dtype, True, total.shape)


def _cumsum(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    g = trace.graph
    out = _on_ones(func, args, kwargs)
    if args[0].dim() == 0:
        return _result(trace, args[0].terms, out.dtype)
    primitive = "mul" if func._schema.name == "aten::cumprod" else "add"
    terms = args[0].unrolled(func._schema.name.removeprefix("aten::")).movedim(args[1], -1)
    rows = []
    for row in terms.reshape(-1, terms.shape[-1]).tolist():
        sums = [g.cast(t, category(out.dtype)) for t in row[:1]]
        for term in row[1:]:
            sums.append(g.apply(primitive, sums[-1], g.cast(term, category(out.dtype))))
        rows.append(sums)
    sums_of = terms_of(rows, terms.shape).movedim(-1, args[1])
    return _result(trace, sums_of, out.dtype, True)


def _variance(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """var, std, and both with the mean: of the deviations from the mean."""
    aten = torch.ops.aten
    name = func._schema.name.removeprefix("aten::")
    bound = _bound(func, args, kwargs)
    tensor, dims = _traced(trace, bound["self"]), bound.get("dim")
    dims = list(range(tensor.dim())) if not dims else [dims] if isinstance(dims, int) else list(dims)
    correction = bound.get("correction", 1 if bound.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    keepdim = bool(bound.get("keepdim", False))
    mean = aten.mean(tensor, dims, True)
    squares = aten.sum(aten.square(aten.sub(tensor, mean)), dims, keepdim)
    count = math.prod(tensor.shape[d] for d in dims)
    value = aten.div(squares, max(float(count - correction), 0.0))
    if name.startswith("std"):
        value = _root(value, 2)
    return (value, mean if keepdim else aten.mean(tensor, dims)) if name.endswith("_mean") else value


def _root(x: TracedTensor, p: float) -> TracedTensor:
    """The root of what is not negative; at 0 its gradient is 0. Of both branches there, so that a derivative which
    computes what it then leaves out makes no NaN of it either."""
    aten = torch.ops.aten
    zero = aten.eq(x, 0)
    rest = aten.where(zero, aten.ones_like(x), x)
    root = aten.sqrt(rest) if p == 2 else aten.pow(rest, 1 / p)
    return aten.where(zero, aten.full_like(x, 0.0 if p > 0 else math.inf), root)


def _norm(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """norm and vector_norm; at 0 the gradient is 0."""
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    out = _on_ones(func, args, kwargs)
    p = bound["ord"] if "ord" in bound else bound["p"]
    p = 2.0 if p is None else float(p)
    tensor, dims, keepdim = _traced(trace, bound["self"]), bound.get("dim"), bool(bound.get("keepdim", False))
    dims = list(range(tensor.dim())) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    if bound.get("dtype") is not None:
        tensor = aten._to_copy(tensor, dtype=bound["dtype"])
    if p == 2:
        result = _root(aten.sum(aten.square(tensor), dims, keepdim), p)
    elif p == 0:
        result = aten.sum(aten._to_copy(aten.ne(tensor, 0), dtype=out.dtype), dims, keepdim)
    elif p == 1:
        result = aten.sum(aten.abs(tensor), dims, keepdim)
    elif math.isinf(p):
        result = (aten.amax if p > 0 else aten.amin)(aten.abs(tensor), dims, keepdim)
    else:
        size = aten.abs(tensor)
        if p < 2:  # the power has no derivative at 0, or no second one
            zero = aten.eq(size, 0)
            power = aten.pow(aten.where(zero, aten.ones_like(size), size), p)
            power = aten.where(zero, aten.full_like(size, 0.0 if p > 0 else math.inf), power)
        else:
            power = aten.pow(size, p)
        result = _root(aten.sum(power, dims, keepdim), p)
    return _result(trace, result.packed, out.dtype, shape=result.shape)


def _distance(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    return aten.linalg_vector_norm(aten.sub(bound["self"], bound["other"]), bound["p"])


def _distances(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """cdist: of each row from each row. However they are computed, they are norms."""
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    differences = aten.sub(aten.unsqueeze(bound["x1"], -2), aten.unsqueeze(bound["x2"], -3))
    return aten.linalg_vector_norm(differences, bound.get("p", 2.0), [-1])


def _softmax(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """softmax and log_softmax, which do not depend on the maximum that exp is kept from overflowing by."""
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    tensor, dim = _traced(trace, bound["self"]), bound["dim"]
    out = _on_ones(func, args, kwargs)
    shifted = aten.sub(tensor, aten.amax(trace.detached(tensor), [dim], True))
    powers = aten.exp(shifted)
    total = aten.sum(powers, [dim], True)
    logs = func._schema.name == "aten::_log_softmax"
    result = aten.sub(shifted, aten.log(total)) if logs else aten.div(powers, total)
    return _result(trace, result.packed, out.dtype, shape=result.shape)


def _logsumexp(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    tensor, dims, keepdim = _traced(trace, bound["self"]), bound["dim"], bound["keepdim"]
    tensor = tensor if tensor.dtype.is_floating_point else aten._to_copy(tensor, dtype=torch.get_default_dtype())
    most = aten.amax(trace.detached(tensor), dims, True)
    most = aten.where(aten.eq(aten.abs(most), math.inf), aten.full_like(most, 0.0), most)
    result = aten.log(aten.sum(aten.exp(aten.sub(tensor, most)), dims, keepdim))
    return aten.add(result, most if keepdim else aten.squeeze(most, dims))


_MAX_SORTED = 16
"""Vectors of so many elements are sorted one by one, in n² / 2 comparisons; longer ones by rank."""


def _sorted(trace: Trace, tensor: TracedTensor, dim: int, descending: bool, name: str) -> tuple[Tensor, Tensor]:
    """The terms in their order along the last dimension, and their places: equal ones in that of their places, NaN
    the largest."""
    g = trace.graph
    if tensor.dim() == 0:
        tensor = torch.ops.aten.unsqueeze(tensor, 0)
    n = tensor.shape[dim]
    terms = tensor.unrolled(name).movedim(dim, -1)
    values, places = [], []
    for row in terms.reshape(-1, n).tolist():
        places.append([g.constant(i) for i in range(n)])
        at = places[-1]
        for end in range(n - 1, 0, -1):
            for i in range(end):
                a, b = row[i], row[i + 1]
                small, large = (b, a) if not descending else (a, b)
                swap = g.apply("or", g.apply("lt", small, large), _only_first_nan(g, large, small))
                row[i], row[i + 1] = g.apply("where", swap, b, a), g.apply("where", swap, a, b)
                p, q = at[i], at[i + 1]
                at[i], at[i + 1] = g.apply("where", swap, q, p), g.apply("where", swap, p, q)
        values.append(row)
    return terms_of(values, terms.shape), terms_of(places, terms.shape)


def _only_first_nan(g: Graph, a: int, b: int) -> int:
    return g.apply("and", g.apply("ne", a, a), g.apply("eq", b, b))


def _by_rank(trace: Trace, tensor: TracedTensor, dim: int, descending: bool, name: str, k: int) -> tuple[Any, Any]:
    """The first k elements in order along a dimension, of kthvalue and median the one at k - 1, and their places. An
    element comes where as many others are before it as its place says: two loops over an axis for each."""
    g = trace.graph
    n = tensor.shape[dim]
    single = name in ("kthvalue", "median")
    shape = [(1 if single else k) if d == dim else size for d, size in enumerate(tensor.shape)]
    at, other = g.axis(n, _RANKED), g.axis(n, _BEFORE)
    packed = tensor.packed.movedim(dim, -1)
    values, places = [], []
    for row in packed.reshape(-1, packed.shape[-1]).tolist():

        def element(place: int, row: list[int] = row) -> int:
            if len(row) == 1:
                return g.substitute(row[0], {axis_of(g, tensor.shape, dim): place})
            return _element(g, row, place)

        x, y = element(at), element(other)
        nan, other_nan = g.apply("ne", x, x), g.apply("ne", y, y)
        before = g.apply("gt" if descending else "lt", y, x)
        last, first = (other_nan, nan) if descending else (nan, other_nan)
        before = g.apply("or", before, g.apply("and", last, g.apply("not", first)))
        equal = g.apply("or", g.apply("eq", x, y), g.apply("and", nan, other_nan))
        before = g.apply("or", before, g.apply("and", equal, g.apply("lt", other, at)))
        rank = g.reduce("sum", other, g.cast(before, INT))
        if name == "median":  # of a NaN the median is it, which is the last one
            has_nan = g.reduce("amax", at, g.cast(nan, INT))
            wanted = [g.apply("where", g.cast(has_nan, BOOL), g.constant(n - 1), g.constant(k - 1))]
        elif single:
            wanted = [g.constant(k - 1)]
        else:
            wanted = [axis_of(g, shape, dim)] if k > SMALL else [g.constant(i) for i in range(k)]
        for place in wanted:
            here = g.apply("eq", rank, place)
            values.append(g.reduce("sum", at, g.apply("where", here, x, g.constant(0))))
            places.append(g.reduce("sum", at, g.apply("where", here, at, g.constant(0))))
    count = len(values) // max(math.prod(packed.shape[:-1]), 1)

    def result(terms: list[int], dtype: torch.dtype) -> TracedTensor:
        return _result(trace, terms_of(terms, [*packed.shape[:-1], count]).movedim(-1, dim), dtype, shape=shape)

    return result(values, tensor.dtype), result(places, torch.int64)


def _ordered(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """sort, argsort, topk, median and kthvalue."""
    name = func._schema.name.removeprefix("aten::")
    bound = _bound(func, args, kwargs)
    tensor = _traced(trace, bound["self"])
    out = _on_ones(func, args, kwargs)
    if name == "median" and "dim" not in bound:
        return _median(tensor)
    dim = bound.get("dim", -1)
    descending = bool(bound.get("descending", False)) or (name == "topk" and bound["largest"])
    size = tensor.shape[dim] if tensor.dim() else 1
    if size > _MAX_SORTED:
        k = (size + 1) // 2 if name == "median" else bound.get("k", size)
        ranked = _by_rank(trace, tensor, dim % tensor.dim(), descending, name, k)
        if name in ("median", "kthvalue") and not bound.get("keepdim", False):
            ranked = tuple(torch.ops.aten.squeeze(x, dim) for x in ranked)
        return ranked[1] if name == "argsort" else ranked[0] if isinstance(out, Tensor) else ranked
    values, places = _sorted(trace, tensor, dim, descending, name)
    if name in ("median", "kthvalue"):
        size = values.shape[-1]
        k = (size - 1) // 2 if name == "median" else bound["k"] - 1
        g = trace.graph
        picked = []
        for row, at in zip(values.reshape(-1, size).tolist(), places.reshape(-1, size).tolist(), strict=True):
            value, place = row[k], at[k]
            if name == "median":  # where there is a NaN it is the median; NaN is sorted last
                nan = g.apply("ne", row[-1], row[-1])
                value, place = g.apply("where", nan, row[-1], value), g.apply("where", nan, at[-1], place)
            picked.append((value, place))
        values, places = (terms_of([x[i] for x in picked], values.shape[:-1]).unsqueeze(-1) for i in (0, 1))
        values, places = (x.movedim(-1, dim) if bound["keepdim"] else x.squeeze(-1) for x in (values, places))
    else:
        if name == "topk":
            values, places = values[..., : bound["k"]], places[..., : bound["k"]]
        values, places = (x.movedim(-1, dim) for x in (values, places))
    if name == "argsort":
        return _result(trace, places.reshape(out.shape), torch.int64)
    return _result(trace, values.reshape(out[0].shape), out[0].dtype), _result(
        trace, places.reshape(out[1].shape), torch.int64
    )


def _median(tensor: TracedTensor) -> TracedTensor:
    """Of all elements: those that are equal to it share the gradient evenly."""
    aten = torch.ops.aten
    flat = aten.reshape(tensor, [-1])
    value = aten.detach(aten.median(flat, 0)[0])
    if not tensor.dtype.is_floating_point:
        return value
    equal = aten.amax(aten.where(aten.eq(flat, value), flat, aten.full_like(flat, -math.inf)))
    return aten.where(aten.ne(value, value), value, equal)


def _bucketize(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """bucketize and searchsorted: how many boundaries lie before each value."""
    aten = torch.ops.aten
    bound = _bound(func, args, kwargs)
    searched = func._schema.name == "aten::searchsorted"
    boundaries = bound["sorted_sequence"] if searched else bound["boundaries"]
    values = bound["self"]
    if searched and (bound.get("sorter") is not None or boundaries.dim() != 1):
        raise Refused("searchsorted with a sorter or in several rows", "give sorted boundaries of one dimension")
    right = bool(bound["right"]) or (searched and bound.get("side") == "right")
    boundaries = _traced(trace, boundaries)
    values = _traced(trace, values) if isinstance(values, Tensor) else trace.stacked(values)
    # `boundary < value` would be wrong for NaN, which lies beyond all boundaries.
    after = (aten.gt if right else aten.ge)(boundaries, aten.unsqueeze(values, -1))
    count = aten.sum(aten.logical_not(after), [-1])
    return aten._to_copy(count, dtype=torch.int32 if bound.get("out_int32") else torch.int64)


def _count_nonzero(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    bound = _bound(func, args, kwargs)
    dim = bound["dim"]
    dims = [] if dim is None else [dim] if isinstance(dim, int) else dim
    return torch.ops.aten.sum(torch.ops.aten.ne(bound["self"], 0), dims)


_TABLE: tuple[tuple[str, Handler, str], ...] = (
    ("_to_copy", _to_copy, "self dtype"),
    ("_local_scalar_dense", _local_scalar, "self"),
    ("index", _index, "self indices"),
    ("index_select", _index_select, "self dim index"),
    ("take", _take, "self index"),
    ("gather", _gather, "self dim index"),
    ("embedding", _embedding, "weight indices padding_idx"),
    ("cumsum cumprod", _cumsum, "self dim dtype"),
    ("sort argsort", _ordered, "self dim descending"),
    ("topk", _ordered, "self k dim largest"),
    ("kthvalue", _ordered, "self k dim keepdim"),
    ("median", _ordered, "self dim keepdim"),
    ("bucketize", _bucketize, "self boundaries out_int32 right"),
    ("searchsorted", _bucketize, "sorted_sequence self out_int32 right side"),
    ("count_nonzero", _count_nonzero, "self dim"),
    ("var std var_mean std_mean", _variance, "self dim correction unbiased keepdim"),
    ("norm linalg_vector_norm", _norm, "self p ord dim keepdim dtype"),
    ("_softmax _log_softmax", _softmax, "self dim half_to_float"),
    ("logsumexp", _logsumexp, "self dim keepdim"),
    ("dist", _distance, "self other p"),
    ("_cdist_forward _euclidean_dist", _distances, "x1 x2 p compute_mode"),
    ("max min argmax argmin", _extreme, "self dim keepdim"),
    ("zeros_like ones_like", _fill, "self dtype"),
    ("new_zeros new_ones", _fill, "self size dtype"),
    ("full_like", _fill, "self fill_value dtype"),
    ("new_full", _fill, "self size fill_value dtype"),
    ("empty_like", _empty, "self dtype"),
    ("new_empty", _empty, "self size dtype"),
    ("new_empty_strided", _empty, "self size stride dtype"),
    ("mm bmm", _matrix_product, "self mat2 out_dtype"),
    ("mv", _matrix_product, "self vec"),
    ("dot", _matrix_product, "self tensor"),
    ("vdot", _matrix_product, "self other"),
)
"""Operations, what they become, and the arguments that are read: others raise where they are given."""
_HANDLERS: dict[str, Handler] = {name: handler for names, handler, _ in _TABLE for name in names.split()}
_READ = {name: words(read) for names, _, read in _TABLE for name in names.split()}
_READ_BY_FOLDS = words("self dim keepdim dtype")
