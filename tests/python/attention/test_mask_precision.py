"""Masks at the edges of dtypes: lists of blocks, pairs and derivatives of every order decide as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from block_masks import dense as allowed_by
from coverings import each_of, rows_of
from fusegrad import create_block_mask, flex_attention
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

pytestmark = pytest.mark.usefixtures("each_device")

S = 24
LISTS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]


def masks() -> dict[str, Callable]:
    """Some pairs lie where float32 and float64, or float32 and the integers, disagree."""
    seconds = 1.7e9 + torch.arange(S, dtype=torch.float64) * 7.3
    shuffled = seconds[torch.randperm(S)]
    milliseconds = 1_700_000_000_000 + torch.arange(S) * 70_001
    large = 2**60 + torch.arange(S).flip(0) * 3
    cutoff, step = torch.tensor(1.7e9 + 73, dtype=torch.float64), torch.tensor(0.1)
    low = (1e10 * (1 + torch.rand(S))).to(torch.bfloat16)
    half = (60000 * torch.rand(S)).to(torch.float16)
    number = 0.3
    return {
        "tenths": lambda b, h, q, kv: kv * 0.1 <= 0.3,
        "tenths of a distance": lambda b, h, q, kv: (q - kv).abs() * 0.1 <= number,
        "a captured step": lambda b, h, q, kv: (q - kv).abs() * step <= number,
        "thirds": lambda b, h, q, kv: (q / 3) * 3 >= kv,
        "seconds": lambda b, h, q, kv: seconds[q] >= seconds[kv],
        "shuffled seconds": lambda b, h, q, kv: shuffled[q] >= shuffled[kv],
        "a window of seconds": lambda b, h, q, kv: (seconds[q] - seconds[kv]).abs() <= 21.9,
        "seconds beside a cutoff": lambda b, h, q, kv: (seconds[kv] <= cutoff) | (q == kv),
        "milliseconds": lambda b, h, q, kv: milliseconds[q] >= milliseconds[kv],
        "milliseconds, a window": lambda b, h, q, kv: (milliseconds[q] - milliseconds[kv]).abs() <= 210_003,
        "milliseconds in float64": lambda b, h, q, kv: milliseconds[q].double() >= milliseconds[kv].double(),
        # PyTorch rounds to float32 here, and so does a mask that captures no float64.
        "milliseconds in float32": lambda b, h, q, kv: milliseconds[q].float() >= milliseconds[kv].float(),
        "beyond float64": lambda b, h, q, kv: large[q] - large[kv] >= 3,
        "bfloat16 near 1e10": lambda b, h, q, kv: low[q] >= low[kv],
        "bfloat16 near 1e10, scaled": lambda b, h, q, kv: low[q].float() * 0.7 >= low[kv].float() * 0.9,
        "bfloat16 near 1e10, a window": lambda b, h, q, kv: (low[q].float() - low[kv].float()).abs() <= 2e9,
        "float16": lambda b, h, q, kv: half[q].float() * 1.5 - half[kv].float() > 0.1,
    }


def truth_of(tensors: list[Tensor], allowed: Tensor) -> Tensor:
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    score = (q @ k.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
    alive = allowed.any(-1, keepdim=True)
    return twice(torch.where(alive, torch.where(alive, score, 0.0).softmax(-1), 0) @ v, [q, k, v])


def twice(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
    return [out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]


@each_of({"dtype": [torch.float64, torch.float32, torch.bfloat16], "name": [*masks()]})
def test_one_dtype_decides(name: str, dtype: torch.dtype) -> None:
    device = torch.get_default_device()
    if device.type == "cuda" and dtype == torch.float64:
        pytest.skip("queries are not float64 there")
    torch.manual_seed(1)
    mod = masks()[name]
    allowed = allowed_by(mod, 1, 1, S, S)
    assert allowed.any() and not allowed.all()
    tensors = [torch.randn(1, 2, S, 8).to(dtype).requires_grad_() for _ in range(3)]
    truth = truth_of(tensors, allowed)
    limit = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for block in (1, 8, 32):
        try:
            ours = create_block_mask(mod, None, None, S, S, device=device, block_size=block)
        except TypeError as error:
            assert device.type == "cuda" and "must not be float64" in str(error)
            return
        theirs = pytorch.create_block_mask(mod, None, None, S, S, device=device, BLOCK_SIZE=block)
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in LISTS), block
        found = twice(flex_attention(*tensors, block_mask=ours), tensors)
        for i, (a, b) in enumerate(zip(found, truth, strict=True)):
            assert (a.double() - b).norm() <= limit * b.norm() + 1e-12, (block, i)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["in float64", "in float32"])
def test_tangents_and_transforms_decide_alike(name: str, dtype: torch.dtype) -> None:
    if torch.get_default_device().type == "cuda" and "64" in f"{name} {dtype}":
        pytest.skip("float64 is refused")
    torch.manual_seed(1)
    seconds = 1.7e9 + torch.arange(S, dtype=torch.float64) * 7.3
    mods = {
        "in float64": lambda b, h, q, kv: (seconds[q] >= seconds[kv]) & (q - kv < 5),
        "in float32": lambda b, h, q, kv: (q - kv).abs() * 0.1 <= 0.3,
    }
    mod = mods[name]
    mask = create_block_mask(mod, None, None, S, S, block_size=8)
    q, k, v, d = (torch.randn(1, 2, S, 8).to(dtype) for _ in range(4))
    score = lambda x, t: x @ t.mT * 8**-0.5  # noqa: E731
    allowed = allowed_by(mod, 1, 1, S, S)

    def ours(x: Tensor) -> Tensor:
        return flex_attention(x, k.to(x), v.to(x), block_mask=mask).square().sum()

    def plain(x: Tensor) -> Tensor:
        return (score(x, k.double()).masked_fill(~allowed, -torch.inf).softmax(-1) @ v.double()).square().sum()

    def derivatives(f: Callable, x: Tensor, d: Tensor) -> list[Tensor]:
        grad, jvp = torch.func.grad, torch.func.jvp
        many = torch.stack([x, x + 1])
        return [
            jvp(f, (x,), (d,))[1],
            jvp(grad(f), (x,), (d,))[1],
            torch.vmap(lambda x: jvp(grad(f), (x,), (d,))[1])(many),
            grad(lambda x: jvp(grad(lambda x: jvp(f, (x,), (d,))[1]), (x,), (d,))[1].sum())(x),
        ]

    limit = 1e-9 if dtype == torch.float64 else 1e-4
    truth = derivatives(plain, q.double(), d.double())
    for i, (a, b) in enumerate(zip(derivatives(ours, q, d), truth, strict=True)):
        assert (a.double() - b).norm() <= limit * b.norm(), i


# --- score_mods -----------------------------------------------------------------------------------------------------


def score_mods() -> dict[str, tuple[Callable, bool]]:
    """Score_mods of float64 tensors, and whether float32 has room for what they are used for."""
    seconds = 1.7e9 + torch.arange(S, dtype=torch.float64) * 7.3
    bias, slope = torch.randn(S, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    vectors = torch.randn(S, 4, dtype=torch.float64)
    milliseconds = 1_700_000_000_000 + torch.arange(S) * 70_001
    return {
        "a bias": (lambda s, b, h, q, kv: s + bias[kv], True),
        "a bias and a slope": (lambda s, b, h, q, kv: s + bias[kv] - slope * (q - kv).abs(), True),
        "a factor and tanh": (lambda s, b, h, q, kv: 3 * torch.tanh(s * bias[q].exp() / 3), True),
        "a choice": (lambda s, b, h, q, kv: torch.where(q > kv, s + bias[q], s * slope), True),
        "seconds apart": (lambda s, b, h, q, kv: s - (seconds[q] - seconds[kv]).abs() * 0.01, False),
        "later seconds": (lambda s, b, h, q, kv: torch.where(seconds[q] >= seconds[kv], s, -torch.inf), False),
        "an angle": (lambda s, b, h, q, kv: s + torch.sin(seconds[kv] * 0.1), False),
        "whole seconds": (lambda s, b, h, q, kv: s + seconds[kv].long() % 7, False),
        "a product of vectors": (lambda s, b, h, q, kv: s + torch.dot(vectors[q], vectors[kv]), False),
        "a distance": (lambda s, b, h, q, kv: s - (vectors[q] - vectors[kv]).square().sum(), False),
        "milliseconds apart": (
            lambda s, b, h, q, kv: s - (milliseconds[q].double() - milliseconds[kv].double()).abs() * 1e-6,
            False,
        ),
        "a difference of milliseconds": (
            lambda s, b, h, q, kv: s - (milliseconds[q] - milliseconds[kv]).double().abs() * 1e-6,
            True,
        ),
    }


@rows_of("name", [*score_mods()])
def test_captured_float64_is_exact_or_refused(name: str) -> None:
    """The truth is the function itself, in float64."""
    device = torch.get_default_device()
    torch.manual_seed(2)
    mod, rounds = score_mods()[name]
    tensors = [torch.randn(1, 2, S, 8, requires_grad=True) for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    indices = [torch.arange(n).reshape([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate((1, 2, S, S))]
    score = wide[0] @ wide[1].mT * 8**-0.5
    places = torch.broadcast_tensors(score, *indices)
    each = [mod(*x) for x in zip(*(p.reshape(-1) for p in places), strict=True)]
    truth = twice(torch.stack(each).reshape(score.shape).softmax(-1) @ wide[2], wide)
    found = {}
    if device.type == "cpu":
        found[torch.float64] = twice(flex_attention(*wide, mod), wide)
    if rounds:
        found[torch.float32] = twice(flex_attention(*tensors, mod), tensors)
    else:
        with pytest.raises(TypeError, match=r"^flex_attention: score_mod's captured tensors must not be float64 where"):
            flex_attention(*tensors, mod)
        with pytest.raises(TypeError, match=r"^flex_attention: score_mod's captured tensors must not be float64 where"):
            torch.func.jvp(lambda x: flex_attention(x, x, x, mod), (tensors[0],), (tensors[1],))
    for dtype, results in found.items():
        limit = 1e-9 if dtype == torch.float64 else 1e-4
        for i, (a, b) in enumerate(zip(results, truth, strict=True)):
            assert (a.double() - b).norm() <= limit * b.norm(), (dtype, i)
