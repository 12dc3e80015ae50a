"""Jagged NestedTensors in flex_attention: packed sequences, each of which attends to itself alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .block_mask import varlen_mask
from .score_mod import ScoreMod

__all__ = ["Packed"]


class Packed:
    """The sequences of query, key and value, each ``[B, H, j, D]`` with a jagged third dimension, as one.

    Attributes:
        tensors: query, key and value, ``[1, H, total, D]``; their gradients are the NestedTensors'.
        mask: the block mask that is given for them, or the one that keeps the sequences apart.
        score_mod: of packed positions; the one that is given sees the number of the sequence as b, and places in it.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Any] | ScoreMod | None,
        block_mask: BlockMask | None,
    ) -> None:
        inputs = {"query": query, "key": key, "value": value}
        for name, t in inputs.items():
            if not t.is_nested or t.layout != torch.jagged:
                raise TypeError(
                    "flex_attention: query, key and value must be all dense or all nested tensors of layout "
                    f"torch.jagged, but got a {name} that is {'nested, strided' if t.is_nested else 'dense'}"
                )
            if t.dim() != 4 or t._ragged_idx != 2 or t.lengths() is not None:
                raise ValueError(
                    f"flex_attention: {name} must be nested as [B, H, j, D], without holes, but got {tuple(t.shape)}: "
                    "of [B, j, H, D] take transpose(1, 2)"
                )
        if not (query.size(0) == key.size(0) and key.shape[2] == value.shape[2]):
            raise ValueError(
                "flex_attention: query and key must have as many sequences, and value the key's lengths, but got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        self.offsets = query.offsets()
        self.tensors = [t.values().unsqueeze(0) for t in inputs.values()]
        lengths = (self.tensors[0].size(2), self.tensors[1].size(2))
        if block_mask is None:
            # An offset of int64 on the CPU is checked there; totals are those of the values.
            block_mask = varlen_mask(self.offsets, key.offsets(), lengths=lengths)
        self.mask = block_mask
        self.score_mod = score_mod
        if score_mod is not None:
            if isinstance(score_mod, ScoreMod):
                raise TypeError(
                    "flex_attention: score_mod of nested tensors must be a function, but got a ScoreMod: the function "
                    "is traced with places within the sequences"
                )
            self.score_mod = within(score_mod, self.offsets, key.offsets(), lengths[0])

    def nested(self, result: Tensor) -> Tensor:
        """``[1, H, total, ...]`` as the query is nested."""
        return torch.nested.nested_tensor_from_jagged(result.squeeze(0), self.offsets, jagged_dim=2)


def within(score_mod: Callable[..., Any], q_offsets: Tensor, k_offsets: Tensor, queries: int) -> Callable[..., Any]:
    """The score_mod of packed positions that calls one of places within sequences."""
    place = torch.arange(queries, device=q_offsets.device)
    sequence = torch.searchsorted(q_offsets[1:], place, right=True).clamp_(max=q_offsets.numel() - 2)
    first_query, first_key = (ends[sequence].int() for ends in (q_offsets, k_offsets))
    sequence = sequence.int()

    def packed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return score_mod(score, sequence[q_idx], h, q_idx - first_query[q_idx], kv_idx - first_key[q_idx])

    return packed
