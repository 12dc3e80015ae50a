"""Backwards whose CTAs have all keys of a head: they alone add to its dQ, which is the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from attention_reference import dense
from coverings import pairs_of
from flex_cuda_support import DEVICE, causal, inputs, relative
from fusegrad import _C, flex_attention
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of sm_90"
    ),
    pytest.mark.usefixtures("made_on_the_gpu"),
]


@contextmanager
def whole_forced(whole: bool) -> Iterator[None]:
    _C.flex.force_whole(int(whole))
    try:
        yield
    finally:
        _C.flex.force_whole(-1)


@pytest.fixture(params=[True, False], ids=["whole heads", "tiles of keys"])
def whole(request: pytest.FixtureRequest) -> Iterator[bool]:
    with whole_forced(request.param):
        yield request.param


@pytest.fixture
def whole_heads() -> Iterator[None]:
    with whole_forced(True):
        yield


def fill_memory_with_nan(like: Tensor) -> None:
    """What the backward takes next is no longer zero where it happened to be."""
    junk = [torch.full((1 << 24,), torch.nan), *(torch.full_like(like, torch.nan) for _ in range(4))]
    del junk


def assert_right(
    out: Tensor, leaves: list[Tensor], truth: Tensor, exact: list[Tensor], limit: float = 1e-2, again: bool = True
) -> None:
    upstream = torch.randn_like(out)
    fill_memory_with_nan(out)
    grads = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    for grad, right in zip(grads, torch.autograd.grad(truth, exact, upstream.double()), strict=True):
        assert relative(grad, right) <= limit
    if again:
        for grad, same in zip(grads, torch.autograd.grad(out, leaves, upstream), strict=True):
            assert torch.equal(grad, same)


# --- masks ----------------------------------------------------------------------------------------------------


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 100 + 100 * h)


def late(b, h, q, kv):
    """The first 300 queries have no key: whole tiles, and a part of one."""
    return (q >= kv) & (q >= 300)


def documents(b, h, q, kv):
    return (q // 150 + b) % 5 == (kv // 150 + b) % 5


MASKS = {"all": None, "causal": causal, "window": window, "late": late, "documents": documents}


@pairs_of(
    {"d": [24, 64, 80, 128], "m, n": [(512, 512), (700, 530), (330, 1000), (390, 120)], "name": [*MASKS]}, tests=8
)
def test_masks(whole: bool, name: str, m: int, n: int, d: int) -> None:
    mask_mod = MASKS[name]
    mask = None if mask_mod is None else create_block_mask(mask_mod, 2, 2, m, n, device=DEVICE)
    places = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None], torch.arange(m)[:, None]
    takes = None if mask_mod is None else mask_mod(*places, torch.arange(n)).expand(2, 2, m, n)
    leaves = inputs(2, 2, m, n, d)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = flex_attention(*leaves, block_mask=mask)
    assert_right(out, leaves, dense(*exact, mask=takes).out, exact, again=whole)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("block", [64, 96, 128, (128, 256)], ids=str)
def test_lists_without_some_queries(whole_heads: None, block: int | tuple[int, int], d: int) -> None:
    """By the block mask's lists alone whole tiles of queries have no key."""
    m = n = 768
    mask = create_block_mask(lambda b, h, q, kv: ((q < 128) | (q >= 512)) & (kv >= 256), 1, 1, m, n, DEVICE, block)
    rows, cols = mask.BLOCK_SIZE
    takes = mask.to_dense()[0].bool().repeat_interleave(rows, 1).repeat_interleave(cols, 2)[:, :m, :n]
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=mask.BLOCK_SIZE, seq_lengths=(m, n))
    leaves = inputs(3, 2, m, n, d)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = flex_attention(*leaves, block_mask=mask)
    assert_right(out, leaves, dense(*exact, mask=takes).out, exact)


# --- score_mods -----------------------------------------------------------------------------------------------


def pairs(m: int, n: int) -> tuple[Callable, Tensor]:
    bias = torch.randn(4, m, n).bfloat16().requires_grad_()
    return lambda t: lambda s, b, h, q, kv: s + t[h, q, kv], bias


def keys(m: int, n: int) -> tuple[Callable, Tensor]:
    bias = torch.randn(4, n, requires_grad=True)
    return lambda t: lambda s, b, h, q, kv: s + t[h, kv], bias


def queries(m: int, n: int) -> tuple[Callable, Tensor]:
    bias = torch.randn(m, requires_grad=True)
    return lambda t: lambda s, b, h, q, kv: s * torch.tanh(t[q]), bias


def distances(m: int, n: int) -> tuple[Callable, Tensor]:
    bias = torch.randn(4, m + n, requires_grad=True)
    return lambda t: lambda s, b, h, q, kv: s + t[h, q - kv + n], bias


@pairs_of({"d": [16, 32, 64, 128], "m, n": [(256, 256), (330, 450)], "of": [pairs, keys, queries, distances]})
def test_biases(whole_heads: None, of: Callable, m: int, n: int, d: int) -> None:
    made, bias = of(m, n)
    leaves = [*inputs(5, 4, m, n, d), bias]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = flex_attention(*leaves[:3], made(bias))
    assert_right(out, leaves, dense(*exact[:3], made(exact[3])).out, exact, again=False)


@pytest.mark.parametrize("d", [64, 128])
def test_grouped_heads(whole_heads: None, d: int) -> None:
    leaves = inputs(3, 6, 300, 400, d, hkv=2)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = flex_attention(*leaves, enable_gqa=True)
    assert_right(out, leaves, dense(*exact).out, exact)


# --- how it is called -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["all pairs", "block mask"])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_in_place_and_deterministic(whole_heads: None, masked: bool, d: int) -> None:
    leaves = inputs(4, 4, 400, 400, d)
    upstream = torch.randn(4, 4, 400, d).bfloat16()
    mask = create_block_mask(late, 1, 1, 400, 400, device=DEVICE) if masked else None
    found = []
    for options in ({}, {"deterministic": True}, {"inplace": True}):
        out = flex_attention(*(t * 1 for t in leaves), block_mask=mask, **options)
        found.append(torch.autograd.grad(out, leaves, upstream))
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], grads, strict=True))


@pytest.mark.parametrize("heads, length, d", [(640, 256, 64), (264, 384, 32), (530, 200, 96)], ids=str)
def test_many_heads(heads: int, length: int, d: int) -> None:
    """Where nothing is forced: more heads than CTAs."""
    leaves = inputs(heads // 2, 2, length, length, d)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = flex_attention(*leaves)
    assert_right(out, leaves, dense(*exact).out, exact)


@pytest.mark.parametrize("d", [64, 128])
def test_any_strides(whole_heads: None, d: int) -> None:
    """Rows that do not begin at multiples of 16 bytes, and heads between a row's columns."""
    wide = [torch.randn(2, 300, 3, d + 6).bfloat16().requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in wide]
    cut = [t[..., 3 : d + 3].transpose(1, 2) for t in wide]
    out = flex_attention(*cut)
    assert_right(out, wide, dense(*(t[..., 3 : d + 3].transpose(1, 2) for t in exact)).out, exact)
