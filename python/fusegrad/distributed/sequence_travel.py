"""Keys, values and sums of their gradients on their way around a ring of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .sequence import ContextParallel

__all__ = ["Exchange", "Layout"]


class Layout:
    """Keys and values of a part in one piece of memory, as large as the largest part's."""

    def __init__(self, key: Tensor, value: Tensor, largest: int) -> None:
        self.like = key
        self.heads = key.shape[0], key.shape[1]
        self.widths = key.shape[3], value.shape[3]
        self.size = largest * self.heads[0] * self.heads[1] * sum(self.widths)

    def packed(self, key: Tensor, value: Tensor) -> Tensor:
        flat = key.new_empty(self.size)
        for to, what in zip(self.views(flat, key.shape[2]), (key, value), strict=True):
            to.copy_(what)
        return flat

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Numbers behind a shorter part's are any."""
        return self.like.new_empty(self.size, dtype=dtype)

    def views(self, flat: Tensor, length: int) -> list[Tensor]:
        made, at = [], 0
        for width in self.widths:
            count = self.heads[0] * self.heads[1] * length * width
            made.append(flat[at : at + count].view(*self.heads, length, width))
            at += count
        return made


class Exchange:
    """Sends a tensor to the next process and receives one like it from the process before."""

    def __init__(self, context: ContextParallel, flat: Tensor) -> None:
        self.sent = self.received = flat
        self.works: list[Any] = []
        if flat.numel() == 0 or context.world == 1:
            return
        self.received = torch.empty_like(flat)
        group = context.group
        to = dist.get_global_rank(group, (context.rank + 1) % context.world)
        source = dist.get_global_rank(group, (context.rank - 1) % context.world)
        operations = [
            dist.P2POp(dist.isend, flat, to, group),
            dist.P2POp(dist.irecv, self.received, source, group),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
