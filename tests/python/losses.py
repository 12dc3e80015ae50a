"""Both losses behind one face, for tests of behaviour that every op has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusegrad
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Loss:
    """`ours(activation, **options)` and `eager(activation, **options)`; the other arguments are fixed by `make`."""

    name: str
    ours: Callable[..., Any]
    eager: Callable[..., Tensor]
    shape: tuple[int, int]
    target: Tensor
    weight: Tensor | None = None

    def __str__(self) -> str:
        return self.name


NAMES = ["cross_entropy", "linear_cross_entropy"]


def make(name: str, device: str, rows: int = 8, dtype: torch.dtype = torch.float32) -> Loss:
    """rows x 8 activations, 8 classes."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 8, (rows,), generator=generator).to(device)
    if name == "cross_entropy":
        return Loss(
            name,
            lambda x, **o: fusegrad.cross_entropy(x, target, **o),
            lambda x, **o: F.cross_entropy(x, target, **o),
            (rows, 8),
            target,
        )
    weight = torch.randn(8, 8, generator=generator).to(device, dtype).requires_grad_()
    return Loss(
        name,
        lambda x, **o: fusegrad.linear_cross_entropy(x, weight.to(x.dtype), target, **o),
        lambda x, **o: F.cross_entropy(F.linear(x, weight.to(x.dtype)), target, **o),
        (rows, 8),
        target,
        weight,
    )
