"""ATen operations on scalars, by their names: what each emits into the graph.

A function's parameters are those of the operation's schema. Tensors and numbers arrive as terms, one element at a
time; None and strings as they are. The result is cast to the type that PyTorch's promotion gives. fusegrad.jax uses
what is here too: it must not need torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusegrad._C.score_mod import BOOL, FLOAT, Graph

from .names import words

__all__ = ["ELEMENTWISE"]

ELEMENTWISE: dict[str, Callable[..., int]] = {}


def _register(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        for name in names:
            ELEMENTWISE[name] = function
        return function

    return decorate


def _are_bools(g: Graph, *terms: int) -> bool:
    return all(g.type(x) == BOOL for x in terms)


def _scaled(g: Graph, term: int, alpha: int) -> int:
    return term if g.value(alpha) == 1 else g.apply("mul", term, alpha)


# --- the same under the same or another name ------------------------------------------------------------------

_UNARY = words(
    "neg abs sign sqrt rsqrt exp exp2 expm1 log log2 log1p tanh sigmoid silu relu erf erfc sin cos tan atan asin acos "
    "sinh cosh asinh acosh atanh floor ceil trunc"
)
_BINARY = {
    "remainder": "mod",
    "floor_divide": "floor_div",
    "minimum": "min",
    "maximum": "max",
    "pow": "pow",
    "atan2": "atan2",
    "hypot": "hypot",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr",
    "__lshift__": "shl",
    "__rshift__": "shr",
}


def _unary(primitive: str) -> Callable[..., int]:
    return lambda g, self: g.apply(primitive, self)


def _binary(primitive: str) -> Callable[..., int]:
    def emit(g: Graph, self: int, other: int) -> int:
        return g.apply(primitive, self, other)

    return emit


for _name in _UNARY:
    ELEMENTWISE[_name] = _unary(_name)
for _name, _primitive in _BINARY.items():
    ELEMENTWISE[_name] = _binary(_primitive)
ELEMENTWISE["sgn"] = ELEMENTWISE["sign"]
ELEMENTWISE["bitwise_not"] = _unary("not")
ELEMENTWISE["pow"] = lambda g, self, exponent: g.apply("pow", self, exponent)


# --- arithmetic -----------------------------------------------------------------------------------------------


@_register("add")
def _add(g: Graph, self: int, other: int, alpha: int) -> int:
    if _are_bools(g, self, other):
        return g.apply("or", self, other)
    return g.apply("add", self, _scaled(g, other, alpha))


@_register("sub")
def _sub(g: Graph, self: int, other: int, alpha: int) -> int:
    return g.apply("sub", self, _scaled(g, other, alpha))


@_register("rsub")
def _rsub(g: Graph, self: int, other: int, alpha: int) -> int:
    return g.apply("sub", other, _scaled(g, self, alpha))


@_register("mul")
def _mul(g: Graph, self: int, other: int) -> int:
    return g.apply("and" if _are_bools(g, self, other) else "mul", self, other)


@_register("div")
def _div(g: Graph, self: int, other: int, rounding_mode: str | None = None) -> int:
    if rounding_mode is None:
        return g.apply("div", self, other)
    if rounding_mode == "floor":
        return g.apply("floor_div", self, other)
    if FLOAT in (g.type(self), g.type(other)):
        return g.apply("trunc", g.apply("div", self, other))
    # Towards zero: of the absolute values, with the quotient's sign.
    quotient = g.apply("floor_div", g.apply("abs", self), g.apply("abs", other))
    zero = g.constant(0)
    differ = g.apply("ne", g.apply("lt", self, zero), g.apply("lt", other, zero))
    return g.apply("where", differ, g.apply("neg", quotient), quotient)


@_register("fmod")
def _fmod(g: Graph, self: int, other: int) -> int:
    # The remainder of the absolute values, with the sign of the first. abs(x) would have gradient 0 at 0, fmod has 1.
    size = g.apply("abs", other)
    below = g.apply("neg", g.apply("mod", g.apply("neg", self), size))
    return g.apply("where", g.apply("lt", self, g.constant(0)), below, g.apply("mod", self, size))


@_register("reciprocal")
def _reciprocal(g: Graph, self: int) -> int:
    return g.apply("div", g.constant(1.0), self)


@_register("square")
def _square(g: Graph, self: int) -> int:
    return g.apply("square", self)


@_register("log10")
def _log10(g: Graph, self: int) -> int:
    return g.apply("div", g.apply("log", self), g.constant(math.log(10)))


@_register("logit")
def _logit(g: Graph, self: int, eps: int | None = None) -> int:
    # For the quotient's logarithm the gradient at 0 would be NaN.
    if eps is not None:
        self = g.apply("clamp", self, eps, g.apply("sub", g.constant(1.0), eps))
    return g.apply("sub", g.apply("log", self), g.apply("log1p", g.apply("neg", self)))


def _log_of_sum(exponential: str, logarithm: Callable[[Graph, int], int]) -> Callable[..., int]:
    """log(exp(a) + exp(b)): the larger, and what the difference adds. Equal infinities are the result themselves: their
    difference is NaN."""

    def emit(g: Graph, self: int, other: int) -> int:
        equal = g.apply("eq", self, other)
        difference = g.apply("abs", g.apply("sub", self, other))
        added = logarithm(g, g.apply(exponential, g.apply("neg", difference)))
        # The half of each, since max and abs give their gradients so where both are equal.
        total = g.apply("add", g.apply("max", self, other), added)
        infinite = g.apply("and", equal, g.apply("eq", g.apply("abs", self), g.constant(math.inf)))
        return g.apply("where", infinite, self, total)

    return emit


ELEMENTWISE["logaddexp"] = _log_of_sum("exp", lambda g, x: g.apply("log1p", x))
ELEMENTWISE["logaddexp2"] = _log_of_sum(
    "exp2", lambda g, x: g.apply("div", g.apply("log1p", x), g.constant(math.log(2)))
)


def _times_logarithm(logarithm: str) -> Callable[..., int]:
    """x · log(y), 0 where x is, but for y = NaN. Where the logarithm is finite its product has the right gradient."""

    def emit(g: Graph, self: int, other: int) -> int:
        value = g.apply(logarithm, other)
        finite = g.apply("lt", g.apply("abs", value), g.constant(math.inf))
        zero = g.apply("and", g.apply("eq", self, g.constant(0)), g.apply("not", finite))
        product = g.apply("where", zero, g.constant(0.0), g.apply("mul", self, value))
        return g.apply("where", g.apply("ne", other, other), other, product)

    return emit


ELEMENTWISE["xlogy"], ELEMENTWISE["special_xlog1py"] = _times_logarithm("log"), _times_logarithm("log1p")


@_register("gelu")
def _gelu(g: Graph, self: int, approximate: str = "none") -> int:
    return g.apply("gelu_tanh" if approximate == "tanh" else "gelu", self)


@_register("softplus")
def _softplus(g: Graph, self: int, beta: int, threshold: int) -> int:
    scaled = _scaled(g, self, beta)
    soft = g.apply("log1p", g.apply("exp", scaled))
    soft = soft if g.value(beta) == 1 else g.apply("div", soft, beta)
    return g.apply("where", g.apply("gt", scaled, threshold), self, soft)


@_register("log_sigmoid_forward")
def _log_sigmoid(g: Graph, self: int) -> int:
    # min(0, x) − log1p(exp(−|x|)): neither term overflows.
    tail = g.apply("log1p", g.apply("exp", g.apply("neg", g.apply("abs", self))))
    return g.apply("sub", g.apply("min", self, g.constant(0.0)), tail)


@_register("round")
def _round(g: Graph, self: int, decimals: int | None = None) -> int:
    if decimals is None or g.value(decimals) == 0:
        return g.apply("round", self)
    scale = g.constant(10.0 ** int(g.value(decimals) or 0))
    return g.apply("div", g.apply("round", g.apply("mul", self, scale)), scale)


# --- bounds ---------------------------------------------------------------------------------------------------


@_register("clamp", "clamp_min", "clamp_max")
def _clamp(g: Graph, self: int, min: int | None = None, max: int | None = None) -> int:
    # One bound is a clamp too where it has a gradient: at the bound PyTorch gives all of it to x, and half with max().
    if min is not None and max is not None:
        return g.apply("clamp", self, min, max)
    if FLOAT in (g.type(x) for x in (self, min, max) if x is not None):
        low = g.constant(-math.inf) if min is None else min
        return g.apply("clamp", self, low, g.constant(math.inf) if max is None else max)
    if min is not None:
        return g.apply("max", self, min)
    assert max is not None
    return g.apply("min", self, max)


@_register("hardtanh")
def _hardtanh(g: Graph, self: int, min_val: int, max_val: int) -> int:
    # Unlike clamp it has no gradient at the bounds.
    below = g.apply("where", g.apply("le", self, min_val), min_val, self)
    return g.apply("where", g.apply("ge", self, max_val), max_val, below)


@_register("hardsigmoid")
def _hardsigmoid(g: Graph, self: int) -> int:
    return _hardtanh(
        g, g.apply("add", g.apply("div", self, g.constant(6.0)), g.constant(0.5)), *map(g.constant, (0.0, 1.0))
    )


@_register("hardswish")
def _hardswish(g: Graph, self: int) -> int:
    middle = g.apply("div", g.apply("mul", self, g.apply("add", self, g.constant(3.0))), g.constant(6.0))
    above = g.apply("where", g.apply("ge", self, g.constant(3.0)), self, middle)
    return g.apply("where", g.apply("le", self, g.constant(-3.0)), g.constant(0.0), above)


@_register("relu6")
def _relu6(g: Graph, self: int) -> int:
    return _hardtanh(g, self, g.constant(0.0), g.constant(6.0))


def _nan_ignoring(wins: str) -> Callable[..., int]:
    def emit(g: Graph, self: int, other: int) -> int:
        # The first of equal values gets the gradient.
        first = g.apply("or", g.apply(wins, self, other), g.apply("ne", other, other))
        return g.apply("where", first, self, other)

    return emit


ELEMENTWISE["fmax"], ELEMENTWISE["fmin"] = _nan_ignoring("ge"), _nan_ignoring("le")


# --- truth and choice -----------------------------------------------------------------------------------------


def _truth(primitive: str) -> Callable[..., int]:
    return lambda g, self, other: g.apply(primitive, g.cast(self, BOOL), g.cast(other, BOOL))


for _name in ("and", "or", "xor"):
    ELEMENTWISE[f"logical_{_name}"] = _truth(_name)


@_register("logical_not")
def _logical_not(g: Graph, self: int) -> int:
    return g.apply("not", g.cast(self, BOOL))


@_register("isnan")
def _isnan(g: Graph, self: int) -> int:
    return g.apply("ne", self, self)


@_register("isinf")
def _isinf(g: Graph, self: int) -> int:
    return g.apply("eq", g.apply("abs", self), g.constant(math.inf))


@_register("where")
def _where(g: Graph, condition: int, self: int, other: int) -> int:
    return g.apply("where", g.cast(condition, BOOL), self, other)


@_register("masked_fill")
def _masked_fill(g: Graph, self: int, mask: int, value: int) -> int:
    return g.apply("where", mask, value, self)


@_register("detach")
def _detach(g: Graph, self: int) -> int:
    return g.apply("detach", self) if g.type(self) == FLOAT else self
