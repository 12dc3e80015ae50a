"""Keys that a block mask's lists name: where these are few, processes send each other no others.

Every process has the mask of the whole sequence, so each knows which keys the others need, and none asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .sequence import ContextParallel
from .sequence_masks import MaskCuts, Piece, listed_versions, pieces
from .sequence_ranges import Ranges, cut, sizes_of

__all__ = ["Columns", "Fetch", "listed_columns", "send_back"]

# Rows that lie in both of two orders: the first's number in each, and how many.
_Overlaps = list[tuple[int, int, int]]


class Columns:
    """Which keys each process works with, and where this process has them: in one tensor of `size` rows.

    Args:
        queries: the pieces of each process, and between which keys the mask lists any for each of them.
        keys: which positions each process has; `rank` is this one's there.

    Attributes:
        needed: of each process, sorted and apart.
        keys_of: of a piece of this process's queries; pieces that need no key are not there.
        local, rest: pieces that need this process's keys alone, and the others.
        lists: of blocks, of a piece and its keys.
        own, inbound: the rows of each process that this one needs: row there, row here, number.
        outbound: this process's rows that each one needs.
    """

    def __init__(self, queries: Sequence[dict[Piece, tuple[int, int]]], keys: Sequence[Ranges], rank: int) -> None:
        self.needed = [_joined(list(part.values())) for part in queries]
        mine, self.size = [], 0
        for start, stop in self.needed[rank]:
            mine.append(Piece(start, stop, self.size))
            self.size += stop - start
        overlaps = [_overlaps(part, self.needed[rank]) for part in keys]
        self.own = overlaps[rank]
        self.inbound = [[] if r == rank else found for r, found in enumerate(overlaps)]
        self.outbound = [[] if r == rank else _overlaps(keys[rank], n) for r, n in enumerate(self.needed)]
        self.keys_of: dict[Piece, Piece] = {}
        self.local: list[Piece] = []
        self.rest: list[Piece] = []
        for q, (start, stop) in queries[rank].items():
            (home,) = (piece for piece in mine if piece.start <= start < piece.stop)
            self.keys_of[q] = Piece(start, stop, home.row + start - home.start)
            here = sum(n for _, _, n in _overlaps(keys[rank], ((start, stop),)))
            (self.local if here == stop - start else self.rest).append(q)
        self.lists: dict[tuple[Piece, Piece], list[Tensor]] = {}

    def few(self, keys: Sequence[Ranges]) -> bool:
        """Whether less than two thirds of what gathering all would move is needed. A gather has the better collective,
        and a causal mask over a zigzag needs three quarters."""
        moved = 0
        for rank, needed in enumerate(self.needed):
            moved += sum(n for r, k in enumerate(keys) if r != rank for _, _, n in _overlaps(k, needed))
        return 3 * moved < 2 * (len(keys) - 1) * sum(sizes_of(keys))


def _joined(intervals: list[tuple[int, int]]) -> Ranges:
    made: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return tuple(made)


def _overlaps(first: Ranges, second: Ranges) -> _Overlaps:
    found, row = [], 0
    for a, b in first:
        at = 0
        for c, d in second:
            start, stop = max(a, c), min(b, d)
            if start < stop:
                found.append((row + start - a, at + start - c, stop - start))
            at += d - c
        row += b - a
    return found


_known: weakref.WeakKeyDictionary[BlockMask, tuple[Any, Columns | None]] = weakref.WeakKeyDictionary()


def listed_columns(
    mask: BlockMask, cuts: MaskCuts, queries: Sequence[Ranges], keys: Sequence[Ranges], rank: int
) -> Columns | None:
    """The keys between the first and the last block that a mask of the whole sequence lists for each piece of queries;
    None where these are not few. Read from the device once for a mask that many layers share."""
    key = (listed_versions(cuts), tuple(queries), tuple(keys), rank)
    known = _known.get(mask)
    if known is not None and known[0] == key:
        return known[1]
    length, (rows, columns) = sum(sizes_of(keys)), cuts.size
    made = None
    if all(t.numel() for t in cuts.lists):
        hulls = cuts.hulls()
        parts: list[dict[Piece, tuple[int, int]]] = []
        for part in queries:
            found = {}
            for q in pieces(part, rows):
                its = hulls[q.start // rows : -(-q.stop // rows)]
                start, stop = min(h[0] for h in its) * columns, min(max(h[1] for h in its) * columns, length)
                if start < stop:
                    found[q] = start, stop
            parts.append(found)
        columns_of = Columns(parts, keys, rank)
        if columns_of.few(keys):
            made = columns_of
            made.lists = {(q, k): cuts.pair(q, k) for q, k in made.keys_of.items()}
    _known[mask] = (key, made)
    return made


class Fetch:
    """The needed rows of key and value, [B, H, rows, D]: this process's at once, the others' after wait()."""

    def __init__(self, context: ContextParallel, columns: Columns, tensors: Sequence[Tensor]) -> None:
        self._columns = columns
        own = [t.movedim(2, 0) for t in tensors]
        self._coming = [_exchange(context, t, columns.outbound, columns.inbound, 0) for t in own]
        self._made = [t.new_empty(columns.size, *t.shape[1:]) for t in own]
        for made, t in zip(self._made, own, strict=True):
            for there, here, count in columns.own:
                made[here : here + count].copy_(t[there : there + count])
        self.key, self.value = (made.movedim(0, 2) for made in self._made)

    def wait(self) -> None:
        for made, (received, _, work) in zip(self._made, self._coming, strict=True):
            work.wait()
            at = 0
            for _, here, count in (place for part in self._columns.inbound for place in part):
                made[here : here + count].copy_(received[at : at + count])
                at += count
        self._coming = []


def send_back(
    context: ContextParallel, columns: Columns, sums: Sequence[Tensor | None], own: int
) -> list[Tensor | None]:
    """Of sums over needed rows, [rows, ...], those of this process's `own` rows, added up in the order of processes."""
    coming = [None if t is None else _exchange(context, t, columns.inbound, columns.outbound, 1) for t in sums]
    made: list[Tensor | None] = []
    for t, its in zip(sums, coming, strict=True):
        if t is None or its is None:
            made.append(None)
            continue
        whole = t.new_zeros(own, *t.shape[1:])
        for there, here, count in columns.own:
            whole[there : there + count] = t[here : here + count]
        received, _, work = its
        work.wait()
        at = 0
        for there, _, count in (place for part in columns.outbound for place in part):
            whole[there : there + count] += received[at : at + count]
            at += count
        made.append(whole)
    return made


def _exchange(
    context: ContextParallel, rows: Tensor, to: list[_Overlaps], of: list[_Overlaps], side: int
) -> tuple[Tensor, Tensor, Any]:
    """Begins to send each process its rows, whose numbers are on that `side` of overlaps: what is received, in the
    order of processes, what is sent, and a handle to wait for."""
    sent = cut(rows, 0, tuple((p[side], p[side] + p[2]) for part in to for p in part)).contiguous()
    counts = [[sum(n for _, _, n in part) for part in parts] for parts in (of, to)]
    received = rows.new_empty(sum(counts[0]), *rows.shape[1:])
    return received, sent, dist.all_to_all_single(received, sent, *counts, group=context.group, async_op=True)
