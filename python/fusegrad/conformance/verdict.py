"""What came of a case, and how far a result may be off."""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

__all__ = ["ACCURACY", "TOLERANCE", "Verdict", "Wrong", "check", "distance"]


class Verdict(str, enum.Enum):
    RIGHT = "right"
    RAISES = "raises"
    WRONG = "silently wrong"
    CRASHES = "crashes"
    NOT_OFFERED = "not offered"


# The root mean square of the error by that of the truth. More than rounding explains, products in TF32 included.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Rule 12: of the error of PyTorch's own ops in the same dtype.
ACCURACY = 1.5


class Wrong(Exception):
    """A result without an error that is not what it must be; `error` says by how much, where that is a number."""

    def __init__(self, what: str, error: float | None = None) -> None:
        super().__init__(what)
        self.error = error


def distance(value: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference by that of the truth; infinite where one is finite and the other is not."""
    value, truth = value.detach().double().cpu(), truth.detach().double().cpu()
    if truth.numel() == 0:
        return 0.0
    finite = truth.isfinite()
    rest, expected = (torch.where(finite, 0.0, t.nan_to_num(7.0)) for t in (value, truth))
    if not torch.equal(rest, expected):
        return math.inf
    if not value[finite].isfinite().all():
        return math.inf
    if not finite.any():
        return 0.0
    error = (value - truth)[finite].square().mean().sqrt().item()
    scale = truth[finite].square().mean().sqrt().item()
    return error / scale if scale > 1e-30 else error


def check(what: str, value: Tensor | None, truth: Tensor, dtype: torch.dtype) -> None:
    """Raises Wrong where the value is not the truth, rounded in the dtype."""
    if value is None:
        raise Wrong(f"{what}: there is none")
    if value.shape != truth.shape:
        raise Wrong(f"{what}: shape {tuple(value.shape)} instead of {tuple(truth.shape)}")
    error = distance(value, truth)
    if not error <= TOLERANCE[dtype]:
        raise Wrong(what, error)
