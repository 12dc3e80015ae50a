"""cross_entropy and linear_cross_entropy under torch.func, torch.vmap, forward-mode differentiation and a second
backward, against the plain formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from coverings import each_of, rows_of
from function_transforms import assert_same_under_transforms, assert_second_derivatives, twice
from fusegrad import Aux, _loss_chunks, reference
from torch import Tensor

N, V, H = 5, 7, 3
DIFFERENTIABLE = Aux(lse=True, entropy=True, token_log_prob=True)


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear losses take two rows each."""
    monkeypatch.setitem(_loss_chunks._LOGITS, "cpu", 1)
    monkeypatch.setattr(_loss_chunks, "_LEAST", 2)


def target() -> Tensor:
    return torch.tensor([1, -100, 6, 0, 3])


def probabilities() -> Tensor:
    return torch.linspace(-2, 1, N * V, dtype=torch.float64).view(N, V).sin().softmax(1)


CASES: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "mean": (target, {}),
    "sum": (lambda: target().abs() % 7, {"reduction": "sum", "ignore_index": 3}),
    "none": (target, {"reduction": "none", "label_smoothing": 0.2}),
    "weighted": (target, {"weight": torch.linspace(0.5, 2, V).double(), "label_smoothing": 0.1, "z_loss": 0.3}),
    "capped": (target, {"softcap": 2.0, "z_loss": 0.1, "token_weight": torch.linspace(0, 2, N).double()}),
    "normalized": (target, {"normalizer": 11.0, "z_loss": 0.2}),
    "probabilities": (probabilities, {"label_smoothing": 0.1}),
    "weighted probabilities": (
        probabilities,
        {"weight": torch.linspace(0.5, 2, V).double(), "reduction": "sum", "z_loss": 0.2},
    ),
}
cases = rows_of("case", CASES)


def pair(case: tuple[Callable[[], Tensor], dict[str, Any]], linear: float) -> tuple[Callable, Callable, list[Tensor]]:
    """Ours and the formula as functions of what is differentiated, and that. linear: the logits' scale, 0 without."""
    of_target, options = case
    made = of_target()
    if linear:
        more = {"logit_scale": linear, **options}
        inputs = [torch.randn(s, dtype=torch.float64) for s in ((N, H), (V, H), (V,))]
        return (
            lambda x, w, b: fusegrad.linear_cross_entropy(x, w, made, linear_bias=b, **more),
            lambda x, w, b: reference.linear_cross_entropy(x, w, made, linear_bias=b, **more)[0],
            inputs,
        )
    return (
        lambda z: fusegrad.cross_entropy(z, made, **options),
        lambda z: reference.cross_entropy(z, made, **options)[0],
        [torch.randn(N, V, dtype=torch.float64)],
    )


linears = pytest.mark.parametrize("linear", [0.0, 1.0, 1.5], ids=["cross_entropy", "linear_cross_entropy", "scaled"])


@cases
@linears
def test_transforms(case: Any, linear: float) -> None:
    assert_same_under_transforms(*pair(case, linear))


@cases
@linears
def test_second_derivatives(case: Any, linear: float) -> None:
    assert_second_derivatives(*pair(case, linear))


@linears
@rows_of("reduction", ["mean", "none"])
def test_aux_values(linear: bool, reduction: str) -> None:
    """All of them have derivatives under a transform; those that a backward refuses are refused in both orders."""
    ours, _, inputs = pair((target, {"z_loss": 0.2, "reduction": reduction, "return_aux": DIFFERENTIABLE}), linear)
    _, by_formula, _ = pair((target, {"z_loss": 0.2, "reduction": reduction}), linear)
    del by_formula

    def formula(*t: Tensor) -> tuple[Tensor, ...]:
        call = (reference.linear_cross_entropy, reference.cross_entropy)[not linear]
        more = {"linear_bias": t[2], "logit_scale": linear} if linear else {}
        loss, aux = call(*t[:2] if linear else t[:1], target(), z_loss=0.2, reduction=reduction, **more)
        return loss, aux["lse"], aux["entropy"], aux["token_log_prob"]

    def values(*t: Tensor) -> tuple[Tensor, ...]:
        loss, aux = ours(*t)
        return loss, aux.lse, aux.entropy, aux.token_log_prob

    tangents = tuple(torch.randn_like(t) for t in inputs)
    torch.testing.assert_close(
        torch.func.jvp(values, tuple(inputs), tangents), torch.func.jvp(formula, tuple(inputs), tangents)
    )
    leaves = [t.requires_grad_() for t in inputs]

    def total(f: Callable) -> Callable:
        return lambda *t: sum((i + 1) * (v * v).sum() for i, v in enumerate(f(*t)))

    torch.testing.assert_close(*(twice(total(f), leaves) for f in (values, formula)))


def test_constants_of_a_backward_have_tangents() -> None:
    x, tangent = torch.randn(N, V), torch.randn(N, V)

    def z_loss(x: Tensor) -> Tensor:
        return fusegrad.cross_entropy(x, target(), z_loss=0.3, return_aux=Aux(z_loss=True))[1].z_loss

    ours = torch.func.jvp(z_loss, (x,), (tangent,))
    right = torch.func.jvp(lambda x: reference.cross_entropy(x, target(), z_loss=0.3)[1]["z_loss"], (x,), (tangent,))
    torch.testing.assert_close(ours, right)


def test_targets_of_probabilities() -> None:
    z, t = torch.randn(N, V, dtype=torch.float64, requires_grad=True), probabilities().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z, t: fusegrad.cross_entropy(z, t, label_smoothing=0.1), (z, t))
    of = [lambda t, f=f: f(z.detach(), t) for f in (fusegrad.cross_entropy, F.cross_entropy)]
    torch.testing.assert_close(*(torch.func.jacfwd(torch.func.grad(f))(t.detach()) for f in of))
    torch.testing.assert_close(*(torch.func.grad(f)(t.detach()) for f in of))


def test_inputs_that_depend_on_each_other() -> None:
    """Tied weights, a target made of the logits: a gradient is by one input alone, its way through the other is the
    graph's own."""
    w, tokens = torch.randn(V, H, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 3, 5])

    def tied(head: Callable, **options: Any) -> Tensor:
        return head(w[tokens].tanh(), w, tokens.roll(1), **options).square().sum()

    pairs = [
        [lambda: tied(fusegrad.linear_cross_entropy), lambda: tied(lambda x, w, t: F.cross_entropy(x @ w.T, t))],
        [
            lambda: tied(fusegrad.linear_cross_entropy, reduction="none"),
            lambda: tied(lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="none")),
        ],
        [lambda c=c: c(w, (w * 2).softmax(1)) for c in (fusegrad.cross_entropy, F.cross_entropy)],
    ]
    for both in pairs:
        found = []
        for f in both:
            (first,) = torch.autograd.grad(f(), w, create_graph=True)
            found.append([first, *torch.autograd.grad(first.square().sum(), w)])
        torch.testing.assert_close(*found)


@linears
def test_per_sample_gradients(linear: float) -> None:
    """What differential privacy asks for: vmap over grad, targets batched too."""
    rows, targets = torch.randn(6, H if linear else V), torch.tensor([0, 3, 6, -100, 2, 2])
    head = torch.randn(V, H)

    def ours(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
        if linear:
            return fusegrad.linear_cross_entropy(x[None], w, t[None], reduction="sum")
        return fusegrad.cross_entropy(x * w.sum(), t, reduction="sum")

    def eager(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w) if linear else x * w.sum(), t, reduction="sum")

    found = [torch.vmap(torch.func.grad(f), in_dims=(None, 0, 0))(head, rows, targets) for f in (ours, eager)]
    torch.testing.assert_close(*found)


@linears
@rows_of("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(linear: bool, dtype: torch.dtype) -> None:
    ours, _, inputs = pair((target, {"z_loss": 0.1}), linear)
    _, truth, _ = pair((target, {"z_loss": 0.1}), linear)
    low = [t.to(dtype) for t in inputs]
    tangents = [torch.randn_like(t) for t in low]
    value, tangent = torch.func.jvp(ours, tuple(low), tuple(tangents))
    assert value.dtype == tangent.dtype == torch.float32
    exact = torch.func.jvp(truth, tuple(t.double() for t in low), tuple(t.double() for t in tangents))
    tolerance = {"rtol": 3e-2 if linear and dtype != torch.float32 else 1e-4, "atol": 2e-2 if linear else 1e-4}
    torch.testing.assert_close((value.double(), tangent.double()), exact, **tolerance)
    for gradient, leaf in zip(torch.func.grad(ours, tuple(range(len(low))))(*low), low, strict=True):
        assert gradient.dtype == leaf.dtype


def test_ignored_rows_count_for_nothing() -> None:
    """Also where their logits are NaN; without a row that is kept the mean is NaN and its gradient 0."""
    x = torch.randn(N, V, dtype=torch.float64)
    wild = x.clone()
    wild[1] = torch.nan
    found = [torch.func.grad(lambda x: fusegrad.cross_entropy(x, target(), z_loss=0.1))(t) for t in (x, wild)]
    torch.testing.assert_close(*found)
    none = torch.full((N,), -100)
    assert not torch.func.grad(lambda x: fusegrad.cross_entropy(x, none))(x).any()
    leaf = wild.clone().requires_grad_()
    (first,) = torch.autograd.grad(fusegrad.cross_entropy(leaf, target()), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert not first[1].any() and not second[1].any() and second.isfinite().all()


def test_wrong_indices() -> None:
    x, wrong = torch.randn(N, V), torch.tensor([1, 7, 6, 0, 3])
    with pytest.raises(IndexError, match="cross_entropy: target must be in"), forward_ad.dual_level():
        fusegrad.cross_entropy(forward_ad.make_dual(x, x), wrong)
    assert torch.func.grad_and_value(lambda x: fusegrad.cross_entropy(x, wrong))(x)[1].isnan()
    batched = torch.vmap(lambda x, t: fusegrad.cross_entropy(x, t, reduction="none"))(x[None], wrong[None])[0]
    assert batched[1].isnan() and batched[[0, 2, 3, 4]].isfinite().all()


def test_what_is_refused() -> None:
    x, w, t = torch.randn(4, V), torch.randn(V, V), torch.tensor([0, 1, 2, 3])
    support = torch.arange(4).expand(4, 4)
    with pytest.raises(NotImplementedError, match=r"^cross_entropy with a support: torch\.func"):
        torch.func.grad(lambda x: fusegrad.cross_entropy(x, t, support=support))(x)
    with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy with a support"), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        fusegrad.linear_cross_entropy(dual, w, t, support=support)
    # In place the logits are gone.
    leaf = torch.randn(4, V, requires_grad=True)
    (first,) = torch.autograd.grad(fusegrad.cross_entropy(leaf * 1, t, inplace=True), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second time"):
        first.sum().backward()


def test_inplace_writes_nothing_under_transforms() -> None:
    x = torch.randn(4, V)
    kept, t = x.clone(), torch.tensor([0, 1, 2, 3])
    found = torch.func.grad(lambda x: fusegrad.cross_entropy(x * 1, t, inplace=True))(x)
    torch.testing.assert_close(found, torch.func.grad(lambda x: F.cross_entropy(x, t))(x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [torch.float64], ids=str)
def test_samples_of_pytorch(dtype: torch.dtype) -> None:
    """PyTorch's own samples of cross_entropy: forward-mode gradients and second derivatives."""
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [x for x in op_db if x.name == "nn.functional.cross_entropy"]
    checked = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        if sample.input.numel() > 60 or sample.input.dim() < 1:
            continue

        def call(x: Tensor, sample: Any = sample) -> Tensor:
            constants = [a.detach() if isinstance(a, Tensor) else a for a in sample.args]
            return fusegrad.cross_entropy(x, *constants, **sample.kwargs)

        leaf = sample.input.detach().requires_grad_()
        assert torch.autograd.gradcheck(call, leaf, check_forward_ad=True, check_undefined_grad=False)
        assert torch.autograd.gradgradcheck(call, leaf)
        checked += 1
    assert checked > 10


def test_compiled() -> None:
    x, t = torch.randn(4, V), torch.tensor([0, 1, 2, 3])
    gradient = torch.func.grad(lambda x: fusegrad.cross_entropy(x, t))
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager", fullgraph=True)(x), gradient(x))


def saved_in(result: Tensor) -> list[Tensor]:
    """What the nodes of PyTorch's ops and of Functions in Python keep."""
    nodes, seen, found = [result.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        kept += getattr(node, "saved_tensors", ())
        found += [t for t in kept if isinstance(t, Tensor)]
        nodes += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("divergence", [False, True], ids=["linear_cross_entropy", "linear_jsd"])
def test_a_graph_keeps_no_logits(divergence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of linear losses are computed again for each derivative; as many rows as the budget holds are one."""
    rows, classes = 24, 50
    x = torch.randn(rows, H, dtype=torch.float64, requires_grad=True)
    w, labels = torch.randn(classes, H, dtype=torch.float64, requires_grad=True), torch.arange(rows)
    teacher = torch.randn(rows, H, dtype=torch.float64)

    def loss(**options: Any) -> Tensor:
        if divergence:
            options |= {"labels": labels, "hard_weight": 0.1, "student_logit_scale": 1.5}  # which have no kernels
            return fusegrad.linear_jsd(x, w, teacher, w.detach(), reduction="sum", **options)
        return fusegrad.linear_cross_entropy(x, w, labels, reduction="sum", logit_scale=1.5, **options)

    def second(**options: Any) -> tuple[list[Tensor], int]:
        found = torch.autograd.grad(loss(**options), [x, w], create_graph=True)
        total = torch.stack([g.square().sum() for g in found]).sum()
        largest = max(t.numel() for t in saved_in(total))
        return list(torch.autograd.grad(total, [x, w])), largest

    found, largest = second()
    assert largest <= classes * H
    monkeypatch.setitem(_loss_chunks._LOGITS, "cpu", 2**21)
    whole, largest = second()
    assert largest >= rows * classes
    torch.testing.assert_close(found, whole)
    of_a_budget, largest = second(workspace_mib=0)
    assert largest <= classes * H
    torch.testing.assert_close(of_a_budget, whole)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # which torch.func does not take
        torch.testing.assert_close(second()[0], whole)


def test_sums_over_chunks_are_not_rounded() -> None:
    """The weight's gradient adds up in float32, also where it is of 16 bits."""
    torch.manual_seed(0)
    rows = 512
    x, labels = torch.randn(rows, 4, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
    w = torch.randn(V, 4, dtype=torch.bfloat16)

    def gradient(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda w: fusegrad.linear_cross_entropy(x, w, labels, reduction="sum"))(w)

    ours, right = gradient(x, w), gradient(x.double(), w.double())
    assert (ours - right).abs().max() < 0.01 * right.abs().max()


SECOND: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "penalty": {"z_loss": 0.1, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1, "softcap": 5.0},
    "aux": {"reduction": "none", "return_aux": DIFFERENTIABLE},
    "probabilities": {"label_smoothing": 0.1},
}


@each_of({"dtype": [torch.float32, torch.bfloat16, torch.float16], "name": [*SECOND]})
def test_second_derivatives_by_kernels(name: str, dtype: torch.dtype, each_device: str) -> None:
    """In chunks, and as accurate as eager PyTorch; the first gradients are the kernels' to the bit."""
    torch.manual_seed(0)
    options, rows, hidden, classes = SECOND[name], 300, 32, 777
    made = torch.randint(classes, (rows,), device=each_device)
    made[7] = -100
    if name == "probabilities":
        made = torch.randn(rows, classes, device=each_device).softmax(1).to(dtype)
    given = [torch.randn(s, device=each_device, dtype=dtype) for s in ((rows, hidden), (classes, hidden), (classes,))]
    given[1] *= hidden**-0.5
    weights = torch.randn(4, rows, device=each_device)
    along = [torch.randn_like(t) for t in given]

    def total(values: Any) -> Tensor:
        each = (values[0], *values[1]) if isinstance(values, tuple) else (values,)
        return sum((w[: v.numel()].view_as(v) * v.to(w.dtype)).sum() for w, v in zip(weights, each, strict=False))

    def ours(x: Tensor, w: Tensor, b: Tensor, **more: Any) -> Tensor:
        found = fusegrad.linear_cross_entropy(x, w, made, linear_bias=b, **options, **more)
        if isinstance(found, tuple):
            found = (found[0], (found[1].lse, found[1].entropy, found[1].token_log_prob))
        return total(found)

    def formula(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        plain = {k: v for k, v in options.items() if k != "return_aux"}
        target = made.to(x.dtype) if made.is_floating_point() else made
        loss, aux = reference.linear_cross_entropy(x, w, target, linear_bias=b, **plain)
        asked = "return_aux" in options
        return total((loss, (aux["lse"], aux["entropy"], aux["token_log_prob"])) if asked else loss)

    def second(f: Callable[..., Tensor], dtype: torch.dtype, **more: Any) -> tuple[tuple[Tensor, ...], ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        first = torch.autograd.grad(f(*leaves, **more), leaves, create_graph=True)
        return first, torch.autograd.grad(first, leaves, [t.to(dtype) for t in along])

    exact = second(formula, torch.float64)[1]
    eager = second(formula, dtype)[1]
    for more in ({}, {"workspace_mib": 1}):
        first, found = second(ours, dtype, **more)
        leaves = [t.detach().requires_grad_() for t in given]
        assert all(map(torch.equal, first, torch.autograd.grad(ours(*leaves, **more), leaves)))
        for one, plain, right in zip(found, eager, exact, strict=True):
            error, theirs = ((t.double() - right).norm() for t in (one, plain))
            assert error <= 1.5 * theirs + 1e-6 * right.norm(), (error / right.norm(), theirs / right.norm())


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.0, "weight": torch.linspace(0.5, 2, V).double()}], ids=str
)
def test_classes_without_probability_cost_nothing(options: dict[str, Any]) -> None:
    """Whatever their logits: of those of -inf, too."""
    logits, shares = torch.randn(3, N, V, dtype=torch.float64), torch.rand(3, N, V, dtype=torch.float64)
    logits[..., 2], shares[..., 2] = -torch.inf, 0
    places = [i for i in range(V) if i != 2]
    rest = {k: v[places] if k == "weight" else v for k, v in options.items()}
    expected = torch.stack(
        [reference.cross_entropy(z[:, places], t[:, places], **rest)[0] for z, t in zip(logits, shares, strict=True)]
    )
    loss = lambda z, t: fusegrad.cross_entropy(z, t, **options)  # noqa: E731
    torch.testing.assert_close(torch.vmap(loss)(logits, shares), expected)
    grads = torch.vmap(torch.func.grad(loss))(logits, shares)
    assert grads.isfinite().all() and not grads[..., 2].any()
    _, tangent = torch.func.jvp(torch.vmap(loss), (logits, shares), (torch.ones_like(logits), torch.zeros_like(shares)))
    assert tangent.isfinite().all()
