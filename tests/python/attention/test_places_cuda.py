"""Indices of tables that kernels read from copies with fewer bytes, on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_reference import dense
from coverings import pairs_of
from flex_cuda_support import ON_EACH_FAMILY, inputs, relative
from fusegrad import flex_attention
from torch import Tensor

pytestmark = ON_EACH_FAMILY

# (B, H, M, N) of so many pairs that copies of 64 bits pay: short ones, whose kernels take them in the order of threads,
# and long ones.
SIZES = [(64, 32, 64, 64), (96, 32, 49, 49), (90, 24, 33, 64), (160, 32, 64, 17), (3, 40, 200, 200), (16, 24, 100, 130)]
# What does not fit fewer bytes, or is beyond the table, though its low bytes may look like one of its elements.
WILD = [3 + (1 << 32), 3 + (1 << 16), 3 + (1 << 8), (1 << 63) - 1, -(1 << 63), (1 << 31) + 5, -(1 << 31) + 2, 128, 255]
WILD += [-129, -256 + 7, 32768, -32769, 65535, -65536]


def indices(table: int, sizes: tuple[int, ...], dtype: torch.dtype, wild: bool) -> tuple[Tensor, Tensor]:
    """Indices, some from the end, and whether they are in the table: some that are not, where wild."""
    index = torch.randint(-table, table, sizes)
    if wild:
        limits = torch.iinfo(dtype)
        values = [x for x in [*WILD, table, -table - 1] if limits.min <= x <= limits.max]
        chosen = torch.rand(sizes) < 0.1
        index[chosen] = torch.tensor(values)[torch.randint(len(values), (int(chosen.sum()),))]
    return index.to(dtype), (index >= -table) & (index < table)


@pairs_of(
    {
        "wild": [False, True],
        "deterministic": [False, True],
        "dtype": [torch.int64, torch.int32],
        "tables": [(512, 64), (100, 40_000), (128, 127), (5000, 3)],
        "size": [16, 24, 64],
        "sizes": SIZES,
    },
    tests=12,
)
def test_tables(
    sizes: tuple[int, int, int, int],
    size: int,
    tables: tuple[int, int],
    dtype: torch.dtype,
    deterministic: bool,
    wild: bool,
) -> None:
    b, h, m, n = sizes
    of_kind = [torch.randn(count, h, requires_grad=True) for count in tables]
    places = [indices(count, (b, m, n), dtype, wild) for count in tables]
    given = [*inputs(b, h, m, n, size), *of_kind]
    upstream = torch.randn_like(given[0])
    (first, in_first), (second, in_second) = places

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # Beyond the table a read is NaN, which is not taken.
        s = torch.where(in_first[b, q, kv], s + of_kind[0][first[b, q, kv], h], s)
        return torch.where(in_second[b, q, kv], s + of_kind[1][second[b, q, kv], h], s)

    out = flex_attention(*given[:3], score_mod, deterministic=deterministic)
    grads = torch.autograd.grad(out, given, upstream)
    wide = [t.detach().double().requires_grad_() for t in given]

    def formula(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        for table, (index, inside) in zip(wide[3:], places, strict=True):
            there = inside[b, q, kv]
            s = s + torch.where(there, table[torch.where(there, index[b, q, kv].long(), 0), h], 0.0)
        return s

    expected = dense(*wide[:3], formula).out
    assert relative(out, expected) <= 1e-2
    for ours, truth in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("sizes", SIZES[:4])
def test_the_bits_do_not_depend_on_the_width(sizes: tuple[int, int, int, int], bits: int) -> None:
    """What is read is the same number, beyond the table too."""
    b, h, m, n = sizes
    q, k, v = (t.detach() for t in inputs(b, h, m, n, 24))
    table = torch.randn(300, h)
    index, _ = indices(300, (b, m, n), torch.int16, wild=True)
    index[::2] = index[::2].clamp(-300, 299)  # batches without NaN
    wide = index.to(torch.int64 if bits == 64 else torch.int32)
    few = slice(0, 1)  # of which no copy pays
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[wide[b, i, j], h])
    same = flex_attention(q[few], k[few], v[few], lambda s, b, h, i, j: s + table[wide[b, i, j], h])
    narrow = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[index[b, i, j], h])
    assert torch.isnan(out).any()
    assert torch.equal(torch.isnan(out), torch.isnan(narrow))
    torch.testing.assert_close(out, narrow, equal_nan=True, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[few], same, equal_nan=True, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("groups", [1, 3])
def test_first_indices_of_copies(groups: int) -> None:
    """Tensors of few batches, of some heads, smaller than the pairs, expanded, and with keys first."""
    b, h, m, n = 96, 24, 60, 64
    table = torch.randn(80, h, requires_grad=True)
    given = [*inputs(b, h, m, n, 32), table]
    upstream = torch.randn_like(given[0])
    shared = torch.randint(80, (b // groups, 1, m, n)).expand(-1, h, -1, -1)
    turned = torch.randint(80, (b, n, m)).mT

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, t: Tensor) -> Tensor:
        return s + t[shared[b // groups, h, q, kv], h] + t[turned[b, q, kv], h]

    out = flex_attention(*given[:3], lambda *args: score_mod(*args, table))
    grads = torch.autograd.grad(out, given, upstream)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda *args: score_mod(*args, wide[3])).out
    assert relative(out, expected) <= 1e-2
    for ours, truth in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2
