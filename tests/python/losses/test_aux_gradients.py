"""Gradients of lse, entropy and token_log_prob, beside the loss's and alone, against float64 formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, reference
from support import DEVICE_DTYPES, DEVICES, acc_of, assert_as_good_as_eager
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable as compiled_autograd

AUX = Aux(lse=True, entropy=True, token_log_prob=True)
OUTPUTS = ("loss", "lse", "entropy", "token_log_prob")
# What each output's upstream gradient is: "-" none, "0" zeros, "e" expanded, "s" with strides, "r" a row of its own.
COMBINATIONS = ("rrrr", "---r", "--r-", "-r--", "r---", "--er", "e-s0", "0-re", "rs0-", "-0es", "0000")


def upstream_of(kind: str, rows: int, like: Tensor) -> Tensor | None:
    if kind == "-":
        return None
    if kind == "0":
        return torch.zeros_like(like)
    if kind == "e":
        return torch.full((), 0.37, dtype=like.dtype, device=like.device).expand(rows)
    values = torch.randn(rows, 2, device=like.device, dtype=torch.float64).to(like.dtype)
    return values[:, 0] if kind == "s" else values[:, 0].contiguous()


def outputs(out: tuple[Tensor, Any]) -> list[Tensor]:
    loss, aux = out
    values = aux if isinstance(aux, dict) else aux._asdict()
    return [loss, *(values[name] for name in OUTPUTS[1:])]


def gradients_of(outs: list[Tensor], upstream: list[Tensor | None], leaves: list[Tensor], **how: Any) -> list[Tensor]:
    pairs = [(o, u.to(o.dtype)) for o, u in zip(outs, upstream, strict=True) if u is not None]
    return list(torch.autograd.grad([o for o, _ in pairs], leaves, [u for _, u in pairs], **how))


def hard_rows(logits: Tensor) -> Tensor:
    """Rows of every kind: random, flat, nearly flat, nearly all weight on one class, large offsets."""
    vocab = logits.shape[1]
    logits[1] = 0.25
    logits[2] = 0.25 + 1e-3 * logits[2]
    logits[3] = 0.0
    logits[3, vocab // 2] = 13.8 + torch.tensor(float(vocab)).log()  # p = 1 - 1e-6
    logits[4] += 100.0
    logits[5] -= 200.0
    return logits


def compare(
    ours: Callable[..., Any], truth: Callable[..., Any], inputs: list[Tensor], rows: int, combinations: Any
) -> None:
    """`truth(*inputs)` in the inputs' dtype is eager, in float64 it is the truth."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    outs, eager, right = outputs(ours(*leaves)), outputs(truth(*leaves)), outputs(truth(*wide))
    for name, o, e, r in zip(OUTPUTS, outs, eager, right, strict=True):
        assert o.dtype == acc_of(inputs[0].dtype)
        assert_as_good_as_eager(o, e, r, name)
    for kinds in combinations:
        upstream = [upstream_of(kind, rows, outs[0]) for kind in kinds]
        found = gradients_of(outs, upstream, leaves, retain_graph=True)
        by_eager = gradients_of(eager, upstream, leaves, retain_graph=True)
        expected = gradients_of(right, upstream, wide, retain_graph=True)
        for i, (f, e, t) in enumerate(zip(found, by_eager, expected, strict=True)):
            assert f.dtype == inputs[i].dtype
            assert_as_good_as_eager(f, e, t, f"gradient {i} of {kinds}")


@pytest.mark.parametrize("form", ["logits", "kept", "recomputed"])
def test_every_combination_of_upstream_gradients(form: str) -> None:
    """A gradient is linear in the upstream gradients: that of a combination is the sum of those that formulas give for
    each alone."""
    rows, options = 6, {"reduction": "none", "z_loss": 0.1}
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((rows, 3), (11, 3))]
    target = torch.tensor([0, 10, -100, 3, 2, 2])

    def call(module: Any, **how: Any) -> list[Tensor]:
        if form == "logits":
            return outputs(module.cross_entropy(inputs[0] @ inputs[1].T, target, **how, **options))
        return outputs(module.linear_cross_entropy(*inputs, target, **how, **options))

    right = call(reference)
    ours = call(fusegrad, return_aux=AUX, **({"workspace_mib": 0} if form == "recomputed" else {}))
    upstream = {kind: [upstream_of(kind, rows, out) for out in right] for kind in "-0esr"}
    alone = {
        (i, kind): torch.autograd.grad(right[i], inputs, upstream[kind][i], retain_graph=True)
        for i in range(4)
        for kind in "0esr"
    }
    for kinds in itertools.product("-0esr", repeat=4):
        if kinds == ("-",) * 4:
            continue
        given = [upstream[kind][i] for i, kind in enumerate(kinds)]
        found = gradients_of(ours, given, inputs, retain_graph=True)
        for j, gradient in enumerate(found):
            expected = sum(alone[i, kind][j] for i, kind in enumerate(kinds) if kind != "-")
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11, msg=f"gradient {j} of {kinds}")


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "label_smoothing": 0.1}, {"z_loss": 1e-3}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_cross_entropy(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rows = 24
    for vocab in (7, 1003):
        logits = hard_rows(torch.randn(rows, vocab, device=device, dtype=torch.float64) * 2).to(dtype)
        target = torch.randint(0, vocab, (rows,), device=device)
        target[7] = -100
        compare(
            lambda x, t=target: fusegrad.cross_entropy(x, t, reduction="none", return_aux=AUX, **options),
            lambda x, t=target: reference.cross_entropy(x, t, reduction="none", **options),
            [logits],
            rows,
            COMBINATIONS,
        )


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 0}, {"workspace_mib": 1}, {"softcap": 5.0}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_linear_cross_entropy(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rows, hidden, vocab = 150, 16, 2501
    scale, plain = 1.3, {name: value for name, value in options.items() if name != "workspace_mib"}
    shapes = ((rows, hidden), (vocab, hidden), (vocab,))
    inputs = [torch.randn(s, device=device, dtype=torch.float64).mul(0.5).to(dtype) for s in shapes]
    target = torch.randint(0, vocab, (rows,), device=device)
    target[7] = -100
    compare(
        lambda x, w, b: fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", logit_scale=scale, return_aux=AUX, **options
        ),
        lambda x, w, b: reference.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", logit_scale=scale, **plain
        ),
        inputs,
        rows,
        COMBINATIONS[::3],
    )


@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_logits_that_lie_in_the_gradient_of_the_weight(device: str, dtype: torch.dtype) -> None:
    """On a GPU the first blocks of logits that are computed again do, where the vocabulary is long enough."""
    rows, hidden, vocab = 24, 64, 8001
    inputs = [torch.randn(s, device=device, dtype=torch.float64).to(dtype) for s in ((rows, hidden), (vocab, hidden))]
    target = torch.randint(0, vocab, (rows,), device=device)
    options = {"logit_scale": 0.2, "reduction": "none"}
    compare(
        lambda x, w: fusegrad.linear_cross_entropy(x, w, target, workspace_mib=0, return_aux=AUX, **options),
        lambda x, w: reference.linear_cross_entropy(x, w, target, **options),
        inputs,
        rows,
        ("rrrr", "--r-"),
    )

    def means(dtype_of: torch.dtype, loss: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.detach().to(dtype_of).requires_grad_() for t in inputs]
        return list(torch.autograd.grad(loss(*leaves), leaves))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return reference.linear_cross_entropy(x, w, target, logit_scale=0.2)[0]

    # The gradients are made in the forward.
    ours = means(dtype, lambda x, w: fusegrad.linear_cross_entropy(x, w, target, workspace_mib=0, logit_scale=0.2))
    for found, eager, truth in zip(ours, means(dtype, plain), means(torch.float64, plain), strict=True):
        assert_as_good_as_eager(found, eager, truth, "a gradient of the mean")


def test_peaked_rows_gradient_of_entropy() -> None:
    """Relative to each row's own gradient, not to the largest of all rows."""
    vocab = 5000
    logits = hard_rows(torch.randn(6, vocab))
    wide = logits.double().requires_grad_()
    leaf = logits.clone().requires_grad_()
    target = torch.zeros(6, dtype=torch.int64)
    _, aux = fusegrad.cross_entropy(leaf, target, return_aux=Aux(entropy=True))
    (found,) = torch.autograd.grad(aux.entropy.sum(), leaf)
    (truth,) = torch.autograd.grad(reference.cross_entropy(wide, target)[1]["entropy"].sum(), wide)
    error = (found - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-12)
    # The flat row's gradient is 0. In the peaked row 1 - p is what float32 leaves of a sum of 1 + 1e-6.
    assert found[1].abs().max() < 1e-9
    assert error[[0, 2, 4, 5]].max() < 1e-4 and error[3] < 0.1


def problem(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in ((5, 3), (7, 3), (7,))]
    return inputs, torch.tensor([0, 6, -100, 3, 2], device=device)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@rows_of("options", [{}, {"workspace_mib": 0}, {"softcap": 3.0, "logit_scale": -0.7}])
def test_gradcheck(reduction: str, options: dict[str, Any]) -> None:
    inputs, target = problem()

    def linear(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return outputs(
            fusegrad.linear_cross_entropy(
                x * 1, w, target, linear_bias=b, reduction=reduction, inplace=True, return_aux=AUX, **options
            )
        )

    assert torch.autograd.gradcheck(linear, inputs)
    for probabilities in (False, True):
        x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
        t = torch.rand(5, 7, dtype=torch.float64) if probabilities else target
        aux = Aux(lse=True, entropy=True, token_log_prob=not probabilities)
        softcap = options.get("softcap")

        def direct(x: Tensor, t: Tensor = t, aux: Aux = aux, softcap: float | None = softcap) -> list[Tensor]:
            loss, values = fusegrad.cross_entropy(
                x * 1, t, reduction=reduction, softcap=softcap, inplace=True, return_aux=aux
            )
            return [loss, *(v for v in values if v is not None)]

        assert torch.autograd.gradcheck(direct, (x,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workspace_mib", [None, 0])
def test_every_backward_gives_the_same_bits(workspace_mib: int | None, device: str) -> None:
    inputs = [torch.randn(s, device=device).bfloat16().requires_grad_() for s in ((300, 32), (3001, 32), (3001,))]
    target = torch.randint(0, 3001, (300,), device=device)
    outs = outputs(
        fusegrad.linear_cross_entropy(
            inputs[0], inputs[1], target, linear_bias=inputs[2], workspace_mib=workspace_mib, return_aux=AUX
        )
    )
    upstream = [torch.full_like(outs[0], 0.37), *(torch.randn_like(o) for o in outs[1:])]
    # The last may write over the logits that were kept.
    passes = [gradients_of(outs, upstream, inputs, retain_graph=i < 2) for i in range(3)]
    for later in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(passes[0], later, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        gradients_of(outs, upstream, inputs)


def saved_elements(call: Callable[[], Any]) -> int:
    """The largest tensor that a graph keeps."""
    sizes = [0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        call()
    return max(sizes)


def test_logits_are_kept_where_the_budget_holds_them() -> None:
    rows, hidden, vocab = 600, 8, 1000
    x, w = torch.randn(rows, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True)
    target = torch.randint(0, vocab, (rows,))
    for options, kept in (
        ({}, True),
        ({"workspace_mib": 3}, True),  # 2.3 MiB of logits
        ({"workspace_mib": 2}, False),
        ({"workspace_mib": 0}, False),
        ({"reduction": "mean"}, False),
        ({"reduction": "mean", "return_aux": Aux(entropy=True)}, True),
    ):
        call = {"reduction": "none", **options}
        largest = saved_elements(lambda call=call: fusegrad.linear_cross_entropy(x, w, target, **call))
        assert (largest >= rows * vocab) == kept, options
    low = (x.bfloat16(), w.bfloat16())  # the CPU's logits are float32 then
    assert saved_elements(lambda: fusegrad.linear_cross_entropy(*low, target, reduction="none")) < rows * vocab
    with torch.no_grad():
        assert saved_elements(lambda: fusegrad.linear_cross_entropy(x, w, target, reduction="none")) == 0


@pytest.mark.parametrize("workspace_mib", [None, 0])
def test_compiled(workspace_mib: int | None) -> None:
    inputs, target = problem()

    def objective(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", workspace_mib=workspace_mib, return_aux=AUX
        )
        return sum(((i + 1) * o * o).sum() for i, o in enumerate(outputs(out)))

    expected = torch.autograd.grad(objective(*inputs), inputs)
    torch.compiler.reset()
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
    with compiled_autograd(torch.compile(backend="aot_eager")):
        objective(*inputs).backward()
    torch.testing.assert_close([t.grad for t in inputs], list(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_linear_log_prob(device: str) -> None:
    (x, w, b), target = problem(torch.float32, device)
    options = {"linear_bias": b, "logit_scale": 0.5, "softcap": 4.0}
    out = fusegrad.linear_log_prob(x, w, target, **options)
    right = reference.linear_log_prob(x.double(), w.double(), target, **{**options, "linear_bias": b.double()})
    for ours, truth in zip(out, right, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)
    total = (out.log_prob * 2 - out.entropy).sum()
    expected = torch.autograd.grad((right[0] * 2 - right[1]).sum(), [x, w, b])
    torch.testing.assert_close(torch.autograd.grad(total, [x, w, b]), expected, rtol=1e-4, atol=1e-5)
    alone = fusegrad.linear_log_prob(x, w, target, return_entropy=False, **options)
    assert alone.entropy is None and torch.equal(alone.log_prob, out.log_prob)
    many = fusegrad.linear_log_prob(x.unsqueeze(0), w, target.clamp_min(0).unsqueeze(0), ignore_index=3, **options)
    assert many.log_prob.shape == (1, 5) and many.log_prob[0, 3] == 0
