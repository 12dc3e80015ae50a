"""``attn_implementation="fusegrad"`` of transformers: attention and its masks, by :func:`fusegrad.flex_attention`.

Letters: B batch, H query heads, M queries, N keys, D the head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
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

from .transformers_context import context_of, whole_mask

__all__ = ["attention", "block_mask"]

BLOCK = 128


class _Mask(BlockMask):
    ndim = 4  # GPT-2 asks, and makes four dimensions of fewer

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
        return _Mask(**fields_of(_moved(self.mask_mod, starts), lengths, device, list(self.BLOCK_SIZE)))


def _moved(mask: Any, starts: dict[str, int]) -> Any:
    """The mask_mod of indices that begin there."""
    if isinstance(mask, fusegrad.ScoreMod):
        return MovedMod(mask, tuple(starts)).traced(Starts(starts))
    b0, h0, q0, kv0 = starts.values()

    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask(b + b0, h + h0, q_idx + q0, kv_idx + kv0)

    return moved


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
    **kwargs: Any,
) -> BlockMask:
    """The mask that transformers describes by a function of indices and a padding mask, as a block mask.

    Args: as of transformers' ``AttentionMaskInterface``: lengths M and N, what to add to the indices, the function
        (causal, sliding window, chunks, packed sequences, or several joined), ``attention_mask`` ``[B, >= N]``, bool.
    """
    mask: Any
    mask, q_length = whole_mask(mask_function, q_length, kv_length)
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask = and_masks(mask, padding_mask_function(padding))
    mask = add_offsets_to_mask_function(mask, q_offset, kv_offset)
    if not torch.compiler.is_compiling():
        mask = fusegrad.trace_mask_mod(mask, device=torch.device(device))  # once, and not again by each layer
    return _Mask(**fields_of(mask, [batch_size, 1, q_length, kv_length], torch.device(device), [BLOCK, BLOCK]))


def _score_mod(softcap: float | None, bias: Tensor | None, position_bias: Tensor | None) -> Callable[..., Any] | None:
    """Softcap first, then what is added: as transformers' eager attention does."""
    if softcap is None and bias is None and position_bias is None:
        return None

    def added(score: Tensor, tensor: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        one_batch, one_head = tensor.shape[0] == 1, tensor.shape[1] == 1
        return score + tensor[0 if one_batch else b, 0 if one_head else h, q_idx, kv_idx]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = added(score, bias, b, h, q_idx, kv_idx)
        if position_bias is not None:
            score = added(score, position_bias, b, h, q_idx, kv_idx)
        return score

    return score_mod


def _mask(
    attention_mask: Tensor | BlockMask | None, module: Any, is_causal: bool | None, query: Tensor, key: Tensor
) -> tuple[BlockMask | None, Tensor | None]:
    """A block mask, or what a 4D mask adds to the scores."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if isinstance(attention_mask, BlockMask):
        return attention_mask, None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or queries == 1:
            return None, None
        if queries != keys:
            raise ValueError(
                "fusegrad attention: causal attention without a mask must have as many queries as keys, "
                f"but got {queries} and {keys}"
            )
        return block_mask(1, queries, keys, device=query.device), None
    if attention_mask.dim() != 4 or attention_mask.shape[2] != queries or attention_mask.shape[3] < keys:
        raise ValueError(
            f"fusegrad attention: attention_mask must be a block mask or [B or 1, H or 1, {queries}, >= {keys}], "
            f"but got {list(attention_mask.shape)}"
        )
    given = attention_mask[..., :keys]
    if given.dtype != torch.bool:
        return None, given
    if given.shape[1] != 1:
        return None, torch.zeros_like(given, dtype=query.dtype).masked_fill_(~given, -float("inf"))
    one_batch = given.shape[0] == 1

    def allowed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return given[0 if one_batch else b, 0, q_idx, kv_idx]

    return block_mask(1 if one_batch else batch, queries, keys, mask_function=allowed, device=query.device), None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' ``AttentionInterface`` wants it.

    Args:
        query, key, value: ``[B, H, M, D]``, ``[B, Hkv, N, D]`` twice.
        attention_mask: of :func:`block_mask`; or ``[B or 1, H or 1, M, N]``, bool, or added to the scores.
        scaling, softcap: of the scores.
        dropout: the probability with which a weight becomes 0, in training.
        s_aux: sinks ``[H]``: scores of one more key, which has no value.
        position_bias: ``[B or 1, H or 1, M, N]``, added to the scores; gets its gradient.
        is_causal: of attention without a mask; None: the module's own.

    Returns:
        ``[B, M, H, D]``, and None for the weights, which are never there.

    Raises:
        NotImplementedError: the weights are asked for.
        ValueError: a mask that does not fit.
    """
    if output_attentions:
        raise NotImplementedError(
            'fusegrad attention: output_attentions must be False, but got True: use attn_implementation="eager"'
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # Rotary embeddings leave query and key in float32 there, and value in 16 bits.
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    context = context_of(module)
    if context is not None and (position_bias is not None or not isinstance(attention_mask, BlockMask)):
        raise NotImplementedError(
            "fusegrad attention: over spread sequences attention must have a block mask and no position_bias, but got "
            f"{type(attention_mask).__name__} and {type(position_bias).__name__}"
        )
    mask, bias = _mask(attention_mask, module, is_causal, query, key)
    result: Any = fusegrad.flex_attention(
        query,
        key,
        value,
        _score_mod(softcap, bias, position_bias),
        mask,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if s_aux is None else AuxRequest(lse=True),
        dropout_p=dropout,
        context_parallel=context,
    )
    if s_aux is None:
        out = result
    else:
        # exp(lse) / (exp(lse) + exp(sink)) is what the keys have of the weight.
        out, aux = result
        kept = torch.sigmoid(aux.lse - s_aux.to(aux.lse.dtype).view(1, -1, 1))
        out = (out * kept.unsqueeze(-1)).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None
