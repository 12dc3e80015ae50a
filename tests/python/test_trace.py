"""Tracing Python score_mods and mask_mods: against the functions themselves, run by PyTorch on each pair."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import threading
import types
import weakref
from collections.abc import Callable

import fusegrad
import pytest
import score_mods
import torch
import torch.nn.functional as F
from fusegrad import ScoreMod, TraceError, trace_mask_mod, trace_score_mod
from fusegrad._C import score_mod as language
from fusegrad._tracing import cache
from score_mods import Bias
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, or_masks

B, H, M, N = 2, 2, 6, 8


@pytest.fixture(autouse=True)
def fresh():
    """No traces of other tests, and PyTorch's own arithmetic on integers in float64."""
    cache.clear()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(case: score_mods.Case, seed: int = 0) -> score_mods.Mods:
    return case.make(B, H, M, N, torch.float64, torch.Generator().manual_seed(seed))


def on_each_pair(mod: Callable, score: Tensor | None) -> Tensor:
    """The function itself, called with 0-d tensors for one pair after the other: nothing of ours takes part."""
    values = []
    for place in itertools.product(range(B), range(H), range(M), range(N)):
        indices = [torch.tensor(i) for i in place]
        values.append(mod(*indices) if score is None else mod(score[place].clone(), *indices))
    return torch.stack(values).reshape(B, H, M, N)


def agree(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, check_dtype=False)


def check_score_mod(mod: Callable, parameters: list[Tensor]) -> ScoreMod:
    generator = torch.Generator().manual_seed(1)
    score, grad = (torch.randn(B, H, M, N, generator=generator, dtype=torch.float64) for _ in range(2))
    score.requires_grad_()
    expected = on_each_pair(mod, score)
    traced = trace_score_mod(mod)
    inputs = [b.detach() for b in traced.buffers], traced.scalars
    agree(torch.ops.fusegrad.evaluate_score_mod(traced.text, score.detach(), *inputs), expected)

    expected_grads = torch.autograd.grad(expected, [score, *parameters], grad, materialize_grads=True, retain_graph=True)
    grad = torch.where(expected.isfinite(), grad, 0)
    grad_score, grad_buffers = torch.ops.fusegrad.evaluate_score_mod_backward(grad, traced.text, score.detach(), *inputs)
    agree(grad_score, expected_grads[0])
    outputs = [(b, g.to(b.dtype)) for b, g in zip(traced.buffers, grad_buffers, strict=True) if b.requires_grad]
    got = torch.autograd.grad([b for b, _ in outputs], parameters, [g for _, g in outputs]) if parameters else ()
    for g, e in zip(got, expected_grads[1:], strict=True):
        assert e.abs().max() > 0
        tolerance = {"rtol": 0.02, "atol": 0.02} if e.dtype == torch.bfloat16 else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(g, e, **tolerance)
    return traced


def check_mask_mod(mod: Callable) -> ScoreMod:
    traced = trace_mask_mod(mod)
    got = torch.ops.fusegrad.evaluate_mask_mod(traced.text, [B, H, M, N], traced.buffers, traced.scalars)
    expected = on_each_pair(mod, None)
    assert torch.equal(got, expected)
    return traced


@pytest.mark.parametrize("case", score_mods.CASES, ids=lambda c: c.name.replace(" ", "_"))
def test_score_mods_from_the_field(case: score_mods.Case) -> None:
    score_mod, mask_mod, parameters = draw(case)
    if score_mod is not None:
        check_score_mod(score_mod, parameters)
    if mask_mod is not None:
        check_mask_mod(mask_mod)


@pytest.mark.parametrize("case", score_mods.CASES, ids=lambda c: c.name.replace(" ", "_"))
def test_another_call_with_new_values_is_not_traced(case: score_mods.Case) -> None:
    score_mod, mask_mod, parameters = draw(case)
    for mod, trace in ((score_mod, trace_score_mod), (mask_mod, trace_mask_mod)):
        if mod is not None:
            trace(mod)
    misses = cache.cache_info()["misses"]
    score_mod, mask_mod, parameters = draw(case, seed=5)
    if score_mod is not None:
        check_score_mod(score_mod, parameters)
    if mask_mod is not None:
        check_mask_mod(mask_mod)
    assert cache.cache_info()["misses"] == misses
