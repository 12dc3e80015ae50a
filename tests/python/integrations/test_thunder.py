"""lightning-thunder: jitted functions use fusegrad's ops, with eager's gradients, any number of times."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from compat_ops import OPS, Case, Op
from compat_transforms import check
from coverings import rows_of
from support import DEVICES
from torch import Tensor, nn

if not hasattr(Tensor, "align_as"):
    pytest.skip("lightning-thunder 0.2.6 cannot be imported: it names Tensor.align_as", allow_module_level=True)
thunder = pytest.importorskip("thunder")
from fusegrad.integrations.thunder import fusegrad_ex  # noqa: E402
from thunder.benchmarks.utils import backward_only  # noqa: E402

everywhere = pytest.mark.parametrize("device", DEVICES)
LOSSES = [op for op in OPS if op.name != "flex_attention"]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return thunder.jit(function, executors=[fusegrad_ex, *thunder.get_default_executors()])


def symbols(function: Callable[..., Any], backward: bool = False) -> set[str]:
    """The names of fusegrad's operations in what was compiled last, without their numbers."""
    traces = thunder.last_backward_traces(function) if backward else thunder.last_traces(function)
    return {re.sub(r"_\d+$", "", s.sym.name) for s in traces[-1].bound_symbols if s.sym.name.startswith("fusegrad_")}


@everywhere
@pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])
@rows_of("op", [*LOSSES])
def test_gradients_of_kept_graphs(op: Op, device: str, inplace: bool) -> None:
    """Rule 12 for the gradients, bitwise the same in each of three backwards; and the trace has the op's two halves."""
    case = Case(op, inplace, device, torch.float64 if device == "cpu" else torch.float32)
    ours = op.ours

    def program(*tensors: Tensor) -> Tensor:
        return 0.37 * ours(tensors[0] * 0.5, *tensors[1:], inplace=inplace)

    leaves, constants = case.draw()
    jitted = jit(program)
    loss = jitted(*leaves, *constants)
    runs = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(3)]
    check(case, runs[0])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert symbols(jitted) == {f"fusegrad_{op.name}_forward"}
    assert symbols(jitted, backward=True) == {f"fusegrad_{op.name}_backward"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embedding(tokens))), target, label_smoothing=0.1)


@everywhere
def test_a_model_that_calls_pytorchs_cross_entropy(device: str) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    tokens, target = torch.randint(0, 16, (2, 12), device=device)
    target[3] = -100
    jitted = jit(model)
    loss = jitted(tokens, target)
    assert symbols(jitted) == {"fusegrad_cross_entropy_forward"}
    ours = torch.autograd.grad(loss, list(model.parameters()))
    eager = model(tokens, target)
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(ours, torch.autograd.grad(eager, list(model.parameters())))
    with torch.no_grad():
        torch.testing.assert_close(jitted(tokens, target), eager)
    assert symbols(jitted) == {"fusegrad_cross_entropy"}


@everywhere
@pytest.mark.parametrize("shape", [(16,), (12, 16), (3, 16, 4)], ids=str)
@rows_of("options", [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.2}, {"weight": 1}])
def test_pytorchs_cross_entropy(device: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape, device=device, requires_grad=True)
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(0, 16, rows, device=device)
    options = {**options, **({"weight": torch.rand(16, device=device)} if "weight" in options else {})}
    jitted = jit(lambda x, t, **o: F.cross_entropy(x, t, **o))
    loss, eager = jitted(logits, target, **options), F.cross_entropy(logits, target, **options)
    torch.testing.assert_close(loss, eager)
    upstream = torch.rand_like(eager)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits, upstream), torch.autograd.grad(eager, logits, upstream)
    )
    assert symbols(jitted) == {"fusegrad_cross_entropy_forward"}


@everywhere
def test_backward_only_twice(device: str) -> None:
    """thunder's own benchmark helper keeps the graph and runs its backward again and again."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return fusegrad.linear_cross_entropy(x, w, target)

    torch.manual_seed(0)
    x, w = (torch.randn(16, 16, device=device, requires_grad=True) for _ in range(2))
    target = torch.randint(0, 16, (16,), device=device)
    run, setup = backward_only(jit(loss), x, w, target)
    upstream = setup()
    results = []
    for _ in range(2):
        run(*upstream)
        results.append((x.grad.clone(), w.grad.clone()))
    torch.testing.assert_close(results[0], torch.autograd.grad(loss(x, w, target), (x, w), upstream[0]))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@everywhere
def test_aux_values_and_what_wants_a_gradient(device: str) -> None:
    """A frozen weight costs no gradient, lse brings one, values under no_grad bring none."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            fixed = x * 2
        first, aux = fusegrad.cross_entropy(x @ w.T, target, return_aux=fusegrad.Aux(lse=True, predicted_tokens=True))
        second = fusegrad.linear_jsd(x.tanh(), w, fixed, w.detach())
        return first + aux.lse.square().mean() + second, aux.predicted_tokens

    torch.manual_seed(0)
    x, w = torch.randn(12, 8, device=device, requires_grad=True), torch.randn(16, 8, device=device)
    target = torch.randint(0, 16, (12,), device=device)
    jitted = jit(loss)
    (ours, predicted), (eager, expected) = jitted(x, w, target), loss(x, w, target)
    assert torch.equal(predicted, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(eager, x))
    (backward,) = [s for s in thunder.last_backward_traces(jitted)[-1].bound_symbols if "linear_jsd" in s.sym.name]
    assert len(backward.flat_proxy_outs) == 1


def test_errors_are_the_ops_own() -> None:
    x, target = torch.randn(4, 8, requires_grad=True), torch.randint(0, 8, (4,))
    with pytest.raises(ValueError, match="cross_entropy: label_smoothing must be in"):
        jit(lambda x, t: fusegrad.cross_entropy(x, t, label_smoothing=2.0))(x, target)
    with pytest.raises(IndexError, match="cross_entropy"):
        jit(lambda x, t: fusegrad.cross_entropy(x, t))(x, target + 8)
    with pytest.raises(ValueError, match="linear_jsd: teacher_input must not require"):
        jit(lambda x, y: fusegrad.linear_jsd(x, x, y.exp(), x))(x, x)
    with pytest.raises(NotImplementedError, match="flex_attention: it must not be called"):
        jit(lambda q: fusegrad.flex_attention(q, q, q))(torch.randn(1, 1, 4, 4))


def test_new_shapes_and_options_are_other_compilations() -> None:
    """Nothing of one call is taken for another."""
    jitted = jit(lambda x, t, smoothing: fusegrad.cross_entropy(x, t, label_smoothing=smoothing))
    for rows, smoothing in ((4, 0.0), (6, 0.0), (6, 0.3), (4, 0.3), (4, 0.0)):
        x, target = torch.randn(rows, 8, requires_grad=True), torch.randint(0, 8, (rows,))
        ours, eager = jitted(x, target, smoothing), F.cross_entropy(x, target, label_smoothing=smoothing)
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(eager, x))


@pytest.mark.parametrize(
    "fused", [pytest.param(False, marks=pytest.mark.large, id="pytorch"), pytest.param(True, id="fused")]
)
def test_the_example(fused: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns something in a few steps; it compares its last gradients with eager's itself."""
    import thunder_train

    losses = thunder_train.train("cpu", 4, fused)
    assert losses[-1] < losses[0] - 0.3
    assert f"fusegrad_{'linear_' if fused else ''}cross_entropy_backward" in capsys.readouterr().out
