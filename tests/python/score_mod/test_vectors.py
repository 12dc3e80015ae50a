"""score_mods and mask_mods over vectors of captured tensors: loops over axes in the language and in the kernels."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from math import inf, nan

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import TraceError, trace_mask_mod, trace_score_mod
from fusegrad._C import score_mod as language
from needs import needs_flex_compiler
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

B, H, M, N, D = 2, 4, 5, 6, 12


def floats(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).requires_grad_()


def dense(mod: Callable, score: Tensor, kind: str = "score_mod") -> Tensor:
    """What the function gives for each pair, by PyTorch itself."""
    rows = []
    for place in torch.cartesian_prod(*(torch.arange(n) for n in score.shape)):
        b, h, q, kv = place
        rows.append(mod(score[b, h, q, kv], b, h, q, kv) if kind == "score_mod" else mod(b, h, q, kv))
    return torch.stack(rows).reshape(score.shape)


def assert_like_dense(mod: Callable, captured: list[Tensor], m: int = M, n: int = N) -> None:
    query, key, value = (floats(B, H, x, 8, seed=i) for i, x in enumerate((m, n, n)))
    out = fusegrad.flex_attention(query, key, value, score_mod=mod)
    score = query @ key.mT / 8**0.5
    expected = dense(mod, score).softmax(-1) @ value
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    upstream = floats(*out.shape, seed=9).detach()
    inputs = [query, key, value, *captured]
    got = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    wanted = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
    for x, g, w in zip(inputs, got, wanted, strict=True):
        zeros = torch.zeros_like(x)
        torch.testing.assert_close(zeros if g is None else g, zeros if w is None else w, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [3, 8, 9, 64, 256])
def test_dot_product(length: int) -> None:
    query, key = floats(B, H, M, length), floats(B, 2, N, length)

    def mod(s, b, h, i, j):
        return s + 0.125 * torch.dot(query[b, h, i, :], key[b, h // 2, j, :])

    assert_like_dense(mod, [query, key])
    text = fusegrad.trace_score_mod(mod).text
    assert text.count("\n") == 12, "the text grows with the vectors"


# Captured by the cases below.
WIDE, ZEROS = floats(N, 70, seed=4), floats(N, 18, seed=5)
with torch.no_grad():
    ZEROS[torch.arange(4), 2], ZEROS[1, 7], ZEROS[2] = 0, 0, 0
A, K, MATRIX, TABLE, SMALL = floats(M, D), floats(N, D, seed=1), floats(H, D, D), floats(D, seed=2), floats(M, 5)
HIDDEN, OUTER, JOINED = floats(10, D), floats(10), floats(16, 2 * D)
CHOSEN = torch.randint(0, D, (M, 10), generator=torch.Generator().manual_seed(3))
BOUNDARIES = torch.linspace(-2, 2, 33, dtype=torch.float64)
NET = nn.Sequential(nn.Linear(2 * D, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)).double()

CASES: dict[str, Callable] = {
    "gather": lambda s, b, h, i, j: s + (A[i][CHOSEN[i]] * OUTER).sum() * K[j].mean(),
    "gather of a table": lambda s, b, h, i, j: s + TABLE[CHOSEN[i]].sum() * TABLE.take(CHOSEN[i]).max() * K[j, 0],
    "two layers": lambda s, b, h, i, j: s + torch.dot(OUTER, torch.tanh(HIDDEN @ (A[i] - K[j]))),
    "concatenated": lambda s, b, h, i, j: s + (F.relu(F.linear(torch.cat([A[i], K[j]]), JOINED))).sum(),
    "a module": lambda s, b, h, i, j: s + NET(torch.cat([A[i], K[j]]))[0],
    "softmax": lambda s, b, h, i, j: s + torch.softmax(A[i], -1) @ K[j] + F.log_softmax(K[j], 0)[3],
    "layer_norm": lambda s, b, h, i, j: s + F.layer_norm(A[i], (D,)) @ F.layer_norm(K[j], (D,), TABLE, TABLE),
    "var and std": lambda s, b, h, i, j: s + A[i].var() * K[j].std() + torch.var(K[j], correction=0),
    "var_mean": lambda s, b, h, i, j: s + torch.var_mean(MATRIX[h] * K[j], dim=1)[0].sum() - torch.std_mean(A[i])[1],
    "norms": lambda s, b, h, i, j: s / A[i].norm() + F.normalize(A[i], dim=0) @ K[j] + (A[i] - K[j]).norm(p=1),
    "cosine": lambda s, b, h, i, j: s + F.cosine_similarity(A[i], K[j], dim=0),
    "bilinear": lambda s, b, h, i, j: s + A[i] @ MATRIX[h] @ K[j] + torch.einsum("i,ij,j->", A[i], MATRIX[h], K[j]),
    "bmm": lambda s, b, h, i, j: s + (torch.bmm(MATRIX, MATRIX.mT)[h] @ K[j]).amax(),
    "matrices": lambda s, b, h, i, j: s + (torch.outer(A[i], K[j]) @ MATRIX[h]).diagonal().sum(),
    "extrema": lambda s, b, h, i, j: s + A[i].max() * K[j].amin() + A[i].max(0).values * K[j].min(dim=0).values,
    "places": lambda s, b, h, i, j: s + TABLE[A[i].argmax()] * K[j][A[i].argmin()] + A[i][(K[j].argmax() + i) % D],
    "places in both": lambda s, b, h, i, j: (
        s + TABLE[torch.stack([A[i], K[j]], 1).argmax() // 2] + TABLE[torch.stack([A[i], K[j]]).argmin() % D]
    ),
    "places of each": lambda s, b, h, i, j: (
        s * torch.stack([A[i], K[j]], 1).argmax(0, keepdim=True).sum() / D
        + (torch.stack([A[i], K[j]]).max(0).values * TABLE).sum()
        + (torch.stack([A[i], K[j]], 1).min(1, keepdim=True).values.t() @ TABLE)[0]
        + (MATRIX[h].max(0).values * MATRIX[h].argmax(1)).sum() / D
    ),
    "small matrices": lambda s, b, h, i, j: (
        s + ((torch.stack([A[i], K[j]]) @ torch.stack([K[j], A[i]], 1)) @ torch.stack([s, A[i, 0]])).sum()
    ),
    "slices": lambda s, b, h, i, j: s + A[i][2:].sum() * K[j][:4].prod() + (A[i][::2] * K[j][1::2]).sum(),
    "views": lambda s, b, h, i, j: s + A[i].flip(0) @ K[j] + A[i].view(3, 4).sum(0)[1] * A[i].reshape(2, 6).amax(),
    "flattened": lambda s, b, h, i, j: s + (MATRIX[h].flatten() * s).mean() + MATRIX[h].t().reshape(-1)[7 + j],
    "rotary": lambda s, b, h, i, j: s + (torch.cos(TABLE * (i - j) / 3) * A[i]).sum(),
    "of the score": lambda s, b, h, i, j: torch.logsumexp(s * A[i] + K[j], 0) + (torch.ones_like(A[i]) * s).mean(),
    "where": lambda s, b, h, i, j: s + torch.where(K[j] > 0, A[i], -2 * A[i]).sum() + (A[i] > 0).sum(),
    "stacked": lambda s, b, h, i, j: s + torch.stack([A[i], K[j], TABLE]).sum(0).square().sum().sqrt(),
    "nested": lambda s, b, h, i, j: s + (A[i][:, None] - K[j][None]).abs().amin(0).sum(),
    "bucketize": lambda s, b, h, i, j: s * TABLE[torch.bucketize(K[j, 0].detach(), BOUNDARIES).clamp(max=D - 1)],
    "searchsorted": lambda s, b, h, i, j: s * torch.searchsorted(BOUNDARIES, K[j].detach(), right=True).sum() / 99,
    "product": lambda s, b, h, i, j: s + A[i].prod() * K[j].sum(),
    "long product": lambda s, b, h, i, j: (
        s * (1 + WIDE[j] / 5).prod() + ((1 + WIDE[i] / 9)[:, None] * (1 + TABLE / 99)).prod(0).sum()
    ),
    "product with zeros": lambda s, b, h, i, j: s + ZEROS[i].prod() * K[j, 0] + (ZEROS[i][:9] + s).prod(),
}


@rows_of("name", [*CASES])
def test_like_pytorch(name: str) -> None:
    assert_like_dense(CASES[name], [A, K, MATRIX, TABLE, SMALL, WIDE, ZEROS, HIDDEN, OUTER, JOINED, *NET.parameters()])


ROWS = torch.tensor(list(itertools.product([0.0, 1.0, -inf, inf, nan], repeat=3)), dtype=torch.float64)
OF_ROWS: dict[str, Callable] = {
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(),
    "max": lambda x: x.max(0).values * 3 + x.max(),
    "min": lambda x: x.min(0).values * 3 + x.min(),
    "place of max": lambda x: x.max(0).indices,
    "place of min": lambda x: x.min(0).indices,
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "sum": lambda x: x.sum(),
    "prod": lambda x: x.prod(),
    "mean": lambda x: x.mean(),
    "logsumexp": lambda x: x.logsumexp(0),
    "count_nonzero": lambda x: torch.count_nonzero(x),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)).sum(),
    "norms": lambda x: x.norm() + x.norm(1) + x.norm(inf) + x.norm(-inf) + x.norm(0),
}


@pytest.mark.parametrize("kind", ["an axis", "single"])
@rows_of("name", [*OF_ROWS])
def test_nan_and_infinities(name: str, kind: str) -> None:
    """Values, along an axis and of single elements."""

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row = ROWS[kv] if kind == "an axis" else torch.stack([ROWS[kv, i] for i in range(3)])
        return s + OF_ROWS[name](row)

    traced = fusegrad.trace_score_mod(mod)
    score = torch.zeros(1, 1, 1, len(ROWS), dtype=torch.float64)
    got = torch.ops.fusegrad.evaluate_score_mod(traced.text, score, traced.buffers, [], []).reshape(-1)
    expected = torch.stack([OF_ROWS[name](row).double() for row in ROWS])
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_ties_share_the_gradient_evenly() -> None:
    vector = torch.tensor([2.0, 1.0, 2.0, 0.0, 2.0, 1.0, 0.5, 1.5, 1.9, -1.0], dtype=torch.float64).requires_grad_()
    assert_like_dense(lambda s, b, h, i, j: s + j * vector.amax() * vector.amin(), [vector])


def test_masks() -> None:
    seen = torch.rand(N, D, generator=torch.Generator().manual_seed(5)) < 0.3

    def mask(b, h, q, kv):
        return (seen[kv] & (A[q] > 0)).any() | ((K[kv] * A[q]).sum() > 0) | (seen[kv].sum() > 5)

    traced = fusegrad.trace_mask_mod(mask)
    got = torch.ops.fusegrad.evaluate_mask_mod(traced.text, [B, H, M, N], traced.buffers, [], [])
    assert torch.equal(got, dense(mask, torch.zeros(B, H, M, N), "mask_mod"))


def test_half_precision_and_many_tiles() -> None:
    """More than a tile in each direction, and gradients of buffers that are bfloat16."""
    query, key = (floats(1, 2, 200, 32, seed=i).detach().bfloat16().requires_grad_() for i in range(2))
    given = [floats(1, 2, 200, 16, seed=i).detach().float() for i in range(3)]

    def mod(s, b, h, i, j):
        return torch.where(i >= j, s + 0.1 * torch.dot(query[b, h, i], key[b, h, j]), -float("inf"))

    out = fusegrad.flex_attention(*given, score_mod=mod)
    grads = torch.autograd.grad(out.square().sum(), [query, key])
    wide = [x.detach().double().requires_grad_() for x in (query, key)]
    score = given[0].double() @ given[1].double().mT / 4 + 0.1 * wide[0] @ wide[1].mT
    score = score.masked_fill(~torch.ones(200, 200, dtype=torch.bool).tril(), -float("inf"))
    expected = score.softmax(-1) @ given[2].double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda s, b, h, i, j: s + (LONG[j] * torch.stack([s * n for n in range(99)])).sum(), "99 elements.*most 64"),
        (
            lambda s, b, h, i, j: s + (LONGEST[:, None] * s * LONGEST).sum(),
            r"4194304 operations for a pair .*, but got \d+",
        ),
        (lambda s, b, h, i, j: s + LONG[j], r"shape \[99\]; return a single value"),
    ],
)
def test_what_has_no_loop_is_refused(mod: Callable, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        fusegrad.trace_score_mod(mod)


LONG, LONGEST = floats(N, 99), floats(3000)


def test_what_runs_too_long_is_refused() -> None:
    wide = torch.zeros(4, 256, 256)
    with pytest.raises(TraceError, match=r"at most 4194304 operations for a pair .*, but got \d+"):
        fusegrad.trace_score_mod(lambda s, b, h, i, j: s + (wide[h] @ wide[b] @ wide[0]).sum())


TEXT = """score_mod 1
buffer @0 f 2
%0 = axis 64
%1 = load @0 q_idx %0
%2 = load @0 kv_idx %0
%3 = mul %1 %2
%4 = sum %0 %3
%5 = amax %0 %1
%6 = add %4 %5
%7 = add score %6
return %7
"""


def test_the_text() -> None:
    assert language.canonical(TEXT) == TEXT
    assert language.simplify(TEXT) == TEXT
    # The names of axes do not matter, and reductions over equal axes share one.
    renamed = TEXT.replace("%5 = amax %0 %1", "%5 = axis 64\n%6 = load @0 q_idx %5\n%7 = amax %5 %6")
    end = "%8 = add %4 %7\n%9 = add score %8\nreturn %9"
    renamed = renamed.replace("%6 = add %4 %5\n%7 = add score %6\nreturn %7", end)
    assert language.simplify(renamed) == TEXT
    derivative = language.derivative(TEXT, [True])
    assert language.canonical(derivative) == derivative
    assert derivative.count("scatter") == 2
    assert "class C" in language.explain(TEXT, [True])
    assert "for each of 64 elements of a vector" in language.explain(TEXT, [True])


@rows_of(
    "old, new, message",
    [
        ("axis 64", "axis 0", "2:|extent of an axis must be 1 to 65536, but got 0"),
        ("axis 64", "axis 65537", "but got 65537"),
        ("axis 64", "axis", "expected the extent of an axis, but got the end of the line"),
        ("sum %0 %3", "sum %3 %0", "'sum' expects an axis as its first operand"),
        ("sum %0 %3", "sum %0", "'sum' expects an axis and a value, but got 1 operand"),
        ("return %7", "return %3", "the result depends on an axis"),
    ],
)
def test_texts_that_break_a_rule(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        language.canonical(TEXT.replace(old, new))


def test_the_trip_count_of_a_text_is_bounded() -> None:
    lines = ["score_mod 1", *(f"%{i} = axis 65536" for i in range(3)), "%3 = add %0 %1", "%4 = add %3 %2"]
    lines += ["%5 = sum %0 %4", "%6 = sum %1 %5", "%7 = sum %2 %6", "return %7"]
    with pytest.raises(ValueError, match="operations for a pair"):
        language.canonical("\n".join(lines))


# --- kernels ---------------------------------------------------------------------------------------------------


COMPILE = """
import os, sys, torch, fusegrad
length, architecture, deterministic = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "deterministic"
def tensor(*sizes):
    return torch.randn(sizes, dtype=torch.bfloat16).requires_grad_()
query, key = tensor(2, 8, 256, length), tensor(2, 2, 256, length)
def mod(s, b, h, i, j):
    return s + 0.125 * torch.dot(query[b, h, i, :], key[b, h // 4, j, :])
fusegrad.compile_flex(mod, lambda b, h, q, kv: q >= kv, head_size=64, dtype=torch.bfloat16,
                      architecture=architecture, deterministic=deterministic)
"""


@needs_flex_compiler
@pytest.mark.parametrize(
    ("length", "architecture", "how"),
    [
        (64, "80", "plain"),
        (256, "90a", "plain"),
        pytest.param(256, "90a", "deterministic", marks=pytest.mark.large),
    ],
)
def test_a_dot_product_compiles(length: int, architecture: str, how: str, tmp_path) -> None:
    """In a process of its own: NVRTC ended it when vectors were unrolled."""
    environment = {**os.environ, "FUSEGRAD_CACHE_DIR": str(tmp_path)}
    begin = time.perf_counter()
    command = [sys.executable, "-c", inspect.cleandoc(COMPILE), str(length), architecture, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # Beside the usual ones, on Hopper the backward of whole heads, or one that finds the unit of fixed point.
    assert len(list(tmp_path.glob("*.cubin"))) == (2 if architecture == "80" else 3)
    assert time.perf_counter() - begin < 240  # 10 s on a core of its own


@needs_flex_compiler
def test_what_is_too_large_for_a_kernel_is_refused() -> None:
    biases = floats(N, 40).unbind(-1)
    many = fusegrad.trace_score_mod(lambda s, b, h, i, j: s + sum(bias[j] for bias in biases))
    options = {"head_size": 64, "dtype": torch.bfloat16, "architecture": "90a"}
    with pytest.raises(TraceError, match="gradients at no more than 32 places, but got 40"):
        fusegrad.compile_flex(many, **options)

    def long(s, b, h, i, j):
        for step in range(550):
            s = torch.tanh(s + j * step) * 0.5
        return s

    with pytest.raises(TraceError, match=r"at most 2048 operations, but got \d+"):
        fusegrad.compile_flex(long, requires_grad=False, **options)
    with FakeTensorMode():  # a call of the op says so too, before it compiles anything
        query = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(TraceError, match=r"at most 2048 operations, but got \d+"):
            fusegrad.flex_attention(query, query, query, fusegrad.ScoreMod(fusegrad.trace_score_mod(long).text))


def test_what_is_too_large_for_the_language_is_refused_with_its_size() -> None:
    def long(s, b, h, i, j):
        for step in range(2500):
            s = torch.where(s > step, s * 2, s)
        return s

    with pytest.raises(TraceError, match=r"a function of 1\d{4} operations, .*at most 4096 nodes"):
        fusegrad.trace_score_mod(long)
    rows = floats(70, 9)
    with pytest.raises(TraceError, match=r"70 captured tensors .*more than 64 captured buffers"):
        fusegrad.trace_score_mod(lambda s, b, h, i, j: s + sum(row[j] for row in rows.unbind()))


def test_the_source_does_not_grow_with_the_vectors() -> None:
    def source(length: int) -> str:
        text = fusegrad.trace_score_mod(lambda s, b, h, i, j: s + torch.dot(a[i], k[j])).text
        rendered = language.render_cuda(text, ["float32", "float32"])
        derivative = language.render_cuda(language.derivative(text, [True, True]), ["float32", "float32"])
        return (rendered + derivative).replace(str(length), "n")

    sources = []
    for length in (48, 272):  # numbers that stand nowhere else in the source
        a, k = floats(M, length), floats(N, length)
        sources.append(source(length))
    assert sources[0] == sources[1]


POSITIONS = floats(2, 6, 3, seed=7)  # of which rows 1 and 4 are one
with torch.no_grad():
    POSITIONS[:, 4] = POSITIONS[:, 1]
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda x, y: (x - y).norm(),
    "cubic": lambda x, y: torch.linalg.vector_norm(x - y, 3),
    "dist": lambda x, y: torch.dist(x, y),
    "square of the norm": lambda x, y: (x - y).norm() ** 2,
    "std": lambda x, y: (x - y).std() + torch.std_mean(x - y, 0, correction=0)[0],
    "masked softmax": lambda x, y: torch.where(
        (x == y).all(), 0, (torch.where((x == y).all(), -torch.inf, x)).softmax(0)[1]
    ),
}


@rows_of("name", [*DISTANCES])
def test_derivatives_where_a_distance_is_zero(name: str) -> None:
    """Gradients, tangents and second derivatives: those without the pairs whose distance is 0, whose gradient is 0."""
    distance = DISTANCES[name]
    x = POSITIONS.detach().clone().requires_grad_()
    apart = (POSITIONS[:, :, None] != POSITIONS[:, None]).any(-1)

    def attention(q: Tensor, x: Tensor) -> Tensor:
        return fusegrad.flex_attention(q, q, q, lambda s, b, h, i, j: s - distance(x[b, i], x[b, j]))

    def dense_attention(q: Tensor, x: Tensor) -> Tensor:
        rows = [
            distance(x[b, i], x[b, j]) if apart[b, i, j] else x.new_zeros(())
            for b, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(6)).tolist()
        ]
        score = q @ q.mT / q.size(-1) ** 0.5 - torch.stack(rows).reshape(2, 1, 6, 6)
        return score.softmax(-1) @ q

    q, direction, upstream = (floats(2, 1, 6, 8, seed=i) for i in range(3))
    tangents = direction.detach(), floats(*x.shape, seed=8).detach()
    results = []
    for call in (attention, dense_attention):
        out = call(q, x)
        grads = torch.autograd.grad(out, (q, x), upstream, create_graph=True)
        second = torch.autograd.grad([(g * t).sum() for g, t in zip(grads, tangents, strict=True)], (q, x, upstream))
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(p.detach(), t) for p, t in zip((q, x), tangents, strict=True)]
            tangent = torch.autograd.forward_ad.unpack_dual(call(*duals)).tangent
        results.append([out, *grads, *second, tangent])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


def test_elements_out_of_range_are_nothing() -> None:
    """Where that is no error, as of a captured tensor: NaN, 0 and false."""
    floats = trace_score_mod(lambda s, b, h, q, kv: torch.stack([s, 2 * s])[q]).text
    assert "%0 = within q_idx 2\n%1 = eq %0 2\n" in floats and " = where %1 nan " in floats
    integers = trace_score_mod(lambda s, b, h, q, kv: s * torch.stack([q, kv])[q]).text
    assert " = where %1 0 " in integers
    bools = trace_mask_mod(lambda b, h, q, kv: torch.stack([q > 1, kv > 0])[q]).text
    assert "%1 = ne %0 2\n" in bools and " = and %1 " in bools
