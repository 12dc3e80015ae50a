"""Reads at places that other reads give, and the gradients of what they read, on a GPU."""

from __future__ import annotations

import torch
from attention_reference import dense, over_all
from coverings import pairs_of
from flex_cuda_support import DEVICE, ON_EACH_FAMILY, inputs, relative
from fusegrad import flex_attention
from reads_of_reads import BATCHES, CHAINS, HEADS, ROWS, Chain, places, same_document
from torch.nn.attention.flex_attention import create_block_mask

pytestmark = ON_EACH_FAMILY


@pairs_of(
    {
        "dtype": [torch.float32, torch.int32, torch.int64],
        "deterministic": [False, True],
        "masked": [False, True],
        "lengths": [(300, 260), (130, 512), (49, 60), (20, 200)],
        "size": [32, 64, 128, 192],
        "chain": CHAINS,
    },
    tests=12,
)
def test_gradients(
    chain: Chain, size: int, lengths: tuple[int, int], masked: bool, deterministic: bool, dtype: torch.dtype
) -> None:
    m, n = lengths
    x = places(dtype, m, n)
    given = [*inputs(BATCHES, HEADS, m, n, size, hkv=2), (0.5 * torch.randn(ROWS, HEADS)).requires_grad_()]
    upstream = torch.randn_like(given[0])
    mask_mod = same_document(x, m)
    mask = create_block_mask(mask_mod, None, None, m, n, device=DEVICE) if masked else None
    options = {"enable_gqa": True, "deterministic": deterministic}
    out = flex_attention(*given[:3], chain(x, m, given[3]), mask, **options)
    got = torch.autograd.grad(out, given, upstream)
    wide = [t.detach().double().requires_grad_() for t in given]
    takes_part = over_all(mask_mod, (1, 1, m, n)) if masked else None
    expected = dense(*wide[:3], chain(x, m, wide[3]), takes_part).out
    assert relative(out, expected) <= 1e-2
    for ours, truth in zip(got, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2
