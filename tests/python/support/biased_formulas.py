"""What packages of models of proteins compute, with all scores in memory, and how ours is compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import DEVICES, assert_as_good_as_eager, dtypes, rmse
from torch import Tensor
from torch.nn import functional as F

DEVICE_DTYPES = [(device, dtype) for device in DEVICES for dtype in dtypes(device)]


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Sequence[Tensor] = (),
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    empty_rows: str = "zero",
    softcap: float | None = None,
) -> Tensor:
    """All scores in memory, in the arguments' dtype."""
    score = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    for bias in biases:
        score = score + bias.to(score.dtype)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    there = torch.ones_like(score, dtype=torch.bool)
    if mask is not None:
        there = there & mask
    if kv_lengths is not None:
        there = there & (torch.arange(key.shape[-2], device=score.device) < kv_lengths)
    score = torch.where(there, score, torch.finfo(score.dtype).min)
    p = score.softmax(-1)
    if empty_rows == "zero":
        p = torch.where(there.any(-1, keepdim=True), p, 0.0)
    return p @ value


def drawn(*sizes: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sizes).to(device, dtype).requires_grad_()


def gradients(call: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    out = call(*leaves)
    out.backward(upstream.to(out.dtype))
    found = [out]
    for t in leaves:
        assert t.grad is not None
        found.append(t.grad)
        t.grad = None
    return found


def compare(
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    scores: int = 1,
    part: float = 0,
) -> None:
    """Output and all gradients, the truth being the plain one in float64, by the rule of the contract. A gradient that
    is a sum over scores may cancel (that of a bias of all keys is 0, and of eager PyTorch exactly where a row has one
    key): a few roundings of what is summed are allowed, on a GPU those of 16 bits, to which it rounds probabilities for
    their product, and `part` of the largest gradient."""
    wide = [t.detach().double().requires_grad_() for t in leaves]
    upstream = torch.randn_like(plain(*wide))
    truth = gradients(plain, wide, upstream)
    eager = gradients(plain, leaves, upstream)
    found = gradients(ours, leaves, upstream)
    assert found[0].dtype == leaves[0].dtype
    largest = max(t.square().mean().sqrt().item() for t in truth[1:])
    dtype = leaves[0].dtype
    rounding = 2**-50 if dtype == torch.float64 else 2**-21
    for i, (mine, theirs, right) in enumerate(zip(found, eager, truth, strict=True)):
        assert mine.shape == right.shape and (i == 0 or mine.dtype == leaves[i - 1].dtype)
        summed = scores / max(right.numel(), 1)
        of_bias = i > 3 and summed > 1  # where `scores` is given, leaves begin with query, key and value
        each = max(rounding, torch.finfo(dtype).eps / 16) if of_bias and mine.is_cuda else rounding
        allowed = each * math.sqrt(max(summed, 1)) + rounding * part * largest
        if rmse(mine, right) > allowed:
            assert_as_good_as_eager(mine, theirs, right, f"{i}")


# By package: the leading dimensions, H, Q, K, D, and its biases' and masks' shapes; odd lengths.
TRIANGLE = ((2, 7), 3, 7, 7, 8)
TABLE: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "triangle": (TRIANGLE, [(2, 7, 1, 1, 7), (2, 1, 3, 7, 7)]),
    "triangle, B = 1": (((1, 7), 3, 7, 7, 8), [(1, 7, 1, 1, 7), (1, 1, 3, 7, 7)]),
    "a chunk": (((5,), 3, 7, 7, 8), [(5, 1, 1, 7), (1, 3, 7, 7)]),
    "a chunk, bias of each": (((5,), 3, 7, 7, 8), [(5, 1, 1, 7), (5, 3, 7, 7)]),
    "templates": (((2, 3, 5), 2, 5, 5, 4), [(2, 3, 5, 1, 1, 5), (2, 3, 1, 2, 5, 5)]),
    "templates that share": (((2, 3, 5), 2, 5, 5, 4), [(2, 1, 5, 1, 1, 5), (1, 3, 1, 2, 5, 5)]),
    "tokens": (((2,), 4, 9, 9, 24), [(2, 1, 1, 9), (2, 4, 9, 9)]),
    "samples": (((2, 3), 4, 9, 9, 12), [(2, 3, 1, 1, 9), (2, 1, 4, 9, 9)]),
    "atoms": (((3, 4), 2, 8, 32, 8), [(1, 4, 2, 8, 32)]),
    "atoms of samples": (((3, 4), 2, 8, 32, 8), [(3, 1, 2, 8, 32), (2, 1, 32)]),
    "MSA": (((2, 5), 8, 7, 7, 4), [(2, 5, 1, 1, 7), (2, 1, 8, 7, 7)]),
    "no leading dimension": (((), 2, 5, 7, 4), [(2, 5, 7), (7,)]),
    "one query": (((3,), 2, 1, 7, 4), [(3, 2, 1, 7), ()]),
    "no bias": (((2, 3), 2, 5, 7, 4), []),
    "apart": (((2, 3, 4), 2, 5, 5, 4), [(2, 1, 4, 1, 5, 5), (3, 1, 2, 1, 5)]),
}


def problem(name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], tuple[int, ...]]:
    (leading, H, Q, K, D), shapes = TABLE[name]
    q, k, v = (drawn(*leading, H, n, D, device=device, dtype=dtype) for n in (Q, K, K))
    return [q, k, v, *(drawn(*s, device=device, dtype=dtype) for s in shapes)], (*leading, H, Q, K)


def triangle(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    return formula(q, k, v, [bias], mask=mask, kv_lengths=lengths, empty_rows="zero" if mask is None else "mean")


def weights(H: int, DH: int, D: int, c: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    inner = H * DH
    shapes = {
        "w_ln_a": (D,), "b_ln_a": (D,), "w_proj_q": (inner, D), "b_proj_q": (inner,), "w_proj_k": (inner, D),
        "w_proj_v": (inner, D), "w_proj_g": (inner, D), "w_proj_o": (D, inner), "w_proj_z": (H, c), "b_proj_o": (D,),
        "b_proj_z": (H,), "w_ln_z": (c,), "b_ln_z": (c,), "b_proj_k": (inner,), "b_proj_v": (inner,),
        "w_ln_q": (inner,), "b_ln_q": (inner,), "w_ln_k": (inner,), "b_ln_k": (inner,), "b_proj_g": (inner,),
    }  # fmt: skip
    return {name: drawn(*shape, dtype=dtype) for name, shape in shapes.items()}


def pair_bias_formula(
    single: Tensor, pair: Tensor, mask: Tensor | None, H: int, w: dict[str, Tensor], *, inf: float = 1e6,
    cached: bool = False, rms: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    BM, N, _ = single.shape

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if rms:
            return F.rms_norm(x, x.shape[-1:], weight, 1e-5)
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    def heads(t: Tensor) -> Tensor:
        return t.view(BM, N, H, -1).transpose(1, 2)

    x = norm(single, w["w_ln_a"], w.get("b_ln_a"))
    q, k, v, g = (F.linear(x, w[f"w_proj_{n}"], w.get(f"b_proj_{n}")) for n in "qkvg")
    if "w_ln_q" in w:
        q = norm(q, w["w_ln_q"], w.get("b_ln_q"))
    if "w_ln_k" in w:
        k = norm(k, w["w_ln_k"], w.get("b_ln_k"))
    z = pair
    if not cached:
        z = F.linear(norm(pair, w.get("w_ln_z"), w.get("b_ln_z")), w["w_proj_z"], w.get("b_proj_z"))
        z = z.permute(0, 3, 1, 2)
    biases = [z.repeat_interleave(BM // len(z), 0)]
    if mask is not None:
        biases.append((1 - mask.repeat_interleave(BM // len(mask), 0).to(q.dtype))[:, None, None] * -inf)
    out = formula(heads(q), heads(k), heads(v), biases, scale=scale).transpose(1, 2).reshape(BM, N, -1)
    return F.linear(out * g.sigmoid(), w["w_proj_o"], w.get("b_proj_o"))
