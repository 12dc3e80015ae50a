"""Rows whose scores are all far from 0, as a mask of -1e9 makes them: every derivative is right to rounding.

Queries and keys are multiples of 1/8, so that scores are exact in float32, and what adding a large number rounds away
is the same for the op and for the truth, which has that rounding's derivative 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_reference import dense, dropout_weight
from fusegrad import flex_attention
from support import assert_as_good_as_eager, rmse
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

LOWEST = torch.finfo(torch.float32).min
SHIFTS = [0.0, 40.0, -1e4, 1e5, -1e9, LOWEST]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_grid(*sizes: int) -> Tensor:
    return torch.randint(-12, 13, sizes) / 8


def shifted(score: Tensor, shift: Tensor) -> Tensor:
    """score + shift with the rounding of float32 and the derivative of the sum."""
    total = score + shift.to(score.dtype)
    rounded = (score.detach().float() + shift.detach().float()).to(total.dtype)
    return total + (rounded - total).detach()


def inputs(b: int, h: int, m: int, n: int, d: int, e: int, hkv: int) -> list[Tensor]:
    return [0.25 * on_grid(b, h, m, d), 2 * on_grid(b, hkv, n, d), torch.randn(b, hkv, n, e)]


def leaf(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.detach().to(dtype).requires_grad_()


Mod = Callable[[Tensor, Tensor, Tensor], Tensor]
# (score_mod's score, what it reads, the shift of the row) -> score: over all pairs, and as a score_mod
KINDS: dict[str, tuple[tuple[str, ...], Callable, Callable]] = {
    "rows": ("m", lambda s, t, c: shifted(s, c[:, None]), lambda t, c: lambda s, b, h, q, kv: s + c[q]),
    "scale of a head": (
        "h",
        lambda s, t, c: shifted(s * t[:, None, None], c[:, None]),
        lambda t, c: lambda s, b, h, q, kv: s * t[h] + c[q],
    ),
    "bias of pairs": (
        "hmn",
        lambda s, t, c: shifted(s + t, c[:, None]),
        lambda t, c: lambda s, b, h, q, kv: (s + t[h, q, kv]) + c[q],
    ),
    "relative": (
        "hr",
        lambda s, t, c: shifted(s + t[:, relative(s)], c[:, None]),
        lambda t, c: lambda s, b, h, q, kv: (s + t[h, q - kv + c.numel()]) + c[q],
    ),
    "keys": (
        "n",
        lambda s, t, c: shifted(s + t, c[:, None]),
        lambda t, c: lambda s, b, h, q, kv: (s + t[kv]) + c[q],
    ),
}  # fmt: skip


def relative(score: Tensor) -> Tensor:
    m, n = score.shape[-2:]
    return torch.arange(m)[:, None] - torch.arange(n) + m


def captured(sizes: str, h: int, m: int, n: int) -> Tensor:
    made = torch.randint(-8, 9, [{"h": h, "m": m, "n": n, "r": m + n}[c] for c in sizes]) / 8
    return 1 + made / 4 if sizes == "h" else made


def compare(
    kind: str, dtype: torch.dtype, shift: float, b=2, h=4, m=70, n=70, d=32, e=32, hkv=4, causal=False,
    dropout: float = 0.0, **options,
) -> None:  # fmt: skip
    query, key, value = inputs(b, h, m, n, d, e, hkv)
    sizes, over_all, made = KINDS[kind]
    table = captured(sizes, h, m, n)
    c = torch.where(torch.arange(m) % 3 > 0, shift, 0.0)
    grad_out, grad_lse = torch.randn(b, h, m, e), torch.randn(b, h, m)
    # Far rows of which one or the other, or neither has a gradient.
    grad_out[:, :, 1::7], grad_lse[:, :, 1::14] = 0, 0
    mask = torch.ones(m, n, dtype=torch.bool).tril() if causal else None
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, m, n, c.device.type) if causal else None
    weight = dropout_weight(dropout, (b, h, m, n)) if dropout else None

    def plain(to: torch.dtype) -> list[Tensor]:
        t = [leaf(x.to(dtype), to) for x in (query, key, value)] + [leaf(table, to if to == torch.float64 else c.dtype)]
        found = dense(
            *t[:3], lambda s, *_: over_all(s.to(torch.promote_types(s.dtype, c.dtype)), t[3], c), mask, scale=1.0,
            evaluate=lambda f, sizes, s: f(s), weight=weight,
        )  # fmt: skip
        loss = (found.out.to(to) * grad_out.to(to)).sum() + (found.lse * grad_lse.to(found.lse.dtype)).sum()
        return [found.out, *torch.autograd.grad(loss, t if sizes != "m" else t[:3])]

    ours = [leaf(x, dtype) for x in (query, key, value)]
    read = leaf(table, torch.float32)
    given = [t * 1 for t in ours] if options.get("inplace") else ours
    out, aux = flex_attention(
        *given, made(read, c), block_mask, scale=1.0, enable_gqa=hkv != h, return_aux=AuxRequest(lse=True),
        dropout_p=dropout, **options,
    )  # fmt: skip
    torch.autograd.backward([out, aux.lse], [grad_out.to(dtype), grad_lse])
    found = [out, *(t.grad for t in ours), read.grad]
    for name, x, eager, truth in zip(
        ("out", "query", "key", "value", kind), found, plain(dtype), plain(torch.float64), strict=False
    ):
        least = 2**-20 if dtype == torch.float32 else 0.0
        assert_as_good_as_eager(x, eager, truth, f"{name} at {shift}", least=least)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("each_flex_device")
def test_every_gradient_at_any_shift(dtype: torch.dtype, shift: float) -> None:
    compare("rows", dtype, shift)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("each_flex_device")
def test_captured_tensors(dtype: torch.dtype, kind: str) -> None:
    compare(kind, dtype, -1e5)
    compare(kind, dtype, -1e9, b=5, m=64, n=64)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "m": 300, "n": 300, "d": 64, "e": 64},
        {"hkv": 2, "m": 130, "n": 200, "d": 128, "e": 128},
        {"m": 150, "n": 150, "d": 256, "e": 256, "b": 1},
        {"m": 150, "n": 150, "d": 192, "e": 128, "b": 1, "causal": True},
        {"m": 3, "n": 700, "d": 64, "e": 64},
        {"deterministic": True},
        {"inplace": True},
        {"dropout": 0.3},
        {"dropout": 0.3, "m": 130, "n": 130, "d": 128, "e": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("each_flex_device")
def test_calls_of_every_kernel(dtype: torch.dtype, options: dict) -> None:
    compare("rows", dtype, -1e9, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(40, 140), (33, 128), (9, 64)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("each_flex_device")
def test_heads_of_which_some_have_far_rows(padded: bool, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """A bias that all batches share, as of triangle attention with padded residues: kernels go from batch to batch."""
    (b, n), h, d = sizes, 2, 32
    query, key, value = inputs(b, h, n, n, d, d, h)
    table, grad = captured("hmn", h, n, n), torch.randn(b, h, n, d)
    shift = torch.zeros(b, n)
    shift[1::3], shift[::5, n // 2 :] = -1e9, -1e5
    if padded:  # nothing of most far rows reaches a loss
        grad[4::3], grad[::10, :, n // 2 :] = 0, 0
    masked = torch.rand(b, n) < 0.2

    def plain(to: torch.dtype) -> list[Tensor]:
        q, k, v, t = [leaf(x.to(dtype), to) for x in (query, key, value)] + [leaf(table.to(dtype), to)]
        wide = torch.promote_types(to, torch.float32)
        score = shifted(q.to(wide) @ k.to(wide).mT + t.to(wide), shift[:, None, :, None])
        weight = torch.where(masked[:, None, None], torch.tensor(-1e9, dtype=wide), score).softmax(-1)
        return [*torch.autograd.grad((weight.to(to) @ v * grad.to(to)).sum(), (q, k, v, t))]

    q, k, v, t = (leaf(x, dtype) for x in (query, key, value, table))
    lowest = torch.tensor(-1e9)
    out = flex_attention(
        q, k, v, lambda s, b, h, i, j: torch.where(masked[b, j], lowest, s + t[h, i, j] + shift[b, i]), scale=1.0
    )
    found = torch.autograd.grad(out, (q, k, v, t), grad.to(dtype))
    least = 2**-20 if dtype == torch.float32 else 0.0
    for name, x, eager, truth in zip("qkvt", found, plain(dtype), plain(torch.float64), strict=True):
        assert_as_good_as_eager(x, eager, truth, f"{name} of {sizes}", least=least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("each_flex_device")
def test_maxima_alone_of_far_rows(dtype: torch.dtype) -> None:
    """A far row whose output and lse reach no loss counts as one without keys, but not if its maximum does."""
    for b, n in ((2, 70), (9, 64)):
        query, key, value = inputs(b, 2, n, n, 32, 32, 2)
        table, grad = captured("hmn", 2, n, n), torch.randn(b, 2, n)
        c = torch.where(torch.arange(n) % 3 > 0, -1e5, 0.0)

        def plain(to: torch.dtype, query=query, key=key, table=table, grad=grad, c=c) -> list[Tensor]:
            q, k, t = [leaf(x.to(dtype), to) for x in (query, key)] + [leaf(table, torch.promote_types(to, c.dtype))]
            score = shifted((q.to(t.dtype) @ k.to(t.dtype).mT) + t, c[:, None])
            return list(torch.autograd.grad(score.amax(-1), (q, k, t), grad.to(t.dtype)))

        q, k, v, t = leaf(query, dtype), leaf(key, dtype), leaf(value, dtype), leaf(table, torch.float32)
        _, aux = flex_attention(
            q, k, v, lambda s, b, h, i, j, t=t, c=c: (s + t[h, i, j]) + c[i], scale=1.0,
            return_aux=AuxRequest(max_scores=True),
        )  # fmt: skip
        found = torch.autograd.grad(aux.max_scores, (q, k, t), grad)
        least = 2**-20 if dtype == torch.float32 else 0.0
        for name, x, eager, truth in zip("qkt", found, plain(dtype), plain(torch.float64), strict=True):
            assert_as_good_as_eager(x, eager, truth, f"{name} of {b} {n}", least=least)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("each_flex_device")
def test_scores_that_are_far_by_themselves(dtype: torch.dtype) -> None:
    """Without a score_mod: query * key is near -2^15, whose neighbours in float32 are 2^-9 apart."""
    for m, n, d in ((70, 70, 32), (200, 200, 128), (2, 600, 64)):
        query, key, value = inputs(2, 3, m, n, d, d, 3)
        query[..., 0], key[..., 0] = -(2.0**12), 8.0
        grad = torch.randn(2, 3, m, d)

        def run(
            attend: Callable, to: torch.dtype, tensors: tuple[Tensor, ...] = (query, key, value), grad: Tensor = grad
        ) -> list[Tensor]:
            t = [leaf(x.to(dtype), to) for x in tensors]
            out = attend(*t)
            return [out, *torch.autograd.grad(out, t, grad.to(to))]

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            wide = q.dtype if q.dtype == torch.float64 else torch.float32
            return ((q.to(wide) @ k.to(wide).mT).softmax(-1).to(v.dtype)) @ v

        found = run(lambda *t: flex_attention(*t, scale=1.0), dtype)
        for x, eager, truth in zip(found, run(plain, dtype), run(plain, torch.float64), strict=True):
            assert_as_good_as_eager(x, eager, truth, f"{m} {n} {d}", least=2**-20 if dtype == torch.float32 else 0.0)


def test_float64_far_beyond_its_places() -> None:
    query, key, value = (t.double().requires_grad_() for t in inputs(1, 1, 5, 8, 4, 4, 1))
    c = torch.tensor(-1e30, dtype=torch.float64)
    (found,) = torch.autograd.grad(flex_attention(query, key, value, lambda s, b, h, i, j: s + c).sum(), value)
    assert rmse(found, torch.full_like(found, 5 / 8)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("each_flex_device")
def test_second_derivatives_tangents_and_vmap(dtype: torch.dtype) -> None:
    b, h, m, d = 2, 2, 40, 32
    tensors = inputs(b, h, m, m, d, d, h)
    upstream, *directions = (torch.randn(b, h, m, d) for _ in range(4))
    c = torch.where(torch.arange(m) % 2 == 0, -1e9, 0.0)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + c[i], scale=1.0)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = q @ k.mT
        score = shifted(score.to(torch.promote_types(score.dtype, torch.float32)), c[:, None])
        return score.softmax(-1).to(v.dtype) @ v

    def derivatives(attend: Callable, to: torch.dtype) -> dict[str, Tensor]:
        t = tuple(x.to(dtype).to(to) for x in tensors)
        moved = tuple(x.to(to) for x in directions)

        def gradients(*t: Tensor) -> tuple[Tensor, ...]:
            return torch.func.grad(lambda *t: (attend(*t) * upstream[: t[0].size(0)].to(to)).sum(), argnums=(0, 1, 2))(
                *t
            )

        _, tangent = torch.func.jvp(attend, t, moved)
        _, second = torch.func.jvp(gradients, t, moved)
        each = torch.func.vmap(lambda *t: gradients(*(x[None] for x in t))[0][0])(*t)
        made = {"tangent": tangent, "each": each}
        made |= {f"second {i}": g for i, g in enumerate(second)}
        leaves = [x.requires_grad_() for x in t]
        first = torch.autograd.grad((attend(*leaves) * upstream.to(to)).sum(), leaves, create_graph=True)
        again = torch.autograd.grad(first, leaves, moved)
        return made | {f"twice {i}": g for i, g in enumerate(again)}

    found, eager, truth = derivatives(ours, dtype), derivatives(plain, dtype), derivatives(plain, torch.float64)
    for name in found:
        least = 2**-20 if dtype == torch.float32 else 0.0
        assert_as_good_as_eager(found[name], eager[name], truth[name], name, least=least)
