"""Few queries against many keys on a GPU: keys split over CTAs, heads of a group in one tile, the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from attention_reference import dense, dropout_weight
from coverings import each_of, pairs_of
from flex_cuda_support import DEVICE, inputs, relative
from fusegrad import flex_attention
from support import assert_as_good_as_eager, deterministic_algorithms
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("made_on_the_gpu"),
]

# B, H, key heads, M, N, D, E
SIZES = {
    "one query": (2, 8, 2, 1, 3001, 128, 128),
    "a key": (1, 2, 2, 1, 1, 64, 64),
    "many heads of a group": (1, 71, 1, 1, 700, 64, 64),
    "three tiles of a group": (2, 12, 2, 6, 1000, 40, 72),
    "latents": (1, 3, 3, 32, 5000, 64, 64),
    "odd sizes": (3, 4, 2, 5, 1291, 50, 31),
    "wide": (1, 4, 2, 3, 900, 256, 200),
    "many batches": (300, 2, 1, 2, 130, 32, 32),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def band(b, h, q, kv):
    return (kv >= 700 * q) & (kv < 700 * q + 333 + b)


def by_head(b, h, q, kv):
    return (kv + h) % 5 < 3


def mask_of(mask_mod: Callable | None, sizes: tuple[int, ...], heads: int = 1, block: int = 128) -> BlockMask | None:
    b, _, _, m, n, _, _ = sizes
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, b, heads if heads > 1 else None, m, n, device=DEVICE, BLOCK_SIZE=block)


def allowed_of(mask_mod: Callable, sizes: tuple[int, ...]) -> Tensor:
    b, h, _, m, n, _, _ = sizes
    places = torch.meshgrid(*(torch.arange(size) for size in (b, h, m, n)), indexing="ij")
    return mask_mod(*places)


def score_mod_of(h: int, m: int, n: int) -> tuple[Callable, list[Tensor]]:
    pairs, keys = (torch.randn(h, m, n) * 0.3).requires_grad_(), torch.randn(n).requires_grad_()
    return lambda s, b, head, q, kv: s * 0.75 + pairs[head, q, kv] + keys[kv], [pairs, keys]


def compare(sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    b, h, hkv, m, n, d, e = sizes
    query = torch.randn(b, h, m, d).to(dtype).requires_grad_()
    key, value = (torch.randn(b, hkv, n, size).to(dtype).requires_grad_() for size in (d, e))
    mod, held = score_mod_of(h, m, n) if kind == "score_mod" else (None, [])
    mask_mod = {"mask": band, "mask by head": by_head, "small blocks": band}.get(kind)
    mask = mask_of(mask_mod, sizes, h if kind == "mask by head" else 1, 48 if kind == "small blocks" else 128)
    allowed = None if mask_mod is None else allowed_of(mask_mod, sizes)
    options = {"dropout_p": 0.3} if kind == "dropout" else {}
    weight = dropout_weight(0.3, (b, h, m, n)) if kind == "dropout" else None
    scale = {"negative scale": -0.2}.get(kind)

    leaves = [query, key, value, *held]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    near = [t.detach().clone().requires_grad_() for t in leaves]

    def plain(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        pairs, keys = tensors[3:] if held else (None, None)

        def changed(s: Tensor, b: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (s * 0.75 + pairs[head, q, kv] + keys[kv]).to(s.dtype)

        result = dense(*tensors[:3], None if mod is None else changed, allowed, scale, weight=weight)
        return result.out, result.lse

    out, aux = flex_attention(
        query, key, value, mod, mask, scale, enable_gqa=True, return_aux=AuxRequest(lse=True), **options
    )
    truth, eager = plain(exact), plain(near)
    assert_as_good_as_eager(out, eager[0], truth[0], "out", least=1e-6)
    finite = truth[1].isfinite()
    assert torch.equal(aux.lse.isfinite(), finite)
    assert (aux.lse - truth[1])[finite].abs().max() <= 1e-5 * (1 + truth[1][finite].abs().max())
    upstream, upstream_lse = torch.randn_like(out), torch.randn_like(aux.lse) * finite
    found = torch.autograd.grad((out, aux.lse), leaves, (upstream, upstream_lse))
    expected = torch.autograd.grad(
        [torch.where(finite, x, 0) if x is truth[1] else x for x in truth],
        exact,
        (upstream.double(), upstream_lse.double()),
    )
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for name, ours, right in zip(("query", "key", "value", "pairs", "keys"), found, expected, strict=False):
        if right.norm() > 0:
            assert relative(ours, right) <= limit, name


@each_of({"dtype": [*DTYPES], "name": [*SIZES]})
def test_sizes(name: str, dtype: torch.dtype) -> None:
    compare(SIZES[name], dtype, "plain")


KINDS = ["score_mod", "mask", "mask by head", "small blocks", "dropout", "negative scale"]


@pairs_of(
    {
        "dtype": [torch.bfloat16, torch.float32],
        "name": ["one query", "three tiles of a group", "odd sizes"],
        "kind": [*KINDS],
    }
)
def test_what_shapes_the_scores(kind: str, name: str, dtype: torch.dtype) -> None:
    compare(SIZES[name], dtype, kind)


@pairs_of(
    {
        "dtype": [torch.bfloat16, torch.float32],
        "sizes": [(1, 3, 3, 64, 5000, 64, 64), (2, 4, 2, 130, 3001, 128, 120), (1, 2, 2, 60, 2100, 256, 200)],
        "kind": ["plain", "score_mod", "mask", "dropout", "deterministic"],
    }
)
def test_usual_tiles(kind: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Their keys are split over CTAs, in deterministic mode and of wide heads dQ's too; some splits have no tiles
    under the mask, and some rows no keys."""
    with deterministic_algorithms(kind == "deterministic"):
        compare(sizes, dtype, kind)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 4096, 100_003])
def test_the_same_bits_and_graphs(keys: int) -> None:
    q, k, v = inputs(1, 8, 2, keys, 128, hkv=2)

    def call() -> Tensor:
        return flex_attention(q, k, v, enable_gqa=True)

    with torch.no_grad():
        first = call()
        assert all(torch.equal(first, call()) for _ in range(5))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for _ in range(2):
            q.copy_(torch.randn_like(q))
            graph.replay()
            assert torch.equal(captured, call())


def test_one_split_or_many_is_the_same_but_for_rounding() -> None:
    """A row's result does not depend on how many others there are but for the order of its sums."""
    q, k, v = inputs(200, 4, 1, 2000, 64, torch.float32, hkv=1)
    with torch.no_grad():
        together = flex_attention(q, k, v, enable_gqa=True)
        alone = flex_attention(q[:1], k[:1], v[:1], enable_gqa=True)
    assert relative(together[:1], alone) <= 1e-6


def test_scores_of_any_size() -> None:
    """Splits of very different scores: what small ones give is 0, and nothing overflows."""
    q, k, v = inputs(1, 2, 2, 4000, 64, torch.float32)
    place = torch.linspace(-3e4, 3e4, 4000)
    for sign in (-1, 1):
        with torch.no_grad():
            out, aux = flex_attention(
                q, k, v, lambda s, b, h, i, j, sign=sign: s + sign * place[j], return_aux=AuxRequest(lse=True)
            )
            truth = dense(*(t.double() for t in (q, k, v)), lambda s, b, h, i, j, sign=sign: s + sign * place[j])
        assert relative(out, truth.out) <= 1e-2 and relative(aux.lse, truth.lse) <= 1e-6


def test_max_scores() -> None:
    q, k, v = inputs(1, 4, 2, 1500, 64, torch.float32, hkv=2)
    _, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    truth = dense(*(t.detach().double() for t in (q, k, v)))
    assert relative(aux.max_scores, truth.max_scores) <= 1e-6
    (found,) = torch.autograd.grad(aux.max_scores.sum(), k)
    assert (found.abs().sum(-1) > 0).sum() == 2 * 4  # the largest scores' keys, of 2 queries and 4 heads


def test_rows_without_keys_and_wrong_lists() -> None:
    q, k, v = inputs(2, 4, 1, 1000, 64, hkv=2)
    none = create_block_mask(lambda b, h, i, j: (b == 1) & (j < 500), 2, None, 1, 1000, device=DEVICE)
    with torch.no_grad():
        out, aux = flex_attention(q, k, v, None, none, enable_gqa=True, return_aux=AuxRequest(lse=True))
        assert not out[0].any() and (aux.lse[0] == -torch.inf).all() and aux.lse[1].isfinite().all()
        none.kv_indices[1] = 100
        out, aux = flex_attention(q, k, v, None, none, enable_gqa=True, return_aux=AuxRequest(lse=True))
        assert out[1].isnan().all() and aux.lse[1].isnan().all() and not out[0].any()


def test_layouts() -> None:
    """Rows that begin anywhere, a batch of keys for all, and a cache that is longer than what is read of it."""
    wide = torch.randn(2, 900, 2, 3 * 70).to(torch.bfloat16)
    q = torch.randn(2, 1, 8, 70).to(torch.bfloat16).transpose(1, 2)
    k, v = wide[:, :801, :, 3:67].transpose(1, 2), wide[:, :801, :, 75:140].transpose(1, 2)
    q = q[..., 2:66]
    with torch.no_grad():
        out = flex_attention(q, k, v, enable_gqa=True)
        assert torch.equal(out, flex_attention(*(t.contiguous() for t in (q, k, v)), enable_gqa=True))
        truth = dense(*(t.double() for t in (q, k, v))).out
        assert relative(out, truth) <= 1e-2
        one = flex_attention(q, k[:1], v[:1], enable_gqa=True)
        assert relative(one, dense(*(t.double() for t in (q, k[:1], v[:1]))).out) <= 1e-2


def test_memory_that_runs_out() -> None:
    """The workspace of the splits is an allocation as any other: an error and no more."""
    q, k, v = inputs(4, 16, 32, 30_000, 128)
    with torch.no_grad():
        expected = flex_attention(q, k, v)  # 2 MiB of splits
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
        rest = []  # of larger blocks, which could be had without asking the device
        try:
            for size in (2**22, 2**20 + 2**12):
                with contextlib.suppress(torch.OutOfMemoryError):
                    while True:
                        rest.append(torch.empty(size, dtype=torch.uint8))
            with pytest.raises(torch.OutOfMemoryError):
                flex_attention(q, k, v)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del rest
        assert torch.equal(expected, flex_attention(q, k, v))
