"""Captured tensors that are DTensors: what this process reads of them, and how their gradients are sharded.

A tensor that is sharded as the scores are is read where it is: along heads where all reads are by h, along queries
where they are by q_idx. Any other shard is gathered before the call, and its gradient reduced to the shard after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._sharding import is_dtensor
from ..score_mod import ScoreMod
from .sequence_mods import Local, local_reads
from .sequence_ranges import Ranges, ordered, sizes_of

__all__ = ["Captured", "captured"]


class Captured(NamedTuple):
    """What one call makes of the captured tensors of its mod.

    Attributes:
        local: the reads that stay in this process.
        own: by buffer: its gradient is a DTensor's, which nobody has to add up.
        parts: each makes what kernels read of a captured tensor; the processes call them together.
    """

    local: tuple[Local, ...]
    own: tuple[bool, ...]
    parts: tuple[Callable[[Tensor], Tensor], ...]


def captured(
    op: str,
    name: str,
    mod: ScoreMod | None,
    roles: dict[tuple[int, ...], str],
    queries: tuple[Ranges, ...],
    keys: tuple[Ranges, ...],
    rank: int,
) -> Captured:
    """A plan for the buffers of a mod.

    Args:
        roles: by the ranks of a group: the input of mods of which its processes have parts: b, h or q_idx; "" where
            they all have the same.
        queries, keys: which positions each process of the sequence's group has; `rank` is this one's there.
    """
    local: list[Local] = []
    own: list[bool] = []
    parts: list[Callable[[Tensor], Tensor]] = []
    for i, buffer in enumerate(() if mod is None else mod.buffers):
        assert mod is not None
        own.append(is_dtensor(buffer))
        if not own[-1]:
            parts.append(_as_it_is)
            continue
        made, reads = _plan(op, f"{name}'s captured tensor @{i}", mod, i, buffer, roles, queries, keys, rank)
        parts.append(made)
        local += reads
    return Captured(tuple(local), tuple(own), tuple(parts))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _plan(
    op: str,
    what: str,
    mod: ScoreMod,
    index: int,
    buffer: Any,
    roles: dict[tuple[int, ...], str],
    queries: tuple[Ranges, ...],
    keys: tuple[Ranges, ...],
    rank: int,
) -> tuple[Callable[[Tensor], Tensor], list[Local]]:
    import torch.distributed as dist
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, placements = buffer.device_mesh, buffer.placements
    sharded = [p.dim % buffer.dim() for p in placements if p.is_shard()]
    read_at: list[Any] = []
    gradients: list[Any] = []
    local: list[Local] = []
    reorder: list[tuple[int, tuple[Ranges, ...]]] = []
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{op}: {what} must be Replicate or Shard, but got {placements}")
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group(dim)))
        role = roles.get(ranks)
        if not placement.is_shard():
            read_at.append(Replicate())
            gradients.append(Replicate() if role == "" else Partial())
            continue
        at = placement.dim % buffer.dim()
        by = local_reads(mod.text, index, at)
        if role is None:
            raise ValueError(
                f"{op}: {what} must be sharded over processes that share query, key and value, but got {placements} on "
                f"{mesh}: gather it first, as FSDP2 does before a module's forward"
            )
        stays = role and by == role and mod.kind == "score_mod" and type(placement) is Shard and sharded.count(at) == 1
        if stays:
            size = buffer.to_local().shape[at]
            if role == "q_idx" and size != sizes_of(queries)[rank]:
                raise ValueError(
                    f"{op}: {what} must have a row for each of this process's {sizes_of(queries)[rank]} queries, but "
                    f"got {size} in dimension {at}"
                )
            local.append((index, at, role))
            read_at.append(placement)
            gradients.append(placement)
            continue
        if role == "q_idx" and by in ("q_idx", "kv_idx"):
            reorder.append((at, queries if by == "q_idx" else keys))
        read_at.append(Replicate())
        gradients.append(Replicate() if role == "" else Partial())

    def part(tensor: Any) -> Tensor:
        made = tensor
        if tuple(read_at) != tuple(tensor.placements):
            made = made.redistribute(placements=read_at)
        made = made.to_local(grad_placements=gradients)
        for at, everyone in reorder:
            made = _in_order(made, at, everyone)
        return made

    return part, local


def _in_order(tensor: Tensor, dim: int, everyone: tuple[Ranges, ...]) -> Tensor:
    """Processes' parts one after the other, as the sequence has them."""
    sizes = sizes_of(everyone)
    if tensor.shape[dim] != sum(sizes):
        return tensor
    largest = max(sizes, default=0)
    rows = tensor.movedim(dim, 0)
    if any(size != largest for size in sizes):
        rows = torch.cat(
            [torch.nn.functional.pad(r, (0, 0) * (r.dim() - 1) + (0, largest - len(r))) for r in rows.split(sizes)]
        )
    return ordered(rows, everyone, largest).movedim(0, dim)
