"""Where tensors of indices that all heads read are copied with fewer bytes, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from coverings import rows_of
from fusegrad import _C, trace_score_mod
from fusegrad.compile import _fields_of
from needs import needs_flex_compiler
from torch import Tensor

pytestmark = [needs_flex_compiler, pytest.mark.cpu_only]

Sizes = tuple[int, int, int, int]
Made = Callable[..., Tensor]


def plan(mod: Made, sizes: Sizes, direction: str, head: int = 24) -> str:
    score = trace_score_mod(mod)
    b, h, m, n = sizes
    fields = _fields_of("score_mod", score)
    fields |= {"direction": direction, "shape": [b, h, m, b, h, n, head, head], "training": True}
    if direction == "backward":
        fields |= {"needs_grad": [True] * 3 + [x.requires_grad for x in score.buffers]}
    return _C.flex.call_plan(fields, "90a", 132)[0]


def copies(text: str) -> dict[int, int]:
    """The bytes of the copy of each buffer."""
    assert ("flex_copy_places" in text) == ("places" in text.replace("flex_copy_places", ""))
    return {int(i): int(size) for i, size in re.findall(r"places (\d+) (\d+)", text)}


def table(*sizes: int) -> Tensor:
    return torch.zeros(sizes, requires_grad=True)


def graphormer(dtype: torch.dtype, sizes: Sizes, elements: int = 512) -> Made:
    b, h, m, n = sizes
    distance, edge = (torch.zeros(b, m, n, dtype=dtype) for _ in range(2))
    of_distance, of_edge = table(elements, h), table(64, h)
    return lambda s, b, h, q, kv: s + of_distance[distance[b, q, kv], h] + of_edge[edge[b, q, kv], h]


GRAPHS = (256, 32, 64, 64)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16], ids=str)
def test_graphormers_indices(dtype: torch.dtype, direction: str) -> None:
    found = copies(plan(graphormer(dtype, GRAPHS), GRAPHS, direction))
    pairs = 256 * 64 * 64
    assert sorted(found.values()) == [pairs, 2 * pairs]


@rows_of(
    "elements, each",
    [(127, 1), (128, 2), (4096, 2), (32767, 2), (32768, 4), (100_000, 4)],
)
def test_the_width_follows_from_the_table(elements: int, each: int) -> None:
    found = copies(plan(graphormer(torch.int64, GRAPHS, elements), GRAPHS, "forward"))
    assert sorted(found.values()) == sorted([256 * 64 * 64, 256 * 64 * 64 * each])


SHORT: dict[str, tuple[Sizes, Callable[[], Made]]] = {
    # few heads or pairs, of which a copy would save less than it takes
    "one head": ((256, 1, 64, 64), lambda: graphormer(torch.int64, (256, 1, 64, 64))),
    "few pairs": ((8, 8, 64, 64), lambda: graphormer(torch.int64, (8, 8, 64, 64))),
}


@pytest.mark.parametrize("name", [*SHORT])
def test_copies_that_would_not_pay(name: str) -> None:
    sizes, make = SHORT[name]
    assert copies(plan(make(), sizes, "forward")) == {}


def counted() -> Made:
    places, t = torch.zeros(256, 64, 64, dtype=torch.int64), table(512, 32)
    return lambda s, b, h, q, kv: s + t[places[b, q, kv], h] + places[b, q, kv]


def compared() -> Made:
    places, t = torch.zeros(256, 64, 64, dtype=torch.int64), table(512, 32)
    return lambda s, b, h, q, kv: torch.where(places[b, q, kv] > 3, s + t[places[b, q, kv], h], s)


def shifted() -> Made:
    places, t = torch.zeros(256, 64, 64, dtype=torch.int64), table(512, 32)
    return lambda s, b, h, q, kv: s + t[places[b, q, kv] + 1, h]


def by_keys() -> Made:
    places, t = torch.zeros(256, 64, dtype=torch.int64), table(512, 32)
    return lambda s, b, h, q, kv: s + t[places[b, kv], h]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("make", [counted, compared, shifted, by_keys])
def test_integers_that_are_more_than_indices_of_pairs(make: Callable[[], Made], direction: str) -> None:
    assert copies(plan(make(), GRAPHS, direction)) == {}


def test_two_tables_of_one_tensor_take_the_larger() -> None:
    places, small, large = torch.zeros(256, 64, 64, dtype=torch.int64), table(50, 32), table(300, 32)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + small[places[b, q, kv], h] + large[places[b, q, kv], h]

    assert list(copies(plan(mod, GRAPHS, "backward")).values()) == [2 * 256 * 64 * 64]


def test_larger_heads_keep_boxes_of_32_bits() -> None:
    """Their kernels are those of long sequences."""
    assert copies(plan(graphormer(torch.int32, GRAPHS), GRAPHS, "forward", head=64)) == {}
    assert len(copies(plan(graphormer(torch.int64, GRAPHS), GRAPHS, "forward", head=64))) == 2


def test_long_sequences_keep_boxes_of_32_bits() -> None:
    sizes = (32, 32, 256, 256)
    assert copies(plan(graphormer(torch.int32, sizes), sizes, "forward")) == {}
    assert sorted(copies(plan(graphormer(torch.int64, sizes), sizes, "forward")).values()) == [2097152, 4194304]


def test_bytes_are_read_as_they_are() -> None:
    assert copies(plan(graphormer(torch.int8, GRAPHS, 100), GRAPHS, "forward")) == {}


def test_what_all_batches_read_is_kept() -> None:
    places, t = torch.zeros(64, 64, dtype=torch.int64), table(225, 16)
    sizes = (2048, 16, 64, 64)
    for direction in ("forward", "backward"):
        assert copies(plan(lambda s, b, h, q, kv: s + t[places[q, kv], h], sizes, direction, head=32)) == {}


def test_an_expanded_tensor_is_copied_once() -> None:
    places, t = torch.zeros(64, 64, dtype=torch.int64).expand(256, -1, -1), table(64, 32)
    text = plan(lambda s, b, h, q, kv: s + t[places[b, q, kv], h], GRAPHS, "forward")
    assert copies(text) == {0: 64 * 64}
