"""flex_attention: values and gradients against float64 formulas, with every kind of mask, bias and layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import score_mods
import torch
from attention_reference import dense, dropout_weight, one_by_one, over_all
from coverings import each_of, rows_of
from fusegrad import flex_attention
from support import acc_of, assert_as_good_as_eager, rmse
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask

pytestmark = pytest.mark.usefixtures("each_flex_device")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BOTH = AuxRequest(lse=True, max_scores=True)


def on_cuda() -> bool:
    return torch.get_default_device().type == "cuda"


def widest() -> torch.dtype:
    """The dtype of the least rounding."""
    return torch.float32 if on_cuda() else torch.float64


def causal(b, h, q, kv):
    return q >= kv


def block_mask(mask: Callable, m: int, n: int, block: int | tuple[int, int] = 128, b=None, h=None) -> BlockMask:
    return create_block_mask(mask, b, h, m, n, device=torch.get_default_device().type, BLOCK_SIZE=block)


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    M: int
    N: int
    D: int
    E: int
    Hkv: int = 0
    Bkv: int = 0

    def __str__(self) -> str:
        return "-".join(f"{k}{v}" for k, v in vars(self).items() if v)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        dtype = widest() if dtype is None else dtype
        b, h = self.Bkv or self.B, self.Hkv or self.H
        shapes = [(self.B, self.H, self.M, self.D), (b, h, self.N, self.D), (b, h, self.N, self.E)]
        return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


SIZES = [
    Sizes(2, 3, 70, 130, 8, 8),
    Sizes(1, 1, 300, 300, 64, 64),
    Sizes(2, 4, 65, 33, 16, 24, Hkv=2),
    Sizes(3, 2, 17, 40, 5, 3, Hkv=1, Bkv=1),
    Sizes(1, 2, 130, 257, 100, 1),
    Sizes(1, 1, 40, 600, 256, 256),
    Sizes(2, 1, 1, 1, 1, 1),
]


def leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def check(
    tensors: list[Tensor],
    make: Callable[[list[Tensor]], Callable | None],
    buffers: list[Tensor],
    mask: BlockMask | None = None,
    allowed: Tensor | None = None,
    aux: bool = True,
    **options,
) -> None:
    """Outputs and all gradients by rule 12 of the contract; `make` makes the score_mod of its buffers."""
    dtype = tensors[0].dtype
    acc = acc_of(dtype)
    q, k, v, *held = tensors + buffers
    sizes = (*q.shape[:3], k.shape[2])
    weight = dropout_weight(options["dropout_p"], sizes) if "dropout_p" in options else None
    out, found = flex_attention(q, k, v, make(held), mask, return_aux=BOTH, **options)
    ours = [out, found.lse, found.max_scores]
    assert out.dtype == dtype and found.lse.dtype == acc and found.max_scores.dtype == acc
    upstream = [torch.randn_like(t) for t in (ours if aux else ours[:1])]
    inputs = tensors + buffers
    grads = torch.autograd.grad(ours[: len(upstream)], inputs, upstream, allow_unused=True)

    def plain(wide: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        given = leaves(inputs, wide)
        result = dense(*given[:3], make(given[3:]), allowed, options.get("scale"), weight=weight)
        expected = list(result)
        wanted = [u.to(e.dtype) for u, e in zip(upstream, expected, strict=False)]
        found = torch.autograd.grad(expected[: len(wanted)], given, wanted, materialize_grads=True)
        return expected, list(found)

    truth, truth_grads = plain(torch.float64)
    eager, eager_grads = plain(dtype)
    names = ["out", "lse", "max_scores", *(f"gradient {i}" for i in range(len(inputs)))]
    for name, x, e, t in zip(names, [*ours, *grads], [*eager, *eager_grads], [*truth, *truth_grads], strict=True):
        if x is None:
            assert not t.any()
            continue
        finite = t.isfinite()
        assert torch.equal(x.double()[~finite], t[~finite]), name
        good(x[finite], e[finite], t[finite], name)


def good(ours: Tensor, eager: Tensor, truth: Tensor, name: str) -> None:
    """Rule 12; of a handful of numbers eager's error may be small by luck, where two roundings are allowed, or where
    what is of order one cancels, a few of float32: sums come in any order."""
    scale = truth.double().square().mean().sqrt().item() if truth.numel() else 0.0
    few = max(2**-18, torch.finfo(ours.dtype).eps if ours.dtype.itemsize == 2 else 0.0) * scale + 2**-22
    if 0 < truth.numel() <= 16 and ours.dtype != torch.float64 and rmse(ours, truth) <= few:
        return
    assert_as_good_as_eager(ours, eager, truth, name)


def full_bias(held: list[Tensor]) -> Callable:
    (bias,) = held
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@rows_of("sizes", [*SIZES])
def test_parity(dtype: torch.dtype, sizes: Sizes) -> None:
    gqa = bool(sizes.Hkv)
    tensors = sizes.tensors(dtype)
    check(tensors, lambda _: None, [], enable_gqa=gqa)
    allowed = torch.ones(sizes.M, sizes.N).tril().bool()
    mask = block_mask(causal, sizes.M, sizes.N, (32, 48))
    check(tensors, lambda _: None, [], mask, allowed, enable_gqa=gqa, scale=1.3 * sizes.D**-0.5, aux=False)
    bias = torch.randn(sizes.H, sizes.M, sizes.N).to(dtype).requires_grad_()
    check(tensors, full_bias, [bias], mask, allowed, enable_gqa=gqa)


WIDE = [Sizes(1, 4, 33, 70, 512, 512, Hkv=2), Sizes(1, 2, 40, 40, 576, 512), Sizes(2, 1, 17, 20, 300, 257)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@rows_of("sizes", WIDE)
def test_heads_of_more_than_256(dtype: torch.dtype, sizes: Sizes) -> None:
    tensors = sizes.tensors(dtype)
    bias = torch.randn(sizes.H, sizes.M, sizes.N).to(dtype).requires_grad_()
    mask = block_mask(causal, sizes.M, sizes.N, (32, 16))
    allowed = torch.ones(sizes.M, sizes.N).tril().bool()
    gqa = bool(sizes.Hkv)
    check(tensors, lambda _: None, [], mask, allowed, enable_gqa=gqa, aux=False)
    check(tensors, full_bias, [bias], mask, allowed, enable_gqa=gqa)
    check(tensors, full_bias, [bias], mask, allowed, enable_gqa=gqa, dropout_p=0.2, aux=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_of_the_output_does_not_reach_the_gradients(dtype: torch.dtype) -> None:
    """With few keys dP and its mean nearly cancel; the gradients are still as good as the truth rounded once, or twice
    where tensor cores multiply what was rounded."""
    q, k, v = Sizes(1, 1, 40, 3, 256, 256).tensors(dtype)
    upstream = torch.randn(1, 1, 40, 256).to(dtype)
    grads = torch.autograd.grad(flex_attention(q, k, v, scale=0.3), (q, k, v), upstream)
    wide = leaves([q, k, v], torch.float64)
    truth = torch.autograd.grad(dense(*wide, scale=0.3).out, wide, upstream.double())
    for grad, t in zip(grads, truth, strict=True):
        assert rmse(grad, t) <= (1.6 if on_cuda() else 1.3) * rmse(t.to(dtype), t)


@rows_of("case", [*score_mods.CASES, *score_mods.OWN_DERIVATIVES], tests=12)
def test_score_mods_from_the_field(case: score_mods.Case) -> None:
    sizes = (2, 2, 6, 8)
    tensors = Sizes(*sizes, 8, 5).tensors()
    wide = leaves(tensors, torch.float64)
    torch.set_default_dtype(torch.float64)  # PyTorch's own arithmetic on integers, for the reference
    try:
        made = []
        for dtype in (torch.float64, widest()):
            generator = torch.Generator(torch.get_default_device()).manual_seed(0)
            made.append(case.make(*sizes, dtype, generator))
        score_mod, mask_mod, wide_held = made[0]
        allowed = None if mask_mod is None else one_by_one(mask_mod, sizes)
        expected = dense(*wide, score_mod, allowed, evaluate=one_by_one)
    finally:
        torch.set_default_dtype(torch.float32)
    score_mod, mask_mod, held = made[1]
    mask = None if mask_mod is None else block_mask(lambda b, h, q, kv: mask_mod(b, h, q, kv), 6, 8, 4, 2, 2)
    out, aux = flex_attention(*tensors, score_mod, mask, return_aux=BOTH)
    inputs = [*tensors, *held]
    upstream = [torch.randn_like(t) for t in (out, aux.lse)]
    # What was captured may hang on one graph of both.
    grads = torch.autograd.grad((out, aux.lse), inputs, upstream, retain_graph=True)
    wide_upstream = [u.double() for u in upstream]
    expected_grads = torch.autograd.grad(expected[:2], [*wide, *wide_held], wide_upstream, materialize_grads=True)
    for ours, truth in zip([out, *aux, *grads], [*expected, *expected_grads], strict=True):
        loose = 0.02 if ours.dtype == torch.bfloat16 else 1e-9 if ours.dtype == torch.float64 else 2e-5
        scale = max(1.0, truth.abs().nan_to_num(posinf=0).max().item())
        torch.testing.assert_close(ours.double(), truth.double(), rtol=loose, atol=loose * scale)


# --- masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broadcast", [True, False])
@rows_of("block", [128, (16, 32), (7, 13), 1])
def test_block_masks_of_any_block_size(block, broadcast: bool) -> None:
    b, h = (None, None) if broadcast else (2, 2)
    table = torch.rand(2, 2, 33, 40) < 0.3

    def mask_mod(b, h, q, kv):
        return table[b, h, q, kv] & (kv > 2)

    tensors = Sizes(2, 2, 33, 40, 8, 8).tensors(torch.float32)
    mask = block_mask(mask_mod, 33, 40, block, b, h)
    allowed = over_all(mask_mod, (2, 2, 33, 40))
    if broadcast:
        # The blocks of the first head, with everybody's own mask inside.
        size = (block, block) if isinstance(block, int) else block
        listed = mask.to_dense()[0, 0].bool()
        listed = listed.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[:33, :40]
        full = torch.zeros_like(listed)
        if mask.full_kv_num_blocks is not None:
            only_full = BlockMask.from_kv_blocks(
                mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=size, compute_q_blocks=False
            )
            full = only_full.to_dense()[0, 0].bool()
            full = full.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[:33, :40]
        allowed = (allowed | full) & listed
    check(tensors, lambda _: None, [], mask, allowed)


def test_lists_of_blocks_count_and_not_the_mask_mod_alone() -> None:
    """Full blocks skip mask_mod, unlisted ones are excluded whatever it says; rows may have no block at all."""
    count = torch.tensor([[[1, 0, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[1, 0, 2], [0, 1, 2], [2, 0, 1]]]], dtype=torch.int32)
    full_count = torch.tensor([[[1, 0, 0]]], dtype=torch.int32)
    full_index = torch.tensor([[[[2, 0, 1], [0, 1, 2], [0, 1, 2]]]], dtype=torch.int32)
    allowed = torch.zeros(24, 24, dtype=torch.bool)
    for row, col in ((0, 1), (2, 2), (2, 0)):
        allowed[row * 8 : row * 8 + 8, col * 8 : col * 8 + 8] = True
    tensors = Sizes(1, 2, 24, 24, 8, 8).tensors(torch.float32)

    def even(b, h, q, kv):
        return kv % 2 == 0

    partial = allowed & (torch.arange(24) % 2 == 0)
    full = torch.zeros_like(allowed)
    full[:8, 16:] = True
    for mask_mod, dtype, expected in ((None, torch.int32, allowed | full), (even, torch.int64, partial | full)):
        lists = [t.to(dtype) for t in (count, index, full_count, full_index)]
        check(tensors, lambda _: None, [], BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, mask_mod=mask_mod), expected)
    only_partial = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=8, mask_mod=even, compute_q_blocks=False)
    check(tensors, lambda _: None, [], only_partial, partial)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_key(dtype: torch.dtype) -> None:
    q, k, v = Sizes(1, 2, 70, 40, 8, 8).tensors(dtype)
    scale = torch.ones((), dtype=dtype, requires_grad=True)
    mask = block_mask(lambda b, h, q, kv: (q >= 32) & (q != 50), 70, 40, 16)
    out, aux = flex_attention(q, k, v, lambda s, b, h, q, kv: s * scale, mask, return_aux=BOTH)
    empty = [*range(32), 50]
    assert not out[:, :, empty].any()
    assert (aux.lse[:, :, empty] == -math.inf).all() and (aux.max_scores[:, :, empty] == -math.inf).all()
    # An upstream gradient of nan, as where the caller takes lse - lse.
    upstream = torch.randn_like(aux.lse).index_fill(2, torch.tensor(empty), math.nan)
    grads = torch.autograd.grad((out, aux.lse), (q, k, v, scale), (torch.randn_like(out), upstream))
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, :, empty].any()
    nothing = block_mask(lambda b, h, q, kv: q < 0, 70, 40)
    out = flex_attention(q, k, v, block_mask=nothing)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out.any() and not any(g.any() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scores_of_minus_infinity_behave_as_masked(dtype: torch.dtype) -> None:
    tensors = Sizes(1, 2, 40, 150, 8, 8).tensors(dtype)
    bias = torch.randn(150, dtype=dtype, requires_grad=True)
    allowed = torch.ones(40, 150).tril().bool()

    def where(held: list[Tensor]) -> Callable:
        return lambda s, b, h, q, kv: torch.where(q >= kv, s * held[0][kv], -math.inf)

    check(tensors, where, [bias], None, allowed)
    # log(0): the derivative of the score_mod there is infinite, and must not matter.
    weight = torch.rand(150, dtype=dtype)
    weight[::3] = 0
    weight.requires_grad_()
    q, k, v = tensors
    out = flex_attention(q, k, v, lambda s, b, h, q, kv: s + torch.log(weight[kv]))
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v, weight), upstream)
    kept = weight > 0
    small = weight.detach()[kept].requires_grad_()
    expected = dense(q, k[:, :, kept], v[:, :, kept], lambda s, b, h, q, kv: s + torch.log(small[kv])).out
    expected_grads = torch.autograd.grad(expected, (q, k, v, small), upstream)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads[:3], expected_grads[:3])
    torch.testing.assert_close(grads[3][kept], expected_grads[3], rtol=1e-4, atol=1e-5)
    assert not grads[3][~kept].any()


def test_masked_pairs_read_nothing_out_of_range() -> None:
    q, k, v = Sizes(1, 1, 40, 40, 8, 8).tensors()
    bias = torch.randn(20, dtype=q.dtype, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        return s + bias[kv]

    mask = block_mask(lambda b, h, q, kv: kv < 20, 40, 40, 16)
    out = flex_attention(q, k, v, score_mod, mask)
    expected = dense(q, k[:, :, :20], v[:, :, :20], score_mod).out
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x, (q, bias), torch.ones_like(out)) for x in (out, expected)]
    torch.testing.assert_close(*grads)


def wrong_list() -> BlockMask:
    """Lists a block that there is not."""
    count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.full((1, 1, 1, 1), 3, dtype=torch.int32)
    return BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=64, seq_lengths=(40, 40), compute_q_blocks=False)


def test_an_index_out_of_range() -> None:
    """An error on the CPU; on CUDA, where nothing may wait for the GPU, a read gives nan, 0 or false."""
    q, k, v = Sizes(1, 1, 40, 40, 8, 8).tensors()
    bias = torch.randn(20, dtype=q.dtype, requires_grad=True)
    table = torch.ones(30, dtype=torch.bool)
    partial = block_mask(causal, 40, 40, 16)
    partial.mask_mod = lambda b, h, q, kv: table[q]

    def score_mod(s, b, h, q, kv):
        return s + torch.where(q == 7, bias[kv], 0.0)

    if not on_cuda():
        with pytest.raises(
            IndexError, match=r"flex_attention: score_mod: index 20 .* dimension 0 .* buffer 0.* size 20"
        ):
            flex_attention(q, k, v, score_mod)
        with pytest.raises(IndexError, match="flex_attention: mask_mod: index 3"):
            flex_attention(q, k, v, block_mask=partial)
        with pytest.raises(IndexError, match=r"must list key blocks in \[0, 1\), but got 3"):
            flex_attention(q, k, v, block_mask=wrong_list())
        return
    out, aux = flex_attention(q, k, v, score_mod, return_aux=BOTH)
    hit = torch.arange(40) == 7
    assert torch.equal(out.isnan().all(-1)[0, 0], hit) and torch.equal(aux.lse.isnan()[0, 0], hit)
    assert not out[:, :, ~hit].isnan().any()
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert torch.equal(grads[0].isnan().all(-1)[0, 0], hit) and not grads[0][:, :, ~hit].isnan().any()
    assert all(g.isnan().all() for g in grads[1:])
    # What is read beyond the mask's table is false: there are the rows of full blocks alone.
    out = flex_attention(q, k, v, block_mask=partial)
    assert out.isfinite().all() and out[:, :, :30].ne(0).all()
    out, aux = flex_attention(q, k, v, block_mask=wrong_list(), return_aux=BOTH)
    assert out.isnan().all() and aux.lse.isnan().all()
    assert torch.autograd.grad(out.sum(), q)[0].isnan().all()


# --- captured buffers -----------------------------------------------------------------------------------------


def test_buffers_of_any_kind() -> None:
    tensors = Sizes(2, 2, 30, 50, 8, 8).tensors(torch.float32)
    half = torch.randn(50).bfloat16().requires_grad_()
    wide = torch.randn(2, 30, dtype=torch.float64, requires_grad=True)
    row = torch.randn(1, 50, requires_grad=True)
    number = torch.tensor(0.3, requires_grad=True)
    frozen = torch.randn(50)
    place = torch.randint(0, 50, (30,))

    def run(q, k, v, half, wide, row, number, attention):
        expanded, strided = row.expand(30, 50), (wide * 2).t()

        def score_mod(s, b, h, q, kv):
            s = s * (1 + number) + half[kv].to(s.dtype) * frozen[place[q]].to(s.dtype)
            return s + expanded[q, kv] * half[place[q]].to(s.dtype) + strided[q, b].to(s.dtype)

        return attention(q, k, v, score_mod)

    inputs = [*tensors, half, wide, row, number]
    out = run(*inputs, flex_attention)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, upstream)
    given = leaves(inputs, torch.float64)
    expected = run(*given, lambda *a: dense(*a).out)
    expected_grads = torch.autograd.grad(expected, given, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for x, g, e in zip(inputs, grads, expected_grads, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape
        tolerance = 1e-2 if x.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(g.double(), e, rtol=tolerance, atol=tolerance)


LARGE = {
    "every pair": ((2, 2, 150, 260), lambda t, q, kv, b, h: t[b, h, q, kv]),
    "of a head": ((2, 300, 260), lambda t, q, kv, b, h: t[h, q, kv]),
    "of all heads": ((300, 260), lambda t, q, kv, b, h: t[q, kv]),
    "of a batch": ((2, 300, 260), lambda t, q, kv, b, h: t[b, q, kv]),
    "by key": ((2, 70000), lambda t, q, kv, b, h: t[h, kv * 2 + 1]),
    "by difference": ((2, 70000), lambda t, q, kv, b, h: t[h, q - kv + 30000]),
    "two reads": ((300, 300), lambda t, q, kv, b, h: t[q, kv] * t[kv, q]),
    "by table": ((70000,), lambda t, q, kv, b, h: t[(q * 7919 + kv * 31 + h) % 70000]),
}


@each_of({"threads": [1, 2, 5], "name": [*LARGE]})
def test_large_buffers(name: str, threads: int) -> None:
    """However the work is cut among threads, no contribution is lost or counted twice."""
    sizes, read = LARGE[name]
    m = 150 if name == "every pair" else 300
    tensors = Sizes(2, 2, m, 260, 4, 4).tensors(torch.float32)
    table = torch.randn(sizes, requires_grad=True)
    mask = block_mask(lambda b, h, q, kv: (q + kv) % 3 != 0, m, 260, 64)
    allowed = over_all(lambda b, h, q, kv: (q + kv) % 3 != 0, (1, 1, m, 260))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(tensors, lambda held: lambda s, b, h, q, kv: s + read(held[0], q, kv, b, h), [table], mask, allowed)
    finally:
        torch.set_num_threads(before)


def test_a_score_mod_that_ignores_the_score() -> None:
    tensors = Sizes(1, 2, 20, 30, 4, 4).tensors()
    bias = torch.randn(30, dtype=tensors[0].dtype, requires_grad=True)
    check(tensors, lambda held: lambda s, b, h, q, kv: held[0][kv] + 0 * q, [bias])


def test_gradients_that_are_not_wanted_are_not_made() -> None:
    tensors = Sizes(1, 2, 40, 30, 8, 8).tensors(torch.float32)
    bias = torch.randn(30, requires_grad=True)
    everything = [*tensors, bias]
    upstream = torch.randn(1, 2, 40, 8)

    def grads_of(wanted: list[int]) -> dict[int, Tensor]:
        given = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(everything)]
        out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + given[3][kv])
        out.backward(upstream)
        assert all((t.grad is not None) == (i in wanted) for i, t in enumerate(given))
        return {i: given[i].grad for i in wanted}

    full = grads_of([0, 1, 2, 3])
    for wanted in ([0], [1], [2], [3], [0, 2], [1, 3]):
        for i, grad in grads_of(wanted).items():
            torch.testing.assert_close(grad, full[i], rtol=1e-6 if on_cuda() else 0, atol=1e-6 if on_cuda() else 0)


@pytest.mark.parametrize("queries", [1, 3, 16, 17])
@rows_of("dropout_p", [0.0, 0.2])
def test_few_queries_of_many_heads(queries: int, dropout_p: float) -> None:
    """On the CPU the query heads of a key head are one task then, up to 64 rows; scores differ by head and query."""
    sizes = Sizes(3, 8, queries, 600, 20, 12, Hkv=2)
    q, k, v = given = sizes.tensors()
    bias = torch.randn(8, queries, 600, dtype=widest()).requires_grad_()
    weight = dropout_weight(dropout_p, (3, 8, queries, 600)) if dropout_p > 0 else None

    def score_mod(s, b, h, i, j):
        return s * (1 + 0.125 * h) + bias[h, i, j]

    how = {"dropout_p": dropout_p} if dropout_p > 0 else {}
    out, aux = flex_attention(q, k, v, score_mod, enable_gqa=True, return_aux=BOTH, **how)
    expected = dense(q, k, v, score_mod, weight=weight)
    limits = {"rtol": 1e-3, "atol": 1e-4} if on_cuda() else {"rtol": 1e-9, "atol": 1e-10}
    for ours, truth in zip((out, aux.lse, aux.max_scores), expected, strict=True):
        torch.testing.assert_close(ours.double(), truth.double(), **limits)
    upstream = torch.randn_like(expected.out)
    wanted = [*given, bias]
    grads = torch.autograd.grad(out, wanted, upstream)
    for ours, truth in zip(grads, torch.autograd.grad(expected.out, wanted, upstream), strict=True):
        torch.testing.assert_close(ours, truth, **limits)


@pytest.mark.cpu_only
def test_gradcheck() -> None:
    q, k, v = Sizes(2, 2, 5, 7, 3, 2, Hkv=1).tensors()
    bias, number = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.tensor(0.4, dtype=torch.float64)
    mask = block_mask(causal, 5, 7, 2)

    def call(q, k, v, bias, number):
        def score_mod(s, b, h, q, kv):
            return 3 * torch.tanh(s * number / 3) + bias[kv] * bias[q]

        out, aux = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_aux=BOTH)
        return out, aux.lse, aux.max_scores

    assert torch.autograd.gradcheck(call, (q, k, v, bias, number.requires_grad_()))


# --- outputs and layouts --------------------------------------------------------------------------------------


def test_what_is_returned() -> None:
    q, k, v = Sizes(1, 2, 10, 12, 4, 4).tensors(torch.float32)
    expected = dense(*leaves([q, k, v], torch.float64))
    out = flex_attention(q, k, v)
    assert isinstance(out, Tensor)
    pair = flex_attention(q, k, v, return_lse=True)
    assert isinstance(pair, tuple) and torch.equal(pair[0], out)
    torch.testing.assert_close(pair[1].double(), expected.lse, rtol=1e-6, atol=1e-6)
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), BOTH):
        result, aux = flex_attention(q, k, v, return_aux=request, kernel_options={"BLOCK_M": 64})
        assert isinstance(aux, AuxOutput)
        torch.testing.assert_close(result, out, rtol=1e-6 if on_cuda() else 0, atol=1e-6 if on_cuda() else 0)
        assert (aux.lse is not None) == request.lse and (aux.max_scores is not None) == request.max_scores
    torch.testing.assert_close(aux.max_scores.double(), expected.max_scores, rtol=1e-6, atol=1e-6)
    # lse alone can be differentiated, and so can max_scores.
    for i in (1, 2):
        ours = flex_attention(q, k, v, return_aux=BOTH)[1][i - 1]
        (grad,) = torch.autograd.grad(ours.sum(), q)
        (truth,) = torch.autograd.grad(dense(q, k, v)[i].sum(), q)
        torch.testing.assert_close(grad, truth)


def test_the_gradient_of_max_scores_is_shared_by_ties() -> None:
    q, k, v = (torch.randint(-1, 2, (1, 2, 40, 4)).to(widest()).requires_grad_() for _ in range(3))
    k = torch.cat([k, k, k[:, :, :30]], 2).detach().requires_grad_()
    v = torch.randn(1, 2, 110, 4, dtype=q.dtype)
    mask = block_mask(lambda b, h, q, kv: kv != 3, 40, 110, 16)
    max_scores = flex_attention(q, k, v, block_mask=mask, return_aux=BOTH)[1].max_scores
    expected = dense(q, k, v, None, torch.arange(110) != 3).max_scores
    upstream = torch.randn_like(expected)
    assert torch.equal(max_scores, expected)
    ours, truth = (torch.autograd.grad(x, (q, k), upstream) for x in (max_scores, expected))
    torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@rows_of("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2)])
def test_any_strides(order: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = []
    for t in Sizes(2, 3, 40, 50, 20, 20).tensors(dtype):
        laid = t.detach().permute(order).contiguous()
        tensors.append(laid.permute(*torch.argsort(torch.tensor(order)).tolist()).requires_grad_())
    check(tensors, lambda _: None, [])
    assert all(torch.autograd.grad(flex_attention(*tensors).sum(), t)[0].stride() == t.stride() for t in tensors)
    # A slice with gaps, and a batch that is expanded.
    q, k, v = tensors
    wide = torch.cat([q, q], -1).detach()[..., 5:25]
    one = k[:1].detach().expand(2, 3, 50, 20)
    ours, truth = flex_attention(wide, one, v), flex_attention(wide.contiguous(), one.contiguous(), v)
    assert torch.equal(ours, truth)


def test_as_pytorch_has_it() -> None:
    """Output, strides, lse and block masks of torch.nn.attention.flex_attention.flex_attention itself."""
    from torch.nn.attention import flex_attention as torch_flex

    torch._dynamo.reset()
    q, k, v = (t.detach() for t in Sizes(2, 4, 40, 50, 16, 8, Hkv=2).tensors(torch.float32))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(4)

    def score_mod(s, b, h, q, kv):
        return s * 0.5 + bias[h] * (q - kv)

    mask = block_mask(lambda b, h, q, kv: (q >= kv) | (kv < 3), 40, 50, 16)
    arguments = (q, k, v, score_mod, mask, 0.3, True)
    out, lse = flex_attention(*arguments, return_lse=True)
    expected, expected_lse = torch_flex.flex_attention(*arguments, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert out.stride() == expected.stride()


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(0, 2, 3, 4, 8, 8),
        Sizes(2, 0, 3, 4, 8, 8),
        Sizes(2, 2, 0, 4, 8, 8),
        Sizes(2, 2, 3, 0, 8, 8),
        Sizes(2, 2, 3, 4, 8, 0),
    ],
    ids=["no batch", "no head", "no query", "no key", "no value size"],
)
def test_empty(sizes: Sizes) -> None:
    q, k, v = sizes.tensors(torch.float32)
    bias = torch.randn(5, requires_grad=True)
    out, aux = flex_attention(q, k, v, lambda s, b, h, q, kv: s + bias[kv], return_aux=BOTH)
    assert out.shape == (*q.shape[:3], v.size(3)) and not out.any()
    if sizes.N == 0:
        assert (aux.lse == -math.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias), create_graph=True)
    second = torch.autograd.grad([g.square().sum() for g in grads], (q, k, v, bias), allow_unused=True)
    assert not any(g.any() for g in (*grads, *second) if g is not None)
    moved = torch.func.jvp(lambda *t: flex_attention(*t), *[tuple(t.detach() for t in (q, k, v))] * 2)
    assert all(t.shape == out.shape and not t.any() for t in moved)
    if sizes.M and sizes.N and sizes.B and sizes.H:
        mask = block_mask(causal, sizes.M, sizes.N)
        assert flex_attention(q, k, v, block_mask=mask).shape == out.shape


def test_values_that_are_not_finite_show() -> None:
    q, k, v = Sizes(1, 1, 20, 30, 4, 4).tensors(torch.float32)
    q.data[0, 0, 3] = math.nan
    out, aux = flex_attention(q, k, v, return_aux=BOTH)
    assert out[0, 0, 3].isnan().all() and aux.lse[0, 0, 3].isnan() and out[0, 0, 4].isfinite().all()
    grads = torch.autograd.grad(out[0, 0, :3].sum(), (q, k, v))
    assert grads[0][0, 0, :3].isfinite().all()
    large = flex_attention(q.detach().nan_to_num(1.0) * 1e4, k * 1e4, v)
    assert large.isfinite().all()


@pytest.mark.cpu_only
@pytest.mark.parametrize("captured", ["dot products", "keys", "differences", "vectors of differences"])
def test_large_buffers_in_which_many_pairs_meet(captured: str) -> None:
    """More than 65536 elements, a thousand pairs and more for each: float32 sums one after the other would be off."""
    H, G, S, D, R = 16, 4, 512, 16, 64
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "dot products": ((H, S, R), (G, S, R)),
        "keys": ((1, 1), (H, 8 * S)),
        "differences": ((1, 1), (H, 9 * S)),
        "vectors of differences": ((H, S, R), (2 * S + 8, R)),
    }[captured]
    inputs = [torch.randn(x, generator=generator) for x in ((1, H, S, D), (1, G, S, D), (1, G, S, D), *shapes)]
    upstream = torch.randn(1, H, S, D, generator=generator)
    distance = torch.arange(S)[:, None] - torch.arange(S) + S

    def eager(dtype: torch.dtype) -> list[Tensor]:
        q, k, v, x, y = leaves = [t.to(dtype).requires_grad_() for t in inputs]
        k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
        added = {
            "dot products": lambda: 0.125 * x @ y.repeat_interleave(H // G, 0).mT,
            "keys": lambda: y[:, None, :S],
            "differences": lambda: y[:, distance],
            "vectors of differences": lambda: 0.125 * (x @ y.mT).gather(-1, distance.expand(H, -1, -1)),
        }[captured]()
        out = (q @ k.mT / D**0.5 + added).softmax(-1) @ v
        return list(torch.autograd.grad(out, leaves, upstream.to(dtype), materialize_grads=True, allow_unused=True))

    q, k, v, x, y = leaves = [t.clone().requires_grad_() for t in inputs]
    mod = {
        "dot products": lambda s, b, h, i, j: s + 0.125 * torch.dot(x[h, i], y[h // (H // G), j]),
        "keys": lambda s, b, h, i, j: s + y[h, j],
        "differences": lambda s, b, h, i, j: s + y[h, i - j + S],
        "vectors of differences": lambda s, b, h, i, j: s + 0.125 * torch.dot(x[h, i], y[i - j + S]),
    }[captured]
    out = flex_attention(q, k, v, mod, enable_gqa=True)
    ours = torch.autograd.grad(out, leaves, upstream, materialize_grads=True, allow_unused=True)
    for name, one, in_float, truth in zip("qkvxy", ours, eager(torch.float32), eager(torch.float64), strict=True):
        assert_as_good_as_eager(one, in_float, truth, f"{captured}, gradient of {name}")
