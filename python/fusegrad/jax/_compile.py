"""Compiles the kernels of flex attention ahead of the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _check
from ._attention import flex_attention
from ._attention_primitives import waits
from ._block_mask import BlockMask
from ._library import build_has_cuda
from ._score_mod import Mod, trace_score_mod

__all__ = ["compile_flex"]

_OP = "fusegrad.jax.compile_flex"


def compile_flex(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    *,
    requires_grad: bool = True,
    layout: str = "BHSD",
    **options: Any,
) -> None:
    """Compiles what a call of :func:`flex_attention` on this process's GPU and its backward need, into the memory of
    the process and fusegrad's cache on the disk; nothing is run. A program that is jitted later finds them there.

    Args:
        query, key, value: arrays or ``jax.ShapeDtypeStruct``.
        score_mod, block_mask, layout, options: As of the call.
        requires_grad: Whether there is a backward, for query, key, value and all floats that the score_mod captures.

    Raises:
        NotImplementedError: where fusegrad was built without CUDA.
        ValueError, TypeError, TraceError: as :func:`flex_attention`.
    """
    if not build_has_cuda:
        raise NotImplementedError(f"{_OP}: fusegrad must be built with CUDA, but was built without: see docs/jax.md")
    tensors = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    heads, length = (2, 1) if layout == "BSHD" else (1, 2)
    mod = None
    if score_mod is not None:
        sizes = (*(tensors[0].shape[d] for d in (0, heads, length)), tensors[1].shape[length])
        mod = trace_score_mod(score_mod, score_dtype=_check.acc_type(tensors[0].dtype), sizes=sizes)
    captured = [] if mod is None else [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in mod.buffers]
    places = (0, 1, 2, *(3 + i for i, x in enumerate(captured) if jnp.issubdtype(x.dtype, jnp.floating)))

    def step(*arrays: jax.Array) -> Any:
        def attend(*some: jax.Array) -> Any:
            given = list(arrays)
            for place, x in zip(places, some, strict=True):
                given[place] = x
            traced: Any = None if mod is None else Mod(mod.text, tuple(given[3:]), mod.scalars)
            q, k, v = given[:3]
            return flex_attention(q, k, v, traced, block_mask, layout=layout, **options)

        inputs = [arrays[i] for i in places]
        if not requires_grad:
            return attend(*inputs)
        out, pullback = jax.vjp(attend, *inputs)
        return out, pullback(out)

    token = waits.set(True)
    try:
        jax.jit(step).trace(*tensors, *captured).lower(lowering_platforms=("cuda",))
    finally:
        waits.reset(token)
