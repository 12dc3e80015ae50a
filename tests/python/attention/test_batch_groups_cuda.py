"""Biases that groups of batches share, on a GPU, and others whose first indices are no plain b."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_reference import dense
from coverings import each_of, pairs_of
from flex_cuda_support import DEVICE, ON_EACH_FAMILY, causal, inputs, relative
from fusegrad import _C, flex_attention
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

pytestmark = ON_EACH_FAMILY

Sizes = tuple[int, int, int, int]
# For the sizes and for a group's: the shapes of tensors that get gradients, and the score_mod of them.
Shared = Callable[[Sizes, int], tuple[list[tuple[int, ...]], Callable[..., Callable[..., Tensor]]]]


def ceil(b: int, n: int) -> int:
    return -(-b // n)


BIASES: dict[str, Shared] = {
    "neighbours": lambda s, n: (
        [(ceil(s[0], n), *s[1:])],
        lambda t: lambda x, b, h, q, kv: x + t[b // n, h, q, kv],
    ),
    "every n-th": lambda s, n: ([(n, *s[1:])], lambda t: lambda x, b, h, q, kv: x + t[b % n, h, q, kv]),
    "all heads'": lambda s, n: (
        [(ceil(s[0], n), *s[2:])],
        lambda t: lambda x, b, h, q, kv: x * (1 + t[b // n, q, kv]),
    ),
    "groups, and all batches": lambda s, n: (
        [(ceil(s[0], n), *s[1:]), s[1:]],
        lambda t, u: lambda x, b, h, q, kv: x + t[b // n, h, q, kv] + u[h, q, kv],
    ),
    "groups, and each batch": lambda s, n: (
        [(ceil(s[0], n), *s[1:]), (s[0], s[3])],
        lambda t, u: lambda x, b, h, q, kv: x + t[b // n, h, q, kv] + u[b, kv],
    ),
    "groups of two kinds": lambda s, n: (
        [(ceil(s[0], n), *s[1:]), (n, *s[1:])],
        lambda t, u: lambda x, b, h, q, kv: x + t[b // n, h, q, kv] * u[b % n, h, q, kv],
    ),
    "all batches": lambda s, n: ([s[1:]], lambda t: lambda x, b, h, q, kv: x + t[h, q, kv]),
    "a group too many": lambda s, n: (
        [(ceil(s[0], n) + 1, *s[1:])],
        lambda t: lambda x, b, h, q, kv: x + t[b // n, h, q, kv],
    ),
    "a dimension of one": lambda s, n: (
        [(ceil(s[0], n), 1, *s[1:])],
        lambda t: lambda x, b, h, q, kv: x + t[b // n, 0, h, q, kv],
    ),
    "one of several": lambda s, n: ([(3, *s[1:])], lambda t: lambda x, b, h, q, kv: x + t[2, h, q, kv]),
    "the last": lambda s, n: ([(3, *s[2:])], lambda t: lambda x, b, h, q, kv: x + t[-1, q, kv]),
    "batches backwards": lambda s, n: (
        [s],
        lambda t: lambda x, b, h, q, kv: x + t[-1 - b, h, q, kv],
    ),
    "each pair, dimensions of one": lambda s, n: (
        [(s[0], 1, *s[1:3], 1, s[3])],
        lambda t: lambda x, b, h, q, kv: x + t[b, 0, h, q, 0, kv],
    ),
}
# (B, H, M, N) and n: groups so large that several CTAs share a tile, a last group of fewer batches, windows, many
# groups.
SIZES = {
    "several CTAs a tile": ((65, 2, 70, 133), 32),
    "one batch more": ((17, 2, 130, 136), 8),
    "odd": ((10, 2, 70, 133), 4),
    "windows": ((24, 3, 49, 49), 4),
    "few queries": ((9, 2, 20, 200), 5),
    "tall": ((8, 2, 264, 256), 4),
    "more than there are": ((6, 2, 128, 136), 9),
}


def check(
    name: str,
    sizes: Sizes,
    n: int,
    size: int,
    dtype: torch.dtype,
    masked: bool = False,
    deterministic: bool = False,
    of_tables: torch.dtype | None = None,
) -> None:
    shapes, function = BIASES[name](sizes, n)
    tables = [torch.randn(s).to(of_tables or dtype).requires_grad_() for s in shapes]
    given = [*inputs(*sizes, size), *tables]
    upstream = torch.randn_like(given[0])
    m, k = sizes[2:]
    mask = create_block_mask(causal, None, None, m, k, device=DEVICE, BLOCK_SIZE=64) if masked else None

    def run() -> tuple[Tensor, ...]:
        out = flex_attention(*given[:3], function(*tables), mask, deterministic=deterministic)
        return out, *torch.autograd.grad(out, given, upstream)

    out, *grads = run()
    if deterministic:
        assert all(torch.equal(x, y) for _ in range(2) for x, y in zip((out, *grads), run(), strict=True))
    wide = [t.detach().double().requires_grad_() for t in given]
    alive = torch.ones(m, k).tril().bool() if masked else None
    expected = dense(*wide[:3], function(*wide[3:]), alive).out
    assert relative(out, expected) <= 1e-2
    for ours, truth in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


@each_of({"deterministic": [False, True], "sizes": [*SIZES], "name": [*BIASES]})
def test_gradients(name: str, sizes: str, deterministic: bool) -> None:
    check(name, *SIZES[sizes], 32, torch.bfloat16, deterministic=deterministic)


@each_of({"dtype": [torch.float16, torch.float32], "size": [24, 64, 128], "name": [*BIASES]})
def test_head_sizes_and_dtypes(name: str, size: int, dtype: torch.dtype) -> None:
    check(name, *SIZES["one batch more"], size, dtype)


@pairs_of(
    {
        "dtype": [torch.float16, torch.float32],
        "sizes": ["one batch more", "odd", "windows"],
        "name": ["neighbours", "every n-th", "all batches", "groups, and all batches"],
    }
)
def test_tables_of_other_dtypes(name: str, sizes: str, dtype: torch.dtype) -> None:
    check(name, *SIZES[sizes], 32, torch.bfloat16, of_tables=dtype)


@pytest.mark.parametrize("name", BIASES)
def test_with_a_block_mask(name: str) -> None:
    check(name, *SIZES["one batch more"], 32, torch.bfloat16, masked=True)


def test_groups_of_any_number_of_batches() -> None:
    """The number is an argument of the kernels, of which some add each batch and others sum over a group's first."""
    given = inputs(12, 2, 130, 136, 32)
    few, many = (3, 1, 2), (4, 5, 12, 100)
    for numbers in (few, many):
        for n in numbers:
            before = _C.jit.stats()
            bias = torch.randn(ceil(12, n), 2, 130, 136, requires_grad=True)
            out = flex_attention(*given, lambda x, b, h, q, kv, t=bias, n=n: x + t[b // n, h, q, kv])
            upstream = torch.randn_like(out)
            (ours,) = torch.autograd.grad(out, bias, upstream)
            new = {name: count - before[name] for name, count in _C.jit.stats().items()}
            assert n == numbers[0] or new["compilations"] == new["disk_hits"] == 0
            wide = [t.detach().double().requires_grad_() for t in (*given, bias)]
            expected = dense(*wide[:3], lambda x, b, h, q, kv, t=wide[3], n=n: x + t[b // n, h, q, kv]).out
            (truth,) = torch.autograd.grad(expected, wide[3], upstream.double())
            assert relative(ours, truth) <= 1e-2


def test_a_group_that_a_table_lacks_is_nan() -> None:
    given = inputs(12, 2, 130, 136, 32)
    bias = torch.randn(2, 2, 130, 136, dtype=torch.bfloat16, requires_grad=True)
    out = flex_attention(*given, lambda x, b, h, q, kv: x + bias[b // 4, h, q, kv])
    assert out[:8].isfinite().all()
    assert out[8:].isnan().all()
    upstream = torch.zeros_like(out)
    upstream[:8] = torch.randn_like(out[:8])
    (ours,) = torch.autograd.grad(out, bias, upstream)
    wide = [t.detach()[:8].double().requires_grad_() for t in given] + [bias.detach().double().requires_grad_()]
    expected = dense(*wide[:3], lambda x, b, h, q, kv: x + wide[3][b // 4, h, q, kv]).out
    (truth,) = torch.autograd.grad(expected, wide[3], upstream[:8].double())
    assert relative(ours, truth) <= 1e-2
