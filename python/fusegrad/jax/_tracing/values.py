"""What a traced function computes with: arrays as functions from indices to terms of the graph.

An operation on arrays says which term stands at an index, and nothing is computed before it is asked for: a
transposed array asks at permuted indices, a product of matrices sums over an axis of the language at whose variable it
asks both factors. An index is itself a term: a number, what the function computes, or the variable of an axis. So no
array is ever written out, and whatever indexes what is one thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fusegrad._C.score_mod import BOOL, FLOAT, INT

from .errors import Refused

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["MAX_UNROLLED", "SMALL", "Index", "Known", "Rule", "Value", "category"]

Index = tuple[int, ...]
Rule = Callable[[Index], int]

SMALL = 2
"""Reductions over more elements have an axis."""
MAX_UNROLLED = 64
"""What has no loop along an axis is done element by element, for at most so many."""
_MAX_CONSTANTS = 64
"""Numbers that the function itself writes down are part of the text up to so many."""


def category(dtype: Any) -> int:
    """The language's type of such numbers."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return BOOL
    if jnp.issubdtype(dtype, jnp.integer):
        if np.dtype(dtype).name == "uint64":
            raise Refused("numbers of type uint64, which the language has not", "use int32, uint32 or int64")
        return INT
    if jnp.issubdtype(dtype, jnp.floating):
        return FLOAT
    what = "random keys" if jnp.issubdtype(dtype, jax.dtypes.prng_key) else f"numbers of type {dtype}"
    raise Refused(what, "a score_mod has floats, integers and bools; draw random numbers outside and capture them")


class Value:
    """An array without numbers; `rule` says which term stands at an index."""

    def __init__(self, trace: Trace, shape: Sequence[int], dtype: Any, rule: Rule, equation: Any = None) -> None:
        self.trace, self.shape, self.dtype, self.equation = trace, tuple(shape), dtype, equation
        self._rule = rule
        self._terms: dict[Index, int] = {}

    def at(self, index: Index) -> int:
        zero = self.trace.zero
        index = tuple(zero if n == 1 else i for i, n in zip(index, self.shape, strict=True))
        term = self._terms.get(index)
        if term is None:
            try:
                term = self.trace.fitted(self._rule(index), self.dtype)
            except Refused as error:
                error.equation = error.equation or self.equation
                raise
            self._terms[index] = term
        return term

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def elements(self) -> list[int]:
        """The terms of all elements, one by one."""
        if self.size > MAX_UNROLLED:
            raise Refused(
                f"an array of shape {list(self.shape)}, whose elements would be computed one by one",
                f"index it before, or leave at most {MAX_UNROLLED} elements",
            )
        g = self.trace.g
        return [self.at(tuple(map(g.constant, place))) for place in np.ndindex(*self.shape)]


class Known(Value):
    """An array that depends on no index and no score: JAX has it. `view`: of which other one it is another layout,
    whose elements are read; `is_literal`: it depends on nothing from outside."""

    def __init__(
        self,
        trace: Trace,
        shape: Sequence[int],
        dtype: Any,
        make: Callable[[], Any],
        view: Rule | None = None,
        is_literal: bool = False,
    ) -> None:
        super().__init__(trace, shape, dtype, view or self._read)
        self._make, self._array = make, None
        self.is_literal = is_literal

    @property
    def array(self) -> Any:
        if self._array is None:
            self._array = self._make()
        return self._array

    @property
    def number(self) -> np.ndarray | None:
        """A literal's value; within shard_map JAX may have none."""
        return np.asarray(self.array) if self.is_literal and not isinstance(self.array, jax.core.Tracer) else None

    def _read(self, index: Index) -> int:
        if (number := self.number) is not None:
            term = _number(self.trace, number, index)
            if term is not None:
                return term
        return self.trace.load(self.array, index)


def _number(trace: Trace, array: np.ndarray, index: Index) -> int | None:
    """The element of an array of numbers: a constant, or what is linear in the index. None: it must be read."""
    g = trace.g
    kind = category(array.dtype)
    first = array[(0,) * array.ndim].item() if array.size else 0
    if kind != INT and (array.size == 1 or bool((array == first).all())):
        return g.constant(first)
    if kind == INT:
        steps = [int(np.diff(array, axis=d).flat[0]) if n > 1 else 0 for d, n in enumerate(array.shape)]
        linear = sum(
            (step * np.arange(n).reshape([-1 if i == d else 1 for i in range(array.ndim)]))
            for d, (n, step) in enumerate(zip(array.shape, steps, strict=True))
        )
        if bool((array == first + linear).all()):
            term = g.constant(first)
            for i, step in zip(index, steps, strict=True):
                if step != 0:
                    term = trace.add(term, trace.times(i, step))
            return term
    places = [g.value(i) for i in index]
    if None not in places and array.size <= _MAX_CONSTANTS:
        return g.constant(array[tuple(places)].item())
    return None
