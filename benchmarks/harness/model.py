"""The vocabulary of the benchmarks: cases, problems, implementations, measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    """One op at one size. `sizes` maps the letters N, V, H to numbers."""

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    device: str

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def label(self) -> str:
        return " ".join(f"{letter}{size}" for letter, size in self.sizes) + f" {self.dtype}"


@dataclass
class Problem:
    """The inputs of one case.

    activation: [N, V] logits or [N, H] hidden states, the tensor that in-place implementations overwrite.
    weight: [V, H] of the linear losses. upstream_rows: [N], the upstream gradient of reduction 'none'.
    constants: what else a call takes, without a gradient, such as a teacher's tensors.
    """

    activation: Tensor
    target: Tensor
    upstream_rows: Tensor
    weight: Tensor | None = None
    pristine: Tensor | None = None
    constants: tuple[Tensor, ...] = ()

    def others(self, weight: Tensor | None) -> list[Tensor]:
        """What follows the activation in a call, with this weight."""
        return [*([] if weight is None else [weight]), self.target, *self.constants]

    def keep_copy(self) -> None:
        if self.pristine is None:
            self.pristine = self.activation.clone()

    def restore(self) -> None:
        if self.pristine is not None:
            self.activation.copy_(self.pristine)


@dataclass(frozen=True)
class Implementation:
    """One way to compute the loss: `loss(activation, [weight,] target, *constants)`.

    floor_scale: its floor, in units of the case's measured floor. upstream: a number, or 'rows' for a vector.
    overwrites: it destroys its activation, which is restored (untimed) before every repetition.
    frozen_weight: the weight gets no gradient. backward_alone: the forward is not timed. variant: what the reference
    has to compute, where an op's implementations differ in that.
    """

    name: str
    loss: Callable[..., Tensor]
    ours: bool = False
    backward: bool = True
    upstream: float | str = 1.0
    overwrites: bool = False
    floor_scale: float = 1.0
    essential: bool = True
    frozen_weight: bool = False
    backward_alone: bool = False
    variant: Any = None


@dataclass(frozen=True)
class Unavailable:
    """An implementation that cannot be timed here, and why."""

    name: str
    reason: str


@dataclass
class Measurement:
    """What was found about one implementation in one case; None where it was not measured."""

    name: str
    ours: bool
    ms: float | None = None
    round_ms: list[float] = field(default_factory=list)
    floor_ms: float | None = None
    floor_ratio: float | None = None
    tokens_per_s: float | None = None
    peak_mib: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value not in (None, [], {})}


@dataclass
class CaseResult:
    case: Case
    floor_name: str
    floor_ms: float | None
    measurements: list[Measurement]
    unavailable: list[Unavailable]

    def get(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)
