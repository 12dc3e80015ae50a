"""Calls of every kind have a plan on GPUs with 99 KiB of shared memory a CTA, as on those with more."""

from __future__ import annotations

import itertools

import pytest
import score_mods
import torch
from coverings import rows_of
from flex_limits import too_large
from fusegrad import _C, trace_mask_mod, trace_score_mod
from fusegrad.compile import _fields_of
from needs import needs_flex_compiler

pytestmark = [needs_flex_compiler, pytest.mark.cpu_only]

B, H, S = 2, 4, 333
SIZES = [(16, 16), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (64, 512), (512, 512), (576, 512), (64, 0)]
# Larger ones have second derivatives of formulas.
MOST_OF_PAIR_TANGENTS = {"bfloat16": 256, "float32": 128}


@rows_of("case", score_mods.CASES, tests=4)
def test_every_call_has_a_plan(case: score_mods.Case) -> None:
    score_mod, mask_mod, _ = case.make(B, H, 64, 64, torch.float32, torch.Generator().manual_seed(0))
    score = None if score_mod is None else trace_score_mod(score_mod)
    mask = None if mask_mod is None else trace_mask_mod(mask_mod)
    buffers = () if score is None else score.buffers
    mods = _fields_of("score_mod", score) | _fields_of("mask_mod", mask)
    wants = [True] * 3 + [b.requires_grad for b in buffers]
    directions = (
        {"direction": "forward"},
        {"direction": "backward", "needs_grad": wants, "deterministic": False},
        {"direction": "backward", "needs_grad": wants, "deterministic": True},
        {"direction": "tangents", "buffer_tangents": [b.is_floating_point() for b in buffers]},
        {"direction": "pair_tangents", "grad_out_tangent": True},
    )
    common = {**mods, "block_size": (128, 128) if mask else None, "full_float32": True, "training": True}
    for architecture, dtype, sizes, one in itertools.product(
        ("80", "86", "120", "90a"), ("bfloat16", "float32"), SIZES, directions
    ):
        direction, deterministic = one["direction"], one.get("deterministic", False)
        if direction == "pair_tangents" and max(sizes) > MOST_OF_PAIR_TANGENTS[dtype]:
            continue
        fields = {**common, **one, "dtype": dtype, "shape": [B, H, S, B, H, S, *sizes], "dropout": deterministic}

        def plan(fields: dict = fields, architecture: str = architecture) -> object:
            return _C.flex.call_plan(fields, architecture, 84)

        if too_large(architecture, dtype, sizes, direction, deterministic):
            with pytest.raises(RuntimeError, match=r"tiles fit the GPU's \d+ bytes of shared memory"):
                plan()
        else:
            plan()


# Architecture, dtype, head sizes, and the bytes that the kernel that spills most may spill. The backward of 576/512
# takes all 255 registers: it spills 0 bytes, or 40 in a process that has compiled many others.
COMPILED = [("90a", "bfloat16", (576, 512), 64), ("86", "float32", (256, 256), 512)]
COMPILED_AT_NIGHT = [("80", "bfloat16", (512, 512), 128), ("120", "bfloat16", (512, 512), 1024)]


@rows_of("architecture, dtype, sizes, most", COMPILED)
def test_kernels_of_wide_heads_and_small_memory(
    architecture: str, dtype: str, sizes: tuple[int, int], most: int
) -> None:
    check_spills(architecture, dtype, sizes, most)


@pytest.mark.large
@rows_of("architecture, dtype, sizes, most", COMPILED_AT_NIGHT)
def test_more_kernels_of_wide_heads(architecture: str, dtype: str, sizes: tuple[int, int], most: int) -> None:
    check_spills(architecture, dtype, sizes, most)


def check_spills(architecture: str, dtype: str, sizes: tuple[int, int], most: int) -> None:
    for direction in ("forward", "backward"):
        more = {"needs_grad": [True] * 3, "deterministic": False} if direction == "backward" else {}
        fields = {"direction": direction, "dtype": dtype, "shape": [B, H, S, B, H, S, *sizes], "training": True, **more}
        plan, programs = _C.flex.call_plan(fields, architecture, 84)
        for program in {_C.jit.key(p): p for p in programs}.values():
            (found,) = _C.jit.resources(program).values()
            assert found["spill_store_bytes"] <= most, plan


def test_a_smaller_limit_plans_as_a_smaller_gpu() -> None:
    fields = {"direction": "backward", "dtype": "float32", "shape": [B, H, S, B, H, S, 256, 256], "training": True}
    fields |= {"needs_grad": [True] * 3, "deterministic": False}

    def tiles(architecture: str) -> str:
        return _C.flex.call_plan(fields, architecture, 84)[0]

    usual = tiles("90")
    _C.force_limits(0, 99 << 10)
    try:
        assert tiles("90") == tiles("86") != usual
    finally:
        _C.force_limits(0, 0)
    assert tiles("90") == usual
