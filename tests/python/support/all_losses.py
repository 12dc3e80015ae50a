"""All losses behind one face, for tests of behaviour that every op has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusegrad
import torch
import torch.nn.functional as F
from fusegrad import reference
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


NAMES = ["cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd"]
AVERAGE = {"mean": "batchmean"}  # what the divergences call the mean over rows


def divergence(function: Callable[..., Any], labels: Tensor, *fixed: Tensor) -> Callable[..., Any]:
    """`function(x, *fixed)` with the labels' cross entropy mixed in; reduction 'mean' is the one over rows. Other
    losses' options are left out."""

    def call(x: Tensor, *, reduction: str = "mean", z_loss: float = 0.0, **options: Any) -> Any:
        given = [t.to(x.dtype) for t in fixed]
        return function(
            x, *given, labels=labels, hard_weight=0.5, reduction=AVERAGE.get(reduction, reduction), **options
        )

    return call


def make(name: str, device: str, rows: int = 8, dtype: torch.dtype = torch.float32, part: slice = slice(None)) -> Loss:
    """rows x 8 activations, 8 classes; `part` of those rows."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 8, (rows,), generator=generator)[part].to(device)
    if name == "cross_entropy":
        return Loss(
            name,
            lambda x, **o: fusegrad.cross_entropy(x, target, **o),
            lambda x, **o: F.cross_entropy(x, target, **o),
            (rows, 8),
            target,
        )
    teacher = torch.randn(rows, 8, generator=generator)[part].to(device, dtype)
    if name == "jsd":
        return Loss(
            name,
            divergence(fusegrad.jsd, target, teacher),
            divergence(lambda *a, **o: reference.jsd(*a, **o)[0], target, teacher),
            (rows, 8),
            target,
        )
    weight = torch.randn(8, 8, generator=generator).to(device, dtype).requires_grad_()
    if name == "linear_jsd":
        head = torch.randn(8, 8, generator=generator).to(device, dtype)
        return Loss(
            name,
            divergence(
                lambda x, y, v, **o: fusegrad.linear_jsd(x, weight.to(x.dtype), y, v, **o), target, teacher, head
            ),
            divergence(
                lambda x, y, v, **o: reference.linear_jsd(x, weight.to(x.dtype), y, v, **o)[0], target, teacher, head
            ),
            (rows, 8),
            target,
            weight,
        )
    return Loss(
        name,
        lambda x, **o: fusegrad.linear_cross_entropy(x, weight.to(x.dtype), target, **o),
        lambda x, **o: F.cross_entropy(F.linear(x, weight.to(x.dtype)), target, **o),
        (rows, 8),
        target,
        weight,
    )
