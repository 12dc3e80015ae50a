"""Calls of every kind have a plan on GPUs with 99 KiB of shared memory a CTA, as on those with more."""

from __future__ import annotations

import itertools

import pytest
import score_mods
import torch
from coverings import rows_of
from fusegrad import _C, trace_mask_mod, trace_score_mod
from fusegrad.compile import _captured
from needs import needs_flex_compiler

pytestmark = [needs_flex_compiler, pytest.mark.cpu_only]

B, H, S = 2, 4, 333
# Where no tile fits 99 KiB: the direction and the head size, in float32.
TOO_LARGE = {("backward", 256), ("pair_tangents", 192), ("pair_tangents", 256)}


@rows_of("case", score_mods.CASES, tests=4)
def test_every_call_has_a_plan(case: score_mods.Case) -> None:
    score_mod, mask_mod, _ = case.make(B, H, 64, 64, torch.float32, torch.Generator().manual_seed(0))
    score = None if score_mod is None else trace_score_mod(score_mod)
    mask = None if mask_mod is None else trace_mask_mod(mask_mod)
    buffers = () if score is None else score.buffers
    mods = dict(zip(("score_mod", "score_mod_buffers", "score_mod_scalars"), _captured(score), strict=True))
    mods |= dict(zip(("mask_mod", "mask_mod_buffers", "mask_mod_scalars"), _captured(mask), strict=True))
    wants = [True] * 3 + [b.requires_grad for b in buffers]
    directions = (
        {"direction": "forward"},
        {"direction": "backward", "needs_grad": wants, "deterministic": False},
        {"direction": "backward", "needs_grad": wants, "deterministic": True},
        {"direction": "tangents", "buffer_tangents": [b.is_floating_point() for b in buffers]},
        {"direction": "pair_tangents", "grad_out_tangent": True},
    )
    common = {**mods, "block_size": (128, 128) if mask else None, "full_float32": True, "training": True}
    for architecture, dtype, size in itertools.product(
        ("86", "120", "90a"), ("bfloat16", "float32"), (16, 64, 96, 128, 192, 256)
    ):
        for one in directions:
            fields = {**common, **one, "dtype": dtype, "shape": [B, H, S, B, H, S, size, size]}
            fields["dropout"] = one.get("deterministic", False)

            def plan(fields: dict = fields, architecture: str = architecture) -> object:
                return _C.flex.call_plan(fields, architecture, 84)

            if architecture != "90a" and dtype == "float32" and (one["direction"], size) in TOO_LARGE:
                with pytest.raises(RuntimeError, match=r"tiles fit the GPU's 101376 bytes of shared memory"):
                    plan()
            else:
                plan()
