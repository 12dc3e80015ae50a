"""Ranges of a sequence's positions: who has which, and rows in the order of processes or of the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

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


def indices_of(ranges: Ranges, device: torch.device | str | None) -> Tensor:
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


def balanced_ranges(block_mask: BlockMask, world: int) -> list[list[tuple[int, int]]]:
    """Ranges for each process: chunks of equal length, the heaviest first, each to the process with the least work of
    those that may have another. Of 1, 2, 4, 8 and 16 chunks a process, the first number is taken that leaves none with
    more than 2% above its share."""
    length = block_mask.seq_lengths[0]
    counts = block_mask.kv_num_blocks.double()
    if block_mask.full_kv_num_blocks is not None:
        counts = counts + block_mask.full_kv_num_blocks
    rows: list[float] = counts.reshape(-1, counts.shape[-1]).sum(0).tolist()
    total = sum(rows)
    if length == 0 or total == 0:
        raise ValueError(f"{NAME}.balanced: block_mask must list blocks, but got none")
    block = block_mask.BLOCK_SIZE[0]
    best: tuple[float, list[list[tuple[int, int]]]] | None = None
    for each in (1, 2, 4, 8, 16):
        if each * world > len(rows) and best is not None:
            break
        made, share = _dealt(rows, length, block, each, world)
        worst = share * world / total
        if best is None or worst < best[0]:
            best = worst, made
        if worst <= 1.02:
            break
    assert best is not None
    return best[1]


def _dealt(
    rows: list[float], length: int, block: int, each: int, world: int
) -> tuple[list[list[tuple[int, int]]], float]:
    count = each * world
    ends = [i * length // count for i in range(count + 1)]
    if length >= count * block:  # cut between blocks
        ends = [e // block * block for e in ends[:-1]] + [length]
    before = list(itertools.accumulate(rows, initial=0.0))

    def until(position: int) -> float:
        row, rest = divmod(position, block)
        return before[row] + (rows[row] * rest / block if rest else 0.0)

    work = [until(b) - until(a) for a, b in itertools.pairwise(ends)]
    loads, parts = [0.0] * world, [list[int]() for _ in range(world)]
    for chunk in sorted(range(count), key=lambda i: -work[i]):
        rank = min((r for r in range(world) if len(parts[r]) < each), key=lambda r: loads[r])
        parts[rank].append(chunk)
        loads[rank] += work[chunk]
    made = []
    for part in parts:
        ranges: list[tuple[int, int]] = []
        for chunk in sorted(part):
            a, b = ends[chunk], ends[chunk + 1]
            if ranges and ranges[-1][1] == a:
                ranges[-1] = ranges[-1][0], b
            elif b > a:
                ranges.append((a, b))
        made.append(ranges)
    return made, max(loads)


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
