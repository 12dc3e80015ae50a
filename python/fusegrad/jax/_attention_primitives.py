"""flex_attention as JAX's primitives: a forward, its tangents, which are linear, and what these transpose to, the
backward. With them jit, grad, remat and scan need nothing of their own.

The arrays of a call: query, key, value, the score_mod's buffers, the mask_mod's, lists of a block mask, a seed. What a
forward saves: all its outputs, see Call.outputs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core
import jax.ffi
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fusegrad._C import score_mod as _language

from ._attention_call import OP, Call, Flags, fold, fold_rows, moved, unfold
from ._attention_sharding import Parts, partitioned
from ._library import FLEX_FLAGS, build_has_cuda, flex_scratch
from ._manual import zeros
from ._score_mod import TraceError

_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_FORWARD, _BACKWARD, _TANGENTS = range(3)
#: Whether a lowering for CUDA waits for its kernels to be compiled.
waits = contextvars.ContextVar("waits", default=False)
_TARGETS = ("fusegrad_flex_forward", "fusegrad_flex_backward", "fusegrad_flex_tangents")


def _types(like: jax.Array, results: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[Any, ...]:
    """The types of results that vary over a mesh's axes as `like` does."""
    made = jax.make_jaxpr(lambda x: [zeros(x, shape, dtype) for shape, dtype in results])(like)
    return tuple(made.out_avals)


# --- binding --------------------------------------------------------------------------------------------------------


def forward(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    types = _types(arrays[0], call.outputs(arrays[0], arrays[2]))
    return list(forward_p.bind(*arrays, call=call, types=types))


def tangents(
    call: Call, arrays: Sequence[Any], saved: Sequence[Any], has: Flags, given: Sequence[Any]
) -> list[jax.Array]:
    """For out and lse, and for the largest scores if the call has them."""
    types = _types(arrays[0], call.outputs(arrays[0], arrays[2])[: 3 if call.max_scores else 2])
    return list(tangents_p.bind(*arrays, *saved, *given, call=call, has=has, types=types))


def backward(
    call: Call, arrays: Sequence[Any], saved: Sequence[Any], having: Flags, upstream: Sequence[Any], wanted: Flags
) -> list[jax.Array]:
    """The wanted gradients. `having`: which upstream gradients there are, of out, lse and the largest scores."""
    results = [(x.shape, x.dtype) for x, w in zip(arrays, wanted, strict=False) if w]
    types = _types(arrays[0], results)
    return list(backward_p.bind(*arrays, *saved, *upstream, call=call, having=having, wanted=wanted, types=types))


def _count(call: Call) -> int:
    return call.inputs + call.mask_mod.buffers + call.lists + (call.dropout_p > 0)


def split(call: Call, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The arrays of a call, what its forward saved, and the rest."""
    n = _count(call)
    of_16_bits = getattr(args[0], "aval", args[0]).dtype.itemsize == 2
    end = n + 3 + 2 * call.max_scores + of_16_bits
    return list(args[:n]), list(args[n:end]), list(args[end:])


def split_like(call: Call, args: Sequence[Any], of: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What goes with each of the args, in the same parts."""
    arrays, saved, _ = split(call, args)
    n, end = len(arrays), len(arrays) + len(saved)
    return list(of[:n]), list(of[n:end]), list(of[end:])


# --- primitives -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _compiled(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(lambda *args: primitive.bind(*args, **dict(params)))


def primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *args, types, **params: types)
    primitive.def_impl(lambda *args, **params: _compiled(primitive, tuple(sorted(params.items())))(*args))
    return primitive


forward_p = primitive("fusegrad_flex_attention")
tangents_p = primitive("fusegrad_flex_attention_tangents")
backward_p = primitive("fusegrad_flex_attention_backward")


# --- derivatives ----------------------------------------------------------------------------------------------------


def _zero(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _forward_jvp(primals: Sequence[Any], given: Sequence[Any], *, call: Call, types: Any) -> Any:
    n = call.inputs
    has = tuple(type(t) is not ad.Zero for t in given[:n])
    if not any(has):
        out = forward(call, primals)
        return out, [_zero(x) for x in out]
    full = replace(call, low=True)
    saved = forward(full, primals)
    moving = tangents(full, primals, saved, has, [t for t, h in zip(given, has, strict=False) if h])
    out = saved[: len(types)]
    return out, [*moving, *(_zero(x) for x in out[len(moving) :])]


def _tangents_transpose(upstream: Sequence[Any], *args: Any, call: Call, has: Flags, types: Any) -> list[Any]:
    arrays, saved, given = split(call, args)
    having = tuple(type(g) is not ad.Zero for g in (*upstream, *[ad.Zero(None)] * 3)[:3])
    none = [None] * (len(arrays) + len(saved))
    if not any(having):
        return [*none, *(ad.Zero(t.aval) for t in given)]
    there = [g for g, h in zip(upstream, having, strict=False) if h]
    return [*none, *backward(call, arrays, saved, having, there, has)]


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_transposes[tangents_p] = _tangents_transpose
# For the other derivatives, see _attention_second.


# --- vmap -----------------------------------------------------------------------------------------------------------


def _size(args: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)


def _one_by_one(primitive: Primitive, args: Sequence[Any], dims: Sequence[int | None], params: Any) -> Any:
    """A call has one seed, and drops other pairs in each element of its batch."""
    batched = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def run(mine: Sequence[Any]) -> Any:
        rest = iter(mine)
        return primitive.bind(*(x if d is None else next(rest) for x, d in zip(args, dims, strict=True)), **params)

    out = jax.lax.map(run, batched)
    return out, (0,) * len(out)


def _forward_batched(args: Sequence[Any], dims: Sequence[Any], *, call: Call, types: Any) -> Any:
    if call.dropout_p > 0:
        return _one_by_one(forward_p, args, dims, {"call": call, "types": types})
    size = _size(args, dims)
    out = forward(*fold(call, args, dims, size))
    return [unfold(x, size) for x in out], (0,) * len(out)


def _tangents_batched(args: Sequence[Any], dims: Sequence[Any], *, call: Call, has: Flags, types: Any) -> Any:
    if call.dropout_p > 0:
        return _one_by_one(tangents_p, args, dims, {"call": call, "has": has, "types": types})
    size = _size(args, dims)
    (arrays, saved, given), (d, d_saved, d_given) = split(call, args), split_like(call, args, dims)
    folded, all_arrays = fold(call, arrays, d, size, has)
    saved = [fold_rows(x, i, size) for x, i in zip(saved, d_saved, strict=True)]
    own = all_arrays[0].shape[0] // size
    moving = []
    for place, x, i in zip([p for p, h in enumerate(has) if h], given, d_given, strict=True):
        moving.append(fold_rows(x, i, size, own) if place < 3 else moved(x, i, size))
    out = tangents(folded, all_arrays, saved, has, moving)
    return [unfold(x, size) for x in out], (0,) * len(out)


def _backward_batched(
    args: Sequence[Any], dims: Sequence[Any], *, call: Call, having: Flags, wanted: Flags, types: Any
) -> Any:
    if call.dropout_p > 0:
        params = {"call": call, "having": having, "wanted": wanted, "types": types}
        return _one_by_one(backward_p, args, dims, params)
    size = _size(args, dims)
    (arrays, saved, upstream), (d, d_saved, d_upstream) = split(call, args), split_like(call, args, dims)
    folded, all_arrays = fold(call, arrays, d, size, wanted)
    saved = [fold_rows(x, i, size) for x, i in zip(saved, d_saved, strict=True)]
    upstream = [fold_rows(x, i, size) for x, i in zip(upstream, d_upstream, strict=True)]
    found = backward(folded, all_arrays, saved, having, upstream, wanted)
    results = []
    for place, g, own in zip([p for p, w in enumerate(wanted) if w], found, types, strict=True):
        if place < 3:
            g = unfold(g, size)
            g = g.sum(1, keepdims=True) if g.shape[1] != own.shape[0] else g  # of keys that all of a batch share
        results.append(g)
    return results, (0,) * len(results)


batching.primitive_batchers[forward_p] = _forward_batched
batching.primitive_batchers[tangents_p] = _tangents_batched
batching.primitive_batchers[backward_p] = _backward_batched


# --- lowering -------------------------------------------------------------------------------------------------------


def _number_of(aval: Any) -> tuple[int, tuple[int, ...]]:
    name = "int32" if aval.dtype == jnp.uint32 else aval.dtype.name  # of seeds
    return _DTYPES.index(name), aval.shape


def _check_cuda(avals: Sequence[Any]) -> None:
    if not build_has_cuda:
        raise NotImplementedError(
            f"{OP}: fusegrad must be built with CUDA for a program on a GPU, but was built without: see docs/jax.md"
        )
    if avals[0].dtype == jnp.float64:
        raise NotImplementedError(f"{OP}: query must be bfloat16, float16 or float32 on CUDA, but got float64")


def _check_size(text: str, wanted: Any) -> None:
    """TraceError where the kernel of a score_mod, or of its derivative, would be too large."""
    if not text:
        return
    try:
        _language.check_kernel_size(text, None if wanted is None else tuple(bool(w) for w in wanted[3:]))
    except ValueError as error:
        raise TraceError(f"{OP}: {error}") from None


def _custom_call(
    cuda: bool, direction: int, ctx: Any, avals_in: Any, operands: Any, avals_out: Any, attributes: dict[str, Any]
) -> Any:
    scratch = []
    if cuda:
        _check_cuda(avals_in)
        _check_size(attributes["score_mod"], attributes["wanted"] if direction == _BACKWARD else None)
        numbers = {name: int(attributes[name]) for name in FLEX_FLAGS}
        size = flex_scratch(
            direction,
            {**attributes, **numbers},
            [*map(_number_of, avals_in)],
            [*map(_number_of, avals_out)],
            wait=waits.get(),
        )
        scratch = [jax.core.ShapedArray((size,), jnp.dtype("uint8"))]
    ctx = ctx.replace(avals_in=avals_in, avals_out=[*avals_out, *scratch])
    out = list(jax.ffi.ffi_lowering(_TARGETS[direction])(ctx, *operands, **attributes))
    return out[: len(avals_out)]


def is_for_several_devices(ctx: Any) -> bool:
    """Whether XLA's partitioner will see the program. Within shard_map it will not."""
    axes = ctx.module_context.axis_context
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1 and axes.device_assignment is not None


def _with_more(flags: Flags, call: Call, local: Call) -> Flags:
    """Also of the buffers that a device's part has besides."""
    return (*flags, *(False,) * (local.inputs - call.inputs))


def _forward_lowering(cuda: bool, ctx: Any, *operands: Any, call: Call, types: Any) -> Any:
    if is_for_several_devices(ctx):

        def part(parts: Parts, mine: Sequence[jax.Array]) -> Any:
            return forward(*parts.local(call, mine))

        results = [(x, None) for x in ctx.avals_out]
        run = partitioned(call, lambda *x: forward(call, x), part, ctx.avals_in, [], results)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    attributes = call.attributes((False,) * call.inputs, max_scores=call.max_scores)
    return _custom_call(cuda, _FORWARD, ctx, ctx.avals_in, operands, ctx.avals_out, attributes)


def _tangents_lowering(cuda: bool, ctx: Any, *operands: Any, call: Call, has: Flags, types: Any) -> Any:
    if call.max_scores:
        raise NotImplementedError(f"{OP}: max_scores must not be asked for in forward mode, but is")
    (avals, saved, given), n = split(call, ctx.avals_in), _count(call)
    if is_for_several_devices(ctx):

        def part(parts: Parts, mine: Sequence[jax.Array]) -> Any:
            arrays, kept, moving = split(call, mine)
            local, full = parts.local(call, arrays)
            return tangents(local, full, kept, _with_more(has, call, local), moving)

        def whole(*mine: jax.Array) -> Any:
            arrays, kept, moving = split(call, mine)
            return tangents(call, arrays, kept, has, moving)

        places = [i for i, h in enumerate(has) if h]
        others = [*((x, None) for x in saved), *zip(given, places, strict=True)]
        run = partitioned(call, whole, part, avals, others, [(x, None) for x in ctx.avals_out])
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    avals_out = [*saved[:2], *ctx.avals_out]
    attributes = replace(call, low=False).attributes(has, max_scores=False)
    rest = operands[n + len(saved) :]
    out = _custom_call(cuda, _TANGENTS, ctx, [*avals, *given], [*operands[:n], *rest], avals_out, attributes)
    return out[2:]


def _backward_lowering(
    cuda: bool, ctx: Any, *operands: Any, call: Call, having: Flags, wanted: Flags, types: Any
) -> Any:
    if is_for_several_devices(ctx):
        avals, saved_avals, given_avals = split(call, ctx.avals_in)

        def part(parts: Parts, mine: Sequence[jax.Array]) -> Any:
            arrays, kept, given = split(call, mine)
            local, full = parts.local(call, arrays)
            return backward(local, full, kept, having, given, _with_more(wanted, call, local))

        def whole(*mine: jax.Array) -> Any:
            arrays, kept, given = split(call, mine)
            return backward(call, arrays, kept, having, given, wanted)

        others = [(x, None) for x in (*saved_avals, *given_avals)]
        places = [i for i, w in enumerate(wanted) if w]
        run = partitioned(call, whole, part, avals, others, list(zip(ctx.avals_out, places, strict=True)))
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    arrays, saved, upstream = split(call, _with_avals(ctx.avals_in, operands))
    out, lse, *more = saved
    maxima, low = more[: 2 * call.max_scores], more[2 * call.max_scores :]
    given = [*arrays, out, lse, *low, *(maxima if having[2] else []), *upstream]
    attributes = call.attributes(wanted, max_scores=having[2], out=having[0], lse=having[1])
    avals, values = [x.aval for x in given], [x.value for x in given]
    return _custom_call(cuda, _BACKWARD, ctx, avals, values, ctx.avals_out, attributes)


class _Operand:
    def __init__(self, aval: Any, value: Any) -> None:
        self.aval, self.value = aval, value


def _with_avals(avals: Sequence[Any], operands: Sequence[Any]) -> list[_Operand]:
    return [_Operand(a, x) for a, x in zip(avals, operands, strict=True)]


# JAX has no public way to say that a lowering rule wants to know the devices, as custom_partitioning's does. Where the
# set is gone, arrays that jit splits are gathered.
with contextlib.suppress(ImportError):
    from jax._src.dispatch import prim_requires_devices_during_lowering

    prim_requires_devices_during_lowering.update((forward_p, tangents_p, backward_p))

for _primitive_of, _rule in (
    (forward_p, _forward_lowering),
    (tangents_p, _tangents_lowering),
    (backward_p, _backward_lowering),
):
    mlir.register_lowering(_primitive_of, functools.partial(_rule, False), platform="cpu")
    mlir.register_lowering(_primitive_of, functools.partial(_rule, True), platform="cuda")
