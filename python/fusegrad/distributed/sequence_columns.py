"""Keys that a block mask's lists name: where these are few, processes send each other no others.

Every process has the mask of the whole sequence, so each knows which keys the others need, and none asks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .gradients import acc_of
from .sequence import ContextParallel
from .sequence_masks import MaskCuts, Piece, listed_versions, pieces
from .sequence_ranges import Ranges, joined, sizes_of
from .sequence_rows import Sum

__all__ = ["Columns", "Fetch", "KeySums", "listed_columns"]

# Rows that lie in both of two orders: the first's number in each, and how many.
_Overlaps = list[tuple[int, int, int]]
# Each with rows [number, B, H, D].
_Rows = list[tuple[tuple[int, int, int], Tensor]]


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
        self._coming: _Exchange | None = _Exchange(context, own, columns.outbound, columns.inbound, 0)
        self._made = [t.new_empty(columns.size, *t.shape[1:]) for t in own]
        pairs = zip(self._made, own, strict=True)
        _copy((made[here : here + n], t[there : there + n]) for made, t in pairs for there, here, n in columns.own)

    def of(self, q: Piece) -> list[Tensor]:
        """Key and value, [B, H, rows, D], for a piece of queries: of the columns' `rest` after wait()."""
        k = self._columns.keys_of[q]
        if q in self._columns.home:
            return [t.narrow(2, k.row, k.size) for t in self._tensors]
        return [made.narrow(0, k.row, k.size).movedim(0, 2) for made in self._made]

    def wait(self) -> None:
        assert self._coming is not None
        came = zip(self._made, self._coming.wait(), strict=True)
        _copy((made[here : here + n], rows) for made, parts in came for (_, here, n), rows in parts)
        self._coming = None


class KeySums:
    """The gradients of key and value, or of one of them, from what the pieces of all processes give to them.

    Where no process has anything to add up by itself, what pieces give keeps its dtype until it meets another
    process's: no bit of it is lost, and half as many travel.
    """

    def __init__(self, columns: Columns, own: Sequence[Tensor | None]) -> None:
        self._columns = columns
        self._sums = [None if t is None else _KeySum(columns, t) for t in own]

    def add(self, q: Piece, gradients: Sequence[Tensor]) -> None:
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.of(q).add(self._columns.keys_of[q].row, gradient)

    def finished(self, context: ContextParallel) -> list[Tensor | None]:
        """Those of this process's keys, with what the others' pieces give, in the order of processes."""
        columns, wanted = self._columns, [total for total in self._sums if total is not None]
        if not wanted:
            return [None for _ in self._sums]
        gathered = [total.gathered() for total in wanted]
        coming = _Exchange(context, [g.movedim(2, 0) for g in gathered], columns.inbound, columns.outbound, 1)
        for total, rows in zip(wanted, gathered, strict=True):
            for there, here, count in columns.own:
                total.home.add(there, rows.narrow(2, here, count))
        came = iter(coming.wait())
        return [None if total is None else total.finished(next(came)) for total in self._sums]


class _KeySum:
    """The gradient of key or value: `home` of this process's own rows, and of the columns' one tensor."""

    def __init__(self, columns: Columns, own: Tensor) -> None:
        self._columns, self._dtype = columns, own.dtype
        self._travels = dtype = own.dtype if columns.apart else acc_of(own.dtype)
        self.home = Sum(lambda: torch.empty_like(own, dtype=dtype), own.shape[2], dtype)
        # In memory as it travels, row by row.
        shape = (columns.size, *own.shape[:2], own.shape[3])
        self._together = Sum(lambda: own.new_empty(shape, dtype=dtype).movedim(0, 2), columns.size, dtype)

    def of(self, q: Piece) -> Sum:
        return self.home if q in self._columns.home else self._together

    def gathered(self) -> Tensor:
        """[B, H, size, D] of the columns' one tensor."""
        return self._together.finished().to(self._travels)

    def finished(self, came: _Rows) -> Tensor:
        own = self.home.finished()
        parts = [(there, rows.movedim(0, 2)) for (there, _, _), rows in came]
        for start, stop in joined([(there, there + part.shape[2]) for there, part in parts]):
            shared = own.narrow(2, start, stop - start)
            wide = shared.to(acc_of(own.dtype))
            for there, part in parts:
                if start <= there < stop:
                    wide.narrow(2, there - start, part.shape[2]).add_(part)
            if wide is not shared:
                shared.copy_(wide)
        return own.to(self._dtype)


class _Exchange:
    """Sends each process its rows of some tensors of one dtype, [rows, B, H, D], and receives theirs, all in one
    collective. The numbers of the rows to send are on that `side` of overlaps."""

    def __init__(
        self, context: ContextParallel, tensors: Sequence[Tensor], to: list[_Overlaps], of: list[_Overlaps], side: int
    ) -> None:
        self._shapes, self._of = [t.shape[1:] for t in tensors], of
        width = sum(math.prod(shape) for shape in self._shapes)
        counts = [[width * sum(n for _, _, n in part) for part in parts] for parts in (of, to)]
        self._received, self._sent = (tensors[0].new_empty(sum(its)) for its in counts)
        going = zip(tensors, self._views(self._sent, to), strict=True)
        _copy((rows, t[p[side] : p[side] + p[2]]) for t, parts in going for p, rows in parts)
        self._work = dist.all_to_all_single(self._received, self._sent, *counts, group=context.group, async_op=True)

    def wait(self) -> list[_Rows]:
        """What came of each tensor, in the order of processes."""
        self._work.wait()
        return self._views(self._received, self._of)

    def _views(self, flat: Tensor, overlaps: list[_Overlaps]) -> list[_Rows]:
        made: list[_Rows] = [[] for _ in self._shapes]
        at = 0
        for part in overlaps:
            for views, shape in zip(made, self._shapes, strict=True):
                for place in part:
                    count = place[2] * math.prod(shape)
                    views.append((place, flat[at : at + count].view(place[2], *shape)))
                    at += count
        return made


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair, by one kernel where they lie alike in memory."""
    to, of = [], []
    for a, b in pairs:
        to.append(a)
        of.append(b)
    if to:
        torch._foreach_copy_(to, of)
