"""flex_attention under vmap, beside a loop over the elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fusegrad
import pytest
import torch
from coverings import pairs_of, rows_of
from fusegrad import flex_attention, trace_mask_mod
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

V = 3


def precision() -> torch.dtype:
    return torch.float64 if torch.get_default_device().type == "cpu" else torch.float32


def close(found: Any, expected: Any) -> None:
    low = precision() == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4 if low else 1e-9, atol=1e-5 if low else 1e-10)


def given(b: int = 2, bkv: int = 2, h: int = 4, hkv: int = 2, m: int = 5, n: int = 6, d: int = 4) -> list[Tensor]:
    shapes = [(b, h, m, d), (bkv, hkv, n, d), (bkv, hkv, n, d), (h, n), (b, m)]
    return [torch.randn(s, dtype=torch.float64).to(precision()) for s in shapes]


def loop(function: Callable, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Any:
    results = []
    for i in range(V):
        results.append(function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True))))
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(r) for r in zip(*results, strict=True))


def batched(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    made = []
    for t, d in zip(tensors, dims, strict=True):
        made.append(t if d is None else torch.stack([t * (0.5 + i) - i * t.cos() for i in range(V)], d))
    return made


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """A score_mod that reads b, by itself and as an index."""

    def score_mod(s, b, h, i, j):
        return s * factor[b, i] + bias[h, j] + b * bias[h, 0]

    return flex_attention(q, k, v, score_mod, enable_gqa=True, return_lse=True)


DIMS = [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, 2, None, None, None), (None, None, 1, None, None),
        (None, None, None, 1, None), (None, None, None, None, 0), (3, 0, None, 2, None)]  # fmt: skip


@pytest.mark.parametrize("dims", DIMS, ids=str)
@rows_of("keys", [2, 1])
def test_each_input(dims: tuple[int | None, ...], keys: int, each_device: str) -> None:
    tensors = batched(given(bkv=keys), dims)
    close(torch.vmap(attention, dims)(*tensors), loop(attention, tensors, dims))

    def loss(*x: Tensor) -> Tensor:
        out, lse = attention(*x)
        return out.sin().sum() + lse.square().sum()

    gradients = torch.func.grad(loss, tuple(range(5)))
    close(torch.vmap(gradients, dims)(*tensors), loop(gradients, tensors, dims))


def test_one_batch_and_no_score_mod(each_device: str) -> None:
    tensors = batched(given(1, 1)[:3], (0, 0, None))
    plain = lambda q, k, v: flex_attention(q, k, v, enable_gqa=True)  # noqa: E731
    close(torch.vmap(plain, (0, 0, None))(*tensors), loop(plain, tensors, (0, 0, None)))


def test_vmap_of_vmap(each_device: str) -> None:
    q, k, v, bias, factor = given()
    many = torch.stack([torch.stack([q * (i + j) for i in range(V)]) for j in range(2)], 1)  # [V, 2, ...]
    of_bias = torch.stack([bias, bias.sin()])
    inner = torch.vmap(attention, (0, None, None, 0, None))
    found = torch.vmap(inner, (0, None, None, None, None))(many, k, v, of_bias, factor)
    expected = [[attention(many[i, j], k, v, of_bias[j], factor) for j in range(2)] for i in range(V)]
    for r in range(2):
        close(found[r], torch.stack([torch.stack([e[r] for e in row]) for row in expected]))


def every_block() -> tuple[Tensor, Tensor]:
    """The lists of a mask of 3 by 3 blocks, all of them partial."""
    return torch.full((1, 1, 3), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).repeat(1, 1, 3, 1)


@pytest.mark.parametrize("lists", [1, 2], ids=["lists for all", "lists of each batch"])
def test_masks(lists: int, each_device: str) -> None:
    """A block mask of all elements, whose mask_mod reads b."""
    q, k, v, *_ = given(m=40, n=40)
    length = torch.tensor([30, 17])
    allowed = lambda b, h, i, j: (j < length[b]) & (i >= j)  # noqa: E731
    mask = create_block_mask(allowed, 2, None, 40, 40, device=q.device, BLOCK_SIZE=16)
    if lists == 1:  # every block partial, for any batch
        mask = BlockMask.from_kv_blocks(*every_block(), BLOCK_SIZE=16, mask_mod=allowed, seq_lengths=(40, 40))
    call = lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # noqa: E731
    tensors = batched([q, k, v], (0, None, 0))
    close(torch.vmap(call, (0, None, 0))(*tensors), loop(call, tensors, (0, None, 0)))


def test_batched_captures_of_masks_and_lists(each_device: str) -> None:
    q, k, v, *_ = given(m=40, n=40)
    lengths = torch.tensor([30, 17, 40])
    most, indices = every_block()
    counts = torch.stack([most - i for i in range(V)])

    def call(q: Tensor, length: Tensor, count: Tensor) -> Tensor:
        mask = BlockMask.from_kv_blocks(
            count, indices, BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: j < length, seq_lengths=(40, 40),
            compute_q_blocks=False,
        )  # fmt: skip
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    many = batched([q], (0,))[0]
    for dims in ((0, 0, 0), (None, 0, None), (None, None, 0)):
        tensors = [t if d == 0 else t[0] for t, d in zip((many, lengths, counts), dims, strict=True)]
        close(torch.vmap(call, dims)(*tensors), loop(call, tensors, dims))


def test_block_masks_that_are_made_within(each_device: str) -> None:
    """Their lists, of what is captured for each element."""
    lengths = torch.tensor([[3, 25], [17, 40], [40, 0]])

    def lists(length: Tensor) -> list[Tensor]:
        allowed = lambda b, h, i, j: (j < length[b]) & (i >= j)  # noqa: E731
        mask = fusegrad.create_block_mask(allowed, 2, None, 40, 40, device=length.device, block_size=16)
        return [t for t in mask.as_tuple() if isinstance(t, Tensor)]

    expected = [torch.stack(of_all) for of_all in zip(*map(lists, lengths), strict=True)]
    for dim in (0, 1):
        made = torch.vmap(lists, dim)(lengths.movedim(0, dim))
        assert all(x.equal(y) for x, y in zip(made, expected, strict=True))


def test_integers_and_bools_that_are_batched(each_device: str) -> None:
    q, k, v, bias, _ = given()
    table = torch.randint(6, (V, 5))
    allowed = torch.rand(V, 5, 6) < 0.7

    def call(table: Tensor, allowed: Tensor) -> Tensor:
        def score_mod(s, b, h, i, j):
            return torch.where(allowed[i, j], s + bias[h, table[i]] + b, -1.0)

        return flex_attention(q, k, v, score_mod, enable_gqa=True)

    close(torch.vmap(call)(table, allowed), loop(call, (table, allowed), (0, 0)))


def test_dropout(each_device: str) -> None:
    q, k, v = given(2, 2, 2, 2, 20, 30)[:3]
    many = torch.stack([q] * V)

    def call(q: Tensor) -> Tensor:
        return flex_attention(q, k, v, dropout_p=0.5)

    out = torch.vmap(call, randomness="different")(many)
    assert not any(torch.equal(out[i], out[i - 1]) for i in range(V))
    torch.manual_seed(3)
    upstream = torch.randn_like(q)
    grad = torch.vmap(torch.func.grad(lambda q: (call(q) * upstream).sum()), randomness="different")
    torch.manual_seed(5)
    found = grad(many)
    # The pairs of the elements are those of one call for a larger batch.
    torch.manual_seed(5)
    x = many.flatten(0, 1).requires_grad_()
    whole = flex_attention(x, k.repeat(V, 1, 1, 1), v.repeat(V, 1, 1, 1), dropout_p=0.5)
    (expected,) = torch.autograd.grad(whole, x, upstream.repeat(V, 1, 1, 1))
    close(found.flatten(0, 1), expected)
    with pytest.raises(NotImplementedError, match="dropout_p must be 0 where"):
        torch.vmap(call, randomness="same")(many)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(many)
    out = call(q.requires_grad_())
    with pytest.raises(NotImplementedError, match="dropout_p must be 0 where"):
        torch.autograd.grad(out, q, torch.stack([upstream] * V), is_grads_batched=True)


def _second_derivatives() -> dict[str, Callable]:
    """Those of a number of one tensor, in a direction."""
    grad, jvp = torch.func.grad, torch.func.jvp

    def along(f: Callable, x: Tensor, d: Tensor) -> Tensor:
        return jvp(f, (x,), (d,))[1]

    return {
        "grad of grad": lambda f, x, d: grad(lambda y: (grad(f)(y) * d).sum())(x),
        "jvp of grad": lambda f, x, d: along(grad(f), x, d),
        "grad of jvp": lambda f, x, d: grad(lambda y: along(f, y, d))(x),
        "jvp of jvp": lambda f, x, d: along(lambda y: along(f, y, d), x, d),
        "grad of jvp of grad": lambda f, x, d: grad(lambda y: (along(grad(f), y, d) * d).sum())(x),
    }


@pairs_of({"name": [*_second_derivatives()], "nested": [False, True], "of": ["query", "key"]})
def test_second_derivatives_drop_the_pairs_of_the_first(each_device: str, name: str, nested: bool, of: str) -> None:
    q, k, v = given(2, 2, 2, 2, 20, 30)[:3]
    x = q if of == "query" else k
    batch = (2, V) if nested else (V,)
    many, direction = torch.randn(*batch, *x.shape).to(x), torch.randn_like(x)
    upstream = torch.randn_like(q)
    derivative = _second_derivatives()[name]

    def loss(x: Tensor) -> Tensor:
        out = flex_attention(x, k, v, dropout_p=0.5) if of == "query" else flex_attention(q, x, v, dropout_p=0.5)
        return (out * upstream).square().sum()

    mapped = torch.vmap(lambda x: derivative(loss, x, direction), randomness="different")
    if nested:
        mapped = torch.vmap(mapped, randomness="different")
    torch.manual_seed(5)
    found = mapped(many)
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, batch).flatten()[0]
    calls = seed.new_empty(batch).numel()
    kept = torch.ops.fusegrad.flex_attention_dropout_mask(seed, 0.5, [calls * 2, 2, 20, 30]).double() * 2
    for i, (one, weight) in enumerate(zip(many.flatten(0, -5), kept.unflatten(0, (calls, 2)), strict=True)):

        def exact(x: Tensor, weight: Tensor = weight) -> Tensor:
            query, key = (x, k.double()) if of == "query" else (q.double(), x)
            weights = (query @ key.mT * 0.5).softmax(-1) * weight
            return (weights @ v.double() * upstream.double()).square().sum()

        truth = derivative(exact, one.double(), direction.double())
        found_here = found.flatten(0, -5)[i] if found.dim() > len(batch) else found.flatten()[i]
        limit = 1e-9 if precision() == torch.float64 else 1e-4
        assert (found_here.double() - truth).norm() <= limit * truth.norm(), i


def test_batches_of_upstream_gradients(each_device: str) -> None:
    tensors = [t.requires_grad_() for t in given(bkv=1)]
    for inplace in (False, True):
        wide = [t * 1 for t in tensors[:3]]
        bias, factor = tensors[3:]
        score_mod = lambda s, b, h, i, j: s * factor[b, i] + bias[h, j]  # noqa: E731
        out, lse = flex_attention(*wide, score_mod, enable_gqa=True, return_lse=True, inplace=inplace)
        of_out, of_lse = torch.randn(V, *out.shape, dtype=out.dtype), torch.randn(V, *lse.shape, dtype=lse.dtype)
        each = [torch.autograd.grad([out, lse], tensors, [a, b], retain_graph=True) for a, b in
                zip(of_out, of_lse, strict=True)]  # fmt: skip
        expected = [torch.stack(g) for g in zip(*each, strict=True)]

        def one(a: Tensor, b: Tensor, out: Tensor = out, lse: Tensor = lse) -> Any:
            return torch.autograd.grad([out, lse], tensors, [a, b], retain_graph=True)

        close(list(torch.vmap(one)(of_out, of_lse)), expected)
        found = torch.autograd.grad([out, lse], tensors, [of_out, of_lse], is_grads_batched=True, retain_graph=True)
        close(list(found), expected)
        graph = torch.autograd.grad([out, lse], tensors, [of_out, of_lse], is_grads_batched=True, create_graph=True)
        close(list(graph), expected)
        again = [torch.autograd.grad([out, lse], tensors, [a, b], create_graph=True) for a, b in
                 zip(of_out, of_lse, strict=True)]  # fmt: skip
        second = torch.autograd.grad(
            sum(g.sin().sum() for g in graph), tensors, retain_graph=True, materialize_grads=True
        )
        loop_over = torch.autograd.grad(
            sum(g.sin().sum() for of_one in again for g in of_one),
            tensors,
            retain_graph=True,
            materialize_grads=True,
        )
        close(list(second), list(loop_over))
        # The last use of a graph, which would be in place.
        last = torch.autograd.grad([out, lse], tensors, [of_out, of_lse], is_grads_batched=True)
        close(list(last), expected)
    with pytest.raises(NotImplementedError, match="create_graph=True must not come within"):
        out = attention(*tensors)[0]
        torch.vmap(lambda u: torch.autograd.grad(out, tensors[0], u, create_graph=True)[0])(of_out)


def plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * bias.cos()[:, None]).softmax(-1) @ v


def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s * bias[h, j].cos())


@pytest.mark.parametrize("vectorize", ["reverse-mode", "forward-mode"])
def test_jacobians(vectorize: str) -> None:
    x = tuple(given(1, 1, 2, 2, 3, 4)[:4])

    def jacobian(function: Callable) -> Any:
        return torch.autograd.functional.jacobian(function, x, vectorize=True, strategy=vectorize)

    close(jacobian(ours), jacobian(plainly))
    of_all = (torch.func.jacrev, torch.func.jacfwd)[vectorize == "forward-mode"]
    close(of_all(ours, (0, 1, 2, 3))(*x), of_all(plainly, (0, 1, 2, 3))(*x))


def test_vmap_of_tangents_and_hessians() -> None:
    tensors = batched(given(1, 1, 2, 2, 3, 4)[:4], (0,) * 4)

    def same(of: Callable[[Callable], Callable], *dims: int | None) -> None:
        arguments = [t if d == 0 else t[0] for t, d in zip(tensors, dims, strict=True)]
        close(torch.vmap(of(ours), dims)(*arguments), torch.vmap(of(plainly), dims)(*arguments))

    def tangent(function: Callable) -> Callable:
        return lambda *x: torch.func.jvp(function, x, tuple(t.sin() for t in x))

    same(tangent, 0, 0, 0, 0)
    same(tangent, 0, None, None, None)
    same(tangent, None, None, None, 0)
    same(lambda f: lambda *x: torch.func.jvp(f, x, tuple(t[1] for t in tensors)), 0, None, 0, None)
    same(lambda f: torch.func.hessian(lambda *x: f(*x).square().sum(), 3), 0, 0, None, 0)


def test_per_sample_gradients_of_a_model(each_device: str) -> None:
    """vmap(grad) of a module whose weights all samples share."""
    dtype = precision()
    layer = torch.nn.Linear(8, 24).to(dtype)
    weights = dict(layer.named_parameters())
    table = torch.randn(2, 11, dtype=dtype)

    def loss(weights: dict[str, Tensor], table: Tensor, x: Tensor) -> Tensor:
        qkv = torch.func.functional_call(layer, weights, x[None]).unflatten(-1, (3, 2, 4))
        out = flex_attention(*qkv.permute(2, 0, 3, 1, 4), lambda s, b, h, i, j: s + table[h, i - j + 5])
        return out.square().sum()

    x = torch.randn(V, 6, 8, dtype=dtype)
    found = torch.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(weights, table, x)
    for i in range(V):
        of_one = torch.func.grad(loss, (0, 1))(weights, table, x[i])
        close({k: g[i] for k, g in found[0].items()}, of_one[0])
        close(found[1][i], of_one[1])


def test_traced_before(each_device: str) -> None:
    """A ScoreMod of a plain tensor, and one of batched captures."""
    q, k, v, *_ = given()
    mask_mod = trace_mask_mod(lambda b, h, i, j: i + b >= j, device=q.device)
    whole = create_block_mask(lambda b, h, i, j: i + b >= j, 2, None, 5, 6, device=q.device, BLOCK_SIZE=4)
    mask = BlockMask.from_kv_blocks(
        whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices, BLOCK_SIZE=4,
        mask_mod=mask_mod, seq_lengths=(5, 6),
    )  # fmt: skip
    call = lambda q: flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # noqa: E731
    many = batched([q], (0,))
    close(torch.vmap(call)(*many), loop(call, many, (0,)))


@pytest.mark.parametrize("shape, message", [
    ((2, 4, 5), r"query must have shape \[B, H, M, D\]"),
    ((2, 3, 5, 4), "query must have the key's heads|key must have the query's heads"),
])  # fmt: skip
def test_bad_input(shape: tuple[int, ...], message: str) -> None:
    _, k, v, *_ = given()
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda q: flex_attention(q, k, v))(torch.randn(V, *shape, dtype=precision()))
