"""Whether all processes make the same call. Each tells the others a few numbers that stand for what it was given,
before anything else is sent: a difference is an error in all of them, and no collective waits for one that does not
come."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._load import check_targets_enabled

__all__ = ["agree", "fingerprint"]

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACE, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# What a process tells that cannot take part, in place of its numbers.
_FAILED = -1
# Calls that were compared before, by group: the tensor to send.
_known: dict[tuple[Any, ...], Tensor] = {}


def agree(
    op: str,
    group: Any,
    device: torch.device,
    given: dict[str, Any],
    failed: bool = False,
    *,
    who: str = "of context_parallel",
    again: bool = True,
) -> Tensor | None:
    """Compares what the processes of the group were `given`, whose names are the same in all.

    Args:
        given: printed the same where it is the same.
        failed: this process cannot make the call, and will raise an error of its own after this.
        who: which processes, for messages.
        again: False where no other call is given the same.

    Returns:
        None where all is known to be the same; on a GPU, where a call like it was compared before, a 0-d bool tensor:
        whether something differs. Nothing waits for the GPU then.

    Raises:
        ValueError: in all processes, with the name of what differs.
    """
    numbers = [_FAILED if failed else 0, *map(_number, given.values())]
    key = (id(group), device, *numbers)
    mine = _known.get(key)
    seen = mine is not None
    if mine is None:
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(numbers))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    everyone = everyone.view(-1, len(numbers))
    if seen and device.type != "cpu" and not check_targets_enabled():
        return (everyone != mine).any()
    told = everyone.tolist()
    failures = [rank for rank, its in enumerate(told) if its[0] == _FAILED]
    if failures and not failed:
        raise RuntimeError(
            f"{op}: all processes {who} must make the call, but got an error of its own in rank "
            f"{', '.join(map(str, failures))}"
        )
    if failed:
        return None
    for place, (name, value) in enumerate(given.items(), 1):
        different = [rank for rank, its in enumerate(told) if its[place] != told[0][place]]
        if different:
            raise ValueError(
                f"{op}: {name} must be the same in all processes {who}, but got another in rank "
                f"{', '.join(map(str, different))} than in rank 0; in this one {str(value)[:400]}"
            )
    if again:
        if len(_known) >= 1024:
            _known.clear()
        _known[key] = mine
    return None


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that other bits, or the same in another order, change: 0-d, int64."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = tensor.contiguous().view(_INTEGER[tensor.element_size()])
    bits = tensor.reshape(-1).to(torch.int64)
    return _mixed(bits + _PLACE * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()


def _mixed(bits: Tensor) -> Tensor:
    """splitmix64, in int64, which wraps around."""
    bits = bits * _FIRST
    bits = (bits ^ (bits >> 31)) * _SECOND
    return bits ^ (bits >> 29)


def _number(value: Any) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
