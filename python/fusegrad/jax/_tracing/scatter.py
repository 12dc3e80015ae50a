"""Arrays of which some elements are written: x.at[i].set(v), .add(v) and .multiply(v)."""

from __future__ import annotations

import math
from typing import Any

from .errors import Refused
from .layout import in_range, unlinear
from .trace import Trace
from .values import MAX_UNROLLED, Index, Value

__all__ = ["SCATTERS", "scatter"]

SCATTERS: dict[str, str | None] = {"scatter": None}
"""What becomes of an element and an update, where that does not replace it."""
for _name in ("add", "sub", "mul", "min", "max"):
    SCATTERS[f"scatter-{_name}"] = SCATTERS[f"scatter_{_name}"] = _name


def scatter(t: Trace, equation: Any, operands: list[Value]) -> list[Value]:
    """An element is what is there and each update that meets it, in order."""
    (x, indices, updates), params = operands, equation.params
    numbers, mode = params["dimension_numbers"], params["mode"].name
    op = SCATTERS[equation.primitive.name]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    if batching:
        raise Refused("a scatter with batching dimensions", "write elements one by one")
    windows = numbers.update_window_dims
    batch = [n for d, n in enumerate(updates.shape) if d not in windows]
    windowed = [d for d in range(len(x.shape)) if d not in numbers.inserted_window_dims]
    sizes = {d: updates.shape[w] for d, w in zip(windowed, windows, strict=True)}
    if math.prod(batch) > MAX_UNROLLED:
        raise Refused(f"a scatter of {math.prod(batch)} updates", f"use at most {MAX_UNROLLED}")

    def rule(index: Index) -> int:
        g, term = t.g, x.at(index)
        for k in range(math.prod(batch)):
            at_batch = unlinear(t, g.constant(k), batch)
            inside, offsets = g.constant(True), []
            for d, n in enumerate(x.shape):
                start, size = t.zero, sizes.get(d, 1)
                if d in numbers.scatter_dims_to_operand_dims:
                    place = numbers.scatter_dims_to_operand_dims.index(d)
                    start = indices.at((*at_batch, g.constant(place)))
                    if mode == "CLIP":
                        start = t.clipped(start, 0, n - size)
                    inside = t.both(inside, in_range(t, start, n - size + 1))
                offset = t.add(index[d], t.times(start, -1))
                inside = t.both(inside, in_range(t, offset, size))
                offsets.append(t.clipped(offset, 0, size - 1))
            places, rest = iter(at_batch), iter(offsets[d] for d in windowed)
            value = updates.at(tuple(next(rest) if w in windows else next(places) for w in range(len(updates.shape))))
            term = t.where(inside, value if op is None else g.apply(op, term, value), term)
        return term

    (var,) = equation.outvars
    return [Value(t, var.aval.shape, var.aval.dtype, rule, equation)]
