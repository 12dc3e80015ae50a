"""What attention makes of some queries, and how parts of it are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .gradients import acc_of
from .sequence_masks import Piece

__all__ = ["Results", "Sums", "Tensors", "merged", "nothing"]


@dataclass
class Tensors:
    """What a call reads."""

    query: Tensor
    key: Tensor
    value: Tensor
    seed: Tensor | None
    buffers: list[Tensor]
    mask_buffers: list[Tensor]


@dataclass
class Results:
    """Of some queries: out [B, H, m, E]; lse, max_scores and max_ties [B, H, m], the latter two empty unless asked for;
    low, what rounding took from a 16-bit out. As flex_attention_forward returns them, or `out` in float32 and wider."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    max_ties: Tensor
    low: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.out, self.lse, self.max_scores, self.max_ties, self.low]

    def rows(self, piece: Piece) -> Results:
        """Of some of the queries, without a copy."""
        return Results(*(t.narrow(2, piece.row, piece.size) if t.dim() >= 3 else t for t in self.tensors()))


def nothing(t: Tensors, max_scores: bool) -> Results:
    """Of queries that no key takes part for; dimensions of the output lie in memory as the query's do."""
    query = t.query
    low = query.dtype in (torch.bfloat16, torch.float16)
    order = sorted(range(3), key=lambda d: -query.stride(d))
    sizes = [query.shape[d] for d in order]

    def output() -> Tensor:
        made = query.new_zeros(*sizes, t.value.shape[3])
        return made.permute(*(order.index(d) for d in range(3)), 3)

    acc = acc_of(query.dtype)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=acc, device=query.device)
    none = lse.new_empty(0)
    return Results(
        output(),
        lse,
        lse.clone() if max_scores else none,
        torch.zeros_like(lse) if max_scores else none,
        output() if low else query.new_empty(0),
    )


def merged(sums: Results | None, part: Results) -> Results:
    """Results over some keys, of which `sums` has its output in float32 or wider, with those over further keys."""
    wide = part.out.to(acc_of(part.out.dtype), copy=True)
    if part.low.numel():
        wide += part.low
    if sums is None:
        return Results(wide, part.lse, part.max_scores, part.max_ties, part.low.new_empty(0))
    lse = torch.logaddexp(sums.lse, part.lse)
    top = torch.where(lse == -torch.inf, 0, lse)
    sums.out.mul_((sums.lse - top).exp_().unsqueeze(-1)).addcmul_(wide, (part.lse - top).exp_().unsqueeze(-1))
    if sums.max_scores.numel():
        largest = torch.maximum(sums.max_scores, part.max_scores)
        ties = torch.where(sums.max_scores == largest, sums.max_ties, 0)
        sums.max_ties = ties + torch.where(part.max_scores == largest, part.max_ties, 0)
        sums.max_scores = largest
    sums.lse = lse
    return sums


class Sums:
    """The gradients of the queries and of the score_mod's buffers, added up over parts in float32 or wider.

    Args:
        wanted: of query, key, value and each buffer.
        own: for each buffer, whether its gradient stays in this process.
        groups: over which the others are summed.
    """

    def __init__(self, t: Tensors, wanted: Sequence[bool], own: Sequence[bool], groups: Sequence[Any]) -> None:
        self.t, self.wanted, self.own, self.groups = t, list(wanted), own, groups
        acc = acc_of(t.query.dtype)
        self._query = torch.zeros_like(t.query, dtype=acc) if wanted[0] else None
        self._buffers = [
            torch.zeros(b.shape, dtype=acc_of(b.dtype), device=b.device) if want else None
            for b, want in zip(t.buffers, wanted[3:], strict=True)
        ]

    def add(self, piece: Piece, query: Tensor, buffers: Sequence[Tensor]) -> None:
        if self._query is not None:
            self._query.narrow(2, piece.row, piece.size).add_(query)
        for to, gradient in zip(self._buffers, buffers, strict=True):
            if to is not None:
                to.add_(gradient)

    def query(self) -> Tensor | None:
        return None if self._query is None else self._query.to(self.t.query.dtype)

    def buffers(self) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        for buffer, gradient, own in zip(self.t.buffers, self._buffers, self.own, strict=True):
            if gradient is not None and not own and gradient.numel():
                for group in self.groups:
                    dist.all_reduce(gradient, group=group)
            made.append(None if gradient is None else gradient.to(buffer.dtype))
        return made
