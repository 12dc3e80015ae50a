"""JAX's primitives that place elements: for each, which element of its operands stands at an index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fusegrad._C.score_mod import FLOAT, INT

from ..._tracing.names import words
from .trace import Trace
from .values import Index, Rule, Value, category

__all__ = ["LAYOUT", "VIEWS", "linear", "unlinear"]

Layout = Callable[..., Rule]
LAYOUT: dict[str, Layout] = {}
"""(trace, parameters, the result's shape, *operands) -> the rule of the result."""
VIEWS = words("broadcast_in_dim broadcast_to tile transpose squeeze expand_dims reshape slice rev")
"""Those that only name the elements of their one operand otherwise."""


def _register(name: str) -> Callable[[Layout], Layout]:
    def decorate(function: Layout) -> Layout:
        LAYOUT[name] = function
        return function

    return decorate


@_register("iota")
def _iota(t: Trace, params: dict[str, Any], shape: Sequence[int]) -> Rule:
    return lambda index: index[params["dimension"]]


@_register("broadcast_in_dim")
def _broadcast(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, *sizes: Value) -> Rule:
    dims = params["broadcast_dimensions"]
    return lambda index: x.at(tuple(index[d] for d in dims))


@_register("broadcast_to")
def _broadcast_to(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, *sizes: Value) -> Rule:
    return lambda index: x.at(index[len(shape) - len(x.shape) :])


@_register("tile")
def _tile(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value) -> Rule:
    def rule(index: Index) -> int:
        # A single element has index 0 whatever is asked for.
        return x.at(tuple(t.modulo(i, n) for i, n in zip(index, x.shape, strict=True)))

    return rule


@_register("transpose")
def _transpose(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value) -> Rule:
    order = np.argsort(params["permutation"])
    return lambda index: x.at(tuple(index[d] for d in order))


@_register("squeeze")
def _squeeze(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value) -> Rule:
    gone = {d % len(x.shape) for d in params["dimensions"]}

    def rule(index: Index) -> int:
        rest = iter(index)
        return x.at(tuple(t.zero if d in gone else next(rest) for d in range(len(x.shape))))

    return rule


@_register("expand_dims")
def _expand(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value) -> Rule:
    new = {d % len(shape) for d in params["dimensions"]}
    return lambda index: x.at(tuple(i for d, i in enumerate(index) if d not in new))


@_register("rev")
def _rev(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value) -> Rule:
    dims = params["dimensions"]
    return lambda index: x.at(
        tuple(t.plus(t.times(i, -1), shape[d] - 1) if d in dims else i for d, i in enumerate(index))
    )


@_register("slice")
def _slice(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value) -> Rule:
    starts, steps = params["start_indices"], params["strides"] or [1] * len(shape)
    return lambda index: x.at(
        tuple(t.plus(t.times(i, step), start) for i, start, step in zip(index, starts, steps, strict=True))
    )


def linear(t: Trace, index: Index, shape: Sequence[int]) -> int:
    """The place of an element, counted from the first."""
    place = t.zero
    for i, n in zip(index, shape, strict=True):
        place = t.add(t.times(place, n), i) if n != 1 else place
    return place


def unlinear(t: Trace, place: int, shape: Sequence[int]) -> Index:
    g = t.g
    value = g.value(place)
    if value is not None:
        return tuple(g.constant(int(i)) for i in np.unravel_index(value, shape))
    index: list[int] = []
    for d in reversed(range(len(shape))):
        n = shape[d]
        if n == 1:
            index.insert(0, t.zero)
        elif math.prod(shape[:d]) == 1:
            index.insert(0, place)
        else:
            index.insert(0, g.apply("mod", place, g.constant(n)))
            place = g.apply("floor_div", place, g.constant(n))
    return tuple(index)


@_register("reshape")
def _reshape(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, *sizes: Value) -> Rule:
    # Parts of both shapes with the same number of elements are one another's: a dimension that stays is its own part.
    parts: list[tuple[list[int], list[int]]] = []
    ours, its = list(range(len(shape)))[::-1], list(range(len(x.shape)))[::-1]
    while ours or its:
        here, there = [ours.pop()] if ours else [], [its.pop()] if its else []
        while (more := math.prod(shape[d] for d in here) - math.prod(x.shape[d] for d in there)) != 0 and x.size:
            (there if more > 0 else here).append((its if more > 0 else ours).pop())
        parts.append((here, there))

    def rule(index: Index) -> int:
        found = [t.zero] * len(x.shape)
        for here, there in parts:
            place = linear(t, tuple(index[d] for d in here), [shape[d] for d in here])
            for d, i in zip(there, unlinear(t, place, [x.shape[d] for d in there]), strict=True):
                found[d] = i
        return x.at(tuple(found))

    return rule


@_register("concatenate")
def _concatenate(t: Trace, params: dict[str, Any], shape: Sequence[int], *parts: Value) -> Rule:
    d = params["dimension"]
    sizes = [part.shape[d] for part in parts]
    starts = [sum(sizes[:k]) for k in range(len(parts))]

    def rule(index: Index) -> int:
        i, (low, high) = index[d], t.bounds(index[d])
        met = [k for k in range(len(parts)) if sizes[k] > 0 and low < starts[k] + sizes[k] and high >= starts[k]]
        if not met:  # out of range, of a branch that is not taken
            met = [k for k in range(len(parts)) if sizes[k] > 0][:1]

        def of(k: int) -> int:
            place = t.clipped(t.plus(i, -starts[k]), 0, sizes[k] - 1)
            return parts[k].at((*index[:d], place, *index[d + 1 :]))

        term = of(met[-1])
        for k in reversed(met[:-1]):
            term = t.where(t.compared("lt", i, t.g.constant(starts[k] + sizes[k])), of(k), term)
        return term

    return rule


@_register("stack")
def _stack(t: Trace, params: dict[str, Any], shape: Sequence[int], *parts: Value) -> Rule:
    d = params["axis"] % len(shape)
    return lambda index: t.chosen([part.at((*index[:d], *index[d + 1 :])) for part in parts], index[d])


@_register("pad")
def _pad(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, fill: Value) -> Rule:
    def rule(index: Index) -> int:
        g, inside, places = t.g, t.g.constant(True), []
        for i, n, (low, _, between) in zip(index, x.shape, params["padding_config"], strict=True):
            place = t.plus(i, -low)
            if between:
                step = g.constant(between + 1)
                inside = t.both(inside, t.compared("eq", g.apply("mod", place, step), t.zero))
                place = g.apply("floor_div", place, step)
            inside = t.both(inside, in_range(t, place, n))
            places.append(t.clipped(place, 0, n - 1))
        return t.where(inside, x.at(tuple(places)), fill.at(())) if x.size else fill.at(())

    return rule


def in_range(t: Trace, place: int, size: int) -> int:
    return t.both(t.compared("ge", place, t.zero), t.compared("lt", place, t.g.constant(size)))


# --- places that are computed ---------------------------------------------------------------------------------


@_register("dynamic_slice")
def _dynamic_slice(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, *starts: Value) -> Rule:
    def rule(index: Index) -> int:
        places = []
        for i, start, n, size in zip(index, starts, x.shape, shape, strict=True):
            places.append(t.add(t.clipped(start.at(()), 0, n - size), i))
        return x.at(tuple(places))

    return rule


@_register("dynamic_update_slice")
def _dynamic_update_slice(
    t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, update: Value, *starts: Value
) -> Rule:
    def rule(index: Index) -> int:
        inside, places = t.g.constant(True), []
        for i, start, n, size in zip(index, starts, shape, update.shape, strict=True):
            place = t.add(i, t.times(t.clipped(start.at(()), 0, n - size), -1))
            inside = t.both(inside, in_range(t, place, size))
            places.append(t.clipped(place, 0, size - 1))
        return t.where(inside, update.at(tuple(places)), x.at(index)) if update.size else x.at(index)

    return rule


@_register("gather")
def _gather(t: Trace, params: dict[str, Any], shape: Sequence[int], x: Value, indices: Value) -> Rule:
    numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], params["mode"].name
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    of_batching = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    windowed = [d for d in range(len(x.shape)) if d not in (*numbers.collapsed_slice_dims, *batching)]

    def rule(index: Index) -> int:
        g = t.g
        batch = [i for d, i in enumerate(index) if d not in numbers.offset_dims]
        offsets = dict(zip(windowed, (index[d] for d in numbers.offset_dims), strict=True))
        inside, places = g.constant(True), []
        for d, n in enumerate(x.shape):
            place = t.zero
            if d in batching:
                place = batch[of_batching[batching.index(d)]]
            elif d in numbers.start_index_map:
                k = numbers.start_index_map.index(d)
                place = indices.at((*batch, g.constant(k)))
                if mode == "FILL_OR_DROP":
                    inside = t.both(inside, in_range(t, place, n - sizes[d] + 1))
                if mode != "PROMISE_IN_BOUNDS":
                    place = t.clipped(place, 0, n - sizes[d])
            places.append(t.add(place, offsets.get(d, t.zero)))
        if g.value(inside) is True:
            return x.at(tuple(places))
        return t.where(inside, x.at(tuple(places)) if x.size else _filling(t, params, x), _filling(t, params, x))

    return rule


def _filling(t: Trace, params: dict[str, Any], x: Value) -> int:
    """What a read out of range gives."""
    g, given, kind = t.g, params["fill_value"], category(x.dtype)
    if given is not None:
        return g.cast(g.constant(np.asarray(given).item()), kind)
    if kind != INT:
        return g.constant(math.nan if kind == FLOAT else True)
    info = jnp.iinfo(x.dtype)
    return g.constant(int(info.min if info.min < 0 else info.max))
