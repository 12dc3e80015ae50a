"""Functions of torch that PyTorch would not run on traced tensors, or not as their values want it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .bounds import checked
from .elements import each
from .errors import Refused
from .indexing import index
from .lifted import Lifted
from .reads import numbers_along
from .tensor import TracedTensor
from .trace import Trace, category
from .trees import contains, mapped

__all__ = [
    "as_tensor",
    "clamp",
    "getitem",
    "linear",
    "made_of_numbers",
    "matmul",
    "one_hot",
    "requires_grad",
    "tensor",
    "with_value",
]


def getitem(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return index(trace, trace.operand(args[0]), args[1])


def _in(trace: Trace, x: TracedTensor, dtype: torch.dtype | None) -> TracedTensor:
    return x if dtype is None else trace.run(Tensor.to, x, dtype)


def tensor(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch.tensor, and the method new_tensor: a copy without a gradient."""
    data = kwargs["data"] if "data" in kwargs else args[-1]
    dtype = args[0].dtype if len(args) + ("data" in kwargs) > 1 else None
    return _in(trace, trace.run(Tensor.detach, trace.stacked(data)), kwargs.get("dtype") or dtype)


def as_tensor(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _in(trace, trace.stacked(args[0] if args else kwargs["data"]), kwargs.get("dtype"))


def made_of_numbers(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor | None:
    """What a function makes of Python's numbers from outside alone, where that is a value of the graph."""
    if name in ("tensor", "as_tensor", "scalar_tensor") and args:
        made = trace.stacked(args[0])
    elif name == "full" and len(args) == 2 and contains(args[1], Lifted):
        made = trace.lifted(args[1])
        shape = args[0] if isinstance(args[0], (tuple, list)) else (args[0],)
        made = trace.filled(int(made.terms), shape, made.dtype)
    else:
        return None
    return _in(trace, made, kwargs.get("dtype"))


def with_value(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """full_like and new_full: the value may be traced, where PyTorch wants a number."""
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
    zero = False if isinstance(value, bool) else 0
    if "fill_value" in kwargs:
        kwargs = {**kwargs, "fill_value": zero}
    else:
        args = [*args[:-1], zero]
    like, value = trace.run(func, *args, **kwargs), trace.stacked(value)
    if value.dim() != 0:
        raise Refused(f"a fill value of shape {list(value.shape)}", "fill with a single number")
    return trace.filled(trace.graph.cast(int(value.terms), category(like.dtype)), like.shape, like.dtype)


def clamp(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """PyTorch wants both bounds to be tensors, or both numbers."""
    args, kwargs = mapped((args, kwargs), trace.operand)
    if sum(isinstance(x, TracedTensor) for x in [*args, *kwargs.values()]) > 1:
        args, kwargs = mapped((args, kwargs), lambda x: trace.stacked(x) if isinstance(x, (int, float)) else x)
    return trace.run(func, *args, **kwargs)


def matmul(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """PyTorch reshapes the product of a vector and a matrix in place, which a tensor without memory cannot follow."""
    a, b = (trace.operand(x) for x in args)
    if getattr(func, "__name__", "") == "__rmatmul__":
        a, b = b, a
    if a.dim() == 1 and b.dim() == 2:
        return trace.run(torch.mv, b.t(), a)
    return trace.run(torch.matmul, a, b)


def linear(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    (x, weight, *rest), kwargs = mapped((args, kwargs), trace.operand)
    bias = rest[0] if rest else kwargs.get("bias")
    product = matmul(trace, torch.matmul, (x, trace.run(torch.t, weight)), {})
    return product if bias is None else trace.run(torch.add, product, bias)


def one_hot(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """PyTorch looks at the values: for the number of classes, and for those that are none."""
    (x, *rest), kwargs = mapped((args, kwargs), trace.operand)
    classes = rest[0] if rest else kwargs.get("num_classes", -1)
    if not isinstance(classes, int) or classes <= 0:
        raise Refused("one_hot without a number of classes", "give num_classes")
    if x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"one_hot wants integers of 64 or 32 bits, not {x.dtype}")
    terms = each(x.packed, lambda t: checked(trace.graph, t, classes))
    places = trace.run(torch.unsqueeze, trace.wrap(terms, torch.int64, x.shape), -1)
    return trace.run(Tensor.to, trace.run(torch.eq, places, numbers_along(trace, [classes], 0)), torch.int64)


def requires_grad(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if x.read is None and any(map(trace.graph.on_score, x.terms.reshape(-1).tolist())):
        raise Refused("whether the score requires grad, which is not known", "leave it to autograd")
    return trace.run(func, *args)
