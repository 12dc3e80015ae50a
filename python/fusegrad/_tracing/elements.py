"""Operations on each element, and what those of other modules share with them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegrad._C.score_mod import INT

from .bounds import wrapped
from .errors import Refused, unknown
from .ops import ELEMENTWISE
from .tensor import TracedTensor
from .trace import Trace, category
from .trees import mapped
from .vectors import common_axes, terms_of

__all__ = [
    "bound",
    "each",
    "elementwise",
    "fill",
    "local_scalar",
    "name_of",
    "on_ones",
    "result",
    "to_copy",
    "traced",
    "unknown_op",
]

_NARROW = {torch.int8: (8, True), torch.int16: (16, True), torch.uint8: (8, False), torch.int32: (32, True)}
_FILLS = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1}


def name_of(func: Any) -> str:
    """ATen's, without the overload."""
    return func._schema.name.removeprefix("aten::")


def unknown_op(func: Any) -> Refused:
    name = name_of(func)
    return unknown(f"{name}.{func._overloadname}" if func._overloadname not in ("default", "Tensor") else name)


def bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names in the schema."""
    found = {a.name: a.default_value for a in func._schema.arguments}
    found.update(zip(found, args, strict=False))
    return {**found, **kwargs}


def on_ones(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The results for ones: their shapes and dtypes, with PyTorch's checks of the arguments. On the CPU, as many meta
    kernels are Python, which imports torch._dynamo."""

    def stand_in(x: Any) -> Any:
        return torch.ones(x.shape, dtype=x.dtype, device="cpu") if isinstance(x, Tensor) else x

    args, kwargs = mapped((args, kwargs), stand_in)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    return func(*args, **kwargs)


def traced(trace: Trace, x: Tensor) -> TracedTensor:
    """An operand. A real tensor is one that PyTorch made within an operation: captured ones were replaced before."""
    return x if isinstance(x, TracedTensor) else trace.constants(x)


def each(terms: Tensor, function: Callable[[int], int]) -> Tensor:
    return terms_of([function(t) for t in terms.reshape(-1).tolist()], terms.shape)


def result(
    trace: Trace, terms: Tensor, dtype: torch.dtype, arithmetic: bool = False, shape: Sequence[int] | None = None
) -> TracedTensor:
    """A value of these packed terms; `arithmetic`: integers of few bits wrap."""
    g = trace.graph

    def fitting(term: int) -> int:
        term = g.cast(term, category(dtype))
        return wrapped(g, term, *_NARROW[dtype]) if arithmetic and dtype in _NARROW else term

    return trace.wrap(each(terms, fitting), dtype, shape)


def _packed(trace: Trace, x: Tensor | float) -> tuple[Tensor, Sequence[int]]:
    if isinstance(x, Tensor):
        x = traced(trace, x)
        return x.packed, x.shape
    return terms_of(trace.graph.constant(x)), ()


_signature = functools.lru_cache(inspect.signature)


def elementwise(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    emit = ELEMENTWISE[func._schema.name.split("::")[1]]
    out = on_ones(func, args, kwargs)
    first = out[0] if isinstance(out, tuple) else out
    given = bound(func, args, kwargs)
    try:
        _signature(emit).bind(trace.graph, **given)
    except TypeError:
        raise unknown_op(func) from None
    if not all(x is None or isinstance(x, (Tensor, int, float, str)) for x in given.values()):
        raise unknown_op(func)
    named = {k: v for k, v in given.items() if v is None or isinstance(v, str)}
    operands = {k: v for k, v in given.items() if k not in named}
    packed = common_axes(trace.graph, [_packed(trace, x) for x in operands.values()], first.shape)
    packed = list(torch.broadcast_tensors(*packed))
    columns = zip(*(p.reshape(-1).tolist() for p in packed), strict=True)
    terms = [emit(trace.graph, **named, **dict(zip(operands, column, strict=True))) for column in columns]
    value = result(trace, terms_of(terms, packed[0].shape), first.dtype, True, first.shape)
    return (value, value) if isinstance(out, tuple) else value  # log_sigmoid_forward's second is for its backward


def to_copy(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    dtype = kwargs.get("dtype") or args[0].dtype
    if dtype.is_complex:
        raise Refused(f"a cast to {dtype}", "scores are real")
    g, source = trace.graph, args[0].dtype
    fits = not source.is_floating_point and (source == torch.bool or source.itemsize < dtype.itemsize)
    if dtype not in _NARROW or fits or (dtype == torch.int32 and source.is_floating_point):
        packed = args[0].packed if dtype != torch.float64 else each(args[0].packed, trace.in_float64)
        return result(trace, packed, dtype, shape=args[0].shape)
    narrowed = each(args[0].packed, lambda t: wrapped(g, g.cast(t, INT), *_NARROW[dtype], from_wider=source != dtype))
    return result(trace, narrowed, dtype, shape=args[0].shape)


def fill(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """zeros_like and its kin; what is empty is NaN."""
    out = on_ones(func, args, kwargs)
    nothing = math.nan if out.dtype.is_floating_point else 0
    value = bound(func, args, kwargs).get("fill_value", _FILLS.get(name_of(func), nothing))
    return trace.filled(trace.graph.cast(trace.graph.constant(value), category(out.dtype)), out.shape, out.dtype)


def local_scalar(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    value = trace.graph.value(int(args[0].terms))
    if value is not None:
        return value
    raise Refused(
        "a value that differs from score to score as a Python number",
        "keep it a tensor: .long() for int(), x[index] for an element, torch.where for a branch",
    )
