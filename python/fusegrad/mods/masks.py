"""Mask_mods: which pairs of a query and a key take part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from .checks import check_at_least, check_integers, check_rank

__all__ = [
    "MaskMod",
    "and_masks",
    "causal",
    "dilated",
    "document",
    "document_ids",
    "natten",
    "not_mask",
    "or_masks",
    "padding",
    "prefix",
    "sliding_window",
]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(offset: int | Tensor = 0) -> MaskMod:
    """A query sees itself and the keys before it.

    Args:
        offset: the position of the first query among the keys, such as the number of cached keys. A 0-d tensor is read
            when attention runs.
    """
    if isinstance(offset, Tensor):
        check_integers("causal", "offset", offset)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    return mask


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """A query sees `left` keys before its own position, that position, and `right` keys behind it; -1 is no limit.

    The convention is FlashAttention's ``window_size``.
    """
    check_at_least("sliding_window", "left", left, -1)
    check_at_least("sliding_window", "right", right, -1)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if left < 0 and right < 0:
            return q_idx >= 0
        if left < 0:
            return kv_idx - q_idx <= right
        if right < 0:
            return q_idx - kv_idx <= left
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask


def prefix(length: int | Tensor) -> MaskMod:
    """Every query sees the first keys; with :func:`causal` by :func:`or_masks` it is a prefix language model.

    Args:
        length: of the prefix, one for all or ``[B]``.
    """
    if not isinstance(length, Tensor):
        return lambda b, h, q_idx, kv_idx: kv_idx < length
    check_integers("prefix", "length", length)
    lengths = check_rank("prefix", "length", length, "[B]")
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def padding(lengths: Tensor) -> MaskMod:
    """Keys at and behind a sequence's length are padding: no query sees them.

    Args:
        lengths: ``[B]``, integers.
    """
    check_integers("padding", "lengths", check_rank("padding", "lengths", lengths, "[B]"))
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def document(ids: Tensor, kv_ids: Tensor | None = None) -> MaskMod:
    """A query sees keys of its own document, of packed sequences.

    Args:
        ids: each position's document, ``[S]`` or ``[B, S]``, integers.
        kv_ids: those of the keys; by default the queries'.
    """
    keys = ids if kv_ids is None else kv_ids
    for name, given in (("ids", ids), ("kv_ids", keys)):
        if not isinstance(given, Tensor) or given.dim() not in (1, 2):
            shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"mods.document: {name} must have shape [S] or [B, S], but got {shape}")
        check_integers("document", name, given)
    if ids.dim() != keys.dim():
        raise ValueError(
            f"mods.document: kv_ids must have as many dimensions as ids, {ids.dim()}, but got {keys.dim()}"
        )
    if ids.dim() == 1:
        return lambda b, h, q_idx, kv_idx: ids[q_idx] == keys[kv_idx]
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == keys[b, kv_idx]


def document_ids(lengths: Tensor) -> Tensor:
    """The documents of positions, ``[S]`` int32, from the documents' lengths ``[n]`` in their order."""
    check_integers("document_ids", "lengths", check_rank("document_ids", "lengths", lengths, "[n]"))
    numbers = torch.arange(len(lengths), device=lengths.device, dtype=torch.int32)
    return torch.repeat_interleave(numbers, lengths)


def dilated(window: int, dilation: int) -> MaskMod:
    """A query sees keys within `window` positions on both sides, at multiples of `dilation`.

    Longformer, Beltagy et al. 2020, section 3.1.
    """
    check_at_least("dilated", "window", window, 0)
    check_at_least("dilated", "dilation", dilation, 1)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).abs()
        return (distance <= window) & (distance % dilation == 0)

    return mask


def natten(kernel_size: int | tuple[int, ...], grid: tuple[int, ...]) -> MaskMod:
    """Neighbourhood attention in one to three dimensions, whose positions are rows of a grid in row-major order.

    A query sees the ``kernel_size`` positions around its own in each dimension; near a border the neighbourhood is
    shifted into the grid, so every query has as many keys. Hassani et al. 2022, equation 1.

    Args:
        kernel_size: odd, one for all dimensions or one each, at most the grid's.
        grid: the sizes of the dimensions, such as ``(height, width)``.
    """
    sizes = (kernel_size,) * len(grid) if isinstance(kernel_size, int) else tuple(kernel_size)
    if not 1 <= len(grid) <= 3 or len(sizes) != len(grid):
        raise ValueError(
            f"mods.natten: grid must have 1 to 3 dimensions and kernel_size as many, but got {grid}, {sizes}"
        )
    if any(k % 2 == 0 or not 0 < k <= n for k, n in zip(sizes, grid, strict=True)):
        raise ValueError(f"mods.natten: kernel_size must be odd and at most the grid's {grid}, but got {sizes}")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen, q, kv = q_idx >= 0, q_idx, kv_idx
        for size, n in zip(reversed(sizes), reversed(grid), strict=True):
            middle = (q % n).clamp(size // 2, n - 1 - size // 2)
            seen = seen & ((middle - kv % n).abs() <= size // 2)
            q, kv = q // n, kv // n
        return seen

    return mask


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """The pairs that another mask_mod leaves out."""
    return lambda b, h, q_idx, kv_idx: ~mask_mod(b, h, q_idx, kv_idx)
