"""The kernels of cross entropy's derivatives, and how they nest, against autograd of the plain formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusegrad
import pytest
import torch
from coverings import pairs_of, rows_of
from fusegrad import Aux, reference
from nestings import NESTINGS, Seen, along
from support import DEVICES, acc_of, assert_as_good_as_eager, dtypes
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

LSE, ENTROPY, LOG_PROB = 1, 16, 32
EVERYTHING = LSE | ENTROPY | LOG_PROB
DEVICE_DTYPES = [(device, dtype) for device in DEVICES for dtype in dtypes(device)]


@dataclass(frozen=True)
class Settings:
    """What shapes a row's values."""

    aux: int = 0
    smoothing: float = 0.0
    softcap: float = 0.0
    weighted: bool = False
    probabilities: bool = False
    infinite: bool = False

    def make(self, rows: int, vocab: int, device: str, dtype: torch.dtype) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits, and what the ops take behind the tensors."""
        logits = 2 * torch.randn(rows, vocab, device=device).to(dtype)
        if self.probabilities:
            target = torch.randn(rows, vocab, device=device).softmax(1).to(dtype)
        else:
            target = torch.randint(vocab, (rows,), device=device)
            target[2 % rows] = -100
        if self.infinite:
            logits[:, ::3] = -torch.inf
            target = target.masked_fill(logits == -torch.inf, 0) if self.probabilities else target // 3 * 3 + 1
            if not self.probabilities:
                target[2 % rows] = -100
        weight = (torch.rand(vocab, device=device) + 0.2).to(acc_of(dtype)) if self.weighted else None
        return logits, (target, weight, -100, self.smoothing, self.softcap, self.aux)


CASES = {
    "plain": Settings(),
    "values": Settings(EVERYTHING),
    "infinite": Settings(EVERYTHING, infinite=True),
    "weighted": Settings(LSE, weighted=True),
    "smoothed": Settings(LOG_PROB, smoothing=0.1),
    "capped": Settings(EVERYTHING, smoothing=0.1, softcap=3.0),
    "dense": Settings(ENTROPY, smoothing=0.2, weighted=True),
    "probabilities": Settings(LSE | ENTROPY, probabilities=True, infinite=True),
    "capped probabilities": Settings(ENTROPY, smoothing=0.1, softcap=2.0, weighted=True, probabilities=True),
}


def formula(logits: Tensor, settings: tuple[Any, ...]) -> Tensor:
    """The values [4, N] by PyTorch's ops, in the logits' dtype."""
    target, weight, ignore_index, smoothing, softcap, aux = settings
    z = logits if softcap == 0 else (logits / softcap).tanh() * softcap
    lse, vocab, none = z.logsumexp(1), z.size(1), torch.zeros_like(z[:, 0])
    per_class = torch.ones_like(z) if weight is None else weight.to(z.dtype).expand_as(z)
    kept = torch.ones_like(lse, dtype=torch.bool)
    log_prob = none
    if target.is_floating_point():
        a = per_class * ((1 - smoothing) * target.to(z.dtype) + smoothing / vocab)
    else:
        kept = target != ignore_index
        index = target.clamp_min(0)[:, None]
        a = torch.zeros_like(z).scatter(1, index, 1 - smoothing) * per_class + smoothing / vocab * per_class
        log_prob = z.gather(1, index)[:, 0] - lse
    log_p = z - lse[:, None]
    cost = -(a * log_p.masked_fill(a == 0, 0)).sum(1)
    dead = z == -torch.inf
    entropy = -(log_p.exp() * log_p.masked_fill(dead, 0)).sum(1)
    found = [cost, lse, entropy if aux & ENTROPY else none, log_prob if aux & LOG_PROB else none]
    return torch.stack([v if i == 1 and aux & LSE else v.where(kept, none) for i, v in enumerate(found)])


SIZES = [(5, 7), (3, 1000), (2, 9001)]
everywhere = rows_of("device, dtype", DEVICE_DTYPES)


@pairs_of({"device, dtype": DEVICE_DTYPES, "sizes": [*SIZES], "case": CASES}, tests=4)
def test_kernels(case: Settings, sizes: tuple[int, int], device: str, dtype: torch.dtype) -> None:
    """Values, gradient, tangents of both; a column cut off keeps rows from starting at units of 16 bytes."""
    torch.manual_seed(1)
    ops = torch.ops.fusegrad
    logits, settings = case.make(*sizes, device, dtype)
    if sizes[1] == 1000:
        logits = torch.cat([logits, logits[:, :1]], 1)[:, :-1]
    tangent = torch.randn(sizes, device=device).to(dtype)
    upstream, moved = torch.randn(2, 4, sizes[0], dtype=acc_of(dtype), device=device)
    values, stats = ops.cross_entropy_rows(logits, *settings)
    ours = (
        values,
        ops.cross_entropy_rows_gradient(logits, upstream, stats, *settings),
        ops.cross_entropy_rows_tangent(logits, tangent, stats, *settings),
        ops.cross_entropy_rows_second(logits, upstream, tangent, None, stats, *settings),
        ops.cross_entropy_rows_second(logits, upstream, tangent, moved, stats, *settings),
    )

    def right(acc: torch.dtype) -> list[Tensor]:
        z, d, u, m = (t.to(acc) for t in (logits, tangent, upstream, moved))

        def gradient(z: Tensor, u: Tensor) -> Tensor:
            return vjp(lambda z: formula(z, settings), z)[1](u)[0]

        value, change = jvp(lambda z: formula(z, settings), (z,), (d,))
        first, second = jvp(lambda z: gradient(z, u), (z,), (d,))
        return [value, first, change, second, jvp(gradient, (z, u), (d, m))[1]]

    names = ("values", "gradient", "tangent", "second", "second with a tangent")
    eager = [t.to(o.dtype) for t, o in zip(right(acc_of(dtype)), ours, strict=True)]
    dead = logits == -torch.inf
    for name, found, plain, truth in zip(names, ours, eager, right(torch.float64), strict=True):
        if truth.shape == logits.shape:
            # A formula that has 0 * inf there is no truth.
            assert not found[dead].any(), name
            found, plain, truth = (t.masked_fill(dead, 0) for t in (found, plain, truth))
        assert truth.isfinite().all() and found.isfinite().all(), name
        # Sums of some thousand products of either sign.
        assert_as_good_as_eager(found, plain, truth, name, least=3e-6)


@everywhere
def test_what_is_ignored_or_wrong(device: str, dtype: torch.dtype) -> None:
    """Ignored rows may hold anything, and have their lse alone; on the GPU a row with a wrong index is NaN."""
    ops, target = torch.ops.fusegrad, torch.tensor([1, -100, 3], device=device)
    logits = torch.randn(3, 300, device=device).to(dtype)
    tangent, upstream = torch.randn_like(logits), torch.ones(4, 3, device=device, dtype=acc_of(dtype))
    for aux in (0, EVERYTHING):
        for wild in (False, True):
            if wild:
                logits[1] = torch.nan
            call = (target, None, -100, 0.0, 0.0, aux)
            values, stats = ops.cross_entropy_rows(logits, *call)
            found = [
                values.T,
                ops.cross_entropy_rows_gradient(logits, upstream, stats, *call),
                ops.cross_entropy_rows_tangent(logits, tangent, stats, *call).T,
                ops.cross_entropy_rows_second(logits, upstream, tangent, upstream, stats, *call),
            ]
            for t in found:
                assert t[[0, 2]].isfinite().all()
                assert t[1].any() == (aux != 0) if not wild or aux else not t[1].any()
    if device == "cuda":
        bad = torch.tensor([1, 300, -7], device=device)
        call = (bad, None, -100, 0.0, 0.0, EVERYTHING)
        values, stats = ops.cross_entropy_rows(logits[[0, 2, 2]], *call)
        args = logits[[0, 2, 2]], upstream, tangent[[0, 2, 2]], upstream, stats
        second = ops.cross_entropy_rows_second(*args, *call)
        moved = ops.cross_entropy_rows_tangent(args[0], args[2], stats, *call)
        for t in (values.T, second, moved.T):
            assert t[1:].isnan().all() and t[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    ops = torch.ops.fusegrad
    for case in (CASES["values"], CASES["probabilities"]):
        logits, settings = case.make(4, 5, device, torch.float32)
        logits = logits.nan_to_num(neginf=-3).requires_grad_()
        upstream, tangent = torch.randn(4, 4, device=device), torch.randn(4, 5, device=device)
        stats = ops.cross_entropy_rows(logits.detach(), *settings)[1]
        leaf = upstream.clone().requires_grad_()
        torch.library.opcheck(ops.cross_entropy_rows.default, (logits, *settings))
        torch.library.opcheck(ops.cross_entropy_rows_gradient.default, (logits, leaf, stats, *settings))
        torch.library.opcheck(ops.cross_entropy_rows_tangent.default, (logits, tangent, stats, *settings))
        for moved in (None, leaf):
            call = (logits, upstream, tangent, moved, stats, *settings)
            torch.library.opcheck(ops.cross_entropy_rows_second.default, call)


# --- nestings ---

LOSS = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.2}


def loss_and_values(x: Tensor, target: Tensor) -> Tensor:
    """A number that everything differentiable of a row has a part in."""
    loss, aux = fusegrad.cross_entropy(x, target, return_aux=Aux(lse=True, entropy=True, token_log_prob=True), **LOSS)
    return loss + (aux.lse * aux.entropy).sum() + aux.token_log_prob.sin().sum()


def formula_of_them(x: Tensor, target: Tensor) -> Tensor:
    loss, aux = reference.cross_entropy(x, target, **LOSS)
    # Ignored rows have their lse.
    z = (x / LOSS["softcap"]).tanh() * LOSS["softcap"]
    return loss + (z.logsumexp(1) * aux["entropy"]).sum() + aux["token_log_prob"].sin().sum()


@pytest.mark.parametrize("name", NESTINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_nestings(name: str, device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.float32
    target = torch.tensor([1, -100, 3, 5], device=device)
    x, d = torch.randn(2, 4, 6, dtype=dtype, device=device)
    with Seen() as seen:
        ours = NESTINGS[name](lambda x: loss_and_values(x, target), x, d)
    # PyTorch's logsumexp writes over what a backward through its tangent needs.
    same = {"backward through a tangent": lambda f, x, d: (along(f, d)(x), grad(along(f, d))(x))}
    truth = same.get(name, NESTINGS[name])(lambda x: formula_of_them(x, target), x.double(), d.double())
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if device == "cpu" else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(ours, truth, check_dtype=False, **tolerance)
    assert seen.count["cross_entropy_rows"] >= 1
    # Second derivatives are the kernels'; a formula's softmax is what third ones begin with.
    if not name.startswith(("third", "fourth", "create_graph")):
        assert seen.count["logsumexp"] == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_what_has_no_kernel(weighted: bool) -> None:
    """A tangent or a batch of class weights, or of a target of probabilities, counts."""
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.1
    target = torch.tensor([1, 0, 3, 5]) if weighted else torch.randn(4, 6, dtype=torch.float64).softmax(1)

    def ours(x: Tensor, other: Tensor) -> Tensor:
        return fusegrad.cross_entropy(x, target, weight=other) if weighted else fusegrad.cross_entropy(x, other)

    def right(x: Tensor, other: Tensor) -> Tensor:
        log_p = x.log_softmax(1)
        if not weighted:
            return -(log_p * other).sum() / 4
        return -(log_p[torch.arange(4), target] * other[target]).sum() / other[target].sum()

    other = weight if weighted else target
    d = torch.randn_like(other)
    torch.testing.assert_close(*(jvp(lambda w, f=f: f(x, w), (other,), (d,)) for f in (ours, right)))
    batch = torch.stack([other, other * 2])
    torch.testing.assert_close(*(vmap(grad(f), in_dims=(None, 0))(x, batch) for f in (ours, right)))


@pytest.mark.parametrize(
    "of",
    [lambda f, x, d: grad(f)(x), lambda f, x, d: jvp(f, (x,), (d,)), lambda f, x, d: jvp(grad(f), (x,), (d,))],
    ids=["grad", "jvp", "jvp(grad)"],
)
def test_compiled(of: Callable) -> None:
    torch._dynamo.reset()
    x, d = torch.randn(2, 4, 6)
    target = torch.tensor([1, -100, 3, 5])

    def f(x: Tensor) -> Tensor:
        return fusegrad.cross_entropy(x, target, z_loss=0.1)

    compiled = torch.compile(lambda x, d: of(f, x, d), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, d), of(f, x, d))
