"""What the tests of flex_attention's CUDA kernels share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = "cuda"
# For a module whose tests run on the GPU, once for every family of kernels that it has, tensors being made there.
ON_EACH_FAMILY = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("made_on_the_gpu", "each_flex_family"),
]


def causal(b, h, q, kv):
    return q >= kv


def relative(ours: Tensor, truth: Tensor) -> float:
    ours, truth = ours.detach().double(), truth.detach().double()
    return ((ours - truth).norm() / truth.norm()).item()


def inputs(
    b: int, h: int, m: int, n: int, d: int, dtype: torch.dtype = torch.bfloat16, hkv: int | None = None, e: int = 0
) -> list[Tensor]:
    shapes = [(b, h, m, d), (b, hkv or h, n, d), (b, hkv or h, n, e or d)]
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
