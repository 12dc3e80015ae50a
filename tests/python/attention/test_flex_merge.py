"""flex_attention_merge_: outputs over two sets of keys, added up with their low parts."""

from __future__ import annotations

import math

import pytest
import torch
from fusegrad._attention_low import with_low
from fusegrad.distributed.sequence_rows import Results, merged
from fusegrad.score_mod import trace_score_mod
from support import DEVICES
from torch import Tensor

OP = torch.ops.fusegrad
LOW, MAX_SCORES = 2, 1
LAYOUTS = ("heads", "rows", "odd", "strided")


def parts(device: str, dtype: torch.dtype, layout: str, far: float = 0.0) -> tuple[list[Results], Tensor, Tensor]:
    """Results of the forward over two sets of keys, of which some rows see none or those of one set alone; out and lse
    of all keys in float64."""
    B, H, M, D = 2, 3, 37, 20 if layout == "odd" else 64
    keys = (41, 24)
    q, k, v = (torch.randn(B, H, n, D, device=device).to(dtype) for n in (M, sum(keys), sum(keys)))
    if layout == "rows":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(M, sum(keys), device=device) * 3 + far
    bias[:5, : keys[0]] = -math.inf
    bias[3:9, keys[0] :] = -math.inf
    found, first = list[Results](), 0
    for n in keys:
        some = bias[:, first : first + n].contiguous()
        mod = trace_score_mod(lambda s, b, h, i, j, some=some: s + some[i, j])
        taken = (t[:, :, first : first + n] for t in (k, v))
        made = OP.flex_attention_forward(
            q, *taken, mod.text, [some], [], [], "", [], [], [], [], [0, 0], D**-0.5, 0.0, None, LOW | MAX_SCORES
        )
        found.append(Results(*made))
        first += n
    scores = (q.double() @ k.double().mT) * D**-0.5 + bias.double()
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isinf().unsqueeze(-1), 0, (scores - lse.unsqueeze(-1)).exp())
    if layout == "strided":  # no columns side by side
        for r in found:
            r.out = r.out.mT.contiguous().mT
            r.low = r.low.mT.contiguous().mT if r.low.numel() else r.low
    return found, weights @ v.double(), lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("far", [0.0, 3e4])
def test_two_sets_of_keys_are_all_keys(device: str, dtype: torch.dtype, layout: str, far: float) -> None:
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("not on CUDA")
    torch.manual_seed(0)
    (one, two), out, lse = parts(device, dtype, layout, far)
    both = merged(merged(None, one), two)
    assert both is one and both.out.dtype == dtype
    low = dtype in (torch.bfloat16, torch.float16)
    assert (both.low.numel() > 0) == low
    exact = (with_low(both.out, both.low) if low else both.out).double()
    # Of 16 bits the kernels round probabilities too; both sets alone have that error already.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    tolerance += far * torch.finfo(one.lse.dtype).eps  # scores are rounded
    assert (exact - out).norm() <= tolerance * out.norm()
    assert not both.out[:, :, 3:5].any() and (both.lse[:, :, 3:5] == -math.inf).all()
    some = lse.isfinite()
    assert ((both.lse + both.lse_low).double() - lse)[some].abs().max() <= (1e-10 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 8, 36, 200])
def test_low_parts_are_added(device: str, dtype: torch.dtype, columns: int) -> None:
    """Numbers of all magnitudes, among them those below the smallest normal one, and infinities."""
    torch.manual_seed(0)
    shape = (1, 2, 19, columns)
    exponents = torch.randint(-20, 9, shape, device=device)
    wide = [torch.randn(shape, device=device, dtype=torch.float64) * 2.0**exponents for _ in range(2)]
    pairs = []
    for x in wide:
        out = x.to(dtype)
        unit = (with_low(out, torch.ones_like(out, dtype=torch.int8)).double() - out.double()).abs()
        pairs.append((out, ((x - out.double()) / unit).round().clamp(-126, 126).to(torch.int8)))
    weights = [torch.rand(shape[:3], device=device) for _ in range(2)]
    terms = [with_low(*p).double() * w.double().unsqueeze(-1) for p, w in zip(pairs, weights, strict=True)]
    truth, magnitude = terms[0] + terms[1], terms[0].abs() + terms[1].abs()
    (out, low), (more, more_low) = pairs
    out[0, 0, 3, 0] = math.inf
    OP.flex_attention_merge_(out, low, weights[0], more, more_low, weights[1])
    assert out[0, 0, 3, 0] == math.inf
    out[0, 0, 3, 0], low[0, 0, 3, 0], truth[0, 0, 3, 0] = 0, 0, 0
    error = (with_low(out, low).double() - truth).abs()
    # Half a unit of a low part, and float32's roundings.
    least = torch.finfo(dtype).smallest_normal
    bound = out.double().abs().clamp_min(least) * torch.finfo(dtype).eps / 252 * 1.5
    assert (error <= bound + 2e-7 * magnitude).all()


def call(device: str) -> list[Tensor]:
    out = torch.randn(1, 2, 3, 8, device=device).bfloat16()
    low = torch.zeros_like(out, dtype=torch.int8)
    return [out, low, torch.rand(1, 2, 3, device=device), out.clone(), low.clone(), torch.rand(1, 2, 3, device=device)]


@pytest.mark.parametrize("device", DEVICES)
def test_as_an_op(device: str) -> None:
    arguments = call(device)
    torch.library.opcheck(OP.flex_attention_merge_.default, arguments)
    before = [t._version for t in arguments]
    OP.flex_attention_merge_(*arguments)
    assert [t._version - v for t, v in zip(arguments, before, strict=True)] == [1, 1, 0, 0, 0, 0]
    wide = [t.float() if t.dtype == torch.bfloat16 else t for t in call(device)]
    wide[1], wide[4] = (torch.empty(0, device=device) for _ in range(2))
    torch.library.opcheck(OP.flex_attention_merge_.default, wide)


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (1, lambda t: t.float(), "out_low must be Char of shape"),
        (1, lambda t: t[:0], "out_low must be Char of shape"),
        (2, lambda t: t.double(), "weight must be Float of shape"),
        (2, lambda t: t[..., None], "weight must be Float of shape"),
        (3, lambda t: t.half(), "more must be BFloat16 of shape"),
        (4, lambda t: t[..., :4], "more_low must be Char of shape"),
        (5, lambda t: t[:, :1], "more_weight must be Float of shape"),
        (0, lambda t: t[0], "out must be"),
    ],
)
def test_bad_arguments(at: int, wrong: object, message: str) -> None:
    arguments = call("cpu")
    kept = [t.clone() for t in arguments]
    arguments[at] = wrong(arguments[at])  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"flex_attention_merge_: {message}"):
        OP.flex_attention_merge_(*arguments)
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(arguments, kept, strict=True)) if i != at)
