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
from .custom import custom_call
from .elementwise import ELEMENTWISE, Scalars
from .errors import Refused, of_jax
from .layout import LAYOUT, VIEWS
from .reductions import REDUCTIONS
from .scatter import SCATTERS, scatter
from .values import MAX_UNROLLED, Index, Known, Rule, Trace, Value, category

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


def _refused(equation: Any, what: str, instead: str) -> Refused:
    error = Refused(f"the primitive {equation.primitive.name}, which {what}", instead)
    error.equation = equation
    return error


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
        return _CALLS[name](t, equation, operands)
    avals = [var.aval for var in equation.outvars]
    for aval in avals:
        category(aval.dtype)
    rules = _rules(t, name, params, operands, avals)
    if rules is None:
        raise _refused(equation, "score_mods do not have", "write it with what docs/score_mod.md lists")
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
    # Of literals there is a value also where all else is traced; within shard_map JAX would compute none.
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
    integers, of which the planners of kernels know something."""
    if name not in ("jit", "pjit") or len(operands) != 2:
        return None
    function = equation.params.get("name")
    primitive = {"floor_divide": "floor_div", "remainder": "mod"}.get(function)
    aval = equation.outvars[0].aval
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


def _cond(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    """Both branches are computed, as under vmap."""
    which, *args = operands
    branches = [interpret(t, branch, args) for branch in equation.params["branches"]]
    taken = t.g.value(which.at(()))
    if taken is not None:
        return branches[min(max(int(taken), 0), len(branches) - 1)]
    return [_choice(t, which, cases, equation) for cases in zip(*branches, strict=True)]


def _choice(t: Trace, which: Value, cases: Sequence[Value], equation: Any) -> Value:
    def rule(index: Index) -> int:
        place = t.g.cast(which.at(()), t.g.type(t.zero))
        return t.chosen([case.at(index) for case in cases], t.clipped(place, 0, len(cases) - 1))

    return Value(t, cases[0].shape, cases[0].dtype, rule, equation)


def _scan(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    """Step by step."""
    params = equation.params
    length, reverse = params["length"], params["reverse"]
    consts, carried = _scan_counts(params)
    if length > MAX_UNROLLED:
        raise _refused(equation, f"has {length} steps", f"use at most {MAX_UNROLLED}, or sums and products of matrices")
    fixed, carry, xs = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
    collected: dict[int, list[Value]] = {}
    for step in reversed(range(length)) if reverse else range(length):
        given = [_element(t, x, step, equation) for x in xs]
        out = interpret(t, params["jaxpr"], [*fixed, *carry, *given])
        carry, collected[step] = out[:carried], out[carried:]
    stacked = []
    for i, var in enumerate(equation.outvars[carried:]):
        parts = [collected[step][i] for step in range(length)]

        def rule(index: Index, parts: list[Value] = parts) -> int:
            return t.chosen([part.at(index[1:]) for part in parts], index[0])

        stacked.append(Value(t, var.aval.shape, var.aval.dtype, rule, equation))
    return [*carry, *stacked]


def _scan_counts(params: Any) -> tuple[int, int]:
    """How many operands are the same in all steps, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())  # since JAX 0.12
    return consts, carried


def _element(t: Trace, x: Value, step: int, equation: Any) -> Value:
    place = t.g.constant(step)

    def rule(index: Index) -> int:
        return x.at((place, *index))

    if isinstance(x, Known):
        return Known(t, x.shape[1:], x.dtype, lambda: x.array[step], rule, x.is_literal)
    return Value(t, x.shape[1:], x.dtype, rule, equation)


def _unstack(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    (x,), d = operands, equation.params["axis"] % len(operands[0].shape)
    results = []
    for k, var in enumerate(equation.outvars):

        def rule(index: Index, k: int = k) -> int:
            return x.at((*index[:d], t.g.constant(k), *index[d:]))

        results.append(Value(t, var.aval.shape, var.aval.dtype, rule, equation))
    return results


def _while(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    """Step by step, where the number of steps is known."""
    params = equation.params
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, body, carry = operands[:of_test], operands[of_test : of_test + of_body], operands[of_test + of_body :]
    for _ in range(MAX_UNROLLED + 1):
        (going,) = interpret(t, params["cond_jaxpr"], [*test, *carry])
        more = t.g.value(going.at(()))
        if more is None:
            raise _refused(equation, "runs until a value says so", "use a number of steps: lax.fori_loop(0, 8, ...)")
        if not more:
            return list(carry)
        carry = interpret(t, params["body_jaxpr"], [*body, *carry])
    raise _refused(equation, f"has more than {MAX_UNROLLED} steps", "use fewer, or sums and products of matrices")


def _split(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    (x,), d = operands, equation.params["axis"]
    results, start = [], 0
    for var, size in zip(equation.outvars, equation.params["sizes"], strict=True):

        def rule(index: Index, start: int = start) -> int:
            return x.at((*index[:d], t.plus(index[d], start), *index[d + 1 :]))

        results.append(Value(t, var.aval.shape, var.aval.dtype, rule, equation))
        start += size
    return results


def _custom(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    return custom_call(t, equation, operands, interpret)


_CALLS: dict[str, Callable[[Trace, Any, list[Value]], list[Value]]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "split": _split,
    "unstack": _unstack,
    "optimization_barrier": lambda t, equation, operands: operands,
    "device_put": lambda t, equation, operands: operands,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "custom_vjp_call_jaxpr": _custom,
    "call_hi_primitive": _custom,
    **dict.fromkeys(SCATTERS, scatter),
}

SUPPORTED = frozenset({*ELEMENTWISE, *LAYOUT, *REDUCTIONS, *_CALLS, *_INLINED})
"""The names of the primitives that a score_mod may have."""
