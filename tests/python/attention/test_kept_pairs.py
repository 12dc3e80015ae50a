"""On the CPU what a score_mod reads by a pair alone is read once for a head's batches: values, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable

import fusegrad
import pytest
import torch
from coverings import pairs_of
from torch import Tensor

pytestmark = pytest.mark.cpu_only
B, H, S, D = 70, 3, 13, 8  # more batches than are added up at a time


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def table_of_places(index: Tensor, table: Tensor, other: Tensor) -> Callable:
    return lambda s, b, h, q, k: s + table[index[q, k], h]


def twice(index: Tensor, table: Tensor, other: Tensor) -> Callable:
    """The same place in two tables, one of which is a factor."""
    return lambda s, b, h, q, k: s * torch.tanh(other[h, index[q, k]]) + table[index[q, k], h]


def of_the_batch_too(index: Tensor, table: Tensor, other: Tensor) -> Callable:
    """A part that is kept, and one that is not."""
    return lambda s, b, h, q, k: s + table[index[q, k], h] + other[h, index[q, (k + b) % S]]


MODS = {f.__name__: f for f in (table_of_places, twice, of_the_batch_too)}
MASKS: dict[str, Callable | None] = {
    "all": None,
    "causal": lambda b, h, q, k: q >= k,
    "by batch": lambda b, h, q, k: k <= q + b % 5,
}


def made(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(B, H, S, D, dtype=dtype) for _ in range(3)]
    leaves += [torch.randn(29, H, dtype=dtype), torch.randn(H, 29, dtype=dtype)]
    return [t.requires_grad_() for t in leaves], torch.randint(0, 29, (S, S), dtype=torch.int32)


def formula(mod: Callable, mask: Callable | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (B, H, S, S)), indexing="ij")
    score = mod(query @ key.mT * D**-0.5, b, h, q, k)
    if mask is not None:
        score = score.masked_fill(~mask(b, h, q, k), -torch.inf)
    return score.softmax(-1) @ value


@pairs_of({"dtype": [torch.float64, torch.float32], "mask": MASKS, "mod": MODS}, tests=3)
def test_values_and_gradients(mod: Callable, mask: Callable | None, dtype: torch.dtype, threads: int) -> None:
    leaves, index = made(dtype)
    blocks = None if mask is None else fusegrad.create_block_mask(mask, B, H, S, S, device="cpu")
    upstream = torch.randn(B, H, S, D, dtype=dtype)
    out = fusegrad.flex_attention(*leaves[:3], mod(index, *leaves[3:]), block_mask=blocks)
    used = leaves[:4] if mod is table_of_places else leaves
    found = torch.autograd.grad(out, used, upstream, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(out, used, upstream)))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    right = formula(mod(index.long(), *exact[3:]), mask, *exact[:3])
    gradients = torch.autograd.grad(right, exact[: len(used)], upstream.double())
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 5e-5}
    torch.testing.assert_close(out, right, check_dtype=False, **tolerance)
    torch.testing.assert_close(list(found), list(gradients), check_dtype=False, **tolerance)


def test_an_index_out_of_range_of_some_batches() -> None:
    """A pair that the first batches leave out is read by a later one."""
    leaves, index = made(torch.float32)
    index[0, S - 1] = 29
    mod = table_of_places(index, *leaves[3:])
    masked = fusegrad.create_block_mask(lambda b, h, q, k: q + S - 2 >= k, None, None, S, S, device="cpu")
    out = fusegrad.flex_attention(*leaves[:3], mod, block_mask=masked)
    torch.autograd.grad(out, leaves[:4], torch.randn_like(out))
    late = fusegrad.create_block_mask(lambda b, h, q, k: (q + S - 2 >= k) | (b > 40), B, None, S, S, device="cpu")
    with pytest.raises(IndexError, match="score_mod: index 29 is out of range for dimension 0"):
        fusegrad.flex_attention(*leaves[:3], mod, block_mask=late)


def test_few_batches_of_many_heads() -> None:
    """What is kept ends with each head."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 40, S, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(40, 29, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 29, (S, S))
    out = fusegrad.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[h, index[q, k]])
    right = (query @ key.mT * D**-0.5 + table[:, index]).softmax(-1) @ value
    upstream = torch.randn_like(out)
    leaves = [query, key, value, table]
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(*(torch.autograd.grad(o, leaves, upstream) for o in (out, right)))
