"""flex_attention differentiated twice and more: create_graph=True, reverse mode through tangents, Hessians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import score_mods
import torch
import torch.autograd.forward_ad as fwAD
from attention_reference import dense, dropout_weight, one_by_one
from coverings import rows_of
from fusegrad import _C, flex_attention, trace_score_mod
from fusegrad import _attention_composite as composite
from fusegrad._program import program
from fusegrad._score_mod_torch import Values, adds_reads, evaluate, evaluate_reads
from fusegrad.score_mod import split_scalars
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

LSE = AuxRequest(lse=True)


def block_mask(mask: Callable, b: int, h: int, m: int, n: int, block: int = 4) -> BlockMask:
    return create_block_mask(mask, b, h, m, n, device=torch.get_default_device(), BLOCK_SIZE=block)


def precision() -> torch.dtype:
    """The most precise dtype of the default device."""
    return torch.float64 if torch.get_default_device().type == "cpu" else torch.float32


def close(ours: Sequence[Tensor], truth: Sequence[Tensor], at_least: float = 0.0) -> None:
    """To float64's or float32's accuracy, relative to the largest number."""
    for i, (a, b) in enumerate(zip(ours, truth, strict=True)):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        least = 1e-9 if a.dtype == torch.float64 else 1e-4 if a.dtype == torch.float32 else 2e-2
        least = max(least, at_least) * scale
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-8, atol=least, msg=lambda m, i=i: f"{i}: {m}")


def twice(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """First gradients of a function of the outputs, and the gradients of a function of these."""
    value = sum((torch.where(o.isfinite(), o, 0).sin() * (1 + i)).sum() for i, o in enumerate(outputs))
    first = torch.autograd.grad(value, given, create_graph=True, materialize_grads=True)
    of_first = sum(g.square().sum() + g.cos().sum() for g in first)
    return [*first, *torch.autograd.grad(of_first, given, materialize_grads=True)]


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


def inputs(b: int, h: int, m: int, n: int, d: int, e: int, hkv: int = 0, bkv: int = 0) -> list[Tensor]:
    shapes = [(b, h, m, d), (bkv or b, hkv or h, n, d), (bkv or b, hkv or h, n, e)]
    return leaves([torch.randn(s, dtype=torch.float64).to(precision()) for s in shapes])


# --- score_mods -----------------------------------------------------------------------------------------------


@rows_of("case", [*score_mods.CASES, *score_mods.OWN_DERIVATIVES], tests=8)
def test_score_mods_from_the_field(case: score_mods.Case) -> None:
    sizes = (2, 2, 4, 5)
    tensors = inputs(*sizes, 8, 5)
    torch.set_default_dtype(torch.float64)  # PyTorch's own arithmetic on integers, for the reference
    try:
        plain_mod, mask_mod, held = case.make(*sizes, torch.float64, torch.Generator().manual_seed(0))
        allowed = None if mask_mod is None else one_by_one(mask_mod, sizes)
        expected = dense(*tensors, plain_mod, allowed, evaluate=one_by_one)
        truth = twice(expected[:2], [*tensors, *held])
        score_mod, mask_mod, held = case.make(*sizes, torch.float64, torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(torch.float32)
    mask = None if mask_mod is None else block_mask(lambda b, h, q, kv: mask_mod(b, h, q, kv), *sizes)
    out, aux = flex_attention(*tensors, score_mod, mask, return_aux=LSE)
    if case.name == "clipped_gradient":  # what it is of a part of its upstream is not a part of what it is of the whole
        with pytest.raises(ValueError, match="must be linear in its upstream"):
            twice([out, aux.lse], [*tensors, *held])
        return
    found = twice([out, aux.lse], [*tensors, *held])
    # The first gradient of 16 bits, which the others depend on, is rounded from a sum in another order.
    close(found, truth, 1e-2 if case.name == "bf16_bias" else 0.0)


@pytest.mark.cpu_only
@rows_of("case", score_mods.CASES, tests=8)
def test_second_derivatives_by_the_score(case: score_mods.Case) -> None:
    """What the kernels on CUDA have of them, a text of the language, against autograd's."""
    sizes = (2, 2, 4, 5)
    score_mod = case.make(*sizes, torch.float64, torch.Generator().manual_seed(0))[0]
    if score_mod is None:
        pytest.skip("a mask alone")
    mod = trace_score_mod(score_mod)
    places = [torch.arange(n).reshape([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)]
    inputs = dict(zip(("b", "h", "q_idx", "kv_idx"), places, strict=True))
    score = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(sizes, dtype=torch.float64)

    def evaluated(text: str, **more: Tensor) -> Tensor:
        floats = [x for x in mod.scalars if isinstance(x, float)]
        ints = [int(x) for x in mod.scalars if not isinstance(x, float)]
        values = Values({**inputs, **more}, mod.buffers, floats, ints, torch.float64, sizes)
        return evaluate(program(text), values).expand(sizes)

    value = evaluated(mod.text, score=score)
    (slope,) = torch.autograd.grad(value.sum(), score, create_graph=True, materialize_grads=True)
    truth = torch.zeros(sizes, dtype=torch.float64)
    if slope.requires_grad:
        (truth,) = torch.autograd.grad(slope.sum(), score, materialize_grads=True)
    found = evaluated(_C.score_mod.curvature(mod.text), score=score.detach(), grad=grad)
    torch.testing.assert_close(found, truth * grad)


def test_axes(monkeypatch: pytest.MonkeyPatch, each_device: str) -> None:
    """Vectors too long to be unrolled, in several chunks."""
    monkeypatch.setitem(composite._CHUNK, each_device, 1)
    q, k, v = inputs(1, 2, 40, 7, 4, 4)
    a, w = leaves([torch.randn(40, 24), torch.randn(7, 24)], precision())

    def vectors(s, b, h, i, j):
        x = a[i] * w[j]
        return s + x.sum() + x.softmax(-1)[3] * s + x.amax() + (0.1 * x + 1).prod()

    s = (q @ k.transpose(-1, -2) / 2).double()
    x = a.double()[:, None] * w.double()
    s = s + x.sum(-1) + x.softmax(-1)[..., 3] * s + x.amax(-1) + (0.1 * x + 1).prod(-1)
    truth = twice([s.softmax(-1) @ v.double(), s.logsumexp(-1)], [q, k, v, a, w])
    out, lse = flex_attention(q, k, v, vectors, return_lse=True)
    close(twice([out, lse], [q, k, v, a, w]), truth)


# --- what else shapes a call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2**20], ids=["many chunks", "one chunk"])
def test_groups_masks_lists_and_maxima(chunk: int, each_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(composite._CHUNK, each_device, chunk)
    b, h, m, n = 2, 4, 37, 50
    tensors = [*inputs(b, h, m, n, 6, 5, hkv=2, bkv=1), *leaves([torch.randn(h, n), torch.randn(m)], precision())]
    shift = torch.randint(5, (h,))

    def near(b, h, q, kv):
        return ((q - kv).abs() < 9 + shift[h]) & (q != 3)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, factor: Tensor) -> list[Tensor]:
        def score_mod(s, b, h, i, j):
            return torch.tanh(s) * factor[i] + bias[h, j].exp() + b * bias[h, 0]

        mask = block_mask(near, 1, h, m, n, 16)
        out, aux = flex_attention(q, k, v, score_mod, mask, 0.7, True, return_aux=AuxRequest(lse=True, max_scores=True))
        return [out, aux.lse, aux.max_scores]

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, factor: Tensor) -> list[Tensor]:
        def evaluate(_, sizes, s):
            of_batch = torch.arange(b)[:, None, None, None] * bias[None, :, :1, None]
            return torch.tanh(s) * factor[:, None] + bias[:, None].exp() + of_batch

        rows = torch.arange(m)[:, None]
        allowed = ((rows - torch.arange(n)).abs() < 9 + shift[:, None, None]) & (rows != 3)
        return list(dense(q, k, v, call, allowed, 0.7, evaluate=evaluate))

    wide = leaves(tensors, torch.float64)
    found, truth = twice(call(*tensors), tensors), twice(plain(*wide), wide)
    close(found, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, each_device: str) -> None:
    tensors = [t.detach().to(dtype).requires_grad_() for t in inputs(1, 2, 20, 30, 16, 16)]
    wide = leaves(tensors, torch.float64)
    close(twice([flex_attention(*tensors)], tensors), twice([dense(*wide).out], wide))


def test_dropout(each_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(composite._CHUNK, each_device, 1)
    tensors = inputs(2, 2, 40, 70, 8, 8)
    weight = dropout_weight(0.4, (2, 2, 40, 70))
    wide = leaves(tensors, torch.float64)
    close(twice([flex_attention(*tensors, dropout_p=0.4)], tensors), twice([dense(*wide, weight=weight).out], wide))


def test_what_masked_keys_hold_and_rows_without_keys() -> None:
    """On the CPU: kernels on CUDA ask for finite keys and values, also where a mask leaves them out."""
    tensors = inputs(1, 2, 6, 9, 4, 4)
    with torch.no_grad():
        for t in tensors[1:]:
            t[..., 7:, :] = torch.nan
    table = torch.randn(7, dtype=precision(), requires_grad=True)  # read out of range by pairs that take no part
    mask = block_mask(lambda b, h, q, kv: (q > 0) & (kv < 7), 1, 1, 6, 9, 2)
    out = flex_attention(*tensors, lambda s, b, h, i, j: s * table[j], mask)
    found = twice([out], [*tensors, table])
    part = [t[..., :7, :].detach().double().requires_grad_() for t in tensors]
    wide = table.detach().double().requires_grad_()
    alive = torch.arange(6)[:, None] > 0
    plain = dense(*part, table, alive, evaluate=lambda mod, sizes, s: s * wide)
    truth = twice([plain.out], [*part, wide])
    for k in (1, 2, 5, 6):
        assert not found[k][..., 7:, :].any()
        found[k] = found[k][..., :7, :]
    close(found, truth)


def test_no_keys_and_no_queries(each_device: str) -> None:
    for m, n in ((3, 0), (0, 3), (0, 0)):
        tensors = inputs(1, 2, m, n, 4, 5)
        out, lse = flex_attention(*tensors, return_lse=True)
        assert not any(g.any() for g in twice([out, lse], tensors))


def test_memory_is_linear_in_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(composite._CHUNK, "cpu", 2**12)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return result

    bias = torch.randn(512, requires_grad=True)
    tensors = [t.detach().float().requires_grad_() for t in inputs(1, 1, 512, 512, 4, 4)]
    with Sizes():
        twice([flex_attention(*tensors, lambda s, b, h, i, j: s + bias[j])], [*tensors, bias])
    assert largest <= 8 * 16 * 512  # int64 of one chunk of 16 queries


# --- every order and mode ---------------------------------------------------------------------------------------


def shifted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) * bias[h, j] + s)


def plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    # Not by softmax, whose forward mode PyTorch cannot differentiate within a level.
    p = (torch.tanh(s) * bias[None, :, None] + s).exp()
    return p / p.sum(-1, keepdim=True) @ v


def given() -> list[Tensor]:
    return [*inputs(1, 2, 3, 4, 3, 2), *leaves([torch.randn(2, 4)], precision())]


@pytest.mark.cpu_only
def test_gradcheck_and_gradgradcheck() -> None:
    tensors = given()
    assert torch.autograd.gradcheck(shifted, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(shifted, tensors, check_fwd_over_rev=True, fast_mode=True)
    tensors = [t.detach()[..., :2, :2].requires_grad_() for t in tensors[:3]]
    assert torch.autograd.gradgradcheck(flex_attention, tensors, check_batched_grad=True)


def scalar(function: Callable) -> Callable:
    return lambda *x: function(*x).sin().sum()


EVERY: dict[str, Callable] = {
    "hessian": lambda f, x, t: torch.func.hessian(scalar(f), (0, 3))(*x),
    "jacrev of grad": lambda f, x, t: torch.func.jacrev(torch.func.grad(scalar(f), 3), 0)(*x),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(scalar(f), (0, 1, 2, 3)), x, t),
    "grad of the tangent": lambda f, x, t: torch.func.grad(
        lambda *y: torch.func.jvp(f, y, t)[1].sin().sum(), (0, 1, 2, 3)
    )(*x),
    "grad by the tangents": lambda f, x, t: torch.func.grad(
        lambda *u: torch.func.jvp(f, x, u)[1].sin().sum(), (0, 1, 2, 3)
    )(*t),
    "jvp of jvp": lambda f, x, t: torch.func.jvp(lambda *y: torch.func.jvp(f, y, t)[1], x, t),
    "third": lambda f, x, t: torch.func.grad(
        lambda q: torch.func.grad(lambda y: torch.func.grad(scalar(f))(y, *x[1:]).sin().sum())(q).cos().sum()
    )(x[0]),
    "functional.hessian": lambda f, x, t: torch.autograd.functional.hessian(scalar(f), x, vectorize=True),
}


@rows_of("name", [*EVERY])
def test_nestings(name: str, each_device: str) -> None:
    x, t = (tuple(y.detach() for y in given()) for _ in range(2))
    found = EVERY[name](shifted, x, t)
    truth = EVERY[name](plainly, *(tuple(y.double() for y in of) for of in (x, t)))
    leaves_of = torch.utils._pytree.tree_leaves
    close(leaves_of(found), leaves_of(truth))


def test_gradients_of_gradients_by_torch_func(each_device: str) -> None:
    x = tuple(y.detach() for y in given())

    def penalty(function: Callable, *y: Tensor) -> Tensor:
        return sum(g.square().sum() for g in torch.func.grad(scalar(function), (0, 1, 2, 3))(*y))

    found = torch.func.grad(lambda *y: penalty(shifted, *y), (0, 1, 2, 3))(*x)
    truth = torch.func.grad(lambda *y: penalty(plainly, *y), (0, 1, 2, 3))(*(y.double() for y in x))
    close(found, truth)


def test_reverse_mode_through_tangents_of_a_level() -> None:
    tensors, moved = given(), [t.detach() for t in given()]
    results = []
    for function in (shifted, plainly):
        with fwAD.dual_level():
            duals = [fwAD.make_dual(t, d) for t, d in zip(tensors, moved, strict=True)]
            out, tangent = fwAD.unpack_dual(function(*duals))
            # Within the level gradients have tangents, too.
            grads = torch.autograd.grad(function(*duals).sin().sum(), tensors)
            pushed = [fwAD.unpack_dual(g).tangent for g in grads]
        results.append([*torch.autograd.grad(tangent.sin().sum() + out.cos().sum(), tensors), *pushed])
    close(*results)


def test_a_gradient_penalty_in_place(each_device: str) -> None:
    """Permission to write over the inputs is without effect where a graph of the backward is kept."""
    results = []
    for inplace in (False, True):
        torch.manual_seed(1)
        x = torch.randn(1, 2, 8, 16, dtype=precision(), requires_grad=True)
        out = flex_attention(x * 1, x * 2, x.sin(), inplace=inplace)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        results.append([grad, *torch.autograd.grad(grad.square().sum(), x)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


FIRST, SECOND = 3, 0.7
READS: dict[str, tuple[bool, Callable]] = {
    "pairs": (True, lambda s, b, h, q, kv, t, u: s + t[h, q, kv]),
    "other order": (True, lambda s, b, h, q, kv, t, u: u[kv, h] / 3 + (s - t[h, kv, q] * (q - kv))),
    "one buffer twice": (True, lambda s, b, h, q, kv, t, u: s + t[h, q, kv] + t[1, 2, kv]),
    "branches": (True, lambda s, b, h, q, kv, t, u: torch.where(q >= kv, s - u[(q - kv) % 5, 0], -torch.inf)),
    "numbers": (True, lambda s, b, h, q, kv, t, u: torch.where(q * 2 > FIRST, s + u[kv, h] * SECOND, -torch.inf)),
    "other branches": (False, lambda s, b, h, q, kv, t, u: torch.where(q >= kv, s + u[kv, h], 0.0)),
    "branches by the score": (False, lambda s, b, h, q, kv, t, u: torch.where(s > 0, s + u[kv, h], -torch.inf)),
    "branches by a read": (False, lambda s, b, h, q, kv, t, u: torch.where(u[kv, h] > 0, s + u[kv, h], -torch.inf)),
    "a detached score": (False, lambda s, b, h, q, kv, t, u: s.detach() + u[kv, h]),
    "the larger read": (False, lambda s, b, h, q, kv, t, u: s + torch.maximum(u[kv, h], t[h, q, kv])),
    "product of reads": (False, lambda s, b, h, q, kv, t, u: s + t[h, q, kv] * u[kv, h]),
    "factor of the score": (False, lambda s, b, h, q, kv, t, u: s * t[h, q, kv]),
    "within a function": (False, lambda s, b, h, q, kv, t, u: s + torch.tanh(t[h, q, kv])),
    "the score in one": (False, lambda s, b, h, q, kv, t, u: torch.tanh(s) + t[h, q, kv]),
    "less the score": (False, lambda s, b, h, q, kv, t, u: t[h, q, kv] - s),
    "scores by branch": (False, lambda s, b, h, q, kv, t, u: torch.where(q > kv, s, u[kv, h])),
    "twice the score": (False, lambda s, b, h, q, kv, t, u: s + (s + t[h, q, kv])),
}


@rows_of("name", [*READS])
def test_reads_that_are_added_to_the_score(name: str) -> None:
    """What the kernels of second derivatives take is told apart, and is as PyTorch differentiates it."""
    added, mod = READS[name]
    batch, heads, rows, keys = sizes = (2, 3, 6, 6)
    t, u = torch.randn(heads, rows, keys, dtype=torch.float64), torch.randn(6, heads, dtype=torch.float64)
    traced = trace_score_mod(lambda s, b, h, q, kv: mod(s, b, h, q, kv, t, u))
    buffers = list(traced.buffers)
    assert adds_reads(traced.text, frozenset(range(len(buffers)))) == added
    if not added:
        return
    first = 2
    starts = {"b": 0, "h": 0, "q_idx": first, "kv_idx": 0}
    places = {}
    for dim, (place, size) in enumerate(zip(starts, (batch, heads, rows - first, keys), strict=True)):
        shape = [1] * 4
        shape[dim] = size
        places[place] = torch.arange(starts[place], starts[place] + size).view(shape)
    text = program(traced.text)

    def values(buffers: Sequence[Tensor], **more: Any) -> Values:
        numbers = split_scalars(traced.scalars)
        return Values({**places, **more}, buffers, *numbers, torch.float64, sizes, None, starts)

    tangents = [torch.randn_like(b) for b in buffers]
    score = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    _, right = torch.func.jvp(lambda *b: evaluate(text, values(b, score=score)), tuple(buffers), tuple(tangents))
    found = evaluate_reads(traced.text, values(buffers), tangents)
    torch.testing.assert_close(found.expand(right.shape), right)
    alone = evaluate_reads(traced.text, values(buffers), [tangents[0], *[None] * (len(buffers) - 1)])
    _, right = torch.func.jvp(
        lambda b: evaluate(text, values([b, *buffers[1:]], score=score)), (buffers[0],), (tangents[0],)
    )
    torch.testing.assert_close(alone.expand(right.shape), right)
