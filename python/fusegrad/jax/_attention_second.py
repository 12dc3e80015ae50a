"""Second derivatives of flex_attention, and those beyond.

The tangents are linear in the tangents of the call's arrays, and the gradients in the upstream gradients; each is the
transpose of the other, and both are the kernels'. How they depend on the arrays is differentiated by formulas
(_attention_formulas). What a forward saved depends on the arrays alone, so that the derivative by these is all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ._attention_call import OP, Call, Flags
from ._attention_formulas import attend
from ._attention_primitives import (
    backward,
    backward_p,
    is_for_several_devices,
    primitive,
    split,
    split_like,
    tangents,
    tangents_p,
)

__all__: list[str] = []


def _moves(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero


def _formulas(call: Call, arrays: Sequence[jax.Array], places: Sequence[int]) -> tuple[Callable[..., Any], list[Any]]:
    """The results as a function of the arrays at these places, and those."""
    if call.score_mod.own_derivatives:
        raise NotImplementedError(
            f"{OP}: a function with a derivative of its own (custom_jvp, custom_vjp) must not be in a score_mod of "
            "which a second derivative is wanted, but is"
        )
    full = list(arrays)
    if call.dropout_p > 0:
        (full[-1],) = one_device_p.bind(full[-1], types=(jax.typeof(full[-1]),))

    def of(*some: jax.Array) -> list[jax.Array]:
        given = list(full)
        for place, x in zip(places, some, strict=True):
            given[place] = x
        return attend(call, given)

    return of, [arrays[i] for i in places]


def _flagged(flags: Flags, values: Sequence[Any]) -> list[Any]:
    """Each flag's value, None where it is not set."""
    rest = iter(values)
    return [next(rest) if flag else None for flag in flags]


def _derivative(function: Callable[..., Any], arrays: list[Any], moving: list[Any], like: Sequence[Any]) -> list[Any]:
    """For function(*arrays) along `moving`, in dtypes as those of `like`."""
    found = jax.jvp(function, arrays, moving)[1]
    return [x.astype(y.dtype) for x, y in zip(found, like, strict=True)]


def _sum(parts: Sequence[list[Any]], like: Sequence[Any]) -> list[Any]:
    if not parts:
        return [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in like]
    return [sum(x[1:], x[0]) for x in zip(*parts, strict=True)]


def _backward_jvp(
    primals: Sequence[Any], given: Sequence[Any], *, call: Call, having: Flags, wanted: Flags, types: Any
) -> Any:
    arrays, saved, upstream = split(call, primals)
    of_arrays, _, of_upstream = split_like(call, primals, given)
    found = backward(call, arrays, saved, having, upstream, wanted)
    parts = []
    if any(map(_moves, of_upstream)):
        of_each = _flagged(having, of_upstream)
        there = tuple(g is not None and _moves(g) for g in of_each)
        moving = [g for g, t in zip(of_each, there, strict=True) if t]
        parts.append(backward(call, arrays, saved, there, moving, wanted))
    places = [i for i, t in enumerate(of_arrays[: call.inputs]) if _moves(t)]
    if places:
        of_results = [i for i, w in enumerate(wanted) if w]

        def gradients(*some: jax.Array) -> Any:
            full = list(arrays)
            for place, x in zip(places, some, strict=True):
                full[place] = x
            of, at = _formulas(call, full, of_results)
            results, pull = jax.vjp(of, *at)
            cotangents = [
                jnp.zeros_like(r) if g is None else g.astype(r.dtype)
                for r, g in zip(results, [*_flagged(having, upstream)][: len(results)], strict=True)
            ]
            return pull(cotangents)

        parts.append(_derivative(gradients, [arrays[i] for i in places], [of_arrays[i] for i in places], found))
    return found, _sum(parts, found)


def _backward_transpose(
    upstream: Sequence[Any], *args: Any, call: Call, having: Flags, wanted: Flags, types: Any
) -> list[Any]:
    """For the upstream gradients: the tangents along what the gradients receive."""
    arrays, saved, given = split(call, args)
    none: list[Any] = [None] * (len(arrays) + len(saved))
    of_inputs = _flagged(wanted, upstream)
    has = tuple(t is not None and _moves(t) for t in of_inputs)
    if not any(has):
        return [*none, *(ad.Zero(g.aval) for g in given)]
    moving = [t for t, h in zip(of_inputs, has, strict=True) if h]
    if call.max_scores:  # of which the kernels have no tangents
        of, at = _formulas(call, arrays, [i for i, h in enumerate(has) if h])
        found = jax.jvp(of, at, moving)[1]
    else:
        found = tangents(call, arrays, saved, has, moving)
    rest = iter(given)
    own = [(t, next(rest)) for t, h in zip(found, having, strict=False) if h]
    return [*none, *(t.astype(g.aval.dtype) for t, g in own)]


def _tangents_jvp(primals: Sequence[Any], given: Sequence[Any], *, call: Call, has: Flags, types: Any) -> Any:
    arrays, saved, moving = split(call, primals)
    of_arrays, _, of_moving = split_like(call, primals, given)
    found = tangents(call, arrays, saved, has, moving)
    parts = []
    if any(map(_moves, of_moving)):
        of_each = _flagged(has, of_moving)
        there = tuple(t is not None and _moves(t) for t in of_each)
        parts.append(tangents(call, arrays, saved, there, [t for t, h in zip(of_each, there, strict=True) if h]))
    places = [i for i, t in enumerate(of_arrays[: call.inputs]) if _moves(t)]
    if places:

        def pushed(*some: jax.Array) -> Any:
            full = list(arrays)
            for place, x in zip(places, some, strict=True):
                full[place] = x
            of, at = _formulas(call, full, [i for i, h in enumerate(has) if h])
            return jax.jvp(of, at, list(moving))[1]

        parts.append(_derivative(pushed, [arrays[i] for i in places], [of_arrays[i] for i in places], found))
    return found, _sum(parts, found)


ad.primitive_jvps[backward_p] = _backward_jvp
ad.primitive_transposes[backward_p] = _backward_transpose
ad.primitive_jvps[tangents_p] = _tangents_jvp


# --- dropout over several devices -------------------------------------------------------------------------------------

#: A seed, which formulas for all of the batch may not use where each device's part has its own (Parts.local).
one_device_p = primitive("fusegrad_flex_attention_on_one_device")


def _one_device_lowering(ctx: Any, seed: Any, *, types: Any) -> Any:
    if is_for_several_devices(ctx):
        raise NotImplementedError(
            f"{OP}: arrays must not be split over devices by jit where a second derivative with dropout is wanted, but "
            "are: use jax.shard_map"
        )
    return [seed]


def _one_device_batched(args: Sequence[Any], dims: Sequence[Any], *, types: Any) -> Any:
    return one_device_p.bind(*args, types=(jax.typeof(args[0]),)), dims


mlir.register_lowering(one_device_p, _one_device_lowering)
batching.primitive_batchers[one_device_p] = _one_device_batched
