"""What is known of integers of a graph, and what follows from it: no wrapping, no check of an index.

fusegrad.jax uses what is here too: it must not need torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fusegrad._C.score_mod import BOOL, INT, MAX_LENGTH, Graph

__all__ = ["Bounds", "bounds", "checked", "inside", "wrapped"]

Bounds = tuple[float, float]
_ANY: Bounds = (-math.inf, math.inf)
_LENGTH: Bounds = (0, MAX_LENGTH)
"""For the number of a batch, head, query or key."""
_INT32: Bounds = (-(1 << 31) + (1 << 20), (1 << 31) - (1 << 20))
"""For captured int32: so far from the limits that small numbers may be added without a thought of wrapping."""


def bounds(
    g: Graph, term: int, unknown: Bounds = _ANY, depth: int = 8, known: Mapping[int, Bounds] | None = None
) -> Bounds:
    """What is known of an integer's least and largest value; `unknown`: of what is read or cast, `known`: of terms."""
    if known is not None and term in known:
        return known[term]
    operation, type_, of, operands = g.node(term)
    if operation == "constant":
        return (int(of),) * 2
    if operation == "input":
        return _LENGTH
    if operation == "axis":
        return 0, of - 1
    if type_ == BOOL or (operation == "to_int" and g.type(operands[0]) == BOOL):
        return 0, 1
    if operation in ("load", "scalar", "to_int"):
        return unknown
    if operation not in _BOUNDS or depth == 0:
        return _ANY
    x = [bounds(g, operand, unknown, depth - 1, known) for operand in operands]
    low, high = _BOUNDS[operation](x)
    return (low, high) if abs(low) < 1 << 62 and abs(high) < 1 << 62 else _ANY


def _bits_bounds(x: list[Bounds]) -> Bounds:
    if all(low >= 0 for low, _ in x):
        return 0, max(high for _, high in x) * 2
    largest = max(abs(bound) for pair in x for bound in pair)
    return _ANY if largest == math.inf else (-(1 << int(largest).bit_length()), (1 << int(largest).bit_length()) - 1)


def _product_bounds(x: list[Bounds]) -> Bounds:
    if math.inf in (abs(bound) for pair in x for bound in pair):
        return _ANY
    corners = [a * b for a in x[0] for b in x[1]]
    return min(corners), max(corners)


def _quotient(bound: float, nearer: float, farther: float) -> float:
    """A bound of quotients by positive numbers: a negative one is divided by `nearer`, where it is the larger."""
    by = nearer if bound < 0 else farther
    return bound if math.isinf(bound) else -1 if bound < 0 and math.isinf(by) else 0 if math.isinf(by) else bound // by


_BOUNDS: dict[str, Callable[[list[Bounds]], Bounds]] = {
    "add": lambda x: (x[0][0] + x[1][0], x[0][1] + x[1][1]),
    "sub": lambda x: (x[0][0] - x[1][1], x[0][1] - x[1][0]),
    "neg": lambda x: (-x[0][1], -x[0][0]),
    "mul": _product_bounds,
    "abs": lambda x: (max(x[0][0], -x[0][1], 0), max(-x[0][0], x[0][1])),
    "sign": lambda x: (-1, 1),
    "min": lambda x: (min(x[0][0], x[1][0]), min(x[0][1], x[1][1])),
    "max": lambda x: (max(x[0][0], x[1][0]), max(x[0][1], x[1][1])),
    "clamp": lambda x: (min(max(x[0][0], x[1][0]), x[2][0]), min(max(x[0][1], x[1][1]), x[2][1])),
    "mod": lambda x: (0, x[1][1] - 1) if x[1][0] > 0 else _ANY,
    "floor_div": lambda x: (_quotient(x[0][0], *x[1]), _quotient(x[0][1], *x[1][::-1])) if x[1][0] > 0 else _ANY,
    "and": lambda x: ((0, min(high for low, high in x if low >= 0)) if max(x[0][0], x[1][0]) >= 0 else _bits_bounds(x)),
    "or": _bits_bounds,
    "xor": _bits_bounds,
    "not": lambda x: (-1 - x[0][1], -1 - x[0][0]),
    "shr": lambda x: (
        (
            int(x[0][0]) >> int(x[1][0]) if x[0][0] > -math.inf else -(1 << 63 - int(x[1][0])),
            int(x[0][1]) >> int(x[1][0]) if x[0][1] < math.inf else (1 << 63 - int(x[1][0])) - 1,
        )
        if x[1][0] == x[1][1] and 0 <= x[1][0] < 64
        else _ANY
    ),
    "where": lambda x: (min(x[1][0], x[2][0]), max(x[1][1], x[2][1])),
    "within": lambda x: (0, max(x[1][1] - 1, 0)),
}


def wrapped(
    g: Graph,
    term: int,
    bits: int,
    signed: bool,
    from_wider: bool = False,
    known: Mapping[int, Bounds] | None = None,
) -> int:
    """An integer as a type of so many bits would hold it."""
    half = 1 << (bits - 1)
    low, high = bounds(g, term, _INT32 if bits == 32 and not from_wider else _ANY, known=known)
    if (-half if signed else 0) <= low and high < (half if signed else 2 * half):
        return term
    if not signed:
        return g.apply("and", term, g.constant((1 << bits) - 1))
    shift = g.constant(64 - bits)
    return g.apply("shr", g.apply("shl", term, shift), shift)


def checked(g: Graph, index: int, size: int) -> int:
    """An index from 0 to `size`, without that: elsewhere an error on the CPU, and `size` on a GPU."""
    low, high = bounds(g, index)
    if low == high and not 0 <= low < size:
        raise IndexError(f"index {low} is out of range for a dimension of size {size}")
    return index if low >= 0 and high < size else g.apply("within", index, g.constant(size))


def inside(g: Graph, index: int, size: int) -> int:
    """A negative index counts from the end."""
    index = g.cast(index, INT)
    low, high = bounds(g, index)
    if low == high and not -size <= low < size:
        raise IndexError(f"index {low} is out of range for a dimension of size {size}")
    if low == high:
        return g.constant(int(low) % size)
    if low < 0:
        index = g.apply("where", g.apply("lt", index, g.constant(0)), g.apply("add", index, g.constant(size)), index)
    # What was negative and in range is so after all.
    return index if -size <= low and high < size else checked(g, index, size)
