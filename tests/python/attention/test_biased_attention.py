"""biased_attention beside its formula: every layout and mask of packages of proteins, and what PyTorch does with it."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import fusegrad
import pytest
import torch
from biased_formulas import DEVICE_DTYPES, TABLE, compare, drawn, formula, gradients, problem, triangle
from coverings import each_of, pairs_of, rows_of
from fusegrad import biased_attention, triangle_attention
from support import DEVICES
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint


@each_of({"device, dtype": [*DEVICE_DTYPES], "name": [*TABLE]})
def test_biases(name: str, device: str, dtype: torch.dtype) -> None:
    leaves, sizes = problem(name, device, dtype)
    compare(
        lambda q, k, v, *b: biased_attention(q, k, v, b),
        lambda q, k, v, *b: formula(q, k, v, b),
        leaves,
        math.prod(sizes),
    )


@pairs_of({"device, dtype": [*DEVICE_DTYPES], "empty_rows": ["zero", "mean"], "name": [*TABLE]}, tests=6)
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


@pytest.mark.parametrize("seed", range(12))
@rows_of("device", [*DEVICES])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@rows_of("inf", [1e6, 1e9, 1e10])
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


@pytest.mark.parametrize("dynamic", [False, True])
@rows_of("name", ["triangle", "templates that share", "no bias"])
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
