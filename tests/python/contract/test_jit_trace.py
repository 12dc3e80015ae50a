"""torch.jit.trace of the ops: a program that is right for other values and lengths, or an error; never a crash."""

from __future__ import annotations

import io
from collections.abc import Callable

import fusegrad
import pytest
import score_mods
import torch
from coverings import rows_of
from fusegrad import TraceError, flex_attention
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

B, H, M, N, D = 2, 2, 6, 8, 4


def inputs_of(m: int = M, n: int = N, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, H, length, D, dtype=torch.float64, generator=generator).requires_grad_() for length in (m, n, n)
    ]


def agree(one: Callable[..., Tensor], other: Callable[..., Tensor], inputs: list[Tensor], *parameters: Tensor) -> None:
    out, expected = one(*inputs), other(*inputs)
    torch.testing.assert_close(out, expected)
    leaves = [t for t in [*inputs, *parameters] if t.requires_grad]
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, upstream, materialize_grads=True)
    for a, b in zip(found, torch.autograd.grad(expected, leaves, upstream, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b)


class Biased(nn.Module):
    """Learned tensors, one computed, a number and the sizes of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(N, dtype=torch.float64))
        self.register_buffer("distance", torch.randn(M + N, dtype=torch.float64))
        self.slope = 0.25

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.size(2)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            place = (q_idx - kv_idx + length).clamp(0, len(self.distance) - 1)
            bias = self.bias.exp()[kv_idx.clamp(0, self.bias.shape[0] - 1)]
            return score + self.slope * bias * self.distance[place] + query[b, h, q_idx, 0]

        return flex_attention(query, key, value, score_mod)


@pytest.mark.cpu_only
def test_a_module_at_other_lengths_and_from_a_file() -> None:
    module = Biased()
    program = torch.jit.trace(module, tuple(inputs_of()))
    agree(program, module, inputs_of(5, 7, seed=1), module.bias)
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    agree(loaded, lambda *x: module(*x), inputs_of(3, 4, seed=2))
    with torch.no_grad():
        module.bias.add_(1.0)
    agree(program, module, inputs_of(seed=3), module.bias)


@pytest.mark.cpu_only
@rows_of("case", score_mods.CASES, tests=6)
def test_score_mods_from_the_field(case: score_mods.Case) -> None:
    """Traced in the recorder's presence for the first time, which must not see traced tensors."""
    score_mod, mask_mod, parameters = case.make(B, H, M, N, torch.float64, torch.Generator().manual_seed(0))
    function = mask_mod if mask_mod is None else lambda b, h, q, kv: mask_mod(b, h, q, kv)
    block_mask = function and create_block_mask(function, B, H, M, N, device="cpu", BLOCK_SIZE=4)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, score_mod, block_mask)

    if any(p.requires_grad for p in parameters):
        with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a constant"):
            torch.jit.trace(attention, tuple(inputs_of()))
        if case.name in ("not a leaf", "expanded"):
            return
        for p in parameters:
            p.requires_grad_(False)
    program = torch.jit.trace(attention, tuple(inputs_of()), check_trace=False)
    agree(program, attention, inputs_of(seed=1))


@pytest.mark.cpu_only
def test_sizes_within_a_function_would_be_constants() -> None:
    """For an input, and for what is made of one; whether or not the function has been traced before."""
    functions = [
        lambda q: lambda s, b, h, i, j: s + (i - j) * q.size(2),
        lambda q: lambda s, b, h, i, j: s + (i - j) * q.mul(2).shape[2],
    ]
    for make in functions:

        def attention(q: Tensor, k: Tensor, v: Tensor, make: Callable = make) -> Tensor:
            return flex_attention(q, k, v, make(q))

        for _ in range(2):
            with pytest.raises(TraceError, match=r"must not read sizes .*, such as n = x.size\(0\)"):
                torch.jit.trace(attention, tuple(inputs_of()))
            attention(*inputs_of())


@pytest.mark.cpu_only
def test_a_function_that_is_not_kept() -> None:
    calls = [0]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        calls[0] += 1
        return score * 2

    with pytest.raises(TraceError, match=r"cannot be run again within torch.jit.trace .*fusegrad.trace_score_mod"):
        torch.jit.trace(lambda q, k, v: flex_attention(q, k, v, score_mod), tuple(inputs_of()))
    traced = fusegrad.trace_score_mod(score_mod)
    program = torch.jit.trace(lambda q, k, v: flex_attention(q, k, v, traced), tuple(inputs_of()))
    agree(program, lambda q, k, v: flex_attention(q, k, v, score_mod), inputs_of(seed=1))


@pytest.mark.cpu_only
def test_after_failed_traces_all_is_as_before() -> None:
    """Functions that cannot be traced, wrong shapes and an index out of range, each an error of its own."""
    bias = torch.randn(2, dtype=torch.float64)
    bad = {
        TraceError: lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s if s > 0 else 2 * s),
        ValueError: lambda q, k, v: flex_attention(q[0], k, v),
        IndexError: lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j].exp()),
    }

    def good(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * bias.exp()[h])

    for error, function in bad.items():
        with pytest.raises(error):
            torch.jit.trace(function, tuple(inputs_of()))
        assert not torch.jit.is_tracing()
        agree(torch.jit.trace(good, tuple(inputs_of())), good, inputs_of(seed=1))
