"""``attn_implementation="fusegrad"`` of transformers: attention and its masks, by :func:`fusegrad.flex_attention`.

Letters: B batch, H query heads, M queries, N keys, D the head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import fusegrad
from fusegrad.block_mask import fields_of

from .transformers_context import attending, context_of
from .transformers_masks import BLOCK, block_mask, packed_mask
from .transformers_models import HARMLESS, refuse_unable_attention, serves

__all__ = ["attention", "block_mask"]


def _score_mod(softcap: float | None, bias: Tensor | None, position_bias: Tensor | None) -> Callable[..., Any] | None:
    """Softcap first, then what is added: as transformers' eager attention does."""
    if softcap is None and bias is None and position_bias is None:
        return None

    def added(score: Tensor, tensor: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        rows = [0 if n == 1 else i for n, i in zip(tensor.shape, (b, h, q_idx), strict=False)]
        return score + tensor[(*rows, kv_idx)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = added(score, bias, b, h, q_idx, kv_idx)
        if position_bias is not None:
            score = added(score, position_bias, b, h, q_idx, kv_idx)
        return score

    return score_mod


def _checked(name: str, given: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask or bias that is read by indices, as long as there are keys. A kernel would read zeros beyond its end."""
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    fits = given.dim() == 4 and given.shape[3] >= keys
    if not fits or any(n not in (1, m) for n, m in zip(given.shape, (batch, heads, queries), strict=False)):
        raise ValueError(
            f"fusegrad attention: {name} must be [{batch} or 1, {heads} or 1, {queries} or 1, >= {keys}], "
            f"but got {list(given.shape)}"
        )
    return given[..., :keys]


def _mask(
    attention_mask: Tensor | BlockMask | None, module: Any, is_causal: bool | None, query: Tensor, key: Tensor
) -> tuple[BlockMask | None, Tensor | None]:
    """A block mask, or what a 4D mask adds to the scores."""
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(attention_mask, BlockMask):
        if context_of(module) is None and tuple(attention_mask.seq_lengths) != (queries, keys):
            raise ValueError(
                f"fusegrad attention: the mask must be for the {queries} queries and {keys} keys of "
                f"{type(module).__name__}, but got one for {attention_mask.seq_lengths[0]} and "
                f'{attention_mask.seq_lengths[1]}: use attn_implementation="eager"'
            )
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
    given = _checked("attention_mask", attention_mask, query, key)
    if given.dtype != torch.bool:
        return None, given
    if given.shape[1] != 1:
        return None, torch.zeros_like(given, dtype=query.dtype).masked_fill_(~given, -float("inf"))
    one_batch, one_query = given.shape[0] == 1, given.shape[2] == 1

    def allowed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return given[0 if one_batch else b, 0, 0 if one_query else q_idx, kv_idx]

    return BlockMask(**fields_of(allowed, [given.shape[0], 1, queries, keys], query.device, [BLOCK, BLOCK])), None


def _within_sequences(
    mask: BlockMask | None,
    bias: Tensor | None,
    query: Tensor,
    key: Tensor,
    ends: tuple[Tensor | None, Tensor | None],
    seq_idx: Tensor | None,
) -> BlockMask | None:
    """The mask within packed sequences, which their ends or each token's index tell; as it is where neither does."""
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    told = seq_idx if ends[0] is None else ends[0]
    if told is None:
        return mask
    if bias is not None:
        raise NotImplementedError(
            "fusegrad attention: packed sequences that cu_seq_lens_q or seq_idx tell must have a block mask or none, "
            "but got a mask that is a tensor"
        )
    if ends[0] is None:
        if list(told.shape) not in ([batch, queries], [1, queries]) or queries != keys:
            raise ValueError(
                f"fusegrad attention: seq_idx must be [{batch} or 1, {queries}] for as many queries as keys, "
                f"but got {list(told.shape)} for {queries} and {keys}"
            )
        return packed_mask(mask, told, (told, told), [batch, 1, queries, keys])
    both = [told, told if ends[1] is None else ends[1]]
    if batch != 1 or (not torch.compiler.is_compiling() and [int(e[-1]) for e in both] != [queries, keys]):
        raise ValueError(
            f"fusegrad attention: cu_seq_lens_q and cu_seq_lens_k must end with the {queries} queries and {keys} keys "
            f"of one row, but got {batch} rows and {both[0]} and {both[1]}"
        )
    of_queries, of_keys = (
        torch.searchsorted(e, torch.arange(n, device=e.device, dtype=e.dtype), right=True)[None]
        for e, n in zip(both, (queries, keys), strict=True)
    )
    return packed_mask(mask, told, (of_queries, of_keys), [1, 1, queries, keys])


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """Sinks of each head, ``[H]``, or of each query too, ``[B or 1, H, M or 1, 1]``: beside ``[B, H, M]``."""
    if sinks is None:
        return None
    batch, heads, queries, _ = query.shape
    shaped = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
    sizes = ((1, batch), (heads,), (1, queries), (1,))
    if shaped.dim() != 4 or any(n not in m for n, m in zip(shaped.shape, sizes, strict=True)):
        raise ValueError(
            f"fusegrad attention: sinks must be [{heads}] or [{batch} or 1, {heads}, {queries} or 1, 1], "
            f"but got {list(sinks.shape)}"
        )
    return shaped[..., 0]


@serves
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
    sinks: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' ``AttentionInterface`` wants it.

    Args:
        query, key, value: ``[B, H, M, D]``, ``[B, Hkv, N, D]`` twice.
        attention_mask: of :func:`block_mask`; or ``[B or 1, H or 1, M or 1, N]``, bool, or added to the scores.
        scaling, softcap: of the scores.
        dropout: the probability with which a weight becomes 0, in training.
        s_aux, sinks: ``[H]`` or ``[B or 1, H, M or 1, 1]``: scores of one more key, which has no value; get their
            gradient.
        position_bias: ``[B or 1, H or 1, M or 1, N]``, added to the scores; gets its gradient.
        is_causal: of attention without a mask; None: the module's own.
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences of one row begin and end; queries see their own alone.
        seq_idx: the sequence of each token, ``[B or 1, M]``, in the same way.

    Returns:
        ``[B, M, H, D]``, and None for the weights, which are never there.

    Raises:
        ValueError: the model makes its masks of tensors, or attends by something else besides.
        NotImplementedError: the weights are asked for; an argument that is none of these, and not known to change
            nothing; what does not go together.
        ValueError: a mask, a bias or sinks that do not fit.
    """
    refuse_unable_attention(module)
    for name, other in others.items():
        if other is not None and name not in HARMLESS:
            raise NotImplementedError(
                "fusegrad attention: the model's arguments must be those that it computes by, but "
                f'{type(module).__name__} gave {name}: use attn_implementation="eager"'
            )
    if output_attentions:
        raise NotImplementedError(
            'fusegrad attention: output_attentions must be False, but got True: use attn_implementation="eager"'
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # Rotary embeddings leave query and key in float32 there, and value in 16 bits.
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    context = attending(module)
    if context is not None:
        if position_bias is not None or not isinstance(attention_mask, BlockMask):
            raise NotImplementedError(
                "fusegrad attention: over spread sequences attention must have a block mask and no position_bias, but "
                f"got {type(attention_mask).__name__} and {type(position_bias).__name__}"
            )
        if cu_seq_lens_q is not None or seq_idx is not None:
            raise NotImplementedError(
                "fusegrad attention: over spread sequences position_ids must tell packed sequences, but got "
                + ("seq_idx" if cu_seq_lens_q is None else "cu_seq_lens_q")
            )
    if s_aux is not None and sinks is not None:
        raise ValueError("fusegrad attention: sinks must be given once, but got s_aux and sinks")
    sink = _sinks(sinks if s_aux is None else s_aux, query)
    if position_bias is not None:
        position_bias = _checked("position_bias", position_bias, query, key)
    mask, bias = _mask(attention_mask, module, is_causal, query, key)
    mask = _within_sequences(mask, bias, query, key, (cu_seq_lens_q, cu_seq_lens_k), seq_idx)
    result: Any = fusegrad.flex_attention(
        query,
        key,
        value,
        _score_mod(softcap, bias, position_bias),
        mask,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sink is None else AuxRequest(lse=True),
        dropout_p=dropout,
        context_parallel=context,
    )
    if sink is None:
        out = result
    else:
        # exp(lse) / (exp(lse) + exp(sink)) is what the keys have of the weight.
        out, aux = result
        kept = torch.sigmoid(aux.lse - sink.to(aux.lse.dtype))
        out = (out * kept.unsqueeze(-1)).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None
