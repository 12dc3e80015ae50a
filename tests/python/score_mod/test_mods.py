"""fusegrad.mods: each mod against the formula of its paper or its package, and as PyTorch's flex_attention takes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import create_block_mask, flex_attention, mods, trace_score_mod
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import flex_attention as pytorchs

B, H, M, N, D = 2, 3, 7, 7, 4


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes).requires_grad_()


def positive(*sizes: int) -> Tensor:
    return (torch.rand(sizes) + 0.5).requires_grad_()


def distances() -> Tensor:
    """The distance of a query and a key, [M, N]."""
    return torch.arange(M)[:, None] - torch.arange(N)


CAUSAL = torch.ones(M, N, dtype=torch.bool).tril()


# --- score_mods: (mod, captured tensors, formula of the scores [B, H, M, N]) -----------------------------------------


def of_softcap() -> tuple:
    cap = torch.tensor(2.0, requires_grad=True)
    return mods.softcap(cap), [cap], lambda s: cap * torch.tanh(s / cap)


def of_alibi() -> tuple:
    slopes = positive(H)
    return mods.alibi(slopes), [slopes], lambda s: s - slopes[:, None, None] * distances().abs()


def of_relative() -> tuple:
    table = drawn(H, 5)
    return mods.relative(table), [table], lambda s: s + table[:, distances().clamp(-2, 2) + 2]


def of_t5(bidirectional: bool) -> tuple:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=8, d_kv=4, num_heads=H, is_decoder=not bidirectional)
    config.relative_attention_num_buckets, config.relative_attention_max_distance = 6, 5
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table = module.relative_attention_bias.weight
    mod = mods.t5(table, bidirectional=bidirectional, max_distance=5, length=6)
    return mod, [table], lambda s: s + module.compute_bias(M, N, s.device).to(s.dtype)


def of_swin() -> tuple:
    table, height, width = drawn(3 * 7, H), 2, 4
    places = [divmod(i, width) for i in range(height * width)][:M]
    index = torch.tensor([[(a - c + 1) * 7 + (b - d + 3) for c, d in places] for a, b in places])
    return mods.swin(table, (height, width)), [table], lambda s: s + table[index].permute(2, 0, 1)


def of_swin_v2() -> tuple:
    offsets = drawn(1, 3, 7, H)
    places = [divmod(i, 4) for i in range(M)]
    index = torch.tensor([[(a - c + 1) * 7 + (b - d + 3) for c, d in places] for a, b in places])
    formula = lambda s: s + 16 * torch.sigmoid(offsets.view(-1, H)[index]).permute(2, 0, 1)  # noqa: E731
    return mods.swin(mods.swin_v2_table(offsets), (2, 4)), [offsets], formula


def of_pair_bias() -> tuple:
    bias, mask = drawn(B, H, M, N), torch.rand(B, N) < 0.7
    mask[0] = False  # a mean of the values
    return mods.pair_bias(bias, mask), [bias], lambda s: torch.where(mask[:, None, None], s + bias, -1e9)


def of_shared_pair_bias() -> tuple:
    bias = drawn(H, M, N)
    return mods.pair_bias(bias), [bias], lambda s: s + bias


def of_graphormer() -> tuple:
    spatial, edge = drawn(5, H), drawn(4, H)
    distance, path = torch.randint(5, (B, M, N)), torch.randint(4, (B, M, N, 3))

    def formula(s: Tensor) -> Tensor:
        return s + spatial[distance].permute(0, 3, 1, 2) + edge[path].mean(3).permute(0, 3, 1, 2)

    return mods.graphormer(spatial, distance, edge, path), [spatial, edge], formula


def of_transformer_xl() -> tuple:
    query, positions = drawn(B, H, M, D), drawn(H, M + N - 1, D)

    def formula(s: Tensor) -> Tensor:
        """Row i of all products of queries and positions, from its own distances on: the paper's relative shift."""
        all_of_them = torch.einsum("bhid,hrd->bhir", query, positions)[..., : M + N - 1]
        rows = [all_of_them[:, :, i, M - 1 - i : M - 1 - i + N] for i in range(M)]
        return s + 0.5 * torch.stack(rows, 2)

    return mods.transformer_xl(query, positions, 0.5), [query, positions], formula


def of_deberta() -> tuple:
    query, key = drawn(B, H, M, D), drawn(B, H, N, D)
    position_query, position_key = drawn(H, 4, D), drawn(H, 4, D)
    bucket = lambda distance: (distance + 2).clamp(0, 3)  # noqa: E731  the paper's delta, k = 2

    def formula(s: Tensor) -> Tensor:
        c2p = torch.einsum("bhid,hrd->bhir", query, position_key).gather(-1, bucket(distances()).expand(B, H, M, N))
        p2c = torch.einsum("bhjd,hrd->bhjr", key, position_query).gather(-1, bucket(distances()).T.expand(B, H, N, M))
        return s + 0.3 * (c2p + p2c.mT)

    buckets = bucket(torch.arange(1 - M, M))
    captured = [query, key, position_query, position_key]
    return mods.deberta(*captured, 0.3, buckets), captured, formula


def of_fire() -> tuple:
    net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, H))
    c, threshold = positive(), torch.tensor(2.5, requires_grad=True)

    def formula(s: Tensor) -> Tensor:
        i = torch.arange(M).to(c.dtype)[:, None]
        x = torch.log(c * distances().clamp(min=0) + 1) / torch.log(c * torch.maximum(i, threshold) + 1)
        return s + net(x[..., None]).permute(2, 0, 1)

    mod = mods.fire([net[0].weight, net[2].weight], [net[0].bias, net[2].bias], c, threshold)
    return mod, [*net.parameters(), c, threshold], formula


def of_kerple_power() -> tuple:
    r1, r2 = positive(H), positive(H)
    by_head = lambda r: r[:, None, None]  # noqa: E731
    power = lambda: (distances().abs() + 1e-300) ** by_head(r2)  # noqa: E731
    return mods.kerple_power(r1, r2), [r1, r2], lambda s: s - by_head(r1) * power()


def of_kerple_log() -> tuple:
    r1, r2 = positive(H), positive(H)
    by_head = lambda r: r[:, None, None]  # noqa: E731
    formula = lambda s: s - by_head(r1) * torch.log(1 + by_head(r2) * distances().abs())  # noqa: E731
    return mods.kerple_log(r1, r2), [r1, r2], formula


def of_forgetting_gates() -> tuple:
    log_gates = F.logsigmoid(drawn(B, H, M)).detach().requires_grad_()

    def formula(s: Tensor) -> Tensor:
        sums = [[log_gates[..., j + 1 : i + 1].sum(-1) for j in range(N)] for i in range(M)]
        return s + torch.stack([torch.stack(row, -1) for row in sums], -2).where(CAUSAL, 0.0)

    return mods.forgetting_gates(log_gates), [log_gates], formula


def of_compose() -> tuple:
    slopes, cap = positive(H), torch.tensor(2.0, requires_grad=True)
    formula = lambda s: cap * torch.tanh((s - slopes[:, None, None] * distances().abs()) / cap)  # noqa: E731
    return mods.compose(mods.alibi(slopes), mods.softcap(cap)), [slopes, cap], formula


SCORES: dict[str, Callable[[], tuple]] = {
    "softcap": of_softcap,
    "alibi": of_alibi,
    "relative": of_relative,
    "t5, encoder": lambda: of_t5(True),
    "t5, decoder": lambda: of_t5(False),
    "swin": of_swin,
    "swin_v2_table": of_swin_v2,
    "pair_bias": of_pair_bias,
    "pair_bias of all batches": of_shared_pair_bias,
    "graphormer": of_graphormer,
    "transformer_xl": of_transformer_xl,
    "deberta": of_deberta,
    "fire": of_fire,
    "kerple_power": of_kerple_power,
    "kerple_log": of_kerple_log,
    "forgetting_gates": of_forgetting_gates,
    "compose": of_compose,
}
OF_CAUSAL = ("fire", "forgetting_gates", "t5, decoder")


@rows_of("name", [*SCORES])
def test_score_mods(name: str) -> None:
    """Values and all gradients."""
    mod, captured, formula = SCORES[name]()
    q, k, v = drawn(B, H, M, D), drawn(B, H, N, D), drawn(B, H, N, D)
    causal = name in OF_CAUSAL
    mask = create_block_mask(mods.causal(), None, None, M, N, device="cpu") if causal else None
    out = flex_attention(q, k, v, mod, mask)
    scores = formula(q @ k.mT * D**-0.5)
    if causal:
        scores = scores.masked_fill(~CAUSAL, -math.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(out)
    leaves = [q, k, v, *captured]
    found = torch.autograd.grad(out, leaves, upstream)
    truth = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-9)
    with torch.no_grad():  # PyTorch's has no backward on a CPU
        torch.testing.assert_close(
            pytorchs(*(t.detach() for t in (q, k, v)), mod, mask), expected, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("heads", [1, 4, 12, 20])
def test_alibi_slopes(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float64)
    torch.testing.assert_close(mods.alibi_slopes(heads), theirs.view(heads, 2)[:, 1])


# --- mask_mods: whether a pair takes part, in Python ------------------------------------------------------------------

IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]])


def neighbourhood(i: int, j: int, kernel: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Positions of a window around i that is moved into the grid."""
    for size, n in zip(reversed(kernel), reversed(grid), strict=True):
        i, x = divmod(i, n)
        j, y = divmod(j, n)
        first = min(max(x - size // 2, 0), n - size)
        if not first <= y < first + size:
            return False
    return True


MASKS: dict[str, tuple[Callable, Callable[[int, int, int], bool]]] = {
    "causal": (mods.causal(), lambda b, i, j: j <= i),
    "causal, offset": (mods.causal(2), lambda b, i, j: j <= i + 2),
    "causal, a tensor's offset": (mods.causal(torch.tensor(3)), lambda b, i, j: j <= i + 3),
    "sliding_window": (mods.sliding_window(2), lambda b, i, j: i - 2 <= j <= i),
    "sliding_window, both": (mods.sliding_window(1, 2), lambda b, i, j: i - 1 <= j <= i + 2),
    "sliding_window, left open": (mods.sliding_window(-1, 1), lambda b, i, j: j <= i + 1),
    "sliding_window, right open": (mods.sliding_window(1, -1), lambda b, i, j: j >= i - 1),
    "sliding_window, open": (mods.sliding_window(-1, -1), lambda b, i, j: True),
    "prefix": (mods.or_masks(mods.prefix(3), mods.causal()), lambda b, i, j: j < 3 or j <= i),
    "prefix of each": (mods.prefix(torch.tensor([2, 5])), lambda b, i, j: j < (2, 5)[b]),
    "padding": (mods.padding(torch.tensor([7, 4])), lambda b, i, j: j < (7, 4)[b]),
    "document": (mods.document(IDS[0]), lambda b, i, j: IDS[0, i].item() == IDS[0, j].item()),
    "document of each": (
        mods.and_masks(mods.document(IDS), mods.causal()),
        lambda b, i, j: IDS[b, i].item() == IDS[b, j].item() and j <= i,
    ),
    "document, other keys": (mods.document(IDS[0], IDS[1]), lambda b, i, j: IDS[0, i].item() == IDS[1, j].item()),
    "dilated": (mods.dilated(4, 2), lambda b, i, j: abs(i - j) <= 4 and (i - j) % 2 == 0),
    "natten, 1D": (mods.natten(3, (M,)), lambda b, i, j: neighbourhood(i, j, (3,), (M,))),
    "natten, 2D": (mods.natten((1, 3), (2, 4)), lambda b, i, j: neighbourhood(i, j, (1, 3), (2, 4))),
    "natten, 3D": (mods.natten((1, 1, 3), (2, 1, 4)), lambda b, i, j: neighbourhood(i, j, (1, 1, 3), (2, 1, 4))),
    "not_mask": (mods.not_mask(mods.causal()), lambda b, i, j: j > i),
}


@rows_of("name", [*MASKS])
def test_mask_mods(name: str) -> None:
    mask_mod, takes = MASKS[name]
    allowed = torch.tensor([[[takes(b, i, j) for j in range(N)] for i in range(M)] for b in range(B)])[:, None]
    q, k, v = drawn(B, H, M, D), drawn(B, H, N, D), drawn(B, H, N, D)
    mask = create_block_mask(mask_mod, B, None, M, N, device="cpu", block_size=4)
    scores = (q @ k.mT * D**-0.5).masked_fill(~allowed, -math.inf)
    expected = scores.softmax(-1).nan_to_num(0) @ v
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(
            pytorchs(*(t.detach() for t in (q, k, v)), block_mask=mask), expected, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("kernel, grid", [((5,), (9,)), ((3, 5), (4, 6)), ((3, 1, 3), (3, 2, 4))], ids=str)
def test_natten(kernel: tuple[int, ...], grid: tuple[int, ...]) -> None:
    places = range(math.prod(grid))
    mask = mods.natten(kernel, grid)
    zero = torch.zeros((), dtype=torch.int64)
    for i, j in itertools.product(places, places):
        assert bool(mask(zero, zero, torch.tensor(i), torch.tensor(j))) == neighbourhood(i, j, kernel, grid), (i, j)


def test_document_ids() -> None:
    assert mods.document_ids(torch.tensor([2, 3, 0, 2])).tolist() == [0, 0, 1, 1, 1, 3, 3]


def test_sinks() -> None:
    q, k, v, sinks = drawn(B, H, M, D), drawn(B, H, N, D), drawn(B, H, N, D), drawn(H)
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    found = mods.with_sinks(out, aux.lse, sinks)
    scores = torch.cat([q @ k.mT * D**-0.5, sinks.view(1, H, 1, 1).expand(B, H, M, 1)], -1)
    expected = scores.softmax(-1)[..., :N] @ v
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(out)
    leaves = [q, k, v, sinks]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )


def test_all_of_them_are_tested() -> None:
    tested = {name.split(",")[0].split(" ")[0] for name in (*SCORES, *MASKS)}
    assert {*mods.__all__} - tested == {"alibi_slopes", "and_masks", "document_ids", "or_masks", "with_sinks"}


def test_other_tensors_are_not_traced_again() -> None:
    from fusegrad._tracing import cache

    for name, make in SCORES.items():
        trace_score_mod(make()[0])
        misses = cache.cache_info()["misses"]
        trace_score_mod(make()[0])
        assert cache.cache_info()["misses"] == misses, name


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "slopes": (lambda: mods.alibi(torch.ones(2, 3)), ValueError, r"mods.alibi: slopes must have shape \[H\], but got"),
    "no tensor": (lambda: mods.alibi(0.5), TypeError, r"mods.alibi: slopes must be a tensor \[H\], but got float"),
    "cap": (lambda: mods.softcap(0.0), ValueError, "mods.softcap: cap must be > 0, but got 0.0"),
    "caps": (lambda: mods.softcap(torch.ones(2)), ValueError, "cap must be a number or a 0-d tensor"),
    "even": (lambda: mods.relative(torch.ones(2, 4)), ValueError, r"table must have shape \[H, 2R \+ 1\], but got"),
    "swin": (lambda: mods.swin(torch.ones(20, 2), (2, 4)), ValueError, "= 21 rows, but got 20"),
    "t5": (lambda: mods.t5(torch.ones(8, 2), bidirectional=True, length=5), ValueError, "at least max_distance, 128"),
    "ids": (lambda: mods.document(torch.ones(3)), TypeError, "mods.document: ids must have an integer dtype"),
    "kv_ids": (lambda: mods.document(IDS, IDS[0]), ValueError, "kv_ids must have as many dimensions as ids, 2"),
    "lengths": (lambda: mods.padding(torch.ones(3)), TypeError, "mods.padding: lengths must have an integer dtype"),
    "window": (lambda: mods.sliding_window(-2), ValueError, "mods.sliding_window: left must be >= -1, but got -2"),
    "kernel": (lambda: mods.natten(4, (8, 8)), ValueError, "kernel_size must be odd and at most the grid's"),
    "grid": (lambda: mods.natten(3, (8, 8, 8, 8)), ValueError, "grid must have 1 to 3 dimensions"),
    "offset": (lambda: mods.causal(torch.tensor(0.5)), TypeError, "mods.causal: offset must have an integer dtype"),
    "edges": (
        lambda: mods.graphormer(torch.ones(5, 2), IDS[None], edge=torch.ones(4, 2)),
        ValueError,
        "edge and path must both be given",
    ),
    "pairs": (lambda: mods.pair_bias(torch.ones(3, 3)), ValueError, r"bias must have shape \[H, M, N\] or"),
    "mask": (lambda: mods.pair_bias(torch.ones(1, 3, 3), torch.ones(1, 3)), TypeError, "mask must be bool, but got"),
    "layers": (
        lambda: mods.fire([torch.ones(1, 1)], [], torch.ones(()), torch.ones(())),
        ValueError,
        "biases must have a tensor or None for each layer, but got 0 for 1 weights",
    ),
    "sinks": (
        lambda: mods.with_sinks(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3), torch.ones(3)),
        ValueError,
        r"lse must have shape \[1, 2, 3\] and sinks \[2\], but got",
    ),
}


@rows_of("make, error, message", BAD)
def test_bad_input(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
