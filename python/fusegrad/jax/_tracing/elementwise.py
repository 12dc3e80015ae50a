"""JAX's primitives on single elements: what each emits into the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fusegrad._C.score_mod import BOOL, FLOAT, INT

from ..._tracing.names import words
from ..._tracing.ops import ELEMENTWISE as OF_TORCH
from .errors import Refused
from .trace import Trace
from .values import category

__all__ = ["ELEMENTWISE", "Scalars"]


@dataclass(frozen=True)
class Scalars:
    """An equation of scalars."""

    trace: Trace
    params: dict[str, Any]
    dtypes: tuple[Any, ...]
    """Those of the operands."""
    dtype: Any
    """That of the result."""

    @property
    def bits(self) -> int:
        return int(jnp.iinfo(self.dtypes[0]).bits)


Emit = Callable[..., int]
ELEMENTWISE: dict[str, Emit] = {}


def _register(*names: str) -> Callable[[Emit], Emit]:
    def decorate(function: Emit) -> Emit:
        for name in names:
            ELEMENTWISE[name] = function
        return function

    return decorate


_SAME = words(
    """
    neg sign sqrt rsqrt exp exp2 expm1 log log2 log1p tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh
    erf erfc floor ceil square atan2 hypot
    """
)
_RENAMED = {"logistic": "sigmoid", "not": "not", "xor": "xor"}


def _same(primitive: str) -> Emit:
    return lambda s, *x: s.trace.g.apply(primitive, *x)


for _name in _SAME:
    ELEMENTWISE[_name] = _same(_name)
for _name, _primitive in _RENAMED.items():
    ELEMENTWISE[_name] = _same(_primitive)


def _comparison(op: str) -> Emit:
    return lambda s, a, b: s.trace.compared(op, a, b)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    ELEMENTWISE[_name] = ELEMENTWISE[f"{_name}_to"] = _comparison(_name)


# --- arithmetic -----------------------------------------------------------------------------------------------


@_register("add", "add_any")
def _add(s: Scalars, a: int, b: int) -> int:
    g = s.trace.g
    if g.type(a) == BOOL:
        return g.apply("or", a, b)
    return s.trace.add(a, b) if g.type(a) == INT else g.apply("add", a, b)


@_register("sub")
def _sub(s: Scalars, a: int, b: int) -> int:
    g = s.trace.g
    x, y = g.value(a), g.value(b)
    if g.type(a) == INT and x is not None and y is not None:
        return g.constant(x - y)
    return a if g.type(a) == INT and y == 0 else g.apply("sub", a, b)


@_register("mul")
def _mul(s: Scalars, a: int, b: int) -> int:
    g = s.trace.g
    if g.type(a) == BOOL:
        return g.apply("and", a, b)
    if g.type(a) == INT:
        for x, y in ((a, b), (b, a)):
            number = g.value(y)
            if number is not None:
                return s.trace.times(x, number)
    return g.apply("mul", a, b)


def _extreme(op: str, of_bools: str) -> Emit:
    def emit(s: Scalars, a: int, b: int) -> int:
        t, g = s.trace, s.trace.g
        if g.type(a) == BOOL:
            return g.apply(of_bools, a, b)
        if g.type(a) == INT:
            (a_low, a_high), (b_low, b_high) = t.bounds(a), t.bounds(b)
            if a_high <= b_low:
                return a if op == "min" else b
            if b_high <= a_low:
                return b if op == "min" else a
            if op == "max" and -math.inf in (g.value(a), g.value(b)):
                return b if g.value(a) == -math.inf else a
        return g.apply(op, a, b)

    return emit


ELEMENTWISE["max"], ELEMENTWISE["min"] = _extreme("max", "or"), _extreme("min", "and")


def _may_be_zero(t: Trace, divisor: int) -> bool:
    low, high = t.bounds(divisor)
    return low <= 0 <= high


@_register("div")
def _div(s: Scalars, a: int, b: int) -> int:
    t, g = s.trace, s.trace.g
    if g.type(a) == FLOAT:
        return g.apply("div", a, b)
    if t.bounds(a)[0] >= 0 and t.bounds(b)[0] >= 0:
        quotient = g.apply("floor_div", a, b)
    else:
        quotient = OF_TORCH["div"](g, a, b, "trunc")
    # XLA's division by zero has all bits set.
    by_zero = g.constant(-1 if jnp.iinfo(s.dtype).min < 0 else int(jnp.iinfo(s.dtype).max))
    return t.where(t.compared("eq", b, t.zero), by_zero, quotient) if _may_be_zero(t, b) else quotient


@_register("rem")
def _rem(s: Scalars, a: int, b: int) -> int:
    t, g = s.trace, s.trace.g
    if g.type(a) == FLOAT:
        return OF_TORCH["fmod"](g, a, b)
    remainder = g.apply("mod", a, b) if t.bounds(a)[0] >= 0 and t.bounds(b)[0] >= 0 else OF_TORCH["fmod"](g, a, b)
    return t.where(t.compared("eq", b, t.zero), a, remainder) if _may_be_zero(t, b) else remainder


@_register("pow")
def _pow(s: Scalars, a: int, b: int) -> int:
    return s.trace.g.apply("pow", a, b)


@_register("integer_pow")
def _integer_pow(s: Scalars, a: int) -> int:
    g, n = s.trace.g, s.params["y"]
    return g.apply("pow", a, g.constant(n if g.type(a) == INT else float(n)))


@_register("one_minus_square")
def _one_minus_square(s: Scalars, a: int) -> int:
    g = s.trace.g
    return g.apply("sub", g.cast(g.constant(1), g.type(a)), g.apply("square", a))


@_register("polynomial")
def _polynomial(s: Scalars, a: int, *coefficients: int) -> int:
    g, total = s.trace.g, coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = g.apply("add", g.apply("mul", total, a), coefficient)
    return total


@_register("abs")
def _abs(s: Scalars, a: int) -> int:
    g = s.trace.g
    if not g.active(a):
        return g.apply("abs", a)
    # JAX's gradient at 0 is 1. The sum makes 0 of -0.
    of_sign = g.apply("where", g.apply("lt", a, g.constant(0.0)), g.apply("neg", a), a)
    return g.apply("add", of_sign, g.constant(0.0))


@_register("cbrt")
def _cbrt(s: Scalars, a: int) -> int:
    g, third = s.trace.g, s.trace.g.constant(1 / 3)
    below = g.apply("neg", g.apply("pow", g.apply("neg", a), third))
    return g.apply("where", g.apply("lt", a, g.constant(0.0)), below, g.apply("pow", a, third))


@_register("round")
def _round(s: Scalars, a: int) -> int:
    g = s.trace.g
    if int(s.params["rounding_method"]) == 1:
        return g.apply("round", a)
    whole = g.apply("trunc", a)  # halves go away from zero
    far = g.apply("ge", g.apply("abs", g.apply("sub", a, whole)), g.constant(0.5))
    return g.apply("where", far, g.apply("add", whole, g.apply("sign", a)), whole)


@_register("clamp")
def _clamp(s: Scalars, low: int, a: int, high: int) -> int:
    t, g = s.trace, s.trace.g
    if g.type(a) == INT:
        return ELEMENTWISE["min"](s, ELEMENTWISE["max"](s, a, low), high)
    # Nothing flows at the bounds themselves.
    at_bound = g.apply("or", g.apply("eq", a, low), g.apply("eq", a, high))
    inside = t.where(at_bound, g.apply("detach", a), a)
    above = t.where(g.apply("gt", a, high), high, inside)
    return t.where(g.apply("lt", a, low), low, above)


@_register("is_finite")
def _is_finite(s: Scalars, a: int) -> int:
    g = s.trace.g
    return g.apply("lt", g.apply("abs", a), g.constant(math.inf))


# --- integers -------------------------------------------------------------------------------------------------


def _truth_or_bits(op: str) -> Emit:
    def emit(s: Scalars, a: int, b: int) -> int:
        g = s.trace.g
        if g.type(a) == BOOL:
            for x, y in ((a, b), (b, a)):
                value = g.value(x)
                if value is not None:
                    return y if value == (op == "and") else x
        return g.apply(op, a, b)

    return emit


ELEMENTWISE["and"], ELEMENTWISE["or"] = _truth_or_bits("and"), _truth_or_bits("or")


def _within_bits(s: Scalars, by: int, shifted: int, beyond: int) -> int:
    """XLA's shift by a type's width or more gives `beyond`; by a negative number too."""
    t, g = s.trace, s.trace.g
    low, high = t.bounds(by)
    if low >= 0 and high < s.bits:
        return shifted
    outside = g.apply("or", t.compared("lt", by, t.zero), t.compared("ge", by, g.constant(s.bits)))
    return t.where(outside, beyond, shifted)


@_register("shift_left")
def _shift_left(s: Scalars, a: int, by: int) -> int:
    return _within_bits(s, by, s.trace.g.apply("shl", a, by), s.trace.zero)


@_register("shift_right_arithmetic")
def _shift_right_arithmetic(s: Scalars, a: int, by: int) -> int:
    g = s.trace.g
    if jnp.iinfo(s.dtype).min == 0 and s.bits <= 32:  # the highest bit is the sign here
        shift = g.constant(64 - s.bits)
        a = g.apply("shr", g.apply("shl", a, shift), shift)
    beyond = g.apply("shr", a, g.constant(63))
    return _within_bits(s, by, g.apply("shr", a, by), beyond)


@_register("shift_right_logical")
def _shift_right_logical(s: Scalars, a: int, by: int) -> int:
    t, g = s.trace, s.trace.g
    if t.bounds(a)[0] < 0:
        if s.bits > 32:
            raise Refused("shift_right_logical of 64 bits", "use shift_right_arithmetic, or 32 bits")
        a = g.apply("and", a, g.constant((1 << s.bits) - 1))
    return _within_bits(s, by, g.apply("shr", a, by), t.zero)


# --- choice and types -----------------------------------------------------------------------------------------


@_register("select_n")
def _select(s: Scalars, which: int, *cases: int) -> int:
    t = s.trace
    if t.g.type(which) == BOOL:
        return t.where(which, cases[1], cases[0])
    return t.chosen(cases, which)


@_register("convert_element_type")
def _convert(s: Scalars, a: int) -> int:
    g, to = s.trace.g, category(s.dtype)
    if to == INT and g.type(a) == INT and jnp.iinfo(s.dtype).bits < jnp.iinfo(s.dtypes[0]).bits:
        return s.trace.fitted(a, s.dtype, from_wider=True)
    return g.cast(a, to)


@_register("stop_gradient")
def _stop_gradient(s: Scalars, a: int) -> int:
    g = s.trace.g
    return g.apply("detach", a) if g.type(a) == FLOAT else a


@_register("copy", "copy_p", "name", "real", "pvary", "pcast", "sharding_constraint", "mesh_cast", "reshard")
def _identity(s: Scalars, a: int) -> int:
    return a
