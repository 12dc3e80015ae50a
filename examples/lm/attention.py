"""Causal self-attention, by PyTorch's own or by fusegrad's, with or without a learned bias of the relative position."""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from lm import ExampleError, import_fusegrad

ATTENTIONS = ("sdpa", "fusegrad")
# Where tokens stand: an embedding added to them, or a bias of each head, added to the scores, for the distance back:
# one number for each distance, or ALiBi's slope (Press et al. 2021, arXiv:2108.12409), learned here.
POSITIONS = ("embedding", "relative", "alibi")


class CausalAttention(nn.Module):
    """query, key, value [B, heads, S, D] -> [B, heads, S, D]; S is at most `seq_length`."""

    def __init__(self, implementation: str, positions: str, heads: int, seq_length: int) -> None:
        super().__init__()
        if implementation not in ATTENTIONS:
            raise ExampleError(f"--attention must be one of {', '.join(ATTENTIONS)}, but got {implementation}")
        if positions not in POSITIONS:
            raise ExampleError(f"--positions must be one of {', '.join(POSITIONS)}, but got {positions}")
        self.flex_attention: Any = None
        if implementation == "fusegrad":
            self.flex_attention = import_fusegrad("--attention fusegrad", without="--attention sdpa").flex_attention
        self.relative: nn.Parameter | None = None
        self.slopes: nn.Parameter | None = None
        if positions == "relative":
            self.relative = nn.Parameter(torch.zeros(heads, seq_length))
        elif positions == "alibi":
            self.slopes = nn.Parameter(2 ** (-8 * torch.arange(1.0, heads + 1) / heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: Any = None) -> Tensor:
        """`context`: fusegrad's ContextParallel, where the tensors are this process's part of the sequence."""
        if self.flex_attention is not None:
            return self._flex(query, key, value, context)
        assert context is None
        return self._sdpa(query, key, value)

    def _flex(self, query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
        length = query.shape[2] if context is None else context.whole(query.shape[2])
        mask = causal_block_mask(length, query.device)
        score_mod = self._score_mod()
        return self.flex_attention(query, key, value, score_mod=score_mod, block_mask=mask, context_parallel=context)

    def _score_mod(self) -> Any:
        relative, slopes = self.relative, self.slopes

        def add_relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            return score + relative[h, q_idx - kv_idx]

        def add_slope(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            return score - slopes[h] * (q_idx - kv_idx)

        return add_relative if relative is not None else add_slope if slopes is not None else None

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.relative is None and self.slopes is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        # The bias of every pair, [heads, S, S]: what a score_mod does not need.
        index = torch.arange(query.shape[2], device=query.device)
        back = index[:, None] - index
        if self.relative is not None:
            bias = self.relative[:, back.clamp(min=0)]
        else:
            assert self.slopes is not None
            bias = -self.slopes[:, None, None] * back
        bias = bias.masked_fill(back < 0, -math.inf).to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


@functools.lru_cache(maxsize=8)
def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    import fusegrad

    return fusegrad.create_block_mask(_causal, None, None, length, length, device=device)


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx
