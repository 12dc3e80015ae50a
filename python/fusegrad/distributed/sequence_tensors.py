"""flex_attention of DTensors: each process's part, and what its mods see of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .._eager import eager_only
from .._sharding import is_dtensor
from ..score_mod import ScoreMod
from .sequence import ContextParallel
from .sequence_attention import Options, Part, attend
from .sequence_mods import Starts

__all__ = ["attend_parts"]

_OP = "flex_attention"
# What sharding a dimension of query means: the input of mods that then has parts.
_INPUTS = {0: "b", 1: "h", 2: "q_idx"}


@eager_only
def attend_parts(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | ScoreMod | None,
    block_mask: BlockMask | None,
    options: Options,
    context: ContextParallel | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_scores: plain tensors, or DTensors sharded as query is."""
    if not is_dtensor(query, key, value):
        assert context is not None
        ranks = tuple(dist.get_process_group_ranks(context.group))
        groups = [context.group] if context.sum_captured else []
        part = Part(context, groups, {ranks: "q_idx"})
        return attend(query, key, value, score_mod, block_mask, options, part)

    part, gradients = _part_of(query, key, value, context)
    local = [t.to_local(grad_placements=g) for t, g in zip((query, key, value), gradients, strict=True)]
    out, lse, max_scores = attend(local[0], local[1], local[2], score_mod, block_mask, options, part)

    def whole(t: Tensor, *shape: int) -> Any:
        from torch.distributed.tensor import DTensor

        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * max(size, 1))
        return DTensor.from_local(
            t,
            query.device_mesh,
            query.placements,
            run_check=False,
            shape=query.shape[:0] + shape,
            stride=tuple(strides),
        )

    rows = tuple(query.shape[:3])
    maxima = None if max_scores is None else whole(max_scores, *rows)
    return whole(out, *rows, value.shape[3]), whole(lse, *rows), maxima


def _part_of(query: Any, key: Any, value: Any, given: ContextParallel | None) -> tuple[Part, list[list[Any]]]:
    """This process's part, and the placements of the gradients of query, key and value."""
    from torch.distributed.tensor import DTensor, Partial

    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, DTensor) or t.device_mesh != query.device_mesh:
            raise TypeError(
                f"{_OP}: query, key and value must all be DTensors on one mesh or all be plain tensors, but got "
                f"{[type(x).__name__ for x in (query, key, value)]}: {name} is none of the query's mesh"
            )
        if t.dim() != 4:
            raise ValueError(f"{_OP}: {name} must have 4 dimensions, but got shape {list(t.shape)}")
    mesh = query.device_mesh
    gradients: list[list[Any]] = [[], [], []]
    context, groups, roles = None, [], {}
    heads = 1
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        ranks = tuple(dist.get_process_group_ranks(group))
        found = [t.placements[dim] for t in (query, key, value)]
        role = _role(found, key.shape)
        roles[ranks] = role
        for i, placement in enumerate(found):
            gradients[i].append(Partial() if role and not placement.is_shard() else placement)
        if role:
            groups.append(group)
        if role == "h":
            heads *= mesh.size(dim)
        if role == "q_idx":
            if context is not None:
                raise ValueError(
                    f"{_OP}: query must be Shard(2) on one dimension of the mesh, but got {query.placements} on {mesh}"
                )
            context = ContextParallel._of(group) if given is None else given
            if tuple(dist.get_process_group_ranks(context.group)) != ranks:
                raise ValueError(
                    f"{_OP}: context_parallel must have the processes over which query is Shard(2), {list(ranks)}, "
                    f"but got {dist.get_process_group_ranks(context.group)}"
                )
    if context is None:
        if given is not None:
            raise ValueError(f"{_OP}: with context_parallel query must be Shard(2), but got {query.placements}")
        context = ContextParallel._alone()
    for name, t in (("query", query), ("key", key)):
        if t.shape[1] % heads and not (name == "key" and t.shape[1] == 1):
            raise ValueError(
                f"{_OP}: {name} must have a multiple of {heads} heads, over as many processes, but got {t.shape[1]}"
            )
    if not context.sum_captured:
        groups = []
    moved = tuple(name for name in ("b", "h") if name in roles.values())
    starts = {"b": _first(query, 0), "h": _first(query, 1), "q_idx": 0, "kv_idx": 0}
    lengths = query.shape[2], key.shape[2]
    return Part(context, groups, roles, Starts(starts), lengths, moved), gradients


def _first(tensor: Any, sharded: int) -> int:
    """Where this process's part of a dimension begins, which one dimension of the mesh after the other cuts."""
    first, size = 0, tensor.shape[sharded]
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(sharded):
            chunk = -(-size // tensor.device_mesh.size(dim))
            start = min(tensor.device_mesh.get_local_rank(dim) * chunk, size)
            first, size = first + start, min(chunk, size - start)
    return first


def _role(found: list[Any], key_shape: Any) -> str:
    """The input of mods that has parts where query, key and value are placed so on one dimension of a mesh."""
    from torch.distributed.tensor import Shard

    query = found[0]
    if not any(p.is_shard() for p in found) and not any(p.is_partial() for p in found):
        return ""
    right = type(query) is Shard and query.dim in _INPUTS
    for placement in found[1:]:
        shared = placement.is_replicate() and right and query.dim < 2 and key_shape[query.dim] == 1
        right = right and (placement == query or shared)
    if not right:
        raise ValueError(
            f"{_OP}: query, key and value must be Shard(0), Shard(1) or Shard(2) alike, or Replicate, but got {found}"
        )
    return _INPUTS[query.dim]
