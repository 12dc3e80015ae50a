"""The ops of the compatibility table: each as a program of an upstream op and a loss, with its truth in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import fusegrad
import torch
import torch.nn.functional as F
from fusegrad import reference
from torch import Tensor

HIDDEN, CLASSES = 8, 16
UPSTREAM = 0.37  # not 1: a gradient that was scaled in the forward must be scaled again


@dataclass(frozen=True)
class Op:
    """`draw(rows, device, dtype)` gives leaves, of which the first `overwritable` go through the upstream op, and
    constants; `ours` and `eager` take them all and return a number."""

    name: str
    overwritable: int
    draw: Callable[[int, str, torch.dtype], tuple[list[Tensor], list[Tensor]]]
    ours: Callable[..., Tensor]
    eager: Callable[..., Tensor]

    def __str__(self) -> str:
        return self.name


def widest(device: str) -> torch.dtype:
    """The dtype of the least rounding that the ops take there."""
    return torch.float64 if device == "cpu" else torch.float32


@dataclass(frozen=True)
class Case:
    """A cell's left side: an op, in place or not, on a device.

    `upstream` stands before the op; by default one that has not saved what the op may overwrite.
    """

    op: Op
    inplace: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    rows: int = 12
    upstream: Callable[[Tensor], Tensor] = lambda x: x * 0.5

    def __str__(self) -> str:
        return f"{self.op.name}{'-inplace' if self.inplace else ''}"

    def draw(self, rows: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves that require grad, and constants; the same each time."""
        torch.manual_seed(0)
        leaves, constants = self.op.draw(rows or self.rows, self.device, self.dtype)
        return [t.requires_grad_() for t in leaves], constants

    def activations(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.upstream(t) if i < self.op.overwritable else t for i, t in enumerate(tensors)]

    def loss(self, activations: Sequence[Tensor]) -> Tensor:
        return UPSTREAM * self.op.ours(*activations, inplace=self.inplace)

    def program(self, *tensors: Tensor) -> Tensor:
        """Leaves and constants to the loss."""
        return self.loss(self.activations(tensors))

    def plain(self) -> Case:
        """The same by PyTorch's own ops."""

        def eager(*tensors: Tensor, inplace: bool) -> Tensor:
            return self.op.eager(*tensors)

        return replace(self, op=replace(self.op, ours=eager), inplace=False)

    def truth(self, rows: int | None = None) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients in float64, of the same rounded inputs."""
        leaves, constants = self.draw(rows)
        leaves = [t.detach().double().requires_grad_() for t in leaves]
        constants = [t.double() if t.is_floating_point() else t for t in constants]
        loss = self.plain().program(*leaves, *constants)
        return loss.detach(), list(torch.autograd.grad(loss, leaves))


def _normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def _classes(rows: int, device: str) -> Tensor:
    target = torch.randint(0, CLASSES, (rows,))
    target[1] = -100
    return target.to(device)


def _draw_cross_entropy(rows: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    return [_normal(device, dtype, rows, CLASSES)], [_classes(rows, device)]


def _draw_linear_cross_entropy(rows: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [_normal(device, dtype, *shape) for shape in ((rows, HIDDEN), (CLASSES, HIDDEN), (CLASSES,))]
    return leaves, [_classes(rows, device)]


def _draw_jsd(rows: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [_normal(device, dtype, rows, CLASSES), _normal(device, dtype, rows, CLASSES)]
    return leaves, [_classes(rows, device)]


def _draw_linear_jsd(rows: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    shapes = ((rows, HIDDEN), (CLASSES, HIDDEN), (rows, HIDDEN), (CLASSES, HIDDEN))
    student_input, student_weight, *teacher = (_normal(device, dtype, *shape) for shape in shapes)
    return [student_input, student_weight], [*teacher, _classes(rows, device)]


def _draw_flex_attention(rows: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [_normal(device, dtype, 2, 2, rows, HIDDEN) for _ in range(3)]
    bias, table = _normal(device, dtype, rows), _normal(device, dtype, 4)
    return [*leaves, bias, table], [torch.randint(0, 4, (rows,)).to(device), _normal(device, dtype, 2, 2, rows, HIDDEN)]


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, table: Tensor, kind: Tensor, w: Tensor, *, inplace: bool
) -> Tensor:
    """A causal score_mod that reads two captured tensors, one of them through a captured index."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx >= kv_idx, score * table[kind[q_idx]] + bias[kv_idx], -torch.inf)

    # For bits that are compared: by default sums on CUDA come in any order.
    how = {"scale": HIDDEN**-0.5, "inplace": inplace, "deterministic": True}
    out = fusegrad.flex_attention(query, key, value, score_mod, **how)
    assert isinstance(out, Tensor)
    return (out * w).sum()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, table: Tensor, kind: Tensor, w: Tensor
) -> Tensor:
    score = query @ key.mT / query.shape[-1] ** 0.5 * table[kind][:, None] + bias
    allowed = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).tril()
    return (score.masked_fill(~allowed, -torch.inf).softmax(-1) @ value * w).sum()


OPS = [
    Op(
        "cross_entropy",
        1,
        _draw_cross_entropy,
        lambda x, target, inplace: fusegrad.cross_entropy(x, target, label_smoothing=0.1, inplace=inplace),
        lambda x, target: F.cross_entropy(x, target, label_smoothing=0.1),
    ),
    Op(
        "linear_cross_entropy",
        1,
        _draw_linear_cross_entropy,
        lambda x, w, b, target, inplace: fusegrad.linear_cross_entropy(x, w, target, linear_bias=b, inplace=inplace),
        lambda x, w, b, target: F.cross_entropy(F.linear(x, w, b), target),
    ),
    Op(
        "jsd",
        1,
        _draw_jsd,
        lambda x, y, labels, inplace: fusegrad.jsd(x, y, labels=labels, hard_weight=0.5, inplace=inplace),
        lambda x, y, labels: reference.jsd(x, y, labels=labels, hard_weight=0.5)[0],
    ),
    Op(
        "linear_jsd",
        1,
        _draw_linear_jsd,
        lambda x, w, y, v, labels, inplace: fusegrad.linear_jsd(
            x, w, y, v, labels=labels, hard_weight=0.5, temperature=2.0, inplace=inplace
        ),
        lambda x, w, y, v, labels: reference.linear_jsd(x, w, y, v, labels=labels, hard_weight=0.5, temperature=2.0)[0],
    ),
    Op("flex_attention", 3, _draw_flex_attention, _flex_attention, _attention),
]
