"""ATen operations on traced tensors.

An elementwise operation is looked up in ops.py; what only moves elements about is done, by PyTorch itself, to the
tensors of terms; sums and matrix products are unrolled; all else is decomposed by PyTorch's own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import Refused
from .graph import BOOL, INT
from .ops import ELEMENTWISE, FOLDS, wrapped
from .tensor import TracedTensor, terms_of
from .trace import Trace, category
from .trees import mapped, words

__all__ = ["dispatch"]

Handler = Callable[[Trace, Any, Sequence[Any], dict[str, Any]], Any]

_MOVES = words(
    """
    view _unsafe_view reshape expand permute t transpose select slice unsqueeze squeeze cat stack flip repeat split
    split_with_sizes unbind diagonal roll movedim alias clone _reshape_alias tile unfold view_as squeeze_
    repeat_interleave lift_fresh lift lift_fresh_copy _conj resolve_conj contiguous _to_copy_same chunk unsafe_split
    diag_embed swapaxes
    """
)
_FILLS = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "full_like": None, "new_full": None}
_NARROW = {torch.int8: (8, True), torch.int16: (16, True), torch.uint8: (8, False)}


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    trace = _trace_of((args, kwargs))
    name = func._schema.name.split("::")[1]
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
    if handler is not None:
        return handler(trace, func, args, kwargs)
    if name in ELEMENTWISE:
        return _elementwise(trace, func, ELEMENTWISE[name], args, kwargs)
    if name in _MOVES:
        return _move(trace, func, args, kwargs)
    if name in FOLDS:
        return _fold(trace, func, name, args, kwargs)
    decomposed = _decomposed(func, args, kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    raise Refused(
        f"the operation {name}, which score_mods do not have", "write it with elementwise operations of torch"
    )


def _decomposed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._decomp import decomposition_table  # takes half a second to import

    rule = decomposition_table.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func._can_decompose():
        return func.decompose(*args, **kwargs)
    return NotImplemented


def _trace_of(tree: Any) -> Trace:
    found: list[Trace] = []
    mapped(tree, lambda x: found.append(x.trace) if isinstance(x, TracedTensor) else None)
    if any(trace is not found[0] for trace in found):
        raise Refused("a value of another score_mod or mask_mod", "compute within one function")
    return found[0]


def _on_ones(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The results for ones: their shapes and dtypes, with PyTorch's checks of the arguments. On the CPU: many meta
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


def _result(trace: Trace, terms: Tensor, dtype: torch.dtype, arithmetic: bool = False) -> TracedTensor:
    g = trace.graph

    def fitting(term: int) -> int:
        term = g.cast(term, category(dtype))
        if arithmetic and dtype in _NARROW:
            term = wrapped(g, term, *_NARROW[dtype])
        return term

    return trace.wrap(_each(terms, fitting), dtype)


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


def _elementwise(trace: Trace, func: Any, emit: Callable[..., int], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    out = _on_ones(func, args, kwargs)
    first = out[0] if isinstance(out, tuple) else out
    bound = _bound(func, args, kwargs)
    named = {k: v for k, v in bound.items() if v is None or isinstance(v, str)}
    operands = {
        k: _terms(trace, v).expand(first.shape).reshape(-1).tolist()
        for k, v in bound.items()
        if isinstance(v, (Tensor, int, float))
    }
    terms = [
        emit(trace.graph, **named, **dict(zip(operands, column, strict=True)))
        for column in zip(*operands.values(), strict=True)
    ]
    result = _result(trace, terms_of(terms, first.shape), first.dtype, True)
    if isinstance(out, tuple):  # log_sigmoid_forward's second result is for its backward
        return (result, result)
    return result


def _move(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    out = _on_ones(func, args, kwargs)
    given = [x for x in args[:1] if isinstance(x, TracedTensor)]
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    if given and given[0].read is not None and func._schema.name in ("aten::alias", "aten::lift_fresh"):
        return given[0]
    moved = func(*mapped(args, lambda x: _terms(trace, x) if isinstance(x, Tensor) else x), **kwargs)
    if isinstance(out, Tensor):
        return _result(trace, moved, out.dtype)
    return [_result(trace, terms, meta.dtype) for terms, meta in zip(moved, out, strict=True)]


def _in_place(trace: Trace, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`score += x` is a new value under the old name, as long as nothing else may show the old one."""
    target = args[0] if args else None
    base = name[:-1]
    if not (isinstance(target, TracedTensor) and name.endswith("_") and hasattr(torch.ops.aten, base)):
        raise Refused("a write into a captured tensor", "compute a new value, such as a + b for a += b")
    if target.viewed:
        raise Refused("a write into a value that has views", "compute a new value, such as a + b for a += b")
    if name == "copy_":
        value = torch.ops.aten._to_copy(args[1], dtype=target.dtype)
        value = torch.ops.aten.expand(value, list(target.shape))
    elif name in ("fill_", "zero_"):
        value = torch.ops.aten.full_like(target, args[1] if len(args) > 1 else 0)
    else:
        overload = getattr(getattr(torch.ops.aten, base), func._overloadname)
        value = overload(*args, **kwargs)
    if value.shape != target.shape or category(value.dtype) > category(target.dtype):
        raise Refused(
            f"an in-place operation whose result is {value!r}, not {target!r}", "compute a new value: a = a + b"
        )
    target.assign(_result(trace, value.terms, target.dtype))
    return target


# --- single operations ----------------------------------------------------------------------------------------


def _to_copy(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    dtype = kwargs.get("dtype") or args[0].dtype
    if dtype.is_complex:
        raise Refused(f"a cast to {dtype}", "scores are real")
    narrower = dtype in _NARROW and args[0].dtype != torch.bool
    return _result(trace, args[0].terms, dtype, narrower)


def _fill(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    bound = _bound(func, args, kwargs)
    value = _FILLS[func._schema.name.removeprefix("aten::")]
    out = _on_ones(func, args, kwargs)
    term = trace.graph.constant(bound["fill_value"] if value is None else value)
    return _result(trace, terms_of(term).expand(out.shape), out.dtype)


def _empty(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    out = _on_ones(func, args, kwargs)
    number = float("nan") if out.dtype.is_floating_point else 0
    return _result(trace, terms_of(trace.graph.constant(number)).expand(out.shape), out.dtype)


def _index(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, indices = args
    items = [slice(None) if x is None else _integers(trace, x) for x in indices]
    items += [slice(None)] * (tensor.dim() - len(items))
    return trace.index_by_terms(_traced(trace, tensor), items)


def _integers(trace: Trace, x: Tensor) -> Tensor:
    if x.dtype.is_floating_point or x.dtype == torch.bool:
        raise Refused(f"an index of {x.dtype}", "index by integers, see .long() and torch.where")
    return _terms(trace, x)


def _traced(trace: Trace, x: Tensor) -> TracedTensor:
    return x if isinstance(x, TracedTensor) else trace.constants(x)


def _index_select(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, dim, index = _traced(trace, args[0]), args[1], _integers(trace, args[2])
    items: list[Any] = [slice(None)] * tensor.dim()
    items[dim] = index.reshape(-1)
    return trace.index_by_terms(tensor, items)


def _take(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, index = _traced(trace, args[0]), args[1]
    g = trace.graph
    items: list[Any] = []
    rest = _integers(trace, index)
    rest = _each(rest, lambda t: g.apply("mod", t, g.constant(max(tensor.numel(), 1))))
    for size in reversed(tensor.shape):
        items.insert(0, _each(rest, lambda t, n=size: g.apply("mod", t, g.constant(n))))  # type: ignore[misc]
        rest = _each(rest, lambda t, n=size: g.apply("floor_div", t, g.constant(n)))  # type: ignore[misc]
    return trace.index_by_terms(tensor, items)


def _gather(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    tensor, dim, index = _traced(trace, args[0]), args[1], _integers(trace, args[2])
    if tensor.dim() == 0:
        return tensor
    dim %= tensor.dim()
    items: list[Any] = []
    for d in range(tensor.dim()):
        if d == dim:
            items.append(index)
            continue
        view = [1] * index.dim()
        view[d] = index.shape[d]
        places = terms_of([trace.graph.constant(i) for i in range(index.shape[d])], view)
        items.append(places.expand(index.shape))
    return trace.index_by_terms(tensor, items)


def _embedding(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    return trace.index_by_terms(_traced(trace, args[0]), [_integers(trace, args[1]), slice(None)])


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
    rows = tensor.terms.permute(kept + dims).reshape(out.numel(), -1).tolist()
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
        for term in row[1:]:
            total = FOLDS[name](g, total, term)
        if name == "mean" and row:
            total = g.apply("div", total, g.constant(float(len(row))))
        terms.append(total)
    return _result(trace, terms_of(terms, out.shape), out.dtype, True)


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
    a, b = (_terms(trace, x) for x in args[:2])
    if a.dim() == 3:  # bmm
        terms = torch.stack([_products(trace, x, y) for x, y in zip(a, b, strict=True)])
    else:
        left = a if a.dim() == 2 else a[None]
        right = b if b.dim() == 2 else b[:, None]
        terms = _products(trace, left, right).reshape(out.shape)
    return _result(trace, terms, out.dtype, True)


def _cumsum(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    g = trace.graph
    out = _on_ones(func, args, kwargs)
    if args[0].dim() == 0:
        return _result(trace, args[0].terms, out.dtype)
    rows = []
    terms = args[0].terms.movedim(args[1], -1)
    for row in terms.reshape(-1, terms.shape[-1]).tolist():
        sums = row[:1]
        for term in row[1:]:
            sums.append(g.apply("add", sums[-1], term))
        rows.append(sums)
    sums_of = terms_of(rows, terms.shape).movedim(-1, args[1])
    return _result(trace, sums_of, out.dtype, True)


_HANDLERS: dict[str, Handler] = {
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar,
    "index": _index,
    "index_select": _index_select,
    "take": _take,
    "gather": _gather,
    "embedding": _embedding,
    "cumsum": _cumsum,
    **dict.fromkeys(("max", "min", "argmax", "argmin"), _extreme),
    **dict.fromkeys(_FILLS, _fill),
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), _empty),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _matrix_product),
}
