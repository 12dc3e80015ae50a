"""Block masks of random mask_mods, whose values PyTorch computes in float64: bounds decide no block wrongly.

FUSEGRAD_MASK_EXAMPLES sets their number.
"""

from __future__ import annotations

import math
import os

import pytest
import test_score_mod
import torch
from block_masks import blocks_of
from fusegrad import ScoreMod, create_block_mask
from fusegrad.score_mod import split_scalars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DEVICES
from torch import Tensor

EXAMPLES = {"cpu": int(os.environ.get("FUSEGRAD_MASK_EXAMPLES", "200")), "cuda": 40}


def check(p: test_score_mod.Program, block: tuple[int, int], device: str) -> None:
    bools = [v for v in p.values if v[1].dtype == torch.bool and v[0].startswith("%")]
    if not bools:
        numbers = [v for v in p.values if v[1].dtype != torch.bool]
        bools = [p.apply("gt", numbers[-1], numbers[-2])]
    name, value = bools[-1]
    buffers = [b.detach().float() if b.is_floating_point() else b for b in p.buffers]
    mod = ScoreMod(p.text("mask_mod", name), [b.to(device) for b in buffers], p.scalars)
    same(mod, value.expand(p.sizes), block, device)


def same(mod: ScoreMod, allowed: Tensor, block: tuple[int, int], device: str) -> None:
    ours = create_block_mask(mod, *allowed.shape, device=device, block_size=block)
    partial, full = blocks_of(allowed, block)
    for blocks, count, index in (
        (partial, ours.kv_num_blocks, ours.kv_indices),
        (full, ours.full_kv_num_blocks, ours.full_kv_indices),
    ):
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        assert torch.equal(count.cpu(), blocks.sum(-1, dtype=torch.int32)), mod
        assert torch.equal(index.cpu(), order), mod


@pytest.mark.parametrize("device", DEVICES)
def test_random_masks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Values near a jump may fall on either side of it in float32.
    monkeypatch.setattr(test_score_mod, "MARGIN", 1e-4)
    monkeypatch.setattr(test_score_mod, "LARGEST", 1e3)

    @settings(max_examples=EXAMPLES[device], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(test_score_mod.programs("mask_mod", torch.float32), st.sampled_from([(2, 2), (4, 3), (1, 64)]))
    def run(program: test_score_mod.Program, block: tuple[int, int]) -> None:
        check(program, block, device)

    run()


@pytest.mark.parametrize("scale", [1.0, 1e10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lists_are_those_of_the_pairs(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For values of any size, to the last bit."""
    monkeypatch.setattr(test_score_mod, "MARGIN", 0)
    monkeypatch.setattr(test_score_mod, "LARGEST", math.inf)
    if dtype == torch.float16 and scale > 1:
        scale = 1e4

    @settings(max_examples=EXAMPLES["cpu"] // 4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(test_score_mod.programs("mask_mod", torch.float32), st.sampled_from([(2, 2), (4, 3), (1, 64)]))
    def run(p: test_score_mod.Program, block: tuple[int, int]) -> None:
        bools = [v for v in p.values if v[1].dtype == torch.bool and v[0].startswith("%")]
        numbers = [v for v in p.values if v[1].dtype != torch.bool]
        name, _ = bools[-1] if bools else p.apply("gt", numbers[-1], numbers[-2])
        buffers = [(b.detach() * scale).to(dtype) if b.is_floating_point() else b for b in p.buffers]
        mod = ScoreMod(p.text("mask_mod", name), buffers, p.scalars)
        scalars = split_scalars(p.scalars)
        try:
            pairs = torch.ops.fusegrad.evaluate_mask_mod(mod.text, list(p.sizes), buffers, *scalars)
        except IndexError:
            return
        same(mod, pairs, block, "cpu")

    run()
