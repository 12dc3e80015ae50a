"""biased_attention, triangle_attention and attention_pair_bias beside the formulas of packages of proteins."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import fusegrad
import pytest
import torch
from fusegrad import attention_pair_bias, biased_attention, triangle_attention
from support import DEVICES, assert_as_good_as_eager, dtypes, rmse
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint

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
    is a sum over scores may cancel (that of a bias of all keys is 0): a few roundings of what is summed are allowed,
    and `part` of the largest gradient."""
    wide = [t.detach().double().requires_grad_() for t in leaves]
    upstream = torch.randn_like(plain(*wide))
    truth = gradients(plain, wide, upstream)
    eager = gradients(plain, leaves, upstream)
    found = gradients(ours, leaves, upstream)
    assert found[0].dtype == leaves[0].dtype
    largest = max(t.square().mean().sqrt().item() for t in truth[1:])
    rounding = 2**-51 if leaves[0].dtype == torch.float64 else 2**-22
    for i, (mine, theirs, right) in enumerate(zip(found, eager, truth, strict=True)):
        assert mine.shape == right.shape and (i == 0 or mine.dtype == leaves[i - 1].dtype)
        allowed = rounding * (math.sqrt(max(scores / max(right.numel(), 1), 1)) + part * largest)
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


@pytest.mark.parametrize("device, dtype", DEVICE_DTYPES, ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_biases(name: str, device: str, dtype: torch.dtype) -> None:
    leaves, sizes = problem(name, device, dtype)
    compare(
        lambda q, k, v, *b: biased_attention(q, k, v, b),
        lambda q, k, v, *b: formula(q, k, v, b),
        leaves,
        math.prod(sizes),
    )


@pytest.mark.parametrize("device, dtype", DEVICE_DTYPES, ids=str)
@pytest.mark.parametrize("empty_rows", ["zero", "mean"])
@pytest.mark.parametrize("name", TABLE)
def test_masks_with_empty_rows(name: str, empty_rows: str, device: str, dtype: torch.dtype) -> None:
    leaves, sizes = problem(name, device, dtype)
    for shape in {(*sizes[:-3], 1, 1, sizes[-1]), sizes[-2:], sizes}:
        mask = torch.rand(shape, device=device) > 0.4
        mask[(0,) * (len(shape) - 1)] = False
        compare(
            lambda q, k, v, *b, m=mask: biased_attention(q, k, v, b, mask=m, empty_rows=empty_rows),
            lambda q, k, v, *b, m=mask: formula(q, k, v, b, mask=m, empty_rows=empty_rows),
            leaves,
            math.prod(sizes),
        )
    lengths = torch.randint(0, sizes[-1] + 2, (*sizes[:-3], 1, 1, 1), device=device, dtype=torch.int32)
    lengths.view(-1)[0] = 0
    compare(
        lambda q, k, v, *b: biased_attention(q, k, v, b, kv_lengths=lengths, empty_rows=empty_rows),
        lambda q, k, v, *b: formula(q, k, v, b, kv_lengths=lengths, empty_rows=empty_rows),
        leaves,
        math.prod(sizes),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed: int, device: str) -> None:
    """Any leading dimensions, biases that have any of them, in any order of strides, with all that may come along."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtype = torch.float64 if device == "cpu" else torch.float32
    leading = tuple(chance.choice([1, 2, 3]) for _ in range(chance.randint(0, 4)))
    H, Q, K, D, E = (chance.choice([1, 2, 5, 7]) for _ in range(5))
    sizes = (*leading, H, Q, K)
    shared = chance.choice([H, 1])
    q = drawn(*leading, H, Q, D, device=device, dtype=dtype)
    few = tuple(chance.choice([1, n]) for n in leading)
    k, v = (drawn(*of, shared, K, d, device=device, dtype=dtype) for of, d in ((few, D), (leading, E)))

    def shape() -> tuple[int, ...]:
        whole = tuple(chance.choice([1, n]) for n in sizes)
        return whole[chance.randint(0, len(whole)) :]

    biases = []
    for _ in range(chance.randint(0, 3)):
        leaf = drawn(*shape(), device=device, dtype=dtype)
        biases.append(leaf)
    mask = torch.rand(shape(), device=device) > 0.3 if chance.random() < 0.6 else None
    lengths = torch.randint(0, K + 1, (*shape()[:-1], 1), device=device) if chance.random() < 0.4 else None
    options: dict[str, Any] = {
        "mask": mask, "kv_lengths": lengths, "empty_rows": chance.choice(["zero", "mean"]),
        "scale": chance.choice([None, 1.0, 0.3]), "softcap": chance.choice([None, 3.0]),
    }  # fmt: skip

    def permuted(bias: Tensor) -> Tensor:
        """The same numbers with the last dimension's stride the largest."""
        return bias.movedim(-1, 0).contiguous().movedim(0, -1) if bias.dim() else bias

    compare(
        lambda q, k, v, *b: biased_attention(q, k, v, [permuted(x) for x in b], **options),
        lambda q, k, v, *b: formula(q, k, v, b, **options),
        [q, k, v, *biases],
        math.prod(sizes),
    )


@pytest.mark.parametrize("name", ["triangle", "samples", "no leading dimension"])
def test_heads_last(name: str) -> None:
    (leading, H, Q, K, D), shapes = TABLE[name]
    leaves = [drawn(*leading, n, H, D) for n in (Q, K, K)] + [drawn(*s) for s in shapes]

    def plain(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        return formula(*(t.transpose(-2, -3) for t in (q, k, v)), biases).transpose(-2, -3)

    compare(lambda q, k, v, *b: biased_attention(q, k, v, b, layout="heads_last"), plain, leaves)
    q, k, v, *b = leaves
    assert biased_attention(q, k, v, b, layout="heads_last").is_contiguous()


@pytest.mark.parametrize("inf", [1e6, 1e9, 1e10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_additive_masks_of_whole_rows(inf: float, dtype: torch.dtype) -> None:
    """What packages add: rows whose keys all have it are softmaxes of what its rounding leaves of the scores."""
    torch.manual_seed(0)
    q, k = (torch.randint(-12, 13, (2, 5, 3, 7, 8)).to(dtype) / 8 for _ in range(2))
    v, pair = torch.randn(2, 5, 3, 7, 8, dtype=dtype), torch.randint(-8, 9, (2, 1, 3, 7, 7)).to(dtype) / 8
    mask = (torch.rand(2, 5, 1, 1, 7) > 0.4).to(dtype)
    mask[0, 1] = 0
    lowered = inf * (mask - 1)
    leaves = [t.requires_grad_() for t in (q, k, v, pair)]
    upstream = torch.randn(2, 5, 3, 7, 8, dtype=dtype)
    found = gradients(lambda q, k, v, b: biased_attention(q, k, v, [lowered, b], scale=0.5), leaves, upstream)
    right = gradients(lambda q, k, v, b: formula(q, k, v, [lowered, b], scale=0.5), leaves, upstream)
    for ours, truth in zip(found, right, strict=True):
        torch.testing.assert_close(ours, truth, rtol=2e-5 if dtype == torch.float32 else 1e-11, atol=2e-6)


def test_aux() -> None:
    leaves, _ = problem("triangle", "cpu", torch.float64)
    q, k, v, *biases = leaves
    _, aux = biased_attention(q, k, v, biases, return_aux=AuxRequest(lse=True, max_scores=True))
    score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + sum(biases)
    torch.testing.assert_close(aux.lse, score.logsumexp(-1))
    torch.testing.assert_close(aux.max_scores, score.amax(-1))
    assert biased_attention(q, k, v, biases, return_aux=AuxRequest(lse=True))[1].max_scores is None
    found = torch.autograd.grad(aux.lse.sin().sum(), leaves[:2] + biases)
    right = torch.autograd.grad(score.logsumexp(-1).sin().sum(), leaves[:2] + biases)
    torch.testing.assert_close(found, right)


def test_no_tensor_of_all_rows() -> None:
    """Nothing larger than an input is made beside what is returned: not the scores of the leading dimensions."""
    N = 24
    q, k, v = (drawn(1, N, 2, N, 4, dtype=torch.float32) for _ in range(3))
    biases = [drawn(1, N, 1, 1, N, dtype=torch.float32), drawn(1, 1, 2, N, N, dtype=torch.float32)]
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                largest = max(largest, t.numel() if isinstance(t, Tensor) else 0)
            return out

    with Watch():
        biased_attention(q, k, v, biases).sum().backward()
    assert largest == q.numel()


def test_dropout() -> None:
    leaves, _ = problem("triangle", "cpu", torch.float64)
    q, k, v, *biases = leaves
    torch.manual_seed(3)
    out = biased_attention(q, k, v, biases, dropout_p=0.25)
    torch.manual_seed(3)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    row, pair = biases[0].view(14, 7), biases[1][:, 0]
    right = fusegrad.flex_attention(*flat, lambda s, b, h, i, j: s + row[b, j] + pair[b // 7, h, i, j], dropout_p=0.25)
    torch.testing.assert_close(out.flatten(0, 1), right)
    assert not torch.equal(out, biased_attention(q, k, v, biases))


# --- triangle attention ---


def triangle(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    return formula(q, k, v, [bias], mask=mask, kv_lengths=lengths, empty_rows="zero" if mask is None else "mean")


@pytest.mark.parametrize("device, dtype", DEVICE_DTYPES, ids=str)
@pytest.mark.parametrize("B, N, Q, K", [(2, 7, 7, 7), (1, 5, 3, 9), (3, 1, 33, 17)])
def test_triangle_attention(B: int, N: int, Q: int, K: int, device: str, dtype: torch.dtype) -> None:
    q, k, v = (drawn(B, N, 2, n, 8, device=device, dtype=dtype) for n in (Q, K, K))
    bias = drawn(B, 1, 2, Q, K, device=device, dtype=dtype)
    mask = torch.rand(B, N, 1, 1, K, device=device) > 0.4
    mask[0, 0] = False
    lengths = torch.randint(0, K + 1, (B, N, 1, 1, 1), dtype=torch.int32, device=device)
    lengths[0, 0] = 0
    for options in ({}, {"mask": mask}, {"mask": mask.int()}, {"kv_lengths": lengths}):
        chosen = options.get("mask"), options.get("kv_lengths")
        compare(
            lambda *t, o=options: triangle_attention(*t, **o),
            lambda *t, c=chosen: triangle(*t, c[0] if c[0] is None else c[0].bool(), c[1]),
            [q, k, v, bias],
        )


def test_triangle_attention_of_four_dimensions() -> None:
    """cuEquivariance adds the batch, and its results keep it."""
    q, k, v, bias = drawn(5, 2, 7, 8), drawn(5, 2, 7, 8), drawn(5, 2, 7, 8), drawn(1, 2, 7, 7)
    mask = torch.rand(5, 1, 1, 7) > 0.3
    out, lse, most = triangle_attention(q, k, v, bias, mask, return_aux=True)
    assert out.shape == (1, 5, 2, 7, 8) and lse.shape == most.shape == (1, 5, 2, 7)
    assert lse.dtype == most.dtype == torch.float32
    torch.testing.assert_close(out[0], triangle(q, k, v, bias, mask))
    grads = torch.autograd.grad(out.sum(), [q, bias])
    assert [g.shape for g in grads] == [q.shape, bias.shape]


def test_aux_of_triangle_attention() -> None:
    q, k, v, bias = drawn(1, 3, 2, 5, 8), drawn(1, 3, 2, 5, 8), drawn(1, 3, 2, 5, 8), drawn(1, 1, 2, 5, 5)
    score = q @ k.transpose(-1, -2) * 8**-0.5 + bias
    mask = torch.ones(1, 3, 1, 1, 5, dtype=torch.bool)
    mask[0, 1], mask[0, 2, ..., 3:] = False, False
    masked = torch.where(mask, score, -1e9)
    _, lse, most = triangle_attention(q, k, v, bias, mask, return_aux=True)
    torch.testing.assert_close(lse, masked.logsumexp(-1).float())
    torch.testing.assert_close(most, masked.amax(-1).float())
    lengths = torch.tensor([5, 0, 3], dtype=torch.int32).view(1, 3, 1, 1, 1)
    out, lse, most = triangle_attention(q, k, v, bias, return_aux=True, kv_lengths=lengths)
    assert (out[0, 1] == 0).all() and (lse[0, 1] == 0).all() and (most[0, 1] == 0).all()
    torch.testing.assert_close(lse[0, [0, 2]], masked.logsumexp(-1).float()[0, [0, 2]])
    grads = torch.autograd.grad(lse.sum() + most.sum(), [q, bias])
    assert all(g.isfinite().all() for g in grads) and (grads[0][0, 1] == 0).all()


# --- attention with pair bias, whole ---


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["all", "least", "rms_norm", "cached"])
@pytest.mark.parametrize("M", [1, 3])
def test_attention_pair_bias(kind: str, M: int, dtype: torch.dtype) -> None:
    B, N, H, DH, D, c = 2, 7, 3, 4, 10, 5
    w = weights(H, DH, D, c, dtype)
    if kind == "least":
        w = {n: w[n] for n in ("w_ln_a", "w_proj_q", "w_proj_k", "w_proj_v", "w_proj_g", "w_proj_o", "w_proj_z")}
    if kind == "rms_norm":
        w = {n: t for n, t in w.items() if not n.startswith("b_ln")}
    if kind == "cached":
        w = {n: t for n, t in w.items() if n not in ("w_proj_z", "b_proj_z", "w_ln_z", "b_ln_z")}
    single = drawn(B * M, N, D, dtype=dtype)
    pair = drawn(B, H, N, N, dtype=dtype) if kind == "cached" else drawn(B, N, N, c, dtype=dtype)
    leaves, names = [single, pair, *w.values()], list(w)
    optional = ("b_ln_a", "b_proj_q")
    for mask in (None, torch.rand(B, N) > 0.3, (torch.rand(B * M, N) > 0.3).to(dtype)):

        def ours(single: Tensor, pair: Tensor, *of: Tensor, mask: Tensor | None = mask) -> Tensor:
            given: dict[str, Any] = {**dict.fromkeys(optional), **dict(zip(names, of, strict=True))}
            options: dict[str, Any] = {"is_cached_z_proj": kind == "cached"}
            if kind == "rms_norm":
                options["norm_kind"] = "rms_norm"
            out, z = attention_pair_bias(single, pair, mask, H, return_z_proj=True, attn_scale=0.4, **given, **options)
            assert z is not None and z.shape == (B, H, N, N)
            return out

        compare(
            ours,
            lambda single, pair, *of, m=mask: pair_bias_formula(
                single, pair, m, H, dict(zip(names, of, strict=True)), cached=kind == "cached",
                rms=kind == "rms_norm", scale=0.4,
            ),
            leaves,
            part=16,
        )  # fmt: skip


def test_a_mask_with_a_gradient() -> None:
    w = weights(2, 4, 6, 5)
    single, pair = drawn(4, 5, 6), drawn(2, 5, 5, 5)
    mask = torch.rand(2, 5).double().requires_grad_()
    out, _ = attention_pair_bias(single, pair, mask, 2, inf=3.0, **w)
    right = pair_bias_formula(single, pair, mask, 2, w, inf=3.0)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), mask), torch.autograd.grad(right.sin().sum(), mask))


# --- what PyTorch does with a call ---


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str) -> None:
    leaves, _ = problem("triangle", device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        out = biased_attention(*leaves[:3], leaves[3:])
    low = [t.detach().bfloat16() for t in leaves[:3]]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, biased_attention(*low, leaves[3:]))
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert all(g.dtype == torch.float32 and g.shape == t.shape for g, t in zip(grads, leaves, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    leaves, _ = problem("triangle", "cpu", torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        return biased_attention(q, k, v, biases)

    compare(lambda *t: checkpoint(call, *t, use_reentrant=reentrant), lambda q, k, v, *b: formula(q, k, v, b), leaves)


@pytest.mark.parametrize("name", ["triangle", "templates that share", "no bias"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    leaves, sizes = problem(name, "cpu", torch.float64)
    mask = torch.rand(sizes[-1]) > 0.3

    def call(q: Tensor, k: Tensor, v: Tensor, *b: Tensor) -> Tensor:
        return biased_attention(q, k, v, b, mask=mask, empty_rows="mean", softcap=4.0)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    compare(compiled, lambda q, k, v, *b: formula(q, k, v, b, mask=mask, empty_rows="mean", softcap=4.0), leaves)


def test_compiled_triangle_attention() -> None:
    torch._dynamo.reset()
    q, k, v, bias = drawn(2, 5, 2, 5, 8), drawn(2, 5, 2, 5, 8), drawn(2, 5, 2, 5, 8), drawn(2, 1, 2, 5, 5)
    mask = torch.rand(2, 5, 1, 1, 5) > 0.3
    compiled = torch.compile(triangle_attention, backend="aot_eager", fullgraph=True)
    compare(lambda *t: compiled(*t, mask), lambda *t: triangle(*t, mask), [q, k, v, bias])


def test_vmap_and_second_derivatives() -> None:
    q, k, v, bias = drawn(2, 3, 2, 4, 5), drawn(2, 3, 2, 4, 5), drawn(2, 3, 2, 4, 5), drawn(2, 1, 2, 4, 4)
    each = torch.func.vmap(lambda q, k, v, b: biased_attention(q, k, v, [b]))(q, k, v, bias)
    torch.testing.assert_close(each, formula(q, k, v, [bias]))
    assert torch.autograd.gradgradcheck(lambda *t: triangle_attention(*t), [q, k, v, bias])
    assert torch.autograd.gradcheck(lambda *t: triangle_attention(*t), [q, k, v, bias])


def test_known_calls_trace_nothing() -> None:
    from fusegrad import _bias_texts
    from fusegrad._tracing.cache import cache_info

    leaves, _ = problem("triangle", "cpu", torch.float32)
    biased_attention(*leaves[:3], leaves[3:])
    texts, traces = _bias_texts.text_of.cache_info(), cache_info()
    for N in (7, 8, 9):  # other lengths have the same text
        q, k, v = (drawn(2, N, 3, N, 8) for _ in range(3))
        biased_attention(q, k, v, [drawn(2, N, 1, 1, N), drawn(2, 1, 3, N, N)])
    assert _bias_texts.text_of.cache_info().misses == texts.misses and cache_info() == traces


# --- every argument counts ---


def effects() -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]:
    """Calls, and for each argument a value that must change what is returned."""
    torch.manual_seed(0)
    q, k, v, other = (torch.randn(2, 5, 3, 5, 8) for _ in range(4))
    bias, mask = torch.randn(2, 1, 3, 5, 5), torch.rand(2, 5, 1, 1, 5) > 0.5
    mask[0, 0] = False
    lengths = torch.randint(0, 5, (2, 5, 1, 1, 1))
    w = {name: t.detach() for name, t in weights(3, 4, 6, 4, torch.float32).items()}
    pairs = {"single_repr": torch.randn(4, 5, 6), "pair_repr": torch.randn(2, 5, 5, 4), "mask": torch.rand(2, 5)}
    optional = [n for n in w if n[2:] in ("ln_q", "ln_k", "ln_z") or n.startswith("b_")]
    return {
        "biased_attention": (
            biased_attention,
            {"query": q, "key": k, "value": v, "biases": [bias], "mask": mask},
            {
                **{"query": other, "key": other, "value": other, "biases": [-bias], "scale": 0.1, "mask": ~mask},
                **{"kv_lengths": lengths, "layout": "heads_last", "empty_rows": "mean", "softcap": 1.0},
                **{"dropout_p": 0.5, "return_aux": AuxRequest(lse=True)},
            },
        ),
        "triangle_attention": (
            triangle_attention,
            {"q": q, "k": k, "v": v, "bias": bias},
            {
                **{"q": other, "k": other, "v": other, "bias": -bias, "mask": mask, "scale": 0.1},
                **{"return_aux": True, "kv_lengths": lengths},
            },
        ),
        "attention_pair_bias": (
            attention_pair_bias,
            {**pairs, "num_heads": 3, **w, "inf": 2.0},
            {
                **{name: -t for name, t in pairs.items()},
                **{name: t.flip(0) * 2 for name, t in w.items()},
                **{"num_heads": 4, "inf": 1.0, "eps": 1.0, "attn_scale": 0.1, "return_z_proj": True},
                **{"is_cached_z_proj": True, "norm_kind": "rms_norm"},
                **{name: None for name in optional if name != "b_ln_a"},
            },
        ),
    }


@pytest.mark.parametrize("name", ["biased_attention", "triangle_attention", "attention_pair_bias"])
def test_every_argument_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    function, call, changed = effects()[name]
    # On the CPU the bits are the same in any case: what counts is what reaches the op.
    told: list[Any] = []
    original = fusegrad.folding.attend_traced
    monkeypatch.setattr(
        fusegrad.folding, "attend_traced", lambda *a, **more: told.append(more["deterministic"]) or original(*a, **more)
    )

    def result(**options: Any) -> list[Tensor] | str:
        torch.manual_seed(1)
        try:
            return [t for t in torch.utils._pytree.tree_leaves(function(**{**call, **options})) if t is not None]
        except (ValueError, TypeError) as error:
            return str(error)

    plain = result()
    assert not isinstance(plain, str), plain
    for argument in inspect.signature(function).parameters:
        if argument == "deterministic":
            result(deterministic=True)
            assert told[-1] is True and told[0] is None
            continue
        if argument in ("b_proj_z", "b_proj_k"):  # the same for all keys, which a softmax takes away
            continue
        other = result(**{argument: changed[argument]})
        same = isinstance(other, list) and len(other) == len(plain) and all(map(torch.equal, other, plain))
        assert not same, f"{argument} has no effect"


# --- errors ---


def good() -> dict[str, Any]:
    q = torch.randn(2, 5, 3, 7, 8)
    return {"query": q, "key": q.clone(), "value": q.clone(), "biases": [torch.randn(2, 1, 3, 7, 7)]}


@pytest.mark.parametrize(
    "changed, error, text",
    [
        (
            {"key": torch.randn(2, 5, 3, 7, 9)},
            ValueError,
            r"key must have a shape that fits query, \[2, 5, 3, 7, 8\], but got \[2, 5, 3, 7, 9\]",
        ),
        ({"key": torch.randn(3, 5, 3, 7, 8)}, ValueError, "key must have a shape that fits query"),
        ({"value": torch.randn(2, 5, 3, 6, 8)}, ValueError, "value must have a shape that fits query"),
        ({"value": torch.randn(2, 5, 2, 7, 8)}, ValueError, "value must have a shape that fits query"),
        (
            {"query": torch.randn(7, 8)},
            ValueError,
            r"query must have at least 3 dimensions, \[\*, H, S, D\], but got \[7, 8\]",
        ),
        ({"query": torch.zeros(2, 5, 3, 7, 8, dtype=torch.int32)}, TypeError, "query must be float32"),
        (
            {"key": torch.randn(2, 5, 3, 7, 8).half()},
            TypeError,
            "key must have the dtype of query, torch.float32, but got torch.float16",
        ),
        (
            {"biases": [torch.randn(2, 2, 3, 7, 7)]},
            ValueError,
            r"biases\[0\] must have a shape that broadcasts to \[2, 5, 3, 7, 7\], but got \[2, 2, 3, 7, 7\]",
        ),
        ({"biases": [torch.randn(1, 2, 5, 3, 7, 7)]}, ValueError, r"biases\[0\] must have a shape that broadcasts"),
        (
            {"biases": [torch.ones(7, 7).bool()]},
            TypeError,
            r"biases\[0\] must be floating-point, but got torch.bool: what takes part is a mask",
        ),
        ({"biases": [torch.ones(7, 7).long()]}, TypeError, r"biases\[0\] must be floating-point, but got torch.int64"),
        ({"biases": [None]}, TypeError, r"biases\[0\] must be a tensor, but got None"),
        ({"biases": torch.randn(7, 7)}, TypeError, "biases must be a sequence, but got torch.Tensor"),
        (
            {"mask": torch.ones(7)},
            TypeError,
            r"mask must be a bool tensor, .* but got torch.float32: an additive mask is a bias",
        ),
        (
            {"mask": torch.ones(6).bool()},
            ValueError,
            r"mask must have a shape that broadcasts to \[2, 5, 3, 7, 7\], but got \[6\]",
        ),
        (
            {"kv_lengths": torch.ones(7).long()},
            ValueError,
            r"kv_lengths must have a shape that broadcasts to \[2, 5, 3, 7, 1\], but got \[7\]",
        ),
        (
            {"kv_lengths": torch.ones(1)},
            TypeError,
            "kv_lengths must be of a dtype of whole numbers, but got torch.float32",
        ),
        ({"softcap": 0.0}, ValueError, "softcap must be more than 0, but got 0.0"),
        ({"empty_rows": "nan"}, ValueError, "empty_rows must be 'zero' or 'mean', but got 'nan'"),
        ({"layout": "bhqd"}, ValueError, "layout must be 'heads_first' or 'heads_last', but got 'bhqd'"),
        ({"bias": torch.ones(7, 7)}, TypeError, "unexpected keyword argument 'bias'"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        biased_attention(**{**good(), **changed})


@pytest.mark.parametrize(
    "changed, error, text",
    [
        (
            {"bias": torch.randn(2, 5, 3, 7, 7)},
            ValueError,
            r"bias must have shape \[B, 1, H, Q, K\] = \[2, 1, 3, 7, 7\], but got \[2, 5, 3, 7, 7\]",
        ),
        (
            {"bias": torch.randn(3, 7, 7)},
            ValueError,
            r"bias must have 5 dimensions, or 4 for B = 1, but got \[3, 7, 7\]",
        ),
        ({"bias": torch.ones(2, 1, 3, 7, 7).bool()}, TypeError, "bias must be floating-point, but got torch.bool"),
        ({"k": torch.randn(2, 5, 3, 7, 9)}, ValueError, "k must have a shape that fits q"),
        (
            {"v": torch.randn(2, 5, 3, 7, 4)},
            ValueError,
            r"v must have shape \[B, N, H, K, D\] = \[2, 5, 3, 7, 8\], but got \[2, 5, 3, 7, 4\]",
        ),
        (
            {"mask": torch.ones(2, 5, 7).bool()},
            ValueError,
            r"mask must have shape \[B, N, 1, 1, K\] = \[2, 5, 1, 1, 7\], but got \[2, 5, 7\]",
        ),
        (
            {"mask": torch.zeros(2, 5, 1, 1, 7)},
            TypeError,
            "mask must be bool, or whole numbers that are 0 where a key is masked, but got torch.float32",
        ),
        ({"kv_lengths": torch.ones(2, 5).int()}, ValueError, r"kv_lengths must have shape \[B, N, 1, 1, 1\]"),
        ({"kv_lengths": torch.ones(2, 5, 1, 1, 1)}, TypeError, "kv_lengths must be of a dtype of whole numbers"),
        (
            {"mask": torch.ones(2, 5, 1, 1, 7).bool(), "kv_lengths": torch.ones(2, 5, 1, 1, 1).int()},
            ValueError,
            "mask and kv_lengths must not come together",
        ),
        ({"precision": "tf32"}, TypeError, "unexpected keyword argument 'precision'"),
    ],
)
def test_errors_of_triangle_attention(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    q = torch.randn(2, 5, 3, 7, 8)
    with pytest.raises(error, match=text):
        triangle_attention(**{"q": q, "k": q, "v": q, "bias": torch.randn(2, 1, 3, 7, 7), **changed})


@pytest.mark.parametrize(
    "changed, text",
    [
        (
            {"pair_repr": torch.randn(3, 5, 5, 4)},
            r"pair_repr must have shape \[B, N, N, c\], N = 5, B \* M = 4, but got \[3, 5, 5, 4\]",
        ),
        ({"pair_repr": torch.randn(2, 5, 5, 4), "is_cached_z_proj": True}, r"pair_repr must have shape \[B, H, N, N\]"),
        (
            {"mask": torch.ones(3, 5)},
            r"mask must have shape \[B, N\] = \[2, 5\] or \[B \* M, N\] = \[4, 5\], but got \[3, 5\]",
        ),
        ({"num_heads": 3}, "w_proj_q must have a multiple of num_heads = 3 rows, but got 8"),
        ({"w_proj_z": None}, "w_proj_z must be given where pair_repr is not projected, but got None"),
        ({"norm_kind": "rms_norm"}, "b_ln_a must be None with norm_kind='rms_norm'"),
        ({"norm_kind": "batch"}, "norm_kind must be 'layer_norm' or 'rms_norm', but got 'batch'"),
    ],
)
def test_errors_of_attention_pair_bias(changed: dict[str, Any], text: str) -> None:
    w: dict[str, Any] = {n: t.float().detach() for n, t in weights(2, 4, 6, 4).items()}
    arguments = {
        "single_repr": torch.randn(4, 5, 6),
        "pair_repr": torch.randn(2, 5, 5, 4),
        "mask": None,
        "num_heads": 2,
    }
    with pytest.raises(ValueError, match=text):
        attention_pair_bias(**{**arguments, **w, **changed})


def test_signatures_are_cuequivariances() -> None:
    """Names and order, from its documentation."""
    import inspect

    theirs = ["q", "k", "v", "bias", "mask", "scale", "return_aux", "kv_lengths"]
    assert list(inspect.signature(triangle_attention).parameters)[: len(theirs)] == theirs
    names = (  # noqa: SIM905
        "single_repr pair_repr mask num_heads w_ln_a b_ln_a w_proj_q b_proj_q w_proj_k w_proj_v w_proj_g w_proj_o "
        "w_proj_z b_proj_o b_proj_z w_ln_z b_ln_z inf eps attn_scale return_z_proj is_cached_z_proj b_proj_k b_proj_v "
        "w_ln_q b_ln_q w_ln_k b_ln_k b_proj_g norm_kind"
    ).split()
    assert list(inspect.signature(attention_pair_bias).parameters)[: len(names)] == names


def test_texts_are_canonical() -> None:
    from fusegrad import ScoreMod
    from fusegrad._bias_texts import MASKED, Pattern, Read, text_of

    batches: list[tuple[Any, ...]] = [(), ((-1, -1),), ((0, -1),), ((-1, 0),), ((0, -1), (-1, 1))]
    for batch, roles in itertools.product(batches, [(), ("h",), ("kv_idx",), ("h", "q_idx", "kv_idx")]):
        for softcap in (False, True):
            text = text_of(Pattern((Read("bias", (*batch, *roles)), Read("mask", batch)), softcap, MASKED))
            whole = max((n for i in batch for n in i), default=-1) + 1
            buffers = [torch.zeros((1,) * len((*batch, *roles))), torch.ones((1,) * len(batch), dtype=torch.bool)]
            made = ScoreMod(text.replace(";", "\n"), buffers, [1] * whole + [1.0] * softcap)
            assert made.text.replace("\n", ";") == text
