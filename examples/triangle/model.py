"""A pair-biased transformer: triangle attention as in AlphaFold (Jumper et al. 2021, Nature 596, 583, algorithms 13 to
15), over the pairs of atoms of molecules, with two implementations of its attention.

Row i of the pair features attends within itself: the pair (i, j) to the pairs (i, k), with a learned bias of the pair
(j, k) that all rows share. So what is known of i and k and of k and j comes together at i and j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from graph.data import BONDS, DISTANCES, Molecule
from torch import Tensor, nn
from torch.nn import functional as F

# Where two atoms are no pair to learn from: the same one, or beyond a molecule's atoms.
NO_PAIR = -100
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Pairs:
    """G molecules, padded to n atoms."""

    bonds: Tensor  # [G, n, n] int64
    distances: Tensor  # [G, n, n] int64; NO_PAIR
    sizes: Tensor  # [G] int64

    def to(self, device: torch.device | str) -> Pairs:
        return Pairs(self.bonds.to(device), self.distances.to(device), self.sizes.to(device))


def pad(molecules: Sequence[Molecule]) -> Pairs:
    sizes = torch.tensor([len(m.elements) for m in molecules])
    n = int(sizes.max())
    bonds = torch.zeros(len(molecules), n, n, dtype=torch.int64)
    distances = torch.full_like(bonds, NO_PAIR)
    for g, m in enumerate(molecules):
        size = len(m.elements)
        bonds[g, :size, :size] = m.bonds.long()
        distances[g, :size, :size] = m.distances.long().masked_fill(torch.eye(size, dtype=torch.bool), NO_PAIR)
    return Pairs(bonds, distances, sizes)


def fused_attention(sizes: Tensor, n: int) -> Attention:
    """query, key, value [G * n, H, n, D] and the bias [G, H, n, n] -> [G * n, H, n, D]. No bias of all rows exists."""
    import fusegrad

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        def score_mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            if bias is not None:
                score = score + bias[b // n, h, q_idx, kv_idx]
            return torch.where(kv_idx < sizes[b // n], score, -math.inf)

        return fusegrad.flex_attention(query, key, value, score_mod)

    return attention


def dense_attention(sizes: Tensor, n: int) -> Attention:
    """The same by scaled_dot_product_attention: biases [G * n, H, n, n]."""
    beyond = torch.arange(n, device=sizes.device) >= sizes[:, None]

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        mask = query.new_zeros(len(sizes), 1, n, n) if bias is None else bias
        mask = mask.masked_fill(beyond[:, None, None], -math.inf).repeat_interleave(n, 0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return attention


ATTENTIONS = {"fusegrad": fused_attention, "dense": dense_attention}


class TriangleAttention(nn.Module):
    """Around the starting node, or around the ending one: the same of the transposed pairs."""

    def __init__(self, width: int, heads: int, ending: bool, biased: bool) -> None:
        super().__init__()
        self.heads, self.ending = heads, ending
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Linear(width, heads, bias=False) if biased else None
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pairs: Tensor, attention: Attention) -> Tensor:
        groups, n, _, width = pairs.shape
        x = self.norm(pairs.transpose(1, 2) if self.ending else pairs)
        heads = self.query_key_value(x).view(groups * n, n, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        bias = None if self.bias is None else self.bias(x).permute(0, 3, 1, 2)
        mixed = attention(query, key, value, bias).transpose(1, 2).reshape(groups, n, n, width)
        change = self.out(torch.sigmoid(self.gate(x)) * mixed)
        return pairs + (change.transpose(1, 2) if self.ending else change)


class PairTransformer(nn.Module):
    """Bonds [G, n, n] -> logits of the distances of all pairs, [G, n, n, DISTANCES]."""

    def __init__(self, layers: int, width: int, heads: int, biased: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(BONDS) + 1, width)  # the last: an atom and itself
        self.attention = nn.ModuleList(
            TriangleAttention(width, heads, ending=i % 2 == 1, biased=biased) for i in range(2 * layers)
        )
        self.transition = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, DISTANCES))

    def forward(self, batch: Pairs, attention: Attention) -> Tensor:
        same = torch.eye(batch.bonds.shape[-1], dtype=torch.bool, device=batch.bonds.device)
        pairs = self.embedding(batch.bonds.masked_fill(same, len(BONDS)))
        for i, transition in enumerate(self.transition):
            pairs = self.attention[2 * i](pairs, attention)
            pairs = self.attention[2 * i + 1](pairs, attention)
            pairs = pairs + transition(pairs)
        return self.head(pairs)
