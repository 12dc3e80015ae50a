"""Operations that are made of others, in a way that gives PyTorch's gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .elements import bound, name_of, on_ones, result, traced
from .errors import Refused
from .folds import dims_of
from .tensor import TracedTensor
from .trace import Trace

__all__ = ["bucketize", "distances", "logsumexp", "norm", "softmax", "variance"]


def variance(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """var, std, and both with the mean: of the deviations from the mean."""
    aten, name = torch.ops.aten, name_of(func)
    given = bound(func, args, kwargs)
    tensor, keepdim = traced(trace, given["self"]), bool(given.get("keepdim", False))
    dims = dims_of(tensor, given.get("dim"))
    correction = given.get("correction", 1 if given.get("unbiased", True) else 0)
    mean = aten.mean(tensor, dims, True)
    squares = aten.sum(aten.square(aten.sub(tensor, mean)), dims, keepdim)
    count = math.prod(tensor.shape[d] for d in dims) - (1 if correction is None else correction)
    value = aten.div(squares, max(float(count), 0.0))
    if name.startswith("std"):
        value = _root(value, 2)
    return (value, mean if keepdim else aten.mean(tensor, dims)) if name.endswith("_mean") else value


def _where_zero(x: TracedTensor, function: Any, at_zero: float) -> TracedTensor:
    """function(x), and at 0 a number with gradient 0. There the function gets 1, so that a derivative which computes
    what it then leaves out makes no NaN of it."""
    aten = torch.ops.aten
    zero = aten.eq(x, 0)
    return aten.where(zero, aten.full_like(x, at_zero), function(aten.where(zero, aten.ones_like(x), x)))


def _root(x: TracedTensor, p: float) -> TracedTensor:
    """The root of what is not negative."""
    aten = torch.ops.aten
    function = aten.sqrt if p == 2 else lambda x: aten.pow(x, 1 / p)
    return _where_zero(x, function, 0.0 if p > 0 else math.inf)


def norm(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """norm and vector_norm; at 0 the gradient is 0."""
    aten = torch.ops.aten
    given, out = bound(func, args, kwargs), on_ones(func, args, kwargs)
    p = given["ord"] if "ord" in given else given["p"]
    p = 2.0 if p is None else float(p)
    tensor, keepdim = traced(trace, given["self"]), bool(given.get("keepdim", False))
    dims = dims_of(tensor, given.get("dim"))
    if given.get("dtype") is not None:
        tensor = aten._to_copy(tensor, dtype=given["dtype"])
    if p == 2:
        found = _root(aten.sum(aten.square(tensor), dims, keepdim), p)
    elif p == 0:
        found = aten.sum(aten._to_copy(aten.ne(tensor, 0), dtype=out.dtype), dims, keepdim)
    elif p == 1:
        found = aten.sum(aten.abs(tensor), dims, keepdim)
    elif math.isinf(p):
        found = (aten.amax if p > 0 else aten.amin)(aten.abs(tensor), dims, keepdim)
    else:
        size = aten.abs(tensor)
        # Below 2 the power has no derivative at 0, or no second one.
        power = _where_zero(size, lambda x: aten.pow(x, p), 0.0 if p > 0 else math.inf) if p < 2 else aten.pow(size, p)
        found = _root(aten.sum(power, dims, keepdim), p)
    return result(trace, found.packed, out.dtype, shape=found.shape)


def distances(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """cdist: of each row from each row. However they are computed, they are norms."""
    aten = torch.ops.aten
    given = bound(func, args, kwargs)
    differences = aten.sub(aten.unsqueeze(given["x1"], -2), aten.unsqueeze(given["x2"], -3))
    return aten.linalg_vector_norm(differences, given.get("p", 2.0), [-1])


def softmax(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """softmax and log_softmax, which do not depend on the maximum that exp is kept from overflowing by."""
    aten = torch.ops.aten
    given, out = bound(func, args, kwargs), on_ones(func, args, kwargs)
    tensor, dim = traced(trace, given["self"]), given["dim"]
    shifted = aten.sub(tensor, aten.amax(trace.detached(tensor), [dim], True))
    powers = aten.exp(shifted)
    total = aten.sum(powers, [dim], True)
    found = aten.sub(shifted, aten.log(total)) if name_of(func) == "_log_softmax" else aten.div(powers, total)
    return result(trace, found.packed, out.dtype, shape=found.shape)


def logsumexp(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    aten = torch.ops.aten
    given = bound(func, args, kwargs)
    tensor, dims, keepdim = traced(trace, given["self"]), given["dim"], given["keepdim"]
    tensor = tensor if tensor.dtype.is_floating_point else aten._to_copy(tensor, dtype=torch.get_default_dtype())
    most = aten.amax(trace.detached(tensor), dims, True)
    most = aten.where(aten.eq(aten.abs(most), math.inf), aten.full_like(most, 0.0), most)
    found = aten.log(aten.sum(aten.exp(aten.sub(tensor, most)), dims, keepdim))
    return aten.add(found, most if keepdim else aten.squeeze(most, dims))


def bucketize(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor:
    """bucketize and searchsorted: how many boundaries lie before each value."""
    aten = torch.ops.aten
    given = bound(func, args, kwargs)
    boundaries = given["boundaries"] if "boundaries" in given else given["sorted_sequence"]
    if given.get("sorter") is not None or boundaries.dim() != 1:
        raise Refused("searchsorted with a sorter or in several rows", "give sorted boundaries of one dimension")
    boundaries, values = traced(trace, boundaries), given["self"]
    values = traced(trace, values) if isinstance(values, Tensor) else trace.stacked(values)
    # `boundary < value` would be wrong for NaN, which lies beyond all boundaries.
    right = bool(given["right"]) or given.get("side") == "right"
    after = (aten.gt if right else aten.ge)(boundaries, aten.unsqueeze(values, -1))
    count = aten.sum(aten.logical_not(after), [-1])
    return aten._to_copy(count, dtype=torch.int32 if given.get("out_int32") else torch.int64)
