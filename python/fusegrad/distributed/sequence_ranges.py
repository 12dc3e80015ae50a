"""Ranges of a sequence's positions: who has which, and rows in the order of processes or of the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .._arguments import Device

__all__ = ["NAME", "Ranges"]

NAME = "ContextParallel"

# [start, stop) of positions in the whole sequence, in the order in which a process has them.
Ranges = tuple[tuple[int, int], ...]


def covered(everyone: Sequence[Ranges]) -> int:
    """The length that the ranges of all cover."""
    end = 0
    for first, last in sorted(pair for ranges in everyone for pair in ranges):
        if first != end:
            raise ValueError(
                f"{NAME}: the ranges of all processes must be [0, S) without gaps and overlaps, but got "
                f"{[list(r) for r in everyone]}: {'nothing covers' if first > end else 'twice'} "
                f"[{min(first, end)}, {max(first, end)})"
            )
        end = last
    return end


@lru_cache(maxsize=256)
def contiguous(length: int, world: int) -> tuple[Ranges, ...]:
    chunk = -(-length // world)
    return tuple(((min(r * chunk, length), min((r + 1) * chunk, length)),) for r in range(world))


@lru_cache(maxsize=256)
def zigzag(length: int, world: int) -> tuple[Ranges, ...]:
    ends = [i * length // (2 * world) for i in range(2 * world + 1)]
    chunks = list(itertools.pairwise(ends))
    return tuple((chunks[r], chunks[2 * world - 1 - r]) for r in range(world))


def indices_of(ranges: Ranges, device: Device | None) -> Tensor:
    parts = [torch.arange(a, b, device=device) for a, b in ranges]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def cut(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    return torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges] or [tensor.narrow(dim, 0, 0)], dim)


def sizes_of(everyone: Sequence[Ranges]) -> list[int]:
    """How many positions each process has."""
    return [sum(b - a for a, b in ranges) for ranges in everyone]


def joined(intervals: Sequence[tuple[int, int]]) -> Ranges:
    """Sorted, and those that touch or overlap as one."""
    made: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return tuple(made)


def within(start: int, stop: int, ranges: Ranges) -> list[tuple[int, int, bool]]:
    """[start, stop) cut where ranges begin and end, and whether each part lies in one of them."""
    ends = sorted({start, stop, *(end for pair in ranges for end in pair if start < end < stop)})
    return [(a, b, any(first <= a and b <= last for first, last in ranges)) for a, b in itertools.pairwise(ends)]


# Work is counted in pairs of blocks. A block of keys that only the other side of a cut has is fetched twice and its
# gradients are sent back: the time of about so many pairs, in bfloat16 over NVLink.
_PAIRS_A_FETCHED_BLOCK = 4
# By what part of its share work may differ, for fewer ranges and less to fetch; by more where no cut is closer.
_TOLERANCE = 0.01


def balanced_ranges(block_mask: BlockMask, world: int) -> list[list[tuple[int, int]]]:
    """Ranges for each process, of as many rows of blocks and of as much work as the others', at most 2 world - 1 in all
    and ceil(log2(world)) + 1 each.

    The rows lie on a circle. Half of the processes get a window of it, the others the rest, and both close to circles
    that are halved again. A window of the share's work always exists, but for a row's: the mean over all starts is the
    share, and a step to the next start changes the work by the difference of two rows. Each of the world - 1 halvings
    makes at most two cuts."""
    length, block = int(block_mask.seq_lengths[0]), block_mask.BLOCK_SIZE[0]
    work, across = _counts(block_mask)
    if length == 0 or sum(work) == 0:
        raise ValueError(f"{NAME}.balanced: block_mask must list blocks, but got none")
    unit = block if length >= world * block else 1  # cuts lie between blocks
    if unit == 1:  # what lies across a cut within a block is not known
        across = [0.0 if i % block else across[i // block] for i in range(length)]
        work = [work[i // block] / block for i in range(length)]
    sizes = [(r + 1) * len(work) // world - r * len(work) // world for r in range(world)]
    parts = _halved(list(range(len(work))), sizes, work, across, _TOLERANCE / max((world - 1).bit_length(), 1))
    return [list(joined([(i * unit, min((i + 1) * unit, length)) for i in part])) for part in sorted(parts)]


def _counts(block_mask: BlockMask) -> tuple[list[float], list[float]]:
    """For each row of blocks, the mean over batches and heads: how many blocks it lists; and how many of them, and of
    those of the row before, lie on the other side of a cut between the two."""
    rows, columns = block_mask.BLOCK_SIZE
    m = block_mask
    sums: tuple[list[Tensor], ...] = [], [], []  # of all blocks, those below and those above the row's own
    for count, index in ((m.kv_num_blocks, m.kv_indices), (m.full_kv_num_blocks, m.full_kv_indices)):
        if count is None or index is None:
            continue
        listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
        start = torch.arange(count.shape[-1], device=index.device).unsqueeze(-1) * rows
        found = (listed, listed & (index * columns < start), listed & ((index + 1) * columns > start + rows))
        for to, which in zip(sums, found, strict=True):
            to.append(which.sum(-1).reshape(-1, count.shape[-1]).double().mean(0))
    made: list[list[float]] = torch.stack([torch.stack(t).sum(0) for t in sums]).tolist()
    return made[0], [b + a for b, a in zip(made[1], [0.0, *made[2]], strict=False)]


def _halved(
    rows: list[int], sizes: list[int], work: list[float], across: list[float], tolerance: float
) -> list[list[int]]:
    """For sorted rows, which close to a circle, those of as many processes as there are sizes."""
    if len(sizes) == 1:
        return [rows]
    first, count = len(sizes) // 2, len(rows)
    size = sum(sizes[:first])
    before = list(itertools.accumulate((work[i] for i in rows * 2), initial=0.0))
    share = before[count] * first / len(sizes)

    # Which cuts before a row are new: nothing is fetched over the others that was not before.
    cuts = [0 if count == 0 or rows[i] != rows[i - 1] + 1 else 1 for i in range(count)]
    fetched = [_PAIRS_A_FETCHED_BLOCK * across[i] if cut else 0.0 for i, cut in zip(rows, cuts, strict=True)]
    off = [abs(before[start + size] - before[start] - share) for start in range(count)]
    allowed = max(min(off, default=0.0), tolerance * share)

    def cost(start: int) -> tuple[int, float]:
        end = (start + size) % count
        return cuts[start] + cuts[end], off[start] + fetched[start] + fetched[end]

    start = min((i for i in range(count) if off[i] <= allowed), key=cost, default=0)
    around = rows[start:] + rows[:start]
    parts = (around[:size], sizes[:first]), (around[size:], sizes[first:])
    return [part for its, its_sizes in parts for part in _halved(sorted(its), its_sizes, work, across, tolerance)]


def ordered(rows: Tensor, everyone: Sequence[Ranges], largest: int) -> Tensor:
    """Parts of `largest` rows each, one after the other, as the rows of the whole sequence."""
    places = []
    for rank, ranges in enumerate(everyone):
        at = rank * largest
        for a, b in ranges:
            places.append((a, at, b - a))
            at += b - a
    places = [place for place in places if place[2]]
    if all(a == at for a, at, _ in places):
        return rows[: sum(n for _, _, n in places)]
    return torch.cat([rows[at : at + n] for _, at, n in sorted(places)])


def unordered(rows: Tensor, everyone: Sequence[Ranges], largest: int) -> Tensor:
    """The reverse of ordered(), with zeros where a part is shorter."""
    parts = []
    for ranges in everyone:
        own = [rows[a:b] for a, b in ranges]
        missing = largest - sum(b - a for a, b in ranges)
        if missing:
            own.append(rows.new_zeros(missing, *rows.shape[1:]))
        parts += own
    if [r for ranges in everyone for r in ranges if r[1] > r[0]] == sorted(
        r for ranges in everyone for r in ranges if r[1] > r[0]
    ) and all(sum(b - a for a, b in ranges) == largest for ranges in everyone):
        return rows
    return torch.cat(parts)
