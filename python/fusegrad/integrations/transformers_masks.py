"""Masks of ``attn_implementation="fusegrad"`` of transformers: functions of indices, as block masks.

Letters: B batch, H query heads, M queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)

import fusegrad
from fusegrad.block_mask import fields_of
from fusegrad.distributed.sequence_mods import MovedMod, Starts
from fusegrad.score_mod import _made as traced_mod

from .transformers_context import whole_mask

__all__ = ["block_mask"]

BLOCK = 128
# What transformers hands to every maker of masks, for kernels that can do without a mask and for tensors.
_OF_OTHER_MAKERS = frozenset(("allow_is_bidirectional_skip", "allow_is_causal_skip", "config", "dtype", "local_size"))


class _Mask(BlockMask):
    """A block mask of transformers' model, which treats it as a tensor here and there.

    Attributes:
        function: The mask before it was traced.
        packed: What :func:`packed_mask` made of it last: the sequences' tensor, its version, and the mask.
    """

    ndim = 4  # GPT-2 asks, and makes four dimensions of fewer
    function: Callable[..., Any]
    packed: tuple[Tensor | None, int, Any] = (None, 0, None)

    def contiguous(self) -> BlockMask:
        """The mask as it is; generation with a static cache asks every mask for this."""
        return self

    def __getitem__(self, index: Any) -> BlockMask:
        """A range of each dimension of [B, 1, M, N], as of a mask that is a tensor: Gemma 4 takes the last queries.
        (PyTorch's block masks are indexed by blocks, and lose their mask_mod.)"""
        index = index if isinstance(index, tuple) else (index,)
        sizes = self.shape
        if len(index) > len(sizes) or not all(isinstance(i, slice) and i.step in (None, 1) for i in index):
            raise IndexError(
                "fusegrad attention: a block mask's index must be up to four slices of step 1, one of each dimension "
                f"of [B, 1, M, N], but got {index}"
            )
        whole = (slice(None),) * (len(sizes) - len(index))
        ranges = [range(*i.indices(n)) for i, n in zip((*index, *whole), sizes, strict=True)]
        lengths = [len(r) for r in ranges]
        if lengths == list(sizes):
            return self
        starts = dict(zip(("b", "h", "q_idx", "kv_idx"), (r.start for r in ranges), strict=True))
        device = self.kv_num_blocks.device
        return _made(_moved(self.function, starts), _moved(self.mask_mod, starts), lengths, device)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            "fusegrad attention: the model must hand its masks to attention as they were made, but got one in "
            f'{getattr(function, "__name__", function)}: use attn_implementation="eager"'
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fusegrad attention: the model must hand its masks to attention as they were made, but asked one for its "
            f'{name}: use attn_implementation="eager"'
        )


def _moved(mask: Any, starts: dict[str, int]) -> Any:
    """The mask of indices that begin there."""
    if isinstance(mask, fusegrad.ScoreMod):
        return MovedMod(mask, tuple(starts)).traced(Starts(starts))
    b0, h0, q0, kv0 = starts.values()

    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask(b + b0, h + h0, q_idx + q0, kv_idx + kv0)

    return moved


def _made(function: Callable[..., Tensor], mask_mod: Any, sizes: list[int], device: torch.device) -> _Mask:
    made = _Mask(**fields_of(mask_mod, sizes, device, [BLOCK, BLOCK]))
    made.function = function
    return made


def made_mask(function: Callable[..., Tensor], sizes: list[int], device: torch.device) -> _Mask:
    """The block mask of a function, for ``sizes`` B, H, M and N. What the function captures is copied: its owner may
    change it in place before attention reads it, or before its backward does."""
    if torch.compiler.is_compiling():
        return _made(function, function, sizes, device)
    traced = fusegrad.trace_mask_mod(function, device=device)  # once, and not again by each layer
    buffers = tuple(b.clone() for b in traced.buffers)
    return _made(function, traced_mod(traced.kind, traced.text, buffers, traced.scalars), sizes, device)


def block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    kv_offset: Tensor | int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> BlockMask:
    """The mask that transformers describes by a function of indices and a padding mask, as a block mask.

    Args: as of transformers' ``AttentionMaskInterface``: lengths M and N, what to add to the indices, the function
        (causal, sliding window, chunks, packed sequences, or several joined), ``attention_mask`` ``[B, >= N]``, bool.

    Raises:
        TypeError: another argument, which may say what the mask is to be.
    """
    for name, value in others.items():
        if name not in _OF_OTHER_MAKERS and value is not None:
            raise TypeError(
                "fusegrad attention: a mask's arguments must be those of transformers' AttentionMaskInterface, "
                f"but got {name}"
            )
    # A static cache hands its own counter, which it raises before attention reads the mask: in a compiled graph too.
    q_offset, kv_offset = (o.clone() if isinstance(o, Tensor) else o for o in (q_offset, kv_offset))
    mask: Any
    mask, q_length = whole_mask(mask_function, q_length, kv_length)
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask = and_masks(mask, padding_mask_function(padding))
    mask = add_offsets_to_mask_function(mask, q_offset, kv_offset)
    return made_mask(mask, [batch_size, 1, q_length, kv_length], torch.device(device))


def packed_mask(mask: BlockMask | None, told: Tensor, documents: tuple[Tensor, Tensor], sizes: list[int]) -> BlockMask:
    """A mask, or attention to all keys, within packed sequences.

    Args:
        told: what the model was given to tell them. A mask keeps what was made of it by this, for the next layers.
        documents: the sequence of each query and of each key, ``[B or 1, M]`` and ``[B or 1, N]``.
        sizes: B, H, M and N.
    """
    keeper = mask if isinstance(mask, _Mask) and not torch.compiler.is_compiling() and not told.is_inference() else None
    if keeper is not None and keeper.packed[1] == told._version and keeper.packed[0] is told:
        return keeper.packed[2]
    queries, keys = documents
    one_row = queries.shape[0] == 1

    def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return queries[0 if one_row else b, q_idx] == keys[0 if one_row else b, kv_idx]

    if mask is None:
        return made_mask(same, sizes, queries.device)
    function = mask.function if isinstance(mask, _Mask) else mask.mask_mod
    if isinstance(function, fusegrad.ScoreMod):
        raise NotImplementedError(
            "fusegrad attention: within packed sequences the mask must be transformers', or one of a function, "
            "but got one that is traced"
        )
    made = made_mask(and_masks(function, same), sizes, queries.device)
    if keeper is not None:
        keeper.packed = (told, told._version, made)
    return made
