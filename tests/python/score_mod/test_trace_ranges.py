"""Indices out of range and integers of 32 bits: a score_mod raises where PyTorch does, and wraps where it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import each_of, rows_of
from fusegrad import TraceError, trace_score_mod
from fusegrad.score_mod import split_scalars
from torch import Tensor

TABLE = torch.tensor([[0.5, -1.0, 2.0], [3.0, 4.0, -5.0], [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]], dtype=torch.float64)
ROW = TABLE.reshape(-1)


def evaluated(mod: Callable[..., Tensor], keys: int, mask: Callable[..., Tensor] | None = None) -> Tensor:
    traced = trace_score_mod(mod)
    score = torch.zeros(1, 1, 1, keys, dtype=torch.float64)
    return torch.ops.fusegrad.evaluate_score_mod(
        traced.text, score, [x.detach() for x in traced.buffers], *split_scalars(traced.scalars)
    ).reshape(-1)


def by_pytorch(mod: Callable[..., Tensor], keys: int) -> list[Any]:
    zero = torch.tensor(0)
    results: list[Any] = []
    for kv in torch.arange(keys):
        try:
            results.append(mod(torch.tensor(0.0, dtype=torch.float64), zero, zero, zero, kv).item())
        except (IndexError, RuntimeError):
            results.append(None)
    return results


# How an element is taken at a place.
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "F.embedding": lambda i: F.embedding(i, TABLE).sum(),
    "F.embedding of values": lambda i: F.embedding(i, TABLE * i.clamp(0, 1)).sum(),
    "gather": lambda i: TABLE.gather(0, i[None, None])[0, 0],
    "gather of values": lambda i: (TABLE[0] * i.clamp(0, 1)).gather(0, i[None])[0],
    "index_select": lambda i: TABLE.index_select(0, i[None]).sum(),
    "index_select of values": lambda i: (TABLE[:, 0] + i).index_select(0, i[None]).sum(),
    "take": lambda i: TABLE.take(i),
    "take of a row": lambda i: ROW.take(i),
    "take of values": lambda i: (TABLE + i).take(i),
    "one_hot": lambda i: (F.one_hot(i, 5) * torch.arange(5)).sum() * 0.5,
    "one_hot of two": lambda i: F.one_hot(i, 2)[1] + 2.5 * F.one_hot(i, 2)[0],
    "one_hot of a vector": lambda i: F.one_hot(torch.stack([i, i.clamp(0, 3)]), 4).double().sum(),
    "a stack": lambda i: torch.stack([i * 0.5, i + 1.0])[i],
    "a long stack": lambda i: torch.stack([i * 0.5, i + 1.0, i * i + 2.5, i * 0.25])[i],
    "a stack of a stack": lambda i: torch.stack([torch.stack([i / 2, i + 1]), torch.stack([i * 3, i / 4])])[i, -i],
    "a slice of a row": lambda i: ROW[2:7][i],
    "a slice of values": lambda i: (ROW * i)[2:7][i],
    "a product": lambda i: (ROW[:3] * TABLE[i.clamp(0, 3)])[i],
    "a captured row": lambda i: ROW[i],
    "numbers": lambda i: torch.tensor([0.5, 1.5, 2.5])[i],
    "nll_loss": lambda i: F.nll_loss(TABLE[:1] * i, i[None]),
}  # fmt: skip


@rows_of("name", [*TAKEN])
def test_out_of_range_raises_where_pytorch_does(name: str) -> None:
    keys = 32
    places = torch.arange(keys) - keys // 2
    expected = by_pytorch(lambda s, b, h, q, kv: s + TAKEN[name](places[kv]), keys)
    assert None in expected, "some place is out of range"
    for place, wanted in zip(places.tolist(), expected, strict=True):
        at = torch.tensor([place])
        mod = lambda s, b, h, q, kv, at=at: s + TAKEN[name](at[kv])  # noqa: E731
        if wanted is None:
            with pytest.raises(IndexError, match="out of range"):
                evaluated(mod, 1)
        else:
            assert evaluated(mod, 1).item() == pytest.approx(wanted, abs=1e-12), place


@rows_of("name", [*TAKEN])
def test_numbers_out_of_range_raise_when_traced(name: str) -> None:
    for place in (-16, 15, 100):
        with pytest.raises((TraceError, IndexError), match=r"out of (range|bounds)"):
            evaluated(lambda s, b, h, q, kv, i=place: s + TAKEN[name](torch.tensor(i) + 0 * kv.clamp(0, 0)), 1)


def test_pairs_that_take_no_part_may_be_out_of_range() -> None:
    query = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    kinds = torch.tensor([0, 1, 2, 7])

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + torch.stack([s, s * 2, kv * 0.5])[kinds[kv]] + F.one_hot(kinds[kv], 3)[1]

    mask = fusegrad.create_block_mask(lambda b, h, q, kv: kv < 3, 1, 1, 4, 4, device=torch.device("cpu"))
    out = fusegrad.flex_attention(query, query, query, mod, mask)
    score = query @ query.mT / 8**0.5
    rows = [score, score * 2, torch.arange(4) * 0.5 + 0 * score]
    chosen = torch.stack([r[..., k] for k, r in enumerate(rows)], -1)
    expected = (score[..., :3] + chosen + torch.tensor([0.0, 1.0, 0.0])).softmax(-1) @ query[..., :3, :]
    torch.testing.assert_close(out, expected)
    with pytest.raises(IndexError, match="score_mod: index 7 is out of range for a dimension of size 3"):
        fusegrad.flex_attention(query, query, query, mod)


def test_one_hot_wants_the_number_of_classes() -> None:
    with pytest.raises(TraceError, match="one_hot without a number of classes"):
        trace_score_mod(lambda s, b, h, q, kv: s + F.one_hot(kv).sum())


# --- integers of fewer bits -----------------------------------------------------------------------------------

LIMITS = torch.tensor([2**31 - 1, -(2**31), 65537, -46341, 3, -1, 0, 123456789], dtype=torch.int64)
WRAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * x,
    "by a number": lambda x: x * 31,
    "hash": lambda x: (x * 31 + 7) % 97,
    "sum": lambda x: x + x,
    "difference": lambda x: x - (-x) * 2,
    "negative": lambda x: -x * 3,
    "power": lambda x: x**3,
    "square": lambda x: x.square(),
    "absolute": lambda x: x.abs() * 2,
    "shift": lambda x: x << 3,
    "bits": lambda x: (x ^ (x >> 3)) * 17,
    "dot": lambda x: torch.dot(torch.stack([x, x, x]), torch.stack([x, x, x])),
    "matrix": lambda x: (torch.stack([x, x])[None] @ torch.stack([x, x])[:, None])[0, 0],
    "multiply and add": lambda x: torch.addcmul(x, x, x),
    "in place": lambda x: (x + 0).mul_(x),
}


@each_of({"dtype": [torch.int32, torch.int16, torch.int8, torch.uint8, torch.int64], "name": [*WRAPPING]})
def test_integers_wrap(name: str, dtype: torch.dtype) -> None:
    values = LIMITS.to(dtype)
    if name == "dot" and dtype != torch.int32:
        pytest.skip("one dtype is enough")
    mod = lambda s, b, h, q, kv: s + WRAPPING[name](values[kv])  # noqa: E731
    assert evaluated(mod, len(values)).tolist() == by_pytorch(mod, len(values))


def test_a_cast_to_fewer_bits_wraps() -> None:
    wide = torch.tensor([2**31, -(2**31) - 1, 2**40 + 5, 7, -1])
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        mod = lambda s, b, h, q, kv, dtype=dtype: s + wide[kv].to(dtype).double()  # noqa: E731
        assert evaluated(mod, len(wide)).tolist() == by_pytorch(mod, len(wide))


def test_indices_need_no_wrapping() -> None:
    """What lengths and captured tables allow is arithmetic of one instruction."""
    table = torch.arange(64, dtype=torch.int32)
    for mod in (
        lambda s, b, h, q, kv: s + (q.int() - kv.int()),
        lambda s, b, h, q, kv: s + torch.clamp(table[kv] + 8, max=15) * (table[q] > 3),
        lambda s, b, h, q, kv: s + torch.where(table[kv] > 8, 8 + (s * 2).to(torch.int32), table[kv]),
    ):
        assert " sh" not in trace_score_mod(mod).text
