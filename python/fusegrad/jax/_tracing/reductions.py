"""JAX's primitives that reduce over dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusegrad._C.score_mod import BOOL, FLOAT, INT

from .trace import Trace
from .values import Index, Rule, Value

__all__ = ["REDUCTIONS"]

REDUCTIONS: dict[str, Callable[..., list[Rule]]] = {}
"""(trace, parameters, *operands) -> the rules of the results."""


def _register(*names: str) -> Callable[[Callable[..., list[Rule]]], Callable[..., list[Rule]]]:
    def decorate(function: Callable[..., list[Rule]]) -> Callable[..., list[Rule]]:
        for name in names:
            REDUCTIONS[name] = function
        return function

    return decorate


def _over(t: Trace, op: str, sizes: Sequence[int], index: Index, body: Callable[[Index], int]) -> int:
    """A reduction over several dimensions."""
    if not sizes:
        return body(())
    return t.reduced(op, sizes[0], index, lambda i: _over(t, op, sizes[1:], (*index, i), lambda j: body((i, *j))))


def _reduction(op: str, empty: Any = None) -> Callable[..., list[Rule]]:
    def made(t: Trace, params: dict[str, Any], x: Value) -> list[Rule]:
        axes = sorted(params["axes"])
        sizes = [x.shape[d] for d in axes]

        def rule(index: Index) -> int:
            if 0 in sizes:
                return t.g.constant(empty)

            def body(places: Index) -> int:
                rest, reduced = iter(index), dict(zip(axes, places, strict=True))
                term = x.at(tuple(reduced[d] if d in reduced else next(rest) for d in range(len(x.shape))))
                return t.g.cast(term, INT) if t.g.type(term) == BOOL else term

            return _over(t, op, sizes, index, body)

        return [rule]

    return made


REDUCTIONS["reduce_sum"] = _reduction("sum", 0)
REDUCTIONS["reduce_prod"] = _reduction("prod", 1)
REDUCTIONS["reduce_max"] = _reduction("amax", float("-inf"))
REDUCTIONS["reduce_min"] = _reduction("amin", float("inf"))
REDUCTIONS["reduce_and"] = _reduction("amin", True)
REDUCTIONS["reduce_or"] = _reduction("amax", False)


@_register("dot_general")
def _dot(t: Trace, params: dict[str, Any], a: Value, b: Value) -> list[Rule]:
    (a_summed, b_summed), (a_batch, b_batch) = params["dimension_numbers"]
    a_free = [d for d in range(len(a.shape)) if d not in (*a_summed, *a_batch)]
    b_free = [d for d in range(len(b.shape)) if d not in (*b_summed, *b_batch)]
    sizes = [a.shape[d] for d in a_summed]

    def rule(index: Index) -> int:
        batch, rest = index[: len(a_batch)], index[len(a_batch) :]
        of_a, of_b = rest[: len(a_free)], rest[len(a_free) :]

        def body(places: Index) -> int:
            g = t.g
            at_a = {**dict(zip(a_batch, batch, strict=True)), **dict(zip(a_free, of_a, strict=True))}
            at_b = {**dict(zip(b_batch, batch, strict=True)), **dict(zip(b_free, of_b, strict=True))}
            at_a.update(zip(a_summed, places, strict=True))
            at_b.update(zip(b_summed, places, strict=True))
            x = a.at(tuple(at_a[d] for d in range(len(a.shape))))
            y = b.at(tuple(at_b[d] for d in range(len(b.shape))))
            return g.apply("mul", x, y)

        return t.g.constant(0) if 0 in sizes else _over(t, "sum", sizes, index, body)

    return [rule]


def _at(x: Value, index: Index, d: int, place: int) -> int:
    return x.at((*index[:d], place, *index[d + 1 :]))


@_register("argmax")
def _argmax(t: Trace, params: dict[str, Any], x: Value) -> list[Rule]:
    return _extreme_place(t, params, x, "amax")


@_register("argmin")
def _argmin(t: Trace, params: dict[str, Any], x: Value) -> list[Rule]:
    return _extreme_place(t, params, x, "amin")


def _extreme_place(t: Trace, params: dict[str, Any], x: Value, op: str) -> list[Rule]:
    """The first place of the extremum, or of a NaN."""
    (d,) = params["axes"]
    n = x.shape[d]

    def rule(index: Index) -> int:
        g = t.g

        def of(i: int) -> int:
            term = x.at((*index[:d], i, *index[d:]))
            return g.cast(term, INT) if g.type(term) == BOOL else term

        extreme = t.reduced(op, n, index, of)

        def place(i: int) -> int:
            found = g.apply("eq", of(i), extreme)
            if g.type(extreme) == FLOAT:
                found = g.apply("or", found, g.apply("ne", of(i), of(i)))
            return g.apply("where", found, i, g.constant(n))

        return t.clipped(t.reduced("amin", n, index, place), 0, n - 1)

    return [rule]


# --- along a dimension ----------------------------------------------------------------------------------------


def _cumulative(op: str) -> Callable[..., list[Rule]]:
    def made(t: Trace, params: dict[str, Any], x: Value) -> list[Rule]:
        d = params["axis"]
        n = x.shape[d]

        def rule(index: Index) -> int:
            g = t.g
            value = g.value(index[d])
            if value is not None:
                first, last = (value, n - 1) if params["reverse"] else (0, value)
                return t.reduced(op, last - first + 1, index, lambda i: _at(x, index, d, t.plus(i, first)))
            nothing = {"sum": 0, "prod": 1, "amax": float("-inf"), "amin": float("inf")}[op]
            if g.type(x.at(index)) != FLOAT and op in ("amax", "amin"):
                nothing = (-1 if op == "amax" else 1) * (1 << 62)

            def body(i: int) -> int:
                counts = g.apply("ge" if params["reverse"] else "le", i, index[d])
                return t.where(counts, _at(x, index, d, i), g.constant(nothing))

            return t.reduced(op, n, index, body)

        return [rule]

    return made


for _name, _op in (("cumsum", "sum"), ("cumprod", "prod"), ("cummax", "amax"), ("cummin", "amin")):
    REDUCTIONS[_name] = _cumulative(_op)


@_register("cumlogsumexp")
def _cumlogsumexp(t: Trace, params: dict[str, Any], x: Value) -> list[Rule]:
    (largest,) = _cumulative("amax")(t, params, x)

    def rule(index: Index) -> int:
        g = t.g
        most = g.apply("detach", largest(index))
        finite = t.where(g.apply("lt", g.apply("abs", most), g.constant(float("inf"))), most, g.constant(0.0))
        shifted = Value(t, x.shape, x.dtype, lambda i: g.apply("exp", g.apply("sub", x.at(i), finite)))
        (total,) = _cumulative("sum")(t, params, shifted)
        return g.apply("add", g.apply("log", total(index)), finite)

    return [rule]


def _before(t: Trace, keys: Sequence[Value], index: Index, d: int, i: int, j: int, descending: bool) -> int:
    """Whether element i comes before element j where they are sorted; NaN is the largest."""
    g = t.g
    before, equal = g.constant(False), g.constant(True)
    for key in keys:
        a, b = _at(key, index, d, i), _at(key, index, d, j)
        if descending:
            a, b = b, a
        less, same = t.compared("lt", a, b), t.compared("eq", a, b)
        if g.type(a) == FLOAT:
            a_nan, b_nan = g.apply("ne", a, a), g.apply("ne", b, b)
            less = g.apply("or", less, g.apply("and", b_nan, g.apply("not", a_nan)))
            same = g.apply("or", same, g.apply("and", a_nan, b_nan))
        before = g.apply("or", before, t.both(equal, less))
        equal = t.both(equal, same)
    return g.apply("or", before, t.both(equal, t.compared("lt", i, j)))


def _sorted(t: Trace, keys: Sequence[Value], d: int, x: Callable[[Index, int], int], descending: bool) -> Rule:
    """What x says of the element that comes at a place."""
    n = keys[0].shape[d]

    def rule(index: Index) -> int:
        g = t.g

        def of(i: int) -> int:
            def counted(j: int) -> int:
                return g.cast(_before(t, keys, index, d, j, i, descending), INT)

            rank = t.reduced("sum", n, (*index, i), counted)
            value = x(index, i)
            nothing = g.cast(g.constant(0), g.type(value))
            return g.apply("where", g.apply("eq", rank, index[d]), value, nothing)

        return t.reduced("sum", n, index, of)

    return rule


@_register("sort")
def _sort(t: Trace, params: dict[str, Any], *operands: Value) -> list[Rule]:
    d, keys = params["dimension"], operands[: params["num_keys"]]
    return [_sorted(t, keys, d, lambda index, i, x=x: _at(x, index, d, i), False) for x in operands]  # type: ignore[misc]


@_register("top_k")
def _top_k(t: Trace, params: dict[str, Any], x: Value) -> list[Rule]:
    d = params.get("axis", params.get("operand_axis", -1)) % len(x.shape)
    return [
        _sorted(t, [x], d, lambda index, i: _at(x, index, d, i), True),
        _sorted(t, [x], d, lambda index, i: i, True),
    ]
