"""Block masks of random mask_mods, whose values PyTorch computes in float64: bounds decide no block wrongly.

FUSEGRAD_MASK_EXAMPLES sets their number.
"""

from __future__ import annotations

import os

import pytest
import test_score_mod
import torch
from block_masks import blocks_of
from fusegrad import ScoreMod, create_block_mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DEVICES

EXAMPLES = {"cpu": int(os.environ.get("FUSEGRAD_MASK_EXAMPLES", "200")), "cuda": 40}


def check(p: test_score_mod.Program, block: tuple[int, int], device: str) -> None:
    bools = [v for v in p.values if v[1].dtype == torch.bool and v[0].startswith("%")]
    if not bools:
        numbers = [v for v in p.values if v[1].dtype != torch.bool]
        bools = [p.apply("gt", numbers[-1], numbers[-2])]
    name, value = bools[-1]
    buffers = [b.detach().float() if b.is_floating_point() else b for b in p.buffers]
    mod = ScoreMod(p.text("mask_mod", name), [b.to(device) for b in buffers], p.scalars)
    ours = create_block_mask(mod, *p.sizes, device=device, block_size=block)
    partial, full = blocks_of(value.expand(p.sizes), block)
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
