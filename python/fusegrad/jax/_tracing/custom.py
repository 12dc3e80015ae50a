"""Functions with a derivative of their own: custom_jvp and custom_vjp.

Their value is computed as it is; what each argument receives is what jax.vjp says of the call, on symbolic gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusegrad._C.score_mod import FLOAT

from ..._tracing.ops import ELEMENTWISE as OF_TORCH
from .elementwise import ELEMENTWISE
from .errors import OneByOne, Refused, of_jax
from .layout import linear
from .trace import Trace
from .values import MAX_UNROLLED, Index, Value, category

__all__ = ["Interpret", "custom_call"]

Interpret = Callable[[Trace, Any, Any], list[Value]]


def _relu(t: Trace, x: int) -> int:
    return t.g.apply("relu", x)


def _logaddexp(t: Trace, a: int, b: int) -> int:
    return OF_TORCH["logaddexp"](t.g, a, b)


_OF_JAX: dict[str, Callable[..., int]] = {"relu": _relu, "logaddexp": _logaddexp}
"""Functions of JAX's own that the language has, or whose derivative is that of what they compute."""


def custom_call(t: Trace, equation: Any, operands: list[Value], interpret: Interpret) -> list[Value]:
    inner = _called(equation, operands)
    jaxpr = getattr(inner, "jaxpr", inner)
    values = interpret(t, inner, operands)
    t.own_derivatives |= not of_jax(jaxpr)
    if t.in_backward:
        # The language has no derivative of one's own by an upstream gradient: it is that of what is computed.
        return values
    alike = all(x.shape == operands[0].shape for x in (*operands, *values))
    elementwise = alike and _is_elementwise(jaxpr)
    if of_jax(jaxpr):
        emit = _OF_JAX.get(jaxpr.debug_info.func_src_info.partition(" at ")[0])
        if emit is not None:
            (value,) = values
            rule = _emitted(t, emit, operands)
            return [Value(t, value.shape, value.dtype, rule, equation)]
        if not elementwise and any(x.shape for x in operands):
            return values  # the derivative of JAX's own functions is that of what they compute
    inputs = [x for x in operands if category(x.dtype) == FLOAT]
    results = [x for x in values if category(x.dtype) == FLOAT]
    if not inputs or not results:
        return values
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*operands, *results)]
    closed = jax.make_jaxpr(_pull(equation, operands))(given[: len(operands)], given[len(operands) :])
    made = _Applied(t, equation, inputs, results)
    made.gradients = _backwards(t, closed, [*operands, *made.upstreams], interpret)
    whole = not (elementwise and _is_elementwise(getattr(closed, "jaxpr", closed)))
    found = iter(made.whole() if whole else made.each())
    return [next(found) if category(x.dtype) == FLOAT else x for x in values]


def _called(equation: Any, operands: list[Value]) -> Any:
    """What is computed."""
    params = equation.params
    if "_prim" not in params:
        return next(params[key] for key in ("call_jaxpr", "fun_jaxpr") if key in params)
    prim = params["_prim"]  # a jax.experimental.hijax.HiPrim

    def expanded(*arrays: Any) -> Any:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, arrays)))

    return jax.make_jaxpr(expanded)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))


def _emitted(t: Trace, emit: Callable[..., int], operands: list[Value]) -> Callable[[Index], int]:
    return lambda index: emit(t, *(x.at(index if x.shape else ()) for x in operands))


def _is_elementwise(jaxpr: Any) -> bool:
    """Whether no element has to do with another, where all arguments and results have one shape."""
    for equation in jaxpr.eqns:
        inner = next((p for p in equation.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")), None)
        if inner is not None:
            if equation.primitive.name not in ("jit", "pjit") or not _is_elementwise(getattr(inner, "jaxpr", inner)):
                return False
        elif equation.primitive.name == "broadcast_in_dim":
            if any(getattr(x.aval, "shape", ()) for x in equation.invars):
                return False
        elif equation.primitive.name not in ELEMENTWISE:
            return False
    return True


def _pull(equation: Any, operands: list[Value]) -> Callable[..., Any]:
    """What the arguments of floats receive, as a function of all arguments and the results' gradients."""
    floats = [category(x.dtype) == FLOAT for x in operands]

    def call(*arrays: Any) -> Any:
        params = equation.primitive.get_bind_params(equation.params)
        functions, params = params if isinstance(params, tuple) else ((), params)
        out = equation.primitive.bind(*functions, *arrays, **params)
        return [x for x in out if jnp.issubdtype(x.dtype, jnp.floating)]

    def pull(arrays: list[Any], cotangents: list[Any]) -> Any:
        def of_floats(*given: Any) -> Any:
            rest = iter(given)
            return call(*(next(rest) if f else x for f, x in zip(floats, arrays, strict=True)))

        return jax.vjp(of_floats, *(x for f, x in zip(floats, arrays, strict=True) if f))[1](cotangents)

    return pull


def _backwards(t: Trace, closed: Any, arguments: list[Value], interpret: Interpret) -> list[Value]:
    before, t.in_backward = t.in_backward, True
    try:
        return interpret(t, closed, arguments)
    finally:
        t.in_backward = before


class _Applied:
    """One application: its results are values with a backward."""

    def __init__(self, t: Trace, equation: Any, inputs: list[Value], results: list[Value]) -> None:
        self.t, self.equation, self.inputs, self.results = t, equation, inputs, results
        self.gradients: list[Value] = []
        """What each input receives."""
        self._own: list[dict[Index, int]] = [{} for _ in results]
        self.upstreams = [Value(t, x.shape, x.dtype, self._upstream(k)) for k, x in enumerate(results)]

    def _upstream(self, k: int) -> Callable[[Index], int]:
        def rule(index: Index) -> int:
            own = self._own[k]
            if any(self.t.g.value(i) is None for i in index):
                raise OneByOne(frozenset(axis for i in index for axis in self.t.g.open_axes(i)))
            if index not in own:
                own[index] = self.t.g.upstream()
            return own[index]

        return rule

    def _customs(self, places: list[list[Index]]) -> list[list[int]]:
        """The results at these places of each, with one backward; of the inputs the same places, or all."""
        g, backward = self.t.g, self.t.g.backward()
        found = [
            [g.custom(u.at(i), x.at(i), backward) for i in at]
            for u, x, at in zip(self.upstreams, self.results, places, strict=True)
        ]
        return [[backward], *found]

    def each(self) -> list[Value]:
        """For arrays whose elements have nothing to do with one another: element by element, as they are asked for."""
        known: dict[Index, list[int]] = {}
        g = self.t.g

        def at(index: Index) -> list[int]:
            axes = frozenset(axis for i in index for axis in g.open_axes(i))
            if axes:
                raise OneByOne(axes)
            if index not in known:
                (backward,), *found = self._customs([[index] for _ in self.results])
                known[index] = [x for (x,) in found]
                for x, gradient in zip(self.inputs, self.gradients, strict=True):
                    g.add_pair(backward, x.at(index), gradient.at(index))
            return known[index]

        return [self._result(x, lambda index, k=k: at(index)[k]) for k, x in enumerate(self.results)]  # type: ignore[misc]

    def whole(self) -> list[Value]:
        """All elements share the backward."""
        t = self.t
        if sum(x.size for x in (*self.inputs, *self.results)) > 2 * MAX_UNROLLED:
            raise Refused(
                f"a function with a derivative of its own, of arrays of {[list(x.shape) for x in self.inputs]}",
                f"give it single elements, such as bias[kv_idx], or at most {MAX_UNROLLED}",
            )
        places = [[tuple(map(t.g.constant, at)) for at in np.ndindex(*x.shape)] for x in self.results]
        (backward,), *found = self._customs(places)
        for x, gradient in zip(self.inputs, self.gradients, strict=True):
            for term, d in zip(x.elements(), gradient.elements(), strict=True):
                t.g.add_pair(backward, term, d)
        return [
            self._result(x, lambda index, x=x, terms=terms: t.chosen(terms, linear(t, index, x.shape)))  # type: ignore[misc]
            for x, terms in zip(self.results, found, strict=True)
        ]

    def _result(self, like: Value, rule: Callable[[Index], int]) -> Value:
        return Value(self.t, like.shape, like.dtype, rule, self.equation)
