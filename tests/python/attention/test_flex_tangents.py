"""flex_attention in forward mode: tangents of the results against float64's reverse mode, twice applied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import score_mods
import torch
import torch.autograd.forward_ad as fwAD
from attention_reference import dense, dropout_weight, one_by_one
from coverings import each_of, rows_of
from forward_mode import pushed, tangents_of
from fusegrad import _C, flex_attention, trace_score_mod
from fusegrad._attention_low import with_low
from support import assert_as_good_as_eager
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

LSE = AuxRequest(lse=True)


def causal(b, h, q, kv):
    return q >= kv


def block_mask(mask: Callable, b: int, h: int, m: int, n: int, block: int = 4) -> BlockMask:
    return create_block_mask(mask, b, h, m, n, device="cpu", BLOCK_SIZE=block)


def inputs(b: int, h: int, m: int, n: int, d: int, e: int, dtype=torch.float64, hkv: int = 0) -> list[Tensor]:
    shapes = [(b, h, m, d), (b, hkv or h, n, d), (b, hkv or h, n, e)]
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


# --- score_mods -----------------------------------------------------------------------------------------------

FIELD = [*score_mods.CASES, *score_mods.OWN_DERIVATIVES]
# What a backward of one's own does with its upstream is no derivative of anything there.
NOT_LINEAR = ("clipped_gradient",)


@rows_of("case", [*FIELD], tests=8)
def test_score_mods_from_the_field(case: score_mods.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (2, 2, 4, 5)
    tensors = inputs(*sizes, 8, 5)
    moved = [torch.randn_like(t) for t in tensors]
    torch.set_default_dtype(torch.float64)  # PyTorch's own arithmetic on integers, for the reference
    try:
        plain_mod, mask_mod, held = case.make(*sizes, torch.float64, torch.Generator().manual_seed(0))
        allowed = None if mask_mod is None else one_by_one(mask_mod, sizes)
        wide = [t.clone().requires_grad_() for t in tensors]
        expected = dense(*wide, plain_mod, allowed, evaluate=one_by_one)[:2]
        of_held = [torch.randn_like(t) for t in held]
        finite = expected[1].isfinite()
        truth = pushed([expected[0], torch.where(finite, expected[1], 0)], [*wide, *held], [*moved, *of_held])
    finally:
        torch.set_default_dtype(torch.float32)
    mask = None if mask_mod is None else block_mask(lambda b, h, q, kv: mask_mod(b, h, q, kv), *sizes)
    draw = score_mods.Draw.floats

    with fwAD.dual_level():

        def floats(self: score_mods.Draw, *shape: int, scale: float = 1.0) -> Tensor:
            """Tensors that have their tangent from the start: what is computed of them has one too."""
            leaf = draw(self, *shape, scale=scale)
            known = [t for t, h in zip(of_held, held, strict=True) if torch.equal(h, leaf)]
            if known:
                with torch.no_grad():
                    leaf.copy_(fwAD.make_dual(leaf.detach().clone(), known[0]))
            return leaf

        torch.set_default_dtype(torch.float64)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(score_mods.Draw, "floats", floats)
                score_mod, _, ours = case.make(*sizes, torch.float64, torch.Generator().manual_seed(0))
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            for t, d in zip(ours, of_held, strict=True):
                if fwAD.unpack_dual(t).tangent is None:
                    t.copy_(fwAD.make_dual(t.detach().clone(), d))
        duals = [fwAD.make_dual(t, d) for t, d in zip(tensors, moved, strict=True)]
        if case.name in NOT_LINEAR:
            with pytest.raises(ValueError, match="must be linear in its upstream"):
                flex_attention(*duals, score_mod, mask)
            return
        out, aux = flex_attention(*duals, score_mod, mask, return_aux=LSE)
        found = [fwAD.unpack_dual(x) for x in (out, aux.lse)]
    for (value, tangent), right, wanted in zip(found, expected, truth, strict=True):
        torch.testing.assert_close(value, right.detach(), rtol=1e-9, atol=1e-9)
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(tangent, wanted, rtol=1e-8, atol=1e-9 * scale)


def test_the_text() -> None:
    """A tangent is a graph of its own: it is printed, parsed and simplified as others are."""
    bias, table = torch.randn(5, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    mod = trace_score_mod(lambda s, b, h, q, kv: torch.tanh(s) * bias[kv] + table[h, q])
    text = _C.score_mod.tangent(mod.text, [True, False])
    assert text.startswith("tangent 1\n") and text.count("buffer ") == 3
    assert _C.score_mod.canonical(text) == text and _C.score_mod.simplify(text) == text
    assert _C.score_mod.tangent("score_mod 1\nreturn score\n", []) == "tangent 1\nreturn grad\n"


# --- what else shapes a call ----------------------------------------------------------------------------------

WITH = [(True, True, True, True), (True, False, False, False), (False, True, False, False), (False, False, True, False),
        (False, False, False, True)]  # fmt: skip


@each_of({"dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16], "with_tangent": [*WITH]})
def test_tiles_groups_masks_and_dtypes(with_tangent: tuple[bool, ...], dtype: torch.dtype) -> None:
    b, h, hkv, m, n = 2, 4, 2, 70, 300
    tensors = [*inputs(b, h, m, n, 24, 40, dtype, hkv), torch.randn(h, m, n, dtype=torch.float64).to(dtype)]
    moved = [torch.randn(t.shape, dtype=torch.float64).to(dtype) if w else None
             for t, w in zip(tensors, with_tangent, strict=True)]  # fmt: skip

    def near(b, h, q, kv):
        return (q - kv).abs() < 30

    mask, allowed = block_mask(near, 1, 1, m, n, 32), (torch.arange(m)[:, None] - torch.arange(n)).abs() < 30

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(q, k, v, lambda s, b, h, i, j: 0.5 * s * bias[h, i, j].sin(), mask, 0.3, True,
                                  return_aux=LSE)  # fmt: skip
        return out, aux.lse

    def plain(wide: torch.dtype) -> list[Tensor]:
        given = [t.detach().to(wide, copy=True).requires_grad_() for t in tensors]
        result = dense(*given[:3], call, allowed, 0.3, evaluate=lambda _, sizes, s: 0.5 * s * given[3].sin())
        zeros = [torch.zeros_like(t) if d is None else d.to(wide) for t, d in zip(given, moved, strict=True)]
        return pushed(result[:2], given, zeros)

    truth, eager = plain(torch.float64), plain(dtype)
    found = tangents_of(call, tensors, moved)
    for name, (value, tangent), by_eager, right in zip(("out", "lse"), found, eager, truth, strict=True):
        assert tangent is not None and tangent.dtype == value.dtype
        if not right.any():
            assert not tangent.any()
            continue
        assert_as_good_as_eager(tangent, by_eager, right, name, least=1e-6)


def test_rows_without_keys_and_what_masked_keys_hold() -> None:
    tensors, moved = (
        inputs(1, 1, 4, 6, 3, 3),
        [torch.randn(s).double() for s in ((1, 1, 4, 3), (1, 1, 6, 3), (1, 1, 6, 3))],
    )
    for t in (tensors[1], tensors[2], moved[1], moved[2]):
        t[..., 4:, :] = torch.nan
    mask = block_mask(lambda b, h, q, kv: (q > 0) & (kv < 4), 1, 1, 4, 6, 2)
    (out, out_tangent), (lse, lse_tangent) = tangents_of(
        lambda q, k, v: (lambda r: (r[0], r[1].lse))(flex_attention(q, k, v, block_mask=mask, return_aux=LSE)),
        tensors, moved,
    )  # fmt: skip
    assert not out[..., 0, :].any() and not out_tangent[..., 0, :].any() and not lse_tangent[..., 0].any()
    assert lse[..., 0] == -torch.inf
    assert all(t[..., 1:, :].isfinite().all() for t in (out, out_tangent)) and lse_tangent.isfinite().all()


def test_no_keys_and_no_queries() -> None:
    for m, n in ((3, 0), (0, 3), (0, 0)):
        tensors = inputs(1, 2, m, n, 4, 5)
        ((out, tangent),) = tangents_of(
            lambda *x: (flex_attention(*x),), tensors, [torch.randn_like(t) for t in tensors]
        )
        assert out.shape == tangent.shape == (1, 2, m, 5) and not tangent.any()


def test_dropout() -> None:
    tensors = inputs(2, 2, 20, 30, 8, 8)
    moved = [torch.randn_like(t) for t in tensors]
    weight = dropout_weight(0.4, (2, 2, 20, 30))
    given = [t.clone().requires_grad_() for t in tensors]
    truth = pushed(dense(*given, weight=weight)[:2], given, moved)
    found = tangents_of(
        lambda *x: (lambda r: (r[0], r[1].lse))(flex_attention(*x, dropout_p=0.4, return_aux=LSE)), tensors, moved
    )
    for (_, tangent), right in zip(found, truth, strict=True):
        torch.testing.assert_close(tangent, right, rtol=1e-9, atol=1e-9)


def test_any_layout() -> None:
    tensors = inputs(2, 3, 7, 9, 6, 6)
    moved = [torch.randn_like(t) for t in tensors]
    expected = tangents_of(lambda *x: (flex_attention(*x),), tensors, moved)
    strided = [[t.transpose(1, 2).contiguous().transpose(1, 2) for t in of] for of in (tensors, moved)]
    found = tangents_of(lambda *x: (flex_attention(*x),), *strided)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    one = [tensors[0], *(t[:1] for t in tensors[1:])]
    of_one = [moved[0], *(t[:1] for t in moved[1:])]
    whole = [one[0], *(t.expand(2, -1, -1, -1) for t in one[1:])]
    of_whole = [of_one[0], *(t.expand(2, -1, -1, -1) for t in of_one[1:])]
    of_all = [tangents_of(lambda *x: (flex_attention(*x),), *pair)[0] for pair in ((one, of_one), (whole, of_whole))]
    torch.testing.assert_close(*of_all)


# --- nested with reverse mode, and torch.func -----------------------------------------------------------------


def shifted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j])


def plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias[None, :, None]).softmax(-1) @ v


def given() -> tuple[list[Tensor], list[Tensor]]:
    tensors = [*inputs(2, 2, 4, 5, 3, 3), torch.randn(2, 5, dtype=torch.float64)]
    return tensors, [torch.randn_like(t) for t in tensors]


def test_gradcheck_of_forward_mode() -> None:
    tensors, _ = given()
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(shifted, leaves, check_forward_ad=True, check_batched_grad=False)


def test_reverse_mode_through_the_primal_output() -> None:
    tensors, moved = given()
    leaves = [t.clone().requires_grad_() for t in tensors]
    with fwAD.dual_level():
        out, tangent = fwAD.unpack_dual(shifted(*(fwAD.make_dual(t, d) for t, d in zip(leaves, moved, strict=True))))
    found = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    assert tangent.requires_grad
    expected = torch.autograd.grad(plainly(*leaves).square().sum(), leaves)
    torch.testing.assert_close(found, expected)


def in_a_level(function: Callable, tensors: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
    """The output, its tangent, and gradients of both by the first tensor."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    with fwAD.dual_level():
        pair = fwAD.unpack_dual(function(*(fwAD.make_dual(t, d) for t, d in zip(leaves, moved, strict=True))))
        return [*pair, *(torch.autograd.grad(t.sin().sum(), leaves[0], retain_graph=True)[0] for t in pair)]


def by_jvp(function: Callable, tensors: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    pair = torch.func.jvp(function, tuple(leaves), tuple(moved))
    return [*pair, *(torch.autograd.grad(t.sin().sum(), leaves[0], retain_graph=True)[0] for t in pair)]


def within_grad(function: Callable, tensors: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
    def loss(first: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, tangent = torch.func.jvp(function, (first, *tensors[1:]), tuple(moved))
        return out.sin().sum() + tangent.sin().sum(), (out, tangent)

    gradient, pair = torch.func.grad(loss, has_aux=True)(tensors[0])
    return [*pair, gradient]


@pytest.mark.parametrize("way", [in_a_level, by_jvp, within_grad])
def test_where_a_backward_follows_one_kernel_makes_output_and_tangent(way: Callable) -> None:
    tensors, moved = given()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        found = way(shifted, tensors, moved)
    calls = [event.name for event in recorded.events()]
    assert calls.count("fusegrad::flex_attention_jvp") == 1
    assert "fusegrad::flex_attention_forward" not in calls
    # PyTorch's softmax cannot be differentiated backward through a tangent of a level.
    torch.testing.assert_close(found, (by_jvp if way is in_a_level else way)(plainly, tensors, moved))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_mode_keeps_what_rounding_takes(dtype: torch.dtype) -> None:
    """For the backward: the output's low part is the forward's, to the bit where their sums are in one order."""
    q, k, v = inputs(2, 2, 20, 33, 8, 6, dtype=dtype)
    scoring = ("", [], [], [], "", [], [], [], [], [], 0.3, 0.0, None)
    out, _, _, _, low, _ = torch.ops.fusegrad.flex_attention_forward(q, k, v, *scoring, 2)
    found = torch.ops.fusegrad.flex_attention_jvp(q, k, v, q.sin(), None, v.cos(), [], [], *scoring, 2)
    whole = dense(*(t.double() for t in (q, k, v)), scale=0.3)[0]
    assert torch.equal(found[0], out)
    for part in (low, found[4]):
        assert (with_low(out, part).double() - whole).norm() < 1e-2 * (out.double() - whole).norm()
    assert torch.ops.fusegrad.flex_attention_jvp(q, k, v, q, None, None, [], [], *scoring, 0)[4].numel() == 0


def test_function_transforms() -> None:
    tensors, moved = (tuple(x) for x in given())
    func = torch.func
    torch.testing.assert_close(func.jvp(shifted, tensors, moved), func.jvp(plainly, tensors, moved))

    def loss(function: Callable) -> Callable:
        return lambda *x: function(*x).square().sum()

    for argnums in (0, (0, 1, 2, 3)):
        found, expected = (func.grad(loss(f), argnums)(*tensors) for f in (shifted, plainly))
        torch.testing.assert_close(found, expected)

    def of_primal(function: Callable) -> Callable:
        return lambda *x: func.jvp(function, x, moved)[0].square().sum()

    found, expected = (func.grad(of_primal(f), (0, 3))(*tensors) for f in (shifted, plainly))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(func.vjp(shifted, *tensors)[1](moved[0]), func.vjp(plainly, *tensors)[1](moved[0]))


@pytest.mark.parametrize("argnum", range(4))
def test_jacfwd(argnum: int) -> None:
    tensors, _ = given()
    found, expected = (torch.func.jacfwd(f, argnum)(*tensors) for f in (shifted, plainly))
    torch.testing.assert_close(found, expected)


# --- what is refused ------------------------------------------------------------------------------------------


def test_what_has_no_forward_mode() -> None:
    tensors, moved = given()

    def refused(match: str, call: Callable, error: type[Exception] = NotImplementedError) -> None:
        with pytest.raises(error, match=match), fwAD.dual_level():
            call(*(fwAD.make_dual(t, d) for t, d in zip(tensors, moved, strict=True)))

    refused(
        "max_scores must not be asked for",
        lambda q, k, v, bias: flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True)),
    )
    refused(
        "dropout_p must be at least 0 and less than 1",
        lambda q, k, v, bias: flex_attention(q, k, v, dropout_p=2.0),
        ValueError,
    )


def test_bad_tangents() -> None:
    q, k, v = (t.float() for t in inputs(1, 2, 4, 5, 3, 3))
    scoring = ("", [], [], [], "", [], [], [], [], [], 1.0, 0.0, None)
    jvp = torch.ops.fusegrad.flex_attention_jvp
    with pytest.raises(ValueError, match=r"query_tangent must be as \[1, 2, 4, 3\]"):
        jvp(q, k, v, q[:, :1], None, None, [], [], *scoring, 0)
    with pytest.raises(TypeError, match="key_tangent must have the dtype Float, but got Double"):
        jvp(q, k, v, None, k.double(), None, [], [], *scoring, 0)
    with pytest.raises(ValueError, match="with_tangent must have an index for each of the 1 buffer_tangents"):
        jvp(q, k, v, None, None, None, [], [k], *scoring, 0)
    with pytest.raises(ValueError, match="with_tangent must be ascending indices of buffers"):
        jvp(q, k, v, None, None, None, [0], [k], *scoring, 0)


def test_the_op() -> None:
    mod = trace_score_mod(lambda s, b, h, q, kv: s * 2)
    q, k, v = inputs(1, 2, 4, 5, 3, 3)
    torch.library.opcheck(
        torch.ops.fusegrad.flex_attention_jvp,
        (q, k, v, q.sin(), None, v.cos(), [], [], mod.text, [], [], [], "", [], [], [], [], [], 0.5, 0.0, None, 2),
    )
