"""Random score_mods through flex_attention's CUDA kernels, against float64.

FUSEGRAD_FLEX_GRAPHS sets their number, for each dtype and family of kernels. Two kernels of each are compiled, which
takes a core 2 s in float32, 6 s in bfloat16: 10,000 of all are 40 minutes of 64 cores (`-n 60`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import fusegrad
import hypothesis
import pytest
import test_score_mod
import torch
from flex_cuda_support import DEVICE, ON_EACH_FAMILY
from fusegrad import _C, ScoreMod, compile_flex, flex_attention
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

pytestmark = ON_EACH_FAMILY
GRAPHS = {
    dtype: int(os.environ.get("FUSEGRAD_FLEX_GRAPHS", default))
    for dtype, default in ((torch.float32, "300"), (torch.bfloat16, "100"))
}
SIZES = {1: 16, 3: 16, 5: 16, 9: 16, 70: 80}  # queries: head size
CHUNKS = {dtype: max(4, count // 75) for dtype, count in GRAPHS.items()}
THREADS = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def random_programs(count: int, seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    # Values near a jump may fall on either side of it, in float32 too.
    monkeypatch.setattr(test_score_mod, "MARGIN", 1e-4)
    monkeypatch.setattr(test_score_mod, "LARGEST", 1e3)
    found: list[tuple] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(test_score_mod.programs(dtype=dtype), st.booleans())
    def collect(program: test_score_mod.Program, masked: bool) -> None:
        assume(dtype == torch.float32 or not shows_approximations(program))
        floats = [v for v in program.values if v[1].is_floating_point()]
        x = floats[-1]
        for other in floats[-4:-1]:
            x = program.apply("add", x, other)
        # To scores of a few units, where the softmax has gradients: 4 x / (4 + |x|).
        size = program.apply("add", program.apply("abs", x), program.constant(4.0))
        x = program.apply("div", program.apply("mul", x, program.constant(4.0)), size)
        found.append((program, x, masked))

    torch.set_default_device("cpu")
    collect()
    return found


def shows_approximations(program: test_score_mod.Program) -> bool:
    """Whether it has what kernels for 16 bits approximate: tanh, or a quotient (to a few roundings) before a jump."""
    inexact = set()
    for line in program.lines:
        name, _, op, *operands = line.split()
        if op in ("tanh", "gelu_tanh"):
            return True
        after = bool(inexact.intersection(operands))
        if after and op in test_score_mod.JUMPS:
            return True
        if after or op in ("div", "sigmoid", "silu"):
            inexact.add(name)
    return False


@pytest.mark.parametrize("dtype, chunk", [(dtype, i) for dtype in CHUNKS for i in range(CHUNKS[dtype])], ids=str)
def test_random_score_mods(
    dtype: torch.dtype,
    chunk: int,
    each_flex_family: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """For each: values and gradients as close to float64's as those of the CPU's float32 kernels, but for what is
    rounded to the dtype. Every other time a backward's CTA takes all keys of a head, where it can."""
    _C.flex.force_whole(chunk % 2)
    request.addfinalizer(lambda: _C.flex.force_whole(-1))
    if dtype == torch.float32 and each_flex_family == "hopper":
        pytest.skip("float32 has the portable kernels alone")
    programs = random_programs(-(-GRAPHS[dtype] // CHUNKS[dtype]), chunk, dtype, monkeypatch)
    cases = []
    for program, result, masked in programs:
        floats = [b.detach().float().requires_grad_() if b.requires_grad else b for b in program.buffers]
        mod = ScoreMod(program.text("score_mod", result[0]), floats, program.scalars)
        cases.append((program, result[1], masked, mod))

    def compile_one(case: tuple) -> None:
        program, _, masked, mod = case
        size = SIZES[program.sizes[2]]
        mask = fusegrad.trace_mask_mod(kept(masks[program.sizes])) if masked else None
        batch, heads, *lengths = program.sizes
        sizes = {"batch": batch, "heads": heads, "lengths": tuple(lengths), "head_size": size, "value_size": 16}
        compile_flex(mod, mask, dtype=dtype, **sizes)

    masks = {p.sizes: torch.rand(p.sizes) < 0.7 for p, *_ in programs}
    if DEVICE == "cuda":
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(compile_one, cases))
    before, skipped = _C.jit.stats()["compilations"], 0
    for case in cases:
        skipped += not compare(*case, masks[case[0].sizes], dtype)
    assert skipped <= len(cases) // 5
    assert _C.jit.stats()["compilations"] == before  # all of them were compiled ahead


def kept(table: Tensor) -> Callable:
    return lambda b, h, q, kv: table[b, h, q, kv]


def compare(
    program: test_score_mod.Program, result: Tensor, masked: bool, mod: ScoreMod, allowed: Tensor, dtype: torch.dtype
) -> bool:
    """False where nothing finite is there to compare, or float32 is too little for this score_mod."""
    b, h, m, n = program.sizes
    size = SIZES[m]
    values, upstream = torch.randn(b, h, n, 16).to(dtype), torch.randn(b, h, m, 16).to(dtype)
    # With rows of the unit matrix as queries the scores are the keys, and the keys' gradient that of the scores.
    query = torch.eye(m, size).expand(b, h, m, size).to(dtype).contiguous()
    key = torch.zeros(b, h, n, size, dtype=dtype)
    key[..., :m] = program.score.detach().transpose(-1, -2)
    some = allowed.any(-1) if masked else torch.ones(b, h, m, dtype=torch.bool)
    lse_upstream = torch.randn(b, h, m) * some
    score = result.expand(program.sizes)
    score = torch.where(allowed | ~some[..., None], score, -torch.inf) if masked else score
    weights = score.softmax(-1) * some[..., None]
    leaves = [program.score, *(x for x in program.buffers if x.requires_grad)]

    def gradients(of: Tensor, given: Tensor, to: list[Tensor]) -> list[Tensor]:
        if not of.requires_grad:
            return [torch.zeros_like(x) for x in to]
        return list(torch.autograd.grad(of, to, given.to(of), retain_graph=True, materialize_grads=True))

    out, lse = weights @ values.double(), score.logsumexp(-1) * some
    truth = [out, *gradients(out, upstream, leaves), lse, *gradients(lse, lse_upstream, leaves)]
    truth = [t.detach() for t in truth]
    if not all(bool(t.isfinite().all()) for t in truth):
        return False

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        buffers = [x.detach().to(device).requires_grad_(x.requires_grad) for x in mod.buffers]
        given = [t.to(device, dtype).requires_grad_() for t in (query, key, values)]
        mask = None
        if masked:
            mask = create_block_mask(kept(allowed.to(device)), b, h, m, n, device=device)
        got, aux = flex_attention(
            *given, ScoreMod(mod.text, buffers, mod.scalars), mask, scale=1.0, return_aux=AuxRequest(lse=True)
        )
        assert torch.equal(aux.lse.isneginf().cpu(), ~some)
        # All of them: which are asked for is part of what the backward is compiled for.
        wanted = [*given, *(t for t in buffers if t.requires_grad)]
        found = []
        for of, by in ((got, upstream), (aux.lse.masked_fill(~some.to(device), 0.0), lse_upstream)):
            grads = gradients(of, by.to(device), wanted)
            found += [of, grads[1][..., :m].transpose(-1, -2), *grads[3:]]
        return [t.detach().double().cpu() for t in found]

    def errors(got: list[Tensor]) -> list[float]:
        return [((x - t).norm() / size).item() for x, t, size in zip(got, truth, sizes, strict=True)]

    # Gradients are what is left of terms of order one, that of the scores by out of sums of 16 products, of order 4:
    # 3e-6 is 6 of a unit in their last place.
    sizes = [t.norm() + (0.1 if i == 1 else 0.03) * t.numel() ** 0.5 for i, t in enumerate(truth)]
    # A buffer's gradient is what is left of many.
    limits = 2 * [3e-5, 3e-5, *(3e-4 for _ in leaves[1:])]
    by_lse = len(leaves) + 1
    if dtype != torch.float32:
        # Probabilities are rounded for the product with the values, and so is what becomes of it. By them alone
        # sum(P * dP) may be off, one number a row: captured gradients, of many rows, show it too much to be compared.
        unit = torch.finfo(dtype).eps / 2
        (slope,) = gradients(result.expand(program.sizes).sum(), torch.ones(()), leaves[:1])
        weights = weights.detach()
        products = weights * (upstream.double() @ values.double().mT).abs()
        limits[0] = limits[1] = limits[by_lse + 1] = 3 * unit
        limits[1] += unit * float((products.sum(-1, keepdim=True) * weights * slope).norm() / sizes[1])
        limits[2:by_lse] = (math.inf for _ in leaves[1:])
    found = [errors(got) for got in (run("cpu", torch.float32), run(DEVICE, dtype))]
    if max(found[0]) > 1e-3:
        return False
    for i, (cpu, ours, limit) in enumerate(zip(*found, limits, strict=True)):
        assert ours <= 8 * cpu + limit, f"result {i}: error {ours:.2g}, on the CPU {cpu:.2g}\n{mod!r}"
    return True
