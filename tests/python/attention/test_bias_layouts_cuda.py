"""Biases of pairs that lie in memory in other ways than kernels copy them, on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from attention_reference import dense
from coverings import pairs_of
from flex_cuda_support import DEVICE, ON_EACH_FAMILY, causal, inputs, relative
from fusegrad import flex_attention
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

pytestmark = ON_EACH_FAMILY

# [b, h, q, kv] as a view of a leaf.
LAYOUTS: dict[str, Callable[[int, int, int, int], tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]] = {
    "heads last": lambda b, h, q, kv: ((b, q, kv, h), lambda t: t.permute(0, 3, 1, 2)),
    "batches last": lambda b, h, q, kv: ((h, q, kv, b), lambda t: t.permute(3, 0, 1, 2)),
    "queries last": lambda b, h, q, kv: ((b, h, kv, q), lambda t: t.mT),
    "heads outside": lambda b, h, q, kv: ((h, b, q, kv), lambda t: t.transpose(0, 1)),
    "from the second key": lambda b, h, q, kv: ((b, h, q, kv + 1), lambda t: t[..., 1:]),
    "every second key": lambda b, h, q, kv: ((b, h, q, 2 * kv), lambda t: t[..., ::2]),
    "a part of the heads": lambda b, h, q, kv: ((b, q, kv, h + 3), lambda t: t[..., 1 : h + 1].permute(0, 3, 1, 2)),
    "one batch, heads last": lambda b, h, q, kv: ((1, q, kv, h), lambda t: t.permute(0, 3, 1, 2).expand(b, -1, -1, -1)),
    "one head, keys first": lambda b, h, q, kv: ((b, kv, q), lambda t: t.mT[:, None].expand(-1, h, -1, -1)),
}


@pairs_of(
    {
        "masked": [False, True],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "sizes": [(3, 4, 130, 203), (2, 9, 70, 136), (2, 40, 200, 129), (9, 3, 60, 61)],
        "name": [*LAYOUTS],
    },
    tests=8,
)
def test_layouts(name: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, masked: bool) -> None:
    b, h, m, n = sizes
    shape, view = LAYOUTS[name](*sizes)
    leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
    bias = view(leaf)
    given = [*inputs(b, h, m, n, 32), leaf]
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE, BLOCK_SIZE=64) if masked else None
    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + bias[b, h, q, kv], mask)
    grads = torch.autograd.grad(out, given, upstream)
    wide = [t.detach().double().requires_grad_() for t in given]
    alive = torch.ones(m, n).tril().bool() if masked else None
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + view(wide[3])[b, h, q, kv], alive).out
    assert relative(out, expected) <= 1e-2
    for ours, truth in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert relative(ours, truth) <= 1e-2


# Sizes of a leaf before those of queries and keys, and the first indices of its reads.
FIRST: dict[str, tuple[Callable[[int, int], tuple[int, ...]], Callable[[Tensor, Tensor], tuple]]] = {
    "none": (lambda b, h: (), lambda b, h: ()),
    "0": (lambda b, h: (1,), lambda b, h: (0,)),
    "0 0 h": (lambda b, h: (1, 1, h), lambda b, h: (0, 0, h)),
    "b 0 h": (lambda b, h: (b, 1, h), lambda b, h: (b, 0, h)),
    "0 b 0": (lambda b, h: (1, b, 1), lambda b, h: (0, b, 0)),
    "0 b 0 h 0": (lambda b, h: (1, b, 1, h, 1), lambda b, h: (0, b, 0, h, 0)),
    "0 h of two": (lambda b, h: (2, h), lambda b, h: (0, h)),
    "1 h of two": (lambda b, h: (2, h), lambda b, h: (1, h)),
    "1 0 h": (lambda b, h: (2, 1, h), lambda b, h: (1, 0, h)),
    "h b": (lambda b, h: (h, b), lambda b, h: (h, b)),
    "h 0 b": (lambda b, h: (h, 2, b), lambda b, h: (h, 0, b)),
}


@pairs_of(
    {
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "sizes": [(9, 3, 130, 200), (3, 4, 256, 256), (2, 9, 70, 137)],
        "size": [32, 64],
        "name": [*FIRST],
    },
    tests=6,
)
def test_first_indices(name: str, size: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, h, m, n = sizes
    first, indices = FIRST[name]
    leaf = torch.randn(*first(b, h), m, n, dtype=dtype, requires_grad=True)
    given = [*inputs(b, h, m, n, size), leaf]
    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + leaf[(*indices(b, h), q, kv)])
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][(*indices(b, h), q, kv)]).out
    assert relative(out, expected) <= 1e-2
    truths = torch.autograd.grad(expected, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 33, 70])
def test_the_bits_of_a_bias_do_not_depend_on_its_layout(heads: int, dtype: torch.dtype) -> None:
    q, k, v = (t.detach() for t in inputs(2, heads, 150, 264, 32))
    bias = torch.randn(2, 150, 264, heads, dtype=dtype).permute(0, 3, 1, 2)
    outs = [flex_attention(q, k, v, lambda s, b, h, i, j, t=t: s + t[b, h, i, j]) for t in (bias, bias.contiguous())]
    assert torch.equal(*outs)


@pairs_of(
    {
        "dtypes": [(torch.float32,), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32, torch.float32)],
        "size": [16, 32, 48, 64, 96, 128],
        "sizes": [(3, 4, 512, 512), (9, 3, 130, 200), (2, 8, 260, 1000), (66, 4, 256, 64)],
        "shared": [True, False],
    },
    tests=4,
)
def test_biases_of_both_widths(
    sizes: tuple[int, int, int, int], size: int, dtypes: tuple[torch.dtype, ...], shared: bool
) -> None:
    """In one score_mod, of all batches or of each."""
    b, h, m, n = sizes
    biases = [torch.randn(*([] if shared else [b]), h, m, n).to(dtype).requires_grad_() for dtype in dtypes]
    given = [*inputs(b, h, m, n, size), *biases]

    def mod(*of: Tensor) -> Callable[..., Tensor]:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            for t in of:
                s = s + (t[h, q, kv] if shared else t[b, h, q, kv])
            return s

        return score_mod

    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], mod(*biases))
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], mod(*wide[3:])).out
    assert relative(out, expected) <= 1e-2
    truths = torch.autograd.grad(expected, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


def test_places_with_keys_first() -> None:
    table, places = torch.randn(600, 4, requires_grad=True), torch.randint(600, (5, 150, 130), dtype=torch.int32).mT
    given = [*inputs(5, 4, 130, 150, 24), table]
    upstream = torch.randn_like(given[0])
    out = flex_attention(*given[:3], lambda s, b, h, q, kv: s + table[places[b, q, kv], h])
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = dense(*wide[:3], lambda s, b, h, q, kv: s + wide[3][places[b, q, kv], h]).out
    truths = torch.autograd.grad(expected, wide, upstream.double())
    for ours, truth in zip(torch.autograd.grad(out, given, upstream), truths, strict=True):
        assert relative(ours, truth) <= 1e-2


@pytest.mark.parametrize(
    "sizes, shared, masked, copied",
    [
        ((16, 8, 512, 512), True, False, True),
        ((2, 8, 512, 512), False, False, True),
        ((16, 8, 512, 512), True, True, True),
        ((2, 8, 512, 512), False, True, False),  # a mask may leave out most of it
    ],
    ids=["shared", "of all pairs", "shared, masked", "of all pairs, masked"],
)
def test_rows_are_copied_where_it_pays(
    sizes: tuple[int, int, int, int], shared: bool, masked: bool, copied: bool
) -> None:
    b, h, m, n = sizes
    q, k, v = (t.detach() for t in inputs(b, h, m, n, 32))
    bias = torch.randn(1 if shared else b, m, n, h, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE, BLOCK_SIZE=128) if masked else None

    def peak(t: Tensor) -> int:
        t = t.expand(b, -1, -1, -1)
        for _ in range(2):
            gc.collect()  # what other tests left behind would go during the call
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            flex_attention(q, k, v, lambda s, b, h, i, j: s + t[b, h, i, j], mask)
        return torch.cuda.max_memory_allocated() - before

    more = peak(bias) - peak(bias.contiguous())
    assert more == (bias.nbytes if copied else 0)
