"""A small trunk: single and pair representations, triangular updates, triangle attention, attention with pair bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import BINS, UNKNOWN, Batch

NEIGHBOURS = 8  # along the chain, whose distance in it a pair knows


def fused_triangle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    import fusegrad

    return fusegrad.triangle_attention(q, k, v, bias, mask)


def fused_pairs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    import fusegrad

    return fusegrad.biased_attention(q, k, v, [bias], mask=mask, empty_rows="mean")


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """All scores in memory: of triangle attention a number for each triangle."""
    score = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return torch.where(mask, score, -1e9).softmax(-1) @ v


class Attentions(NamedTuple):
    triangle: Any
    pairs: Any


ATTENTIONS = {"fusegrad": Attentions(fused_triangle, fused_pairs), "dense": Attentions(dense, dense)}


class TriangleAttention(nn.Module):
    """Row i of pairs, ``(i, j)`` over j, attends to itself with a bias of ``(j, k)``; ending: columns."""

    def __init__(self, width: int, heads: int, ending: bool) -> None:
        super().__init__()
        self.heads, self.ending = heads, ending
        self.norm = nn.LayerNorm(width)
        self.qkv, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.bias, self.out = nn.Linear(width, heads, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, z: Tensor, there: Tensor, attend: Any) -> Tensor:
        x = self.norm(z.transpose(1, 2) if self.ending else z)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(3)
        q, k, v = (t.transpose(2, 3) for t in qkv)  # [B, N, H, N, D]
        bias = self.bias(x).movedim(-1, 1).unsqueeze(1)  # [B, 1, H, N, N]
        mask = (there[:, :, None] & there[:, None])[:, :, None, None]  # [B, N, 1, 1, N]
        out = attend(q, k, v, bias, mask).transpose(2, 3).flatten(-2)
        out = self.out(out * self.gate(x).sigmoid())
        return out.transpose(1, 2) if self.ending else out


class TriangleUpdate(nn.Module):
    """``(i, j)`` sums products of ``(i, k)`` and ``(j, k)`` over k; incoming: of ``(k, i)`` and ``(k, j)``."""

    def __init__(self, width: int, incoming: bool) -> None:
        super().__init__()
        self.incoming = incoming
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.sides, self.gates = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, z: Tensor, there: Tensor) -> Tensor:
        x = self.norm(z)
        pairs = (there[:, :, None] & there[:, None]).unsqueeze(-1)
        a, b = (self.sides(x) * self.gates(x).sigmoid() * pairs).chunk(2, -1)
        product = torch.einsum("bkic,bkjc->bijc" if self.incoming else "bikc,bjkc->bijc", a, b)
        return self.out(self.after(product)) * self.gate(x).sigmoid()


class PairBias(nn.Module):
    """Residues attend to residues, with a bias of their pair."""

    def __init__(self, single: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.of_pairs = nn.LayerNorm(single), nn.LayerNorm(width)
        self.qkv, self.gate = nn.Linear(single, 3 * single, bias=False), nn.Linear(single, single)
        self.bias, self.out = nn.Linear(width, heads, bias=False), nn.Linear(single, single, bias=False)

    def forward(self, s: Tensor, z: Tensor, there: Tensor, attend: Any) -> Tensor:
        x = self.norm(s)
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2))  # [B, H, N, D]
        out = attend(q, k, v, self.bias(self.of_pairs(z)).movedim(-1, 1), there[:, None, None])
        return self.out(out.transpose(1, 2).flatten(-2) * self.gate(x).sigmoid())


class Block(nn.Module):
    def __init__(self, single: int, width: int, heads: int) -> None:
        super().__init__()
        self.updates = nn.ModuleList(TriangleUpdate(width, incoming) for incoming in (False, True))
        self.triangles = nn.ModuleList(TriangleAttention(width, heads, ending) for ending in (False, True))
        self.attention = PairBias(single, width, heads)
        self.transitions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.SiLU(), nn.Linear(2 * n, n)) for n in (single, width)
        )

    def forward(self, s: Tensor, z: Tensor, there: Tensor, attentions: Attentions) -> tuple[Tensor, Tensor]:
        for update in self.updates:
            z = z + update(z, there)
        for triangle in self.triangles:
            z = z + triangle(z, there, attentions.triangle)
        z = z + self.transitions[1](z)
        s = s + self.attention(s, z, there, attentions.pairs)
        return s + self.transitions[0](s), z


class Trunk(nn.Module):
    """Distances of residues, as logits of bins, from those that are given and from the sequence."""

    def __init__(self, blocks: int, width: int, heads: int, triangles: bool = True) -> None:
        super().__init__()
        single = 2 * width
        self.triangles = triangles
        self.kinds, self.given = nn.Embedding(UNKNOWN + 1, single), nn.Embedding(BINS + 1, width)
        self.apart, self.of_single = nn.Embedding(2 * NEIGHBOURS + 1, width), nn.Linear(single, 2 * width)
        self.blocks = nn.ModuleList(Block(single, width, heads) for _ in range(blocks))
        self.logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BINS))
        if not triangles:
            for block in self.blocks:
                block.updates, block.triangles = nn.ModuleList(), nn.ModuleList()

    def forward(self, batch: Batch, attentions: Attentions) -> Tensor:
        n = batch.kinds.shape[1]
        place = torch.arange(n, device=batch.kinds.device)
        apart = (place - place[:, None]).clamp(-NEIGHBOURS, NEIGHBOURS) + NEIGHBOURS
        s = self.kinds(batch.kinds)
        rows, columns = self.of_single(s).chunk(2, -1)
        z = self.given(batch.given) + self.apart(apart) + rows[:, :, None] + columns[:, None]
        for block in self.blocks:
            s, z = block(s, z, batch.there, attentions)
        rows, columns = self.of_single(s).chunk(2, -1)
        z = z + rows[:, :, None] + columns[:, None]
        return self.logits(z + z.transpose(1, 2))


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    kept = batch.pairs
    return F.cross_entropy(logits[kept], batch.distances[kept])
