"""score_mods and mask_mods of JAX in the score_mod language, whose graph, derivative and kernels are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fusegrad._C.score_mod import MAX_LENGTH

from .._program import PLACES
from ._tracing.errors import OneByOne, Refused, TraceError, located
from ._tracing.interpret import interpret
from ._tracing.trace import Trace
from ._tracing.values import Value, category

__all__ = ["Mod", "TraceError", "trace_mask_mod", "trace_score_mod"]

_OP = "fusegrad.jax.flex_attention"


class Mod(NamedTuple):
    """A score_mod or mask_mod as the kernels take it."""

    text: str
    """The canonical text of the language; '' for none."""
    buffers: tuple[jax.Array, ...]
    """What the text calls @0, @1, ..., in order: arrays, or tracers of what surrounds the call."""
    scalars: tuple[float | int | bool, ...]
    """What it calls $0, $1, ..."""
    own_derivatives: bool = False
    """Whether it has functions with a derivative that the user wrote: the text does not say what that depends on."""


def trace_score_mod(
    score_mod: Callable[..., Any] | None,
    *,
    score_dtype: Any = jnp.float32,
    sizes: Sequence[int | None] | None = None,
    op: str = _OP,
) -> Mod:
    """A score_mod ``(score, b, h, q_idx, kv_idx) -> score`` in the language. It is traced by JAX as a function of
    scalars; ``sizes``, the numbers of batches, heads, queries and keys that the indices are below, say which reads are
    in range without being clamped: without them nearly none. None stands for any number.

    Raises:
        TraceError: ``op: score_mod: what it must not do; what to write instead``, with the line.
    """
    scores = jax.ShapeDtypeStruct((), score_dtype)
    return _trace("score_mod", score_mod, ("score", *PLACES), (scores, *_places()), sizes, op)


def trace_mask_mod(
    mask_mod: Callable[..., Any] | None, *, sizes: Sequence[int | None] | None = None, op: str = _OP
) -> Mod:
    """A mask_mod ``(b, h, q_idx, kv_idx) -> bool`` in the language, see :func:`trace_score_mod`."""
    return _trace("mask_mod", mask_mod, PLACES, _places(), sizes, op)


def _places() -> tuple[Any, ...]:
    return (jax.ShapeDtypeStruct((), jnp.int32),) * len(PLACES)


def _trace(
    kind: str, function: Any, names: Sequence[str], types: Sequence[Any], sizes: Sequence[int | None] | None, op: str
) -> Mod:
    if function is None:
        return Mod("", (), ())
    if isinstance(function, Mod):
        return function
    if not callable(function):
        raise TypeError(f"{op}: {kind} must be a function, but got {type(function).__name__}")
    if not all(n is None or 0 <= n <= MAX_LENGTH for n in sizes or ()):
        raise ValueError(f"{op}: sizes must be at most {MAX_LENGTH}, but got {list(sizes or ())}")
    closed = _jaxpr(kind, function, types, op)
    _check_result(kind, closed, op)
    t = Trace(kind, sizes)
    try:
        inputs = [
            Value(t, (), type_.dtype, lambda _, name=name: t.g.input(name))  # type: ignore[misc]
            for name, type_ in zip(names, types, strict=True)
        ]
        (result,) = interpret(t, closed, inputs)
        text, buffers, _ = t.g.compact(result.at(()))
    except RecursionError:
        long = Refused("a long chain of operations on arrays", "index the arrays before, and compute on single numbers")
        raise located(long, op, kind) from None
    except (Refused, OneByOne, ValueError) as error:
        raise located(error, op, kind) from (None if isinstance(error, Refused) else error)
    return Mod(text, tuple(t.buffers[i] for i in buffers), (), t.own_derivatives)


def _jaxpr(kind: str, function: Any, types: Sequence[Any], op: str) -> Any:
    def call(*args: Any) -> Any:
        return function(*args)

    try:
        return jax.make_jaxpr(call)(*types)
    except jax.errors.ConcretizationTypeError as error:
        raise located(
            error,
            op,
            kind,
            "a Python value of what differs from score to score; use jnp.where(condition, a, b), or lax.cond, for a "
            "branch, and functions of jnp for Python's",
        ) from error
    except Exception as error:
        error.add_note(f"{op}: while the {kind} was traced")  # type: ignore[attr-defined]  # JAX needs Python 3.11
        raise


def _check_result(kind: str, closed: Any, op: str) -> None:
    avals = closed.out_avals
    if len(avals) != 1 or avals[0].shape != ():
        got = ", ".join(f"{a.dtype}{list(a.shape)}" for a in avals) or "nothing"
        raise TraceError(f"{op}: {kind} must return one number for a score, but got {got}")
    if kind == "mask_mod" and avals[0].dtype != jnp.bool_:
        raise TraceError(f"{op}: mask_mod must return bool, but got {avals[0].dtype}")
    try:
        category(avals[0].dtype)
    except Refused as error:
        raise located(error, op, kind) from None
