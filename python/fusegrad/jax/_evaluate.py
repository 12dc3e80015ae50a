"""score_mods and mask_mods evaluated by JAX's own operations, which differentiate as often as wanted.

The kernels know a score_mod and its first derivative. What is differentiated further reads the same graph here: an
array for each node, of dimensions [B, H, M, N] and one more for each axis, of size 1 where nothing depends on them.
Integers have 64 bits, as the language's do, whatever `jax_enable_x64` says; indices of reads have 32: XLA's own
lowering of reads takes no others where 64 bits are off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._program import LEAVES, PLACES, Node, Program, program

__all__ = ["Values", "evaluate", "extremum", "rows_of_buffers"]

_SPATIAL = len(PLACES)


@functools.lru_cache(maxsize=512)
def rows_of_buffers(text: str) -> tuple[int | None, ...]:
    """For each buffer, the dimension that q_idx by itself names in every read; None: there is none."""
    parsed = program(text)
    found: list[set[int] | None] = [None] * parsed.buffers
    for n in parsed.nodes:
        if n.op == "load":
            here = {d for d, x in enumerate(n.operands) if parsed.nodes[x].of == "q_idx"}
            before = found[n.of]
            found[n.of] = here if before is None else before & here
    return tuple(min(dims) if dims else None for dims in found)


@dataclass
class Values:
    """What a text reads. Inputs broadcast to [B, H, M, N]; `taking_part`, a bool array of such a shape or None for all:
    where it is false nothing is read from a buffer but its first element. A buffer that has `rows`: the dimension of
    q_idx begins at the first of these queries, else at the call's."""

    inputs: dict[str, Any]
    buffers: Sequence[Any]
    rows: Sequence[int | None]
    scalars: Sequence[int | float | bool]
    dtype: Any
    sizes: tuple[int, int, int, int]
    taking_part: Any = None
    own_rows: Any = field(init=False)

    def __post_init__(self) -> None:
        self.own_rows = jnp.arange(self.sizes[2], dtype=jnp.int64).reshape(1, 1, -1, 1)


# --- primitives -----------------------------------------------------------------------------------------------------


def _is_float(a: Any) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.floating))


def _by_nonzero(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function with 0 where the divisor is, for integers."""

    def divided(a: Any, b: Any) -> Any:
        if _is_float(a):
            return function(a, b)
        return jnp.where(b == 0, 0, function(a, jnp.where(b == 0, 1, b)))

    return divided


def _where_defined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where it is NaN it has no derivative: of a branch that is not taken none counts, but 0 * NaN would."""

    def of(*operands: Any) -> Any:
        found = lax.stop_gradient(function(*operands))
        wrong = jnp.isnan(found)
        return jnp.where(wrong, found, function(*(jnp.where(wrong, 0.5, x) for x in operands)))

    return of


_float_pow = _where_defined(lax.pow)


def _pow(a: Any, b: Any) -> Any:
    if _is_float(a):
        return _float_pow(*jnp.broadcast_arrays(a, b))
    result, base, left = jnp.ones_like(a + b), a + 0 * b, jnp.maximum(b, 0) + 0 * a
    for _ in range(63):  # of 64 bits; what is beyond the exponent's highest one multiplies by 1
        result = jnp.where(left & 1 == 1, result * base, result)
        base, left = base * base, left >> 1
    of_negative = jnp.where(jnp.abs(a) == 1, jnp.where(b % 2 == 0, 1, a), 0)
    return jnp.where(b < 0, of_negative, result)


def _clamp(x: Any, low: Any, high: Any) -> Any:
    found = jnp.where((x > high) | (low > high), high, jnp.where(x < low, low, x))
    return found if not _is_float(x) else jnp.where(low != low, low, jnp.where(high != high, high, found))


def _whole(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: function(a) if _is_float(a) else a


def _relu(a: Any) -> Any:
    return jnp.where(a <= 0, jnp.zeros_like(a), a)


def _gelu_tanh(a: Any) -> Any:
    return 0.5 * a * (1 + jnp.tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)))


def _atan2(y: Any, x: Any) -> Any:
    origin = (y == 0) & (x == 0)
    away = jnp.arctan2(jnp.where(origin, 0, y), jnp.where(origin, 1, x))
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), away)


def _hypot(a: Any, b: Any) -> Any:
    """Whose derivative is NaN in the origin, as the language's."""
    scale = lax.stop_gradient(jnp.maximum(jnp.abs(a), jnp.abs(b)))
    scale = jnp.where((scale == 0) | jnp.isinf(scale), 1, scale)
    return scale * jnp.sqrt((a / scale) ** 2 + (b / scale) ** 2)


def _shifted(shift: Callable[[Any, Any], Any], left: bool) -> Callable[[Any, Any], Any]:
    def shifted(a: Any, b: Any) -> Any:
        a, b = jnp.broadcast_arrays(a, b)
        out = (b < 0) | (b >= 64)
        rest = jnp.zeros_like(a) if left else lax.shift_right_arithmetic(a, jnp.full_like(a, 63))
        return jnp.where(out, rest, shift(a, jnp.where(out, 0, b)))

    return shifted


def _to_int(a: Any) -> Any:
    if not _is_float(a):
        return a.astype(jnp.int64)
    a = lax.stop_gradient(a)
    low, high = a < -(2.0**63), a >= 2.0**63
    inside = jnp.where(jnp.isnan(a) | low | high, 0, a).astype(jnp.int64)
    return jnp.where(high, jnp.iinfo(jnp.int64).max, jnp.where(low, jnp.iinfo(jnp.int64).min, inside))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide,
    "floor_div": _by_nonzero(lambda a, b: lax.stop_gradient(jnp.floor_divide(a, b))),
    "mod": _by_nonzero(jnp.remainder), "pow": _pow, "neg": jnp.negative, "abs": jnp.abs, "sign": jnp.sign,
    "square": jnp.square, "min": jnp.minimum, "max": jnp.maximum, "clamp": _clamp,
    "floor": _whole(jnp.floor), "ceil": _whole(jnp.ceil), "trunc": _whole(jnp.trunc), "round": _whole(jnp.round),
    "sqrt": _where_defined(jnp.sqrt), "rsqrt": _where_defined(lax.rsqrt), "exp": jnp.exp, "exp2": jnp.exp2,
    "expm1": jnp.expm1, "log": _where_defined(jnp.log), "log2": _where_defined(jnp.log2),
    "log1p": _where_defined(jnp.log1p), "tanh": jnp.tanh, "sigmoid": lax.logistic,
    "silu": lambda a: a * lax.logistic(a), "relu": _relu,
    "gelu": lambda a: 0.5 * a * lax.erfc(-0.7071067811865476 * a), "gelu_tanh": _gelu_tanh, "erf": lax.erf,
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "erfc": lax.erfc, "atan": jnp.arctan, "asin": jnp.arcsin,
    "acos": jnp.arccos, "sinh": jnp.sinh, "cosh": jnp.cosh, "asinh": jnp.arcsinh, "acosh": jnp.arccosh,
    "atanh": jnp.arctanh, "atan2": _atan2, "hypot": _hypot, "detach": lax.stop_gradient,
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
    "ge": jnp.greater_equal, "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor,
    "not": jnp.bitwise_not, "shl": _shifted(lax.shift_left, True), "shr": _shifted(lax.shift_right_arithmetic, False),
    "within": lambda a, n: jnp.where((a >= 0) & (a < n), a, n), "where": jnp.where, "to_int": _to_int,
    "to_bool": lambda a: a != 0,
}  # fmt: skip


def extremum(x: Any, dim: int) -> Any:
    """The largest ones, kept as a dimension of 1; those that are equal to it have an equal part in it. One of them is
    told by its place: XLA may compute numbers again for the comparison, rounded in another way, and none would be."""
    top = lax.stop_gradient(x).max(dim, keepdims=True)
    place = lax.stop_gradient(x).argmax(dim, keepdims=True)
    chosen = (x >= top) | (lax.broadcasted_iota(place.dtype, x.shape, dim % x.ndim) == place)
    return jnp.where(chosen, x, 0).sum(dim, keepdims=True) / chosen.sum(dim, keepdims=True).astype(x.dtype)


def _reduced(op: str, x: Any, dim: int) -> Any:
    if op in ("sum", "prod"):
        return getattr(jnp, op)(x, dim, keepdims=True)
    if not _is_float(x):
        return getattr(x, op[1:])(dim, keepdims=True)
    return extremum(x, dim) if op == "amax" else -extremum(-x, dim)


# --- texts ----------------------------------------------------------------------------------------------------------


class _Evaluation:
    """The values of one text's nodes, at one set of inputs."""

    def __init__(self, text: Program, values: Values, known: dict[int, Any] | None = None) -> None:
        self.text, self.values = text, values
        self.known = {} if known is None else known

    def operand(self, i: int) -> Any:
        if i not in self.known:
            n = self.text.nodes[i]
            if n.op not in LEAVES:  # out of its order: a value that shares a backward with an earlier one
                self.run([i])
            elif n.op == "input":
                self.known[i] = self.values.inputs[n.of]
            else:
                number = self.values.scalars[n.of] if n.op == "scalar" else n.of if n.op == "constant" else 0
                dtype = (jnp.bool_, jnp.int64, self.values.dtype)[n.type]
                self.known[i] = jnp.asarray(number, dtype)
        return self.known[i]

    def run(self, places: Sequence[int]) -> None:
        for i in places:
            n = self.text.nodes[i]
            if n.op == "backward" or n.op in LEAVES or i in self.known:
                continue
            if n.op == "custom":
                self.own(n.operands[1])
            else:
                self.known[i] = self.value(i, n)

    def dim(self, axis: int) -> int:
        return _SPATIAL + self.text.axes.index(axis)

    def value(self, i: int, n: Node) -> Any:
        if n.op == "axis":
            shape = [1] * (_SPATIAL + len(self.text.axes))
            shape[self.dim(i)] = n.of
            return jnp.arange(n.of, dtype=jnp.int64).reshape(shape)
        if n.op == "load":
            part = self.part(n)
            return self.load(n) if part is None else part
        operands = [self.operand(x) for x in n.operands]
        if n.op in ("sum", "prod", "amax", "amin"):
            _, value = jnp.broadcast_arrays(*operands)
            return _reduced(n.op, value, self.dim(n.operands[0]))
        if n.op == "to_float":
            return operands[0].astype(self.values.dtype)
        return _FUNCTIONS[n.op](*operands)

    def part(self, n: Node) -> Any:
        """A read at some of b, h, q_idx and kv_idx themselves: a part of the array, whose gradient is one as well."""
        buffer, part = self.values.buffers[n.of], self.values.taking_part
        names = [self.text.nodes[i].of for i in n.operands if self.text.nodes[i].op == "input"]
        if not _is_float(buffer) or not names or len(set(names)) < len(n.operands):
            return None
        if "q_idx" in names and self.values.rows[n.of] is None:
            return None
        sizes = dict(zip(PLACES, self.values.sizes, strict=True))
        if any(sizes[name] > size for name, size in zip(names, buffer.shape, strict=True)):
            return None
        buffer = buffer[tuple(slice(sizes[name]) for name in names)]
        order = sorted(range(len(names)), key=lambda i: PLACES.index(names[i]))
        shape = [sizes[p] if p in names else 1 for p in PLACES] + [1] * len(self.text.axes)
        found = buffer.transpose(order).reshape(shape).astype(self.values.dtype)
        return found if part is None else jnp.where(self.taking_part(), found, 0)

    def taking_part(self) -> Any:
        part = self.values.taking_part
        return part.reshape(*part.shape, *[1] * len(self.text.axes))

    def load(self, n: Node) -> Any:
        """nan (0, false) out of range: where that is an error, the forward has raised it."""
        buffer, own = self.values.buffers[n.of], self.values.rows[n.of]
        kind = self.values.dtype if _is_float(buffer) else jnp.bool_ if buffer.dtype == jnp.bool_ else jnp.int64
        if not n.operands:
            return buffer.astype(kind)
        inside: Any = None
        places = []
        for d, (i, size) in enumerate(zip(n.operands, buffer.shape, strict=True)):
            index = self.operand(i)
            if d == own:
                index = self.values.own_rows.reshape(index.shape)
            index = jnp.where(index < 0, index + size, index)
            within = (index >= 0) & (index < size)
            inside = within if inside is None else inside & within
            places.append(index)
        nothing = jnp.asarray(jnp.nan if _is_float(buffer) else 0, kind)
        if buffer.size == 0:
            return jnp.broadcast_to(nothing, inside.shape)
        reading, outside = inside, ~inside
        if self.values.taking_part is not None:
            part = self.taking_part()
            reading, outside = inside & part, ~inside & part
        at = jnp.broadcast_arrays(*(jnp.where(reading, p, 0).astype(jnp.int32) for p in places))
        found = buffer.at[tuple(at)].get(mode="promise_in_bounds")
        return jnp.where(outside, nothing, found.astype(kind))

    def own(self, backward: int) -> None:
        """All values that share a backward. What each input receives is linear in the upstream gradients; transposed,
        it is the tangents that they have."""
        nodes = self.text.nodes
        customs = [i for i, n in enumerate(nodes) if n.op == "custom" and n.operands[1] == backward]
        keys = {n.of: i for i, n in enumerate(nodes) if n.op == "upstream"}
        full = (*self.values.sizes, *[1] * len(self.text.axes))
        xs, wanted = nodes[backward].operands[::2], nodes[backward].operands[1::2]
        needed: set[int] = set()
        reads: dict[int, Any] = {}
        pending = list(wanted)
        while pending:
            i = pending.pop()
            if i not in self.text.upstream:
                reads[i] = self.operand(i)
            elif i not in needed:
                needed.add(i)
                pending += nodes[i].operands
        names, order, values = list(reads), sorted(needed), self.values

        def received(upstream: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            known = dict(zip(names, given, strict=True))
            for custom, gradient in zip(customs, upstream, strict=True):
                known[keys.get(nodes[custom].of, -1)] = gradient
            inner = _Evaluation(self.text, values, known)
            inner.run(order)
            return [jnp.broadcast_to(inner.operand(x), full) for x in wanted]

        @jax.custom_jvp
        def applied(results: Any, inputs: Any, given: Any) -> Any:
            return results

        @applied.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            with jax.enable_x64(True):
                _, pull = jax.vjp(lambda u: received(u, primals[2]), [jnp.zeros_like(x) for x in primals[0]])
                return applied(*primals), pull(tangents[1])[0]

        inputs = [jnp.broadcast_to(self.operand(x), full) for x in xs]
        results = [jnp.broadcast_to(self.operand(nodes[i].operands[0]), full) for i in customs]
        self.known.update(zip(customs, applied(results, inputs, list(reads.values())), strict=True))


def evaluate(text: Program, values: Values) -> Any:
    """The result, which broadcasts to [B, H, M, N]. `jax_enable_x64` must be on."""
    axes = len(text.axes)
    if axes:
        values.inputs = {k: x.reshape(*x.shape, *[1] * axes) for k, x in values.inputs.items()}
    run = _Evaluation(text, values)
    run.run([i for i in range(len(text.nodes)) if i not in text.upstream])
    found = run.operand(text.result)
    return found.reshape(found.shape[:_SPATIAL]) if axes and found.ndim > _SPATIAL else found
