"""A call of flex_attention: what of it is part of a compiled program, its arrays, and both for a batch folded into it.

Letters: B batch, H query heads, M queries, N keys, D and E the head sizes of keys and of values. acc: float32, or
float64 for float64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusegrad._mod_fold import taken_apart

from ._check import acc_type

OP = "fusegrad.jax.flex_attention"
#: A tuple of these for query, key and value, then for each of the score_mod's buffers.
Flags = tuple[bool, ...]


@dataclass(frozen=True)
class Text:
    """A mod but for its buffers."""

    text: str = ""
    scalars: tuple[int | float | bool, ...] = ()
    buffers: int = 0  # how many
    own_derivatives: bool = False  # see Mod


@dataclass(frozen=True)
class Call:
    score_mod: Text = Text()
    mask_mod: Text = Text()
    lists: int = 0  # 0, or 2 of a block mask, or 4 of one with full blocks
    block_size: tuple[int, int] = (1, 1)
    scale: float = 1.0
    bshd: bool = False
    max_scores: bool = False
    low: bool = False  # a backward or tangents may follow
    deterministic: bool = False
    dropout_p: float = 0.0

    @property
    def inputs(self) -> int:
        """How many arrays may have a gradient: they come first."""
        return 3 + self.score_mod.buffers

    def attributes(self, wanted: Flags, *, max_scores: bool, out: bool = False, lse: bool = False) -> dict[str, Any]:
        """Those of csrc/jax/attention_call.h. `out`, `lse`: of upstream gradients."""
        scalars = [0, *map(_bits, (*self.score_mod.scalars, *self.mask_mod.scalars))]
        return {
            "score_mod": self.score_mod.text,
            "mask_mod": self.mask_mod.text,
            "scale": np.float64(self.scale),
            "dropout_p": np.float64(self.dropout_p),
            "bshd": self.bshd,
            "lists": np.int64(self.lists),
            "block_q": np.int64(self.block_size[0]),
            "block_kv": np.int64(self.block_size[1]),
            "max_scores": max_scores,
            "low": self.low,
            "deterministic": self.deterministic,
            "grad_out": out,
            "grad_lse": lse,
            "wanted": np.array(wanted, np.int64),
            "scalars": np.array(scalars, np.int64),
        }

    def outputs(self, query: Any, value: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of a forward's: out, lse, perhaps the largest scores and how many tie, perhaps out_low and
        lse_low."""
        out = ((*query.shape[:3], value.shape[3]), query.dtype)
        heads, length = query.shape[1:3] if not self.bshd else (query.shape[2], query.shape[1])
        row = ((query.shape[0], heads, length), acc_type(query.dtype))
        low = [(out[0], np.int8)] * (query.dtype.itemsize == 2) + [row] if self.low else []
        return [out, row, *([row, row] if self.max_scores else []), *low]


def _bits(number: int | float | bool) -> int:
    """An integer, or a float64's bits as one."""
    return struct.unpack("<q", struct.pack("<d", number))[0] if isinstance(number, float) else int(number)


# --- vmap -----------------------------------------------------------------------------------------------------------


def moved(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """With the batch first; all elements are the same where there was none."""
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def fold_rows(x: jax.Array, dim: int | None, size: int, own: int | None = None) -> jax.Array:
    """An array of [B, ...], or of [1, ...] that stands for `own` ones, folded."""
    x = moved(x, dim, size)
    if own is not None and x.shape[1] == 1 != own:
        x = jnp.broadcast_to(x, (size, own, *x.shape[2:]))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def unfold(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def fold(
    call: Call, arrays: Sequence[jax.Array], dims: Sequence[int | None], size: int, each: Flags = ()
) -> tuple[Call, list[jax.Array]]:
    """The call over all elements. Where `each`, an array that may have a gradient has an element for each in any
    case."""
    each = each or (False,) * call.inputs
    n, of_score, of_mask = call.inputs, call.score_mod.buffers, call.mask_mod.buffers
    batch = arrays[0].shape[0 if dims[0] != 0 else 1]
    query = fold_rows(arrays[0], dims[0], size)
    key, value = arrays[1:3]
    shared = key.shape[0 if dims[1] != 0 else 1] == 1
    if each[1] or each[2] or not shared or dims[1] is not None or dims[2] is not None:
        key, value = (fold_rows(x, d, size, batch) for x, d in zip((key, value), dims[1:3], strict=True))
    folded = [query, key, value]
    batched = [d is not None for d in dims[3 : n + of_mask]]
    batched[:of_score] = [b or e for b, e in zip(batched, each[3:], strict=False)]
    for x, d, b in zip(arrays[3:], dims[3:], batched, strict=False):
        folded.append(moved(x, d, size) if b else x)
    lists = list(zip(arrays[n + of_mask :], dims[n + of_mask :], strict=True))
    differ = any(d is not None or x.shape[0] > 1 for x, d in lists)
    folded += [fold_rows(x, d, size, batch) if differ else x for x, d in lists]

    def text(mod: Text, batched: Sequence[bool]) -> Text:
        if not mod.text:
            return mod
        return replace(mod, text=taken_apart(mod.text, tuple(batched)), scalars=(*mod.scalars, batch))

    call = replace(
        call, score_mod=text(call.score_mod, batched[:of_score]), mask_mod=text(call.mask_mod, batched[of_score:])
    )
    return call, folded
