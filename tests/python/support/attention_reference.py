"""Flex attention in plain PyTorch, with all scores in memory: what the op is compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

Sizes = tuple[int, int, int, int]


def dropout_weight(p: float, sizes: Sizes) -> Tensor:
    """What dropout multiplies the probabilities of the next call of flex_attention by, on the default device."""
    device = torch.get_default_device()
    generator = torch.cuda if device.type == "cuda" else torch
    state = generator.get_rng_state()
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    generator.set_rng_state(state)
    kept = torch.ops.fusegrad.flex_attention_dropout_mask(seed, p, list(sizes))
    threshold = min(round(p * 2**40), 2**40 - 2**25)
    return kept.double() * (2**40 / (2**40 - threshold))


class Dense(NamedTuple):
    out: Tensor
    lse: Tensor
    max_scores: Tensor


def one_by_one(function: Callable, sizes: Sizes, score: Tensor | None = None) -> Tensor:
    """The same with 0-d tensors, pair after pair: for functions that PyTorch's vmap cannot differentiate."""
    values = []
    for place in itertools.product(*(range(n) for n in sizes)):
        indices = [torch.tensor(i) for i in place]
        values.append(function(*indices) if score is None else function(score[place], *indices))
    return torch.stack(values).reshape(sizes)


def over_all(function: Callable, sizes: Sizes, score: Tensor | None = None) -> Tensor:
    """A score_mod or mask_mod of every pair, [B, H, M, N], run by PyTorch as its own flex_attention does."""
    indices = [torch.arange(n) for n in sizes]
    with TransformGetItemToIndex():
        if score is None:
            return _vmap_for_bhqkv(function, prefix=())(*indices)
        return _vmap_for_bhqkv(function, prefix=(0,))(score, *indices)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    evaluate: Callable = over_all,
    weight: Tensor | None = None,
) -> Dense:
    """In the dtype of its arguments. `mask`: bool, broadcasts to [B, H, M, N]; rows without a key give 0 and -inf.
    `weight`, of the same shape: what dropout multiplies probabilities by."""
    batch, heads, queries, head_size = query.shape
    group = heads // key.size(1)
    key, value = (t.expand(batch, *t.shape[1:]).repeat_interleave(group, 1) for t in (key, value))
    score = query @ key.transpose(-1, -2) * (head_size**-0.5 if scale is None else scale)
    if score_mod is not None:
        score = evaluate(score_mod, (batch, heads, queries, key.size(2)), score)
    if mask is not None:
        score = torch.where(mask, score, -math.inf)
    alive = (score > -math.inf).any(-1, keepdim=True)
    filled = torch.where(alive, score, 0.0)
    p = torch.where(alive & (score > -math.inf), filled.softmax(-1), 0.0)
    if weight is not None:
        p = p * weight.to(p.dtype)
    none = ~alive.squeeze(-1)
    # PyTorch's gradient of logsumexp is exp(score - lse), which far from 0 is off in any dtype.
    largest = filled.detach().amax(-1)
    lse = torch.where(none, -math.inf, largest + (filled - largest.unsqueeze(-1)).logsumexp(-1))
    return Dense(p.to(value.dtype) @ value, lse, torch.where(none, -math.inf, filled.amax(-1)))
