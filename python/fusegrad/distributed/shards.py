"""Who has which part of the vocabulary, whether all processes make the same call, and tensors of
torch.distributed.tensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _sharding
from .._sharding import is_dtensor

__all__ = ["VocabParallel", "agree", "process_group"]


class KeptGroup:
    """The attribute that is an object's process group, which torch.distributed alone keeps.

    A reference of the object's would keep a gloo group's threads alive after ``destroy_process_group``, and one of them
    that lets go of a tensor while Python shuts down aborts the process.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        reference = instance._group
        group = None if reference is None else reference()
        if group is None and reference is not None:
            raise RuntimeError(f"{owner.__name__}: its process group must be there, but has been destroyed")
        return group

    def __set__(self, instance: Any, group: Any) -> None:
        instance._group = None if group is None else weakref.ref(group)


class VocabParallel(_sharding.VocabParallel):
    """The part [start, stop) of the vocabulary that this process has, and the group of processes that have the others.

    Made by all processes of the group together: they tell each other their parts, once. In a call of a loss with
    ``vocab_parallel``, the logits or the rows of a head's weight and bias are this part, class weights are the whole
    vocabulary's, and all else (hidden states, targets, options) is the same in all processes of the group.

    Args:
        group: a process group that this process belongs to, a device mesh of one dimension, or None: all processes.
        start, stop: the parts of all processes must be [0, V) without gaps and overlaps; they may differ in size, be in
            any order, and be empty.

    Attributes:
        vocab: V.
        bounds: (start, stop) of each process of the group, by its rank there.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: in all processes of the group, where the parts do not fit or this process is not in the group.
    """

    bounds: tuple[tuple[int, int], ...]
    rank: int
    start: int
    stop: int
    vocab: int
    group_name: str
    group = KeptGroup()

    def __init__(self, group: Any, start: int, stop: int) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "VocabParallel: torch.distributed must be initialised (torch.distributed.init_process_group), "
                "but got no default group"
            )
        group = process_group("VocabParallel", group)
        # What came is told before it is checked: an error in one process alone would leave the others waiting.
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, (start, stop), group=group)
        for rank, bound in enumerate(told):
            if not all(type(b) is int for b in bound) or not 0 <= bound[0] <= bound[1]:
                raise ValueError(
                    "VocabParallel: start and stop must be whole numbers with 0 <= start <= stop, "
                    f"but got {bound[0]!r} and {bound[1]!r} in rank {rank}"
                )
        end = 0
        for first, last in sorted(told):
            if first != end:
                raise ValueError(
                    f"VocabParallel: the parts must be [0, V) without gaps and overlaps, but got {told}: "
                    f"{'nothing covers' if first > end else 'twice'} [{min(first, end)}, {max(first, end)})"
                )
            end = last
        self._set(group, told)

    @classmethod
    def _of(cls, group: Any, bounds: list[tuple[int, int]]) -> VocabParallel:
        made = cls.__new__(cls)
        made._set(group, bounds)
        return made

    def _set(self, group: Any, bounds: Sequence[tuple[int, int]]) -> None:
        self.group = group
        self.bounds = tuple(bounds)
        self.group_name = group.group_name
        self._bounds = tuple(bound for part in self.bounds for bound in part)
        self.rank = dist.get_rank(group)
        self.start, self.stop = self.bounds[self.rank]
        self.vocab = max(stop for _, stop in self.bounds)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def world(self) -> int:
        return len(self.bounds)

    def __repr__(self) -> str:
        return f"VocabParallel([{self.start}, {self.stop}) of {self.vocab}, rank {self.rank} of {self.world})"

    def told(self) -> tuple[str, int, tuple[int, ...]]:
        """What the ops take: the group's name, this process's rank there, and the bounds one after another."""
        if not torch.compiler.is_compiling():
            assert self.group is not None  # which raises where it has been destroyed
        return self.group_name, self.rank, self._bounds


def process_group(name: str, group: Any) -> Any:
    """What the class `name` was given as its group."""
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):  # a device mesh
        if group.ndim != 1:
            raise ValueError(f"{name}: a device mesh must have one dimension, but got {group}: take a part of it")
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: group must contain this process, but got {group} in rank {dist.get_rank()}")
    return group


def agree(
    op: str,
    who: str,
    group: Any,
    device: torch.device,
    told: dict[str, Any],
    failed: bool,
    tensors: dict[str, Tensor | None] | None = None,
) -> Tensor | None:
    """Raises in all processes where their calls differ, before anything else is sent: no collective waits for one that
    does not come.

    Args:
        who: which processes, for messages.
        device: of what is sent.
        told: what must be the same; the names are in any case.
        failed: this process cannot make the call, and raises an error of its own after this.
        tensors: they too, bit by bit. The host waits for a GPU.

    Returns:
        Without tensors, on a GPU: whether something differs, 0-d bool, which nothing waits for.
    """
    values = {name: value for name, value in (tensors or {}).items() if value is not None}
    world = dist.get_world_size(group)
    different = torch.ops.fusegrad.shards_agree(
        op,
        who,
        [torch.empty(0, device=device)] if not values else [value.detach().to(device) for value in values.values()],
        ",".join(tensors or {}),
        [0 if name in values else -1 for name in tensors or {}],
        # A line each.
        "".join(f"{name}: {str(value).encode('unicode_escape').decode()}\n" for name, value in told.items()),
        failed,
        tensors is None,
        group.group_name,
        dist.get_rank(group),
        [0] * (2 * world),
    )
    return different if different.is_cuda else None


def part_of(op: str, name: str, tensor: Any, dim: int, given: VocabParallel | None) -> VocabParallel:
    """The shards of a DTensor that is sharded along `dim`, which is its vocabulary."""
    from torch.distributed.tensor import Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or not isinstance(placements[0], Shard) or placements[0].dim % tensor.dim() != dim % tensor.dim():
        raise ValueError(
            f"{op}: {name} must be Shard({dim}) on a device mesh of one dimension, but got {placements} on {mesh}"
        )
    world = mesh.size()
    vocab = tensor.shape[dim]
    chunk = -(-vocab // world)
    bounds = [(min(r * chunk, vocab), min((r + 1) * chunk, vocab)) for r in range(world)]
    made = VocabParallel._of(mesh.get_group(), bounds)
    if tensor._local_tensor.shape[dim] != made.size:
        raise ValueError(
            f"{op}: {name} must be sharded evenly, as torch.chunk does, but got {tensor._local_tensor.shape[dim]} "
            f"of {vocab} in rank {made.rank}; give the parts as vocab_parallel=VocabParallel(...) instead"
        )
    if given is not None and given.bounds != made.bounds:
        raise ValueError(f"{op}: vocab_parallel must be the parts of {name}, {made}, but got {given}")
    return given or made


def local_part(tensor: Any) -> Any:
    """This process's part of a sharded DTensor; its gradient is the part's own."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Any) -> Any:
    """All of a tensor in every process. Its gradient is the same in all, so a sharded one takes its part of it without
    another collective."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    everywhere = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=everywhere).to_local(grad_placements=everywhere)
