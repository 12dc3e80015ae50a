"""Block masks of parts of a sequence: the lists of a mask of the whole one, cut to ranges of queries and of keys.

A list says what takes part, whatever the mask_mod would say elsewhere, so a cut lies between blocks: a range that
begins within a block has a piece of its own up to the block's end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .._arguments import Device
from ..block_mask import create_block_mask
from ..score_mod import ScoreMod, trace_mask_mod
from .sequence_mods import MovedMod, Starts
from .sequence_ranges import Ranges, sizes_of

__all__ = ["MaskCuts", "Piece", "listed_pairs", "listed_versions", "own_block_mask", "pieces"]


class Piece(NamedTuple):
    """Positions [start, stop) of the sequence, which a process has from its row-th on."""

    start: int
    stop: int
    row: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def pieces(ranges: Ranges, block: int) -> list[Piece]:
    """The ranges, those that follow each other as one, each begun at a block's start or within one block; a block of 0
    cuts nothing."""
    whole: list[tuple[int, int]] = []
    for start, stop in ranges:
        if whole and whole[-1][1] == start:
            whole[-1] = whole[-1][0], stop
        else:
            whole.append((start, stop))
    made, row = [], 0
    for start, stop in whole:
        end = stop if block == 0 else min(-(-start // block) * block, stop)
        for a, b in ((start, end), (end, stop)) if start < end < stop else ((start, stop),):
            if a < b:
                made.append(Piece(a, b, row))
                row += b - a
    return made


class MaskCuts:
    """The lists of a block mask for pieces of queries and of keys.

    Args:
        block_mask: of the whole sequence, or (`own`) of this process's queries and all keys.
        batches, heads: this process's; a mask of one batch or one head stands for all.
    """

    def __init__(self, block_mask: BlockMask, own: bool, batches: range, heads: range) -> None:
        size = block_mask.BLOCK_SIZE
        self.size: tuple[int, int] = (size, size) if isinstance(size, int) else (size[0], size[1])
        self.own = own
        m = block_mask
        lists = [m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices]
        self.lists: list[Tensor] = []
        for i, t in enumerate(t for t in lists if t is not None):
            while t.dim() < 3 + i % 2:
                t = t.unsqueeze(0)
            self.lists.append(_cut(_cut(t, 0, batches), 1, heads))

    def rows(self, piece: Piece) -> list[Tensor]:
        """Those of a piece of queries, for all keys."""
        first = (piece.row if self.own else piece.start) // self.size[0]
        return [t.narrow(2, first, -(-piece.size // self.size[0])) for t in self.lists]

    def hulls(self) -> list[tuple[int, int]]:
        """For each row of blocks, the first block and the end of the last one that any batch or head lists; where none
        is listed the first is not before the end. Read from the device."""
        firsts, ends = [], []
        for count, index in zip(self.lists[::2], self.lists[1::2], strict=True):
            kept = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
            firsts.append(index.masked_fill(~kept, torch.iinfo(index.dtype).max).amin((0, 1, 3)))
            ends.append(index.masked_fill(~kept, -1).amax((0, 1, 3)) + 1)
        found = torch.stack([torch.stack(firsts).amin(0), torch.stack(ends).amax(0)], 1)
        return [(first, end) for first, end in found.tolist()]

    def pair(self, queries: Piece, keys: Piece) -> list[Tensor]:
        """Those of a piece of queries for a piece of keys."""
        first = keys.start // self.size[1]
        last = first + -(-keys.size // self.size[1])
        rows, made = self.rows(queries), []
        for count, index in zip(rows[::2], rows[1::2], strict=True):
            place = torch.arange(index.shape[-1], device=index.device)
            kept = (place < count.unsqueeze(-1)) & (index >= first) & (index < last)
            order = kept.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : last - first]
            made += [kept.sum(-1, dtype=torch.int32), (index.gather(-1, order) - first).clamp_(0, last - first - 1)]
        return made


def _cut(t: Tensor, dim: int, part: range) -> Tensor:
    return t if t.shape[dim] == 1 else t.narrow(dim, part.start, len(part))


_Pairs = dict[tuple[Piece, Piece], list[Tensor]]
_known: weakref.WeakKeyDictionary[BlockMask, tuple[Any, _Pairs]] = weakref.WeakKeyDictionary()


def listed_versions(cuts: MaskCuts) -> Any:
    """What differs where lists were replaced or written to."""
    return tuple((t.data_ptr(), t._version, tuple(t.shape)) for t in cuts.lists)


def listed_pairs(mask: BlockMask, cuts: MaskCuts, queries: Sequence[Piece], keys: Sequence[Piece]) -> _Pairs:
    """The lists of each pair of pieces that has any block: what the others list is nothing, and nothing is computed.
    Which these are is read from the device, once for a mask that many layers share."""
    key = (listed_versions(cuts), tuple(queries), tuple(keys))
    known = _known.get(mask)
    if known is not None and known[0] == key:
        return known[1]
    made = {(q, k): cuts.pair(q, k) for q in queries for k in keys}
    if not made:
        return made
    counts = torch.stack([sum(t.sum() for t in lists[::2]) for lists in made.values()]).tolist()
    made = {pair: lists for (pair, lists), count in zip(made.items(), counts, strict=True) if count}
    _known[mask] = (key, made)
    return made


def own_block_mask(
    ranges: Ranges,
    mask_mod: Callable[..., Any] | ScoreMod,
    B: int | None,
    H: int | None,
    length: int,
    device: Device,
    block_size: int,
) -> BlockMask:
    """The block mask of queries at these positions and all keys."""
    mod = trace_mask_mod(mask_mod, device=torch.device(device))
    moved = MovedMod(mod, ("q_idx",))
    parts, row = [], 0
    for start, stop in ranges:
        if row % block_size:
            raise ValueError(
                "ContextParallel.block_mask: block_size must divide the lengths of all of this process's ranges but "
                f"the last, but got {block_size} and {list(ranges)}"
            )
        row += stop - start
        part = moved.traced(Starts().at(start, 0, 0))
        parts.append(create_block_mask(part, B, H, stop - start, length, device=device, block_size=block_size))
    columns = -(-length // block_size)
    lists = []
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        shape = (B or 1, H or 1, 0) if name.endswith("num_blocks") else (B or 1, H or 1, 0, columns)
        nothing = torch.zeros(shape, dtype=torch.int32, device=device)
        lists.append(torch.cat([nothing, *(getattr(part, name) for part in parts)], 2))
    lengths = (sizes_of((ranges,))[0], length)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=mod, seq_lengths=lengths)
