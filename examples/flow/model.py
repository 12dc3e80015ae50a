"""A diffusion transformer of small images (Peebles and Xie 2023, arXiv:2212.09748), with two implementations of its
attention: both can be differentiated forward, and backward through what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# query, key, value [B, H, S, D] and a bias [H, S, S] -> [B, H, S, D]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """No scores, no weights and none of their tangents are kept."""
    import fusegrad

    return fusegrad.flex_attention(query, key, value, lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])


def dense_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1]) + bias
    return scores.softmax(-1) @ value


ATTENTIONS: dict[str, Attention] = {"fusegrad": fused_attention, "dense": dense_attention}


def features_of(time: Tensor, width: int) -> Tensor:
    """[B] in [0, 1] as waves [B, width]. Slow ones: the tangent along time has their rates as factors."""
    rates = torch.exp(torch.linspace(0, math.log(10), width // 2, dtype=time.dtype, device=time.device))
    angles = time[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class Block(nn.Module):
    """Attention and a perceptron, whose inputs and outputs a condition scales and shifts."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width)
        self.bias = nn.Parameter(torch.zeros(heads, length, length))  # of each pair of patches
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: Tensor, condition: Tensor, attention: Attention) -> Tensor:
        shift, scale, gate, *of_perceptron = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        query, key, value = self.projection(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = attention(query, key, value, self.bias)
        x = x + gate * self.out(mixed.transpose(1, 2).flatten(2))
        shift, scale, gate = of_perceptron
        return x + gate * self.perceptron(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)


class DiT(nn.Module):
    """u(z, r, t, label): images [B, side, side] to images, in patches of 2 by 2."""

    def __init__(self, side: int, classes: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.width, length = width, (side // 2) ** 2
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.times = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.last = nn.Linear(width, 4)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, labels: Tensor, attention: Attention) -> Tensor:
        count, half = z.shape[0], z.shape[-1] // 2
        x = z.view(count, half, 2, half, 2).transpose(2, 3).reshape(count, half * half, 4)
        x = self.patches(x) + self.places
        time = torch.cat([features_of(t, self.width), features_of(t - r, self.width)], -1)
        condition = self.times(time) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition, attention)
        x = self.last(F.layer_norm(x, x.shape[-1:]))
        # A velocity is noise less an image: of the noise z has the most.
        return z + x.view(count, half, half, 2, 2).transpose(2, 3).reshape(z.shape)
