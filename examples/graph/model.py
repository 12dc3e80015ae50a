"""A Graphormer-like model (Ying et al. 2021, arXiv:2106.05234), with two implementations of its attention.

Each head h adds `spatial[h, distance]` and `edge[h, bond]` of a pair of nodes to the pair's score; both are learned.
The prediction is a sum over the nodes, as log P is one over the atoms; there is no virtual node.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from graph.data import BONDS, DISTANCES, ELEMENTS, Batch

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def packed_attention(batch: Batch) -> Attention:
    """q, k, v [H, S, D] and the biases -> [H, S, D], over all molecules of the batch as one sequence.

    The biases are gathers through gathered tables; a pair of different molecules is masked and reads nothing.
    """
    import fusegrad

    mask = block_mask(batch)
    distances, bonds, row_start = batch.distances, batch.bonds, batch.row_start

    def attention(query: Tensor, key: Tensor, value: Tensor, spatial: Tensor, edge: Tensor) -> Tensor:
        def score_mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            entry = row_start[q_idx] + kv_idx
            return score + spatial[h, distances[entry]] + edge[h, bonds[entry]]

        out = fusegrad.flex_attention(query[None], key[None], value[None], score_mod=score_mod, block_mask=mask)
        return out[0]

    return attention


def block_mask(batch: Batch) -> BlockMask:
    """Which blocks of the sequence hold pairs of one molecule."""
    molecule, length = batch.molecule, len(batch.molecule)

    def same_molecule(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return molecule[q_idx] == molecule[kv_idx]

    return create_block_mask(same_molecule, None, None, length, length, device=str(molecule.device), BLOCK_SIZE=64)


def dense_attention(batch: Batch) -> Attention:
    """The same by PyTorch's scaled_dot_product_attention: molecules padded to the longest, biases [G, H, N, N]."""
    groups, width = len(batch.labels), int(batch.slot.max()) + 1
    inside = torch.zeros(groups, width, dtype=torch.bool, device=batch.slot.device)
    inside[batch.molecule, batch.slot] = True
    both = inside[:, :, None] & inside[:, None, :]

    def padded(table: Tensor) -> Tensor:
        return torch.zeros(groups, width, width, dtype=table.dtype, device=table.device).masked_scatter(both, table)

    distances, bonds = padded(batch.distances), padded(batch.bonds)

    def attention(query: Tensor, key: Tensor, value: Tensor, spatial: Tensor, edge: Tensor) -> Tensor:
        def spread(packed: Tensor) -> Tensor:
            rows = packed.new_zeros(groups, width, *packed.shape[::2])
            return rows.index_put((batch.molecule, batch.slot), packed.transpose(0, 1)).transpose(1, 2)

        # As Graphormer does: the backward of `spatial[:, distances]` takes several times as long.
        bias = (F.embedding(distances, spatial.T) + F.embedding(bonds, edge.T)).permute(0, 3, 1, 2)
        bias = bias.masked_fill(~inside[:, None, None, :], -math.inf)
        out = F.scaled_dot_product_attention(spread(query), spread(key), spread(value), attn_mask=bias)
        return out.transpose(1, 2)[batch.molecule, batch.slot].transpose(0, 1)

    return attention


ATTENTIONS = {"fusegrad": packed_attention, "dense": dense_attention}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, nodes: Tensor, attention: Attention, spatial: Tensor, edge: Tensor) -> Tensor:
        length, width = nodes.shape
        packed = self.query_key_value(self.attention_norm(nodes)).view(length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(1, 2, 0, 3).unbind(0)
        mixed = attention(query, key, value, spatial, edge)
        nodes = nodes + self.attention_out(mixed.transpose(0, 1).reshape(length, width))
        return nodes + self.mlp(nodes)


class GraphTransformer(nn.Module):
    """A batch of graphs -> [G], a number for each graph. The biases are shared by the layers, as in Graphormer."""

    def __init__(self, layers: int, width: int, heads: int, structure: bool = True) -> None:
        super().__init__()
        self.element_embedding = nn.Embedding(ELEMENTS, width)
        self.spatial = nn.Parameter(torch.zeros(heads, DISTANCES), requires_grad=structure)
        self.edge = nn.Parameter(torch.zeros(heads, len(BONDS)), requires_grad=structure)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        if structure:
            nn.init.normal_(self.spatial, std=0.02)
            nn.init.normal_(self.edge, std=0.02)

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        nodes = self.element_embedding(batch.elements)
        for block in self.blocks:
            nodes = block(nodes, attention, self.spatial, self.edge)
        of_nodes = self.head(self.norm(nodes)).squeeze(-1)
        return of_nodes.new_zeros(len(batch.labels)).index_add(0, batch.molecule, of_nodes)
