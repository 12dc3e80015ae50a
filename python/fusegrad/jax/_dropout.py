"""Which pairs flex_attention drops, as csrc/cuda/attention/device/dropout.cuh has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["ROWS", "kept"]

ROWS, _COLUMNS = 16, 64
"""The pairs of a block."""
_NUMBERS = 1 << 40


def _product(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    """The lower and the upper half of a product of 64 bits."""
    full = x.astype(jnp.uint64) * jnp.uint64(y)
    return full.astype(jnp.uint32), (full >> jnp.uint64(32)).astype(jnp.uint32)


def _philox(words: Sequence[jax.Array], key: Sequence[Any], rounds: int) -> list[list[jax.Array]]:
    """The words after each round."""
    found, w = [], list(words)
    for i in range(rounds):
        (low0, high0), (low1, high1) = _product(w[0], 0xD2511F53), _product(w[2], 0xCD9E8D57)
        steps = (i * step & 0xFFFFFFFF for step in (0x9E3779B9, 0xBB67AE85))
        keys = [jnp.uint32(k) + jnp.uint32(step) for k, step in zip(key, steps, strict=True)]
        w = [high1 ^ w[1] ^ keys[0], low1, high0 ^ w[3] ^ keys[1], low0]
        found.append(w)
    return found


def kept(seed: jax.Array, p: float, sizes: Sequence[int], first: jax.Array, dtype: Any) -> jax.Array:
    """What the weights of [B, H, M, N] are multiplied by, of the queries from `first` on, which is a multiple of
    ROWS."""
    batch, heads, queries, keys = sizes
    threshold = min(round(p * _NUMBERS), _NUMBERS - (_NUMBERS >> 15))
    rows, columns = -(-queries // ROWS), -(-keys // _COLUMNS)
    with jax.enable_x64(True):
        head = jnp.arange(batch * heads, dtype=jnp.uint32).reshape(-1, 1, 1, 1, 1)
        zero = jnp.zeros_like(head)
        of_head = _philox([head, zero, zero, zero], [seed[0], seed[1]], 10)[-1][:2]
        # For each block of queries, lane and block of keys a word, whose bits are pairs.
        row = jnp.arange(rows, dtype=jnp.uint32).reshape(1, -1, 1, 1, 1) + (first // ROWS).astype(jnp.uint32)
        lane = jnp.arange(8, dtype=jnp.uint32).reshape(1, 1, -1, 1, 1) * 4 + jnp.arange(4, dtype=jnp.uint32)
        column = jnp.arange(columns, dtype=jnp.uint32).reshape(1, 1, 1, -1, 1)
        shape = (batch * heads, rows, 8, columns, 4)
        counter = [jnp.broadcast_to(x, shape) for x in (row * 32 + lane, column, *of_head)]
        after = _philox(counter, [0, 0], 9)
        digits = [*after[8], *after[6]]
        rest = digits[5] * digits[6] + digits[7] < jnp.uint32(threshold & 0xFFFFFFFF)
        word = jnp.where(rest, jnp.uint32(0), jnp.uint32(0xFFFFFFFF))
        for d in range(7, -1, -1):
            word = word & digits[d] if threshold >> (39 - d) & 1 else word | digits[d]
        # Query q and key k of a block: bit 16 * (k % 2) + 8 * (q / 8) + k / 8.
        bits = jnp.arange(2, dtype=jnp.uint32).reshape(-1, 1, 1) * 8 + jnp.arange(8, dtype=jnp.uint32).reshape(-1, 1)
        bits = bits + jnp.arange(2, dtype=jnp.uint32) * 16
        kept = (word[..., None, None, None] >> bits) & 1  # [BH, rows, q % 8, columns, k % 8 / 2, q / 8, k / 8, k % 2]
        kept = kept.transpose(0, 1, 5, 2, 3, 6, 4, 7).reshape(batch, heads, rows * ROWS, columns * _COLUMNS)
        scale = jnp.asarray(_NUMBERS / (_NUMBERS - threshold), dtype)
        return jnp.where(kept[:, :, :queries, :keys] != 0, scale, jnp.zeros((), dtype))
