"""A bias of pairs beside a mask of keys, on a GPU: rows whose first keys are masked, and whose scores grow later."""

from __future__ import annotations

import math

import torch
from attention_reference import dense
from coverings import pairs_of
from flex_cuda_support import ON_EACH_FAMILY, inputs, relative
from fusegrad import flex_attention
from torch import Tensor

pytestmark = ON_EACH_FAMILY


@pairs_of(
    {
        "masked": [-math.inf, -1e9],
        "growth": [0.0, 60.0, 300.0],
        "lengths": [(512, 512), (200, 300), (64, 520)],
        "size": [32, 64, 128],
        "requires_grad": [False, True],
        "padded": [False, True],
    },
    tests=6,
)
def test_against_a_formula(
    size: int, lengths: tuple[int, int], growth: float, masked: float, requires_grad: bool, padded: bool
) -> None:
    """padded: nothing of some queries reaches a loss, among them all that see no key."""
    # With a size of 32 there is a head for each multiprocessor: the forward takes its tallest tiles.
    h, (m, n) = 4, lengths
    b = torch.cuda.get_device_properties().multi_processor_count // h if size == 32 else 6
    bias = torch.randn(h, m, n)
    bias[:, ::3, n // 2 :] += growth  # beyond 2^64 of the first exponentials, where it is more than 45
    keeps = torch.rand(b, n) < 0.7
    keeps[1, : n // 2] = False
    keeps[2, n - n // 4 :] = False
    keeps[3] = False
    given = [*inputs(b, h, m, n, size), bias.bfloat16().requires_grad_(requires_grad)]

    def score_mod(bias: Tensor):
        return lambda s, b, h, q, kv: torch.where(keeps[b, kv], s + bias[h, q, kv], masked)

    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    out, expected = flex_attention(*given[:3], score_mod(given[3])), dense(*wide[:3], score_mod(wide[3])).out
    assert relative(out, expected) <= 1e-2
    asked = [i for i, t in enumerate(given) if t.requires_grad]
    upstream = torch.randn_like(out)
    if padded:
        upstream[3], upstream[4, :, m // 2 :] = 0, 0
    ours = torch.autograd.grad(out, [given[i] for i in asked], upstream)
    truth = torch.autograd.grad(expected, [wide[i] for i in asked], upstream.double())
    for x, y in zip(ours, truth, strict=True):
        assert relative(x, y) <= 2e-2
