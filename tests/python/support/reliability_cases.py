"""Calls of every op, small ones, for faults in every place of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusegrad
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask


@dataclass
class Case:
    op: str
    what: str
    leaves: list[Tensor]
    """They get gradients."""
    call: Callable[..., Tensor]
    """Takes the leaves, or what was computed from them, and `inplace`."""
    overwrites: int = 1
    """So many of the first arguments may be overwritten."""
    cold: bool = False
    """Functions are traced anew at each call."""
    threads: int = 1
    """With one, the n-th allocation is the same in every run."""

    def __str__(self) -> str:
        return f"{self.op}, {self.what}"


def cases(device: str) -> list[Case]:
    torch.manual_seed(0)
    acc = torch.float32

    def leaf(*shape: int, dtype: torch.dtype = acc) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    rows, vocab, hidden = 12, 20, 8
    target = torch.randint(0, vocab, (rows,), device=device)
    probabilities = torch.randn(rows, vocab, device=device).softmax(-1)
    class_weight, token_weight = torch.rand(vocab, device=device) + 0.1, torch.rand(rows, device=device)
    teacher = torch.randn(rows, vocab, device=device)
    top = tuple(torch.randn(rows, vocab, device=device).log_softmax(-1).topk(5, -1))
    made = [
        Case(
            "cross_entropy",
            "class indices",
            [leaf(rows, vocab)],
            lambda x, inplace: fusegrad.cross_entropy(x, target, label_smoothing=0.1, z_loss=1e-3, inplace=inplace),
        ),
        Case(
            "cross_entropy",
            "bfloat16, class probabilities, weights",
            [leaf(rows, vocab, dtype=torch.bfloat16)],
            lambda x, inplace: fusegrad.cross_entropy(
                x, probabilities, class_weight, token_weight=token_weight, reduction="sum", inplace=inplace
            ),
        ),
        Case(
            "jsd",
            "dense teacher",
            [leaf(rows, vocab), teacher.clone().requires_grad_()],
            lambda x, y, inplace: fusegrad.jsd(x, y, labels=target, hard_weight=0.5, inplace=inplace),
        ),
        Case(
            "jsd",
            "top-k teacher",
            [leaf(rows, vocab, dtype=torch.float16)],
            lambda x, inplace: fusegrad.jsd(x, top, token_weight=token_weight, inplace=inplace),
        ),
    ]

    def linear(what: str, count: int, size: int, dtype: torch.dtype, **options: Any) -> list[Case]:
        t = torch.randint(0, size, (count,), device=device)
        s, w = (torch.randn(n, hidden, device=device).to(dtype) for n in (count, size))
        k = tuple(torch.randn(count, size, device=device).log_softmax(-1).topk(5, -1))

        def leaves() -> list[Tensor]:
            return [leaf(count, hidden, dtype=dtype), leaf(size, hidden, dtype=dtype), leaf(size, dtype=dtype)]

        return [
            Case(
                "linear_cross_entropy",
                what,
                leaves(),
                lambda x, v, b, inplace: fusegrad.linear_cross_entropy(
                    x, v, t, linear_bias=b, inplace=inplace, **options
                ),
            ),
            Case(
                "linear_jsd",
                f"{what}, dense teacher",
                leaves(),
                lambda x, v, b, inplace: fusegrad.linear_jsd(x, v, s, w, student_bias=b, inplace=inplace, **options),
            ),
            Case(
                "linear_jsd",
                f"{what}, top-k teacher",
                leaves(),
                lambda x, v, b, inplace: fusegrad.linear_jsd(x, v, k, student_bias=b, inplace=inplace, **options),
            ),
        ]

    made += linear("one chunk", rows, vocab, torch.float32)
    # On the GPU chunks have at least 256 rows.
    made += linear("chunks, bfloat16", 600, 1000, torch.bfloat16, workspace_mib=1)
    made += linear("recomputed", rows, vocab, torch.float32, workspace_mib=0)[:1]

    heads, length, size = 2, 40, 16

    def qkv(length: int = length) -> list[Tensor]:
        return [leaf(1, heads, length, size) for _ in range(3)]

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    mask = create_block_mask(causal, 1, None, length, length, device=device, BLOCK_SIZE=16)

    def attention(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor, inplace: bool, mask: Any = None) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            slope, table = captured
            return score + slope[h] * (j - i) + table[i, j]

        return fusegrad.flex_attention(q, k, v, biased if captured else None, mask, inplace=inplace, deterministic=True)

    made += [
        Case("flex_attention", "no score_mod", qkv(), attention, overwrites=3),
        Case("flex_attention", "two threads", qkv(200), attention, overwrites=3, threads=2),
        Case(
            "flex_attention",
            "captured gradients, block mask",
            [*qkv(), leaf(heads), leaf(length, length)],
            lambda *t, inplace: attention(*t, inplace=inplace, mask=mask),
            overwrites=3,
        ),
        Case(
            "flex_attention",
            "captured gradients, first call",
            [*qkv(), leaf(heads), leaf(length, length)],
            attention,
            overwrites=3,
            cold=True,
        ),
    ]
    return made
