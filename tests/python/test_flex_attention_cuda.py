"""What only a GPU can show of flex_attention: schemes of captured gradients, determinism, random score_mods, graphs and
streams, sizes beyond 32 bits, memory that runs out.

FUSEGRAD_FLEX_GRAPHS sets the number of random score_mods, for each dtype and family of kernels. Of each two kernels are
compiled, which takes a core 2 s in float32, 6 s in bfloat16: 10,000 of all are 40 minutes of 64 cores (`-n 60`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import fusegrad
import hypothesis
import pytest
import test_score_mod
import torch
from attention_reference import dense
from fusegrad import _C, ScoreMod, compile_flex, flex_attention
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("each_flex_family"),
]
DEVICE = "cuda"
GRAPHS = {
    dtype: int(os.environ.get("FUSEGRAD_FLEX_GRAPHS", default))
    for dtype, default in ((torch.float32, "300"), (torch.bfloat16, "100"))
}


@pytest.fixture(autouse=True)
def made_on_the_gpu() -> Iterator[None]:
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


def causal(b, h, q, kv):
    return q >= kv


def relative(ours: Tensor, truth: Tensor) -> float:
    ours, truth = ours.detach().double(), truth.detach().double()
    return ((ours - truth).norm() / truth.norm()).item()


def inputs(
    b: int, h: int, m: int, n: int, d: int, dtype: torch.dtype = torch.bfloat16, hkv: int | None = None
) -> list[Tensor]:
    shapes = [(b, h, m, d), (b, hkv or h, n, d), (b, hkv or h, n, d)]
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


# --- captured gradients ---------------------------------------------------------------------------------------

H, S = 2, 200


def captured(name: str) -> tuple[Callable, Tensor]:
    """A score_mod of a class, and what it captures."""
    kinds, places = torch.randint(64, (S, S)), torch.randint(5000, (S, S))
    made: dict[str, tuple[tuple[int, ...], Callable]] = {
        "A": ((H,), lambda t: lambda s, b, h, q, kv: s * t[h]),
        "B": ((S,), lambda t: lambda s, b, h, q, kv: s * t[kv]),
        "C": ((S,), lambda t: lambda s, b, h, q, kv: s * t[q]),
        "D": ((H, 2 * S), lambda t: lambda s, b, h, q, kv: s * t[h, q - kv + S]),
        "E": ((H, S, S), lambda t: lambda s, b, h, q, kv: s * t[h, q, kv]),
        "F": ((64,), lambda t: lambda s, b, h, q, kv: s * t[kinds[q, kv]]),
        "G": ((5000,), lambda t: lambda s, b, h, q, kv: s * t[places[q, kv]]),
    }
    shape, function = made[name]
    buffer = (1 + 0.3 * torch.randn(shape)).requires_grad_()
    return function(buffer), buffer


# The schemes that are right for a class.
RIGHT = {"A": "ABCDFG", "B": "BFG", "C": "CFG", "D": "DFG", "E": "EG", "F": "FG", "G": "G"}


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_every_scheme_gives_the_same_gradient(name: str, dtype: torch.dtype, size: int, deterministic: bool) -> None:
    q, k, v = inputs(2, H, S, S, size, dtype)
    score_mod, buffer = captured(name)
    mask = create_block_mask(causal, None, None, S, S, device=DEVICE, BLOCK_SIZE=64)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = dense(*wide, score_mod, torch.ones(S, S).tril().bool()).out
    upstream = torch.randn_like(q)
    (truth,) = torch.autograd.grad(expected, buffer, upstream.double())
    found = {}
    mod = fusegrad.trace_score_mod(score_mod)
    case = _C.flex.Case(
        "backward",
        str(dtype).removeprefix("torch."),
        size,
        size,
        (mod.text, [str(b.dtype).removeprefix("torch.") for b in mod.buffers]),
        wants_grad=[b.requires_grad for b in mod.buffers],
        elements=[b.numel() for b in mod.buffers],
    )
    try:
        for scheme in RIGHT[name]:
            _C.flex.force_scheme(scheme)
            assert _C.flex.plan(case, "90a")["schemes"] == scheme
            out = flex_attention(q, k, v, score_mod, mask, deterministic=deterministic)
            (found[scheme],) = torch.autograd.grad(out, buffer, upstream)
    finally:
        _C.flex.force_scheme("")
    planned = flex_attention(q, k, v, score_mod, mask, deterministic=deterministic)
    (found["planned"],) = torch.autograd.grad(planned, buffer, upstream)
    for scheme, grad in found.items():
        assert relative(grad, truth) <= (1e-2 if dtype == torch.bfloat16 else 1e-5), scheme
        # Each scheme is a program of its own: the compiler contracts its scores in its own way.
        assert relative(grad, found["planned"]) <= 1e-5, scheme


def all_classes() -> tuple[list[Callable], list[Tensor]]:
    """Two score_mods with a buffer of every class, and the buffers."""
    n = 600
    shapes = [(4,), (n,), (n,), (4, 2 * n), (4, n, n), (64,), (5000,)]
    a, b, c, d, e, f, g = held = [(0.3 * torch.randn(s)).requires_grad_() for s in shapes]
    kinds, places = torch.randint(64, (n, n)), torch.randint(5000, (n, n))

    def regular(s, batch, h, q, kv):
        return s * a[h] + b[kv] * s + c[q] * s + d[h, q - kv + n]

    def irregular(s, batch, h, q, kv):
        return s + e[h, q, kv] + f[kinds[q, kv]] + g[places[q, kv]]

    return [regular, irregular], held


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["ABCD", "EFG"])
def test_deterministic_gradients_are_the_same_bits(which: int, dtype: torch.dtype, size: int) -> None:
    score_mods, held = all_classes()
    wanted = [*inputs(2, 4, 600, 600, size, dtype, hkv=2), *(held[:4] if which == 0 else held[4:])]
    mask = create_block_mask(causal, None, None, 600, 600, device=DEVICE)
    upstream = torch.randn_like(wanted[0])

    def backward(**options) -> tuple[Tensor, ...]:
        out = flex_attention(*wanted[:3], score_mods[which], mask, enable_gqa=True, **options)
        return torch.autograd.grad(out, wanted, upstream)

    runs = [backward(deterministic=True) for _ in range(4)]
    try:
        for warn_only in (False, True):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            runs.append(backward())
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
    for ordered, plain in zip(runs[0], backward(deterministic=False), strict=True):
        limit = 5e-3 if ordered.dtype != torch.float32 else 1e-5 if dtype == torch.float32 else 2e-4
        assert relative(plain, ordered) <= limit


@pytest.mark.parametrize("masked", [False, True], ids=["all pairs", "block mask"])
@pytest.mark.parametrize("heads", [2, 64], ids=["few CTAs a batch", "many CTAs a batch"])
@pytest.mark.parametrize("own", [False, True], ids=["batches share", "each batch its own"])
def test_deterministic_elements_of_one_pair(own: bool, heads: int, masked: bool) -> None:
    """Hopper's backward goes batch by batch there, if a batch is enough for the GPU; else in fixed point."""
    batches, n = 5, 300
    bias = (0.3 * torch.randn(batches if own else 1, 2 * heads, n, n)).requires_grad_()
    wanted = [*inputs(batches, 2 * heads, n, n, 64, hkv=heads), bias]
    upstream = torch.randn_like(wanted[0])
    mask = create_block_mask(causal, None, None, n, n, device=DEVICE) if masked else None

    def score_mod(s, b, h, q, kv):
        return s + bias[b if own else 0, h, q, kv]

    def backward(deterministic: bool) -> tuple[Tensor, ...]:
        out = flex_attention(*wanted[:3], score_mod, mask, enable_gqa=True, deterministic=deterministic)
        return torch.autograd.grad(out, wanted, upstream)

    runs = [backward(True) for _ in range(4)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
    for ordered, plain in zip(runs[0], backward(False), strict=True):
        assert relative(plain, ordered) <= (2e-4 if ordered.dtype == torch.float32 else 5e-3)


def of_places(w: Tensor) -> Callable:
    places = torch.arange(300) * 7 % w.numel()
    return lambda s, b, h, q, kv: s * w[places[kv]]


# Reads of classes A and B where the sums of many heads and keys are of one element.
MEETING: dict[str, tuple[list[tuple[int, ...]], Callable]] = {
    "one number": ([(3,)], lambda w: lambda s, b, h, q, kv: s * w[1]),
    "a head": ([(6,)], lambda w: lambda s, b, h, q, kv: s * w[h]),
    "some keys": ([(40,)], lambda w: lambda s, b, h, q, kv: s + w[kv // 7]),
    "scattered keys": ([(40,)], of_places),
    "each its own": ([(2, 6, 300)], lambda w: lambda s, b, h, q, kv: s + w[b, h, kv]),
    "two classes of one": ([(300,)], lambda w: lambda s, b, h, q, kv: s * w[h] + w[kv] * w[kv // 3]),
    "two tensors": ([(6,), (300,)], lambda w, x: lambda s, b, h, q, kv: s * w[h] + x[kv]),
}


@pytest.mark.parametrize(
    "dtype, size",
    [(torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256), (torch.float32, 16)],
    ids=str,
)
@pytest.mark.parametrize("name", MEETING)
def test_deterministic_sums_that_meet(name: str, dtype: torch.dtype, size: int) -> None:
    """Stored head by head there, and added up later. Head 1 has no keys, the first and the last keys no queries."""
    shapes, function = MEETING[name]
    held = [(1 + 0.3 * torch.randn(s)).requires_grad_() for s in shapes]
    q, k, v = inputs(2, 6, 300, 270, size, dtype, hkv=2)
    upstream = torch.randn_like(q)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (kv >= 64) & (kv < 200) & (h != 1)

    mask = create_block_mask(mask_mod, None, 6, 300, 270, device=DEVICE)
    for keys in (slice(None), slice(1)):
        given = [q, k[keys], v[keys], *held]

        def backward() -> tuple[Tensor, ...]:
            out = flex_attention(*given[:3], function(*held), mask, enable_gqa=True, deterministic=True)
            return torch.autograd.grad(out, given, upstream)

        runs = [backward() for _ in range(3)]
        for run in runs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
        wide = [t.detach().double().requires_grad_() for t in given]
        h, i, j = (torch.arange(n).reshape(s) for n, s in ((6, (6, 1, 1)), (300, (300, 1)), (270, (270,))))
        out = dense(*wide[:3], function(*wide[3:]), mask_mod(None, h, i, j)).out
        for ours, truth in zip(runs[0], torch.autograd.grad(out, wide, upstream.double()), strict=True):
            assert relative(ours, truth) <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_deterministic_sums_that_are_not_finite(value: float, dtype: torch.dtype, size: int) -> None:
    q, k, v = inputs(1, 2, 100, 100, size, dtype)
    factor, bias = torch.ones(2, requires_grad=True), torch.zeros(100, requires_grad=True)
    upstream = torch.randn_like(q)
    upstream[0, 1, 3] = value
    out = flex_attention(q, k, v, lambda s, b, h, q, kv: s * factor[h] + bias[kv], deterministic=True)
    of_factor, of_bias = torch.autograd.grad(out, [factor, bias], upstream)
    assert of_factor[1].isnan() and of_bias.isnan().any()


def test_a_number_on_the_cpu() -> None:
    """PyTorch lets a 0-d tensor stay on the CPU; its gradient goes back there."""
    q, k, v = inputs(1, 2, 40, 40, 16, torch.float32)
    factor = torch.tensor(0.7, device="cpu", requires_grad=True)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s * factor)
    (grad,) = torch.autograd.grad(out.square().sum(), factor)
    wide = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    expected = dense(q.double(), k.double(), v.double(), lambda s, b, h, i, j: s * wide).out
    (truth,) = torch.autograd.grad(expected.square().sum(), wide)
    assert grad.device.type == "cpu" and abs(grad.item() - truth.item()) <= 1e-4 * abs(truth.item())


# --- random score_mods ----------------------------------------------------------------------------------------

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
    dtype: torch.dtype, chunk: int, each_flex_family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each: values and gradients as close to float64's as those of the CPU's float32 kernels, but for what is
    rounded to the dtype."""
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
        compile_flex(mod, mask, head_size=size, value_size=16, dtype=dtype)

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


# --- compiling ahead ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all pairs", "block mask"])
def test_what_was_compiled_ahead_is_what_runs(masked: bool, dtype: torch.dtype, deterministic: bool) -> None:
    bias, frozen, number = torch.randn(100, requires_grad=True), torch.randn(100), 3
    q, k, v = inputs(1, 2, 100, 100, 24, dtype)
    mask = create_block_mask(causal, None, None, 100, 100, device=DEVICE, BLOCK_SIZE=(32, 48)) if masked else None

    def score_mod(s, b, h, q, kv):
        return s * frozen[q] + bias[kv] * number - 0.25

    compile_flex(score_mod, block_mask=mask, head_size=24, dtype=dtype, deterministic=deterministic)
    before = _C.jit.stats()["compilations"]
    flex_attention(q, k, v, score_mod, mask, deterministic=deterministic).sum().backward()
    assert _C.jit.stats()["compilations"] == before


# --- how it runs ----------------------------------------------------------------------------------------------


def a_step(length: int = 300) -> tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]:
    """A forward and backward with everything: block mask, lse, a captured buffer."""
    leaves = [*inputs(1, 2, length, length, 64, torch.bfloat16), torch.randn(length, requires_grad=True)]
    mask = create_block_mask(causal, None, None, length, length, device=leaves[0].device)
    upstream = torch.randn_like(leaves[0])

    def step(**options) -> tuple[Tensor, ...]:
        q, k, v, bias = leaves
        out, aux = flex_attention(
            q * 1, k * 1, v * 1, lambda s, b, h, i, j: s + bias[j], mask, return_aux=AuxRequest(lse=True), **options
        )
        return out, *torch.autograd.grad((out, aux.lse.sum()), leaves, (upstream, None))

    return step, leaves


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"deterministic": True}], ids=str)
def test_nothing_synchronises(options: dict) -> None:
    step, _ = a_step()
    step(**options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(**options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"deterministic": True}], ids=str)
def test_graph_capture_and_replay(options: dict) -> None:
    step, leaves = a_step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(**options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(**options)
    for _ in range(2):
        with torch.no_grad():
            for t in leaves:
                t.copy_(torch.randn_like(t))
        graph.replay()
        for ours, eager in zip(captured, step(), strict=True):
            assert relative(ours, eager) <= (1e-5 if ours.dtype == torch.float32 else 5e-3)


def test_two_streams() -> None:
    """Calls that run beside each other share nothing: each gives the bits that it gives alone."""
    steps = [a_step(1000)[0] for _ in range(2)]
    alone = [step(deterministic=True) for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(3):
        found = []
        for stream, step in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(deterministic=True))
        torch.cuda.synchronize()
        for got, expected in zip(found, alone, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    torch.set_default_device("cuda:1")
    step, _ = a_step()
    on_second = step(deterministic=True)
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in on_second)
    torch.manual_seed(0)
    with torch.cuda.device(1):
        assert all(torch.equal(x, y) for x, y in zip(on_second, step(deterministic=True), strict=True))


def test_slices_and_alignment() -> None:
    """Rows that begin anywhere, gaps, and an innermost dimension that is not dense."""
    wide = [torch.randn(2, 60, 2, 2 * 33, dtype=torch.bfloat16) for _ in range(3)]
    layouts = [
        lambda t: t[..., 1:25].transpose(1, 2),
        lambda t: t[..., 3:27].transpose(1, 2),
        lambda t: t[..., 2:50:2].transpose(1, 2),
        lambda t: t.flatten()[7 : 7 + 2 * 2 * 60 * 24].view(2, 2, 60, 24),
    ]
    for layout in layouts:
        parts = [layout(t).detach().requires_grad_() for t in wide]
        dense_parts = [t.detach().contiguous().clone().requires_grad_() for t in parts]
        outs = [flex_attention(*x, deterministic=True) for x in (parts, dense_parts)]
        assert torch.equal(*outs)
        upstream = torch.randn(2, 2, 60, 48, dtype=torch.bfloat16)[..., 1:25]
        grads = [torch.autograd.grad(x, t, upstream) for x, t in zip(outs, (parts, dense_parts), strict=True)]
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


# --- where the gradient of the queries goes -------------------------------------------------------------------
# By default, but for wide heads of 16 bits on sm_90a, it is added up in float32 and then rounded; else a kernel of its
# own writes it, and in place what that kernel writes replaces the queries in the end.

# Of [2, M, H, 2 * size + 2], tensors [2, H, M, size].
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "heads before rows": lambda t, size: t[..., :size].transpose(1, 2).contiguous(),
    "rows before heads": lambda t, size: t[..., :size].contiguous().transpose(1, 2),
    "a slice": lambda t, size: t[..., 1 : size + 1].transpose(1, 2),
    "columns apart": lambda t, size: t[..., 1 : 2 * size : 2].transpose(1, 2),
}
WIDTHS = [
    *[(torch.bfloat16, size) for size in (37, 40, 64, 128, 192, 256)],
    *[(torch.float16, size) for size in (40, 192)],
    *[(torch.float32, size) for size in (3, 20, 64, 128)],
]


@pytest.mark.parametrize("dtype, size", WIDTHS, ids=str)
def test_gradients_of_any_layout_in_order_and_in_place(dtype: torch.dtype, size: int) -> None:
    m, n, h = 150, 170, 2
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    wide = [torch.randn(2, rows, h, 2 * size + 2).to(dtype).requires_grad_() for rows in (m, n, n)]
    bias = torch.randn(n, requires_grad=True)
    upstream = torch.randn(2, h, m, size).to(dtype)
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE, BLOCK_SIZE=64)
    allowed = torch.ones(m, n).tril().bool()

    for name, layout in LAYOUTS.items():
        exact = [t.detach().double().requires_grad_() for t in (*wide, bias)]
        expected = dense(*(layout(t, size) for t in exact[:3]), lambda s, b, h, q, kv, t=exact[3]: s + t[kv], allowed)
        truth = torch.autograd.grad(expected.out, exact, upstream.double())
        found = {}
        for captures in (False, True):
            for deterministic, inplace in ((False, False), (False, True), (True, False), (True, True)):
                given = [layout(t * 1, size) for t in wide]
                # Without a gradient of the bias there is no fixed point, for which kernels would run twice.
                held = bias if captures else bias.detach()
                out = flex_attention(
                    *given, lambda s, b, h, q, kv, t=held: s + t[kv], mask, deterministic=deterministic, inplace=inplace
                )
                grads = torch.autograd.grad(out, [*wide, bias] if captures else wide, upstream)
                assert all((t._version > 0) == inplace for t in given)
                for i, grad in enumerate(grads):
                    assert relative(grad, truth[i]) <= limit, (name, captures, deterministic, inplace, i)
                found[captures, deterministic, inplace] = grads
            for a, b in zip(found[captures, True, False], found[captures, True, True], strict=True):
                assert torch.equal(a, b), (name, captures)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.bfloat16, 192), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_any_of_the_gradients_alone(dtype: torch.dtype, size: int, deterministic: bool) -> None:
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    tensors = [*inputs(2, 2, 150, 170, size, dtype), torch.randn(170, requires_grad=True)]
    upstream = torch.randn(2, 2, 150, size).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = dense(*exact[:3], lambda s, b, h, q, kv: s + exact[3][kv]).out
    truth = torch.autograd.grad(expected, exact, upstream.double())
    for wanted in ([0], [3], [0, 3], [0, 1], [0, 2], [1, 2], [0, 2, 3], [1, 3]):
        given = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        out = flex_attention(*given[:3], lambda s, b, h, q, kv, t=given[3]: s + t[kv], deterministic=deterministic)
        out.backward(upstream)
        for i, t in enumerate(given):
            assert (t.grad is not None) == (i in wanted)
            assert t.grad is None or relative(t.grad, truth[i]) <= limit, (wanted, i)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_block_that_there_is_not_makes_the_gradient_nan(dtype: torch.dtype, size: int, inplace: bool) -> None:
    """Of its queries, and of those that are in a tile with some of them; others know nothing of it."""
    leaves = inputs(1, 1, 768, 768, size, dtype)
    mask = create_block_mask(causal, None, None, 768, 768, device=DEVICE)
    mask.kv_num_blocks[0, 0, 5], mask.kv_indices[0, 0, 5] = 2, 9
    for deterministic in (False, True):
        out = flex_attention(*(t * 1 for t in leaves), None, mask, deterministic=deterministic, inplace=inplace)
        grad = torch.autograd.grad(out, leaves[0], torch.ones_like(out))[0]
        assert grad[:, :, 640:].isnan().all() and grad[:, :, :384].isfinite().all()


# --- sizes ----------------------------------------------------------------------------------------------------


def scaled(t: Tensor) -> Callable:
    return lambda s, b, h, q, kv: s * (1 + t[h])


def rows_agree(tensors: list[Tensor], heads: list[tuple[int, int]], score_mod: Callable, bias: Tensor) -> None:
    """A few heads of a large call against float64, and the gradient of what all of them share against their sum."""
    q, k, v = tensors
    out = flex_attention(q, k, v, score_mod(bias))
    grads = torch.autograd.grad(out, (q, k, v, bias), out.detach())
    for b, h in heads:
        wide = [t[b : b + 1, h : h + 1].detach().double().requires_grad_() for t in tensors]
        held = bias.detach().double()[h : h + 1].requires_grad_()
        expected = dense(*wide, score_mod(held)).out
        upstream = out[b : b + 1, h : h + 1].detach().double()
        truth = torch.autograd.grad(expected, (*wide, held), upstream)
        assert relative(upstream, expected) <= 5e-3
        for grad, t in zip(grads[:3], truth[:3], strict=True):
            assert relative(grad[b : b + 1, h : h + 1], t) <= 1e-2
    assert grads[3].isfinite().all()


def test_more_heads_than_a_grid_has_rows() -> None:
    tensors = inputs(70000, 2, 16, 16, 16)
    rows_agree(tensors, [(0, 0), (32768, 1), (69999, 1)], scaled, torch.zeros(2).requires_grad_())


def test_more_than_two_to_the_31_elements() -> None:
    """Of each of query, key, value and output, and of a captured buffer."""
    tensors = inputs(66000, 8, 64, 64, 64)
    assert tensors[0].numel() > 2**31
    rows_agree(tensors, [(0, 0), (65536, 1), (65999, 7)], scaled, torch.zeros(8).requires_grad_())
    del tensors
    torch.cuda.empty_cache()
    table = torch.zeros(2**31 + 4096, dtype=torch.bfloat16)
    table[2**31 :] = 0.5 * torch.randn(4096, dtype=torch.bfloat16)
    q, k, v = inputs(1, 1, 64, 64, 64)
    ours = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j * 64 + i + 2**31])
    part = table[2**31 :].clone()
    assert torch.equal(ours, flex_attention(q, k, v, lambda s, b, h, i, j: s + part[j * 64 + i]))


def test_tiles_in_the_order_of_sections_of_heads() -> None:
    """Heads so long that few of them are worked on together, and no multiple of that number."""
    heads, blocks, size = 5, 64, 256
    tensors = inputs(1, heads, blocks * size, blocks * size, 64)
    mask = create_block_mask(
        lambda b, h, q, kv: (q // size == kv // size) & (q >= kv), 1, 1, blocks * size, blocks * size, device=DEVICE
    )
    out = flex_attention(*tensors, block_mask=mask)
    grads = torch.autograd.grad(out, tensors, out.detach())
    q, k, v = (t.detach().double().view(heads, blocks, size, 64).requires_grad_() for t in tensors)
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    truth = (q @ k.mT / 8).masked_fill(later, -torch.inf).softmax(-1) @ v
    expected = torch.autograd.grad(truth, (q, k, v), out.detach().double().view_as(truth))
    assert relative(out.view_as(truth), truth) <= 5e-3
    for grad, t in zip(grads, expected, strict=True):
        assert relative(grad.view_as(t), t) <= 1e-2


@pytest.mark.parametrize("block", [64, 128, 192, 256, (128, 64)], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_tiles_of_queries_in_several_blocks(d: int, block: int | tuple[int, int]) -> None:
    """Kinds of tiles that differ between their queries; lists from the block mask's own, and from its blocks."""

    def window(b, h, q, kv):
        return (q >= kv) & (q - kv < 200 + 100 * h)

    q, k, v = (t.detach() for t in inputs(2, 2, 700, 900, d))
    mask = create_block_mask(window, 1, 2, 700, 900, device=DEVICE, BLOCK_SIZE=block)
    out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
    at = torch.arange(700)[:, None], torch.arange(900)
    truth = dense(q.double(), k.double(), v.double(), mask=window(0, torch.arange(2)[:, None, None], *at))
    assert relative(out, truth.out) <= 5e-3
    torch.testing.assert_close(aux.lse.double(), truth.lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("modified", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("grows", [True, False], ids=["grow", "fall"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_that_grow_or_fall_with_the_keys(d: int, grows: bool, masked: bool, modified: bool) -> None:
    """A row's maximum is another one tile after tile, or stays the first; more rows of tiles than multiprocessors."""
    b, h, m, n = 5, 12, 700, 900
    q, k, v = (t.detach() for t in inputs(b, h, m, n, d))
    place = torch.arange(n) if grows else torch.arange(n).flip(0)
    k *= (place / 60).to(k.dtype)[:, None]
    slope = 0.3 if grows else -0.3
    mod = (lambda s, b, h, q, kv: s + slope * (kv - 400)) if modified else None
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE) if masked else None
    out, aux = flex_attention(q, k, v, mod, mask, return_aux=AuxRequest(lse=True))
    alive = torch.ones(m, n, dtype=torch.bool).tril() if masked else None
    truth = dense(q.double(), k.double(), v.double(), mod, alive)
    assert relative(out, truth.out) <= 5e-3
    torch.testing.assert_close(aux.lse.double(), truth.lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_query_that_is_not_finite_leaves_other_heads_alone(d: int) -> None:
    """The last tile of the head before reads what is known of its first queries, too."""
    mask = create_block_mask(causal, None, None, 100, 100, device=DEVICE)
    q, k, v = inputs(1, 2, 100, 100, d)
    upstream = torch.randn_like(q)
    expected = torch.autograd.grad(flex_attention(q, k, v, None, mask), (q, k, v), upstream)
    with torch.no_grad():
        q[0, 1, 0, 3] = torch.nan
    found = torch.autograd.grad(flex_attention(q, k, v, None, mask), (q, k, v), upstream)
    for grad, want in zip(found, expected, strict=True):
        assert grad[0, 1].isnan().any()
        assert relative(grad[0, 0], want[0, 0]) <= 1e-3


@pytest.mark.parametrize("d", [64, 128])
def test_values_in_blocks_that_are_not_attended_may_be_infinite(d: int) -> None:
    q, k, v = (t.detach() for t in inputs(1, 2, 1000, 1000, d))
    mask = create_block_mask(causal, 1, 1, 1000, 1000, device=DEVICE)
    infinite = v.clone()
    infinite[:, :, 896:] = torch.inf
    expected, out = (flex_attention(q, k, x, block_mask=mask)[:, :, :896] for x in (v, infinite))
    assert torch.equal(out, expected)


def test_no_memory_in_the_backward_is_an_error_and_no_more() -> None:
    step, _ = a_step()
    before = step(deterministic=True)
    q, k, v = inputs(4, 16, 4096, 4096, 64)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    for inplace in (False, True):
        tensors = [t * 1 for t in (q, k, v)]
        out = flex_attention(*tensors, inplace=inplace)
        kept = [t.detach().clone() for t in tensors]
        upstream = torch.randn_like(out)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
        rest = []  # of larger blocks, which could be had without asking the device
        try:
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    rest.append(torch.empty(2**22, dtype=torch.uint8))
            with pytest.raises(torch.OutOfMemoryError):
                torch.autograd.grad(out, tensors, upstream, retain_graph=not inplace)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del rest
        assert all(torch.equal(t, x) for t, x in zip(tensors, kept, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before, step(deterministic=True), strict=True))


# --- bad input ------------------------------------------------------------------------------------------------


def test_what_the_gpu_does_not_have() -> None:
    q = torch.randn(1, 1, 16, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match="query must be float32, bfloat16 or float16 on CUDA, but got Double"):
        flex_attention(q, q, q)
    wide = torch.randn(1, 1, 16, 257)
    with pytest.raises(NotImplementedError, match="query must have a head size of at most 256 on CUDA, but got 257"):
        flex_attention(wide, wide, wide)
    x = torch.randn(1, 1, 16, 16)
    with pytest.raises(ValueError, match="key must be on the query's device cuda:0, but got cpu"):
        flex_attention(x, x.cpu(), x)
    assert x.isfinite().all()
