"""JAX's primitives with several results, or with jaxprs that are interpreted for parts of them: choices and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .custom import Interpret
from .errors import refused
from .trace import Trace
from .values import MAX_UNROLLED, Index, Known, Value

__all__ = ["PARTS"]


def _cond(t: Trace, equation: Any, operands: list[Value], interpret: Interpret) -> list[Value]:
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


def _scan(t: Trace, equation: Any, operands: list[Value], interpret: Interpret) -> list[Value]:
    """Step by step."""
    params = equation.params
    length, reverse = params["length"], params["reverse"]
    consts, carried = _scan_counts(params)
    if length > MAX_UNROLLED:
        raise refused(equation, f"has {length} steps", f"use at most {MAX_UNROLLED}, or sums and products of matrices")
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


def _unstack(t: Trace, equation: Any, operands: list[Value], interpret: Interpret) -> list[Value]:
    (x,), d = operands, equation.params["axis"] % len(operands[0].shape)
    results = []
    for k, var in enumerate(equation.outvars):

        def rule(index: Index, k: int = k) -> int:
            return x.at((*index[:d], t.g.constant(k), *index[d:]))

        results.append(Value(t, var.aval.shape, var.aval.dtype, rule, equation))
    return results


def _while(t: Trace, equation: Any, operands: list[Value], interpret: Interpret) -> list[Value]:
    """Step by step, where the number of steps is known."""
    params = equation.params
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, body, carry = operands[:of_test], operands[of_test : of_test + of_body], operands[of_test + of_body :]
    for _ in range(MAX_UNROLLED + 1):
        (going,) = interpret(t, params["cond_jaxpr"], [*test, *carry])
        more = t.g.value(going.at(()))
        if more is None:
            raise refused(equation, "runs until a value says so", "use a number of steps: lax.fori_loop(0, 8, ...)")
        if not more:
            return list(carry)
        carry = interpret(t, params["body_jaxpr"], [*body, *carry])
    raise refused(equation, f"has more than {MAX_UNROLLED} steps", "use fewer, or sums and products of matrices")


def _split(t: Trace, equation: Any, operands: list[Value], interpret: Interpret) -> list[Value]:
    (x,), d = operands, equation.params["axis"]
    results, start = [], 0
    for var, size in zip(equation.outvars, equation.params["sizes"], strict=True):

        def rule(index: Index, start: int = start) -> int:
            return x.at((*index[:d], t.plus(index[d], start), *index[d + 1 :]))

        results.append(Value(t, var.aval.shape, var.aval.dtype, rule, equation))
        start += size
    return results


PARTS: dict[str, Callable[[Trace, Any, list[Value], Interpret], list[Value]]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "split": _split,
    "unstack": _unstack,
    "optimization_barrier": lambda t, equation, operands, _: operands,
    "device_put": lambda t, equation, operands, _: operands,
}
