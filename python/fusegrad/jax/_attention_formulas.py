"""flex_attention by JAX's own operations, some rows of queries at a time: for what the kernels have no derivative of.

The kernels compute the results, their tangents and the gradients. Derivatives of the latter two by the call's arrays
are those of this function, of any order and in both modes. Each chunk of rows is computed again where a derivative
needs it (jax.checkpoint), so that memory is linear in the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._program import PLACES, program
from ._attention_call import Call, Text
from ._check import acc_type
from ._dropout import ROWS, kept
from ._evaluate import Values, evaluate, extremum, rows_of_buffers

__all__ = ["attend"]

_CHUNK = 1 << 22
"""Scores that a chunk has in each of its arrays, of which there are some tens."""


def attend(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """out, lse and, if the call has them, the largest scores; all but integers in float32, or float64 for float64."""
    n, of_mask = call.inputs, call.mask_mod.buffers
    acc = acc_type(arrays[0].dtype)
    inputs = [x.astype(acc) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays[:n]]
    query, key, value = (x.swapaxes(1, 2) if call.bshd else x for x in inputs[:3])
    score = inputs[3:]
    length = query.shape[2]
    chunk = _Chunks(call, key, value, arrays[n : n + of_mask], arrays[n + of_mask :], query.shape)
    step = _step(call, query.shape, key.shape[2])
    whole = length // step if length > step else 0
    rows = rows_of_buffers(call.score_mod.text) if score else ()
    # What q_idx alone reads in a dimension of the queries' length goes with them.
    rows = tuple(d if d is not None and x.shape[d] == length else None for d, x in zip(rows, score, strict=True))

    def of_rows(first: Any, q: jax.Array, own: Sequence[jax.Array]) -> list[jax.Array]:
        rest = iter(own)
        buffers = [x if d is None else next(rest) for d, x in zip(rows, score, strict=True)]
        return chunk.results(first, q, buffers, rows)

    moving = [(query, 2), *((x, d) for d, x in zip(rows, score, strict=True) if d is not None)]
    parts: list[list[jax.Array]] = []
    if whole:
        split = [_split(x, d, whole, step) for x, d in moving]
        of_chunk = jax.checkpoint(lambda given: of_rows(given[0], given[1], given[2:]), prevent_cse=False)
        firsts = jnp.arange(whole, dtype=jnp.int32) * step
        parts.append([_joined(x) for x in lax.map(of_chunk, [firsts, *split])])
    if whole * step < length:
        q, *own = (lax.slice_in_dim(x, whole * step, None, axis=d) for x, d in moving)
        parts.append(of_rows(jnp.int32(whole * step), q, own))
    results = [jnp.concatenate(x, 2) if len(x) > 1 else x[0] for x in zip(*parts, strict=True)]
    return [results[0].swapaxes(1, 2) if call.bshd else results[0], *results[1:]]


def _step(call: Call, query: Sequence[int], keys: int) -> int:
    most = program(call.score_mod.text).most if call.score_mod.text else 1
    rows = _CHUNK // max(query[0] * query[1] * keys * most, 1)
    return max(rows // ROWS, 1) * ROWS


def _split(x: jax.Array, dim: int, count: int, step: int) -> jax.Array:
    """Chunks of a dimension, the first one."""
    x = lax.slice_in_dim(x, 0, count * step, axis=dim)
    return jnp.moveaxis(x.reshape(*x.shape[:dim], count, step, *x.shape[dim + 1 :]), dim, 0)


def _joined(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


class _Chunks:
    """What all chunks have in common."""

    def __init__(
        self, call: Call, key: jax.Array, value: jax.Array, mask: Sequence[jax.Array], rest: Sequence[jax.Array],
        query: Sequence[int],
    ) -> None:  # fmt: skip
        self.call, self.key, self.value, self.mask = call, key, value, mask
        self.batch, self.heads = query[:2]
        self.lists, self.seed = rest[: call.lists], rest[call.lists :]
        self.acc = key.dtype

    def sizes(self, rows: int) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, rows, self.key.shape[2])

    def results(
        self, first: Any, q: jax.Array, buffers: Sequence[jax.Array], rows: Sequence[int | None]
    ) -> list[jax.Array]:
        call, keys = self.call, self.key.shape[2]
        key_heads, group = self.key.shape[1], self.heads // self.key.shape[1]
        sizes = self.sizes(q.shape[2])
        key, value = self.key, self.value
        visible = self.visible(first, sizes)
        if visible is not None:
            # A key that none of these queries sees is not read: it may hold anything.
            seen = jnp.broadcast_to(visible.any(2), (self.batch, self.heads, keys))
            seen = seen.reshape(self.batch, key_heads, group, keys).any(2)
            seen = seen.any(0, keepdims=True) if key.shape[0] == 1 else seen
            key, value = (jnp.where(seen[..., None], x, 0) for x in (key, value))
        key, value = (jnp.broadcast_to(x, (self.batch, *x.shape[1:])) for x in (key, value))
        grouped = q.reshape(self.batch, key_heads, group * q.shape[2], q.shape[3])
        score = jnp.einsum("bhmd,bhnd->bhmn", grouped, key, precision=lax.Precision.HIGHEST)
        score = (score * jnp.asarray(call.scale, self.acc)).reshape(sizes)
        if call.score_mod.text:
            score = score if visible is None else jnp.where(visible, score, 0)
            score = self.evaluated(call.score_mod, first, sizes, {"score": score}, buffers, rows, self.acc, visible)
            score = jnp.broadcast_to(score, sizes)
        if visible is not None:
            score = jnp.where(visible, score, -jnp.inf)
        alive = (score != -jnp.inf).any(3, keepdims=True)
        score = jnp.where(alive, score, 0)
        top = lax.stop_gradient(score).max(3, keepdims=True)
        weights = jnp.where(alive, jnp.exp(score - top), 0)
        total = jnp.where(alive, weights.sum(3, keepdims=True), 1)
        lse = jnp.where(alive, top + jnp.log(total), -jnp.inf)[..., 0]
        weights = weights / total
        if call.dropout_p > 0:
            weights = weights * kept(self.seed[0], call.dropout_p, sizes, first, self.acc)
        weights = weights.reshape(self.batch, key_heads, group * q.shape[2], keys)
        out = jnp.einsum("bhmn,bhne->bhme", weights, value, precision=lax.Precision.HIGHEST)
        results = [out.reshape(*sizes[:3], value.shape[3]), lse]
        if call.max_scores:
            results.append(jnp.where(alive, extremum(score, 3), -jnp.inf)[..., 0])
        return results

    def evaluated(
        self, mod: Text, first: Any, sizes: tuple[int, int, int, int], inputs: dict[str, Any],
        buffers: Sequence[jax.Array], rows: Sequence[int | None], dtype: Any, taking_part: Any,
    ) -> jax.Array:  # fmt: skip
        with jax.enable_x64(True):
            for dim, (name, size) in enumerate(zip(PLACES, sizes, strict=True)):
                place = jnp.arange(size, dtype=jnp.int64)
                place = place + first.astype(jnp.int64) if name == "q_idx" else place
                inputs[name] = place.reshape([size if d == dim else 1 for d in range(4)])
            return evaluate(program(mod.text), Values(inputs, buffers, rows, mod.scalars, dtype, sizes, taking_part))

    def visible(self, first: Any, sizes: tuple[int, int, int, int]) -> Any:
        """Which pairs take part, bool, broadcasts to the sizes; None: all."""
        if not self.lists:
            return None
        size_q, size_kv = self.call.block_size
        row = (first + jnp.arange(sizes[2], dtype=jnp.int32)) // size_q
        column = jnp.arange(sizes[3], dtype=jnp.int32) // size_kv
        blocks = -(-sizes[3] // size_kv)
        sees: Any = None
        for i in range(len(self.lists) - 2, -1, -2):  # a block that is listed twice is full
            counts, listed = self.lists[i : i + 2]
            inside = jnp.arange(listed.shape[3], dtype=jnp.int32) < counts[..., None]
            states = (jax.nn.one_hot(jnp.where(inside, listed, blocks), blocks, dtype=jnp.int8) > 0).any(3)
            part = states[:, :, row][..., column]
            if i == 0 and self.call.mask_mod.text:
                wide = any(x.dtype == jnp.float64 for x in self.mask)
                dtype = jnp.float64 if wide else jnp.float32
                none = (None,) * len(self.mask)
                part = part & self.evaluated(self.call.mask_mod, first, sizes, {}, self.mask, none, dtype, part)
            sees = part if sees is None else sees | part
        return sees
