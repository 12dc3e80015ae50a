"""What attention makes of some queries, and how parts of it are added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .gradients import acc_of
from .sequence_masks import Piece
from .sequence_ranges import Ranges, joined, within

__all__ = ["Results", "Sum", "Sums", "Tensors", "merged", "together"]


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
    """The results of some queries: out [B, H, m, E]; lse, max_scores and max_ties [B, H, m], the latter empty unless
    asked for; low, what rounding took from a 16-bit out, here or by pieces in `lows`; lse_low, what it took from lse.
    As flex_attention_forward returns them."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    max_ties: Tensor
    low: Tensor
    lse_low: Tensor
    lows: dict[Piece, Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        return [self.out, self.lse, self.max_scores, self.max_ties, self.low, self.lse_low]

    def whole(self) -> list[Tensor]:
        """All but low, which stays in pieces."""
        return [self.out, self.lse, self.max_scores, self.max_ties, self.lse_low]

    def rows(self, piece: Piece) -> Results:
        """The results of some of the queries, without a copy."""
        made = Results(*(t.narrow(2, piece.row, piece.size) if t.dim() >= 3 else t for t in self.tensors()))
        made.low = self.lows.get(piece, made.low)
        return made


def together(t: Tensors, parts: Sequence[tuple[Piece, Results]], max_scores: bool) -> Results:
    """The results of all queries, from those of pieces; no key takes part for the others. What the backward alone
    reads, `low`, stays in pieces."""
    rows = t.query.shape[2]
    if len(parts) == 1 and parts[0][0].size == rows and parts[0][1].out.dtype == t.query.dtype:
        return parts[0][1]
    results = _empty(t, max_scores)
    for piece, part in parts:
        for to, what in zip(results.rows(piece).whole(), part.whole(), strict=True):
            to.copy_(what)
    results.lows = {piece: part.low for piece, part in parts if part.low.numel()}
    reached = joined([(piece.row, piece.row + piece.size) for piece, _ in parts])
    for start, stop, made in within(0, rows, reached):
        if not made:
            none = results.rows(Piece(start, stop, start))
            for to, value in zip(none.whole(), (0, -torch.inf, -torch.inf, 0, 0), strict=True):
                to.fill_(value)
    return results


def _empty(t: Tensors, max_scores: bool) -> Results:
    """Not filled and without `low`; dimensions of the output lie in memory as the query's do."""
    query = t.query
    order = sorted(range(3), key=lambda d: -query.stride(d))
    made = query.new_empty(*(query.shape[d] for d in order), t.value.shape[3])
    out = made.permute(*(order.index(d) for d in range(3)), 3)
    lse = torch.empty(query.shape[:3], dtype=acc_of(query.dtype), device=query.device)
    none = lse.new_empty(0)
    largest, ties = (torch.empty_like(lse) if max_scores else none for _ in range(2))
    return Results(out, lse, largest, ties, query.new_empty(0), torch.empty_like(lse))


def merged(sums: Results | None, part: Results) -> Results:
    """Results over some keys with those over further keys. Writes into `sums`, and returns it."""
    if sums is None:
        return part
    lse, lse_low = _logaddexp(sums, part)
    top = torch.where(lse == -torch.inf, 0, lse)
    before, more = (((r.lse - top) + (r.lse_low - lse_low)).exp_() for r in (sums, part))
    torch.ops.fusegrad.flex_attention_merge_(sums.out, sums.low, before, part.out, part.low, more)
    if sums.max_scores.numel():
        largest = torch.maximum(sums.max_scores, part.max_scores)
        ties = torch.where(sums.max_scores == largest, sums.max_ties, 0)
        sums.max_ties = ties + torch.where(part.max_scores == largest, part.max_ties, 0)
        sums.max_scores = largest
    sums.lse, sums.lse_low = lse, lse_low
    return sums


def _logaddexp(a: Results, b: Results) -> tuple[Tensor, Tensor]:
    """lse of both in two numbers, right to rounding of exp(s - lse) for scores of any size."""
    above = torch.where(a.lse == b.lse, 0, b.lse - a.lse) + (b.lse_low - a.lse_low)  # -inf less -inf would be NaN
    largest, low = (torch.where(above > 0, y, x) for x, y in ((a.lse, b.lse), (a.lse_low, b.lse_low)))
    low = low + above.abs().neg_().exp_().log1p_()
    lse = largest + low
    return lse, torch.where(lse == -torch.inf, 0, (largest - lse) + low)


class Sum:
    """Rows of [B, H, rows, D] that parts are added to: written where none came before.

    Args:
        make: the total, not filled. It is made when it is needed: one part of all rows takes its place.
        dtype: of the total, in which each part is exact.
        total: that which is made already, as into() has it; no part takes its place.
    """

    def __init__(self, make: Callable[[], Tensor], rows: int, dtype: torch.dtype, total: Tensor | None = None) -> None:
        self._make, self._rows, self._dtype, self._total = make, rows, dtype, total
        self._reached: Ranges = ()

    @classmethod
    def into(cls, total: Tensor) -> Sum:
        return cls(lambda: total, total.shape[2], total.dtype, total)

    def add(self, row: int, part: Tensor) -> None:
        size = part.shape[2]
        if self._total is None and size == self._rows:
            self._total = part
        else:
            total = self._whole()
            for start, stop, again in within(row, row + size, self._reached):
                to, what = total.narrow(2, start, stop - start), part.narrow(2, start - row, stop - start)
                (to.add_ if again else to.copy_)(what)
        self._reached = joined([*self._reached, (row, row + size)])

    def finished(self) -> Tensor:
        """The total, with zeros where nothing was added; of one part's dtype where that took its place."""
        total = self._make() if self._total is None else self._total
        for start, stop, reached in within(0, self._rows, self._reached):
            if not reached:
                total.narrow(2, start, stop - start).zero_()
        return total

    def _whole(self) -> Tensor:
        self._total = self._make() if self._total is None else self._total.to(self._dtype)
        return self._total


class Sums:
    """The gradients of the queries and of the score_mod's buffers, from those of parts.

    Args:
        wanted: of query, key, value and each buffer.
        once: whether each query is in one part; else its gradients are added up in float32 or wider.
        own: for each buffer, whether its gradient stays in this process.
        groups: over which the others are summed.
    """

    def __init__(
        self, t: Tensors, wanted: Sequence[bool], once: bool, own: Sequence[bool], groups: Sequence[Any]
    ) -> None:
        self.t, self.wanted, self.own, self.groups = t, list(wanted), own, groups
        dtype = t.query.dtype if once else acc_of(t.query.dtype)
        self._query = Sum(lambda: torch.empty_like(t.query, dtype=dtype), t.query.shape[2], dtype)
        self._buffers: list[Tensor | None] = [None for _ in t.buffers]

    def add(self, piece: Piece, query: Tensor, buffers: Sequence[Tensor]) -> None:
        if self.wanted[0]:
            self._query.add(piece.row, query)
        for i, (made, gradient) in enumerate(zip(self._buffers, buffers, strict=True)):
            if self.wanted[3 + i]:
                self._buffers[i] = gradient if made is None else made.to(acc_of(made.dtype)).add_(gradient)

    def query(self) -> Tensor | None:
        return self._query.finished().to(self.t.query.dtype) if self.wanted[0] else None

    def buffers(self) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        for i, (buffer, gradient, own) in enumerate(zip(self.t.buffers, self._buffers, self.own, strict=True)):
            if not self.wanted[3 + i]:
                made.append(None)
                continue
            if gradient is None:
                gradient = torch.zeros(buffer.shape, dtype=buffer.dtype, device=buffer.device)
            if self.groups and not own and gradient.numel():
                gradient = gradient.to(acc_of(buffer.dtype))
                for group in self.groups:
                    dist.all_reduce(gradient, group=group)
            made.append(gradient.to(buffer.dtype))
        return made
