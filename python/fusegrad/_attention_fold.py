"""Flex attention under vmap: one call over a larger batch.

Element v of a vmap and b of the call's own batch of B become element v * B + b. A mod sees that number as b: its text
is rewritten to take it apart, and reads of a tensor that vmap is over get v as their first index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._attention_composite import Call, Mod, Tensors
from ._mod_fold import taken_apart

__all__ = ["fold", "fold_rows", "moved", "unfold"]


def _folded_mod(mod: Mod, batched: Sequence[bool], batch: int) -> Mod:
    if not mod.text:
        return mod
    return Mod(taken_apart(mod.text, tuple(batched)), mod.floats, [*mod.ints, batch])


def moved(t: Tensor, dim: int | None, size: int) -> Tensor:
    """With the batch first, which has one element for all where there was none."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def fold_rows(t: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor of [B, H, ...], folded; what is empty stays so."""
    if t.dim() - (dim is not None) == 1:
        return t if dim is None else t.select(dim, 0)
    return moved(t, dim, size).flatten(0, 1)


def unfold(t: Tensor, size: int) -> Tensor:
    """A result of a folded call, the batch first."""
    if t.dim() == 1:
        return t.expand(size, *t.shape)
    return t.unflatten(0, (size, t.size(0) // size))


def fold(
    call: Call, t: Tensors, dims: Tensors, size: int, each: Sequence[bool] = (), each_key: bool = False
) -> tuple[Call, Tensors]:
    """The call over all elements. `dims`: the batched dimension of each tensor, or None. Buffers where `each`, and
    keys and values with `each_key`, have an element for each in any case."""
    dim_of: Any = dims
    batch = t.query.size(0 if dim_of.query != 0 else 1)
    # The results have the order of the query's strides: the batch is to be their first.
    query = fold_rows(t.query, dim_of.query, size).contiguous()
    key, value = t.key, t.value
    if each_key or dim_of.key is not None or dim_of.value is not None or key.size(0) > 1:
        key, value = (
            moved(x, d, size).expand(size, batch, *[-1] * 3).flatten(0, 1)
            for x, d in ((key, dim_of.key), (value, dim_of.value))
        )
    of_score = [d is not None for d in dim_of.buffers]
    if each:
        of_score = [s or e for s, e in zip(of_score, each, strict=True)]
    of_mask = [d is not None for d in dim_of.mask_buffers]
    buffers = tuple(moved(x, d, size) if b else x for x, d, b in zip(t.buffers, dim_of.buffers, of_score, strict=True))
    mask_buffers = tuple(
        moved(x, d, size) if b else x for x, d, b in zip(t.mask_buffers, dim_of.mask_buffers, of_mask, strict=True)
    )
    lists_differ = any(d is not None for d in dim_of.kv_blocks) or any(x.size(0) > 1 for x in t.kv_blocks)
    kv_blocks = t.kv_blocks
    if lists_differ:
        kv_blocks = tuple(
            moved(x, d, size).expand(size, batch, *[-1] * (x.dim() - 1 - (d is not None))).flatten(0, 1)
            for x, d in zip(t.kv_blocks, dim_of.kv_blocks, strict=True)
        )
    seed = t.seed
    if seed:
        if dim_of.seed[0] is None:
            raise NotImplementedError(
                "flex_attention: dropout_p must be 0 where a torch.vmap is over calls that drop the same pairs (of "
                f"randomness='same', or over upstream gradients alone), but got {call.dropout_p}"
            )
        seed = (seed[0].select(dim_of.seed[0], 0),)  # the folded batch has other pairs for each element
    folded = replace(
        call,
        score=_folded_mod(call.score, of_score, batch),
        mask=_folded_mod(call.mask, of_mask, batch),
    )
    return folded, Tensors(query, key, value, buffers, mask_buffers, kv_blocks, seed)
