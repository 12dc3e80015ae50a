"""Forward mode of flex_attention on CUDA: tangents of the results against float64's reverse mode, twice applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from attention_reference import dense, dropout_weight
from flex_cuda_support import DEVICE, ON_EACH_FAMILY, causal
from forward_mode import pushed, tangents_of
from fusegrad import _C, compile_flex, flex_attention
from support import assert_as_good_as_eager
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

pytestmark = ON_EACH_FAMILY

LSE = AuxRequest(lse=True)
ALL = (True, True, True)


def drawn(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(size).to(dtype) for size in sizes]


def operands(b: int, h: int, hkv: int, m: int, n: int, d: int, e: int, dtype: torch.dtype) -> list[Tensor]:
    return drawn(dtype, (b, h, m, d), (b, hkv, n, d), (b, hkv, n, e))


def blocks(mask: Callable, m: int, n: int, size: int = 128) -> BlockMask:
    return create_block_mask(mask, None, None, m, n, device=DEVICE, BLOCK_SIZE=size)


def all_together(mod: Callable, sizes: tuple[int, ...], score: Tensor) -> Tensor:
    """A score_mod that is made of operations on elements, of every pair at once."""
    indices = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    return mod(score, *indices)


def compare(
    given: list[Tensor],
    moved: list[Tensor | None],
    mod: Callable[..., Callable] | None = None,
    allowed: Tensor | None = None,
    weight: Tensor | None = None,
    formula: Callable[..., Callable] | None = None,
    **how: Any,
) -> None:
    """Results and tangents of a call with those of the formula. mod(*captured) makes the score_mod of what follows
    query, key and value; formula, the same of whole tensors, where they differ."""

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        score_mod = None if mod is None else mod(*x[3:])
        out, aux = flex_attention(*x[:3], score_mod, enable_gqa=True, return_aux=LSE, **how)
        return out, aux.lse

    def plain(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        wide = [t.detach().to(dtype, copy=True).requires_grad_() for t in given]
        made = formula or mod
        score_mod = None if made is None else made(*wide[3:])
        result = dense(*wide[:3], score_mod, allowed, how.get("scale"), all_together, weight)[:2]
        zeros = [torch.zeros_like(t) if d is None else d.to(dtype) for t, d in zip(wide, moved, strict=True)]
        return list(result), pushed(result, wide, zeros)

    truth, eager = plain(torch.float64), plain(given[0].dtype)
    found = tangents_of(call, given, moved)
    for i, name in enumerate(("out", "lse")):
        finite = truth[0][i].isfinite()
        for part, what in enumerate(("", "'s tangent")):
            right, by_eager = truth[part][i], eager[part][i]
            ours = found[i][part]
            if part == 0:
                assert torch.equal(ours.isfinite(), finite)
                ours, right, by_eager = (torch.where(finite, t, 0) for t in (ours, right, by_eager))
            assert_as_good_as_eager(ours, by_eager, right, name + what, least=1e-6)


# --- operands, tiles, masks -----------------------------------------------------------------------------------

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [
    (BF16, 64, 64, "all pairs"),
    (BF16, 64, 64, "causal"),
    (BF16, 128, 128, "all pairs"),
    (BF16, 128, 128, "causal"),
    (BF16, 128, 64, "small blocks"),
    (BF16, 72, 72, "all pairs"),
    (BF16, 80, 80, "causal"),
    (FP16, 96, 72, "small blocks"),
    (BF16, 256, 200, "small blocks"),
    (FP16, 24, 40, "causal"),
    (FP16, 64, 64, "small blocks"),
    (FP16, 64, 128, "all pairs"),
    (FP32, 64, 64, "small blocks"),
    (FP32, 24, 40, "all pairs"),
    (FP32, 256, 200, "causal"),
]


@pytest.mark.parametrize("dtype, d, e, masked", SIZES, ids=str)
def test_sizes_and_masks(dtype: torch.dtype, d: int, e: int, masked: str) -> None:
    m, n = 300, 333
    given = operands(2, 4, 2, m, n, d, e, dtype)
    moved = [torch.randn_like(t) for t in given]
    how: dict[str, Any] = {}
    allowed = None
    if masked == "causal":
        how["block_mask"] = blocks(causal, m, n)
        allowed = torch.arange(m)[:, None] >= torch.arange(n)
    elif masked == "small blocks":  # tiles lie in several, and some rows have no key
        how["block_mask"] = blocks(lambda b, h, q, kv: (q > 40) & ((q - kv).abs() < 90), m, n, 48)
        q, kv = torch.arange(m)[:, None], torch.arange(n)
        allowed = (q > 40) & ((q - kv).abs() < 90)
    compare(given, moved, allowed=allowed, **how)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("having", [(True, False, False), (False, True, False), (False, False, True), ALL], ids=str)
def test_each_operand_s_tangent(having: tuple[bool, ...], size: int) -> None:
    given = operands(1, 2, 2, 130, 200, size, size, torch.bfloat16)
    compare(given, [torch.randn_like(t) if h else None for t, h in zip(given, having, strict=True)], scale=-0.1)


def test_one_head_of_keys_for_all_batches() -> None:
    query, *others = operands(3, 4, 1, 70, 200, 64, 64, torch.bfloat16)
    given = [query, *(t[:1] for t in others)]
    compare(given, [torch.randn_like(t) for t in given])


def test_any_layout() -> None:
    given = operands(2, 3, 3, 70, 90, 20, 12, torch.bfloat16)
    moved = [torch.randn_like(t) for t in given]

    def out(*x: Tensor) -> tuple[Tensor]:
        return (flex_attention(*x),)

    expected = tangents_of(out, given, moved)
    strided = [[t.transpose(1, 2).contiguous().transpose(1, 2) for t in of] for of in (given, moved)]
    transposed = [[t.mT.contiguous().mT for t in of] for of in (given, moved)]
    for pair in (strided, transposed):
        found = tangents_of(out, *pair)
        assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))


def test_long_rows() -> None:
    """Many tiles, whose maxima grow, so that the sums are rescaled again and again."""
    given = operands(1, 1, 1, 200, 3000, 64, 64, torch.bfloat16)
    given[1] = (given[1].float() * torch.linspace(0.1, 6, 3000)[:, None]).to(torch.bfloat16)
    compare(given, [torch.randn_like(t) for t in given])


def test_dropout() -> None:
    given = operands(2, 2, 2, 200, 300, 64, 64, torch.float32)
    moved = [torch.randn_like(t) for t in given]
    compare(given, moved, weight=dropout_weight(0.4, (2, 2, 200, 300)), dropout_p=0.4)


def test_no_keys_and_no_queries() -> None:
    for m, n in ((3, 0), (0, 3), (0, 0)):
        given = operands(1, 2, 2, m, n, 16, 16, torch.bfloat16)
        ((out, tangent),) = tangents_of(lambda *x: (flex_attention(*x),), given, [torch.randn_like(t) for t in given])
        assert out.shape == tangent.shape == (1, 2, m, 16) and not tangent.any()


# --- score_mods and what they capture -------------------------------------------------------------------------


def test_small_numbers_of_pairs_that_take_no_part() -> None:
    """A score_mod's own -inf, where tangents may be NaN."""
    given = [*operands(1, 1, 1, 70, 90, 16, 16, torch.float32), torch.randn(90)]
    moved = [torch.randn_like(t) for t in given]
    moved[3][40:] = torch.nan

    def mod(bias: Tensor) -> Callable:
        return lambda s, b, h, q, kv: torch.where(kv < 40, s + bias[kv], -torch.inf)

    (_, tangent), (_, of_lse) = tangents_of(
        lambda *x: (lambda r: (r[0], r[1].lse))(flex_attention(*x[:3], mod(x[3]), return_aux=LSE)), given, moved
    )
    short = [given[0], *(t[..., :40, :] for t in given[1:3]), given[3][:40]]
    of_short = [moved[0], *(t[..., :40, :] for t in moved[1:3]), moved[3][:40]]
    ((_, expected),) = tangents_of(
        lambda *x: (flex_attention(*x[:3], lambda s, b, h, q, kv: s + x[3][kv]),), short, of_short
    )
    assert of_lse.isfinite().all()
    torch.testing.assert_close(tangent, expected)


def tables(h: int, m: int, n: int) -> list[Tensor]:
    return [(0.3 * torch.randn(s)) for s in ((h,), (n,), (m,), (h, m + n), (h, m, n), (64,))]


def all_reads(m: int) -> Callable[..., Callable]:
    def mod(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Callable:
        def score_mod(s: Tensor, batch: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            changed = s * (1 + a[h]) + b[kv] * c[q] + d[h, kv - q + m]
            return 5 * torch.tanh(changed / 5) + e[h, q, kv] * f[(q * 3 + kv) % 64]

        return score_mod

    return mod


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("having", ["all", "captured alone", "operands alone", "two tables"])
def test_captured_tensors(having: str, dtype: torch.dtype, size: int) -> None:
    h, m, n = 4, 150, 200
    given = [*operands(2, h, 2, m, n, size, size, dtype), *tables(h, m, n)]
    takes = {
        "all": range(9),
        "captured alone": range(3, 9),
        "operands alone": range(3),
        "two tables": (0, 1, 2, 5, 7),
    }[having]
    moved = [torch.randn_like(t) if i in takes else None for i, t in enumerate(given)]
    compare(given, moved, all_reads(m), torch.arange(m)[:, None] >= torch.arange(n), block_mask=blocks(causal, m, n))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_lines_of_tables(masked: bool, size: int, count: int) -> None:
    """Tables by diagonals and by keys, of which lines of shared memory have room for some."""
    h, m, n = 4, 300, 333
    given = [*operands(2, h, 2, m, n, size, size, torch.bfloat16)]
    given += [0.3 * torch.randn(h, m + n) for _ in range(count)] + [0.3 * torch.randn(n)]

    def mod(*tables: Tensor) -> Callable:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            for table in tables[:-1]:
                s = s + table[h, kv - q + m] * tables[-1][kv]
            return s

        return score_mod

    how: dict[str, Any] = {}
    if masked:
        how = {"block_mask": blocks(causal, m, n), "allowed": torch.ones(m, n).tril().bool()}
    compare(given, [torch.randn_like(t) for t in given], mod, **how)


def test_vectors_of_captured_tensors() -> None:
    h, n = 2, 130
    given = [*operands(1, h, h, n, n, 32, 32, torch.bfloat16), *(0.3 * t for t in drawn(torch.float32, (n, 8), (n, 8)))]

    def mod(left: Tensor, right: Tensor) -> Callable:
        return lambda s, b, h, q, kv: s + (left[q, :] * right[kv, :]).sum()

    def formula(left: Tensor, right: Tensor) -> Callable:
        return lambda s, b, h, q, kv: s + left @ right.mT

    compare(given, [torch.randn_like(t) for t in given], mod, formula=formula)


# --- transforms -----------------------------------------------------------------------------------------------


def shifted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j])


def plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias[None, :, None]).softmax(-1) @ v


def small() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    given = [*operands(2, 2, 2, 70, 90, 16, 16, torch.float32), torch.randn(2, 90)]
    return tuple(given), tuple(torch.randn_like(t) for t in given)


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def test_function_transforms() -> None:
    given, moved = small()
    func = torch.func
    torch.testing.assert_close(func.jvp(shifted, given, moved), func.jvp(plainly, given, moved), **CLOSE)

    def of_primal(function: Callable) -> Callable:
        return lambda *x: func.jvp(function, x, moved)[0].square().sum()

    found, expected = (func.grad(of_primal(f), (0, 1, 2, 3))(*given) for f in (shifted, plainly))
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(func.vjp(shifted, *given)[1](moved[0]), func.vjp(plainly, *given)[1](moved[0]), **CLOSE)
    few = given[0][:1, :1, :4], given[1][:1, :1, :5], given[2][:1, :1, :5], given[3][:1, :5]
    for argnum in range(4):
        found, expected = (func.jacfwd(f, argnum)(*few) for f in (shifted, plainly))
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_reverse_mode_through_the_primal_output(dtype: torch.dtype) -> None:
    given, moved = ([t.to(dtype) if i < 3 else t for i, t in enumerate(of)] for of in small())
    leaves = [t.clone().requires_grad_() for t in given]
    out, tangent = torch.func.jvp(shifted, tuple(leaves), tuple(moved))
    found = torch.autograd.grad(out.float().square().sum(), leaves, retain_graph=True)
    through = torch.autograd.grad(tangent.float().square().sum(), leaves)
    expected = torch.autograd.grad(shifted(*leaves).float().square().sum(), leaves)
    torch.testing.assert_close(found, expected, **({"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else CLOSE))

    def plain_gradients(to: torch.dtype) -> tuple[Tensor, ...]:
        of = [t.detach().to(to).requires_grad_() for t in leaves]
        result = torch.func.jvp(plainly, tuple(of), tuple(t.to(to) for t in moved))[1]
        return torch.autograd.grad(result.square().sum(), of)

    wanted = zip("qkvb", through, plain_gradients(dtype), plain_gradients(torch.float64), strict=True)
    for name, *gradients in wanted:
        assert_as_good_as_eager(*gradients, f"through the tangent: {name}")
    # Without leaves one kernel makes both.
    alone = torch.func.jvp(shifted, tuple(given), tuple(moved))
    torch.testing.assert_close(alone, (out.detach(), tangent.detach()), rtol=0, atol=0)


@pytest.mark.parametrize("size", [64, 72, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_backward_behind_forward_mode(dtype: torch.dtype, size: int) -> None:
    """A kernel of forward mode keeps what rounding took from the output: without it a sum over keys that comes to 0
    would be off by as much as out is."""
    given = operands(1, 2, 2, 200, 300, size, size, dtype)
    given[2] += 20  # a gradient of scores is a difference of products with out
    moved = tuple(torch.randn_like(t) for t in given)
    upstream = torch.randn(1, 2, 200, size).to(dtype)

    def gradients(of: list[Tensor], function: Callable) -> tuple[Tensor, ...]:
        leaves = tuple(t.detach().requires_grad_() for t in of)
        out, _ = torch.func.jvp(function, leaves, tuple(t.to(of[0].dtype) for t in moved))
        return torch.autograd.grad(out, leaves, upstream.to(out.dtype))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    right = gradients([t.double() for t in given], plain)
    leaves = [t.detach().requires_grad_() for t in given]
    usual = torch.autograd.grad(flex_attention(*leaves), leaves, upstream)
    for ours, without, truth in zip(gradients(given, flex_attention), usual, right, strict=True):
        error, bound = ((x.double() - truth).norm() for x in (ours, without))
        assert error <= 1.5 * bound


# --- how it runs ----------------------------------------------------------------------------------------------


def test_what_was_compiled_ahead_is_what_runs() -> None:
    bias = torch.randn(2, 200)
    given = operands(1, 2, 2, 150, 200, 48, 48, torch.bfloat16)
    moved = [torch.randn_like(t) for t in [*given, bias]]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.75 * bias[h, j]),)

    for trained in (True, False):
        of = bias.clone().requires_grad_(trained)
        sizes = {"batch": 1, "heads": 2, "lengths": (150, 200), "head_size": 48}
        compile_flex(lambda s, b, h, i, j, of=of: s + 0.75 * of[h, j], requires_grad=trained, tangents=True, **sizes)
        before = _C.jit.stats()["compilations"]
        tangents_of(call, [t.clone().requires_grad_(trained) for t in (*given, bias)], moved)
        assert _C.jit.stats()["compilations"] == before


def test_a_captured_graph() -> None:
    given, moved = small()
    expected = tangents_of(lambda *x: (shifted(*x),), given, moved)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        found = tangents_of(lambda *x: (shifted(*x),), given, moved)
    for t in found[0]:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))


def test_memory_is_linear_in_the_lengths() -> None:
    given = operands(1, 4, 4, 8192, 8192, 64, 64, torch.bfloat16)
    moved = [torch.randn_like(t) for t in given]
    tangents_of(lambda *x: (flex_attention(*x),), given, moved)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tangents_of(lambda *x: (flex_attention(*x),), given, moved)
    assert torch.cuda.max_memory_allocated() - before < 8 * given[0].nbytes


def test_a_list_of_blocks_that_do_not_exist() -> None:
    given = operands(1, 1, 1, 256, 256, 16, 16, torch.bfloat16)
    moved = [torch.randn_like(t) for t in given]
    mask = blocks(causal, 256, 256)
    mask.kv_indices[0, 0, 1, 0] = 7
    ((out, tangent),) = tangents_of(lambda *x: (flex_attention(*x, block_mask=mask),), given, moved)
    assert out[..., 128:, :].isnan().all() and tangent[..., 128:, :].isnan().all()


def test_duals_of_a_level() -> None:
    given, moved = small()
    with fwAD.dual_level():
        out = shifted(*(fwAD.make_dual(t, d) for t, d in zip(given, moved, strict=True)))
        found = fwAD.unpack_dual(out).tangent
    torch.testing.assert_close(found, torch.func.jvp(plainly, given, moved)[1], **CLOSE)
