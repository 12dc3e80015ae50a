"""Low parts of outputs of 16 bits in PyTorch: csrc/attention/low_part.h says what they are."""

from __future__ import annotations

import torch
from torch import Tensor


def _unit(rounded: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit of low parts at `rounded`, numbers of dtype in float32."""
    info = torch.finfo(dtype)
    power = (rounded.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min(info.smallest_normal)
    return power * (info.eps / 252)


def with_low(out: Tensor, low: Tensor) -> Tensor:
    """The sum of out and its low part, in float32."""
    wide = out.float()
    return wide + low * _unit(wide, out.dtype)


def low_part(wide: Tensor, rounded: Tensor) -> Tensor:
    """The low part of `wide`, float32, which `rounded` has in 16 bits."""
    near = rounded.float()
    units = ((wide - near) / _unit(near, rounded.dtype)).nan_to_num_(0, 0, 0)
    return units.round_().clamp_(-126, 126).to(torch.int8)
