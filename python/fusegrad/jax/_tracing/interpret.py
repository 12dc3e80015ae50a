"""A walk over a jaxpr, in which each equation becomes a value of the trace.

What depends on nothing but captured arrays JAX computes itself, before the call and with its own derivatives; of the
rest there is a term where it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._tracing.names import words
from .custom import Interpret, custom_call
from .elementwise import ELEMENTWISE, Scalars
from .errors import Refused, of_jax, refused
from .layout import LAYOUT, VIEWS
from .parts import PARTS
from .reductions import REDUCTIONS
from .scatter import SCATTERS, scatter
from .trace import Trace
from .values import Index, Known, Rule, Value, category

__all__ = ["SUPPORTED", "interpret"]


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and its constants, of either class that JAX has had."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def interpret(t: Trace, closed: Any, args: Sequence[Value]) -> list[Value]:
    """The results of a jaxpr."""
    jaxpr, consts = _opened(closed)
    values: dict[Any, Value] = {}

    def read(atom: Any) -> Value:
        return _constant(t, atom.val, atom.aval, True) if hasattr(atom, "val") else values[atom]

    for var, const in zip(jaxpr.constvars, consts, strict=True):
        values[var] = _constant(t, const, var.aval, False)
    values.update(zip(jaxpr.invars, args, strict=True))
    for equation in _needed(jaxpr):
        try:
            results = _results(t, equation, [read(x) for x in equation.invars])
            for var, value in zip(equation.outvars, results, strict=True):
                values[var] = value
                if not value.shape and not isinstance(value, Known):
                    value.at(())  # now, since a chain of scalars may be long
        except Refused as error:
            # The outermost: within functions of JAX's own, which it traces once, the line is that of their first call.
            error.equation = equation
            raise
    return [read(x) for x in jaxpr.outvars]


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that the results need, and those with effects."""
    needed, found = {x for x in jaxpr.outvars if not hasattr(x, "val")}, []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not hasattr(x, "val"))
            found.append(equation)
    return found[::-1]


def _constant(t: Trace, value: Any, aval: Any, is_literal: bool) -> Known:
    # A jax.Array is captured, also where a jaxpr holds it as a literal: its value is no part of the text.
    is_literal = is_literal and not isinstance(value, jax.Array)
    return Known(t, aval.shape, aval.dtype, lambda: value, is_literal=is_literal)


def _results(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    name, params = equation.primitive.name, equation.params
    known = all(isinstance(x, Known) for x in operands)
    inner = _inlined(name, params)
    if inner is not None:
        whole = _of_whole(t, name, inner, operands, equation)
        if whole is not None:
            return whole
        if not known or all(e.primitive.name in VIEWS for e in _opened(inner)[0].eqns):
            return interpret(t, inner, operands)
    if known:
        return _known(t, equation, operands)
    if name in _CALLS:
        return _CALLS[name](t, equation, operands, interpret)
    avals = [var.aval for var in equation.outvars]
    for aval in avals:
        category(aval.dtype)
    rules = _rules(t, name, params, operands, avals)
    if rules is None:
        raise refused(equation, "score_mods do not have", "write it with what docs/design/score_mod.md lists")
    return [Value(t, aval.shape, aval.dtype, rule, equation) for aval, rule in zip(avals, rules, strict=True)]


def _rules(t: Trace, name: str, params: Any, operands: list[Value], avals: Sequence[Any]) -> list[Rule] | None:
    if name in LAYOUT:
        return [LAYOUT[name](t, params, avals[0].shape, *operands)]
    if name in REDUCTIONS:
        return REDUCTIONS[name](t, params, *operands)
    if name in ELEMENTWISE:
        emit = ELEMENTWISE[name]
        scalars = Scalars(t, params, tuple(x.dtype for x in operands), avals[0].dtype)
        # Scalars may meet arrays: a predicate, bounds, numbers.
        return [lambda index: emit(scalars, *(x.at(index if x.shape else ()) for x in operands))]
    return None


# --- what JAX computes ----------------------------------------------------------------------------------------


_OF_MESHES = words(
    """
    psum psum_invariant pmax pmin ppermute pbroadcast all_gather all_gather_invariant all_to_all reduce_scatter
    pvary pcast sharding_constraint mesh_cast reshard
    """
)


_FREE = VIEWS | {"copy", "copy_p", "pvary", "pcast"}
"""What reads of an array's elements need not wait for."""


def _known(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    """The results of an equation of known arrays."""
    avals = [var.aval for var in equation.outvars]
    # What a mesh's axes have to do with is no number.
    is_literal = all(x.is_literal for x in operands if isinstance(x, Known)) and (
        equation.primitive.name in ("iota", "empty") if not operands else equation.primitive.name not in _OF_MESHES
    )
    made: list[Any] = []

    def make() -> list[Any]:
        if not made:
            made.extend(_computed(equation, [x.array for x in operands if isinstance(x, Known)], is_literal))
        return made

    name = equation.primitive.name
    free = name in _FREE or (name == "convert_element_type" and _is_free(operands[0], avals[0]))
    views: Sequence[Rule | None] = [None] * len(avals)
    if (free and not is_literal) or (is_literal and any(isinstance(x, jax.core.Tracer) for x in make())):
        views = _rules(t, name, equation.params, operands, avals) or views
    elif not is_literal:
        make()
    return [
        Known(t, aval.shape, aval.dtype, _item(make, i), view, is_literal)
        for i, (aval, view) in enumerate(zip(avals, views, strict=True))
    ]


def _item(make: Callable[[], list[Any]], i: int) -> Callable[[], Any]:
    return lambda: make()[i]


def _is_free(x: Value, aval: Any) -> bool:
    """Whether reading as another float is reading: floats have one type in the language."""
    kinds = [jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (x.dtype, aval.dtype)]
    return all(kinds) and jax.numpy.finfo(aval.dtype).bits >= jax.numpy.finfo(x.dtype).bits


def _computed(equation: Any, arrays: list[Any], is_literal: bool) -> list[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    # For literals there is a value also where all else is traced; within shard_map JAX would compute none.
    now = is_literal and not jax.sharding.get_abstract_mesh().manual_axes
    with equation.ctx.manager, jax.ensure_compile_time_eval() if now else contextlib.nullcontext():
        out = equation.primitive.bind(*functions, *arrays, **params)
    return list(out) if equation.primitive.multiple_results else [out]


# --- calls ----------------------------------------------------------------------------------------------------

_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_vmap_call": "call",
}


def _inlined(name: str, params: Any) -> Any:
    return params.get(_INLINED[name]) if name in _INLINED else None


def _of_whole(t: Trace, name: str, inner: Any, operands: list[Value], equation: Any) -> list[Value] | None:
    """What a function of jax.numpy is in one operation, where it is made of several: floor_divide and remainder of
    integers, of which the planners of kernels know something, and hypot, whose own derivative no other knows."""
    if name not in ("jit", "pjit") or len(operands) != 2:
        return None
    function = equation.params.get("name")
    primitive = {"floor_divide": "floor_div", "remainder": "mod"}.get(function)
    aval = equation.outvars[0].aval
    if function == "hypot" and of_jax(_opened(inner)[0], function):
        if all(isinstance(x, Known) for x in operands) or any(x.shape not in ((), aval.shape) for x in operands):
            return None
        return [Value(t, aval.shape, aval.dtype, _both(t, function, operands), equation)]
    if primitive is None or not jax.numpy.issubdtype(aval.dtype, jax.numpy.integer):
        return None
    integers = all(jax.numpy.issubdtype(x.dtype, jax.numpy.integer) for x in operands)
    if not integers or not of_jax(_opened(inner)[0], function):
        return None
    if all(isinstance(x, Known) for x in operands):
        return None
    info = jax.numpy.iinfo(aval.dtype)

    def rule(index: Index) -> int:
        a, b = (x.at(index if x.shape else ()) for x in operands)
        (a_low, a_high), (b_low, b_high) = t.bounds(a), t.bounds(b)
        fits = info.min <= min(a_low, b_low) and max(a_high, b_high) <= info.max
        if fits and not b_low <= 0 <= b_high:
            return t.g.apply(primitive, a, b)
        (general,) = interpret(t, inner, operands)
        return general.at(index)

    return [Value(t, aval.shape, aval.dtype, rule, equation)]


def _both(t: Trace, primitive: str, operands: list[Value]) -> Rule:
    return lambda index: t.g.apply(primitive, *(x.at(index if x.shape else ()) for x in operands))


_Call = Callable[[Trace, Any, list[Value], Interpret], list[Value]]
_CALLS: dict[str, _Call] = {
    "custom_jvp_call": custom_call,
    "custom_vjp_call": custom_call,
    "custom_vjp_call_jaxpr": custom_call,
    "call_hi_primitive": custom_call,
    **PARTS,
    **dict.fromkeys(SCATTERS, lambda t, equation, operands, _: scatter(t, equation, operands)),
}

SUPPORTED = frozenset({*ELEMENTWISE, *LAYOUT, *REDUCTIONS, *_CALLS, *_INLINED})
"""The names of the primitives that a score_mod may have."""
