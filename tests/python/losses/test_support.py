"""Losses over a support of each row against the same over logits that are -inf elsewhere."""

from __future__ import annotations

from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, reference
from support import DEVICE_DTYPES, DEVICES
from test_aux_gradients import AUX, compare
from torch import Tensor

ROWS, HIDDEN, VOCAB = 60, 16, 501


def sample(device: str, count: int = 9) -> tuple[Tensor, Tensor]:
    """Targets and supports that hold them at any place, some padded."""
    torch.manual_seed(0)
    support = torch.stack([torch.randperm(VOCAB)[:count] for _ in range(ROWS)])
    target = support.gather(1, torch.randint(0, count, (ROWS, 1))).squeeze(1)
    support = torch.where((torch.rand(ROWS, count) < 0.3) & (support != target[:, None]), -1, support)
    target[7] = -100
    return target.to(device), support.to(device)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 1e-3}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_cross_entropy(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    target, support = sample(device)
    logits = (2 * torch.randn(ROWS, VOCAB, device=device)).to(dtype)
    compare(
        lambda x: fusegrad.cross_entropy(x, target, reduction="none", support=support.int(), return_aux=AUX, **options),
        lambda x: reference.cross_entropy(x, target, reduction="none", support=support, **options),
        [logits],
        ROWS,
        ("rrrr", "--re", "0-r-"),
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("linear", [False, True], ids=["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("device", DEVICES)
def test_ignored_rows_may_hold_anything(device: str, linear: bool, softcap: float | None) -> None:
    target, support = sample(device)
    x = torch.randn(ROWS, HIDDEN if linear else VOCAB, device=device)
    w = torch.randn(VOCAB, HIDDEN, device=device)

    def gradient(of_ignored: float) -> Tensor:
        given = x.masked_fill((target == -100).unsqueeze(1), of_ignored).requires_grad_()
        options = {"support": support, "softcap": softcap, "reduction": "none"}
        if linear:
            rows = fusegrad.linear_cross_entropy(given, w, target, **options)
        else:
            rows = fusegrad.cross_entropy(given, target, **options)
        return torch.autograd.grad(rows.sum(), given)[0]

    right = gradient(0.0)
    assert right.any()
    for value in (torch.nan, torch.inf):
        assert torch.equal(gradient(value), right)


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 0}, {"softcap": 3.0}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_linear_cross_entropy(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    target, support = sample(device)
    plain = {name: value for name, value in options.items() if name != "workspace_mib"}
    shapes = ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    inputs = [torch.randn(s, device=device).mul(0.5).to(dtype) for s in shapes]
    compare(
        lambda x, w, b: fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", support=support, logit_scale=-0.7, return_aux=AUX, **options
        ),
        lambda x, w, b: reference.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", support=support, logit_scale=-0.7, **plain
        ),
        inputs,
        ROWS,
        ("rrrr", "--re", "0-r-"),
    )


@pytest.mark.parametrize("reduction, softcap", [("none", None), ("mean", None), ("none", 2.0)])
def test_gradcheck(reduction: str, softcap: float | None) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2), (6, 2), (6,)))
    scale = torch.rand(3, dtype=torch.float64, requires_grad=True)
    target, support = torch.tensor([0, 4, -100]), torch.tensor([[5, 0, -1], [4, 1, 2], [0, 1, -1]])

    def call(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        loss, aux = fusegrad.linear_cross_entropy(
            x,
            w,
            target,
            linear_bias=b,
            support=support,
            logit_scale=scale,
            reduction=reduction,
            softcap=softcap,
            return_aux=AUX,
        )
        return loss, aux.lse, aux.entropy, aux.token_log_prob

    assert torch.autograd.gradcheck(call, (x, w, b, scale))


@pytest.mark.parametrize("device", DEVICES)
def test_aux_and_shapes(device: str) -> None:
    target, support = sample(device)
    logits = torch.randn(ROWS, VOCAB, device=device)
    _, aux = fusegrad.cross_entropy(logits, target, support=support, return_aux=Aux(*[True] * 6))
    _, truth = reference.cross_entropy(logits.double(), target, support=support)
    for name, value in aux._asdict().items():
        torch.testing.assert_close(value.double(), truth[name].double(), rtol=1e-5, atol=1e-5, msg=name)
    many = fusegrad.cross_entropy(
        logits.reshape(2, -1, VOCAB).movedim(-1, 1), target.reshape(2, -1), support=support.reshape(2, ROWS // 2, -1)
    )
    torch.testing.assert_close(many, fusegrad.cross_entropy(logits, target, support=support))


def test_bad_input() -> None:
    x, w, t = torch.randn(3, 2), torch.randn(5, 2), torch.tensor([0, 1, 2])
    s = torch.tensor([[0, 1], [1, -1], [2, 3]])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (IndexError, {"support": torch.tensor([[1, 2], [1, -1], [2, 3]])}, "must have the row's target"),
        (IndexError, {"support": torch.tensor([[0, 5], [1, -1], [2, 3]])}, "must have the row's target"),
        (ValueError, {"support": torch.tensor([[0, 0], [1, -1], [2, 3]])}, "a column once"),
        (ValueError, {"support": s[:2]}, "support must have K >= 1 columns"),
        (TypeError, {"support": s.float()}, "support must be int64 or int32"),
        (ValueError, {"support": s, "label_smoothing": 0.1}, "label_smoothing must be 0"),
        (ValueError, {"support": s, "weight": torch.ones(5)}, "weight must be None with a support"),
    ]
    for error, options, message in cases:
        with pytest.raises(error, match=message):
            fusegrad.linear_cross_entropy(x, w, t, **options)
        with pytest.raises(error, match=message):
            fusegrad.cross_entropy(x @ w.T, t, **options)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_a_target_outside_its_support_is_nan_on_the_gpu() -> None:
    x = torch.randn(2, 5, device="cuda", requires_grad=True)
    support = torch.tensor([[0, 1], [99, 2]], device="cuda")
    loss = fusegrad.cross_entropy(x, torch.tensor([3, 2], device="cuda"), support=support, reduction="none")
    assert loss.isnan().all()


def test_opcheck() -> None:
    target, support = sample("cpu")
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    ops = torch.ops.fusegrad
    torch.library.opcheck(ops.support_logits.default, (x, w, b, support, None))
    torch.library.opcheck(ops.support_logits.default, (x, w, None, support, 0, 128))
    backward = (torch.randn(support.shape, dtype=torch.float64), x, w, b, support, None, None)
    torch.library.opcheck(ops.support_logits_backward.default, (*backward, [True, True, True]))
    torch.library.opcheck(ops.support_logits_backward.default, (*backward, [True, False, False]))
    torch.library.opcheck(ops.support_positions.default, (target, support, VOCAB, -100))


def test_compiled() -> None:
    target, support = sample("cpu")
    x, w = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN, requires_grad=True)

    def objective(x: Tensor, w: Tensor) -> Tensor:
        out = fusegrad.linear_log_prob(x, w, target, support=support)
        return (out.log_prob - out.entropy).sum()

    expected = torch.autograd.grad(objective(x, w), [x, w])
    torch.compiler.reset()
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), [x, w]), expected)
