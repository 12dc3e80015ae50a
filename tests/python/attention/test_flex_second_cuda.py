"""Second derivatives of flex_attention by the CUDA kernels, against float64's of the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from attention_reference import dense
from flex_cuda_support import DEVICE, causal
from forward_mode import pushed
from fusegrad import _C, compile_flex, flex_attention
from fusegrad import _attention_composite as composite
from fusegrad import _attention_second as second
from support import assert_as_good_as_eager
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("made_on_the_gpu", "by_kernels"),
]

LSE = AuxRequest(lse=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = (True,) * 5  # of query, key, value, and the upstream gradients of out and lse


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch's ops would compute fails."""

    def fails(*_: Any) -> None:
        raise AssertionError("computed by PyTorch's ops")

    monkeypatch.setattr(composite, "_attend", fails)


def operands(
    b: int, h: int, hkv: int, m: int, n: int, d: int, e: int, dtype: torch.dtype, bkv: int = 0
) -> list[Tensor]:
    """Query, key, value and upstream gradients of out and lse."""
    shapes = [(b, h, m, d), (bkv or b, hkv, n, d), (bkv or b, hkv, n, e), (b, h, m, e)]
    return [*(torch.randn(s).to(dtype) for s in shapes), torch.randn(b, h, m)]


def blocks(mask: Callable, m: int, n: int, size: int = 128) -> BlockMask:
    return create_block_mask(mask, None, None, m, n, device=DEVICE, BLOCK_SIZE=size)


def all_together(mod: Callable, sizes: tuple[int, ...], score: Tensor) -> Tensor:
    """A score_mod that is made of operations on elements, of every pair at once."""
    return mod(score, *torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij"))


def derivatives(call: Callable, given: list[Tensor], moved: list[Tensor], moving: tuple[bool, ...]) -> list[Tensor]:
    """Those of a double backward by all of `given`, and the tangents of the gradients of query, key and value."""
    leaves = [t.detach().requires_grad_() for t in given]
    out, lse = call(*leaves[:3])
    finite = lse.isfinite()
    upstream = [leaves[3], torch.where(finite, leaves[4], 0).to(lse.dtype)]
    grads = torch.autograd.grad([out, torch.where(finite, lse, 0)], leaves[:3], upstream, create_graph=True)
    of_grads = [t.to(g.dtype) for t, g in zip(moved, grads, strict=False)]
    twice = list(torch.autograd.grad(grads, leaves, of_grads, retain_graph=True))
    tangents = [t.to(x.dtype) if m else torch.zeros_like(x) for t, x, m in zip(moved, leaves, moving, strict=True)]
    if call.__name__ == "plain":
        return [*twice, *pushed(grads, leaves, tangents)]
    with fwAD.dual_level():
        duals = [fwAD.make_dual(x, t) if m else x for x, t, m in zip(leaves, tangents, moving, strict=True)]
        out, lse = call(*duals[:3])
        upstream = [duals[3], torch.where(finite, duals[4], 0)]
        grads = torch.autograd.grad([out, torch.where(finite, lse, 0)], leaves[:3], upstream)
        return [*twice, *(fwAD.unpack_dual(g).tangent for g in grads)]


def compare(
    given: list[Tensor],
    mod: Callable | None = None,
    allowed: Tensor | None = None,
    moving: tuple[bool, ...] = ALL,
    **how: Any,
) -> None:
    """With the formula. `moving`: which of `given` have a tangent, in forward mode over the backward."""
    moved = [torch.randn(t.shape).to(t.dtype) for t in given]

    def ours(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(*x, mod, enable_gqa=True, return_aux=LSE, **how)
        return out, aux.lse

    def plain(*x: Tensor) -> tuple[Tensor, ...]:
        return dense(*x, mod, allowed, how.get("scale"), all_together)[:2]

    truth, eager = (
        derivatives(plain, [t.to(dtype) for t in given], [t.to(dtype) for t in moved], moving)
        for dtype in (torch.float64, given[0].dtype)
    )
    found = derivatives(ours, given, moved, moving)
    names = ["query", "key", "value", "grad_out", "grad_lse", *(f"tangent of the gradient of {x}" for x in "qkv")]
    for name, mine, by_eager, right in zip(names, found, eager, truth, strict=True):
        assert_as_good_as_eager(mine, by_eager, right, name, least=2e-6)


# --- operands, tiles, masks -----------------------------------------------------------------------------------

SIZES = [
    (BF16, 64, 64, "all pairs"),
    (BF16, 64, 64, "causal"),
    (BF16, 128, 128, "causal"),
    (BF16, 128, 64, "small blocks"),
    (BF16, 256, 200, "small blocks"),
    (FP16, 24, 40, "causal"),
    (FP16, 64, 128, "all pairs"),
    (FP32, 64, 64, "small blocks"),
    (FP32, 24, 40, "all pairs"),
    (FP32, 128, 72, "causal"),
]


@pytest.mark.parametrize("dtype, d, e, masked", SIZES, ids=str)
def test_sizes_and_masks(dtype: torch.dtype, d: int, e: int, masked: str) -> None:
    m, n = 300, 333
    q, kv = torch.arange(m)[:, None], torch.arange(n)
    allowed, how = None, {}
    if masked == "causal":
        how["block_mask"], allowed = blocks(causal, m, n), q >= kv
    elif masked == "small blocks":  # tiles lie in several, and some rows have no key
        how["block_mask"] = blocks(lambda b, h, q, kv: (q > 40) & ((q - kv).abs() < 90), m, n, 48)
        allowed = (q > 40) & ((q - kv).abs() < 90)
    compare(operands(2, 4, 2, m, n, d, e, dtype), allowed=allowed, **how)


MODS: dict[str, Callable] = {
    "softcap": lambda s, b, h, q, kv: 3 * torch.tanh(s / 3),
    "alibi": lambda s, b, h, q, kv: s + torch.exp2(-(h + 1.0)) * (kv - q),
    "branches": lambda s, b, h, q, kv: torch.where(q > kv, s * s * 0.2, s * s.detach().abs() * 0.1 + s),
    "far from one": lambda s, b, h, q, kv: torch.where(kv % 7 == 3, -torch.inf, torch.sigmoid(2 * s) * s),
}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("mod", MODS)
def test_score_mods(mod: str, dtype: torch.dtype) -> None:
    compare(operands(1, 2, 2, 140, 150, 64, 64, dtype), MODS[mod])


def test_captured_tensors_without_gradients() -> None:
    bias = torch.randn(2, 150)
    compare(operands(1, 2, 2, 140, 150, 32, 32, BF16), lambda s, b, h, q, kv: torch.tanh(s) + bias[h, kv])


@pytest.mark.parametrize("moving", [(False, True, False, True, False), (True, False, False, False, False)], ids=str)
def test_some_tangents(moving: tuple[bool, ...]) -> None:
    compare(operands(1, 2, 2, 70, 90, 64, 64, FP32), moving=moving, scale=-0.3)


@pytest.mark.parametrize("most", [1, 2**20], ids=["chunks of queries", "chunks of heads"])
def test_chunks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "_CHUNK_BYTES", most)
    m, n = 300, 333
    allowed = torch.arange(m)[:, None] >= torch.arange(n)
    given = operands(2, 4, 2, m, n, 64, 64, BF16, bkv=1)
    compare(given, block_mask=blocks(causal, m, n), allowed=allowed)


def test_keys_that_nobody_sees_are_not_read() -> None:
    m, n = 130, 260
    given = operands(1, 2, 2, m, n, 64, 64, BF16)
    moved = [torch.randn(t.shape).to(t.dtype) for t in given]
    mask = blocks(lambda b, h, q, kv: kv < 128, m, n)

    def call(*x: Tensor) -> tuple[Tensor, ...]:
        return flex_attention(*x, block_mask=mask, return_lse=True)

    expected = derivatives(call, given, moved, ALL)
    for t in given[1:3]:
        t[..., 128:, :] = torch.nan
    found = derivatives(call, given, moved, ALL)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_results_are_the_same_bits_in_every_run() -> None:
    given = operands(2, 4, 2, 300, 333, 64, 64, BF16)
    moved = [torch.randn(t.shape).to(t.dtype) for t in given]

    def call(*x: Tensor) -> tuple[Tensor, ...]:
        return flex_attention(*x, enable_gqa=True, return_lse=True, deterministic=True)

    first, again = (derivatives(call, given, moved, ALL) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_memory_is_linear_in_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "_CHUNK_BYTES", 2**22)
    tensors = [torch.randn(1, 2, 8192, 64, dtype=BF16, requires_grad=True) for _ in range(3)]

    def penalty() -> None:
        grads = torch.autograd.grad(flex_attention(*tensors).square().sum(), tensors, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)

    penalty()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    penalty()
    assert torch.cuda.max_memory_allocated() - before < 2 * 8192 * 8192  # half of the scores in 16 bits


def test_what_was_compiled_ahead_is_what_runs() -> None:
    sizes = {"batch": 2, "heads": 16, "lengths": (1100, 1000), "head_size": 48}
    compile_flex(lambda s, b, h, q, kv: s * 1.5 + 0.25 * torch.tanh(s), tangents=True, second_derivatives=True, **sizes)
    compiled = _C.jit.stats()["compilations"]
    given = operands(2, 16, 16, 1100, 1000, 48, 48, BF16)
    moved = [torch.randn(t.shape).to(t.dtype) for t in given]

    def call(*x: Tensor) -> tuple[Tensor, ...]:
        return flex_attention(*x, lambda s, b, h, q, kv: s * 1.5 + 0.25 * torch.tanh(s), return_lse=True)

    derivatives(call, given, moved, ALL)
    assert _C.jit.stats()["compilations"] == compiled


# --- gradients of captured tensors ------------------------------------------------------------------------------

Shape = tuple[int, ...]
CAPTURED: dict[str, tuple[list[Shape], Callable]] = {
    "pairs": ([(4, 300, 333)], lambda s, b, h, q, kv, t: s + t[h, q, kv]),
    "pairs of batches": ([(2, 4, 333, 300)], lambda s, b, h, q, kv, t: t[b, h, kv, q] * 0.5 + s),
    "keys": ([(4, 333), (2, 300)], lambda s, b, h, q, kv, t, u: s + t[h, kv] - u[b, q]),
    "table": ([(7, 4)], lambda s, b, h, q, kv, t: torch.where(q + 40 >= kv, s + t[(q - kv).abs() % 7, h], -torch.inf)),
    "slopes": ([(4,)], lambda s, b, h, q, kv, t: s + t[h] * (q - kv).abs() / 100),
}


def of_captured(call: Callable, given: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
    """Second derivatives by all of `given`, for upstream gradients of all gradients."""
    leaves = [t.detach().requires_grad_() for t in given]
    out, lse = call(*leaves)
    finite = lse.isfinite()
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    of_lse = torch.where(finite, lse, 0)
    grads = torch.autograd.grad([out, of_lse], leaves, [upstream, 0.1 * of_lse.detach()], create_graph=True)
    return list(torch.autograd.grad(grads, leaves, [t.to(g.dtype) for t, g in zip(moved, grads, strict=True)]))


@pytest.mark.parametrize("most", [1, 2**20, 2**29], ids=["chunks of queries", "chunks of heads", "one chunk"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "_CHUNK_BYTES", most)
    shapes, mod = CAPTURED[name]
    m, n = 300, 333
    dtype = FP32 if name in ("table", "pairs of batches") else BF16
    given = [*operands(2, 4, 2, m, n, 64, 64, dtype, bkv=1)[:3], *(torch.randn(s).to(dtype) for s in shapes)]
    moved = [torch.randn(t.shape).to(t.dtype) for t in given]
    allowed, how = None, {}
    if name == "keys":
        allowed, how = torch.arange(m)[:, None] >= torch.arange(n), {"block_mask": blocks(causal, m, n)}

    def ours(*x: Tensor) -> tuple[Tensor, Tensor]:
        bound = lambda s, b, h, q, kv: mod(s, b, h, q, kv, *x[3:])  # noqa: E731
        out, aux = flex_attention(*x[:3], bound, enable_gqa=True, return_aux=LSE, **how)
        return out, aux.lse

    def plain(*x: Tensor) -> tuple[Tensor, ...]:
        return dense(*x[:3], lambda *s: mod(*s, *x[3:]), allowed, None, all_together)[:2]

    truth, eager = (
        of_captured(plain, [t.to(d) for t in given], [t.to(d) for t in moved]) for d in (torch.float64, dtype)
    )
    found = of_captured(ours, given, moved)
    for i, (mine, by_eager, right) in enumerate(zip(found, eager, truth, strict=True)):
        assert_as_good_as_eager(mine, by_eager, right, f"{name}: {i}", least=2e-6)
