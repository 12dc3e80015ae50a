"""Low parts of outputs of 16 bits in PyTorch: csrc/attention/low_part.h says what they are."""

from __future__ import annotations

import torch
from torch import Tensor


def with_low(out: Tensor, low: Tensor) -> Tensor:
    """The sum of out and its low part, in float32."""
    wide, info = out.float(), torch.finfo(out.dtype)
    power = (wide.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min(info.smallest_normal)
    return wide + low * (power * (info.eps / 252))
