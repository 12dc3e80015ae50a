"""Gradients of what a score_mod captures, on a GPU: every scheme of adding them up, and the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Callable

import fusegrad
import pytest
import score_mods
import torch
from attention_reference import dense, one_by_one
from coverings import pairs_of, rows_of
from flex_cuda_support import DEVICE, ON_EACH_FAMILY, causal, inputs, relative
from flex_limits import NEEDS_HOPPER
from fusegrad import _C, flex_attention
from green_context import stream_of
from support import deterministic_algorithms
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

pytestmark = ON_EACH_FAMILY

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
    fields = {
        "kernel": "backward",
        "dtype": str(dtype).removeprefix("torch."),
        "head_size": size,
        "value_size": size,
        "score_mod": (mod.text, [str(b.dtype).removeprefix("torch.") for b in mod.buffers]),
        "wants_grad": [b.requires_grad for b in mod.buffers],
        "elements": [b.numel() for b in mod.buffers],
    }
    case = _C.flex.case(fields)
    try:
        for scheme in RIGHT[name]:
            _C.flex.force_scheme(scheme)
            assert _C.flex.kernel_plan(case, "90a")["schemes"] == scheme
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
    for warn_only in (False, True):
        with deterministic_algorithms(warn_only=warn_only):
            runs.append(backward())
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


# What every batch shares, class E, F and G, of which a kernel of its own sums up the batches; and what it leaves alone.
SHARED: dict[str, tuple[list[tuple[int, ...]], Callable]] = {
    "a head's pairs": ([(4, 130, 150)], lambda i, t: lambda s, b, h, q, kv: s + t[h, q, kv]),
    "all heads' pairs": ([(130, 150)], lambda i, t: lambda s, b, h, q, kv: s * t[q, kv]),
    "a small table": ([(40, 4)], lambda i, t: lambda s, b, h, q, kv: s * t[i[q, kv] % 40, h]),
    "a large table": ([(5000,)], lambda i, t: lambda s, b, h, q, kv: s + t[i[q, kv]]),
    "pairs that meet": ([(4, 100, 150)], lambda i, t: lambda s, b, h, q, kv: s + t[h, q % 100, kv]),
    "two tables and a batch's own": (
        [(4, 130, 150), (40,), (9, 150)],
        lambda i, t, u, w: lambda s, b, h, q, kv: s * u[i[q, kv] % 40] + t[h, q, kv] + w[b, kv],
    ),
}


@pairs_of({"deterministic": [False, True], "size": [24, 64], "name": [*SHARED]})
def test_sums_over_batches(name: str, size: int, deterministic: bool) -> None:
    shapes, function = SHARED[name]
    held = [(1 + 0.3 * torch.randn(s)).requires_grad_() for s in shapes]
    places = torch.randint(5000, (130, 150), dtype=torch.int32)
    given = [*inputs(9, 4, 130, 150, size, hkv=2), *held]
    upstream = torch.randn_like(given[0])

    def backward() -> tuple[Tensor, ...]:
        out = flex_attention(*given[:3], function(places, *held), enable_gqa=True, deterministic=deterministic)
        return torch.autograd.grad(out, given, upstream)

    runs = [backward() for _ in range(3 if deterministic else 1)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
    wide = [t.detach().double().requires_grad_() for t in given]
    out = dense(*wide[:3], function(places, *wide[3:])).out
    for ours, truth in zip(runs[0], torch.autograd.grad(out, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


# Biases [H, M, N] as models hold them: by rows of 16 bytes or not, by columns, a part of another, shorter.
LAID_OUT: dict[str, Callable[[int, int, int, torch.dtype], Tensor]] = {
    "dense": lambda h, m, n, dtype: torch.randn(h, m, n, dtype=dtype),
    "an offset": lambda h, m, n, dtype: torch.randn(h, m, n + 24, dtype=dtype)[:, :, 3 : n + 3],
    "by columns": lambda h, m, n, dtype: torch.randn(h, n, m, dtype=dtype).mT,
    "pairs last": lambda h, m, n, dtype: torch.randn(m, n, h, dtype=dtype).permute(2, 0, 1),
    "expanded": lambda h, m, n, dtype: torch.randn(1, m, n, dtype=dtype).expand(h, m, n),
}


@pairs_of(
    {
        "masked": [False, True],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "lengths": [(49, 49), (64, 64), (136, 264), (30, 128)],
        "layout": [*LAID_OUT],
    }
)
def test_biases_of_pairs(layout: str, lengths: tuple[int, int], dtype: torch.dtype, masked: bool) -> None:
    m, n = lengths
    bias = LAID_OUT[layout](4, m, n, dtype).detach().requires_grad_()
    given = [*inputs(5, 4, m, n, 24, hkv=2), bias]
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE) if masked else None
    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + bias[h, q, kv], mask, enable_gqa=True)
    got = torch.autograd.grad(out, given, upstream)
    wide = [t.detach().double().requires_grad_() for t in given]
    allowed = torch.ones(m, n).tril().bool() if masked else None
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][h, q, kv], allowed).out
    assert relative(out, expected) <= 1e-2
    for ours, truth in zip(got, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("pairs", ["bhqk", "hqk", "bqk", "qk"])
@pytest.mark.parametrize("size", [24, 64, 128])
def test_deterministic_gradients_of_biases(size: int, pairs: str) -> None:
    """For several tiles of keys, which add to the queries' gradient one after the other."""
    lengths = {"b": 3, "h": 4, "q": 300, "k": 520}
    bias = torch.randn(*(lengths[letter] for letter in pairs), dtype=torch.bfloat16).requires_grad_()
    given = [*inputs(3, 4, 300, 520, size, hkv=2), bias]

    def function(table):
        return lambda s, b, h, q, k: s + table[tuple({"b": b, "h": h, "q": q, "k": k}[letter] for letter in pairs)]

    out = flex_attention(*given[:3], function(bias), enable_gqa=True, deterministic=True)
    upstream = torch.randn_like(out)
    first = torch.autograd.grad(out, given, upstream, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(out, given, upstream, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], function(wide[3])).out
    for ours, truth in zip(first, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("multiprocessors", [8, 16, 64])
def test_deterministic_gradients_on_some_multiprocessors(multiprocessors: int) -> None:
    """Tiles of keys wait for one another though few of their CTAs run at once."""
    bias = torch.randn(4, 264, 512, dtype=torch.bfloat16).requires_grad_()
    given = [*inputs(16, 4, 264, 512, 32), bias]
    upstream = torch.randn_like(given[0])

    def gradients() -> tuple[Tensor, ...]:
        out = flex_attention(*given[:3], lambda s, b, h, q, k: s + bias[h, q, k], deterministic=True)
        return torch.autograd.grad(out, given, upstream)

    expected = gradients()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_of(multiprocessors)):
        got = gradients()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("multiprocessors", [8, 64, None], ids=str)
@pytest.mark.parametrize("size", [24, 64, 80, 128])
def test_tiles_of_keys_that_meet(size: int, multiprocessors: int | None) -> None:
    """The first that has a gradient of some queries stores it, and others that come meanwhile wait for it, where all
    CTAs run at once and where few do. What lies in memory before is not added."""
    given = inputs(2, 4, 700, 1500, size, hkv=2)
    exact = [t.detach().double().requires_grad_() for t in given]
    truth = dense(*exact).out
    upstream = torch.randn_like(truth)
    expected = torch.autograd.grad(truth, exact, upstream)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.current_stream() if multiprocessors is None else stream_of(multiprocessors)):
        out = flex_attention(*given, enable_gqa=True)
        for _ in range(3):
            junk = [torch.full((1 << 22,), torch.nan) for _ in range(2)]
            del junk
            found = torch.autograd.grad(out, given, upstream.to(out.dtype), retain_graph=True)
            assert all(relative(a, b) <= 1e-2 for a, b in zip(found, expected, strict=True))
    torch.cuda.synchronize()


@pytest.mark.parametrize("batched", [False, True], ids=["hqk", "bhqk"])
def test_pairs_beyond_a_bias_read_nan(batched: bool) -> None:
    q, k, v = inputs(2, 3, 512, 512, 32)
    for rows, keys in ((400, 512), (512, 496)):
        bias = torch.randn(*([2] if batched else []), 3, rows, keys, dtype=torch.bfloat16)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + (bias[b, h, i, j] if batched else bias[h, i, j]))
        expected = torch.arange(512) >= (rows if keys == 512 else 0)
        assert torch.equal(out.isnan().all(-1), expected.expand(2, 3, 512))
        assert torch.equal(out.isnan().any(-1), expected.expand(2, 3, 512))


@NEEDS_HOPPER
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("size", [48, 64])
def test_a_forward_and_a_backward_of_two_families(size: int, deterministic: bool) -> None:
    """Where nothing is forced, some biases of pairs take one family's forward and the other one's backward."""
    _C.flex.force_family("")
    given = [*inputs(3, 4, 136, 264, size, hkv=2), torch.randn(3, 4, 136, 264, requires_grad=True)]
    upstream = torch.randn_like(given[0])
    out = flex_attention(
        *given[:3], lambda s, b, h, q, kv: s + given[3][b, h, q, kv], enable_gqa=True, deterministic=deterministic
    )
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][b, h, q, kv]).out
    assert relative(out, expected) <= 1e-2
    truths = torch.autograd.grad(expected, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


@NEEDS_HOPPER
@pytest.mark.parametrize("size", [24, 48, 64])
def test_the_gradient_of_max_scores_takes_one_family(size: int) -> None:
    """It goes to the scores that equal the forward's to the bit."""
    _C.flex.force_family("")
    given = [*inputs(3, 4, 136, 264, size), torch.randn(3, 4, 136, 264, requires_grad=True)]
    _, aux = flex_attention(
        *given[:3], lambda s, b, h, q, kv: s + given[3][b, h, q, kv], return_aux=AuxRequest(max_scores=True)
    )
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][b, h, q, kv]).max_scores
    upstream = torch.randn_like(aux.max_scores)
    truth = torch.autograd.grad(expected, wide[3], upstream.double())[0]
    assert relative(torch.autograd.grad(aux.max_scores, given[3], upstream)[0], truth) <= 1e-2


@rows_of("case", score_mods.CASES, tests=4)
def test_the_gradient_of_max_scores_meets_a_score(case: score_mods.Case) -> None:
    """Whatever a score_mod computes: of each row that has a largest score the gradients by its scores add up to 1."""
    sizes = (2, 2, 33, 40)
    score_mod, _, _ = case.make(*sizes, torch.float32, torch.Generator(DEVICE).manual_seed(0))
    zeros = torch.zeros(sizes, requires_grad=True)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (s if score_mod is None else score_mod(s, b, h, q, kv)) + zeros[b, h, q, kv]

    for dtype in (torch.bfloat16, torch.float32):
        given = [torch.randn(2, 2, n, 32).to(dtype) for n in (33, 40, 40)]
        _, aux = flex_attention(*given, mod, return_aux=AuxRequest(max_scores=True))
        (grad,) = torch.autograd.grad(aux.max_scores.sum(), zeros)
        torch.testing.assert_close(grad.sum(-1), aux.max_scores.isfinite().float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("size", [24, 64])
def test_buckets_of_diagonals(size: int, deterministic: bool) -> None:
    """Neighbouring diagonals have one element, here and there the same as one further on."""
    q, k, v = inputs(2, 3, 700, 650, size)
    table = torch.randn(24, 3, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        far = torch.clamp((q - kv).abs() // 40, max=9)
        return s + table[torch.where((q - kv) % 50 < 3, 11, far + torch.where(q < kv, 12, 0)), h]

    out = flex_attention(q, k, v, score_mod, deterministic=deterministic)
    upstream = torch.randn_like(q)
    (grad,) = torch.autograd.grad(out, table, upstream, retain_graph=True)
    wide = table.detach().double().requires_grad_()
    i, j = torch.arange(700)[:, None], torch.arange(650)
    far = torch.clamp((i - j).abs() // 40, max=9)
    place = torch.where((i - j) % 50 < 3, 11, far + torch.where(i < j, 12, 0))
    score = q.double() @ k.double().mT * size**-0.5 + wide[place].permute(2, 0, 1)
    (truth,) = torch.autograd.grad(score.softmax(-1) @ v.double(), wide, upstream.double())
    assert relative(grad, truth) <= 1e-2
    if deterministic:
        assert torch.equal(grad, torch.autograd.grad(out, table, upstream)[0])


# Tables of which a (b, h) reaches a column, by places that a tensor has for each pair.
COLUMNS: dict[str, tuple[list[tuple[int, ...]], Callable]] = {
    "heads last": ([(600, 4)], lambda i, t: lambda s, b, h, q, kv: s + t[i[b, q, kv], h]),
    "heads first": ([(4, 600)], lambda i, t: lambda s, b, h, q, kv: s * t[h, i[b, q, kv] - 600]),
    "two tables": (
        [(600, 4), (40, 4)],
        lambda i, t, u: lambda s, b, h, q, kv: s * u[i[b, kv, q] % 40, h] + t[i[b, q, kv], h],
    ),
    "a batch's own": ([(20, 600, 4)], lambda i, t: lambda s, b, h, q, kv: s + t[b, i[0, q, kv], h]),
    "two places": ([(30, 4, 20)], lambda i, t: lambda s, b, h, q, kv: s + t[i[b, q, kv] % 30, h, i[b, q, kv] % 20]),
}


@pairs_of(
    {
        "deterministic": [False, True],
        "dtype": [torch.int32, torch.int64],
        "lengths": [(49, 49), (130, 150)],
        "name": [*COLUMNS],
    }
)
def test_columns_of_tables(name: str, lengths: tuple[int, int], dtype: torch.dtype, deterministic: bool) -> None:
    m, n = lengths
    shapes, function = COLUMNS[name]
    held = [(1 + 0.3 * torch.randn(s)).requires_grad_() for s in shapes]
    places = torch.randint(600, (20, 150, 151), dtype=dtype)[:, :, 1:]  # rows are at no multiples of 16 bytes
    given = [*inputs(20, 4, m, n, 24), *held]
    upstream = torch.randn_like(given[0])

    def backward() -> tuple[Tensor, ...]:
        out = flex_attention(*given[:3], function(places, *held), deterministic=deterministic)
        return torch.autograd.grad(out, given, upstream)

    runs = [backward() for _ in range(3 if deterministic else 1)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
    wide = [t.detach().double().requires_grad_() for t in given]
    out = dense(*wide[:3], function(places, *wide[3:])).out
    for ours, truth in zip(runs[0], torch.autograd.grad(out, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("lengths", [(49, 49), (130, 150)], ids=str)
def test_columns_of_tables_for_grouped_heads(lengths: tuple[int, int]) -> None:
    """A CTA has the keys of several query heads."""
    m, n = lengths
    table, places = torch.randn(600, 4, requires_grad=True), torch.randint(600, (9, m, n), dtype=torch.int32)
    given = [*inputs(9, 4, m, n, 24, hkv=2), table]
    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + table[places[b, q, kv], h], enable_gqa=True)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][places[b, q, kv], h]).out
    truths = torch.autograd.grad(expected, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [(49, 49), (130, 150)], ids=str)
@pytest.mark.parametrize("name", ["heads last", "two places"])
def test_places_beyond_a_column_read_nan(name: str, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    m, n = lengths
    shapes, function = COLUMNS[name]
    held = [torch.randn(s) for s in shapes]
    places = torch.randint(600, (20, m, n), dtype=dtype)
    bad = [(0, 3, 5, 600), (7, 0, 0, -601), (19, m - 1, n - 1, 2**30)]
    if dtype == torch.int64:
        bad += [(4, 1, 1, 2**32), (5, 2, 1, -(2**40) + 1)]
    given = inputs(20, 4, m, n, 24)
    good = dense(*(t.double() for t in given), function(places, *(t.double() for t in held))).out
    for b, q, kv, place in bad if name == "heads last" else []:
        places[b, q, kv] = place
        good[b, :, q] = math.nan
    out = flex_attention(*given, function(places, *held))
    assert torch.equal(out.isnan(), good.isnan())
    assert relative(out.nan_to_num(), good.nan_to_num()) <= 1e-2


@pairs_of(
    {
        "deterministic": [False, True],
        "lengths": [(49, 49), (64, 64), (130, 150)],
        "scales": [(0.0, 1.0), (1e-6, 1.0, 1e5), (1e5, 1e-6), (1.0, 2e33)],
    }
)
def test_columns_of_batches_that_contribute_little_and_much(
    lengths: tuple[int, int], scales: tuple[float, ...], deterministic: bool
) -> None:
    """A histogram's unit follows from the batch before, and the first one's from itself."""
    m, n = lengths
    table, places = torch.randn(600, 4, requires_grad=True), torch.randint(600, (200, m, n), dtype=torch.int32)
    given = [*inputs(200, 4, m, n, 24), table]
    of_batch = torch.tensor(scales)[torch.arange(200) * len(scales) // 200]
    upstream = (torch.randn_like(given[0]) * of_batch[:, None, None, None]).to(given[0].dtype)
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + table[places[b, q, kv], h], deterministic=deterministic)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][places[b, q, kv], h]).out
    truths = torch.autograd.grad(expected, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_one_table_of_two_that_suddenly_gets_much(deterministic: bool) -> None:
    """A batch beyond one table's limit is computed again, and counts once for the other table too."""
    batches, length, few = 800, 49, 32
    t, u = torch.randn(600, 4, requires_grad=True), torch.randn(40, 4, requires_grad=True)
    places = torch.randint(600, (batches, length, length), dtype=torch.int32)
    given = [*inputs(batches, 4, length, length, 24), t, u]
    upstream = torch.randn_like(given[0])
    upstream[batches // 2 :, :, few:] *= 100

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        place = places[b, q, kv]
        return torch.where(q < few, s + tables[1][place % 40, h], s) + tables[0][place, h]

    tables = given[3:]
    out = flex_attention(*given[:3], score_mod, deterministic=deterministic)
    wide = [x.detach().double().requires_grad_() for x in given]
    tables = wide[3:]
    truths = torch.autograd.grad(dense(*wide[:3], score_mod).out, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("batches", [3, 40])
def test_columns_of_tables_in_place(batches: int, deterministic: bool) -> None:
    """A CTA that computes a batch again needs its keys, whose place their gradient takes."""
    table, places = torch.randn(600, 4, requires_grad=True), torch.randint(600, (batches, 64, 64), dtype=torch.int32)
    leaves = inputs(batches, 4, 64, 64, 32)
    upstream = torch.randn_like(leaves[0])

    def gradients(inplace: bool) -> tuple[Tensor, ...]:
        out = flex_attention(
            *(t * 1 for t in leaves), lambda s, b, h, q, kv: s + table[places[b, q, kv], h],
            deterministic=deterministic, inplace=inplace,
        )  # fmt: skip
        return torch.autograd.grad(out, (*leaves, table), upstream)

    own, written = gradients(False), gradients(True)
    for x, y in zip(own[:3], written[:3], strict=True):
        assert torch.equal(x, y)
    assert torch.equal(own[3], written[3]) if deterministic else relative(written[3], own[3]) <= 1e-5


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_columns_that_get_what_is_not_finite(value: float, deterministic: bool) -> None:
    """It stays at its elements; in fixed point it takes all of a table."""
    table = torch.randn(600, 4, requires_grad=True)
    places = torch.randint(500, (40, 64, 64), dtype=torch.int32)
    places[17, 5] = 500 + torch.arange(64, dtype=torch.int32)
    query, key, values = inputs(40, 4, 64, 64, 32)
    upstream = torch.randn_like(query)
    upstream[17, 2, 5, 3] = value
    out = flex_attention(
        query, key, values, lambda s, b, h, q, kv: s + table[places[b, q, kv], h], deterministic=deterministic
    )
    (grad,) = torch.autograd.grad(out, table, upstream)
    expected = torch.zeros_like(grad, dtype=torch.bool)
    expected[500:564, 2] = True
    assert torch.equal(~grad.isfinite(), expected | deterministic)


# For keys, what is added to a bias of pairs: scores that are much larger than the first ones, or none before.
RISING: dict[str, Callable[[Tensor], Tensor]] = {
    "level": lambda kv: 0.0 * kv,
    "rising": lambda kv: 150.0 * (kv // 128),
    "one tile": lambda kv: torch.where(kv // 128 == 2, 200.0, 0.0),
    "falling": lambda kv: -150.0 * (kv // 128),
    "none at first": lambda kv: torch.where(kv < 200, -math.inf, 0.0),
    "hardly any at first": lambda kv: torch.where(kv < 200, -1e9, 0.0),
}


@pairs_of({"dtype": [torch.bfloat16, torch.float32], "size": [32, 64, 128], "name": [*RISING]})
def test_biases_of_scores_that_rise(name: str, size: int, dtype: torch.dtype) -> None:
    """Exponentials are relative to a row's first maximum as long as they can be."""
    m, n = 200, 520
    places = torch.arange(n)
    bias = (torch.randn(2, m, n) + RISING[name](places)).to(dtype)
    bias[0, 7], bias[1, 150, 300:] = -math.inf, -math.inf
    given = inputs(3, 2, m, n, size)
    out, aux = flex_attention(*given, lambda s, b, h, q, kv: s + bias[h, q, kv], return_aux=AuxRequest(lse=True))
    wide = [t.double() for t in given]
    score = wide[0] @ wide[1].mT * size**-0.5 + bias.double()
    assert relative(out, (score.softmax(-1) @ wide[2]).nan_to_num()) <= 1e-2
    lse = score.logsumexp(-1)
    assert torch.equal(aux.lse == -math.inf, lse == -math.inf)
    torch.testing.assert_close(aux.lse.nan_to_num(neginf=0), lse.float().nan_to_num(neginf=0), rtol=1e-4, atol=2e-2)


# Biases by b: where each element has a pair of its own, the gradient is stored, in the bias' own dtype.
OF_EVERY_PAIR: dict[str, tuple[tuple[int, ...], Callable]] = {
    "in order": ((5, 4, 136, 150), lambda t: lambda s, b, h, q, kv: s * t[b, h, q, kv]),
    "another order": ((150, 4, 5, 136), lambda t: lambda s, b, h, q, kv: s + t[kv, h, b, q]),
    "some more keys": ((5, 4, 136, 160), lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv]),
    "one further": ((5, 4, 136, 150), lambda t: lambda s, b, h, q, kv: s + t[b, h, q, (kv + 1) % 150]),
    "some without": (
        (5, 4, 136, 150),
        lambda t: lambda s, b, h, q, kv: torch.where(kv <= q + 10, s + t[b, h, q, kv], -math.inf),
    ),
}


@pairs_of(
    {
        "deterministic": [False, True],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "size": [24, 64, 128],
        "name": [*OF_EVERY_PAIR],
    }
)
def test_biases_of_every_pair(name: str, size: int, dtype: torch.dtype, deterministic: bool) -> None:
    shape, function = OF_EVERY_PAIR[name]
    # The gradient's memory has nothing in it before.
    torch.full((2 * math.prod(shape),), math.nan)
    given = [*inputs(5, 4, 136, 150, size, hkv=2), (1 + 0.3 * torch.randn(shape)).to(dtype).requires_grad_()]
    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], function(given[3]), enable_gqa=True, deterministic=deterministic)
    got = torch.autograd.grad(out, given, upstream)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], function(wide[3])).out
    for ours, truth in zip(got, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


@pairs_of(
    {
        "lengths": [(136, 264), (300, 128), (17, 520)],
        "dtype": [torch.bfloat16, torch.float16],
        "size": [16, 32, 64, 96, 128],
    }
)
def test_a_bias_of_every_pair_in_tiles(size: int, dtype: torch.dtype, lengths: tuple[int, int]) -> None:
    """Where an added bias has rows of whole vectors, tiles of dS are its gradient."""
    m, n = lengths
    torch.full((2 * 3 * 4 * m * n,), math.nan)
    given = [*inputs(3, 4, m, n, size, dtype, hkv=2), torch.randn(3, 4, m, n).to(dtype).requires_grad_()]
    bias, upstream = given[3], torch.randn_like(given[0])
    # Some pairs without a part, and a query without any.
    bias.data[:, :, : m // 2, n // 3 : n // 2] = -math.inf
    bias.data[1, 2, 5] = -math.inf
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + bias[b, h, q, kv], enable_gqa=True)
    got = [torch.autograd.grad(out, given, upstream, retain_graph=True) for _ in range(2)]
    assert torch.equal(got[0][3], got[1][3])
    wide = [t.detach().double().requires_grad_() for t in given]
    score = wide[0] @ wide[1].repeat_interleave(2, 1).mT * size**-0.5 + wide[3]
    weights = torch.where((score == -math.inf).all(-1, keepdim=True), 0.0, score).softmax(-1)
    weights = torch.where(score == -math.inf, 0.0, weights)
    expected = weights @ wide[2].repeat_interleave(2, 1)
    for ours, truth in zip(got[0], torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


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


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("case", score_mods.OWN_DERIVATIVES, ids=lambda case: case.name)
def test_derivatives_of_ones_own(case: score_mods.Case, dtype: torch.dtype, size: int) -> None:
    """A straight-through estimator, a clipped gradient, two results at once, a custom op's softcap."""
    n = 10
    q, k, v = (t.detach().requires_grad_() for t in inputs(1, 2, n, n, size, dtype))
    made = []
    for wide in (torch.float64, torch.float32):
        made.append(case.make(1, 2, n, n, wide, torch.Generator(DEVICE).manual_seed(0)))
    (exact, _, exact_held), (score_mod, mask_mod, held) = made
    mask = None if mask_mod is None else create_block_mask(causal, None, None, n, n, device=DEVICE)
    out = flex_attention(q, k, v, score_mod, mask)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, [q, k, v, *held], upstream)
    wide_leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    allowed = None if mask_mod is None else torch.ones(n, n).tril().bool()
    expected = dense(*wide_leaves, exact, allowed, evaluate=one_by_one).out
    truth = torch.autograd.grad(expected, [*wide_leaves, *exact_held], upstream.double())
    for ours, t in zip([out, *grads], [expected, *truth], strict=True):
        assert relative(ours, t) <= (2e-2 if dtype == torch.bfloat16 else 1e-4)


# --- vectors ---------------------------------------------------------------------------------------------------


def over_vectors(name: str, heads: int, n: int) -> tuple[Callable, Callable, list[Tensor]]:
    """A score_mod, what it adds to the scores [B, H, M, N] of captured tensors in float64, and these tensors."""
    group = 2

    def tensor(*sizes: int) -> Tensor:
        return torch.randn(sizes).requires_grad_()

    if name == "dot product":
        a, b = tensor(2, heads, n, 64), tensor(2, heads // group, n, 64)

        def score_mod(s, b_, h, i, j):
            return s + 0.125 * torch.dot(a[b_, h, i, :], b[b_, h // group, j, :])

        return score_mod, lambda a, b: 0.125 * a @ b.repeat_interleave(group, 1).mT, [a, b]
    if name == "network":  # one for all pairs, of vectors of queries and keys
        a, b, hidden, outer = tensor(n, 12), tensor(n, 12), tensor(10, 12), tensor(10)

        def score_mod(s, b_, h, i, j):
            return s + torch.tanh(hidden @ (a[i] - b[j])) @ outer

        def wide(a, b, hidden, outer):
            return torch.tanh((a[:, None] - b[None]) @ hidden.mT) @ outer

        return score_mod, wide, [a, b, hidden, outer]
    if name == "gather":  # of each pair its own
        places, a, b = torch.randint(50, (n, n)), tensor(50, 20), tensor(n, 20)
        return (
            lambda s, b_, h, i, j: s + (a[places[i, j]] * b[j]).sum(),
            lambda a, b: (a[places] * b).sum(-1),
            [a, b],
        )
    assert name == "softmax and layer_norm"
    a, b = tensor(heads, n, 24), tensor(n, 24)
    norm = torch.nn.functional.layer_norm
    return (
        lambda s, b_, h, i, j: s + torch.softmax(a[h, i], 0) @ norm(b[j], (24,)) * b[j].amax(),
        lambda a, b: torch.softmax(a, -1) @ (norm(b, (24,)) * b.amax(-1, keepdim=True)).mT,
        [a, b],
    )


VECTORS = ["dot product", "network", "gather", "softmax and layer_norm"]


@pairs_of(
    {
        "deterministic": [False, True],
        "dtype, size": [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 16)],
        "name": [*VECTORS],
    }
)
def test_vectors(name: str, dtype: torch.dtype, size: int, deterministic: bool) -> None:
    heads, n = 4, 200
    given = inputs(2, heads, n, n, size, dtype, hkv=2)
    score_mod, added, held = over_vectors(name, heads, n)
    mask = create_block_mask(causal, None, None, n, n, device=DEVICE, BLOCK_SIZE=128)
    upstream = torch.randn_like(given[0])
    wide = [t.detach().double().requires_grad_() for t in (*given, *held)]
    query, key, value = wide[0], *(t.repeat_interleave(2, 1) for t in wide[1:3])
    score = query @ key.mT / math.sqrt(size) + added(*wide[3:])
    truth = score.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf).softmax(-1) @ value
    wanted = torch.autograd.grad(truth, wide, upstream.double())

    def backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = flex_attention(*given, score_mod, mask, enable_gqa=True, deterministic=deterministic)
        return out, torch.autograd.grad(out, [*given, *held], upstream)

    out, got = backward()
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative(out, truth) <= limit
    for k, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert relative(x, y) <= limit, k
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(got, backward()[1], strict=True))


def test_vectors_of_wide_heads() -> None:
    """Head sizes above 128 have kernels of their own."""
    heads, n = 2, 130
    given = inputs(1, heads, n, n, 256)
    score_mod, added, held = over_vectors("softmax and layer_norm", heads, n)
    upstream = torch.randn_like(given[0])
    wide = [t.detach().double().requires_grad_() for t in (*given, *held)]
    truth = (wide[0] @ wide[1].mT / 16 + added(*wide[3:])).softmax(-1) @ wide[2]
    out = flex_attention(*given, score_mod)
    got = torch.autograd.grad(out, [*given, *held], upstream)
    for x, y in zip(got, torch.autograd.grad(truth, wide, upstream.double()), strict=True):
        assert relative(x, y) <= 1e-2
