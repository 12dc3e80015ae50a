"""Flex attention: attention whose scores a small function shapes, with gradients for all that it captures."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _attention_primitives as primitives
from . import (
    _attention_second,  # noqa: F401  its rules
    _check,
)
from ._attention_call import OP, Call, Text
from ._attention_sharding import over_explicit_axes
from ._block_mask import BlockMask
from ._manual import alike, sharding_of, whole
from ._score_mod import Mod, trace_mask_mod, trace_score_mod

__all__ = ["AuxOutput", "AuxRequest", "flex_attention"]

_CAPTURED = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class AuxRequest(NamedTuple):
    """What flex_attention returns besides its output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """lse and max_scores, ``[B, H, M]``, as far as they were asked for."""

    lse: jax.Array | None = None
    max_scores: jax.Array | None = None


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    return_aux: AuxRequest | None = None,
    deterministic: bool | None = None,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
) -> Any:
    """Attention with scores that a function changes and pairs that another one masks, :func:`fusegrad.flex_attention`
    for JAX.

    ``s = score_mod(scale * query @ key.T)``, ``out = softmax(s) @ value`` over the keys that take part. Memory is
    linear in the lengths, and everything that the score_mod captures has a gradient: closures over arrays and over
    tracers, as a bias that a layer makes inside ``jit`` and ``grad``. See docs/jax.md.

    Args:
        query: ``[B, H, M, D]``; float32, bfloat16 or float16, on the CPU float64 too. On CUDA D is at most 576 and E
            at most 512. Products of float32 have its accuracy whatever ``jax.default_matmul_precision`` says.
        key: ``[B or 1, Hkv, N, D]``, of the query's dtype.
        value: ``[B or 1, Hkv, N, E]``.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` of scalars.
        block_mask: what :func:`create_block_mask` made.
        scale: a Python number, ``1 / sqrt(D)`` by default.
        enable_gqa: lets H be a multiple of Hkv.
        layout: 'BHSD', or 'BSHD' for query ``[B, M, H, D]``, key, value and output likewise: neither is copied.
        return_aux: ``AuxRequest(lse=True, max_scores=True)``: also returns lse, log(sum(exp(s))), and the largest s,
            each ``[B, H, M]`` in both layouts, float32 (float64 for float64), differentiable, -inf where no key takes
            part.
        deterministic: on CUDA: whether gradients must be the same bits in every run; None: as
            ``--xla_gpu_deterministic_ops`` in XLA_FLAGS says. The CPU's always are.
        dropout_p: of each pair, the probability that its weight becomes 0; the other weights are divided by
            ``1 - dropout_p``. At least 0 and less than 1; lse and max_scores are those without.
        dropout_key: a key of :func:`jax.random.key`, which says what pairs are dropped; needed where dropout_p is not
            0.

    Returns:
        ``[B, H, M, E]`` (``[B, M, H, E]``) in the query's dtype; 0 where no key takes part. With return_aux a pair of
        it and an :class:`AuxOutput`.

    Raises:
        ValueError, TypeError, NotImplementedError: as ``fusegrad.jax.flex_attention: what must hold, but got <value>``,
            while the function is traced.
        TraceError: where a function cannot be traced, or is too large for a kernel.
    """
    _check.value(OP, layout in ("BHSD", "BSHD"), "layout must be 'BHSD' or 'BSHD'", repr(layout))
    bshd = layout == "BSHD"
    q, k, v = (_tensor(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    B, H, M, N, E = _lengths(q, k, v, bshd, enable_gqa)
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise TypeError(f"{OP}: return_aux must be an AuxRequest, but got {type(return_aux).__name__}")
    for name, flag in (("enable_gqa", enable_gqa), ("deterministic", deterministic)):
        if not isinstance(flag, bool) and (flag is not None or name == "enable_gqa"):
            raise TypeError(f"{OP}: {name} must be a bool, but got {type(flag).__name__}")
    p = _check.number(OP, "dropout_p", dropout_p)
    _check.value(OP, 0 <= p < 1, "dropout_p must be at least 0 and less than 1", p)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else _check.number(OP, "scale", scale)
    _check.value(OP, math.isfinite(factor), "scale must be a finite number", factor)
    acc = _check.acc_type(q.dtype)
    sizes = (B, H, M, N)
    score = _mod("score_mod", score_mod, lambda f: trace_score_mod(f, score_dtype=acc, sizes=sizes), q.dtype)
    mask, lists, block_size = _mask(block_mask, B, H, M, N)
    wants_max = return_aux is not None and return_aux.max_scores
    call = Call(
        score_mod=_text(score),
        mask_mod=_text(mask),
        lists=len(lists),
        block_size=block_size,
        scale=factor,
        bshd=bshd,
        max_scores=bool(wants_max),
        deterministic=_xla_is_deterministic() if deterministic is None else deterministic,
        dropout_p=p,
    )
    if 0 in (B, H, M, N, E):
        out, lse, top = _nothing(call, q, v)
    else:
        arrays = (q, k, v, *score.buffers, *mask.buffers, *lists, *_seed(p, dropout_key))
        out, lse, *more = _run(call, arrays)
        top = more[0] if wants_max else None
    if return_aux is None:
        return out
    return out, AuxOutput(lse if return_aux.lse else None, top)


def _run(call: Call, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    def forward(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return primitives.forward(call, alike(tuple(arrays)))

    sharding = sharding_of(arrays[0])
    if sharding is None:
        return forward(call, [whole(x) for x in arrays])
    spec = (*sharding.spec, *(None,) * (4 - len(sharding.spec)))
    length = 1 if call.bshd else 2
    _check.value(
        OP,
        spec[length] is None and spec[3] is None,
        "query must be split over devices by batch and heads alone",
        f"{sharding.spec} of {'BSHD' if call.bshd else 'BHSD'}",
    )
    return over_explicit_axes(call, arrays, sharding, forward)


def _tensor(name: str, given: Any) -> jax.Array:
    x = _check.floating(OP, name, given, may_be_split=True)
    _check.value(OP, x.ndim == 4, f"{name} must have four dimensions", list(x.shape))
    return x


def _lengths(q: jax.Array, k: jax.Array, v: jax.Array, bshd: bool, enable_gqa: bool) -> tuple[int, int, int, int, int]:
    """B, H, M, N and E of arguments that fit one another."""
    heads, length = (2, 1) if bshd else (1, 2)
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} must have the query's dtype {q.dtype.name}, but got {x.dtype.name}")
    _check.value(OP, q.shape[3] >= 1, "query must have a head size D of at least 1", list(q.shape))
    _check.value(OP, k.shape[3] == q.shape[3], f"key must have the query's head size {q.shape[3]}", k.shape[3])
    _check.value(
        OP,
        k.shape[:3] == v.shape[:3],
        f"value must have the key's batch, heads and length {list(k.shape[:3])}",
        list(v.shape[:3]),
    )
    _check.value(
        OP, k.shape[0] in (q.shape[0], 1), f"key must have the query's batch size {q.shape[0]} or 1", k.shape[0]
    )
    H, of_keys = q.shape[heads], k.shape[heads]
    if enable_gqa:
        _check.value(
            OP,
            of_keys > 0 and H % of_keys == 0,
            "query must have a multiple of the key's heads with enable_gqa",
            f"{H} and {of_keys}",
        )
    else:
        _check.value(OP, of_keys == H, f"key must have the query's heads {H} unless enable_gqa is set", of_keys)
    return q.shape[0], H, q.shape[length], k.shape[length], v.shape[3]


def _mod(name: str, given: Any, trace: Callable[[Any], Mod], dtype: Any) -> Mod:
    if given is None:
        return Mod("", (), ())
    mod = given if isinstance(given, Mod) else trace(given)
    buffers = []
    for i, buffer in enumerate(mod.buffers):
        x = _check.array(OP, f"{name}'s captured array {i}", buffer, may_be_split=True)
        if x.dtype.name not in _CAPTURED or (x.dtype == jnp.float64 and name == "score_mod" and dtype != x.dtype):
            raise TypeError(
                f"{OP}: {name}'s captured arrays must be floating (float64 with a float64 query alone), int8 to int64, "
                f"uint8 or bool, but got {x.dtype.name}{list(x.shape)}"
            )
        buffers.append(x)
    return mod._replace(text=mod.text.replace("\n", ";"), buffers=tuple(buffers), scalars=tuple(mod.scalars))


def _text(mod: Mod) -> Text:
    return Text(mod.text, mod.scalars, len(mod.buffers), mod.own_derivatives)


def _mask(given: Any, B: int, H: int, M: int, N: int) -> tuple[Mod, list[jax.Array], tuple[int, int]]:
    """Its mask_mod, its lists for the rows of blocks that there are, and the block size."""
    if given is None:
        return Mod("", (), ()), [], (1, 1)
    if not isinstance(given, BlockMask):
        raise TypeError(
            f"{OP}: block_mask must be a BlockMask of fusegrad.jax, but got {type(given).__name__}: "
            "block_mask_from_torch and block_mask_from_dense make one of others"
        )
    lengths = tuple(given.seq_lengths)
    _check.value(OP, lengths == (M, N), f"block_mask must be made for {M} queries and {N} keys", f"one for {lengths}")
    size = given.BLOCK_SIZE
    block = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    mask = _mod("mask_mod", given.mask_mod, lambda f: trace_mask_mod(f, sizes=(B, H, M, N)), None)
    lists = [given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices]
    rows = -(-M // block[0])
    checked: list[jax.Array] = []
    for i, x in enumerate(lists):
        x = _check.array(OP, "block_mask's lists", x, may_be_split=True).astype(jnp.int32)
        _check.value(OP, x.ndim == 3 + i % 2, f"block_mask's lists must have {3 + i % 2} dimensions", list(x.shape))
        _check.value(
            OP,
            x.shape[0] in (1, B) and x.shape[1] in (1, H) and x.shape[2] == rows,
            f"block_mask's lists must have the query's batch and heads {[B, H]}, or 1, and {rows} rows of blocks",
            list(x.shape),
        )
        _check.value(
            OP,
            not checked or x.shape[:3] == checked[0].shape[:3],
            "block_mask's lists must have leading dimensions in common",
            f"{list(x.shape)} beside {list(checked[0].shape) if checked else None}",
        )
        checked.append(x)
    return mask, checked, block


def _seed(p: float, key: Any) -> list[jax.Array]:
    if p == 0:
        return []
    if key is None:
        raise ValueError(f"{OP}: dropout_key must be a key of jax.random.key where dropout_p is not 0, but got None")
    try:
        return [jax.random.bits(key, (2,), jnp.uint32)]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{OP}: dropout_key must be a key of jax.random.key, but got another: {error}") from error


def _nothing(call: Call, q: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    (out, dtype), (row, acc) = call.outputs(q, v)[:2]
    none = jnp.full(row, -jnp.inf, acc)
    return jnp.zeros(out, dtype), none, none if call.max_scores else None


def _xla_is_deterministic() -> bool:
    found = [f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith("--xla_gpu_deterministic_ops")]
    return bool(found) and not found[-1].lower().endswith(("=false", "=0"))
