"""Attention with a learned relative bias in every layer of the training steps' model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface

from harness import peers
from harness.llama import plain, with_apply
from harness.model import Case, Unavailable
from harness.training import Found, Method, Training

# query, key and value, [B, heads, S, D], the bias, [heads, 2 S], at S for a distance of 0, and the scores' scale.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def with_attention(name: str, attention: Attention, ours: bool = False, head: Method | None = None) -> Method:
    """`attention(query, key, value, bias, scale)`, [B, heads, S, D], in every layer; the loss is the model's."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        out = attention(query, key, value, module.relative_bias, scaling)
        return out.transpose(1, 2).contiguous(), None

    registered = f"relative {name}"
    AttentionInterface.register(registered, attend)

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        training.model.set_attn_implementation(registered)
        with head.within(training) if head else contextlib.nullcontext():
            yield

    return Method(name, plain, ours, within=within)


def relative_biases(case: Case) -> Found:
    length = case["S"]
    mask = create_block_mask(causal, None, None, length, length, device=case.device)

    def flexible(flex: Callable[..., Tensor]) -> Attention:
        def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
            def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return score + bias[h, q - kv + length]

            return flex(query, key, value, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=True)

        return attention

    def ours(fusegrad: Any) -> list[Method]:
        attention = flexible(fusegrad.flex_attention)
        return [
            with_attention("fusegrad", attention, ours=True, head=with_apply("")),
            with_attention("fusegrad attention", attention, ours=True),
        ]

    def compiled_flex() -> Found:
        if case.device != "cuda":
            return [Unavailable("compile", "PyTorch's flex attention has gradients on CUDA only")]
        return [with_attention("compile", flexible(torch.compile(flex_attention, dynamic=False)))]

    return [with_attention("eager", dense), *compiled_flex(), *peers.optional("fusegrad", "fusegrad", ours)]


def dense_bias(bias: Tensor, length: int) -> Tensor:
    """[heads, S, S] what is added to the scores, -inf above the diagonal."""
    place = torch.arange(length, device=bias.device)
    distance = place[:, None] - place
    return bias[:, distance + length].masked_fill(distance < 0, -torch.inf)


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    # Each query head with a key of its own: the kernels that take a bias know no groups.
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    return F.scaled_dot_product_attention(query, key, value, dense_bias(bias, query.shape[2])[None], scale=scale)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    scores = scale * query.double() @ key.mT + dense_bias(bias.double(), query.shape[2])
    return (scores.softmax(-1) @ value).to(query.dtype)
