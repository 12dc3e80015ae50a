"""Keys that a block mask's lists name: where these are few, processes send each other no others.

Every process has the mask of the whole sequence, so each knows which keys the others need, and none asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .gradients import acc_of
from .sequence import ContextParallel
from .sequence_masks import MaskCuts, Piece, listed_versions, pieces
from .sequence_ranges import Ranges, cut, joined, sizes_of
from .sequence_rows import Sum

__all__ = ["Columns", "Fetch", "KeySum", "listed_columns"]

# Rows that lie in both of two orders: the first's number in each, and how many.
_Overlaps = list[tuple[int, int, int]]


class Columns:
    """Which keys each process works with, and where this process has them: in its own tensors, or with others' keys in
    one tensor of `size` rows.

    Args:
        queries: the pieces of each process, and between which keys the mask lists any for each of them.
        keys: which positions each process has; `rank` is this one's there.

    Attributes:
        needed: of each process, sorted and apart.
        apart: whether no process has two pieces that need the same key: it then has no gradients of keys to add up.
        keys_of: of a piece of this process's queries; pieces that need no key are not there.
        home: pieces whose keys follow each other in this process's own tensors, to whose rows keys_of refers.
        local, rest: pieces that need this process's keys alone, and the others.
        lists: of blocks, of a piece and its keys.
        own, inbound: the rows of each process that the one tensor has: row there, row here, number.
        outbound: this process's rows that each one needs.
    """

    def __init__(self, queries: Sequence[dict[Piece, tuple[int, int]]], keys: Sequence[Ranges], rank: int) -> None:
        self.needed = [joined(list(part.values())) for part in queries]
        self.apart = all(
            sum(b - a for a, b in part.values()) == sum(b - a for a, b in its)
            for part, its in zip(queries, self.needed, strict=True)
        )
        self.outbound = [[] if r == rank else _overlaps(keys[rank], n) for r, n in enumerate(self.needed)]
        self.keys_of: dict[Piece, Piece] = {}
        self.local: list[Piece] = []
        self.rest: list[Piece] = []
        self.home: set[Piece] = set()
        elsewhere = {}
        own = pieces(keys[rank], 0)
        for q, (start, stop) in queries[rank].items():
            here = sum(n for _, _, n in _overlaps(keys[rank], ((start, stop),)))
            (self.local if here == stop - start else self.rest).append(q)
            found = [piece for piece in own if piece.start <= start and stop <= piece.stop]
            if found:
                self.home.add(q)
                self.keys_of[q] = _within(found[0], start, stop)
            else:
                elsewhere[q] = start, stop
        together, self.size = [], 0
        for start, stop in joined(list(elsewhere.values())):
            together.append(Piece(start, stop, self.size))
            self.size += stop - start
        for q, (start, stop) in elsewhere.items():
            (found_at,) = (piece for piece in together if piece.start <= start < piece.stop)
            self.keys_of[q] = _within(found_at, start, stop)
        gathered = tuple((piece.start, piece.stop) for piece in together)
        overlaps = [_overlaps(part, gathered) for part in keys]
        self.own = overlaps[rank]
        self.inbound = [[] if r == rank else found for r, found in enumerate(overlaps)]
        self.lists: dict[tuple[Piece, Piece], list[Tensor]] = {}

    def few(self, keys: Sequence[Ranges]) -> bool:
        """Whether less than two thirds of what gathering all would move is needed. A gather has the better collective,
        and a causal mask over a zigzag needs three quarters."""
        moved = 0
        for rank, needed in enumerate(self.needed):
            moved += sum(n for r, k in enumerate(keys) if r != rank for _, _, n in _overlaps(k, needed))
        return 3 * moved < 2 * (len(keys) - 1) * sum(sizes_of(keys))


def _within(piece: Piece, start: int, stop: int) -> Piece:
    return Piece(start, stop, piece.row + start - piece.start)


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
    """The keys and values that pieces need: of()."""

    def __init__(self, context: ContextParallel, columns: Columns, tensors: Sequence[Tensor]) -> None:
        self._columns, self._tensors = columns, tensors
        own = [t.movedim(2, 0) for t in tensors]
        self._coming = [_exchange(context, t, columns.outbound, columns.inbound, 0) for t in own]
        self._made = [t.new_empty(columns.size, *t.shape[1:]) for t in own]
        for made, t in zip(self._made, own, strict=True):
            for there, here, count in columns.own:
                made[here : here + count].copy_(t[there : there + count])

    def of(self, q: Piece) -> list[Tensor]:
        """Key and value, [B, H, rows, D], for a piece of queries: of the columns' `rest` after wait()."""
        k = self._columns.keys_of[q]
        if q in self._columns.home:
            return [t.narrow(2, k.row, k.size) for t in self._tensors]
        return [made.narrow(0, k.row, k.size).movedim(0, 2) for made in self._made]

    def wait(self) -> None:
        for made, (received, _, work) in zip(self._made, self._coming, strict=True):
            work.wait()
            at = 0
            for _, here, count in (place for part in self._columns.inbound for place in part):
                made[here : here + count].copy_(received[at : at + count])
                at += count
        self._coming = []


class KeySum:
    """The gradient of key or value, from what the pieces of all processes give to it.

    Where no process has anything to add up by itself, what pieces give keeps its dtype until it meets another
    process's: no bit of it is lost, and half as many travel.
    """

    def __init__(self, columns: Columns, own: Tensor) -> None:
        self._columns, self._dtype = columns, own.dtype
        self._travels = dtype = own.dtype if columns.apart else acc_of(own.dtype)
        shape = (*own.shape[:2], columns.size, own.shape[3])
        self._home = Sum(lambda: torch.empty_like(own, dtype=dtype), own.shape[2], dtype)
        self._together = Sum(lambda: own.new_empty(shape, dtype=dtype), columns.size, dtype)

    def add(self, q: Piece, gradient: Tensor) -> None:
        (self._home if q in self._columns.home else self._together).add(self._columns.keys_of[q].row, gradient)

    def send(self, context: ContextParallel) -> None:
        columns, rows = self._columns, self._together.finished().to(self._travels)
        self._coming = _exchange(context, rows.movedim(2, 0), columns.inbound, columns.outbound, 1)
        for there, here, count in columns.own:
            self._home.add(there, rows.narrow(2, here, count))

    def received(self) -> Tensor:
        """That of this process's keys, added up in the order of processes, after send()."""
        own = self._home.finished()
        rows, _, work = self._coming
        work.wait()
        places, at = [], 0
        for there, _, count in (place for part in self._columns.outbound for place in part):
            places.append((there, rows[at : at + count].movedim(0, 2)))
            at += count
        for start, stop in joined([(there, there + part.shape[2]) for there, part in places]):
            shared = own.narrow(2, start, stop - start)
            wide = shared.to(acc_of(own.dtype))
            for there, part in places:
                if start <= there < stop:
                    wide.narrow(2, there - start, part.shape[2]).add_(part)
            if wide is not shared:
                shared.copy_(wide)
        return own.to(self._dtype)


def _exchange(
    context: ContextParallel, rows: Tensor, to: list[_Overlaps], of: list[_Overlaps], side: int
) -> tuple[Tensor, Tensor, Any]:
    """Begins to send each process its rows, whose numbers are on that `side` of overlaps: what is received, in the
    order of processes, what is sent, and a handle to wait for."""
    sent = cut(rows, 0, tuple((p[side], p[side] + p[2]) for part in to for p in part)).contiguous()
    counts = [[sum(n for _, _, n in part) for part in parts] for parts in (of, to)]
    received = rows.new_empty(sum(counts[0]), *rows.shape[1:])
    return received, sent, dist.all_to_all_single(received, sent, *counts, group=context.group, async_op=True)
