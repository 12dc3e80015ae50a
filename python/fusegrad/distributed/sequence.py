"""Who has which part of a sequence: ContextParallel, and placements that give each process equal work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .. import _sharding
from .._arguments import Device
from ..score_mod import ScoreMod
from .sequence_masks import own_block_mask
from .sequence_ranges import (
    NAME,
    Ranges,
    balanced_ranges,
    contiguous,
    covered,
    cut,
    indices_of,
    ordered,
    sizes_of,
    zigzag,
)
from .shards import KeptGroup, process_group

__all__ = ["ContextParallel", "gathered"]

_PLACEMENTS = ("contiguous", "zigzag")
_WAYS = ("auto", "gather", "ring")


class ContextParallel(_sharding.ContextParallel):
    """How a sequence is spread over the processes of a group, for ``flex_attention(..., context_parallel=...)``.

    Made by all processes of the group together: they tell each other what they were given, once. In a call each process
    has its own part of query, key and value; mods see positions of the whole sequence. docs/distributed.md explains it.

    Args:
        group: a process group that this process belongs to, a device mesh of one dimension, or None: all processes.
        placement: ``"contiguous"``: one range each, in the order of the ranks, as ``torch.chunk`` cuts. ``"zigzag"``:
            of twice as many chunks as processes, rank r has chunk r and, counted from the end, chunk r again: equal
            work under a causal mask. Or this process's own ranges ``[(start, stop), ...]`` of positions, in the order
            in which it has them; those of all processes must be [0, S) without gaps and overlaps, and may be empty.
        length: S. None: as many as the processes' parts together, which then are equally long. Needed where they are
            not; not with ranges, which say it.
        way: ``"gather"``: each process gathers all keys and values, or those that a block mask lists for its queries,
            if these are few. ``"ring"``: they travel from process to process, and none holds more than two parts.
            ``"auto"``: gathers where all keys together are no larger than a process's own queries, or than 64 MiB, and
            where a mask lists few.
        sum_captured: whether gradients of captured plain tensors are summed over the group, so that they are the same
            in all its processes. False: each has what its own queries contribute, for DDP or FSDP over the same
            processes to reduce.

    Attributes:
        rank, world: of this process in the group, and the group's size.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: in all processes of the group, where arguments are wrong or differ, or the ranges do not fit.
    """

    group = KeptGroup()

    def __init__(
        self,
        group: Any = None,
        placement: str | Sequence[tuple[int, int]] = "contiguous",
        *,
        length: int | None = None,
        way: Literal["auto", "gather", "ring"] = "auto",
        sum_captured: bool = True,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{NAME}: torch.distributed must be initialised (torch.distributed.init_process_group), "
                "but got no default group"
            )
        group = process_group(NAME, group)
        own = placement if isinstance(placement, str) else _pairs(placement)
        told: list[Any] = [None] * dist.get_world_size(group)
        # What came is told before it is checked: an error in one process alone would leave the others waiting.
        dist.all_gather_object(told, (own, length, way, sum_captured), group=group)
        for rank, (its, its_length, its_way, its_sum) in enumerate(told):
            _check(rank, its, its_length, its_way, its_sum)
            if isinstance(its, str) != isinstance(own, str) or (isinstance(own, str) and its != own):
                raise ValueError(f"{NAME}: placement must be the same in all processes, but got {[t[0] for t in told]}")
            for name, mine, other in (("length", length, its_length), ("way", way, its_way)):
                if mine != other:
                    raise ValueError(f"{NAME}: {name} must be the same in all processes, but got {mine} and {other}")
            if its_sum != sum_captured:
                raise ValueError(f"{NAME}: sum_captured must be the same in all processes, but got both")
        if isinstance(own, str):
            self._set(group, own, None, length, way, sum_captured)
            return
        if length is not None:
            raise ValueError(f"{NAME}: length must be None where placement is ranges, but got {length}")
        everyone = [tuple(t[0]) for t in told]
        self._set(group, "ranges", everyone, covered(everyone), way, sum_captured)

    @classmethod
    def _of(cls, group: Any) -> ContextParallel:
        """That of a DTensor, which is contiguous and knows its length."""
        made = cls.__new__(cls)
        made._set(group, "contiguous", None, None, "auto", True)
        return made

    @classmethod
    def _alone(cls) -> ContextParallel:
        """That of a sequence that is not spread."""
        made = cls.__new__(cls)
        made.group, made.placement, made.length, made.way, made.sum_captured = None, "contiguous", None, "gather", True
        made.rank, made.world, made._ranges = 0, 1, None
        return made

    def _set(
        self, group: Any, placement: str, ranges: list[Ranges] | None, length: int | None, way: str, sum_captured: bool
    ) -> None:
        self.group = group
        self.placement = placement
        self.length = length
        self.way = way
        self.sum_captured = sum_captured
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._ranges = ranges

    @classmethod
    def balanced(cls, group: Any, block_mask: BlockMask, **options: Any) -> ContextParallel:
        """Ranges that give each process as many tokens and the same share of the blocks that the mask lists, within 1%
        where its rows of blocks allow: less than two ranges a process on the average.

        Args:
            group: as of the class.
            block_mask: of the whole sequence, the same in all processes; its counts are read, which waits for a GPU.
            options: ``way`` and ``sum_captured``, as of the class.

        Raises:
            ValueError: as of the class; the mask has no blocks.
        """
        world = dist.get_world_size(process_group(NAME, group))
        rank = dist.get_rank(process_group(NAME, group))
        return cls(group, balanced_ranges(block_mask, world)[rank], **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self  # with a copied module: its processes are the same

    def __repr__(self) -> str:
        return f"{NAME}({self.placement!r}, rank {self.rank} of {self.world}, length={self.length}, way={self.way!r})"

    def ranges(self, length: int | None = None) -> tuple[Ranges, ...]:
        """Which positions of [0, length) each process has, by rank. `length` may be left out where it is known."""
        length = self._known(length)
        if self._ranges is not None:
            return tuple(self._ranges)
        return contiguous(length, self.world) if self.placement == "contiguous" else zigzag(length, self.world)

    def whole(self, part: int) -> int:
        """The whole length, from that of this process's part."""
        if self.length is not None:
            return self.length
        if self.placement == "zigzag" and part % 2:
            raise ValueError(
                f"flex_attention: with placement='zigzag' each process must have two chunks of one length, but got "
                f"{part} positions: give ContextParallel(length=...)"
            )
        return part * self.world

    def positions(self, length: int | None = None, device: Device | None = None) -> Tensor:
        """Which positions this process has, int64: for rotary embeddings, and to index a whole batch."""
        return indices_of(self.ranges(length)[self.rank], device)

    def permutation(self, length: int | None = None, device: Device | None = None) -> Tensor:
        """The positions of all processes, in the order of their ranks, int64. Where parts are contiguous chunks of
        ``x[:, permutation]``, as a DTensor's are, each process has those of this placement."""
        return indices_of(tuple(itertools.chain.from_iterable(self.ranges(length))), device)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This process's part of a tensor that all have, along its sequence `dim`: tokens, targets, positions."""
        return cut(tensor, dim, self.ranges(tensor.shape[dim])[self.rank])

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """All of a tensor, in the sequence's order, from the parts of all processes, which all must call this. Its
        gradient is the part's own, of what this process did with the whole."""
        length = self._known(self.whole(tensor.shape[dim]))
        return _Unshard.apply(self, tensor, dim % tensor.dim(), length)

    def block_mask(
        self,
        mask_mod: Callable[..., Any] | ScoreMod,
        B: int | None,
        H: int | None,
        length: int | None = None,
        *,
        device: Device,
        block_size: int = 128,
    ) -> BlockMask:
        """The block mask of this process's queries and all keys, for ``flex_attention(..., context_parallel=self)``. No
        process makes the others' rows; :func:`fusegrad.create_block_mask` makes them.

        Args:
            mask_mod: ``(b, h, q_idx, kv_idx) -> bool`` of positions in the whole sequence.
            B, H, device, block_size: as there.
            length: S, where the class does not know it.

        Raises:
            ValueError: block_size does not divide the lengths of this process's ranges but the last.
        """
        length = self._known(length)
        return own_block_mask(self.ranges(length)[self.rank], mask_mod, B, H, length, device, block_size)

    def _known(self, length: int | None) -> int:
        known = self.length if length is None else length
        if known is None:
            raise ValueError(f"{NAME}: length must be given here or to the class, but got None")
        if self.length is not None and known != self.length:
            raise ValueError(f"{NAME}: length must be {self.length}, as of the class, but got {known}")
        return known


def _pairs(placement: Any) -> Any:
    """Ranges as tuples that can be told; what is no pair is told as it is described."""
    try:
        return tuple((first, last) for first, last in placement)
    except (TypeError, ValueError):
        return ("no pairs", repr(placement)[:80])


def _check(rank: int, placement: Any, length: Any, way: Any, sum_captured: Any) -> None:
    where = f"in rank {rank}"
    if isinstance(placement, str):
        if placement not in _PLACEMENTS:
            raise ValueError(
                f"{NAME}: placement must be 'contiguous', 'zigzag' or a list of ranges, but got {placement!r} {where}"
            )
    else:
        for pair in placement:
            right = isinstance(pair, tuple) and all(type(p) is int for p in pair) and 0 <= pair[0] <= pair[1]
            if not right:
                raise ValueError(
                    f"{NAME}: placement's ranges must be pairs of whole numbers with 0 <= start <= stop, "
                    f"but got {placement} {where}"
                )
    if length is not None and (type(length) is not int or length < 0):
        raise ValueError(f"{NAME}: length must be a whole number >= 0 or None, but got {length!r} {where}")
    if way not in _WAYS:
        raise ValueError(f"{NAME}: way must be 'auto', 'gather' or 'ring', but got {way!r} {where}")
    if type(sum_captured) is not bool:
        raise ValueError(f"{NAME}: sum_captured must be True or False, but got {sum_captured!r} {where}")


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: ContextParallel, tensor: Tensor, dim: int, length: int) -> Tensor:
        everyone = context.ranges(length)
        own = sizes_of(everyone)[context.rank]
        if tensor.shape[dim] != own:
            raise ValueError(
                f"{NAME}.unshard: tensor must have this process's {own} positions in dimension {dim}, but got "
                f"{tensor.shape[dim]}"
            )
        ctx.cut, ctx.dim = everyone[context.rank], dim
        return gathered(context, tensor, dim, everyone)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        return None, cut(grad, ctx.dim, ctx.cut), None, None


def gathered(context: ContextParallel, tensor: Tensor, dim: int, everyone: Sequence[Ranges]) -> Tensor:
    """All processes' parts in the order of the sequence; the sequence lies outermost in memory."""
    sizes = sizes_of(everyone)
    rows = tensor.movedim(dim, 0).contiguous()
    if context.world == 1:
        whole = rows
    else:
        largest = max(sizes)
        if rows.shape[0] < largest:  # a collective has one size for all
            rows = torch.cat([rows, rows.new_zeros(largest - rows.shape[0], *rows.shape[1:])])
        whole = rows.new_empty(context.world * largest, *rows.shape[1:])
        if whole.numel():
            dist.all_gather_into_tensor(whole, rows, group=context.group)
        whole = ordered(whole, everyone, largest)
    return whole.movedim(0, dim)
