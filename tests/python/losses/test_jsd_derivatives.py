"""The kernels of the divergence's derivatives, and how they nest, against autograd of the plain formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusegrad
import pytest
import torch
from coverings import pairs_of, rows_of
from fusegrad import reference
from nestings import NESTINGS, Seen, along
from support import DEVICES, acc_of, assert_as_good_as_eager, dtypes
from torch import Tensor
from torch.func import grad, jvp, vjp

DEVICE_DTYPES = [(device, dtype) for device in DEVICES for dtype in dtypes(device)]


@dataclass(frozen=True)
class Settings:
    """What shapes a row's divergence: beta; of the student and the teacher temperatures, softcaps and scales."""

    beta: float = 0.5
    temperatures: tuple[float, float] = (1.0, 1.0)
    softcaps: tuple[float, float] = (0.0, 0.0)
    scales: tuple[float, float] = (1.0, 1.0)
    log_probs: bool = False
    close: bool = False  # both sides nearly alike
    peaked: bool = False  # each has nearly all of its mass in few columns
    infinite: bool = False

    def make(self, rows: int, vocab: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Both sides, and what the ops take behind the tensors."""
        student, teacher = (12 if self.peaked else 2) * torch.randn(2, rows, vocab, device=device)
        if self.close:
            teacher = student + 0.05 * teacher
        if self.infinite:  # in both, and where the average is not taken of it in one
            student[:, ::3] = teacher[:, ::3] = -torch.inf
            if self.beta > 0:
                student[:, 1::7] = -torch.inf
            if self.beta < 1:
                teacher[:, 2::7] = -torch.inf
        if self.log_probs:
            student, teacher = student.log_softmax(1), teacher.log_softmax(1)
        labels = torch.randint(vocab, (rows,), device=device)
        labels[2 % rows] = -100
        return student.to(dtype), teacher.to(dtype), (labels, -100, self.beta, *self.shape, self.log_probs)

    @property
    def shape(self) -> tuple[float, ...]:
        return *self.temperatures, *self.softcaps, *self.scales


CASES = {
    "plain": Settings(),
    "forward": Settings(0.0),
    "reverse": Settings(1.0),
    "close": Settings(0.3, close=True),
    "forward, close": Settings(0.0, close=True),
    "temperatures": Settings(0.2, temperatures=(2.0, 1.5), scales=(0.7, 1.2)),
    "capped": Settings(0.6, temperatures=(1.0, 2.0), softcaps=(3.0, 4.0), scales=(1.5, 0.8)),
    "forward, capped": Settings(0.0, softcaps=(3.0, 0.0)),
    "infinite": Settings(0.4, infinite=True),
    "forward, infinite": Settings(0.0, infinite=True),
    "reverse, infinite": Settings(1.0, infinite=True),
    "near the teacher": Settings(1 - 1e-7, peaked=True),
    "nearest the teacher": Settings(1 - 1e-12, peaked=True),
    "near the student": Settings(1e-7, peaked=True),
    "log-probabilities, near the teacher": Settings(1 - 1e-7, log_probs=True, peaked=True),
    "log-probabilities": Settings(0.7, log_probs=True),
    "log-probabilities, forward": Settings(0.0, log_probs=True),
    "log-probabilities, reverse": Settings(1.0, log_probs=True),
}


def formula(student: Tensor, teacher: Tensor, settings: tuple[Any, ...]) -> Tensor:
    """[N], by PyTorch's ops in the dtype of the two."""
    labels, ignore_index, beta, *shape, log_probs = settings

    def logarithms(x: Tensor, temperature: float, cap: float, scale: float) -> Tensor:
        z = x * scale
        z = z if cap == 0 else (z / cap).tanh() * cap
        return z if log_probs else (z / temperature).log_softmax(1)

    log_q, log_p = logarithms(student, *shape[::2]), logarithms(teacher, *shape[1::2])

    def kl(x: Tensor, y: Tensor) -> Tensor:
        """sum of exp(x) * (x - y), where exp(x) is not 0."""
        none = x == -torch.inf
        return (x.exp() * (x.masked_fill(none, 0) - y.masked_fill(none, 0))).sum(1)

    if beta in (0, 1):
        rows = kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    else:
        none = (log_q == -torch.inf) & (log_p == -torch.inf)
        # PyTorch's logaddexp has no second derivatives where one of the two is -inf.
        log_m = ((1 - beta) * log_q.exp() + beta * log_p.exp()).masked_fill(none, 1).log()
        rows = (1 - beta) * kl(log_q, log_m) + beta * kl(log_p, log_m)
    return rows.where(labels != ignore_index, 0)


SIZES = [(5, 7), (3, 1000), (2, 9001)]
everywhere = rows_of("device, dtype", DEVICE_DTYPES)


@pairs_of(
    {"device, dtype": DEVICE_DTYPES, "sizes": [*SIZES], "case": CASES, "sides": ["both", "student", "teacher"]}, tests=6
)
def test_kernels(case: Settings, sizes: tuple[int, int], device: str, dtype: torch.dtype, sides: str) -> None:
    """Values, gradients, tangents of both; a column cut off keeps rows from starting at units of 16 bytes."""
    if sides != "both" and sizes[1] != 1000:
        pytest.skip("one size is enough")
    torch.manual_seed(1)
    if case.peaked:
        sizes = 64, sizes[1]  # eager's error of a few numbers may be small by luck
    ops = torch.ops.fusegrad
    student, teacher, settings = case.make(*sizes, device, dtype)
    if sizes[1] == 1000:
        student = torch.cat([student, student[:, :1]], 1)[:, :-1]
    moves = {"both": (True, True), "student": (True, False), "teacher": (False, True)}[sides]
    tangents = [torch.randn(sizes, device=device).to(dtype) for _ in range(2)]
    given = [t if moved else None for t, moved in zip(tangents, moves, strict=True)]
    upstream, change = torch.randn(2, sizes[0], dtype=acc_of(dtype), device=device)
    second = ops.jsd_soft_second(student, teacher, upstream, *given, None, moves, *settings)
    ours = [
        ops.jsd_soft(student, teacher, *settings),
        *ops.jsd_soft_gradient(student, teacher, upstream, moves, *settings),
        ops.jsd_soft_tangent(student, teacher, *given, *settings),
        *second,
        *ops.jsd_soft_second(student, teacher, upstream, *given, change, moves, *settings),
    ]

    def right(acc: torch.dtype) -> list[Tensor]:
        fixed = [student.to(acc), teacher.to(acc)]
        u, c = upstream.to(acc), change.to(acc)
        z = tuple(t for t, moved in zip(fixed, moves, strict=True) if moved)
        d = tuple(t.to(acc) for t in given if t is not None)

        def value(*z: Tensor) -> Tensor:
            both = {"both": z, "student": (z[0], fixed[1]), "teacher": (fixed[0], z[-1])}[sides]
            return formula(*both, settings)

        def gradient(u: Tensor, *z: Tensor) -> tuple[Tensor, ...]:
            return vjp(value, *z)[1](u)

        primal, moved = jvp(value, z, d)
        first, second = jvp(lambda *z: gradient(u, *z), z, d)
        return [primal, *first, moved, *second, *jvp(gradient, (u, *z), (c, *d))[1]]

    eager = [t.to(o.dtype) for t, o in zip(right(acc_of(dtype)), ours, strict=True)]
    dead = (student == -torch.inf) | (teacher == -torch.inf)
    for i, (found, plain, truth) in enumerate(zip(ours, eager, right(torch.float64), strict=True)):
        if truth.shape == student.shape:
            # A formula that has 0 * inf there is no truth.
            assert not found[(student == -torch.inf) & (teacher == -torch.inf)].any(), i
            found, plain, truth = (t.masked_fill(dead, 0) for t in (found, plain, truth))
        assert truth.isfinite().all() and found.isfinite().all(), i
        # Sums of some thousand products of either sign, of few rows each: float32's rounding of each product counts.
        if dtype == torch.float64:
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        elif truth.dim() == 1:
            torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=5e-7)
        else:
            # Differences of probabilities that are twenty times as large, or of logarithms in the few columns that
            # count in a peaked row.
            assert_as_good_as_eager(found, plain, truth, str(i), least=6e-5 if case.close or case.peaked else 3e-6)


@everywhere
@rows_of("beta", [0.0, 0.3, 1.0])
def test_what_is_ignored_or_wrong(device: str, dtype: torch.dtype, beta: float) -> None:
    """Ignored rows may hold anything; on the GPU a row with a wrong label is NaN. Equal rows have no gradient."""
    ops, labels = torch.ops.fusegrad, torch.tensor([1, -100, 3], device=device)
    student, teacher, d, e = torch.randn(4, 3, 300, device=device).to(dtype).unbind(0)
    student[1] = teacher[1] = torch.nan
    upstream = torch.ones(3, device=device, dtype=acc_of(dtype))
    shape = beta, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, False

    def call(labels: Tensor, *sides: Tensor) -> list[Tensor]:
        settings = labels, -100, *shape
        return [
            ops.jsd_soft(*sides, *settings),
            *ops.jsd_soft_gradient(*sides, upstream, (True, True), *settings),
            ops.jsd_soft_tangent(*sides, d, e, *settings),
            *ops.jsd_soft_second(*sides, upstream, d, e, upstream, (True, True), *settings),
        ]

    for t in call(labels, student, teacher):
        assert t[[0, 2]].isfinite().all() and not t[1].any()
    # A NaN of one side reaches all.
    for t in call(torch.tensor([1, 1, 3], device=device), student, teacher.nan_to_num(0)):
        assert t[1].isnan().all() and t[[0, 2]].isfinite().all()
    for t in call(labels, teacher, teacher)[:4]:
        assert not t.any()
    if device == "cuda":
        for t in call(torch.tensor([1, 300, -7], device=device), d, e):
            assert t[0].isfinite().all() and t[1:].isnan().all()
    else:
        with pytest.raises(IndexError, match="jsd: labels must be in"):
            call(torch.tensor([1, 300, -7]), d, e)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    ops = torch.ops.fusegrad
    student, teacher, settings = Settings(0.3).make(4, 5, device, torch.float32)
    student.requires_grad_()
    upstream, (d, e) = torch.rand(4, device=device).requires_grad_(), torch.randn(2, 4, 5, device=device)
    torch.library.opcheck(ops.jsd_soft.default, (student, teacher, *settings))
    torch.library.opcheck(ops.jsd_soft_tangent.default, (student, teacher, d, None, *settings))
    for wanted in ((True, True), (False, True)):
        torch.library.opcheck(ops.jsd_soft_gradient.default, (student, teacher, upstream, wanted, *settings))
        call = (student, teacher, upstream, d, e, upstream.detach(), wanted, *settings)
        torch.library.opcheck(ops.jsd_soft_second.default, call)


# --- nestings ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beta", [0.0, 0.4])
@rows_of("name", [*NESTINGS])
def test_nestings(name: str, device: str, beta: float) -> None:
    """Both sides move: the teacher is a function of the student."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    labels = torch.tensor([1, -100, 3, 5], device=device)
    options = {"beta": beta, "temperature": 1.5, "labels": labels, "hard_weight": 0.3, "reduction": "sum"}
    x, d = torch.randn(2, 4, 6, dtype=dtype, device=device)

    def of(jsd: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: jsd(x, x.sin() * 2, **options)

    with Seen() as seen:
        ours = NESTINGS[name](of(fusegrad.jsd), x, d)
    # PyTorch's logsumexp writes over what a backward through its tangent needs.
    same = {"backward through a tangent": lambda f, x, d: (along(f, d)(x), grad(along(f, d))(x))}
    truth = same.get(name, NESTINGS[name])(of(lambda *a, **o: reference.jsd(*a, **o)[0]), x.double(), d.double())
    tolerance = {"rtol": 1e-8, "atol": 1e-9} if device == "cpu" else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(ours, truth, check_dtype=False, **tolerance)
    assert seen.count["jsd_soft"] >= 1
    # Second derivatives are the kernels'; a formula's softmax is what third ones begin with.
    if not name.startswith(("third", "fourth", "create_graph")):
        assert seen.count["_log_softmax"] == seen.count["log_softmax"] == seen.count["logsumexp"] == 0


@pytest.mark.parametrize(
    "of",
    [lambda f, x, d: grad(f)(x), lambda f, x, d: jvp(f, (x,), (d,)), lambda f, x, d: jvp(grad(f), (x,), (d,))],
    ids=["grad", "jvp", "jvp(grad)"],
)
def test_compiled(of: Callable) -> None:
    torch._dynamo.reset()
    x, d, teacher = torch.randn(3, 4, 6)

    def f(x: Tensor) -> Tensor:
        return fusegrad.jsd(x, teacher, beta=0.2)

    compiled = torch.compile(lambda x, d: of(f, x, d), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, d), of(f, x, d))


SECOND: dict[str, dict[str, Any]] = {
    "batchmean": {},
    "none, forward": {"reduction": "none", "beta": 0.0},
    "labels": {"hard_weight": 0.4, "soft_weight": 0.5, "beta": 0.3, "student_softcap": 5.0},
    "labels alone": {"hard_weight": 1.0, "soft_weight": 0.0, "reduction": "sum"},
    "heads": {"vocab_size": 700, "temperature": 2.0, "teacher_temperature": 1.5, "student_logit_scale": 0.7},
}


@everywhere
@rows_of("options", SECOND)
def test_second_derivatives_of_the_linear_loss(options: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    """In chunks, and as accurate as eager PyTorch; the first gradients are the kernels' to the bit."""
    torch.manual_seed(0)
    rows, hidden, classes = 300, 32, 777
    labels = torch.randint(700, (rows,), device=device)
    labels[7] = -100
    shapes = (rows, hidden), (classes, hidden), (classes,), (rows, 48), (classes, 48)
    *given, teacher, head = (torch.randn(s, device=device).to(dtype) for s in shapes)
    given[1] *= hidden**-0.5
    head *= 48**-0.5
    weights = torch.rand(rows, device=device)
    along = [torch.randn_like(t) for t in given]

    def total(jsd: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor, **more: Any) -> Tensor:
        fixed = teacher.to(x.dtype), head.to(x.dtype)
        mine = weights.to(acc_of(x.dtype))
        values = jsd(x, w, *fixed, student_bias=b, labels=labels, token_weight=mine, **options, **more)
        return (mine[: values.numel()].view_as(values) * values.to(mine.dtype)).sum()

    def second(jsd: Callable[..., Tensor], dtype: torch.dtype, **more: Any) -> tuple[tuple[Tensor, ...], ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        first = torch.autograd.grad(total(jsd, *leaves, **more), leaves, create_graph=True)
        return first, torch.autograd.grad(first, leaves, [t.to(dtype) for t in along])

    def plain(*a: Any, **o: Any) -> Tensor:
        return reference.linear_jsd(*a, **o)[0]

    exact, eager = second(plain, torch.float64)[1], second(plain, dtype)[1]
    for more in ({}, {"workspace_mib": 1}):
        with Seen() as seen:
            first, found = second(fusegrad.linear_jsd, dtype, **more)
        assert seen.count["linear_jsd_second"] == 1 and seen.count["linear_jsd_rows"] == 0
        leaves = [t.detach().requires_grad_() for t in given]
        again = torch.autograd.grad(total(fusegrad.linear_jsd, *leaves, **more), leaves)
        assert all(map(torch.equal, first, again))
        for one, theirs, right in zip(found, eager, exact, strict=True):
            errors = [(t.double() - right).norm() for t in (one, theirs)]
            assert errors[0] <= 1.5 * errors[1] + 1e-6 * right.norm(), (errors, right.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_third_derivatives_of_the_linear_loss(device: str) -> None:
    """And the upstream gradient's, which has a place of its own in the graph."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    teacher = [torch.randn(s, device=device, dtype=dtype) for s in ((5, 3), (6, 3))]
    given = [torch.randn(s, device=device, dtype=dtype) for s in ((5, 2), (6, 2), ())]

    def derivatives(jsd: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        *leaves, scale = (t.to(dtype).requires_grad_() for t in given)
        loss = jsd(*leaves, *(t.to(dtype) for t in teacher), beta=0.3) * scale.exp()
        found: list[Tensor] = []
        for _ in range(3):
            made = torch.autograd.grad(loss, [*leaves, scale], create_graph=True)
            found += made
            loss = sum(g.sin().sum() for g in made)
        return [t.detach() for t in found]

    ours = derivatives(fusegrad.linear_jsd, dtype)
    right = derivatives(lambda *a, **o: reference.linear_jsd(*a, **o)[0], torch.float64)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if device == "cpu" else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(ours, right, check_dtype=False, **tolerance)
