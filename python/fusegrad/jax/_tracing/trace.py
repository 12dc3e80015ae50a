"""The graph that is being made: terms, reductions, and the arrays that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusegrad._C.score_mod import FLOAT, INT, MAX_EXTENT, MAX_RANK, graph

from ..._program import PLACES
from ..._tracing.bounds import Bounds, bounds, wrapped
from ..._tracing.names import words
from .errors import OneByOne, Refused
from .values import MAX_UNROLLED, SMALL, Index, category

__all__ = ["Trace"]

_SLACK = 1 << 20
_DTYPES = words("float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool")


class Trace:
    """The graph, and the arrays that it reads."""

    def __init__(self, kind: str, sizes: Sequence[int | None] | None) -> None:
        self.g = graph(kind)
        self.zero = self.g.constant(0)
        self.buffers: list[Any] = []
        self._places: dict[int, int] = {}  # by the arrays' ids
        self._forms: dict[tuple[int, str], tuple[Any, Any]] = {}  # arrays and other forms of them
        self.known: dict[int, Bounds] = {}
        """What is known of terms' values beside what the graph says."""
        self.in_backward = False
        self.own_derivatives = False
        """Whether there are functions with a derivative that the user wrote."""
        for name, size in zip(PLACES, sizes or (), strict=False):
            if size is not None:
                self.known[self.g.input(name)] = (0, max(size - 1, 0))

    # --- terms ---

    def bounds(self, term: int) -> Bounds:
        return bounds(self.g, term, known=self.known)

    def fitted(self, term: int, dtype: Any, from_wider: bool = False) -> int:
        """As a value of the dtype: integers wrap."""
        kind = category(dtype)
        term = self.g.cast(term, kind)
        info = jnp.iinfo(dtype) if kind == INT else None
        if info is None or info.bits == 64:
            return term
        least, most = int(info.min), int(info.max)
        value = self.g.value(term)
        if value is not None:
            return self.g.constant((value - least) % (1 << info.bits) + least)
        low, high = self.bounds(term)
        if least <= low and high <= most:
            return term
        operation = self.g.node(term)[0]
        if operation in ("load", "to_int") and term not in self.known and not from_wider:
            if info.bits >= 32:
                # As in PyTorch's half: so far within that small numbers may be added without a thought of wrapping.
                self.known[term] = (least + _SLACK * (least < 0), most - _SLACK)
                return term
            if operation == "load":
                self.known[term] = (least, most)
                return term
        term = wrapped(self.g, term, info.bits, least < 0, True, self.known)
        self.known[term] = (least, most)
        return term

    def add(self, a: int, b: int) -> int:
        g = self.g
        x, y = g.value(a), g.value(b)
        if x is not None and y is not None:
            return g.constant(x + y)
        return b if x == 0 else a if y == 0 else g.apply("add", a, b)

    def plus(self, a: int, number: int) -> int:
        return self.add(a, self.g.constant(number))

    def times(self, a: int, number: int) -> int:
        value = self.g.value(a)
        if value is not None:
            return self.g.constant(value * number)
        return a if number == 1 else self.g.apply("mul", a, self.g.constant(number))

    def modulo(self, a: int, number: int) -> int:
        low, high = self.bounds(a)
        if low >= 0 and high < number:
            return a
        value = self.g.value(a)
        return self.g.apply("mod", a, self.g.constant(number)) if value is None else self.g.constant(value % number)

    def compared(self, op: str, a: int, b: int) -> int:
        """A comparison; of integers a constant where their bounds decide."""
        g = self.g
        if g.type(a) == g.type(b) == INT:
            (a_low, a_high), (b_low, b_high) = self.bounds(a), self.bounds(b)
            if op in ("gt", "ge"):
                return self.compared("lt" if op == "gt" else "le", b, a)
            if op == "lt" and (a_high < b_low or a_low >= b_high):
                return g.constant(a_high < b_low)
            if op == "le" and (a_high <= b_low or a_low > b_high):
                return g.constant(a_high <= b_low)
            if op in ("eq", "ne"):
                if a_high < b_low or b_high < a_low:
                    return g.constant(op == "ne")
                if a == b or a_low == a_high == b_low == b_high:
                    return g.constant(op == "eq")
        return g.apply(op, a, b)

    def where(self, condition: int, yes: int, no: int) -> int:
        g = self.g
        value = g.value(condition)
        if value is not None or yes == no:
            return yes if value is None or value else no
        term = g.apply("where", condition, yes, no)
        operation, _, _, operands = g.node(condition)
        if operation == "lt" and operands[1] == self.zero and no == operands[0] and g.node(yes)[0] == "add":
            # How a negative index is made to count from the end.
            low, high = self.bounds(no)
            size = next((g.value(x) for x in g.node(yes)[3] if x != no), None)
            if size is not None and no in g.node(yes)[3]:
                self.known[term] = (min(low + size, 0), max(size - 1, high))
                if low + size >= 0:
                    self.known[term] = (0, max(size - 1, high))
        return term

    def both(self, a: int, b: int) -> int:
        g = self.g
        if g.value(a) is not None:
            return b if g.value(a) else a
        if g.value(b) is not None:
            return a if g.value(b) else b
        return g.apply("and", a, b)

    def clipped(self, term: int, low: int, high: int) -> int:
        """An integer within bounds."""
        g = self.g
        if low == high:
            return g.constant(low)
        least, most = self.bounds(term)
        if least < low:
            term = g.apply("max", term, g.constant(low))
        if most > high:
            term = g.apply("min", term, g.constant(high))
        return term

    def chosen(self, terms: Sequence[int], index: int) -> int:
        """One of some terms."""
        g = self.g
        value = g.value(index)
        if value is not None:
            return terms[value]
        axes = frozenset(g.open_axes(index))
        if axes:
            raise OneByOne(axes)
        result = terms[-1]
        for i in reversed(range(len(terms) - 1)):
            result = self.where(self.compared("eq", index, g.constant(i)), terms[i], result)
        return result

    # --- reductions ---

    def reduced(self, op: str, extent: int, index: Sequence[int], body: Callable[[int], int]) -> int:
        """The sum, the extremum or the product of the body's terms at 0 to `extent`; index: what else it is at."""
        g = self.g
        if extent > MAX_EXTENT:
            raise Refused(f"a reduction of {extent} elements", f"reduce at most {MAX_EXTENT}, or outside")
        if extent > SMALL:
            open_axes = {x for i in index for x in g.open_axes(i)}
            place = 0
            while (axis := g.axis(extent, place)) in open_axes:
                place += 1
            try:
                return g.reduce(op, axis, body(axis))
            except OneByOne as error:
                if axis not in error.axes:
                    raise
        if extent > MAX_UNROLLED:
            raise Refused(f"{extent} elements that would be computed one by one", f"leave at most {MAX_UNROLLED} there")
        combine = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}[op]
        terms = [body(g.constant(i)) for i in range(extent)]
        result = terms[0]
        for term in terms[1:]:
            result = g.apply(combine, result, term)
        return self._shared(result, terms) if op in ("amax", "amin") and extent > SMALL else result

    def _shared(self, extremum: int, terms: Sequence[int]) -> int:
        """The extremum of single elements, whose gradient all share that are equal to it: of two at a time the last
        would get more than the others."""
        g = self.g
        if self.in_backward or not g.active(extremum) or any(g.open_axes(x) for x in terms):
            return extremum
        largest = [g.apply("eq", x, extremum) for x in terms]
        count = g.cast(largest[0], INT)
        for one in largest[1:]:
            count = g.apply("add", count, g.cast(one, INT))
        upstream, backward = g.upstream(), g.backward()
        share = g.apply("div", upstream, count)
        for x, one in zip(terms, largest, strict=True):
            g.add_pair(backward, x, g.apply("where", one, share, g.constant(0.0)))
        return g.custom(upstream, extremum, backward)

    # --- captured arrays ---

    def load(self, array: Any, index: Index) -> int:
        g = self.g
        if not isinstance(array, jax.Array):
            array = self._other(array, "jax", jnp.asarray)
        category(array.dtype)
        shape, name = array.shape, np.dtype(array.dtype).name
        if len(shape) > MAX_RANK:
            lead = len(shape) - MAX_RANK + 1
            first = self.zero
            for i, n in zip(index[:lead], shape[:lead], strict=True):
                first = self.add(self.times(first, n), i)
            array = self._other(array, "merged", lambda x: x.reshape(-1, *shape[lead:]))
            index, shape = (first, *index[lead:]), (math.prod(shape[:lead]), *shape[lead:])
        bits = None
        if name not in _DTYPES:
            if name == "uint32":
                array, bits = self._other(array, name, lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)), 32
            else:
                to = jnp.float32 if category(array.dtype) == FLOAT else jnp.int32
                array = self._other(array, name, lambda x: x.astype(to))
        buffer = self._places.get(id(array))
        if buffer is None:
            kind = category(array.dtype)
            buffer = self._places[id(array)] = g.add_buffer(kind, len(shape), kind == FLOAT)
            self.buffers.append(array)
        term = g.load(buffer, [self._place(i, n) for i, n in zip(index, shape, strict=True)])
        if bits is not None:
            term = g.apply("and", term, g.constant((1 << bits) - 1))
        return term

    def _place(self, index: int, size: int) -> int:
        """An index that counts from the end does so in the language too: what is not clamped is in range."""
        g = self.g
        operation, _, _, operands = g.node(index)
        if operation != "where":
            return index
        condition, yes, no = operands
        negative = g.node(condition)[0] == "lt" and g.node(condition)[3] == [no, self.zero]
        return no if negative and yes in (self.plus(no, size), self.add(g.constant(size), no)) else index

    def _other(self, array: Any, what: str, make: Callable[[Any], Any]) -> Any:
        """The array in another form, the same one each time."""
        key = id(array), what
        if key not in self._forms:
            self._forms[key] = array, make(jnp.asarray(array))
        return self._forms[key][1]
